//! Random numbers by seed: the same workload, faults and figures each time.

use crate::scheduler::Rng;

/// A stream of random numbers. Streams of different `purpose` do not depend on each other, so that drawing more of one thing leaves all others as they were.
#[derive(Clone, Debug)]
pub struct Random(Rng);

impl Random {
    /// The stream for one purpose.
    pub fn new(seed: u64, purpose: &str) -> Self {
        // FNV-1a: enough to tell a dozen words apart.
        let hash = purpose.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        Random(Rng::new(Rng::new(seed ^ hash).next()))
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.0.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Uniform in 0..`n`; 0 for 0.
    pub fn below(&mut self, n: u64) -> u64 {
        // The bias of the remainder is n / 2^64.
        self.0.next() % n.max(1)
    }

    /// Uniform in `low..=high`.
    pub fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// One of them, each as likely.
    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize].clone()
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// Exponential with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// Standard normal (Box and Muller, 1958; the second of each pair is not used).
    pub fn normal(&mut self) -> f64 {
        (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Gamma with this shape and mean 1 (Marsaglia and Tsang, 2000).
    pub fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            let boosted = self.standard_gamma(shape + 1.0);
            return boosted * (1.0 - self.unit()).powf(1.0 / shape) / shape;
        }
        self.standard_gamma(shape) / shape
    }

    /// Shape at least 1, scale 1.
    fn standard_gamma(&mut self, shape: f64) -> f64 {
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && (1.0 - self.unit()).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mean and coefficient of variation of many draws.
    fn moments(mut draw: impl FnMut(&mut Random) -> f64) -> (f64, f64) {
        let mut random = Random::new(1, "moments");
        let draws: Vec<f64> = (0..200_000).map(|_| draw(&mut random)).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|draw| (draw - mean).powi(2)).sum::<f64>() / draws.len() as f64;
        (mean, variance.sqrt() / mean)
    }

    fn assert_near(measured: (f64, f64), expected: (f64, f64)) {
        let off = ((measured.0 / expected.0 - 1.0).abs(), (measured.1 / expected.1 - 1.0).abs());
        assert!(off.0 < 0.03 && off.1 < 0.03, "{measured:?} instead of {expected:?}");
    }

    #[test]
    fn distributions_have_their_moments() {
        assert_near(moments(Random::unit), (0.5, 1.0 / 3f64.sqrt()));
        assert_near(moments(|random| random.exponential(3.0)), (3.0, 1.0));
        assert_near(moments(|random| 5.0 + random.normal()), (5.0, 0.2));
        for cv in [0.5, 1.0, 2.0, 4.0] {
            assert_near(moments(|random| random.gamma(1.0 / (cv * cv))), (1.0, cv));
        }
        assert_near(moments(|random| random.within(3, 5) as f64), (4.0, (2.0f64 / 3.0).sqrt() / 4.0));
    }

    #[test]
    fn a_purpose_has_a_stream_of_its_own() {
        let first = |seed, purpose| Random::new(seed, purpose).unit();
        assert_eq!(first(1, "arrivals"), first(1, "arrivals"));
        assert_ne!(first(1, "arrivals"), first(1, "lengths"));
        assert_ne!(first(1, "arrivals"), first(2, "arrivals"));
    }
}
