//! Ollama: no metrics, no capacity; what runs is counted here.

use crate::scheduler::Slots;

/// It runs OLLAMA_NUM_PARALLEL requests per model, which is 1 unless set, and queues the rest first come, first served.
pub(super) const SLOTS: Slots = Slots::Auto { initial: 1, max: 8 };

/// What GET / says.
pub(super) fn greeting(body: &[u8]) -> bool {
    body.starts_with(b"Ollama is running")
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_introduces_itself() {
        assert!(super::greeting(b"Ollama is running"));
        assert!(!super::greeting(b"<html>Ollama is running"));
    }
}
