//! How many requests one backend may hold: enough that it is never idle, few enough that the order is decided here and not in its own queue.

use std::time::Duration;

use super::climb::Climb;
use super::event::{Load, Slots, Standing};
use super::time::Time;

/// The most that should wait inside the engine: one to two keep it busy between two releases.
const WAITING: u32 = 2;
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
    /// When the engine last told how many wait there.
    reported: Option<Time>,
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
    }

    /// The engine told its numbers. `demand` is whether requests wait here.
    pub fn reported(&mut self, now: Time, load: Load, in_flight: u32, demand: bool) {
        let (Slots::Auto { .. }, Some(waiting)) = (self.slots, load.waiting) else { return };
        self.reported = Some(now);
        if waiting > 0 {
            self.exploring = false;
            self.step = 1;
            self.starving = None;
        }
        if waiting > WAITING {
            self.shrink(now, load.running, waiting, in_flight);
            return;
        }
        self.over = None;
        if waiting > 0 || !demand || in_flight < self.limit {
            self.starving = None;
            return;
        }
        let starving = *self.starving.get_or_insert(now);
        // A release that the numbers do not show yet is about to be what waits there.
        let unseen = self.last_release.is_some_and(|at| now.since(at) < SETTLE) && load.running.is_none_or(|running| running < in_flight);
        if !unseen || now.since(starving.max(self.changed)) >= STUCK {
            self.grow(now);
        }
    }

    /// Too many wait inside the engine: holds as many as run there, and the few that should wait. Only what has waited for a while counts: a burst of releases
    /// passes through the engine's queue even when all of it finds a slot.
    fn shrink(&mut self, now: Time, running: Option<u32>, waiting: u32, in_flight: u32) {
        let (since, fewest) = self.over.map_or((now, waiting), |(since, fewest)| (since, fewest.min(waiting)));
        self.over = Some((since, fewest));
        if now.since(since) < SETTLE {
            return;
        }
        let without_excess = in_flight.saturating_sub(fewest - WAITING);
        let running_and_few = running.map_or(u32::MAX, |running| running.saturating_add(WAITING));
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
