//! What becomes of the tail when what the default policy goes by is wrong: never much more than first come, first served has. Seeds are fixed, so a figure that moves was moved by a change.

mod common;

use std::time::Duration;

use common::gateway;
use headway::engine::Profile;
use headway::scheduler::{Gamma, Order, Score, Target, Time};
use headway::simulator::{Arrivals, Dispatch, Fault, Figures, Length, Member, Part, Plan, Scores, Setup, Tells, Workload, capacity, run};

/// The longest answer, in tokens.
const LONGEST: u32 = 1500;

fn fleet(backends: usize) -> Vec<Member> {
    vec![Member::new(Profile { max_num_seqs: 32, ..Profile::medium() }); backends]
}

/// Short prompts, so that nearly all that can be known is in the scores.
fn workload(backends: usize, seed: u64) -> Workload {
    let lengths = |median, sigma, longest| Length::LogNormal { parts: vec![Part { share: 1.0, median, sigma }], longest };
    let mut workload = Workload::draw(3_000, Arrivals::Gamma { cv: 2.0 }, &lengths(60.0, 0.5, 400), &lengths(60.0, 1.0, LONGEST), seed);
    workload.pace(0.9 * capacity(&fleet(backends), &workload));
    workload.score(Scores::Tau(0.5), seed);
    workload
}

fn figures(dispatch: Dispatch, backends: usize, workload: &Workload, faults: &[(f64, Fault)]) -> Figures {
    let span = workload.jobs.last().map_or(0.0, |job| job.after.as_secs_f64());
    let faults = faults.iter().map(|(share, fault)| (Time::from_secs_f64(share * span), fault.clone())).collect();
    let setup = Setup { plan: Plan { faults, ..Plan::default() }, ..Setup::new(fleet(backends), dispatch) };
    run(&setup, workload, 1).unwrap_or_else(|broken| panic!("{broken}")).figures(0.0)
}

/// TTLT over that of arrival order on the same requests and under the same faults: the default's mean and 99th percentile, and that of `gamma: { target: tail }`.
#[derive(Debug)]
struct Ratios {
    mean: f64,
    p99: f64,
    p99_of_tail: f64,
}

fn ratios(backends: usize, change: impl Fn(&mut Workload, u64), faults: &[(f64, Fault)]) -> Ratios {
    let seeds = [1, 2];
    let mut ratios = Ratios { mean: 0.0, p99: 0.0, p99_of_tail: 0.0 };
    for seed in seeds {
        let mut workload = workload(backends, seed);
        change(&mut workload, seed);
        let figures = |order, target| figures(gateway(order, Gamma::Target(target)), backends, &workload, faults).ttlt;
        let arrival = figures(Order::Fcfs, Target::Mean);
        let (ours, tail) = (figures(Order::Headway, Target::Mean), figures(Order::Headway, Target::Tail));
        ratios.mean += ours.mean / arrival.mean / seeds.len() as f64;
        ratios.p99 += ours.p99 / arrival.p99 / seeds.len() as f64;
        ratios.p99_of_tail += tail.p99 / arrival.p99 / seeds.len() as f64;
    }
    println!("{ratios:.3?}");
    ratios
}

fn unchanged(_: &mut Workload, _: u64) {}

/// Changes the scores of the requests between two shares of the workload.
fn between(workload: &mut Workload, from: f64, to: f64, change: impl Fn(Score) -> Option<Score>) {
    let at = |share: f64| (share * workload.jobs.len() as f64) as usize;
    let (from, to) = (at(from), at(to));
    for job in &mut workload.jobs[from..to] {
        job.score = job.score.and_then(&change);
    }
}

#[test]
fn good_scores_gain() {
    let found = ratios(1, unchanged, &[]);
    assert!(found.mean < 0.95 && found.p99 < 1.06 && found.p99_of_tail < 1.05, "{found:?}");
}

#[test]
fn scores_that_say_nothing_cost_nothing() {
    let found = ratios(1, |workload, seed| workload.score(Scores::Tau(0.0), seed), &[]);
    assert!(found.mean < 1.0 && found.p99 < 1.02 && found.p99_of_tail < 1.05, "noise: {found:?}");
    let found = ratios(1, |workload, _| between(workload, 0.0, 1.0, |_| Score::new(1.0)), &[]);
    assert!(found.mean < 1.0 && found.p99 < 1.02 && found.p99_of_tail < 1.05, "all equal: {found:?}");
    let found = ratios(1, |workload, seed| workload.score(Scores::Inverted, seed), &[]);
    assert!(found.mean < 1.0 && found.p99 < 1.02 && found.p99_of_tail < 1.05, "inverted: {found:?}");
}

#[test]
fn scores_that_turn_round_are_found_out() {
    let found = ratios(1, |workload, _| between(workload, 0.5, 1.0, |score| Score::new(-score.get())), &[]);
    assert!(found.mean < 0.98 && found.p99 < 1.05 && found.p99_of_tail < 1.05, "{found:?}");
}

#[test]
fn requests_that_pretend_to_be_short_are_not_many_enough() {
    let pretend = |workload: &mut Workload, _| {
        for job in workload.jobs.iter_mut().step_by(100) {
            (job.output, job.score) = (LONGEST, Score::new(-10.0));
        }
    };
    let found = ratios(1, pretend, &[]);
    assert!(found.mean < 0.9 && found.p99 < 1.05 && found.p99_of_tail < 1.05, "{found:?}");
}

#[test]
fn without_a_ranker_the_order_is_that_of_arrival() {
    let found = ratios(1, |workload, _| between(workload, 0.33, 0.67, |_| None), &[]);
    assert!(found.mean < 0.97 && found.p99 < 1.06 && found.p99_of_tail < 1.05, "{found:?}");
    let found = ratios(1, |workload, _| between(workload, 0.0, 1.0, |_| None), &[]);
    assert!(found.mean < 1.0 && found.p99 < 1.02 && found.p99_of_tail < 1.05, "none at all: {found:?}");
}

/// Speeds that were learnt are four times too high, and later four times too low.
#[test]
fn speeds_may_be_wrong_by_a_factor_of_four() {
    let paced = |workload: &mut Workload, _| {
        // A quarter as many come while it is slow: what it can do is not the question.
        let jobs = workload.jobs.len();
        let mut late = Duration::ZERO;
        let mut before = Duration::ZERO;
        for (index, job) in workload.jobs.iter_mut().enumerate() {
            let gap = job.after - before;
            before = job.after;
            if (jobs / 3..2 * jobs / 3).contains(&index) {
                late += 3 * gap;
            }
            job.after += late;
        }
    };
    // The middle third takes four times as long as each of the others.
    let found = ratios(1, paced, &[(1.0 / 6.0, Fault::Pace { backend: 0, factor: 0.25 }), (5.0 / 6.0, Fault::Pace { backend: 0, factor: 1.0 })]);
    assert!(found.mean < 0.97 && found.p99 < 1.05 && found.p99_of_tail < 1.05, "{found:?}");
}

#[test]
fn metrics_may_be_stale_or_silent() {
    for tells in [Tells::Stale, Tells::Nothing] {
        let found = ratios(1, unchanged, &[(0.3, Fault::Tells { backend: 0, tells })]);
        assert!(found.mean < 0.96 && found.p99 < 1.05 && found.p99_of_tail < 1.05, "{found:?}");
    }
}

#[test]
fn a_backend_may_be_twice_as_slow_as_believed() {
    // Two backends that do three quarters of what two do.
    let slower = |workload: &mut Workload, _| workload.jobs.iter_mut().for_each(|job| job.after = job.after.mul_f64(4.0 / 3.0));
    let found = ratios(2, slower, &[(0.2, Fault::Pace { backend: 1, factor: 0.5 })]);
    assert!(found.mean < 1.0 && found.p99 < 1.05 && found.p99_of_tail < 1.05, "{found:?}");
}
