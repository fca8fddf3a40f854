//! One client's connection: which HTTP it speaks, whether anyone is still there, how long it may be silent.
//!
//! hyper serves HTTP/1.1 requests one after another and does not read while bytes of a next one wait in its buffer. A client that pipelines and then leaves
//! would keep its place in the queue; [`Downstream`] reads ahead in hyper's place, notices, and fails the connection, which drops the request.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, timeout};

/// The first bytes of an HTTP/2 connection (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How long a connection may be kept without a request. Longer than the 60 s of common load balancers, so that they are the ones who close.
const IDLE: Duration = Duration::from_secs(75);
/// How long a client may take none of the bytes that are ready for it.
pub(super) const STALLED: Duration = Duration::from_secs(60);
/// Bytes that are read ahead to notice a client that left; who pipelines more than this is noticed when its turn comes.
const AHEAD: usize = 16 << 10;

/// Which HTTP a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Http1,
    Http2,
}

/// What a connection and its requests tell each other.
#[derive(Debug, Default)]
pub struct Vitals {
    /// Requests that have begun.
    begun: AtomicUsize,
    /// Requests that have ended.
    ended: AtomicUsize,
    /// Requests whose bodies are being read.
    uploading: AtomicUsize,
    /// The connection had no request for too long.
    expired: AtomicBool,
}

/// One request in progress on a connection.
#[derive(Debug)]
pub struct InProgress(Arc<Vitals>);

/// One request whose body is being read: who reads notices when the client leaves.
#[derive(Debug)]
pub struct Uploading(Arc<Vitals>);

impl Vitals {
    /// Counts a request until the value is dropped.
    pub fn begin(self: &Arc<Self>) -> InProgress {
        self.begun.fetch_add(1, Ordering::Relaxed);
        InProgress(Arc::clone(self))
    }

    /// The body of a request is being read until the value is dropped.
    pub fn upload(self: &Arc<Self>) -> Uploading {
        self.uploading.fetch_add(1, Ordering::Relaxed);
        Uploading(Arc::clone(self))
    }

    /// Whether the connection should be closed for being idle.
    pub fn is_expired(&self) -> bool {
        self.expired.load(Ordering::Relaxed)
    }

    fn is_uploading(&self) -> bool {
        self.uploading.load(Ordering::Relaxed) > 0
    }

    fn is_busy(&self) -> bool {
        self.begun.load(Ordering::Relaxed) != self.ended.load(Ordering::Relaxed)
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Uploading {
    fn drop(&mut self) {
        self.0.uploading.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The client's socket (or TLS stream) as hyper sees it.
pub struct Downstream<S> {
    stream: S,
    protocol: Protocol,
    /// A client that has closed its sending side may still be there.
    half_close: bool,
    vitals: Arc<Vitals>,
    /// Read before hyper asked.
    ahead: BytesMut,
    /// hyper has asked in this round, and waits.
    asked: bool,
    silence: Silence,
    /// Requests that had begun when `silence` was last looked at.
    begun: usize,
    head_timeout: Duration,
    /// Fires when a silence may have lasted too long; its deadline is only ever too early.
    patience: Pin<Box<Sleep>>,
    /// Until when the client may take nothing.
    stalled: Option<Pin<Box<Sleep>>>,
}

/// What the silence of a client without a request in progress means.
#[derive(Clone, Copy, Debug)]
enum Silence {
    /// It has no request.
    Idle(Instant),
    /// It has begun a head.
    Head(Instant),
}

impl<S: AsyncRead + AsyncWrite + Unpin> Downstream<S> {
    /// Waits for enough bytes to tell the protocol. `None` if the client left or took longer than `head_timeout`.
    pub async fn detect(mut stream: S, vitals: Arc<Vitals>, head_timeout: Duration, half_close: bool) -> Option<Downstream<S>> {
        let began = Instant::now();
        let mut ahead = BytesMut::with_capacity(8 << 10);
        let detecting = async {
            loop {
                if stream.read_buf(&mut ahead).await.ok()? == 0 {
                    return None;
                }
                if ahead.starts_with(PREFACE) {
                    return Some(Protocol::Http2);
                }
                if !PREFACE.starts_with(&ahead) {
                    return Some(Protocol::Http1);
                }
            }
        };
        let protocol = timeout(head_timeout, detecting).await.ok()??;
        let patience = Box::pin(tokio::time::sleep_until(began + head_timeout));
        Some(Downstream {
            stream,
            protocol,
            half_close,
            vitals,
            ahead,
            asked: false,
            silence: Silence::Head(began),
            begun: 0,
            head_timeout,
            patience,
            stalled: None,
        })
    }

    /// Which HTTP the client speaks.
    pub fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Takes note of what a silence means from now on.
    fn note(&mut self, came: bool) {
        let begun = self.vitals.begun.load(Ordering::Relaxed);
        if self.vitals.is_busy() {
            return;
        }
        let is_new = std::mem::replace(&mut self.begun, begun) != begun;
        match self.silence {
            Silence::Idle(_) if came => self.silence = Silence::Head(Instant::now()),
            _ if is_new => self.silence = if came { Silence::Head(Instant::now()) } else { Silence::Idle(Instant::now()) },
            _ => {}
        }
    }

    /// Ends a silence that lasts too long: an error for a head that does not come, a mark for a connection without requests.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if self.vitals.is_busy() {
            return Poll::Pending;
        }
        let until = match self.silence {
            Silence::Head(since) if self.protocol == Protocol::Http1 => since + self.head_timeout,
            Silence::Head(since) | Silence::Idle(since) => since + IDLE,
        };
        if self.patience.deadline() > until {
            self.patience.as_mut().reset(until);
        }
        loop {
            ready!(self.patience.as_mut().poll(cx));
            if until > Instant::now() {
                self.patience.as_mut().reset(until);
                continue;
            }
            if let (Silence::Head(_), Protocol::Http1) = (self.silence, self.protocol) {
                return Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, "the head did not come in time"));
            }
            self.vitals.expired.store(true, Ordering::Relaxed);
            return Poll::Pending;
        }
    }

    /// Looks whether the client is still there while hyper does not read. One that has closed its sending side counts as gone: a close and a half-close
    /// look the same until something is written.
    fn poll_presence(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if std::mem::take(&mut self.asked)
            || self.half_close
            || self.protocol == Protocol::Http2
            || !self.vitals.is_busy()
            || self.vitals.is_uploading()
        {
            return Ok(());
        }
        while self.ahead.len() < AHEAD {
            // Nothing is set aside for bytes that nearly never come.
            let mut bytes = [MaybeUninit::uninit(); 1 << 10];
            let mut buffer = ReadBuf::uninit(&mut bytes);
            match Pin::new(&mut self.stream).poll_read(cx, &mut buffer) {
                Poll::Pending => break,
                Poll::Ready(Ok(())) if buffer.filled().is_empty() => return Err(io::Error::new(io::ErrorKind::ConnectionReset, "the client left")),
                Poll::Ready(Ok(())) => self.ahead.extend_from_slice(buffer.filled()),
                Poll::Ready(Err(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// Fails a write that makes no progress for too long.
    fn watch_writes<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let limit = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(STALLED)));
        ready!(limit.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing")))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Downstream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.ahead.is_empty() {
            let n = this.ahead.len().min(buffer.remaining());
            buffer.put_slice(&this.ahead[..n]);
            this.ahead.advance(n);
            if this.ahead.is_empty() {
                this.ahead = BytesMut::new();
            }
            return Poll::Ready(Ok(()));
        }
        match Pin::new(&mut this.stream).poll_read(cx, buffer) {
            Poll::Ready(result) => {
                this.note(true);
                Poll::Ready(result)
            }
            Poll::Pending => {
                this.asked = true;
                this.note(false);
                this.poll_silence(cx).map(Err)
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Downstream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.watch_writes(cx, written)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.watch_writes(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// hyper flushes at the end of every round, whether it has written or not: the place to look after the client.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        ready!(self.watch_writes(cx, flushed))?;
        Poll::Ready(self.poll_presence(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncWriteExt, DuplexStream, duplex};

    const HEAD: Duration = Duration::from_secs(10);

    async fn connected(first: &[u8]) -> (DuplexStream, Downstream<DuplexStream>, Arc<Vitals>) {
        let (mut client, server) = duplex(64 << 10);
        client.write_all(first).await.unwrap();
        let vitals = Arc::<Vitals>::default();
        let downstream = Downstream::detect(server, Arc::clone(&vitals), HEAD, false).await.unwrap();
        (client, downstream, vitals)
    }

    async fn read(downstream: &mut Downstream<DuplexStream>) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(1024);
        downstream.read_buf(&mut bytes).await.map(|_| bytes)
    }

    #[tokio::test(start_paused = true)]
    async fn the_protocol_is_told_by_the_first_bytes_however_they_come() {
        for (bytes, protocol) in
            [(PREFACE, Protocol::Http2), (b"GET / HTTP/1.1", Protocol::Http1), (b"PRI / HTTP/1.1", Protocol::Http1), (b"P\n", Protocol::Http1)]
        {
            let (mut client, server) = duplex(64);
            let sending = async {
                for byte in bytes {
                    client.write_all(&[*byte]).await.unwrap();
                    tokio::task::yield_now().await;
                }
            };
            let (downstream, ()) = tokio::join!(Downstream::detect(server, Arc::default(), HEAD, false), sending);
            let mut downstream = downstream.unwrap();
            assert_eq!(downstream.protocol(), protocol);
            let mut seen = Vec::new();
            while seen.len() < bytes.len() {
                seen.extend(read(&mut downstream).await.unwrap());
            }
            assert_eq!(seen, bytes);
        }
        let (mut client, server) = duplex(64);
        client.write_all(&PREFACE[..7]).await.unwrap();
        assert!(Downstream::detect(server, Arc::default(), HEAD, false).await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn silence_means_what_came_before_it() {
        // A head that does not go on is an error after its time; bytes in between win none.
        let (mut client, mut downstream, _) = connected(b"GET").await;
        let start = Instant::now();
        assert_eq!(read(&mut downstream).await.unwrap(), b"GET");
        let slow = async {
            loop {
                tokio::time::sleep(Duration::from_secs(3)).await;
                client.write_all(b" ").await.unwrap();
            }
        };
        let failed = async { while read(&mut downstream).await.is_ok() {} };
        tokio::select! { () = slow => {}, () = failed => {} }
        assert_eq!(start.elapsed().as_secs(), HEAD.as_secs());

        // A request in progress has all the time that its own limits give it; after it the connection may be idle for a while, and is then marked.
        let (_client, mut downstream, vitals) = connected(b"GET").await;
        read(&mut downstream).await.unwrap();
        let request = vitals.begin();
        assert!(timeout(Duration::from_secs(3600), read(&mut downstream)).await.is_err());
        drop(request);
        assert!(timeout(IDLE - Duration::from_secs(1), read(&mut downstream)).await.is_err());
        assert!(!vitals.is_expired());
        assert!(timeout(Duration::from_secs(2), read(&mut downstream)).await.is_err());
        assert!(vitals.is_expired());
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_is_given_up() {
        let (mut client, mut downstream, _) = connected(b"GET").await;
        let mut written = 0;
        let start = Instant::now();
        let failed = async {
            loop {
                match downstream.write(&[0; 8 << 10]).await {
                    Ok(n) => written += n,
                    Err(error) => return error,
                }
            }
        };
        // It reads a little now and then, and at last nothing.
        let reading = async {
            for _ in 0..5 {
                tokio::time::sleep(STALLED - Duration::from_secs(1)).await;
                client.read_exact(&mut [0; 100]).await.unwrap();
            }
            std::future::pending::<()>().await;
        };
        let error = tokio::select! { error = failed => error, () = reading => unreachable!() };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(start.elapsed().as_secs(), 5 * (STALLED.as_secs() - 1) + STALLED.as_secs());
        assert_eq!(written, (64 << 10) + 500);
    }

    #[tokio::test]
    async fn presence_is_looked_at_only_as_far_as_it_is_cheap() {
        let (mut client, mut downstream, vitals) = connected(b"GET").await;
        let _request = vitals.begin();
        client.write_all(&[b'x'; 40 << 10]).await.unwrap();
        downstream.flush().await.unwrap();
        assert!((AHEAD..AHEAD + (8 << 10)).contains(&downstream.ahead.len()), "{}", downstream.ahead.len());
        // Nothing of it is lost.
        let mut seen = 0;
        while seen < 3 + (40 << 10) {
            seen += read(&mut downstream).await.unwrap().len();
        }
        drop(client);
        // Who reads the body looks after the client meanwhile.
        let uploading = vitals.upload();
        downstream.flush().await.unwrap();
        drop(uploading);
        assert_eq!(downstream.flush().await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
}
