//! Whole files in, snapshots or problems out.

use std::fs;
use std::time::Duration;

use super::*;
use crate::fleet::EngineKind;
use crate::scheduler::{Gamma, Slots};

fn environment(name: &str) -> Option<String> {
    match name {
        "KEY" => Some("sk-from-env".into()),
        "PORT" => Some("8123".into()),
        _ => None,
    }
}

/// Loads `text` as headway.yaml, in a folder that holds `files` too.
fn load_text(text: &str, files: &[(&str, &str)]) -> Result<Snapshot, ConfigError> {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    let path = dir.path().join("headway.yaml");
    fs::write(&path, text).unwrap();
    load_with(&path, &environment)
}

const POOL: &str = "pools: [{ name: chat, models: [m], backends: [{ url: 'http://127.0.0.1:8000' }] }]\n";

/// The only problem of `text`, as (line, column, field, message, hint).
fn only_problem(text: &str) -> (u64, u64, String, String, String) {
    let error = load_text(text, &[]).unwrap_err();
    let [problem] = error.problems() else { panic!("expected one problem, got {error}") };
    let (line, column) = problem.position.unwrap_or_default();
    (line, column, problem.field.clone(), problem.message.clone(), problem.hint.clone())
}

#[test]
fn a_small_file_gets_the_defaults() {
    let snapshot = load_text(POOL, &[]).unwrap();
    assert_eq!(snapshot.listen, DEFAULT_LISTEN);
    assert_eq!(snapshot.admin, DEFAULT_ADMIN);
    assert_eq!(snapshot.edge, Edge::default());
    assert_eq!(snapshot.pools[0].timeouts, Timeouts::default());
    assert_eq!(snapshot.pools[0].policy.name, "headway");
    assert_eq!(snapshot.models["m"], Route { pool: 0, upstream: None });
    assert!(snapshot.ranker.is_none());
}

#[test]
fn a_full_file_is_read_as_written() {
    let text = r#"
listen: 127.0.0.1:${PORT}
admin: 127.0.0.1:9099
threads: 3
policy: fcfs
state: kept
training_log: { file: rows.jsonl, max_size: 2MiB }
usage_log: { file: usage.jsonl }
access_log: { file: access.jsonl, keep: 3 }
edge: { max_body: 1MiB, max_body_total: 64MiB, max_head: 16KiB, head_timeout: 3s, body_timeout: 4s, drain: 5s, half_close: true, headers: false, keepalive: 20s, sessions: user }
limits: { queue_requests: 10, queue_bytes: 8MiB }
timeouts: { queue: 30s }
pools:
  - name: chat
    policy: my/own.yaml
    models: [llama, { name: gpt-4o, upstream: llama }]
    limits: { max_output: 100 }
    timeouts: { connect: 15ms }
    retries: 0
    retry_budget: 7
    backends:
      - { url: "http://10.0.0.1:8000", slots: auto }
      - { url: "http://10.0.0.2:30000", engine: sglang, slots: 64, weight: 2, api_key: "${KEY}", kv_tokens: 5000, prefix_cache: false, priority: true }
      - { url: "http://10.0.0.3:1", slots: { initial: 4, max: 16 }, api_key_file: secrets/key }
  - name: any
    resume: true
    slow_stream: { tokens_per_second: 0.5 }
    backends: [{ url: "http://10.0.0.4:1" }]
"#;
    let snapshot = load_text(
        text,
        &[
            ("my/own.yaml", "order: pars\ngamma: { target: tail }\nmax_overtake: 10m\naging: { threshold: 60s, share: 0.5 }\noverload: false\n"),
            ("secrets/key", "sk-from-file\n"),
        ],
    )
    .unwrap();
    assert_eq!(snapshot.listen.port(), 8123);
    assert_eq!(snapshot.threads, 3);
    assert!(snapshot.state.as_ref().unwrap().ends_with("kept"));
    let log = snapshot.training_log.as_ref().unwrap();
    assert!(log.file.ends_with("rows.jsonl") && log.max_size == 2 << 20);
    let log = snapshot.usage_log.as_ref().unwrap();
    assert!(log.file.ends_with("usage.jsonl") && log.max_size == 64 << 20);
    let log = snapshot.access_log.as_ref().unwrap();
    assert!(log.file.ends_with("access.jsonl") && (log.max_size, log.keep) == (64 << 20, 3));
    assert_eq!(snapshot.policy.name, "fcfs");
    assert_eq!(snapshot.edge.max_body, 1 << 20);
    assert!(snapshot.edge.half_close && !snapshot.edge.headers);
    assert_eq!((snapshot.edge.keepalive.unwrap().as_secs(), snapshot.edge.sessions), (20, Sessions::User));
    let chat = &snapshot.pools[0];
    assert_eq!(chat.policy.name, "own");
    assert_eq!(chat.limits, crate::scheduler::Limits { queue_requests: 10, queue_bytes: 8 << 20, max_output: 100 });
    assert_eq!(chat.timeouts.connect.as_millis(), 15);
    assert_eq!(chat.timeouts.queue.as_secs(), 30);
    assert_eq!((chat.retries, chat.retry_budget, chat.resume), (0, 7, false));
    assert_eq!(snapshot.models["gpt-4o"], Route { pool: 0, upstream: Some("llama".into()) });
    assert_eq!(chat.backends[0].slots, None);
    let second = &chat.backends[1];
    assert_eq!((second.engine, second.slots, second.weight.get()), (Some(EngineKind::Sglang), Some(Slots::Fixed(64)), 2.0));
    assert_eq!((second.kv_tokens, second.prefix_cache, second.priority), (Some(5000), Some(false), true));
    assert_eq!(second.api_key.as_ref().unwrap().expose(), "sk-from-env");
    let third = &chat.backends[2];
    assert_eq!(third.slots, Some(Slots::Auto { initial: 4, max: 16 }));
    assert_eq!(third.api_key.as_ref().unwrap().expose(), "sk-from-file");
    assert!(snapshot.pools[1].models.is_empty() && snapshot.pools[1].resume);
    assert_eq!(snapshot.pools[1].slow_stream, Some(SlowStream { tokens_per_second: 0.5, over: DEFAULT_SLOW_OVER }));
    assert_eq!(snapshot.sources.len(), 3, "{:?}", snapshot.sources);
    let shown = format!("{snapshot:?}");
    assert!(!shown.contains("sk-from"), "a secret shows itself");
}

#[test]
fn every_built_in_policy_is_valid() {
    for name in built_in_policies() {
        assert_eq!(policy(name).unwrap().name, name);
    }
    assert_eq!(NamedPolicy::default().name, "headway");
}

#[test]
fn every_mistake_in_values_is_reported_at_once() {
    let text = r#"
listen: 8080
policy: headwy
limits: { queue_requests: 0 }
timeouts: { queue: 15 }
pools:
  - name: chat room
    models: [m]
    backends:
      - { url: "10.0.0.1:8000", slots: many, api_key: "${NOPE}" }
      - { url: "http://10.0.0.2:8000", engine: vlm, api_key_file: missing.txt }
"#;
    let error = load_text(text, &[]).unwrap_err();
    let found: Vec<(u64, &str)> = error.problems().iter().map(|p| (p.position.unwrap().0, p.field.as_str())).collect();
    let expected = [
        (2, "listen"),
        (3, "policy"),
        (4, "limits.queue_requests"),
        (5, "timeouts.queue"),
        (7, "pools[0].name"),
        (10, "pools[0].backends[0].url"),
        (10, "pools[0].backends[0].slots"),
        (10, "pools[0].backends[0].api_key"),
        (11, "pools[0].backends[1].engine"),
        (11, "pools[0].backends[1].api_key_file"),
    ];
    assert_eq!(found, expected, "{error}");
    let shown = error.to_string();
    for hint in ["did you mean headway?", "write 1 to 10000000", "write 15s", "write http://10.0.0.1:8000", "NOPE is not set", "did you mean vllm?"] {
        assert!(shown.contains(hint), "{hint} is not in\n{shown}");
    }
    assert!(shown.contains("headway.yaml:10:"), "{shown}");
}

#[test]
fn an_unknown_field_names_the_near_one() {
    let (line, column, field, message, hint) = only_problem(&format!("{POOL}polcy: fcfs\n"));
    assert_eq!((line, column), (2, 1));
    assert_eq!(field, "polcy");
    assert_eq!(message, "there is no field \"polcy\"");
    assert!(hint.starts_with("did you mean policy?"), "{hint}");

    let (line, _, field, _, hint) = only_problem("pools:\n  - name: chat\n    backends:\n      - url: http://a:1\n        slot: 3\n");
    assert_eq!(line, 5);
    assert_eq!(field, "pools[0].backends[0].slot");
    assert!(hint.starts_with("did you mean slots?"), "{hint}");
}

#[test]
fn structural_mistakes_have_a_place_and_a_hint() {
    let cases = [
        ("listen: 1.2.3.4:5\n", (1, ""), "the field \"pools\" is missing"),
        ("pools:\n  - name: a\n", (2, "pools[0]"), "the field \"backends\" is missing"),
        ("pools: chat\n", (1, "pools"), "a list"),
        ("pools: [{name: a, backends: http://a}]\n", (1, "pools[0].backends"), "a list"),
        ("pools: []\n", (1, "pools"), "there is no pool"),
        ("pools: [{name: a, backends: []}]\n", (1, "pools[0].backends"), "no backend"),
        ("pools: [{name: a, retries: 0, resume: true, backends: [{url: \"http://a:1\"}]}]\n", (1, "pools[0].resume"), "retries is 0"),
        ("pools: []\npools: []\n", (2, ""), "written twice"),
        ("tls: yes\npools: []\n", (1, "tls"), "a mapping"),
        ("pools: [{name: [a], backends: []}]\n", (1, "pools[0].name"), "a single value"),
    ];
    for (text, (line, field), message) in cases {
        let problem = only_problem(text);
        assert!((problem.0, problem.2.as_str()) == (line, field) && problem.3.contains(message), "{text:?} gave {problem:?}");
    }
}

#[test]
fn what_is_not_yaml_is_a_problem_with_a_place() {
    for text in ["pools: [", "a: b: c", "\tx: 1", "pools: &a [*a]", "\u{0}", "- 1\n- 2", "''", "{{{{"] {
        let error = load_text(text, &[]).unwrap_err();
        assert_eq!(error.problems().len(), 1);
        assert!(error.problems()[0].position.is_some(), "{text:?}: {error}");
    }
    assert!(load_text("", &[]).unwrap_err().to_string().contains("pools"));
}

#[test]
fn files_that_unfold_without_end_are_refused() {
    let deep = "[".repeat(100_000);
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..12 {
        bomb += &format!("a{level}: &a{level} [{}]\n", format!("*a{}, ", level - 1).repeat(10));
    }
    bomb += "pools: *a11\n";
    for text in [deep, bomb] {
        assert_eq!(load_text(&text, &[]).unwrap_err().problems().len(), 1);
    }
}

#[test]
fn a_file_that_is_missing_or_not_text() {
    let error = load(Path::new("/nowhere/headway.yaml")).unwrap_err();
    assert!(error.to_string().contains("--backend"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.yaml");
    fs::write(&path, b"pools: \xff\xfe").unwrap();
    assert!(load(&path).unwrap_err().to_string().contains("UTF-8"));
}

#[test]
fn names_are_unique() {
    let two = |first: &str, second: &str| format!("pools:\n  - {first}\n  - {second}\n");
    let (line, _, field, message, _) =
        only_problem(&two("{ name: a, models: [m], backends: [{ url: 'http://a' }] }", "{ name: a, models: [n], backends: [{ url: 'http://b' }] }"));
    assert_eq!((line, field.as_str()), (3, "pools[1].name"));
    assert!(message.contains("already on line 2"), "{message}");

    let (_, _, field, message, _) = only_problem(&two(
        "{ name: a, models: [m], backends: [{ url: 'http://a' }] }",
        "{ name: b, models: [n, m], backends: [{ url: 'http://b' }] }",
    ));
    assert_eq!(field, "pools[1].models[1]");
    assert!(message.contains("already in the pool \"a\""), "{message}");

    let (_, _, field, message, _) = only_problem(&two(
        "{ name: a, models: [m], backends: [{ url: 'http://a' }] }",
        "{ name: b, models: [n], backends: [{ url: 'http://A:80/' }] }",
    ));
    assert_eq!(field, "pools[1].backends[0].url");
    assert!(message.contains("already on line 2"), "{message}");

    let (_, _, _, message, _) = only_problem(&two("{ name: a, backends: [{ url: 'http://a' }] }", "{ name: b, backends: [{ url: 'http://b' }] }"));
    assert!(message.contains("second pool without models"), "{message}");
}

#[test]
fn aliases_lead_to_a_real_name_in_one_step() {
    let models = |list: &str| format!("pools: [{{ name: a, backends: [{{ url: 'http://a' }}], models: {list} }}]\n");
    let (_, _, field, message, hint) = only_problem(&models("[{ name: x, upstream: y }, { name: y, upstream: z }]"));
    assert_eq!(field, "pools[0].models[0]");
    assert!(message.contains("x -> y -> z") && hint.contains("upstream: z"), "{message} {hint}");
    let error = load_text(&models("[{ name: x, upstream: y }, { name: y, upstream: x }]"), &[]).unwrap_err();
    assert!(error.to_string().contains("circle: x -> y -> x"), "{error}");
    assert_eq!(load_text(&models("[{ name: x, upstream: x }, { name: y }]"), &[]).unwrap().models["x"].upstream, None);
}

#[test]
fn a_missing_policy_file_says_what_is_there() {
    let text = format!("policy: p/mine.yaml\n{POOL}");
    let error = load_text(&text, &[("p/yours.yaml", "order: fcfs\n")]).unwrap_err();
    assert!(error.to_string().contains("in that folder: yours.yaml"), "{error}");
}

#[test]
fn a_mistake_in_a_policy_file_is_reported_there_and_once() {
    let text = "policy: mine.yaml\npools: [{ name: chat, policy: mine.yaml, models: [m], backends: [{ url: 'http://127.0.0.1:8000' }] }]\n";
    let error = load_text(text, &[("mine.yaml", "order: headway\naging: { share: lots }\n")]).unwrap_err();
    let [problem] = error.problems() else { panic!("{error}") };
    assert!(problem.file.ends_with("mine.yaml"));
    assert_eq!((problem.position.unwrap().0, problem.field.as_str()), (2, "aging.share"));
    let error = load_text(text, &[("mine.yaml", "order: headway\naging: { share: 1.5 }\n")]).unwrap_err();
    assert!(error.to_string().contains("0 to 1"), "{error}");
    for (gamma, said) in [
        ("{ target: mean, ttft_p99: 2s }", "gamma: target and ttft_p99 are both written"),
        ("{}", "gamma: says neither target nor ttft_p99"),
        ("{ ttft_p99: soon }", "gamma.ttft_p99"),
        ("{ ttft_p99: 0s }", "longer than 0"),
    ] {
        let error = load_text(text, &[("mine.yaml", &format!("order: headway\ngamma: {gamma}\n"))]).unwrap_err();
        assert!(error.to_string().contains(said), "{gamma}: {error}");
    }
    let snapshot = load_text(text, &[("mine.yaml", "order: headway\ngamma: { ttft_p99: 2s }\n")]).unwrap();
    assert_eq!(snapshot.policy.policy.gamma(), Gamma::Ttft(Duration::from_secs(2)));
    let error = load_text(text, &[("mine.yaml", "order: oracle-sjf\n")]).unwrap_err();
    assert!(error.to_string().contains("only a simulation knows"), "{error}");
}

#[test]
fn values_that_contradict_each_other() {
    let cases = [
        (format!("listen: 127.0.0.1:9090\nadmin: 0.0.0.0:9090\n{POOL}"), "admin"),
        (format!("edge: {{ max_body: 64MiB, max_body_total: 32MiB }}\n{POOL}"), "edge.max_body_total"),
        (format!("limits: {{ queue_bytes: 1MiB }}\n{POOL}"), "limits.queue_bytes"),
        (format!("timeouts: {{ total: 1m, first_byte: 2m, inter_chunk: 10s }}\n{POOL}"), "timeouts.first_byte"),
        (POOL.replace("url: ", "slots: { initial: 9, max: 3 }, url: "), "pools[0].backends[0].slots.initial"),
        (POOL.replace("url: ", "api_key: a, api_key_file: b, url: "), "pools[0].backends[0].api_key_file"),
        (POOL.replace("url: ", "api_key: \"a\\nb\", url: "), "pools[0].backends[0].api_key"),
        (format!("ranker: {{ weights: nowhere }}\n{POOL}"), "ranker.weights"),
        (format!("tls: {{ cert: headway.yaml, key: headway.yaml }}\n{POOL}"), "tls.cert"),
    ];
    for (text, field) in cases {
        let error = load_text(&text, &[]).unwrap_err();
        assert_eq!(error.problems()[0].field, field, "{text}\n{error}");
    }
}

#[test]
fn the_environment_fills_in_and_a_dollar_can_be_kept() {
    let snapshot = load_text(&POOL.replace("[m]", "['a${PORT}b', 'x$${y}']"), &[]).unwrap();
    assert_eq!(snapshot.models.keys().collect::<Vec<_>>(), ["a8123b", "x${y}"]);
    for bad in ["${", "${}", "${a b}"] {
        assert!(load_text(&POOL.replace("[m]", &format!("['{bad}']")), &[]).is_err(), "{bad}");
    }
}

#[test]
fn backends_without_a_file() {
    let urls: Vec<BackendUrl> = ["http://a:1", "http://b:2", "http://a:1"].iter().map(|url| url.parse().unwrap()).collect();
    let snapshot = from_backends(&urls, DEFAULT_LISTEN, DEFAULT_ADMIN, NamedPolicy::default());
    assert_eq!(snapshot.pools.len(), 1);
    assert_eq!(snapshot.pools[0].backends.len(), 2);
    assert!(snapshot.pools[0].models.is_empty() && snapshot.sources.is_empty());
}

#[test]
fn check_tells_what_it_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("headway.yaml");
    fs::write(&path, POOL).unwrap();
    let shown = check(&path).unwrap();
    for part in ["is valid", "0.0.0.0:8080", "pool chat: policy headway", "model m", "http://127.0.0.1:8000"] {
        assert!(shown.contains(part), "{part} is not in\n{shown}");
    }
    fs::write(&path, "pools: []").unwrap();
    assert!(check(&path).is_err());
}

mod anything {
    use proptest::prelude::*;

    use super::*;

    const EXAMPLE: &str = include_str!("../../config/headway.yaml");

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 300 } else { 5000 }))]

        /// A damaged file is read or refused, never a panic; a refusal names the file and says something.
        #[test]
        fn damaged_files_are_read_or_refused(cuts in prop::collection::vec((0..EXAMPLE.len(), 0_usize..40, "[\\PC\n]{0,6}"), 1..4)) {
            let mut text: Vec<char> = EXAMPLE.chars().collect();
            for (at, length, insert) in cuts {
                let at = at.min(text.len());
                let end = (at + length).min(text.len());
                text.splice(at..end, insert.chars());
            }
            let text: String = text.into_iter().collect();
            if let Err(error) = load_text(&text, &[]) {
                prop_assert!(!error.problems().is_empty());
                for problem in error.problems() {
                    prop_assert!(problem.file.ends_with("headway.yaml") && !problem.message.is_empty());
                }
            }
        }

        #[test]
        fn single_values_never_panic(text in "\\PC{0,24}") {
            use super::super::text::{Bytes, FromText};
            _ = std::time::Duration::from_text(&text);
            _ = Bytes::from_text(&text);
            _ = SocketAddr::from_text(&text);
            if let Ok(url) = BackendUrl::from_text(&text) {
                prop_assert_eq!(BackendUrl::from_text(&url.to_string()), Ok(url));
            }
            if let Ok(url) = BackendUrl::from_text(&format!("http://{text}")) {
                prop_assert_eq!(BackendUrl::from_text(&url.to_string()), Ok(url));
            }
        }
    }
}

#[test]
fn traces_are_off_or_go_to_a_collector() {
    assert_eq!(load_text(POOL, &[]).unwrap().otlp, None);
    assert_eq!(load_text(&format!("{POOL}telemetry: {{}}\n"), &[]).unwrap().otlp, None);
    let otlp = |text: &str| load_text(&format!("{POOL}telemetry: {{ otlp: {{ {text} }} }}\n"), &[]).map(|snapshot| snapshot.otlp.unwrap());
    let defaults = Otlp { endpoint: "http://a:4317".into(), sample: 0.01, service_name: "headway".into() };
    assert_eq!(otlp("endpoint: http://a").unwrap(), defaults);
    let all = otlp("endpoint: http://a:8123, sample: 1, service_name: edge").unwrap();
    assert_eq!(all, Otlp { endpoint: "http://a:8123".into(), sample: 1.0, service_name: "edge".into() });
    for (text, field, hint) in [
        ("sample: 0.5", "telemetry.otlp", ""),
        ("endpoint: http://a, sample: 1%", "telemetry.otlp.sample", "for example 0.25"),
        ("endpoint: http://a, sample: 2", "telemetry.otlp.sample", "write 0 to 1; the default is 0.01"),
        ("endpoint: http://a, service_name: ''", "telemetry.otlp.service_name", "write a value"),
        ("endpoint: 'a:4317'", "telemetry.otlp.endpoint", "write http://a:4317"),
        ("endpoint: http://a, ratio: 1", "telemetry.otlp.ratio", ""),
    ] {
        let problem = only_problem(&format!("{POOL}telemetry: {{ otlp: {{ {text} }} }}\n"));
        assert_eq!((problem.0, problem.2.as_str()), (2, field), "{problem:?}");
        assert!(problem.4.contains(hint), "{problem:?}");
    }
}
