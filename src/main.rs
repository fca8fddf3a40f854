//! The command line. Every subcommand lives in the module that does the work; here a result becomes an exit code.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use headway::engine::server as engine;
use headway::simulator::command as simulator;
use headway::tenancy::NewKey;
use headway::training;

mod demo;
mod serve;
mod top;

/// A request is some fifty small allocations on the same few threads, which jemalloc serves with less CPU time than the C library does; docs/comparison.md says how much.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

#[derive(Parser)]
#[command(name = "headway", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the gateway
    Serve(serve::Args),
    /// Run three simulated backends, the gateway in front, and one workload under fcfs and under headway
    Demo(demo::Args),
    /// Show a running gateway in the terminal
    Top(top::Args),
    /// Check a configuration file as start and reload do
    Check {
        /// The file
        file: PathBuf,
    },
    /// Run a simulated engine
    Engine(engine::Args),
    /// Compare policies on a workload in virtual time, or look for what breaks them
    Simulate(simulator::Args),
    /// Keys that clients show
    Key {
        #[command(subcommand)]
        what: Key,
    },
    Train(training::TrainArgs),
    Evaluate(training::EvaluateArgs),
    Score(training::ScoreArgs),
}

#[derive(Subcommand)]
enum Key {
    /// Make a key, and print it once and the entry for the keys file
    New,
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(args) => serve::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Check { file } => check(&file),
        Command::Engine(args) => serve::runtime().and_then(|runtime| Ok(runtime.block_on(engine::run(args))?)),
        Command::Simulate(args) => simulator::run(&args),
        Command::Key { what: Key::New } => new_key(),
        Command::Train(args) => training::train(&args),
        Command::Evaluate(args) => training::evaluate(&args),
        Command::Score(args) => training::score(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("headway: {}", story(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error and its causes, each said once: many errors name their cause themselves.
fn story(error: &anyhow::Error) -> String {
    error
        .chain()
        .skip(1)
        .map(ToString::to_string)
        .fold(error.to_string(), |told, cause| if told.contains(&cause) { told } else { format!("{told}: {cause}") })
}

fn new_key() -> anyhow::Result<()> {
    let key = NewKey::random()?;
    println!("key     {}   for the client: it is shown this once and kept nowhere", key.reveal());
    println!("sha256  {}   for a tenant's keys in the keys file", key.hash());
    Ok(())
}

fn check(file: &Path) -> anyhow::Result<()> {
    let summary = headway::config::check(file)?;
    // Not the configuration's own business, and the start would fail of it all the same.
    if let Some(ranker) = headway::config::load(file)?.ranker {
        if let Some(shadow) = &ranker.shadow {
            headway::ranker::Shadow::start(&ranker, shadow).context("ranker.shadow")?;
        }
        headway::ranker::Ranker::start(ranker).context("ranker")?;
    }
    print!("{summary}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split(' '))
    }

    #[test]
    fn causes_are_said_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("reading x: {0}")]
        struct Outer(#[source] std::io::Error);
        let error = anyhow::Error::new(Outer(std::io::Error::other("gone")));
        assert_eq!(story(&error), "reading x: gone");
        assert_eq!(story(&error.context("starting")), "starting: reading x: gone");
    }

    #[test]
    fn what_a_file_says_is_not_said_beside_it() {
        assert!(parse("headway serve --config a.yaml").is_ok());
        assert!(parse("headway serve --backend http://a:1 --backend http://b:1 --policy fcfs --listen 127.0.0.1:1 --admin 127.0.0.1:2").is_ok());
        for option in ["--listen 127.0.0.1:1", "--admin 127.0.0.1:1", "--policy fcfs", "--ranker x", "--backend http://a:1"] {
            let error = parse(&format!("headway serve --config a.yaml {option}")).err().expect(option);
            assert_eq!(error.kind(), clap::error::ErrorKind::ArgumentConflict, "{option}");
        }
    }

    #[test]
    fn a_gateway_without_anything_is_told_both_ways_to_start() {
        let error = parse("headway serve").err().unwrap().to_string();
        assert!(error.contains("--config <FILE>") && error.contains("--backend <URL>"), "{error}");
    }
}
