//! Who waits, where, and who goes next. Told, not asking: no IO, no clock, no async, and it cannot fail (it can refuse).
//!
//! [`Event`]s go in with the time at which they happened, [`Action`]s come out of the same call. Reading order: [`event`] (the whole interface),
//! `score` and `keys` (what a request is ordered by), `queue` (the order), `placement` and `release` (where and when it goes).
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod backend;
mod event;
mod keys;
mod outcome;
mod placement;
mod policy;
mod queue;
mod release;
mod restrictions;
mod rng;
mod score;
mod speed;
mod table;
mod time;
mod view;
mod window;

use std::collections::{BTreeMap, BTreeSet};

pub use event::*;
pub use outcome::{Ending, Reason};
pub use policy::{Gamma, Limits, MaxOvertake, Order, Policy, PolicyError, PolicyParts, Target};
pub use score::{Boost, LEVEL, RankerVersion, Score, Scored, Weight, attained_level, boost};
pub use speed::Speed;
pub use time::Time;
pub use view::{BackendView, Counters, Mode, ModelView, PoolView};

use backend::Backend;
use keys::Keying;
use placement::Demand;
use queue::{Aging, Item, Key, Place};
use restrictions::Restrictions;
use rng::Rng;
use table::{Entry, Stage, Table};

/// The scheduler of one pool.
#[derive(Debug)]
pub struct Scheduler {
    policy: Policy,
    limits: Limits,
    /// When the last event happened.
    now: Time,
    draining: bool,
    table: Table,
    backends: Vec<Backend>,
    by_id: BTreeMap<BackendId, usize>,
    restrictions: Restrictions,
    /// Everything that waits, by when it expires.
    expiries: BTreeSet<(Time, Place)>,
    waiting_bytes: u64,
    sequence: u64,
    keying: Keying,
    aging: Aging,
    rng: Rng,
    counters: Counters,
}

impl Scheduler {
    /// A pool without backends. The same seed and the same events give the same actions.
    pub fn new(policy: Policy, limits: Limits, seed: u64) -> Self {
        let speed = Speed::ASSUMED;
        let gamma = keys::initial_gamma(&policy, speed.seconds(0, 256));
        Scheduler {
            now: Time::ZERO,
            draining: false,
            table: Table::default(),
            backends: Vec::new(),
            by_id: BTreeMap::new(),
            restrictions: Restrictions::new(),
            expiries: BTreeSet::new(),
            waiting_bytes: 0,
            sequence: 0,
            keying: Keying::new(&policy, &limits, speed, gamma, false),
            aging: Aging::new(policy.aging_threshold(), policy.aging_share()),
            rng: Rng::new(seed),
            counters: Counters::default(),
            policy,
            limits,
        }
    }

    /// Tells what happened at `now` and appends what to do about it. Time never runs backwards: an earlier `now` counts as the latest one seen.
    pub fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        self.now = self.now.max(now);
        self.expire(actions);
        match event {
            Event::Arrived(request) => self.arrived(request, actions),
            Event::Cancelled(id) => self.cancelled(id),
            Event::Progress(id, output) => return self.progress(id, output),
            Event::Finished(id, ending) => self.finished(id, ending),
            Event::BackendChanged(id, state) => self.backend_changed(id, state, actions),
            Event::LoadReported(id, load) => self.load_reported(id, load),
            Event::PolicyChanged(policy) => self.policy_changed(policy),
            Event::LimitsChanged(limits) => self.limits_changed(limits),
            Event::DrainStarted => self.draining = true,
            Event::Tick => {}
        }
        self.settle(actions);
    }

    /// When to call [`Scheduler::handle`] with [`Event::Tick`] if nothing happens before.
    pub fn next_deadline(&self) -> Option<Time> {
        self.expiries.first().map(|(expires, _)| *expires)
    }

    /// The pool as it is now.
    pub fn view(&self) -> PoolView {
        PoolView {
            order: self.policy.order(),
            mode: if self.keying.overload { Mode::Overload } else { Mode::Normal },
            waiting: self.waiting(),
            waiting_bytes: self.waiting_bytes,
            aged: self.backends.iter().map(|backend| backend.queue.aged_len(self.now, self.aging)).sum(),
            in_flight: self.backends.iter().map(|backend| backend.in_flight).sum(),
            gamma: self.keying.gamma,
            max_overtake: self.keying.bound,
            backlog: self.queued_seconds(),
            mean_work: self.keying.speed.seconds(0, 256),
            speed: self.keying.speed,
            draining: self.draining,
            backends: self
                .backends
                .iter()
                .map(|backend| BackendView {
                    id: backend.id,
                    standing: backend.state.standing,
                    waiting: backend.queue.len(),
                    in_flight: backend.in_flight,
                    window: backend.limit(),
                    backlog: backend.backlog(self.speed_of(backend)),
                    speed: self.speed_of(backend),
                    speed_learnt: false,
                    load: backend.load,
                })
                .collect(),
            models: Vec::new(),
            counters: self.counters.clone(),
        }
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.expiries.len()
    }

    fn arrived(&mut self, request: Request, actions: &mut Vec<Action>) {
        if self.table.slot_of(request.id).is_some() {
            return;
        }
        self.counters.arrived += 1;
        self.counters.neutral += u64::from(request.score.is_none() && !request.unscored);
        if let Err(reason) = self.accept(&request) {
            self.reject(request.id, reason, actions);
        }
    }

    /// Puts a request into a queue.
    fn accept(&mut self, request: &Request) -> Result<(), Reason> {
        // A request that is sent again was accepted before the drain.
        if self.draining && request.excluded.is_empty() {
            return Err(Reason::Draining);
        }
        let slot = self.table.vacant().filter(|_| self.waiting() < self.limits.queue_requests).ok_or(Reason::QueueFull)?;
        if self.waiting_bytes + u64::from(request.bytes) > self.limits.queue_bytes {
            return Err(Reason::QueueBytes);
        }
        if request.expires <= self.now {
            return Err(Reason::Expired);
        }
        if self.backends.iter().all(|backend| !backend.queue.has_restricted()) {
            self.restrictions.clear();
        }
        let restriction = self.restriction_of(request.excluded.clone(), request.prompt_tokens, request.max_output);
        let restriction = self.restrictions.intern(restriction);
        let mut entry = Entry::new(request, Place::new(self.sequence, slot));
        entry.expected = if request.unscored { 0 } else { 256.min(request.max_output.unwrap_or(self.limits.max_output)) };
        entry.at_most = entry.expected;
        let index = self.choose(Demand::of(&entry), restriction)?;
        entry.backend = index as u32;
        let work = self.keying.work(&entry);
        entry.work = work as f32;
        let phi = self.keying.phi(&entry, work);
        entry.stage = Stage::Waiting { phi, expires: request.expires, restriction };
        self.sequence += 1;
        self.table.insert(entry);
        self.join_queue(slot, index);
        Ok(())
    }

    fn cancelled(&mut self, id: RequestId) {
        let Some(slot) = self.table.slot_of(id) else { return };
        if let Stage::Waiting { .. } = self.table.get(slot).stage {
            self.leave_queue(slot);
            self.table.remove(slot);
            self.counters.cancelled += 1;
        }
    }

    fn progress(&mut self, id: RequestId, output: Tokens) {
        let Some(slot) = self.table.slot_of(id) else { return };
        let entry = self.table.get_mut(slot);
        let Stage::Running { released, produced, remaining } = entry.stage else { return };
        if output <= produced {
            return;
        }
        let running = &mut self.backends[entry.backend as usize].running;
        if produced == 0 {
            running.subtract(entry.uncached(), 0);
        }
        let left = entry.expected.saturating_sub(output);
        running.subtract(0, remaining);
        running.add(0, left);
        entry.stage = Stage::Running { released, produced: output, remaining: left };
    }

    fn finished(&mut self, id: RequestId, ending: Ending) {
        let Some(slot) = self.table.slot_of(id) else { return };
        let Stage::Running { produced, remaining, .. } = self.table.get(slot).stage else { return };
        let entry = self.table.remove(slot);
        let index = entry.backend as usize;
        let backend = &mut self.backends[index];
        backend.in_flight -= 1;
        backend.running.subtract(if produced == 0 { entry.uncached() } else { 0 }, remaining);
        self.counters.finished += 1;
        self.counters.pushbacks += u64::from(ending == Ending::Pushback);
        self.forget_if_gone(index);
    }

    fn backend_changed(&mut self, id: BackendId, state: BackendState, actions: &mut Vec<Action>) {
        match self.by_id.get(&id) {
            None if state.standing == Standing::Gone => {}
            None => {
                self.by_id.insert(id, self.backends.len());
                self.backends.push(Backend::new(id, state));
            }
            Some(&index) => {
                let backend = &mut self.backends[index];
                backend.window.reconfigure(state.slots);
                backend.state = state;
                if !backend.takes_requests() {
                    let places = backend.queue.drain();
                    self.place_again(index, &places, actions);
                    self.forget_if_gone(index);
                }
            }
        }
    }

    /// Puts requests that were drained from the queue of a backend into other queues.
    fn place_again(&mut self, from: usize, places: &[Place], actions: &mut Vec<Action>) {
        for place in places {
            let slot = place.slot();
            let restriction = waiting(self.table.get(slot)).0.restriction;
            self.uncount(slot, from);
            match self.choose(Demand::of(self.table.get(slot)), restriction) {
                Ok(index) => {
                    self.table.get_mut(slot).backend = index as u32;
                    self.join_queue(slot, index);
                    self.counters.placed_again += 1;
                }
                Err(reason) => {
                    let entry = self.table.remove(slot);
                    self.reject(entry.id, reason, actions);
                }
            }
        }
    }

    fn load_reported(&mut self, id: BackendId, load: Load) {
        if let Some(&index) = self.by_id.get(&id) {
            self.backends[index].load = load;
        }
    }

    fn policy_changed(&mut self, policy: Policy) {
        self.aging = Aging::new(policy.aging_threshold(), policy.aging_share());
        let gamma = keys::initial_gamma(&policy, self.keying.speed.seconds(0, 256));
        self.keying = Keying::new(&policy, &self.limits, self.keying.speed, gamma, self.keying.overload && policy.overload());
        self.policy = policy;
        self.rebuild_keys();
    }

    /// Orders everything that waits anew.
    fn rebuild_keys(&mut self) {
        for index in 0..self.backends.len() {
            for place in self.backends[index].queue.drain() {
                let entry = self.table.get_mut(place.slot());
                let (mut item, expires) = waiting(entry);
                let work = self.keying.work(entry);
                item.key.phi = self.keying.phi(entry, work);
                entry.work = work as f32;
                entry.stage = Stage::Waiting { phi: item.key.phi, expires, restriction: item.restriction };
                self.backends[index].queue.insert(item);
            }
        }
        self.counters.rebuilds += 1;
    }

    fn limits_changed(&mut self, limits: Limits) {
        self.limits = limits;
        self.keying = Keying::new(&self.policy, &self.limits, self.keying.speed, self.keying.gamma, self.keying.overload);
        self.rebuild_keys();
    }

    /// Turns away what has waited until its deadline.
    fn expire(&mut self, actions: &mut Vec<Action>) {
        while let Some(&(expires, place)) = self.expiries.first()
            && expires <= self.now
        {
            self.leave_queue(place.slot());
            let entry = self.table.remove(place.slot());
            self.reject(entry.id, Reason::Expired, actions);
        }
    }

    fn reject(&mut self, request: RequestId, reason: Reason, actions: &mut Vec<Action>) {
        self.counters.rejected[reason as usize] += 1;
        actions.push(Action::Reject { request, reason, retry_after: self.retry_after() });
    }

    fn retry_after(&self) -> RetryAfter {
        (self.queued_seconds().ceil() as RetryAfter).clamp(1, 300)
    }

    /// Predicted seconds until all that waits has been started.
    fn queued_seconds(&self) -> f64 {
        let (queued, backends) = self.backends.iter().filter(|backend| backend.takes_requests()).fold((0.0, 0u32), |(sum, n), backend| {
            let speed = self.speed_of(backend);
            (sum + speed.seconds(backend.queued.prompt, backend.queued.output), n + 1)
        });
        queued / f64::from(backends.max(1))
    }

    fn speed_of(&self, backend: &Backend) -> Speed {
        let weight = backend.state.weight.get();
        Speed { prompt: self.keying.speed.prompt / weight, output: self.keying.speed.output / weight }
    }

    /// Puts a waiting entry into the queue of a backend.
    fn join_queue(&mut self, slot: u32, index: usize) {
        let entry = self.table.get(slot);
        let (item, expires) = waiting(entry);
        self.waiting_bytes += u64::from(entry.bytes);
        self.expiries.insert((expires, entry.place));
        let backend = &mut self.backends[index];
        backend.queued.add(entry.uncached(), entry.expected);
        backend.queue.insert(item);
    }

    /// Takes a waiting entry out of its queue.
    fn leave_queue(&mut self, slot: u32) {
        let entry = self.table.get(slot);
        let index = entry.backend as usize;
        self.backends[index].queue.remove(waiting(entry).0);
        self.uncount(slot, index);
    }

    /// Takes a waiting entry out of the sums over what waits for a backend.
    fn uncount(&mut self, slot: u32, index: usize) {
        let entry = self.table.get(slot);
        self.waiting_bytes -= u64::from(entry.bytes);
        self.expiries.remove(&(waiting(entry).1, entry.place));
        self.backends[index].queued.subtract(entry.uncached(), entry.expected);
    }

    /// Drops what is known of a backend that left the pool, once nothing runs there.
    fn forget_if_gone(&mut self, index: usize) {
        let backend = &self.backends[index];
        if backend.state.standing != Standing::Gone || backend.in_flight > 0 {
            return;
        }
        self.by_id.remove(&backend.id);
        self.backends.remove(index);
        for position in self.by_id.values_mut().filter(|position| **position > index) {
            *position -= 1;
        }
        for entry in self.table.iter_mut().filter(|entry| entry.backend > index as u32) {
            entry.backend -= 1;
        }
    }
}

/// A waiting request as its queue knows it, and when it expires.
fn waiting(entry: &Entry) -> (Item, Time) {
    // Running requests are in no queue, so whoever asks for one as waiting has lost track of it.
    let Stage::Waiting { phi, expires, restriction } = entry.stage else { unreachable!("{:?} does not wait", entry.id) };
    (Item { key: Key { phi, place: entry.place }, arrived: entry.arrived, restriction }, expires)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    pub(super) fn policy(order: Order) -> Policy {
        Policy::new(PolicyParts {
            order,
            gamma: Gamma::Adaptive,
            max_overtake: MaxOvertake::Auto,
            aging_threshold: Duration::from_secs(120),
            aging_share: 0.25,
            overload: true,
        })
        .unwrap()
    }

    fn pool(slots: u32) -> Scheduler {
        let limits = Limits { queue_requests: 10, queue_bytes: 1000, max_output: 1024 };
        let mut pool = Scheduler::new(policy(Order::Fcfs), limits, 1);
        backend(&mut pool, 0, slots, Standing::Healthy);
        pool
    }

    fn backend(pool: &mut Scheduler, id: u32, slots: u32, standing: Standing) -> Vec<Action> {
        let state = BackendState { standing, slots: Slots::Fixed(slots), weight: Weight::ONE, kv_tokens: None, context_tokens: None };
        at(pool, 0, Event::BackendChanged(BackendId(id), state))
    }

    fn request(id: u64, arrived: u64) -> Request {
        Request {
            id: RequestId(id),
            arrived: Time::from_micros(arrived),
            model: ModelId(0),
            score: None,
            prompt_tokens: 10,
            max_output: None,
            attained: 0,
            weight: Weight::ONE,
            expires: Time::from_micros(1000),
            bytes: 100,
            unscored: false,
            excluded: Vec::new(),
            tenant: None,
            prefix: None,
            oracle_output: None,
        }
    }

    fn at(pool: &mut Scheduler, micros: u64, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        pool.handle(Time::from_micros(micros), event, &mut actions);
        actions
    }

    fn released(actions: &[Action]) -> Vec<(u64, u32)> {
        actions
            .iter()
            .map(|action| match action {
                Action::Release { request, backend, .. } => (request.0, backend.0),
                Action::Reject { .. } => panic!("{action:?}"),
            })
            .collect()
    }

    fn rejected(actions: &[Action]) -> Vec<(u64, Reason)> {
        actions
            .iter()
            .map(|action| match action {
                Action::Reject { request, reason, .. } => (request.0, *reason),
                Action::Release { .. } => panic!("{action:?}"),
            })
            .collect()
    }

    #[test]
    fn what_finds_no_slot_waits_for_one() {
        let mut pool = pool(1);
        assert_eq!(released(&at(&mut pool, 1, Event::Arrived(request(1, 1)))), [(1, 0)]);
        assert_eq!(released(&at(&mut pool, 2, Event::Arrived(request(2, 2)))), []);
        assert_eq!(released(&at(&mut pool, 3, Event::Finished(RequestId(1), Ending::Uncounted))), [(2, 0)]);
        assert_eq!(released(&at(&mut pool, 4, Event::Finished(RequestId(1), Ending::Uncounted))), []);
    }

    #[test]
    fn limits_refuse_and_deadlines_expire() {
        let mut pool = pool(0);
        for id in 0..10 {
            assert_eq!(at(&mut pool, 1, Event::Arrived(request(id, 1))), []);
        }
        assert_eq!(rejected(&at(&mut pool, 1, Event::Arrived(request(10, 1)))), [(10, Reason::QueueFull)]);
        at(&mut pool, 1, Event::Cancelled(RequestId(0)));
        let big = Request { bytes: 101, ..request(11, 1) };
        assert_eq!(rejected(&at(&mut pool, 1, Event::Arrived(big))), [(11, Reason::QueueBytes)]);
        assert_eq!(pool.next_deadline(), Some(Time::from_micros(1000)));
        assert_eq!(rejected(&at(&mut pool, 1000, Event::Tick)).len(), 9);
        assert_eq!((pool.view().waiting, pool.view().waiting_bytes, pool.next_deadline()), (0, 0, None));
    }

    #[test]
    fn requests_of_a_lost_backend_go_to_its_siblings() {
        let mut pool = pool(0);
        at(&mut pool, 1, Event::Arrived(request(1, 1)));
        backend(&mut pool, 1, 1, Standing::Probing);
        assert_eq!(pool.view().in_flight, 1, "the new backend steals");
        at(&mut pool, 2, Event::Arrived(request(2, 2)));
        backend(&mut pool, 0, 0, Standing::Gone);
        assert_eq!(pool.view().backends.len(), 1);
        assert_eq!(released(&at(&mut pool, 3, Event::Finished(RequestId(1), Ending::Uncounted))), [(2, 1)]);
        at(&mut pool, 4, Event::Arrived(request(3, 2)));
        assert_eq!(rejected(&backend(&mut pool, 1, 0, Standing::Ejected)), [(3, Reason::NoHealthyBackend)]);
        assert_eq!(rejected(&at(&mut pool, 5, Event::Arrived(request(4, 2)))), [(4, Reason::NoHealthyBackend)]);
    }
}
