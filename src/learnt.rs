//! What a pool has learnt of answer lengths, kept over a restart: one file per pool, replaced as a whole.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::scheduler::{Learnt, ModelId, RankerVersion, Sample, Score, Scored};

/// Layout of the file; others are not read.
const FORMAT: u32 = 1;
/// Answers that one file holds, shared by the pool's models; about 40 bytes each.
const ANSWERS: usize = 16_384;
/// Bytes of the largest file that is read.
const LARGEST: u64 = 16 << 20;

/// Makes the directory if it is missing, and sees that files can be written there.
///
/// # Errors
/// One of the two fails.
pub fn prepare(directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let trial = directory.join(format!("{}.new", std::process::id()));
    write_whole(&trial, b"")?;
    fs::remove_file(&trial)
}

/// The file of one pool.
#[derive(Debug)]
pub struct Keeper {
    path: PathBuf,
    /// Hash of what the file was last given, so that a quiet pool writes nothing.
    written: Mutex<Option<u64>>,
}

/// Why what a pool has learnt could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{} cannot be written, a restart learns anew: {source}", path.display())]
pub struct NotKept {
    path: PathBuf,
    source: io::Error,
}

/// Why a file is of no use.
#[derive(Debug, thiserror::Error)]
enum Damage {
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    #[error("it is larger than {LARGEST} bytes")]
    TooLarge,
    #[error("its format is {0}, this program reads {FORMAT}")]
    Format(u32),
    #[error("an answer names model {0}, of which there is no name")]
    Model(usize),
    #[error("a score or a rate is not a number")]
    NotANumber,
}

/// A score and the version of its ranker, short because a file holds thousands.
type ScoredRow = (u32, f32);
/// Place in the list of models, score, tokens, and whether the answer was cut there.
type AnswerRow = (Option<usize>, Option<ScoredRow>, u32, bool);

/// [`Learnt`] with models by name, since ids are given out anew at every start.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    format: u32,
    gamma: Option<f64>,
    models: Vec<String>,
    /// Oldest first, as the answers.
    scores: Vec<ScoredRow>,
    answers: Vec<AnswerRow>,
}

impl Keeper {
    /// The file of `pool` in `directory`; nothing is opened yet.
    pub fn new(directory: &Path, pool: &str) -> Keeper {
        Keeper { path: directory.join(format!("{pool}.json")), written: Mutex::default() }
    }

    /// What was kept, with the ids that `id` gives to names. A damaged file is set aside under another name, and a warning says so.
    pub fn read(&self, id: impl Fn(&str) -> ModelId) -> Option<Learnt> {
        // Not of a pipe or a device, which might have no end.
        let is_file = |metadata: fs::Metadata| if metadata.is_file() { Ok(()) } else { Err(io::Error::other("it is not a regular file")) };
        let read = fs::metadata(&self.path).and_then(is_file).and_then(|()| fs::File::open(&self.path)).and_then(|file| {
            let mut text = Vec::new();
            file.take(LARGEST + 1).read_to_end(&mut text).map(|_| text)
        });
        let text = match read {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                tracing::warn!("{} cannot be read, the pool learns anew: {error}", self.path.display());
                return None;
            }
        };
        match understand(&text, id) {
            Ok(learnt) => Some(learnt),
            Err(damage) => {
                let aside = self.path.with_extension("damaged");
                let moved = fs::rename(&self.path, &aside).map_or_else(|error| error.to_string(), |()| format!("set aside as {}", aside.display()));
                tracing::warn!("{} is damaged, the pool learns anew: {damage}; {moved}", self.path.display());
                None
            }
        }
    }

    /// Replaces the file, unless it holds the same already. Blocks.
    ///
    /// # Errors
    /// The directory or the file cannot be written; the old file is whole.
    pub fn write(&self, learnt: &Learnt, models: &BTreeMap<String, ModelId>) -> Result<(), NotKept> {
        self.replace(learnt, models).map_err(|source| NotKept { path: self.path.clone(), source })
    }

    fn replace(&self, learnt: &Learnt, models: &BTreeMap<String, ModelId>) -> io::Result<()> {
        let text = serde_json::to_vec(&document(learnt, models))?;
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        let hash = hasher.finish();
        let mut written = self.written.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *written == Some(hash) {
            return Ok(());
        }
        // Of this process alone: during a hand-over there are two.
        let new = self.path.with_extension(format!("{}.new", std::process::id()));
        let replaced = write_whole(&new, &text).and_then(|()| fs::rename(&new, &self.path));
        match &replaced {
            Ok(()) => *written = Some(hash),
            // Nothing more can be done about what is left of it.
            Err(_) => _ = fs::remove_file(&new),
        }
        replaced
    }
}

/// Writes a new file that only this user reads: names of models are nobody else's business.
fn write_whole(path: &Path, text: &[u8]) -> io::Result<()> {
    // An operator may have cleared away the directory.
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    // A process that had the same id may have left one.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text)?;
    // On the disk before it takes the old one's name: a crash leaves one whole file or the other.
    file.sync_all()
}

fn document(learnt: &Learnt, models: &BTreeMap<String, ModelId>) -> Document {
    // Only names with answers: a name that somebody made up must not take a place in the next process too.
    let answered: BTreeSet<ModelId> = learnt.samples.iter().filter_map(|sample| sample.model).collect();
    let named: Vec<(&String, ModelId)> = models.iter().map(|(name, &id)| (name, id)).filter(|(_, id)| answered.contains(id)).collect();
    let places: BTreeMap<ModelId, usize> = named.iter().enumerate().map(|(place, &(_, id))| (id, place)).collect();
    let share = ANSWERS / (answered.len() + 1);
    let mut taken: BTreeMap<Option<ModelId>, usize> = BTreeMap::new();
    let scored = |scored: Scored| (scored.version.0, scored.score.get());
    let newest = learnt.samples.iter().rev().filter(|sample| {
        let taken = taken.entry(sample.model).or_default();
        *taken += 1;
        *taken <= share
    });
    let place = |model: Option<ModelId>| model.and_then(|model| places.get(&model).copied());
    let mut answers: Vec<AnswerRow> = newest.map(|sample| (place(sample.model), sample.score.map(scored), sample.output, sample.cut)).collect();
    answers.reverse();
    Document {
        format: FORMAT,
        gamma: learnt.gamma,
        models: named.into_iter().map(|(name, _)| name.clone()).collect(),
        scores: learnt.scores.iter().copied().map(scored).collect(),
        answers,
    }
}

fn understand(text: &[u8], id: impl Fn(&str) -> ModelId) -> Result<Learnt, Damage> {
    if text.len() as u64 > LARGEST {
        return Err(Damage::TooLarge);
    }
    let document: Document = serde_json::from_slice(text)?;
    if document.format != FORMAT {
        return Err(Damage::Format(document.format));
    }
    let ids: Vec<ModelId> = document.models.iter().map(|name| id(name)).collect();
    let scored = |(version, score): ScoredRow| Ok(Scored { score: Score::new(score).ok_or(Damage::NotANumber)?, version: RankerVersion(version) });
    let sample = |(place, score, output, cut): AnswerRow| {
        let model = place.map(|place| ids.get(place).copied().ok_or(Damage::Model(place))).transpose()?;
        Ok(Sample { model, score: score.map(scored).transpose()?, output, cut })
    };
    if document.gamma.is_some_and(|gamma| !gamma.is_finite() || gamma <= 0.0) {
        return Err(Damage::NotANumber);
    }
    Ok(Learnt {
        scores: document.scores.into_iter().map(scored).collect::<Result<_, Damage>>()?,
        samples: document.answers.into_iter().map(sample).collect::<Result<_, Damage>>()?,
        gamma: document.gamma,
        // Engines may have changed meanwhile, and show theirs within seconds.
        speed: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(score: f32) -> Scored {
        Scored { score: Score::new(score).unwrap(), version: RankerVersion(7) }
    }

    fn learnt() -> Learnt {
        let sample =
            |model: Option<u32>, score: Option<f32>, output, cut| Sample { model: model.map(ModelId), score: score.map(scored), output, cut };
        Learnt {
            scores: vec![scored(-1.5), scored(0.1)],
            samples: vec![sample(None, Some(0.1), 9, false), sample(Some(1), None, 100, true), sample(Some(2), Some(-1.5), 7, false)],
            gamma: Some(0.01),
            speed: None,
        }
    }

    fn names(pairs: &[(&str, u32)]) -> BTreeMap<String, ModelId> {
        pairs.iter().map(|&(name, id)| (name.to_owned(), ModelId(id))).collect()
    }

    #[test]
    fn what_is_kept_comes_back_under_the_ids_of_the_next_start() {
        let directory = tempfile::tempdir().unwrap();
        let keeper = Keeper::new(directory.path(), "chat");
        assert_eq!(keeper.read(|_| unreachable!()), None);
        keeper.write(&learnt(), &names(&[("b", 1), ("a", 2)])).unwrap();
        let read = Keeper::new(directory.path(), "chat").read(|name| ModelId(if name == "a" { 12 } else { 11 })).unwrap();
        let mut expected = learnt();
        expected.samples[1].model = Some(ModelId(11));
        expected.samples[2].model = Some(ModelId(12));
        assert_eq!(read, expected);
    }

    #[test]
    fn a_file_is_bounded_and_keeps_the_newest_answers_of_each_model_that_has_some() {
        let answer = |model, output| Sample { model: Some(ModelId(model)), score: None, output, cut: false };
        let many = (0..ANSWERS as u32).map(|n| answer(1, n));
        let learnt = Learnt { samples: many.chain([answer(2, 5)]).collect(), ..Learnt::default() };
        let document = document(&learnt, &names(&[("busy", 1), ("made up", 3), ("rare", 2)]));
        assert_eq!(document.models, ["busy", "rare"]);
        assert_eq!(document.answers.len(), ANSWERS / 3 + 1);
        let last = ANSWERS as u32 - 1;
        assert_eq!(document.answers[document.answers.len() - 2..], [(Some(0), None, last, false), (Some(1), None, 5, false)]);
    }

    #[test]
    fn a_quiet_pool_writes_nothing_and_a_busy_one_replaces_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let keeper = Keeper::new(directory.path(), "chat");
        let file = directory.path().join("chat.json");
        keeper.write(&learnt(), &BTreeMap::new()).unwrap();
        fs::remove_file(&file).unwrap();
        keeper.write(&learnt(), &BTreeMap::new()).unwrap();
        assert!(!file.exists());
        keeper.write(&Learnt::default(), &BTreeMap::new()).unwrap();
        assert_eq!(keeper.read(|_| unreachable!()), Some(Learnt::default()));
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn a_directory_is_made_where_it_is_missing_and_a_pipe_is_not_read() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("a/b");
        prepare(&directory).unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
        fs::remove_dir_all(&directory).unwrap();
        let keeper = Keeper::new(&directory, "chat");
        keeper.write(&learnt(), &BTreeMap::new()).unwrap();
        assert!(keeper.read(|_| unreachable!()).is_some());
        fs::write(parent.path().join("file"), "").unwrap();
        assert!(prepare(&parent.path().join("file/below")).is_err());
        fs::remove_file(directory.join("chat.json")).unwrap();
        fs::create_dir(directory.join("chat.json")).unwrap();
        assert_eq!(keeper.read(|_| unreachable!()), None, "neither is anything else that is no file");
    }

    #[test]
    fn a_damaged_file_is_set_aside() {
        let directory = tempfile::tempdir().unwrap();
        let keeper = Keeper::new(directory.path(), "chat");
        let file = directory.path().join("chat.json");
        keeper.write(&learnt(), &names(&[("b", 1), ("a", 2)])).unwrap();
        let whole = fs::read_to_string(&file).unwrap();
        for damaged in [
            "",
            &whole[..whole.len() / 2],
            &whole.replace("\"format\":1", "\"format\":2"),
            &whole.replace("[\"a\",\"b\"]", "[\"a\"]"),
            &whole.replace("-1.5", "1e300"),
            &whole.replace("0.01", "-0.01"),
        ] {
            fs::write(&file, damaged).unwrap();
            assert_eq!(keeper.read(|_| ModelId(1)), None, "{damaged}");
            assert!(!file.exists());
            assert_eq!(fs::read_to_string(directory.path().join("chat.damaged")).unwrap(), damaged);
        }
    }
}
