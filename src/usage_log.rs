//! What every request used, for whoever bills it: one JSON object a line, in files that are never deleted here.
//!
//! The line of an answer is in the file before the client gets the last of it: whoever has seen an answer complete will find its line, also if the process is
//! killed in the next moment. A disk that stalls holds the ends of answers for [`PATIENCE`], no longer.

use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use serde::Serialize;

use crate::config::UsageLogSettings;
use crate::row_log::{self, Full, RowLog};
use crate::telemetry::metrics::UsageLines;

/// How long the end of an answer waits for its line.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// Lines that may wait to be written; some 400 bytes each.
const QUEUE: usize = 1 << 16;

/// One request.
#[derive(Clone, Debug, Serialize)]
pub struct Usage<'a> {
    /// When the line was made, as RFC 3339 has it.
    pub time: String,
    /// `x-request-id` of its answer.
    pub id: &'a str,
    /// Whose it is, where keys are asked for.
    pub tenant: Option<&'a str>,
    /// As the client named it.
    pub model: &'a str,
    /// As its backends know it.
    pub upstream_model: Option<&'a str>,
    /// Where it ran.
    pub pool: Option<&'a str>,
    /// What was asked for, at most 256 bytes of it.
    pub path: &'a str,
    /// `ok`, or how it ended otherwise, in the words of the access log.
    pub reason: &'a str,
    /// What is to be billed; `None` where it is not known.
    pub prompt_tokens: Option<u32>,
    /// The same, never more than the request could have.
    pub output_tokens: u32,
    /// Both are the backend's own counts; otherwise the output is an estimate, and the prompt may be unknown.
    pub counted: bool,
    /// Backends that went on with it after one had died.
    pub resumed: u32,
}

/// Ready when a line is in the file, or cannot be waited for.
pub type Written = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The file, open for as long as this lives; dropping it waits until everything is written.
pub struct UsageLog {
    settings: UsageLogSettings,
    log: RowLog,
    lines: UsageLines,
}

/// Why no usage log can be kept.
#[derive(Debug, thiserror::Error)]
#[error("usage_log.file: {} cannot be written: {source}; name a file in a directory that is there and writable", path.display())]
pub struct UsageLogError {
    path: PathBuf,
    source: io::Error,
}

impl UsageLog {
    /// Opens the file, to go on behind what it holds. Blocks.
    ///
    /// # Errors
    /// The file cannot be opened for writing, or there is no thread to be had.
    pub fn start(settings: UsageLogSettings, lines: UsageLines) -> Result<UsageLog, UsageLogError> {
        let UsageLogSettings { file, max_size } = settings.clone();
        let rows = row_log::Settings { name: "usage-log", file, max_size, full: Full::Stays, queue: QUEUE };
        let log = RowLog::start(rows, lines.rows.clone()).map_err(|source| UsageLogError { path: settings.file.clone(), source })?;
        Ok(UsageLog { settings, log, lines })
    }

    /// What it was started with.
    pub fn settings(&self) -> &UsageLogSettings {
        &self.settings
    }

    /// Writes down a request that nobody waits for. Never waits.
    pub fn note(&self, usage: &Usage) {
        self.log.push(line(usage));
    }

    /// Writes down an answer whose end waits for its line.
    pub fn write(&self, usage: &Usage) -> Written {
        let written = self.log.push_and_tell(line(usage));
        let late = self.lines.late.clone();
        Box::pin(async move {
            // A line that is lost is counted where it is lost.
            if tokio::time::timeout(PATIENCE, written).await.is_err() {
                late.inc();
            }
        })
    }
}

fn line(usage: &Usage) -> Vec<u8> {
    // Texts and numbers serialise without fail, and the writer is memory.
    let mut line = serde_json::to_vec(usage).unwrap_or_default();
    line.push(b'\n');
    line
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::telemetry::metrics::Metrics;

    fn usage() -> Usage<'static> {
        Usage {
            time: row_log::now(),
            id: "r-\"1\"",
            tenant: Some("search"),
            model: "gpt-4o",
            upstream_model: Some("llama"),
            pool: Some("chat"),
            path: "/v1/chat/completions",
            reason: "ok",
            prompt_tokens: Some(7),
            output_tokens: 3,
            counted: true,
            resumed: 1,
        }
    }

    #[tokio::test]
    async fn a_line_says_who_used_how_much_of_what() {
        let directory = tempfile::tempdir().unwrap();
        let settings = UsageLogSettings { file: directory.path().join("usage.jsonl"), max_size: 1 << 20 };
        let log = UsageLog::start(settings.clone(), Metrics::default().usage_lines()).unwrap();
        log.write(&usage()).await;
        let text = std::fs::read_to_string(&settings.file).unwrap();
        let mut written: Value = serde_json::from_str(&text).unwrap();
        let time = written.as_object_mut().unwrap().remove("time").unwrap();
        assert!(text.ends_with("}\n") && time.as_str().unwrap().ends_with('Z') && time.as_str().unwrap().contains('T'), "{text}");
        assert_eq!(
            written,
            json!({
                "id": "r-\"1\"", "tenant": "search", "model": "gpt-4o", "upstream_model": "llama", "pool": "chat", "path": "/v1/chat/completions",
                "reason": "ok", "prompt_tokens": 7, "output_tokens": 3, "counted": true, "resumed": 1,
            })
        );
    }

    #[test]
    fn a_file_that_cannot_be_had_is_told_of_at_the_start() {
        let directory = tempfile::tempdir().unwrap();
        let settings = UsageLogSettings { file: directory.path().join("not/there"), max_size: 1 << 20 };
        let error = UsageLog::start(settings, Metrics::default().usage_lines()).err().unwrap().to_string();
        assert!(error.contains("usage_log.file") && error.contains("not/there") && error.contains("name a file"), "{error}");
    }
}
