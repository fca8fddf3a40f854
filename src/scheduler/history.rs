//! What came before a request: the beginnings that its prompt shares with others, and the session that it belongs to.

use super::event::{Prefix, Tokens};

/// What a request goes on from. Shared, because whoever sends a request again says the same of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct History {
    hashes: [u64; History::MOST],
    /// 0 where there are no more.
    tokens: [Tokens; History::MOST],
    session: u64,
    has_session: bool,
}

impl History {
    /// Beginnings of one prompt, at most.
    pub const MOST: usize = 7;

    /// Beginnings from the shortest to the longest, which is best the whole prompt: the next turn of a conversation begins with it. Empty ones and those beyond
    /// [`History::MOST`] are left out. `session` is equal for requests of one session or agent program of one tenant.
    pub fn new(beginnings: impl IntoIterator<Item = Prefix>, session: Option<u64>) -> Self {
        let mut history = History { session: session.unwrap_or(0), has_session: session.is_some(), ..History::default() };
        let beginnings = beginnings.into_iter().filter(|beginning| beginning.tokens > 0).take(Self::MOST);
        for (place, beginning) in beginnings.enumerate() {
            (history.hashes[place], history.tokens[place]) = (beginning.hash, beginning.tokens);
        }
        history
    }

    /// The beginnings, the longest first.
    pub fn longest_first(&self) -> impl Iterator<Item = Prefix> {
        let all = self.hashes.iter().zip(&self.tokens).rev();
        all.filter(|(_, tokens)| **tokens > 0).map(|(&hash, &tokens)| Prefix { hash, tokens })
    }

    /// The same in this session.
    pub fn in_session(self, session: Option<u64>) -> Self {
        History { session: session.unwrap_or(0), has_session: session.is_some(), ..self }
    }

    /// Whether nothing came before.
    pub fn is_empty(&self) -> bool {
        *self == History::default()
    }

    /// The session, where there is one.
    pub fn session(&self) -> Option<u64> {
        self.has_session.then_some(self.session)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_a_few_beginnings_and_tells_the_longest_first() {
        let prefix = |tokens| Prefix { hash: u64::from(tokens) * 7, tokens };
        let history = History::new([0, 10, 20, 30].map(prefix), Some(3));
        assert_eq!(history.longest_first().collect::<Vec<_>>(), [30, 20, 10].map(prefix));
        assert_eq!(history.session(), Some(3));
        let many = History::new((1..100).map(prefix), None);
        assert_eq!((many.longest_first().count(), many.session()), (History::MOST, None));
        assert_eq!(History::default().longest_first().count(), 0);
    }
}
