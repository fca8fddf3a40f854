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
pub fn salted(text: &str) -> u64 {
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
        Beginnings {
            hasher,
            bytes: 0,
            readable: true,
            begun: false,
            answering: false,
            fixed: [NONE; 1 + CUTS.len()],
            answers: [NONE; ANSWERS],
        }
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
