//! Backends come, change and go; what waits for one that goes is placed again.

use std::time::Duration;

use super::Scheduler;
use super::arrivals::waiting;
use super::backend::Backend;
use super::event::{Action, BackendId, BackendState, Load, Standing, Tokens};
use super::placement::{Demand, too_small};
use super::restrictions::Restriction;
use super::table::{Entry, Stage};

impl Scheduler {
    /// A backend joined, or its state changed.
    pub(super) fn backend_changed(&mut self, id: BackendId, state: BackendState, actions: &mut Vec<Action>) {
        let index = match self.by_id.get(&id) {
            // It is gone already.
            None if state.standing == Standing::Gone => return,
            None => {
                self.by_id.insert(id, self.backends.len());
                self.backends.push(Backend::new(id, state, self.keying.speed));
                self.backends.len() - 1
            }
            Some(&index) => {
                let backend = &mut self.backends[index];
                backend.window.reconfigure(state.slots);
                if state.standing == Standing::Ejected {
                    // It may have started anew.
                    backend.prefixes.forget();
                }
                backend.state = state;
                index
            }
        };
        let backend = &mut self.backends[index];
        backend.prefixes.set_present(backend.state.prefix_cache);
        self.update_speeds();
        self.set_leads();
        let sizes = Sizes::of(&self.backends);
        let before = std::mem::replace(&mut self.sizes, sizes);
        if self.sizes != before {
            self.restrict_again(actions);
            if self.sizes.context != before.context {
                self.rebuild_keys();
            }
        }
        if !self.backends[index].takes_requests() {
            for place in self.backends[index].queue.places() {
                self.place_again(place.slot(), actions);
            }
            self.forget_if_gone(index);
        }
        self.all_changed();
    }

    /// Moves a waiting request to the queue that suits it best now, or turns it away.
    fn place_again(&mut self, slot: u32, actions: &mut Vec<Action>) {
        self.leave_queue(slot);
        let entry = self.table.get(slot);
        let (demand, restriction) = (Demand::of(entry), waiting(entry).0.lane.restriction);
        match self.choose(&demand, restriction) {
            Ok(index) => {
                let entry = self.table.get_mut(slot);
                entry.backend = index as u32;
                entry.cached = self.backends[index].cached(&entry.sought());
                self.join_queue(slot);
                self.counters.placed_again += 1;
            }
            Err(reason) => {
                let entry = self.table.remove(slot);
                self.reject(entry.id, reason, self.queued_seconds(), actions);
            }
        }
    }

    /// Looks again at which backends are too small for what waits.
    fn restrict_again(&mut self, actions: &mut Vec<Action>) {
        let stages: Vec<(u32, Stage)> = self.table.iter().map(|entry| (entry.place.slot(), entry.stage)).collect();
        for (slot, stage) in stages {
            let Stage::Waiting { phi, expires, restriction } = stage else { continue };
            let entry = self.table.get(slot);
            let old = self.restrictions.get(restriction);
            let too_small = too_small(&self.backends, &self.sizes, entry.prompt, entry.max_output());
            if too_small == old.too_small {
                continue;
            }
            let restriction = self.restrictions.intern(Restriction { excluded: old.excluded.clone(), too_small });
            self.leave_queue(slot);
            let entry = self.table.get_mut(slot);
            entry.stage = Stage::Waiting { phi, expires, restriction };
            let home = entry.backend as usize;
            self.join_queue(slot);
            if self.restrictions.get(restriction).bars(self.backends[home].id) {
                self.place_again(slot, actions);
            }
        }
    }

    /// A backend told its numbers.
    pub(super) fn load_reported(&mut self, id: BackendId, load: Load) {
        let demand = self.waiting() > 0;
        if let Some(&index) = self.by_id.get(&id) {
            let backend = &mut self.backends[index];
            backend.load = load;
            let iteration = Duration::try_from_secs_f64(f64::from(backend.in_flight) * backend.speed.output).unwrap_or_default();
            backend.window.reported(self.now, load, backend.in_flight, demand, iteration);
            self.changed(index);
        }
    }

    /// Drops what is known of a backend that left the pool, once nothing runs there.
    pub(super) fn forget_if_gone(&mut self, index: usize) {
        let backend = &self.backends[index];
        if backend.state.standing != Standing::Gone || backend.in_flight > 0 {
            return;
        }
        self.by_id.remove(&backend.id);
        self.backends.remove(index);
        for position in self.by_id.values_mut().filter(|position| **position > index) {
            *position -= 1;
        }
        let moved = |entry: &&mut Entry| entry.backend > index as u32;
        self.table.iter_mut().filter(moved).for_each(|entry| entry.backend -= 1);
        self.all_changed();
    }
}

/// What decides which backends are too small for a request.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Sizes {
    each: Vec<(BackendId, Option<Tokens>, Option<u64>)>,
    /// The longest context, where known.
    context: Option<Tokens>,
    /// The shortest context and the smallest KV cache, where any is known.
    least: (Option<Tokens>, Option<u64>),
}

impl Sizes {
    pub fn of(backends: &[Backend]) -> Self {
        let present = backends.iter().filter(|backend| backend.state.standing != Standing::Gone);
        let each: Vec<_> = present.map(|backend| (backend.id, backend.state.context_tokens, backend.state.kv_tokens)).collect();
        let contexts = || each.iter().filter_map(|(_, context, _)| *context);
        let (context, least) = (contexts().max(), (contexts().min(), each.iter().filter_map(|(_, _, kv)| *kv).min()));
        // Where nothing is limited nothing can be too small, whoever is there.
        Sizes { each: if least == (None, None) { Vec::new() } else { each }, context, least }
    }

    /// Whether every backend has room for a prompt, and for so many tokens with its answer.
    pub fn fit(&self, prompt: u64, needed: u64) -> bool {
        let (context, kv) = self.least;
        context.is_none_or(|context| needed <= u64::from(context)) && kv.is_none_or(|kv| prompt < kv)
    }
}
