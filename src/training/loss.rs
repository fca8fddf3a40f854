//! What a batch of scores is told about a batch of lengths.

use candle_core::{D, Result, Tensor};

/// How lengths teach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
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

impl Loss {
    /// The loss of `scores` where the logarithms of the true lengths are `lengths`. `None`: this batch has nothing to teach.
    ///
    /// A pair counts if its lengths differ by at least the share `delta` of the longer one.
    pub fn of(self, scores: &Tensor, lengths: &[f64], delta: f64) -> Result<Option<Tensor>> {
        match self {
            Loss::Pairwise => pairwise(scores, lengths, delta),
            Loss::Pointwise => {
                let target: Vec<f32> = lengths.iter().map(|length| *length as f32).collect();
                let target = Tensor::from_vec(target, lengths.len(), scores.device())?;
                (scores - target)?.sqr()?.mean_all().map(Some)
            }
            Loss::Listwise => listwise(scores, lengths).map(Some),
        }
    }
}

/// Whether the first of two logarithms of lengths is longer than the second by at least the share `delta` of the longer.
pub(super) fn longer(a: f64, b: f64, delta: f64) -> bool {
    a > b && 1.0 - (b - a).exp() >= delta
}

fn pairwise(scores: &Tensor, lengths: &[f64], delta: f64) -> Result<Option<Tensor>> {
    let n = lengths.len();
    let mask: Vec<f32> = lengths.iter().flat_map(|a| lengths.iter().map(|b| f32::from(u8::from(longer(*a, *b, delta))))).collect();
    let pairs: f32 = mask.iter().sum();
    if pairs == 0.0 {
        return Ok(None);
    }
    let mask = Tensor::from_vec(mask, (n, n), scores.device())?;
    let ahead = scores.unsqueeze(1)?.broadcast_sub(&scores.unsqueeze(0)?)?;
    let hinge = ahead.affine(-1.0, MARGIN)?.relu()?;
    ((hinge * mask)?.sum_all()? / f64::from(pairs)).map(Some)
}

fn listwise(scores: &Tensor, lengths: &[f64]) -> Result<Tensor> {
    let n = lengths.len();
    let mut order: Vec<u32> = (0..n as u32).collect();
    order.sort_by(|a, b| lengths[*b as usize].total_cmp(&lengths[*a as usize]));
    let scores = scores.index_select(&Tensor::from_vec(order, n, scores.device())?, 0)?;
    let scores = scores.broadcast_sub(&scores.max(D::Minus1)?.detach())?;
    // Row i has ones from column i on: what could still have been chosen as the i-th longest.
    let rest: Vec<f32> = (0..n).flat_map(|i| (0..n).map(move |j| f32::from(u8::from(j >= i)))).collect();
    let rest = Tensor::from_vec(rest, (n, n), scores.device())?;
    let total = rest.matmul(&scores.exp()?.unsqueeze(1)?)?.squeeze(1)?.log()?;
    (total - scores)?.mean_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    fn value(loss: Loss, scores: &[f32], lengths: &[f64]) -> Option<f32> {
        let scores = Tensor::from_slice(scores, scores.len(), &Device::Cpu).unwrap();
        let logs: Vec<f64> = lengths.iter().map(|length| length.ln()).collect();
        loss.of(&scores, &logs, 0.2).unwrap().map(|loss| loss.to_scalar().unwrap())
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
    fn gradients_are_those_of_finite_differences() {
        let at = [0.3f32, -0.2, 0.9, 0.1];
        let lengths = [5.0f64, 60.0, 20.0, 300.0];
        let logs = lengths.map(f64::ln);
        for loss in [Loss::Pairwise, Loss::Pointwise, Loss::Listwise] {
            let scores = Var::from_slice(&at, 4, &Device::Cpu).unwrap();
            let gradients = loss.of(&scores, &logs, 0.2).unwrap().unwrap().backward().unwrap();
            let gradient: Vec<f32> = gradients.get(&scores).unwrap().to_vec1().unwrap();
            for index in 0..4 {
                let shifted = |by: f32| {
                    let mut at = at;
                    at[index] += by;
                    value(loss, &at, &lengths).unwrap()
                };
                let numeric = (shifted(1e-2) - shifted(-1e-2)) / 2e-2;
                assert!((numeric - gradient[index]).abs() < 1e-2, "{loss:?} {index}: {numeric} and {}", gradient[index]);
            }
        }
    }
}
