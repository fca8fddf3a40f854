//! llama.cpp's server; its metrics page needs `--metrics`. Every route answers 503 "Loading model" until it is ready. Seen on a running server.

use serde_json::Value;

use super::{Capacity, Http, Page, QUESTION, sum, tokens};
use crate::scheduler::Load;

pub(super) fn load(page: Page) -> Load {
    let value = |name| page.samples(name).map(|sample| sample.value);
    // KV use is told nowhere; its slots have fixed shares of the cache.
    Load { running: sum(value("llamacpp:requests_processing")), waiting: sum(value("llamacpp:requests_deferred")), kv_used: None }
}

pub(super) async fn capacity(http: &mut Http) -> Capacity {
    match http.get("/props", QUESTION).await {
        Ok(answer) => answer.json().map(|props| of_props(&props)).unwrap_or_default(),
        Err(_) => Capacity::default(),
    }
}

/// The context is one slot's, so slots of equal size fill the cache and need no budget of tokens.
fn of_props(props: &Value) -> Capacity {
    Capacity {
        slots: tokens(&props["total_slots"]),
        kv_tokens: None,
        context_tokens: tokens(&props["default_generation_settings"]["n_ctx"]),
        prefix_cache: None,
    }
}

/// `/props` of llama.cpp, and not somebody else's.
pub(super) fn props(body: &[u8]) -> bool {
    let props: Value = serde_json::from_slice(body).unwrap_or_default();
    props["total_slots"].is_u64() && props["default_generation_settings"].is_object()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn props_tell_slots_and_the_context_of_one() {
        let body = br#"{"default_generation_settings":{"params":{},"n_ctx":2048},"total_slots":4,"model_path":"toy.gguf"}"#;
        assert!(props(body));
        let props: Value = serde_json::from_slice(body).unwrap();
        assert_eq!(of_props(&props), Capacity { slots: Some(4), kv_tokens: None, context_tokens: Some(2048), prefix_cache: None });
    }

    #[test]
    fn load_from_its_page() {
        let page = Page::new("# TYPE llamacpp:requests_processing gauge\nllamacpp:requests_processing 4\nllamacpp:requests_deferred 2\n");
        assert_eq!(load(page), Load { running: Some(4), waiting: Some(2), kv_used: None });
    }
}
