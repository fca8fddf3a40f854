//! How good a ranker is: per source and model, beside what prompt length alone would say and what another model's true lengths say.

use std::collections::BTreeMap;
use std::path::PathBuf;

use clap::Args;

use super::dataset::Example;
use super::metrics::{Agreement, agreement};
use crate::config::Device;
use crate::ranker::tokenizer::Pieces;
use crate::ranker::weights::Package;

/// Groups with fewer prompts are left out: their figures are noise.
const FEWEST: usize = 20;
/// Pairs whose lengths differ by less than this share do not count for the accuracy.
const DELTA: f64 = 0.2;

/// Measure a ranker on prompts with observed answer lengths
#[derive(Args, Debug)]
pub struct EvaluateArgs {
    /// Data in the format of `train`
    #[arg(long, required = true)]
    data: Vec<PathBuf>,
    /// A ranker's directory
    #[arg(long, default_value = "models/pars")]
    model: PathBuf,
    /// Only the percentage of prompts that `train` held out; 100 for all
    #[arg(long, default_value_t = 15)]
    holdout: u8,
    /// Only models whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// Models shown per source, those with the most prompts first
    #[arg(long, default_value_t = 4)]
    models: usize,
    /// cpu, auto or cuda:N
    #[arg(long, default_value = "cpu", value_parser = super::device)]
    device: Device,
}

/// One line of the table.
struct Line {
    prompts: usize,
    ranker: Agreement,
    /// Order by prompt length instead.
    naive: f64,
    /// Order by the median of the other models' true lengths instead; `None` where no other answered these prompts.
    ceiling: Option<f64>,
}

/// Prints the table.
///
/// # Errors
/// The ranker or the data cannot be read.
pub fn evaluate(args: &EvaluateArgs) -> anyhow::Result<()> {
    let package = Package::load(&args.model, args.device)?;
    let mut examples = super::load(&args.data)?;
    examples.retain(|example| example.place() < args.holdout);
    let scores = scores(&package, &examples)?;
    println!("{:<28} {:<38} {:>6} {:>7} {:>7} {:>7} {:>8} {:>7}", "source", "model", "n", "tau-b", "pairs", "naive", "ceiling", "share");
    let mut sources: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, example) in examples.iter().enumerate() {
        sources.entry(&example.source).or_default().push(index);
    }
    let all: Vec<usize> = (0..examples.len()).collect();
    let several = sources.len() > 1;
    for (source, members) in sources.into_iter().chain(several.then_some(("(all)", all))) {
        let mut models: BTreeMap<&str, usize> = BTreeMap::new();
        for name in members.iter().flat_map(|index| examples[*index].lengths.keys()) {
            *models.entry(name).or_default() += 1;
        }
        let mut models: Vec<(&str, usize)> =
            models.into_iter().filter(|(name, _)| args.only.as_ref().is_none_or(|only| name.contains(only.as_str()))).collect();
        models.sort_by_key(|(name, count)| (std::cmp::Reverse(*count), *name));
        for (model, _) in models.into_iter().take(args.models) {
            let Some(line) = line(&examples, &scores, &members, model) else { continue };
            let (ceiling, share) = match line.ceiling {
                Some(ceiling) => (format!("{ceiling:.3}"), format!("{:.2}", line.ranker.tau / ceiling)),
                None => ("-".into(), "-".into()),
            };
            println!(
                "{source:<28} {model:<38} {:>6} {:>7.3} {:>7.3} {:>7.3} {ceiling:>8} {share:>7}",
                line.prompts, line.ranker.tau, line.ranker.accuracy, line.naive
            );
        }
    }
    Ok(())
}

fn scores(package: &Package, examples: &[Example]) -> anyhow::Result<Vec<f64>> {
    let mut pieces: Vec<(usize, Pieces)> = examples.iter().map(|example| package.tokenizer().pieces(&example.text)).enumerate().collect();
    pieces.sort_by_key(|(_, pieces)| pieces.len());
    let mut scores = vec![0.0; examples.len()];
    for chunk in pieces.chunks(32) {
        let batch: Vec<Pieces> = chunk.iter().map(|(_, pieces)| pieces.clone()).collect();
        for ((index, _), score) in chunk.iter().zip(package.score(&batch)?) {
            scores[*index] = f64::from(score);
        }
    }
    Ok(scores)
}

fn line(examples: &[Example], scores: &[f64], members: &[usize], model: &str) -> Option<Line> {
    let members: Vec<usize> = members.iter().copied().filter(|index| examples[*index].lengths.contains_key(model)).collect();
    if members.len() < FEWEST {
        return None;
    }
    let log = |length: u32| f64::from(length).ln();
    let lengths: Vec<f64> = members.iter().map(|index| log(examples[*index].lengths[model])).collect();
    let ranks: Vec<f64> = members.iter().map(|index| scores[*index]).collect();
    let naive: Vec<f64> = members.iter().map(|index| examples[*index].text.user.len() as f64).collect();
    let others: Option<Vec<f64>> = members
        .iter()
        .map(|index| {
            let others: Vec<f64> = examples[*index].lengths.iter().filter(|(name, _)| *name != model).map(|(_, length)| log(*length)).collect();
            (!others.is_empty()).then(|| super::dataset::median(others))
        })
        .collect();
    Some(Line {
        prompts: members.len(),
        ranker: agreement(&ranks, &lengths, DELTA),
        naive: agreement(&naive, &lengths, DELTA).tau,
        ceiling: others.map(|others| agreement(&others, &lengths, DELTA).tau),
    })
}
