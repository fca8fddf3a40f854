//! `headway simulate`: policies compared on one workload, or setups drawn by seed to find what breaks.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "this is the simulator's shell: it reads files, measures itself and has threads"
)]

mod chart;
mod page;
mod scenario;
mod table;
mod trace;

use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};

use super::{End, Figures, Run, Setup, Workload, fuzz};
use scenario::{Contender, Pace, Scenario, contender};

/// What `headway simulate` takes.
#[derive(clap::Args)]
pub struct Args {
    /// What to simulate; examples/scenarios has some
    #[arg(value_name = "SCENARIO", required_unless_present = "fuzz", conflicts_with = "fuzz")]
    scenario: Option<PathBuf>,
    /// Decides all that is drawn; by default the scenario's own, or 0 to begin a --fuzz with
    #[arg(long)]
    seed: Option<u64>,
    /// Compare these instead of the scenario's policies and gammas: names, paths, NAME@GAMMA
    #[arg(long = "policy", value_name = "NAME,...", value_delimiter = ',', conflicts_with = "fuzz")]
    policies: Vec<String>,
    /// Requests for this share of what the fleet can do, instead of the scenario's
    #[arg(long, conflicts_with = "fuzz")]
    load: Option<f64>,
    /// Write all figures here
    #[arg(long, value_name = "FILE", conflicts_with = "fuzz")]
    json: Option<PathBuf>,
    /// Write what became of each request here, as CSV
    #[arg(long, value_name = "FILE", conflicts_with = "fuzz")]
    answers: Option<PathBuf>,
    /// Write a page with charts here
    #[arg(long, value_name = "FILE", conflicts_with = "fuzz")]
    html: Option<PathBuf>,
    /// Let requests that wait ask this often, in seconds, when it is their turn, and compare
    #[arg(long, value_name = "SECONDS", conflicts_with = "fuzz")]
    ask: Option<f64>,
    /// Check every invariant after every event, which takes longer
    #[arg(long)]
    check: bool,
    /// Draw this many setups with faults instead, and check every invariant after every event
    #[arg(long, value_name = "N")]
    fuzz: Option<u64>,
}

/// One policy's run and what is said about it.
struct Result {
    name: String,
    /// The fixed gamma, where it is a point of the sweep.
    swept: Option<f64>,
    run: Run,
    figures: Figures,
    took: Duration,
}

/// What was simulated, in words and numbers.
struct Header {
    scenario: String,
    seed: u64,
    requests: usize,
    /// Share of the fleet's capacity that arrives, floods of tenants left out; `None` in a burst or a closed loop.
    load: Option<f64>,
    /// Requests a second at capacity.
    capacity: f64,
    /// Agreement of scores and true lengths.
    tau: Option<f64>,
    warm_up: f64,
    /// Names by tenant id.
    tenants: Vec<String>,
}

/// Runs the command.
///
/// # Errors
/// The scenario is wrong, a report cannot be written, or something that must always hold did not.
pub fn run(args: &Args) -> anyhow::Result<()> {
    match (args.fuzz, &args.scenario) {
        (Some(seeds), _) => break_things(args.seed.unwrap_or(0), seeds),
        (None, Some(path)) => compare(args, path),
        (None, None) => bail!("name a scenario, or --fuzz N"),
    }
}

fn compare(args: &Args, path: &Path) -> anyhow::Result<()> {
    let mut scenario = scenario::load(path)?;
    if !args.policies.is_empty() {
        scenario.policies = args.policies.iter().map(|name| contender(name.trim(), Path::new(""))).collect::<std::result::Result<_, _>>()?;
        scenario.gammas.clear();
    }
    if let Some(load) = args.load {
        if !(load > 0.0 && load <= 100.0) {
            bail!("--load is a share of what the fleet can do, such as 0.85, not {load}");
        }
        scenario.pace = Pace::Load(load);
    }
    let ask = args.ask.map(Duration::try_from_secs_f64).transpose().ok().filter(|ask| *ask != Some(Duration::ZERO));
    let Some(ask) = ask else { bail!("--ask is a number of seconds above 0, such as 15") };
    let seed = args.seed.unwrap_or(scenario.seed);
    let capacity = scenario.capacity();
    let workload = scenario.workload(seed, capacity);
    let header = header(path, &scenario, &workload, capacity, seed);
    print!("{}", table::heading(&header));
    let results = run_all(&scenario, &workload, seed, (args.check, ask))?;
    print!("{}", table::table(&header, &results));
    eprintln!("{}", speed(&results));
    if let Some(file) = &args.json {
        std::fs::write(file, table::json(&header, &results)).with_context(|| format!("writing {}", file.display()))?;
    }
    if let Some(file) = &args.answers {
        std::fs::write(file, table::answers(&results)).with_context(|| format!("writing {}", file.display()))?;
    }
    if let Some(file) = &args.html {
        std::fs::write(file, page::page(&header, &results)).with_context(|| format!("writing {}", file.display()))?;
    }
    Ok(())
}

/// How fast the simulation was. Apart from the reports, which are the same whenever the seed is.
fn speed(results: &[Result]) -> String {
    let (iterations, took) =
        results.iter().fold((0, Duration::ZERO), |(iterations, took), result| (iterations + result.run.request_iterations, took + result.took));
    let millions = iterations as f64 / 1e6;
    format!(
        "{millions:.1} million request-iterations (one token's worth of one request), {:.2} million a second of one core",
        millions / took.as_secs_f64().max(1e-9)
    )
}

fn header(path: &Path, scenario: &Scenario, workload: &Workload, capacity: f64, seed: u64) -> Header {
    let span = if workload.clients.is_none() { workload.span().as_secs_f64() } else { 0.0 };
    let steady = workload.jobs.len() - scenario.tenants.iter().map(|(_, sender)| sender.flood).sum::<usize>();
    Header {
        scenario: path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default(),
        seed,
        requests: workload.jobs.len(),
        load: (span > 0.0).then(|| steady as f64 / span / capacity),
        capacity,
        tau: workload.tau(),
        warm_up: scenario.warm_up,
        tenants: scenario.tenants.iter().map(|(name, _)| name.clone()).collect(),
    }
}

/// Runs every contender and every point of the sweep, as many at once as there are cores. The order of the results is that of the scenario.
fn run_all(scenario: &Scenario, workload: &Workload, seed: u64, (check, ask): (bool, Option<Duration>)) -> anyhow::Result<Vec<Result>> {
    let mut tasks: Vec<(Contender, Option<f64>)> = scenario.policies.iter().map(|contender| (contender.clone(), None)).collect();
    for gamma in &scenario.gammas {
        tasks.push((contender(&format!("headway@{gamma}"), Path::new(""))?, Some(*gamma)));
    }
    let span = workload.span();
    // Some 400 points in a chart, whatever the span.
    let look = (span / 400).max(Duration::from_millis(100));
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<anyhow::Result<Result>>>> = tasks.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(tasks.len()) {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some((contender, swept)) = tasks.get(index) else { return };
                    let setup = Setup {
                        affinity: contender.affinity,
                        queue_timeout: scenario.queue_timeout,
                        look,
                        check,
                        ask,
                        ..Setup::new(contender.fleet(scenario), contender.dispatch.clone())
                    };
                    let result = one(&contender.name, *swept, &setup, workload, seed, scenario.warm_up);
                    // Nobody else locks this place, so it is never poisoned.
                    drop(results[index].lock().map(|mut place| *place = Some(result)));
                }
            });
        }
    });
    let mut all = Vec::with_capacity(results.len());
    for result in results {
        all.push(result.into_inner().ok().flatten().context("a simulation panicked")??);
    }
    Ok(all)
}

fn one(name: &str, swept: Option<f64>, setup: &Setup, workload: &Workload, seed: u64, warm_up: f64) -> anyhow::Result<Result> {
    let began = Instant::now();
    let run = super::run(setup, workload, seed).map_err(|broken| anyhow!("policy {name}: {broken}"))?;
    let took = began.elapsed();
    Ok(Result { name: name.to_owned(), swept, figures: run.figures(warm_up), run, took })
}

/// Tries seed after seed.
fn break_things(from: u64, seeds: u64) -> anyhow::Result<()> {
    let began = Instant::now();
    let (mut events, mut answered, mut otherwise, mut capped) = (0, 0, 0, 0);
    for seed in from..from.saturating_add(seeds) {
        let replay = || format!("replay it with: headway simulate --fuzz 1 --seed {seed}");
        let run = catch_unwind(|| fuzz::try_seed(seed)).map_err(|_| anyhow!("seed {seed} panics; {}", replay()))?;
        let run = run.map_err(|broken| anyhow!("seed {seed}, {broken}\n{}", replay()))?;
        let whole = run.answers.iter().filter(|answer| answer.end == End::Answered).count();
        events += run.events;
        capped += u64::from(run.reached > 0.9);
        answered += whole;
        otherwise += run.answers.len() - whole;
    }
    let seconds = began.elapsed().as_secs_f64();
    println!(
        "{seeds} seeds from {from}: nothing broke in {events} events, {answered} answers and {otherwise} other endings; overtaking came near B in {capped} ({seconds:.1} s)"
    );
    Ok(())
}
