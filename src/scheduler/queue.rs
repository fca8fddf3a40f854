//! One backend's priority queue: ordered by key among the tenants that are not ahead of their share, with an aged FIFO beside it, open to siblings that steal.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, btree_map};
use std::time::Duration;

use super::event::{BackendId, TenantId};
use super::restrictions::{RestrictionId, Restrictions};
use super::shares::Service;
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
    pub lane: Lane,
}

/// Requests that only differ in their keys: of one tenant, and under the same restriction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lane {
    pub tenant: Option<TenantId>,
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
pub(super) struct Keys(BTreeMap<Lane, Vec<Key>>);

impl Keys {
    pub fn push(&mut self, key: Key, lane: Lane) {
        self.0.entry(lane).or_default().push(key);
    }
}

/// The requests that wait for one backend.
#[derive(Debug, Default)]
pub(super) struct Queue {
    lanes: BTreeMap<Lane, BTreeSet<Key>>,
    /// The first of each lane whose tenant is not ahead of its share.
    heads: BTreeSet<(Key, Lane)>,
    /// Who waits here.
    tenants: BTreeMap<Option<TenantId>, Waiting>,
    /// The same, by what they have had.
    by_service: BTreeSet<(Service, Option<TenantId>)>,
    /// Above this a tenant is ahead of its share: what the one that had least has had, and the lead.
    most: Service,
    lead: Service,
    /// The oldest of each tenant that is not ahead of its share.
    oldest: BTreeSet<(Age, Option<TenantId>)>,
    len: usize,
    /// How many of them may not go everywhere.
    restricted: usize,
    /// What the aged FIFO may still take, earned release by release; always less than one release, so that a long time without aged requests is no store of turns.
    credit: u32,
}

/// Smaller is older.
type Age = (Time, Place);

/// One tenant's part of a queue.
#[derive(Debug)]
struct Waiting {
    by_age: BTreeSet<Age>,
    service: Service,
}

impl Queue {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether any of them may not go everywhere.
    pub fn has_restricted(&self) -> bool {
        self.restricted > 0
    }

    /// What each tenant that waits here has had, as far as it was told.
    pub fn services(&self) -> impl Iterator<Item = (Service, Option<TenantId>)> {
        self.by_service.iter().copied()
    }

    /// `service` is what its tenant has had; only the first of a tenant tells it, later changes come through [`Queue::served`].
    pub fn insert(&mut self, item: Item, service: Service) {
        let Item { key, arrived, lane } = item;
        if let btree_map::Entry::Vacant(entry) = self.tenants.entry(lane.tenant) {
            entry.insert(Waiting { by_age: BTreeSet::new(), service });
            self.by_service.insert((service, lane.tenant));
            self.measure();
        }
        let shown = !self.is_ahead(lane.tenant);
        if let Some(waiting) = self.tenants.get_mut(&lane.tenant) {
            let first = waiting.by_age.first().copied();
            waiting.by_age.insert((arrived, key.place));
            replace(&mut self.oldest, shown, lane.tenant, first, waiting.by_age.first().copied());
        }
        let keys = self.lanes.entry(lane).or_default();
        let first = keys.first().copied();
        keys.insert(key);
        replace(&mut self.heads, shown, lane, first, keys.first().copied());
        self.restricted += usize::from(lane.restriction != RestrictionId::NONE);
        self.len += 1;
    }

    pub fn remove(&mut self, item: Item) {
        let Item { key, arrived, lane } = item;
        // Without its lane it is not here.
        let Some(keys) = self.lanes.get_mut(&lane) else { return };
        let first = keys.first().copied();
        keys.remove(&key);
        let next = keys.first().copied();
        if next.is_none() {
            self.lanes.remove(&lane);
        }
        let shown = !self.is_ahead(lane.tenant);
        replace(&mut self.heads, shown, lane, first, next);
        if let btree_map::Entry::Occupied(mut entry) = self.tenants.entry(lane.tenant) {
            let waiting = entry.get_mut();
            let first = waiting.by_age.first().copied();
            waiting.by_age.remove(&(arrived, key.place));
            replace(&mut self.oldest, shown, lane.tenant, first, waiting.by_age.first().copied());
            if waiting.by_age.is_empty() {
                let (tenant, waiting) = entry.remove_entry();
                self.by_service.remove(&(waiting.service, tenant));
                self.measure();
            }
        }
        self.restricted -= usize::from(lane.restriction != RestrictionId::NONE);
        self.len -= 1;
    }

    /// A tenant has now had this much.
    pub fn served(&mut self, tenant: Option<TenantId>, service: Service) {
        let Some(waiting) = self.tenants.get_mut(&tenant) else { return };
        let before = std::mem::replace(&mut waiting.service, service);
        if before == service {
            return;
        }
        // In this order: a set that becomes empty gives its memory back.
        self.by_service.insert((service, tenant));
        self.by_service.remove(&(before, tenant));
        let was_ahead = before > self.most;
        self.measure_others(Some(tenant));
        if was_ahead != (service > self.most) {
            self.show(tenant, was_ahead);
        }
    }

    /// How far ahead of the one that had least a tenant may be.
    pub fn set_lead(&mut self, lead: Service) {
        self.lead = lead;
        self.measure();
    }

    pub fn is_ahead(&self, tenant: Option<TenantId>) -> bool {
        self.tenants.get(&tenant).is_some_and(|waiting| waiting.service > self.most)
    }

    fn measure(&mut self) {
        self.measure_others(None);
    }

    /// Follows the one that had least: whoever was ahead and is not any more stands with the others again, and the other way round.
    fn measure_others(&mut self, but: Option<Option<TenantId>>) {
        let least = self.by_service.first().map(|(service, _)| *service);
        let most = least.unwrap_or_default().saturating_add(self.lead);
        let before = std::mem::replace(&mut self.most, most);
        let (low, high) = (before.min(most), before.max(most));
        if low == high {
            return;
        }
        let crossed = self.by_service.range((low, None)..).skip_while(|(service, _)| *service == low).take_while(|(service, _)| *service <= high);
        let crossed: Vec<_> = crossed.map(|(_, tenant)| *tenant).filter(|tenant| Some(*tenant) != but).collect();
        for tenant in crossed {
            self.show(tenant, most > before);
        }
    }

    /// Puts a tenant's lanes among the heads, and its oldest request among the oldest, or takes them out.
    fn show(&mut self, tenant: Option<TenantId>, shown: bool) {
        let oldest = self.tenants.get(&tenant).and_then(|waiting| waiting.by_age.first());
        if let Some(oldest) = oldest {
            if shown {
                self.oldest.insert((*oldest, tenant));
            } else {
                self.oldest.remove(&(*oldest, tenant));
            }
        }
        let lane = |restriction| Lane { tenant, restriction };
        for (lane, keys) in self.lanes.range(lane(RestrictionId::NONE)..=lane(RestrictionId::LAST)) {
            let Some(first) = keys.first() else { continue };
            if shown {
                self.heads.insert((*first, *lane));
            } else {
                self.heads.remove(&(*first, *lane));
            }
        }
    }

    /// Gives every request a new key; who waits stays the same.
    pub fn rekey(&mut self, keys: Keys) {
        // Collected as a whole, a set is sorted once and built without a search per key.
        self.lanes = keys.0.into_iter().map(|(lane, keys)| (lane, keys.into_iter().collect())).collect();
        self.heads = self.expected_heads();
    }

    /// Who waits, in the order of keys; tenants that are ahead of their share last.
    pub fn keys(&self) -> impl Iterator<Item = Key> {
        let lanes = |ahead| self.lanes.iter().filter(move |(lane, _)| self.is_ahead(lane.tenant) == ahead).map(|(_, keys)| keys);
        merged(lanes(false)).chain(merged(lanes(true)))
    }

    /// Where those are that wait, in the same order.
    pub fn places(&self) -> Vec<Place> {
        self.keys().map(|key| key.place).collect()
    }

    /// Whether every request is in each of the sets it belongs to.
    pub fn is_consistent(&self) -> bool {
        let requests = |tenant| self.lanes.iter().filter(|(lane, _)| lane.tenant == tenant).map(|(_, keys)| keys.len()).sum::<usize>();
        let restricted = self.lanes.iter().filter(|(lane, _)| lane.restriction != RestrictionId::NONE).map(|(_, keys)| keys.len()).sum::<usize>();
        self.lanes.values().map(BTreeSet::len).sum::<usize>() == self.len
            && self.restricted == restricted
            && self.tenants.iter().all(|(tenant, waiting)| waiting.by_age.len() == requests(*tenant))
            && self.by_service == self.tenants.iter().map(|(tenant, waiting)| (waiting.service, *tenant)).collect()
            && self.heads == self.expected_heads()
            && self.oldest == self.expected_oldest()
    }

    fn expected_heads(&self) -> BTreeSet<(Key, Lane)> {
        let here = self.lanes.iter().filter(|(lane, _)| !self.is_ahead(lane.tenant));
        here.filter_map(|(lane, keys)| Some((*keys.first()?, *lane))).collect()
    }

    fn expected_oldest(&self) -> BTreeSet<(Age, Option<TenantId>)> {
        let here = self.tenants.iter().filter(|(tenant, _)| !self.is_ahead(**tenant));
        here.filter_map(|(tenant, waiting)| Some((*waiting.by_age.first()?, *tenant))).collect()
    }

    /// Whose turn it is on the queue's own backend.
    pub fn next(&self, now: Time, aging: Aging, table: &Table) -> Option<Turn> {
        let (first, _) = self.heads.first()?;
        Some(turn(*first, self.aged(now, aging), table))
    }

    /// Whose turn it is for a sibling that wants to take one: the same, among those that may go there; tenants that are ahead too, where nobody else may.
    pub fn next_for(&self, thief: BackendId, now: Time, aging: Aging, restrictions: &Restrictions, table: &Table) -> Option<Turn> {
        let allowed = |lane: &Lane| !restrictions.get(lane.restriction).bars(thief);
        let ahead = || self.lanes.iter().filter(|(lane, _)| allowed(lane)).filter_map(|(_, keys)| keys.first()).min();
        let first = self.heads.iter().find(|(_, lane)| allowed(lane)).map(|(key, _)| key).or_else(ahead)?;
        let aged = self.aged(now, aging).filter(|place| match table.get(place.slot()).stage {
            Stage::Waiting { restriction, .. } => !restrictions.get(restriction).bars(thief),
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
        let aged = |waiting: &Waiting| waiting.by_age.iter().take_while(|(arrived, _)| aging.is_aged(now, *arrived)).count();
        self.tenants.values().map(aged).sum()
    }

    /// The oldest of the tenants that are not ahead of their share, if it is aged and the aged FIFO may take a turn. The release at hand earns its share too.
    fn aged(&self, now: Time, aging: Aging) -> Option<Place> {
        let ((arrived, place), _) = *self.oldest.first()?;
        (self.credit + aging.share >= ONE_RELEASE && aging.is_aged(now, arrived)).then_some(place)
    }
}

/// The first of a part of the queue has changed, or not; `shown` is whether it is among `firsts`.
fn replace<First: Ord + Copy, Part: Ord + Copy>(
    firsts: &mut BTreeSet<(First, Part)>,
    shown: bool,
    part: Part,
    before: Option<First>,
    after: Option<First>,
) {
    if !shown || before == after {
        return;
    }
    // In this order: a set that becomes empty gives its memory back.
    if let Some(after) = after {
        firsts.insert((after, part));
    }
    if let Some(before) = before {
        firsts.remove(&(before, part));
    }
}

/// The keys of several sets in one order.
fn merged<'a>(sets: impl Iterator<Item = &'a BTreeSet<Key>>) -> impl Iterator<Item = Key> {
    let mut rests: Vec<_> = sets.map(BTreeSet::iter).collect();
    let mut firsts: BinaryHeap<_> = rests.iter_mut().enumerate().filter_map(|(index, rest)| Some(Reverse((*rest.next()?, index)))).collect();
    std::iter::from_fn(move || {
        let Reverse((key, index)) = firsts.pop()?;
        firsts.extend(rests[index].next().map(|next| Reverse((*next, index))));
        Some(key)
    })
}

/// An aged request that is first by key too is released by key.
fn turn(first: Key, aged: Option<Place>, table: &Table) -> Turn {
    match aged.filter(|place| *place != first.place).map(|place| table.get(place.slot())) {
        Some(&Entry { place, stage: Stage::Waiting { phi, .. }, .. }) => Turn { key: Key { phi, place }, aged: true },
        _ => Turn { key: first, aged: false },
    }
}
