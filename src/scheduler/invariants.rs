//! What always holds, as predicates: debug assertions check the cheap ones after every event, property tests and the simulator all of them.

use std::collections::BTreeMap;

use super::Scheduler;
use super::backend::Backlog;
use super::event::{Action, BackendId, TenantId};
use super::membership::Sizes;
use super::overload::WaitingWork;
use super::shares::Service;
use super::table::{Resident, Stage};

/// What did not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error("{arrived} requests arrived, but {accounted} wait, run or have ended")]
    Conservation { arrived: u64, accounted: u64 },
    #[error("backend {} was given a request beyond its window of {window}: {in_flight} are in flight", backend.0)]
    Window { backend: BackendId, window: u32, in_flight: u32 },
    #[error("backend {} has room and a request waits that may go there", backend.0)]
    IdleSlot { backend: BackendId },
    #[error("the sums over {what} are off")]
    Sums { what: &'static str },
    #[error("what is kept of {what} is not so")]
    Kept { what: &'static str },
}

/// Everything below.
///
/// # Errors
/// The first predicate that does not hold.
pub fn all(scheduler: &Scheduler, actions: &[Action]) -> Result<(), Violation> {
    conservation(scheduler)?;
    windows(scheduler, actions)?;
    no_idle_slot(scheduler)?;
    sums(scheduler)?;
    kept(scheduler)
}

/// Every request that arrived waits, runs, or has ended in exactly one way.
///
/// # Errors
/// The two sides of the balance.
pub fn conservation(scheduler: &Scheduler) -> Result<(), Violation> {
    let counters = &scheduler.counters;
    let rejected: u64 = counters.rejected.iter().sum();
    let present = scheduler.expiries.len() + scheduler.running.len();
    let accounted = present as u64 + counters.finished + counters.cancelled + rejected;
    if counters.arrived == accounted { Ok(()) } else { Err(Violation::Conservation { arrived: counters.arrived, accounted }) }
}

/// No release went beyond a window, given the actions of the last event.
///
/// # Errors
/// The first backend that was given too much.
pub fn windows(scheduler: &Scheduler, actions: &[Action]) -> Result<(), Violation> {
    let released_to = |id: BackendId| actions.iter().any(|action| matches!(action, Action::Release { backend, .. } if *backend == id));
    for backend in &scheduler.backends {
        if backend.in_flight > backend.limit() && released_to(backend.id) {
            return Err(Violation::Window { backend: backend.id, window: backend.limit(), in_flight: backend.in_flight });
        }
    }
    Ok(())
}

/// No backend has room while a request waits that may go there. A request that does not fit a KV cache beside what runs waits its turn, and so does what is
/// behind it.
///
/// # Errors
/// The first backend that idles.
pub fn no_idle_slot(scheduler: &Scheduler) -> Result<(), Violation> {
    for (index, backend) in scheduler.backends.iter().enumerate() {
        if scheduler.own_turn(index).is_some() {
            return Err(Violation::IdleSlot { backend: backend.id });
        }
        if !backend.has_slot() || !backend.queue.is_empty() {
            continue;
        }
        let mut blocked = Vec::new();
        for entry in scheduler.table.iter() {
            let Stage::Waiting { restriction, .. } = entry.stage else { continue };
            if scheduler.restrictions.get(restriction).bars(backend.id) || blocked.contains(&entry.backend) {
                continue;
            }
            // Any one that fits is a violation unless its queue's own turn for this thief does not fit.
            let queue = &scheduler.backends[entry.backend as usize].queue;
            let turn = queue.next_for(backend.id, scheduler.now, scheduler.aging, &scheduler.restrictions, &scheduler.table);
            match turn {
                Some(turn) if !backend.has_kv_for(scheduler.table.get(turn.key.place.slot())) => blocked.push(entry.backend),
                _ => return Err(Violation::IdleSlot { backend: backend.id }),
            }
        }
    }
    Ok(())
}

/// Every sum that is kept is what adding up gives. Walks over everything.
///
/// # Errors
/// Which sum is off.
pub fn sums(scheduler: &Scheduler) -> Result<(), Violation> {
    let n = scheduler.backends.len();
    let (mut queued, mut running, mut resident) = (vec![Backlog::default(); n], vec![Backlog::default(); n], vec![Resident::default(); n]);
    let (mut waiting, mut in_flight) = (vec![0usize; n], vec![0u32; n]);
    let mut all = Backlog::default();
    let (mut bytes, mut work) = (0, WaitingWork::default());
    let mut tenants: BTreeMap<Option<TenantId>, (usize, Service)> = BTreeMap::new();
    for entry in scheduler.table.iter() {
        let index = entry.backend as usize;
        match entry.stage {
            Stage::Waiting { .. } => {
                queued[index].add(entry.uncached(), entry.expected);
                all.add(entry.uncached(), entry.expected);
                waiting[index] += 1;
                bytes += u64::from(entry.bytes);
                work.add(entry);
                let (requests, sum) = tenants.entry(entry.tenant()).or_default();
                (*requests, *sum) = (*requests + 1, sum.saturating_add(entry.reckoned()));
            }
            Stage::Running { produced, remaining, .. } => {
                running[index].add(if produced == 0 { entry.uncached() } else { 0 }, remaining);
                resident[index].add(entry.resident());
                in_flight[index] += 1;
            }
        }
    }
    let each = |what, holds: &dyn Fn(usize) -> bool| if (0..n).all(holds) { Ok(()) } else { Err(Violation::Sums { what }) };
    each("queued work", &|index| scheduler.backends[index].queued == queued[index])?;
    each("all queued work", &|_| scheduler.queued == all)?;
    each("running work", &|index| scheduler.backends[index].running == running[index])?;
    each("resident tokens", &|index| scheduler.backends[index].resident == resident[index])?;
    each("queues", &|index| scheduler.backends[index].queue.len() == waiting[index] && scheduler.backends[index].queue.is_consistent())?;
    each("slots", &|index| scheduler.backends[index].in_flight == in_flight[index])?;
    if !scheduler.shares.waiting().eq(tenants.into_iter().map(|(tenant, (requests, work))| (tenant, requests, work))) {
        return Err(Violation::Sums { what: "what waits by tenant" });
    }
    if scheduler.waiting_bytes != bytes || scheduler.waiting_work != work || scheduler.expiries.len() != waiting.iter().sum::<usize>() {
        return Err(Violation::Sums { what: "what waits" });
    }
    Ok(())
}

/// Everything that is kept so that it need not be looked for is what looking gives.
///
/// # Errors
/// What is not.
pub fn kept(scheduler: &Scheduler) -> Result<(), Violation> {
    let (backends, shares) = (&scheduler.backends, &scheduler.shares);
    // As long as one tenant waits alone no queue knows what it has had lately.
    let known = |served: (Service, _)| shares.services().any(|has| has == served || has.1 == served.1 && !shares.compete());
    let checks = [
        ("the sizes of backends", scheduler.sizes == Sizes::of(backends)),
        ("what backends are worth", scheduler.parallel == scheduler.worth()),
        ("who has to be looked at", scheduler.attention.is_complete(backends, scheduler.waiting() > 0)),
        ("what tenants have had", shares.is_consistent()),
        ("what tenants have had in queues", backends.iter().all(|backend| backend.queue.services().all(known))),
    ];
    checks.into_iter().try_for_each(|(what, holds)| if holds { Ok(()) } else { Err(Violation::Kept { what }) })
}

#[cfg(test)]
mod tests {
    use super::super::release::Attention;
    use super::super::shares::Shares;
    use super::super::speed::SpeedLearner;
    use super::super::tests::{backend, pool, request};
    use super::super::window::Window;
    use super::super::{Event, Request, Slots, Standing, Time};
    use super::*;

    /// Two backends of one slot, one request on each and one that waits.
    fn sound() -> (Scheduler, Vec<Action>) {
        let (mut scheduler, mut actions) = (pool(1), Vec::new());
        backend(&mut scheduler, 1, 1, Standing::Healthy);
        for id in 1..=3 {
            scheduler.handle(Time::from_micros(1), Event::Arrived(request(id, 1)), &mut actions);
        }
        assert_eq!(all(&scheduler, &actions), Ok(()));
        (scheduler, actions)
    }

    fn broken(change: impl FnOnce(&mut Scheduler)) -> Violation {
        let (mut scheduler, actions) = sound();
        change(&mut scheduler);
        all(&scheduler, &actions).unwrap_err()
    }

    /// Predicates that cannot fail would check nothing.
    #[test]
    fn whatever_is_broken_is_found() {
        assert_eq!(broken(|scheduler| scheduler.counters.arrived += 1), Violation::Conservation { arrived: 4, accounted: 3 });
        assert_eq!(broken(|scheduler| scheduler.counters.cancelled += 1), Violation::Conservation { arrived: 3, accounted: 4 });
        let beyond = broken(|scheduler| scheduler.backends[1].in_flight += 1);
        assert_eq!(beyond, Violation::Window { backend: BackendId(1), window: 1, in_flight: 2 });
        let idles = broken(|scheduler| scheduler.backends[0].in_flight -= 1);
        assert!(matches!(idles, Violation::IdleSlot { .. }), "{idles:?}");
        type Change = fn(&mut Scheduler);
        let changes: [(&str, Change); 9] = [
            ("queued work", |scheduler| scheduler.backends.iter_mut().for_each(|backend| backend.queued.add(1, 1))),
            ("all queued work", |scheduler| scheduler.queued.add(1, 0)),
            ("running work", |scheduler| scheduler.backends[0].running.add(0, 1)),
            ("resident tokens", |scheduler| {
                let resident = scheduler.table.iter().find(|entry| matches!(entry.stage, Stage::Running { .. })).unwrap().resident();
                scheduler.backends[0].resident.add(resident);
            }),
            ("queues", |scheduler| {
                let waits = scheduler.backends.iter_mut().find(|backend| !backend.queue.is_empty()).unwrap();
                waits.queue.rekey(Default::default());
            }),
            ("what waits by tenant", |scheduler| scheduler.shares.forget_work()),
            ("what waits", |scheduler| scheduler.waiting_bytes += 1),
            ("what waits", |scheduler| scheduler.waiting_work = WaitingWork::default()),
            ("slots", |scheduler| {
                // Beyond its window, but nothing was released to it by the last event.
                scheduler.backends[0].in_flight += 1;
            }),
        ];
        for (what, change) in changes {
            let (mut scheduler, _) = sound();
            change(&mut scheduler);
            assert_eq!(sums(&scheduler), Err(Violation::Sums { what }));
        }
        let changes: [(&str, Change); 10] = [
            ("the sizes of backends", |scheduler| scheduler.backends[1].state.kv_tokens = Some(1000)),
            ("what backends are worth", |scheduler| scheduler.backends[1].state.standing = Standing::Draining),
            ("what backends are worth", |scheduler| scheduler.backends[1].speed = scheduler.backends[1].speed.scaled(2.0)),
            // A window that grew, one that was not told that it is full, a speed that is not measured, and one that is measured for longer than it was said.
            ("who has to be looked at", |scheduler| scheduler.backends[1].window = Window::new(Slots::Fixed(2))),
            ("who has to be looked at", |scheduler| scheduler.backends[1].window = Window::new(Slots::Fixed(1))),
            ("who has to be looked at", |scheduler| scheduler.backends[0].learner = SpeedLearner::default()),
            ("who has to be looked at", |scheduler| {
                scheduler.backends[0].learner = SpeedLearner::default();
                scheduler.backends[0].learner.saturated(Time::ZERO, true);
            }),
            ("who has to be looked at", |scheduler| scheduler.attention = Attention::default()),
            ("what tenants have had in queues", |scheduler| scheduler.shares = Shares::default()),
            ("what tenants have had in queues", |scheduler| {
                let request = Request { tenant: Some(TenantId(1)), ..request(4, 1) };
                scheduler.handle(Time::from_micros(1), Event::Arrived(request), &mut Vec::new());
                assert_eq!(kept(scheduler), Ok(()));
                scheduler.shares.released(None, 1.0);
            }),
        ];
        for (what, change) in changes {
            let (mut scheduler, _) = sound();
            change(&mut scheduler);
            assert_eq!(kept(&scheduler), Err(Violation::Kept { what }));
        }
    }
}
