//! What can be seen of a pool from outside: plain values for the admin page and the metrics.

use super::event::{BackendId, Load, ModelId, Standing};
use super::outcome::Reason;
use super::policy::Order;
use super::speed::Speed;

/// One pool at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolView {
    /// What the main queue is sorted by.
    pub order: Order,
    /// Whether the order above or the one of overload applies.
    pub mode: Mode,
    /// Requests that wait.
    pub waiting: usize,
    /// Bytes of the bodies that wait with them.
    pub waiting_bytes: u64,
    /// Of those that wait, how many are aged.
    pub aged: usize,
    /// Requests that hold a slot.
    pub in_flight: u32,
    /// The decay rate of the boost in 1/s, as used in keys.
    pub gamma: f64,
    /// B: how much later, in seconds, a request may arrive and still overtake one of the same weight. Void in overload.
    pub max_overtake: f64,
    /// Predicted seconds until everything that waits has been started.
    pub backlog: f64,
    /// Mean expected work of a request in capacity-seconds.
    pub mean_work: f64,
    /// Seconds of capacity per token, as used in keys.
    pub speed: Speed,
    /// Whether nothing is accepted any more.
    pub draining: bool,
    /// In the order in which they joined; those that are gone stay until they are empty.
    pub backends: Vec<BackendView>,
    /// What is known of the lengths of each model's answers.
    pub models: Vec<ModelView>,
    pub counters: Counters,
}

/// Which order applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The policy's own.
    Normal,
    /// Work alone, beside the aged share.
    Overload,
}

impl Mode {
    /// The stable lower-case name used in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Mode::Normal => "normal",
            Mode::Overload => "overload",
        }
    }
}

/// One backend at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendView {
    pub id: BackendId,
    pub standing: Standing,
    /// Requests in its queue.
    pub waiting: usize,
    /// Requests that hold one of its slots.
    pub in_flight: u32,
    /// How many it may hold in this standing.
    pub window: u32,
    /// Predicted seconds of work in its queue and in flight.
    pub backlog: f64,
    /// Seconds of its capacity per token.
    pub speed: Speed,
    /// Whether the speed was learnt from it, or is assumed.
    pub speed_learnt: bool,
    /// Its own numbers, as last reported.
    pub load: Load,
}

/// What is known of one model's answers.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelView {
    pub model: ModelId,
    /// Answers learnt from, older ones counting less.
    pub samples: f64,
    /// Their mean length in tokens, cut answers taken into account.
    pub mean_output: f64,
    /// Kendall's tau-b between score and length, -1 to 1; `None` until there is enough to say.
    pub tau: Option<f64>,
    /// Whether the scores are trusted: otherwise every prompt of the model is expected to be equally long.
    pub trusted: bool,
}

/// Counts since the start. Every request that arrived was released, rejected or cancelled, or still waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub arrived: u64,
    pub released: u64,
    /// Of those released: by age rather than by key.
    pub aged: u64,
    /// Of those released: by another backend than the one they waited for.
    pub stolen: u64,
    /// Cancelled while they waited.
    pub cancelled: u64,
    /// Placed again because their backend went away or turned out too small.
    pub placed_again: u64,
    /// Rejections by reason, in the order of [`Reason::ALL`].
    pub rejected: [u64; Reason::ALL.len()],
    /// Released ones that have left their backend.
    pub finished: u64,
    /// Of those finished: the backend said that it is full.
    pub pushbacks: u64,
    /// How often all keys were rebuilt.
    pub rebuilds: u64,
    /// How often overload began.
    pub overloads: u64,
    /// Requests without the ranker's opinion, which were given the pooled estimate.
    pub neutral: u64,
}
