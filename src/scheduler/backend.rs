//! One backend as the scheduler knows it.

use super::event::{BackendId, BackendState, Load, Standing, Tokens};
use super::queue::Queue;
use super::speed::Speed;
use super::window::Window;

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
}

impl Backend {
    pub fn new(id: BackendId, state: BackendState) -> Self {
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

    /// Whether requests may wait for it.
    pub fn takes_requests(&self) -> bool {
        matches!(self.state.standing, Standing::Healthy | Standing::Probing)
    }

    /// Predicted seconds until it has done all it has, at a given speed.
    pub fn backlog(&self, speed: Speed) -> f64 {
        speed.seconds(self.queued.prompt + self.running.prompt, self.queued.output + self.running.output)
    }
}
