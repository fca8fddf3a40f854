//! The orders that rank every request before each iteration, and who gives way to whom under them.

use std::cmp::Reverse;
use std::time::Duration;

use super::profile::{Boosting, Order, Profile, Step};
use super::{BLOCK_TOKENS, Engine, Event, Request};
use crate::scheduler::{GammaAda, LEVEL, RequestId, Rng, Time, Tokens, attained_level, boost};

/// Between two looks at what was learnt.
const LEARN: Duration = Duration::from_secs(5);
/// Answers that say something about how long answers are.
const ENOUGH: u64 = 20;
/// How long answers are before anything is known, in tokens.
const ASSUMED: f64 = 256.0;
/// Gamma times the mean work before the tail is known.
const START: f64 = 0.1;
/// Hysteresis of a boosted order, in units of 1/gamma. With a tenth of that, the work that is done twice outweighs what is won on every workload tried.
const MARGIN: f64 = 1.0;

/// Ranks requests: the smallest key is the most urgent.
#[derive(Clone, Debug)]
pub(super) struct Ranking {
    order: Order,
    /// Seconds of capacity of a prompt token and of an output token, as the profile has them.
    prompt: f64,
    output: f64,
    gamma: f64,
    tail: GammaAda,
    lengths: Lengths,
    next: Time,
}

impl Ranking {
    /// `None` for an order that ranks nobody anew.
    pub fn new(profile: &Profile) -> Option<Self> {
        let gamma = match profile.order {
            Order::Fcfs | Order::Priority | Order::PrefillFirst => return None,
            Order::Shortest | Order::Remaining { .. } | Order::Attained => None,
            Order::Boost(Boosting { gamma, .. }) => gamma,
        };
        let timing = profile.timing;
        let (prompt, output) = (timing.per_prefill_token, timing.base / f64::from(profile.max_num_seqs.max(1)) + timing.per_sequence);
        let gamma = gamma.unwrap_or(START / (output * ASSUMED).max(1e-6));
        Some(Ranking { order: profile.order, prompt, output, gamma, tail: GammaAda::default(), lengths: Lengths::default(), next: Time::ZERO })
    }

    /// Where a request stands now.
    pub fn key(&self, request: &Request) -> i64 {
        let produced = request.known - request.prompt;
        match self.order {
            Order::Shortest => (self.work(request.prompt, f64::from(request.target - request.prompt)) * 1e9) as i64,
            Order::Remaining { noise, .. } => (remaining(request, noise) * 1e3) as i64,
            Order::Attained => i64::from(attained_level(produced)),
            Order::Boost(Boosting { step, .. }) => {
                let attained = if step < Step::Guarded { produced } else { attained_level(produced) };
                let work = self.work(request.prompt, self.lengths.beyond(attained));
                request.arrived.as_micros() as i64 - (boost(self.gamma, work.max(1e-6)) * 1e6) as i64
            }
            Order::Fcfs | Order::Priority | Order::PrefillFirst => request.priority,
        }
    }

    fn work(&self, prompt: Tokens, output: f64) -> f64 {
        self.prompt * f64::from(prompt) + self.output * output
    }

    /// Whether a running request may be thrown back for one that ranks before it.
    fn gives_way(&self, request: &Request) -> bool {
        match self.order {
            Order::Remaining { noise, until } => {
                let produced = f64::from(request.known - request.prompt);
                produced < until * (produced + remaining(request, noise))
            }
            Order::Attained => true,
            Order::Boost(Boosting { step, .. }) => match step {
                Step::Queues => false,
                Step::Unified => true,
                Step::Guarded => request.known - request.since >= LEVEL,
            },
            Order::Shortest | Order::Fcfs | Order::Priority | Order::PrefillFirst => false,
        }
    }

    /// By how much one that waits has to rank before one that runs.
    fn margin(&self) -> i64 {
        match self.order {
            Order::Boost(_) => (MARGIN / self.gamma * 1e6) as i64,
            _ => 0,
        }
    }

    /// Learns from a request that is done.
    pub fn finished(&mut self, now: Time, request: &Request) {
        if let Order::Boost(_) = self.order {
            self.lengths.add(request.prompt, request.known - request.prompt);
            self.tail.completed(now.since(request.arrived).as_secs_f64());
        }
    }

    /// Puts what was learnt into use every few seconds. Whether keys may be others now.
    fn refresh(&mut self, now: Time) -> bool {
        let Order::Boost(Boosting { gamma, .. }) = self.order else { return false };
        if now < self.next || self.lengths.count < ENOUGH {
            return false;
        }
        self.next = now.after(LEARN);
        self.lengths.sum_up();
        if gamma.is_none() {
            let count = self.lengths.count as f64;
            let mean_work = self.prompt * self.lengths.prompts as f64 / count + self.output * self.lengths.outputs as f64 / count;
            self.tail.update(mean_work.max(1e-6));
            self.gamma = self.tail.slope().unwrap_or(START / mean_work.max(1e-6));
        }
        true
    }
}

/// Predicted output to come, in tokens.
fn remaining(request: &Request, noise: f64) -> f64 {
    let truth = f64::from(request.target - request.known);
    if noise > 0.0 { truth * (noise * normal(request.id, (request.known - request.prompt) / LEVEL)).exp() } else { truth }
}

/// Standard normal, the same whenever a request's length is guessed at this level (Box and Muller, 1958).
fn normal(id: RequestId, level: Tokens) -> f64 {
    let mut rng = Rng::new(id.0 << 16 ^ u64::from(level));
    let mut unit = || (rng.next() >> 11) as f64 / (1_u64 << 53) as f64;
    (-2.0 * (1.0 - unit()).ln()).sqrt() * (std::f64::consts::TAU * unit()).cos()
}

/// How long answers turned out to be.
#[derive(Clone, Debug)]
struct Lengths {
    count: u64,
    prompts: u64,
    outputs: u64,
    /// By [`LEVEL`]: answers that ended in it, and their tokens.
    ended: Vec<(u64, u64)>,
    /// Mean length of the answers that reached each level.
    mean_beyond: Vec<f64>,
}

impl Default for Lengths {
    fn default() -> Self {
        Lengths { count: 0, prompts: 0, outputs: 0, ended: vec![(0, 0); 512], mean_beyond: Vec::new() }
    }
}

impl Lengths {
    fn add(&mut self, prompt: Tokens, output: Tokens) {
        self.count += 1;
        self.prompts += u64::from(prompt);
        self.outputs += u64::from(output);
        let last = self.ended.len() - 1;
        let (count, tokens) = &mut self.ended[((output / LEVEL) as usize).min(last)];
        *count += 1;
        *tokens += u64::from(output);
    }

    fn sum_up(&mut self) {
        let (mut count, mut tokens) = (0, 0);
        self.mean_beyond.resize(self.ended.len(), 0.0);
        for level in (0..self.ended.len()).rev() {
            count += self.ended[level].0;
            tokens += self.ended[level].1;
            self.mean_beyond[level] = if count == 0 { 0.0 } else { tokens as f64 / count as f64 };
        }
    }

    /// The expected length, in tokens, of an answer that has this many.
    fn beyond(&self, attained: Tokens) -> f64 {
        let (level, part) = ((attained / LEVEL) as usize, f64::from(attained % LEVEL) / f64::from(LEVEL));
        let mean = |level: usize| self.mean_beyond.get(level).copied().unwrap_or(0.0);
        let learnt = mean(level) * (1.0 - part) + mean(level + 1).max(mean(level)) * part;
        // Beyond what was seen, twice as long as it is.
        let assumed = (2.0 * f64::from(attained)).max(if self.mean_beyond.is_empty() { ASSUMED } else { 0.0 });
        if learnt > f64::from(attained) { learnt } else { assumed.max(1.0) }
    }
}

impl Engine {
    /// Brings ranks up to date and makes room for the most urgent of those that wait: the least urgent that run give way until it has a slot and blocks, or nobody
    /// if that would not be enough. One an iteration.
    pub(super) fn rank(&mut self, now: Time, events: &mut Vec<Event>) {
        let Some(ranking) = &mut self.ranking else { return };
        if ranking.refresh(now) {
            for (_, _, place) in std::mem::take(&mut self.waiting) {
                let request = &mut self.requests[place as usize];
                request.priority = ranking.key(request);
                self.waiting.insert(request.waiting_key(place));
            }
        }
        for &place in &self.running {
            let request = &mut self.requests[place as usize];
            request.priority = ranking.key(request);
        }
        let Some(&(urgency, _, place)) = self.waiting.first() else { return };
        let first = &self.requests[place as usize];
        if first.arrived > now {
            return;
        }
        let blocks = (first.computed + (first.known - first.computed).min(self.profile.max_batched_tokens)).div_ceil(BLOCK_TOKENS);
        let mut missing = blocks.saturating_sub(self.blocks.available());
        let mut slot = self.running.len() < self.profile.max_num_seqs as usize;
        if slot && missing == 0 {
            return;
        }
        let bar = urgency.saturating_add(ranking.margin());
        let mut least: Vec<(Reverse<(i64, u64)>, u32)> = Vec::new();
        for &place in &self.running {
            let request = &self.requests[place as usize];
            if request.priority > bar && ranking.gives_way(request) {
                least.push((Reverse((request.priority, request.sequence)), place));
            }
        }
        least.sort_unstable();
        let mut leaving = 0;
        for &(_, place) in &least {
            if slot && missing == 0 {
                break;
            }
            slot = true;
            missing = missing.saturating_sub(self.requests[place as usize].private);
            leaving += 1;
        }
        if !slot || missing > 0 {
            return;
        }
        for &(_, place) in &least[..leaving] {
            self.running.retain(|&running| running != place);
            self.preempt(place, now, events);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predictions_are_off_by_as_much_as_was_asked() {
        let drawn: Vec<f64> = (0..20_000).map(|n| normal(RequestId(n / 4), (n % 4) as u32)).collect();
        let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
        let variance = drawn.iter().map(|draw| (draw - mean).powi(2)).sum::<f64>() / drawn.len() as f64;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} and {variance}");
    }

    #[test]
    fn the_longer_an_answer_is_the_longer_it_will_be() {
        let mut lengths = Lengths::default();
        assert_eq!((lengths.beyond(0), lengths.beyond(1000)), (ASSUMED, 2000.0), "nothing known");
        (0..30).for_each(|_| lengths.add(10, 32));
        (0..10).for_each(|_| lengths.add(10, 640));
        lengths.sum_up();
        assert_eq!((lengths.beyond(0), lengths.beyond(64), lengths.beyond(600)), (184.0, 640.0, 640.0));
        assert_eq!(lengths.beyond(32), (184.0 + 640.0) / 2.0, "between two levels");
        assert_eq!(lengths.beyond(700), 1400.0, "nothing as long has been seen");
    }
}
