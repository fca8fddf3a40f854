//! Scores of recent texts: a bounded map that forgets what was used longest ago.

use std::collections::{BTreeMap, HashMap};

use crate::scheduler::Scored;

/// Names a text: 128 bits of keyed hash, so that no client can search for a collision.
pub(super) type TextKey = u128;

/// A least-recently-used map of a fixed capacity.
pub(super) struct Cache {
    capacity: usize,
    /// The score and the turn of its last use.
    entries: HashMap<TextKey, (Scored, u64)>,
    /// The same entries by that turn, oldest first.
    order: BTreeMap<u64, TextKey>,
    turn: u64,
}

impl Cache {
    pub(super) fn new(capacity: usize) -> Cache {
        Cache { capacity, entries: HashMap::new(), order: BTreeMap::new(), turn: 0 }
    }

    /// The score of this text, which now counts as used.
    pub(super) fn get(&mut self, key: TextKey) -> Option<Scored> {
        let (scored, used) = self.entries.get_mut(&key)?;
        self.turn += 1;
        self.order.remove(used);
        *used = self.turn;
        self.order.insert(self.turn, key);
        Some(*scored)
    }

    /// Remembers a score; at capacity the entry unused for longest makes room.
    pub(super) fn insert(&mut self, key: TextKey, scored: Scored) {
        self.turn += 1;
        if let Some((_, used)) = self.entries.insert(key, (scored, self.turn)) {
            self.order.remove(&used);
        }
        self.order.insert(self.turn, key);
        if self.entries.len() > self.capacity
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.entries.remove(&oldest);
        }
    }

    /// Forgets everything: other weights have taken over.
    pub(super) fn clear(&mut self) {
        self.entries.clear();
        self.order.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::{RankerVersion, Score};

    fn scored(value: f32) -> Scored {
        Scored { score: Score::new(value).unwrap(), version: RankerVersion(1) }
    }

    #[test]
    fn the_entry_unused_for_longest_makes_room() {
        let mut cache = Cache::new(2);
        cache.insert(1, scored(1.0));
        cache.insert(2, scored(2.0));
        assert_eq!(cache.get(1), Some(scored(1.0)));
        cache.insert(3, scored(3.0));
        assert_eq!(cache.get(2), None);
        assert_eq!(cache.get(1), Some(scored(1.0)));
        assert_eq!(cache.get(3), Some(scored(3.0)));
    }

    #[test]
    fn storing_a_text_again_replaces_its_score_and_takes_no_second_place() {
        let mut cache = Cache::new(2);
        cache.insert(1, scored(1.0));
        cache.insert(1, scored(1.5));
        cache.insert(2, scored(2.0));
        assert_eq!(cache.get(1), Some(scored(1.5)));
        assert_eq!(cache.get(2), Some(scored(2.0)));
        assert_eq!((cache.entries.len(), cache.order.len()), (2, 2));
    }
}
