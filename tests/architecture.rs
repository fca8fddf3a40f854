//! Holds the arrows of the architecture: which room of `src/` never reaches into which, and which crates the pure rooms never name.
//! It reads the source text, so that an arrow breaks here before a reviewer has to see it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A room of `src/`, the rooms and the outside paths it never names, and its files that are free of the rule.
struct Rule {
    room: &'static str,
    rooms: &'static [&'static str],
    outside: &'static [&'static str],
    except: &'static [&'static str],
}

/// What does IO, waits, keeps locks or logs: everything a pure room is told about instead. `std::time::Duration` is a length, not a clock.
const IMPURE: &[&str] = &[
    "tokio",
    "hyper",
    "hyper_util",
    "pingora",
    "axum",
    "candle_core",
    "candle_nn",
    "serde",
    "serde_json",
    "serde_yaml",
    "tracing",
    "std::fs",
    "std::io",
    "std::net",
    "std::env",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
];

const RULES: &[Rule] = &[
    Rule {
        room: "scheduler",
        rooms: &[
            "admin",
            "config",
            "demo",
            "dispatcher",
            "engine",
            "fleet",
            "gateway",
            "proxy",
            "ranker",
            "simulator",
            "telemetry",
            "tenancy",
            "training",
        ],
        outside: IMPURE,
        except: &[],
    },
    Rule {
        room: "engine",
        rooms: &["admin", "config", "demo", "dispatcher", "fleet", "gateway", "proxy", "ranker", "simulator", "telemetry", "tenancy", "training"],
        outside: IMPURE,
        except: &["engine/server.rs", "engine/server/"],
    },
    Rule {
        room: "simulator",
        rooms: &["admin", "config", "demo", "dispatcher", "fleet", "gateway", "proxy", "ranker", "telemetry", "tenancy", "training"],
        outside: IMPURE,
        except: &["simulator/command.rs", "simulator/command/"],
    },
    // Its command line reads files.
    Rule { room: "simulator", rooms: &["admin", "dispatcher", "gateway", "proxy"], outside: &["hyper", "pingora"], except: &[] },
    Rule {
        room: "dispatcher",
        rooms: &["proxy", "ranker", "config", "gateway", "admin", "telemetry", "fleet"],
        outside: &["hyper", "pingora", "candle_core", "candle_nn", "serde_yaml"],
        except: &[],
    },
    Rule {
        room: "ranker",
        rooms: &["proxy", "dispatcher", "gateway", "admin", "telemetry", "training"],
        outside: &["hyper", "pingora"],
        except: &[],
    },
    Rule {
        room: "config",
        rooms: &["proxy", "dispatcher", "gateway", "admin", "telemetry"],
        outside: &["pingora", "candle_core", "candle_nn", "hyper"],
        except: &[],
    },
    Rule {
        room: "telemetry",
        rooms: &["proxy", "dispatcher", "gateway", "admin", "ranker", "fleet"],
        outside: &["hyper", "pingora", "candle_core", "candle_nn"],
        except: &[],
    },
    // The simulator is on no request's way: of the gateway only `admin` runs it, on a thread of its own, when an operator asks what other policies would have done.
    Rule { room: "proxy", rooms: &["simulator", "admin"], outside: &[], except: &[] },
    Rule { room: "tenancy", rooms: &["simulator", "proxy", "dispatcher", "gateway", "admin"], outside: &[], except: &[] },
    Rule { room: "fleet", rooms: &["proxy", "gateway", "admin", "ranker"], outside: &["pingora", "candle_core", "candle_nn"], except: &[] },
];

/// The text without comments and without what stands between quotes, so that prose about an arrow is not taken for one.
fn code(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let skipped = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(hashes) = raw_string(rest) {
            let close = format!("\"{}", "#".repeat(hashes));
            let open = hashes + 2;
            rest[open..].find(&close).map_or(rest.len(), |end| open + end + close.len())
        } else if first == '"' {
            plain_string(rest)
        } else if rest.starts_with("'\"'") || rest.starts_with("'\\\"'") {
            rest[1..].find('\'').map_or(rest.len(), |end| end + 2) // a quote as a character opens no string
        } else {
            0
        };
        if skipped > 0 {
            out.push(' ');
            rest = &rest[skipped..];
        } else {
            out.push(first);
            rest = &rest[first.len_utf8()..];
        }
    }
    out
}

/// How many hashes the raw string that starts here has.
fn raw_string(text: &str) -> Option<usize> {
    let hashes = text.strip_prefix('r')?.chars().take_while(|c| *c == '#').count();
    text[1 + hashes..].starts_with('"').then_some(hashes)
}

/// Length of the string that starts here, both quotes included.
fn plain_string(text: &str) -> usize {
    let mut escaped = false;
    for (at, letter) in text.char_indices().skip(1) {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Every path of two or more parts that the code names, groups opened up: `use crate::{a, b::{c, d}};` names `crate::a`, `crate::b::c` and `crate::b::d`.
fn paths(code: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let letters: Vec<char> = code.chars().collect();
    let mut at = 0;
    while at < letters.len() {
        if is_ident(letters[at]) {
            at = path(&letters, at, String::new(), &mut found);
        } else {
            at += 1;
        }
    }
    found
}

/// Reads one path from `at`, adds what it names to `found`, returns where it ends.
fn path(letters: &[char], mut at: usize, mut before: String, found: &mut BTreeSet<String>) -> usize {
    loop {
        while at < letters.len() && is_ident(letters[at]) {
            before.push(letters[at]);
            at += 1;
        }
        if letters[at..].starts_with(&[':', ':']) {
            before.push_str("::");
            at += 2;
            match letters.get(at) {
                Some('{') => return group(letters, at + 1, &before, found),
                Some(next) if is_ident(*next) => continue,
                _ => {}
            }
        }
        if before.contains("::") {
            found.insert(before.trim_end_matches("::").to_owned());
        }
        return at;
    }
}

/// Reads the inside of `{...}` after `before::`.
fn group(letters: &[char], mut at: usize, before: &str, found: &mut BTreeSet<String>) -> usize {
    while at < letters.len() {
        match letters[at] {
            '}' => return at + 1,
            letter if is_ident(letter) => at = path(letters, at, before.to_owned(), found),
            _ => at += 1,
        }
    }
    at
}

fn is_ident(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// Whether `named` lies at or below `path`.
fn within(named: &str, path: &str) -> bool {
    named.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// The path as seen from the crate's root: `super` past the file's own depth counts as `crate`.
fn from_root(named: &str, depth: usize) -> String {
    let supers = named.split("::").take_while(|part| *part == "super").count();
    if supers == 0 || supers < depth {
        return named.to_owned();
    }
    let rest: Vec<&str> = named.split("::").skip(supers).collect();
    format!("crate::{}", rest.join("::"))
}

/// What in `text`, a file of `depth` modules below the root, breaks `rule`.
fn broken(rule: &Rule, depth: usize, text: &str) -> Vec<String> {
    let named: Vec<String> = paths(&code(text)).iter().map(|path| from_root(path, depth)).collect();
    let rooms = rule.rooms.iter().flat_map(|room| [format!("crate::{room}"), format!("headway::{room}")]);
    let forbidden: Vec<String> = rooms.chain(rule.outside.iter().map(|path| (*path).to_owned())).collect();
    named.into_iter().filter(|named| forbidden.iter().any(|path| within(named, path))).collect()
}

fn sources(under: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(under) else { return Vec::new() };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.expect("a folder of src can be listed").path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    files
}

/// The files of a room as paths below `src/`, its own `room.rs` included.
fn files(src: &Path, rule: &Rule) -> Vec<(String, String)> {
    let mut files = sources(&src.join(rule.room));
    let single = src.join(rule.room).with_extension("rs");
    if single.exists() {
        files.push(single);
    }
    let below = |file: &PathBuf| file.strip_prefix(src).expect("found below src").display().to_string();
    let names = files.iter().map(|file| (below(file), fs::read_to_string(file).expect("a source is text")));
    names.filter(|(name, _)| !rule.except.iter().any(|except| name.starts_with(except))).collect()
}

/// How many `super` lead from the file to the root.
fn depth(name: &str) -> usize {
    name.trim_end_matches("/mod.rs").split('/').count()
}

#[test]
fn the_arrows_hold() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    for rule in RULES {
        for (name, text) in files(&src, rule) {
            wrong.extend(broken(rule, depth(&name), &text).into_iter().map(|path| format!("src/{name} names {path}")));
        }
    }
    assert!(wrong.is_empty(), "arrows that must not be:\n{}", wrong.join("\n"));
}

#[test]
fn the_pure_core_was_read() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let read: Vec<String> = files(&src, &RULES[0]).into_iter().map(|(name, _)| name).collect();
    assert!(read.contains(&"scheduler/mod.rs".to_owned()), "{read:?}");
    assert!(read.contains(&"scheduler/policy.rs".to_owned()), "{read:?}");
}

#[test]
fn an_arrow_that_must_not_be_is_found() {
    let rule = &RULES[0];
    for text in [
        "use crate::proxy::Body;",
        "use crate::{scheduler::Time, proxy};",
        "use crate::{\n    scheduler::{Time, Work},\n    proxy::{self, Body},\n};",
        "fn f() { crate::dispatcher::spawn() }",
        "use super::super::config::Pool;",
        "use tokio::sync::mpsc;",
        "#[derive(serde::Serialize)] struct A;",
        "use std::{collections::BTreeMap, fs};",
        "use std::time::{Duration, Instant};",
        "let now = std::time::SystemTime::now();",
        "let quote = '\"'; use tokio::spawn; let other = '\"';",
    ] {
        assert!(!broken(rule, 2, text).is_empty(), "{text}");
    }
}

#[test]
fn what_is_allowed_or_only_said_is_no_arrow() {
    let rule = &RULES[0];
    for text in [
        "use crate::scheduler::Time;",
        "use super::time::Time;",
        "use std::time::Duration;",
        "// crate::proxy calls this",
        "//! [`crate::proxy`] and tokio::time",
        "let said = \"crate::proxy\";",
        "let said = r#\"use \"crate::proxy\"\"#;",
        "let said = \"a \\\" crate::proxy\";",
        "use crate::proxy_like::Body;",
        "fn tokio() {}",
    ] {
        assert_eq!(broken(rule, 2, text), Vec::<String>::new(), "{text}");
    }
}
