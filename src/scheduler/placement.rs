//! Which backend's queue a request joins: filter, expected finish, seeded choice between equals.

use super::Scheduler;
use super::backend::Backend;
use super::event::{BackendId, Standing, Tokens};
use super::membership::Sizes;
use super::outcome::Reason;
use super::prefixes::Sought;
use super::restrictions::RestrictionId;
use super::table::Entry;

/// What a second saved counts where nobody has to wait. There a backlog is what runs beside a request: it takes a share of the engine and no turn, so a second of it
/// costs less than a second. Measured on conversations at loads from 0.5 to 1.5 (docs/simulator.md): at 1 a conversation leaves its cache for the slightest
/// difference, at 10 it stays with a slow backend for too long.
const BESIDE: f64 = 4.0;

/// What a request asks of a backend.
#[derive(Debug)]
pub(super) struct Demand {
    prompt: Tokens,
    sought: Sought,
    /// Expected.
    output: Tokens,
}

impl Demand {
    pub fn of(entry: &Entry) -> Self {
        Demand { prompt: entry.prompt, sought: entry.sought(), output: entry.expected }
    }
}

impl Scheduler {
    /// Which queue a waiting request should join, as an index: of the backends that may take it, the one that would finish it first.
    ///
    /// # Errors
    /// Why none may take it.
    pub(super) fn choose(&mut self, demand: &Demand, restriction: RestrictionId) -> Result<usize, Reason> {
        let (open, restriction) = (restriction == RestrictionId::NONE, self.restrictions.get(restriction));
        let mut refusal = Reason::NoHealthyBackend;
        // Nothing is later than NaN, or equal to it: the first one is the best so far.
        let (mut best, mut earliest, mut equals) = (None, f64::NAN, 0);
        let (prompt, output, most) = (f64::from(demand.prompt), f64::from(demand.output), demand.sought.most());
        for (index, backend) in self.backends.iter().enumerate().filter(|(_, backend)| backend.takes_requests()) {
            if !open && restriction.excluded.binary_search(&backend.id).is_ok() {
                if refusal == Reason::NoHealthyBackend {
                    refusal = Reason::NoOtherBackend;
                }
                continue;
            }
            if !open && restriction.too_small.binary_search(&backend.id).is_ok() {
                refusal = Reason::TooLarge;
                continue;
            }
            let mut finish = backend.backlog() + (backend.speed.prompt * prompt + backend.speed.output * output);
            if most > 0 {
                let saved = |cached| backend.speed.prompt * f64::from(cached) * if backend.starts_at_once() { BESIDE } else { 1.0 };
                // A cache that could not make it the best is not searched.
                if finish - saved(most) > earliest {
                    continue;
                }
                finish -= saved(backend.cached(&demand.sought));
            }
            if finish > earliest {
                continue;
            }
            if finish == earliest {
                equals += 1;
                if self.rng.one_in(equals) {
                    best = Some(index);
                }
            } else {
                (best, earliest, equals) = (Some(index), finish, 1);
            }
        }
        best.ok_or(refusal)
    }
}

/// The backends whose context length or KV cache is too small for a request. Prompt lengths are estimates: where the request seems too large for every
/// backend but a quarter less would do, it goes to the largest, whose engine knows the true length and answers in its own words.
pub(super) fn too_small(backends: &[Backend], sizes: &Sizes, prompt: Tokens, max_output: Option<Tokens>) -> Vec<BackendId> {
    let needed = u64::from(prompt) + u64::from(max_output.unwrap_or(1).max(1));
    if sizes.fit(u64::from(prompt), needed) {
        return Vec::new();
    }
    let present = || backends.iter().filter(|backend| backend.state.standing != Standing::Gone);
    let context = |backend: &Backend| backend.state.context_tokens.map_or(u64::MAX, u64::from);
    let kv = |backend: &Backend| backend.state.kv_tokens.unwrap_or(u64::MAX);
    let fits = |backend: &Backend| needed <= context(backend) && u64::from(prompt) < kv(backend);
    if present().any(fits) {
        return present().filter(|backend| !fits(backend)).map(|backend| backend.id).collect();
    }
    let room = |backend: &Backend| context(backend).min(kv(backend));
    let largest = present().map(room).max().unwrap_or(0);
    let hopeless = u64::from(prompt) * 3 / 4 >= largest;
    present().filter(|backend| hopeless || room(backend) < largest).map(|backend| backend.id).collect()
}
