//! What strangers send and operators write, drawn at random and broken at random, against something slower and simpler that must agree.
//!
//! `FUZZ_SECONDS=600 cargo test --test fuzz -- --nocapture` tries each for so long instead of a fixed number of inputs; `FUZZ_FROM=17` begins with that input,
//! so that a failure, which names its own, is replayed.
#![cfg(feature = "gateway")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use headway::config;
use headway::proxy::api::{Api, BadBody, Splices, parse};
use headway::proxy::http1::{self, Framing, Malformed, Next};
use headway::proxy::stream::Observer;
use http::header::{HeaderMap, TRANSFER_ENCODING};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Chance from a seed: SplitMix64 (Steele, Lea and Flood, 2014).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }

    /// True once in so many times.
    fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len())]
    }
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Calls `check` with one chance after another; it says whether the input was one that got past the door. Half a percent have to, and as many must not.
fn try_all(what: &str, inputs: u64, check: impl Fn(&mut Chance) -> bool) {
    let (from, started) = (variable("FUZZ_FROM").unwrap_or(0), Instant::now());
    let limit = variable("FUZZ_SECONDS").map(Duration::from_secs);
    let (mut tried, mut taken) = (0_u64, 0_u64);
    while limit.map_or(tried < inputs, |limit| started.elapsed() < limit) {
        let seed = from + tried;
        match catch_unwind(AssertUnwindSafe(|| check(&mut Chance(seed.wrapping_mul(0xd134_2543_de82_ef95))))) {
            Ok(good) => taken += u64::from(good),
            Err(panic) => {
                eprintln!("{what}: input {seed} fails; replay it with FUZZ_FROM={seed}");
                resume_unwind(panic);
            }
        }
        tried += 1;
    }
    println!("{what}: {tried} inputs, {taken} of them taken, in {:.0?}", started.elapsed());
    assert!(
        tried < 1000 || taken > tried / 200 && tried - taken > tried / 200,
        "{what}: {taken} of {tried} taken: the generator makes one kind only"
    );
}

const STRINGS: [&str; 14] = [
    "",
    "a",
    "hello",
    "[DONE]",
    "data: x",
    "\\u0041",
    "\\ud83d\\ude00",
    "\\n\\t\\\"",
    "é",
    "日本語",
    "\u{1f600}",
    "x y z",
    "\\\\",
    "0123456789abcdef0123456789",
];

/// A piece of JSON text, mostly valid.
fn value(chance: &mut Chance, depth: usize, out: &mut String) {
    blank(chance, out);
    match chance.below(if depth == 0 { 7 } else { 10 }) {
        0 => out.push_str(chance.pick(&["null", "true", "false", "nul", "True"][..if chance.0.is_multiple_of(16) { 5 } else { 3 }])),
        1 => out.push_str(chance.pick(&["0", "-0", "1", "100", "100.0", "1e2", "-1", "4294967296", "18446744073709551616", "0.5", "1E-2"])),
        2 if chance.once_in(16) => out.push_str(chance.pick(&["01", "+1", "1.", ".5", "1e", "-", "1e999", "0x10", "NaN", "'a'"])),
        2..=6 => string(chance, out),
        7 => list(chance, depth, out),
        _ => object(chance, depth, &[], out),
    }
    blank(chance, out);
}

fn string(chance: &mut Chance, out: &mut String) {
    out.push('"');
    for _ in 0..chance.below(3) {
        out.push_str(chance.pick(&STRINGS));
    }
    if chance.once_in(40) {
        out.push_str(chance.pick(&["\\x", "\\u12", "\\ud800", "\\udc00\\ud800", "\n", "\u{1}", "\\"]));
    }
    if chance.once_in(200) {
        (0..chance.below(1200)).for_each(|_| out.push_str("some words "));
    }
    out.push('"');
}

fn list(chance: &mut Chance, depth: usize, out: &mut String) {
    out.push('[');
    for index in 0..chance.below(4) {
        out.push_str(if index > 0 { "," } else { "" });
        value(chance, depth - 1, out);
    }
    out.push_str(if chance.once_in(60) { ",]" } else { "]" });
}

/// An object with some of the `fields`, each made by its own maker, among others.
fn object(chance: &mut Chance, depth: usize, fields: &[(&str, Maker)], out: &mut String) {
    out.push('{');
    let mut first = true;
    for _ in 0..chance.below(3 + 2 * fields.len()) {
        if !std::mem::take(&mut first) {
            out.push(',');
        }
        blank(chance, out);
        match fields.is_empty() || chance.once_in(6) {
            true => {
                string(chance, out);
                out.push(':');
                value(chance, depth.saturating_sub(1), out);
            }
            false => {
                let (name, make) = fields[chance.below(fields.len())];
                match chance.once_in(30) {
                    // The same name, written otherwise.
                    true => name.chars().enumerate().for_each(|(at, c)| match at {
                        0 => out.push_str(&format!("\"\\u{:04x}", u32::from(c))),
                        _ => out.push(c),
                    }),
                    false => out.push_str(&format!("\"{name}")),
                }
                out.push_str("\":");
                match chance.once_in(12) {
                    true => value(chance, depth.saturating_sub(1), out),
                    false => make(chance, depth.saturating_sub(1), out),
                }
            }
        }
    }
    out.push_str(if chance.once_in(80) { ",}" } else { "}" });
}

type Maker = fn(&mut Chance, usize, &mut String);

fn blank(chance: &mut Chance, out: &mut String) {
    if chance.once_in(4) {
        out.push_str(chance.pick(&[" ", "\n", "\t", "\r\n", "  "]));
    }
    if chance.once_in(400) {
        out.push_str(chance.pick(&["\u{a0}", "\u{feff}", "/**/", "\u{c}"]));
    }
}

fn flag(chance: &mut Chance, _: usize, out: &mut String) {
    out.push_str(chance.pick(&["true", "false", "null"]));
}

fn number(chance: &mut Chance, _: usize, out: &mut String) {
    out.push_str(chance.pick(&["0", "1", "2", "100", "100.0", "1e2", "4294967296", "null", "99999999999999999999", "3"]));
}

fn text(chance: &mut Chance, _: usize, out: &mut String) {
    string(chance, out);
}

fn role(chance: &mut Chance, _: usize, out: &mut String) {
    out.push_str(chance.pick(&["\"user\"", "\"system\"", "\"assistant\"", "\"developer\"", "\"tool\"", "\"user\""]));
}

fn parts(chance: &mut Chance, depth: usize, out: &mut String) {
    if !chance.once_in(4) {
        return string(chance, out);
    }
    out.push('[');
    for index in 0..chance.below(4) {
        out.push_str(if index > 0 { "," } else { "" });
        object(chance, depth, &[("type", kind), ("text", text), ("content", text)], out);
    }
    out.push(']');
}

fn kind(chance: &mut Chance, _: usize, out: &mut String) {
    out.push_str(chance.pick(&["\"text\"", "\"image_url\"", "\"tool_result\"", "\"input_audio\"", "\"file\"", "\"x\""]));
}

fn messages(chance: &mut Chance, depth: usize, out: &mut String) {
    out.push('[');
    for index in 0..chance.below(5) {
        out.push_str(if index > 0 { "," } else { "" });
        object(chance, depth, &[("role", role), ("content", parts), ("role", role), ("content", parts)], out);
    }
    out.push(']');
}

fn stream_options(chance: &mut Chance, depth: usize, out: &mut String) {
    object(chance, depth, &[("include_usage", flag)], out);
}

const FIELDS: [(&str, Maker); 17] = [
    ("model", text),
    ("model", text),
    ("model", text),
    ("messages", messages),
    ("messages", messages),
    ("prompt", parts),
    ("input", parts),
    ("system", parts),
    ("instructions", text),
    ("stream", flag),
    ("stream_options", stream_options),
    ("max_tokens", number),
    ("max_completion_tokens", number),
    ("max_output_tokens", number),
    ("n", number),
    ("priority", number),
    ("service_tier", text),
];

/// A request body: mostly an object with the fields that are looked at, sometimes something else, sometimes broken afterwards.
fn body(chance: &mut Chance) -> Vec<u8> {
    let mut out = String::new();
    blank(chance, &mut out);
    match chance.once_in(40) {
        true => value(chance, 4, &mut out),
        false => object(chance, 4, &FIELDS, &mut out),
    }
    if chance.once_in(200) {
        let depth = 120 + chance.below(20);
        out = format!("{{\"model\":\"m\",\"x\":{}{}}}", "[".repeat(depth), "]".repeat(depth));
    }
    let mut bytes = out.into_bytes();
    if chance.once_in(6) {
        damage(chance, &mut bytes);
    }
    bytes
}

fn damage(chance: &mut Chance, bytes: &mut Vec<u8>) {
    for _ in 0..=chance.below(3) {
        let at = chance.below(bytes.len() + 1);
        match chance.below(5) {
            0 => bytes.truncate(at),
            1 if at < bytes.len() => bytes[at] ^= 1 << chance.below(8),
            2 => bytes.insert(at, chance.pick(&[b"{".as_slice(), b"}", b"\"", b"\\", b",", b":", b"\0", b"\xff", b"\n", b"["])[0]),
            3 if at < bytes.len() => _ = bytes.remove(at),
            _ => {
                let part = bytes[at.min(bytes.len())..(at + chance.below(20)).min(bytes.len())].to_vec();
                let to = chance.below(bytes.len() + 1);
                bytes.splice(to..to, part);
            }
        }
    }
}

/// As serde_json reads it; of equal names the last one counts.
fn read(bytes: &[u8]) -> Option<Value> {
    serde_json::from_slice(bytes).ok()
}

/// A count as the parser is to understand it.
fn count(value: &Value) -> Option<Option<u32>> {
    match value {
        Value::Null => Some(None),
        Value::Number(number) => match (number.as_u64(), number.as_f64()) {
            (Some(whole), _) => Some(Some(u32::try_from(whole).unwrap_or(u32::MAX))),
            (None, Some(number)) if number >= 0.0 && number.fract() == 0.0 => Some(Some(number as u32)),
            _ => None,
        },
        _ => None,
    }
}

#[test]
fn the_prompt_parser_agrees_with_serde_json() {
    try_all("prompt", 20_000, |chance| {
        let bytes = body(chance);
        let api = [Api::Chat, Api::Completions, Api::Responses, Api::Messages, Api::Other][chance.below(5)];
        let parsed = parse(api, &bytes);
        let shown = || String::from_utf8_lossy(&bytes).into_owned();
        // serde_json does not look at the characters of what it skips.
        let is_json = std::str::from_utf8(&bytes).is_ok() && serde_json::from_slice::<serde::de::IgnoredAny>(&bytes).is_ok();
        match &parsed {
            Err(BadBody::Syntax(_)) => assert!(!is_json, "refused as no JSON: {}", shown()),
            Err(BadBody::TooDeep) => assert!(bytes.iter().filter(|b| matches!(b, b'[' | b'{')).count() > 100, "too deep: {}", shown()),
            _ => assert!(is_json, "taken for JSON: {}", shown()),
        }
        // Numbers and escapes that stand for nothing are no business of the parser where it does not look at them.
        let Some(whole) = read(&bytes) else { return parsed.is_ok() };
        match &parsed {
            Ok(prompt) => {
                assert_eq!(Some(prompt.model.as_str()), whole["model"].as_str(), "{}", shown());
                if api.is_scored() {
                    assert_eq!(prompt.stream, whole["stream"] == true, "{}", shown());
                    assert_eq!(prompt.include_usage, whole["stream_options"]["include_usage"] == true, "{}", shown());
                    let limit = match api {
                        Api::Chat => count(&whole["max_completion_tokens"]).flatten().or(count(&whole["max_tokens"]).flatten()),
                        Api::Responses => count(&whole["max_output_tokens"]).flatten(),
                        _ => count(&whole["max_tokens"]).flatten(),
                    };
                    let answers = count(&whole["n"]).flatten().unwrap_or(1).max(1);
                    assert_eq!(prompt.max_output, limit.map(|limit| limit.saturating_mul(answers)), "{}", shown());
                }
                if let (Api::Chat, Some((system, user))) = (api, said(&whole["messages"])) {
                    assert_eq!((prompt.text.system.as_str(), prompt.text.user.as_str()), (system, user), "{}", shown());
                }
            }
            Err(BadBody::NotAnObject) => assert!(!whole.is_object(), "{}", shown()),
            Err(BadBody::Missing("model")) => assert!(whole.get("model").is_none(), "{}", shown()),
            Err(BadBody::WrongType { field, .. }) if field == "model" => assert!(!whole["model"].is_string(), "{}", shown()),
            Err(BadBody::WrongType { field, .. }) if field == "stream" => {
                assert!(!matches!(whole["stream"], Value::Null | Value::Bool(_)), "{}", shown())
            }
            Err(BadBody::WrongType { field, .. }) if field == "n" || field.starts_with("max_") => {
                assert_eq!(count(&whole[&**field]), None, "{}", shown())
            }
            Err(_) => {}
        }
        parsed.is_ok()
    });
}

/// System and last user text of a conversation that is nothing but short texts.
fn said(messages: &Value) -> Option<(&str, &str)> {
    let (mut system, mut user) = ("", "");
    for message in messages.as_array()? {
        let (role, content) = (message.get("role")?.as_str()?, message.get("content")?.as_str()?);
        match role {
            _ if content.len() > 1000 || message.as_object()?.len() != 2 => return None,
            "system" | "developer" if system.is_empty() => system = content,
            "user" => user = content,
            "assistant" | "system" | "developer" => {}
            _ => return None,
        }
    }
    Some((system, user))
}

#[test]
fn a_spliced_body_is_what_surgery_on_its_value_gives() {
    try_all("splice", 20_000, |chance| {
        let bytes = Bytes::from(body(chance));
        let (Ok(prompt), Some(Value::Object(mut wanted))) = (parse(Api::Chat, &bytes), read(&bytes)) else { return false };
        let mut splices = Splices::default();
        let (rename, priority, usage) = (chance.once_in(2), chance.once_in(2), chance.once_in(2));
        let name = chance.pick(&["llama", "a \"quoted\" name", "日本", "\n"]);
        if rename {
            prompt.rename_model(&mut splices, name);
            wanted.insert("model".into(), name.into());
        }
        if priority {
            prompt.set_priority(&mut splices, -7);
            wanted.insert("priority".into(), json!(-7));
        }
        if usage {
            prompt.ask_for_usage(&mut splices);
            match wanted.entry("stream_options").or_insert(Value::Null) {
                Value::Object(options) => _ = options.insert("include_usage".into(), true.into()),
                other => *other = Value::Object(Map::from_iter([("include_usage".to_owned(), true.into())])),
            }
        }
        let mut spliced = splices.apply(&bytes);
        let spliced = spliced.copy_to_bytes(spliced.remaining());
        let shown = || format!("{}\n-> {}", String::from_utf8_lossy(&bytes), String::from_utf8_lossy(&spliced));
        assert_eq!(read(&spliced), Some(Value::Object(wanted)), "{}", shown());
        if !(rename || priority || usage) {
            assert_eq!(spliced, bytes);
        }
        // What was spliced is read as before.
        let again = parse(Api::Chat, &spliced).unwrap_or_else(|error| panic!("{error}: {}", shown()));
        assert_eq!((again.model.as_str(), &again.text), (if rename { name } else { &prompt.model }, &prompt.text), "{}", shown());
        assert_eq!(again.include_usage, prompt.include_usage || usage, "{}", shown());
        true
    });
}

fn usage(chance: &mut Chance, depth: usize, out: &mut String) {
    object(chance, depth, &[("prompt_tokens", number), ("completion_tokens", number), ("input_tokens", number), ("output_tokens", number)], out);
}

fn choices(chance: &mut Chance, depth: usize, out: &mut String) {
    out.push('[');
    for index in 0..chance.below(3) {
        out.push_str(if index > 0 { "," } else { "" });
        object(chance, depth, &[("delta", delta), ("finish_reason", finish), ("text", text)], out);
    }
    out.push(']');
}

fn delta(chance: &mut Chance, depth: usize, out: &mut String) {
    object(chance, depth, &[("content", text), ("reasoning_content", text), ("stop_reason", finish)], out);
}

fn finish(chance: &mut Chance, _: usize, out: &mut String) {
    out.push_str(chance.pick(&["null", "\"stop\"", "\"length\"", "\"error\"", "\"in_progress\""]));
}

fn event_type(chance: &mut Chance, _: usize, out: &mut String) {
    out.push_str(chance.pick(&["\"message_stop\"", "\"content_block_delta\"", "\"response.completed\"", "\"error\"", "\"message_start\""]));
}

fn inner(chance: &mut Chance, depth: usize, out: &mut String) {
    object(chance, depth, &[("model", text), ("usage", usage)], out);
}

fn stream(chance: &mut Chance) -> Vec<u8> {
    const EVENT: [(&str, Maker); 7] =
        [("choices", choices), ("choices", choices), ("model", text), ("usage", usage), ("type", event_type), ("delta", delta), ("message", inner)];
    let mut out = String::new();
    for _ in 0..chance.below(8) {
        let mut event = String::new();
        match chance.below(12) {
            0 => event.push_str(chance.pick(&["[DONE]", " [DONE]", "x[DONE]", "[DONE] "])),
            1 => event.push_str("{\"choices\":[{\"index\":0,\"delta\":{\"content\":\"[DONE]\"}}]}"),
            2 => value(chance, 3, &mut event),
            // The same event again and again, as streams have it.
            3 => {
                let same = format!("data: {{\"model\":\"b\",\"choices\":[{{\"delta\":{{\"content\":\"{}\"}}}}]}}\n\n", chance.pick(&STRINGS));
                (0..chance.below(5)).for_each(|_| out.push_str(&same));
                continue;
            }
            _ => object(chance, 4, &EVENT, &mut event),
        }
        if !chance.once_in(20) {
            event = event.replace(['\n', '\r'], " ");
        }
        if chance.once_in(6) {
            out.push_str(chance.pick(&[": ping\n", "event: message\n", "id: 1\r\n", "\n", "retry: 5\n"]));
        }
        out.push_str(chance.pick(&["data: ", "data:", "data:  ", "data", "data: "]));
        out.push_str(&event);
        out.push_str(chance.pick(&["\n\n", "\r\n\r\n", "\n", "", "\n\n", "\n\n"]));
    }
    let mut bytes = out.into_bytes();
    if chance.once_in(5) {
        damage(chance, &mut bytes);
    }
    bytes
}

/// What a naive reader makes of a whole stream: the bytes for the client, whether its last word was heard, and the last prompt count.
struct Naive {
    out: Vec<u8>,
    done: bool,
    /// Every event could be read by serde_json, so that the naive reader can be compared.
    plain: bool,
}

fn naive(bytes: &[u8], model: &str, hide_usage: bool) -> Naive {
    let mut naive = Naive { out: Vec::new(), done: false, plain: true };
    let mut hiding = false;
    for line in bytes.split_inclusive(|&b| b == b'\n') {
        let trimmed = line.trim_ascii_end();
        if std::mem::take(&mut hiding) && trimmed.is_empty() {
            continue;
        }
        let payload = trimmed.strip_prefix(b"data:").map(<[u8]>::trim_ascii_start);
        naive.done |= payload == Some(b"[DONE]");
        match payload.and_then(read) {
            Some(Value::Object(event)) => {
                let kind = event.get("type").and_then(Value::as_str).unwrap_or_default();
                naive.done |= matches!(kind, "message_stop" | "response.completed");
                // Where a model is named more than once, or otherwise than others write it, the two may mean different ones.
                let names = trimmed.windows(5).filter(|part| part == b"model").count();
                let named = event.get("model").or(event.get("message").and_then(|inner| inner.get("model"))).and_then(Value::as_str);
                naive.plain &= !trimmed.windows(6).any(|part| part == b"\\u006d") && (names == 0 || names == 1 && named == Some(model));
                let empty = event.get("choices").and_then(Value::as_array).is_some_and(Vec::is_empty);
                if hide_usage && empty && event.get("usage").is_some_and(Value::is_object) {
                    hiding = true;
                    continue;
                }
            }
            Some(_) => {}
            None => naive.plain &= payload.is_none_or(|payload| payload == b"[DONE]"),
        }
        naive.out.extend_from_slice(line);
    }
    naive
}

#[test]
fn the_observer_does_not_care_where_a_stream_is_cut() {
    try_all("sse", 2_000, |chance| {
        let bytes = Bytes::from(stream(chance));
        let (model, hide_usage) = (chance.pick(&["a", "b", "", "a \"model\""]), chance.once_in(2));
        let watch = |pieces: &[Bytes]| {
            let mut observer = Observer::new(model, hide_usage);
            let mut out: Vec<u8> = Vec::new();
            pieces.iter().for_each(|piece| out.extend_from_slice(&observer.feed(piece.clone())));
            out.extend_from_slice(&observer.end());
            (out, *observer.seen())
        };
        let whole = watch(std::slice::from_ref(&bytes));
        let shown = || String::from_utf8_lossy(&bytes).into_owned();
        for most in [1, 2, 7, 60] {
            let (mut rest, mut pieces) = (bytes.clone(), Vec::new());
            while !rest.is_empty() {
                let cut = rest.len().min(1 + chance.below(most));
                pieces.push(rest.split_to(cut));
            }
            let cut = watch(&pieces);
            assert_eq!((String::from_utf8_lossy(&cut.0), cut.1), (String::from_utf8_lossy(&whole.0), whole.1), "{most}: {}", shown());
        }
        // Nothing is lost or made up: apart from names of the model and what is hidden, the client gets the very bytes.
        let naive = naive(&bytes, model, hide_usage);
        if naive.plain && !hide_usage {
            assert_eq!(String::from_utf8_lossy(&whole.0), String::from_utf8_lossy(&bytes), "{}", shown());
        }
        let done_word =
            bytes.split(|&b| b == b'\n').any(|line| line.trim_ascii_end().strip_prefix(b"data:").map(<[u8]>::trim_ascii_start) == Some(b"[DONE]"));
        assert!(!done_word || whole.1.done, "{}", shown());
        assert!(!whole.1.done || naive.done || bytes.windows(8).any(|part| part == b"response" || part == b"message_"), "{}", shown());
        let lines = |bytes: &[u8]| bytes.iter().filter(|&&b| b == b'\n').count();
        assert!(lines(&whole.0) <= lines(&bytes), "{}", shown());
        if naive.plain && hide_usage && whole.0 != bytes {
            assert_eq!(String::from_utf8_lossy(&whole.0), String::from_utf8_lossy(&naive.out), "{}", shown());
        }
        naive.plain && whole.1.done
    });
}

/// A configuration: lines of the example, left out, doubled, moved or changed in one value.
fn configuration(chance: &mut Chance, example: &[&str]) -> String {
    const VALUES: [&str; 26] = [
        "0",
        "1",
        "-1",
        "64",
        "99999999999999999999",
        "1.5",
        "true",
        "null",
        "~",
        "\"\"",
        "[]",
        "{}",
        "auto",
        "15ms",
        "7d",
        "8d",
        "0s",
        "30MiB",
        "1KiB",
        "${HOME}",
        "${NOT_THERE}",
        "$${x}",
        "fcfs",
        "\"\\u0000\"",
        "&a [*a]",
        "!!binary aGk=",
    ];
    const LINES: [&str; 18] = [
        "threads: 4",
        "state: state",
        "usage_log: { file: usage.jsonl }",
        "keys: { file: keys.yaml, unknown_per_minute: 5 }",
        "tls: { cert: a, key: b }",
        "    wedged_after: 5s",
        "    fallback: [small]",
        "    slow_stream: { tokens_per_second: 2 }",
        "    resume: true",
        "    limits: { queue_requests: 5 }",
        "    timeouts: { queue: 1m, total: 1s }",
        "      - { name: x, upstream: gpt-4o, limits: { queue_bytes: 1MiB } }",
        "      - { url: \"http://[::1]:9/p\", priority: true, kv_tokens: 4096, api_key: k }",
        "telemetry: { otlp: { endpoint: \"http://localhost\", sample: 0.5 } }",
        "? [a, b]",
        "  - name: chat",
        "pools: []",
        "<<: *x",
    ];
    let mut lines: Vec<String> = example.iter().map(|line| (*line).to_owned()).collect();
    for _ in 0..chance.below(6) {
        let at = chance.below(lines.len());
        match chance.below(6) {
            0 => _ = lines.remove(at),
            1 => lines.insert(at, lines[chance.0 as usize % lines.len()].clone()),
            2 | 3 => lines.insert(at, chance.pick(&LINES).to_owned()),
            _ => {
                if let Some((name, _)) = lines[at].clone().split_once(": ") {
                    lines[at] = format!("{name}: {}", chance.pick(&VALUES));
                }
            }
        }
        if lines.is_empty() {
            break;
        }
    }
    let mut bytes = lines.join("\n").into_bytes();
    if chance.once_in(10) {
        damage(chance, &mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn no_configuration_is_taken_that_does_not_hold_together() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, example) = (folder.path().join("headway.yaml"), std::fs::read_to_string("config/headway.yaml").expect("the example is there"));
    let hash = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    std::fs::write(folder.path().join("keys.yaml"), format!("tenants: [{{ name: a, keys: [{hash}] }}]")).expect("written");
    let lines: Vec<&str> = example
        .lines()
        .map(|line| line.split(" #").next().unwrap_or_default())
        .filter(|line| !line.trim().is_empty() && !line.starts_with('#'))
        .collect();
    try_all("config", 1_500, |chance| {
        let text = configuration(chance, &lines);
        std::fs::write(&file, &text).expect("written");
        let checked = config::check(&file);
        let snapshot = match config::load(&file) {
            Ok(snapshot) => snapshot,
            Err(error) => {
                let problems = error.problems();
                assert!(checked.is_err() && !problems.is_empty(), "{text}");
                let lines = text.lines().count() as u64 + 1;
                for problem in problems {
                    assert!(!problem.message.is_empty() && problem.position.is_none_or(|(line, _)| line <= lines), "{problem:?}\n{text}");
                }
                return false;
            }
        };
        assert!(checked.is_ok_and(|summary| summary.contains("is valid")), "{text}");
        assert!(!snapshot.pools.is_empty(), "{text}");
        let mut urls = std::collections::BTreeSet::new();
        for pool in &snapshot.pools {
            assert!(!pool.backends.is_empty() && pool.backends.iter().all(|backend| urls.insert(backend.url.to_string())), "{text}");
            assert!(pool.fallback.iter().all(|name| *name != pool.name && snapshot.pools.iter().any(|other| other.name == *name)), "{text}");
            let timeouts = pool.timeouts;
            assert!(
                [timeouts.connect, timeouts.queue, timeouts.first_byte, timeouts.inter_chunk, timeouts.total].iter().all(|wait| !wait.is_zero()),
                "{text}"
            );
            assert!(pool.limits.queue_requests > 0 && pool.limits.queue_bytes >= snapshot.edge.max_body, "{text}");
        }
        for (name, route) in &snapshot.models {
            let known = &snapshot.pools[route.pool].models;
            assert!(known.iter().any(|(model, upstream)| model == name && *upstream == route.upstream), "{text}");
        }
        // The same file says the same.
        assert_eq!(format!("{snapshot:?}"), format!("{:?}", config::load(&file).expect("it was taken before")), "{text}");
        true
    });
}

/// An answer as a backend writes it: mostly one that can be read, sometimes broken afterwards.
fn answer(chance: &mut Chance) -> Vec<u8> {
    let mut out = Vec::new();
    while chance.once_in(8) {
        out.extend_from_slice(chance.pick(&["HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"]).as_bytes());
    }
    let statuses =
        ["200 OK", "200 OK", "200 OK", "404 Not Found", "503 No backend", "204 No Content", "304 Not Modified", "200", "200 ", "1000 x", "099 x"];
    let version = if chance.once_in(12) { "HTTP/1.0" } else { "HTTP/1.1" };
    let usual = if chance.once_in(8) { statuses.len() } else { 7 };
    let status = chance.below(usual);
    out.extend_from_slice(format!("{version} {}\r\n", statuses[status]).as_bytes());
    let field = |chance: &mut Chance, out: &mut Vec<u8>, fields: &[&str]| {
        out.extend_from_slice(chance.pick(fields).as_bytes());
        out.extend_from_slice(b"\r\n");
    };
    let length = chance.below(40);
    let chunked = chance.once_in(2);
    for _ in 0..chance.below(4) {
        field(
            chance,
            &mut out,
            &[
                "content-type: text/event-stream",
                "Server:  uvicorn ",
                "x-empty:",
                "set-cookie: a=b",
                "set-cookie: c",
                "x-latin: caf\u{e9}",
                "connection: close",
            ],
        );
    }
    let framings = if chunked {
        ["transfer-encoding: chunked", "Transfer-Encoding: Chunked", "transfer-encoding:chunked "].map(str::to_owned)
    } else {
        [
            format!("content-length: {length}"),
            format!("Content-Length: {length}, {length}"),
            format!("content-length:{length}\r\ncontent-length: {length}"),
        ]
    };
    match chance.below(10) {
        0 => {}
        1 => field(
            chance,
            &mut out,
            &["transfer-encoding: gzip, chunked", "transfer-encoding: identity", "content-length: +4", "content-length: 4, 5", "content-length: "],
        ),
        _ => field(chance, &mut out, &[&framings[0], &framings[0], &framings[0], &framings[1], &framings[2]]),
    }
    if chance.once_in(20) {
        field(chance, &mut out, &["content-length: 3", "transfer-encoding: chunked", " folded: x", "no colon", "spaced : x", "bad\u{7f}: x"]);
    }
    out.extend_from_slice(b"\r\n");
    if chunked {
        for _ in 0..chance.below(5) {
            let chunk = &"data: 0123456789abcdef\n\n"[..1 + chance.below(24)];
            let zeros = if chance.once_in(10) { "000" } else { "" };
            let extension = if chance.once_in(10) { chance.pick(&[";a=b", " ;x", "; a=\"b\"", " ", ";", "x", "-"]) } else { "" };
            let size = if chance.once_in(2) { format!("{:x}", chunk.len()) } else { format!("{:X}", chunk.len()) };
            out.extend_from_slice(format!("{zeros}{size}{extension}\r\n{chunk}\r\n").as_bytes());
        }
        out.extend_from_slice(chance.pick(&["0\r\n\r\n", "0\r\n\r\n", "0\r\n\r\n", "0\r\nx-trailer: y\r\n\r\n", "00;x\r\n\r\n", ""]).as_bytes());
    } else {
        out.extend((0..length).map(|at| b'a' + (at % 26) as u8));
    }
    if chance.once_in(5) {
        damage(chance, &mut out);
    }
    out
}

/// What a reader makes of an answer: its status, its headers but the one that frames it, its body, and whether that ended as it should.
type Read = (StatusCode, HeaderMap, Vec<u8>, bool);

/// As hyper's client reads it.
fn by_hyper(answer: &[u8], method: &Method) -> anyhow::Result<Option<Read>> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(async {
        let (near, mut far) = tokio::io::duplex(1 << 20);
        let (mut sender, driver) = hyper::client::conn::http1::handshake(TokioIo::new(near)).await?;
        let request = Request::builder().method(method).uri("/").body(Empty::<Bytes>::new())?;
        let backend = async move {
            let mut asked = Vec::new();
            while !asked.ends_with(b"\r\n\r\n") {
                far.read_buf(&mut asked).await?;
            }
            far.write_all(answer).await
        };
        let client = async move {
            let (mut head, mut body) = sender.send_request(request).await.ok()?.into_parts();
            let (mut read, mut whole) = (Vec::new(), true);
            while let Some(frame) = body.frame().await {
                match frame {
                    Ok(frame) => read.extend_from_slice(frame.data_ref().map_or(&[], |data| data)),
                    Err(_) => whole = false,
                }
            }
            head.headers.remove(TRANSFER_ENCODING);
            Some((head.status, head.headers, read, whole))
        };
        let (_, asked, read) = tokio::join!(driver, backend, client);
        asked?;
        Ok(read)
    })
}

/// As the gateway reads it, in pieces of any length.
fn by_headway(mut answer: &[u8], method: &Method, chance: &mut Chance) -> Result<Option<Read>, Malformed> {
    let mut bytes = BytesMut::new();
    let mut more = |bytes: &mut BytesMut| {
        let (piece, rest) = answer.split_at((1 + chance.below(30)).min(answer.len()));
        answer = rest;
        bytes.extend_from_slice(piece);
        !piece.is_empty()
    };
    let mut head = loop {
        match http1::read_head(&mut bytes, method)? {
            Some(head) => break head,
            None if more(&mut bytes) => {}
            None => return Ok(None),
        }
    };
    let mut body = Vec::new();
    let whole = loop {
        match head.framing.next(&mut bytes) {
            Ok(Next::Body(length)) => body.extend_from_slice(&bytes.split_to(length)),
            Ok(Next::More) if more(&mut bytes) => {}
            Ok(Next::More) => break head.framing == Framing::UntilClose,
            Ok(Next::End) => break true,
            Err(_) => break false,
        }
    };
    head.parts.headers.remove(TRANSFER_ENCODING);
    Ok(Some((head.parts.status, head.parts.headers, body, whole)))
}

#[test]
fn an_answer_is_read_as_hyper_reads_it() {
    try_all("answer", 10_000, |chance| {
        let answer = answer(chance);
        let method = if chance.once_in(20) { Method::HEAD } else { Method::POST };
        let shown = || answer.escape_ascii().to_string();
        let hyper = by_hyper(&answer, &method).unwrap();
        match by_headway(&answer, &method, chance) {
            Ok(Some((StatusCode::SWITCHING_PROTOCOLS, ..))) => false,
            // Stricter: hyper passes on a body of unknown coding and believes one of two framings, and looks at neither nor at lengths where there is no body.
            Err(Malformed::Coding) => false,
            Err(Malformed::Length) => {
                let bodiless = |(status, ..): &Read| method == Method::HEAD || matches!(*status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
                assert!(hyper.as_ref().is_none_or(bodiless), "{}", shown());
                false
            }
            Ok(mut read) => {
                if let (Some((.., ours, false)), Some((.., theirs, false))) = (&mut read, &hyper) {
                    // What comes before a break may be lost on the way out of hyper.
                    assert!(ours.starts_with(theirs), "{}", shown());
                    ours.truncate(theirs.len());
                }
                // Stricter: a line feed alone ends no line after the last chunk.
                let is_loose = answer.windows(2).any(|pair| pair[1] == b'\n' && pair[0] != b'\r');
                if let (Some((.., ours @ false)), Some((.., true)), true) = (&mut read, &hyper, is_loose) {
                    *ours = true;
                }
                assert_eq!(read, hyper, "{}", shown());
                read.is_some_and(|read| read.3)
            }
            Err(malformed) => {
                assert_eq!(hyper, None, "{malformed}: {}", shown());
                false
            }
        }
    });
}
