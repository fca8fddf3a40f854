//! Who goes next, as soon as there is room: each backend from its own queue, and an idle one from its siblings'.

use super::Scheduler;
use super::event::{Action, Facts, TenantId};
use super::queue::Turn;
use super::shares::Service;
use super::table::Stage;

impl Scheduler {
    /// Releases whatever there is room for.
    pub(super) fn settle(&mut self, actions: &mut Vec<Action>) {
        // Hundreds of backends are looked at after every event, few of them have something to do.
        while self.waiting() > 0 {
            let before = self.counters.released;
            for index in 0..self.backends.len() {
                if !self.backends[index].queue.is_empty() {
                    self.release_own(index, actions);
                }
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
        let demand = self.waiting() > 0;
        for backend in &mut self.backends {
            backend.learner.saturated(self.now, backend.is_saturated());
            backend.window.settled(self.now, backend.in_flight, demand);
        }
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
        for (thief, backend) in self.backends.iter().enumerate().filter(|(_, backend)| backend.has_slot() && backend.queue.is_empty()) {
            let busy = backend.backlog();
            if best.as_ref().is_some_and(|(least, _)| *least <= busy) {
                continue;
            }
            let turns = self.backends.iter().enumerate().filter_map(|(victim, sibling)| {
                let turn = sibling.queue.next_for(backend.id, self.now, self.aging, &self.restrictions, &self.table)?;
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
        entry.cached = backend.cached(entry.history.as_deref(), entry.prompt);
        entry.stage = Stage::Running { released: self.now, produced: 0, remaining: entry.expected };
        backend.in_flight += 1;
        backend.running.add(entry.uncached(), entry.expected);
        backend.resident.add(entry.resident());
        backend.window.released(self.now);
        backend.prefixes.seen(entry.history.as_deref(), u64::from(entry.uncached()) + u64::from(entry.expected));

        self.counters.released += 1;
        self.counters.aged += u64::from(turn.aged);
        self.counters.stolen += u64::from(from != to);
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

    /// A tenant has now had this much.
    pub(super) fn served(&mut self, tenant: Option<TenantId>, service: Service) {
        for backend in self.backends.iter_mut().filter(|backend| !backend.queue.is_empty()) {
            backend.queue.served(tenant, service);
        }
    }
}

/// One backend takes a request out of the queue of another.
#[derive(Clone, Copy, Debug)]
pub(super) struct Theft {
    thief: usize,
    victim: usize,
    turn: Turn,
}
