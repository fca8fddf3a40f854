//! A request's body: read whole, within bounds of size, time and memory.
//!
//! Whole, because the order depends on what the prompt says, and because a request that can be sent again needs its body.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::time::timeout;

use crate::config::Edge;

/// A body of one piece up to this size is copied: as it comes, it is a slice of the connection's read buffer, and would keep all of that while it waits.
const COPIED: usize = 8 << 10;

/// The memory that all bodies take together.
#[derive(Clone, Debug, Default)]
pub struct Budget(Arc<AtomicU64>);

/// A part of the [`Budget`], given back on drop.
#[derive(Debug, Default)]
pub struct Share {
    budget: Budget,
    bytes: u64,
}

/// A body and the memory it takes.
#[derive(Debug, Default)]
pub struct Held {
    pub bytes: Bytes,
    _share: Share,
}

/// Why a body was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    #[error("the body is larger than the limit of {limit} bytes")]
    TooLarge { limit: u64 },
    #[error("the bodies of all waiting requests together are at their limit of {limit} bytes")]
    NoRoom { limit: u64 },
    #[error("the body did not come within {0:?}")]
    Timeout(Duration),
    #[error("the body broke off")]
    Broken,
}

impl Budget {
    /// Bytes held now.
    pub fn used(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl Share {
    fn grow(&mut self, bytes: u64, limit: u64) -> Result<(), BodyError> {
        // Counted first and taken back on failure by drop: two that race may both be refused, never both be let in.
        self.bytes += bytes;
        let before = self.budget.0.fetch_add(bytes, Ordering::Relaxed);
        if before + bytes > limit { Err(BodyError::NoRoom { limit }) } else { Ok(()) }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Reads a body to its end.
///
/// # Errors
/// A declared length over the limit is refused before anything is read, so that a client that expects a `100 Continue` does not get it.
pub async fn read<B>(body: &mut B, limits: &Edge, budget: &Budget) -> Result<Held, BodyError>
where
    B: Body<Data = Bytes> + Unpin,
{
    let too_large = BodyError::TooLarge { limit: limits.max_body };
    let declared = body.size_hint().exact();
    if declared.is_some_and(|length| length > limits.max_body) {
        return Err(too_large);
    }
    let reading = async {
        let mut share = Share { budget: budget.clone(), bytes: 0 };
        let mut first = Bytes::new();
        let mut all = BytesMut::new();
        while let Some(frame) = body.frame().await {
            // Trailers mean nothing here.
            let Ok(data) = frame.map_err(|_| BodyError::Broken)?.into_data() else { continue };
            share.grow(data.len() as u64, limits.max_body_total)?;
            if share.bytes > limits.max_body {
                return Err(too_large);
            }
            if first.is_empty() {
                first = data;
                continue;
            }
            if all.is_empty() {
                // The declared length is within the limit; a kernel hands out pages only as they are filled.
                all.reserve(declared.map_or(2 * first.len(), |length| usize::try_from(length).unwrap_or(0)));
                all.extend_from_slice(&first);
            }
            all.extend_from_slice(&data);
        }
        let bytes = match (all.is_empty(), first.len() <= COPIED) {
            (true, true) => Bytes::copy_from_slice(&first),
            (true, false) => first,
            (false, _) => all.freeze(),
        };
        Ok(Held { bytes, _share: share })
    };
    timeout(limits.body_timeout, reading).await.unwrap_or(Err(BodyError::Timeout(limits.body_timeout)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body::Frame;
    use http_body_util::Full;
    use std::convert::Infallible;
    use std::pin::Pin;
    use std::task::{Context, Poll};
    use tokio::sync::mpsc;

    fn limits(max_body: u64, max_body_total: u64) -> Edge {
        Edge { max_body, max_body_total, ..Edge::default() }
    }

    /// A body of undeclared length that comes as it is told.
    struct Told(mpsc::UnboundedReceiver<Bytes>);

    impl Body for Told {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            self.0.poll_recv(cx).map(|data| data.map(|data| Ok(Frame::data(data))))
        }
    }

    fn told() -> (mpsc::UnboundedSender<Bytes>, Told) {
        let (sender, frames) = mpsc::unbounded_channel();
        (sender, Told(frames))
    }

    #[tokio::test]
    async fn one_piece_is_kept_as_it_is_unless_it_is_small() {
        for (length, is_kept) in [(7, false), (COPIED, false), (COPIED + 1, true)] {
            let bytes = Bytes::from(vec![b'x'; length]);
            let held = read(&mut Full::new(bytes.clone()), &limits(1 << 20, 1 << 20), &Budget::default()).await.unwrap();
            assert_eq!(held.bytes, bytes);
            assert_eq!(held.bytes.as_ptr() == bytes.as_ptr(), is_kept, "{length}");
        }
    }

    #[tokio::test]
    async fn sizes_are_bounded_alone_and_in_sum() {
        let budget = Budget::default();
        let body = || Full::new(Bytes::from_static(b"12345678"));
        assert_eq!(read(&mut body(), &limits(7, 100), &budget).await.unwrap_err(), BodyError::TooLarge { limit: 7 });
        let held = read(&mut body(), &limits(8, 12), &budget).await.unwrap();
        assert_eq!(read(&mut body(), &limits(8, 12), &budget).await.unwrap_err(), BodyError::NoRoom { limit: 12 });
        assert_eq!(budget.used(), 8);
        drop(held);
        assert_eq!(budget.used(), 0);

        let (frames, mut body) = told();
        for _ in 0..3 {
            frames.send(Bytes::from_static(b"123")).unwrap();
        }
        assert_eq!(read(&mut body, &limits(8, 100), &budget).await.unwrap_err(), BodyError::TooLarge { limit: 8 });
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test]
    async fn pieces_become_one() {
        let (frames, mut body) = told();
        for piece in ["", "ab", "", "c", "def"] {
            frames.send(Bytes::from(piece)).unwrap();
        }
        drop(frames);
        let budget = Budget::default();
        assert_eq!(read(&mut body, &limits(6, 6), &budget).await.unwrap().bytes, "abcdef");
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_never_ends_is_given_up() {
        let (frames, mut body) = told();
        frames.send(Bytes::from_static(b"ab")).unwrap();
        let (budget, limits) = (Budget::default(), limits(8, 8));
        assert_eq!(read(&mut body, &limits, &budget).await.unwrap_err(), BodyError::Timeout(limits.body_timeout));
        assert_eq!(budget.used(), 0);
        // So is one that its reader gives up.
        let _ = timeout(Duration::from_millis(1), read(&mut body, &limits, &budget)).await;
        assert_eq!(budget.used(), 0);
    }
}
