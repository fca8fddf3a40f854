//! So much a minute, of anything: a bucket that fills evenly and holds one minute's worth.
//!
//! The `governor` crate's limiters cannot take anything back, and what an answer costs is known only at its end: here a request reserves what it is expected
//! to cost and settles later. A bucket may owe; then everyone waits until it is paid.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug)]
pub struct Allowance {
    per_minute: f64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// What may be taken now; below zero, what is owed.
    level: f64,
    /// When that was so.
    at: Instant,
}

/// How an allowance stands, for headers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Standing {
    pub per_minute: u64,
    pub left: u64,
    /// Until it is full again.
    pub full_in: Duration,
}

impl Allowance {
    /// A full one.
    pub fn new(per_minute: u64, now: Instant) -> Allowance {
        let per_minute = per_minute.max(1) as f64;
        Allowance { per_minute, state: Mutex::new(State { level: per_minute, at: now }) }
    }

    /// Takes so many. More than a minute's worth is taken from a full bucket, which then owes the rest.
    ///
    /// # Errors
    /// There are not so many; how long to wait until there are, if nobody else takes any.
    pub fn take(&self, amount: u64, now: Instant) -> Result<(), Duration> {
        let mut state = self.filled(now);
        let missing = (amount as f64).min(self.per_minute) - state.level;
        if missing > 0.0 {
            return Err(self.time_for(missing));
        }
        state.level -= amount as f64;
        Ok(())
    }

    /// Settles what was reserved: gives back what is left of it, or takes what it was short of.
    pub fn settle(&self, reserved: u64, used: u64, now: Instant) {
        let mut state = self.filled(now);
        state.level = (state.level + reserved as f64 - used as f64).min(self.per_minute);
    }

    pub fn standing(&self, now: Instant) -> Standing {
        let level = self.filled(now).level;
        Standing { per_minute: self.per_minute as u64, left: level.max(0.0) as u64, full_in: self.time_for(self.per_minute - level) }
    }

    fn filled(&self, now: Instant) -> MutexGuard<'_, State> {
        // Two numbers, set one after the other, each sound alone.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let elapsed = now.saturating_duration_since(state.at).as_secs_f64();
        state.level = (state.level + elapsed * self.per_minute / 60.0).min(self.per_minute);
        state.at = state.at.max(now);
        state
    }

    fn time_for(&self, amount: f64) -> Duration {
        // Rounded up to what timers can tell: who waits exactly so long must not find it a nanosecond short.
        Duration::from_micros((amount.max(0.0) * 60e6 / self.per_minute).ceil() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[tokio::test(start_paused = true)]
    async fn fills_evenly_and_says_exactly_how_long_to_wait() {
        let start = Instant::now();
        let allowance = Allowance::new(60, start);
        assert_eq!(allowance.take(50, start), Ok(()));
        assert_eq!(allowance.take(20, start), Err(seconds(10.0)), "a request that does not fit takes nothing");
        assert_eq!(allowance.take(10, start), Ok(()));
        let later = start + seconds(19.5);
        let wait = allowance.take(20, later).unwrap_err();
        assert_eq!(wait, seconds(0.5));
        assert_eq!(allowance.take(20, later + wait), Ok(()));
        assert_eq!(allowance.standing(later + wait), Standing { per_minute: 60, left: 0, full_in: seconds(60.0) });
        assert_eq!(allowance.standing(start + seconds(600.0)), Standing { per_minute: 60, left: 60, full_in: Duration::ZERO });
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_reserved_is_settled() {
        let now = Instant::now();
        let allowance = Allowance::new(600, now);
        allowance.take(500, now).unwrap();
        allowance.settle(500, 20, now);
        assert_eq!(allowance.standing(now).left, 580);
        // An answer longer than reserved is owed, and paid before anyone goes on.
        allowance.take(100, now).unwrap();
        allowance.settle(100, 780, now);
        assert_eq!(allowance.standing(now).left, 0);
        assert_eq!(allowance.take(1, now), Err(seconds(20.1)));
        allowance.settle(10_000, 0, now);
        assert_eq!(allowance.standing(now).left, 600, "never more than full");
    }

    #[tokio::test(start_paused = true)]
    async fn more_than_a_minutes_worth_waits_for_a_full_bucket() {
        let now = Instant::now();
        let allowance = Allowance::new(60, now);
        assert_eq!(allowance.take(100, now), Ok(()));
        assert_eq!(allowance.take(1, now), Err(seconds(41.0)));
        assert_eq!(allowance.take(100, now + seconds(99.0)), Err(seconds(1.0)));
    }
}
