//! Which backend's queue a request joins: filter, expected finish, seeded choice between equals.

use super::Scheduler;
use super::backend::Backend;
use super::event::{BackendId, Standing, Tokens};
use super::outcome::Reason;
use super::restrictions::{Restriction, RestrictionId};
use super::table::Entry;

/// What a request asks of a backend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    pub prompt: Tokens,
    /// Expected.
    pub output: Tokens,
}

impl Demand {
    pub fn of(entry: &Entry) -> Self {
        Demand { prompt: entry.uncached(), output: entry.expected }
    }
}

impl Scheduler {
    /// Which queue a waiting request should join, as an index.
    ///
    /// # Errors
    /// Why none may take it.
    pub(super) fn choose(&mut self, demand: Demand, restriction: RestrictionId) -> Result<usize, Reason> {
        let restriction = self.restrictions.get(restriction);
        let mut refusal = Reason::NoHealthyBackend;
        let mut best: Option<(usize, f64)> = None;
        let mut equals = 0;
        for (index, backend) in self.backends.iter().enumerate().filter(|(_, backend)| backend.takes_requests()) {
            if restriction.excluded.binary_search(&backend.id).is_ok() {
                if refusal == Reason::NoHealthyBackend {
                    refusal = Reason::NoOtherBackend;
                }
                continue;
            }
            if restriction.too_small.binary_search(&backend.id).is_ok() {
                refusal = Reason::TooLarge;
                continue;
            }
            let speed = self.speed_of(backend);
            let finish = backend.backlog(speed) + speed.seconds(u64::from(demand.prompt), u64::from(demand.output));
            match best {
                Some((_, earliest)) if finish > earliest => {}
                Some((_, earliest)) if finish == earliest => {
                    equals += 1;
                    if self.rng.one_in(equals) {
                        best = Some((index, finish));
                    }
                }
                _ => {
                    best = Some((index, finish));
                    equals = 1;
                }
            }
        }
        best.map(|(index, _)| index).ok_or(refusal)
    }

    /// What bars a request from backends of this pool.
    pub(super) fn restriction_of(&self, excluded: Vec<BackendId>, prompt: Tokens, max_output: Option<Tokens>) -> Restriction {
        Restriction { excluded, too_small: too_small(&self.backends, prompt, max_output) }
    }
}

/// The backends whose context length or KV cache is too small for a request. Prompt lengths are estimates: where the request seems too large for every
/// backend but a quarter less would do, it goes to the largest, whose engine knows the true length and answers in its own words.
fn too_small(backends: &[Backend], prompt: Tokens, max_output: Option<Tokens>) -> Vec<BackendId> {
    let needed = u64::from(prompt) + u64::from(max_output.unwrap_or(1).max(1));
    let present = || backends.iter().filter(|backend| backend.state.standing != Standing::Gone);
    let room = |backend: &Backend| {
        let context = backend.state.context_tokens.map_or(u64::MAX, u64::from);
        context.min(backend.state.kv_tokens.unwrap_or(u64::MAX))
    };
    let fits = |backend: &Backend| {
        let context = backend.state.context_tokens.map_or(u64::MAX, u64::from);
        needed <= context && u64::from(prompt) < backend.state.kv_tokens.unwrap_or(u64::MAX)
    };
    if present().all(fits) {
        return Vec::new();
    }
    if present().any(fits) {
        return present().filter(|backend| !fits(backend)).map(|backend| backend.id).collect();
    }
    let largest = present().map(room).max().unwrap_or(0);
    let hopeless = u64::from(prompt) * 3 / 4 >= largest;
    present().filter(|backend| hopeless || room(backend) < largest).map(|backend| backend.id).collect()
}
