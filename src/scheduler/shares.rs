//! What each tenant has had of the pool, so that whoever floods the queue waits behind itself and not in front of others.
//!
//! One virtual counter per tenant, as in VTC (Sheng et al., OSDI 2024, arXiv 2401.00588): work served, divided by weight; of those that wait, whoever had least is
//! due. Here the counter is moved by the expected work when a request is released and set right when it ends, and a tenant may be some seconds ahead before others
//! go first: as long as nobody is, keys alone decide.

use std::collections::{BTreeMap, BTreeSet};

use super::event::TenantId;
use super::score::Weight;
use super::table::Entry;

/// How many times what is left of a queue one tenant may have of it.
const PART: u64 = 9;

/// Work that was served, by weight: nanoseconds of capacity of one backend. Only differences have a meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Service(u64);

impl Service {
    /// More than anybody ever gets.
    pub const MAX: Service = Service(u64::MAX);

    /// At least nothing, and at most a century.
    pub fn of(seconds: f64) -> Self {
        Service((seconds.clamp(0.0, 3e9) * 1e9) as u64)
    }

    pub fn saturating_add(self, other: Service) -> Self {
        Service(self.0.saturating_add(other.0))
    }

    pub fn saturating_sub(self, other: Service) -> Self {
        Service(self.0.saturating_sub(other.0))
    }

    pub fn as_seconds(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

/// All tenants of one pool. Requests without a tenant count as one.
#[derive(Debug, Default)]
pub(super) struct Shares {
    accounts: BTreeMap<Option<TenantId>, Account>,
    /// What the one that had least has had: never falls. Whoever comes back starts here, so that time without requests is no store of service.
    floor: Service,
    /// Who has requests that wait, by what they have had.
    by_service: BTreeSet<(Service, Option<TenantId>)>,
    /// Their weights, in millionths.
    weights: u64,
}

#[derive(Clone, Copy, Debug)]
struct Account {
    service: Service,
    weight: Weight,
    /// Requests that wait.
    waiting: usize,
    /// Bytes of their bodies.
    bytes: u64,
    /// Expected work of those, not by weight.
    work: Service,
    /// Requests that run.
    running: usize,
}

impl Account {
    /// Its tenant has now had this much.
    fn set(&mut self, service: Service, tenant: Option<TenantId>, by_service: &mut BTreeSet<(Service, Option<TenantId>)>) -> Service {
        let before = std::mem::replace(&mut self.service, service);
        if self.waiting > 0 && before != service {
            // In this order: a set that becomes empty gives its memory back.
            by_service.insert((service, tenant));
            by_service.remove(&(before, tenant));
        }
        service
    }
}

impl Shares {
    /// A request joins a queue: tells what its tenant has had.
    pub fn joined(&mut self, tenant: Option<TenantId>, entry: &Entry) -> Service {
        let account = account(&mut self.accounts, tenant, self.floor);
        if account.waiting == 0 {
            let (least, weight) = (self.by_service.first().map(|(service, _)| *service), entry.share());
            account.service = account.service.max(self.floor).max(least.unwrap_or_default());
            account.weight = weight;
            self.floor = self.floor.max(least.unwrap_or(account.service));
            self.weights += millionths(weight);
            self.by_service.insert((account.service, tenant));
        }
        account.waiting += 1;
        account.bytes += u64::from(entry.bytes);
        account.work = account.work.saturating_add(entry.reckoned());
        account.service
    }

    /// One that waited does not any more.
    pub fn left(&mut self, tenant: Option<TenantId>, entry: &Entry) {
        let account = account(&mut self.accounts, tenant, self.floor);
        account.waiting -= 1;
        account.bytes -= u64::from(entry.bytes);
        account.work = account.work.saturating_sub(entry.reckoned());
        if account.waiting == 0 {
            self.weights -= millionths(account.weight);
            self.by_service.remove(&(account.service, tenant));
        }
    }

    /// One is released, and will probably be this much work, in seconds: tells what its tenant has had with it.
    pub fn released(&mut self, tenant: Option<TenantId>, expected: f64) -> Service {
        let account = account(&mut self.accounts, tenant, self.floor);
        account.running += 1;
        let service = account.service.saturating_add(Service::of(expected / account.weight.get()));
        account.set(service, tenant, &mut self.by_service)
    }

    /// One has ended and was this much work instead: tells what its tenant has had. What was expected too much is given back down to the floor: below it, whoever
    /// came meanwhile and started there would stand back for work that was never done.
    pub fn settled(&mut self, tenant: Option<TenantId>, expected: f64, actual: f64) -> Service {
        let account = account(&mut self.accounts, tenant, self.floor);
        account.running -= 1;
        let part = |seconds: f64| Service::of(seconds / account.weight.get());
        let service = account.service.saturating_add(part(actual)).saturating_sub(part(expected)).max(self.floor);
        account.set(service, tenant, &mut self.by_service)
    }

    /// Forgets the work of what waits, which is about to be [reckoned](Shares::reckon) anew.
    pub fn forget_work(&mut self) {
        self.accounts.values_mut().for_each(|account| account.work = Service::default());
    }

    /// One that waits is this much work.
    pub fn reckon(&mut self, tenant: Option<TenantId>, work: Service) {
        let account = account(&mut self.accounts, tenant, self.floor);
        account.work = account.work.saturating_add(work);
    }

    /// Whether more than one tenant waits.
    pub fn compete(&self) -> bool {
        self.by_service.len() > 1
    }

    /// The only tenant that waits, and what it has had.
    pub fn alone(&self) -> Option<(Service, Option<TenantId>)> {
        self.by_service.first().copied().filter(|_| !self.compete())
    }

    /// Forgets whoever would start at the floor anyway.
    pub fn prune(&mut self) {
        let floor = self.floor;
        self.accounts.retain(|_, account| account.waiting + account.running > 0 || account.service > floor);
    }

    /// Work, in seconds, that is done before all that a tenant has waiting, at the rate of its share; `None` while nobody else waits.
    pub fn before(&self, tenant: Option<TenantId>, weight: Weight) -> Option<f64> {
        let own = self.accounts.get(&tenant).filter(|account| account.waiting > 0);
        let part = millionths(own.map_or(weight, |account| account.weight));
        let all = if own.is_some() { self.weights } else { self.weights + part };
        let work = own.map_or(0.0, |account| account.work.as_seconds());
        (all > part).then(|| work * all as f64 / part as f64)
    }

    /// Whether a tenant has so many requests waiting, or so many bytes of them, that what is left of a queue is for others: `room` is what the pool's limits leave of
    /// both. A bound that follows what is free (Choudhury and Hahne, IEEE/ACM ToN 1998): one tenant gets nine tenths of an empty queue.
    pub fn fills_its_part(&self, tenant: TenantId, room: (usize, u64)) -> bool {
        let Some(account) = self.accounts.get(&Some(tenant)).filter(|account| account.waiting > 0) else { return false };
        account.waiting >= room.0.saturating_mul(PART as usize) || account.bytes >= room.1.saturating_mul(PART)
    }

    /// Whether what each tenant that waits has had is what its account says.
    pub fn is_consistent(&self) -> bool {
        let waiting = self.accounts.iter().filter(|(_, account)| account.waiting > 0);
        self.by_service == waiting.map(|(tenant, account)| (account.service, *tenant)).collect()
    }

    /// What each tenant that waits has had.
    pub fn services(&self) -> impl Iterator<Item = (Service, Option<TenantId>)> {
        self.by_service.iter().copied()
    }

    /// How many requests of a tenant wait, and their expected work in seconds.
    pub fn waiting(&self) -> impl Iterator<Item = (Option<TenantId>, usize, Service)> {
        self.accounts.iter().filter(|(_, account)| account.waiting > 0).map(|(tenant, account)| (*tenant, account.waiting, account.work))
    }
}

fn account(accounts: &mut BTreeMap<Option<TenantId>, Account>, tenant: Option<TenantId>, floor: Service) -> &mut Account {
    accounts.entry(tenant).or_insert(Account { service: floor, weight: Weight::ONE, waiting: 0, bytes: 0, work: Service::default(), running: 0 })
}

/// Whole numbers, so that what was added can be subtracted.
fn millionths(weight: Weight) -> u64 {
    (weight.get().min(1e6) * 1e6).ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::super::queue::Place;
    use super::super::tests::request;
    use super::*;

    #[test]
    fn who_had_least_is_first_and_only_of_those_that_wait() {
        let (mut shares, entry) = (Shares::default(), Entry::new(&request(1, 1), Place::new(0, 0)));
        let [one, other] = [1, 2].map(|id| Some(TenantId(id)));
        shares.joined(one, &entry);
        assert_eq!((shares.alone(), shares.compete()), (Some((Service(0), one)), false));
        shares.joined(other, &entry);
        shares.joined(one, &entry);
        shares.left(one, &entry);
        let service = shares.released(one, 2.0);
        assert_eq!(shares.services().collect::<Vec<_>>(), [(Service(0), other), (service, one)]);
        assert!(shares.compete() && shares.alone().is_none() && shares.is_consistent());
        shares.left(other, &entry);
        let service = shares.settled(one, 2.0, 1.0);
        assert_eq!((service, shares.alone()), (Service::of(1.0), Some((service, one))));
        shares.by_service.clear();
        assert!(!shares.is_consistent());
    }
}
