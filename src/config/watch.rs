//! Reloads: a changed file, SIGHUP, or a request of an operator. One task, one path through it: load, check, hand over; the last good one stays otherwise.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use notify::event::{AccessKind, AccessMode, ModifyKind};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::error::ConfigError;
use super::load;
use super::snapshot::Snapshot;

/// Editors and Kubernetes write in several steps; this long without another step is the end.
const QUIET: Duration = Duration::from_millis(200);
/// However restless the folder, a change is looked at after this long.
const AT_LATEST: Duration = Duration::from_secs(2);
/// The files are also compared this often: not every file system reports changes.
const COMPARE: Duration = Duration::from_secs(10);

/// Why nothing changed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ReloadError {
    #[error("there is no configuration file: the gateway was started without one")]
    NoFile,
    #[error("{0}")]
    Invalid(#[from] ConfigError),
    /// The configuration is valid, and cannot be taken over while running.
    #[error("{0}")]
    Refused(String),
    #[error("the gateway is stopping")]
    Stopping,
}

/// How reloads went so far.
#[derive(Clone, Debug)]
pub struct ReloadStatus {
    /// The configuration file.
    pub file: Option<PathBuf>,
    /// A hash of the files in force, in hex; the same on every machine that runs them.
    pub version: String,
    /// When they were taken over.
    pub since: SystemTime,
    /// Reloads that were taken over.
    pub succeeded: u64,
    /// Reloads that were not.
    pub failed: u64,
    /// When and why the last reload failed; `None` once a later one succeeded.
    pub error: Option<(SystemTime, ReloadError)>,
}

/// A handle to the task that reloads. The task ends with the last handle.
#[derive(Clone)]
pub struct Reloader {
    requests: mpsc::Sender<oneshot::Sender<Result<(), ReloadError>>>,
    status: Arc<Mutex<ReloadStatus>>,
}

impl Reloader {
    /// Watches the files of `snapshot`, which came from `file`, and SIGHUP. `apply` takes over a valid configuration or says why it cannot. Needs a tokio
    /// runtime.
    ///
    /// # Errors
    /// The signal handler cannot be installed.
    pub fn start<Apply, Applied, Refusal>(file: Option<PathBuf>, snapshot: &Snapshot, apply: Apply) -> std::io::Result<Reloader>
    where
        Apply: Fn(Snapshot) -> Applied + Send + 'static,
        Applied: Future<Output = Result<(), Refusal>> + Send + 'static,
        Refusal: Display + 'static,
    {
        let hangups = signal(SignalKind::hangup())?;
        // One change at a time is enough: whoever asks during a reload waits for the next one.
        let (requests, inbox) = mpsc::channel(1);
        let version = version(&snapshot.sources);
        let status = ReloadStatus { file: file.clone(), version: version.clone(), since: SystemTime::now(), succeeded: 0, failed: 0, error: None };
        let status = Arc::new(Mutex::new(status));
        let owner = Owner { file, files: Files::new(&snapshot.sources), tried: version, inbox, hangups, status: Arc::clone(&status), apply };
        tokio::spawn(owner.run());
        Ok(Reloader { requests, status })
    }

    /// Reloads now, whether or not anything changed.
    ///
    /// # Errors
    /// Why the running configuration stays.
    pub async fn reload(&self) -> Result<(), ReloadError> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(reply).await.map_err(|_| ReloadError::Stopping)?;
        answer.await.map_err(|_| ReloadError::Stopping)?
    }

    /// How reloads went so far.
    pub fn status(&self) -> ReloadStatus {
        // A value is replaced as a whole under the lock: sound even if a holder panicked.
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What the owner task woke up for.
enum Wake {
    Asked(oneshot::Sender<Result<(), ReloadError>>),
    Hangup,
    /// Something happened to the files, or it is time to compare them.
    Files,
    Over,
}

struct Owner<Apply> {
    file: Option<PathBuf>,
    files: Files,
    /// The version of the files at the last try, good or bad.
    tried: String,
    inbox: mpsc::Receiver<oneshot::Sender<Result<(), ReloadError>>>,
    hangups: Signal,
    status: Arc<Mutex<ReloadStatus>>,
    apply: Apply,
}

impl<Apply, Applied, Refusal> Owner<Apply>
where
    Apply: Fn(Snapshot) -> Applied,
    Applied: Future<Output = Result<(), Refusal>>,
    Refusal: Display,
{
    async fn run(mut self) {
        loop {
            match self.next().await {
                Wake::Over => return,
                Wake::Asked(reply) => {
                    let result = self.reload().await;
                    // Whoever asked may have left.
                    _ = reply.send(result);
                }
                Wake::Hangup => _ = self.reload().await,
                Wake::Files => {
                    // A failed try may have missed a file that is not known yet: then any change in the folders is worth another.
                    let failed = self.status.lock().unwrap_or_else(PoisonError::into_inner).error.is_some();
                    if failed || version(self.files.paths()) != self.tried {
                        _ = self.reload().await;
                    }
                }
            }
        }
    }

    async fn next(&mut self) -> Wake {
        tokio::select! {
            request = self.inbox.recv() => request.map_or(Wake::Over, Wake::Asked),
            Some(()) = self.hangups.recv() => Wake::Hangup,
            () = self.files.changed(), if self.file.is_some() => Wake::Files,
        }
    }

    /// The one way in: load, check, hand over, remember how it went.
    async fn reload(&mut self) -> Result<(), ReloadError> {
        let result = self.attempt().await;
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        match &result {
            Ok(()) => {
                tracing::info!(version = %self.tried, "configuration reloaded");
                status.version.clone_from(&self.tried);
                status.since = SystemTime::now();
                status.succeeded += 1;
                status.error = None;
            }
            Err(error) => {
                // The same mistake, looked at again because the folder is restless, is not news.
                if status.error.as_ref().is_none_or(|(_, known)| known.to_string() != error.to_string()) {
                    tracing::error!("configuration not reloaded, the running one stays:\n{error}");
                    status.failed += 1;
                }
                status.error = Some((SystemTime::now(), error.clone()));
            }
        }
        result
    }

    async fn attempt(&mut self) -> Result<(), ReloadError> {
        let file = self.file.clone().ok_or(ReloadError::NoFile)?;
        // Before reading: a change during the reading is then seen as another one.
        let before = version(self.files.paths());
        let loaded = match tokio::task::spawn_blocking(move || load(&file)).await {
            Ok(loaded) => loaded,
            Err(stopped) if stopped.is_panic() => std::panic::resume_unwind(stopped.into_panic()),
            Err(_) => return Err(ReloadError::Stopping),
        };
        let snapshot = match loaded {
            Ok(snapshot) => snapshot,
            Err(error) => {
                self.tried = before;
                return Err(error.into());
            }
        };
        let same_files = self.files.paths() == snapshot.sources;
        if !same_files {
            self.files = Files::new(&snapshot.sources);
        }
        self.tried = if same_files { before } else { version(self.files.paths()) };
        (self.apply)(snapshot).await.map_err(|refusal| ReloadError::Refused(refusal.to_string()))
    }
}

/// Files whose changes are noticed.
struct Files {
    paths: Vec<PathBuf>,
    events: mpsc::Receiver<()>,
    /// Stops with the value. `None` where the system offers none; comparing remains.
    _watcher: Option<RecommendedWatcher>,
    compare: tokio::time::Interval,
}

impl Files {
    fn new(paths: &[PathBuf]) -> Files {
        // One note that something happened is enough, however much did.
        let (sender, events) = mpsc::channel(1);
        let watcher = watcher(paths, sender).inspect_err(|error| tracing::warn!("changes of files are noticed late: {error}")).ok();
        let mut compare = interval(COMPARE);
        compare.set_missed_tick_behavior(MissedTickBehavior::Delay);
        compare.reset();
        Files { paths: paths.to_vec(), events, _watcher: watcher, compare }
    }

    fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Resolves when something happened and it has become quiet, or when it is time to compare. Cancel-safe: a change noted and not yet reported is found
    /// by the next comparison.
    async fn changed(&mut self) {
        tokio::select! {
            Some(()) = self.events.recv() => {}
            _ = self.compare.tick() => return,
        }
        let latest = Instant::now() + AT_LATEST;
        loop {
            tokio::select! {
                Some(()) = self.events.recv() => {}
                () = sleep_until((Instant::now() + QUIET).min(latest)) => return,
            }
            if Instant::now() >= latest {
                return;
            }
        }
    }
}

/// Watches the folders of `paths`, not the files: editors replace files, and Kubernetes swaps a symbolic link beside them.
fn watcher(paths: &[PathBuf], sender: mpsc::Sender<()>) -> notify::Result<RecommendedWatcher> {
    let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        if event.is_ok_and(|event| may_change(event.kind)) {
            // A full channel already says that something happened.
            _ = sender.try_send(());
        }
    })?;
    let folders: BTreeSet<PathBuf> =
        paths.iter().flat_map(|path| [Some(folder(path)), path.canonicalize().ok().map(|real| folder(&real))]).flatten().collect();
    for folder in folders {
        watcher.watch(&folder, RecursiveMode::NonRecursive)?;
    }
    Ok(watcher)
}

/// Reading, which every reload does, is an event too, and no change. Where the end of writing is told, what is written before it is none either: a log in
/// the same folder would otherwise make us look at every line.
fn may_change(kind: EventKind) -> bool {
    match kind {
        EventKind::Access(access) => access == AccessKind::Close(AccessMode::Write),
        EventKind::Modify(ModifyKind::Data(_)) => !cfg!(target_os = "linux"),
        EventKind::Any | EventKind::Create(_) | EventKind::Modify(_) | EventKind::Remove(_) | EventKind::Other => true,
    }
}

fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// A hash of the files' contents, in their order (FNV-1a, 64 bits: to tell apart, not to protect).
fn version(paths: &[PathBuf]) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for path in paths {
        // A file that cannot be read differs from an empty one.
        let content = std::fs::read(path).unwrap_or_else(|_| b"\xff absent".to_vec());
        for byte in content.iter().chain(b"\0") {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tokio::time::timeout;

    use super::*;

    const GOOD: &str = "pools: [{ name: chat, models: [m], policy: p.yaml, backends: [{ url: 'http://127.0.0.1:8000' }] }]\n";

    struct Setup {
        _dir: tempfile::TempDir,
        file: PathBuf,
        policy: PathBuf,
        reloader: Reloader,
        applied: mpsc::UnboundedReceiver<Snapshot>,
    }

    fn setup() -> Setup {
        let dir = tempfile::tempdir().unwrap();
        let (file, policy) = (dir.path().join("headway.yaml"), dir.path().join("p.yaml"));
        fs::write(&file, GOOD).unwrap();
        fs::write(&policy, "order: fcfs\n").unwrap();
        let (sender, applied) = mpsc::unbounded_channel();
        let apply = move |snapshot: Snapshot| {
            let refusal = snapshot.models.contains_key("refused").then(|| "not while running".to_owned());
            _ = sender.send(snapshot);
            async move { refusal.map_or(Ok(()), Err) }
        };
        let reloader = Reloader::start(Some(file.clone()), &load(&file).unwrap(), apply).unwrap();
        Setup { _dir: dir, file, policy, reloader, applied }
    }

    async fn next(applied: &mut mpsc::UnboundedReceiver<Snapshot>) -> Snapshot {
        timeout(Duration::from_secs(30), applied.recv()).await.unwrap().unwrap()
    }

    async fn until(mut fits: impl FnMut() -> bool) {
        timeout(Duration::from_secs(30), async {
            while !fits() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap();
    }

    #[tokio::test]
    async fn a_changed_file_is_taken_over() {
        let mut setup = setup();
        let before = setup.reloader.status();
        fs::write(&setup.file, GOOD.replace("[m]", "[m, n]")).unwrap();
        assert!(next(&mut setup.applied).await.models.contains_key("n"));
        until(|| setup.reloader.status().succeeded == 1).await;
        assert_ne!(setup.reloader.status().version, before.version);
    }

    #[tokio::test]
    async fn a_changed_policy_is_taken_over_too() {
        let mut setup = setup();
        // As editors do it: another file under the same name.
        let other = setup.policy.with_extension("new");
        fs::write(&other, "order: pars\n").unwrap();
        fs::rename(&other, &setup.policy).unwrap();
        let snapshot = next(&mut setup.applied).await;
        assert_eq!(snapshot.pools[0].policy.policy.order(), crate::scheduler::Order::Pars);
    }

    #[tokio::test]
    async fn a_mistake_changes_nothing_and_is_remembered_until_it_is_gone() {
        let mut setup = setup();
        let before = setup.reloader.status().version;
        fs::write(&setup.file, "polls: []\n").unwrap();
        until(|| setup.reloader.status().failed == 1).await;
        let status = setup.reloader.status();
        assert_eq!(status.version, before);
        assert!(status.error.unwrap().1.to_string().contains("did you mean pools?"));
        assert!(setup.applied.try_recv().is_err());
        fs::write(&setup.file, GOOD.replace("[m]", "[k]")).unwrap();
        assert!(next(&mut setup.applied).await.models.contains_key("k"));
        until(|| setup.reloader.status().error.is_none()).await;
    }

    #[tokio::test]
    async fn a_file_that_was_missing_is_noticed_when_it_comes() {
        let mut setup = setup();
        fs::write(&setup.file, GOOD.replace("p.yaml", "later.yaml")).unwrap();
        until(|| setup.reloader.status().failed == 1).await;
        fs::write(setup.file.with_file_name("later.yaml"), "order: pars\n").unwrap();
        assert_eq!(next(&mut setup.applied).await.pools[0].policy.name, "later");
    }

    #[tokio::test]
    async fn what_cannot_be_taken_over_is_an_error_and_the_version_stays() {
        let mut setup = setup();
        let before = setup.reloader.status().version;
        fs::write(&setup.file, GOOD.replace("[m]", "[refused]")).unwrap();
        next(&mut setup.applied).await;
        until(|| setup.reloader.status().error.is_some()).await;
        let status = setup.reloader.status();
        assert!(matches!(status.error, Some((_, ReloadError::Refused(why))) if why == "not while running"));
        assert_eq!((status.version, status.failed), (before, 1));
    }

    #[tokio::test]
    async fn an_operator_gets_the_answer() {
        let mut setup = setup();
        setup.reloader.reload().await.unwrap();
        assert_eq!(setup.applied.try_recv().unwrap().pools.len(), 1);
        fs::write(&setup.file, "pools: []\n").unwrap();
        assert!(matches!(setup.reloader.reload().await, Err(ReloadError::Invalid(_))));
    }

    #[tokio::test]
    async fn without_a_file_there_is_nothing_to_reload() {
        let snapshot = super::super::from_backends(&[], super::super::DEFAULT_LISTEN, super::super::DEFAULT_ADMIN, Default::default());
        let reloader = Reloader::start(None, &snapshot, |_| async { Ok::<(), String>(()) }).unwrap();
        assert!(matches!(reloader.reload().await, Err(ReloadError::NoFile)));
    }

    #[tokio::test]
    async fn a_swapped_link_is_a_change() {
        // Kubernetes mounts a config map as links through ..data, and swaps that one.
        let dir = tempfile::tempdir().unwrap();
        for (version, text) in [("v1", GOOD.to_owned()), ("v2", GOOD.replace("[m]", "[swapped]"))] {
            fs::create_dir(dir.path().join(version)).unwrap();
            fs::write(dir.path().join(version).join("headway.yaml"), text).unwrap();
            fs::write(dir.path().join(version).join("p.yaml"), "order: fcfs\n").unwrap();
        }
        let link = std::os::unix::fs::symlink;
        link("v1", dir.path().join("..data")).unwrap();
        link("..data/headway.yaml", dir.path().join("headway.yaml")).unwrap();
        link("..data/p.yaml", dir.path().join("p.yaml")).unwrap();
        let file = dir.path().join("headway.yaml");
        let (sender, mut applied) = mpsc::unbounded_channel();
        let apply = move |snapshot: Snapshot| {
            _ = sender.send(snapshot);
            async { Ok::<(), String>(()) }
        };
        let _reloader = Reloader::start(Some(file.clone()), &load(&file).unwrap(), apply).unwrap();
        link("v2", dir.path().join("..data_new")).unwrap();
        fs::rename(dir.path().join("..data_new"), dir.path().join("..data")).unwrap();
        assert!(next(&mut applied).await.models.contains_key("swapped"));
    }

    #[test]
    fn reading_is_no_change() {
        assert!(!may_change(EventKind::Access(AccessKind::Open(AccessMode::Any))));
        assert!(may_change(EventKind::Access(AccessKind::Close(AccessMode::Write))));
        assert!(may_change(EventKind::Remove(notify::event::RemoveKind::File)));
        assert!(may_change(EventKind::Modify(ModifyKind::Name(notify::event::RenameMode::To))));
        assert_eq!(may_change(EventKind::Modify(ModifyKind::Data(notify::event::DataChange::Any))), !cfg!(target_os = "linux"));
    }
}
