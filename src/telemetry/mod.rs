//! Turns outcomes and stage timings into metrics, the access log and spans. Nobody below knows it.

mod access;
mod context;
pub mod metrics;
mod recent;
mod trace;
mod tracer;

use std::time::Duration;

use opentelemetry::trace::TraceId;

pub use access::Line;
pub use context::random;
pub use recent::{Ended, Recent, Totals};
pub use trace::{Stage, Trace};
pub use tracer::{Tracer, TracerError};

use metrics::{Metrics, Record};

/// How one request went: one value per request, whatever became of it.
#[derive(Clone, Debug)]
pub struct Outcome<'a> {
    /// Kept from the client or made here; goes upstream and back.
    pub request_id: &'a str,
    /// The trace it is recorded in.
    pub trace: Option<TraceId>,
    pub method: &'a str,
    pub path: &'a str,
    /// What is asked for, in the words of OpenTelemetry's GenAI conventions; `None` for what they have no word for.
    pub operation: Option<&'static str>,
    /// Whose API is spoken, in the words of the same.
    pub provider: &'static str,
    /// Whose request it is, where keys are asked for.
    pub tenant: Option<&'a str>,
    /// A stream is asked for.
    pub streamed: bool,
    /// The model as the client named it; empty if it came to no model.
    pub model: &'a str,
    /// The model as its backends know it, where one answered.
    pub upstream_model: Option<&'a str>,
    /// `None`: no pool was found for it.
    pub pool: Option<&'a str>,
    /// The pool that the model belongs to, where another one took over.
    pub fell_from: Option<&'a str>,
    /// `host:port` of the backend that answered or failed last.
    pub backend: Option<&'a str>,
    /// What the client was told; 499 for one that left, as nginx writes it.
    pub status: u16,
    /// `ok`, or why not, in one word of a closed set.
    pub reason: &'static str,
    /// Wait in the queue, over all attempts; `None` if it never asked for a slot.
    pub queued: Option<Duration>,
    /// From arrival to the last release to a backend.
    pub released: Option<Duration>,
    /// From arrival to the first token of a streamed answer.
    pub first_token: Option<Duration>,
    /// From arrival to the end.
    pub total: Duration,
    /// Prompt tokens by the backend's count.
    pub prompt_tokens: Option<u32>,
    /// Output tokens, the backend's count where it told one.
    pub output_tokens: u32,
    /// The client's limit on them; `None` where it is no tighter than the pool's.
    pub max_output: Option<u32>,
    pub score: Option<f32>,
    /// Where the score came from, one of a closed set of names; `None` for requests that are not scored.
    pub scoring: Option<&'static str>,
    /// Output tokens that were expected when it was released.
    pub predicted_tokens: Option<u32>,
    /// The work that was expected then, in capacity-seconds.
    pub work: Option<f64>,
    /// How much earlier than its arrival the order took it for, in microseconds.
    pub boost: Option<i64>,
    /// Released for its age rather than by its key.
    pub aged: bool,
    /// Released by another backend than the one it waited for.
    pub stolen: bool,
    /// Attempts on other backends before the answer began.
    pub retries: u32,
    /// Backends that went on with the answer after one had died.
    pub resumed: u32,
    /// Why no other one did, when the last one died.
    pub not_resumed: Option<&'static str>,
}

/// What became of an answer whose backend died while it streamed, in a pool whose answers go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Another backend went on with it.
    Resumed,
    /// Its rest cannot be asked for: it is more than one text, or it is too long to be kept.
    Unfit,
    /// It had no retries left, or its pool none.
    Budget,
    /// No other backend could be reached, or none that can go on with an answer.
    NoBackend,
    /// Another backend did not take it.
    Refused,
}

impl Resume {
    /// The word in metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Resume::Resumed => "resumed",
            Resume::Unfit => "unfit",
            Resume::Budget => "budget",
            Resume::NoBackend => "no_backend",
            Resume::Refused => "refused",
        }
    }
}

/// Counts a request and remembers it.
pub fn record(outcome: &Outcome, metrics: &Metrics, recent: &Recent) {
    recent.record(outcome);
    let complete = outcome.reason == "ok";
    metrics.record(&Record {
        pool: outcome.pool,
        fell_from: outcome.fell_from,
        tenant: outcome.tenant,
        model: outcome.pool.map(|_| outcome.model),
        outcome: outcome.reason,
        queued: outcome.queued,
        first_token: outcome.first_token,
        last_token: complete.then_some(outcome.total),
        prompt_tokens: outcome.prompt_tokens,
        output_tokens: outcome.output_tokens,
        retries: outcome.retries,
        resumed: outcome.resumed,
        not_resumed: outcome.not_resumed,
        scoring: outcome.scoring,
    });
}

/// As much of a client's text as is worth keeping, in bytes.
const LONGEST: usize = 256;

/// The beginning of a text that a client has made up.
fn short(text: &str) -> &str {
    &text[..text.floor_char_boundary(LONGEST)]
}

fn millis(span: Duration) -> f64 {
    span.as_micros() as f64 / 1e3
}

#[cfg(test)]
impl Outcome<'_> {
    /// A chat that was turned away at once.
    fn refused() -> Self {
        Outcome {
            request_id: "r",
            trace: None,
            method: "POST",
            path: "/v1/chat/completions",
            operation: Some("chat"),
            provider: "openai",
            tenant: None,
            streamed: false,
            model: "m",
            upstream_model: None,
            pool: Some("chat"),
            fell_from: None,
            backend: None,
            status: 429,
            reason: "queue_full",
            queued: None,
            released: None,
            first_token: None,
            total: Duration::ZERO,
            prompt_tokens: None,
            output_tokens: 0,
            max_output: None,
            score: None,
            scoring: None,
            predicted_tokens: None,
            work: None,
            boost: None,
            aged: false,
            stolen: false,
            retries: 0,
            resumed: 0,
            not_resumed: None,
        }
    }
}
