//! How fast a backend is: seconds of its capacity per token, learnt while it has all it may hold.

use std::time::Duration;

use super::event::Tokens;
use super::time::Time;

/// Seconds of capacity per token, that is 1 / (aggregate tokens per second at saturation); never the per-token time of one stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Per uncached prompt token (alpha).
    pub prompt: f64,
    /// Per output token (beta).
    pub output: f64,
}

/// Prompt tokens are this much cheaper than output tokens, before anything else was seen: a batch computes them in parallel.
const RATIO: f64 = 0.05;
/// How many intervals the ratio above is worth.
const LEAN: f64 = 2.0;
/// The ratio that is learnt never leaves this range.
const RATIOS: (f64, f64) = (0.001, 1.0);
/// How long tokens are counted before they count.
const INTERVAL: Duration = Duration::from_secs(2);
/// What an interval's weight is multiplied with at the next one: half in 70 s of saturation.
const DECAY: f64 = 0.98;

impl Speed {
    /// What is assumed before anything was seen: 2,000 output tokens a second.
    pub const ASSUMED: Speed = Speed { prompt: RATIO / 2000.0, output: 1.0 / 2000.0 };

    /// Seconds of capacity that these tokens take.
    pub fn seconds(self, prompt: u64, output: u64) -> f64 {
        self.prompt * prompt as f64 + self.output * output as f64
    }

    /// This speed, with each token taking `factor` times as long.
    pub fn scaled(self, factor: f64) -> Speed {
        Speed { prompt: self.prompt * factor, output: self.output * factor }
    }

    /// The mean over requests that go where they are done soonest: each backend counts by its speed, which makes the mean harmonic.
    pub fn mean(speeds: impl Iterator<Item = Speed>) -> Option<Speed> {
        let (mut n, mut prompt, mut output) = (0.0, 0.0, 0.0);
        for speed in speeds {
            n += 1.0;
            prompt += 1.0 / speed.prompt;
            output += 1.0 / speed.output;
        }
        (n > 0.0).then(|| Speed { prompt: n / prompt, output: n / output })
    }

    /// Whether it is more than a tenth off the other.
    pub fn differs(self, other: Speed) -> bool {
        let off = |a: f64, b: f64| !(1.0 / 1.1..=1.1).contains(&(a / b));
        off(self.prompt, other.prompt) || off(self.output, other.output)
    }
}

/// Learns a speed from how long a saturated backend takes for how many tokens.
#[derive(Debug, Default)]
pub(super) struct SpeedLearner {
    /// Since when the backend is saturated.
    saturated: Option<Time>,
    /// The interval under way.
    elapsed: Duration,
    prompt: u64,
    output: u64,
    sums: Sums,
}

/// Decayed sums over intervals: seconds t, prompt tokens p, output tokens n and their products.
#[derive(Debug, Default)]
struct Sums {
    intervals: f64,
    t: f64,
    p: f64,
    n: f64,
    pp: f64,
    pn: f64,
    nn: f64,
    tp: f64,
    tn: f64,
}

impl SpeedLearner {
    /// The backend has computed tokens. Those of unsaturated times say nothing of capacity.
    pub fn computed(&mut self, prompt: Tokens, output: Tokens) {
        if self.saturated.is_some() {
            self.prompt += u64::from(prompt);
            self.output += u64::from(output);
        }
    }

    /// Tells whether the backend has all it may hold, after every event that may change it.
    pub fn saturated(&mut self, now: Time, saturated: bool) {
        if let Some(since) = self.saturated {
            if saturated && now.since(since) + self.elapsed < INTERVAL {
                return;
            }
            self.elapsed += now.since(since);
            if self.elapsed >= INTERVAL {
                self.sums.add(self.elapsed.as_secs_f64(), self.prompt as f64, self.output as f64);
                (self.elapsed, self.prompt, self.output) = (Duration::ZERO, 0, 0);
            }
        }
        self.saturated = saturated.then_some(now);
    }

    /// Whether the backend has all it may hold, as far as it was told.
    pub fn is_saturated(&self) -> bool {
        self.saturated.is_some()
    }

    /// When the interval under way is long enough.
    pub fn due(&self) -> Time {
        self.saturated.map_or(Time::MAX, |since| since.after(INTERVAL.saturating_sub(self.elapsed)))
    }

    /// What was learnt, if anything was.
    pub fn speed(&self) -> Option<Speed> {
        let ratio = self.sums.ratio();
        let tokens = ratio * self.sums.p + self.sums.n;
        // The ratio only shares the time out between the two kinds; the time itself adds up.
        (tokens > 0.0).then(|| {
            let output = self.sums.t / tokens;
            Speed { prompt: ratio * output, output }
        })
    }
}

impl Sums {
    fn add(&mut self, t: f64, p: f64, n: f64) {
        let add = |sum: &mut f64, value: f64| *sum = *sum * DECAY + value;
        add(&mut self.intervals, 1.0);
        add(&mut self.t, t);
        add(&mut self.p, p);
        add(&mut self.n, n);
        add(&mut self.pp, p * p);
        add(&mut self.pn, p * n);
        add(&mut self.nn, n * n);
        add(&mut self.tp, t * p);
        add(&mut self.tn, t * n);
    }

    /// alpha / beta by least squares on t = alpha p + beta n, leaning on the assumed ratio.
    fn ratio(&self) -> f64 {
        let lean = LEAN * (self.pp + self.nn) / self.intervals;
        let (pp, pn, nn) = (self.pp + lean, self.pn - lean * RATIO, self.nn + lean * RATIO * RATIO);
        let alpha = self.tp * nn - self.tn * pn;
        let beta = self.tn * pp - self.tp * pn;
        let ratio = alpha / beta;
        // Nothing seen yet, or nothing that makes sense.
        if !ratio.is_finite() || beta <= 0.0 {
            return RATIO;
        }
        ratio.clamp(RATIOS.0, RATIOS.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(second: u64) -> Time {
        Time::from_micros(second * 1_000_000)
    }

    /// A backend of a given speed that is saturated for `intervals` intervals with changing mixes.
    fn learn(speed: Speed, intervals: u64) -> Option<Speed> {
        let mut learner = SpeedLearner::default();
        for n in 0..intervals {
            learner.saturated(second(2 * n), true);
            let share = f64::from((n as u32).wrapping_mul(2_654_435_761) >> 16) / 65_536.0;
            learner.computed((share * 2.0 / speed.prompt) as Tokens, ((1.0 - share) * 2.0 / speed.output) as Tokens);
        }
        learner.saturated(second(2 * intervals), true);
        learner.speed()
    }

    #[test]
    fn learns_both_speeds_apart() {
        let speed = Speed { prompt: 2e-4, output: 1e-3 };
        let learnt = learn(speed, 400).unwrap();
        assert!((learnt.output / speed.output - 1.0).abs() < 0.1, "{learnt:?}");
        assert!((learnt.prompt / speed.prompt - 1.0).abs() < 0.2, "{learnt:?}");
    }

    #[test]
    fn one_interval_gives_the_scale() {
        let mut learner = SpeedLearner::default();
        learner.saturated(second(0), true);
        learner.computed(0, 3000);
        learner.saturated(second(1), true);
        assert_eq!(learner.speed(), None);
        learner.saturated(second(3), true);
        assert!((learner.speed().unwrap().output - 1e-3).abs() < 1e-12);

        let mut learner = SpeedLearner::default();
        learner.saturated(second(0), true);
        learner.computed(0, 3000);
        learner.saturated(second(2), true);
        assert!(learner.speed().is_some(), "an interval is two seconds, not more");
    }

    /// No other ratio explains the decayed intervals better, with two intervals' worth of belief in the assumed one.
    #[test]
    fn the_ratio_is_that_of_the_least_squares() {
        let intervals = [(1.0, 9000.0, 200.0), (2.0, 3000.0, 1500.0), (1.5, 12_000.0, 10.0)];
        let mut sums = Sums::default();
        intervals.iter().for_each(|&(t, p, n)| sums.add(t, p, n));
        let weight = |index: usize| DECAY.powi((intervals.len() - 1 - index) as i32);
        let total: f64 = (0..intervals.len()).map(weight).sum();
        let squares: f64 = intervals.iter().enumerate().map(|(index, (_, p, n))| weight(index) * (p * p + n * n)).sum();
        let lean = LEAN * squares / total;
        let loss = |ratio: f64| {
            let parts = || intervals.iter().enumerate().map(|(index, &(t, p, n))| (weight(index), t, ratio * p + n));
            let away = ratio - RATIO;
            // The best beta for this ratio, and what it leaves unexplained.
            let beta = parts().map(|(w, t, x)| w * t * x).sum::<f64>() / (parts().map(|(w, _, x)| w * x * x).sum::<f64>() + lean * away * away);
            parts().map(|(w, t, x)| w * (t - beta * x).powi(2)).sum::<f64>() + lean * (beta * away).powi(2)
        };
        let found = sums.ratio();
        assert!(found > RATIOS.0 && found < RATIOS.1, "{found}");
        for off in [0.999, 1.001] {
            assert!(loss(found) < loss(found * off), "{found} is not the best");
        }
    }

    #[test]
    fn what_makes_no_sense_is_not_learnt() {
        assert_eq!(Sums::default().ratio(), RATIO, "nothing seen");
        // The same prompts and more output in less time: as if output were faster than nothing.
        let mut sums = Sums::default();
        (0..100).for_each(|n| if n % 2 == 0 { sums.add(3.0, 1000.0, 0.0) } else { sums.add(1.0, 1000.0, 1000.0) });
        assert_eq!(sums.ratio(), RATIO);
    }

    #[test]
    fn only_saturated_times_count() {
        let mut learner = SpeedLearner::default();
        learner.computed(0, 1_000_000);
        learner.saturated(second(10), true);
        learner.computed(0, 1000);
        learner.saturated(second(11), false);
        learner.computed(0, 1_000_000);
        learner.saturated(second(100), true);
        learner.computed(0, 1000);
        learner.saturated(second(101), false);
        assert!((learner.speed().unwrap().output - 1e-3).abs() < 1e-12, "two pieces of a second make an interval");
    }

    #[test]
    fn prompts_alone_are_enough() {
        let mut learner = SpeedLearner::default();
        learner.saturated(second(0), true);
        learner.computed(20_000, 0);
        learner.saturated(second(2), false);
        assert!((learner.speed().unwrap().prompt - 1e-4).abs() < 1e-9);
    }

    #[test]
    fn the_mean_counts_fast_backends_more() {
        let speed = |output| Speed { prompt: output, output };
        let mean = Speed::mean([speed(1.0), speed(0.25)].into_iter()).unwrap();
        assert!((mean.output - 0.4).abs() < 1e-12);
        assert_eq!(Speed::mean(std::iter::empty()), None);
        assert!(speed(1.0).differs(speed(1.2)) && !speed(1.0).differs(speed(1.05)));
    }
}
