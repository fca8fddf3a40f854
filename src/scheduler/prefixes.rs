//! Which prompt beginnings a backend has seen lately and so probably holds in its prefix cache.

use std::collections::BTreeSet;

use super::event::{Prefix, Tokens};

/// Beginnings remembered per backend, at most; the older half goes at once.
const MOST: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Prefixes {
    young: BTreeSet<u64>,
    old: BTreeSet<u64>,
}

impl Prefixes {
    /// A prompt with this beginning goes to the backend.
    pub fn seen(&mut self, prefix: Prefix) {
        self.young.insert(prefix.hash);
        if self.young.len() >= MOST / 2 {
            self.old = std::mem::take(&mut self.young);
        }
    }

    /// How many of a prompt's tokens the backend probably need not compute.
    pub fn cached(&self, prefix: Option<Prefix>, prompt: Tokens) -> Tokens {
        match prefix {
            Some(prefix) if self.young.contains(&prefix.hash) || self.old.contains(&prefix.hash) => prefix.tokens.min(prompt),
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_the_recent_ones_and_forgets_the_rest() {
        let mut prefixes = Prefixes::default();
        let prefix = |hash| Prefix { hash, tokens: 100 };
        for hash in 0..MOST as u64 * 2 {
            prefixes.seen(prefix(hash));
        }
        assert_eq!(prefixes.cached(Some(prefix(MOST as u64 * 2 - 1)), 1000), 100);
        assert_eq!(prefixes.cached(Some(prefix(MOST as u64 * 3 / 2)), 30), 30, "never more than the prompt");
        assert_eq!(prefixes.cached(Some(prefix(0)), 1000), 0);
        assert_eq!(prefixes.cached(None, 1000), 0);
        assert!(prefixes.young.len() + prefixes.old.len() <= MOST);
    }
}
