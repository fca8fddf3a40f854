//! A trained ranker as a directory that the gateway serves.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{DType, Tensor};

use super::dataset::median;
use crate::config::Device;
use crate::ranker::PromptText;
use crate::ranker::model::Config;
use crate::ranker::tokenizer::{Tokenizer, Truncation};
use crate::ranker::weights::{CARD, CONFIG, Calibration, Card, FORMAT, Golden, Package, RankerError, TOKENIZER, WEIGHTS, read, sha256};

/// Scores of the same weights on another device or through a fused path may differ by this much.
const TOLERANCE: f32 = 2e-3;
/// Bins of the calibration that ships with the weights.
const BINS: usize = 12;

/// Prompts that verify a copy of the weights: every kind of text that could be read differently by a damaged or different engine.
const GOLDEN: [(&str, &str); 12] = [
    ("", ""),
    ("", "Hi"),
    ("", "What is the capital of Portugal? One word only."),
    ("", "Write a detailed essay of at least two thousand words about the history of lighthouses."),
    ("", "Translate to German: The ferry leaves at nine."),
    ("You are a helpful assistant.", "Explain step by step how a four-stroke engine works, with an analogy for each stroke."),
    ("", "def area(r):\n    return 3.14 * r ** 2\n\nAdd type hints and a docstring, and write ten unit tests."),
    ("Answer as a terse senior engineer.", "Is it safe to call free() twice on the same pointer?"),
    ("", "[CLS] [SEP] [MASK] [PAD]"),
    ("", "请用三句话概括《红楼梦》的主要情节。"),
    ("", "🦀🦀🦀 what do these have in common? 🐍"),
    (
        "",
        "Below is a report.\n\nThe harbour committee met on Tuesday. Attendance was low because of the storm, and two members joined by telephone. The first \
         item was the dredging of the north channel, which has silted up faster than the survey of last year predicted; the contractor offers to begin in \
         May, at a price one tenth above the estimate. The second item was the new crane. Its foundations are finished, the electrical work is not, and the \
         supplier asks for another six weeks. The third item was a complaint of the fishing co-operative about the noise of the pumps at night. The chair \
         proposed to enclose them; the engineer doubts that the motors would stay cool. A decision was put off until the measurements are in. Finally the \
         treasurer presented the accounts, which were approved without a question.\n\nSummarise the report in one sentence.",
    ),
];

/// A place to stop at, whatever went wrong.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("cannot write {path}: {source}", path = path.display())]
    Write { path: std::path::PathBuf, source: std::io::Error },
    #[error("cannot convert the weights: {0}")]
    Convert(#[from] candle_core::Error),
    #[error(transparent)]
    Ranker(#[from] RankerError),
}

/// What goes into a directory.
pub struct Export<'a> {
    pub name: &'a str,
    pub config: &'a Config,
    pub tokenizer: &'a [u8],
    pub truncation: Truncation,
    pub tensors: BTreeMap<String, Tensor>,
    /// Scores and logarithms of lengths that the calibration is taken from.
    pub observed: (&'a [f64], &'a [f64]),
    pub about: serde_json::Value,
}

/// Writes the directory (weights in f16), then loads it the way the gateway does.
///
/// # Errors
/// A file cannot be written, or what was written does not verify.
pub fn export(directory: &Path, export: Export) -> Result<(), ExportError> {
    let write = |file: &str, bytes: &[u8]| {
        let path = directory.join(file);
        std::fs::write(&path, bytes).map_err(|source| ExportError::Write { path, source })
    };
    std::fs::create_dir_all(directory).map_err(|source| ExportError::Write { path: directory.into(), source })?;
    write(CONFIG, &pretty(export.config))?;
    write(TOKENIZER, export.tokenizer)?;
    let half: HashMap<String, Tensor> =
        export.tensors.into_iter().map(|(name, tensor)| Ok((name, tensor.to_dtype(DType::F16)?))).collect::<Result<_, candle_core::Error>>()?;
    candle_core::safetensors::save(&half, directory.join(WEIGHTS))?;

    let tokenizer = Tokenizer::from_json(export.tokenizer, export.truncation)?;
    let scorer = crate::ranker::weights::reference(&read(directory, WEIGHTS)?, export.config)?;
    let golden = GOLDEN
        .iter()
        .map(|(system, user)| {
            let text = PromptText { system: (*system).into(), user: (*user).into() };
            let score = scorer.forward(&[tokenizer.pieces(&text)])?.to_vec1()?[0];
            Ok(Golden { system: text.system, user: text.user, score })
        })
        .collect::<Result<_, candle_core::Error>>()?;
    let files = [CONFIG, TOKENIZER, WEIGHTS].map(|file| Ok((file.to_owned(), sha256(&read(directory, file)?))));
    let card = Card {
        format: FORMAT,
        name: export.name.into(),
        truncation: export.truncation,
        files: files.into_iter().collect::<Result<_, RankerError>>()?,
        golden,
        tolerance: TOLERANCE,
        calibration: calibration(export.observed.0, export.observed.1),
        about: export.about,
    };
    write(CARD, &pretty(&card))?;
    Package::load(directory, Device::Cpu)?;
    Ok(())
}

fn pretty(value: &impl serde::Serialize) -> Vec<u8> {
    let mut json = serde_json::to_vec_pretty(value).unwrap_or_default();
    json.push(b'\n');
    json
}

/// Bins of equal count over the scores, with the median length of each.
fn calibration(scores: &[f64], lengths: &[f64]) -> Vec<Calibration> {
    let mut observed: Vec<(f64, f64)> = scores.iter().copied().zip(lengths.iter().copied()).collect();
    observed.sort_by(|a, b| a.0.total_cmp(&b.0));
    observed
        .chunks(observed.len().div_ceil(BINS).max(1))
        .map(|bin| Calibration { from_score: bin[0].0 as f32, tokens: median(bin.iter().map(|(_, length)| *length).collect()).exp().round() as u32 })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calibration_has_the_median_length_of_each_share_of_the_scores() {
        let scores: Vec<f64> = (0..120).map(f64::from).rev().collect();
        let lengths: Vec<f64> = scores.iter().map(|score| (score + 1.0).ln()).collect();
        let bins = calibration(&scores, &lengths);
        assert_eq!(bins.len(), BINS);
        assert_eq!((bins[0].from_score, bins[0].tokens), (0.0, 5));
        assert_eq!((bins[11].from_score, bins[11].tokens), (110.0, 115));
    }
}
