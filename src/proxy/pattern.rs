//! What an answer's events have in common: all but a short text. Pure.
//!
//! An engine sends one event a token, and each is the one before it with another word: comparing the bytes around that word says all that parsing would.

use std::ops::Range;

use super::api::json::place;
use crate::scheduler::Tokens;

/// The bytes around the text of an event whose only news is that text.
#[derive(Debug, Default)]
pub struct Pattern {
    /// Up to the text's opening quote; empty while no event is known.
    before: Vec<u8>,
    /// From its closing quote.
    after: Vec<u8>,
    /// Pieces of output that such an event brings.
    pieces: Tokens,
    /// Where a model's name stands that becomes another, in the event that was learnt, and that event's length.
    rename: Option<Range<usize>>,
    length: usize,
}

/// What an event that fits does.
#[derive(Debug, PartialEq, Eq)]
pub struct Fits {
    /// Pieces of output that it brings.
    pub pieces: Tokens,
    /// Where it names a model that becomes another.
    pub rename: Option<Range<usize>>,
}

impl Pattern {
    /// Knows no event any more.
    pub fn forget(&mut self) {
        self.before.clear();
    }

    /// Events are like `line` from now on, but for `text`, a slice of it between quotes.
    pub fn learn(&mut self, line: &[u8], text: &str, fits: Fits) {
        let text = place(text, line);
        self.before.clear();
        self.before.extend_from_slice(&line[..text.start]);
        self.after.clear();
        self.after.extend_from_slice(&line[text.end..]);
        (self.pieces, self.rename, self.length) = (fits.pieces, fits.rename, line.len());
    }

    /// What `line` does, if it is the event that was learnt with another text. `None` says nothing about it.
    pub fn fits(&self, line: &[u8]) -> Option<Fits> {
        if self.before.is_empty() {
            return None;
        }
        let text = line.strip_prefix(&self.before[..])?.strip_suffix(&self.after[..])?;
        if !is_text(text) {
            return None;
        }
        let rename = self.rename.clone().map(|place| match place.start < self.before.len() {
            true => place,
            false => place.start + line.len() - self.length..place.end + line.len() - self.length,
        });
        Some(Fits { pieces: self.pieces, rename })
    }
}

/// Whether it is the inside of a JSON string (RFC 8259, 7) that is not empty. Escapes of code points are not looked into: `false`.
fn is_text(inside: &[u8]) -> bool {
    let (mut bytes, mut ascii) = (inside.iter(), true);
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' | ..0x20 => return false,
            b'\\' if !bytes.next().is_some_and(|escaped| br#""\/bfnrt"#.contains(escaped)) => return false,
            byte => ascii &= byte.is_ascii(),
        }
    }
    !inside.is_empty() && (ascii || std::str::from_utf8(inside).is_ok())
}
