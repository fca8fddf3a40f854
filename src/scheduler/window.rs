//! How many requests one backend may hold: enough that it is never idle, few enough that the order is decided here and not in its own queue.

use std::time::Duration;

use super::climb::Climb;
use super::event::{Load, Slots, Standing};
use super::time::Time;

/// The most that should wait inside the engine, beyond those that only pass through: one to two keep it busy between two releases.
const WAITING: u32 = 2;
/// At most this share of what is in flight passes through the engine's queue at a time.
const PASSING: u32 = 4;
/// How long a release may take to show in the engine's numbers, and how long a burst of releases may wait there before it counts as a queue.
const SETTLE: Duration = Duration::from_millis(500);
/// How long an engine may report nothing waiting before the window grows even though some releases do not show.
const STUCK: Duration = Duration::from_secs(2);
/// An engine that reported its queue this lately is steered by it; the throughput of others is watched.
const REPORTS: Duration = Duration::from_secs(30);
/// Pushbacks this close together are one.
const BURST: Duration = Duration::from_secs(1);

/// A backend's release window. What is in flight counts from the release on; shrinking never cancels.
///
/// Fixed: the setting, less what the backend pushed back lately. Auto: first by halves until the engine reports a queue of its own (`exploring`), then by
/// steps; without reports by what its throughput says ([`Climb`]).
#[derive(Debug)]
pub(super) struct Window {
    slots: Slots,
    limit: u32,
    exploring: bool,
    /// The next growth; it doubles while the engine keeps finding nothing to wait.
    step: u32,
    changed: Time,
    last_release: Option<Time>,
    /// When the engine last told how many wait there, and the releases since.
    reported: Option<Time>,
    releases: u32,
    /// Since when it reports too many, and the fewest it reported since.
    over: Option<(Time, u32)>,
    /// Since when it reports none although requests wait here.
    starving: Option<Time>,
    pushed_back: Option<Time>,
    climb: Climb,
}

impl Window {
    pub fn new(slots: Slots) -> Self {
        let limit = match slots {
            Slots::Fixed(limit) => limit,
            Slots::Auto { initial, max } => initial.min(max).max(1),
        };
        Window {
            slots,
            limit,
            exploring: true,
            step: 1,
            changed: Time::ZERO,
            last_release: None,
            reported: None,
            releases: 0,
            over: None,
            starving: None,
            pushed_back: None,
            climb: Climb::default(),
        }
    }

    /// The setting may have changed; what was learnt stays where only the maximum did.
    pub fn reconfigure(&mut self, slots: Slots) {
        match (self.slots, slots) {
            (old, new) if old == new => {}
            (Slots::Auto { initial: old, .. }, Slots::Auto { initial, max }) if old == initial => {
                self.slots = slots;
                self.limit = self.limit.min(max).max(1);
            }
            _ => *self = Window::new(slots),
        }
    }

    /// How many requests the backend may hold in this standing.
    pub fn limit(&self, standing: Standing) -> u32 {
        match standing {
            Standing::Healthy => self.limit,
            Standing::Probing => self.limit.min(1),
            Standing::Ejected | Standing::Draining | Standing::Gone => 0,
        }
    }

    pub fn released(&mut self, now: Time) {
        self.last_release = Some(now);
        self.releases = self.releases.saturating_add(1);
    }

    /// The engine told its numbers. `demand` is whether requests wait here, `iteration` how long the engine takes for one token of each that it runs.
    ///
    /// An engine admits at the beginning of an iteration: whatever it was sent during one waits there, also while slots are free. With short answers that
    /// are many, and says nothing of its room.
    pub fn reported(&mut self, now: Time, load: Load, in_flight: u32, demand: bool, iteration: Duration) {
        let (Slots::Auto { .. }, Some(waiting)) = (self.slots, load.waiting) else { return };
        let elapsed = self.reported.map_or(0.0, |last| now.since(last).as_secs_f64());
        let passing = if elapsed > 0.0 { (f64::from(self.releases) * iteration.as_secs_f64() / elapsed) as u32 } else { 0 };
        let passing = passing.min(in_flight / PASSING);
        self.reported = Some(now);
        self.releases = 0;
        if waiting > passing {
            self.exploring = false;
            self.step = 1;
            self.starving = None;
        }
        let few = WAITING + 2 * passing;
        if waiting > few {
            self.shrink(now, load.running, waiting, in_flight, few);
            return;
        }
        self.over = None;
        if waiting > passing || !demand || in_flight < self.limit {
            self.starving = None;
            return;
        }
        let starving = *self.starving.get_or_insert(now);
        // A release that the numbers do not show yet is about to be what waits there.
        let seen = |running: u32| running.saturating_add(waiting).saturating_add(passing);
        let unseen = self.last_release.is_some_and(|at| now.since(at) < SETTLE) && load.running.is_none_or(|running| seen(running) < in_flight);
        if !unseen || now.since(starving.max(self.changed)) >= STUCK {
            self.grow(now);
        }
    }

    /// Too many wait inside the engine: holds as many as run there, and the `few` that should wait. Only what has waited for a while counts: a burst of releases
    /// passes through the engine's queue even when all of it finds a slot.
    fn shrink(&mut self, now: Time, running: Option<u32>, waiting: u32, in_flight: u32, few: u32) {
        let (since, fewest) = self.over.map_or((now, waiting), |(since, fewest)| (since, fewest.min(waiting)));
        self.over = Some((since, fewest));
        if now.since(since) < SETTLE {
            return;
        }
        let without_excess = in_flight.saturating_sub(fewest.saturating_sub(few));
        let running_and_few = running.map_or(u32::MAX, |running| running.saturating_add(few));
        self.set(now, without_excess.min(running_and_few).min(self.limit));
        self.over = Some((now, waiting));
    }

    fn grow(&mut self, now: Time) {
        let by = if self.exploring { self.limit / 2 } else { self.step };
        self.step = (self.step * 2).min(self.limit / 4).max(1);
        self.set(now, self.limit.saturating_add(by.max(1)));
    }

    /// The backend answered 429 or 503.
    pub fn pushed_back(&mut self, now: Time, in_flight: u32) {
        if self.pushed_back.is_some_and(|at| now.since(at) < BURST) {
            return;
        }
        self.pushed_back = Some(now);
        self.exploring = false;
        self.step = 1;
        self.climb = Climb::default();
        self.set(now, self.limit.min(in_flight.max(1)) * 3 / 4);
    }

    /// The backend computed output tokens and finished requests, for those whose throughput is watched.
    pub fn computed(&mut self, tokens: f64, finished: bool) {
        self.climb.computed(tokens, finished);
    }

    /// Tells how many are in flight and whether more wait, after every event that may change it.
    pub fn settled(&mut self, now: Time, in_flight: u32, demand: bool) {
        self.climb.full(now, demand && in_flight == self.limit);
    }

    /// Whether it was told this.
    pub fn is_settled(&self, in_flight: u32, demand: bool) -> bool {
        self.climb.is_full() == (demand && in_flight == self.limit)
    }

    /// To be called about every second: what grows back or is tried out as time passes.
    pub fn tick(&mut self, now: Time) {
        match self.slots {
            Slots::Fixed(limit) => {
                if self.limit < limit && self.pushed_back.is_none_or(|at| now.since(at) >= BURST) {
                    self.limit = limit.min(self.limit + (limit / 16).max(1));
                }
            }
            Slots::Auto { max, .. } => {
                if self.reported.is_none_or(|at| now.since(at) > REPORTS)
                    && let Some(limit) = self.climb.decide(now, self.limit, max, self.exploring)
                {
                    self.exploring &= limit > self.limit;
                    self.set(now, limit);
                }
            }
        }
    }

    fn set(&mut self, now: Time, limit: u32) {
        let most = match self.slots {
            Slots::Fixed(limit) => limit,
            Slots::Auto { max, .. } => max.max(1),
        };
        let limit = limit.clamp(1.min(most), most);
        if limit != self.limit {
            self.limit = limit;
            self.changed = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(millis: u64) -> Time {
        Time::from_micros(millis * 1000)
    }

    fn load(running: u32, waiting: u32) -> Load {
        Load { running: Some(running), waiting: Some(waiting), kv_used: None }
    }

    /// Answers are long: next to nothing is on its way in.
    const SLOW: Duration = Duration::ZERO;
    const AUTO: Slots = Slots::Auto { initial: 8, max: 64 };

    #[test]
    fn the_standing_decides_how_much_of_it_counts() {
        let window = Window::new(Slots::Fixed(4));
        let limits =
            [Standing::Healthy, Standing::Probing, Standing::Draining, Standing::Ejected, Standing::Gone].map(|standing| window.limit(standing));
        assert_eq!(limits, [4, 1, 0, 0, 0]);
        assert_eq!(Window::new(Slots::Fixed(0)).limit(Standing::Probing), 0);
        assert_eq!(Window::new(Slots::Auto { initial: 8, max: 6 }).limit, 6);
        assert_eq!(Window::new(Slots::Auto { initial: 0, max: 0 }).limit, 1);
    }

    #[test]
    fn a_pushback_takes_a_quarter_that_grows_back() {
        let mut window = Window::new(Slots::Fixed(32));
        window.pushed_back(millis(5000), 31);
        assert_eq!(window.limit, 24 - 1, "three quarters of what was in flight");
        window.pushed_back(millis(5999), 23);
        assert_eq!(window.limit, 23, "one burst");
        window.tick(millis(5999));
        assert_eq!(window.limit, 23);
        window.tick(millis(6000));
        assert_eq!(window.limit, 25);
        (0..10).for_each(|_| window.tick(millis(7000)));
        assert_eq!(window.limit, 32);
        window.pushed_back(millis(9000), 0);
        assert_eq!(window.limit, 1, "never nothing");
    }

    #[test]
    fn fixed_slots_grow_back_by_a_sixteenth_of_them() {
        let mut window = Window::new(Slots::Fixed(160));
        window.pushed_back(millis(0), 100);
        assert_eq!(window.limit, 75);
        window.tick(millis(1000));
        assert_eq!(window.limit, 85);
        window.limit = 155;
        window.tick(millis(2000));
        assert_eq!(window.limit, 160, "and no further than the setting");
        window.tick(millis(3000));
        assert_eq!(window.limit, 160);
    }

    #[test]
    fn reports_count_for_half_a_minute() {
        // Full from the first moment on, each slot as good as the others: throughput alone would make the window grow.
        let grown = |silent: u64| {
            let mut window = Window::new(AUTO);
            window.reported(millis(0), load(8, 0), 8, false, SLOW);
            window.settled(millis(silent - 10_000), 8, true);
            window.computed(8000.0, false);
            (0..10).for_each(|_| window.computed(0.0, true));
            window.tick(millis(silent));
            window.limit > 8
        };
        assert_eq!((grown(30_000), grown(30_001)), (false, true));
    }

    #[test]
    fn what_passes_is_counted_over_the_time_between_reports() {
        // A hundred releases in ten seconds, an iteration of 100 ms: one is on its way at a time, and three that wait are one too many after a while.
        let mut window = Window::new(Slots::Auto { initial: 40, max: 64 });
        window.reported(millis(0), load(40, 0), 40, false, SLOW);
        for at in [10_000, 20_000] {
            (0..100).for_each(|release| window.released(millis(at - 10_000 + release * 100)));
            window.reported(millis(at), load(30, 5), 40, true, Duration::from_millis(100));
        }
        assert_eq!(window.limit, 34, "thirty that run and four");
    }

    #[test]
    fn fixed_slots_ignore_what_the_engine_reports() {
        let mut window = Window::new(Slots::Fixed(8));
        (0..60).for_each(|second| window.reported(millis(second * 1000), load(2, 6), 8, true, SLOW));
        (60..120).for_each(|second| window.reported(millis(second * 1000), load(8, 0), 8, true, SLOW));
        assert_eq!(window.limit, 8);
    }

    #[test]
    fn grows_by_halves_until_the_engine_has_a_queue_and_by_doubling_steps_after() {
        let mut window = Window::new(AUTO);
        let mut limits = Vec::new();
        for second in 0..3 {
            let limit = window.limit;
            window.reported(millis(second * 1000), load(limit, 0), limit, true, SLOW);
            limits.push(window.limit);
        }
        assert_eq!(limits, [12, 18, 27]);
        window.reported(millis(3000), load(25, 2), 27, true, SLOW);
        assert_eq!(window.limit, 27, "one or two that wait are as it should be");
        for second in 4..9 {
            let limit = window.limit;
            window.reported(millis(second * 1000), load(limit, 0), limit, true, SLOW);
            limits.push(window.limit);
        }
        assert_eq!(limits[3..], [28, 30, 34, 41, 49], "at most a quarter");
        for second in 9..20 {
            window.reported(millis(second * 1000), load(window.limit, 0), window.limit, true, SLOW);
        }
        assert_eq!(window.limit, 64);
    }

    #[test]
    fn does_not_grow_for_nobody_or_for_what_is_on_its_way() {
        let mut window = Window::new(AUTO);
        window.reported(millis(0), load(8, 0), 8, false, SLOW);
        window.reported(millis(1000), load(7, 0), 7, true, SLOW);
        window.reported(millis(2000), Load { waiting: None, ..load(8, 0) }, 8, true, SLOW);
        assert_eq!(window.limit, 8);
        // A release that the engine does not show yet, until it should have.
        for at in [3000, 3400, 3800, 4200, 4600] {
            window.released(millis(at - 100));
            window.reported(millis(at), load(7, 0), 8, true, SLOW);
            assert_eq!(window.limit, 8, "{at}");
        }
        window.released(millis(4900));
        window.reported(millis(5000), load(7, 0), 8, true, SLOW);
        assert_eq!(window.limit, 12, "starving for two seconds");
        window.released(millis(5100));
        window.reported(millis(5599), load(7, 0), 12, true, SLOW);
        assert_eq!(window.limit, 12, "and anew after each growth");
        window.reported(millis(5600), load(7, 0), 12, true, SLOW);
        assert_eq!(window.limit, 18, "half a second is enough to show");
    }

    #[test]
    fn what_only_passes_through_the_engines_queue_is_no_queue() {
        // Forty short requests a second, an iteration of 50 ms: two are on their way in whenever one looks.
        let iteration = Duration::from_millis(50);
        let mut window = Window::new(AUTO);
        let second = |window: &mut Window, at: u64, running: u32, waiting: u32| {
            (0..40).for_each(|release| window.released(millis(at + release * 25)));
            let in_flight = window.limit;
            window.reported(millis(at + 1000), load(running, waiting), in_flight, true, iteration);
        };
        let mut at = 0;
        while window.limit < 64 {
            let running = window.limit - 2;
            second(&mut window, at, running, 2);
            at += 1000;
            assert!(at < 20_000, "{}", window.limit);
        }
        // Full with 60 running: a few more than those on their way keep it busy, many are too many.
        for (waiting, limit) in [(4, 64), (6, 64), (9, 64), (9, 61)] {
            second(&mut window, at, 60, waiting);
            at += 1000;
            assert_eq!(window.limit, limit, "{waiting}");
        }
        // However short the answers, most of what is in flight is taken for running.
        let mut window = Window::new(Slots::Auto { initial: 40, max: 64 });
        (0..3).for_each(|n| {
            (0..400).for_each(|_| window.released(millis(n * 1000)));
            window.reported(millis(n * 1000 + 1000), load(8, 32), 40, true, Duration::from_secs(1));
        });
        assert_eq!(window.limit, 30, "eight that run, two, and twice ten on their way");
    }

    #[test]
    fn shrinks_to_what_runs_and_the_few_that_should_wait() {
        let mut window = Window::new(Slots::Auto { initial: 40, max: 64 });
        window.reported(millis(0), load(20, 20), 40, true, SLOW);
        window.reported(millis(499), load(20, 12), 40, true, SLOW);
        assert_eq!(window.limit, 40, "a burst passes");
        window.reported(millis(500), load(25, 20), 40, true, SLOW);
        assert_eq!(window.limit, 27, "what runs and two");
        window.reported(millis(1000), load(25, 4), 40, true, SLOW);
        assert_eq!(window.limit, 27, "it does not grow by shrinking");
        // Without the number of those that run: by the fewest that waited.
        let unknown = |waiting| Load { running: None, ..load(0, waiting) };
        window.reported(millis(1100), unknown(2), 27, true, SLOW);
        for (at, waiting) in [(2000, 9), (2200, 7), (2500, 12)] {
            window.reported(millis(at), unknown(waiting), 27, true, SLOW);
        }
        assert_eq!(window.limit, 22, "five of seven were too many");
        window.reported(millis(2700), unknown(12), 22, true, SLOW);
        assert_eq!(window.limit, 22, "counted anew");
    }

    #[test]
    fn without_reports_throughput_decides() {
        let mut window = Window::new(AUTO);
        // An engine with room for 30, each slot a hundred tokens a second.
        let second = |window: &mut Window, at: u64| {
            window.settled(millis(at), window.limit, true);
            window.computed(f64::from(window.limit.min(30)) * 100.0, false);
            (0..10).for_each(|_| window.computed(0.0, true));
            window.tick(millis(at + 1000));
        };
        (0..40).for_each(|n| second(&mut window, n * 1000));
        for n in 40..60 {
            second(&mut window, n * 1000);
            assert!((27..=38).contains(&window.limit), "{}", window.limit);
        }
        let settled = window.limit;
        window.reported(millis(60_000), load(settled - 1, 1), settled, true, SLOW);
        (60..89).for_each(|n| second(&mut window, n * 1000));
        assert_eq!(window.limit, settled, "an engine that reports is not tried out");
        // Not full, nothing is tried out.
        for n in 100..200 {
            window.settled(millis(n * 1000), settled - 1, true);
            window.tick(millis(n * 1000));
        }
        assert_eq!(window.limit, settled);
    }

    #[test]
    fn another_maximum_keeps_what_was_learnt_and_another_start_does_not() {
        let mut window = Window::new(AUTO);
        window.reported(millis(0), load(8, 0), 8, true, SLOW);
        window.reconfigure(AUTO);
        window.reconfigure(Slots::Auto { initial: 8, max: 32 });
        assert_eq!(window.limit, 12);
        window.reconfigure(Slots::Auto { initial: 8, max: 10 });
        assert_eq!(window.limit, 10);
        window.reconfigure(Slots::Auto { initial: 4, max: 10 });
        assert_eq!(window.limit, 4);
        window.reconfigure(Slots::Fixed(3));
        assert_eq!(window.limit, 3);
    }
}
