//! The table of metrics, the alert rules and the runbook name what there is: the three cannot drift from the program or from each other.

use std::collections::BTreeSet;
use std::fs;

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Families that the program registers: the first text of each `register`, and the unit where there is one.
fn registered() -> BTreeSet<String> {
    let mut families = BTreeSet::new();
    for file in ["src/telemetry/metrics.rs", "src/admin/metrics.rs"] {
        let source = read(file);
        for call in source.split("registry.register").skip(1) {
            let (with_unit, arguments) = match call.strip_prefix("_with_unit(") {
                Some(arguments) => (true, arguments),
                None => (false, call.trim_start_matches('(')),
            };
            let name = arguments.split('"').nth(1).expect("a name is the first argument");
            let unit = match with_unit {
                true if arguments.split(';').next().is_some_and(|call| call.contains("Unit::Seconds")) => "_seconds",
                true if arguments.split(';').next().is_some_and(|call| call.contains("Unit::Bytes")) => "_bytes",
                true => panic!("{file}: {name} has another unit"),
                false => "",
            };
            families.insert(format!("headway_{name}{unit}"));
        }
    }
    families
}

/// Families that docs/metrics.md describes.
fn described() -> BTreeSet<String> {
    let page = read("docs/metrics.md");
    page.lines().filter_map(|line| line.strip_prefix("| `headway_")?.split_once('`')).map(|(name, _)| format!("headway_{name}")).collect()
}

/// Every `headway_...` in a text, less what a series adds to its family's name.
fn named(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).filter(|word| word.starts_with("headway_"));
    let family = |word: &str| {
        let ends = ["_total", "_bucket", "_sum", "_count", "_info"];
        ends.iter().find_map(|end| word.strip_suffix(end)).unwrap_or(word).to_owned()
    };
    words.map(family).collect()
}

fn alerts() -> BTreeSet<String> {
    read("examples/prometheus/alerts.yaml").lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).map(str::to_owned).collect()
}

#[test]
fn every_family_is_described_and_no_other() {
    let registered = registered();
    assert!(registered.len() > 40, "{registered:?}");
    assert_eq!(registered, described(), "registered (left) and described in docs/metrics.md (right)");
}

#[test]
fn alerts_and_runbook_name_what_there_is() {
    let described = described();
    for file in ["examples/prometheus/alerts.yaml", "docs/runbook.md", "README.md", "docs/ranker.md", "docs/configuration.md"] {
        let named = named(&read(file));
        let unknown: Vec<&String> = named.difference(&described).collect();
        assert!(unknown.is_empty(), "{file} names {unknown:?}, which docs/metrics.md does not describe");
    }
}

#[test]
fn every_alert_has_its_section_and_every_section_its_alert() {
    let sections: BTreeSet<String> = read("docs/runbook.md").lines().filter_map(|line| line.strip_prefix("## ")).map(str::to_owned).collect();
    assert_eq!(alerts(), sections, "alerts (left) and sections of docs/runbook.md (right)");
}
