//! What a pool has learnt of answer lengths, kept over a restart: one file per pool, replaced as a whole.

use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::scheduler::{Learnt, ModelId, RankerVersion, Sample, Score, Scored};

/// Layout of the file; others are not read.
const FORMAT: u32 = 1;

/// The file of one pool.
#[derive(Debug)]
pub struct Keeper {
    path: PathBuf,
    /// Hash of what the file was last given, so that a quiet pool writes nothing.
    written: Mutex<Option<u64>>,
}

/// Why a file is of no use.
#[derive(Debug, thiserror::Error)]
enum Damage {
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    #[error("its format is {0}, this program reads {FORMAT}")]
    Format(u32),
    #[error("an answer names model {0}, of which there is no name")]
    Model(usize),
    #[error("a score or a rate is not a number")]
    NotANumber,
}

/// [`Learnt`] with models by name, since ids are given out anew at every start.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    format: u32,
    gamma: Option<f64>,
    models: Vec<String>,
    /// Ranker and score, oldest first.
    scores: Vec<(u32, f32)>,
    /// Place in `models`, ranker and score, tokens, whether it was cut there; oldest first.
    answers: Vec<(Option<usize>, Option<(u32, f32)>, u32, bool)>,
}

impl Keeper {
    /// The file of `pool` in `directory`; nothing is opened yet.
    pub fn new(directory: &Path, pool: &str) -> Keeper {
        Keeper { path: directory.join(format!("{pool}.json")), written: Mutex::default() }
    }

    /// What was kept, with the ids that `id` gives to names. A damaged file is set aside under another name, and a warning says so.
    pub fn read(&self, id: impl Fn(&str) -> ModelId) -> Option<Learnt> {
        let text = match fs::read(&self.path) {
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
    pub fn write(&self, learnt: &Learnt, models: &BTreeMap<String, ModelId>) -> io::Result<()> {
        let text = serde_json::to_vec(&document(learnt, models))?;
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        let hash = hasher.finish();
        let mut written = self.written.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *written == Some(hash) {
            return Ok(());
        }
        let new = self.path.with_extension("new");
        let mut file = fs::File::create(&new)?;
        file.write_all(&text)?;
        // On the disk before it takes the old one's name: a crash leaves one whole file or the other.
        file.sync_all()?;
        fs::rename(&new, &self.path)?;
        *written = Some(hash);
        Ok(())
    }
}

fn document(learnt: &Learnt, models: &BTreeMap<String, ModelId>) -> Document {
    let places: BTreeMap<ModelId, usize> = models.values().enumerate().map(|(place, &id)| (id, place)).collect();
    let scored = |scored: Scored| (scored.version.0, scored.score.get());
    let answers = learnt.samples.iter().map(|sample| {
        let place = sample.model.and_then(|model| places.get(&model).copied());
        (place, sample.score.map(scored), sample.output, sample.cut)
    });
    Document {
        format: FORMAT,
        gamma: learnt.gamma,
        models: models.keys().cloned().collect(),
        scores: learnt.scores.iter().copied().map(scored).collect(),
        answers: answers.collect(),
    }
}

fn understand(text: &[u8], id: impl Fn(&str) -> ModelId) -> Result<Learnt, Damage> {
    let document: Document = serde_json::from_slice(text)?;
    if document.format != FORMAT {
        return Err(Damage::Format(document.format));
    }
    let ids: Vec<ModelId> = document.models.iter().map(|name| id(name)).collect();
    let scored = |(version, score): (u32, f32)| Ok(Scored { score: Score::new(score).ok_or(Damage::NotANumber)?, version: RankerVersion(version) });
    let sample = |(place, score, output, cut): (Option<usize>, Option<(u32, f32)>, u32, bool)| {
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
