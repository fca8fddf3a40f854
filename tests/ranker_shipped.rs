//! The ranker that ships: it loads, computes what PyTorch computes, orders obvious cases and is small.
#![cfg(feature = "gateway")]
#![allow(clippy::unwrap_used)] // A test fails by panicking.

use std::path::Path;

use headway::config::{Device, RankerSettings};
use headway::ranker::encoder::Encoder;
use headway::ranker::model::{Config, Model};
use headway::ranker::tokenizer::Pieces;
use headway::ranker::{Opinion, PromptText, Ranker};

const SHIPPED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/pars");

/// A prompt as tests/ranker_reference.py left it.
#[derive(serde::Deserialize)]
struct Reference {
    prompt: String,
    /// Its word pieces, special ones included.
    pieces: Vec<u32>,
    /// Its score in f32 by PyTorch and transformers.
    score: f32,
}

fn references() -> Vec<Reference> {
    serde_json::from_str(include_str!("ranker_reference.json")).unwrap()
}

fn ranker() -> Ranker {
    let deadline = Some(std::time::Duration::from_secs(3600));
    Ranker::start(RankerSettings { weights: SHIPPED.into(), device: Device::Cpu, deadline, threads: 1, shadow: None }).unwrap()
}

async fn score(ranker: &Ranker, user: &str) -> f32 {
    match ranker.score(PromptText { system: String::new(), user: user.into() }).await {
        Opinion::Scored(scored) => scored.score.get(),
        Opinion::Neutral(neutral) => panic!("{user:?}: {neutral:?}"),
    }
}

/// The shipped weights as they serve on a CPU, and in candle.
fn encoders() -> (Encoder, Model) {
    let config = Config::from_json(&std::fs::read(Path::new(SHIPPED).join("config.json")).unwrap()).unwrap();
    let tensors = candle_core::safetensors::load(Path::new(SHIPPED).join("model.safetensors"), &candle_core::Device::Cpu).unwrap();
    let encoder = Encoder::new(&config, |name, shape| {
        assert_eq!(tensors[name].dims(), shape, "{name}");
        Ok(tensors[name].to_dtype(candle_core::DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap())
    });
    let vb = candle_nn::VarBuilder::from_tensors(tensors.clone(), candle_core::DType::F32, &candle_core::Device::Cpu);
    (encoder.unwrap(), Model::new(&config, vb).unwrap())
}

#[test]
fn both_encoders_compute_what_pytorch_computes() {
    let (encoder, model) = encoders();
    let references = references();
    assert_eq!(references.len(), 50);
    for batch in references.chunks(16) {
        let pieces: Vec<Pieces> = batch.iter().map(|reference| Pieces::of_ids(reference.pieces.clone())).collect();
        for scores in [encoder.scores(&pieces).unwrap(), model.forward(&pieces).unwrap().to_vec1().unwrap()] {
            for (reference, score) in batch.iter().zip(scores) {
                assert!((reference.score - score).abs() < 1e-4, "{:?}: {score}, not {}", reference.prompt, reference.score);
            }
        }
    }
}

#[test]
fn prompts_of_any_length_score_the_same_in_both_encoders_alone_and_in_a_batch() {
    let (encoder, model) = encoders();
    let lengths = (1..=128).step_by(3).chain([128]);
    let prompts: Vec<Pieces> =
        lengths.map(|length| Pieces::of_ids((0..length).map(|at| 1996 + (at * 37 + length * 101) % 20_000).collect())).collect();
    let together = encoder.scores(&prompts).unwrap();
    for (pieces, together) in prompts.iter().zip(together) {
        let alone = encoder.scores(std::slice::from_ref(pieces)).unwrap()[0];
        let expected = model.forward(std::slice::from_ref(pieces)).unwrap().to_vec1::<f32>().unwrap()[0];
        let length = pieces.len();
        assert!((alone - expected).abs() < 1e-4, "{length} pieces: {alone}, not {expected}");
        assert!((alone - together).abs() < 1e-5, "{length} pieces: {alone} alone, {together} in a batch");
    }
}

#[tokio::test]
async fn text_in_score_out_is_what_pytorch_and_its_tokenizer_say() {
    let ranker = ranker();
    for reference in references() {
        let score = score(&ranker, &reference.prompt).await;
        assert!((reference.score - score).abs() < 1e-4, "{:?}: {score}, not {}", reference.prompt, reference.score);
    }
}

#[tokio::test]
async fn what_obviously_asks_for_more_scores_higher() {
    let ranker = ranker();
    let pairs = [
        ("What is the capital of France? Answer in one word.", "Write a detailed 2000 word essay about the French Revolution."),
        ("What is 2 + 2?", "Write a complete snake game in Python with comments."),
        ("Yes or no: is the sky blue?", "Write a long story about a dragon who learns to cook."),
        ("Translate 'hello' to Spanish.", "Create a detailed 30-day workout and meal plan for a beginner."),
    ];
    for (short, long) in pairs {
        let (short_score, long_score) = (score(&ranker, short).await, score(&ranker, long).await);
        assert!(short_score < long_score, "{short:?} {short_score} and {long:?} {long_score}");
    }
}

#[tokio::test]
async fn any_text_of_any_script_gets_a_finite_score() {
    let ranker = ranker();
    // Sixty letters out of every kibi of code points, up to the emoji: every living script and many that are not.
    let scripts = (0..0x1fc00u32).step_by(0x400).map(|block| (block..block + 0x400).step_by(17).filter_map(char::from_u32).collect::<String>());
    let odd =
        [String::new(), " \n\t".into(), "[CLS] [SEP] [MASK]".into(), "\u{0}\u{fffd}\u{202e}".into(), "e\u{301}".repeat(3000), "a ".repeat(1 << 19)];
    for text in scripts.chain(odd) {
        assert!(score(&ranker, &text).await.is_finite(), "{:?}", text.chars().take(80).collect::<String>());
    }
}

#[test]
fn the_directory_is_at_most_50_megabytes() {
    let bytes: u64 = std::fs::read_dir(SHIPPED).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
    assert!(bytes <= 50_000_000, "{bytes}");
}
