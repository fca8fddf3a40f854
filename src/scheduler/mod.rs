//! Who waits, where, and who goes next. Told, not asking: no IO, no clock, no async, and it cannot fail (it can refuse).
//!
//! [`Event`]s go in with the time at which they happened, [`Action`]s come out of the same call.
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

// The interface.
mod closeup;
mod event;
mod history;
mod outcome;
mod outlook;
mod policy;
mod score;
mod time;
mod view;

// One request's way, in order.
mod arrivals;
mod keys;
mod placement;
mod queue;
mod release;
mod running;

// What decides about it.
mod backend;
mod calibration;
mod chores;
mod gamma;
mod membership;
mod overload;
mod speed;
mod tenants;
mod window;

// Parts of those.
mod accuracy;
mod bits;
mod climb;
mod concordance;
mod curve;
mod prefixes;
mod restrictions;
mod rng;
mod sessions;
mod shares;
mod table;

pub mod invariants;

use std::collections::{BTreeMap, BTreeSet};

pub use arrivals::LONGEST_RETRY;
pub use calibration::{Learnt, Sample};
pub use closeup::{Calibrated, Position, QueueView, RequestView, StageView, Standpoint};
pub(crate) use concordance::tau_b;
pub use event::*;
pub(crate) use gamma::GammaAda;
pub use history::History;
pub use outcome::{Ending, Reason};
pub use outlook::Outlook;
pub use policy::{Gamma, Lead, Limits, MaxOvertake, Order, Policy, PolicyError, PolicyParts, Target};
pub(crate) use rng::Rng;
pub use score::{Boost, LEVEL, RankerVersion, Score, Scored, Weight, attained_level, boost};
pub use speed::Speed;
pub use time::Time;
pub use view::{BackendView, Counters, Explanation, Mode, ModelView, PoolView, TenantView};

use backend::{Backend, Backlog};
use calibration::Calibration;
use keys::{Keying, Largest, Mix};
use membership::Sizes;
use outlook::Lately;
use overload::{Overload, WaitingWork};
use queue::{Aging, Place};
use release::Attention;
use restrictions::Restrictions;
use sessions::Sessions;
use shares::Shares;
use table::Table;

/// The scheduler of one pool.
#[derive(Debug)]
pub struct Scheduler {
    policy: Policy,
    limits: Limits,
    draining: bool,
    /// When the last event happened.
    now: Time,
    next_look: Time,
    next_learning: Time,

    /// Every request that waits or runs.
    table: Table,
    /// Slots of those that run.
    running: BTreeSet<u32>,
    /// Everything that waits, by when it expires.
    expiries: BTreeSet<(Time, Place)>,
    waiting_bytes: u64,
    waiting_work: WaitingWork,
    /// What waits in all queues.
    queued: Backlog,
    /// How many were ever put into a queue.
    sequence: u64,
    restrictions: Restrictions,
    shares: Shares,
    sessions: Sessions,

    /// The speed of a backend of weight 1 while none is known.
    assumed: Speed,
    backends: Vec<Backend>,
    by_id: BTreeMap<BackendId, usize>,
    sizes: Sizes,
    /// How many backends of the pool's speed the ones that take requests are worth.
    parallel: f64,
    attention: Attention,

    keying: Keying,
    aging: Aging,
    overload: Overload,
    gamma: GammaAda,
    mix: Mix,
    lately: Lately,
    calibration: Calibration,

    rng: Rng,
    counters: Counters,
}

impl Scheduler {
    /// A pool without backends. The same seed and the same events give the same actions.
    pub fn new(policy: Policy, limits: Limits, seed: u64) -> Self {
        let (gamma, mix, speed) = (GammaAda::default(), Mix::default(), Speed::ASSUMED);
        let mean_work = mix.work(policy.order(), speed);
        let rate = gamma.gamma(&policy, mix.service(speed));
        Scheduler {
            draining: false,
            now: Time::ZERO,
            next_look: Time::ZERO,
            next_learning: Time::ZERO,
            table: Table::default(),
            running: BTreeSet::new(),
            expiries: BTreeSet::new(),
            waiting_bytes: 0,
            waiting_work: WaitingWork::default(),
            queued: Backlog::default(),
            sequence: 0,
            restrictions: Restrictions::new(),
            shares: Shares::default(),
            sessions: Sessions::default(),
            assumed: speed,
            backends: Vec::new(),
            by_id: BTreeMap::new(),
            sizes: Sizes::default(),
            parallel: 0.0,
            attention: Attention::default(),
            keying: Keying::new(&policy, Largest::new(&limits, None), speed, mean_work, rate, false, None),
            aging: Aging::new(policy.aging_threshold(), policy.aging_share()),
            overload: Overload::default(),
            gamma,
            mix,
            lately: Lately::default(),
            calibration: Calibration::default(),
            rng: Rng::new(seed),
            counters: Counters::default(),
            policy,
            limits,
        }
    }

    /// Tells what happened at `now` and appends what to do about it. Time never runs backwards: an earlier `now` counts as the latest one seen.
    pub fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        let before = actions.len();
        self.now = self.now.max(now);
        self.expire(actions);
        self.chores();
        match event {
            Event::Arrived(request) => self.arrived(&request, actions),
            Event::Cancelled(id) => self.cancelled(id),
            Event::Progress(id, output) => self.progress(id, output),
            Event::Finished(id, ending) => self.finished(id, ending),
            Event::BackendChanged(id, state) => self.backend_changed(id, state, actions),
            Event::LoadReported(id, load) => self.load_reported(id, load),
            Event::PolicyChanged(policy) => self.policy_changed(policy),
            Event::LimitsChanged(limits) => self.limits_changed(limits),
            Event::DrainStarted => self.draining = true,
            Event::Tick => {}
        }
        self.settle(actions);
        debug_assert_eq!(invariants::conservation(self), Ok(()));
        debug_assert_eq!(invariants::windows(self, &actions[before..]), Ok(()));
    }

    /// When to call [`Scheduler::handle`] with [`Event::Tick`] if nothing happens before.
    pub fn next_deadline(&self) -> Option<Time> {
        let (expires, _) = self.expiries.first()?;
        Some(self.next_look.min(*expires))
    }

    /// Whether the next event at `now` first looks after everything that waits and may order it anew: milliseconds where tens of thousands wait.
    pub fn chores_due(&self, now: Time) -> bool {
        now >= self.next_look
    }

    /// What was learnt of answers and of the tail, for the next start.
    pub fn learnt(&self) -> Learnt {
        let (scores, samples) = self.calibration.learnt();
        Learnt { scores, samples, gamma: self.gamma.slope(), speed: self.typical_speed() }
    }

    /// Continues from what was learnt before, or from what ships with a ranker; the latter once, however often that ranker comes back.
    pub fn restore(&mut self, learnt: &Learnt) {
        if self.calibration.knows(&learnt.scores) {
            return;
        }
        self.calibration.restore(&learnt.scores, &learnt.samples);
        if let Some(gamma) = learnt.gamma {
            self.gamma.restore(gamma);
        }
        if let Some(speed) = learnt.speed {
            self.assumed = speed;
            self.update_speeds();
        }
        self.rebuild_keys();
    }
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
            lead: Lead::Auto,
            overload: true,
        })
        .unwrap()
    }

    pub(super) fn pool(slots: u32) -> Scheduler {
        let limits = Limits { queue_requests: 10, queue_bytes: 1000, max_output: 1024 };
        let mut pool = Scheduler::new(policy(Order::Fcfs), limits, 1);
        backend(&mut pool, 0, slots, Standing::Healthy);
        pool
    }

    pub(super) fn backend(pool: &mut Scheduler, id: u32, slots: u32, standing: Standing) -> Vec<Action> {
        let state =
            BackendState { standing, slots: Slots::Fixed(slots), weight: Weight::ONE, kv_tokens: None, context_tokens: None, prefix_cache: true };
        at(pool, 0, Event::BackendChanged(BackendId(id), state))
    }

    pub(super) fn request(id: u64, arrived: u64) -> Request {
        Request {
            id: RequestId(id),
            arrived: Time::from_micros(arrived),
            model: ModelId(0),
            score: None,
            prompt_tokens: 10,
            max_output: None,
            attained: 0,
            weight: Weight::ONE,
            share: Weight::ONE,
            expires: Time::from_micros(1000),
            bytes: 100,
            unscored: false,
            excluded: Vec::new(),
            tenant: None,
            history: None,
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

    /// The owner task asks before each event, to move what takes long to another thread.
    #[test]
    fn chores_are_due_every_second() {
        let mut pool = pool(1);
        let due = |pool: &Scheduler| [999_999, 1_000_000].map(|micros| pool.chores_due(Time::from_micros(micros)));
        assert_eq!(due(&pool), [false, true], "the backend joined at the start");
        at(&mut pool, 1_000_000, Event::Tick);
        assert_eq!(due(&pool), [false, false]);
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
    fn what_came_without_a_score_is_counted() {
        let mut pool = pool(0);
        let score = Score::new(1.0).map(|score| Scored { score, version: RankerVersion(1) });
        let requests = [request(1, 1), Request { score, ..request(2, 1) }, Request { unscored: true, ..request(3, 1) }, request(4, 1)];
        for request in requests {
            at(&mut pool, 1, Event::Arrived(request));
        }
        // Again has no effect.
        at(&mut pool, 1, Event::Arrived(request(4, 1)));
        let counters = pool.view().counters;
        assert_eq!((counters.arrived, counters.neutral), (4, 2));
    }

    /// Keys are rebuilt for what moved them, and for nothing else: with a hundred thousand waiting that is tens of milliseconds.
    #[test]
    fn keys_are_rebuilt_for_a_reason() {
        let parts = |order, gamma| PolicyParts {
            order,
            gamma: Gamma::Fixed(gamma),
            max_overtake: MaxOvertake::Auto,
            aging_threshold: Duration::from_secs(120),
            aging_share: 0.25,
            lead: Lead::Auto,
            overload: true,
        };
        let limits = Limits { queue_requests: 10_000, queue_bytes: 1 << 30, max_output: 1024 };
        let mut pool = Scheduler::new(Policy::new(parts(Order::Headway, 0.1)).unwrap(), limits, 1);
        backend(&mut pool, 0, 1, Standing::Healthy);
        let waits = |id| Request { expires: Time::MAX, bytes: 0, ..request(id, 1) };
        for id in 0..20 {
            at(&mut pool, 1, Event::Arrived(waits(id)));
        }
        let second = |pool: &mut Scheduler, second: u64| {
            at(pool, second * 1_000_000, Event::Tick);
            pool.view().counters.rebuilds
        };
        let start = second(&mut pool, 1);
        for at in 2..60 {
            assert_eq!(second(&mut pool, at), start, "nothing has moved, {at}");
        }
        // Answers of another length than what was assumed: estimates move, at the next look of those every five seconds.
        for id in 100..200 {
            at(&mut pool, 60_000_000, Event::Arrived(waits(id)));
        }
        at(
            &mut pool,
            60_000_000,
            Event::BackendChanged(
                BackendId(0),
                BackendState {
                    standing: Standing::Healthy,
                    slots: Slots::Fixed(200),
                    weight: Weight::ONE,
                    kv_tokens: None,
                    context_tokens: None,
                    prefix_cache: true,
                },
            ),
        );
        for id in 0..20 {
            at(&mut pool, 60_000_000, Event::Finished(RequestId(id), Ending::Completed { output: 20, prompt: None }));
        }
        backend(&mut pool, 0, 1, Standing::Healthy);
        for id in 300..310 {
            at(&mut pool, 60_000_000, Event::Arrived(waits(id)));
        }
        let rebuilt = (61..=66).map(|at| second(&mut pool, at)).max().unwrap();
        assert!(rebuilt > start, "estimates have moved");

        // Limits and policies are obeyed at once.
        let before = pool.view();
        at(&mut pool, 67_000_000, Event::LimitsChanged(Limits { max_output: 10, ..limits }));
        assert_eq!(pool.view().counters.rebuilds, before.counters.rebuilds + 1);
        assert!(pool.view().longest_work < before.longest_work);
        at(&mut pool, 67_000_000, Event::PolicyChanged(Policy::new(parts(Order::Headway, 0.2)).unwrap()));
        assert_eq!((pool.view().counters.rebuilds, pool.view().gamma), (before.counters.rebuilds + 2, 0.2));
    }

    #[test]
    fn requests_of_a_lost_backend_go_to_its_siblings() {
        let mut pool = pool(0);
        at(&mut pool, 1, Event::Arrived(request(1, 1)));
        backend(&mut pool, 1, 1, Standing::Probing);
        assert_eq!(pool.view().in_flight, 1, "the new backend steals");
        at(&mut pool, 2, Event::Arrived(request(2, 2)));
        backend(&mut pool, 0, 0, Standing::Gone);
        assert_eq!((pool.view().backends.len(), pool.view().counters.placed_again), (1, 1));
        assert_eq!(released(&at(&mut pool, 3, Event::Finished(RequestId(1), Ending::Uncounted))), [(2, 1)]);
        at(&mut pool, 4, Event::Arrived(request(3, 2)));
        assert_eq!(rejected(&backend(&mut pool, 1, 0, Standing::Ejected)), [(3, Reason::NoHealthyBackend)]);
        assert_eq!(rejected(&at(&mut pool, 5, Event::Arrived(request(4, 2)))), [(4, Reason::NoHealthyBackend)]);
    }
}
