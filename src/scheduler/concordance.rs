//! Whether scores and lengths agree: Kendall's tau-b.

use super::event::Tokens;
use super::score::Score;

/// Kendall's tau-b between score and length, -1 to 1, in O(n log n) (Knight, 1966); `None` where one of them never varies.
pub(crate) fn tau_b(pairs: &mut [(Score, Tokens)]) -> Option<f64> {
    let all = choose_two(pairs.len());
    pairs.sort_unstable();
    let same_score = ties(pairs.chunk_by(|a, b| a.0 == b.0).map(<[_]>::len));
    let same_both = ties(pairs.chunk_by(|a, b| a == b).map(<[_]>::len));
    let mut lengths: Vec<Tokens> = pairs.iter().map(|pair| pair.1).collect();
    let discordant = sort_counting(&mut lengths);
    let same_length = ties(lengths.chunk_by(|a, b| a == b).map(<[_]>::len));
    let numerator = all as f64 - same_score as f64 - same_length as f64 + same_both as f64 - 2.0 * discordant as f64;
    let denominator = ((all - same_score) as f64 * (all - same_length) as f64).sqrt();
    (denominator > 0.0).then(|| numerator / denominator)
}

/// The standard error of tau over `n` independent pairs without any relation.
pub(super) fn tau_error(n: usize) -> f64 {
    let n = n.max(2) as f64;
    (2.0 * (2.0 * n + 5.0) / (9.0 * n * (n - 1.0))).sqrt()
}

fn choose_two(n: usize) -> u64 {
    let n = n as u64;
    n * n.saturating_sub(1) / 2
}

fn ties(groups: impl Iterator<Item = usize>) -> u64 {
    groups.map(choose_two).sum()
}

/// Sorts by merging and counts how many pairs stood the wrong way round.
fn sort_counting(values: &mut [Tokens]) -> u64 {
    if values.len() < 2 {
        return 0;
    }
    let (left, right) = values.split_at_mut(values.len() / 2);
    let mut swaps = sort_counting(left) + sort_counting(right);
    let mut merged = Vec::with_capacity(left.len() + right.len());
    let (mut i, mut j) = (0, 0);
    while i < left.len() && j < right.len() {
        if right[j] < left[i] {
            merged.push(right[j]);
            j += 1;
            swaps += (left.len() - i) as u64;
        } else {
            merged.push(left[i]);
            i += 1;
        }
    }
    merged.extend_from_slice(&left[i..]);
    merged.extend_from_slice(&right[j..]);
    values.copy_from_slice(&merged);
    swaps
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pairs(of: &[(i16, Tokens)]) -> Vec<(Score, Tokens)> {
        of.iter().map(|&(score, length)| (Score::new(f32::from(score)).unwrap(), length)).collect()
    }

    #[test]
    fn extremes() {
        assert_eq!(tau_b(&mut pairs(&[(1, 10), (2, 20), (3, 30)])), Some(1.0));
        assert_eq!(tau_b(&mut pairs(&[(3, 10), (2, 20), (1, 30)])), Some(-1.0));
        assert_eq!(tau_b(&mut pairs(&[(3, 10), (3, 20), (3, 30)])), None);
        assert_eq!(tau_b(&mut pairs(&[(1, 10), (2, 10)])), None);
        assert_eq!(tau_b(&mut []), None);
    }

    /// Known values of Kendall's test (his variance, 2 (2n + 5) / 9n (n - 1)).
    #[test]
    fn chance_alone_makes_a_tau_of_this_size() {
        for (n, error) in [(2, 1.0), (10, 0.248_452), (100, 0.067_835)] {
            assert!((tau_error(n) - error).abs() < 1e-6, "{n}: {}", tau_error(n));
        }
        assert_eq!(tau_error(0), tau_error(2));
    }

    proptest! {
        #[test]
        fn counts_what_comparing_all_pairs_counts(of in prop::collection::vec((-5i16..5, 0u32..8), 2..60)) {
            let (mut balance, mut scores, mut lengths) = (0.0, 0.0, 0.0);
            for (i, a) in of.iter().enumerate() {
                for b in &of[..i] {
                    let (score, length) = (f64::from((a.0 - b.0).signum()), (f64::from(a.1) - f64::from(b.1)).clamp(-1.0, 1.0));
                    balance += score * length;
                    scores += score.abs();
                    lengths += length.abs();
                }
            }
            let expected = (scores * lengths > 0.0).then(|| balance / f64::sqrt(scores * lengths));
            match (tau_b(&mut pairs(&of)), expected) {
                (Some(tau), Some(expected)) => prop_assert!((tau - expected).abs() < 1e-12),
                (tau, expected) => prop_assert_eq!(tau, expected),
            }
        }
    }
}
