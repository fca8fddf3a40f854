//! Prompts and the lengths of their answers, written down for `headway train`: one JSON object a line, in a [`RowLog`].

use std::io;
use std::path::PathBuf;

use crate::config::TrainingLogSettings;
use crate::ranker::PromptText;
use crate::row_log::{self, Full, RowLog};
use crate::telemetry::metrics::RowCounts;

/// Rows that may wait to be written; at most some 10 KB each.
const QUEUE: usize = 1024;

/// The file, open for as long as this lives; dropping it waits until everything is written.
pub struct TrainingLog {
    settings: TrainingLogSettings,
    log: RowLog,
}

/// Why no training log can be kept.
#[derive(Debug, thiserror::Error)]
#[error("training_log.file: {} cannot be written: {source}; name a file in a directory that is there and writable", path.display())]
pub struct TrainingLogError {
    path: PathBuf,
    source: io::Error,
}

impl TrainingLog {
    /// Opens the file, to go on behind what it holds. A file that is made is its owner's alone, since it holds prompts. Blocks.
    ///
    /// # Errors
    /// The file cannot be opened for writing, or there is no thread to be had.
    pub fn start(settings: TrainingLogSettings, counts: RowCounts) -> Result<TrainingLog, TrainingLogError> {
        let TrainingLogSettings { file, max_size } = settings.clone();
        let rows = row_log::Settings { name: "training-log", file, max_size, full: Full::Moves { keep: 1 }, queue: QUEUE };
        let log = RowLog::start(rows, counts).map_err(|source| TrainingLogError { path: settings.file.clone(), source })?;
        Ok(TrainingLog { settings, log })
    }

    /// What it was started with.
    pub fn settings(&self) -> &TrainingLogSettings {
        &self.settings
    }

    /// Notes that an answer of `model` to this prompt ended by itself after `tokens` output tokens. `pool` is where it ran. Never waits.
    pub fn note(&self, pool: &str, model: &str, text: PromptText, tokens: u32) {
        let text = text.excerpt();
        let mut row = serde_json::Map::new();
        row.insert("prompt".into(), text.user.into());
        if !text.system.is_empty() {
            row.insert("system".into(), text.system.into());
        }
        row.insert("source".into(), pool.into());
        row.insert("lens".into(), serde_json::json!({ model: tokens }));
        self.log.push(format!("{}\n", serde_json::Value::Object(row)).into_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::telemetry::metrics::Metrics;
    use crate::training::dataset;

    fn text(user: &str) -> PromptText {
        PromptText { system: String::new(), user: user.into() }
    }

    fn settings(directory: &Path, max_size: u64) -> TrainingLogSettings {
        TrainingLogSettings { file: directory.join("rows.jsonl"), max_size }
    }

    fn counted(metrics: &Metrics, result: &str) -> u64 {
        let mut out = String::new();
        metrics.write(&mut out).unwrap();
        let line =
            out.lines().find_map(|line| line.strip_prefix(&format!("headway_training_rows_total{{result=\"{result}\"}} "))).unwrap().to_owned();
        line.parse().unwrap()
    }

    #[test]
    fn training_reads_what_was_noted_and_a_torn_row_costs_itself_alone() {
        let directory = tempfile::tempdir().unwrap();
        let settings = settings(directory.path(), 1 << 20);
        std::fs::write(&settings.file, "{\"prompt\": \"cut of").unwrap();
        let metrics = Metrics::default();
        let log = TrainingLog::start(settings.clone(), metrics.training_rows()).unwrap();
        let system = PromptText { system: "Be brief.".into(), user: "Say \"hi\"\nto \u{2028} me".into() };
        log.note("chat", "llama", system.clone(), 7);
        log.note("chat", "qwen", text("x"), 70_000);
        drop(log);
        assert_eq!((counted(&metrics, "written"), counted(&metrics, "lost")), (2, 0));

        let read = dataset::read(&settings.file).unwrap();
        assert_eq!(read.skipped.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [1]);
        let [first, second] = &*read.examples else { panic!("{:?}", read.examples) };
        assert_eq!((&first.text, first.source.as_str(), first.lengths["llama"]), (&system, "chat", 7));
        assert_eq!((&second.text, second.lengths["qwen"]), (&text("x"), 70_000));
    }

    #[test]
    fn a_file_that_was_taken_away_is_made_anew() {
        let directory = tempfile::tempdir().unwrap();
        let settings = settings(directory.path(), 1 << 20);
        let metrics = Metrics::default();
        let log = TrainingLog::start(settings.clone(), metrics.training_rows()).unwrap();
        let written = |rows: u64| {
            while counted(&metrics, "written") < rows {
                std::thread::yield_now();
            }
        };
        log.note("chat", "llama", text("first"), 1);
        written(1);
        std::fs::rename(&settings.file, directory.path().join("taken")).unwrap();
        log.note("chat", "llama", text("second"), 1);
        written(2);
        std::fs::remove_file(&settings.file).unwrap();
        log.note("chat", "llama", text("third"), 1);
        drop(log);
        let only = |name: &str| dataset::read(&directory.path().join(name)).unwrap().examples[0].text.user.clone();
        assert_eq!((only("taken").as_str(), only("rows.jsonl").as_str()), ("first", "third"));
        assert_eq!(counted(&metrics, "lost"), 0);
    }

    #[test]
    fn a_full_file_becomes_the_older_one() {
        let directory = tempfile::tempdir().unwrap();
        let settings = settings(directory.path(), 4096);
        let metrics = Metrics::default();
        for round in 0..100 {
            // Anew each time, so that every row is a burst of its own.
            let log = TrainingLog::start(settings.clone(), metrics.training_rows()).unwrap();
            log.note("chat", "llama", text(&format!("{round} {}", "x".repeat(200))), 1);
        }
        let rows = |name: &str| dataset::read(&directory.path().join(name)).unwrap().examples;
        let (older, newer) = (rows("rows.jsonl.1"), rows("rows.jsonl"));
        assert!(older.len() > 10 && std::fs::metadata(directory.path().join("rows.jsonl.1")).unwrap().len() <= 4096);
        let numbers: Vec<usize> = older.iter().chain(&newer).map(|row| row.text.user.split(' ').next().unwrap().parse().unwrap()).collect();
        assert_eq!(numbers, ((100 - numbers.len())..100).collect::<Vec<_>>(), "the last ones, in order and without a gap");
    }

    #[test]
    fn a_file_that_cannot_be_written_is_told_of_at_the_start_and_counted_later() {
        let directory = tempfile::tempdir().unwrap();
        let nowhere = TrainingLogSettings { file: directory.path().join("not/there/rows.jsonl"), max_size: 4096 };
        let error = TrainingLog::start(nowhere, Metrics::default().training_rows()).err().unwrap();
        assert!(error.to_string().contains("not/there/rows.jsonl") && error.to_string().contains("name a file"), "{error}");

        // Full, and its place for the older one is taken by a directory that is not empty.
        let settings = settings(directory.path(), 10);
        std::fs::create_dir_all(directory.path().join("rows.jsonl.1/full")).unwrap();
        let metrics = Metrics::default();
        let log = TrainingLog::start(settings, metrics.training_rows()).unwrap();
        log.note("chat", "llama", text("first"), 1);
        drop(log);
        assert_eq!((counted(&metrics, "written"), counted(&metrics, "lost")), (1, 0), "an empty file takes any row");
        let log = TrainingLog::start(self::settings(directory.path(), 10), metrics.training_rows()).unwrap();
        log.note("chat", "llama", text("second"), 1);
        drop(log);
        assert_eq!((counted(&metrics, "written"), counted(&metrics, "lost")), (1, 1));
    }
}
