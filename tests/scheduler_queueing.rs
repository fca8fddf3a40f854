//! The scheduler under textbook queues: driven with random arrivals and service times, it has the mean waits that queueing theory says. Figures of any simulation
//! made with it mean something because of this.
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use headway::scheduler::*;

/// Uniform numbers (SplitMix64), the same on every machine.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.uniform()).ln()
    }
}

/// Mean service time in seconds.
const SERVICE: f64 = 0.02;

struct Queue {
    order: Order,
    backends: u32,
    slots: u32,
    /// Share of what all servers together can do.
    load: f64,
}

/// The mean wait, in units of the mean service time, over this many requests; the first tenth is left out.
fn mean_wait(queue: &Queue, requests: u64, seed: u64) -> f64 {
    let policy = Policy::new(PolicyParts {
        order: queue.order,
        gamma: Gamma::Adaptive,
        max_overtake: MaxOvertake::Auto,
        aging_threshold: Duration::from_secs(1_000_000_000),
        aging_share: 0.0,
        overload: false,
    })
    .unwrap();
    let limits = Limits { queue_requests: 1_000_000, queue_bytes: u64::MAX, max_output: 100_000 };
    let mut scheduler = Scheduler::new(policy, limits, seed);
    let mut actions = Vec::new();
    for id in 0..queue.backends {
        let slots = Slots::Fixed(queue.slots);
        let state = BackendState { standing: Standing::Healthy, slots, weight: Weight::ONE, kv_tokens: None, context_tokens: None };
        scheduler.handle(Time::ZERO, Event::BackendChanged(BackendId(id), state), &mut actions);
    }

    let mut random = Random(seed);
    let servers = f64::from(queue.backends * queue.slots);
    let mut next_arrival = Time::ZERO;
    let mut arrived = 0;
    // What will end when, and what each request that has not ended needs: arrival and service seconds.
    let mut ends: BinaryHeap<Reverse<(Time, RequestId)>> = BinaryHeap::new();
    let mut needs: BTreeMap<RequestId, (Time, f64)> = BTreeMap::new();
    let (mut waits, mut counted) = (0.0, 0u64);
    while arrived < requests {
        let end = ends.peek().map(|Reverse((at, _))| *at).filter(|at| *at <= next_arrival);
        let now = end.unwrap_or(next_arrival);
        let event = if end.is_some() {
            let Some(Reverse((_, id))) = ends.pop() else { unreachable!() };
            let (_, service) = needs.remove(&id).unwrap();
            Event::Finished(id, Ending::Completed { output: (service / SERVICE * 1000.0).round() as Tokens, prompt: None })
        } else {
            let id = RequestId(arrived);
            let service = random.exponential(SERVICE);
            needs.insert(id, (now, service));
            arrived += 1;
            next_arrival = now.after(Duration::from_secs_f64(random.exponential(SERVICE / (queue.load * servers))));
            Event::Arrived(Request {
                id,
                arrived: now,
                model: ModelId(0),
                score: None,
                prompt_tokens: 1,
                max_output: None,
                attained: 0,
                weight: Weight::ONE,
                expires: Time::MAX,
                bytes: 0,
                unscored: false,
                excluded: Vec::new(),
                tenant: None,
                prefix: None,
                oracle_output: Some((service / SERVICE * 1000.0).round() as Tokens),
            })
        };
        actions.clear();
        scheduler.handle(now, event, &mut actions);
        for action in &actions {
            let Action::Release { request, .. } = action else { panic!("{action:?}") };
            let (arrived, service) = needs[request];
            if request.0 >= requests / 10 {
                waits += now.since(arrived).as_secs_f64();
                counted += 1;
            }
            ends.push(Reverse((now.after(Duration::from_secs_f64(service)), *request)));
        }
    }
    waits / SERVICE / counted as f64
}

/// The mean wait in M/M/k, in units of the mean service time: Erlang's C over the spare capacity.
fn erlang_c_wait(servers: u32, load: f64) -> f64 {
    let offered = load * f64::from(servers);
    let (mut term, mut sum) = (1.0, 0.0);
    for n in 0..servers {
        sum += term;
        term *= offered / f64::from(n + 1);
    }
    let waits = term / (1.0 - load);
    waits / (sum + waits) / (f64::from(servers) * (1.0 - load))
}

/// The mean wait in M/M/1 with the shortest first, not interrupted (Phipps, 1956): the work found, over what is left by all that is shorter.
fn shortest_first_wait(load: f64) -> f64 {
    let step = 1e-3;
    (0..40_000)
        .map(|n| (f64::from(n) + 0.5) * step)
        .map(|size| {
            let shorter = load * (1.0 - (-size).exp() * (1.0 + size));
            (-size).exp() * step * load / (1.0 - shorter).powi(2)
        })
        .sum()
}

fn assert_near(measured: f64, expected: f64, tolerance: f64) {
    assert!((measured / expected - 1.0).abs() < tolerance, "measured {measured}, theory says {expected}");
}

#[test]
fn formulas_agree_with_known_values() {
    assert_near(erlang_c_wait(1, 0.8), 4.0, 1e-9);
    assert_near(erlang_c_wait(2, 0.5), 1.0 / 3.0, 1e-9);
    assert!(shortest_first_wait(0.8) < 4.0);
}

#[test]
fn one_server_waits_as_m_m_1() {
    for (order, load) in [(Order::Fcfs, 0.8), (Order::Headway, 0.7)] {
        let queue = Queue { order, backends: 1, slots: 1, load };
        assert_near(mean_wait(&queue, 60_000, 3), erlang_c_wait(1, load), 0.08);
    }
}

#[test]
fn slots_of_one_backend_wait_as_m_m_k() {
    let queue = Queue { order: Order::Fcfs, backends: 1, slots: 4, load: 0.85 };
    assert_near(mean_wait(&queue, 60_000, 2), erlang_c_wait(4, 0.85), 0.08);
}

/// Each backend has a queue of its own, but none idles while another's has somebody in it: together they are one M/M/k. Without stealing the wait would be
/// that of k separate queues, several times as long.
#[test]
fn backends_of_one_pool_wait_as_m_m_k() {
    let queue = Queue { order: Order::Fcfs, backends: 4, slots: 1, load: 0.85 };
    assert_near(mean_wait(&queue, 60_000, 2), erlang_c_wait(4, 0.85), 0.08);
}

#[test]
fn true_lengths_wait_as_shortest_first() {
    let queue = Queue { order: Order::OracleSjf, backends: 1, slots: 1, load: 0.8 };
    assert_near(mean_wait(&queue, 60_000, 4), shortest_first_wait(0.8), 0.08);
}
