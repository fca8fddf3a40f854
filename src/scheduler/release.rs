//! Who goes next, as soon as there is room: each backend from its own queue, and an idle one from its siblings'.

use super::Scheduler;
use super::event::{Action, Facts};
use super::queue::Turn;
use super::score::micros;
use super::table::{Entry, Stage};

impl Scheduler {
    /// Releases whatever there is room for.
    pub(super) fn settle(&mut self, actions: &mut Vec<Action>) {
        for index in 0..self.backends.len() {
            while let Some(turn) = self.own_turn(index) {
                self.release(index, index, turn, actions);
            }
        }
        while let Some((thief, victim, turn)) = self.steal() {
            self.release(victim, thief, turn, actions);
        }
    }

    /// The next request of a backend's own queue, if there is room for it.
    fn own_turn(&self, index: usize) -> Option<Turn> {
        let backend = &self.backends[index];
        if !backend.has_slot() {
            return None;
        }
        backend.queue.next(self.now, self.aging, &self.table)
    }

    /// The idlest backend with room and an empty queue, the sibling with the smallest key for it, and that request.
    fn steal(&self) -> Option<(usize, usize, Turn)> {
        if self.waiting() == 0 {
            return None;
        }
        let mut best: Option<(f64, (usize, usize, Turn))> = None;
        for (thief, backend) in self.backends.iter().enumerate().filter(|(_, backend)| backend.has_slot() && backend.queue.is_empty()) {
            let busy = backend.backlog(self.speed_of(backend));
            if best.as_ref().is_some_and(|(least, _)| *least <= busy) {
                continue;
            }
            let found = self
                .backends
                .iter()
                .enumerate()
                .filter_map(|(victim, sibling)| {
                    let turn = sibling.queue.next_for(backend.id, self.now, self.aging, &self.restrictions, &self.table)?;
                    Some((victim, turn))
                })
                .min_by_key(|(_, turn)| turn.key);
            if let Some((victim, turn)) = found {
                best = Some((busy, (thief, victim, turn)));
            }
        }
        best.map(|(_, steal)| steal)
    }

    /// Takes a request out of the queue of backend `from` and gives it a slot on backend `to`.
    fn release(&mut self, from: usize, to: usize, turn: Turn, actions: &mut Vec<Action>) {
        let slot = turn.key.place.slot();
        self.leave_queue(slot);
        self.backends[from].queue.released(self.aging, turn.aged);

        let entry = self.table.get_mut(slot);
        entry.backend = to as u32;
        entry.stage = Stage::Running { released: self.now, produced: 0, remaining: entry.expected };
        let backend = &mut self.backends[to];
        backend.in_flight += 1;
        backend.running.add(entry.uncached(), entry.expected);

        let facts = facts(entry, turn, from != to);
        self.counters.released += 1;
        self.counters.aged += u64::from(facts.aged);
        self.counters.stolen += u64::from(facts.stolen);
        actions.push(Action::Release { request: entry.id, backend: backend.id, facts });
    }
}

fn facts(entry: &Entry, turn: Turn, stolen: bool) -> Facts {
    Facts { work: f64::from(entry.work), expected_output: entry.expected, boosted_arrival: micros(entry.arrived), aged: turn.aged, stolen }
}
