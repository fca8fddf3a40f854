//! Which prompt beginnings a backend has seen lately and so probably holds in its prefix cache.

use super::event::Tokens;
use super::history::History;

/// Beginnings are kept in sets of a few, as a processor's cache keeps lines: one look at one line of memory says whether a set has it, and what a set has no room
/// for pushes out what it was asked for longest ago.
const WAYS: usize = 4;
/// With four ways, 8,192 beginnings and 64 KiB for each backend; a conversation needs one for each turn.
const SETS: usize = 2048;
/// Tokens that a stamp counts as one.
const STEP: u64 = 64;

/// A beginning, and how much the backend had put into its cache when it was last used.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// The upper half of its hash, never 0; 0 is an empty place.
    tag: u32,
    stamp: u32,
}

/// The beginnings of a prompt, as every backend's cache is asked for them.
#[derive(Debug)]
pub(super) struct Sought {
    /// The longest first: which set would have it, what it is called there, and how many tokens of the prompt it covers.
    beginnings: [(usize, u32, Tokens); History::MOST],
    len: usize,
    /// How many tokens the longest covers.
    most: Tokens,
}

impl Sought {
    /// What came before a prompt of so many tokens.
    pub fn new(history: Option<&History>, prompt: Tokens) -> Self {
        let mut sought = Sought { beginnings: [(0, 0, 0); History::MOST], len: 0, most: 0 };
        for prefix in history.iter().flat_map(|history| history.longest_first()) {
            let (set, tag) = place(prefix.hash);
            let tokens = prefix.tokens.min(prompt);
            sought.beginnings[sought.len] = (set, tag, tokens);
            (sought.len, sought.most) = (sought.len + 1, sought.most.max(tokens));
        }
        sought
    }

    /// The most that a backend may have of it.
    pub fn most(&self) -> Tokens {
        self.most
    }
}

/// What one backend has seen. Engines evict what was used longest ago, so a beginning is held for as long as less than a whole cache has come in since.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    /// Empty until there is something to keep.
    sets: Vec<[Seen; WAYS]>,
    /// Tokens that came into its cache so far.
    stored: u64,
    /// It has no such cache.
    none: bool,
}

impl Prefixes {
    /// A prompt goes to the backend; `stored` of its tokens and its answer's were not in the cache yet.
    pub fn seen(&mut self, history: Option<&History>, stored: u64) {
        self.stored += stored;
        let stamp = self.stamp();
        let (Some(history), false) = (history, self.none) else { return };
        for prefix in history.longest_first() {
            if self.sets.is_empty() {
                self.sets = vec![Default::default(); SETS];
            }
            let (set, tag) = place(prefix.hash);
            let set = &mut self.sets[set];
            let at = set.iter().position(|seen| seen.tag == tag).unwrap_or(WAYS - 1);
            set[..=at].rotate_right(1);
            set[0] = Seen { tag, stamp };
        }
    }

    /// How many of a prompt's tokens the backend, whose cache has room for `room` tokens as far as is known, probably need not compute.
    pub fn cached(&self, sought: &Sought, room: Option<u64>) -> Tokens {
        if self.sets.is_empty() {
            return 0;
        }
        let holds = |set: usize, tag| {
            let seen = self.sets[set].iter().find(|seen| seen.tag == tag);
            seen.is_some_and(|seen| room.is_none_or(|room| u64::from(self.stamp().wrapping_sub(seen.stamp)) * STEP <= room))
        };
        let mut beginnings = sought.beginnings[..sought.len].iter();
        beginnings.find(|(set, tag, _)| holds(*set, *tag)).map_or(0, |(_, _, tokens)| *tokens)
    }

    /// Whether the backend has a cache at all.
    pub fn set_present(&mut self, present: bool) {
        self.none = !present;
        if !present {
            self.forget();
        }
    }

    /// The backend's cache is empty.
    pub fn forget(&mut self) {
        self.sets = Vec::new();
    }

    /// Wraps after 2^38 tokens, a year of 8,000 a second; a beginning that was never used in between would look recent then, which costs one wrong guess.
    fn stamp(&self) -> u32 {
        (self.stored / STEP) as u32
    }
}

/// Which set has a beginning, and what it is called there.
fn place(hash: u64) -> (usize, u32) {
    (hash as usize % SETS, (hash >> 32) as u32 | 1)
}

#[cfg(test)]
mod tests {
    use super::super::event::Prefix;
    use super::*;

    /// A prompt of these beginnings, by number and tokens.
    fn prompt(beginnings: &[(u64, Tokens)]) -> History {
        // Spread over all bits, as a hash is.
        let prefix = |&(number, tokens): &(u64, Tokens)| Prefix { hash: (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15), tokens };
        History::new(beginnings.iter().map(prefix), None)
    }

    #[test]
    fn the_longest_beginning_that_was_seen_counts() {
        let mut prefixes = Prefixes::default();
        let first = prompt(&[(0, 100), (1, 150)]);
        assert_eq!(prefixes.cached(&Sought::new(Some(&first), 150), None), 0);
        prefixes.seen(Some(&first), 150);
        let second = prompt(&[(0, 100), (1, 150), (2, 400)]);
        assert_eq!(prefixes.cached(&Sought::new(Some(&second), 400), None), 150, "the turn before");
        assert_eq!(prefixes.cached(&Sought::new(Some(&prompt(&[(0, 100), (9, 300)])), 300), None), 100, "the system prompt");
        assert_eq!(prefixes.cached(&Sought::new(Some(&second), 30), None), 30, "never more than the prompt");
        assert_eq!((prefixes.cached(&Sought::new(Some(&prompt(&[(9, 10)])), 300), None), prefixes.cached(&Sought::new(None, 300), None)), (0, 0));
        prefixes.forget();
        assert_eq!(prefixes.cached(&Sought::new(Some(&second), 400), None), 0);
    }

    #[test]
    fn what_a_whole_cache_came_in_after_is_gone() {
        let mut prefixes = Prefixes::default();
        let (old, kept) = (prompt(&[(0, 640)]), prompt(&[(1, 640)]));
        prefixes.seen(Some(&old), 640);
        prefixes.seen(Some(&kept), 640);
        prefixes.seen(None, 1280);
        assert_eq!(prefixes.cached(&Sought::new(Some(&old), 640), Some(1920)), 640);
        prefixes.seen(Some(&kept), 640);
        assert_eq!(
            (prefixes.cached(&Sought::new(Some(&old), 640), Some(1920)), prefixes.cached(&Sought::new(Some(&kept), 640), Some(1920))),
            (0, 640)
        );
        assert_eq!(prefixes.cached(&Sought::new(Some(&old), 640), None), 640, "a cache of unknown size");
    }

    #[test]
    fn remembers_the_recent_ones_in_bounded_memory() {
        let mut prefixes = Prefixes::default();
        let most = (WAYS * SETS) as u64;
        for number in 0..4 * most {
            prefixes.seen(Some(&prompt(&[(number, 100)])), 0);
        }
        let known = |numbers: std::ops::Range<u64>| {
            numbers.filter(|&number| prefixes.cached(&Sought::new(Some(&prompt(&[(number, 100)])), 100), None) > 0).count()
        };
        let recent = known(3 * most + most / 2..4 * most);
        assert!(recent as u64 > most * 4 / 10, "{recent} of the last {}", most / 2);
        assert_eq!(known(0..most), 0);
        assert_eq!(prefixes.sets.len(), SETS);
    }
}
