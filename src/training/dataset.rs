//! Observed answer lengths, one JSON object a line, and the one number per prompt that a ranker learns from them.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::ranker::PromptText;

/// Longer answers are taken for a mistake of the row.
const LONGEST: i64 = 10_000_000;

/// A prompt and how long answers to it were.
#[derive(Clone, Debug, PartialEq)]
pub struct Example {
    pub text: PromptText,
    /// Output tokens by model.
    pub lengths: BTreeMap<String, u32>,
    /// Where the row comes from; evaluation reports by it.
    pub source: String,
}

impl Example {
    /// A place in 0..100 that depends on the prompt alone, so that a prompt held out once is held out by every command.
    pub fn place(&self) -> u8 {
        let hash = ring::digest::digest(&ring::digest::SHA256, self.text.user.trim().as_bytes());
        let hash = hash.as_ref().iter().take(8).fold(0u64, |hash, byte| hash << 8 | u64::from(*byte));
        (hash % 100) as u8
    }
}

/// Why a file gives no data.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("cannot read {path}: {source}", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} has no usable row ({skipped} skipped)", path = path.display())]
    Empty { path: PathBuf, skipped: usize },
}

/// What a file held.
#[derive(Debug, Default)]
pub struct Dataset {
    pub examples: Vec<Example>,
    /// Rows left out: the line, counted from 1, and why.
    pub skipped: Vec<(usize, String)>,
}

/// A line as users write it. Other fields are free.
#[derive(Deserialize)]
struct Row {
    prompt: String,
    #[serde(default)]
    system: String,
    /// One observed length, of an unnamed model.
    length: Option<serde_json::Number>,
    /// Observed lengths by model.
    #[serde(default)]
    lens: BTreeMap<String, Option<serde_json::Number>>,
    #[serde(default)]
    source: String,
}

/// Reads JSONL: `{"prompt": .., "length": n}` or `{"prompt": .., "lens": {"model": n, ..}}`, with `system` and `source` if there is any.
///
/// # Errors
/// The file cannot be read or no row of it is usable. Bad rows are skipped and listed.
pub fn read(path: &Path) -> Result<Dataset, DataError> {
    let broken = |source| DataError::Read { path: path.into(), source };
    let file = std::fs::File::open(path).map_err(broken)?;
    let mut dataset = Dataset::default();
    for (index, line) in std::io::BufReader::new(file).split(b'\n').enumerate() {
        let line = line.map_err(broken)?;
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match parse(&line) {
            Ok(example) => dataset.examples.push(example),
            Err(reason) => dataset.skipped.push((index + 1, reason)),
        }
    }
    if dataset.examples.is_empty() {
        return Err(DataError::Empty { path: path.into(), skipped: dataset.skipped.len() });
    }
    Ok(dataset)
}

fn parse(line: &[u8]) -> Result<Example, String> {
    let row: Row = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    let single = row.length.map(|length| (String::new(), Some(length)));
    let mut lengths = BTreeMap::new();
    for (model, length) in row.lens.into_iter().chain(single) {
        // A model that gave no answer is no fault of the row.
        let Some(length) = length else { continue };
        let tokens = length.as_i64().ok_or_else(|| format!("length {length} is not a whole number"))?;
        if !(1..=LONGEST).contains(&tokens) {
            return Err(format!("length {tokens} is not between 1 and {LONGEST}"));
        }
        lengths.insert(model, tokens as u32);
    }
    if lengths.is_empty() {
        return Err("no length".into());
    }
    Ok(Example { text: PromptText { system: row.system, user: row.prompt }.excerpt(), lengths, source: row.source })
}

/// Per example, the logarithm of the length that a typical model answers with.
///
/// Models differ by a factor and so do samples: the median over models, each freed of its own factor, has far less noise than any one length. The
/// factors come from prompts that several models answered; where only one did, its length stands as it is.
pub fn consensus(examples: &[Example]) -> Vec<f64> {
    let mut factors: BTreeMap<&str, f64> = BTreeMap::new();
    let mut typical: Vec<f64> = examples.iter().map(|example| typical_of(example, &factors)).collect();
    // Alternating medians settle within a few rounds.
    for _ in 0..8 {
        let mut differences: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (example, typical) in examples.iter().zip(&typical).filter(|(example, _)| example.lengths.len() > 1) {
            for (model, &length) in &example.lengths {
                differences.entry(model).or_default().push(f64::from(length).ln() - typical);
            }
        }
        factors = differences.into_iter().map(|(model, differences)| (model, median(differences))).collect();
        typical = examples.iter().map(|example| typical_of(example, &factors)).collect();
    }
    typical
}

/// Per example a number, the same for all whose lengths can be compared: a chain of models that answered both ends links them. Between groups a difference
/// in length may be the models' alone.
pub fn groups(examples: &[Example]) -> Vec<usize> {
    // Each model points to a model of its group; the group's first points to itself.
    let mut towards: BTreeMap<&str, &str> = BTreeMap::new();
    fn first<'a>(towards: &BTreeMap<&'a str, &'a str>, mut model: &'a str) -> &'a str {
        while let Some(next) = towards.get(model).filter(|next| **next != model) {
            model = next;
        }
        model
    }
    for example in examples {
        let mut to = None;
        for model in example.lengths.keys() {
            let root = first(&towards, model);
            let to = *to.get_or_insert(root);
            towards.insert(root, to);
            towards.insert(model, to);
        }
    }
    let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
    let group = |example: &Example| {
        let root =
            example.lengths.keys().next().map_or("", |model| first(&towards, towards.get_key_value(model.as_str()).map_or("", |(model, _)| *model)));
        let next = numbers.len();
        *numbers.entry(root).or_insert(next)
    };
    examples.iter().map(group).collect()
}

fn typical_of(example: &Example, factors: &BTreeMap<&str, f64>) -> f64 {
    median(example.lengths.iter().map(|(model, &length)| f64::from(length).ln() - factors.get(model.as_str()).unwrap_or(&0.0)).collect())
}

/// Zero for no values.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    values.sort_by(f64::total_cmp);
    (values[(values.len() - 1) / 2] + values[values.len() / 2]) / 2.0
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn example(user: &str, lengths: &[(&str, u32)]) -> Example {
        Example {
            text: PromptText { system: String::new(), user: user.into() },
            lengths: lengths.iter().map(|(model, length)| ((*model).into(), *length)).collect(),
            source: String::new(),
        }
    }

    #[test]
    fn bad_rows_are_named_and_good_ones_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("data.jsonl");
        let rows = [
            r#"{"prompt": "a", "length": 12, "extra": true}"#,
            r#"{"prompt": "b", "lens": {"m": 3, "n": null}, "source": "s"}"#,
            "",
            r#"{"prompt": "c"}"#,
            r#"{"prompt": "d", "length": 0}"#,
            r#"{"prompt": "e", "length": -4}"#,
            r#"{"prompt": "f", "length": 1e30}"#,
            r#"{"length": 3}"#,
            "{\"prompt\": \"line\u{2028}separator\", \"length\": 5}",
            r#"{"prompt": "g", "length": 99999999999}"#,
        ];
        std::fs::write(&path, rows.join("\n")).unwrap();
        let dataset = read(&path).unwrap();
        let prompts: Vec<&str> = dataset.examples.iter().map(|example| example.text.user.as_str()).collect();
        assert_eq!(prompts, ["a", "b", "line\u{2028}separator"]);
        assert_eq!(dataset.examples[1].lengths, BTreeMap::from([("m".into(), 3)]));
        let lines: Vec<usize> = dataset.skipped.iter().map(|(line, _)| *line).collect();
        assert_eq!(lines, [4, 5, 6, 7, 8, 10]);
        std::fs::write(&path, "nonsense").unwrap();
        assert!(matches!(read(&path), Err(DataError::Empty { skipped: 1, .. })));
    }

    #[test]
    fn consensus_frees_lengths_of_each_models_own_factor() {
        // n answers twice as long as m; the prompt only n answered is not taken for a longer one.
        let examples = [
            example("a", &[("m", 100), ("n", 200)]),
            example("b", &[("m", 10), ("n", 20)]),
            example("c", &[("m", 50), ("n", 100)]),
            example("d", &[("n", 200)]),
        ];
        let typical = consensus(&examples);
        assert!((typical[0] - typical[3]).abs() < 1e-9, "{typical:?}");
        assert!((typical[0] - typical[1] - 10f64.ln()).abs() < 1e-9, "{typical:?}");
    }

    #[test]
    fn lengths_are_comparable_where_a_chain_of_models_links_them() {
        let examples = [
            example("a", &[("m", 1), ("n", 1)]),
            example("b", &[("p", 1)]),
            example("c", &[("o", 1)]),
            example("d", &[("q", 1)]),
            example("e", &[("n", 1), ("o", 1)]),
            example("f", &[("m", 1)]),
        ];
        assert_eq!(groups(&examples), [0, 1, 0, 2, 0, 0]);
    }

    #[test]
    fn a_prompt_is_held_out_whatever_surrounds_it() {
        assert_eq!(example("hello", &[("m", 1)]).place(), example(" hello\n", &[("n", 7)]).place());
    }
}
