//! The server under rough clients, with a stand-in for what answers: nothing is lost, nothing is left behind.
#![cfg(feature = "gateway")]
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use headway::config::{Edge, Tls};
use headway::proxy::server::{Handler, Options, Server, Stop, Uploading};
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};

/// Longer than anything takes, shorter than patience.
const LONG: Duration = Duration::from_secs(30);

/// Answers by path, and says what began and what was dropped before its end.
struct StandIn {
    events: mpsc::UnboundedSender<Event>,
    draining: watch::Sender<bool>,
    go: watch::Receiver<bool>,
    limits: Edge,
}

#[derive(Debug, PartialEq)]
enum Event {
    Began,
    Left,
    Cut,
    End,
}

/// Says on drop that a request did not come to its end.
struct Guard(Option<mpsc::UnboundedSender<Event>>);

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(events) = self.0.take() {
            let _ = events.send(Event::Left);
        }
    }
}

enum Answer {
    Whole(Full<Bytes>),
    /// So many small events, all at once.
    Events(usize),
    /// One event, and a second one when told.
    Slow {
        sent: bool,
        go: Pin<Box<dyn Future<Output = ()> + Send>>,
        guard: Guard,
    },
    End,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match &mut *self {
            Answer::Whole(body) => Pin::new(body).poll_frame(cx),
            Answer::Events(0) | Answer::End => Poll::Ready(None),
            Answer::Events(left) => {
                *left -= 1;
                Poll::Ready(Some(Ok(Frame::data(format!("data: {left}\n\n").into()))))
            }
            Answer::Slow { sent: false, .. } => {
                if let Answer::Slow { sent, .. } = &mut *self {
                    *sent = true;
                }
                Poll::Ready(Some(Ok(Frame::data("data: first\n\n".into()))))
            }
            Answer::Slow { go, guard, .. } => {
                std::task::ready!(go.as_mut().poll(cx));
                guard.0 = None;
                *self = Answer::End;
                Poll::Ready(Some(Ok(Frame::data("data: last\n\n".into()))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Answer::Whole(body) if body.is_end_stream())
    }

    fn size_hint(&self) -> http_body::SizeHint {
        match self {
            Answer::Whole(body) => body.size_hint(),
            _ => http_body::SizeHint::default(),
        }
    }
}

impl Handler for StandIn {
    type Body = Answer;

    async fn begin(&self, _: tokio::runtime::Handle) {}

    async fn handle(self: Arc<Self>, request: Request<Incoming>, _: std::net::IpAddr, uploading: Uploading) -> Response<Answer> {
        let mut guard = Guard(Some(self.events.clone()));
        let path = request.uri().path().to_owned();
        self.events.send(Event::Began).unwrap();
        let uploaded = request.into_body().collect().await;
        drop(uploading);
        let body = match uploaded {
            Ok(body) => body.to_bytes(),
            Err(_) => std::future::pending().await,
        };
        let mut go = self.go.clone();
        let mut response = Response::new(match path.as_str() {
            "/length" => Answer::Whole(Full::from(format!("{} {}", body.len(), body.iter().map(|&b| u64::from(b)).sum::<u64>()))),
            "/wait" => {
                go.wait_for(|go| *go).await.unwrap();
                Answer::Whole(Full::from("waited"))
            }
            "/events" => Answer::Events(10_000),
            "/slow" => {
                let guard = Guard(guard.0.take());
                let going = Box::pin(async move { drop(go.wait_for(|go| *go).await) });
                Answer::Slow { sent: false, go: going, guard }
            }
            other => Answer::Whole(Full::from(other.to_owned())),
        });
        if *self.draining.borrow() {
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        }
        guard.0 = None;
        response
    }

    fn limits(&self) -> Edge {
        self.limits.clone()
    }

    fn start_drain(&self) {
        self.draining.send_replace(true);
    }

    async fn drained(&self, _: Duration) {}

    fn cut(&self) {
        let _ = self.events.send(Event::Cut);
    }

    async fn end(&self, handed_over: bool) {
        assert!(!handed_over);
        let _ = self.events.send(Event::End);
    }
}

/// A server that runs, and what is known of it.
struct Running {
    address: std::net::SocketAddr,
    events: mpsc::UnboundedReceiver<Event>,
    stop: watch::Sender<bool>,
    go: watch::Sender<bool>,
    draining: watch::Receiver<bool>,
    ended: tokio::sync::oneshot::Receiver<()>,
}

fn start_with(threads: usize, tls: Option<Tls>, limits: Edge) -> Running {
    let (events_in, events) = mpsc::unbounded_channel();
    let (stop, stopped) = watch::channel(false);
    let (go, gone) = watch::channel(false);
    let (draining_in, draining) = watch::channel(false);
    let (ending, ended) = tokio::sync::oneshot::channel();
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), tls, Options { threads, ..Options::default() }).unwrap();
    let address = server.address();
    std::thread::spawn(move || {
        server.run(Arc::new(StandIn { events: events_in, draining: draining_in, go: gone, limits }), Stop::Told(stopped)).unwrap();
        let _ = ending.send(());
    });
    Running { address, events, stop, go, draining, ended }
}

fn start() -> Running {
    start_with(2, None, Edge::default())
}

impl Running {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    async fn event(&mut self) -> Event {
        tokio::time::timeout(LONG, self.events.recv()).await.expect("nothing happened").unwrap()
    }

    async fn end(self) {
        self.stop.send(true).unwrap();
        tokio::time::timeout(LONG, self.ended).await.expect("the server did not end").unwrap();
    }
}

/// Reads until `end` was read; panics if the connection closes before.
async fn read_until(socket: &mut (impl AsyncReadExt + Unpin), end: &str) -> String {
    let mut all = Vec::new();
    while !all.ends_with(end.as_bytes()) {
        let n = tokio::time::timeout(LONG, socket.read_buf(&mut all)).await.expect("no more bytes").unwrap();
        assert_ne!(n, 0, "closed after {:?}", String::from_utf8_lossy(&all));
    }
    String::from_utf8(all).unwrap()
}

/// Reads to the end of the connection; a reset is an end.
async fn read_to_end(socket: &mut (impl AsyncReadExt + Unpin)) -> String {
    let mut all = Vec::new();
    let _ = tokio::time::timeout(LONG, socket.read_to_end(&mut all)).await.expect("the connection stays open");
    String::from_utf8(all).unwrap()
}

#[tokio::test]
async fn thirty_mebibytes_arrive_whole() {
    let server = start();
    let body: Vec<u8> = (0..30_u32 << 20).map(|i| (i % 251) as u8).collect();
    let expected = format!("{} {}", body.len(), body.iter().map(|&b| u64::from(b)).sum::<u64>());

    let mut socket = server.connect().await;
    socket.write_all(format!("POST /length HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes()).await.unwrap();
    socket.write_all(&body).await.unwrap();
    assert!(read_until(&mut socket, &expected).await.starts_with("HTTP/1.1 200"));

    socket.write_all(b"POST /length HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n").await.unwrap();
    assert_eq!(read_until(&mut socket, "\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
    for chunk in body.chunks(100_001) {
        socket.write_all(format!("{:x}\r\n", chunk.len()).as_bytes()).await.unwrap();
        socket.write_all(chunk).await.unwrap();
        socket.write_all(b"\r\n").await.unwrap();
    }
    socket.write_all(b"0\r\n\r\n").await.unwrap();
    assert!(read_until(&mut socket, &expected).await.starts_with("HTTP/1.1 200"));
    server.end().await;
}

#[tokio::test]
async fn ten_thousand_events_come_in_order() {
    for threads in [1, 2] {
        let server = start_with(threads, None, Edge::default());
        let mut socket = server.connect().await;
        socket.write_all(b"GET /events HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let text = read_until(&mut socket, "0\r\n\r\n").await;
        let numbers: Vec<usize> = text.lines().filter_map(|line| line.strip_prefix("data: ")).map(|n| n.parse().unwrap()).collect();
        assert_eq!(numbers, (0..10_000).rev().collect::<Vec<_>>());
        server.end().await;
    }
}

#[test]
fn a_burst_of_connections_finds_room_to_wait_in() {
    let server = Server::bind("127.0.0.1:0".parse().unwrap(), None, Options::default()).unwrap();
    // Nobody accepts them yet. One without room would be tried again after a second.
    let connect = |_| std::net::TcpStream::connect_timeout(&server.address(), Duration::from_millis(900));
    let connected: Result<Vec<_>, _> = (0..400).map(connect).collect();
    assert_eq!(connected.unwrap().len(), 400);
}

/// What the client sends before it leaves, while its first request waits.
#[tokio::test]
async fn a_client_that_leaves_is_noticed_at_once() {
    const WAIT: &str = "POST /wait HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}";
    let mut server = start();
    let pipelined = WAIT.repeat(2);
    let half = format!("{WAIT}POST /wa");
    for sent in [WAIT, pipelined.as_str(), half.as_str(), "GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"] {
        let mut socket = server.connect().await;
        socket.write_all(sent.as_bytes()).await.unwrap();
        assert_eq!(server.event().await, Event::Began);
        drop(socket);
        assert_eq!(server.event().await, Event::Left, "{sent}");
    }
    // A second request that comes while the first waits, and then the end.
    let mut socket = server.connect().await;
    socket.write_all(WAIT.as_bytes()).await.unwrap();
    assert_eq!(server.event().await, Event::Began);
    for _ in 0..3 {
        socket.write_all(WAIT.as_bytes()).await.unwrap();
        tokio::task::yield_now().await;
    }
    drop(socket);
    assert_eq!(server.event().await, Event::Left);
    // In the middle of a body, and in the middle of an answer.
    let mut socket = server.connect().await;
    socket.write_all(b"POST /length HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{").await.unwrap();
    assert_eq!(server.event().await, Event::Began);
    drop(socket);
    assert_eq!(server.event().await, Event::Left);
    let mut socket = server.connect().await;
    socket.write_all(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\nGET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    read_until(&mut socket, "data: first\n\n\r\n").await;
    assert_eq!(server.event().await, Event::Began);
    drop(socket);
    assert_eq!(server.event().await, Event::Left);
    server.end().await;
}

/// A half-close looks like a close until something is written: the request counts as given up, and the connection ends at once.
#[tokio::test]
async fn a_client_that_half_closes_is_told_by_the_end_of_the_connection() {
    let mut server = start();
    let mut socket = server.connect().await;
    socket.write_all(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    assert_eq!(server.event().await, Event::Began);
    socket.shutdown().await.unwrap();
    assert_eq!(server.event().await, Event::Left);
    assert_eq!(read_to_end(&mut socket).await, "");
    server.end().await;
}

/// Where half-closing clients are served, it waits for its answer.
#[tokio::test]
async fn a_client_that_half_closes_gets_its_answer_where_that_is_configured() {
    let mut server = start_with(1, None, Edge { half_close: true, ..Edge::default() });
    let mut socket = server.connect().await;
    socket.write_all(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    assert_eq!(server.event().await, Event::Began);
    socket.shutdown().await.unwrap();
    server.go.send(true).unwrap();
    assert!(read_to_end(&mut socket).await.ends_with("waited"));
    server.end().await;
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let server = start();
    let mut socket = server.connect().await;
    let requests: String = (0..100).map(|i| format!("GET /{i} HTTP/1.1\r\nhost: x\r\n\r\n")).collect();
    socket.write_all(requests.as_bytes()).await.unwrap();
    let text = read_until(&mut socket, "/99").await;
    let answers: Vec<&str> = text.split("\r\n\r\n").skip(1).map(|rest| rest.split("HTTP").next().unwrap()).collect();
    assert_eq!(answers, (0..100).map(|i| format!("/{i}")).collect::<Vec<_>>());
    // More than is read ahead waits its turn.
    socket.write_all(b"GET /wait HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let requests: String = (0..2_000).map(|i| format!("GET /{i:0100} HTTP/1.1\r\nhost: x\r\n\r\n")).collect();
    let (mut read, mut write) = socket.split();
    tokio::join!(async { write.write_all(requests.as_bytes()).await.unwrap() }, async {
        server.go.send(true).unwrap();
        read_until(&mut read, "1999").await;
    });
    server.end().await;
}

#[tokio::test]
async fn a_hundred_streams_share_a_connection() {
    let mut server = start();
    let socket = std::net::TcpStream::connect(server.address).unwrap();
    socket.set_nonblocking(true).unwrap();
    let cable = socket.try_clone().unwrap();
    let socket = TcpStream::from_std(socket).unwrap();
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(socket)).await.unwrap();
    tokio::spawn(connection);
    let request = |path: &str| Request::get(format!("http://x{path}")).body(Full::<Bytes>::default()).unwrap();
    let waiting: Vec<_> = (0..100).map(|_| tokio::spawn(sender.send_request(request("/wait")))).collect();
    for _ in 0..100 {
        assert_eq!(server.event().await, Event::Began);
    }
    // One that is given up is noticed while the others wait.
    let mut waiting = waiting.into_iter();
    waiting.next().unwrap().abort();
    assert_eq!(server.event().await, Event::Left);
    server.go.send(true).unwrap();
    for answer in waiting {
        let body = answer.await.unwrap().unwrap().into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, "waited");
    }
    // And all of them are noticed when the connection goes.
    server.go.send(false).unwrap();
    let waiting: Vec<_> = (0..50).map(|_| tokio::spawn(sender.send_request(request("/wait")))).collect();
    for _ in 0..50 {
        assert_eq!(server.event().await, Event::Began);
    }
    cable.shutdown(std::net::Shutdown::Both).unwrap();
    for _ in 0..50 {
        assert_eq!(server.event().await, Event::Left);
    }
    drop(waiting);
    server.end().await;
}

#[tokio::test]
async fn heads_have_limits() {
    let server = start_with(1, None, Edge { max_head: 16 << 10, head_timeout: Duration::from_millis(200), ..Edge::default() });
    let mut socket = server.connect().await;
    socket.write_all(format!("GET /fits HTTP/1.1\r\nhost: x\r\nlong: {}\r\n\r\n", "y".repeat(31 << 10)).as_bytes()).await.unwrap();
    read_until(&mut socket, "/fits").await;
    socket.write_all(format!("GET / HTTP/1.1\r\nhost: x\r\nlong: {}\r\n\r\n", "y".repeat(33 << 10)).as_bytes()).await.unwrap();
    assert!(read_to_end(&mut socket).await.starts_with("HTTP/1.1 431"));
    // Silent, slow in the first head, slow in a later one.
    let mut silent = server.connect().await;
    assert_eq!(read_to_end(&mut silent).await, "");
    let mut slow = server.connect().await;
    slow.write_all(b"GET / HT").await.unwrap();
    assert_eq!(read_to_end(&mut slow).await, "");
    let mut later = server.connect().await;
    later.write_all(b"GET /one HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    read_until(&mut later, "/one").await;
    // When this one's time is over, so would be that of the head which the idle connection has not begun.
    let mut beside = server.connect().await;
    beside.write_all(b"GET / HT").await.unwrap();
    assert_eq!(read_to_end(&mut beside).await, "");
    later.write_all(b"GET /two HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    read_until(&mut later, "/two").await;
    later.write_all(b"GET /thr").await.unwrap();
    assert_eq!(read_to_end(&mut later).await, "");
    server.end().await;
}

#[tokio::test]
async fn a_drain_waits_for_what_runs() {
    let mut server = start();
    let mut stream = server.connect().await;
    stream.write_all(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    read_until(&mut stream, "data: first\n\n\r\n").await;
    let mut idle = server.connect().await;
    idle.write_all(b"GET /one HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    read_until(&mut idle, "/one").await;

    server.stop.send(true).unwrap();
    server.draining.wait_for(|draining| *draining).await.unwrap();
    assert_eq!(read_to_end(&mut idle).await, "", "idle connections end");
    let mut late = server.connect().await;
    late.write_all(b"GET /late HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    let refused = read_to_end(&mut late).await;
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("connection: close"), "{refused}");
    assert!(server.ended.try_recv().is_err(), "a stream is still open");

    server.go.send(true).unwrap();
    assert!(read_to_end(&mut stream).await.contains("data: last\n\n"));
    tokio::time::timeout(LONG, server.ended).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_drain_has_an_end() {
    let server = start_with(1, None, Edge { drain: Duration::from_millis(200), ..Edge::default() });
    let mut stream = server.connect().await;
    stream.write_all(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    read_until(&mut stream, "data: first\n\n\r\n").await;
    server.end().await;
    assert_eq!(read_to_end(&mut stream).await, "");
}

#[tokio::test]
async fn an_answer_that_is_nearly_there_when_the_drain_ends_still_comes() {
    let mut server = start_with(2, None, Edge { drain: Duration::from_millis(200), ..Edge::default() });
    let mut stream = server.connect().await;
    stream.write_all(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    read_until(&mut stream, "data: first\n\n\r\n").await;
    server.stop.send(true).unwrap();
    while server.events.recv().await.unwrap() != Event::Cut {}
    for _ in 0..10 {
        stream.write_all(b"G").await.unwrap();
        tokio::task::yield_now().await;
    }
    server.go.send(true).unwrap();
    assert!(read_to_end(&mut stream).await.contains("data: last\n\n"));
    // The last call comes also when time has run out.
    while server.events.recv().await.unwrap() != Event::End {}
    tokio::time::timeout(LONG, server.ended).await.unwrap().unwrap();
}

#[test]
fn tls_offers_both_protocols() {
    let data = |name: &str| std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    let server = start_with(1, Some(Tls { cert: data("localhost.crt"), key: data("localhost.key") }), Edge::default());
    for (offered, chosen) in [(&[b"h2".to_vec(), b"http/1.1".to_vec()][..], "h2"), (&[b"http/1.1".to_vec()], "http/1.1")] {
        use rustls::pki_types::pem::PemObject;
        use std::io::{Read, Write};
        let mut roots = rustls::RootCertStore::empty();
        roots.add(rustls::pki_types::CertificateDer::from_pem_file(data("localhost.crt")).unwrap()).unwrap();
        let mut config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = offered.to_vec();
        let client = rustls::ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
        let mut tls = rustls::StreamOwned::new(client, std::net::TcpStream::connect(server.address).unwrap());
        let mut answer = [0; 12];
        if chosen == "h2" {
            tls.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").unwrap();
            tls.read_exact(&mut answer).unwrap();
            assert_eq!(answer[3], 4, "a SETTINGS frame");
        } else {
            tls.write_all(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
            tls.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"HTTP/1.1 200");
        }
        assert_eq!(tls.conn.alpn_protocol(), Some(chosen.as_bytes()));
    }
    let missing = Server::bind("127.0.0.1:0".parse().unwrap(), Some(Tls { cert: data("none"), key: data("localhost.key") }), Options::default());
    assert!(missing.is_err_and(|error| error.to_string().contains("none")));
    let swapped = Tls { cert: data("localhost.key"), key: data("localhost.crt") };
    assert!(Server::bind("127.0.0.1:0".parse().unwrap(), Some(swapped), Options::default()).is_err());
}
