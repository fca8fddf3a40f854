//! What is known of the backends: what engine each runs, whether it answers, how loaded it is.
//!
//! A [`Backend`] is shared by the edge, which reports how its attempts went ([`Backend::observe`]), and by two tasks per backend that [`watch`] starts:
//! one probes its health and finds out what runs there, one reads its metrics. Each waits for its own backend alone, so that a dead, slow or hanging one
//! delays nobody else. Every change of what is known goes to the pool's dispatcher at once.

mod backend;
mod engines;
mod health;
mod http;
mod load;
mod probe;
mod prometheus;
mod pulse;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tokio::task::JoinHandle;

pub use backend::{Backend, BackendView, Beat, Listener};
pub use engines::{EngineKind, Priority};
pub use health::{Observation, Siblings};

/// Starts to watch a backend and to tell `listener` what is known of it. Needs a tokio runtime; waits for nothing. Dropping the guard ends the tasks.
pub fn watch(backend: Arc<Backend>, listener: impl Listener) -> WatchGuard {
    backend.listen(Box::new(listener));
    WatchGuard { tasks: [tokio::spawn(probe::run(Arc::clone(&backend))), tokio::spawn(load::run(backend))] }
}

/// Keeps the tasks that watch a backend alive.
pub struct WatchGuard {
    tasks: [JoinHandle<()>; 2],
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}
