//! Scores, work and weights: numbers that are checked once, where they are made.

use std::cmp::Ordering;

use super::event::Tokens;
use super::time::Time;

/// The ranker's opinion of a prompt: finite; higher means a longer expected answer. Only its order has a meaning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score(f32);

impl Score {
    /// `None` unless `value` is finite.
    pub fn new(value: f32) -> Option<Self> {
        // Adding zero turns -0.0 into 0.0, so that equality and order agree.
        value.is_finite().then_some(Score(value + 0.0))
    }

    /// The number itself.
    pub fn get(self) -> f32 {
        self.0
    }

    /// An integer in the same order.
    pub(super) fn ordinal(self) -> i64 {
        let bits = self.0.to_bits() as i32;
        // Negative floats are ordered backwards by their bits; flipping all but the sign turns them round.
        i64::from(bits ^ (((bits >> 31) as u32) >> 1) as i32)
    }
}

impl Eq for Score {}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Which weights produced a score. Scores of different versions are not comparable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RankerVersion(pub u32);

/// A score and whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scored {
    pub score: Score,
    pub version: RankerVersion,
}

/// A positive, finite share; 1 is normal.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Weight(f64);

impl Weight {
    /// The normal share.
    pub const ONE: Weight = Weight(1.0);

    /// `None` unless `value` is finite and greater than zero.
    pub fn new(value: f64) -> Option<Self> {
        (value.is_finite() && value > 0.0).then_some(Weight(value))
    }

    /// The number itself.
    pub fn get(self) -> f64 {
        self.0
    }
}

/// The unit of attained output below which a request counts as fresh (MEMGUARD's quantum).
pub const LEVEL: Tokens = 64;

/// Attained output rounded down to 0, k, 2k, 4k, 8k ... with k = [`LEVEL`]: a key that depends on it moves only a logarithmic number of times.
pub fn attained_level(attained: Tokens) -> Tokens {
    match attained / LEVEL {
        0 => 0,
        units => LEVEL << units.ilog2(),
    }
}

/// The boost in seconds of work `work` (seconds) at decay rate `gamma` (1/s): (1/g) ln(1 / (1 - e^(-g w))), from UNIBOOST, arXiv 2606.18431.
///
/// Strictly decreasing in work, until it is 0 to the last bit. Only differences between boosts have a meaning.
pub fn boost(gamma: f64, work: f64) -> f64 {
    let exponent = gamma * work;
    // Each form is exact where the other loses its digits: for large exponents the logarithm is of a number next to 1.
    let log = if exponent > std::f64::consts::LN_2 { (-(-exponent).exp()).ln_1p() } else { (-(-exponent).exp_m1()).ln() };
    -log / gamma
}

/// The boost in use: everything but the request that a boosted arrival depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Boost {
    gamma: f64,
    bound: f64,
    of_longest: f64,
}

impl Boost {
    /// At decay rate `gamma` (1/s), capped at `bound` seconds above the boost of work `longest` (seconds), from which on there is none.
    pub fn new(gamma: f64, bound: f64, longest: f64) -> Self {
        Boost { gamma, bound, of_longest: boost(gamma, longest) }
    }

    /// phi in microseconds: when a request of this work and weight would have to arrive to be due without a boost. The smallest goes first.
    pub fn boosted_arrival(&self, arrived: Time, work: f64, weight: Weight) -> i64 {
        let relative = (boost(self.gamma, work) - self.of_longest).clamp(0.0, self.bound);
        let ahead = relative + weight.get().ln() / self.gamma;
        micros(arrived) - (ahead * 1e6).round() as i64
    }
}

/// A time as a key.
pub(super) fn micros(time: Time) -> i64 {
    i64::try_from(time.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_and_their_ordinals_have_one_order() {
        let values = [f32::MIN, -5.0, -1.5, -1.0, -f32::MIN_POSITIVE, -1e-45, 0.0, 1e-45, 0.5, 1.0, 5.0, f32::MAX];
        let scores = values.map(|value| Score::new(value).unwrap());
        assert!(scores.is_sorted() && scores.map(Score::ordinal).windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!(scores.map(Score::get), values);
        assert_eq!(Score::new(-0.0).map(Score::ordinal), Some(0));
        assert_eq!([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(Score::new), [None; 3]);
    }

    #[test]
    fn weights_are_positive_and_finite() {
        assert_eq!([0.0, -1.0, f64::NAN, f64::INFINITY].map(Weight::new), [None; 4]);
        assert_eq!(Weight::new(1.0), Some(Weight::ONE));
    }

    #[test]
    fn attained_output_counts_in_doubling_levels() {
        let levels = [(0, 0), (63, 0), (64, 64), (127, 64), (128, 128), (255, 128), (256, 256), (1000, 512), (Tokens::MAX, 1 << 31)];
        for (attained, level) in levels {
            assert_eq!(attained_level(attained), level, "{attained}");
        }
    }

    #[test]
    fn the_boost_is_relative_bounded_and_weighted() {
        // At gamma 0.5: ln(1 / (1 - e^-1)) / 0.5 for a work of 2, less the same for the longest, 8.
        let boosted =
            |arrived, work, weight| Boost::new(0.5, 3.0, 8.0).boosted_arrival(Time::from_micros(arrived), work, Weight::new(weight).unwrap());
        assert_eq!(boosted(10_000_000, 2.0, 1.0), 10_000_000 - (2.0f64 * (0.458_675_145 - 0.018_485_505) * 1e6).round() as i64);
        assert_eq!(boosted(10_000_000, 8.0, 1.0), 10_000_000);
        assert_eq!(boosted(10_000_000, 80.0, 1.0), 10_000_000, "longer than the longest is not pushed back");
        assert_eq!(boosted(10_000_000, 1e-9, 1.0), 7_000_000, "the bound");
        assert_eq!(boosted(10_000_000, 8.0, 2.0), 10_000_000 - 1_386_294, "2 ln 2");
        assert_eq!(boosted(1_000_000, 1e-9, 1.0), -2_000_000, "before the start of time");
    }
}
