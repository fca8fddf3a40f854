//! The access log as a file: one JSON object for each request that has ended, the same as `--log json` writes to standard error.

use std::io;
use std::path::PathBuf;

use crate::config::AccessLogSettings;
use crate::row_log::{self, Full, RowLog};
use crate::telemetry::Line;
use crate::telemetry::metrics::RowCounts;

/// Lines that may wait to be written; some 600 bytes each.
const QUEUE: usize = 1 << 14;

/// The file, open for as long as this lives; dropping it waits until everything is written.
pub struct AccessLog {
    settings: AccessLogSettings,
    log: RowLog,
}

/// Why no access log can be kept.
#[derive(Debug, thiserror::Error)]
#[error("access_log.file: {} cannot be written: {source}; name a file in a directory that is there and writable", path.display())]
pub struct AccessLogError {
    path: PathBuf,
    source: io::Error,
}

impl AccessLog {
    /// Opens the file, to go on behind what it holds. Blocks.
    ///
    /// # Errors
    /// The file cannot be opened for writing, or there is no thread to be had.
    pub fn start(settings: AccessLogSettings, counts: RowCounts) -> Result<AccessLog, AccessLogError> {
        let AccessLogSettings { file, max_size, keep } = settings.clone();
        let rows = row_log::Settings { name: "access-log", file, max_size, full: Full::Moves { keep }, queue: QUEUE };
        let log = RowLog::start(rows, counts).map_err(|source| AccessLogError { path: settings.file.clone(), source })?;
        Ok(AccessLog { settings, log })
    }

    /// What it was started with.
    pub fn settings(&self) -> &AccessLogSettings {
        &self.settings
    }

    /// Writes down a request that has ended. Never waits.
    pub fn write(&self, line: &Line) {
        self.log.push(line.json());
    }
}
