//! gamma-Ada: the decay rate of the boost from the tail of recent response times.

use std::collections::VecDeque;

use super::policy::{Gamma, MaxOvertake, Policy, Target};

/// Response times whose tail is looked at.
const TIMES: usize = 2000;
/// Fewer say nothing about a 99th percentile.
const ENOUGH: usize = 200;
/// Gamma times mean work before the tail is known.
const START: f64 = 0.1;
/// Gamma times mean work never leaves this range. Below it the order is shortest work first, above it arrival.
const RANGE: (f64, f64) = (0.001, 2.0);
/// Share of the old value that survives an update, in the logarithm.
const INERTIA: f64 = 0.7;
/// What the slope is multiplied with to prefer the mean: the other end of the range in which tail is traded for mean smoothly.
const TOWARDS_MEAN: f64 = 0.15;
/// First tokens whose 99th percentile is compared with an objective.
const FIRSTS: usize = 500;
/// How far gamma moves, as a share of its way between shortest first and the tail, when first tokens are later than an objective; and back when they are well below.
const STEPS: (f64, f64) = (0.05, -0.01);
/// What is well below an objective.
const WELL_BELOW: f64 = 0.8;
/// B times gamma: a shorter bound flattens the order to arrival.
pub(super) const BOUND: f64 = 4.0;

/// The two-point slope of the logarithm of recent response times' tail.
#[derive(Clone, Debug, Default)]
pub(crate) struct GammaAda {
    /// Seconds from arrival to the end of complete answers, oldest first.
    times: VecDeque<f32>,
    /// Whether `times` changed since the last update.
    fresh: bool,
    slope: Option<f64>,
    /// Seconds from arrival to the first token, oldest first.
    firsts: VecDeque<f32>,
    /// Where an objective has gamma: 0 is shortest first, 1 what the tail says.
    lean: Option<f64>,
}

impl GammaAda {
    /// An answer has begun, this many seconds after its request arrived.
    pub fn begun(&mut self, seconds: f64) {
        if self.firsts.len() >= FIRSTS {
            self.firsts.pop_front();
        }
        self.firsts.push_back(seconds as f32);
    }

    /// Moves gamma towards an objective; to be called every five seconds.
    pub fn aim(&mut self, policy: &Policy) {
        let Gamma::Ttft(objective) = policy.gamma() else { return };
        if self.firsts.len() < ENOUGH {
            return;
        }
        let mut firsts: Vec<f32> = self.firsts.iter().copied().collect();
        let rank = (firsts.len() * 99).div_ceil(100) - 1;
        let p99 = f64::from(*firsts.select_nth_unstable_by(rank, f32::total_cmp).1);
        let objective = objective.as_secs_f64();
        let step = if p99 > objective {
            STEPS.0
        } else if p99 < WELL_BELOW * objective {
            STEPS.1
        } else {
            0.0
        };
        self.lean = Some((self.lean.unwrap_or(0.5) + step).clamp(0.0, 1.0));
    }

    /// An answer is complete, this many seconds after its request arrived.
    pub fn completed(&mut self, seconds: f64) {
        if self.times.len() >= TIMES {
            self.times.pop_front();
        }
        self.times.push_back(seconds as f32);
        self.fresh = true;
    }

    /// Follows the tail; to be called every five seconds.
    pub fn update(&mut self, mean_work: f64) {
        if !self.fresh || self.times.len() < ENOUGH {
            return;
        }
        self.fresh = false;
        let mut times: Vec<f32> = self.times.iter().copied().collect();
        let mut percentile = |percent: usize| {
            let rank = (times.len() * percent).div_ceil(100) - 1;
            f64::from(*times.select_nth_unstable_by(rank, f32::total_cmp).1)
        };
        // P(T > t) falls from 5 % to 1 % between the two: the slope of its logarithm is the rate of decay.
        let slope = 5f64.ln() / (percentile(99) - percentile(95));
        if !(slope.is_finite() && slope > 0.0) {
            return;
        }
        let old = self.slope.unwrap_or(START / mean_work);
        let smooth = (INERTIA * old.ln() + (1.0 - INERTIA) * slope.ln()).exp();
        self.slope = Some(clamp(smooth, mean_work));
    }

    /// What the tail said, once it said anything.
    pub fn slope(&self) -> Option<f64> {
        self.slope
    }

    /// Continues from what the tail said before a restart.
    pub fn restore(&mut self, slope: f64) {
        if slope.is_finite() && slope > 0.0 {
            self.slope = Some(slope);
        }
    }

    /// How long a backlog, in seconds, boosts could order if the policy's gamma preferred the mean; 0 where gamma is fixed.
    pub fn reach(&self, policy: &Policy, mean_work: f64) -> f64 {
        match policy.gamma() {
            Gamma::Fixed(_) => 0.0,
            Gamma::Adaptive | Gamma::Target(_) | Gamma::Ttft(_) => BOUND / clamp(self.slope.unwrap_or(START / mean_work) * TOWARDS_MEAN, mean_work),
        }
    }

    /// The gamma to use under a policy, in 1/s.
    pub fn gamma(&self, policy: &Policy, mean_work: f64) -> f64 {
        let slope = self.slope.unwrap_or(START / mean_work);
        let gamma = match policy.gamma() {
            Gamma::Fixed(gamma) => gamma,
            Gamma::Adaptive | Gamma::Target(Target::Tail) => clamp(slope, mean_work),
            Gamma::Target(Target::Balanced) => clamp(slope * TOWARDS_MEAN.sqrt(), mean_work),
            Gamma::Target(Target::Mean) => clamp(slope * TOWARDS_MEAN, mean_work),
            Gamma::Ttft(_) => {
                let (shortest, tail) = (RANGE.0 / mean_work, clamp(slope, mean_work));
                (shortest.ln() + self.lean.unwrap_or(0.5) * (tail / shortest).ln()).exp()
            }
        };
        match policy.max_overtake() {
            MaxOvertake::Auto => gamma,
            MaxOvertake::Within(within) => gamma.max(BOUND / within.as_secs_f64()),
        }
    }
}

fn clamp(gamma: f64, mean_work: f64) -> f64 {
    gamma.clamp(RANGE.0 / mean_work, RANGE.1 / mean_work)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::policy::{Lead, Order, PolicyParts};
    use super::*;

    fn policy(gamma: Gamma, max_overtake: MaxOvertake) -> Policy {
        let aging_threshold = Duration::from_secs(120);
        Policy::new(PolicyParts { order: Order::Headway, gamma, max_overtake, aging_threshold, aging_share: 0.25, lead: Lead::Auto, overload: true })
            .unwrap()
    }

    /// Response times whose tail is exponential of this rate.
    fn tail(rate: f64) -> GammaAda {
        let mut ada = GammaAda::default();
        (0..TIMES).for_each(|n| ada.completed(-(1.0 - (n as f64 + 0.5) / TIMES as f64).ln() / rate));
        ada
    }

    #[test]
    fn finds_the_rate_of_an_exponential_tail() {
        let (mut ada, policy) = (tail(0.05), policy(Gamma::Adaptive, MaxOvertake::Auto));
        assert_eq!(ada.gamma(&policy, 2.0), 0.05, "the start is 0.1 over mean work");
        let mut ada_elsewhere = tail(0.2);
        ada_elsewhere.update(2.0);
        let expected = (0.7 * 0.05f64.ln() + 0.3 * 0.2f64.ln()).exp();
        assert!((ada_elsewhere.gamma(&policy, 2.0) / expected - 1.0).abs() < 0.02, "{}", ada_elsewhere.gamma(&policy, 2.0));
        for _ in 0..30 {
            ada.completed(1.0);
            ada.update(2.0);
        }
        assert!((ada.gamma(&policy, 2.0) / 0.05 - 1.0).abs() < 0.05, "{}", ada.gamma(&policy, 2.0));
    }

    #[test]
    fn the_slope_is_that_between_two_percentiles() {
        let mut ada = GammaAda::default();
        // The squares of 1 to 200, in an order of their own.
        (0..200).for_each(|n| ada.completed(f64::from(n * 77 % 200 + 1).powi(2)));
        ada.update(1.0);
        let slope = 5f64.ln() / f64::from(198 * 198 - 190 * 190);
        let expected = (INERTIA * START.ln() + (1.0 - INERTIA) * slope.ln()).exp();
        assert!((ada.slope().unwrap() / expected - 1.0).abs() < 1e-9, "{:?} for {expected}", ada.slope());
    }

    #[test]
    fn too_few_or_equal_times_change_nothing() {
        let mut ada = GammaAda::default();
        (0..ENOUGH - 1).for_each(|n| ada.completed(n as f64));
        ada.update(1.0);
        assert_eq!(ada.slope(), None);
        ada.completed(1000.0);
        ada.update(1.0);
        let slope = ada.slope();
        assert!(slope.is_some());
        (0..TIMES).for_each(|_| ada.completed(3.0));
        ada.update(1.0);
        assert_eq!(ada.slope(), slope);
    }

    #[test]
    fn without_new_times_nothing_moves() {
        let mut ada = tail(0.5);
        ada.update(1.0);
        let slope = ada.slope();
        ada.update(1.0);
        assert_eq!(ada.slope(), slope);
    }

    #[test]
    fn only_a_rate_is_restored() {
        let mut ada = GammaAda::default();
        [0.0, -1.0, f64::NAN, f64::INFINITY].into_iter().for_each(|rate| ada.restore(rate));
        assert_eq!(ada.slope(), None);
        ada.restore(0.3);
        assert_eq!(ada.slope(), Some(0.3));
    }

    #[test]
    fn stays_within_range_of_the_work() {
        let policy = policy(Gamma::Adaptive, MaxOvertake::Auto);
        for (rate, limit) in [(1e-6, 0.001), (1e6, 2.0)] {
            let mut ada = tail(rate);
            for _ in 0..60 {
                ada.completed(1.0 / rate);
                ada.update(10.0);
            }
            assert!((ada.gamma(&policy, 10.0) * 10.0 / limit - 1.0).abs() < 1e-9);
        }
    }

    /// Waits are as long as the whole work makes them, also where prompts alone are the order.
    #[test]
    fn limits_follow_all_work_under_every_order() {
        let limits = super::super::Limits { queue_requests: 1, queue_bytes: 1, max_output: 1024 };
        let gamma = |order| {
            let parts = PolicyParts {
                order,
                gamma: Gamma::Target(Target::Mean),
                max_overtake: MaxOvertake::Auto,
                aging_threshold: Duration::from_secs(120),
                aging_share: 0.25,
                lead: Lead::Auto,
                overload: true,
            };
            super::super::Scheduler::new(Policy::new(parts).unwrap(), limits, 1).view().gamma
        };
        assert_eq!(gamma(Order::Uniboost), gamma(Order::Headway));
    }

    #[test]
    fn an_objective_moves_it_between_shortest_first_and_the_tail() {
        let objective = policy(Gamma::Ttft(Duration::from_secs(10)), MaxOvertake::Auto);
        let mut ada = GammaAda { slope: Some(0.1), ..GammaAda::default() };
        let middle = (0.001f64 * 0.1).sqrt();
        assert!((ada.gamma(&objective, 1.0) / middle - 1.0).abs() < 1e-9);
        let mut aim = |seconds: f64, times: usize| {
            (0..FIRSTS).for_each(|_| ada.begun(seconds));
            (0..times).for_each(|_| ada.aim(&objective));
            ada.gamma(&objective, 1.0)
        };
        assert!((aim(11.0, 2) / (middle * 10.0f64.powf(0.2)) - 1.0).abs() < 1e-9, "a tenth of the way to the tail");
        assert!((aim(9.0, 50) / (middle * 10.0f64.powf(0.2)) - 1.0).abs() < 1e-9, "near the objective it stays");
        assert!((aim(7.0, 10) / middle - 1.0).abs() < 1e-9, "and slowly back");
        assert!((aim(99.0, 50) / 0.1 - 1.0).abs() < 1e-9 && (aim(0.0, 200) / 0.001 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn targets_and_promises_scale_it() {
        let ada = GammaAda { slope: Some(0.1), ..GammaAda::default() };
        let gamma = |gamma, overtake| ada.gamma(&policy(gamma, overtake), 1.0);
        assert_eq!(gamma(Gamma::Fixed(5.0), MaxOvertake::Auto), 5.0);
        assert_eq!(gamma(Gamma::Target(Target::Tail), MaxOvertake::Auto), 0.1);
        assert!((gamma(Gamma::Target(Target::Balanced), MaxOvertake::Auto) - 0.038_73).abs() < 1e-5);
        assert!((gamma(Gamma::Target(Target::Mean), MaxOvertake::Auto) - 0.015).abs() < 1e-9);
        let reach = |gamma| ada.reach(&policy(gamma, MaxOvertake::Auto), 1.0);
        assert!((reach(Gamma::Target(Target::Tail)) - 4.0 / 0.015).abs() < 1e-9, "B of the mean, whatever the target");
        assert_eq!(reach(Gamma::Fixed(0.1)), 0.0);
        assert_eq!(gamma(Gamma::Adaptive, MaxOvertake::Within(Duration::from_secs(20))), 0.2);
        assert_eq!(gamma(Gamma::Adaptive, MaxOvertake::Within(Duration::from_secs(60))), 0.1);
    }
}
