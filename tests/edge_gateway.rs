//! The edge end to end over raw sockets: a client that writes bytes, backends that are played by hand, and the pool's own view of what is left behind.
#![cfg(feature = "gateway")]
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use headway::config::{self, BackendUrl, Pool, Route, Secret, Snapshot, Timeouts};
use headway::fleet::EngineKind;
use headway::gateway::Gateway;
use headway::proxy::Proxy;
use headway::proxy::server::{Options, Server, Stop};
use headway::scheduler::{Slots, Standing};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

/// Longer than anything takes, shorter than patience.
const LONG: Duration = Duration::from_secs(20);
/// What a short time limit is set to.
const SHORT: Duration = Duration::from_millis(150);

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"Hi"}]}"#;
const STREAM: &str = r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"Hi"}]}"#;
const EVENTS: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

/// A message as it came: its head in lower case up to the first blank line, and its body.
#[derive(Clone, Debug, Default)]
struct Message {
    head: String,
    body: Vec<u8>,
}

impl Message {
    fn header(&self, name: &str) -> Option<&str> {
        let prefix = format!("{name}: ");
        self.head.lines().find_map(|line| line.strip_prefix(&prefix))
    }

    fn status(&self) -> u16 {
        self.head.split(' ').nth(1).unwrap().parse().unwrap()
    }

    fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("{self:?}"))
    }
}

/// Reads one message; `None` if the connection ends before its head is whole. A body that breaks off is what came of it.
async fn read_message(socket: &mut TcpStream, pending: &mut Vec<u8>) -> Option<Message> {
    let end = loop {
        if let Some(end) = memchr::memmem::find(pending, b"\r\n\r\n") {
            break end;
        }
        if socket.read_buf(pending).await.unwrap_or(0) == 0 {
            return None;
        }
    };
    let head = String::from_utf8(pending.drain(..end + 4).collect()).unwrap().to_lowercase();
    let mut message = Message { head, body: Vec::new() };
    if message.header("transfer-encoding") == Some("chunked") {
        loop {
            let line = loop {
                if let Some(end) = memchr::memmem::find(pending, b"\r\n") {
                    break end;
                }
                if socket.read_buf(pending).await.unwrap_or(0) == 0 {
                    message.head.push_str("broken-off: yes\n");
                    return Some(message);
                }
            };
            let size = usize::from_str_radix(std::str::from_utf8(&pending[..line]).unwrap(), 16).unwrap();
            while pending.len() < line + 2 + size + 2 {
                if socket.read_buf(pending).await.unwrap_or(0) == 0 {
                    message.head.push_str("broken-off: yes\n");
                    return Some(message);
                }
            }
            message.body.extend_from_slice(&pending[line + 2..line + 2 + size]);
            pending.drain(..line + 2 + size + 2);
            if size == 0 {
                return Some(message);
            }
        }
    }
    let length = message.header("content-length").map_or(0, |text| text.parse().unwrap());
    while pending.len() < length {
        if socket.read_buf(pending).await.unwrap_or(0) == 0 {
            message.head.push_str("broken-off: yes\n");
            break;
        }
    }
    message.body = pending.drain(..length.min(pending.len())).collect();
    Some(message)
}

/// A backend whose answers are written by the test.
struct Backend {
    url: BackendUrl,
    requests: mpsc::UnboundedReceiver<Exchange>,
    accepting: tokio::task::JoinHandle<()>,
}

/// A request that came to a backend, and the connection to answer on.
struct Exchange {
    request: Message,
    socket: TcpStream,
    /// Takes the connection back for the next request.
    done: mpsc::UnboundedSender<TcpStream>,
}

impl Backend {
    async fn start() -> Backend {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
        let (sender, requests) = mpsc::unbounded_channel();
        let (done, mut again) = mpsc::unbounded_channel::<TcpStream>();
        let accepting = tokio::spawn(async move {
            // Ends them with itself.
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let socket = tokio::select! { accepted = listener.accept() => accepted.unwrap().0, Some(socket) = again.recv() => socket };
                connections.spawn(serve(socket, sender.clone(), done.clone()));
            }
        });
        Backend { url, requests, accepting }
    }

    async fn next(&mut self) -> Exchange {
        timeout(LONG, self.requests.recv()).await.expect("no request came").unwrap()
    }

    /// Closes its connections and refuses new ones.
    async fn die(&mut self) {
        self.accepting.abort();
        let _ = (&mut self.accepting).await;
    }
}

/// Answers probes, and hands the first other request out with its connection.
async fn serve(mut socket: TcpStream, requests: mpsc::UnboundedSender<Exchange>, done: mpsc::UnboundedSender<TcpStream>) {
    let mut pending = Vec::new();
    while let Some(request) = read_message(&mut socket, &mut pending).await {
        let path = request.head.split(' ').nth(1).unwrap_or_default();
        let answer = if request.head.starts_with("get ") && path.ends_with("/v1/models") {
            let list = r#"{"object":"list","data":[{"id":"up","owned_by":"x"}]}"#;
            format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{list}", list.len())
        } else if path.ends_with("/health") {
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n".to_owned()
        } else if request.head.starts_with("get /v1/") || !request.head.starts_with("get ") {
            let _ = requests.send(Exchange { request, socket, done });
            return;
        } else {
            "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n".to_owned()
        };
        if socket.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

impl Exchange {
    async fn write(&mut self, text: &str) {
        self.socket.write_all(text.as_bytes()).await.unwrap();
    }

    async fn chunk(&mut self, text: &str) {
        self.write(&format!("{:x}\r\n{text}\r\n", text.len())).await;
    }

    /// Answers with this document and keeps the connection.
    async fn reply(mut self, status: u16, body: &str) {
        self.write(&format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())).await;
        let _ = self.done.send(self.socket);
    }

    async fn token(&mut self, text: &str) {
        let event = json!({"id": "a", "model": "up", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": null}]});
        self.chunk(&format!("data: {event}\n\n")).await;
    }

    /// Ends a chunked answer and keeps the connection.
    async fn end(mut self) {
        self.write("0\r\n\r\n").await;
        let _ = self.done.send(self.socket);
    }

    /// Waits until the other side closes.
    async fn left(mut self) {
        let mut byte = [0];
        timeout(LONG, async { while self.socket.read(&mut byte).await.unwrap_or(0) > 0 {} }).await.expect("the connection stays open");
    }
}

const ANSWER: &str = r#"{"id":"a","model":"up","choices":[{"index":0,"message":{"role":"assistant","content":"Hello"},"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}"#;

struct Running {
    address: std::net::SocketAddr,
    gateway: Arc<Gateway>,
    proxy: Arc<Proxy>,
    stop: watch::Sender<bool>,
    ended: tokio::sync::oneshot::Receiver<()>,
}

/// A gateway in front of these backends, one slot each, with `m` an alias of `up`.
async fn start(backends: &[&Backend], change: impl FnOnce(&mut Snapshot, &mut Pool)) -> Running {
    let urls: Vec<BackendUrl> = backends.iter().map(|backend| backend.url.clone()).collect();
    let nowhere = "127.0.0.1:0".parse().unwrap();
    let mut snapshot = config::from_backends(&urls, nowhere, nowhere, config::policy("headway").unwrap());
    let mut pool = Pool::clone(&snapshot.pools[0]);
    for backend in &mut pool.backends {
        backend.engine = Some(EngineKind::OpenAi);
        backend.slots = Some(Slots::Fixed(1));
    }
    pool.models = vec![("m".to_owned(), Some("up".to_owned())), ("up".to_owned(), None)];
    for (name, upstream) in &pool.models {
        snapshot.models.insert(name.clone(), Route { pool: 0, upstream: upstream.clone() });
    }
    change(&mut snapshot, &mut pool);
    snapshot.pools = vec![Arc::new(pool)];
    let server = Server::bind(nowhere, None, Options { threads: 2, ..Options::default() }).unwrap();
    let address = server.address();
    let gateway = Gateway::start(snapshot).await.unwrap();
    let proxy = Arc::new(Proxy::new(Arc::clone(&gateway)));
    let (stop, stopped) = watch::channel(false);
    let (ending, ended) = tokio::sync::oneshot::channel();
    let handler = Arc::clone(&proxy);
    std::thread::spawn(move || {
        server.run(handler, Stop::Told(stopped)).unwrap();
        let _ = ending.send(());
    });
    let running = Running { address, gateway, proxy, stop, ended };
    let wanted = backends.iter().filter(|backend| !backend.accepting.is_finished()).count();
    running.until(|view| view.backends.iter().filter(|backend| backend.standing == Standing::Healthy).count() == wanted).await;
    running
}

async fn start_one() -> (Backend, Running) {
    let backend = Backend::start().await;
    let running = start(&[&backend], |_, _| {}).await;
    (backend, running)
}

impl Running {
    /// Waits until the pool looks like this.
    async fn until(&self, condition: impl Fn(&headway::scheduler::PoolView) -> bool) {
        let waiting = async {
            loop {
                let view = self.gateway.live().pools[0].dispatcher.view().await.unwrap();
                if condition(&view) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        if timeout(LONG, waiting).await.is_err() {
            panic!("it stays {:#?}", self.gateway.live().pools[0].dispatcher.view().await);
        }
    }

    /// Nothing waits, runs or takes memory any more.
    async fn nothing_is_left(&self) {
        self.until(|view| view.waiting == 0 && view.waiting_bytes == 0 && view.in_flight == 0).await;
        let freed = async {
            while self.proxy.held_bytes() > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(LONG, freed).await.expect("bytes are held");
    }

    async fn connect(&self) -> Client {
        Client { socket: TcpStream::connect(self.address).await.unwrap(), pending: Vec::new() }
    }

    /// Sends one request on a connection of its own.
    async fn send(&self, path: &str, body: &str) -> Client {
        let mut client = self.connect().await;
        client.post(path, body).await;
        client
    }

    async fn chat(&self, body: &str) -> Client {
        self.send("/v1/chat/completions", body).await
    }
}

struct Client {
    socket: TcpStream,
    pending: Vec<u8>,
}

impl Client {
    async fn write(&mut self, text: &str) {
        self.socket.write_all(text.as_bytes()).await.unwrap();
    }

    async fn post(&mut self, path: &str, body: &str) {
        self.post_with(path, "content-type: application/json\r\n", body).await;
    }

    async fn post_with(&mut self, path: &str, headers: &str, body: &str) {
        self.write(&format!("POST {path} HTTP/1.1\r\nhost: gateway\r\n{headers}content-length: {}\r\n\r\n{body}", body.len())).await;
    }

    async fn answer(&mut self) -> Message {
        timeout(LONG, read_message(&mut self.socket, &mut self.pending)).await.expect("no answer came").expect("closed without an answer")
    }

    /// Waits until a part of the answer holds this text.
    async fn until(&mut self, text: &str) {
        let reading = async {
            while memchr::memmem::find(&self.pending, text.as_bytes()).is_none() {
                assert_ne!(self.socket.read_buf(&mut self.pending).await.unwrap(), 0, "closed after {}", String::from_utf8_lossy(&self.pending));
            }
        };
        timeout(LONG, reading).await.expect("it does not come");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_passes_with_the_clients_name_for_the_model() {
    let (mut backend, gateway) = start_one().await;
    let mut client = gateway.connect().await;
    client
        .post_with(
            "/v1/chat/completions?x=1",
            "Authorization: Bearer client\r\nX-Api-Key: client\r\nConnection: keep-alive, x-hop\r\nX-Hop: 1\r\nX-Request-Id: mine\r\ntraceparent: 00-ab-cd-01\r\n",
            CHAT,
        )
        .await;
    let exchange = backend.next().await;
    assert!(exchange.request.head.starts_with("post /v1/chat/completions?x=1 http/1.1\r\n"));
    assert_eq!(exchange.request.text(), CHAT.replace("\"m\"", "\"up\""));
    for (name, value) in [
        ("host", Some(backend.url.authority())),
        ("x-request-id", Some("mine".to_owned())),
        ("traceparent", Some("00-ab-cd-01".to_owned())),
        ("authorization", None),
        ("x-api-key", None),
        ("x-hop", None),
        ("connection", None),
    ] {
        assert_eq!(exchange.request.header(name).map(str::to_owned), value, "{name}");
    }
    exchange.reply(200, ANSWER).await;
    let answer = client.answer().await;
    assert_eq!((answer.status(), answer.text()), (200, ANSWER.replace("\"up\"", "\"m\"")));
    assert_eq!(answer.header("x-request-id"), Some("mine"));
    assert_eq!(answer.header("x-headway-backend"), Some(backend.url.authority().as_str()));
    assert_eq!(answer.header("x-headway-policy"), Some("headway"));
    assert!(answer.header("x-headway-queue-ms").is_some());

    // The next one goes over the same two connections, and what needs no change is not changed.
    let odd = r#" {"messages" : [ {"content":"Hi\u0021","role":"user"} ],"n":1e0, "model":"up","zzz":{"b":1,"a":2}}"#;
    client.post("/v1/chat/completions", odd).await;
    let exchange = backend.next().await;
    assert_eq!(exchange.request.text(), odd);
    assert_eq!(exchange.request.header("x-request-id").map(str::len), Some(32));
    exchange.reply(200, ANSWER).await;
    assert_eq!(client.answer().await.text(), ANSWER);
    gateway.nothing_is_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_passes_without_the_usage_that_only_we_asked_for() {
    let (mut backend, gateway) = start_one().await;
    for (asked, options) in [(false, ""), (true, r#","stream_options":{"include_usage":true}"#)] {
        let body = format!(r#"{{"model":"m","stream":true,"messages":[{{"role":"user","content":"Hi"}}]{options}}}"#);
        let mut client = gateway.chat(&body).await;
        let mut exchange = backend.next().await;
        assert_eq!(exchange.request.json()["stream_options"], json!({"include_usage": true}));
        exchange.write(EVENTS).await;
        exchange.chunk(": keep-alive\n\n").await;
        for word in ["Hel", "lo"] {
            exchange.token(word).await;
            client.until(word).await;
        }
        exchange.chunk("data: {\"model\":\"up\",\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":7}}\n\n").await;
        exchange.chunk("data: [DONE]\n\n").await;
        exchange.end().await;
        let answer = client.answer().await;
        assert_eq!((answer.text().contains("usage"), answer.text().contains("up")), (asked, false));
        assert!(answer.text().ends_with("data: [DONE]\n\n"));
        assert_eq!(answer.header("broken-off"), None);
    }
    gateway.nothing_is_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_what_it_held_in_every_phase() {
    let (mut backend, gateway) = start_one().await;
    for body in [CHAT, STREAM] {
        // While another one has the only slot: in the queue, also with a second request behind it.
        let mut first = gateway.chat(body).await;
        let exchange = backend.next().await;
        let queued = gateway.chat(body).await;
        gateway.until(|view| view.waiting == 1).await;
        drop(queued);
        gateway.until(|view| view.waiting == 0 && view.waiting_bytes == 0).await;
        let mut queued = gateway.chat(body).await;
        queued.post("/v1/chat/completions", body).await;
        gateway.until(|view| view.waiting == 1).await;
        drop(queued);
        gateway.until(|view| view.waiting == 0 && view.in_flight == 1).await;
        exchange.reply(200, ANSWER).await;
        first.answer().await;
        gateway.nothing_is_left().await;

        // Before the first byte of the answer.
        let client = gateway.chat(body).await;
        let exchange = backend.next().await;
        drop(client);
        exchange.left().await;
        gateway.nothing_is_left().await;

        // In the middle of it.
        let mut client = gateway.chat(body).await;
        let mut exchange = backend.next().await;
        if body == STREAM {
            exchange.write(EVENTS).await;
            exchange.token("Hi").await;
            client.until("Hi").await;
        } else {
            exchange.write("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{").await;
        }
        drop(client);
        exchange.left().await;
        gateway.nothing_is_left().await;
    }
    // While its body comes.
    let mut client = gateway.connect().await;
    client.write("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{\"model\":").await;
    drop(client);
    gateway.nothing_is_left().await;
}

/// The listening socket of a backend whose queue of connections is full: a connect neither succeeds nor fails.
#[tokio::test(flavor = "multi_thread")]
async fn a_backend_that_does_not_accept_is_given_up_or_left() {
    let mut backend = Backend::start().await;
    let gateway = start(&[&backend], |_, pool| pool.timeouts.connect = Duration::from_secs(60)).await;
    backend.die().await;
    let full = tokio::net::TcpSocket::new_v4().unwrap();
    full.set_reuseaddr(true).unwrap();
    full.bind(backend.url.authority().parse().unwrap()).unwrap();
    let _full = full.listen(1).unwrap();
    let mut fill = Vec::new();
    for _ in 0..8 {
        fill.push(timeout(SHORT, TcpStream::connect(backend.url.authority())).await);
    }
    let client = gateway.chat(CHAT).await;
    gateway.until(|view| view.in_flight == 1).await;
    drop(client);
    gateway.nothing_is_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_before_its_first_byte_is_tried_elsewhere() {
    let (mut a, mut b) = (Backend::start().await, Backend::start().await);
    for broken in
        ["", "HTTP/1.1 200", "garbage\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"half\":"]
    {
        let gateway = start(&[&a, &b], |_, pool| pool.retries = 1).await;
        let mut client = gateway.chat(CHAT).await;
        let (mut first, other) = tokio::select! { exchange = a.next() => (exchange, &mut b), exchange = b.next() => (exchange, &mut a) };
        first.write(broken).await;
        drop(first);
        other.next().await.reply(200, ANSWER).await;
        assert_eq!(client.answer().await.status(), 200, "{broken:?}");
        gateway.nothing_is_left().await;
    }
    // Never twice on the same one, and the last failure is the answer.
    let gateway = start(&[&a, &b], |_, pool| pool.retries = 2).await;
    let mut client = gateway.chat(CHAT).await;
    let (first, other) = tokio::select! { exchange = a.next() => (exchange, &mut b), exchange = b.next() => (exchange, &mut a) };
    drop(first);
    drop(other.next().await);
    let answer = client.answer().await;
    assert_eq!((answer.status(), answer.header("x-headway-reason")), (502, Some("backend_broke")));
    assert_eq!(answer.json()["error"]["type"], "server_error");
    gateway.nothing_is_left().await;
    // Nobody listens at all.
    a.die().await;
    b.die().await;
    let refused = async {
        loop {
            let answer = gateway.chat(CHAT).await.answer().await;
            match (answer.status(), answer.header("x-headway-reason")) {
                (502, Some("connect_failed" | "backend_broke")) => {}
                (503, Some("no_healthy_backend")) => return answer,
                other => panic!("{other:?}"),
            }
        }
    };
    let answer = timeout(LONG, refused).await.expect("they stay healthy");
    assert!(answer.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    gateway.nothing_is_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_breaks_says_so() {
    let (mut backend, gateway) = start_one().await;
    for (path, body, mark) in [
        ("/v1/chat/completions", STREAM.to_owned(), "\ndata: {\"error\":"),
        ("/v1/messages", STREAM.replace("{\"model\"", "{\"max_tokens\":5,\"model\""), "\nevent: error\ndata: {"),
        ("/v1/responses", r#"{"model":"m","stream":true,"input":"Hi"}"#.to_owned(), "\nevent: error\ndata: {"),
    ] {
        for half in ["", "5\r\nda", "8\r\ndata: {\"\r\n"] {
            let mut client = gateway.send(path, &body).await;
            let mut exchange = backend.next().await;
            exchange.write(EVENTS).await;
            exchange.token("Hi").await;
            client.until("Hi").await;
            exchange.write(half).await;
            drop(exchange);
            let answer = client.answer().await;
            assert_eq!(answer.header("broken-off"), None, "it ends as HTTP, after an event that says what happened");
            let (_, event) = answer.text().split_once(mark).map(|(a, b)| (a.to_owned(), b.to_owned())).unwrap_or_else(|| panic!("{answer:?}"));
            assert!(event.contains("backend_broke") && event.ends_with("\n\n"), "{event}");
            gateway.nothing_is_left().await;
        }
    }
    // What is no stream of events breaks off, so that nobody takes it for whole.
    let mut client = gateway.send("/v1/embeddings", r#"{"model":"m","input":"x"}"#).await;
    let mut exchange = backend.next().await;
    exchange.write("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf").await;
    drop(exchange);
    let answer = timeout(LONG, read_message(&mut client.socket, &mut client.pending)).await.expect("it goes on");
    assert!(answer.is_none_or(|answer| answer.header("broken-off") == Some("yes")));
    gateway.nothing_is_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_wait_has_a_limit_with_a_name() {
    let limits = |change: fn(&mut Timeouts)| move |_: &mut Snapshot, pool: &mut Pool| change(&mut pool.timeouts);
    let mut backend = Backend::start().await;

    let gateway = start(&[&backend], limits(|timeouts| timeouts.first_byte = SHORT)).await;
    let mut client = gateway.chat(CHAT).await;
    let exchange = backend.next().await;
    let answer = client.answer().await;
    assert_eq!((answer.status(), answer.header("x-headway-reason")), (504, Some("first_byte_timeout")));
    assert!(answer.text().contains("150ms"));
    exchange.left().await;
    gateway.nothing_is_left().await;

    let gateway = start(&[&backend], limits(|timeouts| timeouts.inter_chunk = SHORT)).await;
    let mut client = gateway.chat(STREAM).await;
    let mut exchange = backend.next().await;
    exchange.write(EVENTS).await;
    for _ in 0..4 {
        // Longer than the limit in sum, never at once.
        exchange.token("Hi").await;
        tokio::time::sleep(SHORT / 2).await;
    }
    exchange.left().await;
    let answer = client.answer().await;
    assert_eq!(answer.text().matches("Hi").count(), 4);
    assert!(answer.text().contains("inter_chunk_timeout"));
    let mut client = gateway.chat(CHAT).await;
    let mut exchange = backend.next().await;
    exchange.write("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{").await;
    let answer = client.answer().await;
    assert_eq!((answer.status(), answer.header("x-headway-reason")), (504, Some("inter_chunk_timeout")));
    exchange.left().await;
    gateway.nothing_is_left().await;

    let gateway = start(&[&backend], limits(|timeouts| timeouts.total = 2 * SHORT)).await;
    let mut client = gateway.chat(CHAT).await;
    let exchange = backend.next().await;
    assert_eq!(client.answer().await.header("x-headway-reason"), Some("total_timeout"));
    exchange.left().await;
    let mut client = gateway.chat(STREAM).await;
    let mut exchange = backend.next().await;
    exchange.write(EVENTS).await;
    exchange.token("Hi").await;
    let answer = client.answer().await;
    assert!(answer.text().contains("Hi") && answer.text().contains("total_timeout"));
    exchange.left().await;
    gateway.nothing_is_left().await;

    let gateway = start(&[&backend], limits(|timeouts| timeouts.queue = SHORT)).await;
    let mut first = gateway.chat(CHAT).await;
    let exchange = backend.next().await;
    let answer = gateway.chat(CHAT).await.answer().await;
    assert_eq!((answer.status(), answer.header("x-headway-reason")), (429, Some("queue_timeout")));
    assert!(answer.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    exchange.reply(200, ANSWER).await;
    first.answer().await;
    gateway.nothing_is_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_routed_is_refused_with_a_reason() {
    let (_backend, gateway) = start_one().await;
    let mut client = gateway.connect().await;
    let bomb = format!(r#"{{"model":"m","messages":{}"#, "[".repeat(10_000));
    for (path, body, status, code, field) in [
        ("/v1/chat/completions", "{", 400, "invalid_body", Value::Null),
        ("/v1/chat/completions", bomb.as_str(), 400, "invalid_body", Value::Null),
        ("/v1/chat/completions", "{\"messages\":[]}", 400, "missing_field", json!("model")),
        ("/v1/chat/completions", "{\"model\":\"m\"}", 400, "missing_field", json!("messages")),
        ("/v1/chat/completions", "{\"model\":\"m\",\"messages\":[3]}", 400, "wrong_type", json!("messages[0]")),
        ("/v1/chat/completions", "{\"model\":\"upp\",\"messages\":[]}", 404, "model_not_found", json!("model")),
        ("/v1/embeddings", "{\"model\":7}", 400, "wrong_type", json!("model")),
        ("/elsewhere", "{}", 404, "unknown_path", Value::Null),
        ("/v1/../admin", "{}", 404, "unknown_path", Value::Null),
        ("/v1/x/%2E%2e/admin", "{}", 404, "unknown_path", Value::Null),
        ("/v1/models", "{}", 405, "wrong_method", Value::Null),
    ] {
        client.post(path, body).await;
        let answer = client.answer().await;
        assert_eq!((answer.status(), answer.header("x-headway-reason")), (status, Some(code)), "{path} {body:.40}");
        assert_eq!((&answer.json()["error"]["code"], &answer.json()["error"]["param"]), (&json!(code), &field));
        assert!(answer.header("x-request-id").is_some());
    }
    client.post("/v1/messages", "{\"model\":\"upp\",\"messages\":[]}").await;
    let answer = client.answer().await.json();
    assert_eq!((&answer["type"], &answer["error"]["type"]), (&json!("error"), &json!("not_found_error")));
    assert!(answer["error"]["message"].as_str().unwrap().contains("did you mean `up`"));
    client.write("GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(client.answer().await.header("allow"), Some("post"));
    client.write("GET /v1/messages HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let answer = client.answer().await.json();
    assert_eq!((&answer["type"], &answer["error"]["code"]), (&json!("error"), &json!("wrong_method")));
    client.write(&format!("GET /v1/models HTTP/1.1\r\nhost: x\r\nlong: {}\r\n\r\n", "y".repeat(65 << 10))).await;
    let answer = client.answer().await;
    assert_eq!((answer.status(), answer.json()["error"]["code"].as_str()), (431, Some("head_too_large")));
    gateway.nothing_is_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_have_limits_and_their_senders_learn_of_them() {
    let mut backend = Backend::start().await;
    let limit = 30 << 20;
    let gateway = start(&[&backend], |snapshot, _| {
        snapshot.edge.max_body_total = limit + (1 << 20);
        snapshot.edge.body_timeout = 20 * SHORT;
    })
    .await;
    let filled = |length: usize| {
        let (start, end) = (r#"{"model":"up","messages":[{"role":"user","content":""#, r#""}]}"#);
        format!("{start}{}{end}", "x".repeat(length - start.len() - end.len()))
    };
    let fits = filled(limit as usize);
    let mut client = gateway.connect().await;
    let (_, exchange) = tokio::join!(client.post("/v1/chat/completions", &fits), backend.next());
    assert_eq!(exchange.request.body.len(), limit as usize);
    // While it is held, there is no room for another one of a few megabytes.
    let answer = gateway.chat(&filled(2 << 20)).await.answer().await;
    assert_eq!((answer.status(), answer.header("x-headway-reason")), (429, Some("body_memory")));
    exchange.reply(200, ANSWER).await;
    assert_eq!(client.answer().await.status(), 200);
    gateway.nothing_is_left().await;

    // One byte more is refused: before it is sent to who asks first, and after it is read by who does not.
    let long = filled(limit as usize + 1);
    client.write(&format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n", long.len())).await;
    assert_eq!(client.answer().await.status(), 413);
    let mut client = gateway.connect().await;
    client.post("/v1/chat/completions", &long).await;
    let answer = client.answer().await;
    assert_eq!((answer.status(), answer.header("x-headway-reason"), answer.header("broken-off")), (413, Some("body_too_large"), None));
    let mut client = gateway.connect().await;
    client.write("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n").await;
    client.write(&format!("{:x}\r\n{long}\r\n0\r\n\r\n", long.len())).await;
    assert_eq!(client.answer().await.status(), 413);
    // A body that never ends.
    let mut client = gateway.connect().await;
    client.write("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{").await;
    let answer = client.answer().await;
    assert_eq!((answer.status(), answer.header("x-headway-reason")), (408, Some("body_timeout")));
    gateway.nothing_is_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_says_when_to_come_back() {
    let mut backend = Backend::start().await;
    let gateway = start(&[&backend], |_, pool| pool.limits.queue_requests = 1).await;
    let mut first = gateway.chat(CHAT).await;
    let running = backend.next().await;
    let mut second = gateway.chat(CHAT).await;
    gateway.until(|view| view.waiting == 1).await;
    let answer = gateway.chat(CHAT).await.answer().await;
    assert_eq!((answer.status(), answer.header("x-headway-reason")), (429, Some("queue_full")));
    assert!(answer.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    running.reply(200, ANSWER).await;
    assert_eq!(first.answer().await.status(), 200);
    backend.next().await.reply(200, ANSWER).await;
    assert_eq!(second.answer().await.status(), 200);
    gateway.nothing_is_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backends_own_errors_pass_as_they_are() {
    let (mut backend, gateway) = start_one().await;
    let mut client = gateway.connect().await;
    for status in [400, 404, 422, 429, 500, 503] {
        client.post("/v1/chat/completions", STREAM).await;
        let exchange = backend.next().await;
        exchange.reply(status, r#"{"error":{"message":"its own","model":"up"}}"#).await;
        let answer = client.answer().await;
        assert_eq!((answer.status(), answer.text()), (status, r#"{"error":{"message":"its own","model":"up"}}"#.to_owned()));
        gateway.nothing_is_left().await;
    }
    // No number of a client's mistakes takes the backend out.
    for _ in 0..20 {
        client.post("/v1/chat/completions", CHAT).await;
        backend.next().await.reply(400, "{}").await;
        assert_eq!(client.answer().await.status(), 400);
    }
    gateway.until(|view| view.backends[0].standing == Standing::Healthy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_scored_passes_by_its_model_and_counts() {
    let (mut backend, gateway) = start_one().await;
    let mut client = gateway.send("/v1/embeddings", r#"{"input": ["a"],"model":"m"}"#).await;
    let exchange = backend.next().await;
    assert_eq!(exchange.request.text(), r#"{"input": ["a"],"model":"up"}"#);
    let form = "--b\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nRIFF\r\n--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--\r\n";
    let mut audio = gateway.connect().await;
    audio.post_with("/v1/audio/transcriptions", "content-type: multipart/form-data; boundary=b\r\n", form).await;
    gateway.until(|view| view.in_flight == 1 && view.waiting == 1).await;
    exchange.reply(200, r#"{"model":"up","data":[]}"#).await;
    assert_eq!(client.answer().await.text(), r#"{"model":"up","data":[]}"#);
    let exchange = backend.next().await;
    assert_eq!(exchange.request.text(), form.replace("\r\nm\r\n", "\r\nup\r\n"));
    exchange.reply(200, "{}").await;
    assert_eq!(audio.answer().await.status(), 200);
    // A request without a body names its model in the query.
    client.write("GET /v1/files?limit=1&model=u%70 HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let exchange = backend.next().await;
    assert!(exchange.request.head.starts_with("get /v1/files?limit=1&model=u%70 http/1.1"));
    exchange.reply(200, "[]").await;
    assert_eq!(client.answer().await.text(), "[]");
    gateway.nothing_is_left().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_models_are_listed_while_backends_are_down() {
    let (mut backend, gateway) = start_one().await;
    backend.die().await;
    let mut client = gateway.connect().await;
    client.write("GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let names: Vec<Value> = client.answer().await.json()["data"].as_array().unwrap().iter().map(|model| model["id"].clone()).collect();
    assert_eq!(names, ["m", "up"]);
    client.write("GET /v1/models/m HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(client.answer().await.json()["object"], "model");
    client.write("GET /v1/models/%6d HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(client.answer().await.json()["id"], "m");
    client.write("GET /v1/models/mm HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(client.answer().await.status(), 404);
    client.write("GET /v1/models HTTP/1.1\r\nhost: x\r\nanthropic-version: 2023-06-01\r\n\r\n").await;
    assert_eq!(client.answer().await.json()["data"][0]["type"], "model");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backend_gets_its_own_key_prefix_and_priority() {
    let mut backend = Backend::start().await;
    let gateway = start(&[&backend], |_, pool| {
        let settings = &mut pool.backends[0];
        settings.api_key = Some(Secret::new("own".to_owned()));
        settings.url.prefix = "/team".to_owned();
        settings.engine = Some(EngineKind::Vllm);
        settings.priority = true;
    })
    .await;
    let mut client = gateway.connect().await;
    client.post_with("/v1/chat/completions", "authorization: bearer client\r\n", CHAT).await;
    let exchange = backend.next().await;
    assert!(exchange.request.head.starts_with("post /team/v1/chat/completions http/1.1"));
    assert_eq!(exchange.request.header("authorization"), Some("bearer own"));
    // vLLM runs the smaller number first, in steps of a tenth of a second of absolute time.
    let tenths = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64 * 10;
    let priority = exchange.request.json()["priority"].as_i64().unwrap();
    assert!((tenths - 36_000..=tenths + 36_000).contains(&priority), "{priority} is not about {tenths}");
    assert_eq!(exchange.request.json()["model"], "up");
    exchange.reply(200, ANSWER).await;
    client.answer().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_finishes_what_runs_and_what_waits() {
    let (mut backend, gateway) = start_one().await;
    let mut running = gateway.chat(STREAM).await;
    let mut exchange = backend.next().await;
    exchange.write(EVENTS).await;
    exchange.token("Hi").await;
    running.until("Hi").await;
    let mut waiting = gateway.chat(CHAT).await;
    gateway.until(|view| view.waiting == 1).await;
    let mut kept = gateway.connect().await;
    kept.post("/v1/chat/completions", "{").await;
    kept.answer().await;

    gateway.stop.send(true).unwrap();
    gateway.until(|view| view.draining).await;
    let answer = gateway.chat(CHAT).await.answer().await;
    assert_eq!((answer.status(), answer.header("x-headway-reason"), answer.header("connection")), (503, Some("draining"), Some("close")));
    assert!(answer.header("retry-after").is_some());
    exchange.token("there").await;
    exchange.chunk("data: [DONE]\n\n").await;
    exchange.end().await;
    assert!(running.answer().await.text().contains("there"));
    backend.next().await.reply(200, ANSWER).await;
    assert_eq!(waiting.answer().await.status(), 200);
    timeout(LONG, gateway.ended).await.expect("it does not end").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_takes_too_long_cuts_with_an_event() {
    let mut backend = Backend::start().await;
    let gateway = start(&[&backend], |snapshot, pool| {
        snapshot.edge.drain = SHORT;
        pool.backends[0].slots = Some(Slots::Fixed(2));
    })
    .await;
    let mut running = gateway.chat(STREAM).await;
    let mut exchange = backend.next().await;
    exchange.write(EVENTS).await;
    exchange.token("Hi").await;
    running.until("Hi").await;
    let mut whole = gateway.chat(CHAT).await;
    let unanswered = backend.next().await;
    gateway.stop.send(true).unwrap();
    let answer = running.answer().await;
    assert!(answer.text().contains("draining") && answer.header("broken-off").is_none(), "{answer:?}");
    exchange.left().await;
    let answer = whole.answer().await;
    assert_eq!((answer.status(), answer.header("x-headway-reason")), (503, Some("draining")));
    unanswered.left().await;
    timeout(LONG, gateway.ended).await.expect("it does not end").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quiet_stream_over_h2_is_cut_with_an_event_as_well() {
    let mut backend = Backend::start().await;
    let gateway = start(&[&backend], |snapshot, _| snapshot.edge.drain = SHORT).await;
    let socket = TokioIo::new(TcpStream::connect(gateway.address).await.unwrap());
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), socket).await.unwrap();
    tokio::spawn(connection);
    let request = hyper::Request::post(format!("http://{}/v1/chat/completions", gateway.address)).body(Full::new(Bytes::from(STREAM))).unwrap();
    let answer = tokio::spawn(async move { sender.send_request(request).await.unwrap() });
    let mut exchange = backend.next().await;
    exchange.write(EVENTS).await;
    exchange.token("Hi").await;
    let mut body = answer.await.unwrap().into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(first.windows(2).any(|bytes| bytes == b"Hi"), "{first:?}");
    gateway.stop.send(true).unwrap();
    let rest = timeout(LONG, body.collect()).await.expect("the stream does not end").expect("it breaks off").to_bytes();
    assert!(String::from_utf8_lossy(&rest).contains("draining"), "{rest:?}");
    exchange.left().await;
    timeout(LONG, gateway.ended).await.expect("it does not end").unwrap();
}
