//! One line of the access log. It has no prompt, no answer, no key and no query, and of what clients make up no more than the beginning.

use serde::Serialize;

use super::{Outcome, millis, short};
use crate::row_log;

/// What the access log says of one request. What is unknown is left out.
#[derive(Clone, Debug, Serialize)]
pub struct Line<'a> {
    id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<String>,
    method: &'a str,
    path: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tenant: Option<&'a str>,
    model: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fell_from: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    backend: Option<&'a str>,
    status: u16,
    reason: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ttft_ms: Option<f64>,
    total_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<u32>,
    output_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    predicted_tokens: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    boost_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    score: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    scoring: Option<&'static str>,
    aged: bool,
    stolen: bool,
    retries: u32,
    resumed: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_resumed: Option<&'static str>,
}

/// A line in a file, as `--log json` has it on standard error.
#[derive(Serialize)]
struct Written<'a> {
    timestamp: String,
    level: &'a str,
    #[serde(flatten)]
    line: &'a Line<'a>,
    target: &'a str,
}

impl<'a> Line<'a> {
    /// Of a request that has ended.
    pub fn of(outcome: &'a Outcome) -> Line<'a> {
        Line {
            id: outcome.request_id,
            trace: outcome.trace.map(|trace| trace.to_string()),
            method: short(outcome.method),
            path: short(outcome.path),
            tenant: outcome.tenant,
            model: short(outcome.model),
            pool: outcome.pool,
            fell_from: outcome.fell_from,
            backend: outcome.backend,
            status: outcome.status,
            reason: outcome.reason,
            queue_ms: outcome.queued.map(millis),
            ttft_ms: outcome.first_token.map(millis),
            total_ms: millis(outcome.total),
            prompt_tokens: outcome.prompt_tokens,
            output_tokens: outcome.output_tokens,
            predicted_tokens: outcome.predicted_tokens,
            boost_ms: outcome.boost.map(|micros| micros as f64 / 1e3),
            score: outcome.score.map(f64::from),
            scoring: outcome.scoring,
            aged: outcome.aged,
            stolen: outcome.stolen,
            retries: outcome.retries,
            resumed: outcome.resumed,
            not_resumed: outcome.not_resumed,
        }
    }

    /// Writes it among the lines of the log (target `access`).
    pub fn log(&self) {
        tracing::info!(
            target: "access",
            id = self.id,
            trace = self.trace,
            method = self.method,
            path = self.path,
            tenant = self.tenant,
            model = self.model,
            pool = self.pool,
            fell_from = self.fell_from,
            backend = self.backend,
            status = self.status,
            reason = self.reason,
            queue_ms = self.queue_ms,
            ttft_ms = self.ttft_ms,
            total_ms = self.total_ms,
            prompt_tokens = self.prompt_tokens,
            output_tokens = self.output_tokens,
            predicted_tokens = self.predicted_tokens,
            boost_ms = self.boost_ms,
            score = self.score,
            scoring = self.scoring,
            aged = self.aged,
            stolen = self.stolen,
            retries = self.retries,
            resumed = self.resumed,
            not_resumed = self.not_resumed,
        );
    }

    /// As JSON, with the end of a line.
    pub fn json(&self) -> Vec<u8> {
        let written = Written { timestamp: row_log::now(), level: "INFO", line: self, target: "access" };
        // Texts and numbers serialise without fail, and the writer is memory.
        let mut line = serde_json::to_vec(&written).unwrap_or_default();
        line.push(b'\n');
        line
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use opentelemetry::trace::TraceId;
    use serde_json::{Map, Value};

    use super::*;

    #[derive(Clone, Default)]
    struct Memory(Arc<Mutex<Vec<u8>>>);

    impl Write for Memory {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn both(outcome: &Outcome) -> [Map<String, Value>; 2] {
        let memory = Memory::default();
        let line = Line::of(outcome);
        let writer = memory.clone();
        let subscriber = tracing_subscriber::fmt().json().flatten_event(true).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, || line.log());
        let logged = memory.0.lock().unwrap().clone();
        [line.json(), logged].map(|line| {
            assert!(line.ends_with(b"\n") && line.iter().filter(|byte| **byte == b'\n').count() == 1);
            let mut object: Map<String, Value> = serde_json::from_slice(&line).unwrap();
            assert!(object.remove("timestamp").unwrap().as_str().unwrap().ends_with('Z'));
            object
        })
    }

    #[test]
    fn a_file_has_what_the_log_has() {
        let refused = Outcome::refused();
        let [file, log] = both(&refused);
        assert_eq!(file, log);
        assert!(!file.contains_key("queue_ms") && file["reason"] == "queue_full");
        let all = Outcome {
            trace: Some(TraceId::from_bytes([7; 16])),
            tenant: Some("search"),
            fell_from: Some("big"),
            backend: Some("10.0.0.1:8000"),
            queued: Some(Duration::from_micros(1500)),
            first_token: Some(Duration::from_millis(20)),
            total: Duration::from_millis(300),
            prompt_tokens: Some(3),
            output_tokens: 4,
            predicted_tokens: Some(5),
            boost: Some(-2500),
            score: Some(0.1),
            scoring: Some("scored"),
            aged: true,
            stolen: true,
            retries: 1,
            resumed: 2,
            not_resumed: Some("budget"),
            ..refused
        };
        let [file, log] = both(&all);
        assert_eq!(file, log);
        assert_eq!((file.len(), &file["queue_ms"], &file["boost_ms"]), (27, &Value::from(1.5), &Value::from(-2.5)));
    }

    #[test]
    fn what_clients_make_up_makes_no_line_long() {
        let long = "\u{e9}\n\"".repeat(1 << 16);
        let outcome = Outcome { path: &long, model: &long, method: &long, ..Outcome::refused() };
        let [file, log] = both(&outcome);
        assert_eq!(file, log);
        assert!(["path", "model", "method"].iter().all(|name| file[*name].as_str().unwrap().len() <= 256));
    }
}
