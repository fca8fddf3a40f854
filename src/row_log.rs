//! A file of lines that grows behind the requests' backs: a bounded queue, a thread of its own, and a file that starts anew when it is full.
//!
//! A thread, because a disk may stall: what it cannot keep up with is counted and lost, and no request waits that did not ask to.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::oneshot;
use tracing_subscriber::fmt::format::Writer as TimeWriter;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use crate::telemetry::metrics::RowCounts;

/// Bytes of lines from which on no more are put together to one write.
const BURST: usize = 64 << 10;
/// A disk that takes nothing is told of this often.
const REMIND: Duration = Duration::from_secs(60);

/// Where a full file goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// To `FILE.1`, the one before to `FILE.2`, and so on: so many are kept, at least one.
    Moves { keep: u32 },
    /// To a name of its own, `FILE.TIME-PID`, and onto the disk itself: whoever reads it takes it away.
    Stays,
}

/// What is written, where and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Names the thread.
    pub name: &'static str,
    pub file: PathBuf,
    /// Bytes from which on the file starts anew.
    pub max_size: u64,
    pub full: Full,
    /// Lines that may wait to be written.
    pub queue: usize,
}

/// The file, open for as long as this lives; dropping it waits until everything is written.
pub struct RowLog {
    rows: Option<SyncSender<Row>>,
    thread: Option<JoinHandle<()>>,
    counts: RowCounts,
}

/// A line with its end, and who is told when it is in the file.
struct Row {
    line: Vec<u8>,
    written: Option<oneshot::Sender<()>>,
}

impl RowLog {
    /// Opens the file, to go on behind what it holds, and starts the thread. A file that is made is its owner's alone. Blocks.
    ///
    /// # Errors
    /// The file cannot be opened for writing, or there is no thread to be had.
    pub fn start(settings: Settings, counts: RowCounts) -> io::Result<RowLog> {
        let (rows, waiting) = sync_channel(settings.queue);
        let name = settings.name.to_owned();
        let writer = Writer::open(settings)?;
        let thread = std::thread::Builder::new().name(name).spawn({
            let counts = counts.clone();
            move || writer.run(&waiting, &counts)
        })?;
        Ok(RowLog { rows: Some(rows), thread: Some(thread), counts })
    }

    /// Hands over a line with its end. Never waits.
    pub fn push(&self, line: Vec<u8>) {
        self.send(Row { line, written: None });
    }

    /// Hands over a line with its end. What comes back is ready when the line is in the file: written to the operating system, so that the end of this process
    /// does not matter to it any more. An error: it is lost.
    pub fn push_and_tell(&self, line: Vec<u8>) -> oneshot::Receiver<()> {
        let (written, told) = oneshot::channel();
        self.send(Row { line, written: Some(written) });
        told
    }

    fn send(&self, row: Row) {
        // The sender is there until the drop. A queue that is full and a thread that is gone are the same to the line.
        if let Some(rows) = &self.rows
            && rows.try_send(row).is_err()
        {
            self.counts.lost.inc();
        }
    }
}

impl Drop for RowLog {
    fn drop(&mut self) {
        self.rows = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let join = move || drop(thread.join());
            match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
                // The disk may be slow, and others wait for this thread.
                Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(join),
                _ => join(),
            }
        }
    }
}

struct Writer {
    settings: Settings,
    file: File,
    /// Bytes in the file.
    size: u64,
    /// The file may end in the middle of a line.
    torn: bool,
    /// When a failure was last told of.
    told: Option<Instant>,
}

impl Writer {
    fn open(settings: Settings) -> io::Result<Writer> {
        let (file, size, torn) = open(&settings.file)?;
        Ok(Writer { settings, file, size, torn, told: None })
    }

    fn run(mut self, rows: &Receiver<Row>, counts: &RowCounts) {
        let mut waiting = Vec::new();
        while let Ok(Row { line: mut burst, written }) = rows.recv() {
            let mut count = 1;
            waiting.extend(written);
            while burst.len() < BURST
                && let Ok(row) = rows.try_recv()
            {
                burst.extend(row.line);
                waiting.extend(row.written);
                count += 1;
            }
            match self.write(&burst) {
                Ok(()) => {
                    counts.written.inc_by(count);
                    // Who has stopped waiting needs no word.
                    waiting.drain(..).for_each(|written| _ = written.send(()));
                }
                Err(error) => {
                    self.tell("lines are lost", &error);
                    counts.lost.inc_by(count);
                    waiting.clear();
                }
            };
        }
        if self.settings.full == Full::Stays
            && let Err(error) = self.file.sync_all()
        {
            self.tell("its last lines may not be on the disk", &error);
        }
    }

    /// Writes whole lines at once: during a hand-over two processes append to the same file.
    fn write(&mut self, lines: &[u8]) -> io::Result<()> {
        // Somebody may have taken the file away; what is written to it then nobody would find.
        match self.in_place() {
            Some(size) => self.size = size,
            None => (self.file, self.size, self.torn) = open(&self.settings.file)?,
        }
        if self.size > 0 && self.size + lines.len() as u64 > self.settings.max_size {
            match self.put_away() {
                Ok(()) => (self.file, self.size, self.torn) = open(&self.settings.file)?,
                // Lines that are to stay are worth more than a limit.
                Err(error) if self.settings.full == Full::Stays => self.tell("it grows beyond its size", &error),
                Err(error) => return Err(error),
            }
        }
        if self.torn && self.size > 0 {
            self.file.write_all(b"\n")?;
        }
        self.torn = true;
        self.file.write_all(lines)?;
        self.torn = false;
        self.size += lines.len() as u64;
        Ok(())
    }

    fn put_away(&self) -> io::Result<()> {
        let named = |end: String| {
            let mut name = self.settings.file.clone().into_os_string();
            name.push(end);
            name
        };
        let to = match self.settings.full {
            Full::Moves { keep } => {
                for older in (1..keep).rev() {
                    match fs::rename(named(format!(".{older}")), named(format!(".{}", older + 1))) {
                        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                        _ => {}
                    }
                }
                named(".1".into())
            }
            Full::Stays => {
                self.file.sync_all()?;
                // The process too: during a hand-over two of them put files away.
                let to = named(format!(".{}-{}", now().replace(['-', ':'], ""), std::process::id()));
                if fs::exists(&to)? {
                    return Err(io::Error::other(format!("{} is there already", Path::new(&to).display())));
                }
                to
            }
        };
        fs::rename(&self.settings.file, to)
    }

    /// How long the file is by now, whoever else writes to it or empties it; `None` once another one has its place, or none.
    fn in_place(&self) -> Option<u64> {
        let (open, there) = (self.file.metadata().ok()?, fs::metadata(&self.settings.file).ok()?);
        ((open.dev(), open.ino()) == (there.dev(), there.ino())).then_some(there.len())
    }

    fn tell(&mut self, what: &str, error: &io::Error) {
        if self.told.is_none_or(|told| told.elapsed() >= REMIND) {
            self.told = Some(Instant::now());
            tracing::warn!("{} cannot be written, {what}: {error}", self.settings.file.display());
        }
    }
}

/// The time in UTC, as RFC 3339 has it.
pub fn now() -> String {
    let mut text = String::with_capacity(27);
    // Memory takes any text.
    _ = SystemTime.format_time(&mut TimeWriter::new(&mut text));
    text
}

/// The file, how long it is, and whether its last line has no end.
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

    fn settings(directory: &Path, max_size: u64, full: Full) -> Settings {
        Settings { name: "rows", file: directory.join("rows.jsonl"), max_size, full, queue: 1024 }
    }

    #[test]
    fn what_is_told_is_in_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let settings = settings(directory.path(), 1 << 20, Full::Stays);
        let log = RowLog::start(settings.clone(), Metrics::default().training_rows()).unwrap();
        for number in 0..10 {
            log.push_and_tell(format!("{number}\n").into_bytes()).blocking_recv().unwrap();
            assert!(fs::read_to_string(&settings.file).unwrap().ends_with(&format!("{number}\n")));
        }
    }

    #[test]
    fn files_that_stay_are_all_there() {
        let directory = tempfile::tempdir().unwrap();
        let settings = settings(directory.path(), 64, Full::Stays);
        let log = RowLog::start(settings, Metrics::default().training_rows()).unwrap();
        for number in 0..100 {
            log.push_and_tell(format!("{number:09}\n").into_bytes()).blocking_recv().unwrap();
        }
        drop(log);
        let mut files: Vec<PathBuf> = fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        // The one that is written has the shortest name, and comes first.
        files.rotate_left(1);
        assert_eq!(files.len(), 17, "six lines fit: {files:?}");
        let numbers: Vec<usize> =
            files.iter().flat_map(|file| fs::read_to_string(file).unwrap().lines().map(|line| line.parse().unwrap()).collect::<Vec<_>>()).collect();
        assert_eq!(numbers, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn as_many_full_files_are_kept_as_are_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        let log = RowLog::start(settings(directory.path(), 64, Full::Moves { keep: 3 }), Metrics::default().training_rows()).unwrap();
        for number in 0..30 {
            log.push_and_tell(format!("{number:09}\n").into_bytes()).blocking_recv().unwrap();
        }
        drop(log);
        let first = |end: &str| fs::read_to_string(directory.path().join(format!("rows.jsonl{end}"))).unwrap()[..9].parse::<u32>().unwrap();
        // Six lines fit.
        assert_eq!(["", ".1", ".2", ".3"].map(first), [24, 18, 12, 6]);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 4, "the oldest is gone");
    }

    #[test]
    fn a_file_that_was_copied_and_emptied_goes_on_from_its_beginning() {
        let directory = tempfile::tempdir().unwrap();
        let settings = settings(directory.path(), 64, Full::Moves { keep: 1 });
        let log = RowLog::start(settings.clone(), Metrics::default().training_rows()).unwrap();
        for round in 0..3 {
            for number in 0..6 {
                log.push_and_tell(format!("{round}{number:08}\n").into_bytes()).blocking_recv().unwrap();
            }
            assert_eq!(fs::metadata(&settings.file).unwrap().len(), 60);
            OpenOptions::new().write(true).open(&settings.file).unwrap().set_len(0).unwrap();
        }
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "it was never full");
    }

    #[test]
    fn who_waits_for_a_line_that_is_lost_waits_no_longer() {
        let directory = tempfile::tempdir().unwrap();
        let settings = settings(directory.path(), 1 << 20, Full::Moves { keep: 1 });
        let log = RowLog::start(settings, Metrics::default().training_rows()).unwrap();
        // Its place is taken by a directory, and it is not there any more.
        fs::remove_file(directory.path().join("rows.jsonl")).unwrap();
        fs::create_dir(directory.path().join("rows.jsonl")).unwrap();
        assert!(log.push_and_tell(b"x\n".to_vec()).blocking_recv().is_err());
    }
}
