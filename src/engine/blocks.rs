//! The KV cache: how many blocks are held, and which full prompt blocks can be found again.
//!
//! A block that only one request can use has no identity here, it is a count. A full prompt block has a hash (of itself and everything before it)
//! and is shared: while requests hold it, it cannot be evicted; afterwards it stays findable until its memory is needed, oldest first.
//! Two requests that compute the same block at once share it; vLLM keeps a copy for each until they end.

use std::collections::BTreeMap;

/// No neighbour in the list of idle blocks.
const NONE: u32 = u32::MAX;

/// A shared block: an index into [`Blocks::shared`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shared(u32);

#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: u64,
    /// Requests that hold it; at zero it is in the idle list.
    holders: u32,
    older: u32,
    newer: u32,
}

#[derive(Clone, Debug)]
pub(super) struct Blocks {
    total: u32,
    /// Blocks that belong to one request each.
    private: u32,
    by_hash: BTreeMap<u64, u32>,
    shared: Vec<Entry>,
    vacant: Vec<u32>,
    /// Shared blocks that nobody holds, from `oldest` to `newest`: evicted in this order.
    idle: u32,
    oldest: u32,
    newest: u32,
}

impl Blocks {
    pub(super) fn new(total: u32) -> Self {
        Blocks { total, private: 0, by_hash: BTreeMap::new(), shared: Vec::new(), vacant: Vec::new(), idle: 0, oldest: NONE, newest: NONE }
    }

    /// Blocks that requests hold.
    pub(super) fn held(&self) -> u32 {
        self.private + self.by_hash.len() as u32 - self.idle
    }

    /// Blocks that can be had, evicting idle ones.
    pub(super) fn available(&self) -> u32 {
        self.total - self.held()
    }

    /// How many of the leading `hashes` are cached, and how many of those nobody holds.
    pub(super) fn lookup(&self, hashes: &[u64]) -> (u32, u32) {
        let mut idle = 0;
        let mut hits = 0;
        for hash in hashes {
            let Some(&at) = self.by_hash.get(hash) else { break };
            hits += 1;
            idle += u32::from(self.shared[at as usize].holders == 0);
        }
        (hits, idle)
    }

    /// Takes `count` private blocks. The caller has checked [`Blocks::available`].
    pub(super) fn take(&mut self, count: u32) {
        debug_assert!(count <= self.available());
        while self.private + self.by_hash.len() as u32 + count > self.total {
            self.evict_oldest();
        }
        self.private += count;
    }

    /// Holds a block that is cached under `hash`, if there is one.
    pub(super) fn hold(&mut self, hash: u64) -> Option<Shared> {
        let &at = self.by_hash.get(&hash)?;
        let entry = &mut self.shared[at as usize];
        entry.holders += 1;
        if entry.holders == 1 {
            self.unlink(at);
        }
        Some(Shared(at))
    }

    /// Makes one of the caller's private blocks a shared one; if a block with this hash exists already, the private one is given back.
    pub(super) fn publish(&mut self, hash: u64) -> Shared {
        self.private -= 1;
        if let Some(shared) = self.hold(hash) {
            return shared;
        }
        let entry = Entry { hash, holders: 1, older: NONE, newer: NONE };
        let at = match self.vacant.pop() {
            Some(at) => {
                self.shared[at as usize] = entry;
                at
            }
            None => {
                self.shared.push(entry);
                self.shared.len() as u32 - 1
            }
        };
        self.by_hash.insert(hash, at);
        Shared(at)
    }

    /// Gives back what one request held. Its last block is the first to be evicted: the beginning of a prompt is what others share.
    pub(super) fn release(&mut self, shared: &[Shared], private: u32) {
        self.private -= private;
        for &Shared(at) in shared.iter().rev() {
            let entry = &mut self.shared[at as usize];
            entry.holders -= 1;
            if entry.holders == 0 {
                self.link_newest(at);
            }
        }
    }

    fn evict_oldest(&mut self) {
        let at = self.oldest;
        self.unlink(at);
        self.by_hash.remove(&self.shared[at as usize].hash);
        self.vacant.push(at);
    }

    fn link_newest(&mut self, at: u32) {
        let older = self.newest;
        self.shared[at as usize].older = older;
        self.shared[at as usize].newer = NONE;
        match older {
            NONE => self.oldest = at,
            _ => self.shared[older as usize].newer = at,
        }
        self.newest = at;
        self.idle += 1;
    }

    fn unlink(&mut self, at: u32) {
        let Entry { older, newer, .. } = self.shared[at as usize];
        match older {
            NONE => self.oldest = newer,
            _ => self.shared[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            _ => self.shared[newer as usize].older = older,
        }
        self.idle -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes and publishes one block for each hash.
    fn publish(blocks: &mut Blocks, hashes: &[u64]) -> Vec<Shared> {
        hashes
            .iter()
            .map(|&hash| {
                blocks.take(1);
                blocks.publish(hash)
            })
            .collect()
    }

    #[test]
    fn a_released_block_is_found_until_its_memory_is_needed() {
        let mut blocks = Blocks::new(4);
        let held = publish(&mut blocks, &[1, 2, 3]);
        assert_eq!((blocks.held(), blocks.available()), (3, 1));
        blocks.release(&held, 0);
        assert_eq!((blocks.held(), blocks.available()), (0, 4));
        assert_eq!(blocks.lookup(&[1, 2, 3, 9]), (3, 3));
        blocks.take(2);
        assert_eq!(blocks.lookup(&[1, 2, 3]), (2, 2), "the end of the chain goes first");
        blocks.take(2);
        assert_eq!(blocks.lookup(&[1]), (0, 0));
    }

    #[test]
    fn the_block_used_longest_ago_is_evicted_first() {
        let mut blocks = Blocks::new(3);
        let (a, b, c) = (publish(&mut blocks, &[1]), publish(&mut blocks, &[2]), publish(&mut blocks, &[3]));
        blocks.release(&a, 0);
        blocks.release(&b, 0);
        blocks.release(&c, 0);
        let again = blocks.hold(1).expect("cached");
        blocks.release(&[again], 0);
        blocks.take(1);
        assert_eq!([1, 2, 3].map(|hash| blocks.lookup(&[hash]).0), [1, 0, 1]);
    }

    #[test]
    fn what_is_remembered_does_not_grow() {
        let mut blocks = Blocks::new(3);
        for hash in 0..100 {
            let held = publish(&mut blocks, &[hash]);
            blocks.release(&held, 0);
        }
        assert_eq!((blocks.shared.len(), blocks.by_hash.len()), (3, 3));
    }

    #[test]
    fn a_held_block_is_shared_and_never_evicted() {
        let mut blocks = Blocks::new(2);
        let first = publish(&mut blocks, &[7]);
        let second = publish(&mut blocks, &[7]);
        assert_eq!((first[0], blocks.held()), (second[0], 1));
        blocks.release(&first, 0);
        assert_eq!(blocks.available(), 1);
        blocks.take(1);
        assert_eq!(blocks.lookup(&[7]), (1, 0));
    }
}
