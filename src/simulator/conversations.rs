//! Conversations: requests whose prompts grow by the answer before and by what the client says next, under system prompts that many share.

use std::sync::Arc;
use std::time::Duration;

use super::random::Random;
use super::workload::{Arrivals, Job, Length, Workload};
use crate::engine::BLOCK_TOKENS;
use crate::scheduler::{History, Prefix, Tokens};

/// What conversations are like.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversations {
    /// How many requests one has.
    pub turns: Length,
    /// Mean of the exponential time between an answer's end and the next turn.
    pub think: Duration,
    /// Tokens of a system prompt; 0 for none.
    pub system: Tokens,
    /// How many system prompts there are. Each conversation has any of them.
    pub systems: u32,
    /// A conversation whose next prompt and answer would be longer ends before.
    pub longest: Tokens,
}

/// Which conversation a request is a turn of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    pub conversation: u32,
    /// 0 is the first.
    pub number: u32,
    system: u32,
    system_tokens: Tokens,
}

/// How many earlier prompts of its conversation a turn names, as the gateway's edge does.
const EARLIER: usize = 3;

impl Turn {
    /// A hash for each full block of a prompt of this many tokens: blocks of the system prompt are the same in all conversations that have it, the others are the
    /// same in all turns that are long enough.
    pub(super) fn blocks(self, prompt: Tokens) -> Vec<u64> {
        let of = |block: Tokens| match block < self.system_tokens / BLOCK_TOKENS {
            true => hash(SYSTEM, self.system, block),
            false => hash(WORDS, self.conversation, block),
        };
        (0..prompt / BLOCK_TOKENS).map(of).collect()
    }
}

/// What a hash is of.
const SYSTEM: u64 = 1;
const WORDS: u64 = 2;
const PROMPT: u64 = 3;

/// Spread over all bits (the finaliser of MurmurHash3).
fn hash(kind: u64, whose: u32, which: u32) -> u64 {
    let mut hash = (u64::from(whose) << 32 | u64::from(which)) ^ kind.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ hash >> 33).wrapping_mul(factor);
    }
    hash ^ hash >> 33
}

impl Workload {
    /// Draws this many requests of conversations that begin by `arrivals`, which is no closed loop; `prompt` is what a client says in one turn. Requests come one
    /// a second on average; [`Workload::pace`] changes that.
    pub fn converse(requests: usize, like: &Conversations, arrivals: Arrivals, prompt: &Length, output: &Length, seed: u64) -> Self {
        let (mut prompts, mut outputs) = (Random::new(seed, "prompts"), Random::new(seed, "outputs"));
        let mut random = Random::new(seed, "conversations");
        let mut jobs = Vec::with_capacity(requests);
        let mut conversation = 0;
        while jobs.len() < requests {
            let (turns, system) = (like.turns.draw(&mut random), random.below(u64::from(like.systems)) as u32);
            let mut so_far = like.system;
            let mut ends: Vec<Tokens> = Vec::new();
            for number in 0..turns {
                let (prompt, answer) = (so_far.saturating_add(prompt.draw(&mut prompts)), output.draw(&mut outputs));
                so_far = prompt.saturating_add(answer);
                if jobs.len() == requests || number > 0 && so_far > like.longest {
                    break;
                }
                ends.push(prompt);
                let turn = |number: usize| Prefix { hash: hash(PROMPT, conversation, number as u32), tokens: ends[number] };
                let beginnings = [Prefix { hash: hash(SYSTEM, system, 0), tokens: like.system }].into_iter();
                let history = History::new(beginnings.chain((ends.len().saturating_sub(EARLIER + 1)..ends.len()).map(turn)), None);
                jobs.push(Job {
                    after: Duration::from_secs_f64(random.exponential(like.think.as_secs_f64())),
                    history: Some(Arc::new(history)),
                    turn: Some(Turn { conversation, number, system, system_tokens: like.system }),
                    ..Job::new(prompt, answer)
                });
            }
            conversation += 1;
        }
        let mut workload = Workload { jobs, clients: None };
        workload.arrive(arrivals, seed);
        workload.pace(1.0);
        workload
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn() -> Workload {
        let like = Conversations { turns: Length::Fixed(6), think: Duration::from_secs(20), system: 100, systems: 3, longest: 2_000 };
        let mut workload = Workload::converse(2000, &like, Arrivals::Poisson, &Length::Exponential(80.0), &Length::Exponential(200.0), 1);
        workload.pace(4.0);
        workload
    }

    #[test]
    fn a_prompt_is_all_that_was_said_before() {
        let workload = drawn();
        assert_eq!(workload.jobs.len(), 2000);
        for pair in workload.jobs.windows(2) {
            let (before, job) = (&pair[0], &pair[1]);
            let turn = job.turn.unwrap();
            if turn.number == 0 {
                assert_ne!(Some(turn.conversation), before.turn.map(|turn| turn.conversation));
                continue;
            }
            assert!(job.prompt > before.prompt + before.output && job.prompt + job.output <= 2_000);
            let (old, new) = (before.turn.unwrap().blocks(before.prompt), turn.blocks(job.prompt));
            assert_eq!(old[..], new[..old.len()], "what was computed for the turn before is computed once");
            let named = |job: &Job| job.history.as_ref().unwrap().longest_first().collect::<Vec<_>>();
            assert!(named(job).contains(&named(before)[0]) && named(job)[0].tokens == job.prompt, "the turn before, and all of it");
        }
    }

    #[test]
    fn system_prompts_are_shared_and_words_are_not() {
        let workload = drawn();
        let first = |job: &&Job| job.turn.unwrap().number == 0;
        let firsts: Vec<&Job> = workload.jobs.iter().filter(first).collect();
        for job in &firsts[1..] {
            let (one, other) = (firsts[0].turn.unwrap(), job.turn.unwrap());
            let (a, b) = (one.blocks(firsts[0].prompt), other.blocks(job.prompt));
            let common = a.iter().zip(&b).take_while(|(a, b)| a == b).count();
            assert_eq!(common, if one.system == other.system { 6.min(b.len()) } else { 0 });
        }
        let span = firsts.last().unwrap().after.as_secs_f64() - firsts[0].after.as_secs_f64();
        assert!((span - 2000.0 / 4.0).abs() < 1e-3, "{span} s for 2,000 requests at 4 a second");
        let thinks: Vec<f64> = workload.jobs.iter().filter(|job| !first(job)).map(|job| job.after.as_secs_f64()).collect();
        let mean = thinks.iter().sum::<f64>() / thinks.len() as f64;
        assert!((mean - 20.0).abs() < 2.0, "{mean}");
    }
}
