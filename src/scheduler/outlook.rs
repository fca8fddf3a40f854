//! What can be told to whoever waits: how many go first, and about when it is its turn.
//!
//! Nobody's question costs a walk of its own. A queue is looked through once in a while, what waits before some of its keys is kept, and whoever asks is placed
//! between those. What is expected to come later and go first is reckoned from what came lately.

use std::collections::VecDeque;
use std::time::Duration;

use super::Scheduler;
use super::backend::{Backend, Backlog};
use super::event::RequestId;
use super::keys::Keying;
use super::queue::Key;
use super::score::micros;
use super::table::{Entry, Stage, Table};
use super::time::Time;

/// Places of a queue that are kept; of a shorter one all are.
const KNOTS: usize = 128;
/// For each request of a queue, how long a look at it is good for. It takes some 0.2 us each: looks take about a hundredth of a core at most, however many ask.
const GOOD_FOR: Duration = Duration::from_micros(20);
/// Arrivals that stand for those to come: so many at most, and none older than this.
const ARRIVALS: usize = 256;
const LATELY: Duration = Duration::from_secs(300);
/// Rounds in which those who come during a wait, and so prolong it, are reckoned.
const ROUNDS: usize = 8;
/// How many times as long as without them a wait is foretold at most. Where the load of those who go first is nearly all there is, their sum is a guess: with no limit the median
/// error under `pars` was twelve times as large, with half or three times this limit larger as well.
const LONGEST: f64 = 2.0;
/// Nothing is foretold beyond this many seconds.
const HORIZON: f64 = 86_400.0;

/// What one that waits can expect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outlook {
    /// Its place in its queue, counted from 1. In queues of more than some hundred about that.
    pub position: usize,
    /// Until it is released, by what is expected of all that goes before.
    pub wait: Duration,
}

/// One queue as it was at some moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Sketch {
    until: Time,
    /// In the order of keys; first those of tenants within their share, then the others.
    parts: [Vec<Knot>; 2],
}

/// A request and all that waits before it.
#[derive(Clone, Copy, Debug)]
struct Knot {
    key: Key,
    ahead: usize,
    work: Backlog,
}

impl Sketch {
    fn of(backend: &Backend, table: &Table, now: Time) -> Self {
        let len = backend.queue.len();
        let mut sketch = Sketch { until: now.after(GOOD_FOR * u32::try_from(len).unwrap_or(u32::MAX)), ..Sketch::default() };
        let every = len.div_ceil(KNOTS).max(1);
        let (mut ahead, mut work, mut last) = (0, Backlog::default(), None);
        for key in backend.queue.keys() {
            let entry = table.get(key.place.slot());
            let part = usize::from(backend.queue.is_ahead(entry.tenant()));
            let knot = Knot { key, ahead, work };
            if ahead % every == 0 || sketch.parts[part].is_empty() {
                sketch.parts[part].push(knot);
            }
            last = Some((part, knot));
            ahead += 1;
            work.add(entry.uncached(), entry.expected);
        }
        // The end of the queue, so that there is something to be before.
        if let Some((part, knot)) = last {
            sketch.parts[part].push(Knot { ahead, work, ..knot });
        }
        sketch
    }

    /// About how many, and how many prompt and output tokens, go before this key.
    fn before(&self, key: Key, is_ahead: bool) -> (f64, f64, f64) {
        let knots = &self.parts[usize::from(is_ahead)];
        let exact = |knot: &Knot| (knot.ahead as f64, knot.work.prompt as f64, knot.work.output as f64);
        let next = knots.partition_point(|knot| knot.key < key);
        match (next.checked_sub(1).and_then(|before| knots.get(before)), knots.get(next)) {
            (None, None) => (0.0, 0.0, 0.0),
            (None, Some(knot)) | (Some(knot), None) => exact(knot),
            (Some(_), Some(knot)) if knot.key == key => exact(knot),
            (Some(low), Some(high)) => {
                let (span, above) = (high.key.phi.abs_diff(low.key.phi), key.phi.abs_diff(low.key.phi));
                let share = if span > 0 { above as f64 / span as f64 } else { 0.5 };
                let (low, high) = (exact(low), exact(high));
                let between = |low: f64, high: f64| low + (high - low) * share;
                (between(low.0, high.0), between(low.1, high.1), between(low.2, high.2))
            }
        }
    }
}

/// The last requests that were put into a queue.
#[derive(Clone, Debug, Default)]
pub(super) struct Lately(VecDeque<Arrival>);

#[derive(Clone, Copy, Debug)]
struct Arrival {
    at: Time,
    /// By how many microseconds it was put ahead of its arrival, or its key, where keys are no times.
    ahead: i64,
    /// In capacity-seconds.
    work: f32,
}

impl Lately {
    pub fn joined(&mut self, keying: &Keying, entry: &Entry, phi: i64, now: Time) {
        if self.0.len() >= ARRIVALS {
            self.0.pop_front();
        }
        let ahead = if keying.is_by_time() { micros(entry.arrived).saturating_sub(phi) } else { phi };
        self.0.push_back(Arrival { at: now, ahead, work: entry.work });
    }

    /// Keys are made in another way from now on.
    pub fn forget(&mut self) {
        self.0.clear();
    }

    /// Capacity-seconds of those that will have come in the next `wait` seconds and go before a key.
    fn overtakers(&self, keying: &Keying, phi: i64, now: Time, wait: f64) -> f64 {
        let lately = || self.0.iter().rev().take_while(|arrival| now.since(arrival.at) <= LATELY);
        let span = lately().last().map_or(0.0, |first| now.since(first.at).as_secs_f64());
        if span <= 0.0 {
            return 0.0;
        }
        let seconds = |arrival: &Arrival| match keying.is_by_time() {
            // Whoever comes before this moment goes first.
            true => (phi.saturating_add(arrival.ahead).saturating_sub(micros(now)) as f64 / 1e6).clamp(0.0, wait),
            false if arrival.ahead < phi => wait,
            false => 0.0,
        };
        lately().map(|arrival| f64::from(arrival.work) * seconds(arrival)).sum::<f64>() / span
    }
}

impl Scheduler {
    /// What a request that waits can expect at `now`; `None` if it does not wait.
    pub fn outlook(&mut self, now: Time, id: RequestId) -> Option<Outlook> {
        let now = now.max(self.now);
        let entry = self.table.get(self.table.slot_of(id)?);
        let Stage::Waiting { phi, .. } = entry.stage else { return None };
        let backend = &mut self.backends[entry.backend as usize];
        if backend.sketch.until <= now {
            backend.sketch = Sketch::of(backend, &self.table, now);
        }
        let backend = &self.backends[entry.backend as usize];
        let key = Key { phi, place: entry.place };
        let (ahead, prompt, output) = backend.sketch.before(key, backend.queue.is_ahead(entry.tenant()));
        let by_key = backend.speed.prompt * prompt + backend.speed.output * output;
        let before = by_key.min(self.wait_by_share(entry).unwrap_or(f64::INFINITY));
        // What runs ends one by one; the first of it makes room.
        let running = backend.speed.seconds(backend.running.prompt, backend.running.output) / f64::from(backend.in_flight.max(1));
        let (base, parallel) = (before + running, self.parallel.max(f64::MIN_POSITIVE));
        let mut wait = base;
        for _ in 0..ROUNDS {
            let next = (base + self.lately.overtakers(&self.keying, phi, now, wait) / parallel).min(LONGEST * base);
            let settled = next - wait < 0.01 * wait;
            wait = next;
            if settled {
                break;
            }
        }
        Some(Outlook { position: ahead as usize + 1, wait: Duration::from_secs_f64(wait.min(HORIZON)) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{backend, policy, request};
    use super::super::*;
    use super::*;

    fn at(micros: u64) -> Time {
        Time::from_micros(micros)
    }

    /// A pool with one backend of this many slots.
    fn pool(slots: u32) -> Scheduler {
        let limits = Limits { queue_requests: 100_000, queue_bytes: 1 << 30, max_output: 1024 };
        let mut pool = Scheduler::new(policy(Order::Fcfs), limits, 1);
        backend(&mut pool, 0, slots, Standing::Healthy);
        pool
    }

    fn arrives(pool: &mut Scheduler, id: u64, tenant: Option<TenantId>) {
        let request = Request { expires: Time::MAX, tenant, ..request(id, id) };
        pool.handle(at(id), Event::Arrived(request), &mut Vec::new());
    }

    #[test]
    fn the_wait_is_what_goes_before_and_what_runs() {
        let mut pool = pool(2);
        (1..=6).for_each(|id| arrives(&mut pool, id, None));
        // Nobody knows yet how long answers are: all are alike.
        let work = pool.queues(9)[0].waiting[0].work;
        for (id, ahead) in [(3, 0), (4, 1), (6, 3)] {
            let outlook = pool.outlook(at(6), RequestId(id)).unwrap();
            assert_eq!(outlook.position, ahead + 1);
            let expected = work * (ahead + 1) as f64;
            assert!((outlook.wait.as_secs_f64() / expected - 1.0).abs() < 0.01, "{outlook:?} for {expected}");
        }
        assert_eq!(pool.outlook(at(6), RequestId(1)), None, "it runs");
        assert_eq!(pool.outlook(at(6), RequestId(7)), None, "nobody");
    }

    #[test]
    fn in_a_long_queue_a_place_is_about_right_and_so_is_that_of_one_that_came_since() {
        let mut pool = pool(0);
        (1..=10_000).for_each(|id| arrives(&mut pool, id, None));
        let far_off = |pool: &mut Scheduler, id: u64| pool.outlook(at(10_000), RequestId(id)).unwrap().position.abs_diff(id as usize);
        let worst = (1..=10_000).step_by(77).map(|id| far_off(&mut pool, id)).max().unwrap();
        assert!(worst <= 10_000 / KNOTS, "{worst}");
        // The look is 200 ms old at most, and this one was not there.
        arrives(&mut pool, 10_001, None);
        assert!(far_off(&mut pool, 10_001) <= 1);
        for id in 1..=5000 {
            pool.handle(at(10_001), Event::Cancelled(RequestId(id)), &mut Vec::new());
        }
        assert!(far_off(&mut pool, 10_000) <= 100, "as it was a moment ago");
        let later = at(10_000).after(GOOD_FOR * 10_001);
        assert!(pool.outlook(later, RequestId(10_000)).unwrap().position.abs_diff(5000) <= 100);
    }

    #[test]
    fn those_who_will_overtake_make_a_wait_longer_but_not_without_end() {
        let limits = Limits { queue_requests: 1000, queue_bytes: 1 << 30, max_output: 1024 };
        let mut pool = Scheduler::new(policy(Order::Pars), limits, 1);
        backend(&mut pool, 0, 1, Standing::Healthy);
        let comes = |id: u64, micros: u64, score: f32, pool: &mut Scheduler| {
            let score = Score::new(score).map(|score| Scored { score, version: RankerVersion(1) });
            let request = Request { expires: Time::MAX, score, ..request(id, micros) };
            pool.handle(at(micros), Event::Arrived(request), &mut Vec::new());
        };
        comes(1, 0, 0.5, &mut pool);
        comes(2, 1, 0.4, &mut pool);
        comes(3, 2, 0.6, &mut pool);
        let quiet = pool.outlook(at(1_000_000_000), RequestId(3)).unwrap();
        let last = pool.outlook(at(1_000_000_000), RequestId(2)).unwrap();
        // A stream of shorter ones, each gone again before anybody is asked.
        for id in 4..200 {
            comes(id, 1_000_000_000 + id * 1000, 0.1, &mut pool);
            pool.handle(at(1_000_000_000 + id * 1000), Event::Cancelled(RequestId(id)), &mut Vec::new());
        }
        let busy = pool.outlook(at(1_000_300_000), RequestId(3)).unwrap();
        assert!(busy.wait > quiet.wait.mul_f64(1.5) && busy.wait <= quiet.wait.mul_f64(LONGEST + 0.01), "{quiet:?}, then {busy:?}");
        assert!(last.wait < quiet.wait && last.position == 1, "{last:?}");
    }

    /// Whoever floods waits behind itself: the one request of another tenant is not told to wait for the flood.
    #[test]
    fn a_flood_of_another_tenant_is_not_all_waited_for() {
        let mut pool = pool(1);
        (1..=500).for_each(|id| arrives(&mut pool, id, Some(TenantId(1))));
        arrives(&mut pool, 501, Some(TenantId(2)));
        let [last, other] = [500, 501].map(|id| pool.outlook(at(501), RequestId(id)).unwrap().wait);
        assert!(other < last / 5, "{other:?} against {last:?}");
    }
}
