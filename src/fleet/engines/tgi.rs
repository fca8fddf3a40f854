//! Text Generation Inference. Names from its `router/src/infer` and `backends/v3`; capacity from `/info`.

use serde_json::Value;

use super::{Capacity, Http, Page, QUESTION, mean, sum, tokens};
use crate::scheduler::Load;

pub(super) fn load(page: Page) -> Load {
    let value = |name| page.samples(name).map(|sample| sample.value);
    let budget = value("tgi_batch_max_total_tokens").next().filter(|budget| *budget >= 1.0);
    Load {
        running: sum(value("tgi_batch_current_size")),
        waiting: sum(value("tgi_queue_size")),
        kv_used: budget.and_then(|budget| mean(value("tgi_batch_current_max_tokens").map(|used| used / budget))),
    }
}

pub(super) async fn capacity(http: &mut Http) -> Capacity {
    let info = match http.get("/info", QUESTION).await {
        Ok(answer) => answer.json().unwrap_or_default(),
        Err(_) => Value::Null,
    };
    // max_concurrent_requests counts its queue too; what it batches is max_batch_size, usually unset.
    Capacity {
        slots: tokens(&info["max_batch_size"]),
        kv_tokens: info["max_batch_total_tokens"].as_u64().filter(|tokens| *tokens > 0),
        context_tokens: tokens(&info["max_total_tokens"]),
        prefix_cache: None,
    }
}

/// `/info` of TGI, and not somebody else's.
pub(super) fn info(body: &[u8]) -> bool {
    let info: Value = serde_json::from_slice(body).unwrap_or_default();
    info["model_id"].is_string() && info["max_concurrent_requests"].is_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_the_token_budget_is_its_kv_use() {
        let page = Page::new("tgi_queue_size 2\ntgi_batch_current_size 8\ntgi_batch_current_max_tokens 2048\ntgi_batch_max_total_tokens 8192\n");
        assert_eq!(load(page), Load { running: Some(8), waiting: Some(2), kv_used: Some(0.25) });
        assert_eq!(load(Page::new("tgi_queue_size 0\ntgi_batch_current_max_tokens 2048\n")), Load { running: None, waiting: Some(0), kv_used: None });
    }

    #[test]
    fn info_is_told_from_others() {
        assert!(info(br#"{"model_id":"m","max_concurrent_requests":128}"#));
        assert!(!info(br#"{"model_id":"m"}"#));
    }
}
