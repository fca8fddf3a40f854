//! Which requests are recorded, and how their spans get to the collector: a bounded queue, and one task that sends what is in it. A collector that is slow
//! or away costs spans, never a request.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http::HeaderMap;
use opentelemetry::trace::{TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{ExporterBuildError, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkError;
use opentelemetry_sdk::trace::{SpanData, SpanExporter};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout, timeout_at};

use super::Outcome;
use super::context;
use super::metrics::{Metrics, Traces};
use super::trace::Trace;
use crate::config::Otlp;

/// Traces that may wait to be sent; more are dropped and counted.
const QUEUE: usize = 2048;
/// Traces of one message. A trace is a handful of spans of some 500 bytes, and collectors take messages of 4 MiB.
const BATCH: usize = 256;
/// How long a trace waits for others to share a message with.
const LINGER: Duration = Duration::from_secs(1);
/// How long the collector may take to accept a message.
const EXPORT: Duration = Duration::from_secs(5);
/// How long the end of the process waits for what is left.
const FLUSH: Duration = Duration::from_secs(5);
/// A collector that is away is told of this often.
const REMIND: Duration = Duration::from_secs(60);

/// Why traces cannot be sent.
#[derive(Debug, thiserror::Error)]
#[error("telemetry.otlp: {0}")]
pub struct TracerError(#[from] ExporterBuildError);

/// Decides which requests are recorded, and takes their traces.
pub struct Tracer {
    /// Of 2^63: see [`Tracer::picks`].
    share: AtomicU64,
    queue: mpsc::Sender<Message>,
    scope: InstrumentationScope,
    traces: Traces,
}

enum Message {
    Trace(Vec<SpanData>),
    /// Everything before this is to be sent now.
    Flush(oneshot::Sender<()>),
}

impl Tracer {
    /// Starts the task that sends to the collector of `settings`. Needs a tokio runtime; waits for no connection. Beyond the settings, OpenTelemetry's own
    /// environment variables add headers (`OTEL_EXPORTER_OTLP_HEADERS`) and attributes of the process (`OTEL_RESOURCE_ATTRIBUTES`).
    ///
    /// # Errors
    /// Environment variables of OpenTelemetry that ask for what this program cannot do.
    pub fn start(settings: &Otlp, metrics: &Metrics) -> Result<Tracer, TracerError> {
        let mut exporter =
            opentelemetry_otlp::SpanExporter::builder().with_tonic().with_endpoint(settings.endpoint.clone()).with_timeout(EXPORT).build()?;
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        exporter.set_resource(&Resource::builder().with_service_name(settings.service_name.clone()).with_attribute(version).build());
        Ok(Tracer::with(exporter, settings.sample, metrics))
    }

    fn with<E: SpanExporter + 'static>(exporter: E, share: f64, metrics: &Metrics) -> Tracer {
        let (queue, inbox) = mpsc::channel(QUEUE);
        let traces = metrics.traces();
        tokio::spawn(run(inbox, exporter, traces.clone()));
        let scope = InstrumentationScope::builder("headway").with_version(env!("CARGO_PKG_VERSION")).build();
        let tracer = Tracer { share: AtomicU64::default(), queue, scope, traces };
        tracer.sample(share);
        tracer
    }

    /// From now on, this share of requests is recorded, 0 to 1, of those that come without a trace.
    pub fn sample(&self, share: f64) {
        self.share.store((share * (1_u64 << 63) as f64) as u64, Ordering::Relaxed);
    }

    /// Looks at the head of a request that came at `started`. `None`: it is not recorded, and its headers say so to whoever gets them next.
    ///
    /// What the caller decided for its trace holds, and a trace that is not recorded here goes on as if nobody were between the caller and the backend.
    pub fn begin(&self, headers: &mut HeaderMap, started: Instant) -> Option<Box<Trace>> {
        if let Some(caller) = context::caller(headers) {
            return caller.sampled.then(|| Box::new(Trace::begun(started, caller.trace, Some(caller), context::state(headers))));
        }
        // Without its parent, it says nothing.
        context::clear_state(headers);
        let id = context::new_trace();
        if self.picks(id) {
            return Some(Box::new(Trace::begun(started, id, None, TraceState::default())));
        }
        context::set(headers, id, context::new_span(), false);
        None
    }

    /// By the trace's own digits, as OpenTelemetry's ratio sampler does it: whoever else has to decide decides alike.
    fn picks(&self, id: TraceId) -> bool {
        let [.., a, b, c, d, e, f, g, h] = id.to_bytes();
        u64::from_be_bytes([a, b, c, d, e, f, g, h]) >> 1 < self.share.load(Ordering::Relaxed)
    }

    /// Takes the trace of a request that has ended.
    pub fn end(&self, trace: &Trace, outcome: &Outcome) {
        match self.queue.try_reserve() {
            Ok(place) => place.send(Message::Trace(trace.spans(outcome, &self.scope))),
            Err(TrySendError::Full(()) | TrySendError::Closed(())) => _ = self.traces.dropped.inc(),
        }
    }

    /// Sends what is waiting, if that is possible within a few seconds.
    pub async fn flush(&self) {
        let (done, flushed) = oneshot::channel();
        let flushing = async { self.queue.send(Message::Flush(done)).await.is_ok() && flushed.await.is_ok() };
        if !timeout(FLUSH, flushing).await.unwrap_or(false) {
            tracing::warn!("the last traces were not sent within {FLUSH:?}");
        }
    }
}

/// Sends what comes in, until nobody can send any more.
async fn run<E: SpanExporter>(mut inbox: mpsc::Receiver<Message>, exporter: E, traces: Traces) {
    let mut messages = Vec::with_capacity(BATCH);
    let mut reminded: Option<Instant> = None;
    while inbox.recv_many(&mut messages, BATCH).await > 0 {
        let until = Instant::now() + LINGER;
        while messages.len() < BATCH && !messages.iter().any(|message| matches!(message, Message::Flush(_))) {
            let room = BATCH - messages.len();
            if !matches!(timeout_at(until, inbox.recv_many(&mut messages, room)).await, Ok(more) if more > 0) {
                break;
            }
        }
        let (mut spans, mut waiting, mut count) = (Vec::new(), Vec::new(), 0);
        for message in messages.drain(..) {
            match message {
                Message::Trace(mut of_one) => {
                    spans.append(&mut of_one);
                    count += 1;
                }
                Message::Flush(done) => waiting.push(done),
            }
        }
        if count > 0 {
            // The exporter's own limit does not cover connecting.
            let exported = timeout(EXPORT, exporter.export(spans)).await;
            match exported.unwrap_or(Err(OTelSdkError::Timeout(EXPORT))) {
                Ok(()) => _ = traces.sent.inc_by(count),
                Err(error) => {
                    traces.failed.inc_by(count);
                    if reminded.is_none_or(|last| last.elapsed() >= REMIND) {
                        tracing::warn!("traces are lost: the collector does not take them: {error}");
                        reminded = Some(Instant::now());
                    }
                }
            }
        }
        for done in waiting {
            // Whoever asked may have given up.
            _ = done.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};
    use opentelemetry_sdk::error::OTelSdkResult;

    use super::*;

    const CALLER: &str = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331";

    /// A collector that does what the test needs.
    #[derive(Debug)]
    enum Collector {
        Takes(mpsc::UnboundedSender<usize>),
        Refuses,
        Sleeps,
    }

    impl SpanExporter for Collector {
        async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
            match self {
                Collector::Takes(sizes) => sizes.send(batch.len()).map_err(|gone| OTelSdkError::InternalFailure(gone.to_string())),
                Collector::Refuses => Err(OTelSdkError::InternalFailure("away".into())),
                Collector::Sleeps => std::future::pending().await,
            }
        }
    }

    fn tracer(collector: Collector, share: f64) -> Tracer {
        Tracer::with(collector, share, &Metrics::default())
    }

    fn headers(pairs: &[(&'static str, String)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())).collect()
    }

    fn end(tracer: &Tracer, requests: usize) {
        for _ in 0..requests {
            let trace = tracer.begin(&mut HeaderMap::new(), Instant::now()).expect("all are recorded");
            tracer.end(&trace, &Outcome::refused());
        }
    }

    fn counts(tracer: &Tracer) -> (u64, u64, u64) {
        (tracer.traces.sent.get(), tracer.traces.failed.get(), tracer.traces.dropped.get())
    }

    #[tokio::test]
    async fn the_caller_decides_for_its_trace() {
        for share in [0.0, 1.0] {
            let tracer = tracer(Collector::Sleeps, share);
            let mut recorded = headers(&[("traceparent", format!("00-{CALLER}-01")), ("tracestate", "a=1".into())]);
            let trace = tracer.begin(&mut recorded, Instant::now()).expect("the caller records it");
            assert_eq!(trace.id().to_string(), CALLER[..32]);
            assert_eq!(recorded["tracestate"], "a=1");
            let before = headers(&[("traceparent", format!("00-{CALLER}-00")), ("tracestate", "a=1".into())]);
            let mut not = before.clone();
            assert!(tracer.begin(&mut not, Instant::now()).is_none());
            assert_eq!(not, before);
        }
    }

    #[tokio::test]
    async fn a_trace_that_begins_here_is_picked_by_the_share() {
        let tracer = tracer(Collector::Sleeps, 0.0);
        let malformed = || headers(&[("traceparent", "00-ab-cd-01".into()), ("tracestate", "a=1".into())]);
        let mut out = malformed();
        assert!(tracer.begin(&mut out, Instant::now()).is_none());
        let told = context::caller(&out).expect("the backend is told of the decision");
        assert!(!told.sampled && !out.contains_key("tracestate"));

        tracer.sample(1.0);
        let mut out = malformed();
        let trace = tracer.begin(&mut out, Instant::now()).expect("all are recorded");
        assert_ne!(trace.id(), told.trace);
        assert!(!out.contains_key("tracestate"));

        let id = |low: u64| TraceId::from_bytes(u128::from(low).to_be_bytes());
        for (share, low, picked) in
            [(0.25, 0x3fff_ffff_ffff_f000, true), (0.25, 0x4000_0000_0000_0000, false), (1.0, u64::MAX, true), (0.0, 1, false)]
        {
            tracer.sample(share);
            assert_eq!(tracer.picks(id(low)), picked, "{share} of {low:x}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn traces_share_messages_and_a_flush_waits_for_none() {
        let (sizes, mut taken) = mpsc::unbounded_channel();
        let tracer = tracer(Collector::Takes(sizes), 1.0);
        end(&tracer, 3);
        // A root and its one stage.
        assert_eq!(taken.recv().await, Some(6), "they waited for each other");
        end(&tracer, BATCH + 1);
        let before = Instant::now();
        tracer.flush().await;
        assert_eq!((taken.try_recv(), taken.try_recv()), (Ok(2 * BATCH), Ok(2)));
        assert_eq!(before.elapsed(), Duration::ZERO);
        assert_eq!(counts(&tracer), (BATCH as u64 + 4, 0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_collector_that_refuses_costs_traces_and_they_are_counted() {
        let tracer = tracer(Collector::Refuses, 1.0);
        end(&tracer, 2);
        tracer.flush().await;
        assert_eq!(counts(&tracer), (0, 2, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_collector_that_sleeps_holds_up_nobody() {
        let tracer = tracer(Collector::Sleeps, 1.0);
        end(&tracer, QUEUE + 5);
        assert_eq!(counts(&tracer), (0, 0, 5));
        let before = Instant::now();
        tracer.flush().await;
        assert_eq!(before.elapsed(), FLUSH);
    }
}
