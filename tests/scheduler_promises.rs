//! Promises of the scheduling core, one scene each: what a policy orders by, who waits for room, who takes from whom, who is turned away.
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::sync::Arc;
use std::time::Duration;

use headway::scheduler::*;

fn policy(order: Order, aging_share: f64) -> Policy {
    let parts = PolicyParts {
        order,
        gamma: Gamma::Fixed(0.1),
        max_overtake: MaxOvertake::Auto,
        aging_threshold: Duration::from_secs(100),
        aging_share,
        lead: Lead::Auto,
        overload: true,
    };
    Policy::new(parts).unwrap()
}

/// An order by keys alone, whoever sends.
fn sharing_unlimited(order: Order) -> Policy {
    let by_default = policy(order, 0.0);
    let parts = PolicyParts {
        order,
        gamma: by_default.gamma(),
        max_overtake: by_default.max_overtake(),
        aging_threshold: by_default.aging_threshold(),
        aging_share: 0.0,
        lead: Lead::Unlimited,
        overload: true,
    };
    Policy::new(parts).unwrap()
}

struct Pool {
    scheduler: Scheduler,
    now: Time,
}

impl Pool {
    fn new(policy: Policy, seed: u64) -> Self {
        let limits = Limits { queue_requests: 10_000, queue_bytes: 1 << 30, max_output: 4096 };
        Pool { scheduler: Scheduler::new(policy, limits, seed), now: Time::ZERO }
    }

    /// A pool of one backend with one slot, which request 0 holds.
    fn busy(policy: Policy) -> Self {
        let mut pool = Pool::new(policy, 1);
        pool.backend(0, slots(1));
        assert_eq!(pool.arrive(request(0)), [(0, 0)]);
        pool
    }

    fn wait(&mut self, seconds: u64) {
        let until = self.now.after(Duration::from_secs(seconds));
        while self.now < until {
            self.now = self.now.after(Duration::from_secs(1));
            self.actions(Event::Tick);
        }
    }

    fn actions(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.scheduler.handle(self.now, event, &mut actions);
        assert_eq!(invariants::all(&self.scheduler, &actions), Ok(()));
        actions
    }

    /// Who is released where, when nobody should be turned away.
    fn released(&mut self, event: Event) -> Vec<(u64, u32)> {
        let released = |action: &Action| match action {
            Action::Release { request, backend, .. } => (request.0, backend.0),
            Action::Reject { .. } => panic!("{action:?}"),
        };
        self.actions(event).iter().map(released).collect()
    }

    fn rejected(&mut self, event: Event) -> Option<(Reason, RetryAfter)> {
        match *self.actions(event) {
            [] => None,
            [Action::Reject { reason, retry_after, .. }] => Some((reason, retry_after)),
            ref actions => panic!("{actions:?}"),
        }
    }

    fn backend(&mut self, id: u32, state: BackendState) -> Vec<(u64, u32)> {
        self.released(Event::BackendChanged(BackendId(id), state))
    }

    fn arrive(&mut self, request: Request) -> Vec<(u64, u32)> {
        let arrived = request.arrived.max(self.now);
        self.released(Event::Arrived(Request { arrived, ..request }))
    }

    /// Frees slots until nobody is left, and tells in which order they were released and who by age.
    fn order(&mut self, first: u64) -> Vec<(u64, bool)> {
        let (mut order, mut running) = (Vec::new(), first);
        while let [Action::Release { request, facts, .. }] = *self.actions(Event::Finished(RequestId(running), Ending::Refused)) {
            order.push((request.0, facts.aged));
            running = request.0;
        }
        order
    }

    fn ids_in_order(&mut self) -> Vec<u64> {
        self.order(0).into_iter().map(|(id, _)| id).collect()
    }
}

fn slots(slots: u32) -> BackendState {
    BackendState {
        standing: Standing::Healthy,
        slots: Slots::Fixed(slots),
        weight: Weight::ONE,
        kv_tokens: None,
        context_tokens: None,
        prefix_cache: true,
    }
}

fn request(id: u64) -> Request {
    Request {
        id: RequestId(id),
        arrived: Time::ZERO,
        model: ModelId(0),
        score: None,
        prompt_tokens: 100,
        max_output: Some(100),
        attained: 0,
        weight: Weight::ONE,
        share: Weight::ONE,
        expires: Time::MAX,
        bytes: 1,
        unscored: false,
        excluded: Vec::new(),
        tenant: None,
        history: None,
        oracle_output: None,
    }
}

fn prompt(id: u64, prompt_tokens: Tokens) -> Request {
    Request { prompt_tokens, ..request(id) }
}

fn scored(id: u64, score: f32, version: u32) -> Request {
    Request { score: Score::new(score).map(|score| Scored { score, version: RankerVersion(version) }), ..request(id) }
}

#[test]
fn each_policy_orders_by_what_it_says() {
    // Long prompts first, then long answers, then short ones of both; the scores say something else. All within what boosts tell apart.
    let requests = [
        Request { prompt_tokens: 350, max_output: Some(10), oracle_output: Some(300), ..scored(1, -3.0, 1) },
        Request { prompt_tokens: 300, max_output: Some(4000), oracle_output: Some(1), ..scored(2, 2.0, 1) },
        Request { prompt_tokens: 20, max_output: Some(300), oracle_output: Some(150), ..scored(3, 1.0, 1) },
        Request { prompt_tokens: 200, max_output: Some(20), oracle_output: Some(1000), ..scored(4, 4.0, 1) },
    ];
    let orders = [
        (Order::Fcfs, [1, 2, 3, 4]),
        (Order::Pars, [1, 3, 2, 4]),
        (Order::Uniboost, [3, 4, 2, 1]),
        (Order::Headway, [1, 4, 3, 2]),
        (Order::OracleSjf, [2, 3, 1, 4]),
        (Order::OracleBoost, [2, 3, 1, 4]),
    ];
    for (order, expected) in orders {
        let mut pool = Pool::busy(policy(order, 0.0));
        requests.iter().for_each(|request| assert_eq!(pool.arrive(request.clone()), []));
        assert_eq!(pool.ids_in_order(), expected, "{order:?}");
    }
}

#[test]
fn without_a_comparable_score_the_median_stands_in() {
    let mut pool = Pool::busy(policy(Order::Pars, 0.0));
    for (id, score) in [(1, 1.0), (2, 5.0), (3, 3.0), (4, -2.0), (5, 8.0)] {
        pool.arrive(scored(id, score, 2));
    }
    // The keys are made with the median of the scores seen by then.
    pool.released(Event::PolicyChanged(policy(Order::Pars, 0.0)));
    pool.arrive(request(6));
    pool.arrive(scored(7, 100.0, 1));
    assert_eq!(pool.ids_in_order(), [4, 1, 3, 6, 7, 2, 5]);
}

/// Twenty aged and twenty fresh that are ahead by key: a quarter by age means every fourth. The release of request 0 has earned a share already.
#[test]
fn the_aged_get_their_share_and_no_more() {
    for (share, expected) in [(0.0, "kkkkkkkkkkkk"), (0.25, "kkakkkakkkak"), (0.5, "akakakakakak"), (0.75, "aaakaaakaaak"), (1.0, "aaaaaaaaaaaa")] {
        let mut pool = Pool::busy(policy(Order::Headway, share));
        // Long ones: last by key, whenever they came.
        (100..120).for_each(|id| drop(pool.arrive(prompt(id, 4_000_000))));
        pool.wait(100);
        (1..20).for_each(|id| drop(pool.arrive(prompt(id, 10))));
        let at_threshold = pool.scheduler.view().aged;
        pool.wait(1);
        assert_eq!((at_threshold, pool.scheduler.view().aged), (0, 20));
        let order = pool.order(0);
        let turns: String = order[..12].iter().map(|(_, aged)| if *aged { 'a' } else { 'k' }).collect();
        assert_eq!(turns, expected, "at share {share}");
        let aged: Vec<u64> = order.iter().map(|(id, _)| *id).filter(|id| *id >= 100).collect();
        assert!(aged.is_sorted(), "oldest first");
        assert_eq!(pool.scheduler.view().counters.aged, order.iter().filter(|(_, aged)| *aged).count() as u64);
    }
}

#[test]
fn nothing_passes_what_waits_for_kv_cache() {
    let mut pool = Pool::new(policy(Order::Fcfs, 0.0), 1);
    let state = BackendState { kv_tokens: Some(1000), ..slots(10) };
    pool.backend(0, state.clone());
    // One token of output is allowed and expected, so that sizes are exact: 400 each.
    let prompt = |id, prompt_tokens| Request { max_output: Some(1), ..prompt(id, prompt_tokens) };
    assert_eq!(pool.arrive(prompt(1, 399)), [(1, 0)]);
    assert_eq!(pool.arrive(prompt(2, 399)), [(2, 0)]);
    assert_eq!(pool.arrive(prompt(3, 200)), []);
    assert_eq!(pool.arrive(prompt(4, 100)), []);
    assert_eq!(pool.released(Event::Progress(RequestId(1), 1)), []);
    assert_eq!(pool.released(Event::Finished(RequestId(1), Ending::Refused)), [(3, 0), (4, 0)]);
    // 400, 201 and 101 are promised.
    assert_eq!(pool.arrive(prompt(5, 298)), [], "one token too many");
    assert_eq!(pool.backend(0, BackendState { kv_tokens: Some(1001), ..state }), [(5, 0)]);
    assert_eq!(pool.arrive(prompt(6, 900)), []);
    for id in [2, 3, 4] {
        assert_eq!(pool.released(Event::Finished(RequestId(id), Ending::Refused)), []);
    }
    assert_eq!(pool.released(Event::Finished(RequestId(5), Ending::Refused)), [(6, 0)]);
}

#[test]
fn a_full_kv_cache_takes_nothing_beside_what_runs() {
    let mut pool = Pool::new(policy(Order::Fcfs, 0.0), 1);
    pool.backend(0, slots(10));
    let load = |kv_used| Event::LoadReported(BackendId(0), Load { kv_used, ..Load::default() });
    pool.released(load(Some(0.95)));
    assert_eq!(pool.arrive(request(1)), [(1, 0)], "an empty backend takes any");
    assert_eq!(pool.arrive(request(2)), []);
    assert_eq!(pool.released(load(Some(0.94))), [(2, 0)]);
    pool.released(load(Some(0.99)));
    assert_eq!(pool.arrive(request(3)), []);
    assert_eq!(pool.released(load(None)), [(3, 0)], "unknown is not full");
}

#[test]
fn what_no_backend_has_room_for_is_refused_at_once() {
    let mut pool = Pool::new(policy(Order::Fcfs, 0.0), 1);
    pool.backend(0, BackendState { kv_tokens: Some(1000), ..slots(1) });
    pool.backend(1, BackendState { context_tokens: Some(600), ..slots(1) });
    // 700 and 100 only fit the first; 500 and 100 fit both.
    assert_eq!(pool.arrive(prompt(1, 700)), [(1, 0)]);
    assert_eq!(pool.arrive(prompt(2, 501)), [], "not the second, although it is free");
    assert_eq!(pool.arrive(prompt(3, 500)), [(3, 1)]);
    // Estimates may be off by a quarter.
    assert_eq!(pool.rejected(Event::Arrived(prompt(4, 1334))).unwrap().0, Reason::TooLarge);
    assert_eq!(pool.rejected(Event::Arrived(prompt(5, 1333))), None);
    assert_eq!(pool.rejected(Event::Arrived(Request { excluded: vec![BackendId(1)], ..prompt(6, 1400) })).unwrap().0, Reason::TooLarge);
    assert_eq!(
        pool.rejected(Event::Arrived(Request { excluded: vec![BackendId(0), BackendId(1)], ..prompt(7, 10) })).unwrap().0,
        Reason::NoOtherBackend
    );
}

/// A prompt that fills a cache leaves no room for an answer: a backend without that limit has to do it, where there is one.
#[test]
fn a_prompt_as_large_as_the_cache_goes_elsewhere() {
    let mut pool = Pool::new(policy(Order::Fcfs, 0.0), 1);
    pool.backend(0, BackendState { kv_tokens: Some(1000), ..slots(1) });
    pool.backend(1, slots(0));
    assert_eq!(pool.arrive(prompt(1, 1000)), []);
    assert_eq!(pool.arrive(prompt(2, 999)), [(2, 0)]);
}

#[test]
fn a_backend_with_room_takes_the_first_of_all_its_siblings() {
    let mut pool = Pool::new(policy(Order::Headway, 0.0), 1);
    pool.backend(0, slots(1));
    pool.backend(1, slots(1));
    pool.arrive(request(1));
    pool.arrive(request(2));
    for (id, tokens) in [(3, 900), (4, 500), (5, 700), (6, 300), (7, 1100)] {
        assert_eq!(pool.arrive(prompt(id, tokens)), []);
    }
    pool.arrive(Request { excluded: vec![BackendId(2)], ..prompt(8, 10) });
    let queues: Vec<usize> = pool.scheduler.view().backends.iter().map(|backend| backend.waiting).collect();
    assert!(queues.iter().all(|waiting| *waiting >= 2), "{queues:?}");
    assert_eq!(pool.backend(2, slots(2)), [(6, 2), (4, 2)]);
    assert_eq!(pool.released(Event::Finished(RequestId(6), Ending::Refused)), [(5, 2)]);
    assert_eq!(pool.scheduler.view().counters.stolen, 3);
    assert!(pool.scheduler.explain(RequestId(8)).is_some(), "it has been there");
}

#[test]
fn requests_join_where_they_would_be_done_first() {
    // By weight, as long as speeds are not known.
    let mut pool = Pool::new(policy(Order::Fcfs, 0.0), 1);
    pool.backend(0, slots(0));
    pool.backend(1, BackendState { weight: Weight::new(3.0).unwrap(), ..slots(0) });
    (0..400).for_each(|id| drop(pool.arrive(request(id))));
    let queues: Vec<usize> = pool.scheduler.view().backends.iter().map(|backend| backend.waiting).collect();
    assert!((98..=102).contains(&queues[0]) && queues[0] + queues[1] == 400, "{queues:?}");

    // Where the beginning of the prompt is known, unless the wait for it costs more; between equals, anywhere.
    let conversation = |id| Request { history: Some(Arc::new(History::new([Prefix { hash: 7, tokens: 900 }], None))), ..prompt(id, 1000) };
    let mut elsewhere = 0;
    for seed in 0..40 {
        let mut pool = Pool::new(policy(Order::Fcfs, 0.0), seed);
        pool.backend(0, slots(1));
        pool.backend(1, slots(1));
        let [(1, home)] = pool.arrive(conversation(1))[..] else { panic!() };
        elsewhere += home;
        pool.released(Event::Finished(RequestId(1), Ending::Refused));
        assert_eq!(pool.arrive(conversation(2)), [(2, home)]);
        assert_eq!(pool.arrive(conversation(3)), [(3, 1 - home)], "work is ahead of it at home");
    }
    assert!((10..=30).contains(&elsewhere), "{elsewhere} of 40");
}

/// Turn `turn` of a conversation, each of 1,000 tokens: its prompt ends where the answer to the turn before began, and a turn later.
fn turn(id: u64, conversation: u64, turn: u32) -> Request {
    let end = |turn: u32| Prefix { hash: (conversation << 32 | u64::from(turn)).wrapping_mul(0x9e37_79b9_7f4a_7c15), tokens: 1000 * turn };
    Request { history: Some(Arc::new(History::new([end(turn - 1), end(turn)], None))), ..prompt(id, 1000 * turn) }
}

#[test]
fn a_conversation_goes_on_where_it_was() {
    let mut homes = Vec::new();
    for seed in 0..20 {
        let mut pool = Pool::new(policy(Order::Fcfs, 0.0), seed);
        (0..4).for_each(|id| drop(pool.backend(id, slots(1))));
        let mut work = Vec::new();
        let mut at = Vec::new();
        for number in 1..=6 {
            let [Action::Release { request, backend, facts }] = pool.actions(Event::Arrived(turn(u64::from(number), 1, number)))[..] else {
                panic!()
            };
            at.push(backend.0);
            work.push(facts.work);
            pool.released(Event::Finished(request, Ending::Refused));
        }
        assert!(at.iter().all(|backend| *backend == at[0]), "{at:?}");
        assert!(work.iter().all(|other| (other - work[0]).abs() < 1e-6), "each turn has a thousand tokens to compute: {work:?}");
        homes.push(at[0]);

        // It may have started anew since.
        let state = slots(1);
        pool.backend(at[0], BackendState { standing: Standing::Ejected, ..state.clone() });
        pool.backend(at[0], state);
        let [Action::Release { facts, .. }] = pool.actions(Event::Arrived(turn(7, 1, 7)))[..] else { panic!() };
        assert!(facts.work > 3.0 * work[0], "all of it has to be computed: {} s", facts.work);
    }
    homes.sort_unstable();
    homes.dedup();
    assert_eq!(homes.len(), 4, "a first turn goes anywhere");
}

#[test]
fn without_a_prefix_cache_a_turn_goes_anywhere() {
    let mut elsewhere = 0;
    for seed in 0..40 {
        let mut pool = Pool::new(policy(Order::Fcfs, 0.0), seed);
        (0..2).for_each(|id| drop(pool.backend(id, BackendState { prefix_cache: false, ..slots(1) })));
        let [(1, first)] = pool.arrive(turn(1, 1, 1))[..] else { panic!() };
        pool.released(Event::Finished(RequestId(1), Ending::Refused));
        let [(2, second)] = pool.arrive(turn(2, 1, 2))[..] else { panic!() };
        elsewhere += u32::from(first != second);
    }
    assert!((10..=30).contains(&elsewhere), "{elsewhere} of 40");
}

#[test]
fn what_a_cache_has_no_room_for_is_not_there() {
    let mut pool = Pool::new(policy(Order::Fcfs, 0.0), 1);
    pool.backend(0, BackendState { kv_tokens: Some(4096), ..slots(1) });
    let work = |pool: &mut Pool, request: Request| {
        let id = request.id;
        let [Action::Release { facts, .. }] = pool.actions(Event::Arrived(request))[..] else { panic!() };
        pool.released(Event::Finished(id, Ending::Refused));
        facts.work
    };
    let first = work(&mut pool, turn(1, 1, 1));
    assert!((work(&mut pool, turn(2, 1, 2)) - first).abs() < 1e-6);
    for other in 0..4 {
        work(&mut pool, turn(10 + other, 2 + other, 1));
    }
    assert!(work(&mut pool, turn(3, 1, 3)) > 1.5 * first, "four thousand other tokens came since");
}

/// What a session has had counts as work of its next request, and only for its own tenant.
#[test]
fn a_session_that_had_much_goes_behind_one_that_had_little() {
    let of = |id, session, tenant| {
        let history = Some(Arc::new(History::new([], session)));
        Request { history, tenant: Some(TenantId(tenant)), max_output: Some(2000), ..request(id) }
    };
    let headway = || sharing_unlimited(Order::Headway);
    let mut pool = Pool::busy(headway());
    pool.arrive(of(1, Some(7), 1));
    pool.released(Event::Finished(RequestId(0), Ending::Refused));
    assert_eq!(pool.released(Event::Finished(RequestId(1), Ending::Completed { output: 2000, prompt: None })), []);
    pool.arrive(request(10));
    // The same name of another tenant's is another session; so is none.
    pool.arrive(of(11, Some(7), 1));
    pool.arrive(of(12, Some(7), 2));
    pool.arrive(of(13, Some(8), 1));
    pool.arrive(of(14, None, 1));
    let work = |pool: &Pool, id| pool.scheduler.explain(RequestId(id)).unwrap().work;
    assert!(work(&pool, 11) >= pool.scheduler.view().speed.seconds(0, 1024), "{}", work(&pool, 11));
    assert!([12, 13, 14].iter().all(|&id| work(&pool, id) < work(&pool, 11)));
    assert_eq!(pool.order(10).into_iter().map(|(id, _)| id).collect::<Vec<_>>(), [12, 13, 14, 11]);

    // It fades: half in five minutes.
    let mut pool = Pool::busy(headway());
    pool.arrive(of(1, Some(7), 1));
    pool.released(Event::Finished(RequestId(0), Ending::Refused));
    pool.released(Event::Finished(RequestId(1), Ending::Completed { output: 2000, prompt: None }));
    pool.wait(3600);
    pool.arrive(request(10));
    pool.arrive(of(11, Some(7), 1));
    pool.arrive(of(12, None, 1));
    assert_eq!(work(&pool, 11), work(&pool, 12));
}

/// Two seconds of work each: prompts are assumed to take 25 us a token.
fn heavy(id: u64) -> Request {
    Request { max_output: Some(1), ..prompt(id, 80_000) }
}

/// A pool to which two seconds of work came every second of a minute.
fn overloaded(order: Order) -> Pool {
    let mut pool = Pool::busy(policy(order, 0.25));
    for id in 1..60 {
        assert!(id != 40 || pool.scheduler.view().mode == Mode::Normal);
        pool.wait(1);
        pool.arrive(heavy(id));
    }
    let view = pool.scheduler.view();
    assert_eq!((view.mode, view.counters.overloads), (Mode::Overload, 1));
    assert!((view.backlog - 118.0).abs() < 2.0, "{}", view.backlog);
    pool
}

#[test]
fn overload_by_arrival_sheds_whom_the_whole_queue_is_too_long_for() {
    let mut pool = overloaded(Order::Fcfs);
    let soon = pool.now.after(Duration::from_secs(20));
    let (reason, retry_after) = pool.rejected(Event::Arrived(Request { expires: soon, ..prompt(1000, 10) })).unwrap();
    assert_eq!(reason, Reason::Shed);
    assert!((97..=100).contains(&retry_after), "{retry_after}");
    assert_eq!(pool.rejected(Event::Arrived(prompt(1001, 10))), None);
}

#[test]
fn a_backlog_that_grows_is_overload_until_it_is_small() {
    let mut pool = overloaded(Order::Headway);
    // By work alone: a small one is next although it arrived last, and is not turned away although its time is short.
    let soon = pool.now.after(Duration::from_secs(20));
    assert_eq!(pool.arrive(Request { expires: soon, max_output: Some(1), ..prompt(1000, 10) }), []);
    // Half of what is as large goes before another heavy one: 59 s.
    let (reason, retry_after) = pool.rejected(Event::Arrived(Request { expires: soon, ..heavy(1001) })).unwrap();
    assert_eq!(reason, Reason::Shed);
    assert!((37..=41).contains(&retry_after), "{retry_after}");
    let later = pool.now.after(Duration::from_secs(61));
    assert_eq!(pool.rejected(Event::Arrived(Request { expires: later, ..heavy(1002) })), None);
    assert_eq!(pool.released(Event::Finished(RequestId(0), Ending::Refused)), [(1000, 0)]);

    (1..=50).for_each(|id| drop(pool.actions(Event::Cancelled(RequestId(id)))));
    pool.wait(25);
    assert_eq!(pool.scheduler.view().mode, Mode::Overload);
    pool.wait(10);
    assert_eq!(pool.scheduler.view().mode, Mode::Normal);
}

#[test]
fn a_drain_takes_only_what_was_accepted_before() {
    let mut pool = Pool::busy(policy(Order::Fcfs, 0.0));
    pool.backend(1, slots(0));
    pool.released(Event::DrainStarted);
    assert_eq!(pool.rejected(Event::Arrived(request(1))).unwrap().0, Reason::Draining);
    assert_eq!(pool.rejected(Event::Arrived(Request { excluded: vec![BackendId(1)], ..request(2) })), None);
    assert_eq!(pool.ids_in_order(), [2]);
}

#[test]
fn what_runs_counts_with_what_is_left_of_it() {
    let mut pool = Pool::new(policy(Order::Fcfs, 0.0), 1);
    pool.backend(0, slots(1));
    let mut backlog = |event| {
        pool.released(event);
        let view = pool.scheduler.view();
        (view.backends[0].backlog / view.speed.output).round() as u32
    };
    // Twenty prompt tokens cost as much as one of output. Of 300 allowed tokens 177 are expected: exponential of mean 256, cut.
    let long = Request { prompt_tokens: 2000, max_output: Some(300), ..request(1) };
    let expected = backlog(Event::Arrived(long)) - 100;
    assert!((170..=185).contains(&expected), "{expected}");
    assert_eq!(backlog(Event::Progress(RequestId(1), 50)), expected - 50);
    assert_eq!(backlog(Event::Progress(RequestId(1), 40)), expected - 50, "it does not run backwards");
    // Longer than expected: a quarter of what came is expected once more, as far as it is allowed.
    assert_eq!(backlog(Event::Progress(RequestId(1), 200)), 50);
    assert_eq!(backlog(Event::Progress(RequestId(1), 280)), 20);
    assert_eq!(backlog(Event::Progress(RequestId(1), 400)), 0);
    assert_eq!(backlog(Event::Finished(RequestId(1), Ending::Completed { output: 400, prompt: None })), 0);
    assert_eq!(backlog(Event::Arrived(Request { unscored: true, ..prompt(2, 2000) })), 100, "no output is expected of what produces none");
}

#[test]
fn a_full_backend_tells_how_fast_it_is() {
    let mut pool = Pool::new(policy(Order::Headway, 0.0), 1);
    pool.backend(0, slots(2));
    pool.backend(1, BackendState { weight: Weight::new(2.0).unwrap(), ..slots(0) });
    let long = |id| Request { max_output: None, excluded: vec![BackendId(1)], ..prompt(id, 1) };
    // Half full: what comes says nothing of what could.
    pool.arrive(long(1));
    for second in 1..20 {
        pool.wait(1);
        pool.released(Event::Progress(RequestId(1), second * 10));
    }
    assert!(!pool.scheduler.view().backends[0].speed_learnt);
    pool.arrive(long(2));
    for second in 1..20 {
        pool.wait(1);
        pool.released(Event::Progress(RequestId(1), 1000 + second * 300));
        pool.released(Event::Progress(RequestId(2), second * 200));
    }
    let view = pool.scheduler.view();
    let output = view.backends[0].speed.output;
    assert!(view.backends[0].speed_learnt && (output * 500.0 - 1.0).abs() < 0.1, "{output}");
    assert!(!view.backends[1].speed_learnt);
    assert!((view.backends[1].speed.output * 2.0 / output - 1.0).abs() < 1e-9, "one of twice the weight is assumed to be twice as fast");
}

/// Outside of overload too, once speeds are known; but only where it is hopeless.
#[test]
fn what_cannot_be_started_in_time_is_refused_at_once() {
    let mut pool = Pool::new(policy(Order::Headway, 0.0), 1);
    pool.backend(0, slots(1));
    let long = |id| Request { max_output: None, ..prompt(id, 1) };
    pool.arrive(long(0));
    (1..=20).for_each(|id| drop(pool.arrive(long(id))));
    let soon = |pool: &Pool, seconds| pool.now.after(Duration::from_secs(seconds));
    let early = Request { expires: soon(&pool, 1), ..long(100) };
    assert_eq!(pool.rejected(Event::Arrived(early)), None, "nobody knows how fast the backend is");
    for second in 1..20 {
        pool.wait(1);
        pool.released(Event::Progress(RequestId(0), second * 10));
    }
    // All of one size: half of them go before, at ten tokens a second.
    let view = pool.scheduler.view();
    assert!(view.mode == Mode::Normal && view.backends[0].speed_learnt && view.backlog > 300.0, "{view:?}");
    let half = view.backlog as u64 / 2;
    let within = |seconds, id| Event::Arrived(Request { expires: soon(&pool, seconds), ..long(id) });
    let (hopeless, doubtful) = (within(half * 2 / 3 - 2, 101), within(half * 2 / 3 + 2, 102));
    let (reason, retry_after) = pool.rejected(hopeless).unwrap();
    assert_eq!(reason, Reason::Shed);
    assert!((half / 3..half / 3 + 5).contains(&u64::from(retry_after)), "{retry_after} of {half}");
    assert_eq!(pool.rejected(doubtful), None);
}

#[test]
fn mean_work_is_that_of_the_requests_there_are() {
    let mut pool = Pool::new(policy(Order::Headway, 0.0), 1);
    pool.backend(0, slots(1));
    for id in 0..3000 {
        pool.arrive(prompt(id, 2000));
        pool.released(Event::Finished(RequestId(id), Ending::Completed { output: 50, prompt: None }));
    }
    let view = pool.scheduler.view();
    // The assumption is worth ten requests.
    assert!((view.mean_work / (view.speed.prompt * 2000.0 + view.speed.output * 50.0) - 1.0).abs() < 0.01, "{}", view.mean_work);
    pool.released(Event::PolicyChanged(policy(Order::Uniboost, 0.0)));
    let view = pool.scheduler.view();
    assert!((view.mean_work / (view.speed.prompt * 2000.0) - 1.0).abs() < 0.01, "prompts alone");
}

#[test]
fn what_was_learnt_is_there_after_a_restart() {
    let mut pool = Pool::new(policy(Order::Headway, 0.0), 1);
    pool.backend(0, slots(1000));
    for id in 0..600u64 {
        let score = (id * 37 % 100) as f32;
        pool.now = pool.now.after(Duration::from_millis(50));
        pool.arrive(Request { max_output: None, ..scored(id, score, 1) });
        let output = 10 * score as Tokens + 10;
        pool.released(Event::Finished(RequestId(id), Ending::Completed { output, prompt: None }));
    }
    let learnt = pool.scheduler.learnt();
    assert_eq!((learnt.scores.len(), learnt.samples.len()), (600, 600));
    let mut restarted = Pool::busy(policy(Order::Headway, 0.0));
    restarted.arrive(Request { max_output: None, ..scored(1, 90.0, 1) });
    restarted.arrive(Request { max_output: None, ..scored(2, 10.0, 1) });
    let expected = |pool: &Pool, id| pool.scheduler.explain(RequestId(id)).unwrap().expected_output;
    assert_eq!(expected(&restarted, 1), expected(&restarted, 2), "nothing is known yet");
    restarted.scheduler.restore(&Learnt { gamma: Some(0.125), ..learnt });
    assert!(expected(&restarted, 1) > 2 * expected(&restarted, 2), "what waits is ordered anew");
    assert_eq!(restarted.ids_in_order(), [2, 1]);
    assert_eq!(restarted.scheduler.learnt().gamma, Some(0.125));
}

/// Releases what waits after 600 answers whose scores were drawn by `score` from their number and length, and tells how well the order is that of arrival
/// (Spearman's rank correlation).
fn order_by_arrival(score: impl Fn(u64, u32) -> f32) -> f64 {
    // Mixes the number's bits: a length that has nothing to do with the neighbours'.
    let length = |id: u64| 20 + (id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32 % 1500;
    let mut pool = Pool::new(policy(Order::Headway, 0.0), 1);
    pool.backend(0, slots(1000));
    for id in 1..=600 {
        pool.now = pool.now.after(Duration::from_millis(50));
        pool.arrive(Request { max_output: None, ..scored(id, score(id, length(id)), 1) });
        pool.released(Event::Finished(RequestId(id), Ending::Completed { output: length(id), prompt: None }));
    }
    pool.backend(0, slots(1));
    pool.wait(10);
    pool.arrive(request(10_000));
    let waiting: Vec<u64> = (1001..=1200).collect();
    for &id in &waiting {
        pool.now = pool.now.after(Duration::from_millis(50));
        pool.arrive(Request { max_output: None, ..scored(id, score(id, length(id)), 1) });
    }
    let order = pool.order(10_000);
    assert_eq!(order.len(), waiting.len());
    let squares: f64 = order.iter().enumerate().map(|(place, (id, _))| (place as f64 - (id - waiting[0]) as f64).powi(2)).sum();
    let n = waiting.len() as f64;
    1.0 - 6.0 * squares / (n * (n * n - 1.0))
}

#[test]
fn scores_that_say_nothing_or_the_opposite_leave_the_order_of_arrival() {
    let random = order_by_arrival(|id, _| (id.wrapping_mul(0xd134_2543_de82_ef95) >> 40) as f32);
    let constant = order_by_arrival(|_, _| 1.0);
    let inverted = order_by_arrival(|_, length| -(length as f32));
    assert!(random >= 0.99 && constant >= 0.99 && inverted >= 0.99, "{random} {constant} {inverted}");
    let right = order_by_arrival(|_, length| length as f32);
    assert!(right < 0.9, "scores that say something are obeyed: {right}");
}

#[test]
fn an_engine_with_a_queue_of_its_own_tells_its_speed_before_its_window_is_full() {
    let learns = |waiting: Option<u32>| {
        let mut pool = Pool::new(policy(Order::Headway, 0.0), 1);
        pool.backend(0, slots(4));
        pool.arrive(Request { max_output: None, ..prompt(1, 1) });
        pool.released(Event::LoadReported(BackendId(0), Load { running: Some(1), waiting, kv_used: None }));
        for second in 1..10 {
            pool.wait(1);
            pool.released(Event::Progress(RequestId(1), second * 100));
        }
        pool.scheduler.view().backends[0].speed_learnt
    };
    assert_eq!([None, Some(0), Some(1)].map(learns), [false, false, true]);
}

#[test]
fn time_without_a_request_is_no_slowness() {
    let mut pool = Pool::new(policy(Order::Headway, 0.0), 1);
    // Full in a way: it may hold nothing and holds nothing.
    pool.backend(0, slots(0));
    pool.wait(60);
    pool.backend(0, slots(1));
    pool.arrive(Request { max_output: None, ..prompt(1, 1) });
    for second in 1..10 {
        pool.wait(1);
        pool.released(Event::Progress(RequestId(1), second * 100));
    }
    let output = pool.scheduler.view().backends[0].speed.output;
    assert!((0.009..0.013).contains(&output), "{output}");
}

#[test]
fn a_window_grows_for_those_who_wait_and_not_for_what_passes() {
    let auto = BackendState { slots: Slots::Auto { initial: 8, max: 64 }, ..slots(0) };
    let window = |waiting_here: u64, engine_waits: u32| {
        let mut pool = Pool::new(policy(Order::Headway, 0.0), 1);
        pool.backend(0, auto.clone());
        let report = |pool: &mut Pool, waiting| {
            pool.actions(Event::LoadReported(BackendId(0), Load { running: Some(8 - waiting), waiting: Some(waiting), kv_used: None }));
        };
        report(&mut pool, 0);
        for id in 0..8 + waiting_here {
            pool.arrive(request(id));
        }
        pool.wait(3);
        report(&mut pool, engine_waits);
        pool.scheduler.view().backends[0].window
    };
    assert_eq!(window(0, 0), 8, "for nobody");
    assert!(window(5, 0) > 8);
    // Eight releases in three seconds and iterations of milliseconds: two that wait in the engine do not just pass.
    assert_eq!(window(5, 2), 8);
}

#[test]
fn an_answer_as_long_as_expected_is_expected_to_go_on() {
    let mut pool = Pool::new(policy(Order::Headway, 0.0), 1);
    pool.backend(0, slots(1));
    pool.arrive(Request { max_output: Some(1000), ..request(0) });
    let backlog = |pool: &mut Pool, output| {
        pool.released(Event::Progress(RequestId(0), output));
        let view = pool.scheduler.view();
        view.backends[0].backlog / view.backends[0].speed.output
    };
    let expected = 1 + backlog(&mut pool, 1).round() as u32;
    assert!((100..500).contains(&expected), "{expected}");
    assert!((backlog(&mut pool, expected - 10) - 10.0).abs() < 1e-6);
    assert!((backlog(&mut pool, expected) - f64::from(expected / 4)).abs() < 1e-6, "as long again as a quarter of what came");
    assert!((backlog(&mut pool, 950) - 50.0).abs() < 1e-6, "and no longer than allowed");
}

#[test]
fn a_policy_without_overload_ends_it_at_once() {
    let mut pool = overloaded(Order::Headway);
    let calm = PolicyParts {
        order: Order::Headway,
        gamma: Gamma::Fixed(0.1),
        max_overtake: MaxOvertake::Auto,
        aging_threshold: Duration::from_secs(100),
        aging_share: 0.25,
        lead: Lead::Auto,
        overload: false,
    };
    pool.released(Event::PolicyChanged(Policy::new(calm).unwrap()));
    assert_eq!(pool.scheduler.view().mode, Mode::Normal);
    pool.wait(60);
    assert_eq!((pool.scheduler.view().mode, pool.scheduler.view().counters.overloads), (Mode::Normal, 1));
    // Allowed again, it takes as long as the first time.
    pool.released(Event::PolicyChanged(policy(Order::Headway, 0.25)));
    pool.wait(20);
    assert_eq!(pool.scheduler.view().mode, Mode::Normal);
}

#[test]
fn the_longest_context_bounds_prompts_as_soon_as_it_is_known() {
    let mut pool = Pool::new(policy(Order::Uniboost, 0.0), 1);
    let with = |context| BackendState { context_tokens: Some(context), ..slots(1) };
    pool.backend(0, with(100));
    let short = pool.scheduler.view();
    pool.backend(1, with(200));
    let long = pool.scheduler.view();
    assert!((short.longest_work - 100.0 * short.speed.prompt).abs() < 1e-9, "{}", short.longest_work);
    assert!((long.longest_work - 200.0 * long.speed.prompt).abs() < 1e-9, "{}", long.longest_work);
}

#[test]
fn a_refused_client_comes_back_when_some_of_the_queue_has_drained() {
    let mut pool = overloaded(Order::Fcfs);
    let waiting = pool.scheduler.view().waiting;
    let limits = Limits { queue_requests: waiting, queue_bytes: 1 << 30, max_output: 4096 };
    pool.released(Event::LimitsChanged(limits));
    // A tenth of 118 s.
    let refused = pool.rejected(Event::Arrived(heavy(1000))).unwrap();
    assert!(matches!(refused, (Reason::QueueFull, 11..=13)), "{refused:?}");
    pool.released(Event::LimitsChanged(Limits { queue_requests: 10_000, queue_bytes: pool.scheduler.view().waiting_bytes, ..limits }));
    let refused = pool.rejected(Event::Arrived(heavy(1001))).unwrap();
    assert!(matches!(refused, (Reason::QueueBytes, 11..=13)), "{refused:?}");

    // A sibling takes half of it; without any backend a client looks again after some seconds.
    let alone = pool.scheduler.view().backlog;
    pool.backend(1, slots(0));
    let together = pool.scheduler.view().backlog;
    assert!((together * 2.0 / alone - 1.0).abs() < 0.05, "{together} of {alone}");
    let mut empty = Pool::new(policy(Order::Headway, 0.0), 1);
    assert_eq!(empty.rejected(Event::Arrived(request(1))), Some((Reason::NoHealthyBackend, 5)));
}

#[test]
fn a_backend_that_turns_out_too_small_loses_what_waits_for_it() {
    let mut pool = Pool::busy(policy(Order::Headway, 0.0));
    pool.arrive(prompt(1, 300));
    let small = BackendState { context_tokens: Some(200), ..slots(1) };
    pool.backend(1, BackendState { context_tokens: Some(1000), ..slots(0) });
    pool.backend(0, small);
    assert_eq!(pool.scheduler.view().counters.placed_again, 1);
    assert_eq!(pool.released(Event::Finished(RequestId(0), Ending::Refused)), [], "it idles rather than takes what it cannot hold");
    assert_eq!(pool.arrive(prompt(2, 50)), [(2, 0)]);
    assert_eq!(pool.backend(1, BackendState { context_tokens: Some(1000), ..slots(1) }), [(1, 1)]);
}

fn of_tenant(tenant: u32, request: Request) -> Request {
    Request { tenant: Some(TenantId(tenant)), ..request }
}

/// By arrival, so that only shares put anybody ahead.
fn sharing(lead: Lead) -> Policy {
    let parts = PolicyParts {
        order: Order::Fcfs,
        gamma: Gamma::Fixed(0.1),
        max_overtake: MaxOvertake::Auto,
        aging_threshold: Duration::from_secs(100),
        aging_share: 0.25,
        lead,
        overload: false,
    };
    Policy::new(parts).unwrap()
}

/// A request runs and a flood of tenant 0 waits, two seconds of work each; tenant 1 sends one. How many of tenant 0 go first?
fn ahead_of_a_single_request(policy: Policy, flood: u64, waited: u64) -> usize {
    let mut pool = Pool::busy(policy);
    // Without a look at all invariants each time.
    (1..=flood).for_each(|id| pool.scheduler.handle(pool.now, Event::Arrived(of_tenant(0, heavy(id))), &mut Vec::new()));
    pool.now = pool.now.after(Duration::from_secs(waited));
    pool.arrive(of_tenant(1, heavy(flood + 1)));
    let mut running = 0;
    for ahead in 0.. {
        let released = pool.released(Event::Finished(RequestId(running), Ending::Completed { output: 1, prompt: None }));
        running = released[0].0;
        if running == flood + 1 {
            return ahead;
        }
    }
    unreachable!("a range without an end")
}

#[test]
fn a_flood_delays_another_tenant_by_the_lead_at_most() {
    let seconds = |seconds| Lead::Within(Duration::from_secs(seconds));
    assert_eq!(ahead_of_a_single_request(sharing(seconds(0)), 9_999, 0), 1, "they have had the same");
    // Two seconds each, until the first that is ahead by more than eleven.
    assert_eq!(ahead_of_a_single_request(sharing(seconds(11)), 9_999, 0), 6);
    // Age changes nothing: whoever is ahead of its share has no turn by age either.
    assert_eq!(ahead_of_a_single_request(sharing(seconds(11)), 9_999, 200), 6);
    assert_eq!(ahead_of_a_single_request(sharing(Lead::Unlimited), 500, 0), 500);
    // By default it is four mean works, and those are what the pool has seen.
    let ahead = ahead_of_a_single_request(sharing(Lead::Auto), 9_999, 1);
    assert!((3..=6).contains(&ahead), "{ahead}");
}

/// How many are released of each tenant, one after another, and who runs then. Requests of tenant 1 have numbers from 1000 on; `output` is what an answer turns out to
/// have.
fn served(pool: &mut Pool, mut running: u64, releases: usize, output: impl Fn(usize) -> Tokens) -> ([usize; 2], u64) {
    let tenant = |id| usize::from(id >= 1000);
    let mut counts = [0; 2];
    for _ in 0..releases {
        let ending = Ending::Completed { output: output(tenant(running)), prompt: None };
        running = pool.released(Event::Finished(RequestId(running), ending))[0].0;
        counts[tenant(running)] += 1;
    }
    (counts, running)
}

#[test]
fn whoever_has_three_times_the_weight_gets_three_times_the_work() {
    let mut pool = Pool::busy(sharing(Lead::Within(Duration::ZERO)));
    for id in 1..400 {
        pool.arrive(of_tenant(0, request(id)));
        pool.arrive(of_tenant(1, Request { share: Weight::new(3.0).unwrap(), ..request(1000 + id) }));
    }
    let ([one, three], _) = served(&mut pool, 0, 400, |_| 100);
    assert!((99..=101).contains(&one), "{one} and {three}");
}

#[test]
fn what_answers_turn_out_to_be_is_what_counts() {
    let mut pool = Pool::busy(sharing(Lead::Within(Duration::ZERO)));
    for id in 1..400 {
        let long = |id| Request { max_output: Some(1000), ..prompt(id, 1) };
        pool.arrive(of_tenant(0, long(id)));
        pool.arrive(of_tenant(1, long(1000 + id)));
    }
    // They look the same, but those of tenant 1 run four times as long.
    let ([short, long], _) = served(&mut pool, 0, 300, |tenant| if tenant == 0 { 100 } else { 400 });
    assert!((55..=65).contains(&long), "{short} and {long}");
}

#[test]
fn time_without_requests_is_no_store_of_service() {
    let mut pool = Pool::busy(sharing(Lead::Within(Duration::ZERO)));
    // Tenant 1 is known and stays away while tenant 0 is served.
    pool.arrive(of_tenant(1, request(1000)));
    (1..400).for_each(|id| drop(pool.arrive(of_tenant(0, request(id)))));
    let (counts, running) = served(&mut pool, 0, 200, |_| 100);
    assert_eq!(counts[1], 1);
    (1001..1400).for_each(|id| drop(pool.arrive(of_tenant(1, request(id)))));
    let ([one, other], _) = served(&mut pool, running, 100, |_| 100);
    assert!((49..=51).contains(&other), "{one} and {other}");
}

#[test]
fn a_flood_leaves_a_tenth_of_the_queue_to_others() {
    let (requests, bytes) = ((100, 1 << 20), (100_000, 1000));
    for (queue_requests, queue_bytes) in [requests, bytes] {
        let mut pool = Pool::busy(sharing(Lead::Auto));
        pool.actions(Event::LimitsChanged(Limits { queue_requests, queue_bytes, max_output: 4096 }));
        let sized = |tenant, id| Request { bytes: 10, ..of_tenant(tenant, request(id)) };
        assert!((1..=90).all(|id| pool.rejected(Event::Arrived(sized(0, id))).is_none()));
        assert_eq!(pool.rejected(Event::Arrived(sized(0, 91))).unwrap().0, Reason::QueueShare);
        assert!((101..=109).all(|id| pool.rejected(Event::Arrived(sized(1, id))).is_none()));
        // Whoever belongs to nobody has the pool's limits and no others.
        assert_eq!(pool.rejected(Event::Arrived(Request { bytes: 10, ..request(200) })), None);
        let full = if queue_requests == 100 { Reason::QueueFull } else { Reason::QueueBytes };
        assert_eq!(pool.rejected(Event::Arrived(Request { bytes: 10, ..request(201) })).unwrap().0, full);
    }
}

/// Who comes while a request runs that turns out shorter than expected does not stand back for the difference.
#[test]
fn what_was_expected_too_much_is_nobodys_lead() {
    let mut pool = Pool::new(sharing(Lead::Within(Duration::ZERO)), 1);
    pool.backend(0, slots(1));
    let long = |id| Request { max_output: None, ..prompt(id, 1) };
    (0..20).for_each(|id| drop(pool.arrive(of_tenant(0, long(id)))));
    pool.arrive(of_tenant(1, long(1000)));
    let ending = |id| Event::Finished(RequestId(id), Ending::Completed { output: 1, prompt: None });
    assert_eq!(pool.released(ending(0)), [(1, 0)], "both have had the same");
    assert_eq!(pool.released(ending(1)), [(1000, 0)]);
}

/// In overload whoever would wait beyond the deadline is turned away, and a flood is not everybody's wait.
#[test]
fn a_flood_is_turned_away_and_not_whoever_it_would_delay() {
    let mut pool = Pool::busy(policy(Order::Headway, 0.25));
    for id in 1..60 {
        pool.wait(1);
        pool.arrive(of_tenant(0, heavy(id)));
    }
    assert_eq!(pool.scheduler.view().mode, Mode::Overload);
    let soon = pool.now.after(Duration::from_secs(20));
    assert_eq!(pool.rejected(Event::Arrived(Request { expires: soon, ..of_tenant(0, heavy(1000)) })).unwrap().0, Reason::Shed);
    assert_eq!(pool.rejected(Event::Arrived(Request { expires: soon, ..of_tenant(1, heavy(1001)) })), None);
}
