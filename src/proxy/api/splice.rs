//! Changes of single places in a body. What does not change is not copied.

use std::io::IoSlice;
use std::ops::Range;
use std::vec;

use bytes::{Buf, Bytes};

/// What to put where, in one body.
#[derive(Clone, Debug, Default)]
pub struct Splices(Vec<(Range<usize>, Vec<u8>)>);

impl Splices {
    /// Puts `text` in place of `range`.
    pub fn replace(&mut self, range: Range<usize>, text: Vec<u8>) {
        self.0.push((range, text));
    }

    /// Puts `text` before the byte at `at`.
    pub fn insert(&mut self, at: usize, text: Vec<u8>) {
        self.0.push((at..at, text));
    }

    /// The body with the changes made. Ranges that overlap an earlier one, or reach past the end, are left out.
    pub fn apply(mut self, body: &Bytes) -> Payload {
        if self.0.is_empty() {
            return Payload::from(body.clone());
        }
        self.0.sort_by_key(|(range, _)| (range.start, range.end));
        let mut pieces = Vec::with_capacity(2 * self.0.len() + 1);
        let mut done = 0;
        for (range, text) in self.0 {
            if range.start < done || range.end > body.len() {
                continue;
            }
            pieces.push(body.slice(done..range.start));
            pieces.push(Bytes::from(text));
            done = range.end;
        }
        pieces.push(body.slice(done..));
        pieces.retain(|piece| !piece.is_empty());
        let length = pieces.iter().map(Bytes::len).sum();
        let mut pieces = pieces.into_iter();
        Payload { next: pieces.next().unwrap_or_default(), rest: pieces, length }
    }
}

/// A request body ready to be sent: its length is known and its pieces are shared with the body they came from.
#[derive(Clone, Debug, Default)]
pub struct Payload {
    /// Empty at the end alone.
    next: Bytes,
    rest: vec::IntoIter<Bytes>,
    /// Of all that is still to come.
    length: usize,
}

impl From<Bytes> for Payload {
    fn from(body: Bytes) -> Self {
        Payload { length: body.len(), next: body, rest: vec::IntoIter::default() }
    }
}

impl Buf for Payload {
    fn remaining(&self) -> usize {
        self.length
    }

    fn chunk(&self) -> &[u8] {
        &self.next
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let pieces = self.pieces().filter(|piece| !piece.is_empty());
        pieces.zip(slices).map(|(piece, slice)| *slice = IoSlice::new(piece)).count()
    }

    fn advance(&mut self, mut count: usize) {
        self.length -= count;
        while count >= self.next.len() && count > 0 {
            count -= self.next.len();
            self.next = self.rest.next().unwrap_or_default();
        }
        self.next.advance(count);
    }
}

impl Payload {
    fn pieces(&self) -> impl Iterator<Item = &Bytes> {
        std::iter::once(&self.next).chain(self.rest.as_slice())
    }
}

#[cfg(test)]
impl Payload {
    /// All of it in one piece.
    pub fn concat(&self) -> Vec<u8> {
        let all: Vec<u8> = self.pieces().flatten().copied().collect();
        assert_eq!(all.len(), self.length);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_made_in_place_and_share_the_rest() {
        let body = Bytes::from_static(b"0123456789");
        let mut splices = Splices::default();
        splices.replace(7..9, b"xyz".to_vec());
        splices.insert(0, b"<".to_vec());
        splices.replace(3..4, Vec::new());
        let payload = splices.apply(&body);
        assert_eq!(payload.concat(), b"<012456xyz9");
        assert!(payload.pieces().any(|piece| piece.as_ptr() == body[4..].as_ptr()));
    }

    #[test]
    fn without_changes_it_is_the_same_memory() {
        let body = Bytes::from_static(b"abc");
        assert_eq!(Splices::default().apply(&body).next.as_ptr(), body.as_ptr());
        assert!(!Payload::from(Bytes::new()).has_remaining());
    }
}
