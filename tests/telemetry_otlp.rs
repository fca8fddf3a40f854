//! Traces as a collector gets them: the program itself, a backend and a collector on real sockets, gRPC in between.
#![cfg(feature = "gateway")]
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use axum::response::IntoResponse;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Uri};
use http_body::Body;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Longer than anything takes, shorter than patience.
const LONG: Duration = Duration::from_secs(60);

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";
const STREAM: &str = r#"{"model":"m","stream":true,"messages":[{"role":"user","content":"Hi"}]}"#;

/// A span as it came over the wire.
#[derive(Clone, Debug, Default, PartialEq)]
struct Span {
    trace_id: String,
    span_id: String,
    state: String,
    parent: String,
    name: String,
    kind: u64,
    start: u64,
    end: u64,
    attributes: BTreeMap<String, String>,
    /// Of the process that sent it.
    resource: BTreeMap<String, String>,
}

/// Kinds of spans in OTLP.
const SERVER: u64 = 2;
const CLIENT: u64 = 3;

/// One field of a protobuf message: a number of any width, or bytes.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Field<'a> {
    fn number(self) -> u64 {
        if let Field::Number(number) = self { number } else { panic!("bytes where a number should be") }
    }

    fn bytes(self) -> &'a [u8] {
        if let Field::Bytes(bytes) = self { bytes } else { panic!("a number where bytes should be") }
    }

    fn text(self) -> String {
        String::from_utf8(self.bytes().to_vec()).unwrap()
    }

    fn hex(self) -> String {
        self.bytes().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The numbered fields of a protobuf message.
fn fields(mut message: &[u8]) -> Vec<(u64, Field<'_>)> {
    fn varint(message: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = message.split_off_first().unwrap();
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        value
    }
    let mut all = Vec::new();
    while !message.is_empty() {
        let key = varint(&mut message);
        let field = match key & 7 {
            0 => Field::Number(varint(&mut message)),
            1 => Field::Number(u64::from_le_bytes(message.split_off(..8).unwrap().try_into().unwrap())),
            5 => Field::Number(u32::from_le_bytes(message.split_off(..4).unwrap().try_into().unwrap()).into()),
            2 => {
                let length = varint(&mut message) as usize;
                Field::Bytes(message.split_off(..length).unwrap())
            }
            other => panic!("wire type {other}"),
        };
        all.push((key >> 3, field));
    }
    all
}

/// The spans of an `ExportTraceServiceRequest`, by the field numbers of opentelemetry-proto 1.x.
fn spans_of(message: &[u8]) -> Vec<Span> {
    let mut spans = Vec::new();
    for (_, of_resource) in fields(message) {
        let (mut resource, mut here) = (BTreeMap::new(), Vec::new());
        for (number, field) in fields(of_resource.bytes()) {
            match number {
                1 => resource.extend(fields(field.bytes()).into_iter().filter(|(number, _)| *number == 1).map(|(_, field)| attribute(field.bytes()))),
                2 => here.extend(fields(field.bytes()).into_iter().filter(|(number, _)| *number == 2).map(|(_, field)| span(field.bytes()))),
                _ => {}
            }
        }
        spans.extend(here.into_iter().map(|span| Span { resource: resource.clone(), ..span }));
    }
    spans
}

fn span(message: &[u8]) -> Span {
    let mut span = Span::default();
    for (number, field) in fields(message) {
        match number {
            1 => span.trace_id = field.hex(),
            2 => span.span_id = field.hex(),
            3 => span.state = field.text(),
            4 => span.parent = field.hex(),
            5 => span.name = field.text(),
            6 => span.kind = field.number(),
            7 => span.start = field.number(),
            8 => span.end = field.number(),
            9 => span.attributes.extend([attribute(field.bytes())]),
            _ => {}
        }
    }
    span
}

fn attribute(message: &[u8]) -> (String, String) {
    let (mut name, mut value) = (String::new(), String::new());
    for (number, field) in fields(message) {
        match number {
            1 => name = field.text(),
            _ => {
                for (kind, field) in fields(field.bytes()) {
                    value = match kind {
                        1 => field.text(),
                        2 => (field.number() != 0).to_string(),
                        3 => field.number().cast_signed().to_string(),
                        4 => f64::from_bits(field.number()).to_string(),
                        other => panic!("an attribute of kind {other}"),
                    };
                }
            }
        }
    }
    (name, value)
}

/// A collector that takes OTLP over gRPC and hands on the spans of each message.
async fn collector() -> (SocketAddr, mpsc::UnboundedReceiver<Vec<Span>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, taken) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let sender = sender.clone();
            let service = service_fn(move |request: Request<Incoming>| export(request, sender.clone()));
            tokio::spawn(http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(socket), service));
        }
    });
    (address, taken)
}

/// One call: a frame of a flag, a length and a message each way, and the status behind.
async fn export(
    request: Request<Incoming>,
    spans: mpsc::UnboundedSender<Vec<Span>>,
) -> Result<Response<impl Body<Data = Bytes, Error = Infallible>>, Infallible> {
    assert_eq!(request.uri().path(), "/opentelemetry.proto.collector.trace.v1.TraceService/Export");
    let frame = request.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(frame[..5], [&[0], &(frame.len() as u32 - 5).to_be_bytes()[..]].concat());
    spans.send(spans_of(&frame[5..])).unwrap();
    let status = HeaderMap::from_iter([(HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))]);
    let body = Full::new(Bytes::from_static(&[0; 5])).with_trailers(async { Some(Ok(status)) });
    Ok(Response::builder().header("content-type", "application/grpc").body(body).unwrap())
}

/// A backend that streams two words to whoever asks, and hands on the headers it was asked with.
async fn backend() -> (SocketAddr, mpsc::UnboundedReceiver<HeaderMap>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, asked) = mpsc::unbounded_channel();
    let answer = move |uri: Uri, headers: HeaderMap| {
        let known = uri.path() == "/v1/chat/completions" && sender.send(headers).is_ok();
        async move { if known { stream() } else { "{}".into_response() } }
    };
    tokio::spawn(async move { axum::serve(listener, axum::Router::new().fallback(answer)).await });
    (address, asked)
}

fn stream() -> axum::response::Response {
    let event = |choices: &str, rest: &str| format!("data: {{\"id\":\"a\",\"model\":\"up\",\"choices\":[{choices}]{rest}}}\n\n");
    let words = ["Hel", "lo"].map(|word| event(&format!("{{\"index\":0,\"delta\":{{\"content\":\"{word}\"}},\"finish_reason\":null}}"), ""));
    let usage = event("", ",\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":7}");
    ([("content-type", "text/event-stream")], words.concat() + &usage + "data: [DONE]\n\n").into_response()
}

/// `headway serve` in front of one backend.
struct Gateway {
    process: Process,
    address: String,
    admin: String,
    log: mpsc::UnboundedReceiver<String>,
    _dir: tempfile::TempDir,
}

/// Does not outlive the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

/// The lines that come, until there are no more.
fn lines(of: impl Read + Send + 'static) -> mpsc::UnboundedReceiver<String> {
    let (sender, lines) = mpsc::unbounded_channel();
    std::thread::spawn(move || BufReader::new(of).lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
    lines
}

impl Gateway {
    /// Starts it, and waits until the backend is known to be healthy.
    async fn start(backend: SocketAddr, collector: SocketAddr, share: f64) -> Gateway {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("headway.yaml");
        let text = format!(
            "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\n\
             telemetry: {{ otlp: {{ endpoint: 'http://{collector}', sample: {share}, service_name: edge }} }}\n\
             pools: [{{ name: chat, models: [{{ name: m, upstream: up }}], backends: [{{ url: 'http://{backend}', engine: openai }}] }}]\n"
        );
        std::fs::write(&file, text).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_headway"))
            .args(["serve", "--config"])
            .arg(&file)
            .env_remove("RUST_LOG")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut said, mut log) = (lines(child.stdout.take().unwrap()), lines(child.stderr.take().unwrap()));
        let process = Process(child);
        let admin = after("operators: http://", &mut log).await;
        let address = after("listening on http://", &mut said).await;
        let gateway = Gateway { process, address, admin, log, _dir: dir };
        gateway.until(async || gateway.get(&gateway.admin, "/readyz").await.starts_with("HTTP/1.1 200")).await;
        gateway
    }

    async fn until(&self, condition: impl AsyncFn() -> bool) {
        let waiting = async {
            while !condition().await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LONG, waiting).await.expect("it does not come to that");
    }

    async fn get(&self, address: &str, path: &str) -> String {
        exchange(address, &format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await
    }

    async fn chat(&self, headers: &str) -> String {
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n{headers}");
        exchange(&self.address, &format!("{head}content-length: {}\r\n\r\n{STREAM}", STREAM.len())).await
    }

    /// The value of a metric; `None` while it has no series.
    async fn metric(&self, name: &str) -> Option<f64> {
        let page = self.get(&self.admin, "/metrics").await;
        page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    }

    /// Tells it to end, and waits for that.
    async fn end(mut self) -> (ExitStatus, String) {
        let sent = Command::new("kill").args(["-TERM", &self.process.0.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let mut log = String::new();
        let ending = async {
            while let Some(line) = self.log.recv().await {
                log += &(line + "\n");
            }
        };
        timeout(LONG, ending).await.expect("it does not end");
        (self.process.0.wait().unwrap(), log)
    }
}

/// What stands behind `prefix` in the first line that has it.
async fn after(prefix: &str, lines: &mut mpsc::UnboundedReceiver<String>) -> String {
    let found = async {
        while let Some(line) = lines.recv().await {
            if let Some((_, rest)) = line.split_once(prefix) {
                return Some(rest.trim().to_owned());
            }
        }
        None
    };
    timeout(LONG, found).await.expect("nothing is said").unwrap_or_else(|| panic!("it ended without {prefix}"))
}

async fn exchange(address: &str, request: &str) -> String {
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    timeout(LONG, socket.read_to_end(&mut answer)).await.expect("no answer came").unwrap();
    String::from_utf8(answer).unwrap()
}

/// What has come; with the process gone, that is all there will be.
fn all(taken: &mut mpsc::UnboundedReceiver<Vec<Span>>) -> Vec<Span> {
    std::iter::from_fn(|| taken.try_recv().ok()).flatten().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_streamed_request_is_one_trace_from_its_client_to_its_backend() {
    let (sink, mut taken) = collector().await;
    let (address, mut asked) = backend().await;
    let gateway = Gateway::start(address, sink, 0.0).await;
    let answer = gateway.chat(&format!("traceparent: 00-{TRACE}-{CALLER}-01\r\ntracestate: them=1\r\nx-request-id: mine\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("[DONE]"), "{answer}");
    let upstream = asked.recv().await.unwrap();
    let (status, log) = gateway.end().await;
    assert!(status.success(), "{log}");
    assert!(log.contains(TRACE), "the access log names the trace:\n{log}");

    let spans = all(&mut taken);
    let named = |name: &str| {
        let mut found = spans.iter().filter(|span| span.name == name);
        let span = found.next().unwrap_or_else(|| panic!("no {name} in {spans:#?}"));
        assert!(found.next().is_none(), "{name} twice");
        span
    };
    let (root, attempt) = (named("chat m"), named("POST"));
    assert_eq!(spans.len(), 8, "{spans:#?}");
    for span in &spans {
        assert_eq!((span.trace_id.as_str(), span.state.as_str()), (TRACE, "them=1"));
        assert_eq!((span.resource["service.name"].as_str(), span.resource["service.version"].as_str()), ("edge", env!("CARGO_PKG_VERSION")));
    }
    assert_eq!(root.parent, CALLER);
    assert_eq!((root.kind, attempt.kind), (SERVER, CLIENT));

    // What goes upstream names the attempt.
    assert_eq!(upstream["traceparent"], format!("00-{TRACE}-{}-01", attempt.span_id).as_str());
    assert_eq!(upstream["tracestate"], "them=1");

    // Each stage begins where the one before ends, from the first byte to the last.
    let stages = ["receive", "score", "queue", "connect", "first_byte", "stream"].map(named);
    for (stage, parent) in stages.iter().zip([root, root, root, attempt, attempt, attempt]) {
        assert_eq!(stage.parent, parent.span_id, "{}", stage.name);
        assert!(stage.start <= stage.end, "{}", stage.name);
    }
    for pair in stages.windows(2) {
        assert_eq!(pair[0].end, pair[1].start, "{} to {}", pair[0].name, pair[1].name);
    }
    assert_eq!((root.start, root.end), (stages[0].start, stages[5].end));
    assert_eq!(attempt.parent, root.span_id);
    assert_eq!((attempt.start, attempt.end), (stages[3].start, root.end));

    let said = &root.attributes;
    for (name, value) in [
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.provider.name", "openai"),
        ("gen_ai.request.model", "m"),
        ("gen_ai.request.stream", "true"),
        ("gen_ai.response.model", "up"),
        ("gen_ai.usage.input_tokens", "9"),
        ("gen_ai.usage.output_tokens", "7"),
        ("http.request.method", "POST"),
        ("http.response.status_code", "200"),
        ("url.path", "/v1/chat/completions"),
        ("headway.request_id", "mine"),
        ("headway.pool", "chat"),
        ("headway.backend", address.to_string().as_str()),
        ("headway.reason", "ok"),
        ("headway.scoring", "off"),
        ("headway.retries", "0"),
    ] {
        assert_eq!(said.get(name).map(String::as_str), Some(value), "{name} in {said:#?}");
    }
    let first_token: f64 = said["gen_ai.response.time_to_first_chunk"].parse().unwrap();
    let total = (root.end - root.start) as f64 / 1e9;
    assert!(first_token > 0.0 && first_token <= total, "{first_token} of {total}");
    assert!(said["headway.predicted_tokens"].parse::<u32>().unwrap() > 0);
    assert!(said.contains_key("headway.boost_ms") && said.contains_key("headway.queue_ms") && !said.contains_key("error.type"));
    let said = &attempt.attributes;
    assert_eq!((said["server.address"].as_str(), said["server.port"].clone()), ("127.0.0.1", address.port().to_string()));
    assert_eq!((said["http.response.status_code"].as_str(), said.contains_key("error.type")), ("200", false));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_sampled_is_not_sent_and_the_backend_is_told() {
    let (sink, mut taken) = collector().await;
    let (address, mut asked) = backend().await;
    let gateway = Gateway::start(address, sink, 0.0).await;
    let callers = format!("00-{TRACE}-{CALLER}-00");
    for (sent, passed_on) in [
        (format!("traceparent: {callers}\r\ntracestate: them=1\r\n"), true),
        (String::new(), false),
        ("traceparent: 00-no-trace-01\r\ntracestate: them=1\r\n".to_owned(), false),
    ] {
        assert!(gateway.chat(&sent).await.starts_with("HTTP/1.1 200"));
        let upstream = asked.recv().await.unwrap();
        let parent = upstream["traceparent"].to_str().unwrap();
        assert_eq!((parent == callers, upstream.contains_key("tracestate")), (passed_on, passed_on), "{upstream:?}");
        assert!(parent.len() == callers.len() && parent.starts_with("00-") && parent.ends_with("-00"), "{parent}");
    }
    assert_eq!(gateway.metric("headway_traces_total{result=\"sent\"}").await, Some(0.0));
    let (status, log) = gateway.end().await;
    assert!(status.success() && !log.contains("traces"), "{log}");
    assert_eq!(all(&mut taken), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_away_or_silent_costs_traces_and_nothing_else() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let away = listener.local_addr().unwrap();
    drop(listener);
    // Connections to it are made, by the system, and nobody ever answers.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for collector in [away, silent.local_addr().unwrap()] {
        let (address, _asked) = backend().await;
        let gateway = Gateway::start(address, collector, 1.0).await;
        for _ in 0..20 {
            let answer = gateway.chat("").await;
            assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("[DONE]"), "{answer}");
        }
        if collector == away {
            gateway.until(async || gateway.metric("headway_traces_total{result=\"failed\"}").await == Some(20.0)).await;
            for _ in 0..20 {
                gateway.chat("").await;
            }
        }
        let (status, log) = gateway.end().await;
        assert!(status.success(), "{log}");
        let warnings = log.lines().filter(|line| line.contains("WARN") && line.contains("traces")).count();
        assert!(if collector == away { warnings == 1 } else { warnings >= 1 }, "{log}");
    }
}
