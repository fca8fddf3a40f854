//! How good a ranker is: per source and model, beside what prompt length alone would say and what another model's true lengths say.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use rayon::prelude::*;

use super::dataset::Example;
use super::metrics::{Agreement, agreement, interval};
use super::plot;
use crate::config::Device;
use crate::ranker::tokenizer::Pieces;
use crate::ranker::weights::Package;

/// Groups with fewer prompts are left out: their figures are noise.
const FEWEST: usize = 20;
/// Pairs whose lengths differ by less than this share do not count for the accuracy.
const DELTA: f64 = 0.2;
/// Name of the group of all prompts.
const ALL: &str = "(all)";

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
    /// Only sources whose name contains this; may be given several times
    #[arg(long)]
    source: Vec<String>,
    /// Only models whose name contains this
    #[arg(long)]
    only: Option<String>,
    /// Models shown per source, those with the most prompts first
    #[arg(long, default_value_t = 4)]
    models: usize,
    /// The ceiling is the order by this model's true lengths; by default by the median of all other models' lengths
    #[arg(long)]
    ceiling: Option<String>,
    /// Repeats the intervals
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Draw the table into this file
    #[arg(long)]
    svg: Option<PathBuf>,
    /// cpu, auto or cuda:N
    #[arg(long, default_value = "cpu", value_parser = super::device)]
    device: Device,
}

/// One line of the table.
#[derive(Debug, PartialEq, serde::Serialize)]
pub(super) struct Line {
    pub source: String,
    pub model: String,
    pub prompts: usize,
    /// Kendall's tau-b of scores and lengths.
    pub tau: f64,
    /// Its middle 95 % over resamples of the prompts.
    pub interval: (f64, f64),
    /// Share of the pairs that differ by at least a fifth of the longer and are ordered rightly.
    pub pairs: f64,
    /// tau-b of the order by prompt length.
    pub prompt_length: f64,
    /// tau-b of the order by another model's, or the others', true lengths; `None` where no other answered these prompts.
    pub ceiling: Option<f64>,
}

impl Line {
    /// Share of the ceiling.
    fn share(&self) -> Option<f64> {
        self.ceiling.map(|ceiling| self.tau / ceiling)
    }
}

/// Prints the table.
///
/// # Errors
/// The ranker or the data cannot be read, or nothing is left to measure.
pub fn evaluate(args: &EvaluateArgs) -> anyhow::Result<()> {
    let package = Package::load(&args.model, args.device)?;
    let mut examples = super::load(&args.data)?;
    examples
        .retain(|example| example.place() < args.holdout && (args.source.is_empty() || args.source.iter().any(|part| example.source.contains(part))));
    let scores = scores(&package, &examples)?;
    let lines = lines(&examples, &scores, args);
    ensure!(!lines.is_empty(), "no model answered {FEWEST} of the {} prompts that --holdout, --source and --only leave", examples.len());
    if args.json {
        println!("{}", serde_json::to_string_pretty(&lines)?);
    } else {
        print(&lines);
    }
    if let Some(path) = &args.svg {
        std::fs::write(path, plot::svg(&lines)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn print(lines: &[Line]) {
    println!(
        "{:<26} {:<34} {:>6} {:>6}  {:<15} {:>6} {:>7} {:>7} {:>6}",
        "source", "model", "n", "tau-b", "95 %", "pairs", "prompt", "ceiling", "share"
    );
    for line in lines {
        let figure = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.3}"));
        let interval = format!("{:.3} to {:.3}", line.interval.0, line.interval.1);
        println!(
            "{:<26} {:<34} {:>6} {:>6.3}  {interval:<15} {:>6.3} {:>7.3} {:>7} {:>6}",
            line.source,
            line.model,
            line.prompts,
            line.tau,
            line.pairs,
            line.prompt_length,
            figure(line.ceiling),
            figure(line.share())
        );
    }
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

/// Per source, and over all sources, the models with the most prompts.
fn lines(examples: &[Example], scores: &[f64], args: &EvaluateArgs) -> Vec<Line> {
    let mut sources: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (index, example) in examples.iter().enumerate() {
        sources.entry(&example.source).or_default().push(index);
    }
    let several = sources.len() > 1;
    let all: Vec<usize> = (0..examples.len()).collect();
    let mut wanted = Vec::new();
    for (source, members) in sources.into_iter().chain(several.then_some((ALL, all))) {
        let mut models: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for index in members {
            for name in examples[index].lengths.keys().filter(|name| args.only.as_ref().is_none_or(|only| name.contains(only.as_str()))) {
                models.entry(name).or_default().push(index);
            }
        }
        let mut models: Vec<(&str, Vec<usize>)> = models.into_iter().filter(|(_, members)| members.len() >= FEWEST).collect();
        models.sort_by_key(|(name, members)| (std::cmp::Reverse(members.len()), *name));
        wanted.extend(models.into_iter().take(args.models).map(|(model, members)| (source, model, members)));
    }
    wanted.into_par_iter().map(|(source, model, members)| line(examples, scores, &members, source, model, args)).collect()
}

fn line(examples: &[Example], scores: &[f64], members: &[usize], source: &str, model: &str, args: &EvaluateArgs) -> Line {
    let log = |length: u32| f64::from(length).ln();
    let lengths: Vec<f64> = members.iter().map(|index| log(examples[*index].lengths[model])).collect();
    let scores: Vec<f64> = members.iter().map(|index| scores[*index]).collect();
    let sizes: Vec<f64> = members.iter().map(|index| examples[*index].text.user.len() as f64).collect();
    let others: Option<Vec<f64>> = members
        .iter()
        .map(|index| {
            let counts = |name: &str| name != model && args.ceiling.as_ref().is_none_or(|ceiling| name == ceiling);
            let others: Vec<f64> = examples[*index].lengths.iter().filter(|(name, _)| counts(name)).map(|(_, length)| log(*length)).collect();
            (!others.is_empty()).then(|| super::dataset::median(others))
        })
        .collect();
    let Agreement { tau, accuracy } = agreement(&scores, &lengths, DELTA);
    Line {
        source: source.into(),
        model: if model.is_empty() { "(unnamed)".into() } else { model.into() },
        prompts: members.len(),
        tau,
        interval: interval(&scores, &lengths, args.seed),
        pairs: accuracy,
        prompt_length: agreement(&sizes, &lengths, DELTA).tau,
        ceiling: others.map(|others| agreement(&others, &lengths, DELTA).tau),
    }
}

#[cfg(test)]
mod tests {
    use super::super::dataset::tests::example;
    use super::*;

    fn args(more: &[&str]) -> EvaluateArgs {
        #[derive(clap::Parser)]
        struct Command {
            #[command(flatten)]
            args: EvaluateArgs,
        }
        <Command as clap::Parser>::parse_from([&["evaluate", "--data", "none"], more].concat()).args
    }

    /// Prompts that grow with their answers; n answers twice as long as m, o says nothing.
    fn examples() -> Vec<Example> {
        (0..40u32)
            .map(|index| {
                let mut example = example(&"x".repeat(index as usize), &[("m", 100 + index), ("n", 200 + 2 * index), ("o", 50 + (index * 7) % 40)]);
                example.source = if index % 2 == 0 { "even" } else { "odd" }.into();
                example
            })
            .collect()
    }

    #[test]
    fn every_model_of_every_source_has_a_line_and_so_have_all_together() {
        let scores: Vec<f64> = (0..40).map(|index| f64::from(-index)).collect();
        let lines = lines(&examples(), &scores, &args(&["--ceiling", "n"]));
        let names: Vec<(&str, &str, usize)> = lines.iter().map(|line| (line.source.as_str(), line.model.as_str(), line.prompts)).collect();
        let expected = ["even", "odd", ALL].map(|source| ["m", "n", "o"].map(|model| (source, model, if source == ALL { 40 } else { 20 })));
        assert_eq!(names, expected.concat());
        assert_eq!((lines[0].tau, lines[0].prompt_length, lines[0].ceiling), (-1.0, 1.0, Some(1.0)));
        // n has no other n to be compared with.
        assert_eq!(lines[1].ceiling, None);
        assert!(lines[2].ceiling.unwrap().abs() < 0.5, "{:?}", lines[2]);
    }

    #[test]
    fn what_is_not_asked_for_is_left_out() {
        let lines = lines(&examples()[..39], &[0.0; 40], &args(&["--only", "o", "--models", "1"]));
        // Nineteen odd prompts are too few.
        let names: Vec<(&str, &str)> = lines.iter().map(|line| (line.source.as_str(), line.model.as_str())).collect();
        assert_eq!(names, [("even", "o"), (ALL, "o")]);
    }
}
