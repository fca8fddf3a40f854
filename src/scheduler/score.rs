//! Scores, work and weights: numbers that are checked once, where they are made.

use std::cmp::Ordering;

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
