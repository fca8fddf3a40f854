//! What is done as time passes rather than for one request: follow speeds, the tail, the backlog and the calibration, and rebuild keys when they moved.

use std::time::Duration;

use super::Scheduler;
use super::backend::Backlog;
use super::keys::{Keying, Largest};
use super::outlook::Sketch;
use super::overload::WaitingWork;
use super::policy::{Limits, Policy};
use super::queue::{Aging, Key, Keys};
use super::speed::Speed;
use super::table::Stage;

/// Between two looks at the backlog and the windows.
const LOOK: Duration = Duration::from_secs(1);
/// Between two looks at the tail and the calibration.
const LEARN: Duration = Duration::from_secs(5);
/// How far gamma, or the work from which on nothing is boosted, may move, as a factor, before keys are rebuilt.
const DRIFT: f64 = 1.1;

impl Scheduler {
    /// Does what is due.
    pub(super) fn chores(&mut self) {
        if self.now < self.next_look {
            return;
        }
        self.next_look = self.now.after(LOOK);
        for backend in &mut self.backends {
            backend.window.tick(self.now);
        }
        self.all_changed();
        self.update_speeds();
        self.shares.prune();
        self.set_leads();
        if self.policy.overload() {
            // A policy that prefers the tail wants arrival order where waits are long, not order by work.
            let bound = self.keying.bound.max(self.gamma.reach(&self.policy, self.mix.service(self.pool_speed())));
            self.overload.look(self.now, self.queued_seconds(), self.waiting() > 0, bound);
        }
        let switched = self.overload.active() != self.keying.overload;
        self.counters.overloads += u64::from(switched && self.overload.active());
        if self.now >= self.next_learning {
            self.next_learning = self.now.after(LEARN);
            self.gamma.update(self.mix.service(self.pool_speed()));
            self.gamma.aim(&self.policy);
            let running = self.running.iter().map(|&slot| self.table.get(slot));
            let moved = self.calibration.refresh(running, self.expiries.is_empty());
            let next = self.next_keying();
            let drifted = |new: f64, old: f64| !(1.0 / DRIFT..=DRIFT).contains(&(new / old));
            let boosts_moved = drifted(next.gamma, self.keying.gamma) || drifted(next.longest, self.keying.longest);
            if moved || boosts_moved || next.speed.differs(self.keying.speed) || self.expiries.is_empty() || switched {
                self.rebuild_keys();
            }
        } else if switched {
            self.rebuild_keys();
        }
    }

    pub(super) fn policy_changed(&mut self, policy: Policy) {
        self.aging = Aging::new(policy.aging_threshold(), policy.aging_share());
        if !policy.overload() {
            self.overload.end();
        }
        self.policy = policy;
        self.set_leads();
        self.rebuild_keys();
    }

    /// Tells every queue how far one tenant may be ahead of another.
    pub(super) fn set_leads(&mut self) {
        let lead = self.lead();
        self.backends.iter_mut().for_each(|backend| backend.queue.set_lead(lead));
    }

    pub(super) fn limits_changed(&mut self, limits: Limits) {
        self.limits = limits;
        self.rebuild_keys();
    }

    /// Gives each backend the speed that was learnt from it, or one like its siblings'.
    pub(super) fn update_speeds(&mut self) {
        let typical = self.typical_speed().unwrap_or(self.assumed);
        for backend in &mut self.backends {
            backend.speed = backend.learner.speed().unwrap_or_else(|| typical.scaled(1.0 / backend.state.weight.get()));
        }
        self.parallel = self.worth();
    }

    /// How many backends of the pool's speed the ones that take requests are worth.
    pub(super) fn worth(&self) -> f64 {
        let taking = self.backends.iter().filter(|backend| backend.takes_requests());
        taking.map(|backend| self.keying.speed.output / backend.speed.output).sum()
    }

    /// What is known of the speed of a backend of weight 1.
    pub(super) fn typical_speed(&self) -> Option<Speed> {
        // Weights say how speeds compare where they are not known, so a known speed times its weight is that of a backend of weight 1.
        Speed::mean(self.backends.iter().filter_map(|backend| Some(backend.learner.speed()?.scaled(backend.state.weight.get()))))
    }

    /// The speed that keys are made with: the mean of the backends that take requests.
    fn pool_speed(&self) -> Speed {
        let speeds = self.backends.iter().filter(|backend| backend.takes_requests()).map(|backend| backend.speed);
        Speed::mean(speeds).unwrap_or(self.keying.speed)
    }

    fn next_keying(&self) -> Keying {
        let speed = self.pool_speed();
        let mean_work = self.mix.work(self.policy.order(), speed);
        let gamma = self.gamma.gamma(&self.policy, self.mix.service(speed));
        let context = self.backends.iter().filter_map(|backend| backend.state.context_tokens).max();
        let largest = Largest::new(&self.limits, context);
        Keying::new(&self.policy, largest, speed, mean_work, gamma, self.overload.active(), self.calibration.current_ranker())
    }

    /// Orders everything that waits anew.
    pub(super) fn rebuild_keys(&mut self) {
        let keying = self.next_keying();
        let before = std::mem::replace(&mut self.keying, keying);
        self.parallel = self.worth();
        if (before.order, before.overload) != (self.keying.order, self.keying.overload) {
            self.lately.forget();
        }
        if self.expiries.is_empty() {
            return;
        }
        self.counters.rebuilds += 1;
        self.waiting_work = WaitingWork::default();
        self.shares.forget_work();
        self.queued = Backlog::default();
        for backend in &mut self.backends {
            backend.queued = Backlog::default();
            backend.sketch = Sketch::default();
        }
        let mut keys: Vec<Keys> = self.backends.iter().map(|_| Keys::default()).collect();
        // In the order of slots, which is the order of memory.
        let mut table = std::mem::take(&mut self.table);
        for entry in table.iter_mut() {
            let Stage::Waiting { expires, restriction, .. } = entry.stage else { continue };
            self.predict(entry);
            let work = self.keying.work(entry);
            let phi = self.keying.phi(entry, work);
            entry.work = work as f32;
            entry.stage = Stage::Waiting { phi, expires, restriction };
            self.waiting_work.add(entry);
            self.shares.reckon(entry.tenant(), entry.reckoned());
            self.queued.add(entry.uncached(), entry.expected);
            let index = entry.backend as usize;
            self.backends[index].queued.add(entry.uncached(), entry.expected);
            keys[index].push(Key { phi, place: entry.place }, entry.lane(restriction));
        }
        self.table = table;
        for (backend, keys) in self.backends.iter_mut().zip(keys) {
            backend.queue.rekey(keys);
        }
    }
}
