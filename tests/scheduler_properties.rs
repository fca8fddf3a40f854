//! Promises of the scheduling core, held against random histories: whatever happens in whatever order, these stay true.
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use headway::scheduler::*;
use proptest::prelude::*;

/// How often each property is tried; `PROPTEST_CASES` overrides it.
fn cases(normal: u32) -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(normal);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

fn policy(order: Order, gamma: Gamma, aging: (u64, f64)) -> Policy {
    sharing(order, gamma, aging, Lead::Auto)
}

fn sharing(order: Order, gamma: Gamma, aging: (u64, f64), lead: Lead) -> Policy {
    let parts = PolicyParts {
        order,
        gamma,
        max_overtake: MaxOvertake::Auto,
        aging_threshold: Duration::from_secs(aging.0),
        aging_share: aging.1,
        lead,
        overload: true,
    };
    Policy::new(parts).unwrap()
}

const LIMITS: Limits = Limits { queue_requests: 40, queue_bytes: 20_000, max_output: 4096 };

/// A conversation of this number: its system prompt, the turn before and all of it; now and then longer than the prompt, as estimates are.
fn beginnings(hash: u64, prompt: Tokens) -> [Prefix; 3] {
    let prefix = |part, tokens| Prefix { hash: hash.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(part), tokens };
    [prefix(0, 30), prefix(1, prompt / 2), prefix(hash as u32, prompt + 10)]
}

/// One thing that happens. Requests and backends are picked by number among those that exist.
#[derive(Clone, Debug)]
enum Step {
    Arrive(Arrive),
    Cancel(usize),
    Progress(usize, Tokens),
    Finish(usize, Ending),
    Backend(u32, BackendState),
    Load(u32, Load),
    Policy(Policy),
    Limits(Limits),
    Advance(u64),
    Stranger(u64),
}

#[derive(Clone, Debug)]
struct Arrive {
    prompt: Tokens,
    score: Option<f32>,
    version: u32,
    max_output: Option<Tokens>,
    attained: Tokens,
    weight: f64,
    patience: u64,
    late: u64,
    bytes: u32,
    unscored: bool,
    excluded: Vec<BackendId>,
    history: Option<(u64, Option<u64>)>,
}

fn arrive() -> impl Strategy<Value = Arrive> {
    let sizes = (1u32..3000, prop::option::weighted(0.5, 1u32..5000), 0u32..1000, 0u32..1500);
    let score = (prop::option::weighted(0.8, -5.0f32..5.0), 0u32..2);
    let times = (prop_oneof![1u64..20, 100u64..1000], prop_oneof![3 => Just(0u64), 1 => 0u64..300]);
    let rest = (
        prop_oneof![3 => Just(1.0), 1 => Just(2.0), 1 => Just(0.5)],
        prop::bool::weighted(0.1),
        prop_oneof![4 => Just(vec![]), 1 => prop::collection::vec((0u32..4).prop_map(BackendId), 1..3)],
        prop::option::weighted(0.3, (0u64..4, prop::option::of(0u64..3))),
    );
    (sizes, score, times, rest).prop_map(
        |((prompt, max_output, attained, bytes), (score, version), (patience, late), (weight, unscored, excluded, history))| Arrive {
            prompt,
            score,
            version,
            max_output,
            attained,
            weight,
            patience,
            late,
            bytes,
            unscored,
            excluded,
            history,
        },
    )
}

fn ending() -> impl Strategy<Value = Ending> {
    let output = || 0u32..3000;
    prop_oneof![
        4 => output().prop_map(|output| Ending::Completed { output, prompt: None }),
        1 => output().prop_map(|output| Ending::Truncated { output, prompt: Some(10) }),
        1 => output().prop_map(|output| Ending::Cancelled { output }),
        1 => output().prop_map(|output| Ending::Failed { output }),
        1 => Just(Ending::Pushback),
        1 => Just(Ending::Refused),
        1 => Just(Ending::Uncounted),
    ]
}

fn backend_state() -> impl Strategy<Value = BackendState> {
    let standing = prop_oneof![
        6 => Just(Standing::Healthy),
        1 => Just(Standing::Ejected),
        2 => Just(Standing::Probing),
        1 => Just(Standing::Draining),
        1 => Just(Standing::Gone),
    ];
    let slots = prop_oneof![(0u32..6).prop_map(Slots::Fixed), (1u32..6, 1u32..20).prop_map(|(initial, max)| Slots::Auto { initial, max })];
    let sizes = (prop::option::weighted(0.3, 500u64..20_000), prop::option::weighted(0.3, 500u32..8000));
    (standing, slots, sizes, prop_oneof![Just(1.0), Just(2.0)]).prop_map(|(standing, slots, (kv_tokens, context_tokens), weight)| BackendState {
        standing,
        slots,
        weight: Weight::new(weight).unwrap(),
        kv_tokens,
        context_tokens,
        prefix_cache: slots != Slots::Fixed(3),
    })
}

fn load() -> impl Strategy<Value = Load> {
    (prop::option::of(0u32..20), prop::option::of(0u32..8), prop::option::of(0.0f32..1.0)).prop_map(|(running, waiting, kv_used)| Load {
        running,
        waiting,
        kv_used,
    })
}

fn any_policy() -> impl Strategy<Value = Policy> {
    let order = prop::sample::select(vec![Order::Fcfs, Order::Pars, Order::Uniboost, Order::Headway]);
    let gamma = prop_oneof![
        Just(Gamma::Adaptive),
        Just(Gamma::Target(Target::Mean)),
        Just(Gamma::Target(Target::Balanced)),
        (1u64..60).prop_map(|seconds| Gamma::Ttft(Duration::from_secs(seconds))),
        (0.001f64..10.0).prop_map(Gamma::Fixed),
    ];
    let share = prop::sample::select(vec![0.0, 0.1, 0.25, 0.5, 0.75, 1.0]);
    let lead = prop::sample::select(vec![Lead::Auto, Lead::Within(Duration::ZERO), Lead::Within(Duration::from_secs(5)), Lead::Unlimited]);
    (order, gamma, 1u64..60, share, lead).prop_map(|(order, gamma, threshold, share, lead)| sharing(order, gamma, (threshold, share), lead))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => arrive().prop_map(Step::Arrive),
        3 => any::<usize>().prop_map(Step::Cancel),
        10 => (any::<usize>(), 0u32..5000).prop_map(|(pick, output)| Step::Progress(pick, output)),
        20 => (any::<usize>(), ending()).prop_map(|(pick, ending)| Step::Finish(pick, ending)),
        4 => (0u32..4, backend_state()).prop_map(|(id, state)| Step::Backend(id, state)),
        4 => (0u32..4, load()).prop_map(|(id, load)| Step::Load(id, load)),
        1 => any_policy().prop_map(Step::Policy),
        1 => (0usize..60, 0u64..30_000).prop_map(|(queue_requests, queue_bytes)| Step::Limits(Limits { queue_requests, queue_bytes, ..LIMITS })),
        10 => prop_oneof![5 => 0u64..2_000_000, 1 => 0u64..100_000_000].prop_map(Step::Advance),
        2 => any::<u64>().prop_map(Step::Stranger),
    ]
}

/// A scheduler and an independent account of what it said.
struct World {
    scheduler: Scheduler,
    now: u64,
    next_id: u64,
    requests: BTreeMap<RequestId, Request>,
    waiting: BTreeSet<RequestId>,
    running: BTreeMap<RequestId, BackendId>,
    backends: BTreeMap<BackendId, BackendState>,
    /// Whether each release from a queue was an aged one, in order, by the backend whose queue it was.
    turns: BTreeMap<BackendId, Vec<bool>>,
    share: f64,
    threshold: Duration,
    /// How full the engines say they are.
    kv_used: BTreeMap<BackendId, f32>,
    log: Vec<Action>,
}

impl World {
    fn new(policy: Policy, seed: u64) -> Self {
        World {
            share: policy.aging_share(),
            threshold: policy.aging_threshold(),
            kv_used: BTreeMap::new(),
            scheduler: Scheduler::new(policy, LIMITS, seed),
            now: 0,
            next_id: 0,
            requests: BTreeMap::new(),
            waiting: BTreeSet::new(),
            running: BTreeMap::new(),
            backends: BTreeMap::new(),
            turns: BTreeMap::new(),
            log: Vec::new(),
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Arrive(arrive) => {
                let request = self.request(arrive);
                self.waiting.insert(request.id);
                self.requests.insert(request.id, request.clone());
                self.handle(Event::Arrived(request.clone()));
                // Said twice, it counts once.
                if self.waiting.contains(&request.id) || self.running.contains_key(&request.id) {
                    self.no_effect(Event::Arrived(request));
                }
            }
            Step::Cancel(pick) => {
                if let Some(id) = nth(&self.waiting, *pick) {
                    self.waiting.remove(&id);
                    let actions = self.handle(Event::Cancelled(id));
                    assert!(!actions.iter().any(|action| matches!(action, Action::Release { request, .. } if *request == id)));
                    self.no_effect(Event::Cancelled(id));
                    self.no_effect(Event::Progress(id, 10));
                    self.no_effect(Event::Finished(id, Ending::Uncounted));
                }
                if let Some((&id, _)) = self.running.iter().next() {
                    // Only its end frees a slot.
                    self.no_effect(Event::Cancelled(id));
                }
            }
            Step::Progress(pick, output) => {
                if let Some(id) = nth(&self.running.keys().copied().collect(), *pick) {
                    self.handle(Event::Progress(id, *output));
                    self.no_effect(Event::Progress(id, output.saturating_sub(1)));
                }
            }
            Step::Finish(pick, ending) => {
                if let Some(id) = nth(&self.running.keys().copied().collect(), *pick) {
                    self.running.remove(&id);
                    self.handle(Event::Finished(id, *ending));
                    self.no_effect(Event::Finished(id, *ending));
                    self.no_effect(Event::Progress(id, 1));
                }
                if let Some(id) = nth(&self.waiting, *pick) {
                    // Nothing that waits can finish.
                    self.no_effect(Event::Finished(id, *ending));
                }
            }
            Step::Backend(id, state) => {
                let id = BackendId(*id);
                if self.backends.get(&id).is_some_and(|old| old.standing == Standing::Gone) {
                    return;
                }
                let before: Vec<_> = self.waiting.iter().filter_map(|id| Some((*id, self.scheduler.explain(*id)?))).collect();
                self.backends.insert(id, state.clone());
                self.handle(Event::BackendChanged(id, state.clone()));
                if !takes_requests(state.standing) {
                    for (request, old) in before.iter().filter(|(_, old)| old.backend == id) {
                        // Placed again with its original arrival, or settled.
                        if let Some(new) = self.scheduler.explain(*request) {
                            assert_ne!(new.backend, id);
                            assert_eq!((new.arrived, new.sequence), (old.arrived, old.sequence));
                        }
                    }
                }
            }
            Step::Load(id, load) => {
                let id = BackendId(*id);
                if self.scheduler.view().backends.iter().any(|backend| backend.id == id) {
                    self.kv_used.insert(id, load.kv_used.unwrap_or(0.0));
                }
                self.handle(Event::LoadReported(id, *load));
            }
            Step::Policy(policy) => {
                (self.share, self.threshold) = (policy.aging_share(), policy.aging_threshold());
                self.turns.clear();
                self.handle(Event::PolicyChanged(policy.clone()));
            }
            Step::Limits(limits) => drop(self.handle(Event::LimitsChanged(*limits))),
            Step::Advance(micros) => self.advance(*micros),
            Step::Stranger(id) => {
                let id = RequestId(id | 1 << 63);
                self.no_effect(Event::Cancelled(id));
                self.no_effect(Event::Progress(id, 1));
                self.no_effect(Event::Finished(id, Ending::Pushback));
                self.no_effect(Event::LoadReported(BackendId(99), Load::default()));
            }
        }
    }

    fn request(&mut self, arrive: &Arrive) -> Request {
        self.next_id += 1;
        let arrived = self.now.saturating_sub(arrive.late * 1_000_000);
        let score = arrive.score.map(|score| Scored { score: Score::new(score).unwrap(), version: RankerVersion(arrive.version) });
        Request {
            id: RequestId(self.next_id),
            arrived: Time::from_micros(arrived),
            model: ModelId(arrive.version),
            score,
            prompt_tokens: arrive.prompt,
            max_output: arrive.max_output,
            attained: arrive.attained,
            weight: Weight::new(arrive.weight).unwrap(),
            share: Weight::ONE,
            expires: Time::from_micros(self.now + arrive.patience * 1_000_000),
            bytes: arrive.bytes,
            unscored: arrive.unscored,
            excluded: arrive.excluded.clone(),
            tenant: (arrive.bytes % 5).checked_sub(1).map(TenantId),
            history: arrive.history.map(|(hash, session)| Arc::new(History::new(beginnings(hash, arrive.prompt), session))),
            oracle_output: None,
        }
    }

    /// Lets time pass as a dispatcher does: with a tick at every deadline.
    fn advance(&mut self, micros: u64) {
        let until = self.now + micros;
        while let Some(deadline) = self.scheduler.next_deadline().filter(|deadline| deadline.as_micros() <= until) {
            self.now = self.now.max(deadline.as_micros());
            self.handle(Event::Tick);
            assert!(self.scheduler.next_deadline().is_none_or(|next| next > deadline), "a deadline that stays is a busy loop");
        }
        self.now = until;
        self.handle(Event::Tick);
    }

    fn handle(&mut self, event: Event) -> Vec<Action> {
        let homes: BTreeMap<RequestId, Explanation> = self.waiting.iter().filter_map(|id| Some((*id, self.scheduler.explain(*id)?))).collect();
        let now = Time::from_micros(self.now);
        let changes_queues = matches!(event, Event::BackendChanged(..));
        let rebuilds = self.scheduler.view().counters.rebuilds;
        let mut actions = Vec::new();
        self.scheduler.handle(now, event, &mut actions);

        assert_eq!(invariants::all(&self.scheduler, &actions), Ok(()));
        if !changes_queues && self.scheduler.view().counters.rebuilds == rebuilds {
            self.follows_the_keys(&actions, &homes);
        }
        if !changes_queues {
            self.ages_in_order(&actions, &homes);
        }
        for action in &actions {
            match action {
                Action::Release { request, backend, facts } => {
                    assert!(self.waiting.remove(request), "{request:?} did not wait");
                    assert!(takes_requests(self.backends[backend].standing), "{backend:?} takes nothing");
                    assert!(!self.requests[request].excluded.contains(backend), "{backend:?} was tried before");
                    assert!(self.requests[request].expires > now);
                    self.fits(*request, *backend);
                    self.running.insert(*request, *backend);
                    match homes.get(request) {
                        Some(home) if !changes_queues => {
                            assert_eq!(facts.stolen, home.backend != *backend);
                            self.turns.entry(home.backend).or_default().push(facts.aged);
                        }
                        // It just arrived, into the queue of its backend.
                        None if !facts.stolen => self.turns.entry(*backend).or_default().push(facts.aged),
                        // From which queue cannot be seen from outside, so the count begins anew.
                        _ => self.turns.clear(),
                    }
                }
                Action::Reject { request, retry_after, .. } => {
                    assert!(self.waiting.remove(request), "{request:?} did not wait");
                    assert!(*retry_after >= 1);
                }
            }
        }
        self.agrees_with_the_view();
        self.ages_by_share();
        for id in &self.waiting {
            assert!(self.requests[id].expires > now, "{id:?} waits past its deadline");
        }
        self.log.extend(actions.iter().cloned());
        actions
    }

    /// Property 4: nobody with a smaller key is left in the queue from which one was released by key.
    fn follows_the_keys(&self, actions: &[Action], homes: &BTreeMap<RequestId, Explanation>) {
        let sizes_matter = self.backends.values().any(|state| state.kv_tokens.is_some() || state.context_tokens.is_some());
        for action in actions {
            let Action::Release { request, facts, .. } = action else { continue };
            let Some(released) = homes.get(request).filter(|_| !(facts.aged || facts.stolen && sizes_matter)) else { continue };
            for (id, left) in homes {
                let may_be_stolen = !facts.stolen || self.requests[id].excluded.is_empty();
                // Between tenants shares decide.
                let same_tenant = self.requests[id].tenant == self.requests[request].tenant;
                if left.backend == released.backend && same_tenant && may_be_stolen && self.scheduler.explain(*id).is_some() {
                    assert!((released.phi, released.sequence) < (left.phi, left.sequence), "{request:?} went before {id:?}");
                }
            }
        }
    }

    /// One by age is the oldest of its tenant in its queue and has waited for long enough.
    fn ages_in_order(&self, actions: &[Action], homes: &BTreeMap<RequestId, Explanation>) {
        for action in actions {
            let Action::Release { request, facts: Facts { aged: true, .. }, .. } = action else { continue };
            assert!(Time::from_micros(self.now).since(self.requests[request].arrived) > self.threshold, "{request:?} is not aged");
            let Some(released) = homes.get(request) else { continue };
            let of_its_tenant = |id: &RequestId| self.requests[id].tenant == self.requests[request].tenant && self.scheduler.explain(*id).is_some();
            for (id, left) in homes.iter().filter(|(id, left)| left.backend == released.backend && of_its_tenant(id)) {
                assert!((released.arrived, released.sequence) < (left.arrived, left.sequence), "{id:?} is older than {request:?}");
            }
        }
    }

    /// Nothing is added to what runs unless the prompts at least fit the KV cache, and the engine has not said that it is full.
    fn fits(&self, request: RequestId, backend: BackendId) {
        let prompts: Vec<u64> =
            self.running.iter().filter(|(_, at)| **at == backend).map(|(id, _)| u64::from(self.requests[id].prompt_tokens)).collect();
        if prompts.is_empty() {
            return;
        }
        let needed = prompts.iter().sum::<u64>() + u64::from(self.requests[&request].prompt_tokens);
        assert!(self.backends[&backend].kv_tokens.is_none_or(|kv| needed <= kv), "{request:?} does not fit {backend:?}");
        assert!(self.kv_used.get(&backend).is_none_or(|used| *used < 0.95), "{backend:?} is full");
    }

    fn no_effect(&mut self, event: Event) {
        let before = self.scheduler.view();
        let mut actions = Vec::new();
        self.scheduler.handle(Time::from_micros(self.now), event.clone(), &mut actions);
        assert_eq!(actions, [], "{event:?}");
        assert_eq!(self.scheduler.view(), before, "{event:?}");
    }

    fn agrees_with_the_view(&self) {
        let view = self.scheduler.view();
        assert_eq!(view.waiting, self.waiting.len());
        assert_eq!(view.in_flight as usize, self.running.len());
        assert_eq!(view.waiting_bytes, self.waiting.iter().map(|id| u64::from(self.requests[id].bytes)).sum::<u64>());
        for backend in &view.backends {
            let here = self.running.values().filter(|at| **at == backend.id).count();
            assert_eq!(backend.in_flight as usize, here);
            if let Slots::Fixed(slots) = self.backends[&backend.id].slots {
                assert!(backend.window <= slots);
            }
            assert!(backend.window == 0 || takes_requests(backend.standing));
        }
    }

    /// In every window of four releases of one queue, aged ones are at most the share.
    fn ages_by_share(&self) {
        let most = (4.0 * self.share).ceil() as usize;
        for turns in self.turns.values() {
            let window = &turns[turns.len().saturating_sub(4)..];
            assert!(window.iter().filter(|aged| **aged).count() <= most, "{window:?} at share {}", self.share);
        }
    }

    /// Ends everything that is left and asserts that nothing remains of it.
    fn wind_down(mut self) {
        self.handle(Event::DrainStarted);
        for _ in 0..200 {
            while let Some((&id, _)) = self.running.iter().next() {
                self.step(&Step::Finish(0, Ending::Completed { output: 5, prompt: None }));
                assert!(!self.running.contains_key(&id));
            }
            self.advance(10_000_000);
            if self.waiting.is_empty() && self.running.is_empty() {
                let view = self.scheduler.view();
                assert_eq!((view.waiting, view.waiting_bytes, view.in_flight), (0, 0, 0));
                assert_eq!(self.scheduler.next_deadline(), None);
                return;
            }
        }
        panic!("{} wait and {} run after everything expired", self.waiting.len(), self.running.len());
    }
}

fn takes_requests(standing: Standing) -> bool {
    matches!(standing, Standing::Healthy | Standing::Probing)
}

fn nth(ids: &BTreeSet<RequestId>, pick: usize) -> Option<RequestId> {
    if ids.is_empty() { None } else { ids.iter().nth(pick % ids.len()).copied() }
}

/// A history that begins with a backend, so that something happens.
fn history(len: usize) -> impl Strategy<Value = Vec<Step>> {
    let first = BackendState {
        standing: Standing::Healthy,
        slots: Slots::Fixed(2),
        weight: Weight::ONE,
        kv_tokens: None,
        context_tokens: None,
        prefix_cache: true,
    };
    prop::collection::vec(step(), 1..len).prop_map(move |mut steps| {
        steps.insert(0, Step::Backend(0, first.clone()));
        steps
    })
}

proptest! {
    #![proptest_config(cases(120))]

    /// Properties 1 to 3, 7, 8 and 9, and the aged share of 5: every request ends exactly once, no window overflows, no slot idles, what is not known has no
    /// effect, a lost backend loses no request; across changes of policy, limits and weights.
    #[test]
    fn any_history_keeps_the_books(policy in any_policy(), steps in history(150), seed in any::<u64>()) {
        let mut world = World::new(policy, seed);
        for step in &steps {
            world.step(step);
        }
        world.wind_down();
    }

    /// Property 10, first half.
    #[test]
    fn the_same_seed_and_events_give_the_same_actions(policy in any_policy(), steps in history(100), seed in any::<u64>()) {
        let run = || {
            let mut world = World::new(policy.clone(), seed);
            steps.iter().for_each(|step| world.step(step));
            (world.log, world.scheduler.view())
        };
        prop_assert_eq!(run(), run());
    }
}

/// One backend of two fixed slots and requests of all sorts, under one policy.
fn single(policy: Policy, slots: u32) -> World {
    let mut world = World::new(policy, 1);
    let state = BackendState {
        standing: Standing::Healthy,
        slots: Slots::Fixed(slots),
        weight: Weight::ONE,
        kv_tokens: None,
        context_tokens: None,
        prefix_cache: true,
    };
    world.step(&Step::Backend(0, state));
    world
}

/// A policy that the naive scheduler can follow: it has no aged FIFO, and scores are not its order.
fn naive_policy() -> impl Strategy<Value = Policy> {
    let order = prop::sample::select(vec![Order::Fcfs, Order::Headway, Order::Uniboost]);
    let gamma = prop_oneof![Just(Gamma::Adaptive), (0.001f64..5.0).prop_map(Gamma::Fixed)];
    let lead = prop::sample::select(vec![Lead::Within(Duration::ZERO), Lead::Within(Duration::ZERO), Lead::Unlimited]);
    (order, gamma, lead).prop_map(|(order, gamma, lead)| sharing(order, gamma, (1000, 0.0), lead))
}

/// Steps that leave backends and limits alone, with requests that may go anywhere.
fn plain_steps(len: usize) -> impl Strategy<Value = Vec<Step>> {
    let arrive = arrive().prop_map(|arrive| Step::Arrive(Arrive { excluded: vec![], history: None, ..arrive }));
    let step = prop_oneof![
        5 => arrive,
        // A pushback would shrink the window.
        3 => (any::<usize>(), ending()).prop_map(|(pick, ending)| Step::Finish(pick, if ending == Ending::Pushback { Ending::Refused } else { ending })),
        1 => any::<usize>().prop_map(Step::Cancel),
        1 => (any::<usize>(), 0u32..5000).prop_map(|(pick, output)| Step::Progress(pick, output)),
        2 => (0u64..8_000_000).prop_map(Step::Advance),
        1 => naive_policy().prop_map(Step::Policy),
    ];
    prop::collection::vec(step, 1..len)
}

/// The naive scheduler of property 10: everything that waits in one Vec, and whenever somebody may go, the smallest key of those whose tenants are not ahead. Keys are
/// computed from the formulas each time.
#[derive(Default)]
struct Naive {
    waiting: Vec<Request>,
    running: BTreeMap<RequestId, Ran>,
    /// What each tenant has had, in nanoseconds of the backend.
    served: BTreeMap<Option<TenantId>, u64>,
    floor: u64,
    /// Whether tenants have shares.
    shares: bool,
}

struct Ran {
    tenant: Option<TenantId>,
    prompt: Tokens,
    expected: Tokens,
    produced: Tokens,
}

impl Naive {
    fn least(&self) -> Option<u64> {
        self.waiting.iter().map(|request| self.served[&request.tenant]).min()
    }

    /// Whose tenant waits already goes on from what it has had; whoever comes back starts with those that had least.
    fn arrived(&mut self, request: Request) {
        if !self.waiting.iter().any(|other| other.tenant == request.tenant) {
            let served = self.served.get(&request.tenant).copied().unwrap_or(0).max(self.floor).max(self.least().unwrap_or(0));
            self.served.insert(request.tenant, served);
            self.floor = self.floor.max(self.least().unwrap_or(served));
        }
        self.waiting.push(request);
    }

    fn release(&mut self, slots: usize, speed: Speed, key: impl Fn(&Request) -> i64, ran: impl Fn(&Request) -> Ran) -> Vec<RequestId> {
        let mut released = Vec::new();
        while let Some(least) = self.least().filter(|_| self.running.len() < slots) {
            let not_ahead = (0..self.waiting.len()).filter(|&index| !self.shares || self.served[&self.waiting[index].tenant] <= least);
            let next = not_ahead.min_by_key(|&index| (key(&self.waiting[index]), self.waiting[index].id)).unwrap();
            let request = self.waiting.remove(next);
            let ran = ran(&request);
            *self.served.get_mut(&request.tenant).unwrap() += nanos(speed.seconds(u64::from(ran.prompt), u64::from(ran.expected)));
            self.running.insert(request.id, ran);
            released.push(request.id);
        }
        released
    }

    /// What it took counts instead of what was expected; what the backend refused took nothing.
    fn finished(&mut self, id: RequestId, ending: Ending, speed: Speed) {
        let Ran { tenant, prompt, expected, produced } = self.running.remove(&id).unwrap();
        let served = self.served.get_mut(&tenant).unwrap();
        let work = |output: Tokens| nanos(speed.seconds(u64::from(prompt), u64::from(output)));
        let actual = if ending == Ending::Refused { 0 } else { work(produced) };
        *served = (*served + actual).saturating_sub(work(expected)).max(self.floor);
    }
}

fn nanos(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

fn output_of(ending: Ending) -> Tokens {
    match ending {
        Ending::Completed { output, .. } | Ending::Truncated { output, .. } | Ending::Cancelled { output } | Ending::Failed { output } => output,
        Ending::Pushback | Ending::Refused | Ending::Uncounted => 0,
    }
}

proptest! {
    #![proptest_config(cases(100))]

    /// Property 10, second half, and 4, across changes of policy: the same releases as a scheduler of twenty lines.
    #[test]
    fn releases_what_a_naive_scheduler_releases(first in naive_policy(), slots in 1usize..4, steps in plain_steps(150)) {
        let mut naive = Naive { shares: first.lead() != Lead::Unlimited, ..Naive::default() };
        let mut world = single(first, slots as u32);
        for step in &steps {
            let (logged, known) = (world.log.len(), world.requests.len());
            let advance = matches!(step, Step::Advance(_));
            let running: BTreeSet<RequestId> = world.running.keys().copied().collect();
            let output = match step {
                Step::Progress(pick, output) => nth(&running, *pick).map(|id| (id, *output)),
                Step::Finish(pick, ending) => nth(&running, *pick).map(|id| (id, output_of(*ending))),
                _ => None,
            };
            world.step(step);
            if let Step::Policy(policy) = step {
                naive.shares = policy.lead() != Lead::Unlimited;
            }
            let actions = &world.log[logged..];
            let facts: BTreeMap<RequestId, Tokens> = actions.iter().filter_map(|action| match action {
                Action::Release { request, facts, .. } => Some((*request, facts.expected_output)),
                Action::Reject { .. } => None,
            }).collect();
            let released: Vec<RequestId> = facts_in_order(actions);
            let accepted = |request: &Request| world.waiting.contains(&request.id) || facts.contains_key(&request.id);
            naive.waiting.retain(accepted);
            if let Some(request) = world.requests.values().next_back().filter(|request| world.requests.len() > known && accepted(request)) {
                naive.arrived(request.clone());
            }

            let view = world.scheduler.view();
            let order = view.order;
            let boost = Boost::new(view.gamma, view.max_overtake, view.longest_work);
            let key = |request: &Request| {
                let prompt = u64::from(request.prompt_tokens);
                // The estimate of an output is the scheduler's own; it is tested apart.
                let output = facts.get(&request.id).copied().unwrap_or_else(|| world.scheduler.explain(request.id).unwrap().expected_output);
                let output = if order == Order::Uniboost { 0 } else { u64::from(output) };
                let attained = view.speed.seconds(0, u64::from(attained_level(request.attained)));
                let work = view.speed.seconds(prompt, output).max(attained).max(view.speed.seconds(1, 1));
                match order {
                    Order::Fcfs => request.arrived.as_micros() as i64,
                    _ if view.mode == Mode::Overload => (work / request.weight.get() * 1e9) as i64,
                    _ => boost.boosted_arrival(request.arrived, work, request.weight),
                }
            };
            let service = |request: &Request| {
                let output = facts.get(&request.id).copied().unwrap_or(0);
                Ran { tenant: request.tenant, prompt: request.prompt_tokens, expected: output, produced: 0 }
            };
            if let Some((id, output)) = output {
                let ran = naive.running.get_mut(&id).unwrap();
                ran.produced = ran.produced.max(output);
            }
            if let (Step::Finish(_, ending), Some((id, _))) = (step, output) {
                naive.finished(id, *ending, view.speed);
            }
            // While time passes requests also expire, one tick after another; who is left is compared, and nobody is released.
            prop_assert!(!advance || released.is_empty());
            prop_assert_eq!(naive.release(slots, view.speed, key, service), released);
            prop_assert_eq!(naive.running.len(), world.running.len());
        }
    }
}

fn facts_in_order(actions: &[Action]) -> Vec<RequestId> {
    actions.iter().filter_map(|action| if let Action::Release { request, .. } = action { Some(*request) } else { None }).collect()
}

/// A request that only differs in what a test is about.
fn plain(prompt: Tokens, weight: f64) -> Arrive {
    Arrive {
        prompt,
        score: None,
        version: 0,
        max_output: Some(100),
        attained: 0,
        weight,
        patience: 1_000_000,
        late: 0,
        bytes: 1,
        unscored: false,
        excluded: vec![],
        history: None,
    }
}

/// Lets requests arrive behind one that runs, at most 30 at these intervals, and tells the order in which they are released, by position.
fn order_of(policy: Policy, requests: &[(u64, Arrive)]) -> Vec<u64> {
    let mut world = single(policy, 1);
    world.step(&Step::Arrive(plain(1, 1.0)));
    for (after, arrive) in requests {
        world.advance(*after);
        world.step(&Step::Arrive(arrive.clone()));
    }
    let before = world.log.len();
    for _ in requests {
        world.step(&Step::Finish(0, Ending::Refused));
    }
    facts_in_order(&world.log[before..]).iter().map(|id| id.0 - 2).collect()
}

proptest! {
    #![proptest_config(cases(60))]

    /// Property 6: equal work is first come, first served, whatever gamma; and so is any work with a gamma so large that nothing is boosted.
    #[test]
    fn equal_work_or_a_large_gamma_is_arrival(
        gamma in 1e-4f64..1e3,
        requests in prop::collection::vec((1u64..500_000, 1u32..3000), 1..30),
    ) {
        let arrival: Vec<u64> = (0..requests.len() as u64).collect();
        let equal: Vec<_> = requests.iter().map(|(after, _)| (*after, plain(500, 1.0))).collect();
        prop_assert_eq!(order_of(policy(Order::Headway, Gamma::Fixed(gamma), (100_000, 0.0)), &equal), arrival.clone());
        let mixed: Vec<_> = requests.iter().map(|(after, prompt)| (*after, plain(*prompt, 1.0))).collect();
        prop_assert_eq!(order_of(policy(Order::Headway, Gamma::Fixed(1e9), (100_000, 0.0)), &mixed), arrival);
    }

    /// Property 6: a gamma so small that arrival hardly counts is shortest work first. Up to 1.5 times the mean work, and within a factor of e^4 below:
    /// beyond that B flattens the order.
    #[test]
    fn a_small_gamma_is_shortest_first(prompts in prop::collection::btree_set(1u32..2_500, 1..30), seed in any::<u64>()) {
        let mut shuffled: Vec<(u64, Tokens)> = prompts.iter().map(|&prompt| (u64::from(prompt).wrapping_mul(seed | 1), prompt)).collect();
        shuffled.sort_unstable();
        let requests: Vec<_> = shuffled.iter().map(|(_, prompt)| (1000, plain(*prompt, 1.0))).collect();
        let mut by_work: Vec<u64> = (0..requests.len() as u64).collect();
        by_work.sort_by_key(|&position| shuffled[position as usize].1);
        prop_assert_eq!(order_of(policy(Order::Headway, Gamma::Fixed(1e-7), (100_000, 0.0)), &requests), by_work);
    }

    /// Property 5: nobody is overtaken by one that arrived more than B later. `order_of` checks the aged share beside it.
    #[test]
    fn overtaking_is_bounded(
        gamma in 0.05f64..5.0,
        order in prop::sample::select(vec![Order::Headway, Order::Uniboost]),
        // A promise of its own, or what gamma allows.
        promised in prop::option::of(1.0f64..3.0),
        requests in prop::collection::vec((1u64..20_000_000, prop_oneof![1u32..20, 1u32..100_000]), 2..30),
    ) {
        let mut at = 0;
        let arrivals: Vec<u64> = requests.iter().map(|(after, _)| { at += after; at }).collect();
        let requests: Vec<_> = requests.iter().map(|(after, prompt)| (*after, plain(*prompt, 1.0))).collect();
        let seconds = 4.001 / gamma * promised.unwrap_or(1.0);
        let policy = Policy::new(PolicyParts {
            order,
            gamma: Gamma::Fixed(gamma),
            max_overtake: if promised.is_some() { MaxOvertake::Within(Duration::from_secs_f64(seconds)) } else { MaxOvertake::Auto },
            aging_threshold: Duration::from_secs(100_000),
            aging_share: 0.0,
            lead: Lead::Auto,
            overload: false,
        }).unwrap();
        let bound = (seconds * 1e6) as u64;
        let released = order_of(policy, &requests);
        let mut latest = 0;
        for position in released {
            let arrived = arrivals[position as usize];
            prop_assert!(latest <= arrived + bound, "overtaken by one that arrived {} us later, B is {}", latest - arrived, bound);
            latest = latest.max(arrived);
        }
    }

    /// Property 6: the boost falls strictly with work and stays finite over the range that occurs; a change of the unit of time changes nothing.
    #[test]
    fn the_boost_falls_and_has_no_unit(exponent in -9.0f64..3.0, step in 1.001f64..10.0, unit in -6.0f64..6.0, gamma in -3.0f64..1.0) {
        let (gamma, unit) = (10f64.powf(gamma), 10f64.powf(unit));
        let work = 10f64.powf(exponent) / gamma;
        let (here, longer) = (boost(gamma, work), boost(gamma, work * step));
        prop_assert!(here.is_finite() && longer.is_finite() && longer >= 0.0);
        // Beyond gamma * work of about 700 a boost is below the smallest number there is.
        prop_assert!(here > longer || gamma * work > 700.0, "{} then {}", here, longer);
        let scaled = boost(gamma / unit, work * unit) / unit;
        prop_assert!((scaled - here).abs() <= here * 1e-9 + f64::MIN_POSITIVE / unit, "{} against {}", scaled, here);
    }

    /// The boost against its definition, where that keeps its digits.
    #[test]
    fn the_boost_is_what_its_formula_says(product in 1e-3f64..20.0, gamma in 1e-3f64..10.0) {
        let expected = (1.0 / (1.0 - (-product).exp())).ln() / gamma;
        prop_assert!((boost(gamma, product / gamma) - expected).abs() <= expected * 1e-6);
    }

    /// A heavier request goes ahead of an equal one, by ln(weight) / gamma and no more.
    #[test]
    fn weight_is_time_ahead(gamma in 0.01f64..1.0, weight in 1.5f64..20.0) {
        let ahead = (f64::from(weight as f32).ln() / gamma * 1e6) as u64;
        let order = |gap: u64| {
            let requests = [(0, plain(500, 1.0)), (gap, plain(500, weight))];
            order_of(policy(Order::Headway, Gamma::Fixed(gamma), (100_000, 0.0)), &requests)
        };
        prop_assert_eq!(order(ahead - 1000), [1, 0]);
        prop_assert_eq!(order(ahead + 1000), [0, 1]);
    }
}
