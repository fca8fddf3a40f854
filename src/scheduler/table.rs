//! Every request that waits or runs, found by its id or by its slot.
//!
//! Pages of slots, so that growing copies nothing and a crowd costs what it holds; and an index of slots by id with open addressing. A standard map of the
//! ids would cost three times as much, and its random state would make iteration differ from run to run.

use std::sync::Arc;

use super::event::{ModelId, Request, RequestId, TenantId, Tokens};
use super::history::History;
use super::prefixes::Sought;
use super::queue::{Lane, Place};
use super::restrictions::RestrictionId;
use super::score::{RankerVersion, Score, Scored, Weight};
use super::shares::Service;
use super::time::Time;

/// How many slots there may be: what a place can name, less the one that marks an empty cell.
const MAX_REQUESTS: usize = (1 << Place::SLOT_BITS) - 1;

const PAGE: usize = 512;
const NONE: u32 = u32::MAX;

/// What is remembered of one request. Its fields are narrow because a hundred thousand of them wait on a bad day.
#[derive(Debug)]
pub(super) struct Entry {
    pub id: RequestId,
    pub arrived: Time,
    pub place: Place,
    pub stage: Stage,
    pub history: Option<Arc<History>>,
    weight: f32,
    share: f32,
    /// Expected work in capacity-seconds, as keyed.
    pub work: f32,
    pub prompt: Tokens,
    /// Part of the prompt that its backend probably has in its prefix cache.
    pub cached: Tokens,
    max_output: Tokens,
    pub attained: Tokens,
    /// Expected output.
    pub expected: Tokens,
    /// Output that it will probably not exceed.
    pub at_most: Tokens,
    oracle: Tokens,
    /// NaN for none.
    score: f32,
    version: RankerVersion,
    pub model: ModelId,
    tenant: u32,
    pub bytes: u32,
    /// Index of the backend in whose queue or window it is.
    pub backend: u32,
    pub unscored: bool,
}

/// Tokens in a KV cache, as an expectation and how far off it may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Resident {
    expected: u64,
    /// The square of the distance to what it will probably not exceed. Distances of independent requests add up as standard deviations do: the sum of what each
    /// will not exceed is far more than what all of them will not exceed, and would leave a third of a cache empty.
    variance: u64,
}

impl Resident {
    pub fn add(&mut self, other: Resident) {
        self.expected += other.expected;
        self.variance += other.variance;
    }

    pub fn subtract(&mut self, other: Resident) {
        self.expected -= other.expected;
        self.variance -= other.variance;
    }

    /// Tokens that all of it will probably not exceed.
    pub fn at_most(&self) -> u64 {
        self.expected + (self.variance as f64).sqrt().ceil() as u64
    }
}

/// Where in its life a request is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    Waiting { phi: i64, expires: Time, restriction: RestrictionId },
    Running { released: Time, produced: Tokens, remaining: Tokens },
}

impl Entry {
    /// A new request that is not in any queue yet.
    pub fn new(request: &Request, place: Place) -> Self {
        Entry {
            id: request.id,
            arrived: request.arrived,
            place,
            stage: Stage::Waiting { phi: 0, expires: request.expires, restriction: RestrictionId::NONE },
            history: request.history.clone(),
            weight: request.weight.get() as f32,
            share: request.share.get() as f32,
            work: 0.0,
            prompt: request.prompt_tokens,
            cached: 0,
            max_output: request.max_output.unwrap_or(NONE),
            attained: request.attained,
            expected: 0,
            at_most: 0,
            oracle: request.oracle_output.unwrap_or(NONE),
            score: request.score.map_or(f32::NAN, |scored| scored.score.get()),
            version: request.score.map_or(RankerVersion(0), |scored| scored.version),
            model: request.model,
            tenant: request.tenant.map_or(NONE, |tenant| tenant.0),
            bytes: request.bytes,
            backend: NONE,
            unscored: request.unscored,
        }
    }

    /// The weight, in single precision.
    pub fn weight(&self) -> Weight {
        // A weight so extreme that single precision turns it into 0 or infinity counts as 1.
        Weight::new(f64::from(self.weight)).unwrap_or(Weight::ONE)
    }

    /// Its tenant's share of the pool, in single precision.
    pub fn share(&self) -> Weight {
        Weight::new(f64::from(self.share)).unwrap_or(Weight::ONE)
    }

    /// What the client allows.
    pub fn max_output(&self) -> Option<Tokens> {
        (self.max_output != NONE).then_some(self.max_output)
    }

    pub fn oracle_output(&self) -> Option<Tokens> {
        (self.oracle != NONE).then_some(self.oracle)
    }

    pub fn score(&self) -> Option<Scored> {
        Score::new(self.score).map(|score| Scored { score, version: self.version })
    }

    pub fn tenant(&self) -> Option<TenantId> {
        (self.tenant != NONE).then_some(TenantId(self.tenant))
    }

    /// What it will hold in a KV cache at its end.
    pub fn resident(&self) -> Resident {
        let output = match self.stage {
            Stage::Waiting { .. } => self.expected,
            Stage::Running { produced, remaining, .. } => produced.saturating_add(remaining),
        };
        let spread = u64::from(self.at_most.saturating_sub(output));
        Resident { expected: u64::from(self.prompt) + u64::from(output), variance: spread * spread }
    }

    /// Which lane of a queue it waits in.
    pub fn lane(&self, restriction: RestrictionId) -> Lane {
        Lane { tenant: self.tenant(), restriction }
    }

    /// Its expected work, as keyed, for sums: rounded in the same way each time, so that what was added can be subtracted.
    pub fn reckoned(&self) -> Service {
        Service::of(f64::from(self.work))
    }

    /// What to ask a backend's prefix cache for.
    pub fn sought(&self) -> Sought {
        Sought::new(self.history.as_deref(), self.prompt)
    }

    /// Prompt tokens that a backend has to compute.
    pub fn uncached(&self) -> Tokens {
        self.prompt.saturating_sub(self.cached)
    }
}

/// All requests of one scheduler.
#[derive(Debug, Default)]
pub(super) struct Table {
    pages: Vec<Vec<Option<Entry>>>,
    free: Vec<u32>,
    /// Slots by id: linear probing, a power of two long, at most three quarters full; [`NONE`] is an empty cell. The byte above a slot's bits is how far the
    /// cell is from where the search for its id starts, so that hardly any other request's entry is read on the way.
    index: Vec<u32>,
    len: usize,
}

impl Table {
    /// The slot that the next [`Table::insert`] will use; `None` when every place is taken.
    pub fn vacant(&self) -> Option<u32> {
        match self.free.last() {
            Some(&slot) => Some(slot),
            None => (self.len < MAX_REQUESTS).then_some(self.len as u32),
        }
    }

    /// Puts an entry into the slot its place names, which is the one [`Table::vacant`] told. Its id must be new.
    pub fn insert(&mut self, entry: Entry) {
        let slot = entry.place.slot();
        debug_assert_eq!(self.vacant(), Some(slot));
        if 4 * (self.len + 1) > 3 * self.index.len() {
            self.grow_index();
        }
        self.enter(entry.id, slot);
        match self.free.pop() {
            Some(_) => self.pages[slot as usize / PAGE][slot as usize % PAGE] = Some(entry),
            None => {
                if (slot as usize).is_multiple_of(PAGE) {
                    self.pages.push(Vec::with_capacity(PAGE));
                }
                self.pages[slot as usize / PAGE].push(Some(entry));
            }
        }
        self.len += 1;
    }

    pub fn slot_of(&self, id: RequestId) -> Option<u32> {
        self.cell_of(id).map(|cell| self.index[cell] & SLOT)
    }

    /// The entry in a slot that is known to be taken.
    #[inline]
    pub fn get(&self, slot: u32) -> &Entry {
        // Slots are only kept by whoever also removes them (queues, windows), so a vacant one is a bug of this module's callers.
        self.pages[slot as usize / PAGE][slot as usize % PAGE].as_ref().unwrap_or_else(|| unreachable!("slot {slot} is vacant"))
    }

    /// As [`Table::get`], to change it.
    #[inline]
    pub fn get_mut(&mut self, slot: u32) -> &mut Entry {
        self.pages[slot as usize / PAGE][slot as usize % PAGE].as_mut().unwrap_or_else(|| unreachable!("slot {slot} is vacant"))
    }

    /// Takes an entry out of a slot that is known to be taken.
    pub fn remove(&mut self, slot: u32) -> Entry {
        let id = self.get(slot).id;
        if let Some(cell) = self.cell_of(id) {
            self.vacate(cell);
        }
        self.len -= 1;
        self.free.push(slot);
        self.pages[slot as usize / PAGE][slot as usize % PAGE].take().unwrap_or_else(|| unreachable!("slot {slot} is vacant"))
    }

    /// Every entry, in the order of slots.
    pub fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.pages.iter().flatten().flatten()
    }

    /// Every entry, in the order of slots, to change it.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Entry> {
        self.pages.iter_mut().flatten().flatten()
    }

    /// Where the search for an id starts. Fibonacci hashing: ids are handed out in sequence by the dispatcher, never by a client.
    fn home(&self, id: RequestId) -> usize {
        (id.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - self.index.len().ilog2())) as usize
    }

    fn enter(&mut self, id: RequestId, slot: u32) {
        let mask = self.index.len() - 1;
        let home = self.home(id);
        let mut distance = 0;
        while self.index[(home + distance) & mask] != NONE {
            distance += 1;
        }
        self.index[(home + distance) & mask] = tag(distance) | slot;
    }

    fn cell_of(&self, id: RequestId) -> Option<usize> {
        if self.index.is_empty() {
            return None;
        }
        let mask = self.index.len() - 1;
        let home = self.home(id);
        for distance in 0.. {
            let cell = (home + distance) & mask;
            let found = self.index[cell];
            if found == NONE {
                break;
            }
            if found & !SLOT == tag(distance) && self.get(found & SLOT).id == id {
                return Some(cell);
            }
        }
        None
    }

    /// Empties a cell and moves back what was pushed past it, so that searches need no tombstones.
    fn vacate(&mut self, mut hole: usize) {
        let mask = self.index.len() - 1;
        let mut cell = hole;
        loop {
            cell = (cell + 1) & mask;
            let found = self.index[cell];
            if found == NONE {
                break;
            }
            let distance = match found >> Place::SLOT_BITS {
                // So far away that only the entry itself knows.
                FAR => cell.wrapping_sub(self.home(self.get(found & SLOT).id)) & mask,
                distance => distance as usize,
            };
            let gap = cell.wrapping_sub(hole) & mask;
            // Its search passes the hole unless it starts after it.
            if distance >= gap {
                self.index[hole] = tag(distance - gap) | (found & SLOT);
                hole = cell;
            }
        }
        self.index[hole] = NONE;
    }

    fn grow_index(&mut self) {
        self.index = vec![NONE; (self.index.len() * 2).max(16)];
        for slot in 0..self.pages.iter().map(Vec::len).sum::<usize>() as u32 {
            if let Some(entry) = &self.pages[slot as usize / PAGE][slot as usize % PAGE] {
                self.enter(entry.id, slot);
            }
        }
    }
}

/// The bits of a cell that hold a slot.
const SLOT: u32 = (1 << Place::SLOT_BITS) - 1;
/// The distance that stands for all longer ones.
const FAR: u32 = NONE >> Place::SLOT_BITS;

fn tag(distance: usize) -> u32 {
    (distance as u32).min(FAR) << Place::SLOT_BITS
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// The sum of what each will not exceed would be 200 tokens a request.
    #[test]
    fn what_many_will_not_exceed_is_less_than_what_each_will_not() {
        let one = Resident { expected: 100, variance: 100 * 100 };
        let mut all = Resident::default();
        (0..100).for_each(|_| all.add(one));
        assert_eq!((one.at_most(), all.at_most()), (200, 10_000 + 1_000));
        (0..99).for_each(|_| all.subtract(one));
        assert_eq!(all, one);
    }

    fn request(id: u64) -> Request {
        Request {
            id: RequestId(id),
            arrived: Time::ZERO,
            model: ModelId(0),
            score: None,
            prompt_tokens: 1,
            max_output: None,
            attained: 0,
            weight: Weight::ONE,
            share: Weight::ONE,
            expires: Time::MAX,
            bytes: 0,
            unscored: false,
            excluded: Vec::new(),
            tenant: None,
            history: None,
            oracle_output: None,
        }
    }

    #[test]
    fn an_entry_is_two_cache_lines() {
        assert_eq!(std::mem::size_of::<Option<Entry>>(), 128);
    }

    #[test]
    fn ids_that_all_collide_are_found() {
        let mut table = Table::default();
        // With Fibonacci hashing, multiples of the inverse of the factor land next to each other; these land on one cell of any index shorter than 2^20.
        let id = |n: u64| n.wrapping_mul(0xf1de_83e1_9937_733d);
        for n in 0..2000 {
            let slot = table.vacant().unwrap();
            table.insert(Entry::new(&request(id(n)), Place::new(0, slot)));
        }
        for n in (0..2000).step_by(3) {
            table.remove(table.slot_of(RequestId(id(n))).unwrap());
        }
        for n in 0..2000 {
            let found = table.slot_of(RequestId(id(n))).map(|slot| table.get(slot).id);
            assert_eq!(found, (n % 3 != 0).then_some(RequestId(id(n))));
        }
    }

    proptest! {
        /// The table against a standard map, with few ids so that they meet, and multiples of a power of two so that they collide.
        #[test]
        fn finds_what_is_in_it_and_nothing_else(steps in prop::collection::vec((0u64..64, any::<bool>()), 1..400)) {
            let mut table = Table::default();
            let mut model = BTreeMap::new();
            for (number, insert) in steps {
                let id = (number << 58) | (number % 3);
                match (insert, model.get(&id).copied()) {
                    (true, None) => {
                        let slot = table.vacant().unwrap();
                        table.insert(Entry::new(&request(id), Place::new(0, slot)));
                        model.insert(id, slot);
                    }
                    (false, Some(slot)) => {
                        prop_assert_eq!(table.remove(slot).id, RequestId(id));
                        model.remove(&id);
                    }
                    _ => {}
                }
                for number in 0..64 {
                    let id = (number << 58) | (number % 3);
                    prop_assert_eq!(table.slot_of(RequestId(id)), model.get(&id).copied());
                }
                prop_assert_eq!(table.len, model.len());
                prop_assert_eq!(table.iter().count(), model.len());
            }
        }
    }
}
