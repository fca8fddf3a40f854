//! The whole interface of the scheduler on one screen: what can happen to it and what it can ask for.

use std::sync::Arc;

use super::history::History;
use super::outcome::{Ending, Reason};
use super::policy::{Limits, Policy};
use super::score::{Scored, Weight};
use super::time::Time;

/// A count of tokens.
pub type Tokens = u32;

/// One stay in the queue of one pool. A request that is sent again after a failed attempt gets a new id and keeps its arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A backend of the pool. Ids are never reused within a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BackendId(pub u32);

/// A served model: the key of a calibration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId(pub u32);

/// Who is served: the key of a correction for prompts that look shorter or longer than they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

/// A beginning that a prompt shares with others: a conversation so far, a long system prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// Equal for equal beginnings; whatever the edge finds useful to hash.
    pub hash: u64,
    /// How many of the prompt's tokens it covers.
    pub tokens: Tokens,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A request wants to run.
    Arrived(Request),
    /// The client of a waiting or running request left. For a running one only [`Event::Finished`] frees its slot.
    Cancelled(RequestId),
    /// A running request has produced this many output tokens so far (cumulative).
    Progress(RequestId, Tokens),
    /// A released request has left its backend.
    Finished(RequestId, Ending),
    /// A backend joined the pool or its state changed. The value replaces what was known.
    BackendChanged(BackendId, BackendState),
    /// The backend's own numbers, as of now. Numbers that are too old are sent as unknown.
    LoadReported(BackendId, Load),
    /// Another policy applies from now on.
    PolicyChanged(Policy),
    /// Other limits apply from now on. Requests already waiting stay.
    LimitsChanged(Limits),
    /// Nothing is accepted any more; what waits may still run.
    DrainStarted,
    /// Time has passed: call this at [`super::Scheduler::next_deadline`].
    Tick,
}

/// What to do about it, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Send the request to the backend; it holds one slot there until [`Event::Finished`].
    Release { request: RequestId, backend: BackendId, facts: Facts },
    /// Turn the request away.
    Reject { request: RequestId, reason: Reason, retry_after: RetryAfter },
}

/// Predicted seconds until the queue has drained far enough to accept more; at least 1.
pub type RetryAfter = u32;

/// Why a release happened when it did: for headers, logs and explanations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    /// Expected work in capacity-seconds, as keyed.
    pub work: f64,
    /// Expected output tokens.
    pub expected_output: Tokens,
    /// Its boosted arrival in microseconds on the scheduler's clock, which may lie before the clock's start; the plain arrival under orders that boost nothing.
    /// Absolute, so that an engine with a priority field can merge the orders of several gateways.
    pub boosted_arrival: i64,
    /// Released from the aged FIFO rather than by key.
    pub aged: bool,
    /// Taken from the queue of another backend.
    pub stolen: bool,
}

/// A request as the scheduler sees it. The prompt itself never comes here.
#[derive(Clone, Debug)]
pub struct Request {
    /// Unique within the pool.
    pub id: RequestId,
    /// When the client's request arrived; kept when it is sent again.
    pub arrived: Time,
    /// Whose lengths to expect.
    pub model: ModelId,
    /// The ranker's opinion; `None` is neutral.
    pub score: Option<Scored>,
    /// Estimated prompt tokens.
    pub prompt_tokens: Tokens,
    /// The client's limit on output tokens.
    pub max_output: Option<Tokens>,
    /// Output already produced for this piece of work (a session, or an answer that is being continued).
    pub attained: Tokens,
    /// How much ahead of others it goes, by its priority: it counts as so many times less work. 1 is normal.
    pub weight: Weight,
    /// Its tenant's share of the pool relative to other tenants that wait; 1 is normal.
    pub share: Weight,
    /// When waiting becomes pointless.
    pub expires: Time,
    /// Bytes of the body that waits with it.
    pub bytes: u32,
    /// Produces no decode work (embeddings and other unscored paths): only its prompt counts.
    pub unscored: bool,
    /// Backends already tried.
    pub excluded: Vec<BackendId>,
    /// Who asks, where known.
    pub tenant: Option<TenantId>,
    /// What came before it, where known. What a backend may have in its prefix cache steers placement and lowers the expected work; what its session has attained
    /// lowers its boost.
    pub history: Option<Arc<History>>,
    /// The true output length: known in simulations only, read by the oracle policies only.
    pub oracle_output: Option<Tokens>,
}

/// What is known of a backend, apart from its load.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendState {
    /// Whether it may get requests.
    pub standing: Standing,
    /// How many requests it may hold.
    pub slots: Slots,
    /// Share of the pool's traffic relative to its siblings where their speed is not known yet; 1 is normal.
    pub weight: Weight,
    /// Tokens that fit its KV cache, where known.
    pub kv_tokens: Option<u64>,
    /// Longest context (prompt + output) it serves, where known.
    pub context_tokens: Option<Tokens>,
    /// Whether it keeps the beginnings of prompts that it has computed.
    pub prefix_cache: bool,
}

/// Whether a backend may get requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Standing {
    /// Takes requests.
    Healthy,
    /// Takes none until a probe succeeds; what waits for it is placed again.
    Ejected,
    /// Was ejected, answers again: takes one request at a time until one completes.
    Probing,
    /// Takes none; what runs there finishes, what waits for it is placed again.
    Draining,
    /// Left the pool. Its id never comes back.
    Gone,
}

/// The release window's setting for one backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slots {
    /// Exactly this many.
    Fixed(u32),
    /// Found out: starts at `initial`, never above `max`. The engine's own slot count is a good `initial`.
    Auto { initial: u32, max: u32 },
}

/// An engine's own numbers. `None` is unknown, never zero.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests in the running batch.
    pub running: Option<u32>,
    /// Requests in the engine's own waiting queue.
    pub waiting: Option<u32>,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_used: Option<f32>,
}
