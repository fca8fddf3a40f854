//! `headway simulate` as people run it: the shipped scenarios are valid, and all three reports say the same.
#![cfg(feature = "gateway")]
#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn headway(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_headway")).arg("simulate").args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A scenario small enough for a debug build.
const SMALL: &str = "
workload: { requests: 300, prompt: { median: 100, sigma: 0.5 }, output: { median: 40, sigma: 1.0, longest: 400 }, load: 0.9, scores: { tau: 0.5 }, tenants: [{ name: chat }, { name: batch, flood: 60, at: 2s }] }
fleet: [{ engine: small, sequences: 8 }, { engine: medium, sequences: 4 }]
policies: [round-robin, least-loaded, fcfs, sjf, headway, oracle-boost]
gammas: [0.1, 1]
";

#[test]
fn reports_compare_policies_on_the_same_requests() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).display().to_string();
    let (scenario, json, html, answers) = (file("small.yaml"), file("small.json"), file("small.html"), file("answers.csv"));
    fs::write(&scenario, SMALL).unwrap();
    let reports = || headway(&[&scenario, "--seed", "5", "--check", "--json", &json, "--html", &html, "--answers", &answers]);
    let output = reports();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for name in [
        "round-robin",
        "least-loaded",
        "fcfs",
        "sjf",
        "headway",
        "oracle-boost",
        "headway@0.1",
        "headway@1",
        "p99.9",
        "overtaken",
        "Jain",
        "headway, batch",
    ] {
        assert!(table.contains(name), "{name} in {table}");
    }

    let report: serde_json::Value = serde_json::from_str(&fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!((report["seed"].as_u64(), report["requests"].as_u64()), (Some(5), Some(360)));
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 8);
    for run in runs {
        assert_eq!(run["ttlt_seconds"]["count"].as_u64(), Some(360), "{}", run["policy"]);
        let tenants = run["tenants"].as_array().unwrap();
        assert!(tenants[0]["tenant"] == "chat" && tenants[1]["ttlt_seconds"]["count"].as_u64() == Some(60), "{tenants:?}");
        assert!((0.5..=1.0).contains(&run["jain"].as_f64().unwrap()), "{}", run["jain"]);
        assert_eq!(run["unanswered"].as_u64(), Some(0), "{}", run["policy"]);
    }
    // The same requests, so the same tokens.
    let mean = |policy: &str| runs.iter().find(|run| run["policy"] == policy).and_then(|run| run["ttlt_seconds"]["mean"].as_f64()).unwrap();
    assert!(mean("sjf") < mean("fcfs"), "{table}");

    let answers = fs::read_to_string(&answers).unwrap();
    let rows = answers.lines().skip(1).map(|row| row.split(',').collect::<Vec<_>>()).filter(|row| row[0] == "headway");
    let ttlt: Vec<f64> = rows.map(|row| row[4].parse().unwrap()).collect();
    assert!(ttlt.len() == 360 && (ttlt.iter().sum::<f64>() / 360.0 - mean("headway")).abs() < 1e-5, "{}", ttlt.len());

    let page = fs::read_to_string(&html).unwrap();
    assert!(page.matches("<svg ").count() == 5 && page.matches("</svg>").count() == 5 && page.ends_with("</html>\n"));
    // Shown without a network, and without a script.
    assert!(!page.contains("http") && !page.contains("<script"));

    let read = |name: &str| fs::read_to_string(name).unwrap();
    let before = (table, read(&json), page);
    assert_eq!((text(&reports().stdout), read(&json), read(&html)), before, "a seed replays all reports");

    let again = file("again.json");
    assert!(headway(&[&scenario, "--seed", "5", "--json", &again, "--policy", "headway, fcfs"]).status.success());
    let again: serde_json::Value = serde_json::from_str(&read(&again)).unwrap();
    assert_eq!(again["runs"].as_array().unwrap().len(), 2, "the scenario's gammas are left out");
    let headways = runs.iter().find(|run| run["policy"] == "headway").unwrap();
    assert_eq!(again["runs"][0]["ttlt_seconds"], headways["ttlt_seconds"], "a seed replays a run");
}

#[test]
fn mistakes_say_where_and_what_to_write_instead() {
    let dir = tempfile::tempdir().unwrap();
    let scenario = dir.path().join("wrong.yaml").display().to_string();
    fs::write(&scenario, SMALL.replace("load: 0.9", "load: much").replace("engine: medium", "engine: medum")).unwrap();
    let output = headway(&[&scenario]);
    let said = text(&output.stderr);
    assert!(!output.status.success());
    for part in ["wrong.yaml:2:", "workload.load: expected a number", "fleet[1].engine", "did you mean medium?"] {
        assert!(said.contains(part), "{part} in {said}");
    }
    assert!(text(&headway(&["no-such.yaml"]).stderr).contains("examples/scenarios/"));
    assert!(text(&headway(&[&scenario, "--fuzz", "3"]).stderr).contains("cannot be used with"));
}

#[test]
fn seeds_are_tried_by_the_dozen() {
    let output = headway(&["--fuzz", "12", "--seed", "7"]);
    let said = text(&output.stdout);
    assert!(output.status.success() && said.starts_with("12 seeds from 7: nothing broke in"), "{said}{}", text(&output.stderr));
}

#[test]
fn shipped_scenarios_are_valid() {
    let mut found = 0;
    for entry in fs::read_dir(Path::new("examples/scenarios")).unwrap() {
        let path = entry.unwrap().path();
        // A policy that is not there is found last, when all else has been read.
        let output = headway(&[&path.display().to_string(), "--policy", "no-such-policy"]);
        assert!(text(&output.stderr).contains("there is no policy \"no-such-policy\""), "{}: {}", path.display(), text(&output.stderr));
        found += 1;
    }
    assert!(found >= 8);
}
