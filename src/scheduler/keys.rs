//! What a request is ordered by: its expected work and, from that, its key.

use super::policy::{Gamma, Limits, MaxOvertake, Order, Policy};
use super::score::{Boost, attained_level, micros};
use super::speed::Speed;
use super::table::Entry;

/// Everything but the request that keys depend on. All keys of a pool are made by one such value; another one means that all are rebuilt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keying {
    pub order: Order,
    /// In overload every order that boosts goes by work alone.
    pub overload: bool,
    pub speed: Speed,
    pub gamma: f64,
    /// B: how much later, in seconds, a request may arrive and still overtake.
    pub bound: f64,
    boost: Boost,
}

impl Keying {
    pub fn new(policy: &Policy, limits: &Limits, speed: Speed, gamma: f64, overload: bool) -> Self {
        let bound = match policy.max_overtake() {
            MaxOvertake::Auto => 4.0 / gamma,
            MaxOvertake::Within(within) => within.as_secs_f64(),
        };
        let longest = speed.seconds(0, u64::from(limits.max_output)).max(shortest(speed));
        Keying { order: policy.order(), overload, speed, gamma, bound, boost: Boost::new(gamma, bound, longest) }
    }

    /// Expected work in capacity-seconds.
    pub fn work(&self, entry: &Entry) -> f64 {
        let output = match self.order {
            Order::Uniboost => 0,
            Order::OracleSjf | Order::OracleBoost => entry.oracle_output().unwrap_or(entry.expected),
            Order::Fcfs | Order::Pars | Order::Headway => entry.expected,
        };
        let expected = self.speed.seconds(u64::from(entry.uncached()), u64::from(output));
        let attained = self.speed.seconds(0, u64::from(attained_level(entry.attained)));
        expected.max(attained).max(shortest(self.speed))
    }

    /// The key of a request whose work is known. The smallest goes first.
    pub fn phi(&self, entry: &Entry, work: f64) -> i64 {
        match self.order {
            Order::Fcfs => micros(entry.arrived),
            Order::Pars => entry.score().map_or(0, |scored| (f64::from(scored.score.get()) * 1e6) as i64),
            Order::OracleSjf => by_work(work, entry),
            Order::Uniboost | Order::Headway | Order::OracleBoost if self.overload => by_work(work, entry),
            Order::Uniboost | Order::Headway | Order::OracleBoost => self.boost.boosted_arrival(entry.arrived, work, entry.weight()),
        }
    }
}

/// Work per weight, in nanoseconds: it has no place on the clock.
fn by_work(work: f64, entry: &Entry) -> i64 {
    (work / entry.weight().get() * 1e9) as i64
}

/// The least work there is: one prompt token and one output token. Without it a fully cached prompt would be boosted without limit.
fn shortest(speed: Speed) -> f64 {
    speed.seconds(1, 1)
}

/// Gamma before anything was seen.
pub(super) fn initial_gamma(policy: &Policy, mean_work: f64) -> f64 {
    let gamma = match policy.gamma() {
        Gamma::Fixed(gamma) => gamma,
        Gamma::Adaptive | Gamma::Target(_) => 0.1 / mean_work,
    };
    match policy.max_overtake() {
        MaxOvertake::Auto => gamma,
        MaxOvertake::Within(within) => gamma.max(4.0 / within.as_secs_f64()),
    }
}
