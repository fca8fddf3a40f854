//! `headway serve`: the socket, the gateway, the operators' address, and then the listener until it is told to stop.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use headway::admin;
use headway::config::{self, BackendUrl, Device, RankerSettings, Snapshot};
use headway::gateway::Gateway;
use headway::proxy::Proxy;
use headway::proxy::server::{Options, Server, Stop};
use tokio::runtime::Runtime;
use tracing_subscriber::EnvFilter;

/// What `headway serve` takes.
#[derive(clap::Args)]
#[command(group = clap::ArgGroup::new("pools").args(["config", "backend"]).required(true).multiple(true))]
pub struct Args {
    /// Configuration file; without it, name the backends with --backend
    #[arg(long, value_name = "FILE", conflicts_with_all = ["backend", "listen", "admin", "policy", "ranker"])]
    config: Option<PathBuf>,
    /// A backend, for example http://localhost:8000; may be given several times
    #[arg(long, value_name = "URL")]
    backend: Vec<BackendUrl>,
    /// Where clients connect (with --backend)
    #[arg(long, value_name = "ADDRESS", value_parser = config::address, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Where operators connect (with --backend)
    #[arg(long, value_name = "ADDRESS", value_parser = config::address, default_value = "127.0.0.1:9090")]
    admin: SocketAddr,
    /// fcfs, pars, uniboost, headway, or a policy file (with --backend)
    #[arg(long, default_value = "headway")]
    policy: String,
    /// A ranker's directory (with --backend); by default models/pars, where that is found
    #[arg(long, value_name = "DIRECTORY")]
    ranker: Option<PathBuf>,
    /// How the log is written to stderr; its level is RUST_LOG's
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = LogFormat::Text)]
    log: LogFormat,
    /// Where the listening socket is handed over to a new process, on SIGQUIT
    #[arg(long, value_name = "SOCKET")]
    upgrade_sock: Option<PathBuf>,
    /// Take the listening socket over from the process that runs with the same --upgrade-sock
    #[arg(long, requires = "upgrade_sock")]
    upgrade: bool,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

/// Runs the gateway until it is told to stop.
pub fn run(args: &Args) -> anyhow::Result<()> {
    log_to_stderr("info", args.log);
    let snapshot = match &args.config {
        Some(file) => config::load(file)?,
        None => without_file(&args.backend, args.listen, args.admin, &args.policy, args.ranker.clone())?,
    };
    let options = Options { upgrade_sock: args.upgrade_sock.clone(), upgrade: args.upgrade, threads: snapshot.threads };
    let scheme = if snapshot.tls.is_some() { "https" } else { "http" };
    let server = Server::bind(snapshot.listen, snapshot.tls.clone(), options)?;
    let runtime = runtime()?;
    let gateway = runtime.block_on(Gateway::start(snapshot))?;
    runtime.block_on(admin::start(Arc::clone(&gateway), args.config.as_deref(), args.upgrade))?;
    if gateway.live().tenancy.is_none() && !server.address().ip().is_loopback() {
        tracing::warn!("no keys are configured: whoever reaches {} may ask", server.address());
    }
    println!("listening on {scheme}://{}", server.address());
    let ended = server.run(Arc::new(Proxy::new(Arc::clone(&gateway))), Stop::Signals);
    if let Some(tracer) = &gateway.tracer {
        runtime.block_on(tracer.flush());
    }
    Ok(ended?)
}

/// The configuration of a gateway that was told its backends alone.
pub fn without_file(
    backends: &[BackendUrl],
    listen: SocketAddr,
    admin: SocketAddr,
    policy: &str,
    ranker: Option<PathBuf>,
) -> anyhow::Result<Snapshot> {
    let mut snapshot = config::from_backends(backends, listen, admin, config::policy(policy)?);
    snapshot.ranker =
        ranker.or_else(shipped_ranker).map(|weights| RankerSettings { weights, device: Device::Auto, deadline: None, threads: 0, shadow: None });
    Ok(snapshot)
}

/// `models/pars` in the working directory or above the executable, as in a checkout.
fn shipped_ranker() -> Option<PathBuf> {
    let executable = std::env::current_exe().ok()?;
    let above = executable.ancestors().skip(1).map(PathBuf::from);
    std::iter::once(PathBuf::new()).chain(above).map(|folder| folder.join("models/pars")).find(|folder| folder.join("config.json").is_file())
}

/// A runtime for everything that is not on a request's way: probes, reloads, the operators' address.
pub fn runtime() -> anyhow::Result<Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("glue").build().context("starting a runtime")
}

/// Logs what is at least as important as `level`, or as RUST_LOG says.
pub fn log_to_stderr(level: &str, format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(format!("{level},pingora_core=warn")));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
}
