//! What an engine runs on: how long an iteration takes, how much fits, and in what order it admits.

use std::time::Duration;

use crate::scheduler::Tokens;

/// Tokens in one block of KV cache (vLLM's default).
pub const BLOCK_TOKENS: Tokens = 16;

/// In what order waiting requests are admitted, who is preempted first when KV blocks run out, and who gives way to whom before that.
///
/// The first two are what engines have. The others are those that papers compare: they know or learn what no gateway can tell them, and rank every request before
/// each iteration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Order {
    /// By arrival; the request admitted last is preempted first. Prompts go in chunks beside those that decode (Sarathi-Serve, arXiv 2403.02310, and vLLM since).
    #[default]
    Fcfs,
    /// Lower priority number first, then by arrival; the highest number is preempted first (vLLM's `--scheduling-policy priority`). With a ranker's scores as
    /// numbers it is the order of PARS (arXiv 2510.03243) and LTR (arXiv 2408.15792).
    Priority,
    /// By arrival, whole prompts first: while one can be admitted nobody decodes (vLLM before chunked prefill). An iteration has one prompt at least, however long.
    PrefillFirst,
    /// The true length, shortest first. Whoever runs stays.
    Shortest,
    /// Least remaining output first (TRAIL, arXiv 2410.01035), as a prediction says whose logarithm is off by a normal error of standard deviation `noise`, drawn
    /// again at each [`LEVEL`](crate::scheduler::LEVEL) of output; 0 is the truth. A request gives way until it has `until` of its predicted output.
    Remaining { noise: f64, until: f64 },
    /// Least attained output first, in levels that double; equals by arrival.
    Attained,
    /// Boosted arrival by attained output and what is known of lengths, without a prediction for any one request (UNIBOOST, arXiv 2606.18431).
    Boost(Boosting),
}

/// How far [`Order::Boost`] goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Boosting {
    /// The decay rate of the boost in 1/s; `None` follows the tail of response times.
    pub gamma: Option<f64>,
    pub step: Step,
}

/// The steps of UNIBOOST, each with all before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// Those that decode and those that wait for their prompt are ordered apart: nobody gives way before memory runs out.
    Queues,
    /// One order for all: whoever waits takes the place of one that runs, if its boosted arrival is earlier by 1/gamma.
    Unified,
    /// Attained output counts in levels that double, and nobody gives way before it has run for the first of them.
    Guarded,
}

/// How long one iteration takes, in seconds:
///
/// `base + per_sequence * requests + per_prefill_token * prefill tokens + per_kv_token * KV tokens read`
///
/// - `base`: the weights are read from memory once, whatever the batch, plus the launch of the kernels.
/// - `per_sequence`: sampling, detokenising and the engine's own bookkeeping.
/// - `per_prefill_token`: prompt tokens are bound by arithmetic, 2 FLOPs for each parameter.
/// - `per_kv_token`: attention reads the KV cache of every request in the iteration once.
///
/// Arithmetic for decoded tokens and the quadratic part of a long prompt's attention are left out: both are small beside these for prompts up to
/// some 10,000 tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Timing {
    pub base: f64,
    pub per_sequence: f64,
    pub per_prefill_token: f64,
    pub per_kv_token: f64,
}

impl Timing {
    /// The length of an iteration, at least a microsecond.
    pub fn iteration(&self, sequences: u32, prefill_tokens: u32, kv_tokens: u64) -> Duration {
        let seconds = self.base
            + self.per_sequence * f64::from(sequences)
            + self.per_prefill_token * f64::from(prefill_tokens)
            + self.per_kv_token * kv_tokens as f64;
        // A float-to-integer cast saturates and maps NaN to 0, so a nonsensical timing gives short iterations and never a panic.
        Duration::from_micros(((seconds * 1e6).round() as u64).max(1))
    }
}

/// Everything that makes one engine differ from another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Profile {
    pub timing: Timing,
    /// Blocks of [`BLOCK_TOKENS`] tokens that the KV cache holds.
    pub kv_blocks: u32,
    /// Requests that can run at once (vLLM's `max_num_seqs`).
    pub max_num_seqs: u32,
    /// Tokens, prompt and decode together, that one iteration computes at most (vLLM's `max_num_batched_tokens`): longer prompts go in chunks.
    pub max_batched_tokens: Tokens,
    /// Prompt and answer together are at most this long (vLLM's `max_model_len`).
    pub max_model_len: Tokens,
    pub order: Order,
    /// Whether full prompt blocks are kept and found again by later requests.
    pub prefix_cache: bool,
    /// Seconds that it takes to copy a KV token to host memory, or back: what a preempted request has computed is kept there (vLLM's `preemption_mode=swap`, until 0.8).
    /// `None` drops it, and it is computed again. Host memory has room for all.
    pub swap: Option<f64>,
}

impl Profile {
    /// An 8B model in 8 bits on a card with 24 GB and 300 GB/s (NVIDIA L4 class): 8 GB / 300 GB/s = 27 ms to read the weights, 16 GFLOP for a prompt
    /// token at some 55 TFLOP/s, 128 KiB of KV for a token, 12 GB left for KV.
    pub fn small() -> Self {
        Profile {
            timing: Timing { base: 28e-3, per_sequence: 60e-6, per_prefill_token: 290e-6, per_kv_token: 0.44e-6 },
            kv_blocks: 5_600,
            max_num_seqs: 32,
            max_batched_tokens: 2_048,
            max_model_len: 32_768,
            order: Order::Fcfs,
            prefix_cache: true,
            swap: None,
        }
    }

    /// An 8B model in 16 bits on a card with 80 GB and 2 TB/s (NVIDIA A100 class): 8 ms for the weights, some 150 TFLOP/s, 50 GB left for KV.
    pub fn medium() -> Self {
        Profile {
            timing: Timing { base: 9.5e-3, per_sequence: 40e-6, per_prefill_token: 107e-6, per_kv_token: 0.066e-6 },
            kv_blocks: 24_000,
            max_num_seqs: 128,
            max_batched_tokens: 2_048,
            max_model_len: 32_768,
            order: Order::Fcfs,
            prefix_cache: true,
            swap: None,
        }
    }

    /// An 8B model in 16 bits on a card with 80 GB and 3.35 TB/s (NVIDIA H100 class): 4.8 ms for the weights, some 450 TFLOP/s, 50 GB left for KV.
    pub fn large() -> Self {
        Profile {
            timing: Timing { base: 6.3e-3, per_sequence: 25e-6, per_prefill_token: 36e-6, per_kv_token: 0.039e-6 },
            kv_blocks: 24_000,
            max_num_seqs: 256,
            max_batched_tokens: 8_192,
            max_model_len: 32_768,
            order: Order::Fcfs,
            prefix_cache: true,
            swap: None,
        }
    }

    /// The longest prompt and answer together that this engine can ever hold.
    pub fn context(&self) -> Tokens {
        self.max_model_len.min(self.kv_blocks.saturating_mul(BLOCK_TOKENS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_iteration_takes_what_the_formula_says() {
        let timing = Timing { base: 10e-3, per_sequence: 1e-3, per_prefill_token: 1e-4, per_kv_token: 1e-6 };
        assert_eq!(timing.iteration(3, 20, 1_000), Duration::from_micros(10_000 + 3_000 + 2_000 + 1_000));
    }

    #[test]
    fn an_iteration_always_takes_time() {
        let nothing = Timing { base: 0.0, per_sequence: 0.0, per_prefill_token: 0.0, per_kv_token: 0.0 };
        assert_eq!(nothing.iteration(1, 1, 1), Duration::from_micros(1));
        assert_eq!(Timing { base: f64::NAN, ..nothing }.iteration(1, 1, 1), Duration::from_micros(1));
    }

    #[test]
    fn the_context_is_never_longer_than_the_memory() {
        assert_eq!(Profile { kv_blocks: 10, ..Profile::small() }.context(), 160);
        assert_eq!(Profile::small().context(), 32_768);
    }
}
