//! SGLang, started with `--enable-metrics`. Names from its `metrics_collector.py` (0.5.23); series carry `dp_rank` and `tp_rank`.

use std::time::Duration;

use serde_json::Value;

use super::{Capacity, Http, Page, Priority, QUESTION, Tolerance, max_model_len, mean, per_rank, sum};
use crate::scheduler::Load;

/// Larger runs first. Works only when the engine was started with `--enable-priority-scheduling`.
pub(super) const PRIORITY: Priority = Priority { lower_first: false, unit: Duration::from_secs(1) };

/// Its health check generates a token, and can fail for the length of a long prefill.
pub(super) const TOLERANCE: Tolerance = Tolerance { errors: 5, doubts: 20 };

pub(super) fn load(page: Page) -> Load {
    let ranks = |name| {
        // With priorities on, a series per priority stands beside the total, whose label is empty.
        let totals = page.samples(name).filter(|sample| sample.label("priority").is_none_or(str::is_empty));
        per_rank(totals, "dp_rank").into_iter()
    };
    Load { running: sum(ranks("sglang:num_running_reqs")), waiting: sum(ranks("sglang:num_queue_reqs")), kv_used: mean(ranks("sglang:token_usage")) }
}

pub(super) async fn capacity(http: &mut Http, models: &Value) -> Capacity {
    let kv_tokens = match http.get("/metrics", QUESTION).await {
        Ok(answer) => answer.text().and_then(|text| kv_tokens(Page::new(&text))),
        Err(_) => None,
    };
    // Newer engines warn about the second, older ones know nothing else.
    let (mut slots, mut prefix_cache) = (None, None);
    for path in ["/server_info", "/get_server_info"] {
        if slots.is_none()
            && let Ok(answer) = http.get(path, QUESTION).await
        {
            let info = answer.json().unwrap_or_default();
            slots = running_requests(&info);
            prefix_cache = prefix_cache.or(info["disable_radix_cache"].as_bool().map(|disabled| !disabled));
        }
    }
    Capacity { slots, kv_tokens, context_tokens: max_model_len(models), prefix_cache }
}

/// One state per data-parallel rank.
fn running_requests(info: &Value) -> Option<u32> {
    let states = info["internal_states"].as_array()?;
    let total: u64 = states.iter().filter_map(|state| state["effective_max_running_requests_per_dp"].as_u64()).sum();
    u32::try_from(total).ok().filter(|total| *total > 0)
}

fn kv_tokens(page: Page) -> Option<u64> {
    let ranks = per_rank(page.samples("sglang:max_total_num_tokens"), "dp_rank");
    let total: f64 = ranks.into_iter().filter(|value| value.is_finite()).sum();
    if total >= 1.0 {
        return Some(total as u64);
    }
    let pages: u64 =
        page.samples("sglang:cache_config_info").filter_map(|info| info.number("page_size")?.checked_mul(info.number("num_pages")?)).sum();
    (pages > 0).then_some(pages)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_per_rank_without_repetitions() {
        let page = Page::new(
            r#"sglang:num_running_reqs{dp_rank="0",tp_rank="0"} 3
sglang:num_running_reqs{dp_rank="0",tp_rank="1"} 3
sglang:num_running_reqs{dp_rank="1",tp_rank="0"} 2
sglang:num_queue_reqs{dp_rank="0",tp_rank="0",priority=""} 5
sglang:num_queue_reqs{dp_rank="0",tp_rank="0",priority="7"} 4
sglang:num_queue_reqs{dp_rank="0",tp_rank="0",priority="8"} 1
sglang:token_usage{dp_rank="0"} 0.25
sglang:token_usage{dp_rank="1"} 0.75
sglang:max_total_num_tokens{dp_rank="0"} 1000.0
sglang:max_total_num_tokens{dp_rank="1"} 1000.0
"#,
        );
        assert_eq!(load(page), Load { running: Some(5), waiting: Some(5), kv_used: Some(0.5) });
        assert_eq!(kv_tokens(page), Some(2000));
    }

    #[test]
    fn capacity_from_labels_and_server_info() {
        assert_eq!(kv_tokens(Page::new("sglang:cache_config_info{page_size=\"16\",num_pages=\"100\"} 1\n")), Some(1600));
        assert_eq!(kv_tokens(Page::new("")), None);
        let info =
            serde_json::json!({"internal_states": [{"effective_max_running_requests_per_dp": 128}, {"effective_max_running_requests_per_dp": 128}]});
        assert_eq!(running_requests(&info), Some(256));
        assert_eq!(running_requests(&Value::Null), None);
    }
}
