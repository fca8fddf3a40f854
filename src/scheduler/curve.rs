//! How long answers get: survival curves over log-spaced lengths, from answers that ended and answers that were cut.

use super::event::Tokens;

/// How many lengths a curve knows, beside 0.
pub(super) const BUCKETS: usize = 40;

/// The upper ends of the buckets: 1 to 4 one by one, then evenly in the logarithm up to 2^17 tokens.
const ENDS: [f32; BUCKETS] = ends();

/// The longest length a curve knows.
pub(super) const LONGEST: Tokens = 1 << 17;

const fn ends() -> [f32; BUCKETS] {
    // 2^(15/36), the ratio that leads from 4 to 2^17 in 36 steps; `powf` is not const.
    const RATIO: f64 = 1.334_839_854_170_034_4;
    let mut ends = [0.0; BUCKETS];
    let (mut index, mut end) = (0, 4.0);
    while index < BUCKETS {
        if index < 4 {
            ends[index] = (index + 1) as f32;
        } else {
            end *= RATIO;
            ends[index] = end as f32;
        }
        index += 1;
    }
    ends[BUCKETS - 1] = LONGEST as f32;
    ends
}

/// The bucket of a length of at least 1.
fn bucket(output: Tokens) -> usize {
    ENDS.partition_point(|end| *end < output as f32).min(BUCKETS - 1)
}

/// Weighted answers by length: those that ended there and those of which it is only known that they are longer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Histogram {
    ended: [f32; BUCKETS],
    cut: [f32; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { ended: [0.0; BUCKETS], cut: [0.0; BUCKETS] }
    }
}

impl Histogram {
    /// An answer that ended after `output` tokens. An empty answer counts as one of one token.
    pub fn ended(&mut self, output: Tokens, weight: f32) {
        self.ended[bucket(output)] += weight;
    }

    /// An answer that is longer than `output` tokens.
    pub fn cut(&mut self, output: Tokens, weight: f32) {
        self.cut[bucket(output)] += weight;
    }

    pub fn add(&mut self, other: &Histogram) {
        for index in 0..BUCKETS {
            self.ended[index] += other.ended[index];
            self.cut[index] += other.cut[index];
        }
    }

    /// The weight of the answers that ended: what there is evidence of.
    pub fn weight(&self) -> f32 {
        self.ended.iter().sum()
    }

    /// The Kaplan-Meier estimate; without anything that ended, nothing ever ends. Beyond the longest answer that ended the estimate alone would stay where it
    /// is for ever, and a hundredth of all answers would count as the longest there are: an exponential tail through its last point goes on instead (Brown,
    /// Hollander and Korwar, 1974).
    pub fn survival(&self) -> Survival {
        let mut at_risk = [0.0; BUCKETS];
        let mut sum = 0.0;
        for index in (0..BUCKETS).rev() {
            sum += self.ended[index] + self.cut[index];
            at_risk[index] = sum;
        }
        let mut survival = [1.0; BUCKETS];
        let mut left = 1.0;
        for index in 0..BUCKETS {
            // Those that are cut within a bucket are at risk for half of it, as actuaries count.
            let exposed = at_risk[index] - self.cut[index] / 2.0;
            if exposed > 0.0 {
                left *= (1.0 - self.ended[index] / exposed).max(0.0);
            }
            survival[index] = left;
        }
        if let Some(last) = self.ended.iter().rposition(|ended| *ended > 0.0)
            && survival[last] > 0.0
        {
            let rate = -survival[last].ln() / ENDS[last];
            for index in last + 1..BUCKETS {
                survival[index] = (-rate * ENDS[index]).exp();
            }
        }
        Survival(survival)
    }
}

/// The share of answers longer than each bucket's end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Survival([f32; BUCKETS]);

impl Survival {
    /// Answers whose length has no memory, of mean `mean`.
    pub fn exponential(mean: f32) -> Self {
        Survival(ENDS.map(|end| (-end / mean).exp()))
    }

    /// The mean of two curves with these weights.
    pub fn blend(&self, weight: f32, other: &Survival, other_weight: f32) -> Self {
        let sum = weight + other_weight;
        let mut blended = self.0;
        for (own, other) in blended.iter_mut().zip(other.0) {
            *own = (*own * weight + other * other_weight) / sum;
        }
        Survival(blended)
    }
}

/// Makes curves, given in the order of rising scores, rise themselves: at every length, neighbours that fall are replaced by their mean (pool adjacent
/// violators). Curves that rise pointwise have rising means and quantiles, whatever they are truncated at.
pub(super) fn make_monotone(curves: &mut [Survival], weights: &[f32]) {
    for length in 0..BUCKETS {
        // Blocks of (mean, weight, how many curves).
        let mut blocks: Vec<(f32, f32, usize)> = Vec::with_capacity(curves.len());
        for (curve, &weight) in curves.iter().zip(weights) {
            let mut block = (curve.0[length], weight, 1);
            while let Some(&(mean, weight, count)) = blocks.last()
                && mean > block.0
            {
                let sum = weight + block.1;
                block = ((mean * weight + block.0 * block.1) / sum, sum, count + block.2);
                blocks.pop();
            }
            blocks.push(block);
        }
        let means = blocks.into_iter().flat_map(|(mean, _, count)| std::iter::repeat_n(mean, count));
        for (curve, mean) in curves.iter_mut().zip(means) {
            curve.0[length] = mean;
        }
    }
}

/// A survival curve made ready for questions.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Curve {
    survival: Survival,
    /// Mean length when cut at each bucket's end.
    means: [f32; BUCKETS],
    /// Nine of ten answers are at most this long.
    at_most: f32,
}

/// The share of answers that are at most [`Curve::at_most`] long.
const MOST: f32 = 0.9;

impl From<Survival> for Curve {
    fn from(survival: Survival) -> Self {
        let mut means = [0.0; BUCKETS];
        let (mut mean, mut at_most) = (0.0, None);
        let (mut start, mut before) = (0.0, 1.0);
        for index in 0..BUCKETS {
            let (end, after) = (ENDS[index], survival.0[index]);
            mean += (before + after) / 2.0 * (end - start);
            means[index] = mean;
            if after <= 1.0 - MOST && at_most.is_none() {
                at_most = Some(start + (end - start) * (before - (1.0 - MOST)) / (before - after));
            }
            (start, before) = (end, after);
        }
        Curve { survival, means, at_most: at_most.unwrap_or(LONGEST as f32) }
    }
}

impl Curve {
    /// The mean length of answers that are cut at `limit` tokens.
    pub fn mean(&self, limit: Tokens) -> f32 {
        if limit >= LONGEST {
            return self.means[BUCKETS - 1];
        }
        let limit = limit as f32;
        let index = ENDS.partition_point(|end| *end < limit);
        let (start, before, mean) = match index.checked_sub(1) {
            None => (0.0, 1.0, 0.0),
            Some(previous) => (ENDS[previous], self.survival.0[previous], self.means[previous]),
        };
        let slope = (self.survival.0[index] - before) / (ENDS[index] - start);
        let within = limit - start;
        mean + before * within + slope * within * within / 2.0
    }

    /// The length that nine of ten answers do not exceed.
    pub fn at_most(&self) -> f32 {
        self.at_most
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::rng::Rng;
    use super::*;

    fn curve(fill: impl FnOnce(&mut Histogram)) -> Curve {
        let mut histogram = Histogram::default();
        fill(&mut histogram);
        histogram.survival().into()
    }

    #[test]
    fn buckets_rise_and_hold_their_ends() {
        assert!(ENDS.windows(2).all(|pair| pair[0] < pair[1]), "{ENDS:?}");
        assert!((f64::from(ENDS[BUCKETS - 2]) * 1.334_839_854_170_034_4 / f64::from(LONGEST) - 1.0).abs() < 1e-6);
        assert_eq!((bucket(0), bucket(1), bucket(2), bucket(4), bucket(5)), (0, 0, 1, 3, 4));
        assert_eq!((bucket(LONGEST), bucket(Tokens::MAX)), (BUCKETS - 1, BUCKETS - 1));
    }

    #[test]
    fn the_mean_of_what_ended_is_found_again() {
        let lengths = [3, 20, 90, 400, 401, 2000, 9000];
        let curve = curve(|histogram| lengths.iter().for_each(|&length| histogram.ended(length, 1.0)));
        let mean = lengths.iter().sum::<u32>() as f32 / lengths.len() as f32;
        assert!((curve.mean(Tokens::MAX) / mean - 1.0).abs() < 0.15, "{} against {mean}", curve.mean(Tokens::MAX));
        assert!((curve.at_most() / 9000.0 - 1.0).abs() < 0.34, "{}", curve.at_most());
        assert!(curve.mean(100) < 80.0 && curve.mean(100) > 60.0, "{}", curve.mean(100));
        assert_eq!(curve.mean(0), 0.0);
    }

    /// Lengths are exponential of mean 1000; half of the answers are cut at a random point. Leaving those out, or taking them as ended, would say 500.
    #[test]
    fn cut_answers_do_not_make_the_rest_look_short() {
        let mut rng = Rng::new(1);
        let mut exponential = || -1000.0 * ((rng.next() >> 11) as f64 / (1u64 << 53) as f64 + f64::MIN_POSITIVE).ln();
        let (mut naive, mut count) = (0.0, 0.0);
        let curve = curve(|histogram| {
            for _ in 0..20_000 {
                let (length, cut) = (exponential(), exponential());
                if length <= cut {
                    histogram.ended(length.ceil() as Tokens, 1.0);
                    (naive, count) = (naive + length, count + 1.0);
                } else {
                    histogram.cut(cut.ceil() as Tokens, 1.0);
                }
            }
        });
        assert!(naive / count < 550.0, "the test cuts nothing: {}", naive / count);
        assert!((curve.mean(Tokens::MAX) / 1000.0 - 1.0).abs() < 0.1, "{}", curve.mean(Tokens::MAX));
    }

    /// The integral of an exponential curve, and its quantile, are known.
    #[test]
    fn means_and_quantiles_are_those_of_the_curve() {
        let curve = Curve::from(Survival::exponential(1000.0));
        for limit in [150, 700, 1000, 2222, 5000] {
            let expected = 1000.0 * (1.0 - (-(limit as f32) / 1000.0).exp());
            assert!((curve.mean(limit) / expected - 1.0).abs() < 0.02, "{} for {expected} at {limit}", curve.mean(limit));
        }
        assert!((curve.at_most() / 2302.6 - 1.0).abs() < 0.02, "{}", curve.at_most());
    }

    #[test]
    fn histograms_add_up() {
        let of = |ended: &[Tokens], cut: &[Tokens]| {
            let mut histogram = Histogram::default();
            ended.iter().for_each(|&length| histogram.ended(length, 0.5));
            cut.iter().for_each(|&length| histogram.cut(length, 2.0));
            histogram
        };
        let mut sum = of(&[5, 900], &[70]);
        sum.add(&of(&[5, 30], &[70, 4000]));
        assert_eq!(sum, of(&[5, 900, 5, 30], &[70, 70, 4000]));
    }

    /// Half of the answers ended at 100 and the rest were cut later: from there on the curve falls as it would to reach that point.
    #[test]
    fn behind_the_last_that_ended_the_tail_is_exponential() {
        let curve = curve(|histogram| {
            histogram.ended(100, 1.0);
            histogram.cut(200, 1.0);
        });
        let end = ENDS[bucket(100)];
        let mean = end / 2f32.ln();
        let known = curve.means[bucket(100)];
        assert!((curve.mean(Tokens::MAX) / (known + 0.5 * mean) - 1.0).abs() < 0.03, "{}", curve.mean(Tokens::MAX));
    }

    #[test]
    fn what_never_ended_is_as_long_as_allowed() {
        let curve = curve(|histogram| histogram.cut(500, 3.0));
        assert_eq!(curve.mean(2000), 2000.0);
        assert_eq!(curve.at_most(), LONGEST as f32);
    }

    #[test]
    fn falling_curves_become_their_mean() {
        let mut curves = [Survival::exponential(900.0), Survival::exponential(300.0), Survival::exponential(1000.0)];
        let expected = curves[0].blend(2.0, &curves[1], 1.0);
        make_monotone(&mut curves, &[2.0, 1.0, 1.0]);
        assert_eq!(curves[0], curves[1]);
        assert!(curves[0].0.iter().zip(expected.0).all(|(own, other)| (own - other).abs() < 1e-6));
        assert_eq!(curves[2], Survival::exponential(1000.0));
    }

    proptest! {
        #[test]
        fn monotone_curves_rise_at_every_limit(
            means in prop::collection::vec(1.0f32..10_000.0, 1..12),
            weights in prop::collection::vec(0.1f32..100.0, 12),
            limit in 1u32..200_000,
        ) {
            let mut curves: Vec<_> = means.iter().map(|mean| Survival::exponential(*mean)).collect();
            make_monotone(&mut curves, &weights);
            let curves: Vec<Curve> = curves.into_iter().map(Curve::from).collect();
            for pair in curves.windows(2) {
                prop_assert!(pair[0].mean(limit) <= pair[1].mean(limit) * 1.000_01);
                prop_assert!(pair[0].at_most() <= pair[1].at_most() * 1.000_01);
            }
        }

        #[test]
        fn means_rise_with_the_limit_and_stay_below_it(ended in prop::collection::vec(1u32..100_000, 1..50), cut in prop::collection::vec(1u32..100_000, 0..50)) {
            let curve = curve(|histogram| {
                ended.iter().for_each(|&length| histogram.ended(length, 1.0));
                cut.iter().for_each(|&length| histogram.cut(length, 1.0));
            });
            let mut before = 0.0;
            for limit in [1, 2, 3, 10, 50, 99, 100, 1000, 20_000, 140_000] {
                let mean = curve.mean(limit);
                prop_assert!(mean >= before * 0.999_99 && mean <= limit as f32 * 1.000_01, "{} at {}", mean, limit);
                before = mean;
            }
        }
    }
}
