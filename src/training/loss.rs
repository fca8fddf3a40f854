//! What a batch of scores is told about a batch of lengths.

/// How lengths teach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Loss {
    /// Margin ranking over all pairs of a batch that differ enough: what PARS does, without sampling pairs.
    Pairwise,
    /// Squared error against the logarithm of the length.
    Pointwise,
    /// ListMLE: the likelihood of the batch's true order.
    Listwise,
}

/// Differences in score that satisfy a pair.
const MARGIN: f64 = 1.0;

/// What a prompt should score like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Target {
    /// Logarithm of the length.
    pub length: f64,
    /// Only lengths of the same group are comparable.
    pub group: usize,
}

impl Loss {
    /// The loss of `scores` and its slope by each of them. `None`: this batch has nothing to teach.
    ///
    /// A pair counts if its lengths differ by at least the share `delta` of the longer one.
    pub fn of(self, scores: &[f32], targets: &[Target], delta: f64) -> Option<(f64, Vec<f32>)> {
        let scores: Vec<f64> = scores.iter().map(|score| f64::from(*score)).collect();
        let (loss, slopes) = match self {
            Loss::Pairwise => pairwise(&scores, targets, delta)?,
            Loss::Pointwise => pointwise(&scores, targets),
            Loss::Listwise => listwise(&scores, targets)?,
        };
        Some((loss, slopes.into_iter().map(|slope| slope as f32).collect()))
    }
}

/// Whether the first of two logarithms of lengths is longer than the second by at least the share `delta` of the longer.
pub(super) fn longer(a: f64, b: f64, delta: f64) -> bool {
    a > b && 1.0 - (b - a).exp() >= delta
}

fn pairwise(scores: &[f64], targets: &[Target], delta: f64) -> Option<(f64, Vec<f64>)> {
    let (mut loss, mut pairs, mut slopes) = (0.0, 0u32, vec![0.0; scores.len()]);
    for (i, long) in targets.iter().enumerate() {
        for (j, short) in targets.iter().enumerate() {
            if long.group != short.group || !longer(long.length, short.length, delta) {
                continue;
            }
            pairs += 1;
            let missing = MARGIN - (scores[i] - scores[j]);
            if missing > 0.0 {
                loss += missing;
                slopes[i] -= 1.0;
                slopes[j] += 1.0;
            }
        }
    }
    let share = 1.0 / f64::from(pairs);
    (pairs > 0).then(|| (loss * share, slopes.into_iter().map(|slope| slope * share).collect()))
}

fn pointwise(scores: &[f64], targets: &[Target]) -> (f64, Vec<f64>) {
    let share = 1.0 / scores.len() as f64;
    let errors = scores.iter().zip(targets).map(|(score, target)| score - target.length);
    (errors.clone().map(|error| error * error * share).sum(), errors.map(|error| 2.0 * error * share).collect())
}

fn listwise(scores: &[f64], targets: &[Target]) -> Option<(f64, Vec<f64>)> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| targets[*a].group.cmp(&targets[*b].group).then(targets[*b].length.total_cmp(&targets[*a].length)));
    let share = 1.0 / scores.len() as f64;
    let (mut loss, mut slopes) = (0.0, vec![0.0; scores.len()]);
    for list in order.chunk_by(|a, b| targets[*a].group == targets[*b].group) {
        // Of a list of one, the order is certain.
        for at in 0..list.len() - 1 {
            // What could still have been chosen as the next longest.
            let rest = &list[at..];
            let most = rest.iter().map(|index| scores[*index]).fold(f64::MIN, f64::max);
            let total: f64 = rest.iter().map(|index| (scores[*index] - most).exp()).sum();
            loss += (total.ln() + most - scores[list[at]]) * share;
            slopes[list[at]] -= share;
            rest.iter().for_each(|index| slopes[*index] += share * (scores[*index] - most).exp() / total);
        }
    }
    (loss > 0.0).then_some((loss, slopes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(lengths: &[f64]) -> Vec<Target> {
        lengths.iter().map(|length| Target { length: length.ln(), group: 0 }).collect()
    }

    fn value(loss: Loss, scores: &[f32], lengths: &[f64]) -> Option<f64> {
        loss.of(scores, &targets(lengths), 0.2).map(|(loss, _)| loss)
    }

    #[test]
    fn pairs_that_hardly_differ_teach_nothing() {
        assert_eq!(value(Loss::Pairwise, &[0.0, 5.0], &[100.0, 81.0]), None);
        assert_eq!(value(Loss::Pairwise, &[0.0, 5.0], &[100.0, 79.0]), Some(6.0));
    }

    #[test]
    fn the_margin_is_over_all_pairs_of_the_batch() {
        // Pairs (long, short) are ahead by 2, 0.5 and -1.5: hinges 0, 0.5 and 2.5.
        let loss = value(Loss::Pairwise, &[2.0, 1.5, 0.0], &[400.0, 40.0, 100.0]).unwrap();
        assert!((loss - 1.0).abs() < 1e-6, "{loss}");
    }

    #[test]
    fn the_true_order_has_the_smallest_listwise_loss() {
        let right = value(Loss::Listwise, &[3.0, 1.0, 2.0], &[300.0, 10.0, 90.0]).unwrap();
        let wrong = value(Loss::Listwise, &[1.0, 3.0, 2.0], &[300.0, 10.0, 90.0]).unwrap();
        assert!(right < wrong);
    }

    #[test]
    fn prompts_of_different_groups_are_not_compared() {
        let mut targets = targets(&[10.0, 1000.0]);
        targets[1].group = 1;
        for loss in [Loss::Pairwise, Loss::Listwise] {
            assert_eq!(loss.of(&[1.0, 2.0], &targets, 0.2), None, "{loss:?}");
        }
    }

    #[test]
    fn slopes_are_those_of_finite_differences() {
        let at = [0.3f32, -0.2, 0.9, 0.1, 0.4];
        let mut targets = targets(&[5.0, 60.0, 20.0, 300.0, 40.0]);
        targets[4].group = 1;
        for loss in [Loss::Pairwise, Loss::Pointwise, Loss::Listwise] {
            let (_, slopes) = loss.of(&at, &targets, 0.2).unwrap();
            for index in 0..at.len() {
                let shifted = |by: f32| {
                    let mut at = at;
                    at[index] += by;
                    loss.of(&at, &targets, 0.2).unwrap().0
                };
                let numeric = (shifted(1e-2) - shifted(-1e-2)) / 2e-2;
                assert!((numeric - f64::from(slopes[index])).abs() < 1e-2, "{loss:?} {index}: {numeric} and {}", slopes[index]);
            }
        }
    }
}
