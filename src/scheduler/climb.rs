//! Finding a window by throughput alone, for engines that do not tell how many requests wait there.

use std::time::Duration;

use super::time::Time;

/// A throughput is measured over at least this long,
const SHORTEST: Duration = Duration::from_secs(2);
/// and over this many finished requests or half a window of them, whichever is more,
const FINISHED: u32 = 8;
/// unless that takes longer than this.
const LONGEST: Duration = Duration::from_secs(10);
/// Share of the proportional gain that makes a larger window worth it: a tenth more slots must bring three hundredths more throughput.
const WORTH: f64 = 0.3;
/// Share of the proportional loss that a smaller window may cost. Less than the above, so that the two do not chase each other.
const BEARABLE: f64 = 0.1;
/// Measurements between two trials, after the first that failed and at most.
const PATIENCE: (u32, u32) = (4, 32);

/// Tries a larger or a smaller window, keeps it if the throughput says so, else goes back and waits, longer each time.
#[derive(Debug)]
pub(super) struct Climb {
    measuring: Option<Measurement>,
    /// The window and throughput that trials are compared with.
    base: Option<(u32, f64)>,
    trial: Option<Direction>,
    next: Direction,
    /// Measurements until the next trial.
    rest: u32,
    patience: u32,
}

#[derive(Debug)]
struct Measurement {
    since: Time,
    tokens: f64,
    finished: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

impl Default for Climb {
    fn default() -> Self {
        Climb { measuring: None, base: None, trial: None, next: Direction::Up, rest: 0, patience: PATIENCE.0 }
    }
}

impl Climb {
    /// Tokens were computed, or a request finished.
    pub fn computed(&mut self, tokens: f64, finished: bool) {
        if let Some(measuring) = &mut self.measuring {
            measuring.tokens += tokens;
            measuring.finished += u32::from(finished);
        }
    }

    /// Whether the window is exactly full and more wait: the throughput of other times says nothing.
    pub fn full(&mut self, now: Time, full: bool) {
        if !full {
            self.measuring = None;
        } else if self.measuring.is_none() {
            self.measuring = Some(Measurement { since: now, tokens: 0.0, finished: 0 });
        }
    }

    /// Whether it was last told that the window is full and more wait.
    pub fn is_full(&self) -> bool {
        self.measuring.is_some()
    }

    /// The next window, if a measurement is complete and asks for another one. `exploring`: in large steps, as long as each one pays.
    pub fn decide(&mut self, now: Time, limit: u32, max: u32, exploring: bool) -> Option<u32> {
        let measuring = self.measuring.as_ref()?;
        let elapsed = now.since(measuring.since);
        let enough = measuring.finished >= FINISHED.max(limit / 2) || elapsed >= LONGEST;
        if elapsed < SHORTEST || !enough {
            return None;
        }
        let rate = measuring.tokens / elapsed.as_secs_f64();
        self.measuring = None;

        let (base, base_rate) = *self.base.get_or_insert((limit, rate));
        match self.trial.take() {
            Some(direction) if pays(direction, f64::from(base), base_rate, f64::from(limit), rate) => {
                self.patience = PATIENCE.0;
                self.base = Some((limit, rate));
                self.next = direction;
            }
            Some(direction) => {
                self.rest = self.patience;
                self.patience = (self.patience * 2).min(PATIENCE.1);
                self.next = if direction == Direction::Up { Direction::Down } else { Direction::Up };
                return Some(base);
            }
            None => {
                self.base = Some((limit, rate));
                if self.rest > 0 {
                    self.rest -= 1;
                    return None;
                }
            }
        }
        let next = match self.next {
            Direction::Up => limit.saturating_add(if exploring { limit / 2 } else { limit / 8 }.max(1)).min(max),
            Direction::Down => (limit - (limit / 8).max(1)).max(1),
        };
        if next == limit {
            // At the end of the range; the other way is tried next.
            self.next = if self.next == Direction::Up { Direction::Down } else { Direction::Up };
            return None;
        }
        self.trial = Some(self.next);
        Some(next)
    }
}

fn pays(direction: Direction, base: f64, base_rate: f64, limit: f64, rate: f64) -> bool {
    let step = (limit / base - 1.0).abs();
    match direction {
        Direction::Up => rate >= base_rate * (1.0 + WORTH * step),
        Direction::Down => rate >= base_rate * (1.0 - BEARABLE * step),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where the window settles on an engine with this throughput by window.
    fn climb(initial: u32, max: u32, throughput: impl Fn(u32) -> f64) -> Vec<u32> {
        let (mut climb, mut limit, mut exploring) = (Climb::default(), initial, true);
        (0..600u64)
            .map(|second| {
                let now = Time::from_micros(second * 1_000_000);
                climb.full(now, true);
                if let Some(next) = climb.decide(now, limit, max, exploring) {
                    exploring &= next > limit;
                    limit = next;
                }
                climb.full(now, true);
                climb.computed(throughput(limit), false);
                (0..10).for_each(|_| climb.computed(0.0, true));
                limit
            })
            .collect()
    }

    #[test]
    fn settles_where_more_slots_bring_nothing() {
        let limits = climb(8, 1024, |limit| f64::from(limit.min(64)) * 100.0);
        let late = &limits[300..];
        assert!(late.iter().all(|limit| (56..=75).contains(limit)), "{late:?}");
    }

    #[test]
    fn stays_where_it_is_when_nothing_can_be_gained() {
        let limits = climb(8, 8, |limit| f64::from(limit) * 100.0);
        assert!(limits.iter().all(|limit| (7..=8).contains(limit)), "{limits:?}");
        assert!(climb(1, 4, |_| 100.0)[100..].iter().all(|limit| *limit <= 2));
    }

    #[test]
    fn comes_down_when_the_engine_gets_smaller() {
        let limits = climb(64, 1024, |limit| f64::from(limit.min(16)) * 100.0);
        assert!(limits[500..].iter().all(|limit| *limit < 32), "{:?}", &limits[500..]);
    }

    #[test]
    fn times_that_are_not_full_are_not_measured() {
        let mut climb = Climb::default();
        climb.full(Time::ZERO, true);
        climb.computed(1e9, true);
        climb.full(Time::from_micros(1), false);
        assert_eq!(climb.decide(Time::from_micros(60_000_000), 8, 64, true), None);
    }

    #[test]
    fn a_measurement_takes_half_a_window_or_ten_seconds() {
        let decides = |finished, seconds: u64| {
            let mut climb = Climb::default();
            climb.full(Time::ZERO, true);
            (0..finished).for_each(|_| climb.computed(1.0, true));
            climb.decide(Time::from_micros(seconds * 1_000_000), 64, 128, true).is_some()
        };
        assert!(decides(32, 2) && decides(0, 10));
        assert!(!decides(32, 1) && !decides(31, 9));
    }
}
