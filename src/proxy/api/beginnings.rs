//! Which beginnings of a prompt others may share: hashed while the prompt is read, so that a request can go to the backend that has them cached.
//!
//! A conversation grows: the next prompt is this one, the answer, and what the client says then. So a prompt ends where the next one's last answer begins, and what
//! is named of it are the end of what comes before the words of anybody (tools and system prompt), the beginnings of its last answers, and its own end. Long texts are
//! also named at fixed lengths, for those who put what they share into one message.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

use foldhash::SharedSeed;
use foldhash::quality::{FoldHasher, SeedableRandomState};

use super::tokens;
use crate::scheduler::{History, Prefix, Tokens};

/// Shorter beginnings are not worth a detour: engines cache blocks of 16 tokens or more.
const LEAST: Tokens = 64;
/// How many of the last answers' beginnings are named: one is the turn before, the others are those of whoever goes back and asks otherwise.
const ANSWERS: usize = 3;
/// Bytes of text after which a beginning is named, whatever is said there.
const CUTS: [usize; 2] = [4 << 10, 32 << 10];

/// One of this process, so that nobody outside can make two texts look the same. What a hash says of a text stays in the process.
static SALT: LazyLock<SeedableRandomState> =
    LazyLock::new(|| SeedableRandomState::with_seed(RandomState::new().hash_one("beginnings"), SharedSeed::global_random()));

/// A hash that only this process can compute.
pub fn salted(text: &[u8]) -> u64 {
    SALT.hash_one(text)
}

/// Walks along a prompt as it is read, from the beginning.
pub struct Beginnings {
    hasher: FoldHasher<'static>,
    /// Bytes of text so far.
    bytes: usize,
    /// Everything so far could be read. What comes behind something that could not is not known.
    readable: bool,
    /// The first words of somebody have come.
    begun: bool,
    /// The last thing was a model's.
    answering: bool,
    /// Beginnings but those of answers, and those.
    fixed: [Prefix; 1 + CUTS.len()],
    answers: [Prefix; ANSWERS],
}

const NONE: Prefix = Prefix { hash: 0, tokens: 0 };

impl Beginnings {
    /// A prompt of this model with these tools. Engines cache for each model apart, and put tools first.
    pub fn new(model: &str, tools: Option<&str>) -> Self {
        let mut hasher = SALT.build_hasher();
        hasher.write(model.as_bytes());
        hasher.write(tools.unwrap_or_default().as_bytes());
        Beginnings { hasher, bytes: 0, readable: true, begun: false, answering: false, fixed: [NONE; 1 + CUTS.len()], answers: [NONE; ANSWERS] }
    }

    /// Somebody begins to speak, behind `tokens` of the prompt.
    pub fn turn(&mut self, speaker: Speaker, tokens: Tokens) {
        match speaker {
            Speaker::System => {}
            Speaker::Model | Speaker::Client if !self.begun => {
                self.begun = true;
                self.fixed[0] = self.so_far(tokens);
            }
            Speaker::Model if !self.answering => {
                self.answers.rotate_left(1);
                self.answers[ANSWERS - 1] = self.so_far(tokens);
            }
            Speaker::Model | Speaker::Client => {}
        }
        self.answering = speaker == Speaker::Model;
        self.hasher.write_u8(speaker as u8);
    }

    /// What is said; `before` are the prompt's tokens before it.
    pub fn text(&mut self, text: &str, before: Tokens) {
        let mut rest = text.as_bytes();
        let mut done = 0;
        for (place, cut) in CUTS.into_iter().enumerate() {
            if self.bytes < cut && cut <= self.bytes + rest.len() {
                let (head, tail) = rest.split_at(cut - self.bytes);
                self.hasher.write(head);
                self.bytes = cut;
                done += head.len();
                self.fixed[1 + place] = self.so_far(before.saturating_add(tokens(done)));
                rest = tail;
            }
        }
        self.hasher.write(rest);
        self.bytes += rest.len();
    }

    /// Something that cannot be compared by its text: an image, a piece of audio, a document.
    pub fn unreadable(&mut self) {
        self.readable = false;
    }

    /// The prompt is over, after so many tokens.
    pub fn end(self, tokens: Tokens) -> History {
        let end = self.so_far(tokens);
        let mut all = [NONE; History::MOST];
        for (place, prefix) in all.iter_mut().zip(self.fixed.into_iter().chain(self.answers).chain([end])) {
            *place = prefix;
        }
        all.sort_unstable_by_key(|prefix| prefix.tokens);
        History::new(all, None)
    }

    fn so_far(&self, tokens: Tokens) -> Prefix {
        if self.readable && tokens >= LEAST { Prefix { hash: self.hasher.finish(), tokens } } else { NONE }
    }
}

/// Who says something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speaker {
    System = 1,
    /// The user, and tools.
    Client = 2,
    /// What an earlier answer brought.
    Model = 3,
}

#[cfg(test)]
mod tests {
    use super::super::{Api, parse};
    use super::*;

    /// The beginnings of a body, the longest first.
    fn of(api: Api, body: &serde_json::Value) -> Vec<Prefix> {
        let prompt = parse(api, body.to_string().as_bytes()).unwrap();
        let beginnings: Vec<Prefix> = prompt.history.longest_first().collect();
        assert!(
            beginnings.iter().all(|prefix| (LEAST..=prompt.prompt_tokens).contains(&prefix.tokens)),
            "{beginnings:?} of {}",
            prompt.prompt_tokens
        );
        beginnings
    }

    fn say(role: &str, words: usize) -> serde_json::Value {
        json!({"role": role, "content": format!("{role} says ") + &"word ".repeat(words)})
    }

    fn chat(messages: &[serde_json::Value]) -> serde_json::Value {
        json!({"model": "m", "messages": messages})
    }

    use serde_json::json;

    #[test]
    fn the_next_turn_names_where_the_one_before_ended() {
        let mut messages = vec![say("system", 300), say("user", 100)];
        let mut ends = Vec::new();
        for turn in 1..6 {
            let beginnings = of(Api::Chat, &chat(&messages));
            assert_eq!(beginnings.len(), 2 + (turn - 1).min(ANSWERS), "all of it, the turns before, and the system prompt: {beginnings:?}");
            assert!(ends.iter().rev().take(ANSWERS).all(|end| beginnings[1..].contains(end)), "{ends:?} in {beginnings:?}");
            assert_eq!(beginnings.last(), of(Api::Chat, &chat(&[say("system", 300), say("user", 7 * turn)])).last(), "whatever is asked");
            ends.push(beginnings[0]);
            messages.extend([say("assistant", 10 * turn), say("user", 20 * turn)]);
        }
    }

    #[test]
    fn an_agent_goes_on_after_its_tools_have_answered() {
        let call = |id: u32| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
        let mut messages = vec![say("system", 300), say("user", 100)];
        let before = of(Api::Chat, &chat(&messages))[0];
        messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call(1), call(2)]}));
        messages.extend([1, 2].map(|id| json!({"role": "tool", "tool_call_id": id, "content": "found it ".repeat(40)})));
        let after = of(Api::Chat, &chat(&messages));
        assert_eq!(after[1], before);
        messages[2]["tool_calls"][0]["id"] = json!(3);
        assert_ne!(of(Api::Chat, &chat(&messages))[0], after[0], "another call is another prompt");

        // The same as items of a response: a call and a thought have no role.
        let items = |more: &[serde_json::Value]| {
            let mut input = vec![say("user", 100)];
            input.extend_from_slice(more);
            json!({"model": "m", "instructions": "be brief ".repeat(50), "input": input})
        };
        let before = of(Api::Responses, &items(&[]));
        let answer = [json!({"type": "reasoning", "summary": []}), json!({"type": "function_call", "name": "f", "arguments": "{}"})];
        let result = json!({"type": "function_call_output", "output": "found it ".repeat(40)});
        let after = of(Api::Responses, &items(&[answer[0].clone(), answer[1].clone(), result]));
        assert_eq!((after[1], after.last()), (before[0], before.last()));
    }

    /// Clients of Anthropic's API mark what is to be cached, and the mark moves on.
    #[test]
    fn a_mark_beside_a_text_is_no_part_of_it() {
        let turn = |marked: bool| {
            let mut part = json!({"type": "text", "text": "word ".repeat(100)});
            if marked {
                part["cache_control"] = json!({"type": "ephemeral"});
            }
            json!({"role": "user", "content": [part]})
        };
        let body = |messages: &[serde_json::Value]| json!({"model": "m", "max_tokens": 9, "system": "be brief ".repeat(50), "messages": messages});
        let first = of(Api::Messages, &body(&[turn(true)]));
        let second = of(Api::Messages, &body(&[turn(false), say("assistant", 50), turn(true)]));
        assert_eq!((second[1], second.last()), (first[0], first.last()));
    }

    #[test]
    fn models_and_tools_have_beginnings_of_their_own() {
        let body = |model: &str, tool: &str| json!({"messages": [say("system", 300), say("user", 100)], "tools": [{"name": tool}], "model": model});
        let all = [body("m", "f"), body("m", "g"), body("n", "f")].map(|body| of(Api::Chat, &body));
        for (one, other) in [(0, 1), (0, 2), (1, 2)] {
            assert!(all[one].iter().all(|prefix| all[other].iter().all(|other| other.hash != prefix.hash)));
        }
        assert_eq!(all[0], of(Api::Chat, &body("m", "f")));
    }

    #[test]
    fn nothing_is_named_behind_what_cannot_be_read() {
        let image =
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "word ".repeat(100)}]});
        let body = chat(&[say("system", 300), image, say("assistant", 100), say("user", 100)]);
        assert_eq!(of(Api::Chat, &body), of(Api::Chat, &chat(&[say("system", 300), say("user", 1)]))[1..], "the system prompt");
        let several = json!({"model": "m", "prompt": ["word ".repeat(100), "word ".repeat(200)]});
        assert_eq!(of(Api::Completions, &several), []);
        assert_eq!(of(Api::Chat, &chat(&[say("user", 3)])), [], "too short to be worth it");
        assert_eq!(of(Api::Other, &chat(&[say("user", 300)])), []);
    }

    #[test]
    fn one_long_text_is_named_at_fixed_lengths() {
        let plain = |tail: &str| json!({"model": "m", "prompt": "word ".repeat(10_000) + tail});
        let (one, other) = (of(Api::Completions, &plain("a")), of(Api::Completions, &plain("b")));
        assert_eq!((one.len(), &one[1..]), (1 + CUTS.len(), &other[1..]));
        assert_eq!(one[1..].iter().map(|prefix| prefix.tokens).collect::<Vec<_>>(), [8192, 1024]);
        assert_ne!(one[0], other[0]);
    }
}
