//! vLLM. Names from its `v1/metrics/loggers.py` (0.32); series carry `engine` (the data-parallel rank) and `model_name`.

use std::time::Duration;

use serde_json::Value;

use super::{Capacity, Http, Page, Priority, QUESTION, Tolerance, max_model_len, mean, sum};
use crate::scheduler::Load;

/// Smaller runs first. Works only when the engine was started with `--scheduling-policy priority`.
pub(super) const PRIORITY: Priority = Priority { lower_first: true, unit: Duration::from_millis(100) };

/// It answers 500 for some prompts that are too long: one client's row of them must not eject it.
pub(super) const TOLERANCE: Tolerance = Tolerance { errors: 20, doubts: 3 };

pub(super) fn load(page: Page) -> Load {
    let value = |name| page.samples(name).map(|sample| sample.value);
    Load {
        running: sum(value("vllm:num_requests_running")),
        waiting: sum(value("vllm:num_requests_waiting")),
        // The older name is the engine before its rewrite.
        kv_used: mean(value("vllm:kv_cache_usage_perc")).or_else(|| mean(value("vllm:gpu_cache_usage_perc"))),
    }
}

pub(super) async fn capacity(http: &mut Http, models: &Value) -> Capacity {
    let answer = http.get("/metrics", QUESTION).await.ok();
    let text = answer.as_ref().and_then(|answer| answer.text()).unwrap_or_default();
    let page = Page::new(&text);
    // The number of sequences it batches (--max-num-seqs) is told nowhere.
    Capacity { slots: None, kv_tokens: kv_tokens(page), context_tokens: max_model_len(models), prefix_cache: prefix_cache(page) }
}

fn kv_tokens(page: Page) -> Option<u64> {
    let ranks = page.samples("vllm:cache_config_info").filter_map(|info| {
        // Newer engines count in tokens, which is right for models with several kinds of attention too.
        info.number("kv_cache_size_tokens").or_else(|| info.number("block_size")?.checked_mul(info.number("num_gpu_blocks")?))
    });
    Some(ranks.sum()).filter(|tokens| *tokens > 0)
}

/// As Python writes it; `None` where it says neither.
fn prefix_cache(page: Page) -> Option<bool> {
    match page.samples("vllm:cache_config_info").next()?.label("enable_prefix_caching")? {
        "True" => Some(true),
        "False" => Some(false),
        _ => None,
    }
}

/// `{"version": "0.11.0"}`, and nothing else.
pub(super) fn version(body: &[u8]) -> bool {
    let answer: Value = serde_json::from_slice(body).unwrap_or_default();
    answer.as_object().is_some_and(|object| object.len() == 1 && object.get("version").is_some_and(Value::is_string))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.6
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000",num_gpu_blocks_override="None"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="500",num_gpu_blocks_override="None"} 1.0
"#;

    #[test]
    fn ranks_add_up_and_ratios_average() {
        assert_eq!(load(Page::new(PAGE)), Load { running: Some(7), waiting: Some(2), kv_used: Some(0.4) });
        assert_eq!(kv_tokens(Page::new(PAGE)), Some(24_000));
    }

    #[test]
    fn the_count_in_tokens_wins() {
        let page = "vllm:cache_config_info{block_size=\"16\",kv_cache_size_tokens=\"900\",num_gpu_blocks=\"100\"} 1\n";
        assert_eq!(kv_tokens(Page::new(page)), Some(900));
        let page = "vllm:cache_config_info{block_size=\"16\",kv_cache_size_tokens=\"None\",num_gpu_blocks=\"100\"} 1\n";
        assert_eq!(kv_tokens(Page::new(page)), Some(1600));
    }

    #[test]
    fn whether_prompts_are_kept() {
        let page = |value: &str| format!("vllm:cache_config_info{{block_size=\"16\",enable_prefix_caching=\"{value}\"}} 1\n");
        assert_eq!(["True", "False", "None"].map(|value| prefix_cache(Page::new(&page(value)))), [Some(true), Some(false), None]);
        assert_eq!(prefix_cache(Page::new(PAGE)), None);
    }

    #[test]
    fn older_names_and_gaps() {
        let page =
            Page::new("vllm:gpu_cache_usage_perc{model_name=\"m\"} 0.5\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"None\"} 1\n");
        assert_eq!(load(page), Load { running: None, waiting: None, kv_used: Some(0.5) });
        assert_eq!(kv_tokens(page), None);
    }

    #[test]
    fn version_is_not_any_json() {
        assert!(version(br#"{"version":"0.11.0"}"#));
        assert!(!version(br#"{"version":"1","name":"other"}"#));
        assert!(!version(b"<html>"));
    }
}
