//! HTTP/1.1 to one backend: a pool of kept connections, each driven by whoever reads its answer.
//!
//! Nothing runs beside the request: sending, waiting for the head and reading the body poll the connection themselves, so dropping any of them closes the
//! socket, and that is how a backend learns that its work is not wanted any more.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::buf::Chain;
use bytes::{Buf, Bytes, BytesMut};
use http::{HeaderValue, Method, Request, StatusCode, response};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

use super::api::Payload;
use super::http1::{self, Framing, Head, Malformed, Next};
use crate::config::BackendUrl;
use crate::fleet::Beat;

/// How long a connection is kept for the next request. Shorter than the 5 s after which uvicorn, and so vLLM, closes it.
const KEPT: Duration = Duration::from_secs(4);
/// Connections kept for one backend.
const MOST_KEPT: usize = 512;
/// How much is read of an answer at once, as long as no more is there.
const ROOM: usize = 8 << 10;
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
                Ok(Head { parts, framing, keeps }) => {
                    let body = AnswerBody { wire: Some(wire), framing, keeps, pool: Arc::downgrade(&self.pool), failure: None, beat: None };
                    return Ok(Answer { head: parts, body });
                }
                Err(UpstreamError::Broken(_)) if is_kept && !wire.received => continue,
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
            Ok(Ok(socket)) => Ok(Wire::new(socket)),
        }
    }
}

/// One connection.
struct Wire {
    stream: TcpStream,
    /// Of the request, what is not written yet.
    unsent: Chain<Bytes, Payload>,
    /// Read and not taken yet.
    bytes: BytesMut,
    /// How much is read at once.
    room: usize,
    /// Something came since the last request was sent.
    received: bool,
}

impl Wire {
    fn new(stream: TcpStream) -> Box<Wire> {
        let unsent = Bytes::new().chain(Payload::default());
        Box::new(Wire { stream, unsent, bytes: BytesMut::new(), room: ROOM, received: false })
    }

    async fn exchange(&mut self, request: Request<Payload>, waits: Waits) -> Result<Head, UpstreamError> {
        let head = Bytes::from(http1::write_head(&request));
        let (parts, payload) = request.into_parts();
        self.unsent = head.chain(payload);
        self.received = false;
        let first_byte = Instant::now().checked_add(waits.first_byte).unwrap_or(waits.total);
        let answer = std::future::poll_fn(|cx| self.poll_head(cx, &parts.method));
        match timeout_at(first_byte.min(waits.total), answer).await {
            Err(_) if waits.total <= first_byte => Err(UpstreamError::TotalTimeout),
            Err(_) => Err(UpstreamError::FirstByteTimeout(waits.first_byte)),
            Ok(Ok(head)) if head.parts.status == StatusCode::SWITCHING_PROTOCOLS => {
                Err(UpstreamError::Broken("the backend switched protocols unasked".to_owned()))
            }
            Ok(answer) => answer,
        }
    }

    fn poll_head(&mut self, cx: &mut Context<'_>, method: &Method) -> Poll<Result<Head, UpstreamError>> {
        // A backend may answer, and close, before it has read everything: what it says counts for more than that it does not listen.
        let deaf = self.send(cx).err();
        loop {
            if let Some(head) = http1::read_head(&mut self.bytes, method)? {
                return Poll::Ready(Ok(head));
            }
            if let Err(error) = ready!(self.poll_fill(cx)) {
                return Poll::Ready(Err(deaf.unwrap_or(error).into()));
            }
        }
    }

    /// Writes what the socket takes of what is not written yet.
    fn send(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        while self.unsent.has_remaining() {
            match pin!(self.stream.write_buf(&mut self.unsent)).poll(cx) {
                Poll::Ready(written) => _ = written?,
                Poll::Pending => break,
            }
        }
        Ok(())
    }

    /// Reads what is there, at least a byte.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.bytes.reserve(self.room);
        let read = ready!(pin!(self.stream.read_buf(&mut self.bytes)).poll(cx))?;
        if read == 0 {
            return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
        }
        self.received = true;
        if read >= self.room {
            // A long answer is on its way.
            self.room = MERGE;
        }
        Poll::Ready(Ok(()))
    }

    /// Nobody has closed it, and nothing came that was not asked for.
    fn is_open(&mut self) -> bool {
        // Whoever reads from it next does so with a waker of its own.
        self.poll_fill(&mut Context::from_waker(Waker::noop())).is_pending()
    }

    /// Makes it ready for another request, if all of the last one was sent and nothing came after its answer.
    fn renew(&mut self) -> bool {
        if self.bytes.capacity() > 2 * ROOM {
            (self.bytes, self.room) = (BytesMut::from(&*self.bytes), ROOM);
        }
        !self.unsent.has_remaining() && self.bytes.is_empty()
    }
}

/// The body of an answer; dropping it before its end closes the connection.
pub struct AnswerBody {
    /// Gone once the connection is back in the pool or closed.
    wire: Option<Box<Wire>>,
    framing: Framing,
    /// The connection can carry another request.
    keeps: bool,
    pool: Weak<Pool>,
    /// What ended the body, told after the bytes before it.
    failure: Option<UpstreamError>,
    /// Told of what comes.
    beat: Option<Beat>,
}

impl AnswerBody {
    /// Lets the backend's fleet know of what comes, until there is no more.
    pub fn beats(&mut self, beat: Beat) {
        self.beat = Some(beat);
    }

    /// The body ends where the connection does, so that its end proves nothing.
    pub fn is_until_close(&self) -> bool {
        self.framing == Framing::UntilClose
    }

    /// How much of the body is still to come, where the backend said it.
    pub fn length(&self) -> Option<u64> {
        self.framing.left()
    }

    /// The next bytes, all that are ready up to [`MERGE`]; `None` at the end.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        let mut merged = BytesMut::new();
        let Some(wire) = &mut self.wire else { return Poll::Ready(self.failure.take().map(Err)) };
        let mut beat = self.beat.as_ref();
        let ended = loop {
            match self.framing.next(&mut wire.bytes) {
                Ok(Next::Body(length)) => {
                    // What is read together came together.
                    if !wire.bytes.starts_with(b":")
                        && let Some(beat) = beat.take()
                    {
                        beat.sign();
                    }
                    if merged.is_empty() {
                        if length >= LONG {
                            return Poll::Ready(Some(Ok(wire.bytes.split_to(length).freeze())));
                        }
                        // Framing is the least part of what is at hand.
                        merged.reserve(wire.bytes.len());
                    }
                    merged.extend_from_slice(&wire.bytes[..length]);
                    wire.bytes.advance(length);
                    if merged.len() >= MERGE {
                        return Poll::Ready(Some(Ok(merged.freeze())));
                    }
                }
                Ok(Next::More) => {
                    // Of a request whose answer came early.
                    let deaf = wire.send(cx).err();
                    match wire.poll_fill(cx) {
                        Poll::Ready(Ok(())) => {}
                        Poll::Ready(Err(error)) if self.framing == Framing::UntilClose && error.kind() == io::ErrorKind::UnexpectedEof => {
                            break Ok(());
                        }
                        Poll::Ready(Err(error)) => break Err(deaf.unwrap_or(error).into()),
                        Poll::Pending if merged.is_empty() => return Poll::Pending,
                        Poll::Pending => return Poll::Ready(Some(Ok(merged.freeze()))),
                    }
                }
                Ok(Next::End) => break Ok(()),
                Err(malformed) => break Err(malformed.into()),
            }
        };
        self.failure = ended.err();
        self.end();
        if merged.is_empty() { Poll::Ready(self.failure.take().map(Err)) } else { Poll::Ready(Some(Ok(merged.freeze()))) }
    }

    /// Keeps the connection if it can carry another request.
    fn end(&mut self) {
        self.beat = None;
        let (Some(mut wire), Some(pool)) = (self.wire.take(), self.pool.upgrade()) else { return };
        if self.failure.is_none() && self.keeps && wire.renew() {
            pool.put(wire);
        }
    }
}

impl From<io::Error> for UpstreamError {
    fn from(error: io::Error) -> Self {
        UpstreamError::Broken(match error.kind() {
            io::ErrorKind::UnexpectedEof => "the connection was closed within an answer".to_owned(),
            _ => error.to_string(),
        })
    }
}

impl From<Malformed> for UpstreamError {
    fn from(malformed: Malformed) -> Self {
        UpstreamError::Broken(malformed.to_string())
    }
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
            if wire.is_open() {
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
        for answer in [
            "",
            "garbage\r\n\r\n",
            "HTTP/1.1 200 OK\r\nconte",
            "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
            "HTTP/1.1 101 Switching Protocols\r\n\r\n",
        ] {
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
    async fn an_answer_may_come_before_its_request_was_read() {
        let (backend, connections) = Backend::start().await;
        // More than the sockets between take.
        let long = Bytes::from(vec![b'x'; 32 << 20]);
        let (go, gone) = tokio::sync::oneshot::channel::<()>();
        let serve = tokio::spawn(async move {
            let mut socket = backend.accept().await;
            socket.write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n").await.unwrap();
            gone.await.unwrap();
            let mut read = vec![0; 32 << 20];
            socket.read_exact(&mut read).await.unwrap();
            socket.write_all(b"no").await.unwrap();
            socket
        });
        let request = || Request::post("/x").header("content-length", long.len()).body(Payload::from(long.clone())).unwrap();
        let mut answer = connections.send(waits(), request).await.unwrap();
        assert_eq!(answer.head.status, StatusCode::PAYLOAD_TOO_LARGE);
        go.send(()).unwrap();
        // The rest of the request is written while the answer is read.
        assert_eq!(rest(&mut answer.body).await, "no");
        serve.await.unwrap();
    }

    #[tokio::test]
    async fn a_connection_with_more_to_say_is_not_used_again() {
        let (backend, connections) = Backend::start().await;
        let serve = tokio::spawn(async move {
            for surplus in ["HTTP/1.1 200 OK\r\n", ""] {
                let mut socket = backend.accept().await;
                request(&mut socket).await;
                socket.write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok{surplus}").as_bytes()).await.unwrap();
            }
        });
        for _ in 0..2 {
            assert_eq!(rest(&mut connections.send(waits(), post(&connections)).await.unwrap().body).await, "ok");
        }
        serve.await.unwrap();
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
