//! What to order by. A [`Policy`] that exists is consistent: everything is checked where it is built.

use std::time::Duration;

/// What the main queue is sorted by; the smallest key is released first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// Arrival.
    Fcfs,
    /// The ranker's score, shortest first (PARS, arXiv 2510.03243).
    Pars,
    /// Boosted arrival by prompt length alone, without prediction (UNIBOOST, arXiv 2606.18431).
    Uniboost,
    /// Boosted arrival by calibrated expected work.
    Headway,
    /// The true length, shortest first. Simulation only.
    OracleSjf,
    /// Boosted arrival by the true length. Simulation only.
    OracleBoost,
}

/// How gamma, the decay rate of the boost in 1/s, is found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gamma {
    /// From the slope of the tail of recent response times.
    Adaptive,
    /// Fixed.
    Fixed(f64),
    /// From the slope, scaled towards the mean or the tail.
    Target(Target),
}

/// Which end of the mean-against-tail front to prefer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    Mean,
    Balanced,
    Tail,
}

/// How far a later arrival may overtake an earlier one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MaxOvertake {
    /// 4/gamma.
    Auto,
    /// A promise; gamma is at least 4 over it.
    Within(Duration),
}

/// A scheduling policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    order: Order,
    gamma: Gamma,
    max_overtake: MaxOvertake,
    aging_threshold: Duration,
    aging_share: f64,
    overload: bool,
}

/// What a policy may hold while it is being put together; [`Policy::new`] checks it.
#[derive(Clone, Debug, PartialEq)]
pub struct PolicyParts {
    pub order: Order,
    pub gamma: Gamma,
    pub max_overtake: MaxOvertake,
    /// Waiting longer than this joins the aged FIFO.
    pub aging_threshold: Duration,
    /// At most this share of releases comes from the aged FIFO while the main queue is not empty; 0 is off, 1 is absolute promotion.
    pub aging_share: f64,
    /// Whether the pool may switch to overload mode.
    pub overload: bool,
}

/// Limits of one pool's queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests that may wait.
    pub queue_requests: usize,
    /// Bytes of bodies that may wait.
    pub queue_bytes: u64,
    /// The largest output a request of this pool may have, in tokens; stands in where the client sets no limit.
    pub max_output: u32,
}
