//! Prompt to score: how long an answer a prompt asks for, relative to other prompts.
//!
//! A [`Ranker`] is a handle. Behind it a few threads own the model; a request hands its text over, waits until its deadline and then goes on without
//! an opinion. Nothing here can fail a request.
//!
//! `batcher` who is scored when · `weights` a model directory, verified · `tokenizer` text to pieces · `model` the encoder on any device · `encoder` the
//! same on a CPU, fast, of `product` and `loops` · `shadow` a second ranker, compared and not obeyed.

mod batcher;
mod cache;
pub mod encoder;
pub(crate) mod loops;
pub mod model;
pub(crate) mod product;
mod shadow;
pub mod tokenizer;
pub mod weights;

use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::config::{Device, RankerSettings};
use crate::scheduler::{Learnt, RankerVersion, Scored};

pub use batcher::Counts;
pub(crate) use batcher::yield_to_the_proxy;
pub use shadow::{Compared, Pending, Shadow};
pub use weights::RankerError;

use batcher::{Batcher, Bounds, Loaded, Submitted};
use weights::{Card, Package};

/// How long a request waits for its score on a CPU, unless configured.
const CPU_DEADLINE: Duration = Duration::from_millis(50);
/// How long a request waits for its score on a GPU, unless configured.
const GPU_DEADLINE: Duration = Duration::from_millis(15);
/// Bytes at the beginning and at the end of a longer text that are read at all: several times what the largest useful truncation keeps, so that neither
/// hashing nor tokenizing a prompt of a megabyte takes longer than one of a page.
const READ: usize = 2048;
/// Bytes of text in the pieces that a truncation keeps of a long prompt, roughly.
const KEPT: usize = 512;

/// What of a request is scored.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PromptText {
    /// The head of the system prompt; empty for none.
    pub system: String,
    /// The last user turn, with a marker where an image, audio or a tool result stood.
    pub user: String,
}

impl PromptText {
    /// Without what no tokenizer will look at.
    pub(crate) fn excerpt(mut self) -> PromptText {
        self.system.truncate(self.system.floor_char_boundary(READ));
        // The joint of head and tail is the one byte more: an excerpt is its own excerpt.
        if self.user.len() > 2 * READ + 1 {
            let head = self.user.floor_char_boundary(READ);
            let tail = self.user.ceil_char_boundary(self.user.len() - READ);
            self.user = format!("{} {}", &self.user[..head], &self.user[tail..]);
        }
        self
    }

    /// Bytes, up to about what a truncation keeps: a measure of the time it takes to score.
    fn bytes(&self) -> usize {
        (self.system.len() + self.user.len()).min(KEPT)
    }
}

/// The ranker's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opinion {
    Scored(Scored),
    Neutral(Neutral),
}

/// Why there is no score. Each is normal operation: the request is ordered by the pooled estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Neutral {
    /// No ranker is configured.
    Off,
    /// The score did not come in time.
    Deadline,
    /// Too many prompts wait to be scored.
    Busy,
    /// The model could not score this prompt, or its threads have died.
    Failed,
}

/// A handle to the scoring stage; clones share it. The threads end with the last clone.
#[derive(Clone)]
pub struct Ranker {
    stage: Option<Arc<Stage>>,
}

struct Stage {
    batcher: Batcher,
    deadline: Duration,
    device: Device,
    /// Held while weights are loaded: one load at a time.
    loading: Mutex<()>,
    /// Held for as long as a swap takes.
    changes: Mutex<Changes>,
    /// Two independently keyed hashes name a text.
    hashers: [RandomState; 2],
}

/// What a rollback goes by.
#[derive(Default)]
struct Changes {
    /// The weights before the present ones.
    previous: Option<Loaded>,
    /// An operator has gone back from these: only asking for them brings them in again.
    rejected: Option<RankerVersion>,
}

impl Ranker {
    /// No opinion on anything.
    pub fn off() -> Ranker {
        Ranker { stage: None }
    }

    /// Loads and verifies the model directory, then starts the threads. Blocks as long as reading the weights takes (tenths of a second).
    ///
    /// # Errors
    /// The directory is damaged or incomplete, or the device is not there. The error names the check that failed.
    pub fn start(settings: RankerSettings) -> Result<Ranker, RankerError> {
        let package = Package::load(&settings.weights, settings.device)?;
        let threads = match settings.threads {
            _ if package.on_gpu() => 1,
            0 => std::thread::available_parallelism().map_or(1, |cores| cores.get() - 1).max(1),
            threads => threads,
        };
        let (bounds, deadline) = if package.on_gpu() { (Bounds::GPU, GPU_DEADLINE) } else { (Bounds::CPU, CPU_DEADLINE) };
        let batcher = Batcher::start(loaded(package), bounds, threads).map_err(RankerError::Threads)?;
        Ok(Ranker::over(batcher, settings.deadline.unwrap_or(deadline), settings.device))
    }

    fn over(batcher: Batcher, deadline: Duration, device: Device) -> Ranker {
        Ranker {
            stage: Some(Arc::new(Stage {
                batcher,
                deadline,
                device,
                loading: Mutex::default(),
                changes: Mutex::default(),
                hashers: [RandomState::new(), RandomState::new()],
            })),
        }
    }

    /// The score of this text, or why there is none; at most one deadline later.
    pub async fn score(&self, text: PromptText) -> Opinion {
        let Some(stage) = &self.stage else { return Opinion::Neutral(Neutral::Off) };
        let text = text.excerpt();
        let [low, high] = [0, 1].map(|half| u128::from(stage.hashers[half].hash_one(&text)));
        let answer = match stage.batcher.submit(high << 64 | low, text) {
            Submitted::Answered(answer) => answer,
            Submitted::Waits(waits) => match tokio::time::timeout(stage.deadline, waits).await {
                Ok(answer) => answer.unwrap_or(Err(Neutral::Failed)),
                Err(_) => Err(Neutral::Deadline),
            },
        };
        answer.map_or_else(Opinion::Neutral, Opinion::Scored)
    }

    /// Replaces the weights under load: loads and verifies beside the running ones, then swaps between two batches. Blocks as long as loading takes; no
    /// request waits for it.
    ///
    /// # Errors
    /// As for [`Ranker::start`]; the old weights go on serving. [`RankerError::Off`] where no ranker runs.
    pub fn reload(&self, directory: &Path) -> Result<RankerVersion, RankerError> {
        let stage = self.stage.as_ref().ok_or(RankerError::Off)?;
        let _one_at_a_time = stage.loading.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded(Package::load(directory, stage.device)?);
        let version = loaded.version;
        let mut changes = stage.changes();
        let old = stage.batcher.swap(loaded);
        // Loading the same again leaves the way back open.
        if old.version != version {
            changes.previous = Some(old);
        }
        changes.rejected = None;
        Ok(version)
    }

    /// Takes over what the directory holds, if that is neither what runs nor what an operator went back from. True if the weights have changed.
    ///
    /// # Errors
    /// As for [`Ranker::reload`].
    pub fn follow(&self, directory: &Path) -> Result<bool, RankerError> {
        let stage = self.stage.as_ref().ok_or(RankerError::Off)?;
        let found = Some(Card::read(directory)?.version());
        if found == self.version() || found == stage.changes().rejected {
            return Ok(false);
        }
        self.reload(directory).map(|_| true)
    }

    /// Goes back to the weights before the present ones; once more, and it goes forth again. What the directory holds then stays out until it changes.
    ///
    /// # Errors
    /// [`RankerError::NoPrevious`] if the weights have not changed yet, [`RankerError::Off`] where no ranker runs.
    pub fn rollback(&self) -> Result<RankerVersion, RankerError> {
        let stage = self.stage.as_ref().ok_or(RankerError::Off)?;
        let mut changes = stage.changes();
        let previous = changes.previous.take().ok_or(RankerError::NoPrevious)?;
        let version = previous.version;
        let left = stage.batcher.swap(previous);
        changes.rejected = Some(left.version);
        changes.previous = Some(left);
        Ok(version)
    }

    /// Whose scores are given out now; `None` where no ranker runs.
    pub fn version(&self) -> Option<RankerVersion> {
        self.stage.as_ref().map(|stage| stage.batcher.loaded().version)
    }

    /// What a rollback would bring back.
    pub fn previous(&self) -> Option<RankerVersion> {
        self.stage.as_ref()?.changes().previous.as_ref().map(|previous| previous.version)
    }

    /// What to expect of these scores before anything has been observed.
    pub fn prior(&self) -> Arc<Learnt> {
        self.stage.as_ref().map(|stage| stage.batcher.loaded().prior).unwrap_or_default()
    }

    /// What has happened so far; all zero where no ranker runs.
    pub fn counts(&self) -> Counts {
        self.stage.as_ref().map(|stage| stage.batcher.counts()).unwrap_or_default()
    }
}

impl Stage {
    fn changes(&self) -> MutexGuard<'_, Changes> {
        // Its fields are set one after the other, each sound alone.
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn loaded(package: Package) -> Loaded {
    let (version, prior) = (package.version(), Arc::new(package.prior()));
    Loaded { model: Arc::new(package), version, prior }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::batcher::Model;
    use super::tokenizer::Pieces;
    use super::weights::tests::tiny_directory;
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn text(user: &str) -> PromptText {
        PromptText { system: String::new(), user: user.into() }
    }

    fn settings(directory: &Path) -> RankerSettings {
        RankerSettings { weights: directory.into(), device: Device::Cpu, deadline: Some(HOUR), threads: 1, shadow: None }
    }

    async fn scored(ranker: &Ranker, user: &str) -> Scored {
        match ranker.score(text(user)).await {
            Opinion::Scored(scored) => scored,
            Opinion::Neutral(neutral) => panic!("{user:?}: {neutral:?}"),
        }
    }

    /// Answers nothing until the other end of the channel is dropped, then zeros.
    struct Gated(Mutex<mpsc::Receiver<()>>);

    impl Model for Gated {
        fn pieces(&self, _: &PromptText) -> Pieces {
            Pieces::of_ids(vec![2, 3])
        }

        fn scores(&self, batch: &[Pieces]) -> Result<Vec<f32>, RankerError> {
            assert!(self.0.lock().unwrap_or_else(PoisonError::into_inner).recv().is_err());
            Ok(vec![0.0; batch.len()])
        }
    }

    #[tokio::test]
    async fn without_a_ranker_nothing_is_scored() {
        assert_eq!(Ranker::off().score(text("hello")).await, Opinion::Neutral(Neutral::Off));
        assert_eq!(Ranker::off().version(), None);
        assert!(matches!(Ranker::off().reload(Path::new("nowhere")), Err(RankerError::Off)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_goes_on_at_its_deadline() {
        let (gate, closed) = mpsc::channel();
        let loaded = Loaded { model: Arc::new(Gated(Mutex::new(closed))), version: RankerVersion(1), prior: Arc::default() };
        let deadline = Duration::from_millis(50);
        let ranker = Ranker::over(Batcher::start(loaded, Bounds::CPU, 1).unwrap(), deadline, Device::Cpu);
        let start = tokio::time::Instant::now();
        assert_eq!(ranker.score(text("hello")).await, Opinion::Neutral(Neutral::Deadline));
        assert_eq!(start.elapsed().as_millis(), deadline.as_millis());
        drop(gate);
    }

    #[tokio::test]
    async fn a_directory_is_served_and_the_same_text_costs_nothing_twice() {
        let directory = tiny_directory(1);
        let ranker = Ranker::start(settings(directory.path())).unwrap();
        let first = scored(&ranker, "hello world").await;
        assert_eq!(Some(first.version), ranker.version());
        assert_ne!(first.score, scored(&ranker, "a b c").await.score);
        assert_eq!(scored(&ranker, "hello world").await, first);
        let counts = ranker.counts();
        assert_eq!((counts.scored, counts.cached, counts.waiting), (2, 1, 0));
    }

    #[tokio::test]
    async fn any_text_gets_a_finite_score() {
        let directory = tiny_directory(1);
        let ranker = Ranker::start(settings(directory.path())).unwrap();
        let texts = [
            String::new(),
            " \n\t ".into(),
            "\u{0}\u{fffd}\u{feff}".into(),
            "🦀".repeat(5000),
            "a".repeat(1 << 20),
            "hello ".repeat(1 << 17),
            "[CLS][SEP][PAD][MASK]".into(),
            "שלום नमस्ते 你好 สวัสดี مرحبا".into(),
            "e\u{301}".repeat(3000),
        ];
        for text in texts {
            scored(&ranker, &text).await;
            let system = PromptText { system: text, user: "hello".into() };
            assert!(matches!(ranker.score(system).await, Opinion::Scored(_)));
        }
    }

    #[tokio::test]
    async fn weights_are_replaced_while_serving_and_kept_when_the_new_ones_are_bad() {
        let (old, new) = (tiny_directory(1), tiny_directory(2));
        let ranker = Ranker::start(settings(old.path())).unwrap();
        let before = scored(&ranker, "hello").await;
        let version = ranker.reload(new.path()).unwrap();
        let after = scored(&ranker, "hello").await;
        assert_eq!(after.version, version);
        assert_ne!((before.version, before.score), (after.version, after.score));

        std::fs::write(old.path().join("model.safetensors"), b"damaged").unwrap();
        assert!(matches!(ranker.reload(old.path()), Err(RankerError::Hash { .. })));
        assert_eq!(scored(&ranker, "hello").await, after);
    }

    #[tokio::test]
    async fn a_directory_is_followed_unless_an_operator_went_back_from_it() {
        let (old, new) = (tiny_directory(1), tiny_directory(2));
        let ranker = Ranker::start(settings(old.path())).unwrap();
        let first = ranker.version().unwrap();
        assert!(matches!(ranker.rollback(), Err(RankerError::NoPrevious)));
        assert!(!ranker.follow(old.path()).unwrap(), "it runs already");
        assert!(ranker.follow(new.path()).unwrap());
        let second = ranker.version().unwrap();
        assert_eq!(ranker.previous(), Some(first));

        assert_eq!(ranker.rollback().unwrap(), first);
        assert!(!ranker.follow(new.path()).unwrap(), "rejected");
        assert_eq!(scored(&ranker, "hello").await.version, first);
        assert_eq!(ranker.rollback().unwrap(), second, "and forth");
        assert_eq!(ranker.rollback().unwrap(), first);
        assert_eq!(ranker.reload(new.path()).unwrap(), second, "asked for by name");

        std::fs::write(new.path().join("card.json"), b"{}").unwrap();
        assert!(matches!(ranker.follow(new.path()), Err(RankerError::Card(_))));
        assert_eq!(ranker.version(), Some(second));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_thousand_swaps_under_load_fail_no_request_and_mix_no_versions() {
        const SWAPS: usize = 1000;
        let directories = [tiny_directory(1), tiny_directory(2)];
        let texts = ["hello", "worlds a b", "a b c d e", ""];
        // What each version says, so that a score of one under the name of the other is found.
        let mut truth = std::collections::HashMap::new();
        for directory in &directories {
            let alone = Ranker::start(settings(directory.path())).unwrap();
            for text in texts {
                let score = scored(&alone, text).await;
                truth.insert((score.version.0, text), score.score);
            }
        }
        let ranker = Ranker::start(settings(directories[0].path())).unwrap();
        let swapping = {
            let ranker = ranker.clone();
            tokio::task::spawn_blocking(move || {
                for swap in 0..SWAPS {
                    ranker.reload(directories[(swap + 1) % 2].path()).unwrap();
                }
            })
        };
        let mut seen = std::collections::BTreeMap::new();
        while !swapping.is_finished() {
            for text in texts {
                let score = scored(&ranker, text).await;
                assert!((score.score.get() - truth[&(score.version.0, text)].get()).abs() < 1e-5, "{text:?}");
                *seen.entry(score.version.0).or_insert(0) += 1;
            }
        }
        swapping.await.unwrap();
        assert_eq!(seen.len(), 2, "{seen:?}");
    }

    #[test]
    fn an_excerpt_keeps_both_ends_and_is_its_own_excerpt() {
        let long = PromptText { system: "é".repeat(READ), user: format!("{}{}", "ä".repeat(3 * READ), "z".repeat(READ - 1)) };
        let excerpt = long.excerpt();
        assert_eq!(excerpt.system.len(), READ);
        assert!(excerpt.user.starts_with('ä') && excerpt.user.ends_with('z') && excerpt.user.len() <= 2 * READ + 1);
        assert_eq!(excerpt.clone().excerpt(), excerpt);
    }
}
