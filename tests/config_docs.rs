//! The example is valid, and the reference describes every field that the program reads.
#![cfg(feature = "gateway")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use headway::config;

#[test]
fn the_example_passes_its_own_check() {
    let summary = config::check(Path::new("config/headway.yaml")).unwrap_or_else(|error| panic!("{error}"));
    assert!(summary.contains("pool chat: policy headway"), "{summary}");
}

#[test]
fn the_example_states_the_defaults() {
    let snapshot = config::load(Path::new("config/headway.yaml")).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!((snapshot.listen, snapshot.admin), (config::DEFAULT_LISTEN, config::DEFAULT_ADMIN));
    assert_eq!(snapshot.edge, config::Edge::default());
    assert_eq!(snapshot.pools[0].limits, config::DEFAULT_LIMITS);
    assert_eq!(snapshot.pools[0].timeouts, config::Timeouts::default());
}

/// Field names by structure, from the source of what users write.
fn fields_read() -> BTreeMap<String, BTreeSet<String>> {
    let source = fs::read_to_string("src/config/raw.rs").expect("the source is there");
    let mut structures: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut current = None;
    for line in source.lines() {
        if let Some(rest) = line.strip_prefix("pub(super) struct ") {
            // `Leaf` is how a value is held, not something users write.
            current = rest.strip_suffix(" {").filter(|name| !name.contains('<'));
        } else if line == "}" {
            current = None;
        } else if let (Some(structure), Some((name, _))) = (current, line.trim().strip_prefix("pub ").and_then(|field| field.split_once(": "))) {
            structures.entry(structure.to_owned()).or_default().insert(name.to_owned());
        }
    }
    structures
}

/// Field names by heading, from the tables of the reference.
fn fields_described() -> BTreeMap<String, BTreeSet<String>> {
    let reference = fs::read_to_string("docs/configuration.md").expect("the reference is there");
    let mut sections: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut heading = String::new();
    for line in reference.lines() {
        if line.starts_with('#') {
            heading = line.trim_start_matches(['#', ' ']).to_owned();
        } else if let Some((field, _)) = line.strip_prefix("| `").and_then(|row| row.split_once('`')) {
            sections.entry(heading.clone()).or_default().insert(field.to_owned());
        }
    }
    sections
}

#[test]
fn the_reference_describes_every_field_and_no_other() {
    let headings = [
        ("File", "The file"),
        ("Tls", "`tls`"),
        ("Ranker", "`ranker`"),
        ("Telemetry", "`telemetry`"),
        ("Otlp", "`telemetry.otlp`"),
        ("Keys", "`keys`"),
        ("KeysFile", "The keys file"),
        ("Tenant", "`tenants[]`"),
        ("TenantLimits", "`tenants[].limits`"),
        ("TrainingLog", "`training_log`"),
        ("UsageLog", "`usage_log`"),
        ("AccessLog", "`access_log`"),
        ("Edge", "`edge`"),
        ("Limits", "`limits` (top level, and per pool)"),
        ("Timeouts", "`timeouts` (top level, and per pool)"),
        ("Pool", "`pools[]`"),
        ("SlowStream", "`pools[].slow_stream`"),
        ("Model", "`pools[].models[]`, the long form"),
        ("QueueLimits", "`limits` of a key or a model"),
        ("Key", "`tenants[].keys[]`, the long form"),
        ("Backend", "`pools[].backends[]`"),
        ("Slots", "`slots`, the long form"),
        ("Policy", "Policy files"),
        ("Gamma", "`gamma`, the long form"),
        ("Aging", "`aging`"),
    ];
    let (read, mut described) = (fields_read(), fields_described());
    assert_eq!(read.keys().map(String::as_str).collect::<BTreeSet<_>>(), headings.iter().map(|(structure, _)| *structure).collect());
    for (structure, heading) in headings {
        let section = described.remove(heading).unwrap_or_default();
        assert_eq!(read[structure], section, "{structure} in src/config/raw.rs (left) and {heading} in docs/configuration.md (right)");
    }
    assert!(described.is_empty(), "tables under headings that no structure stands for: {described:?}");
}
