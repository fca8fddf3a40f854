//! How fast the places of one owner come free.

use std::time::Duration;

use tokio::time::Instant;

use crate::scheduler::LONGEST_RETRY;

/// How much less each place counts with every later one.
const NEWEST: f64 = 0.1;
/// Who goes as soon as this has not waited: it was refused for something else, or its turn was at once. It says nothing of when others go.
const AT_ONCE: Duration = Duration::from_millis(1);

/// How fast places come free, learnt from those that did: the seconds between them, over their number, the older the less.
///
/// Time in which no place is taken is nobody's wait, and is left out.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// When the last place came free, or the first was taken after none was.
    since: Option<Instant>,
    seconds: f64,
    places: f64,
}

impl Pace {
    /// A place was taken; none was before.
    pub fn begins(&mut self, now: Instant) {
        self.since = Some(now);
    }

    /// A place that somebody had for so long came free.
    pub fn left(&mut self, had: Duration, now: Instant) {
        if had < AT_ONCE {
            return;
        }
        // Where the limit came after the places were taken, the first only begins the time.
        if self.since.is_some() {
            (self.seconds, self.places) = self.with(self.passed(now));
        }
        self.since = Some(now);
    }

    /// Predicted time until so many more have come free, at most [`LONGEST_RETRY`]. From the next one's is taken what has passed since the last; one that is overdue
    /// takes as long as if it came now and were counted, so that where all stands still clients stay away longer and longer, also where none ever came free.
    pub fn until(&self, places: u64, now: Instant) -> Duration {
        let passed = self.passed(now);
        let each = if self.places > 0.0 { self.seconds / self.places } else { 0.0 };
        let (each, next) = if passed < each {
            (each, each - passed)
        } else {
            let (seconds, places) = self.with(passed);
            (seconds / places, seconds / places)
        };
        let all = next + each * places.saturating_sub(1) as f64;
        Duration::from_secs_f64(all.min(LONGEST_RETRY))
    }

    /// What is known, with a place that came free after so many seconds.
    fn with(&self, passed: f64) -> (f64, f64) {
        (self.seconds * (1.0 - NEWEST) + passed, self.places * (1.0 - NEWEST) + 1.0)
    }

    fn passed(&self, now: Instant) -> f64 {
        self.since.map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    fn after(start: Instant, seconds: f64) -> Instant {
        start + Duration::from_secs_f64(seconds)
    }

    /// The mean of what is predicted over what comes true, where places come free after these seconds, asked at ten moments of each wait.
    fn told_by_true(gaps: impl Iterator<Item = f64>) -> f64 {
        let (mut pace, mut now) = (Pace::default(), Instant::now());
        pace.begins(now);
        let (mut told, mut came) = (0.0, 0.0);
        for (index, gap) in gaps.enumerate() {
            // What is asked at even moments weighs waits by their length, as clients that come at any time meet them.
            let step = 0.1;
            let moments = if index < 50 { 0 } else { (gap / step) as usize };
            for moment in 0..moments {
                let passed = moment as f64 * step;
                told += pace.until(1, after(now, passed)).as_secs_f64();
                came += gap - passed;
            }
            now = after(now, gap);
            pace.left(LONG, now);
        }
        told / came
    }

    #[test]
    fn what_is_told_comes_true_on_average_whether_places_come_evenly_or_by_chance() {
        let even = told_by_true(std::iter::repeat_n(7.0, 1000));
        assert!((0.95..1.05).contains(&even), "{even}");
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let chance = told_by_true((0..20_000).map(|_| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            -7.0 * (1.0 - (random >> 11) as f64 / (1_u64 << 53) as f64).ln()
        }));
        assert!((0.7..1.3).contains(&chance), "{chance}");
    }

    #[test]
    fn the_next_of_several_comes_sooner_by_what_has_passed() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        pace.begins(start);
        for place in 1..=20 {
            pace.left(LONG, after(start, 5.0 * f64::from(place)));
        }
        let until = |places, seconds| pace.until(places, after(start, 100.0 + seconds)).as_secs_f64();
        assert!((until(1, 0.0) - 5.0).abs() < 1e-6 && (until(1, 3.5) - 1.5).abs() < 1e-6, "{}", until(1, 3.5));
        assert!((until(4, 3.5) - 16.5).abs() < 1e-6, "{}", until(4, 3.5));
        assert_eq!(until(0, 3.5), until(1, 3.5), "there is no place before the next");
        assert_eq!(until(1_000_000, 0.0), LONGEST_RETRY);
    }

    #[test]
    fn where_all_stands_still_clients_stay_away_longer_and_longer() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        pace.begins(start);
        let until = |pace: &Pace, seconds| pace.until(1, after(start, seconds)).as_secs_f64();
        assert_eq!(until(&pace, 0.0), 0.0);
        assert_eq!((until(&pace, 20.0), until(&pace, 1e6)), (20.0, LONGEST_RETRY), "of one that never came free, as long again");
        for place in 1..=50 {
            pace.left(LONG, after(start, f64::from(place)));
        }
        let overdue = until(&pace, 50.0 + 60.0);
        assert!((5.0..10.0).contains(&overdue), "one wait of a minute among many of a second: {overdue}");
        assert!(until(&pace, 50.0 + 600.0) > 5.0 * overdue);
    }

    #[test]
    fn neither_empty_hours_nor_those_who_did_not_wait_count() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        pace.begins(start);
        pace.left(LONG, after(start, 4.0));
        pace.left(Duration::from_micros(100), after(start, 6.0));
        pace.begins(after(start, 5000.0));
        pace.left(LONG, after(start, 5004.0));
        assert!((pace.until(1, after(start, 5004.0)).as_secs_f64() - 4.0).abs() < 1e-6, "{pace:?}");
    }
}
