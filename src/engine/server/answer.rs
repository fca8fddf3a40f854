//! What an answer is: how many tokens, why it ends there, and which words. Everything follows from the prompt and the seed.

use std::collections::HashMap;

use super::request::{Ask, Prompt, Tool};
use crate::scheduler::Tokens;

/// Words of an answer; one is one token.
const WORDS: [&str; 64] = [
    "the",
    "a",
    "of",
    "and",
    "to",
    "in",
    "that",
    "it",
    "with",
    "as",
    "for",
    "on",
    "this",
    "by",
    "from",
    "each",
    "system",
    "request",
    "model",
    "queue",
    "answer",
    "value",
    "time",
    "work",
    "first",
    "next",
    "small",
    "large",
    "often",
    "rarely",
    "carefully",
    "quickly",
    "because",
    "while",
    "whether",
    "should",
    "could",
    "takes",
    "gives",
    "holds",
    "keeps",
    "moves",
    "starts",
    "ends",
    "between",
    "after",
    "before",
    "under",
    "over",
    "more",
    "fewer",
    "same",
    "other",
    "result",
    "reason",
    "example",
    "part",
    "order",
    "number",
    "case",
    "point",
    "question",
    "idea",
    "way",
];

/// Characters of a tool call's arguments in one token.
const ARGUMENT_CHARS: usize = 4;

/// Known answer lengths: fingerprint of a prompt -> tokens.
#[derive(Clone, Debug, Default)]
pub struct Lengths(HashMap<u64, Tokens>);

impl Lengths {
    /// Remembers that `prompt`, the text of the last user message or the whole prompt, is answered with `tokens` tokens.
    pub fn insert(&mut self, prompt: &str, tokens: Tokens) {
        self.0.insert(fingerprint(prompt), tokens);
    }

    /// How many prompts are known.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn of(&self, prompt: &Prompt) -> Option<Tokens> {
        self.0.get(&prompt.question).or_else(|| self.0.get(&prompt.whole)).copied()
    }
}

/// How long answers are whose length is not known: log-normal, drawn from a hash of the prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LengthModel {
    /// Half of the answers are shorter than this, in tokens.
    pub median: f64,
    /// Standard deviation of the logarithm.
    pub sigma: f64,
}

impl Default for LengthModel {
    /// Half of the answers have fewer than 150 tokens, one in a hundred more than 1,500: the shape of public chat traces.
    fn default() -> Self {
        LengthModel { median: 150.0, sigma: 1.0 }
    }
}

impl LengthModel {
    fn draw(self, hash: u64) -> Tokens {
        // Box-Muller, from two halves of a mixed hash. Adding one half keeps the logarithm's argument away from zero.
        let unit = |bits: u64| (bits >> 11) as f64 / (1u64 << 53) as f64;
        let radius = (-2.0 * (unit(mix(hash)) + 0.5f64.powi(54)).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * unit(mix(hash ^ 0x5bd1_e995))).cos();
        ((self.median * (self.sigma * normal).exp()).round() as Tokens).max(1)
    }
}

/// Why an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Finish {
    Stop,
    Length,
    ToolCall,
}

/// An answer, before any of it is produced.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub(super) tokens: Tokens,
    pub(super) finish: Finish,
    seed: u64,
    pub(super) tool: Option<ToolCall>,
}

/// A call of a tool, as the answer. It is as long as its arguments.
#[derive(Clone, Debug)]
pub(super) struct ToolCall {
    pub(super) name: String,
    arguments: Vec<char>,
}

impl Answer {
    /// The answer to `ask`, at most `limit` tokens long. Its length is the one the request names, else the known one, else a drawn one;
    /// `min_tokens` lengthens it, `ignore_eos` makes it exactly `limit`. A tool call is as long as its arguments.
    pub(super) fn plan(ask: &Ask, limit: Tokens, seed: u64, lengths: &Lengths, model: LengthModel) -> Answer {
        let seed = seed ^ ask.prompt.whole;
        let tool = ask.tool.as_ref().map(|tool| ToolCall { name: tool.name.clone(), arguments: arguments(tool, seed).chars().collect() });
        let (natural, finish) = match &tool {
            Some(call) => (call.arguments.len().div_ceil(ARGUMENT_CHARS) as Tokens, Finish::ToolCall),
            None => (ask.sim_output_tokens.or_else(|| lengths.of(&ask.prompt)).unwrap_or_else(|| model.draw(seed)), Finish::Stop),
        };
        let natural = natural.max(ask.min_tokens).max(1);
        if ask.ignore_eos && tool.is_none() {
            return Answer { tokens: limit, finish: Finish::Length, seed, tool };
        }
        if natural > limit {
            return Answer { tokens: limit, finish: Finish::Length, seed, tool };
        }
        Answer { tokens: natural, finish, seed, tool }
    }

    /// The text of token `at`, counted from 0: a word with a space before it (but the first), or a piece of a tool call's arguments.
    pub(super) fn piece(&self, at: Tokens, out: &mut String) {
        if let Some(call) = &self.tool {
            let from = (at as usize * ARGUMENT_CHARS).min(call.arguments.len());
            let to = (from + ARGUMENT_CHARS).min(call.arguments.len());
            out.extend(&call.arguments[from..to]);
            return;
        }
        if at > 0 {
            out.push(' ');
        }
        out.push_str(WORDS[(mix(self.seed.wrapping_add(u64::from(at))) % WORDS.len() as u64) as usize]);
    }

    /// The first `tokens` tokens.
    pub(super) fn text(&self, tokens: Tokens) -> String {
        let mut text = String::new();
        for at in 0..tokens {
            self.piece(at, &mut text);
        }
        text
    }
}

/// Arguments that fit a tool's JSON schema as far as names and types go: its required properties, or all if it requires none.
fn arguments(tool: &Tool, seed: u64) -> String {
    let properties = tool.schema.get("properties").and_then(|properties| properties.as_object());
    let required: Option<Vec<&str>> =
        tool.schema.get("required").and_then(|names| names.as_array()).map(|names| names.iter().filter_map(|name| name.as_str()).collect());
    let mut object = serde_json::Map::new();
    for (at, (name, schema)) in properties.into_iter().flatten().enumerate() {
        if required.as_ref().is_none_or(|required| required.contains(&name.as_str())) {
            object.insert(name.clone(), example(schema, mix(seed.wrapping_add(at as u64))));
        }
    }
    serde_json::Value::Object(object).to_string()
}

fn example(schema: &serde_json::Value, seed: u64) -> serde_json::Value {
    if let Some(first) = schema.get("enum").and_then(|values| values.get(0)) {
        return first.clone();
    }
    match schema.get("type").and_then(|kind| kind.as_str()) {
        Some("integer" | "number") => (seed % 100).into(),
        Some("boolean") => seed.is_multiple_of(2).into(),
        Some("array") => serde_json::Value::Array(Vec::new()),
        Some("object") => serde_json::Value::Object(serde_json::Map::new()),
        Some("null") => serde_json::Value::Null,
        _ => WORDS[(seed % WORDS.len() as u64) as usize].into(),
    }
}

/// A hash of a text (FNV-1a), the same in every process.
pub(super) fn fingerprint(text: &str) -> u64 {
    extend(0xcbf2_9ce4_8422_2325, text.as_bytes())
}

/// Continues a hash over more bytes.
pub(super) fn extend(hash: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(hash, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Spreads the bits of a number over all of it (the finaliser of SplitMix64).
pub(super) fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_lengths_have_the_median_and_spread_they_should() {
        let model = LengthModel { median: 100.0, sigma: 0.8 };
        let mut drawn: Vec<Tokens> = (0..10_001).map(|seed| model.draw(seed)).collect();
        drawn.sort_unstable();
        assert!((95..=105).contains(&drawn[5_000]), "median {}", drawn[5_000]);
        // One standard deviation up: 100 * e^0.8 = 223.
        assert!((210..=236).contains(&drawn[8_413]), "84.13th percentile {}", drawn[8_413]);
        assert!(drawn[0] >= 1);
    }

    #[test]
    fn a_hash_is_the_same_in_every_process() {
        // Test vectors of FNV-1a's authors.
        assert_eq!((fingerprint("a"), fingerprint("foobar")), (0xaf63_dc4c_8601_ec8c, 0x8594_4171_f739_67e8));
        assert_eq!(fingerprint("headway"), extend(fingerprint("head"), b"way"));
    }
}
