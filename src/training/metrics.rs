//! How well one list of numbers orders another.

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
    let (mut concordant, mut discordant, mut tied_scores, mut tied_lengths) = (0u64, 0u64, 0u64, 0u64);
    let (mut right, mut pairs) = (0.0, 0u64);
    for i in 1..scores.len().min(lengths.len()) {
        for j in 0..i {
            let (score, length) = (scores[i] - scores[j], lengths[i] - lengths[j]);
            tied_scores += u64::from(score == 0.0);
            tied_lengths += u64::from(length == 0.0);
            concordant += u64::from(score * length > 0.0);
            discordant += u64::from(score * length < 0.0);
            if super::loss::longer(lengths[i], lengths[j], delta) || super::loss::longer(lengths[j], lengths[i], delta) {
                pairs += 1;
                right += if score == 0.0 { 0.5 } else { f64::from(u8::from(score * length > 0.0)) };
            }
        }
    }
    let n = scores.len().min(lengths.len()) as u64;
    let all = n * n.saturating_sub(1) / 2;
    let scale = ((all - tied_scores) as f64 * (all - tied_lengths) as f64).sqrt();
    Agreement {
        tau: if scale > 0.0 { (concordant as f64 - discordant as f64) / scale } else { 0.0 },
        accuracy: if pairs > 0 { right / pairs as f64 } else { 0.5 },
    }
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
}
