//! Whether a backend that holds requests still gives signs of life. Health checks do not tell: an engine whose loop has stopped may answer them all the same,
//! and even send the head of an answer.
//!
//! A sign is a piece of an answer that went well, other than a comment. Silence is the time without any sign while at least one streamed request was there to
//! give one; an answer that comes in one piece gives none until its end, so alone it proves nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// A silence is explained up to so many times the longest one that ended well, and so many times the work that is there, by the learnt speed.
const PATIENCE: f64 = 4.0;
/// What is left of the longest silence when a shorter one ends.
const FADES: f64 = 0.9;
/// Signs that follow each other faster than this are no silence to remember.
const SHORT: u64 = 1_000_000;
/// How exactly the time of the last sign is known.
const FINE: u64 = 1_000;

/// The signs of one backend, in microseconds since `start`.
#[derive(Debug)]
pub(super) struct Pulse {
    start: Instant,
    last: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Streamed requests that are there.
    streamed: usize,
    /// Expected work of all requests that are there, in microseconds of the backend's capacity.
    work: u64,
    /// The silence up to `since`, and since when it goes on, if a streamed request is there.
    silence: u64,
    since: u64,
    /// The longest silence that ended with a sign; fades.
    longest: f64,
}

impl Pulse {
    pub(super) fn new(now: Instant) -> Pulse {
        Pulse { start: now, last: AtomicU64::new(0), state: Mutex::default() }
    }

    /// A request is sent there, of so many expected seconds of its capacity.
    pub(super) fn begins(&self, streamed: bool, work: Duration, now: Instant) {
        let now = self.at(now);
        let mut state = self.state(now);
        state.streamed += usize::from(streamed);
        state.work = state.work.saturating_add(micros(work));
    }

    /// As it began, whatever became of it.
    pub(super) fn ends(&self, streamed: bool, work: Duration, now: Instant) {
        let now = self.at(now);
        let mut state = self.state(now);
        state.streamed = state.streamed.saturating_sub(usize::from(streamed));
        state.work = state.work.saturating_sub(micros(work));
    }

    /// A sign came.
    pub(super) fn sign(&self, now: Instant) {
        let now = self.at(now);
        let gap = now.saturating_sub(self.last.load(Ordering::Relaxed));
        // Many streams share this one number.
        if gap < FINE {
            return;
        }
        if gap >= SHORT {
            let mut state = self.state(now);
            state.longest = (state.longest * FADES).max(state.silence as f64);
        }
        // Relaxed is enough: whoever reads it a moment too early finds a silence a moment longer.
        self.last.fetch_max(now, Ordering::Relaxed);
    }

    /// How much longer its silence may go on until it counts as wedged, where nothing shorter than `after` counts. `None`: nothing is there to give a sign.
    pub(super) fn silence(&self, after: Duration, now: Instant) -> Option<Duration> {
        let now = self.at(now);
        let state = self.state(now);
        let explained = PATIENCE * state.longest.max(state.work as f64);
        let limit = micros(after).max(explained as u64);
        (state.streamed > 0).then(|| Duration::from_micros(limit.saturating_sub(state.silence)))
    }

    /// What has been silent so far counts no longer.
    pub(super) fn forget(&self, now: Instant) {
        self.state(self.at(now)).silence = 0;
    }

    /// Whether no request at all gave a sign for so long.
    pub(super) fn is_silent_for(&self, span: Duration, now: Instant) -> bool {
        self.at(now).saturating_sub(self.last.load(Ordering::Relaxed)) >= micros(span)
    }

    fn at(&self, now: Instant) -> u64 {
        micros(now.saturating_duration_since(self.start))
    }

    /// The state with its silence brought up to now. What panics under the lock leaves numbers that are sound.
    fn state(&self, now: u64) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let last = self.last.load(Ordering::Relaxed);
        if last >= state.since {
            (state.silence, state.since) = (0, last);
        }
        if state.streamed > 0 {
            state.silence += now.saturating_sub(state.since);
        }
        state.since = state.since.max(now);
        state
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_secs(60);

    struct Clock {
        pulse: Pulse,
        now: Instant,
    }

    impl Clock {
        fn new() -> Clock {
            let now = Instant::now();
            Clock { pulse: Pulse::new(now), now }
        }

        fn pass(&mut self, seconds: u64) {
            self.now += Duration::from_secs(seconds);
        }

        fn begins(&self) {
            self.pulse.begins(true, Duration::ZERO, self.now);
        }

        fn ends(&self) {
            self.pulse.ends(true, Duration::ZERO, self.now);
        }

        fn sign(&self) {
            self.pulse.sign(self.now);
        }

        /// Seconds of silence that are left.
        fn left(&self) -> Option<u64> {
            self.pulse.silence(AFTER, self.now).map(|left| left.as_secs())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_time_with_a_streamed_request_is_silence() {
        let mut clock = Clock::new();
        clock.pass(3600);
        assert_eq!(clock.left(), None, "idle");
        clock.pulse.begins(false, Duration::ZERO, clock.now);
        clock.pass(3600);
        assert_eq!(clock.left(), None, "an answer in one piece gives no sign before its end");
        clock.begins();
        clock.pass(20);
        assert_eq!(clock.left(), Some(40));
        // Clients that lose patience and others that come do not make a dead backend look alive, and the time between them is no silence.
        clock.ends();
        clock.pass(3600);
        clock.begins();
        clock.pass(30);
        assert_eq!(clock.left(), Some(10));
        clock.pass(10);
        assert_eq!(clock.left(), Some(0));
        clock.sign();
        clock.pass(1);
        assert_eq!(clock.left(), Some(239));
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_progresses_vouches_for_all() {
        let mut clock = Clock::new();
        (0..5).for_each(|_| clock.begins());
        for _ in 0..1000 {
            clock.pass(10);
            clock.sign();
        }
        assert_eq!(clock.left(), Some(60));
        assert!(!clock.pulse.is_silent_for(Duration::from_secs(1), clock.now));
    }

    #[tokio::test(start_paused = true)]
    async fn what_ended_well_before_and_what_is_there_now_explain_a_silence() {
        let mut clock = Clock::new();
        clock.begins();
        clock.pass(50);
        clock.sign();
        clock.pass(10);
        assert_eq!(clock.left(), Some(190), "four times the fifty seconds that ended well");
        for _ in 0..20 {
            clock.pass(2);
            clock.sign();
        }
        assert_eq!(clock.left(), Some(60), "which fades");
        clock.pulse.begins(false, Duration::from_secs(25), clock.now);
        assert_eq!(clock.left(), Some(100), "work of 25 s at the learnt speed");
        clock.pulse.ends(false, Duration::from_secs(25), clock.now);
        assert_eq!(clock.left(), Some(60));
    }

    #[test]
    fn threads_end_what_they_began() {
        let clock = Clock::new();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for n in 0..10_000_u64 {
                        let (streamed, work) = (n.is_multiple_of(2), Duration::from_millis(n % 100));
                        clock.pulse.begins(streamed, work, Instant::now());
                        clock.pulse.sign(Instant::now());
                        clock.pulse.ends(streamed, work, Instant::now());
                    }
                });
            }
        });
        let state = clock.pulse.state(clock.pulse.at(Instant::now()));
        assert_eq!((state.streamed, state.work), (0, 0));
    }
}
