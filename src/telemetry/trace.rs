//! The trace of one request: notes while it runs, and spans made of them once it has ended.
//!
//! Names are those of OpenTelemetry's semantic conventions 1.45.0 (HTTP, server, error) and of its GenAI conventions 0.1.0; for what neither has a name,
//! they begin with `headway.`. docs/tracing.md lists them.

use std::borrow::Cow;
use std::time::SystemTime;

use http::HeaderMap;
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};
use tokio::time::Instant;

use super::context::{self, Caller};
use super::{Outcome, millis, short};
use crate::config::BackendUrl;

/// What a request is doing. It does one thing at a time: to enter a stage is to end the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Its body is read and understood, and its pool is found.
    Receive,
    /// The ranker reads its prompt.
    Score,
    /// It waits for a slot.
    Queue,
    /// It has a slot, and gets a connection to the backend.
    Connect,
    /// It is sent, and nothing has come back yet.
    FirstByte,
    /// The head of the answer has come, and the rest follows.
    Stream,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Stage::Receive => "receive",
            Stage::Score => "score",
            Stage::Queue => "queue",
            Stage::Connect => "connect",
            Stage::FirstByte => "first_byte",
            Stage::Stream => "stream",
        }
    }

    /// Whether it is a part of an attempt on a backend.
    fn is_upstream(self) -> bool {
        matches!(self, Stage::Connect | Stage::FirstByte | Stage::Stream)
    }
}

/// A recorded request.
#[derive(Debug)]
pub struct Trace {
    id: TraceId,
    /// The span of the request as a whole.
    span: SpanId,
    /// The caller's span; invalid where the trace begins here.
    parent: SpanId,
    state: TraceState,
    started: Instant,
    /// What the clock on the wall said when it started. It is asked once, so that no step of it comes between two spans.
    since: SystemTime,
    /// When each stage was entered.
    stages: Vec<(Stage, Instant)>,
    /// One for each [`Stage::Connect`].
    attempts: Vec<Attempt>,
}

/// One try on one backend.
#[derive(Debug)]
struct Attempt {
    span: SpanId,
    url: BackendUrl,
    status: Option<u16>,
    error: Option<&'static str>,
}

impl Trace {
    /// The trace of a request whose head came at `started`.
    pub(super) fn begun(started: Instant, id: TraceId, caller: Option<Caller>, state: TraceState) -> Trace {
        let mut stages = Vec::with_capacity(8);
        stages.push((Stage::Receive, started));
        Trace {
            id,
            span: context::new_span(),
            parent: caller.map_or(SpanId::INVALID, |caller| caller.span),
            state,
            started,
            since: SystemTime::now(),
            stages,
            attempts: Vec::new(),
        }
    }

    /// Names the trace, in logs too.
    pub fn id(&self) -> TraceId {
        self.id
    }

    /// It goes on to this stage.
    pub fn enters(&mut self, stage: Stage) {
        self.stages.push((stage, Instant::now()));
    }

    /// It has got a slot on this backend.
    pub fn released(&mut self, url: &BackendUrl) {
        self.attempts.push(Attempt { span: context::new_span(), url: url.clone(), status: None, error: None });
        self.enters(Stage::Connect);
    }

    /// It is sent with these headers, which the backend's own spans get their parent from. A request sent again, because a kept connection turned out to
    /// be closed, is the same attempt.
    pub fn sent(&mut self, headers: &mut HeaderMap) {
        let Some(attempt) = self.attempts.last() else { return };
        context::set(headers, self.id, attempt.span, true);
        if self.stages.last().is_none_or(|(stage, _)| *stage != Stage::FirstByte) {
            self.enters(Stage::FirstByte);
        }
    }

    /// The head of the backend's answer has come.
    pub fn answered(&mut self, status: u16) {
        if let Some(attempt) = self.attempts.last_mut() {
            attempt.status = Some(status);
        }
        self.enters(Stage::Stream);
    }

    /// The attempt came to nothing, for this reason.
    pub fn failed(&mut self, reason: &'static str) {
        if let Some(attempt) = self.attempts.last_mut() {
            attempt.error = Some(reason);
        }
    }

    /// The spans of the request, which has ended like this: one for the whole, below it one for each stage before a backend and one for each attempt, and
    /// below an attempt its stages.
    pub(super) fn spans(&self, outcome: &Outcome, scope: &InstrumentationScope) -> Vec<SpanData> {
        let end = self.started + outcome.total;
        let failed = failed(outcome);
        let mut spans = Vec::with_capacity(1 + self.attempts.len() + self.stages.len());
        let mut root = self.span(scope, self.span, self.parent, root_name(outcome), self.started, end);
        root.parent_span_is_remote = self.parent != SpanId::INVALID;
        root.span_kind = SpanKind::Server;
        root.attributes = root_attributes(outcome, failed);
        root.status = status(failed.then_some(outcome.reason));
        spans.push(root);

        let mut attempts = self.attempts.iter().enumerate();
        let mut parent = self.span;
        for (index, &(stage, from)) in self.stages.iter().enumerate() {
            let rest = &self.stages[index + 1..];
            let to = rest.first().map_or(end, |next| next.1);
            if stage == Stage::Connect
                && let Some((number, attempt)) = attempts.next()
            {
                let next = rest.iter().find(|(stage, _)| !stage.is_upstream() || *stage == Stage::Connect);
                let is_last = number + 1 == self.attempts.len();
                let reason = attempt.error.or((is_last && failed).then_some(outcome.reason));
                let mut span = self.span(scope, attempt.span, self.span, method(outcome.method).1.into(), from, next.map_or(end, |next| next.1));
                span.span_kind = SpanKind::Client;
                (span.attributes, span.status) = attempt_facts(attempt, number, reason, outcome);
                spans.push(span);
                parent = attempt.span;
            }
            let parent = if stage.is_upstream() { parent } else { self.span };
            spans.push(self.span(scope, context::new_span(), parent, stage.name().into(), from, to));
        }
        spans
    }

    fn span(&self, scope: &InstrumentationScope, id: SpanId, parent: SpanId, name: Cow<'static, str>, from: Instant, to: Instant) -> SpanData {
        SpanData {
            span_context: SpanContext::new(self.id, id, TraceFlags::SAMPLED, false, self.state.clone()),
            parent_span_id: parent,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name,
            start_time: self.wall(from),
            end_time: self.wall(to),
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: scope.clone(),
        }
    }

    fn wall(&self, at: Instant) -> SystemTime {
        self.since + at.saturating_duration_since(self.started)
    }
}

/// Whether the request is a failure of the server: a status from 500, or an answer that began well and broke off. HTTP's conventions leave the rest, and
/// so a client that left, to the client.
fn failed(outcome: &Outcome) -> bool {
    outcome.status >= 500 || (outcome.status < 400 && outcome.reason != "ok")
}

fn status(error: Option<&'static str>) -> Status {
    error.map_or(Status::Unset, Status::error)
}

/// `chat llama`; without a name that somebody serves, and so of bounded kinds, only what is asked for.
fn root_name(outcome: &Outcome) -> Cow<'static, str> {
    let operation = outcome.operation.unwrap_or(method(outcome.method).1);
    match outcome.pool {
        Some(_) if outcome.operation.is_some() => format!("{operation} {}", short(outcome.model)).into(),
        _ => operation.into(),
    }
}

/// The method as an attribute, and as a name of a span: of a closed set.
fn method(method: &str) -> (&'static str, &'static str) {
    const KNOWN: [&str; 9] = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE"];
    KNOWN.into_iter().find(|known| *known == method).map_or(("_OTHER", "HTTP"), |known| (known, known))
}

fn root_attributes(outcome: &Outcome, failed: bool) -> Vec<KeyValue> {
    let mut all = Attributes(Vec::with_capacity(24));
    if let Some(operation) = outcome.operation {
        all.add("gen_ai.operation.name", operation);
        all.add("gen_ai.provider.name", outcome.provider);
    }
    if !outcome.model.is_empty() {
        all.add("gen_ai.request.model", short(outcome.model).to_owned());
    }
    if outcome.streamed {
        all.add("gen_ai.request.stream", true);
    }
    all.maybe("gen_ai.response.model", outcome.upstream_model.map(|model| short(model).to_owned()));
    all.maybe("gen_ai.response.time_to_first_chunk", outcome.first_token.map(|span| span.as_secs_f64()));
    all.maybe("gen_ai.usage.input_tokens", outcome.prompt_tokens.map(i64::from));
    all.maybe("gen_ai.usage.output_tokens", (outcome.output_tokens > 0).then_some(i64::from(outcome.output_tokens)));
    all.add("http.request.method", method(outcome.method).0);
    all.add("url.path", short(outcome.path).to_owned());
    // Nobody was told that the client had left.
    all.maybe("http.response.status_code", (outcome.status != 499).then_some(i64::from(outcome.status)));
    all.maybe("error.type", failed.then_some(outcome.reason));
    all.add("headway.request_id", outcome.request_id.to_owned());
    all.add("headway.reason", outcome.reason);
    all.maybe("headway.pool", outcome.pool.map(str::to_owned));
    all.maybe("headway.backend", outcome.backend.map(str::to_owned));
    all.maybe("headway.score", outcome.score.map(f64::from));
    all.maybe("headway.scoring", outcome.scoring);
    all.maybe("headway.predicted_tokens", outcome.predicted_tokens.map(i64::from));
    all.maybe("headway.boost_ms", outcome.boost.map(|micros| micros as f64 / 1e3));
    all.maybe("headway.queue_ms", outcome.queued.map(millis));
    if outcome.backend.is_some() {
        all.add("headway.aged", outcome.aged);
        all.add("headway.stolen", outcome.stolen);
        all.add("headway.retries", i64::from(outcome.retries));
    }
    all.0
}

fn attempt_facts(attempt: &Attempt, number: usize, reason: Option<&'static str>, outcome: &Outcome) -> (Vec<KeyValue>, Status) {
    let mut all = Attributes(Vec::with_capacity(8));
    all.add("http.request.method", method(outcome.method).0);
    all.add("server.address", attempt.url.host.trim_matches(['[', ']']).to_owned());
    all.add("server.port", i64::from(attempt.url.port));
    all.add("url.full", format!("{}{}", attempt.url, short(outcome.path)));
    all.maybe("http.request.resend_count", (number > 0).then(|| i64::try_from(number).unwrap_or(i64::MAX)));
    all.maybe("http.response.status_code", attempt.status.map(i64::from));
    // To a client, 4xx are errors too.
    let refused = attempt.status.filter(|status| *status >= 400).map(|status| Cow::from(status.to_string()));
    let error = refused.or(reason.map(Cow::from));
    all.maybe("error.type", error.clone().map(|error| error.into_owned()));
    (all.0, error.map_or(Status::Unset, Status::error))
}

struct Attributes(Vec<KeyValue>);

impl Attributes {
    fn add(&mut self, name: &'static str, value: impl Into<Value>) {
        self.0.push(KeyValue::new(name, value));
    }

    fn maybe(&mut self, name: &'static str, value: Option<impl Into<Value>>) {
        if let Some(value) = value {
            self.add(name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::advance;

    use super::super::LONGEST;
    use super::*;

    fn outcome<'a>() -> Outcome<'a> {
        Outcome {
            streamed: true,
            upstream_model: Some("up"),
            backend: Some("10.0.0.1:8000"),
            status: 200,
            reason: "ok",
            queued: Some(Duration::from_millis(22)),
            first_token: Some(Duration::from_millis(250)),
            prompt_tokens: Some(9),
            output_tokens: 7,
            score: Some(0.5),
            scoring: Some("scored"),
            predicted_tokens: Some(12),
            boost: Some(1500),
            stolen: true,
            ..Outcome::refused()
        }
    }

    fn begun() -> Trace {
        Trace::begun(Instant::now(), context::new_trace(), None, TraceState::default())
    }

    async fn pass(millis: u64) {
        advance(Duration::from_millis(millis)).await;
    }

    fn spans(trace: &Trace, outcome: Outcome) -> Vec<SpanData> {
        let outcome = Outcome { total: trace.started.elapsed(), ..outcome };
        trace.spans(&outcome, &InstrumentationScope::builder("test").build())
    }

    fn attribute(span: &SpanData, name: &str) -> Option<String> {
        let mut found = span.attributes.iter().filter(|attribute| attribute.key.as_str() == name);
        let value = found.next().map(|attribute| attribute.value.to_string());
        assert!(found.next().is_none(), "{name} is said twice");
        value
    }

    /// Names, names of parents, and milliseconds from the start: what a page shows of a trace.
    fn drawn(spans: &[SpanData]) -> Vec<(String, String, u128, u128)> {
        let name = |id| spans.iter().find(|span| span.span_context.span_id() == id).map_or_else(String::new, |span| span.name.to_string());
        let since = |at: SystemTime| at.duration_since(spans[0].start_time).unwrap().as_millis();
        spans.iter().map(|span| (span.name.to_string(), name(span.parent_span_id), since(span.start_time), since(span.end_time))).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_was_tried_twice_is_a_tree_of_its_stages() {
        let mut trace = begun();
        let url = |text: &str| text.parse::<BackendUrl>().unwrap();
        pass(5).await;
        trace.enters(Stage::Score);
        pass(10).await;
        trace.enters(Stage::Queue);
        pass(20).await;
        trace.released(&url("http://10.0.0.1:8000"));
        pass(1).await;
        let mut headers = HeaderMap::new();
        trace.sent(&mut headers);
        pass(30).await;
        let first = context::caller(&headers).unwrap();
        trace.failed("backend_broke");
        trace.enters(Stage::Queue);
        pass(2).await;
        trace.released(&url("http://[::1]:8001/llm"));
        pass(1).await;
        trace.sent(&mut headers);
        pass(3).await;
        // On another connection.
        trace.sent(&mut headers);
        pass(40).await;
        trace.answered(200);
        pass(100).await;

        let spans = spans(&trace, Outcome { retries: 1, ..outcome() });
        let all = [
            ("chat m", "", 0, 212),
            ("receive", "chat m", 0, 5),
            ("score", "chat m", 5, 15),
            ("queue", "chat m", 15, 35),
            ("POST", "chat m", 35, 66),
            ("connect", "POST", 35, 36),
            ("first_byte", "POST", 36, 66),
            ("queue", "chat m", 66, 68),
            ("POST", "chat m", 68, 212),
            ("connect", "POST", 68, 69),
            ("first_byte", "POST", 69, 112),
            ("stream", "POST", 112, 212),
        ];
        assert_eq!(drawn(&spans), all.map(|(name, parent, from, to)| (name.to_owned(), parent.to_owned(), from, to)));

        let kinds: Vec<_> = spans.iter().filter(|span| span.span_kind != SpanKind::Internal).map(|span| span.span_kind.clone()).collect();
        assert_eq!(kinds, [SpanKind::Server, SpanKind::Client, SpanKind::Client]);
        assert!(spans.iter().all(|span| span.span_context.trace_id() == trace.id() && span.span_context.is_sampled()));
        assert!(first.sampled && first.trace == trace.id() && first.span == spans[4].span_context.span_id());
        assert_eq!(context::caller(&headers).unwrap().span, spans[8].span_context.span_id());
        assert_eq!(spans[9].parent_span_id, spans[8].span_context.span_id());

        let root = |name| attribute(&spans[0], name).unwrap_or_default();
        assert_eq!((root("gen_ai.request.model"), root("gen_ai.response.model")), ("m".to_owned(), "up".to_owned()));
        assert_eq!((root("gen_ai.usage.input_tokens"), root("gen_ai.usage.output_tokens")), ("9".to_owned(), "7".to_owned()));
        assert_eq!((root("headway.boost_ms"), root("headway.predicted_tokens")), ("1.5".to_owned(), "12".to_owned()));
        assert_eq!(
            (root("headway.retries"), root("http.response.status_code"), root("error.type")),
            ("1".to_owned(), "200".to_owned(), String::new())
        );
        assert_eq!(attribute(&spans[4], "error.type").as_deref(), Some("backend_broke"));
        assert_eq!(attribute(&spans[4], "http.request.resend_count"), None);
        let second = |name| attribute(&spans[8], name).unwrap_or_default();
        assert_eq!((second("server.address"), second("server.port")), ("::1".to_owned(), "8001".to_owned()));
        assert_eq!((second("url.full"), second("error.type")), ("http://[::1]:8001/llm/v1/chat/completions".to_owned(), String::new()));
        assert_eq!(second("http.request.resend_count"), "1");
        assert_eq!((&spans[0].status, &spans[8].status), (&Status::Unset, &Status::Unset));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_leaves_the_queue_is_nobodys_failure() {
        let mut trace = begun();
        trace.enters(Stage::Queue);
        pass(7).await;
        let left = Outcome { backend: None, upstream_model: None, status: 499, reason: "client_left", ..outcome() };
        let spans = spans(&trace, left);
        assert_eq!(drawn(&spans).last().unwrap(), &("queue".to_owned(), "chat m".to_owned(), 0, 7));
        assert_eq!(spans[0].status, Status::Unset);
        assert_eq!((attribute(&spans[0], "error.type"), attribute(&spans[0], "http.response.status_code")), (None, None));
        assert_eq!(attribute(&spans[0], "headway.reason").as_deref(), Some("client_left"));
    }

    #[tokio::test(start_paused = true)]
    async fn failures_are_told_apart() {
        let url = "http://a:1".parse().unwrap();
        // What the backend and the client were told, whether the request failed, and what is said of the attempt.
        for (backend, status, reason, failed, of_attempt) in [
            (200, 200, "inter_chunk_timeout", true, Some("inter_chunk_timeout")),
            (400, 400, "backend_refused", false, Some("400")),
            (500, 500, "backend_error", true, Some("500")),
            (429, 429, "backend_busy", false, Some("429")),
            (200, 499, "client_left", false, None),
        ] {
            let mut trace = begun();
            trace.released(&url);
            trace.sent(&mut HeaderMap::new());
            trace.answered(backend);
            let spans = spans(&trace, Outcome { status, reason, ..outcome() });
            assert_eq!(spans[0].status != Status::Unset, failed, "{reason}");
            assert_eq!(attribute(&spans[0], "error.type"), failed.then(|| reason.to_owned()), "{reason}");
            let attempt = spans.iter().find(|span| span.span_kind == SpanKind::Client).unwrap();
            assert_eq!(attribute(attempt, "error.type").as_deref(), of_attempt, "{reason}");
            assert_eq!(attempt.status != Status::Unset, of_attempt.is_some(), "{reason}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_clients_make_up_names_no_span_and_fills_no_attribute() {
        let long = "\u{e9}".repeat(1000);
        let unknown = Outcome { pool: None, model: &long, path: &long, method: "BREW", operation: None, ..outcome() };
        let spans = spans(&begun(), unknown);
        assert_eq!(spans[0].name, "HTTP");
        assert_eq!(attribute(&spans[0], "http.request.method").as_deref(), Some("_OTHER"));
        assert_eq!(attribute(&spans[0], "gen_ai.operation.name"), None);
        for name in ["gen_ai.request.model", "url.path"] {
            assert_eq!(attribute(&spans[0], name).map(|text| text.len()), Some(LONGEST), "{name}");
        }
        assert_eq!(root_name(&Outcome { pool: None, ..outcome() }), "chat");
    }
}
