//! A model directory: read, verified, named. Nothing is served that has not passed every check here.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

use super::PromptText;
use super::batcher;
use super::encoder::Encoder;
use super::model::{Config, ENCODER, HEAD, Model};
use super::tokenizer::{Pieces, Tokenizer, Truncation};
use crate::config::Device;
use crate::scheduler::{Learnt, RankerVersion, Sample, Score, Scored};

/// The tensors.
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// The encoder's shape.
pub(crate) const CONFIG: &str = "config.json";
/// The tokenizer.
pub(crate) const TOKENIZER: &str = "tokenizer.json";
/// What was trained, how, and how to tell that it arrived whole.
pub(crate) const CARD: &str = "card.json";
/// How many answers each bin of the shipped calibration stands for: enough to order by from the first request, few enough to be outvoted within minutes.
const WORTH: usize = 16;
/// Layout of the directory that this program reads and writes.
pub(crate) const FORMAT: u32 = 1;

/// Why a ranker cannot be started or replaced.
#[derive(Debug, thiserror::Error)]
pub enum RankerError {
    #[error("cannot read {path}: {source}", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("card.json: {0}")]
    Card(String),
    #[error("{file} is not the file that the card was made for (SHA-256 {found}, not {expected})")]
    Hash { file: String, expected: String, found: String },
    #[error("config.json: {0}")]
    Config(String),
    #[error("tokenizer.json: {0}")]
    Tokenizer(String),
    #[error("model.safetensors: {0}")]
    Weights(String),
    #[error("model.safetensors: {0} holds a number that is not finite")]
    NotFinite(String),
    #[error("golden prompt {index} scores {found}, not {expected} as the card says")]
    Golden { index: usize, expected: f32, found: f32 },
    #[error("device: {0}")]
    Device(String),
    #[error("cannot start the ranker's threads: {0}")]
    Threads(std::io::Error),
    #[error("cannot score: {0}")]
    Compute(String),
    #[error("no ranker is running")]
    Off,
    #[error("there are no weights to go back to")]
    NoPrevious,
}

/// The largest tolerance of golden scores: what f16 weights and another engine's rounding explain, with room.
const LOOSEST: f32 = 0.05;

/// `card.json`: the model card, as far as it is read again. Free text and figures live in [`Card::about`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    /// Layout of the directory; this program reads 1.
    pub format: u32,
    pub name: String,
    pub truncation: Truncation,
    /// SHA-256 of the other files, in hex.
    pub files: BTreeMap<String, String>,
    /// Prompts whose scores are known; they find what a hash cannot: an engine that computes something else.
    pub golden: Vec<Golden>,
    /// Largest absolute difference of a golden score.
    pub tolerance: f32,
    /// What a score is worth in tokens before anything has been observed.
    pub calibration: Vec<Calibration>,
    /// Data, licences, settings and figures of the training.
    pub about: serde_json::Value,
}

impl Card {
    /// The card of a directory, whose other files nobody has looked at.
    pub(crate) fn read(directory: &Path) -> Result<Card, RankerError> {
        let card: Card = serde_json::from_slice(&read(directory, CARD)?).map_err(|error| RankerError::Card(error.to_string()))?;
        if card.format != FORMAT {
            return Err(RankerError::Card(format!("format {} is not one that this program reads ({FORMAT})", card.format)));
        }
        Ok(card)
    }

    /// Everything that decides a score names it, so that a restart with the same directory finds its calibration again.
    pub(crate) fn version(&self) -> RankerVersion {
        let name = digest(&SHA256, format!("{:?} {:?}", self.files, self.truncation).as_bytes());
        RankerVersion(name.as_ref().iter().take(4).fold(0, |version, byte| version << 8 | u32::from(*byte)))
    }

    /// What to expect of its scores before anything has been observed.
    fn prior(&self) -> Learnt {
        let version = self.version();
        let bins = self.calibration.iter().filter_map(|bin| Some((Scored { score: Score::new(bin.from_score)?, version }, bin.tokens)));
        let (mut scores, mut samples) = (Vec::new(), Vec::new());
        for (scored, output) in bins {
            scores.push(scored);
            samples.extend([Sample { model: None, score: Some(scored), output, cut: false }; WORTH]);
        }
        Learnt { scores, samples, gamma: None, speed: None }
    }
}

/// A prompt and its score.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Golden {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub system: String,
    pub user: String,
    pub score: f32,
}

/// Among the training prompts with scores from this one up to the next entry's, the typical answer length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Calibration {
    pub from_score: f32,
    /// Median output tokens.
    pub tokens: u32,
}

/// A verified directory, ready to score.
pub(crate) struct Package {
    tokenizer: Tokenizer,
    engine: Engine,
    card: Card,
    version: RankerVersion,
}

/// Who computes.
enum Engine {
    Cpu(Box<Encoder>),
    Gpu(Box<Model>),
}

impl Package {
    /// Reads and verifies: hashes, configuration, tokenizer, shapes, finite numbers, golden scores.
    pub(crate) fn load(directory: &Path, device: Device) -> Result<Package, RankerError> {
        let card = Card::read(directory)?;
        if card.golden.is_empty() {
            return Err(RankerError::Card("no golden prompts to verify the weights with".into()));
        }
        if !(0.0..=LOOSEST).contains(&card.tolerance) {
            return Err(RankerError::Card(format!("a tolerance of {} verifies nothing; it is at most {LOOSEST}", card.tolerance)));
        }
        let verified = |file: &str| -> Result<Vec<u8>, RankerError> {
            let bytes = read(directory, file)?;
            let expected = card.files.get(file).ok_or_else(|| RankerError::Card(format!("no hash of {file}")))?;
            let found = sha256(&bytes);
            if found == *expected { Ok(bytes) } else { Err(RankerError::Hash { file: file.into(), expected: expected.clone(), found }) }
        };
        let (config, tokenizer, weights) = (verified(CONFIG)?, verified(TOKENIZER)?, verified(WEIGHTS)?);
        let config = Config::from_json(&config)?;
        if card.truncation.pieces > config.max_position_embeddings {
            return Err(RankerError::Card(format!(
                "{} pieces for an encoder of {} positions",
                card.truncation.pieces, config.max_position_embeddings
            )));
        }
        let tokenizer = Tokenizer::from_json(&tokenizer, card.truncation)?;
        if tokenizer.vocabulary() > config.vocab_size {
            return Err(RankerError::Tokenizer(format!("{} pieces for an encoder of {}", tokenizer.vocabulary(), config.vocab_size)));
        }
        let device = open(device)?;
        let tensors = tensors(&weights)?;
        // As little as possible stands in memory twice.
        drop(weights);
        let engine = if device.is_cpu() {
            Engine::Cpu(Box::new(encoder(tensors, &config)?))
        } else {
            let vb = VarBuilder::from_tensors(tensors, DType::F32, &device);
            Engine::Gpu(Box::new(Model::new(&config, vb).map_err(|error| RankerError::Weights(error.to_string()))?))
        };
        let package = Package { tokenizer, engine, version: card.version(), card };
        package.verify_golden()?;
        Ok(package)
    }

    fn verify_golden(&self) -> Result<(), RankerError> {
        for (index, golden) in self.card.golden.iter().enumerate() {
            let text = PromptText { system: golden.system.clone(), user: golden.user.clone() }.excerpt();
            let found = self.score(&[self.tokenizer.pieces(&text)])?.into_iter().next().unwrap_or(f32::NAN);
            if found.is_nan() || (found - golden.score).abs() > self.card.tolerance {
                return Err(RankerError::Golden { index, expected: golden.score, found });
            }
        }
        Ok(())
    }

    pub(crate) fn score(&self, batch: &[Pieces]) -> Result<Vec<f32>, RankerError> {
        match &self.engine {
            Engine::Cpu(encoder) => encoder.scores(batch),
            Engine::Gpu(model) => model.forward(batch).and_then(|scores| scores.to_vec1()).map_err(|error| RankerError::Compute(error.to_string())),
        }
    }

    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    pub(crate) fn version(&self) -> RankerVersion {
        self.version
    }

    pub(crate) fn prior(&self) -> Learnt {
        self.card.prior()
    }

    pub(crate) fn on_gpu(&self) -> bool {
        matches!(self.engine, Engine::Gpu(_))
    }
}

impl batcher::Model for Package {
    fn pieces(&self, text: &PromptText) -> Pieces {
        self.tokenizer.pieces(text)
    }

    fn scores(&self, batch: &[Pieces]) -> Result<Vec<f32>, RankerError> {
        self.score(batch)
    }
}

/// The encoder of these tensors, which are in f32 on the CPU; each is let go as it is packed.
pub(crate) fn encoder(tensors: HashMap<String, Tensor>, config: &Config) -> Result<Encoder, RankerError> {
    let tensors = RefCell::new(tensors);
    Encoder::new(config, |name, shape| {
        let tensor = tensors.borrow_mut().remove(name).ok_or_else(|| RankerError::Weights(format!("there is no tensor {name}")))?;
        if tensor.dims() != shape {
            return Err(RankerError::Weights(format!("{name} has the shape {:?}, not {shape:?}", tensor.dims())));
        }
        tensor.flatten_all().and_then(|flat| flat.to_vec1()).map_err(|error| RankerError::Weights(error.to_string()))
    })
}

/// The reference model of these weights on the CPU.
pub(crate) fn reference(safetensors: &[u8], config: &Config) -> Result<Model, RankerError> {
    let vb = VarBuilder::from_tensors(tensors(safetensors)?, DType::F32, &candle_core::Device::Cpu);
    Model::new(config, vb).map_err(|error| RankerError::Weights(error.to_string()))
}

/// Hex SHA-256.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn read(directory: &Path, file: &str) -> Result<Vec<u8>, RankerError> {
    let path = directory.join(file);
    std::fs::read(&path).map_err(|source| RankerError::Read { path, source })
}

/// The tensors of a safetensors file in f32 on the CPU, under this program's names: a checkpoint may leave out the `bert.` prefix and may call a layer
/// norm's two halves gamma and beta.
pub(crate) fn tensors(safetensors: &[u8]) -> Result<HashMap<String, Tensor>, RankerError> {
    let broken = |error: candle_core::Error| RankerError::Weights(error.to_string());
    let mut tensors = HashMap::new();
    for (name, tensor) in candle_core::safetensors::load_buffer(safetensors, &candle_core::Device::Cpu).map_err(broken)? {
        // position_ids and the like: indices, not weights.
        if !tensor.dtype().is_float() {
            continue;
        }
        let name = match name.strip_suffix(".gamma").map(|stem| format!("{stem}.weight")) {
            Some(renamed) => renamed,
            None => name.strip_suffix(".beta").map_or(name.clone(), |stem| format!("{stem}.bias")),
        };
        let known = [ENCODER, HEAD].iter().any(|room| name.strip_prefix(room).is_some_and(|rest| rest.starts_with('.')));
        let name = if known { name } else { format!("{ENCODER}.{name}") };
        let tensor = tensor.to_dtype(DType::F32).map_err(broken)?;
        let finite = tensor.flatten_all().and_then(|flat| flat.to_vec1::<f32>()).map_err(broken)?.iter().all(|value| value.is_finite());
        if !finite {
            return Err(RankerError::NotFinite(name));
        }
        tensors.insert(name, tensor);
    }
    Ok(tensors)
}

/// The device, or why it is not there. `Auto` is the first GPU where this build has any use for one.
pub(crate) fn open(device: Device) -> Result<candle_core::Device, RankerError> {
    match device {
        Device::Cpu => Ok(candle_core::Device::Cpu),
        Device::Auto => candle_core::Device::cuda_if_available(0),
        Device::Cuda(index) => candle_core::Device::new_cuda(index),
    }
    .map_err(|error| RankerError::Device(error.to_string()))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::ranker::tokenizer::tests::tiny_json;

    pub(crate) const TINY: Config = Config {
        vocab_size: 16,
        hidden_size: 8,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        intermediate_size: 12,
        hidden_act: crate::ranker::model::Activation::Gelu,
        max_position_embeddings: 16,
        type_vocab_size: 2,
        layer_norm_eps: 1e-12,
        position_embedding_type: crate::ranker::model::Positions::Absolute,
        model_type: String::new(),
    };

    /// Tensors of the tiny shape.
    pub(crate) fn tiny_tensors(seed: u32) -> HashMap<String, Tensor> {
        arbitrary_tensors(&TINY, seed)
    }

    /// Tensors of this shape: arbitrary, reproducible, different for every seed.
    pub(crate) fn arbitrary_tensors(config: &Config, seed: u32) -> HashMap<String, Tensor> {
        let map = candle_nn::VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &candle_core::Device::Cpu);
        Model::new(config, vb).unwrap();
        let mut state = seed.wrapping_mul(2_654_435_761) | 1;
        let mut names: Vec<String> = map.data().lock().unwrap().keys().cloned().collect();
        names.sort();
        let mut noise = move |shape: &candle_core::Shape| {
            let values: Vec<f32> = (0..shape.elem_count())
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 8) as f32 / (1 << 23) as f32 - 1.0
                })
                .collect();
            Tensor::from_vec(values, shape, &candle_core::Device::Cpu).unwrap()
        };
        names.into_iter().map(|name| (name.clone(), noise(map.data().lock().unwrap()[&name].shape()))).collect()
    }

    /// Writes a directory that passes every check.
    pub(crate) fn tiny_directory(seed: u32) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let config = serde_json::to_vec(&Config { model_type: "bert".into(), ..TINY }).unwrap();
        let tensors = tiny_tensors(seed);
        let model = Model::new(&TINY, VarBuilder::from_tensors(tensors.clone(), DType::F32, &candle_core::Device::Cpu)).unwrap();
        std::fs::write(directory.path().join(CONFIG), config).unwrap();
        std::fs::write(directory.path().join(TOKENIZER), tiny_json()).unwrap();
        candle_core::safetensors::save(&tensors, directory.path().join(WEIGHTS)).unwrap();
        let truncation = Truncation { pieces: 12, system: 2 };
        let tokenizer = Tokenizer::from_json(&tiny_json(), truncation).unwrap();
        let golden = ["", "hello world", "a b c d e a b c d e a b c d e"].map(|user| {
            let text = PromptText { system: String::new(), user: user.into() };
            let score = model.forward(&[tokenizer.pieces(&text)]).unwrap().to_vec1().unwrap()[0];
            Golden { system: String::new(), user: user.into(), score }
        });
        write_card(
            directory.path(),
            &Card {
                format: FORMAT,
                name: "tiny".into(),
                truncation,
                files: BTreeMap::new(),
                golden: golden.into(),
                tolerance: 1e-4,
                calibration: Vec::new(),
                about: serde_json::Value::Null,
            },
        );
        directory
    }

    /// Writes the card with the hashes of the files as they are.
    fn write_card(directory: &Path, card: &Card) {
        let files = [CONFIG, TOKENIZER, WEIGHTS].map(|file| (file.to_owned(), sha256(&read(directory, file).unwrap())));
        let card = Card { files: files.into(), ..card.clone() };
        std::fs::write(directory.join(CARD), serde_json::to_vec(&card).unwrap()).unwrap();
    }

    fn card(directory: &Path) -> Card {
        serde_json::from_slice(&read(directory, CARD).unwrap()).unwrap()
    }

    fn refusal(directory: &Path) -> RankerError {
        match Package::load(directory, Device::Cpu) {
            Ok(_) => panic!("accepted"),
            Err(error) => error,
        }
    }

    #[test]
    fn the_shipped_calibration_orders_before_anything_was_seen() {
        let directory = tiny_directory(1);
        let bins = [(-1.0, 50), (0.5, 400)].map(|(from_score, tokens)| Calibration { from_score, tokens });
        write_card(directory.path(), &Card { calibration: bins.into(), ..card(directory.path()) });
        let package = Package::load(directory.path(), Device::Cpu).unwrap();
        let prior = package.prior();
        let scored = |score| Scored { score: Score::new(score).unwrap(), version: package.version() };
        assert_eq!(prior.scores, [scored(-1.0), scored(0.5)]);
        assert_eq!(prior.samples.len(), 2 * WORTH);
        assert_eq!(prior.samples[WORTH], Sample { model: None, score: Some(scored(0.5)), output: 400, cut: false });
    }

    #[test]
    fn the_version_names_the_weights() {
        let version = |seed| Package::load(tiny_directory(seed).path(), Device::Cpu).unwrap().version();
        assert_eq!(version(1), version(1));
        assert_ne!(version(1), version(2));
    }

    #[test]
    fn a_batch_scores_what_its_entries_score_alone() {
        let directory = tiny_directory(1);
        let package = Package::load(directory.path(), Device::Cpu).unwrap();
        let batch: Vec<Pieces> = ["", "a", "hello worlds a b", "a b c d e a b c d e a b c d e"]
            .map(|user| package.tokenizer.pieces(&PromptText { system: String::new(), user: user.into() }))
            .into();
        let together = package.score(&batch).unwrap();
        for (pieces, together) in batch.iter().zip(together) {
            let alone = package.score(std::slice::from_ref(pieces)).unwrap()[0];
            assert!((alone - together).abs() < 1e-5, "{alone} alone, {together} in a batch");
        }
    }

    #[test]
    fn damage_of_any_file_is_found_and_named() {
        for file in [CONFIG, TOKENIZER, WEIGHTS] {
            let directory = tiny_directory(1);
            let path = directory.path().join(file);
            let mut bytes = std::fs::read(&path).unwrap();
            let last = bytes.len() - 2;
            bytes[last] ^= 1;
            std::fs::write(&path, bytes).unwrap();
            assert!(matches!(refusal(directory.path()), RankerError::Hash { file: found, .. } if found == file));
            std::fs::remove_file(&path).unwrap();
            assert!(matches!(refusal(directory.path()), RankerError::Read { path: found, .. } if found == path));
        }
    }

    #[test]
    fn wrong_files_are_found_though_their_hashes_are_right() {
        let with_tensors = |change: &dyn Fn(&mut HashMap<String, Tensor>)| {
            let directory = tiny_directory(1);
            let mut tensors = tiny_tensors(1);
            change(&mut tensors);
            candle_core::safetensors::save(&tensors, directory.path().join(WEIGHTS)).unwrap();
            write_card(directory.path(), &card(directory.path()));
            refusal(directory.path())
        };
        let full = |value: f32, shape: (usize, usize)| Tensor::full(value, shape, &candle_core::Device::Cpu).unwrap();
        let error = with_tensors(&|tensors| drop(tensors.insert("head.weight".into(), full(f32::NAN, (1, 8)))));
        assert!(matches!(&error, RankerError::NotFinite(name) if name == "head.weight"), "{error}");
        let error = with_tensors(&|tensors| drop(tensors.insert("head.weight".into(), full(1.0, (1, 7)))));
        assert!(matches!(&error, RankerError::Weights(reason) if reason.contains("head.weight")), "{error}");
        let error = with_tensors(&|tensors| drop(tensors.remove("bert.encoder.layer.1.output.dense.bias")));
        assert!(matches!(&error, RankerError::Weights(reason) if reason.contains("layer.1.output.dense.bias")), "{error}");
        let error = with_tensors(&|tensors| *tensors = tiny_tensors(2));
        assert!(matches!(error, RankerError::Golden { index: 0, .. }), "{error}");

        let directory = tiny_directory(1);
        let weights = read(directory.path(), WEIGHTS).unwrap();
        std::fs::write(directory.path().join(WEIGHTS), &weights[..weights.len() / 2]).unwrap();
        write_card(directory.path(), &card(directory.path()));
        assert!(matches!(refusal(directory.path()), RankerError::Weights(_)));

        let directory = tiny_directory(1);
        let swapped = String::from_utf8(tiny_json()).unwrap().replace(r#""hello":13"#, r#""hello":8"#).replace(r#""a":8"#, r#""a":13"#);
        std::fs::write(directory.path().join(TOKENIZER), swapped).unwrap();
        write_card(directory.path(), &card(directory.path()));
        assert!(matches!(refusal(directory.path()), RankerError::Golden { index: 1, .. }));
    }

    #[test]
    fn a_card_that_does_not_fit_is_refused() {
        let with_card = |change: &dyn Fn(&mut Card)| {
            let directory = tiny_directory(1);
            let mut card = card(directory.path());
            change(&mut card);
            std::fs::write(directory.path().join(CARD), serde_json::to_vec(&card).unwrap()).unwrap();
            refusal(directory.path())
        };
        assert!(matches!(with_card(&|card| card.format = 2), RankerError::Card(_)));
        assert!(matches!(with_card(&|card| card.tolerance = 1e9), RankerError::Card(_)));
        assert!(matches!(with_card(&|card| card.golden.clear()), RankerError::Card(_)));
        assert!(matches!(with_card(&|card| card.files.clear()), RankerError::Card(_)));
        assert!(matches!(with_card(&|card| card.truncation.pieces = 17), RankerError::Card(_)));
        assert!(matches!(with_card(&|card| card.golden[2].score += 0.01), RankerError::Golden { index: 2, .. }));
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_gpu_that_this_build_cannot_use_is_an_error() {
        assert!(matches!(open(Device::Cuda(0)), Err(RankerError::Device(_))));
        assert!(open(Device::Auto).unwrap().is_cpu());
    }
}
