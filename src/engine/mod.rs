//! A model of a continuous-batching engine: told what time it is, it says what tokens came out. No IO, no clock, no async.
//!
//! It works in iterations, as vLLM's scheduler does (`vllm/v1/core/sched/scheduler.py`). Each computes at most `max_batched_tokens` tokens: first for
//! the requests that run already, one token each while they decode and a chunk of their prompt before, then for waiting ones as long as slots, tokens
//! and KV blocks last. When blocks run out, a running request is preempted: it gives back its blocks, waits again and later recomputes its prompt and
//! what it had produced, unless it is swapped out to host memory ([`Profile::swap`]). How long an iteration takes is a linear formula ([`Timing`]). Orders that papers compare rank every request before each iteration and may
//! preempt for the sake of the order ([`Order`]).
//!
//! [`Engine::advance`] is the whole of it: complete the iterations that are over, begin the next. [`server`] runs it in real time behind HTTP.
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod blocks;
mod profile;
mod ranking;
#[cfg(feature = "gateway")]
pub mod server;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::scheduler::{RequestId, Time, Tokens};
use blocks::{Blocks, Shared};
pub use profile::{BLOCK_TOKENS, Boosting, Order, Profile, Step, Timing};
use ranking::Ranking;

/// What an engine is asked to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    pub prompt_tokens: Tokens,
    /// One hash for each full block of the prompt, of that block and everything before it. May be shorter than the prompt or empty.
    pub prefix_hashes: Vec<u64>,
    /// Tokens of the answer; 0 ends the request when its prompt has been computed, as an embedding does.
    pub output_tokens: Tokens,
    /// Lower is sooner; only [`Order::Priority`] looks at it.
    pub priority: i64,
}

/// Why a request cannot be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("{asked} tokens do not fit a context of {context}")]
    TooLong { asked: u64, context: Tokens },
    #[error("a request needs at least one prompt token")]
    Empty,
    #[error("a request with this id is already here")]
    Duplicate,
}

/// Something that happened to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub at: Time,
    pub id: RequestId,
    pub what: What,
}

/// See [`Event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Left the waiting queue; this many of its tokens were found in the prefix cache. Happens again after a preemption.
    Admitted { cached: Tokens },
    /// Back in the waiting queue, its KV blocks gone, or copied to host memory.
    Preempted,
    /// Has produced this many tokens in all; 1 is the first token.
    Token(Tokens),
    /// Is done and gone.
    Finished,
}

/// One iteration: what was computed and how long that takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Iteration {
    pub began: Time,
    pub ends: Time,
    /// Requests that got at least one token of the budget.
    pub sequences: u32,
    /// Prompt tokens, and tokens recomputed after a preemption.
    pub prefill_tokens: Tokens,
    /// Tokens of requests that decode: one each.
    pub decode_tokens: Tokens,
    /// KV tokens that attention reads: everything resident of these requests, what is being computed included.
    pub kv_tokens: u64,
}

/// Running totals, counted where vLLM counts them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Prompt tokens of requests whose prompt has been computed, cached ones included.
    pub prompt_tokens: u64,
    pub generation_tokens: u64,
    /// Tokens looked up in the prefix cache and found there, at first admissions only.
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub preemptions: u64,
    pub finished: u64,
    pub cancelled: u64,
    pub iterations: u64,
    /// Time spent in iterations that are over.
    pub busy: Duration,
}

/// A request's own state. `computed` counts tokens that have KV, `known` prompt and produced tokens; it decodes when only the newest lacks KV.
#[derive(Clone, Debug)]
struct Request {
    id: RequestId,
    computed: Tokens,
    known: Tokens,
    /// Tokens computed in the current iteration.
    taken: Tokens,
    /// Tokens that its blocks have room for.
    room: Tokens,
    prompt: Tokens,
    /// Value of `known` at which it is done.
    target: Tokens,
    private: u32,
    shared: Vec<Shared>,
    hashes: Vec<u64>,
    /// What the order goes by. Under a ranking it is brought up to date before each iteration for those that run.
    priority: i64,
    /// Value of `known` when it was last admitted.
    since: Tokens,
    sequence: u64,
    arrived: Time,
    preempted: bool,
}

impl Request {
    fn waiting_key(&self, place: u32) -> WaitingKey {
        (self.priority, self.sequence, place)
    }

    /// Whether what it computes in this iteration is its newest token and nothing else.
    fn decodes(&self) -> bool {
        self.known > self.prompt && self.known - self.computed == 1
    }
}

/// Priority, order of arrival, place in the slab.
type WaitingKey = (i64, u64, u32);

/// The tokens of an iteration while it is put together.
#[derive(Default)]
struct Batch {
    sequences: u32,
    prefill: Tokens,
    decode: Tokens,
    kv: u64,
}

impl Batch {
    fn add(&mut self, request: &Request) {
        self.sequences += 1;
        self.kv += u64::from(request.computed + request.taken);
        if request.decodes() {
            self.decode += 1;
        } else {
            self.prefill += request.taken;
        }
    }

    fn remove(&mut self, request: &Request) {
        self.sequences -= 1;
        self.kv -= u64::from(request.computed + request.taken);
        if request.decodes() {
            self.decode -= 1;
        } else {
            self.prefill -= request.taken;
        }
    }
}

/// The engine. Deterministic: the same calls give the same events.
#[derive(Clone, Debug)]
pub struct Engine {
    profile: Profile,
    /// Slab of requests; `running`, `waiting` and `places` point into it.
    requests: Vec<Request>,
    vacant: Vec<u32>,
    places: BTreeMap<RequestId, u32>,
    waiting: BTreeSet<WaitingKey>,
    /// For orders that rank every request before each iteration.
    ranking: Option<Ranking>,
    /// In order of admission.
    running: Vec<u32>,
    blocks: Blocks,
    current: Option<Iteration>,
    arrivals: u64,
    counters: Counters,
    /// KV tokens copied to or from host memory since the last iteration began.
    swapped: u64,
}

impl Engine {
    /// An idle engine.
    pub fn new(profile: Profile) -> Self {
        Engine {
            ranking: Ranking::new(&profile),
            profile,
            requests: Vec::new(),
            vacant: Vec::new(),
            places: BTreeMap::new(),
            waiting: BTreeSet::new(),
            running: Vec::new(),
            blocks: Blocks::new(profile.kv_blocks),
            current: None,
            arrivals: 0,
            counters: Counters::default(),
            swapped: 0,
        }
    }

    /// What it runs on.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Requests that hold a slot.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Requests that wait for one, preempted ones included.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// KV blocks that requests hold. Cached blocks that nobody holds are free.
    pub fn kv_blocks_held(&self) -> u32 {
        self.blocks.held()
    }

    /// The share of KV blocks that requests hold, 0 to 1.
    pub fn kv_usage(&self) -> f64 {
        f64::from(self.blocks.held()) / f64::from(self.profile.kv_blocks.max(1))
    }

    /// The iteration under way.
    pub fn iteration(&self) -> Option<&Iteration> {
        self.current.as_ref()
    }

    /// Totals since the beginning.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Puts a request into the waiting queue. It is considered by the next iteration that begins at or after `now`; call [`Engine::advance`] afterwards,
    /// since an idle engine has none.
    ///
    /// # Errors
    /// Refuses what could never run, and an id that is already here; nothing changes then.
    pub fn submit(&mut self, now: Time, id: RequestId, work: Work) -> Result<(), Refused> {
        let context = self.profile.context();
        let asked = u64::from(work.prompt_tokens) + u64::from(work.output_tokens);
        if asked > u64::from(context) {
            return Err(Refused::TooLong { asked, context });
        }
        if work.prompt_tokens == 0 {
            return Err(Refused::Empty);
        }
        if self.places.contains_key(&id) {
            return Err(Refused::Duplicate);
        }
        let mut hashes = if self.profile.prefix_cache { work.prefix_hashes } else { Vec::new() };
        hashes.truncate((work.prompt_tokens / BLOCK_TOKENS) as usize);
        let mut request = Request {
            id,
            computed: 0,
            known: work.prompt_tokens,
            taken: 0,
            room: 0,
            prompt: work.prompt_tokens,
            target: work.prompt_tokens + work.output_tokens,
            private: 0,
            shared: Vec::with_capacity(hashes.len()),
            hashes,
            priority: if self.profile.order == Order::Priority { work.priority } else { 0 },
            since: work.prompt_tokens,
            sequence: self.arrivals,
            arrived: now,
            preempted: false,
        };
        if let Some(ranking) = &self.ranking {
            request.priority = ranking.key(&request);
        }
        self.arrivals += 1;
        let place = match self.vacant.pop() {
            Some(place) => {
                self.requests[place as usize] = request;
                place
            }
            None => {
                self.requests.push(request);
                self.requests.len() as u32 - 1
            }
        };
        self.places.insert(id, place);
        self.waiting.insert(self.requests[place as usize].waiting_key(place));
        Ok(())
    }

    /// Drops a request, wherever it is, and frees its slot and blocks at once; the iteration under way takes as long as it would have.
    /// Whether there was one.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let Some(&place) = self.places.get(&id) else { return false };
        let key = self.requests[place as usize].waiting_key(place);
        if !self.waiting.remove(&key) {
            self.running.retain(|&running| running != place);
        }
        self.leave(place);
        self.counters.cancelled += 1;
        true
    }

    /// Completes every iteration that ends at or before `now`, each begun when the one before it ended, and begins the next one; an idle engine with
    /// work begins at `now`. What happened is appended to `events`, in order. Returns when to call again, `None` when there is nothing to do.
    pub fn advance(&mut self, now: Time, events: &mut Vec<Event>) -> Option<Time> {
        while let Some(Iteration { began, ends, .. }) = self.current {
            if ends > now {
                return Some(ends);
            }
            self.complete(ends, events);
            self.counters.iterations += 1;
            self.counters.busy += ends.since(began);
            self.begin(ends, events);
        }
        self.begin(now, events);
        self.current.map(|iteration| iteration.ends)
    }

    /// Gives every request of the iteration its token, and lets the finished ones go.
    fn complete(&mut self, now: Time, events: &mut Vec<Event>) {
        let mut kept = 0;
        for at in 0..self.running.len() {
            let place = self.running[at];
            let request = &mut self.requests[place as usize];
            if request.taken == 0 {
                self.running[kept] = place;
                kept += 1;
                continue;
            }
            request.computed += request.taken;
            request.taken = 0;
            let mut done = false;
            if request.computed == request.known {
                if request.known == request.prompt {
                    self.counters.prompt_tokens += u64::from(request.prompt);
                }
                if request.known < request.target {
                    request.known += 1;
                    self.counters.generation_tokens += 1;
                    events.push(Event { at: now, id: request.id, what: What::Token(request.known - request.prompt) });
                }
                done = request.known == request.target;
            }
            if done {
                events.push(Event { at: now, id: request.id, what: What::Finished });
                if let Some(ranking) = &mut self.ranking {
                    ranking.finished(now, request);
                }
                self.counters.finished += 1;
                self.leave(place);
            } else {
                self.running[kept] = place;
                kept += 1;
            }
        }
        self.running.truncate(kept);
    }

    /// Puts the next iteration together: running requests first, then waiting ones unless somebody had to be preempted.
    fn begin(&mut self, now: Time, events: &mut Vec<Event>) {
        let mut budget = self.profile.max_batched_tokens;
        let mut batch = Batch::default();
        if self.profile.order == Order::PrefillFirst {
            self.admit_waiting(true, now, &mut budget, &mut batch, events);
        } else if self.ranking.is_some() {
            self.rank(now, events);
        }
        if batch.prefill == 0 {
            let preempted = self.continue_running(now, &mut budget, &mut batch, events);
            if !preempted && self.profile.order != Order::PrefillFirst {
                self.admit_waiting(false, now, &mut budget, &mut batch, events);
            }
        }
        if batch.sequences == 0 {
            self.current = None;
            return;
        }
        // Copies are over before anything is computed.
        let copies = Duration::from_secs_f64(self.profile.swap.unwrap_or(0.0) * std::mem::take(&mut self.swapped) as f64);
        self.current = Some(Iteration {
            began: now,
            ends: now.after(copies + self.profile.timing.iteration(batch.sequences, batch.prefill, batch.kv)),
            sequences: batch.sequences,
            prefill_tokens: batch.prefill,
            decode_tokens: batch.decode,
            kv_tokens: batch.kv,
        });
    }

    /// Whether somebody had to be preempted.
    fn continue_running(&mut self, now: Time, budget: &mut Tokens, batch: &mut Batch, events: &mut Vec<Event>) -> bool {
        let mut preempted = false;
        let mut at = 0;
        'running: while at < self.running.len() && *budget > 0 {
            let place = self.running[at];
            let request = &mut self.requests[place as usize];
            if request.taken > 0 {
                // Swapped in for this iteration.
                at += 1;
                continue;
            }
            let take = (request.known - request.computed).min(*budget);
            let end = request.computed + take;
            if end > request.room || request.shared.len() < request.hashes.len() {
                while !self.grow(place, end) {
                    preempted = true;
                    let victim = self.victim();
                    let victim_place = self.running.remove(victim);
                    let request = &mut self.requests[victim_place as usize];
                    if request.taken > 0 {
                        *budget += request.taken;
                        batch.remove(request);
                        request.taken = 0;
                    }
                    self.preempt(victim_place, now, events);
                    if victim < at {
                        at -= 1;
                    } else if victim == at {
                        // It gave way itself. vLLM leaves those behind it out of this iteration; here they go on with what blocks they have.
                        continue 'running;
                    }
                }
            }
            let request = &mut self.requests[place as usize];
            request.taken = take;
            *budget -= take;
            batch.add(request);
            at += 1;
        }
        preempted
    }

    /// `whole`: prompts go in one piece, the first of an iteration whatever its length.
    fn admit_waiting(&mut self, whole: bool, now: Time, budget: &mut Tokens, batch: &mut Batch, events: &mut Vec<Event>) {
        while *budget > 0 && self.running.len() < self.profile.max_num_seqs as usize {
            let Some(&key) = self.waiting.first() else { return };
            let place = key.2;
            let request = &mut self.requests[place as usize];
            if request.arrived > now {
                return;
            }
            // At least one token must be computed to get the next one.
            let usable = ((request.known - 1) / BLOCK_TOKENS).min(request.hashes.len() as u32);
            let (hits, idle) = self.blocks.lookup(&request.hashes[..usable as usize]);
            let cached = hits * BLOCK_TOKENS;
            let kept = request.computed.max(cached);
            let mut take = (request.known - kept).min(*budget);
            if whole && kept + take < request.known {
                if batch.sequences > 0 {
                    return;
                }
                take = request.known - kept;
            }
            let fresh = (kept + take).div_ceil(BLOCK_TOKENS) - hits;
            if fresh + idle > self.blocks.available() {
                return;
            }
            self.waiting.remove(&key);
            for &hash in &request.hashes[..hits as usize] {
                request.shared.extend(self.blocks.hold(hash));
            }
            request.room = cached;
            self.swapped += u64::from(kept - cached);
            request.computed = kept;
            request.taken = take;
            request.since = request.known;
            if !request.preempted {
                self.counters.prefix_queries += u64::from(request.known);
                self.counters.prefix_hits += u64::from(cached);
            }
            events.push(Event { at: now, id: request.id, what: What::Admitted { cached } });
            let grown = self.grow(place, kept + take);
            debug_assert!(grown, "availability was checked");
            *budget = budget.saturating_sub(take);
            batch.add(&self.requests[place as usize]);
            self.running.push(place);
        }
    }

    /// Gives a request blocks up to token `end` and publishes the full prompt blocks among them. Changes nothing and says `false` if there are too few.
    fn grow(&mut self, place: u32, end: Tokens) -> bool {
        let request = &mut self.requests[place as usize];
        let blocks = end.div_ceil(BLOCK_TOKENS);
        let missing = blocks.saturating_sub(request.room / BLOCK_TOKENS);
        if missing > self.blocks.available() {
            return false;
        }
        self.blocks.take(missing);
        request.private += missing;
        request.room += missing * BLOCK_TOKENS;
        let full = ((end / BLOCK_TOKENS) as usize).min(request.hashes.len());
        for &hash in &request.hashes[request.shared.len().min(full)..full] {
            request.private -= 1;
            request.shared.push(self.blocks.publish(hash));
        }
        true
    }

    /// The position in `running` of whoever is preempted next.
    fn victim(&self) -> usize {
        let last = self.running.len() - 1;
        match self.profile.order {
            Order::Fcfs | Order::PrefillFirst => last,
            _ => {
                let rank = |&at: &usize| {
                    let request = &self.requests[self.running[at] as usize];
                    (request.priority, request.sequence)
                };
                (0..=last).max_by_key(rank).unwrap_or(last)
            }
        }
    }

    fn preempt(&mut self, place: u32, now: Time, events: &mut Vec<Event>) {
        let request = &mut self.requests[place as usize];
        self.blocks.release(&request.shared, request.private);
        request.shared.clear();
        request.private = 0;
        request.room = 0;
        if self.profile.swap.is_some() {
            self.swapped += u64::from(request.computed);
        } else {
            request.computed = 0;
        }
        request.preempted = true;
        events.push(Event { at: now, id: request.id, what: What::Preempted });
        let key = request.waiting_key(place);
        self.waiting.insert(key);
        self.counters.preemptions += 1;
    }

    /// Frees what a request that is neither waiting nor running any more holds.
    fn leave(&mut self, place: u32) {
        let request = &mut self.requests[place as usize];
        self.blocks.release(&request.shared, request.private);
        request.shared.clear();
        request.private = 0;
        self.places.remove(&request.id);
        self.vacant.push(place);
    }
}

#[cfg(test)]
mod tests;
