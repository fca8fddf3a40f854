//! A slot on a backend.

use tokio::sync::mpsc;

use super::{Message, tell};
use crate::scheduler::{BackendId, Ending, Event, Facts, RequestId, Tokens};

/// The first level at which progress is told after the first token; each further one is twice the one before, like the scheduler's own levels of attained work.
const FIRST_LEVEL: Tokens = 64;

/// A slot on a backend, held until it is finished or dropped; the pool learns exactly once how it ended.
#[derive(Debug)]
pub struct Permit {
    id: RequestId,
    backend: BackendId,
    facts: Facts,
    output: Tokens,
    next_level: Tokens,
    ended: bool,
    messages: mpsc::UnboundedSender<Message>,
}

impl Permit {
    pub(super) fn new(id: RequestId, backend: BackendId, facts: Facts, messages: mpsc::UnboundedSender<Message>) -> Self {
        Permit { id, backend, facts, output: 0, next_level: 1, ended: false, messages }
    }

    /// Where to send the request.
    pub fn backend(&self) -> BackendId {
        self.backend
    }

    /// Why it was released now.
    pub fn facts(&self) -> Facts {
        self.facts
    }

    /// Output tokens streamed so far, cumulative. The pool is told at the first one, which says when the prompt was computed, and at 64, 128, 256 ... tokens.
    pub fn progress(&mut self, output: Tokens) {
        self.output = self.output.max(output);
        if self.output >= self.next_level {
            self.next_level = (self.output / FIRST_LEVEL + 1).next_power_of_two().saturating_mul(FIRST_LEVEL);
            tell(&self.messages, Event::Progress(self.id, self.output));
        }
    }

    #[cfg(test)]
    pub(super) fn next_level(&self) -> Tokens {
        self.next_level
    }

    /// Gives the slot back.
    pub fn finish(mut self, ending: Ending) {
        self.ended = true;
        tell(&self.messages, Event::Finished(self.id, ending));
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if !self.ended {
            tell(&self.messages, Event::Finished(self.id, Ending::Cancelled { output: self.output }));
        }
    }
}
