//! One backend's priority queue: ordered by key, with an aged FIFO beside it, open to siblings that steal.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::event::BackendId;
use super::restrictions::{RestrictionId, Restrictions};
use super::table::{Entry, Stage, Table};
use super::time::Time;

/// A position in the order of arrival and the slot of the table that holds the request: 40 and 24 bits, because a crowd of them waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place(u64);

impl Place {
    pub const SLOT_BITS: u32 = 24;

    /// Sequence numbers wrap after 2^40 requests (four months at 100,000 a second); ties across that moment break the other way round.
    pub fn new(sequence: u64, slot: u32) -> Self {
        Place(sequence << Self::SLOT_BITS | u64::from(slot))
    }

    pub fn sequence(self) -> u64 {
        self.0 >> Self::SLOT_BITS
    }

    pub fn slot(self) -> u32 {
        (self.0 & ((1 << Self::SLOT_BITS) - 1)) as u32
    }
}

/// What a queue is ordered by: phi, ties by arrival sequence. Fixed while a request waits, but for a rebuild of all keys at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub phi: i64,
    pub place: Place,
}

/// What the aged FIFO does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Aging {
    /// Waiting longer than this is aged.
    threshold: Duration,
    /// At most this many of a million releases of a queue; whole numbers, so that shares add up exactly.
    share: u32,
}

/// What one aged release costs, in the unit of [`Aging::share`].
const ONE_RELEASE: u32 = 1_000_000;

impl Aging {
    pub fn new(threshold: Duration, share: f64) -> Self {
        Aging { threshold, share: (share * f64::from(ONE_RELEASE)).round() as u32 }
    }

    pub fn is_aged(self, now: Time, arrived: Time) -> bool {
        now.since(arrived) > self.threshold
    }
}

/// A request as the queue knows it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub key: Key,
    pub arrived: Time,
    pub restriction: RestrictionId,
}

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub key: Key,
    /// By age rather than by key.
    pub aged: bool,
}

/// New keys for everything in a queue.
#[derive(Debug, Default)]
pub(super) struct Keys {
    free: Vec<Key>,
    restricted: Vec<(RestrictionId, Key)>,
}

impl Keys {
    pub fn push(&mut self, key: Key, restriction: RestrictionId) {
        match restriction {
            RestrictionId::NONE => self.free.push(key),
            restriction => self.restricted.push((restriction, key)),
        }
    }
}

/// The requests that wait for one backend.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Those that may go to any backend of the pool.
    free: BTreeSet<Key>,
    /// Those that may not.
    restricted: BTreeSet<Key>,
    /// The same, by restriction, for siblings that steal.
    by_restriction: BTreeMap<RestrictionId, BTreeSet<Key>>,
    /// All of them, oldest first.
    by_age: BTreeSet<(Time, Place)>,
    /// What the aged FIFO may still take, earned release by release; always less than one release, so that a long time without aged requests is no store of turns.
    credit: u32,
}

impl Queue {
    pub fn len(&self) -> usize {
        self.by_age.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_age.is_empty()
    }

    /// Whether any of them may not go everywhere.
    pub fn has_restricted(&self) -> bool {
        !self.restricted.is_empty()
    }

    pub fn insert(&mut self, item: Item) {
        if item.restriction == RestrictionId::NONE {
            self.free.insert(item.key);
        } else {
            self.restricted.insert(item.key);
            self.by_restriction.entry(item.restriction).or_default().insert(item.key);
        }
        self.by_age.insert((item.arrived, item.key.place));
    }

    pub fn remove(&mut self, item: Item) {
        if item.restriction == RestrictionId::NONE {
            self.free.remove(&item.key);
        } else {
            self.restricted.remove(&item.key);
            if let Some(keys) = self.by_restriction.get_mut(&item.restriction) {
                keys.remove(&item.key);
                if keys.is_empty() {
                    self.by_restriction.remove(&item.restriction);
                }
            }
        }
        self.by_age.remove(&(item.arrived, item.key.place));
    }

    /// Gives every request a new key; who waits stays the same.
    pub fn rekey(&mut self, keys: Keys) {
        // Collected as a whole, a set is sorted once and built without a search per key.
        let Keys { free, restricted } = keys;
        self.free = free.into_iter().collect();
        self.restricted = restricted.iter().map(|(_, key)| *key).collect();
        self.by_restriction.clear();
        for (id, key) in restricted {
            self.by_restriction.entry(id).or_default().insert(key);
        }
    }

    /// Who waits, in the order of keys.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        let (mut free, mut restricted) = (self.free.iter().copied().peekable(), self.restricted.iter().copied().peekable());
        std::iter::from_fn(move || match (free.peek(), restricted.peek()) {
            (Some(first), Some(second)) if second < first => restricted.next(),
            (Some(_), _) => free.next(),
            (None, _) => restricted.next(),
        })
    }

    /// Where those are that wait, in the order of keys.
    pub fn places(&self) -> Vec<Place> {
        self.keys().map(|key| key.place).collect()
    }

    /// Whether every request is in each of the sets it belongs to.
    pub fn is_consistent(&self) -> bool {
        let by_restriction: usize = self.by_restriction.values().map(BTreeSet::len).sum();
        self.free.len() + self.restricted.len() == self.by_age.len() && by_restriction == self.restricted.len()
    }

    /// Whose turn it is on the queue's own backend.
    pub fn next(&self, now: Time, aging: Aging, table: &Table) -> Option<Turn> {
        let first = match (self.free.first(), self.restricted.first()) {
            (Some(free), Some(restricted)) => free.min(restricted),
            (free, restricted) => free.or(restricted)?,
        };
        Some(turn(*first, self.aged(now, aging), table))
    }

    /// Whose turn it is for a sibling that wants to take one: the same, among those that may go there.
    pub fn next_for(&self, thief: BackendId, now: Time, aging: Aging, restrictions: &Restrictions, table: &Table) -> Option<Turn> {
        let allowed = |id: RestrictionId| !restrictions.get(id).bars(thief);
        let restricted = self.by_restriction.iter().filter(|(id, _)| allowed(**id)).filter_map(|(_, keys)| keys.first());
        let first = self.free.first().into_iter().chain(restricted).min()?;
        let aged = self.aged(now, aging).filter(|place| match table.get(place.slot()).stage {
            Stage::Waiting { restriction, .. } => allowed(restriction),
            Stage::Running { .. } => false,
        });
        Some(turn(*first, aged, table))
    }

    /// Counts a release.
    pub fn released(&mut self, aging: Aging, aged: bool) {
        let earned = self.credit + aging.share;
        self.credit = if aged { earned.saturating_sub(ONE_RELEASE) } else { earned.min(ONE_RELEASE - 1) };
    }

    /// How many are aged.
    pub fn aged_len(&self, now: Time, aging: Aging) -> usize {
        self.by_age.iter().take_while(|(arrived, _)| aging.is_aged(now, *arrived)).count()
    }

    /// The oldest, if it is aged and the aged FIFO may take a turn. The release at hand earns its share too.
    fn aged(&self, now: Time, aging: Aging) -> Option<Place> {
        let (arrived, place) = *self.by_age.first()?;
        (self.credit + aging.share >= ONE_RELEASE && aging.is_aged(now, arrived)).then_some(place)
    }
}

/// An aged request that is first by key too is released by key.
fn turn(first: Key, aged: Option<Place>, table: &Table) -> Turn {
    match aged.filter(|place| *place != first.place).map(|place| table.get(place.slot())) {
        Some(&Entry { place, stage: Stage::Waiting { phi, .. }, .. }) => Turn { key: Key { phi, place }, aged: true },
        _ => Turn { key: first, aged: false },
    }
}
