//! Turns outcomes and stage timings into metrics and the access log. Nobody below knows it.

pub mod metrics;

use std::time::Duration;

use metrics::{Metrics, Record};

/// How one request went: one value per request, whatever became of it.
#[derive(Clone, Debug)]
pub struct Outcome<'a> {
    /// Kept from the client or made here; goes upstream and back.
    pub request_id: &'a str,
    pub method: &'a str,
    pub path: &'a str,
    /// The model as the client named it; empty if it came to no model.
    pub model: &'a str,
    /// `None`: no pool was found for it.
    pub pool: Option<&'a str>,
    /// `host:port` of the backend that answered or failed last.
    pub backend: Option<&'a str>,
    /// What the client was told; 499 for one that left, as nginx writes it.
    pub status: u16,
    /// `ok`, or why not, in one word of a closed set.
    pub reason: &'static str,
    /// Wait in the queue, over all attempts; `None` if it never asked for a slot.
    pub queued: Option<Duration>,
    /// From arrival to the first token of a streamed answer.
    pub first_token: Option<Duration>,
    /// From arrival to the end.
    pub total: Duration,
    /// Prompt tokens by the backend's count.
    pub prompt_tokens: Option<u32>,
    /// Output tokens, the backend's count where it told one.
    pub output_tokens: u32,
    pub score: Option<f32>,
    /// Where the score came from, one of a closed set of names; `None` for requests that are not scored.
    pub scoring: Option<&'static str>,
    /// Released for its age rather than by its key.
    pub aged: bool,
    /// Released by another backend than the one it waited for.
    pub stolen: bool,
    /// Attempts on other backends.
    pub retries: u32,
}

/// Counts a request and writes its line of the access log (target `access`).
pub fn record(outcome: &Outcome, metrics: &Metrics) {
    let complete = outcome.reason == "ok";
    metrics.record(&Record {
        pool: outcome.pool,
        model: outcome.pool.map(|_| outcome.model),
        outcome: outcome.reason,
        queued: outcome.queued,
        first_token: outcome.first_token,
        last_token: complete.then_some(outcome.total),
        prompt_tokens: outcome.prompt_tokens,
        output_tokens: outcome.output_tokens,
        retries: outcome.retries,
        scoring: outcome.scoring,
    });
    let millis = |span: Duration| span.as_micros() as f64 / 1e3;
    tracing::info!(
        target: "access",
        id = outcome.request_id,
        method = outcome.method,
        path = outcome.path,
        model = outcome.model,
        pool = outcome.pool,
        backend = outcome.backend,
        status = outcome.status,
        reason = outcome.reason,
        queue_ms = outcome.queued.map(millis),
        ttft_ms = outcome.first_token.map(millis),
        total_ms = millis(outcome.total),
        prompt_tokens = outcome.prompt_tokens,
        output_tokens = outcome.output_tokens,
        score = outcome.score,
        scoring = outcome.scoring,
        aged = outcome.aged,
        stolen = outcome.stolen,
        retries = outcome.retries,
    );
}
