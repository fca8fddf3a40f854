//! How good the lengths were that answers were expected to have: known when they end, and nothing is decided by it.

use super::event::Tokens;

/// So many answers count: older ones less and less.
const ANSWERS: f64 = 500.0;
/// Fewer say nothing.
const ENOUGH: f64 = 100.0;

/// Of the answers of one model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Accuracy {
    answers: f64,
    /// Sums over those: of the distance between the logarithms of both lengths, and of both lengths.
    distance: f64,
    expected: f64,
    real: f64,
}

impl Accuracy {
    /// An answer has this many tokens and was expected to have that many when it was released.
    pub fn answered(&mut self, expected: Tokens, real: Tokens) {
        let (expected, real) = (f64::from(expected.max(1)), f64::from(real.max(1)));
        let fade = |sum: &mut f64, new: f64| *sum += new - *sum / ANSWERS;
        fade(&mut self.answers, 1.0);
        fade(&mut self.distance, (real / expected).ln().abs());
        fade(&mut self.expected, expected);
        fade(&mut self.real, real);
    }

    /// The mean distance between the logarithms: 0.7 is a factor of two, too long or too short.
    pub fn error(&self) -> Option<f64> {
        (self.answers >= ENOUGH).then(|| self.distance / self.answers)
    }

    /// All real lengths over all expected ones: above 1 answers have become longer than the calibration knows.
    pub fn drift(&self) -> Option<f64> {
        (self.answers >= ENOUGH).then(|| self.real / self.expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_has_no_direction_and_a_drift_has() {
        let mut accuracy = Accuracy::default();
        for pair in [(100, 200), (200, 100)].iter().cycle().take(200) {
            accuracy.answered(pair.0, pair.1);
        }
        let (error, drift) = (accuracy.error().unwrap(), accuracy.drift().unwrap());
        assert!((error - 2f64.ln()).abs() < 1e-9 && (drift - 1.0).abs() < 0.01, "{error} {drift}");
        // Answers become twice as long.
        (0..5000).for_each(|_| accuracy.answered(100, 200));
        let (error, drift) = (accuracy.error().unwrap(), accuracy.drift().unwrap());
        assert!((error - 2f64.ln()).abs() < 1e-9 && (drift - 2.0).abs() < 0.01, "{error} {drift}");
    }

    #[test]
    fn few_answers_say_nothing() {
        let mut accuracy = Accuracy::default();
        (0..100).for_each(|_| accuracy.answered(0, 1));
        assert_eq!((accuracy.error(), accuracy.drift()), (None, None), "a hundredth of a hundred has faded");
        (0..20).for_each(|_| accuracy.answered(0, 1));
        assert_eq!((accuracy.error(), accuracy.drift()), (Some(0.0), Some(1.0)));
    }
}
