//! The whole simulation under textbook queues. An engine whose iterations take the same time whatever is in them is `slots` servers, so that the mean waits
//! must be those of queueing theory; figures of the simulator mean something because of this.

use std::time::Duration;

use headway::engine::{Profile, Timing};
use headway::scheduler::{Boost, Gamma, Lead, Limits, MaxOvertake, Order, Policy, PolicyParts, Slots, Time, Weight};
use headway::simulator::{Arrivals, Dispatch, Length, Member, Part, Run, Setup, Workload, run};

/// Seconds of one iteration, that is of one token.
const TOKEN: f64 = 1e-3;

/// An engine with this many servers.
fn servers(slots: u32) -> Profile {
    let timing = Timing { base: TOKEN, per_sequence: 0.0, per_prefill_token: 0.0, per_kv_token: 0.0 };
    Profile { timing, max_num_seqs: slots, kv_blocks: 1 << 20, max_batched_tokens: 1 << 20, max_model_len: 1 << 22, ..Profile::large() }
}

fn gateway(order: Order) -> Dispatch {
    boosting(order, Gamma::Adaptive)
}

fn boosting(order: Order, gamma: Gamma) -> Dispatch {
    let parts = PolicyParts {
        order,
        gamma,
        max_overtake: MaxOvertake::Auto,
        aging_threshold: Duration::from_secs(1_000_000),
        aging_share: 0.0,
        lead: Lead::Auto,
        overload: false,
    };
    let limits = Limits { queue_requests: 1_000_000, queue_bytes: u64::MAX, max_output: 1_000_000 };
    Dispatch::Gateway { policy: Policy::new(parts).expect("the parts fit"), limits }
}

struct Queue {
    dispatch: Dispatch,
    backends: usize,
    slots: u32,
    output: Length,
    /// Mean service time in tokens: the mean of `output`, and the iteration that a slot misses where the gateway fills it while others run.
    mean: f64,
    load: f64,
}

/// The mean wait for a slot, in units of the mean service time, and the run. The first tenth is left out.
fn mean_wait(queue: &Queue, requests: usize, seed: u64) -> (f64, Run) {
    let member = Member { slots: Slots::Fixed(queue.slots), known: false, ..Member::new(servers(queue.slots)) };
    let mut workload = Workload::draw(requests, Arrivals::Poisson, &Length::Fixed(1), &queue.output, seed);
    workload.pace(queue.load * queue.backends as f64 * f64::from(queue.slots) / (queue.mean * TOKEN));
    let setup = Setup { look: Duration::from_millis(20), ..Setup::new(vec![member; queue.backends], queue.dispatch.clone()) };
    let run = run(&setup, &workload, seed).unwrap_or_else(|broken| panic!("{broken}"));
    let figures = run.figures(0.1);
    // To the first token it takes one iteration, whoever is served.
    ((figures.ttft.mean - TOKEN) / (queue.mean * TOKEN), run)
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

fn assert_near(measured: f64, expected: f64, tolerance: f64) {
    assert!((measured / expected - 1.0).abs() < tolerance, "measured {measured}, theory says {expected}");
}

const MEAN: f64 = 50.0;
const EXPONENTIAL: Length = Length::Exponential(MEAN);

#[test]
fn one_server_waits_as_m_m_1() {
    for dispatch in [gateway(Order::Fcfs), Dispatch::RoundRobin] {
        let queue = Queue { dispatch, backends: 1, slots: 1, output: EXPONENTIAL, mean: MEAN, load: 0.7 };
        assert_near(mean_wait(&queue, 40_000, 3).0, erlang_c_wait(1, 0.7), 0.08);
    }
}

#[test]
fn slots_of_one_engine_wait_as_m_m_k() {
    for (dispatch, mean) in [(gateway(Order::Fcfs), MEAN + 1.0), (Dispatch::LeastLoaded, MEAN)] {
        let queue = Queue { dispatch, backends: 1, slots: 4, output: EXPONENTIAL, mean, load: 0.8 };
        assert_near(mean_wait(&queue, 20_000, 2).0, erlang_c_wait(4, 0.8), 0.08);
    }
}

/// Backends of one pool have a queue each, but none idles while another's waits.
#[test]
fn engines_behind_the_gateway_wait_as_m_m_k() {
    let queue = Queue { dispatch: gateway(Order::Fcfs), backends: 2, slots: 2, output: EXPONENTIAL, mean: MEAN + 1.0, load: 0.8 };
    assert_near(mean_wait(&queue, 20_000, 2).0, erlang_c_wait(4, 0.8), 0.08);
}

/// Turns divide a Poisson stream into Erlang-4 streams of single servers, whose wait is far above that of one queue for all, and below M/M/1.
#[test]
fn engines_in_turn_wait_longer_than_one_queue() {
    let queue = |dispatch| Queue { dispatch, backends: 4, slots: 1, output: EXPONENTIAL, mean: MEAN, load: 0.85 };
    let (in_turn, _) = mean_wait(&queue(Dispatch::RoundRobin), 20_000, 2);
    assert!(in_turn > 2.0 * erlang_c_wait(4, 0.85) && in_turn < erlang_c_wait(1, 0.85), "{in_turn}");
}

/// Pollaczek and Khinchine: the wait grows with the second moment of the service time.
#[test]
fn long_tails_wait_as_m_g_1() {
    let sigma: f64 = 0.8;
    let mean = 30.0 * (sigma * sigma / 2.0).exp();
    let output = Length::LogNormal { parts: vec![Part { share: 1.0, median: 30.0, sigma }], longest: 1_000_000 };
    let queue = Queue { dispatch: gateway(Order::Fcfs), backends: 1, slots: 1, output, mean, load: 0.7 };
    let squared_cv = (sigma * sigma).exp() - 1.0;
    let expected = 0.7 / (1.0 - 0.7) * (1.0 + squared_cv) / 2.0;
    assert_near(mean_wait(&queue, 20_000, 5).0, expected, 0.08);
}

/// Phipps, 1956: the work found, over what is left by all that is shorter.
#[test]
fn true_lengths_wait_as_shortest_first() {
    let load = 0.7;
    let step = 1e-3;
    let expected: f64 = (0..40_000)
        .map(|n| (f64::from(n) + 0.5) * step)
        .map(|size| {
            let shorter = load * (1.0 - (-size).exp() * (1.0 + size));
            (-size).exp() * step * load / (1.0 - shorter).powi(2)
        })
        .sum();
    let queue = Queue { dispatch: gateway(Order::OracleSjf), backends: 1, slots: 1, output: EXPONENTIAL, mean: MEAN, load };
    assert_near(mean_wait(&queue, 40_000, 4).0, expected, 0.08);
}

/// Little's law, for what waits and runs anywhere: the mean number present is the rate times the mean time.
#[test]
fn moments_and_times_agree() {
    let queue = Queue { dispatch: gateway(Order::Headway), backends: 2, slots: 4, output: EXPONENTIAL, mean: MEAN, load: 0.9 };
    let (_, run) = mean_wait(&queue, 20_000, 6);
    let present = run.moments.iter().map(|moment| f64::from(moment.waiting + moment.in_flight)).sum::<f64>() / run.moments.len() as f64;
    let figures = run.figures(0.0);
    assert_near(present, figures.answers_per_second * figures.ttlt.mean, 0.03);
}

/// P(T > t) falls as C e^(-gamma t), where gamma = lambda (E[e^(gamma S)] - 1). Boosts leave gamma as it is and change C: from E[e^(gamma S)] by arrival to
/// E[e^(gamma (S - b))] e^(lambda E[(e^(gamma S) - 1) b]), both times (1 - rho) / (lambda E[S e^(gamma S)] - 1) (after Yu and Scully, arXiv 2404.08826; b is the boost of size S).
#[test]
fn boosts_shorten_the_tail_as_in_theory() {
    let (mean, load, requests, seed) = (10.0, 0.8, 80_000, 7);
    let output = Length::Exponential(mean);
    let sizes = Workload::draw(requests, Arrivals::Poisson, &Length::Fixed(1), &output, seed).jobs;
    let sizes: Vec<f64> = sizes.iter().map(|job| f64::from(job.output) * TOKEN).collect();
    let expect = |of: &dyn Fn(f64) -> f64| sizes.iter().map(|size| of(*size)).sum::<f64>() / sizes.len() as f64;
    let lambda = load / (mean * TOKEN);
    let (mut low, mut high) = (0.01 * lambda, 0.9 / (mean * TOKEN));
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if lambda * (expect(&|size| (middle * size).exp()) - 1.0) < middle { low = middle } else { high = middle }
    }
    let gamma = low;
    assert_near(gamma, (1.0 - load) / (mean * TOKEN), 0.05);

    // The boost in use: none from 1.5 mean works on, and never more than 4 / gamma.
    let boosted = Boost::new(gamma, 4.0 / gamma, 1.5 * mean * TOKEN);
    let boost = |size: f64| -boosted.boosted_arrival(Time::ZERO, size, Weight::ONE) as f64 / 1e6;
    let before = (1.0 - load) / (lambda * expect(&|size| size * (gamma * size).exp()) - 1.0);
    let crossing = lambda * expect(&|size| ((gamma * size).exp() - 1.0) * boost(size));
    let by_arrival = before * expect(&|size| (gamma * size).exp());
    let by_boost = before * expect(&|size| (gamma * (size - boost(size))).exp()) * crossing.exp();

    let tail = |dispatch| {
        let queue = Queue { dispatch, backends: 1, slots: 1, output: output.clone(), mean, load };
        let (_, run) = mean_wait(&queue, requests, seed);
        let times: Vec<f64> = run.answers.iter().map(|answer| answer.ttlt().as_secs_f64()).collect();
        let constant = |t: f64| times.iter().filter(|time| **time > t).count() as f64 / times.len() as f64 * (gamma * t).exp();
        // Over the stretch in which one in 20 to one in 400 takes longer.
        (0..20).map(|n| constant((3.0 + 3.0 * f64::from(n) / 19.0) / gamma)).sum::<f64>() / 20.0
    };
    let (arrival, boosts) = (tail(gateway(Order::Fcfs)), tail(boosting(Order::OracleBoost, Gamma::Fixed(gamma))));
    println!("gamma {gamma}; C {arrival} and {boosts}, theory {by_arrival} and {by_boost}");
    assert_near(arrival, by_arrival, 0.2);
    assert_near(boosts / arrival, by_boost / by_arrival, 0.05);
}
