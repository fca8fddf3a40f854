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

impl Order {
    /// The stable lower-case name used in policy files, metrics and headers.
    pub const fn as_str(self) -> &'static str {
        match self {
            Order::Fcfs => "fcfs",
            Order::Pars => "pars",
            Order::Uniboost => "uniboost",
            Order::Headway => "headway",
            Order::OracleSjf => "oracle-sjf",
            Order::OracleBoost => "oracle-boost",
        }
    }
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
    /// As small, and with it the mean, as leaves the 99th percentile of TTFT at this.
    Ttft(Duration),
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

/// How far one tenant may be ahead of its share while another waits: until then keys decide, from then on whoever had less goes first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lead {
    /// Some few requests of mean work for each backend.
    Auto,
    /// This much work, in seconds of the whole pool.
    Within(Duration),
    /// Without limit: tenants have no shares, and keys alone decide.
    Unlimited,
}

/// A scheduling policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    order: Order,
    gamma: Gamma,
    max_overtake: MaxOvertake,
    aging_threshold: Duration,
    aging_share: f64,
    lead: Lead,
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
    /// How far one tenant may be ahead of its share.
    pub lead: Lead,
    /// Whether the pool may switch to overload mode.
    pub overload: bool,
}

/// Why parts do not make a policy.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum PolicyError {
    #[error("gamma is a rate in 1/s: {0} is not greater than 0")]
    Gamma(f64),
    #[error("gamma.ttft_p99 must be longer than 0")]
    Ttft,
    #[error("max_overtake is {}s and gamma {gamma}: together they flatten the order to arrival; gamma must be at least 4 / max_overtake", within.as_secs_f64())]
    Flat { gamma: f64, within: Duration },
    #[error("max_overtake must be longer than 0")]
    MaxOvertake,
    #[error("aging.threshold must be longer than 0")]
    AgingThreshold,
    #[error("aging.share is a share from 0 to 1, not {0}")]
    AgingShare(f64),
}

impl Policy {
    /// Puts the parts together.
    ///
    /// # Errors
    /// A part is out of range, or two contradict each other.
    pub fn new(parts: PolicyParts) -> Result<Self, PolicyError> {
        let PolicyParts { order, gamma, max_overtake, aging_threshold, aging_share, lead, overload } = parts;
        if let Gamma::Fixed(rate) = gamma
            && !(rate.is_finite() && rate > 0.0)
        {
            return Err(PolicyError::Gamma(rate));
        }
        if gamma == Gamma::Ttft(Duration::ZERO) {
            return Err(PolicyError::Ttft);
        }
        if let MaxOvertake::Within(within) = max_overtake {
            if within.is_zero() {
                return Err(PolicyError::MaxOvertake);
            }
            if let Gamma::Fixed(gamma) = gamma
                && gamma * within.as_secs_f64() < 4.0
            {
                return Err(PolicyError::Flat { gamma, within });
            }
        }
        if aging_threshold.is_zero() {
            return Err(PolicyError::AgingThreshold);
        }
        if !(0.0..=1.0).contains(&aging_share) {
            return Err(PolicyError::AgingShare(aging_share));
        }
        Ok(Policy { order, gamma, max_overtake, aging_threshold, aging_share, lead, overload })
    }

    /// What the main queue is sorted by.
    pub fn order(&self) -> Order {
        self.order
    }

    /// How gamma is found.
    pub fn gamma(&self) -> Gamma {
        self.gamma
    }

    /// How far a later arrival may overtake an earlier one.
    pub fn max_overtake(&self) -> MaxOvertake {
        self.max_overtake
    }

    /// Waiting longer than this joins the aged FIFO.
    pub fn aging_threshold(&self) -> Duration {
        self.aging_threshold
    }

    /// At most this share of releases comes from the aged FIFO while the main queue is not empty, 0 to 1.
    pub fn aging_share(&self) -> f64 {
        self.aging_share
    }

    /// How far one tenant may be ahead of its share while another waits.
    pub fn lead(&self) -> Lead {
        self.lead
    }

    /// Whether the pool may switch to overload mode.
    pub fn overload(&self) -> bool {
        self.overload
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_out_of_range_or_contradicts_itself_is_no_policy() {
        let good = PolicyParts {
            order: Order::Headway,
            gamma: Gamma::Fixed(0.1),
            max_overtake: MaxOvertake::Within(Duration::from_secs(40)),
            aging_threshold: Duration::from_secs(1),
            aging_share: 1.0,
            lead: Lead::Auto,
            overload: true,
        };
        let why = |parts| Policy::new(parts).err();
        assert_eq!(why(good.clone()), None);
        for rate in [0.0, -1.0, f64::INFINITY] {
            assert_eq!(why(PolicyParts { gamma: Gamma::Fixed(rate), ..good.clone() }), Some(PolicyError::Gamma(rate)));
        }
        assert_eq!(why(PolicyParts { gamma: Gamma::Ttft(Duration::ZERO), ..good.clone() }), Some(PolicyError::Ttft));
        let short = Duration::from_secs(39);
        let within = |within, gamma| PolicyParts { max_overtake: MaxOvertake::Within(within), gamma, ..good.clone() };
        assert_eq!(why(within(short, good.gamma)), Some(PolicyError::Flat { gamma: 0.1, within: short }));
        assert_eq!(why(within(short, Gamma::Adaptive)), None, "gamma follows the promise");
        assert_eq!(why(within(Duration::ZERO, Gamma::Adaptive)), Some(PolicyError::MaxOvertake));
        assert_eq!(why(PolicyParts { aging_threshold: Duration::ZERO, ..good.clone() }), Some(PolicyError::AgingThreshold));
        for share in [-0.1, 1.1] {
            assert_eq!(why(PolicyParts { aging_share: share, ..good.clone() }), Some(PolicyError::AgingShare(share)));
        }
        assert_eq!(why(PolicyParts { aging_share: 0.0, ..good }), None);
    }
}
