//! What is checked after every event: the scheduler's own invariants, and an account of its promises that is kept from outside.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;

use crate::scheduler::invariants::{self, Violation};
use crate::scheduler::{
    Action, BackendId, Event, Explanation, Facts, Mode, Order, Policy, PoolView, Request, RequestId, Scheduler, Standing, TenantId, Time, Weight,
};

/// How many events before the last one an error shows.
const HISTORY: usize = 24;

/// Something that must always hold did not.
#[derive(Clone, Debug, thiserror::Error)]
pub struct Broken {
    /// When.
    pub at: Time,
    pub wrong: Wrong,
    /// The last events, oldest first, as far as they were kept.
    pub history: Vec<String>,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after {:.6} s: {}", self.at.as_secs_f64(), self.wrong)?;
        if !self.history.is_empty() {
            write!(f, "\nthe last events:\n  {}", self.history.join("\n  "))?;
        }
        Ok(())
    }
}

/// What did not hold.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Wrong {
    #[error("{0}")]
    Invariant(#[from] Violation),
    #[error("{0:?} was released or turned away, but does not wait")]
    NotWaiting(RequestId),
    #[error("{0:?} went to {1:?}, which takes no requests")]
    TakesNone(RequestId, BackendId),
    #[error("{0:?} went to {1:?}, which it had been sent to before")]
    TriedBefore(RequestId, BackendId),
    #[error("{0:?} waits past its deadline")]
    PastDeadline(RequestId),
    #[error("{0:?} went before {1:?}, whose key in the same queue is smaller")]
    OutOfOrder(RequestId, RequestId),
    #[error("{0:?} overtook {1:?} of the same queue, which had come {2} s before: the bound is {3} s")]
    Overtook(RequestId, RequestId, f64, f64),
    #[error("{0:?} was released by age, but {1:?} of the same queue is older")]
    NotOldest(RequestId, RequestId),
    #[error("of the last {1} releases from the queue of {0:?} {2} were by age, more than the share of {3}")]
    AgedShare(BackendId, usize, usize, f64),
    #[error("an event about something unknown had an effect")]
    Effect,
    #[error("the deadline {0:?} is still there after the tick")]
    BusyLoop(Time),
    #[error("{waiting} wait and {in_flight} run in the scheduler, but {known_waiting} and {known_in_flight} by its own actions")]
    View { waiting: usize, in_flight: u32, known_waiting: usize, known_in_flight: usize },
    #[error("nothing happens any more, and {open} requests have not ended")]
    Stuck { open: usize },
    #[error("request {0} ended twice")]
    EndedTwice(u32),
}

/// One request as the account knows it.
#[derive(Clone, Debug)]
struct Known {
    arrived: Time,
    expires: Time,
    weight: Weight,
    tenant: Option<TenantId>,
    excluded: Vec<BackendId>,
}

/// How things stood before an event.
pub(super) struct Before {
    homes: BTreeMap<RequestId, Explanation>,
    /// Whether the event moves requests between queues.
    moves: bool,
    /// How the pool looked before an event that may have no effect. What time alone brings about has happened by then.
    unknown: Option<Box<PoolView>>,
}

/// A release, and who it was.
struct Released {
    id: RequestId,
    known: Known,
    backend: BackendId,
    facts: Facts,
}

/// The account.
#[derive(Debug)]
pub(super) struct Check {
    waiting: BTreeMap<RequestId, Known>,
    running: BTreeMap<RequestId, BackendId>,
    standings: BTreeMap<BackendId, Standing>,
    order: Order,
    share: f64,
    /// How often keys had been rebuilt after the last event.
    rebuilds: u64,
    /// By the backend whose queue they came from: whether each of the last four releases was by age.
    turns: BTreeMap<BackendId, VecDeque<bool>>,
    history: VecDeque<(Time, Event)>,
    /// See [`Run::reached`](super::Run::reached).
    reached: f64,
}

impl Check {
    pub fn new(policy: &Policy) -> Self {
        Check {
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            standings: BTreeMap::new(),
            order: policy.order(),
            share: policy.aging_share(),
            rebuilds: 0,
            turns: BTreeMap::new(),
            history: VecDeque::new(),
            reached: 0.0,
        }
    }

    /// See [`Run::reached`](super::Run::reached).
    pub fn reached(&self) -> f64 {
        self.reached
    }

    /// The last events, for an error.
    pub fn history(&self) -> Vec<String> {
        self.history.iter().map(|(at, event)| format!("{:.6} {event:?}", at.as_secs_f64())).collect()
    }

    /// Whether an event is about something that the scheduler cannot know, so that it may have no effect.
    pub fn is_unknown(&self, event: &Event) -> bool {
        match event {
            Event::Cancelled(id) => !self.waiting.contains_key(id),
            Event::Progress(id, _) | Event::Finished(id, _) => !self.running.contains_key(id),
            Event::LoadReported(id, _) => !self.standings.contains_key(id),
            Event::Arrived(_) | Event::BackendChanged(..) | Event::PolicyChanged(_) | Event::LimitsChanged(_) | Event::DrainStarted | Event::Tick => {
                false
            }
        }
    }

    pub fn before(&mut self, now: Time, scheduler: &Scheduler, event: &Event) -> Before {
        if self.history.len() >= HISTORY {
            self.history.pop_front();
        }
        self.history.push_back((now, event.clone()));
        let homes = self.waiting.keys().filter_map(|id| Some((*id, scheduler.explain(*id)?))).collect();
        let mut moves = false;
        let unknown = self.is_unknown(event).then(|| Box::new(scheduler.view()));
        match event {
            Event::Arrived(request) => {
                let Request { arrived, expires, weight, tenant, .. } = *request;
                let known = Known { arrived, expires, weight, tenant, excluded: request.excluded.clone() };
                self.waiting.insert(request.id, known);
            }
            Event::Cancelled(id) => drop(self.waiting.remove(id)),
            Event::Finished(id, _) => drop(self.running.remove(id)),
            Event::BackendChanged(id, state) => {
                moves = true;
                self.turns.clear();
                self.standings.insert(*id, state.standing);
            }
            Event::PolicyChanged(policy) => {
                (self.order, self.share) = (policy.order(), policy.aging_share());
                self.turns.clear();
            }
            Event::Progress(..) | Event::LoadReported(..) | Event::LimitsChanged(_) | Event::DrainStarted | Event::Tick => {}
        }
        Before { homes, moves, unknown }
    }

    pub fn after(&mut self, now: Time, scheduler: &Scheduler, before: &Before, actions: &[Action]) -> Result<(), Wrong> {
        invariants::all(scheduler, actions)?;
        let view = scheduler.view();
        if before.unknown.as_ref().is_some_and(|old| !actions.is_empty() || **old != view) {
            return Err(Wrong::Effect);
        }
        let mut out = Vec::new();
        for action in actions {
            match *action {
                Action::Release { request, backend, facts } => {
                    let known = self.waiting.remove(&request).ok_or(Wrong::NotWaiting(request))?;
                    out.push(Released { id: request, known, backend, facts });
                }
                Action::Reject { request, .. } => drop(self.waiting.remove(&request).ok_or(Wrong::NotWaiting(request))?),
            }
        }
        // Once all are out: those that are left show who was passed over.
        let same_keys = view.counters.rebuilds == self.rebuilds;
        self.rebuilds = view.counters.rebuilds;
        for released in &out {
            self.allowed(now, released)?;
            self.in_its_share(released, before)?;
            if !before.moves && !released.facts.stolen {
                self.passed_over(released, before, same_keys, scheduler, &view)?;
            }
        }
        if let Some((id, _)) = self.waiting.iter().find(|(_, known)| known.expires <= now) {
            return Err(Wrong::PastDeadline(*id));
        }
        if view.waiting != self.waiting.len() || view.in_flight as usize != self.running.len() {
            let (waiting, in_flight) = (view.waiting, view.in_flight);
            return Err(Wrong::View { waiting, in_flight, known_waiting: self.waiting.len(), known_in_flight: self.running.len() });
        }
        Ok(())
    }

    /// Whether it may go there, now.
    fn allowed(&mut self, now: Time, released: &Released) -> Result<(), Wrong> {
        let Released { id, known, backend, .. } = released;
        if !matches!(self.standings.get(backend), Some(Standing::Healthy | Standing::Probing)) {
            return Err(Wrong::TakesNone(*id, *backend));
        }
        if known.excluded.contains(backend) {
            return Err(Wrong::TriedBefore(*id, *backend));
        }
        if known.expires <= now {
            return Err(Wrong::PastDeadline(*id));
        }
        self.running.insert(*id, *backend);
        Ok(())
    }

    /// Of every four releases from a queue, those by age are at most the share.
    fn in_its_share(&mut self, released: &Released, before: &Before) -> Result<(), Wrong> {
        let home = match before.homes.get(&released.id) {
            Some(home) if !before.moves => Some(home.backend),
            None if !released.facts.stolen => Some(released.backend),
            _ => None,
        };
        let Some(home) = home else {
            // From which queue cannot be seen from outside, so all counts begin anew.
            self.turns.clear();
            return Ok(());
        };
        let turns = self.turns.entry(home).or_default();
        turns.push_back(released.facts.aged);
        if turns.len() > 4 {
            turns.pop_front();
        }
        let aged = turns.iter().filter(|aged| **aged).count();
        if aged as f64 > (4.0 * self.share).ceil() { Err(Wrong::AgedShare(home, turns.len(), aged, self.share)) } else { Ok(()) }
    }

    /// Whoever still waits in the same queue has a larger key, and was not overtaken by more than the bound; or is younger than one that went by age.
    fn passed_over(&mut self, released: &Released, before: &Before, same_keys: bool, scheduler: &Scheduler, view: &PoolView) -> Result<(), Wrong> {
        let Released { id, known, backend, facts } = released;
        let boosts = matches!(self.order, Order::Uniboost | Order::Headway | Order::OracleBoost) && view.mode == Mode::Normal;
        // One that has just come cannot be asked for its key any more.
        let home = before.homes.get(id);
        for (other, waiting) in &self.waiting {
            let Some(left) = scheduler.explain(*other).filter(|left| left.backend == *backend) else { continue };
            // Between tenants shares decide, from some lead on.
            if waiting.tenant != known.tenant {
                continue;
            }
            if facts.aged {
                if home.is_some_and(|home| (left.arrived, left.sequence) < (home.arrived, home.sequence)) {
                    return Err(Wrong::NotOldest(*id, *other));
                }
                continue;
            }
            if same_keys && home.is_some_and(|home| (left.phi, left.sequence) < (home.phi, home.sequence)) {
                return Err(Wrong::OutOfOrder(*id, *other));
            }
            let bound = view.max_overtake + (known.weight.get() / waiting.weight.get()).ln() / view.gamma;
            let later = known.arrived.since(waiting.arrived).as_secs_f64();
            // Keys are whole microseconds.
            if boosts && later > bound.max(0.0) + 1e-5 {
                return Err(Wrong::Overtook(*id, *other, later, bound));
            }
            if boosts && bound > 0.0 {
                self.reached = self.reached.max(later / bound);
            }
        }
        Ok(())
    }
}
