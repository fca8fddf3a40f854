//! What requests that hold a slot tell: how far they are and how they ended. Everything that is learnt is learnt here.

use super::Scheduler;
use super::event::{RequestId, Tokens};
use super::outcome::Ending;
use super::table::Stage;

/// How much of what was produced is expected once more, from an answer that is longer than expected: long answers are the longer the longer they are.
const OVERRUN: Tokens = 4;
/// What a prompt token counts beside an output token where only the sum of a backend's throughput is watched.
const PROMPT_TOKEN: f64 = 0.05;

impl Scheduler {
    /// A running request has produced this much so far.
    pub(super) fn progress(&mut self, id: RequestId, output: Tokens) {
        let Some(slot) = self.table.slot_of(id) else { return };
        let limit = self.limit_of(self.table.get(slot));
        let entry = self.table.get_mut(slot);
        let Stage::Running { released, produced, remaining } = entry.stage else { return };
        if output <= produced {
            return;
        }
        let left = match entry.expected.checked_sub(output) {
            Some(left) if left > 0 => left,
            _ => (output / OVERRUN).min(limit.saturating_sub(output)),
        };
        let before = entry.resident();
        entry.stage = Stage::Running { released, produced: output, remaining: left };
        entry.at_most = entry.at_most.max(output.saturating_add(left));

        let prompt = if produced == 0 { entry.uncached() } else { 0 };
        if produced == 0 {
            self.gamma.begun(self.now.since(entry.arrived).as_secs_f64());
        }
        let backend = &mut self.backends[entry.backend as usize];
        backend.running.subtract(prompt, remaining);
        backend.running.add(0, left);
        backend.learner.computed(prompt, output - produced);
        backend.window.computed(work(prompt, output - produced), false);
        backend.resident.subtract(before);
        backend.resident.add(entry.resident());
    }

    /// A released request has left its backend.
    pub(super) fn finished(&mut self, id: RequestId, ending: Ending) {
        let Some(slot) = self.table.slot_of(id) else { return };
        let Stage::Running { .. } = self.table.get(slot).stage else { return };
        // The backend's own count of the prompt is not used: work is predicted from estimated prompt lengths, so speed is learnt in estimated tokens too.
        match ending {
            Ending::Completed { output, .. } | Ending::Truncated { output, .. } | Ending::Cancelled { output } | Ending::Failed { output } => {
                self.progress(id, output);
            }
            Ending::Pushback | Ending::Refused | Ending::Uncounted => {}
        }
        let entry = self.table.remove(slot);
        self.running.remove(&slot);
        let Stage::Running { produced, remaining, .. } = entry.stage else { unreachable!("progress ends no request") };

        let speed = self.keying.speed;
        let (prompt, counted) = (u64::from(entry.uncached()), !matches!(ending, Ending::Pushback | Ending::Refused));
        let actual = if counted { speed.seconds(prompt, u64::from(produced)) } else { 0.0 };
        let service = self.shares.settled(entry.tenant(), speed.seconds(prompt, u64::from(entry.expected)), actual);
        self.served(entry.tenant(), service);

        if let Some(session) = entry.history.as_ref().and_then(|history| history.session()) {
            self.sessions.add(self.now, entry.tenant(), session, produced);
        }
        let index = entry.backend as usize;
        let backend = &mut self.backends[index];
        let unread = if produced == 0 { entry.uncached() } else { 0 };
        if ending == Ending::Uncounted {
            backend.learner.computed(unread, 0);
            backend.window.computed(work(unread, 0), true);
        } else {
            backend.window.computed(0.0, true);
        }
        backend.in_flight -= 1;
        backend.running.subtract(unread, remaining);
        backend.resident.subtract(entry.resident());
        if ending == Ending::Pushback {
            backend.window.pushed_back(self.now, backend.in_flight);
            self.counters.pushbacks += 1;
        }
        self.changed(index);
        self.counters.finished += 1;
        self.calibration.answered(&entry, ending, self.limit_of(&entry));
        if matches!(ending, Ending::Completed { .. } | Ending::Truncated { .. } | Ending::Uncounted) {
            self.gamma.completed(self.now.since(entry.arrived).as_secs_f64());
            self.mix.ended(produced);
        }
        self.forget_if_gone(index);
    }
}

/// What a backend's throughput is counted in: output tokens, and prompt tokens for what they cost beside them.
fn work(prompt: Tokens, output: Tokens) -> f64 {
    PROMPT_TOKEN * f64::from(prompt) + f64::from(output)
}

#[cfg(test)]
mod tests {
    #[test]
    fn twenty_prompt_tokens_count_as_one_of_output() {
        assert_eq!(super::work(20, 5), 6.0);
    }
}
