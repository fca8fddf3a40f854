//! Response bodies: a document, a stream that follows a request through the engine, or a piece of either when a fault says so.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use super::driver::Running;
use super::feed::End;
use super::render::Rendering;

/// See the module.
pub(super) enum Reply {
    Whole(Option<Bytes>),
    Stream(Box<Streaming>),
    /// Promises `promised` bytes, sends some and breaks off.
    Half {
        promised: u64,
        bytes: Option<Bytes>,
        fall: Fall,
    },
}

/// A connection that is about to break: what was written before must reach the socket first, so the error comes one poll later.
#[derive(Default)]
pub(super) struct Fall {
    flushed: bool,
}

impl Fall {
    fn poll<T>(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<T>>> {
        if self.flushed {
            return Poll::Ready(Some(Err(broken("as the fault in force demands"))));
        }
        self.flushed = true;
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

/// The events of one answer, as the engine produces it.
pub(super) struct Streaming {
    running: Running,
    rendering: Rendering,
    seen: u32,
    done: bool,
    /// Events left until the connection breaks.
    fuse: Option<u32>,
    fall: Fall,
}

impl Streaming {
    pub(super) fn new(running: Running, rendering: Rendering, die_after_events: Option<u32>) -> Self {
        Streaming { running, rendering, seen: 0, done: false, fuse: die_after_events, fall: Fall::default() }
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if self.fuse == Some(0) {
            return self.fall.poll(context);
        }
        if self.done {
            return Poll::Ready(None);
        }
        let Poll::Ready(progress) = self.running.feed.poll(self.seen, context) else { return Poll::Pending };
        if progress.end == Some(End::Cut) {
            return Poll::Ready(Some(Err(broken("the engine was reset"))));
        }
        let mut bytes = Vec::with_capacity(512);
        if self.seen == 0 {
            self.rendering.head(progress.cached, &mut bytes);
        }
        for at in self.seen..progress.produced {
            self.rendering.token(at, &mut bytes);
        }
        self.seen = progress.produced;
        if progress.end == Some(End::Finished) {
            self.rendering.tail(progress.cached, &mut bytes);
            self.done = true;
        }
        if let Some(left) = &mut self.fuse {
            burn(&mut bytes, left);
        }
        Poll::Ready(Some(Ok(bytes.into())))
    }
}

/// Keeps as many events as are left, and counts them.
fn burn(bytes: &mut Vec<u8>, left: &mut u32) {
    let ends: Vec<usize> = (1..bytes.len()).filter(|&at| bytes[at - 1..=at] == *b"\n\n").map(|at| at + 1).collect();
    let kept = ends.len().min(*left as usize);
    bytes.truncate(if kept == 0 { 0 } else { ends[kept - 1] });
    *left -= kept as u32;
}

fn broken(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, format!("the connection is broken off: {why}"))
}

impl Body for Reply {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let polled = match &mut *self {
            Reply::Whole(bytes) => Poll::Ready(bytes.take().map(Ok)),
            Reply::Stream(streaming) => streaming.poll(context),
            Reply::Half { bytes, fall, .. } => match bytes.take() {
                Some(bytes) => Poll::Ready(Some(Ok(bytes))),
                None => fall.poll(context),
            },
        };
        polled.map(|item| item.map(|bytes| bytes.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Reply::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Reply::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Reply::Stream(_) => SizeHint::default(),
            Reply::Half { promised, .. } => SizeHint::with_exact(*promised),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fuse_counts_whole_events() {
        let mut bytes = b"data: a\n\ndata: b\n\ndata: c\n\n".to_vec();
        let mut left = 2;
        burn(&mut bytes, &mut left);
        assert_eq!((bytes.as_slice(), left), (b"data: a\n\ndata: b\n\n".as_slice(), 0));
        let mut left = 5;
        burn(&mut bytes, &mut left);
        assert_eq!((bytes.len(), left), (18, 3));
    }
}
