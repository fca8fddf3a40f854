//! Seeded choice between equals.

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): small, and the same on every machine.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// True once in `n` times; the n-th of `n` equals replaces the choice made so far, so that each is as likely.
    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        // The bias of the remainder is n / 2^64.
        self.next().is_multiple_of(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gives_the_numbers_of_its_authors() {
        let mut rng = Rng::new(1_234_567);
        assert_eq!([rng.next(), rng.next(), rng.next()], [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }
}
