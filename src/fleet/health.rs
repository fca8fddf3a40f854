//! From what probes and requests report to a standing. Pure: no clock, no network; who may be ejected is asked through [`Siblings`].
//!
//! ```text
//!            probe ready                3 transport failures, 5 errors, 2 dead or 3 doubtful probes
//!   New ───────────────────▶ Healthy ───────────────────────────────────────────────▶ Ejected
//!    │ any failed probe         ▲   ▲ probe ready after "loading"                     │    ▲
//!    └──────▶ Ejected           │   └─────────────────────────────────────────────────┤    │ failed probe, failed request
//!                               │                                      probe ready    ▼    │
//!                               └──────────── one request answered ────────────── Probing ─┘
//!                                       (or a second ready probe, if it was down)
//! ```
//!
//! A wedged one - it holds requests and gives no sign, see `pulse` - is ejected as after transport failures, and comes back the same way, but by a sign only: neither a
//! ready probe nor the head of an answer proves that its engine runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::scheduler::Standing;

/// How an attempt of the edge went, as far as the backend is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Observation {
    /// An answer with any status but 429, 503 and other 5xx: a client's mistake says nothing against the backend.
    Answered,
    /// 429 or 503: full, not broken.
    Pushback,
    /// Another 5xx.
    ServerError,
    /// Connect failed, reset or garbage.
    Transport,
    /// Nothing came for so long that the request was given up. Counts where no other request has seen a sign meanwhile.
    Silent(Duration),
}

/// How an active probe went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Probe {
    /// It answers.
    Ready,
    /// It answers 503: loading, or says itself that it cannot serve.
    Loading,
    /// Nobody listens, or the connection broke.
    Dead,
    /// No answer in time, or a 5xx.
    Doubtful,
}

/// How much an engine family may stumble before it counts as broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tolerance {
    /// 5xx answers in a row.
    pub errors: u32,
    /// Doubtful probes in a row, with no request answered meanwhile.
    pub doubts: u32,
}

/// Transport failures of requests in a row.
const TRANSPORT_FAILURES: u32 = 3;
/// Probes in a row that found nobody: the second rules out a listen queue that overflowed once.
const DEAD_PROBES: u32 = 2;
/// Between probes of a healthy backend. Its metrics are read far more often, and a failure there asks for a probe at once.
const HEALTHY_INTERVAL: Duration = Duration::from_secs(5);
/// Between probes while something is suspicious.
const SUSPICIOUS_INTERVAL: Duration = Duration::from_millis(200);
/// Between probes of a backend that is loading or proving itself.
const SOON: Duration = Duration::from_millis(500);
/// First and longest wait of an ejected backend for its next probe.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));
/// Failed probes since its ejection until which the only hope of a pool is asked again soon: half a minute.
const ALONE: u32 = 60;
/// Good probes in a row after which earlier ejections are forgotten: a minute.
const FORGIVEN: u32 = 12;

/// How many backends of one pool are healthy. Shared by its backends, so that two of them cannot both conclude that the other remains.
#[derive(Clone, Debug, Default)]
pub struct Siblings(Arc<AtomicUsize>);

impl Siblings {
    fn joined(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn left(&self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }

    /// Leaves, unless that would leave nobody.
    fn left_if_not_last(&self) -> bool {
        self.0.try_update(Ordering::SeqCst, Ordering::SeqCst, |healthy| (healthy > 1).then(|| healthy - 1)).is_ok()
    }

    fn anybody(&self) -> bool {
        self.0.load(Ordering::SeqCst) > 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing is known yet.
    New,
    Healthy,
    Ejected,
    Probing,
}

/// What is known of one backend's health.
#[derive(Debug)]
pub(super) struct Health {
    phase: Phase,
    siblings: Siblings,
    /// Transport failures of requests in a row.
    transport: u32,
    /// 5xx answers in a row.
    errors: u32,
    /// Dead probes in a row.
    dead: u32,
    /// Doubtful probes in a row, none answered in between.
    doubts: u32,
    /// Ready probes in a row.
    good: u32,
    /// Failed probes since the ejection.
    failed: u32,
    /// Ejections that are not forgiven yet.
    ejections: u32,
    /// The last probe was answered with 503.
    loading: bool,
    /// It held requests and gave no sign; it has given none since.
    wedged: bool,
    /// How long that took.
    silence: Duration,
}

impl Health {
    pub(super) fn new(siblings: Siblings) -> Self {
        Health {
            phase: Phase::New,
            siblings,
            transport: 0,
            errors: 0,
            dead: 0,
            doubts: 0,
            good: 0,
            failed: 0,
            ejections: 0,
            loading: false,
            wedged: false,
            silence: BACKOFF.0,
        }
    }

    /// A backend that nothing is known of takes one request at a time, so that a start refuses nobody and loses at most one request to a dead backend.
    pub(super) fn standing(&self) -> Standing {
        match self.phase {
            Phase::New | Phase::Probing => Standing::Probing,
            Phase::Healthy => Standing::Healthy,
            Phase::Ejected => Standing::Ejected,
        }
    }

    /// Whether anything at all is known.
    pub(super) fn known(&self) -> bool {
        self.phase != Phase::New
    }

    /// Whether the next probe should come at once: an attempt has failed in a way that a probe can tell more about.
    pub(super) fn observed(&mut self, observation: Observation, tolerance: Tolerance) -> bool {
        match observation {
            Observation::Answered => {
                (self.transport, self.errors, self.doubts) = (0, 0, 0);
                if self.phase == Phase::Probing && !self.wedged {
                    // Probing -> Healthy: it has served a request.
                    self.become_healthy();
                }
                false
            }
            Observation::Pushback => {
                // It answers; how full it is concerns its window, not its standing.
                (self.transport, self.errors) = (0, 0);
                false
            }
            Observation::ServerError => {
                self.transport = 0;
                self.errors += 1;
                match self.phase {
                    Phase::Healthy if self.errors >= tolerance.errors => {
                        // Healthy -> Ejected, unless it is the last one: an error for every request is still better than no backend at all.
                        self.eject_unless_last();
                    }
                    // Probing -> Ejected, if somebody else can take over.
                    Phase::Probing if self.siblings.anybody() => self.eject(),
                    Phase::New | Phase::Healthy | Phase::Ejected | Phase::Probing => {}
                }
                false
            }
            Observation::Transport | Observation::Silent(_) => {
                self.transport += 1;
                match self.phase {
                    Phase::Healthy if self.transport >= TRANSPORT_FAILURES => {
                        // Healthy -> Ejected; the last one only a probe can eject.
                        self.eject_unless_last();
                        self.wedged |= matches!(observation, Observation::Silent(_));
                    }
                    // Probing -> Ejected: it has not proved itself.
                    Phase::Probing => self.eject(),
                    Phase::New | Phase::Healthy | Phase::Ejected => {}
                }
                self.phase != Phase::Ejected
            }
        }
    }

    pub(super) fn probed(&mut self, probe: Probe, tolerance: Tolerance) {
        let was_loading = self.loading;
        self.loading = probe == Probe::Loading;
        match probe {
            Probe::Ready => {
                (self.dead, self.doubts) = (0, 0);
                self.good = self.good.saturating_add(1);
                match self.phase {
                    // New -> Healthy: the first look found it well.
                    Phase::New => self.become_healthy(),
                    // Ejected -> Healthy: loading is no failure, it need not prove anything.
                    Phase::Ejected if was_loading => self.become_healthy(),
                    // Ejected -> Probing: answering a probe is not serving.
                    Phase::Ejected => self.phase = Phase::Probing,
                    // Probing -> Healthy without a request: it was down, and now stays up.
                    Phase::Probing if self.failed > 0 && self.good >= 2 && !self.wedged => self.become_healthy(),
                    Phase::Probing => {}
                    Phase::Healthy => {
                        if self.good >= FORGIVEN {
                            self.ejections = 0;
                        }
                    }
                }
            }
            Probe::Loading | Probe::Doubtful => {
                // What loads has been started anew.
                self.wedged &= probe != Probe::Loading;
                self.good = 0;
                self.dead = 0;
                match self.phase {
                    Phase::Healthy => {
                        self.doubts += 1;
                        if self.doubts >= tolerance.doubts {
                            // Healthy -> Ejected, unless it is the last one: a wedged health check is not a dead backend.
                            self.eject_unless_last();
                        }
                    }
                    // New, Probing -> Ejected; Ejected stays so. Loading does not count as a failure, so it is asked again soon.
                    Phase::New | Phase::Probing => self.eject(),
                    Phase::Ejected => {}
                }
                if self.phase == Phase::Ejected && probe == Probe::Doubtful {
                    self.failed = self.failed.saturating_add(1);
                }
            }
            Probe::Dead => {
                self.wedged = false;
                self.good = 0;
                self.dead = self.dead.saturating_add(1);
                match self.phase {
                    Phase::Healthy if self.dead >= DEAD_PROBES => {
                        // Healthy -> Ejected, also the last one: requests would only find out more slowly.
                        self.siblings.left();
                        self.eject();
                    }
                    Phase::Healthy => {}
                    // New, Probing -> Ejected.
                    Phase::New | Phase::Probing => self.eject(),
                    Phase::Ejected => {}
                }
                if self.phase == Phase::Ejected {
                    self.failed = self.failed.saturating_add(1);
                }
            }
        }
    }

    /// It holds requests and gives no sign for longer than can be explained, which is more than `silence`. Whether it has been ejected for that.
    pub(super) fn wedges(&mut self, silence: Duration) -> bool {
        (self.wedged, self.silence) = (true, silence);
        let before = self.ejections;
        match self.phase {
            // Healthy -> Ejected, unless it is the last one.
            Phase::Healthy => self.eject_unless_last(),
            // Probing -> Ejected, if somebody else can take over.
            Phase::New | Phase::Probing if self.siblings.anybody() => self.eject(),
            Phase::New | Phase::Probing | Phase::Ejected => {}
        }
        self.ejections > before
    }

    /// A sign came after all.
    pub(super) fn gives_signs(&mut self) {
        if std::mem::take(&mut self.wedged) && matches!(self.phase, Phase::Ejected | Phase::Probing) {
            // Ejected, Probing -> Healthy: that it answers probes was never in doubt.
            self.become_healthy();
        }
    }

    pub(super) fn is_wedged(&self) -> bool {
        self.wedged
    }

    /// How long to wait for the next probe, before jitter.
    pub(super) fn next_probe(&self) -> Duration {
        match self.phase {
            Phase::New => Duration::ZERO,
            Phase::Healthy if self.dead > 0 || self.doubts > 0 || self.transport > 0 => SUSPICIOUS_INTERVAL,
            Phase::Healthy => HEALTHY_INTERVAL,
            Phase::Probing => SOON,
            Phase::Ejected if self.loading => SOON,
            // The request that it is tried with may have to wait as long as the last one did.
            Phase::Ejected if self.wedged => self.silence.clamp(BACKOFF.0, BACKOFF.1),
            // Nobody else can serve: how often it failed before matters less than that it may be back.
            Phase::Ejected if !self.siblings.anybody() && self.failed < ALONE => SOON,
            Phase::Ejected => {
                let exponent = (self.failed + self.ejections).saturating_sub(1).min(16);
                BACKOFF.1.min(BACKOFF.0 * 2_u32.pow(exponent))
            }
        }
    }

    fn become_healthy(&mut self) {
        self.siblings.joined();
        self.phase = Phase::Healthy;
        (self.transport, self.errors, self.dead, self.doubts, self.failed) = (0, 0, 0, 0, 0);
    }

    fn eject_unless_last(&mut self) {
        if self.siblings.left_if_not_last() {
            self.eject();
        }
    }

    fn eject(&mut self) {
        self.phase = Phase::Ejected;
        self.good = 0;
        self.failed = 0;
        self.ejections = self.ejections.saturating_add(1);
    }
}

impl Drop for Health {
    fn drop(&mut self) {
        if self.phase == Phase::Healthy {
            self.siblings.left();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOLERANCE: Tolerance = Tolerance { errors: 5, doubts: 3 };
    const LONG: Duration = Duration::from_secs(60);

    fn healthy(siblings: &Siblings) -> Health {
        let mut health = Health::new(siblings.clone());
        health.probed(Probe::Ready, TOLERANCE);
        assert_eq!(health.standing(), Standing::Healthy);
        health
    }

    fn observe(health: &mut Health, observation: Observation, times: u32) {
        for _ in 0..times {
            health.observed(observation, TOLERANCE);
        }
    }

    fn probe(health: &mut Health, probe: Probe, times: u32) {
        for _ in 0..times {
            health.probed(probe, TOLERANCE);
        }
    }

    #[test]
    fn the_unknown_take_one_request_at_a_time_until_a_probe_tells() {
        let mut health = Health::new(Siblings::default());
        assert_eq!((health.standing(), health.next_probe()), (Standing::Probing, Duration::ZERO));
        probe(&mut health, Probe::Dead, 1);
        assert_eq!(health.standing(), Standing::Ejected);
    }

    #[test]
    fn client_mistakes_and_pushback_never_eject() {
        let siblings = Siblings::default();
        let (mut health, _other) = (healthy(&siblings), healthy(&siblings));
        observe(&mut health, Observation::Answered, 1000);
        observe(&mut health, Observation::Pushback, 1000);
        assert_eq!(health.standing(), Standing::Healthy);
    }

    #[test]
    fn errors_in_a_row_eject_but_not_errors_among_answers() {
        let siblings = Siblings::default();
        let (mut health, _other) = (healthy(&siblings), healthy(&siblings));
        for _ in 0..100 {
            observe(&mut health, Observation::ServerError, 4);
            observe(&mut health, Observation::Answered, 1);
        }
        assert_eq!(health.standing(), Standing::Healthy);
        observe(&mut health, Observation::ServerError, 5);
        assert_eq!(health.standing(), Standing::Ejected);
    }

    #[test]
    fn the_last_healthy_one_is_not_ejected_by_what_requests_see() {
        let siblings = Siblings::default();
        let (mut first, mut second) = (healthy(&siblings), healthy(&siblings));
        observe(&mut first, Observation::ServerError, 5);
        observe(&mut second, Observation::ServerError, 500);
        observe(&mut second, Observation::Transport, 500);
        probe(&mut second, Probe::Doubtful, 500);
        assert_eq!((first.standing(), second.standing()), (Standing::Ejected, Standing::Healthy));
        probe(&mut second, Probe::Dead, 2);
        assert_eq!(second.standing(), Standing::Ejected, "nobody listens: a probe may eject the last one");
    }

    #[test]
    fn a_transport_failure_asks_for_a_probe_at_once() {
        let siblings = Siblings::default();
        let (mut health, _other) = (healthy(&siblings), healthy(&siblings));
        assert!(health.observed(Observation::Transport, TOLERANCE));
        assert!(health.next_probe() < Duration::from_secs(1));
        observe(&mut health, Observation::Transport, 2);
        assert_eq!(health.standing(), Standing::Ejected);
    }

    #[test]
    fn one_request_readmits() {
        let siblings = Siblings::default();
        let (mut health, _other) = (healthy(&siblings), healthy(&siblings));
        observe(&mut health, Observation::Transport, 3);
        probe(&mut health, Probe::Ready, 10);
        assert_eq!(health.standing(), Standing::Probing, "it was never down, so only a request can tell");
        observe(&mut health, Observation::Answered, 1);
        assert_eq!(health.standing(), Standing::Healthy);
    }

    #[test]
    fn a_failed_request_while_probing_ejects_again_and_waits_longer() {
        let siblings = Siblings::default();
        let (mut health, _other) = (healthy(&siblings), healthy(&siblings));
        observe(&mut health, Observation::Transport, 3);
        let first = health.next_probe();
        probe(&mut health, Probe::Ready, 1);
        observe(&mut health, Observation::Transport, 1);
        assert_eq!(health.standing(), Standing::Ejected);
        assert!(health.next_probe() > first);
    }

    #[test]
    fn a_backend_that_was_down_returns_after_two_good_probes() {
        let siblings = Siblings::default();
        let mut health = healthy(&siblings);
        probe(&mut health, Probe::Dead, 3);
        probe(&mut health, Probe::Ready, 1);
        assert_eq!(health.standing(), Standing::Probing);
        probe(&mut health, Probe::Ready, 1);
        assert_eq!(health.standing(), Standing::Healthy);
    }

    #[test]
    fn loading_is_not_a_failure() {
        let mut health = Health::new(Siblings::default());
        probe(&mut health, Probe::Loading, 1000);
        assert_eq!(health.standing(), Standing::Ejected);
        assert_eq!(health.next_probe(), SOON);
        probe(&mut health, Probe::Ready, 1);
        assert_eq!(health.standing(), Standing::Healthy);
    }

    #[test]
    fn a_wedged_one_comes_back_by_a_sign_and_by_nothing_else() {
        let siblings = Siblings::default();
        let (mut health, mut other) = (healthy(&siblings), healthy(&siblings));
        assert!(health.wedges(LONG) && health.is_wedged());
        assert!(!other.wedges(LONG) && other.standing() == Standing::Healthy, "the last one stays, and says that it is wedged");
        assert_eq!(health.next_probe(), BACKOFF.1);
        probe(&mut health, Probe::Ready, 5);
        observe(&mut health, Observation::Answered, 5);
        assert_eq!(health.standing(), Standing::Probing, "an engine that has stopped may answer probes, and begin answers");
        assert!(health.wedges(LONG), "the request that it was tried with had no sign either");
        probe(&mut health, Probe::Ready, 1);
        health.gives_signs();
        assert_eq!((health.standing(), health.is_wedged()), (Standing::Healthy, false));
        other.gives_signs();
        assert!(!other.is_wedged());
        // One that was started anew has nothing to prove.
        assert!(health.wedges(LONG));
        probe(&mut health, Probe::Dead, 2);
        probe(&mut health, Probe::Loading, 2);
        probe(&mut health, Probe::Ready, 1);
        assert_eq!((health.standing(), health.is_wedged()), (Standing::Healthy, false));
    }

    #[test]
    fn slow_probes_do_not_eject_a_backend_that_answers_requests() {
        let siblings = Siblings::default();
        let (mut health, _other) = (healthy(&siblings), healthy(&siblings));
        for _ in 0..100 {
            probe(&mut health, Probe::Doubtful, 2);
            observe(&mut health, Observation::Answered, 1);
        }
        assert_eq!(health.standing(), Standing::Healthy);
        probe(&mut health, Probe::Doubtful, 3);
        assert_eq!(health.standing(), Standing::Ejected);
    }

    #[test]
    fn the_dead_are_asked_less_and_less() {
        let mut health = Health::new(Siblings::default());
        let mut waits = Vec::new();
        for _ in 0..100 {
            probe(&mut health, Probe::Dead, 1);
            waits.push(health.next_probe());
        }
        assert!(waits.is_sorted() && waits[0] <= Duration::from_secs(1) && waits[99] == BACKOFF.1, "{waits:?}");
    }

    #[test]
    fn the_only_hope_of_a_pool_is_asked_soon_whatever_it_did_before() {
        let siblings = Siblings::default();
        let (mut health, other) = (healthy(&siblings), healthy(&siblings));
        for _ in 0..8 {
            observe(&mut health, Observation::Transport, 3);
            probe(&mut health, Probe::Ready, 1);
            observe(&mut health, Observation::Answered, 1);
        }
        probe(&mut health, Probe::Dead, 3);
        assert_eq!(health.next_probe(), BACKOFF.1, "another one serves meanwhile");
        drop(other);
        assert_eq!(health.next_probe(), SOON);
        probe(&mut health, Probe::Dead, ALONE);
        assert_eq!(health.next_probe(), BACKOFF.1);
    }

    #[test]
    fn ejections_are_forgiven_after_a_while() {
        let siblings = Siblings::default();
        let (mut health, _other) = (healthy(&siblings), healthy(&siblings));
        for _ in 0..5 {
            observe(&mut health, Observation::Transport, 3);
            probe(&mut health, Probe::Ready, 1);
            observe(&mut health, Observation::Answered, 1);
        }
        probe(&mut health, Probe::Ready, FORGIVEN);
        observe(&mut health, Observation::Transport, 3);
        assert_eq!(health.next_probe(), BACKOFF.0);
    }

    #[test]
    fn the_count_of_healthy_ones_survives_any_history() {
        // Every observation and probe in a fixed scrambled order, on three backends; the shared count must equal the healthy ones after each step.
        let siblings = Siblings::default();
        let mut all: Vec<Health> = (0..3).map(|_| Health::new(siblings.clone())).collect();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..100_000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let health = &mut all[(random >> 8) as usize % 3];
            match (random >> 16) % 11 {
                0 => _ = health.observed(Observation::Answered, TOLERANCE),
                1 => _ = health.observed(Observation::Pushback, TOLERANCE),
                2 => _ = health.observed(Observation::ServerError, TOLERANCE),
                3 => _ = health.observed(Observation::Transport, TOLERANCE),
                4 => health.probed(Probe::Ready, TOLERANCE),
                5 => health.probed(Probe::Loading, TOLERANCE),
                6 => health.probed(Probe::Dead, TOLERANCE),
                7 => _ = health.wedges(LONG),
                8 => health.gives_signs(),
                9 => _ = health.observed(Observation::Silent(SOON), TOLERANCE),
                _ => health.probed(Probe::Doubtful, TOLERANCE),
            }
            let healthy = all.iter().filter(|health| health.standing() == Standing::Healthy).count();
            assert_eq!(siblings.0.load(Ordering::SeqCst), healthy);
        }
        drop(all);
        assert_eq!(siblings.0.load(Ordering::SeqCst), 0);
    }
}
