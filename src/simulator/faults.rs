//! What can go wrong in a run.

use std::time::Duration;

use super::member::Member;
use crate::scheduler::{Limits, Load, Policy, Time};

/// Something that happens to the fleet or to the gateway. Backends are named by their place in the fleet.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// It loses everything it had. Requests to it fail until it is back; the gateway stops sending them when it has noticed, and lets it prove itself afterwards.
    Crash { backend: usize, noticed_after: Duration, back_after: Duration },
    /// It goes on at this multiple of its speed; at 0 it stands still.
    Pace { backend: usize, factor: f64 },
    /// What its metrics page says from now on.
    Tells { backend: usize, tells: Tells },
    /// An operator takes it out, or puts it back.
    Drained { backend: usize, drained: bool },
    /// It leaves the pool for good.
    Leaves { backend: usize },
    /// Another one joins the pool.
    Joins(Member),
    /// Another policy applies.
    Policy(Policy),
    /// Other limits apply.
    Limits(Limits),
    /// The gateway accepts nothing more.
    Drain,
    /// Events about requests and backends that nobody knows.
    Strangers,
}

/// What a metrics page says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Tells {
    /// How it is.
    Truth,
    /// How it was when this began.
    Stale,
    /// This, whatever is true.
    Lie(Load),
    /// Nothing.
    Nothing,
}

/// How the news of a request's end reaches the gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Mess {
    /// How often it comes late, 0 to 1.
    pub late: f64,
    /// Up to how late.
    pub by: Duration,
    /// How often it comes twice, 0 to 1.
    pub twice: f64,
    /// How often an attempt is answered with 429, 0 to 1.
    pub pushback: f64,
}

/// Everything that goes wrong in one run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// In any order.
    pub faults: Vec<(Time, Fault)>,
    pub mess: Mess,
}
