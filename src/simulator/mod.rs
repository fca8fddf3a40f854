//! The production [`Scheduler`](crate::scheduler::Scheduler) and the [engine model](crate::engine) under virtual time.
//!
//! One heap of things to come. Requests arrive, the scheduler's actions go to the engines, their tokens come back as the events that the gateway would have
//! sent; an engine's own numbers reach the scheduler as the fleet reads them, every quarter of a second under traffic. Nothing here reads a clock or does IO but
//! the [command line](command): the same setup, workload and seed give the same run, to the microsecond.
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

// What is simulated.
mod conversations;
mod faults;
mod member;
mod random;
mod workload;

// The run.
mod check;
mod world;

// What came of it.
mod account;
mod fairness;

// Setups drawn by seed, to find what breaks.
pub mod fuzz;

#[cfg(feature = "gateway")]
pub mod command;

pub use account::{Answer, End, Figures, Foresight, Foretold, Moment, Run, Summary, TenantFigures};
pub use check::{Broken, Wrong};
pub use conversations::{Conversations, Turn};
pub use faults::{Fault, Mess, Plan, Tells};
pub use member::{AUTO_SLOTS, Member, capacity};
pub use random::Random;
pub use workload::{Arrivals, Job, Length, Part, Scores, Sender, Workload};

use std::time::Duration;

use crate::scheduler::{Learnt, Limits, Policy, RankerVersion};

/// How requests find a backend.
#[derive(Clone, Debug, PartialEq)]
pub enum Dispatch {
    /// Through the gateway's queues.
    Gateway { policy: Policy, limits: Limits },
    /// Directly, each to the next backend in turn: all waiting happens inside the engines.
    RoundRobin,
    /// Directly, to the backend with the fewest requests of ours; ties in turn.
    LeastLoaded,
    /// Directly, each conversation to a backend of its own, whatever else is there; what belongs to none in turn.
    Sticky,
}

/// Everything but the workload and the seed that a run depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct Setup {
    pub fleet: Vec<Member>,
    pub dispatch: Dispatch,
    /// Whether the gateway is told what prompts begin with.
    pub affinity: bool,
    /// How long a request may wait in the gateway; `None` is forever.
    pub queue_timeout: Option<Duration>,
    /// How often a request whose backend broke before its first token is sent again.
    pub retries: u32,
    /// What goes wrong, and when.
    pub plan: Plan,
    /// Between two looks at the pool, for [`Run::moments`].
    pub look: Duration,
    /// Whether every invariant is checked after every event. Walks over everything that waits each time.
    pub check: bool,
    /// How often a request that waits asks when it is its turn, for [`Run::foretold`]; `None` is never.
    pub ask: Option<Duration>,
    /// What the gateway has learnt before, and the ranker that the scores are of.
    pub learnt: Learnt,
    pub ranker: RankerVersion,
}

impl Setup {
    /// A fleet on which nothing goes wrong.
    pub fn new(fleet: Vec<Member>, dispatch: Dispatch) -> Self {
        Setup {
            fleet,
            dispatch,
            affinity: true,
            queue_timeout: None,
            retries: 2,
            plan: Plan::default(),
            look: Duration::from_secs(10),
            check: false,
            ask: None,
            learnt: Learnt::default(),
            ranker: RankerVersion(0),
        }
    }
}

/// Runs a workload until every request has ended.
///
/// # Errors
/// Something that must always hold did not; only looked for where [`Setup::check`] asks for it, but for a request that never ends.
pub fn run(setup: &Setup, workload: &Workload, seed: u64) -> Result<Run, Broken> {
    world::World::new(setup, workload, seed).run()
}
