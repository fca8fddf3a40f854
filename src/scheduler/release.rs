//! Who goes next, as soon as there is room: each backend from its own queue, and an idle one from its siblings'.

use super::Scheduler;
use super::backend::Backend;
use super::bits::Bits;
use super::event::{Action, Facts, TenantId};
use super::queue::Turn;
use super::shares::Service;
use super::table::Stage;
use super::time::Time;

/// Which backends have to be looked at: few have something to do after an event.
#[derive(Debug, Default)]
pub(super) struct Attention {
    /// Those with a free slot.
    free: Bits,
    /// Those whose queue is not empty.
    waited_for: Bits,
    /// Those whose slots, window or load have changed since they were told whether they are full,
    changed: Vec<usize>,
    /// or all of them.
    all: bool,
    /// When the first of them has measured its speed for long enough.
    due: Time,
    /// Whether anything waited when they were told.
    demand: bool,
    /// Whether the speeds of all that take requests were seen.
    speeds_known: bool,
}

impl Attention {
    /// Whether the speeds of all that take requests were seen.
    pub fn speeds_known(&self) -> bool {
        self.speeds_known
    }

    /// Whether nothing that has to be looked at is missing; `demand` is whether anything waits.
    pub fn is_complete(&self, backends: &[Backend], demand: bool) -> bool {
        let is_known = |(index, backend): (usize, &Backend)| {
            self.free.has(index) == backend.has_slot()
                && self.waited_for.has(index) != backend.queue.is_empty()
                && self.due <= backend.learner.due()
                && backend.learner.is_saturated() == backend.is_saturated()
                && backend.window.is_settled(backend.in_flight, demand)
        };
        backends.iter().enumerate().all(is_known) && self.speeds_known == speeds_known(backends)
    }
}

impl Scheduler {
    /// Releases whatever there is room for.
    pub(super) fn settle(&mut self, actions: &mut Vec<Action>) {
        while self.waiting() > 0 {
            let before = self.counters.released;
            let mut next = 0;
            while let Some(index) = self.attention.free.first(next, &self.attention.waited_for, true) {
                self.release_own(index, actions);
                next = index + 1;
            }
            while let Some(Theft { thief, victim, turn }) = self.theft() {
                self.release(victim, thief, turn, actions);
                // What was stolen may have been too large for what the victim has room for.
                self.release_own(victim, actions);
            }
            // Whose turn it is elsewhere depends on what a tenant has had here, where there are others.
            if self.counters.released == before || !self.shares.compete() {
                break;
            }
        }
        self.tell_full();
    }

    /// Tells the backends whether they are full, where that may have changed or has lasted for long enough.
    fn tell_full(&mut self) {
        let (now, demand, attention) = (self.now, self.waiting() > 0, &mut self.attention);
        let tell = |backend: &mut Backend| {
            backend.learner.saturated(now, backend.is_saturated());
            backend.window.settled(now, backend.in_flight, demand);
            backend.learner.due()
        };
        if attention.all || now >= attention.due {
            attention.due = self.backends.iter_mut().map(tell).min().unwrap_or(Time::MAX);
            attention.speeds_known = speeds_known(&self.backends);
        } else {
            for &index in &attention.changed {
                attention.due = attention.due.min(tell(&mut self.backends[index]));
            }
            if demand != attention.demand {
                self.backends.iter_mut().for_each(|backend| backend.window.settled(now, backend.in_flight, demand));
            }
        }
        attention.changed.clear();
        (attention.all, attention.demand) = (false, demand);
    }

    /// The slots, the window or the load of a backend may have changed.
    pub(super) fn changed(&mut self, index: usize) {
        self.attention.free.set(index, self.backends[index].has_slot());
        self.attention.changed.push(index);
    }

    /// Those of any may have, or who is there.
    pub(super) fn all_changed(&mut self) {
        let attention = &mut self.attention;
        attention.free.clear();
        attention.waited_for.clear();
        for (index, backend) in self.backends.iter().enumerate() {
            attention.free.set(index, backend.has_slot());
            attention.waited_for.set(index, !backend.queue.is_empty());
        }
        attention.changed.clear();
        attention.all = true;
    }

    /// A queue has one more or one less that waits.
    pub(super) fn queue_changed(&mut self, index: usize) {
        self.attention.waited_for.set(index, !self.backends[index].queue.is_empty());
    }

    fn release_own(&mut self, index: usize, actions: &mut Vec<Action>) {
        while let Some(turn) = self.own_turn(index) {
            self.release(index, index, turn, actions);
        }
    }

    /// The next request of a backend's own queue, if there is room for it. One that does not fit the KV cache beside what runs waits its turn: what is smaller
    /// does not pass it, or it would wait forever.
    pub(super) fn own_turn(&self, index: usize) -> Option<Turn> {
        let backend = &self.backends[index];
        if !backend.has_slot() {
            return None;
        }
        let turn = backend.queue.next(self.now, self.aging, &self.table)?;
        backend.has_kv_for(self.table.get(turn.key.place.slot())).then_some(turn)
    }

    /// The idlest backend with room and an empty queue, and the smallest key among the next requests of its siblings that fit it.
    pub(super) fn theft(&self) -> Option<Theft> {
        if self.waiting() == 0 {
            return None;
        }
        let mut best: Option<(f64, Theft)> = None;
        let Attention { free, waited_for, .. } = &self.attention;
        for thief in free.iter(waited_for, false) {
            let backend = &self.backends[thief];
            let busy = backend.backlog();
            if best.as_ref().is_some_and(|(least, _)| *least <= busy) {
                continue;
            }
            let turns = waited_for.iter(waited_for, true).filter_map(|victim| {
                let turn = self.backends[victim].queue.next_for(backend.id, self.now, self.aging, &self.restrictions, &self.table)?;
                backend.has_kv_for(self.table.get(turn.key.place.slot())).then_some(Theft { thief, victim, turn })
            });
            if let Some(theft) = turns.min_by_key(|theft| theft.turn.key) {
                best = Some((busy, theft));
            }
        }
        best.map(|(_, theft)| theft)
    }

    /// Takes a request out of the queue of backend `from` and gives it a slot on backend `to`.
    fn release(&mut self, from: usize, to: usize, turn: Turn, actions: &mut Vec<Action>) {
        let slot = turn.key.place.slot();
        self.leave_queue(slot);
        self.backends[from].queue.released(self.aging, turn.aged);
        self.running.insert(slot);

        let entry = self.table.get_mut(slot);
        let backend = &mut self.backends[to];
        debug_assert!(backend.has_slot());
        if from != to {
            entry.backend = to as u32;
        }
        // Others with the same beginning may have gone there since it was placed.
        entry.cached = backend.cached(&entry.sought());
        entry.stage = Stage::Running { released: self.now, produced: 0, remaining: entry.expected };
        backend.in_flight += 1;
        backend.running.add(entry.uncached(), entry.expected);
        backend.resident.add(entry.resident());
        backend.window.released(self.now);
        backend.prefixes.seen(entry.history.as_deref(), u64::from(entry.uncached()) + u64::from(entry.expected));

        self.changed(to);
        self.counters.released += 1;
        self.counters.aged += u64::from(turn.aged);
        self.counters.stolen += u64::from(from != to);
        let (entry, backend) = (self.table.get(slot), &self.backends[to]);
        let facts = Facts {
            work: f64::from(entry.work),
            expected_output: entry.expected,
            boosted_arrival: self.keying.boosted_arrival(entry, turn.key.phi),
            aged: turn.aged,
            stolen: from != to,
        };
        actions.push(Action::Release { request: entry.id, backend: backend.id, facts });
        let (tenant, expected) = (entry.tenant(), self.keying.speed.seconds(u64::from(entry.uncached()), u64::from(entry.expected)));
        let service = self.shares.released(tenant, expected);
        self.served(tenant, service);
    }

    /// A tenant has now had this much. As long as one tenant waits alone no queue needs to know.
    pub(super) fn served(&mut self, tenant: Option<TenantId>, service: Service) {
        if !self.shares.compete() {
            return;
        }
        let waited_for = &self.attention.waited_for;
        for index in waited_for.iter(waited_for, true) {
            self.backends[index].queue.served(tenant, service);
        }
    }
}

fn speeds_known(backends: &[Backend]) -> bool {
    backends.iter().filter(|backend| backend.takes_requests()).all(|backend| backend.learner.speed().is_some())
}

/// One backend takes a request out of the queue of another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Theft {
    thief: usize,
    victim: usize,
    turn: Turn,
}
