//! HTTP/1.1 to one backend: a pool of kept connections, each driven by whoever reads its answer.
//!
//! Nothing runs beside the request: sending, waiting for the head and reading the body poll the connection themselves, so dropping any of them closes the
//! socket, and that is how a backend learns that its work is not wanted any more.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, Request, StatusCode, response};
use http_body::Body;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::api::Payload;
use crate::config::BackendUrl;
use crate::fleet::Beat;

/// How long a connection is kept for the next request. Shorter than the 5 s after which uvicorn, and so vLLM, closes it.
const KEPT: Duration = Duration::from_secs(4);
/// Connections kept for one backend.
const MOST_KEPT: usize = 512;
/// Pieces of an answer that are ready together are merged up to this many bytes.
const MERGE: usize = 64 << 10;
/// A piece this long is worth a write of its own.
const LONG: usize = 16 << 10;

/// The connections to one backend.
pub struct Connections {
    address: Address,
    host: HeaderValue,
    pool: Arc<Pool>,
}

enum Address {
    Known(SocketAddr),
    /// Looked up for every connection: names move.
    Named(String, u16),
}

/// How long each step may take.
#[derive(Clone, Copy, Debug)]
pub struct Waits {
    pub connect: Duration,
    /// From the request's last byte of preparation to the head of the answer.
    pub first_byte: Duration,
    /// When the request as a whole has taken too long.
    pub total: Instant,
}

/// Why there is no answer, or no more of it.
#[derive(Debug, thiserror::Error)]
pub enum UpstreamError {
    #[error("connect: {0}")]
    Connect(#[source] io::Error),
    #[error("no connection within {0:?}")]
    ConnectTimeout(Duration),
    #[error("no answer within {0:?}")]
    FirstByteTimeout(Duration),
    #[error("the request's total time is over")]
    TotalTimeout,
    /// Ejected while it was waited for: it gives no sign of life.
    #[error("the backend is wedged")]
    Wedged,
    /// Closed too early, or not HTTP.
    #[error("{0}")]
    Broken(String),
}

/// The head of an answer and the way to its body.
pub struct Answer {
    pub head: response::Parts,
    pub body: AnswerBody,
}

impl Connections {
    /// No connection is made before the first request.
    pub fn new(url: &BackendUrl) -> Connections {
        let host = url.host.trim_start_matches('[').trim_end_matches(']');
        let address = match host.parse() {
            Ok(ip) => Address::Known(SocketAddr::new(ip, url.port)),
            Err(_) => Address::Named(host.to_owned(), url.port),
        };
        // Configuration accepts no host that is not a valid header; a wrong one would be refused by the backend.
        let host = HeaderValue::try_from(url.authority()).unwrap_or(HeaderValue::from_static("invalid"));
        Connections { address, host, pool: Arc::default() }
    }

    /// What the backend is called in a `host` header.
    pub fn host(&self) -> &HeaderValue {
        &self.host
    }

    /// Sends a request and waits for the head of its answer. `request` is called once per attempt: a kept connection that turns out to be closed, before
    /// any byte of an answer, is replaced by a new one.
    pub async fn send(&self, waits: Waits, mut request: impl FnMut() -> Request<Payload>) -> Result<Answer, UpstreamError> {
        let mut kept = self.pool.take();
        loop {
            let (mut wire, is_kept) = match kept.take() {
                Some(wire) => (wire, true),
                // Boxed: a request that finds a kept connection, as most do, has no room for this.
                None => (Box::pin(self.connect(waits)).await?, false),
            };
            match wire.exchange(request(), waits).await {
                Ok(response) => {
                    let (head, incoming) = response.into_parts();
                    return Ok(Answer { body: AnswerBody::new(wire, incoming, &head, &self.pool), head });
                }
                Err(UpstreamError::Broken(_)) if is_kept && !wire.received.load(Ordering::Relaxed) => continue,
                Err(error) => return Err(error),
            }
        }
    }

    async fn connect(&self, waits: Waits) -> Result<Box<Wire>, UpstreamError> {
        let connecting = async {
            let socket = match &self.address {
                Address::Known(address) => TcpStream::connect(address).await,
                Address::Named(host, port) => TcpStream::connect((host.as_str(), *port)).await,
            }?;
            socket.set_nodelay(true)?;
            Ok(socket)
        };
        let within = waits.connect.min(waits.total.saturating_duration_since(Instant::now()));
        match timeout(within, connecting).await {
            Err(_) if within < waits.connect => Err(UpstreamError::TotalTimeout),
            Err(_) => Err(UpstreamError::ConnectTimeout(waits.connect)),
            Ok(Err(error)) => Err(UpstreamError::Connect(error)),
            Ok(Ok(socket)) => Wire::new(socket).await,
        }
    }
}

/// One connection with hyper's state machine for it.
struct Wire {
    sender: http1::SendRequest<Payload>,
    driver: http1::Connection<TokioIo<Socket>, Payload>,
    /// Something came since the last request was sent.
    received: Arc<AtomicBool>,
}

impl Wire {
    async fn new(socket: TcpStream) -> Result<Box<Wire>, UpstreamError> {
        let received = Arc::<AtomicBool>::default();
        let socket = Socket { stream: socket, received: Arc::clone(&received) };
        let (sender, driver) = http1::handshake(TokioIo::new(socket)).await.map_err(broken)?;
        Ok(Box::new(Wire { sender, driver, received }))
    }

    async fn exchange(&mut self, request: Request<Payload>, waits: Waits) -> Result<http::Response<Incoming>, UpstreamError> {
        self.received.store(false, Ordering::Relaxed);
        let first_byte = Instant::now().checked_add(waits.first_byte).unwrap_or(waits.total);
        let mut sent = pin!(self.sender.send_request(request));
        let driver = &mut self.driver;
        let mut over = false;
        let answer = std::future::poll_fn(|cx| {
            loop {
                if let Poll::Ready(answer) = sent.as_mut().poll(cx) {
                    return Poll::Ready(answer);
                }
                // A driver that has ended has told the other half why.
                if over || Pin::new(&mut *driver).poll(cx).is_pending() {
                    break;
                }
                over = true;
            }
            sent.as_mut().poll(cx)
        });
        match timeout_at(first_byte.min(waits.total), answer).await {
            Err(_) if waits.total <= first_byte => Err(UpstreamError::TotalTimeout),
            Err(_) => Err(UpstreamError::FirstByteTimeout(waits.first_byte)),
            Ok(Err(error)) => Err(broken(error)),
            Ok(Ok(response)) if response.status() == StatusCode::SWITCHING_PROTOCOLS => {
                Err(UpstreamError::Broken("the backend switched protocols unasked".to_owned()))
            }
            Ok(Ok(response)) => Ok(response),
        }
    }
}

/// The body of an answer; dropping it before its end closes the connection.
pub struct AnswerBody {
    /// Gone once the connection is back in the pool or closed.
    wire: Option<Box<Wire>>,
    incoming: Incoming,
    pool: Weak<Pool>,
    /// What ended the body, told after the bytes before it.
    failure: Option<UpstreamError>,
    ended: bool,
    /// The body ends where the connection does: a cut cannot be told from an end.
    until_close: bool,
    /// Told of what comes.
    beat: Option<Beat>,
}

impl AnswerBody {
    fn new(wire: Box<Wire>, incoming: Incoming, head: &response::Parts, pool: &Arc<Pool>) -> AnswerBody {
        let until_close =
            !incoming.is_end_stream() && incoming.size_hint().exact().is_none() && !head.headers.contains_key(http::header::TRANSFER_ENCODING);
        AnswerBody { wire: Some(wire), incoming, pool: Arc::downgrade(pool), failure: None, ended: false, until_close, beat: None }
    }

    /// Lets the backend's fleet know of what comes, until there is no more.
    pub fn beats(&mut self, beat: Beat) {
        self.beat = Some(beat);
    }

    /// The body ends where the connection does, so that its end proves nothing.
    pub fn is_until_close(&self) -> bool {
        self.until_close
    }

    /// The body's length, where the backend said it.
    pub fn length(&self) -> Option<u64> {
        self.incoming.size_hint().exact()
    }

    /// The next bytes, all that are ready up to [`MERGE`]; `None` at the end.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        if let Some(error) = self.failure.take() {
            return Poll::Ready(Some(Err(error)));
        }
        if self.ended {
            return Poll::Ready(None);
        }
        let mut first = Bytes::new();
        let mut merged = BytesMut::new();
        // The connection has nothing to say before it is polled again.
        let mut moved = false;
        loop {
            match Pin::new(&mut self.incoming).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    moved = false;
                    // Trailers are not passed on.
                    let Ok(data) = frame.into_data() else { continue };
                    if let Some(beat) = self.beat.as_ref().filter(|_| !data.starts_with(b":")) {
                        beat.sign();
                    }
                    if first.is_empty() {
                        first = data;
                        if first.len() >= LONG {
                            return Poll::Ready(Some(Ok(first)));
                        }
                        continue;
                    }
                    if merged.is_empty() {
                        merged.extend_from_slice(&first);
                    }
                    merged.extend_from_slice(&data);
                    if merged.len() >= MERGE {
                        return Poll::Ready(Some(Ok(merged.freeze())));
                    }
                }
                Poll::Ready(Some(Err(error))) => {
                    self.close();
                    self.failure = Some(broken(error));
                    break;
                }
                Poll::Ready(None) => {
                    self.end(cx);
                    break;
                }
                Poll::Pending if moved => {
                    if first.is_empty() {
                        return Poll::Pending;
                    }
                    break;
                }
                Poll::Pending => {
                    moved = true;
                    if let Some(wire) = &mut self.wire
                        && Pin::new(&mut wire.driver).poll(cx).is_ready()
                    {
                        // What it had is in `incoming`, the end included.
                        self.wire = None;
                    }
                }
            }
        }
        if !merged.is_empty() {
            return Poll::Ready(Some(Ok(merged.freeze())));
        }
        if !first.is_empty() {
            return Poll::Ready(Some(Ok(first)));
        }
        Poll::Ready(self.failure.take().map(Err))
    }

    /// Keeps the connection if it can carry another request.
    fn end(&mut self, cx: &mut Context<'_>) {
        self.ended = true;
        self.beat = None;
        let (Some(mut wire), Some(pool)) = (self.wire.take(), self.pool.upgrade()) else { return };
        if Pin::new(&mut wire.driver).poll(cx).is_pending() && wire.sender.is_ready() {
            pool.put(wire);
        }
    }

    fn close(&mut self) {
        self.ended = true;
        self.beat = None;
        self.wire = None;
    }
}

fn broken(error: hyper::Error) -> UpstreamError {
    use std::error::Error;
    UpstreamError::Broken(match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    })
}

/// Connections that wait for their next request, the oldest in front.
#[derive(Default)]
struct Pool(Mutex<Idle>);

#[derive(Default)]
struct Idle {
    wires: VecDeque<(Instant, Box<Wire>)>,
    /// A task closes those that waited too long.
    swept: bool,
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Idle> {
        // The queue is never left half changed: every change is one call of its own.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection used last, if it is still open.
    fn take(&self) -> Option<Box<Wire>> {
        loop {
            let (since, mut wire) = self.lock().wires.pop_back()?;
            if since.elapsed() >= KEPT {
                // Those before it are older still; the sweep closes them.
                return None;
            }
            // Whoever sends on it polls it with a waker of its own.
            let closed = Pin::new(&mut wire.driver).poll(&mut Context::from_waker(std::task::Waker::noop())).is_ready();
            if !closed && wire.sender.is_ready() {
                return Some(wire);
            }
        }
    }

    fn put(self: Arc<Self>, wire: Box<Wire>) {
        let mut idle = self.lock();
        if idle.wires.len() >= MOST_KEPT {
            return;
        }
        idle.wires.push_back((Instant::now(), wire));
        if !std::mem::replace(&mut idle.swept, true) {
            tokio::spawn(sweep(Arc::downgrade(&self)));
        }
    }
}

/// Closes connections that were not used for [`KEPT`], until none is left.
async fn sweep(pool: Weak<Pool>) {
    loop {
        tokio::time::sleep(KEPT).await;
        let Some(pool) = pool.upgrade() else { return };
        let mut idle = pool.lock();
        let expired = idle.wires.iter().take_while(|(since, _)| since.elapsed() >= KEPT).count();
        idle.wires.drain(..expired);
        if idle.wires.is_empty() {
            idle.swept = false;
            return;
        }
    }
}

/// A socket that remembers whether anything came.
struct Socket {
    stream: TcpStream,
    received: Arc<AtomicBool>,
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buffer);
        if buffer.filled().len() > before {
            self.received.store(true, Ordering::Relaxed);
        }
        read
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, pieces: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    const LONG_WAIT: Duration = Duration::from_secs(20);

    struct Backend(TcpListener);

    impl Backend {
        async fn start() -> (Backend, Connections) {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let port = listener.local_addr().unwrap().port();
            (Backend(listener), Connections::new(&BackendUrl { host: "127.0.0.1".to_owned(), port, prefix: String::new() }))
        }

        async fn accept(&self) -> TcpStream {
            self.0.accept().await.unwrap().0
        }
    }

    /// Reads one request with a content length.
    async fn request(socket: &mut TcpStream) -> String {
        let mut all = Vec::new();
        loop {
            if let Some(end) = memchr::memmem::find(&all, b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&all[..end]).to_lowercase();
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).map_or(0, |text| text.parse().unwrap());
                if all.len() >= end + 4 + length {
                    return String::from_utf8_lossy(&all).into_owned();
                }
            }
            assert_ne!(socket.read_buf(&mut all).await.unwrap(), 0, "closed within a request");
        }
    }

    fn waits() -> Waits {
        Waits { connect: LONG_WAIT, first_byte: LONG_WAIT, total: Instant::now() + LONG_WAIT }
    }

    fn post(connections: &Connections) -> impl Fn() -> Request<Payload> {
        || Request::post("/x").header("host", connections.host()).body(Payload::from(Bytes::from_static(b"{}"))).unwrap()
    }

    async fn next(body: &mut AnswerBody) -> Option<Result<Bytes, UpstreamError>> {
        std::future::poll_fn(|cx| body.poll_chunk(cx)).await
    }

    async fn rest(body: &mut AnswerBody) -> String {
        let mut all = Vec::new();
        while let Some(chunk) = next(body).await {
            all.extend_from_slice(&chunk.unwrap());
        }
        String::from_utf8(all).unwrap()
    }

    #[tokio::test]
    async fn a_connection_is_used_again() {
        let (backend, connections) = Backend::start().await;
        let serve = tokio::spawn(async move {
            let mut socket = backend.accept().await;
            for _ in 0..3 {
                assert!(request(&mut socket).await.starts_with("POST /x HTTP/1.1\r\n"));
                socket.write_all(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
            }
        });
        for _ in 0..3 {
            let mut answer = connections.send(waits(), post(&connections)).await.unwrap();
            assert_eq!(answer.head.status, StatusCode::OK);
            assert_eq!(rest(&mut answer.body).await, "ok");
        }
        serve.await.unwrap();
    }

    #[tokio::test]
    async fn chunks_that_are_ready_come_together() {
        let (backend, connections) = Backend::start().await;
        let (go, gone) = tokio::sync::oneshot::channel::<()>();
        tokio::spawn(async move {
            let mut socket = backend.accept().await;
            request(&mut socket).await;
            socket.write_all(format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{}", "2\r\nab\r\n".repeat(50)).as_bytes()).await.unwrap();
            gone.await.unwrap();
            socket.write_all(b"1\r\nc\r\n0\r\nx-trailer: y\r\n\r\n").await.unwrap();
        });
        let mut answer = connections.send(waits(), post(&connections)).await.unwrap();
        assert_eq!(next(&mut answer.body).await.unwrap().unwrap(), "ab".repeat(50));
        go.send(()).unwrap();
        assert_eq!(rest(&mut answer.body).await, "c");
        assert!(!answer.body.is_until_close());
    }

    #[tokio::test]
    async fn a_kept_connection_that_was_closed_is_replaced_once() {
        let (backend, connections) = Backend::start().await;
        let serve = tokio::spawn(async move {
            for _ in 0..2 {
                let mut socket = backend.accept().await;
                request(&mut socket).await;
                socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
                // Takes the next request and closes without a word, as a server does whose idle time ends just then.
                request(&mut socket).await;
            }
            let mut last = backend.accept().await;
            request(&mut last).await;
        });
        for _ in 0..2 {
            let mut answer = connections.send(waits(), post(&connections)).await.unwrap();
            assert_eq!(rest(&mut answer.body).await, "");
        }
        // The kept connection fails and so does the new one: that is a broken backend.
        assert!(matches!(connections.send(waits(), post(&connections)).await, Err(UpstreamError::Broken(_))));
        serve.await.unwrap();
    }

    #[tokio::test]
    async fn what_is_no_answer_is_broken() {
        for answer in ["", "garbage\r\n\r\n", "HTTP/1.1 200 OK\r\nconte", "HTTP/1.1 101 Switching Protocols\r\n\r\n"] {
            let (backend, connections) = Backend::start().await;
            tokio::spawn(async move {
                let mut socket = backend.accept().await;
                request(&mut socket).await;
                socket.write_all(answer.as_bytes()).await.unwrap();
            });
            assert!(matches!(connections.send(waits(), post(&connections)).await, Err(UpstreamError::Broken(_))), "{answer:?}");
        }
        let (backend, connections) = Backend::start().await;
        drop(backend);
        assert!(matches!(connections.send(waits(), post(&connections)).await, Err(UpstreamError::Connect(_))));
    }

    #[tokio::test]
    async fn a_body_that_is_cut_says_so_after_its_bytes() {
        for head in ["content-length: 9", "transfer-encoding: chunked"] {
            let (backend, connections) = Backend::start().await;
            tokio::spawn(async move {
                let mut socket = backend.accept().await;
                request(&mut socket).await;
                socket.write_all(format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\n2\r\nab\r\n").as_bytes()).await.unwrap();
            });
            let mut answer = connections.send(waits(), post(&connections)).await.unwrap();
            assert!(next(&mut answer.body).await.unwrap().is_ok());
            assert!(matches!(next(&mut answer.body).await, Some(Err(UpstreamError::Broken(_)))));
            assert!(next(&mut answer.body).await.is_none());
        }
    }

    #[tokio::test]
    async fn an_end_by_closing_is_an_end_that_proves_nothing() {
        let (backend, connections) = Backend::start().await;
        tokio::spawn(async move {
            let mut socket = backend.accept().await;
            request(&mut socket).await;
            socket.write_all(b"HTTP/1.1 200 OK\r\n\r\nab").await.unwrap();
        });
        let mut answer = connections.send(waits(), post(&connections)).await.unwrap();
        assert!(answer.body.is_until_close());
        assert_eq!(rest(&mut answer.body).await, "ab");
    }

    #[tokio::test]
    async fn waits_have_their_names() {
        let (_backend, connections) = Backend::start().await;
        let short = Duration::from_millis(20);
        let first_byte = Waits { first_byte: short, ..waits() };
        assert!(matches!(connections.send(first_byte, post(&connections)).await, Err(UpstreamError::FirstByteTimeout(_))));
        let total = Waits { total: Instant::now() + short, ..waits() };
        assert!(matches!(connections.send(total, post(&connections)).await, Err(UpstreamError::TotalTimeout)));
    }

    #[tokio::test]
    async fn dropping_closes_the_connection() {
        let (backend, connections) = Backend::start().await;
        // Before the head, and while its body comes.
        let mut sending = Box::pin(connections.send(waits(), post(&connections)));
        let mut socket = tokio::select! { socket = backend.accept() => socket, _ = &mut sending => panic!("no answer was sent") };
        tokio::select! { _ = request(&mut socket) => {}, _ = &mut sending => panic!("no answer was sent") };
        drop(sending);
        assert_eq!(socket.read(&mut [0; 8]).await.unwrap_or(0), 0);

        let answer = tokio::spawn(async move {
            let mut socket = backend.accept().await;
            request(&mut socket).await;
            socket.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n").await.unwrap();
            socket.read(&mut [0; 8]).await.unwrap_or(0)
        });
        let mut body = connections.send(waits(), post(&connections)).await.unwrap().body;
        assert_eq!(next(&mut body).await.unwrap().unwrap(), "ab");
        drop(body);
        assert_eq!(answer.await.unwrap(), 0);
    }

    #[tokio::test]
    async fn connections_are_not_kept_for_long() {
        let (backend, connections) = Backend::start().await;
        let serve = tokio::spawn(async move {
            let mut socket = backend.accept().await;
            request(&mut socket).await;
            socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
            socket.read(&mut [0; 8]).await.unwrap()
        });
        let mut answer = connections.send(waits(), post(&connections)).await.unwrap();
        rest(&mut answer.body).await;
        assert_eq!(connections.pool.lock().wires.len(), 1);
        tokio::time::pause();
        tokio::time::sleep(KEPT * 2).await;
        tokio::time::resume();
        assert_eq!(connections.pool.lock().wires.len(), 0);
        assert_eq!(serve.await.unwrap(), 0);
    }
}
