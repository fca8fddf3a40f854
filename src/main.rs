//! The command line. Every subcommand lives in the module that does the work; here a result becomes an exit code.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use headway::engine::server as engine;
use headway::training;

mod demo;
mod serve;

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
    /// Check a configuration file as start and reload do
    Check {
        /// The file
        file: PathBuf,
    },
    /// Run a simulated engine
    Engine(engine::Args),
    Train(training::TrainArgs),
    Evaluate(training::EvaluateArgs),
    Score(training::ScoreArgs),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(args) => serve::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Check { file } => check(&file),
        Command::Engine(args) => serve::runtime().and_then(|runtime| Ok(runtime.block_on(engine::run(args))?)),
        Command::Train(args) => training::train(&args),
        Command::Evaluate(args) => training::evaluate(&args),
        Command::Score(args) => training::score(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("headway: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn check(file: &Path) -> anyhow::Result<()> {
    print!("{}", headway::config::check(file)?);
    Ok(())
}
