//! Files to one validated [`Snapshot`]. The only place that knows YAML.
//!
//! `raw` is what users write, `text` reads single values, `validate` checks and joins them, `policy` finds policies, `keys` reads who may ask. A wrong file yields one
//! [`ConfigError`] with every problem that could be found: file, line, column, field, and what to write instead.

mod error;
mod keys;
mod near;
mod parse;
mod policy;
mod raw;
mod snapshot;
mod text;
mod validate;
mod watch;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

pub use error::{ConfigError, Problem};
pub use near::near;
pub use policy::{built_in_policies, policy};
pub use snapshot::*;
pub use text::Mistake;
pub use watch::{ReloadError, ReloadStatus, Reloader};

/// How any file that users write is read, scenarios of the simulator too: leaves with their places, and one error with every mistake.
pub(crate) mod reading {
    pub(crate) use super::error::{ConfigError, Problem};
    pub(crate) use super::parse::parse;
    pub(crate) use super::policy::policy_beside;
    pub(crate) use super::raw::{Leaf, TextOr};
    pub(crate) use super::text::{FromText, Mistake, choice};
    pub(crate) use super::validate::{Checker, Place};
}

use text::FromText;
use validate::{Environment, show_bytes, show_duration};

/// Reads and checks a configuration file and the files it names.
///
/// # Errors
/// Everything that is wrong with it.
pub fn load(path: &Path) -> Result<Snapshot, ConfigError> {
    load_with(path, &|name| std::env::var(name).ok())
}

fn load_with(path: &Path, environment: Environment) -> Result<Snapshot, ConfigError> {
    let bytes = std::fs::read(path).map_err(|error| {
        ConfigError::of_file(
            path,
            format!("cannot be read: {error}"),
            "name a configuration file, or start without one: headway serve --backend http://127.0.0.1:8000".into(),
        )
    })?;
    let text = String::from_utf8(bytes).map_err(|_| ConfigError::of_file(path, "is not UTF-8 text".into(), "save it as UTF-8".into()))?;
    let raw: raw::File = parse::parse(path, &text)?;
    validate::validate(path, &raw, environment)
}

/// An address to listen on, as a configuration file may write it.
///
/// # Errors
/// The text is no address with a port; says how to write one.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    SocketAddr::from_text(text).map_err(|mistake| format!("{}; {}", mistake.message, mistake.hint))
}

/// The configuration of `headway serve --backend URL ...`: one pool that takes any model, all else default. A URL given twice counts once.
pub fn from_backends(urls: &[BackendUrl], listen: SocketAddr, admin: SocketAddr, policy: NamedPolicy) -> Snapshot {
    let policy = Arc::new(policy);
    let mut backends: Vec<BackendSettings> = Vec::new();
    for url in urls {
        if backends.iter().all(|known| known.url != *url) {
            backends.push(BackendSettings::new(url.clone()));
        }
    }
    let pool = Pool {
        name: "default".into(),
        policy: Arc::clone(&policy),
        models: Vec::new(),
        model_queues: BTreeMap::new(),
        fallback: Vec::new(),
        backends,
        limits: DEFAULT_LIMITS,
        timeouts: Timeouts::default(),
        retries: DEFAULT_RETRIES,
        retry_budget: DEFAULT_RETRY_BUDGET,
        resume: false,
        slow_stream: None,
    };
    Snapshot {
        listen,
        tls: None,
        admin,
        threads: 0,
        policy,
        ranker: None,
        otlp: None,
        keys: None,
        training_log: None,
        usage_log: None,
        access_log: None,
        state: None,
        edge: Edge::default(),
        pools: vec![Arc::new(pool)],
        models: BTreeMap::new(),
        sources: Vec::new(),
    }
}

/// `headway check FILE`: the same validation as start and reload, and a summary for people.
///
/// # Errors
/// Everything that is wrong with the file.
pub fn check(path: &Path) -> Result<String, ConfigError> {
    load(path).map(|snapshot| summary(path, &snapshot))
}

fn summary(path: &Path, snapshot: &Snapshot) -> String {
    let mut out = format!("{} is valid\n", path.display());
    let tls = if snapshot.tls.is_some() { "https" } else { "http" };
    let ranker = snapshot.ranker.as_ref().map_or("off (orders by prompt length)".into(), |ranker| ranker.weights.display().to_string());
    // Writing to a String cannot fail.
    let _ = writeln!(out, "  clients    {tls}://{}", snapshot.listen);
    let _ = writeln!(out, "  operators  http://{}", snapshot.admin);
    let _ = match &snapshot.keys {
        None => writeln!(out, "  keys       none: whoever reaches the address may ask"),
        Some(settings) => {
            let keys: usize = settings.tenants.iter().map(|tenant| tenant.keys.len()).sum();
            writeln!(out, "  keys       {keys} of {} tenants", settings.tenants.len())
        }
    };
    let _ = writeln!(out, "  ranker     {ranker}");
    if let Some(shadow) = snapshot.ranker.as_ref().and_then(|ranker| ranker.shadow.as_ref()) {
        let _ = writeln!(out, "  shadow     {}", shadow.display());
    }
    if let Some(state) = &snapshot.state {
        let _ = writeln!(out, "  state      {}", state.display());
    }
    if let Some(log) = &snapshot.training_log {
        let _ = writeln!(out, "  training   answers are noted in {}, up to {} and as much again", log.file.display(), show_bytes(log.max_size));
    }
    if let Some(log) = &snapshot.usage_log {
        let _ = writeln!(out, "  usage      is written to {}, in files of {}", log.file.display(), show_bytes(log.max_size));
    }
    if let Some(log) = &snapshot.access_log {
        let _ = writeln!(out, "  access log {}, in files of {}, {} of them kept", log.file.display(), show_bytes(log.max_size), log.keep);
    }
    if let Some(otlp) = &snapshot.otlp {
        let _ = writeln!(out, "  traces     {} of requests go to {}", otlp.sample, otlp.endpoint);
    }
    let _ = writeln!(out, "  bodies     up to {}, {} in sum", show_bytes(snapshot.edge.max_body), show_bytes(snapshot.edge.max_body_total));
    for pool in &snapshot.pools {
        let _ = writeln!(out, "  pool {}: policy {}, waits up to {}", pool.name, pool.policy.name, show_duration(pool.timeouts.queue));
        if pool.models.is_empty() {
            let _ = writeln!(out, "    any model its backends serve");
        }
        for (name, upstream) in &pool.models {
            let _ = match upstream {
                Some(upstream) => writeln!(out, "    model {name} (the backends know it as {upstream})"),
                None => writeln!(out, "    model {name}"),
            };
        }
        if !pool.fallback.is_empty() {
            let _ = writeln!(out, "    falls back on {}", pool.fallback.join(", then "));
        }
        if pool.resume {
            let _ = writeln!(out, "    goes on with answers whose backend dies");
        }
        for backend in &pool.backends {
            let engine = backend.engine.map_or("engine found out", |engine| engine.as_str());
            let _ = writeln!(out, "    backend {} ({engine})", backend.url);
        }
    }
    out
}

#[cfg(test)]
mod tests;
