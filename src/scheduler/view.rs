//! What can be seen of a pool from outside: plain values for the admin page and the metrics.

use super::Scheduler;
use super::event::{BackendId, Load, ModelId, RequestId, Standing, TenantId, Tokens};
use super::outcome::Reason;
use super::policy::Order;
use super::speed::Speed;
use super::table::Stage;
use super::time::Time;

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
    /// The work, in capacity-seconds, from which on nothing is boosted, as used in keys.
    pub longest_work: f64,
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
    /// What is known of each tenant's prompts.
    pub tenants: Vec<TenantView>,
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
    /// How far expected and real lengths of recent answers are apart: the mean distance of their logarithms, 0.7 for a factor of two. `None` until there is enough to say.
    pub error: Option<f64>,
    /// All real lengths of recent answers over all expected ones: 1 where expectations are right on average.
    pub drift: Option<f64>,
}

/// What is known of one tenant's prompts.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantView {
    pub tenant: TenantId,
    /// The factor on the expected output of its prompts, 1/4 to 4.
    pub correction: f32,
    /// How much its scores agree with its answers' lengths, -1 to 1; `None` until there is enough to say.
    pub concordance: Option<f32>,
}

/// Why a waiting request stands where it stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Explanation {
    /// In whose queue it waits.
    pub backend: BackendId,
    /// Its key; the smallest goes first, ties by `sequence`.
    pub phi: i64,
    pub sequence: u64,
    pub arrived: Time,
    /// Expected work in capacity-seconds.
    pub work: f64,
    pub expected_output: Tokens,
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

impl Scheduler {
    /// The pool at the time of the last event.
    pub fn view(&self) -> PoolView {
        PoolView {
            order: self.policy.order(),
            mode: if self.keying.overload { Mode::Overload } else { Mode::Normal },
            waiting: self.waiting(),
            waiting_bytes: self.waiting_bytes,
            aged: self.backends.iter().map(|backend| backend.queue.aged_len(self.now, self.aging)).sum(),
            in_flight: self.running.len() as u32,
            gamma: self.keying.gamma,
            max_overtake: self.keying.bound,
            longest_work: self.keying.longest,
            backlog: self.queued_seconds(),
            mean_work: self.mix.work(self.keying.order, self.keying.speed),
            speed: self.keying.speed,
            draining: self.draining,
            backends: self
                .backends
                .iter()
                .map(|backend| BackendView {
                    id: backend.id,
                    standing: backend.state.standing,
                    waiting: backend.queue.len(),
                    in_flight: backend.in_flight,
                    window: backend.limit(),
                    backlog: backend.backlog(),
                    speed: backend.speed,
                    speed_learnt: backend.learner.speed().is_some(),
                    load: backend.load,
                })
                .collect(),
            models: self.calibration.known().collect(),
            tenants: self.calibration.tenants().iter().collect(),
            counters: self.counters.clone(),
        }
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.expiries.len()
    }

    /// Why a request stands where it stands; `None` if it does not wait.
    pub fn explain(&self, id: RequestId) -> Option<Explanation> {
        let entry = self.table.get(self.table.slot_of(id)?);
        let Stage::Waiting { phi, .. } = entry.stage else { return None };
        Some(Explanation {
            backend: self.backends[entry.backend as usize].id,
            phi,
            sequence: entry.place.sequence(),
            arrived: entry.arrived,
            work: f64::from(entry.work),
            expected_output: entry.expected,
        })
    }
}
