//! Gamma in whole runs: what the targets stand for, and that it settles.

mod common;

use std::time::Duration;

use common::gateway;
use headway::engine::Profile;
use headway::scheduler::{Gamma, Mode, Order, Target};
use headway::simulator::{Arrivals, Length, Member, Part, Run, Scores, Setup, Workload, capacity, run};

fn fleet() -> Vec<Member> {
    vec![Member::new(Profile { max_num_seqs: 32, ..Profile::medium() })]
}

/// Prompts that are most of the work, and answers of some hundred tokens.
fn workload(requests: usize, arrivals: Arrivals, load: f64) -> Workload {
    let lengths = |median, sigma, longest| Length::LogNormal { parts: vec![Part { share: 1.0, median, sigma }], longest };
    let mut workload = Workload::draw(requests, arrivals, &lengths(900.0, 1.0, 8000), &lengths(60.0, 1.0, 1500), 1);
    workload.pace(load * capacity(&fleet(), &workload));
    workload.score(Scores::Tau(0.5), 1);
    workload
}

fn play(workload: &Workload, order: Order, gamma: Gamma) -> Run {
    let setup = Setup { look: Duration::from_secs(5), ..Setup::new(fleet(), gateway(order, gamma)) };
    run(&setup, workload, 1).unwrap_or_else(|broken| panic!("{broken}"))
}

#[test]
fn targets_are_three_points_between_the_mean_and_the_tail() {
    let workload = workload(3_000, Arrivals::Gamma { cv: 6.0 }, 0.85);
    let figures = |order, target| play(&workload, order, Gamma::Target(target)).figures(0.0);
    let arrival = figures(Order::Fcfs, Target::Tail).ttlt;
    let [mean, balanced, tail] = [Target::Mean, Target::Balanced, Target::Tail].map(|target| {
        let figures = figures(Order::Headway, target);
        assert_eq!(figures.overloaded, 0.0, "a burst is no overload under {target:?}");
        figures.ttlt
    });
    let shown = format!("arrival {arrival:?}\nmean {mean:?}\nbalanced {balanced:?}\ntail {tail:?}");
    assert!(mean.mean < 0.95 * balanced.mean && balanced.mean < 0.95 * tail.mean && tail.mean < 0.99 * arrival.mean, "{shown}");
    assert!(tail.p99 < balanced.p99 && balanced.p99 < mean.p99, "{shown}");
    assert!(tail.p99 < 1.05 * arrival.p99, "{shown}");
}

/// The load goes from three fifths to nineteen twentieths of what the backend can do, and stays there.
#[test]
fn gamma_settles_after_a_step_of_the_load() {
    let mut workload = workload(12_000, Arrivals::Poisson, 0.95);
    let step = 2_000;
    for job in &mut workload.jobs[..step] {
        job.after = job.after.mul_f64(0.95 / 0.6);
    }
    let late = workload.jobs[step - 1].after.saturating_sub(workload.jobs[step].after);
    workload.jobs[step..].iter_mut().for_each(|job| job.after += late);
    let run = play(&workload, Order::Headway, Gamma::Target(Target::Mean));
    let last = workload.jobs.last().map_or(0.0, |job| job.after.as_secs_f64());
    let begun = workload.jobs[step].after.as_secs_f64();
    let from = begun + (last - begun) / 3.0;
    let settled: Vec<f64> = run.moments.iter().filter(|moment| (from..last).contains(&moment.at.as_secs_f64())).map(|moment| moment.gamma).collect();
    // To and fro: how often it turned by more than what keys are rebuilt for.
    let (mut turns, mut up, mut mark) = (0, None, settled[0]);
    for &gamma in &settled {
        let moved = gamma / mark;
        if !(1.0 / 1.2..=1.2).contains(&moved) {
            turns += usize::from(up.is_some_and(|up| up != (moved > 1.0)));
            (up, mark) = (Some(moved > 1.0), gamma);
        }
    }
    let (least, most) = settled.iter().fold((f64::INFINITY, 0.0_f64), |(least, most), gamma| (least.min(*gamma), most.max(*gamma)));
    println!("{} looks, {turns} turns, {least} to {most}", settled.len());
    assert!(settled.len() > 50 && turns * 20 < settled.len(), "{turns} turns in {} looks: {settled:?}", settled.len());
    assert!(run.moments.iter().all(|moment| moment.mode == Some(Mode::Normal)));
}

/// An objective that arrival order meets with room to spare buys mean; one that nothing meets is as near the tail as the tail's own target.
#[test]
fn an_objective_for_ttft_spends_what_it_leaves_on_the_mean() {
    let workload = workload(6_000, Arrivals::Gamma { cv: 3.0 }, 0.95);
    let figures = |gamma| play(&workload, Order::Headway, gamma).figures(0.2);
    let tail = figures(Gamma::Target(Target::Tail));
    let within = |factor: f64| figures(Gamma::Ttft(Duration::from_secs_f64(factor * tail.ttft.p99)));
    let (wide, narrow, none) = (within(3.0), within(1.1), within(0.05));
    let shown = [&tail, &wide, &narrow, &none].map(|figures| (figures.ttlt.mean, figures.ttft.p99));
    assert!(wide.ttlt.mean < 0.95 * narrow.ttlt.mean && narrow.ttlt.mean < 0.95 * tail.ttlt.mean, "{shown:?}");
    // A burst is over before a 99th percentile shows it.
    assert!(wide.ttft.p99 < 3.0 * tail.ttft.p99 && narrow.ttft.p99 < 1.25 * 1.1 * tail.ttft.p99, "{shown:?}");
    assert!(none.ttft.p99 < 1.1 * tail.ttft.p99, "{shown:?}");
}
