//! A connection's socket that can be told to write bytes which are no HTTP.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

const GARBAGE: &[u8] = b"\x16\x03\x01 this is not HTTP\r\n\r\n";

/// See the module.
pub(super) struct Socket {
    inner: TokioIo<TcpStream>,
    /// Once true, the next write sends garbage instead and breaks the connection.
    spoiled: Arc<AtomicBool>,
}

impl Socket {
    pub(super) fn new(stream: TcpStream) -> (Self, Arc<AtomicBool>) {
        let spoiled = Arc::new(AtomicBool::new(false));
        (Socket { inner: TokioIo::new(stream), spoiled: Arc::clone(&spoiled) }, spoiled)
    }

    fn poll_spoil(&mut self, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        ready!(Pin::new(&mut self.inner).poll_write(context, GARBAGE))?;
        Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, "spoiled by a fault")))
    }
}

impl Read for Socket {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl Write for Socket {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.spoiled.load(Ordering::Relaxed) {
            return self.poll_spoil(context);
        }
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, context: &mut Context<'_>, slices: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        if self.spoiled.load(Ordering::Relaxed) {
            return self.poll_spoil(context);
        }
        Pin::new(&mut self.inner).poll_write_vectored(context, slices)
    }
}
