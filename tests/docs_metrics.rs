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
    for file in [
        "examples/prometheus/alerts.yaml",
        "examples/grafana/headway.json",
        "docs/runbook.md",
        "docs/admin.md",
        "README.md",
        "docs/ranker.md",
        "docs/configuration.md",
    ] {
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

/// What a dashboard needs to be imported: every panel has a place and an id of its own, and every query something to ask of the chosen data source.
#[cfg(feature = "gateway")]
#[test]
fn the_dashboard_is_whole() {
    let dashboard: serde_json::Value = serde_json::from_str(&read("examples/grafana/headway.json")).expect("it is JSON");
    let panels = dashboard["panels"].as_array().expect("it has panels");
    let (mut ids, mut places, mut queries) = (BTreeSet::new(), BTreeSet::new(), 0);
    for panel in panels {
        let title = &panel["title"];
        assert!(ids.insert(panel["id"].as_u64()), "{title}: its id is another's");
        let [x, y, w, h] = ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().unwrap_or_else(|| panic!("{title}: no {side}")));
        assert!(x + w <= 24, "{title}: wider than the page");
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(places.insert(cell), "{title}: over another panel");
        }
        for target in panel["targets"].as_array().into_iter().flatten() {
            let query = target["expr"].as_str().unwrap_or_default();
            assert!(query.contains("headway_") && query.matches('(').count() == query.matches(')').count(), "{title}: {query}");
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{title}");
            queries += 1;
        }
    }
    assert!(queries > panels.len(), "{queries}");
    // Counters have a suffix in series that their family does not have in the table: one without it would show nothing.
    let page = read("docs/metrics.md");
    let kinds = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `headway_"))
        .filter_map(|row| Some((row.split_once('`')?.0, row.split('|').nth(1)?.trim())));
    let text = read("examples/grafana/headway.json");
    for (name, kind) in kinds {
        let ends: BTreeSet<&str> = text
            .split(&format!("headway_{name}"))
            .skip(1)
            .map(|rest| rest.split(|c: char| !(c.is_ascii_lowercase() || c == '_')).next().unwrap_or(""))
            .collect();
        let wanted: &[&str] = match kind {
            "counter" => &["_total"],
            "histogram" => &["_bucket"],
            _ => &[""],
        };
        // `headway_waiting` also begins the names of others.
        let own = ends.into_iter().filter(|end| ["", "_total", "_bucket", "_sum", "_count"].contains(end));
        let wrong: Vec<&str> = own.filter(|end| !wanted.contains(end)).collect();
        assert!(wrong.is_empty(), "headway_{name} is a {kind}, and the dashboard asks for it with {wrong:?}");
    }
}
