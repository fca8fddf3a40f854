//! How requests come to wait, and how they stop waiting without being released.

use super::Scheduler;
use super::event::{Action, Request, RequestId, RetryAfter, Tokens};
use super::outcome::Reason;
use super::placement::{Demand, too_small};
use super::policy::{Lead, Order};
use super::queue::{Item, Key, Place};
use super::restrictions::Restriction;
use super::shares::Service;
use super::table::{Entry, Stage};
use super::time::Time;

/// The longest time, in seconds, that a client is asked to stay away: predictions further out are guesses.
pub const LONGEST_RETRY: f64 = 600.0;
/// Seconds until a client should look again whether a backend is back.
const NO_BACKEND_RETRY: f64 = 5.0;
/// Share of a full queue that has to drain before a refused client should try again; sooner, it would find the queue full again.
const DRAINED: f64 = 0.1;
/// A request is turned away at once where its predicted wait is this many times the time that it has.
const HOPELESS: f64 = 1.5;
/// How far one tenant may be ahead of another that waits, in mean works for each backend. More gives keys more room between tenants and helps means, less lets a single
/// request pass a flood sooner; below some few it makes no difference to either.
const LEAD: f64 = 4.0;

impl Scheduler {
    /// A request wants to run. An id that is already here has no effect.
    pub(super) fn arrived(&mut self, request: &Request, actions: &mut Vec<Action>) {
        if self.table.slot_of(request.id).is_some() {
            return;
        }
        self.counters.arrived += 1;
        self.counters.neutral += u64::from(request.score.is_none() && !request.unscored);
        if let Err((reason, after)) = self.accept(request) {
            self.reject(request.id, reason, after, actions);
        }
    }

    /// Puts a request into a queue.
    ///
    /// # Errors
    /// Why not, and in how many seconds to try again.
    fn accept(&mut self, request: &Request) -> Result<(), (Reason, f64)> {
        let sent_again = !request.excluded.is_empty();
        if let (Some(scored), false) = (request.score, sent_again) {
            self.calibration.scored(scored);
        }
        // What is sent again was accepted before the drain began.
        if self.draining && !sent_again {
            return Err((Reason::Draining, NO_BACKEND_RETRY));
        }
        if request.expires <= self.now {
            return Err((Reason::Expired, self.queued_seconds()));
        }
        let full = |reason| (reason, self.queued_seconds() * DRAINED);
        let slot = self.table.vacant().filter(|_| self.waiting() < self.limits.queue_requests).ok_or_else(|| full(Reason::QueueFull))?;
        if self.waiting_bytes + u64::from(request.bytes) > self.limits.queue_bytes {
            return Err(full(Reason::QueueBytes));
        }
        let room = (self.limits.queue_requests - self.waiting(), self.limits.queue_bytes - self.waiting_bytes);
        if request.tenant.is_some_and(|tenant| self.shares.fills_its_part(tenant, room)) {
            return Err(full(Reason::QueueShare));
        }

        let mut entry = Entry::new(request, Place::new(self.sequence, slot));
        if let Some(session) = request.history.as_ref().and_then(|history| history.session()) {
            entry.attained = entry.attained.max(self.sessions.attained(self.now, request.tenant, session));
        }
        self.predict(&mut entry);
        if !self.restrictions.is_empty() && self.backends.iter().all(|backend| !backend.queue.has_restricted()) {
            self.restrictions.clear();
        }
        let too_small = too_small(&self.backends, &self.sizes, request.prompt_tokens, request.max_output);
        let restriction = self.restrictions.intern(Restriction { excluded: request.excluded.clone(), too_small });
        let index = self.choose(&Demand::of(&entry), restriction).map_err(|reason| match reason {
            Reason::NoHealthyBackend => (reason, NO_BACKEND_RETRY),
            _ => (reason, self.queued_seconds()),
        })?;
        entry.backend = index as u32;
        entry.cached = self.backends[index].cached(&entry.sought());
        let work = self.keying.work(&entry);
        entry.work = work as f32;
        if let Some(margin) = self.margin().filter(|_| self.waiting() > 0) {
            let wait = self.predicted_wait(&entry);
            let left = request.expires.since(self.now).as_secs_f64();
            if wait > left * margin {
                return Err((Reason::Shed, wait - left));
            }
        }
        let phi = self.keying.phi(&entry, work);
        entry.stage = Stage::Waiting { phi, expires: request.expires, restriction };
        self.sequence += 1;
        self.mix.arrived(entry.uncached());
        self.lately.joined(&self.keying, &entry, phi, self.now);
        self.table.insert(entry);
        self.join_queue(slot);
        Ok(())
    }

    /// Expects an output length.
    pub(super) fn predict(&self, entry: &mut Entry) {
        if entry.unscored {
            return;
        }
        let estimate = self.calibration.estimate(entry.model, entry.score(), entry.tenant(), self.limit_of(entry));
        (entry.expected, entry.at_most) = (estimate.mean, estimate.at_most);
    }

    /// The most a request may produce.
    pub(super) fn limit_of(&self, entry: &Entry) -> Tokens {
        entry.max_output().unwrap_or(self.limits.max_output)
    }

    /// The client of a request left. One that runs keeps its slot until it has left its backend.
    pub(super) fn cancelled(&mut self, id: RequestId) {
        let Some(slot) = self.table.slot_of(id) else { return };
        if let Stage::Waiting { .. } = self.table.get(slot).stage {
            self.leave_queue(slot);
            self.table.remove(slot);
            self.counters.cancelled += 1;
        }
    }

    /// Turns away what has waited until its deadline.
    pub(super) fn expire(&mut self, actions: &mut Vec<Action>) {
        while let Some(&(expires, place)) = self.expiries.first()
            && expires <= self.now
        {
            self.leave_queue(place.slot());
            let entry = self.table.remove(place.slot());
            self.reject(entry.id, Reason::Expired, self.queued_seconds(), actions);
        }
    }

    pub(super) fn reject(&mut self, request: RequestId, reason: Reason, after: f64, actions: &mut Vec<Action>) {
        self.counters.rejected[reason as usize] += 1;
        let retry_after = after.ceil().clamp(1.0, LONGEST_RETRY) as RetryAfter;
        actions.push(Action::Reject { request, reason, retry_after });
    }

    /// Predicted seconds until all that waits has been started, by the backends that take requests.
    pub(super) fn queued_seconds(&self) -> f64 {
        let queued = self.keying.speed.seconds(self.queued.prompt, self.queued.output);
        if self.parallel > 0.0 { queued / self.parallel } else { 0.0 }
    }

    /// Predicted seconds until a request that joins now would be started: by arrival behind everything that waits, else behind what is smaller; but not behind
    /// more than its tenant's share leaves to others.
    fn predicted_wait(&self, entry: &Entry) -> f64 {
        let (total, queued) = (self.waiting_work.total(), self.queued_seconds());
        if total <= 0.0 {
            return 0.0;
        }
        let by_key = if self.keying.order == Order::Fcfs { total } else { self.waiting_work.before(entry) };
        let by_share = self.wait_by_share(entry).unwrap_or(f64::INFINITY);
        (queued * by_key / total).min(by_share)
    }

    /// Predicted seconds until all that its tenant has waiting would be started, at the rate of the tenant's share; `None` while nobody else waits.
    pub(super) fn wait_by_share(&self, entry: &Entry) -> Option<f64> {
        let total = self.waiting_work.total();
        let work = self.shares.before(entry.tenant(), entry.share()).filter(|_| total > 0.0)?;
        Some(self.queued_seconds() * (work + self.lead().as_seconds()) / total)
    }

    /// How many times as long as its deadline a request's predicted wait may be; `None` while waits cannot be predicted. In overload a prediction holds: the order is by
    /// work. Otherwise it says what goes first at least, and speeds that were never seen say nothing.
    fn margin(&self) -> Option<f64> {
        if self.overload.active() { Some(1.0) } else { self.attention.speeds_known().then_some(HOPELESS) }
    }

    /// How far one tenant may be ahead of another that waits.
    pub(super) fn lead(&self) -> Service {
        let seconds = match self.policy.lead() {
            Lead::Auto => self.mix.service(self.keying.speed) * LEAD,
            Lead::Within(within) => within.as_secs_f64(),
            Lead::Unlimited => return Service::MAX,
        };
        Service::of(seconds * self.parallel)
    }

    /// Puts a waiting entry into the queue of the backend it names.
    pub(super) fn join_queue(&mut self, slot: u32) {
        let entry = self.table.get(slot);
        let (item, expires) = waiting(entry);
        self.waiting_bytes += u64::from(entry.bytes);
        self.waiting_work.add(entry);
        self.expiries.insert((expires, entry.place));
        let alone = self.shares.alone().filter(|(_, tenant)| *tenant != item.lane.tenant);
        let service = self.shares.joined(item.lane.tenant, entry);
        self.queued.add(entry.uncached(), entry.expected);
        let index = entry.backend as usize;
        let backend = &mut self.backends[index];
        backend.queued.add(entry.uncached(), entry.expected);
        backend.queue.insert(item, service);
        self.queue_changed(index);
        if let Some((service, tenant)) = alone {
            self.served(tenant, service);
        }
    }

    /// Takes a waiting entry out of its queue.
    pub(super) fn leave_queue(&mut self, slot: u32) {
        let entry = self.table.get(slot);
        let (item, expires) = waiting(entry);
        self.waiting_bytes -= u64::from(entry.bytes);
        self.waiting_work.subtract(entry);
        self.expiries.remove(&(expires, entry.place));
        self.shares.left(item.lane.tenant, entry);
        self.queued.subtract(entry.uncached(), entry.expected);
        let index = entry.backend as usize;
        let backend = &mut self.backends[index];
        backend.queued.subtract(entry.uncached(), entry.expected);
        backend.queue.remove(item);
        self.queue_changed(index);
    }
}

/// A waiting request as its queue knows it, and when it expires.
pub(super) fn waiting(entry: &Entry) -> (Item, Time) {
    // Running requests are in no queue, so whoever asks for one as waiting has lost track of it.
    let Stage::Waiting { phi, expires, restriction } = entry.stage else { unreachable!("{:?} does not wait", entry.id) };
    (Item { key: Key { phi, place: entry.place }, arrived: entry.arrived, lane: entry.lane(restriction) }, expires)
}
