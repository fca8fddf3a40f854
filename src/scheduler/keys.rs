//! What a request is ordered by: its expected work and, from that, its key.

use super::event::Tokens;
use super::gamma::BOUND;
use super::policy::{Limits, MaxOvertake, Order, Policy};
use super::score::{Boost, Scored, attained_level, micros};
use super::speed::Speed;
use super::table::Entry;

/// Works above this many mean works are boosted as little as the largest there can be. Measured against what a pool allows instead, often a hundred times what
/// its answers are, nearly every boost would reach its cap at B: a small gamma tells works apart within a factor of e^4 only, and the order would be arrival.
const LONGEST: f64 = 1.5;

/// Everything but the request that keys depend on. All keys of a pool are made by one such value; another one means that all are rebuilt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keying {
    pub order: Order,
    /// In overload, orders that boost go by work alone.
    pub overload: bool,
    pub speed: Speed,
    pub gamma: f64,
    /// B: how much later, in seconds, a request may arrive and still overtake.
    pub bound: f64,
    /// The work, in capacity-seconds, from which on nothing is boosted.
    pub longest: f64,
    boost: Boost,
    /// What stands in for a score that is missing or not comparable, where scores themselves are the order.
    neutral: Option<Scored>,
}

/// The largest requests that a pool may get, in tokens.
#[derive(Clone, Copy, Debug)]
pub(super) struct Largest {
    pub prompt: Tokens,
    pub output: Tokens,
}

impl Largest {
    /// By the limits of a pool and the longest of its backends' contexts.
    pub fn new(limits: &Limits, context: Option<Tokens>) -> Self {
        // Most models read at least this much; it only matters where prompts alone are the order.
        Largest { prompt: context.unwrap_or(32_768), output: limits.max_output }
    }
}

impl Keying {
    /// `mean_work` is that of the policy's order, at this speed.
    pub fn new(policy: &Policy, largest: Largest, speed: Speed, mean_work: f64, gamma: f64, overload: bool, neutral: Option<Scored>) -> Self {
        let bound = match policy.max_overtake() {
            MaxOvertake::Auto => BOUND / gamma,
            MaxOvertake::Within(within) => within.as_secs_f64(),
        };
        let order = policy.order();
        let allowed = match order {
            Order::Uniboost => speed.seconds(u64::from(largest.prompt), 0),
            _ => speed.seconds(0, u64::from(largest.output)),
        };
        let longest = allowed.min(LONGEST * mean_work).max(shortest(speed));
        Keying { order, overload, speed, gamma, bound, longest, boost: Boost::new(gamma, bound, longest), neutral }
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
            Order::Pars => {
                let comparable = entry.score().filter(|scored| self.neutral.is_none_or(|neutral| neutral.version == scored.version));
                comparable.or(self.neutral).map_or(0, |scored| scored.score.ordinal())
            }
            Order::OracleSjf => by_work(work, entry),
            Order::Uniboost | Order::Headway | Order::OracleBoost if self.overload => by_work(work, entry),
            Order::Uniboost | Order::Headway | Order::OracleBoost => self.boost.boosted_arrival(entry.arrived, work, entry.weight()),
        }
    }

    /// A key as a time in microseconds, for engines that merge several gateways' orders; the arrival where keys are no times.
    pub fn boosted_arrival(&self, entry: &Entry, phi: i64) -> i64 {
        if self.is_by_time() { phi } else { micros(entry.arrived) }
    }

    /// Whether keys are times of arrival, boosted or not.
    pub fn is_by_time(&self) -> bool {
        match self.order {
            Order::Fcfs => true,
            Order::Pars | Order::OracleSjf => false,
            Order::Uniboost | Order::Headway | Order::OracleBoost => !self.overload,
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

/// What requests are like on average, in tokens, so that mean work follows the speed without waiting for new requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mix {
    prompts: Mean,
    outputs: Mean,
}

#[derive(Clone, Copy, Debug)]
struct Mean {
    seen: f64,
    mean: f64,
}

impl Mean {
    fn add(&mut self, value: Tokens) {
        self.seen = (self.seen + 1.0).min(2000.0);
        self.mean += (f64::from(value) - self.mean) / self.seen;
    }
}

impl Default for Mix {
    /// What is assumed before anything was seen; worth ten requests.
    fn default() -> Self {
        let assumed = Mean { seen: 10.0, mean: 256.0 };
        Mix { prompts: assumed, outputs: assumed }
    }
}

impl Mix {
    /// A request arrived with this many prompt tokens to compute.
    pub fn arrived(&mut self, prompt: Tokens) {
        self.prompts.add(prompt);
    }

    /// A request ended after this many output tokens.
    pub fn ended(&mut self, output: Tokens) {
        self.outputs.add(output);
    }

    /// Mean work as an order counts it, in capacity-seconds.
    pub fn work(&self, order: Order, speed: Speed) -> f64 {
        match order {
            Order::Uniboost => (speed.prompt * self.prompts.mean).max(shortest(speed)),
            _ => self.service(speed),
        }
    }

    /// Mean work as a backend has it, in capacity-seconds: what waits, and so gamma, depend on, whatever an order counts.
    pub fn service(&self, speed: Speed) -> f64 {
        (speed.prompt * self.prompts.mean + speed.output * self.outputs.mean).max(shortest(speed))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::event::Request;
    use super::super::policy::{Gamma, Lead, PolicyParts};
    use super::super::queue::Place;
    use super::super::score::Weight;
    use super::*;

    fn keying(order: Order, overload: bool) -> Keying {
        let policy = Policy::new(PolicyParts {
            order,
            gamma: Gamma::Fixed(0.1),
            max_overtake: MaxOvertake::Auto,
            aging_threshold: Duration::from_secs(120),
            aging_share: 0.1,
            lead: Lead::Auto,
            overload: true,
        })
        .unwrap();
        let limits = Limits { queue_requests: 1, queue_bytes: 1, max_output: 4096 };
        Keying::new(&policy, Largest::new(&limits, None), Speed::ASSUMED, 0.5, 0.1, overload, None)
    }

    fn entry(weight: f64) -> Entry {
        let request = Request { weight: Weight::new(weight).unwrap(), ..super::super::tests::request(1, 7_000_000) };
        let mut entry = Entry::new(&request, Place::new(0, 0));
        entry.expected = 100;
        entry
    }

    /// An engine that merges orders needs times; by work or by score there are none.
    #[test]
    fn what_an_engine_is_told_is_a_time() {
        let entry = entry(1.0);
        for order in [Order::Headway, Order::Uniboost, Order::OracleBoost] {
            assert_eq!(keying(order, false).boosted_arrival(&entry, 123), 123);
            assert_eq!(keying(order, true).boosted_arrival(&entry, 123), 7_000_000, "in overload");
        }
        for order in [Order::Pars, Order::OracleSjf] {
            assert_eq!(keying(order, false).boosted_arrival(&entry, 123), 7_000_000);
        }
    }

    #[test]
    fn twice_the_weight_is_half_the_work() {
        let overloaded = keying(Order::Headway, true);
        let phi = |weight| overloaded.phi(&entry(weight), 0.5);
        assert_eq!((phi(1.0), phi(2.0)), (500_000_000, 250_000_000), "nanoseconds");
        let work = overloaded.work(&entry(1.0));
        assert!((work - Speed::ASSUMED.seconds(10, 100)).abs() < 1e-12);
        let mut least = entry(1.0);
        (least.expected, least.prompt) = (0, 0);
        assert_eq!(overloaded.work(&least), Speed::ASSUMED.seconds(1, 1), "one token of each is the least");
    }

    #[test]
    fn a_mean_follows_what_it_sees() {
        let mut mix = Mix::default();
        (0..10).for_each(|_| mix.ended(56));
        assert_eq!(mix.outputs.mean, 156.0, "ten requests and the assumption, which is worth ten");
        (0..10_000).for_each(|_| mix.ended(40));
        assert!((mix.outputs.mean - 40.0).abs() < 1.0, "{}", mix.outputs.mean);
        assert_eq!(mix.work(Order::Uniboost, Speed::ASSUMED), Speed::ASSUMED.prompt * 256.0);
    }

    /// A pool may allow 32,768 tokens while its answers have some hundred: works must still be told apart.
    #[test]
    fn a_high_limit_does_not_flatten_the_order() {
        let policy = Policy::new(PolicyParts {
            order: Order::Headway,
            gamma: Gamma::Fixed(0.003),
            max_overtake: MaxOvertake::Auto,
            aging_threshold: Duration::from_secs(120),
            aging_share: 0.1,
            lead: Lead::Auto,
            overload: true,
        })
        .unwrap();
        let limits = Limits { queue_requests: 1, queue_bytes: 1, max_output: 32_768 };
        let (speed, mean_work) = (Speed::ASSUMED, Speed::ASSUMED.seconds(0, 200));
        let keying = Keying::new(&policy, Largest::new(&limits, None), speed, mean_work, 0.003, false, None);
        assert_eq!(keying.longest, LONGEST * mean_work);
        let boosted = |tokens| keying.boost.boosted_arrival(super::super::Time::ZERO, speed.seconds(0, tokens), super::super::Weight::ONE);
        let apart = (boosted(200) - boosted(50)) as f64 / 1e6;
        assert!((apart - 4f64.ln() / 0.003).abs() < 1.0, "{apart} s between 50 and 200 tokens");
        assert!(boosted(50) > -(keying.bound * 1e6) as i64 && boosted(400) == 0);

        let strict = Limits { max_output: 100, ..limits };
        let keying = Keying::new(&policy, Largest::new(&strict, None), speed, mean_work, 0.003, false, None);
        assert_eq!(keying.longest, speed.seconds(0, 100), "nothing is longer than what a pool allows");
    }
}
