//! One backend as the scheduler knows it.

use super::event::{BackendId, BackendState, Load, Standing, Tokens};
use super::outlook::Sketch;
use super::prefixes::{Prefixes, Sought};
use super::queue::Queue;
use super::speed::{Speed, SpeedLearner};
use super::table::{Entry, Resident};
use super::window::Window;

/// KV use, 0 to 1, from which on nothing is added to what runs: the engine would have to evict a running request to make room.
const KV_FULL: f32 = 0.95;

/// Tokens that wait for or occupy a backend, kept as sums so that a prediction needs no walk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Backlog {
    /// Prompt tokens still to compute.
    pub prompt: u64,
    /// Output tokens still expected.
    pub output: u64,
}

impl Backlog {
    pub fn add(&mut self, prompt: Tokens, output: Tokens) {
        self.prompt += u64::from(prompt);
        self.output += u64::from(output);
    }

    pub fn subtract(&mut self, prompt: Tokens, output: Tokens) {
        self.prompt -= u64::from(prompt);
        self.output -= u64::from(output);
    }
}

#[derive(Debug)]
pub(super) struct Backend {
    pub id: BackendId,
    pub state: BackendState,
    pub queue: Queue,
    pub window: Window,
    pub load: Load,
    pub in_flight: u32,
    /// What waits in its queue.
    pub queued: Backlog,
    /// What is left of what runs.
    pub running: Backlog,
    /// What all that runs will hold in its KV cache.
    pub resident: Resident,
    pub learner: SpeedLearner,
    /// The speed in use: learnt, or that of its siblings.
    pub speed: Speed,
    pub prefixes: Prefixes,
    /// Its queue as it was a moment ago.
    pub sketch: Sketch,
}

impl Backend {
    pub fn new(id: BackendId, state: BackendState, speed: Speed) -> Self {
        let window = Window::new(state.slots);
        Backend {
            id,
            state,
            queue: Queue::default(),
            window,
            load: Load::default(),
            in_flight: 0,
            queued: Backlog::default(),
            running: Backlog::default(),
            resident: Resident::default(),
            learner: SpeedLearner::default(),
            speed,
            prefixes: Prefixes::default(),
            sketch: Sketch::default(),
        }
    }

    /// How many requests it may hold now.
    pub fn limit(&self) -> u32 {
        self.window.limit(self.state.standing)
    }

    /// Whether a slot is free.
    pub fn has_slot(&self) -> bool {
        self.in_flight < self.limit()
    }

    /// Whether a request that joins now need not wait.
    pub fn starts_at_once(&self) -> bool {
        self.has_slot() && self.queue.is_empty()
    }

    /// Whether the KV cache has room for a request beside what runs. An empty backend takes any: what is larger than the whole cache was refused before.
    pub fn has_kv_for(&self, entry: &Entry) -> bool {
        let with = || {
            let mut with = self.resident;
            with.add(entry.resident());
            with.at_most()
        };
        let fits = self.state.kv_tokens.is_none_or(|kv| with() <= kv);
        self.in_flight == 0 || fits && self.load.kv_used.is_none_or(|used| used < KV_FULL)
    }

    /// How many of a prompt's tokens it probably need not compute.
    pub fn cached(&self, sought: &Sought) -> Tokens {
        self.prefixes.cached(sought, self.state.kv_tokens)
    }

    /// Whether requests may wait for it.
    pub fn takes_requests(&self) -> bool {
        matches!(self.state.standing, Standing::Healthy | Standing::Probing)
    }

    /// Predicted seconds until it has done all it has.
    pub fn backlog(&self) -> f64 {
        self.speed.seconds(self.queued.prompt + self.running.prompt, self.queued.output + self.running.output)
    }

    /// Whether it has as much as it can use: then its throughput is its capacity.
    pub fn is_saturated(&self) -> bool {
        let full = || self.in_flight >= self.limit() || self.load.waiting.is_some_and(|waiting| waiting > 0);
        self.in_flight > 0 && self.state.standing == Standing::Healthy && full()
    }
}
