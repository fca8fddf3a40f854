//! What an answer says about itself, learnt while it passes: tokens, usage, how it ended. Pure.
//!
//! An [`Observer`] reads server-sent events whose lines may be cut anywhere; a line goes on as soon as it is whole. What needs no change is handed on in
//! the memory it came in. [`read_answer`] does the same for an answer that comes as one JSON document.

use std::borrow::Cow;
use std::ops::Range;

use super::api::json::Json;
use super::api::quoted;
use super::kept::{Changes, Fate, Kept};
use super::pattern::{Fits, Pattern};
use crate::scheduler::Tokens;
use bytes::{Bytes, BytesMut};
use memchr::{memchr, memrchr};

/// The longest line that is looked at, in bytes; a longer one passes unread and unchanged.
const MAX_LINE: usize = 1 << 20;

/// What an answer has told so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Pieces of output: the estimate of its tokens until the backend reports them.
    pieces: Tokens,
    /// The backend's own count of output tokens.
    reported: Option<Tokens>,
    /// Output of earlier backends that this one was told of, and so counts as prompt.
    told: Tokens,
    /// The backend's own count of prompt tokens.
    pub prompt_tokens: Option<Tokens>,
    /// How the answer said that it ended.
    pub finish: Option<Finish>,
    /// The dialect's last word was heard: nothing is missing.
    pub done: bool,
    /// The backend reported an error inside the stream.
    pub error: bool,
}

/// Why an answer ended, in its own words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By itself.
    Stopped,
    /// By a limit or a filter: it would have been longer.
    Truncated,
}

impl Seen {
    /// Output tokens so far. While an answer goes on, a count in it may be one of its beginning, as Anthropic's streams have it.
    pub fn output(&self) -> Tokens {
        match self.reported {
            Some(reported) if self.finish.is_some() || self.done => reported,
            reported => self.pieces.max(reported.unwrap_or(0)),
        }
    }

    /// Of these, those of the backend that answers now.
    pub fn here(&self) -> Tokens {
        self.output().saturating_sub(self.told)
    }

    /// Its tokens are the backend's own counts.
    pub fn is_counted(&self) -> bool {
        self.reported.is_some() && self.prompt_tokens.is_some() && (self.finish.is_some() || self.done)
    }

    /// Another backend has begun the answer, so that its length here is not its own.
    pub fn is_the_rest(&self) -> bool {
        self.told > 0
    }

    fn usage(&mut self, usage: &Usage) {
        let (output, prompt) = (usage.completion_tokens.or(usage.output_tokens), usage.prompt_tokens.or(usage.input_tokens));
        self.reported = output.map(|tokens| tokens.saturating_add(self.told)).or(self.reported);
        self.prompt_tokens = prompt.map(|tokens| tokens.saturating_sub(self.told)).or(self.prompt_tokens);
    }

    fn finish(&mut self, reason: &str) {
        let finish = match reason {
            "length" | "max_tokens" | "model_length" | "model_context_window_exceeded" | "content_filter" | "abort" | "incomplete" => {
                Finish::Truncated
            }
            "error" | "failed" => {
                self.error = true;
                return;
            }
            "in_progress" | "queued" => return,
            _ => Finish::Stopped,
        };
        // Of several answers to one prompt, one that was cut makes the sum a lower bound.
        if self.finish != Some(Finish::Truncated) {
            self.finish = Some(finish);
        }
    }

    /// Takes in one event or document; the place of a `model` in it, if it has one.
    fn event<'a>(&mut self, event: &Event<'a>) -> Option<Json<'a>> {
        let inner = event.message.as_ref().or(event.response.as_ref());
        for usage in [event.usage.as_ref(), inner.and_then(|inner| inner.usage.as_ref())].into_iter().flatten() {
            self.usage(usage);
        }
        self.pieces = self.pieces.saturating_add(event.pieces());
        for reason in &event.choices.finish {
            self.finish(reason);
        }
        let reasons = [&event.delta.stop_reason, &event.stop_reason, &event.status, &inner.and_then(|inner| inner.status.clone())];
        for reason in reasons.into_iter().flatten() {
            self.finish(reason);
        }
        self.done |= matches!(&*event.kind, "message_stop" | "response.completed" | "response.incomplete" | "response.failed");
        self.error |= event.error || event.kind == "error";
        inner.and_then(|inner| inner.model).or(event.model)
    }
}

/// Reads one stream of server-sent events.
pub struct Observer {
    seen: Seen,
    /// The name the client asked for, as a JSON string.
    model: Vec<u8>,
    /// The usage chunk was asked for by us alone: the client does not get it.
    hide_usage: bool,
    /// A line that has begun.
    partial: BytesMut,
    /// Within a line that is too long to look at.
    passing: bool,
    /// The event before was taken out: its blank line goes too.
    hiding: bool,
    /// What the client has got, where another backend may have to go on with it.
    kept: Option<Box<Kept>>,
    /// The last event that brought nothing but a text.
    pattern: Pattern,
}

/// What becomes of a line.
enum Verdict {
    Pass,
    Hide,
    /// This part of the payload is the model's name and becomes another.
    Rename(Range<usize>),
    /// These parts become others; in order.
    Change(Changes),
}

impl Observer {
    /// An observer that tells the client the name it asked for, `model`, and hides the last usage chunk if `hide_usage`.
    pub fn new(model: &str, hide_usage: bool) -> Observer {
        Observer {
            seen: Seen::default(),
            model: quoted(model),
            hide_usage,
            partial: BytesMut::new(),
            passing: false,
            hiding: false,
            kept: None,
            pattern: Pattern::default(),
        }
    }

    /// It keeps what the client gets from now on, behind what `kept` has.
    pub fn keep(&mut self, kept: Box<Kept>) {
        self.kept = Some(kept);
    }

    /// What the client has got; `None` where it is not kept.
    pub fn kept(&self) -> Option<&Kept> {
        self.kept.as_deref()
    }

    /// The client has not asked for the last usage chunk.
    pub fn hides_usage(&self) -> bool {
        self.hide_usage
    }

    /// An observer of the rest of the same answer, from a backend that was told what [`Kept::told`] says.
    pub fn of_the_rest(mut self, chat: bool) -> Observer {
        let told = self.kept.as_mut().map_or(0, |kept| kept.goes_on(chat, self.seen.output()));
        let seen = Seen { pieces: told, told, ..Seen::default() };
        Observer { seen, partial: BytesMut::new(), passing: false, hiding: false, pattern: Pattern::default(), ..self }
    }

    /// What is known so far.
    pub fn seen(&self) -> &Seen {
        &self.seen
    }

    /// Takes the next bytes from the backend and returns those for the client; none while a line is incomplete.
    pub fn feed(&mut self, chunk: Bytes) -> Bytes {
        let Some(end) = memrchr(b'\n', &chunk).map(|at| at + 1) else { return self.hold(chunk) };
        let mut whole = chunk;
        let tail = whole.split_off(end);
        if self.passing {
            // The long line ends here; what follows it is looked at again.
            self.passing = false;
            // There is a newline: it was found above.
            let rest = whole.split_off(memchr(b'\n', &whole).map_or(whole.len(), |at| at + 1));
            let looked_at = self.lines(rest);
            whole = concat(&whole, &looked_at);
        } else {
            if !self.partial.is_empty() {
                let mut line = std::mem::take(&mut self.partial);
                line.extend_from_slice(&whole);
                whole = line.freeze();
            }
            whole = self.lines(whole);
        }
        if tail.is_empty() { whole } else { concat(&whole, &self.hold(tail)) }
    }

    /// The backend has ended the stream: what is left for the client.
    pub fn end(&mut self) -> Bytes {
        let rest = std::mem::take(&mut self.partial).freeze();
        self.lines(rest)
    }

    /// Keeps the beginning of a line, or lets it pass if it is too long.
    fn hold(&mut self, tail: Bytes) -> Bytes {
        if self.passing {
            return tail;
        }
        if self.partial.len() + tail.len() > MAX_LINE {
            self.passing = true;
            if let Some(kept) = &mut self.kept {
                kept.lose("it has a line that is too long");
            }
            let begun = std::mem::take(&mut self.partial).freeze();
            return concat(&begun, &tail);
        }
        self.partial.extend_from_slice(&tail);
        Bytes::new()
    }

    /// Looks at whole lines (the last one may lack its newline) and makes the changes they need.
    fn lines(&mut self, lines: Bytes) -> Bytes {
        // Filled from the first change on; holds what has become of `lines[..done]`.
        let mut changed: Option<Vec<u8>> = None;
        let mut done = 0;
        let mut start = 0;
        while start < lines.len() {
            let end = memchr(b'\n', &lines[start..]).map_or(lines.len(), |at| start + at + 1);
            let line = lines[start..end].trim_ascii_end();
            let verdict = if line.is_empty() && self.hiding { Verdict::Hide } else { self.line(line) };
            self.hiding = matches!(verdict, Verdict::Hide) && !line.is_empty();
            match verdict {
                Verdict::Pass => {}
                Verdict::Hide => {
                    changed.get_or_insert_default().extend_from_slice(&lines[done..start]);
                    done = end;
                }
                Verdict::Rename(place) => {
                    let changed = changed.get_or_insert_with(|| Vec::with_capacity(lines.len() + self.model.len()));
                    changed.extend_from_slice(&lines[done..start + place.start]);
                    changed.extend_from_slice(&self.model);
                    done = start + place.end;
                }
                Verdict::Change(changes) => {
                    let changed = changed.get_or_insert_default();
                    for (place, by) in changes {
                        changed.extend_from_slice(&lines[done..start + place.start]);
                        changed.extend_from_slice(&by);
                        done = start + place.end;
                    }
                }
            }
            start = end;
        }
        match changed {
            None => lines,
            Some(mut changed) => {
                changed.extend_from_slice(&lines[done..]);
                Bytes::from(changed)
            }
        }
    }

    /// Looks at one line without its end. Comments, event names and what is not understood pass.
    fn line(&mut self, line: &[u8]) -> Verdict {
        if let Some(Fits { pieces, rename }) = self.pattern.fits(line) {
            self.seen.pieces = self.seen.pieces.saturating_add(pieces);
            return rename.map_or(Verdict::Pass, Verdict::Rename);
        }
        let Some(payload) = line.strip_prefix(b"data:").map(<[u8]>::trim_ascii_start) else { return Verdict::Pass };
        let before = self.seen;
        let (verdict, text) = self.event(line, payload);
        let pieces = self.seen.pieces - before.pieces;
        if self.seen != (Seen { pieces: self.seen.pieces, ..before }) {
            // Another event that was known may mean something else from now on.
            self.pattern.forget();
        } else if let Some(text) = text.filter(|text| pieces > 0 && !text.is_empty() && self.kept.is_none()) {
            match &verdict {
                Verdict::Pass => self.pattern.learn(line, text, Fits { pieces, rename: None }),
                Verdict::Rename(place) => self.pattern.learn(line, text, Fits { pieces, rename: Some(place.clone()) }),
                Verdict::Hide | Verdict::Change(_) => {}
            }
        }
        verdict
    }

    /// Looks at one event, the payload of `line`; tells a text in it that may be all its news.
    fn event<'a>(&mut self, line: &[u8], payload: &'a [u8]) -> (Verdict, Option<&'a str>) {
        if payload == b"[DONE]" {
            self.seen.done = true;
            return (Verdict::Pass, None);
        }
        let Some((json, event)) = Json::check(payload).ok().and_then(|json| Some((json, Event::of(json)?))) else {
            if let Some(kept) = &mut self.kept {
                kept.lose("it has an event that cannot be read");
            }
            return (Verdict::Pass, None);
        };
        let model = self.seen.event(&event);
        if self.hide_usage && event.usage.is_some() && event.choices.is_empty_list {
            return (Verdict::Hide, None);
        }
        let text = event.delta.text.or(event.choices.text);
        let renamed = model.filter(|model| model.get().as_bytes() != self.model).map(|model| model.place(line));
        let changes = match self.kept.as_mut().map(|kept| kept.event(json, line)) {
            None => Changes::new(),
            Some(Fate::Hide) => return (Verdict::Hide, None),
            Some(Fate::Change(changes)) => changes,
        };
        let verdict = match renamed {
            Some(place) if changes.is_empty() => Verdict::Rename(place),
            None if changes.is_empty() => Verdict::Pass,
            renamed => {
                let mut changes = changes;
                changes.extend(renamed.map(|place| (place, self.model.clone())));
                changes.sort_by_key(|(place, _)| place.start);
                Verdict::Change(changes)
            }
        };
        (verdict, text)
    }
}

/// Reads an answer that came as one JSON document, and names the model as the client did. `None` if it is not JSON.
pub fn read_answer(body: &Bytes, model: &str) -> Option<(Seen, Bytes)> {
    let event = Event::of(Json::check(body).ok()?)?;
    let mut seen = Seen::default();
    let place = seen.event(&event).map(|model| model.place(body));
    seen.done = true;
    if seen.reported.is_none() {
        // No usage: the document's length is the best guess there is.
        seen.pieces = u32::try_from(body.len() / 4).unwrap_or(u32::MAX);
    }
    let model = quoted(model);
    let body = match place {
        Some(place) if body[place.clone()] != model[..] => Bytes::from([&body[..place.start], &model, &body[place.end..]].concat()),
        _ => body.clone(),
    };
    Some((seen, body))
}

fn concat(a: &Bytes, b: &Bytes) -> Bytes {
    match (a.is_empty(), b.is_empty()) {
        (true, _) => b.clone(),
        (_, true) => a.clone(),
        _ => Bytes::from([a.as_ref(), b.as_ref()].concat()),
    }
}

/// What the dialects' events and documents have that is looked at: OpenAI's chunks at the top, Anthropic's and the responses API's by `type`.
#[derive(Default)]
struct Event<'a> {
    kind: Cow<'a, str>,
    model: Option<Json<'a>>,
    choices: Choices<'a>,
    usage: Option<Usage>,
    delta: Delta<'a>,
    message: Option<Inner<'a>>,
    response: Option<Inner<'a>>,
    stop_reason: Option<Cow<'a, str>>,
    status: Option<Cow<'a, str>>,
    error: bool,
}

/// The message of Anthropic's first event, the response in the responses API's events.
#[derive(Default)]
struct Inner<'a> {
    model: Option<Json<'a>>,
    usage: Option<Usage>,
    status: Option<Cow<'a, str>>,
}

struct Usage {
    prompt_tokens: Option<Tokens>,
    completion_tokens: Option<Tokens>,
    input_tokens: Option<Tokens>,
    output_tokens: Option<Tokens>,
}

/// All choices of a chunk, folded.
#[derive(Default)]
struct Choices<'a> {
    /// The list is there and has nothing in it.
    is_empty_list: bool,
    /// Choices that brought output.
    pieces: Tokens,
    /// One of their texts, as it is written.
    text: Option<&'a str>,
    finish: Vec<Cow<'a, str>>,
}

/// Whether anything is in a piece of output, and Anthropic's reason to stop.
#[derive(Default)]
struct Delta<'a> {
    any: bool,
    /// One of its texts, as it is written.
    text: Option<&'a str>,
    stop_reason: Option<Cow<'a, str>>,
}

impl<'a> Event<'a> {
    /// `None` if it is no JSON object.
    fn of(payload: Json<'a>) -> Option<Event<'a>> {
        let mut event = Event::default();
        for (name, value) in payload.members()? {
            match &*name {
                "type" => event.kind = value.string().unwrap_or_default(),
                "model" => event.model = Some(value).filter(|value| value.is_string()),
                "choices" => event.choices = Choices::of(value),
                "usage" => event.usage = Usage::of(value),
                "delta" => event.delta = Delta::of(value),
                "message" => event.message = Inner::of(value),
                "response" => event.response = Inner::of(value),
                "stop_reason" => event.stop_reason = value.string(),
                "status" => event.status = value.string(),
                "error" => event.error = !value.is_null(),
                _ => {}
            }
        }
        Some(event)
    }

    /// Pieces of output that it brings.
    fn pieces(&self) -> Tokens {
        let is_delta = self.kind.ends_with("_delta") || self.kind.ends_with(".delta");
        self.choices.pieces.saturating_add(u32::from(is_delta && self.delta.any))
    }
}

impl<'a> Inner<'a> {
    fn of(value: Json<'a>) -> Option<Inner<'a>> {
        let mut inner = Inner::default();
        for (name, value) in value.members()? {
            match &*name {
                "model" => inner.model = Some(value).filter(|value| value.is_string()),
                "usage" => inner.usage = Usage::of(value),
                "status" => inner.status = value.string(),
                _ => {}
            }
        }
        Some(inner)
    }
}

impl Usage {
    fn of(value: Json) -> Option<Usage> {
        let mut usage = Usage { prompt_tokens: None, completion_tokens: None, input_tokens: None, output_tokens: None };
        for (name, value) in value.members()? {
            let slot = match &*name {
                "prompt_tokens" => &mut usage.prompt_tokens,
                "completion_tokens" => &mut usage.completion_tokens,
                "input_tokens" => &mut usage.input_tokens,
                "output_tokens" => &mut usage.output_tokens,
                _ => continue,
            };
            *slot = value.get().parse().ok();
        }
        Some(usage)
    }
}

impl<'a> Choices<'a> {
    fn of(value: Json<'a>) -> Choices<'a> {
        let mut choices = Choices::default();
        let Some(elements) = value.elements() else { return choices };
        choices.is_empty_list = true;
        for choice in elements {
            choices.is_empty_list = false;
            let Some(choice) = choice.members() else { continue };
            let mut any = false;
            for (name, value) in choice {
                match &*name {
                    "delta" => {
                        let delta = Delta::of(value);
                        any |= delta.any;
                        choices.text = delta.text.or(choices.text);
                    }
                    "text" => {
                        any |= says_something(value);
                        choices.text = value.inner().or(choices.text);
                    }
                    "finish_reason" => choices.finish.extend(value.string()),
                    _ => {}
                }
            }
            choices.pieces += u32::from(any);
        }
        choices
    }
}

impl<'a> Delta<'a> {
    fn of(value: Json<'a>) -> Delta<'a> {
        let mut delta = Delta::default();
        let Some(members) = value.members() else {
            // The responses API's deltas are plain text.
            return Delta { any: value.is_string() && says_something(value), text: value.inner(), stop_reason: None };
        };
        for (name, value) in members {
            match &*name {
                "stop_reason" => delta.stop_reason = value.string(),
                "content" | "reasoning_content" | "reasoning" | "refusal" | "tool_calls" | "function_call" | "text" | "thinking" | "partial_json" => {
                    delta.any |= says_something(value);
                    delta.text = value.inner().or(delta.text);
                }
                _ => {}
            }
        }
        delta
    }
}

/// True for a text, list or object with something in it.
fn says_something(value: Json) -> bool {
    match value.get().as_bytes()[0] {
        b'"' => value.get().len() > r#""""#.len(),
        b'[' => value.elements().is_some_and(|mut elements| elements.next().is_some()),
        b'{' => value.members().is_some_and(|mut members| members.next().is_some()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CHAT: &str = concat!(
        ": keep-alive\n\n",
        "data: {\"id\":\"a\",\"model\":\"up\",\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n",
        "data: {\"id\":\"a\",\"model\":\"up\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"é [DONE]\\n\\\"usage\\\":\"},\"finish_reason\":null}]}\n\n",
        "data: {\"id\":\"a\",\"model\":\"up\",\"choices\":[{\"index\":0,\"delta\":{\"reasoning_content\":\"hm\"}}],\"usage\":null}\r\n\r\n",
        "data: {\"id\":\"a\",\"model\":\"up\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"length\"}]}\n\n",
        "data: {\"id\":\"a\",\"model\":\"up\",\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3}}\n\n",
        "data: [DONE]\n\n",
    );
    const MESSAGES: &str = concat!(
        "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"up\",\"usage\":{\"input_tokens\":9,\"output_tokens\":1}}}\n\n",
        "event: ping\ndata: {\"type\": \"ping\"}\n\n",
        "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"Hi\"}}\n\n",
        "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":12}}\n\n",
        "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
    );
    const RESPONSES: &str = concat!(
        "event: response.created\ndata: {\"type\":\"response.created\",\"response\":{\"model\":\"up\",\"status\":\"in_progress\",\"usage\":null}}\n\n",
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"Hi\"}\n\n",
        "event: response.incomplete\ndata: {\"type\":\"response.incomplete\",\"response\":{\"model\":\"up\",\"status\":\"incomplete\",",
        "\"usage\":{\"input_tokens\":4,\"output_tokens\":5}}}\n\n",
    );

    fn run<'a>(observer: &mut Observer, pieces: impl IntoIterator<Item = &'a [u8]>) -> String {
        let mut all = Vec::new();
        for piece in pieces {
            all.extend_from_slice(&observer.feed(Bytes::copy_from_slice(piece)));
        }
        all.extend_from_slice(&observer.end());
        String::from_utf8(all).unwrap()
    }

    fn seen(output: Tokens, prompt: Tokens, finish: Finish) -> impl Fn(&Seen) -> bool {
        move |seen| seen.output() == output && seen.prompt_tokens == Some(prompt) && seen.finish == Some(finish) && seen.done && !seen.error
    }

    /// Whatever the borders of packets, down to single bytes: the same is learnt and the same comes out.
    #[test]
    fn every_cut_gives_the_same() {
        for (text, hide, check) in [
            (CHAT, true, Box::new(seen(3, 7, Finish::Truncated)) as Box<dyn Fn(&Seen) -> bool>),
            (CHAT, false, Box::new(seen(3, 7, Finish::Truncated))),
            (MESSAGES, false, Box::new(seen(12, 9, Finish::Stopped))),
            (RESPONSES, false, Box::new(seen(5, 4, Finish::Truncated))),
        ] {
            let mut expected = text.replace("\"model\":\"up\"", "\"model\":\"asked\"");
            if hide {
                let start = expected.find("data: {\"id\":\"a\",\"model\":\"asked\",\"choices\":[]").unwrap();
                expected.replace_range(start..expected.find("data: [DONE]\n").unwrap(), "");
            }
            for cut in 0..=text.len() {
                let mut observer = Observer::new("asked", hide);
                let (a, b) = text.as_bytes().split_at(cut);
                assert_eq!(run(&mut observer, [a, b]), expected, "cut at {cut}");
                assert!(check(observer.seen()), "cut at {cut}: {:?}", observer.seen());
            }
            let mut observer = Observer::new("asked", hide);
            assert_eq!(run(&mut observer, text.as_bytes().chunks(1)), expected);
            assert!(check(observer.seen()));
        }
    }

    #[test]
    fn without_a_change_nothing_is_copied() {
        let chunk = Bytes::from_static(CHAT.as_bytes());
        let mut observer = Observer::new("up", false);
        assert_eq!(observer.feed(chunk.clone()).as_ptr(), chunk.as_ptr());
        assert_eq!(observer.seen().output(), 3);
    }

    #[test]
    fn tokens_are_estimated_until_they_are_reported() {
        let mut observer = Observer::new("up", false);
        let mut outputs = Vec::new();
        for event in CHAT.split_inclusive("\n\n") {
            observer.feed(Bytes::from_static(event.as_bytes()));
            outputs.push(observer.seen().output());
        }
        // The chunk with CRLF line ends comes with the one after it.
        assert_eq!(outputs, [0, 0, 1, 2, 3, 3]);
        let mut observer = Observer::new("up", false);
        observer.feed(Bytes::from_static(b"data:{\"choices\":[{\"text\":\"a\"},{\"text\":\"\"},{\"text\":\"b\"}]}\n"));
        assert_eq!(observer.seen().output(), 2);
        observer.feed(Bytes::from_static(b"data:{\"choices\":[{\"delta\":{\"tool_calls\":[{}]}}]}\n"));
        assert_eq!(observer.seen().output(), 3);
    }

    #[test]
    fn usage_is_merged_per_field() {
        let mut observer = Observer::new("up", false);
        observer.feed(Bytes::from_static(b"data: {\"usage\":{\"prompt_tokens\":5}}\n\ndata: {\"usage\":{\"completion_tokens\":6}}\n\n"));
        assert_eq!((observer.seen().prompt_tokens, observer.seen().output()), (Some(5), 6));
    }

    #[test]
    fn an_error_in_the_stream_is_seen() {
        for line in [
            "data: {\"error\":{\"message\":\"x\"}}\n",
            "data: {\"type\":\"error\"}\n",
            "data: {\"type\":\"response.failed\",\"response\":{\"status\":\"failed\"}}\n",
        ] {
            let mut observer = Observer::new("up", false);
            observer.feed(Bytes::from_static(line.as_bytes()));
            assert!(observer.seen().error, "{line}");
        }
        let mut observer = Observer::new("up", false);
        observer.feed(Bytes::from_static(b"data: {\"error\":null}\n"));
        assert!(!observer.seen().error);
    }

    #[test]
    fn a_line_too_long_passes_and_the_next_is_read() {
        let long = format!("data: {{\"model\":\"up\",\"x\":\"{}\"}}\n\n", "y".repeat(2 * MAX_LINE));
        let text = format!("{long}{CHAT}");
        let mut observer = Observer::new("asked", false);
        let out = run(&mut observer, text.as_bytes().chunks(8192));
        assert_eq!(out, format!("{long}{}", CHAT.replace("\"model\":\"up\"", "\"model\":\"asked\"")));
        assert_eq!(observer.seen().output(), 3);
        assert!(observer.partial.capacity() <= 2 * MAX_LINE);
    }

    #[test]
    fn a_whole_answer_is_read() {
        let body = Bytes::from_static(
            b"{\"id\":\"a\",\"model\":\"up\",\"choices\":[{\"message\":{\"content\":\"Hi\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":3}}",
        );
        let (answer, renamed) = read_answer(&body, "asked").unwrap();
        assert!(seen(3, 2, Finish::Stopped)(&answer));
        assert_eq!(renamed, String::from_utf8(body.to_vec()).unwrap().replace("up", "asked"));
        assert_eq!(read_answer(&body, "up").unwrap().1.as_ptr(), body.as_ptr());
        let body = Bytes::from_static(
            b"{\"type\":\"message\",\"model\":\"up\",\"stop_reason\":\"max_tokens\",\"usage\":{\"input_tokens\":1,\"output_tokens\":8},\"content\":[{}]}",
        );
        assert!(seen(8, 1, Finish::Truncated)(&read_answer(&body, "up").unwrap().0));
        let body = Bytes::from_static(
            b"{\"object\":\"response\",\"status\":\"completed\",\"model\":\"up\",\"usage\":{\"input_tokens\":1,\"output_tokens\":8}}",
        );
        assert!(seen(8, 1, Finish::Stopped)(&read_answer(&body, "up").unwrap().0));
        assert_eq!(read_answer(&Bytes::from_static(b"{"), "up"), None);
    }

    fn chunk(id: &str, delta: &str) -> String {
        format!("data: {{\"id\":\"{id}\",\"created\":{},\"model\":\"up\",\"choices\":[{{\"index\":0,\"delta\":{delta}}}]}}\n\n", id.len())
    }

    /// Two backends, one answer: cut anywhere in the first one's last event, that event is the second one's to say.
    #[test]
    fn the_rest_of_an_answer_joins_its_beginning() {
        const ROLE: &str = r#"{"role":"assistant","content":""}"#;
        let word = |id, text: &str| chunk(id, &format!(r#"{{"content":"{text}"}}"#));
        let usage = |prompt, output| {
            format!("data: {{\"model\":\"up\",\"choices\":[],\"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":{output}}}}}\n\n")
        };
        let begin = [chunk("one", ROLE), word("one", "a")].concat();
        let cut = word("one", " é");
        let rest = [": keep-alive\n\n", &chunk("second", ROLE), &word("second", " é"), &usage(8, 3), "data: [DONE]\n\n"].concat();
        let asked = |text: String| text.replace("\"up\"", "\"asked\"");
        for length in 0..cut.find('\n').unwrap() {
            let mut first = Observer::new("asked", false);
            first.keep(Box::default());
            let mut out = String::from_utf8(first.feed(Bytes::from(begin.clone())).to_vec()).unwrap();
            out.push_str(std::str::from_utf8(&first.feed(Bytes::copy_from_slice(&cut.as_bytes()[..length]))).unwrap());
            assert_eq!(first.seen().output(), 1);
            assert_eq!(first.kept().unwrap().told(true, 1), Ok(("a", 1)));
            let mut second = first.of_the_rest(true);
            out.push_str(&run(&mut second, rest.as_bytes().chunks(7)));
            let usage = usage(7, 4);
            assert_eq!(out, asked(format!("{begin}: keep-alive\n\n{}{usage}data: [DONE]\n\n", word("one", " é"))), "cut at {length}");
            assert_eq!((second.seen().prompt_tokens, second.seen().output(), second.seen().done), (Some(7), 4, true));
        }
    }

    #[test]
    fn what_cannot_be_read_cannot_be_gone_on_with() {
        for line in ["data: {\n".to_owned(), format!("data: {}", "x".repeat(MAX_LINE))] {
            let mut observer = Observer::new("up", false);
            observer.keep(Box::default());
            observer.feed(Bytes::from(line));
            assert!(observer.kept().unwrap().told(true, 0).is_err());
        }
    }

    /// Events as engines write them, often the same one with another text, and now and then another.
    fn event() -> impl Strategy<Value = String> {
        let text = prop_oneof![
            8 => "[ -~é]{0,6}".prop_map(|text| serde_json::to_string(&text).unwrap()),
            1 => prop::sample::select(vec!["\"\\n\"", "\"\\u00e9\"", "\"\\ud800\"", "\"\\x\"", "\"a\u{1}\"", "null", "[1]", "\"\",\"x\":\"\""]).prop_map(str::to_owned),
        ];
        let form = prop::sample::select(vec![
            r#"{"id":"a","model":"up","choices":[{"index":0,"delta":{"content":TEXT},"finish_reason":null}]}"#,
            r#"{"choices":[{"index":0,"delta":{"content":TEXT}}],"created":7,"model":"up"}"#,
            r#"{"choices":[{"delta":{"content":TEXT,"reasoning":"b"}}],"usage":{"completion_tokens":4}}"#,
            r#"{"choices":[{"delta":{"content":TEXT}}],"usage":{"completion_tokens":9}}"#,
            r#"{"choices":[{"text":TEXT},{"text":"b"}]}"#,
            r#"{"choices":[{"text":"a"},{"text":TEXT,"finish_reason":"length"}],"model":"up"}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3},"x":TEXT}"#,
            r#"{"type":"content_block_delta","delta":{"type":"text_delta","text":TEXT}}"#,
            r#"{"type":"response.output_text.delta","delta":TEXT}"#,
            r#"{"type":"message_delta","delta":{"stop_reason":TEXT}}"#,
            r#"{"error":TEXT}"#,
        ]);
        (form, text).prop_map(|(form, text)| format!("data: {}\n\n", form.replace("TEXT", &text)))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1_000))]

        /// Knowing the event before changes nothing that is learnt or sent.
        #[test]
        fn an_event_that_is_known_says_what_it_would_say_read(forms in prop::collection::vec((event(), 1..4_usize), 1..8), asked in "up|other", hide: bool) {
            let mut knowing = Observer::new(&asked, hide);
            let mut reading = Observer::new(&asked, hide);
            for event in forms.iter().flat_map(|(event, times)| std::iter::repeat_n(event, *times)) {
                reading.pattern.forget();
                let event = Bytes::copy_from_slice(event.as_bytes());
                prop_assert_eq!(knowing.feed(event.clone()), reading.feed(event));
                prop_assert_eq!(knowing.seen(), reading.seen());
            }
        }
    }

    #[test]
    fn an_event_like_the_one_before_is_known() {
        let mut observer = Observer::new("asked", false);
        let event = |text: &str| format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{text}\"}}}}],\"model\":\"up\"}}\n\n");
        for (text, known) in [("a", false), ("bc", true), ("\\n", true), ("é", true), ("\\u00e9", false), ("d", true), ("", false), ("e", true)] {
            assert_eq!(observer.pattern.fits(event(text).trim_ascii_end().as_bytes()).is_some(), known, "{text}");
            let sent = observer.feed(Bytes::from(event(text)));
            assert_eq!(sent, event(text).replace("up", "asked"));
        }
        assert_eq!(observer.seen().output(), 7);
        observer.feed(Bytes::from_static(b"data: {\"usage\":{\"completion_tokens\":9}}\n\n"));
        assert_eq!(observer.pattern.fits(event("f").trim_ascii_end().as_bytes()), None);
    }

    proptest! {
        #[test]
        fn whatever_comes_passes_unchanged_if_it_says_nothing(
            pieces in prop::collection::vec(prop::collection::vec(prop_oneof![Just(b'\n'), Just(b'\r'), Just(b'd'), any::<u8>()], 0..40), 0..20),
        ) {
            let mut observer = Observer::new("m", true);
            let mut out = Vec::new();
            for piece in &pieces {
                out.extend_from_slice(&observer.feed(Bytes::copy_from_slice(piece)));
            }
            out.extend_from_slice(&observer.end());
            prop_assert_eq!(out, pieces.concat());
        }
    }
}
