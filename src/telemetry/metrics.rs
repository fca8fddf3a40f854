//! Counters and histograms of requests. Labels are bounded: what is not configured becomes `other`.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode_registry;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use super::Resume;

/// Models that get series of their own; later ones share `other`.
const MAX_MODELS: usize = 200;
/// Stands for a pool or model that is unknown, or one too many.
const OTHER: &str = "other";

/// How one request went, as far as metrics care.
#[derive(Clone, Debug)]
pub struct Record<'a> {
    /// `None`: no pool was found for it.
    pub pool: Option<&'a str>,
    /// The pool that the model belongs to, where another one took over.
    pub fell_from: Option<&'a str>,
    /// Configured names only; `None` where no keys are asked for, or none was known.
    pub tenant: Option<&'a str>,
    /// The model as clients call it; `None` where nobody serves it, so that clients cannot make up labels.
    pub model: Option<&'a str>,
    /// One of a closed set of names.
    pub outcome: &'static str,
    /// Wait in the queue, if it came that far.
    pub queued: Option<Duration>,
    /// From arrival to the first token, if there was one.
    pub first_token: Option<Duration>,
    /// From arrival to the last token, of a complete answer.
    pub last_token: Option<Duration>,
    /// Prompt tokens by the backend's count.
    pub prompt_tokens: Option<u32>,
    /// Output tokens that reached the client.
    pub output_tokens: u32,
    /// Attempts on other backends before the first byte.
    pub retries: u32,
    /// Backends that went on with an answer after one had died.
    pub resumed: u32,
    /// Why no other one did, one of a closed set of names.
    pub not_resumed: Option<&'static str>,
    /// Where its score came from, one of a closed set of names; `None` for requests that are not scored.
    pub scoring: Option<&'static str>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    pool: String,
    model: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    pool: String,
    model: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolLabels {
    pool: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResumeLabels {
    pool: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FallbackLabels {
    pool: String,
    to: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TenantLabels {
    tenant: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TenantOutcomeLabels {
    tenant: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ScoringLabels {
    pool: String,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    result: &'static str,
}

/// What became of recorded traces.
#[derive(Clone, Debug)]
pub struct Traces {
    /// The collector has them.
    pub sent: Counter,
    /// The collector did not take them.
    pub failed: Counter,
    /// Too many were waiting.
    pub dropped: Counter,
}

/// What became of the lines of a file.
#[derive(Clone, Debug)]
pub struct RowCounts {
    /// They are in the file.
    pub written: Counter,
    /// The disk did not take them, or not in time.
    pub lost: Counter,
}

/// What became of the lines of the usage log.
#[derive(Clone, Debug)]
pub struct UsageLines {
    pub rows: RowCounts,
    /// Their answers did not wait for them any longer; they may be written later.
    pub late: Counter,
}

/// The counters of one gateway.
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    queue: Family<PoolLabels, Histogram>,
    first_token: Family<ModelLabels, Histogram>,
    last_token: Family<ModelLabels, Histogram>,
    prompt_tokens: Family<ModelLabels, Counter>,
    output_tokens: Family<ModelLabels, Counter>,
    retries: Family<PoolLabels, Counter>,
    resumes: Family<ResumeLabels, Counter>,
    fallbacks: Family<FallbackLabels, Counter>,
    tenant_requests: Family<TenantOutcomeLabels, Counter>,
    tenant_prompt_tokens: Family<TenantLabels, Counter>,
    tenant_output_tokens: Family<TenantLabels, Counter>,
    scores: Family<ScoringLabels, Counter>,
    traces: Family<ResultLabels, Counter>,
    training_rows: Family<ResultLabels, Counter>,
    usage_lines: Family<ResultLabels, Counter>,
    access_lines: Family<ResultLabels, Counter>,
    /// Models with series of their own.
    models: Mutex<BTreeSet<String>>,
}

impl Default for Metrics {
    fn default() -> Self {
        type Constructor = fn() -> Histogram;
        // 1 ms to 13 minutes: an empty queue to the default timeout.
        let queue: Constructor = || Histogram::new(exponential_buckets(0.001, 2.6, 15));
        // 10 ms to 11 minutes.
        let first_token: Constructor = || Histogram::new(exponential_buckets(0.01, 2.2, 15));
        // 50 ms to 1.7 hours.
        let last_token: Constructor = || Histogram::new(exponential_buckets(0.05, 2.2, 16));
        let metrics = Metrics {
            registry: Registry::with_prefix("headway"),
            requests: Family::default(),
            queue: Family::new_with_constructor(queue),
            first_token: Family::new_with_constructor(first_token),
            last_token: Family::new_with_constructor(last_token),
            prompt_tokens: Family::default(),
            output_tokens: Family::default(),
            retries: Family::default(),
            resumes: Family::default(),
            fallbacks: Family::default(),
            tenant_requests: Family::default(),
            tenant_prompt_tokens: Family::default(),
            tenant_output_tokens: Family::default(),
            scores: Family::default(),
            traces: Family::default(),
            training_rows: Family::default(),
            usage_lines: Family::default(),
            access_lines: Family::default(),
            models: Mutex::default(),
        };
        metrics.registered()
    }
}

impl Metrics {
    fn registered(mut self) -> Self {
        let registry = &mut self.registry;
        registry.register("requests", "Requests that ended, by how", self.requests.clone());
        registry.register_with_unit("queue", "Wait in the gateway's queue", Unit::Seconds, self.queue.clone());
        registry.register_with_unit("ttft", "From arrival to the first token", Unit::Seconds, self.first_token.clone());
        registry.register_with_unit("ttlt", "From arrival to the last token of complete answers", Unit::Seconds, self.last_token.clone());
        registry.register("prompt_tokens", "Prompt tokens, as backends count them", self.prompt_tokens.clone());
        registry.register("output_tokens", "Output tokens sent to clients", self.output_tokens.clone());
        registry.register("retries", "Attempts on another backend before the first byte", self.retries.clone());
        registry.register("resumes", "Answers whose backend died while they streamed, by what became of them", self.resumes.clone());
        registry.register("fallbacks", "Requests that another pool took over, since no backend of theirs could serve them", self.fallbacks.clone());
        registry.register("tenant_requests", "Requests of a tenant that ended, by how", self.tenant_requests.clone());
        registry.register("tenant_prompt_tokens", "Prompt tokens of a tenant, as backends count them", self.tenant_prompt_tokens.clone());
        registry.register("tenant_output_tokens", "Output tokens sent to a tenant", self.tenant_output_tokens.clone());
        registry.register("scores", "Where the scores of requests came from", self.scores.clone());
        registry.register("traces", "Recorded traces, by what became of them", self.traces.clone());
        registry.register("training_rows", "Answers noted for training, by what became of them", self.training_rows.clone());
        registry.register("usage_lines", "Lines of the usage log, by what became of them", self.usage_lines.clone());
        registry.register("access_lines", "Lines of the access log's file, by what became of them", self.access_lines.clone());
        self
    }

    /// Counts a request that has ended.
    pub fn record(&self, record: &Record) {
        let pool = record.pool.unwrap_or(OTHER).to_owned();
        let model = self.label(record.model);
        let of_pool = PoolLabels { pool: pool.clone() };
        let of_model = ModelLabels { pool: pool.clone(), model: model.clone() };
        if let Some(queued) = record.queued {
            self.queue.get_or_create(&of_pool).observe(queued.as_secs_f64());
        }
        if let Some(first_token) = record.first_token {
            self.first_token.get_or_create(&of_model).observe(first_token.as_secs_f64());
        }
        if let Some(last_token) = record.last_token {
            self.last_token.get_or_create(&of_model).observe(last_token.as_secs_f64());
        }
        if let Some(tokens) = record.prompt_tokens {
            self.prompt_tokens.get_or_create(&of_model).inc_by(tokens.into());
        }
        if record.output_tokens > 0 {
            self.output_tokens.get_or_create(&of_model).inc_by(record.output_tokens.into());
        }
        if let Some(from) = record.fell_from {
            self.fallbacks.get_or_create(&FallbackLabels { pool: from.to_owned(), to: pool.clone() }).inc();
        }
        if let Some(tenant) = record.tenant {
            self.tenant_requests.get_or_create(&TenantOutcomeLabels { tenant: tenant.to_owned(), outcome: record.outcome }).inc();
            let of_tenant = TenantLabels { tenant: tenant.to_owned() };
            self.tenant_prompt_tokens.get_or_create(&of_tenant).inc_by(record.prompt_tokens.unwrap_or_default().into());
            self.tenant_output_tokens.get_or_create(&of_tenant).inc_by(record.output_tokens.into());
        }
        if record.retries > 0 {
            self.retries.get_or_create(&of_pool).inc_by(record.retries.into());
        }
        let resumed = (record.resumed > 0).then_some((Resume::Resumed.as_str(), record.resumed));
        for (outcome, count) in resumed.into_iter().chain(record.not_resumed.map(|why| (why, 1))) {
            self.resumes.get_or_create(&ResumeLabels { pool: pool.clone(), outcome }).inc_by(count.into());
        }
        if let Some(result) = record.scoring {
            self.scores.get_or_create(&ScoringLabels { pool: pool.clone(), result }).inc();
        }
        self.requests.get_or_create(&RequestLabels { pool, model, outcome: record.outcome }).inc();
    }

    /// Counters of recorded traces, which have series from then on.
    pub fn traces(&self) -> Traces {
        let of = |result| self.traces.get_or_create(&ResultLabels { result }).clone();
        Traces { sent: of("sent"), failed: of("failed"), dropped: of("dropped") }
    }

    /// Counters of rows for training, which have series from then on.
    pub fn training_rows(&self) -> RowCounts {
        let of = |result| self.training_rows.get_or_create(&ResultLabels { result }).clone();
        RowCounts { written: of("written"), lost: of("lost") }
    }

    /// Counters of the access log's lines, which have series from then on.
    pub fn access_lines(&self) -> RowCounts {
        let of = |result| self.access_lines.get_or_create(&ResultLabels { result }).clone();
        RowCounts { written: of("written"), lost: of("lost") }
    }

    /// Counters of the usage log's lines, which have series from then on.
    pub fn usage_lines(&self) -> UsageLines {
        let of = |result| self.usage_lines.get_or_create(&ResultLabels { result }).clone();
        UsageLines { rows: RowCounts { written: of("written"), lost: of("lost") }, late: of("late") }
    }

    /// Writes the metrics in the OpenMetrics text format, without the closing `# EOF`.
    ///
    /// # Errors
    /// Only those of `out`.
    pub fn write(&self, out: &mut impl fmt::Write) -> fmt::Result {
        encode_registry(out, &self.registry)
    }

    fn label(&self, model: Option<&str>) -> String {
        let Some(model) = model else { return OTHER.into() };
        // A set under a lock is sound whatever its holder did.
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        if models.contains(model) {
            return model.to_owned();
        }
        if models.len() >= MAX_MODELS {
            return OTHER.into();
        }
        models.insert(model.to_owned());
        model.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(model: Option<&str>) -> Record<'_> {
        Record {
            pool: Some("chat"),
            fell_from: Some("large"),
            tenant: Some("search"),
            model,
            outcome: "completed",
            queued: Some(Duration::from_millis(40)),
            first_token: Some(Duration::from_millis(300)),
            last_token: Some(Duration::from_secs(2)),
            prompt_tokens: Some(100),
            output_tokens: 50,
            retries: 1,
            resumed: 2,
            not_resumed: Some("budget"),
            scoring: Some("scored"),
        }
    }

    fn written(metrics: &Metrics) -> String {
        let mut out = String::new();
        metrics.write(&mut out).unwrap();
        out
    }

    #[test]
    fn a_request_shows_in_every_series() {
        let metrics = Metrics::default();
        metrics.record(&record(Some("llama")));
        metrics.record(&record(Some("llama")));
        let out = written(&metrics);
        for line in [
            "headway_requests_total{pool=\"chat\",model=\"llama\",outcome=\"completed\"} 2",
            "headway_queue_seconds_count{pool=\"chat\"} 2",
            "headway_ttft_seconds_count{pool=\"chat\",model=\"llama\"} 2",
            "headway_ttlt_seconds_sum{pool=\"chat\",model=\"llama\"} 4.0",
            "headway_prompt_tokens_total{pool=\"chat\",model=\"llama\"} 200",
            "headway_output_tokens_total{pool=\"chat\",model=\"llama\"} 100",
            "headway_retries_total{pool=\"chat\"} 2",
            "headway_resumes_total{pool=\"chat\",outcome=\"resumed\"} 4",
            "headway_resumes_total{pool=\"chat\",outcome=\"budget\"} 2",
            "headway_fallbacks_total{pool=\"large\",to=\"chat\"} 2",
            "headway_tenant_requests_total{tenant=\"search\",outcome=\"completed\"} 2",
            "headway_tenant_prompt_tokens_total{tenant=\"search\"} 200",
            "headway_tenant_output_tokens_total{tenant=\"search\"} 100",
            "headway_scores_total{pool=\"chat\",result=\"scored\"} 2",
        ] {
            assert!(out.lines().any(|have| have == line), "{line} is not in\n{out}");
        }
    }

    #[test]
    fn labels_are_bounded() {
        let metrics = Metrics::default();
        for index in 0..1000 {
            metrics.record(&record(Some(&format!("model-{index}"))));
        }
        metrics.record(&Record { pool: None, model: None, ..record(None) });
        let out = written(&metrics);
        let series = out.lines().filter(|line| line.starts_with("headway_requests_total{")).count();
        assert_eq!(series, MAX_MODELS + 2);
        assert!(out.contains("headway_requests_total{pool=\"chat\",model=\"other\",outcome=\"completed\"} 800"));
        assert!(out.contains("headway_requests_total{pool=\"other\",model=\"other\",outcome=\"completed\"} 1"));
    }

    #[test]
    fn a_request_that_never_ran_is_only_counted() {
        let metrics = Metrics::default();
        let rejected = Record {
            queued: None,
            first_token: None,
            last_token: None,
            prompt_tokens: None,
            output_tokens: 0,
            retries: 0,
            resumed: 0,
            not_resumed: None,
            scoring: None,
            ..record(Some("m"))
        };
        metrics.record(&rejected);
        let out = written(&metrics);
        assert!(out.contains("headway_requests_total{") && !out.contains("_count{"), "{out}");
    }
}
