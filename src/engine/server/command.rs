//! `headway engine`: the simulated engine as a program.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use super::{LengthModel, Lengths, ServerConfig, serve};
use crate::engine::{BLOCK_TOKENS, Order, Profile};
use crate::scheduler::Tokens;

/// Runs a simulated engine: continuous batching, KV blocks and a prefix cache in real time, behind the OpenAI API and vLLM's metrics.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,
    /// Name of the served model; give it again for more names
    #[arg(long, default_value = "sim")]
    pub model: Vec<String>,
    /// The hardware it pretends to be: L4, A100 or H100 class, with an 8B model
    #[arg(long, value_enum, default_value_t = Hardware::Medium)]
    pub profile: Hardware,
    /// Requests that run at once, instead of the profile's
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub slots: Option<u32>,
    /// Tokens of KV cache, instead of the profile's; in blocks of 16
    #[arg(long, value_parser = clap::value_parser!(u32).range(i64::from(BLOCK_TOKENS)..))]
    pub kv_tokens: Option<Tokens>,
    /// How many times faster than real it runs
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub speed: f64,
    /// Order of the waiting queue
    #[arg(long, value_enum, default_value_t = PolicyName::Fcfs)]
    pub policy: PolicyName,
    /// Decides the words, and the lengths that neither the request nor --lengths gives
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Known answer lengths: a JSON Lines file of {"prompt": TEXT, "output_tokens": N}
    #[arg(long, value_name = "FILE")]
    pub lengths: Option<PathBuf>,
}

/// The built-in profiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Hardware {
    Small,
    Medium,
    Large,
}

/// vLLM's names of [`Order`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PolicyName {
    Fcfs,
    Priority,
}

/// Why the engine could not run. What lies behind it is its source, for whoever prints the chain.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("cannot listen on {address}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("cannot read {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}, line {line}")]
    Line { path: PathBuf, line: usize, source: serde_json::Error },
    #[error("cannot wait for signals")]
    Signals(#[source] io::Error),
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("must be a number above 0".to_owned()),
    }
}

impl Args {
    /// The configuration these arguments describe.
    ///
    /// # Errors
    /// When the file of lengths cannot be read.
    pub fn config(&self) -> Result<ServerConfig, EngineError> {
        let mut profile = match self.profile {
            Hardware::Small => Profile::small(),
            Hardware::Medium => Profile::medium(),
            Hardware::Large => Profile::large(),
        };
        profile.order = match self.policy {
            PolicyName::Fcfs => Order::Fcfs,
            PolicyName::Priority => Order::Priority,
        };
        profile.max_num_seqs = self.slots.unwrap_or(profile.max_num_seqs);
        profile.kv_blocks = self.kv_tokens.map_or(profile.kv_blocks, |tokens| tokens / BLOCK_TOKENS);
        let lengths = self.lengths.as_deref().map(read_lengths).transpose()?.unwrap_or_default();
        let models = self.model.clone();
        Ok(ServerConfig { models, profile, speed: self.speed, seed: self.seed, lengths, length_model: LengthModel::default() })
    }
}

#[derive(Deserialize)]
struct KnownLength {
    prompt: String,
    output_tokens: Tokens,
}

fn read_lengths(path: &Path) -> Result<Lengths, EngineError> {
    let text = std::fs::read_to_string(path).map_err(|source| EngineError::Read { path: path.to_owned(), source })?;
    let mut lengths = Lengths::default();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let known: KnownLength = serde_json::from_str(line).map_err(|source| EngineError::Line { path: path.to_owned(), line: at + 1, source })?;
        lengths.insert(&known.prompt, known.output_tokens);
    }
    Ok(lengths)
}

/// Serves until SIGINT or SIGTERM. The first line on standard output says where.
///
/// # Errors
/// When the address is taken or the file of lengths cannot be read.
pub async fn run(args: Args) -> Result<(), EngineError> {
    let config = args.config()?;
    let listen = |source| EngineError::Listen { address: args.listen, source };
    let listener = TcpListener::bind(args.listen).await.map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(EngineError::Signals)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(EngineError::Signals)?;
    // Whoever started it may have closed the pipe; it serves all the same.
    let _ = writeln!(io::stdout(), "headway engine: {} on http://{address}", config.models.join(", "));
    tokio::select! {
        never = serve(listener, config) => match never {},
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_in_the_lengths_is_named_with_its_line() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), "{\"prompt\": \"a\", \"output_tokens\": 5}\n\n{\"prompt\": \"b\"}\n").expect("written");
        let error = read_lengths(file.path()).expect_err("the third line lacks a field");
        let EngineError::Line { line, source, .. } = &error else { panic!("{error}") };
        assert_eq!(*line, 3);
        assert!(source.to_string().contains("missing field `output_tokens`"), "{source}");
    }

    #[test]
    fn speeds_that_make_no_sense_are_refused() {
        assert_eq!(positive("2.5"), Ok(2.5));
        for bad in ["0", "-1", "inf", "NaN", "fast"] {
            assert!(positive(bad).is_err(), "{bad}");
        }
    }
}
