//! Prompts and the lengths of their answers, written down for `headway train`: one JSON object a line, in a file that starts anew when it is full.
//!
//! A bounded queue and a thread of its own, because a disk may stall: what the thread cannot keep up with is counted and lost, and no request waits.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config::TrainingLogSettings;
use crate::ranker::PromptText;
use crate::telemetry::metrics::TrainingRows;

/// Rows that may wait to be written; at most some 10 KB each.
const QUEUE: usize = 1024;
/// Bytes of rows from which on no more are put together to one write.
const BURST: usize = 64 << 10;
/// A disk that takes nothing is told of this often.
const REMIND: Duration = Duration::from_secs(60);

/// The file, open for as long as this lives; Dropping it waits until everything is written.
pub struct TrainingLog {
    settings: TrainingLogSettings,
    rows: Option<SyncSender<Vec<u8>>>,
    writer: Option<JoinHandle<()>>,
    counts: TrainingRows,
}

/// Why no training log can be kept.
#[derive(Debug, thiserror::Error)]
#[error("training_log.file: {} cannot be written: {source}; name a file in a directory that is there and writable", path.display())]
pub struct TrainingLogError {
    path: PathBuf,
    source: io::Error,
}

impl TrainingLog {
    /// Opens the file, to go on behind what it holds, and starts the thread. A file that is made is its owner's alone, since it holds prompts. Blocks.
    ///
    /// # Errors
    /// The file cannot be opened for writing, or there is no thread to be had.
    pub fn start(settings: TrainingLogSettings, counts: TrainingRows) -> Result<TrainingLog, TrainingLogError> {
        let failed = |source| TrainingLogError { path: settings.file.clone(), source };
        let writer = Writer::open(&settings).map_err(failed)?;
        let (rows, waiting) = sync_channel(QUEUE);
        let thread = std::thread::Builder::new().name("training-log".into()).spawn({
            let counts = counts.clone();
            move || writer.run(&waiting, &counts)
        });
        let writer = Some(thread.map_err(failed)?);
        Ok(TrainingLog { settings, rows: Some(rows), writer, counts })
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
        let line = format!("{}\n", serde_json::Value::Object(row)).into_bytes();
        // The sender is there until the drop.
        let Some(rows) = &self.rows else { return };
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = rows.try_send(line) {
            self.counts.lost.inc();
        }
    }
}

impl Drop for TrainingLog {
    fn drop(&mut self) {
        self.rows = None;
        if let Some(writer) = self.writer.take() {
            // A thread that panicked has said so.
            _ = writer.join();
        }
    }
}

struct Writer {
    path: PathBuf,
    max_size: u64,
    file: File,
    /// Bytes in the file.
    size: u64,
    /// The file may end in the middle of a row.
    torn: bool,
    /// When a failure was last told of.
    told: Option<Instant>,
}

impl Writer {
    fn open(settings: &TrainingLogSettings) -> io::Result<Writer> {
        let (file, size, torn) = open(&settings.file)?;
        Ok(Writer { path: settings.file.clone(), max_size: settings.max_size, file, size, torn, told: None })
    }

    fn run(mut self, rows: &Receiver<Vec<u8>>, counts: &TrainingRows) {
        while let Ok(mut burst) = rows.recv() {
            let mut count = 1;
            while burst.len() < BURST
                && let Ok(row) = rows.try_recv()
            {
                burst.extend(row);
                count += 1;
            }
            match self.write(&burst) {
                Ok(()) => counts.written.inc_by(count),
                Err(error) => {
                    self.tell(&error);
                    counts.lost.inc_by(count)
                }
            };
        }
    }

    /// Writes whole rows at once: during a hand-over two processes append to the same file.
    fn write(&mut self, rows: &[u8]) -> io::Result<()> {
        // Somebody may have taken the file away; what is written to it then nobody would find.
        if !self.is_in_place() {
            (self.file, self.size, self.torn) = open(&self.path)?;
        }
        if self.size > 0 && self.size + rows.len() as u64 > self.max_size {
            let mut older = self.path.clone().into_os_string();
            older.push(".1");
            fs::rename(&self.path, older)?;
            (self.file, self.size, self.torn) = open(&self.path)?;
        }
        if self.torn {
            self.file.write_all(b"\n")?;
        }
        self.torn = true;
        self.file.write_all(rows)?;
        self.torn = false;
        self.size += rows.len() as u64;
        Ok(())
    }

    fn is_in_place(&self) -> bool {
        let same = |open: fs::Metadata, there: fs::Metadata| (open.dev(), open.ino()) == (there.dev(), there.ino());
        self.file.metadata().and_then(|open| Ok(same(open, fs::metadata(&self.path)?))).unwrap_or(false)
    }

    fn tell(&mut self, error: &io::Error) {
        if self.told.is_none_or(|told| told.elapsed() >= REMIND) {
            self.told = Some(Instant::now());
            tracing::warn!("{} cannot be written, training rows are lost: {error}", self.path.display());
        }
    }
}

/// The file, how long it is, and whether its last row has no end.
fn open(path: &Path) -> io::Result<(File, u64, bool)> {
    let mut file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let size = metadata.len();
    let mut last = [b'\n'];
    if size > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    Ok((file, size, last != [b'\n']))
}

#[cfg(test)]
mod tests {
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
