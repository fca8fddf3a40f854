//! How well one list of numbers orders another.

use super::trainer::Chance;

/// Agreement of two lists about order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Agreement {
    /// Kendall's tau-b, -1 to 1; 0 where a list is constant.
    pub tau: f64,
    /// Share of the pairs whose lengths differ enough that the scores order rightly; a tie of scores counts half. 0.5 where there is no such pair.
    pub accuracy: f64,
}

/// Compares scores with the logarithms of lengths. A pair counts for the accuracy if its lengths differ by at least the share `delta` of the longer.
pub fn agreement(scores: &[f64], lengths: &[f64], delta: f64) -> Agreement {
    let (mut right, mut pairs) = (0.0, 0u64);
    for i in 1..scores.len().min(lengths.len()) {
        for j in 0..i {
            let (score, length) = (scores[i] - scores[j], lengths[i] - lengths[j]);
            if super::loss::longer(lengths[i], lengths[j], delta) || super::loss::longer(lengths[j], lengths[i], delta) {
                pairs += 1;
                right += if score == 0.0 { 0.5 } else { f64::from(u8::from(score * length > 0.0)) };
            }
        }
    }
    let both = scores.iter().copied().zip(lengths.iter().copied());
    Agreement { tau: tau(&mut both.collect::<Vec<_>>()), accuracy: if pairs > 0 { right / pairs as f64 } else { 0.5 } }
}

/// Kendall's tau-b by Knight's algorithm: sorted by one number, the discordant pairs are the swaps of a merge sort by the other.
fn tau(both: &mut [(f64, f64)]) -> f64 {
    both.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let pairs = |n: usize| (n * n.saturating_sub(1) / 2) as f64;
    let tied_scores: f64 = both.chunk_by(|a, b| a.0 == b.0).map(|tied| pairs(tied.len())).sum();
    let tied_both: f64 = both.chunk_by(|a, b| a == b).map(|tied| pairs(tied.len())).sum();
    let mut lengths: Vec<f64> = both.iter().map(|(_, length)| *length).collect();
    let swaps = swaps(&mut lengths) as f64;
    let tied_lengths: f64 = lengths.chunk_by(|a, b| a == b).map(|tied| pairs(tied.len())).sum();
    let all = pairs(both.len());
    let scale = ((all - tied_scores) * (all - tied_lengths)).sqrt();
    if scale > 0.0 { (all - tied_scores - tied_lengths + tied_both - 2.0 * swaps) / scale } else { 0.0 }
}

/// Sorts; returns how many pairs stood in the wrong order.
fn swaps(values: &mut [f64]) -> u64 {
    if values.len() < 2 {
        return 0;
    }
    let middle = values.len() / 2;
    let mut swapped = swaps(&mut values[..middle]) + swaps(&mut values[middle..]);
    let mut merged = Vec::with_capacity(values.len());
    let (mut left, mut right) = (0, middle);
    while left < middle && right < values.len() {
        if values[left] <= values[right] {
            merged.push(values[left]);
            left += 1;
        } else {
            swapped += (middle - left) as u64;
            merged.push(values[right]);
            right += 1;
        }
    }
    merged.extend_from_slice(&values[left..middle]);
    merged.extend_from_slice(&values[right..]);
    values.copy_from_slice(&merged);
    swapped
}

/// Resamples of the bootstrap.
const RESAMPLES: usize = 500;

/// The middle 95 % of tau-b over resamples of the prompts with replacement; `seed` repeats it.
pub fn interval(scores: &[f64], lengths: &[f64], seed: u64) -> (f64, f64) {
    let n = scores.len().min(lengths.len());
    let mut chance = Chance::new(seed);
    let mut draw = || {
        let mut both: Vec<(f64, f64)> = (0..n).map(|_| chance.below(n)).map(|index| (scores[index], lengths[index])).collect();
        tau(&mut both)
    };
    let mut taus: Vec<f64> = (0..RESAMPLES).map(|_| draw()).collect();
    taus.sort_by(f64::total_cmp);
    (taus[RESAMPLES / 40], taus[RESAMPLES - 1 - RESAMPLES / 40])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tau_b_matches_a_worked_example_with_ties() {
        // scipy.stats.kendalltau([1, 2, 2, 3, 5], [1, 3, 2, 2, 4]) = 0.6666...
        let agreement = agreement(&[1.0, 2.0, 2.0, 3.0, 5.0], &[1.0, 3.0, 2.0, 2.0, 4.0], 0.2);
        assert!((agreement.tau - 2.0 / 3.0).abs() < 1e-12, "{agreement:?}");
    }

    #[test]
    fn tau_b_is_its_definition() {
        let mut chance = Chance::new(9);
        for n in [2, 3, 17, 60] {
            let both: Vec<(f64, f64)> = (0..n).map(|_| (chance.below(9) as f64, chance.below(9) as f64)).collect();
            let (mut sum, mut by_score, mut by_length) = (0.0, 0.0f64, 0.0);
            for i in 0..n {
                for j in 0..i {
                    let (score, length) = (both[i].0 - both[j].0, both[i].1 - both[j].1);
                    let sign = |difference: f64| if difference == 0.0 { 0.0 } else { difference.signum() };
                    sum += sign(score) * sign(length);
                    by_score += sign(score).abs();
                    by_length += sign(length).abs();
                }
            }
            let expected = if by_score * by_length > 0.0 { sum / (by_score * by_length).sqrt() } else { 0.0 };
            assert!((tau(&mut both.clone()) - expected).abs() < 1e-12, "{both:?}");
        }
    }

    #[test]
    fn accuracy_leaves_out_pairs_that_hardly_differ() {
        let logs = [100f64, 95.0, 10.0].map(f64::ln);
        let agreement = agreement(&[1.0, 2.0, 0.0], &logs, 0.2);
        assert_eq!(agreement.accuracy, 1.0);
        assert!((agreement.tau - 1.0 / 3.0).abs() < 1e-12);
    }

    #[test]
    fn what_says_nothing_agrees_with_nothing() {
        assert_eq!(agreement(&[1.0, 1.0], &[1.0, 2.0], 0.2), Agreement { tau: 0.0, accuracy: 0.5 });
        assert_eq!(agreement(&[], &[], 0.2), Agreement { tau: 0.0, accuracy: 0.5 });
    }

    #[test]
    fn the_interval_surrounds_the_value_and_narrows_with_more_prompts() {
        let of = |n: usize| {
            let mut chance = Chance::new(4);
            let lengths: Vec<f64> = (0..n).map(|_| chance.below(1000) as f64).collect();
            let scores: Vec<f64> = lengths.iter().map(|length| length + chance.below(1000) as f64).collect();
            let (low, high) = interval(&scores, &lengths, 1);
            let tau = agreement(&scores, &lengths, 0.2).tau;
            assert!(low < tau && tau < high, "{low} {tau} {high}");
            assert_eq!((low, high), interval(&scores, &lengths, 1));
            high - low
        };
        assert!(of(400) < 0.7 * of(100));
    }
}
