//! YAML text to the raw structures; its errors to problems with a field path and a hint. The only place that knows the YAML crate's errors.

use std::path::Path;

use serde::de::DeserializeOwned;
use serde_path_to_error::{Segment, Track};
use serde_yaml::Error;

use super::error::Problem;
use super::near::near;

/// Reads one document.
pub(crate) fn parse<T: DeserializeOwned>(file: &Path, text: &str) -> Result<T, Problem> {
    let mut track = Track::new();
    // Snippets would quote the line, and a line may hold a secret.
    let options = serde_yaml::options! { with_snippet: false, strict_booleans: true };
    let parsed = serde_yaml::with_deserializer_from_str_with_options(text, options, |yaml| {
        T::deserialize(serde_path_to_error::Deserializer::new(yaml, &mut track))
    });
    parsed.map_err(|error| problem(file, track, &error))
}

fn problem(file: &Path, track: Track, error: &Error) -> Problem {
    let (message, hint) = explain(error.without_snippet());
    Problem { file: file.to_owned(), position: error.location().map(|at| (at.line(), at.column())), field: field_path(track.path()), message, hint }
}

/// `pools[0].backends[1]`. A located value appears to serde as a struct with a field `value`; no field of ours is called that.
fn field_path(path: serde_path_to_error::Path) -> String {
    let mut out = String::new();
    for segment in path.iter() {
        match segment {
            Segment::Seq { index } => out.push_str(&format!("[{index}]")),
            Segment::Map { key } if key != "value" => {
                if !out.is_empty() {
                    out.push('.');
                }
                out.push_str(key);
            }
            Segment::Map { .. } | Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    out
}

fn explain(error: &Error) -> (String, String) {
    match error {
        Error::SerdeUnknownField { field, expected, .. } => {
            let hint = match near(field, expected.iter().copied()).first() {
                Some(close) => format!("did you mean {close}? There are: {}", expected.join(", ")),
                None => format!("there are: {}", expected.join(", ")),
            };
            (format!("there is no field {field:?}"), hint)
        }
        Error::SerdeMissingField { field, .. } => (format!("the field {field:?} is missing"), example_of(field).into()),
        Error::DuplicateMappingKey { key: Some(key), .. } => (format!("{key:?} is written twice"), "keep one of them".into()),
        Error::SerdeInvalidType { expected, .. } | Error::SerdeInvalidValue { expected, .. } => (
            format!("expected {}", plain(expected)),
            "docs/configuration.md, or docs/simulator.md for a scenario, has an example of every field".into(),
        ),
        Error::Unexpected { expected, .. } => {
            (format!("expected {}", plain(expected)), "check the indentation, and that a list item begins with a dash".into())
        }
        Error::AliasError { error, .. } => explain(error),
        Error::Eof { .. } => (
            "the file is empty".into(),
            "at least pools (a configuration), tenants (a keys file), order (a policy) or workload and fleet (a scenario) must be there".into(),
        ),
        other => {
            // The crate's own words, without the position that the problem already has.
            let whole = other.to_string();
            let first = whole.lines().next().unwrap_or_default();
            let words = first.split_once(": ").filter(|(head, _)| head.starts_with("error: line")).map_or(first, |(_, tail)| tail);
            (words.to_owned(), "check quotes, brackets and indentation around here".into())
        }
    }
}

/// The names of Rust types mean nothing to whoever writes YAML.
fn plain(expected: &str) -> &str {
    if expected.starts_with("struct") || expected.contains("mapping") {
        "a mapping (name: value)"
    } else if expected.contains("sequence") {
        "a list (- item)"
    } else if expected.contains("string") || expected.contains("scalar") {
        "a single value"
    } else {
        expected
    }
}

fn example_of(field: &str) -> &'static str {
    match field {
        "pools" => {
            "a pool names models and backends:\n    pools:\n      - name: chat\n        models: [my-model]\n        backends: [{ url: \"http://127.0.0.1:8000\" }]"
        }
        "backends" => "backends: [{ url: \"http://127.0.0.1:8000\" }]",
        "url" => "url: \"http://127.0.0.1:8000\"",
        "order" => "order: headway",
        "workload" => "workload: { trace: requests.csv, load: 0.8 }",
        "fleet" => "fleet: [{ engine: medium }]",
        "engine" => "engine: medium",
        "tenants" => "tenants: [{ name: search, keys: [SHA-256 of a key, as headway key new prints it] }]",
        "keys" => "keys: [SHA-256 of a key, as headway key new prints it]",
        "weights" => "weights: a model directory, for example ../models/pars",
        _ => "",
    }
}
