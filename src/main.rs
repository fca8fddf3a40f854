//! The command line. Every subcommand lives in the module that does the work; here a result becomes an exit code.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use headway::engine::server as engine;
use headway::training;

#[derive(Parser)]
#[command(name = "headway", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
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
        Command::Check { file } => check(&file),
        Command::Engine(args) => on_runtime(async { Ok(engine::run(args).await?) }),
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

fn on_runtime<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(work)
}
