//! Overload: when it begins, when it ends, and whom it turns away.

use std::time::Duration;

use super::table::Entry;
use super::time::Time;

/// Backlog, in seconds, under which there is no overload: what boosts can order, but at least the first and at most the second. While waits stay below B, boosts still order what
/// waits, and its tail fares far better than by work alone; beyond a few minutes requests would meet their deadlines in the queue instead of being turned away.
const ENOUGH: (f64, f64) = (30.0, 300.0);
/// How long the backlog has to grow before overload begins, and to be small before it ends.
const PATIENCE: Duration = Duration::from_secs(30);

/// Normal: the backlog is small or shrinks. Normal -> overload: it grew for [`PATIENCE`] at full utilisation and is not small. Overload -> normal: it was small
/// for [`PATIENCE`].
#[derive(Debug, Default)]
pub(super) struct Overload {
    active: bool,
    /// Since when the condition for the other mode holds, and the backlog at that moment.
    since: Option<(Time, f64)>,
}

impl Overload {
    pub fn active(&self) -> bool {
        self.active
    }

    /// Looks at the predicted backlog in seconds; `full` is whether every backend has all it may hold, `bound` is how many seconds of it boosts can order. To be called about every
    /// second.
    pub fn look(&mut self, now: Time, backlog: f64, full: bool, bound: f64) {
        let small = backlog < bound.clamp(ENOUGH.0, ENOUGH.1);
        let (begun, before) = *self.since.get_or_insert((now, backlog));
        let long_enough = now.since(begun) >= PATIENCE;
        if self.active {
            if !small {
                self.since = None;
            } else if long_enough {
                *self = Overload { active: false, since: None };
            }
        } else if small || !full {
            self.since = None;
        } else if backlog < before {
            // It shrank below where the count began, so the count begins anew.
            self.since = Some((now, backlog));
        } else if long_enough && backlog > before {
            *self = Overload { active: true, since: None };
        }
    }

    /// Ends it at once, where a policy does not allow it.
    pub fn end(&mut self) {
        *self = Overload::default();
    }
}

/// Waiting work by size, to predict how much goes first under an order by work without walking a queue. Sizes within a factor of two share a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WaitingWork {
    /// Nanoseconds of capacity.
    buckets: [u64; 64],
}

impl Default for WaitingWork {
    fn default() -> Self {
        WaitingWork { buckets: [0; 64] }
    }
}

impl WaitingWork {
    pub fn add(&mut self, entry: &Entry) {
        let work = nanos(entry);
        self.buckets[bucket(work)] += work;
    }

    pub fn subtract(&mut self, entry: &Entry) {
        let work = nanos(entry);
        self.buckets[bucket(work)] -= work;
    }

    /// Seconds of all work.
    pub fn total(&self) -> f64 {
        self.buckets.iter().map(|&work| work as f64).sum::<f64>() / 1e9
    }

    /// Seconds of the work that goes before a request, by work: all that is smaller, and half of what is about as large.
    pub fn before(&self, entry: &Entry) -> f64 {
        let own = bucket(nanos(entry));
        let smaller: f64 = self.buckets[..own].iter().map(|&work| work as f64).sum();
        (smaller + self.buckets[own] as f64 / 2.0) / 1e9
    }
}

fn nanos(entry: &Entry) -> u64 {
    // Rounded down in the same way each time, so that what was added can be subtracted. At most a year, so that a crowd's sum fits.
    (f64::from(entry.work).min(3e7) * 1e9) as u64
}

fn bucket(work: u64) -> usize {
    work.max(1).ilog2() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(overload: &mut Overload, from: u64, backlogs: impl IntoIterator<Item = f64>, full: bool) -> Vec<u64> {
        let mut changes = Vec::new();
        for (second, backlog) in (from..).zip(backlogs) {
            let before = overload.active();
            overload.look(Time::from_micros(second * 1_000_000), backlog, full, 20.0);
            if overload.active() != before {
                changes.push(second);
            }
        }
        changes
    }

    #[test]
    fn begins_after_thirty_seconds_of_growth_and_ends_after_thirty_of_calm() {
        let mut overload = Overload::default();
        // Over 30 s of backlog from second 11 on, growing.
        assert_eq!(run(&mut overload, 0, (0..60).map(|second| f64::from(second) + 19.5), true), [41]);
        // Under it from second 60 to 80, then not, then for good.
        let calm = (60..160).map(|second| if (60..80).contains(&second) || second >= 90 { 29.0 } else { 31.0 });
        assert_eq!(run(&mut overload, 60, calm, true), [120]);
    }

    #[test]
    fn a_backlog_that_shrinks_stands_still_or_leaves_room_is_none() {
        let growing = || (0..100).map(|second| f64::from(second) + 100.0);
        assert_eq!(run(&mut Overload::default(), 0, growing(), false), [0u64; 0]);
        assert_eq!(run(&mut Overload::default(), 0, growing().map(|backlog| 500.0 - backlog), true), [0u64; 0]);
        assert_eq!(run(&mut Overload::default(), 0, growing().map(|_| 100.0), true), [0u64; 0]);
        assert_eq!(run(&mut Overload::default(), 0, growing().map(|backlog| backlog / 10.0), true), [0u64; 0]);
    }

    #[test]
    fn a_backlog_below_the_bound_is_none() {
        let changes = |bound: f64, backlog: f64| {
            let mut overload = Overload::default();
            (0..100).for_each(|second| overload.look(Time::from_micros(second * 1_000_000), backlog + second as f64 / 1e3, true, bound));
            overload.active()
        };
        assert_eq!(
            [(20.0, 31.0), (100.0, 99.0), (100.0, 101.0), (1e9, 299.0), (1e9, 301.0)].map(|(bound, backlog)| changes(bound, backlog)),
            [true, false, true, false, true]
        );
    }

    #[test]
    fn growth_counts_from_the_last_low() {
        let mut overload = Overload::default();
        let backlogs = (0..100).map(|second| if second == 25 { 40.0 } else { f64::from(second) + 50.0 });
        assert_eq!(run(&mut overload, 0, backlogs, true), [55]);
    }
}
