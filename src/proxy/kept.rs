//! What a client has got of an answer, kept so that another backend can go on with it, and what that backend's events become on their way. Pure.

use std::ops::Range;

use super::api::json::Json;
use super::api::quoted;
use crate::scheduler::Tokens;

/// The longest text that is kept, in bytes: an answer that is longer ends with its backend.
pub const MAX_KEPT: usize = 256 << 10;
/// What a thought begins with that stands in the text itself; it may come in some pieces, behind blank ones.
const THOUGHT: &str = "<think>";

/// The beginning of an answer.
#[derive(Debug, Default)]
pub struct Kept {
    text: String,
    /// Why it cannot be gone on with.
    lost: Option<&'static str>,
    /// `id` and `created` of its first event, as they were written.
    id: Option<String>,
    created: Option<String>,
    /// The client has been told the role.
    has_role: bool,
    /// Events at the end of the text that were whitespace alone.
    blank_events: Tokens,
    /// Another backend goes on with it.
    continued: Option<Rest>,
}

/// How the rest of an answer differs from one of its own.
#[derive(Debug)]
struct Rest {
    /// Whitespace that the client has and the backend was not told of: it may come again.
    again: String,
    /// Tokens that the backend was told of: it counts them as prompt.
    told: Tokens,
}

/// Changes of an event: what stands in place of which bytes of it.
pub type Changes = Vec<(Range<usize>, Vec<u8>)>;

/// What becomes of an event of the rest.
pub enum Fate {
    /// The client has it already.
    Hide,
    /// It goes on, with these changes, in no order.
    Change(Changes),
}

impl Kept {
    /// What is to be told of it to another backend, which are this many of its `output` tokens. Empty: the request is sent as it was. Templates strip the
    /// whitespace around a message, so it is left out here, and taken out of what comes if it comes again; a plain prompt is nobody's to strip.
    ///
    /// # Errors
    /// Why it cannot be gone on with.
    pub fn told(&self, chat: bool, output: Tokens) -> Result<(&str, Tokens), &'static str> {
        match self.lost {
            Some(why) => Err(why),
            None if !chat => Ok((&self.text, output)),
            None => match self.text.trim_end() {
                "" => Ok(("", 0)),
                text => Ok((text, output.saturating_sub(self.blank_events))),
            },
        }
    }

    /// Another backend goes on with what [`Kept::told`] says; how many tokens that is.
    pub fn goes_on(&mut self, chat: bool, output: Tokens) -> Tokens {
        let Ok((text, told)) = self.told(chat, output) else { return 0 };
        let again = self.text[text.len()..].to_owned();
        self.continued = Some(Rest { again, told });
        // They are not in what it was told, and count again where they come again.
        self.blank_events = 0;
        told
    }

    /// It cannot be gone on with any more.
    pub fn lose(&mut self, why: &'static str) {
        if self.lost.is_none() {
            self.lost = Some(why);
            self.text = String::new();
        }
    }

    /// Takes in an event on its way to the client: its payload, a part of `line`, in which the changes are.
    pub fn event(&mut self, payload: Json, line: &[u8]) -> Fate {
        let mut changes = Changes::new();
        let Some(event) = Event::of(payload) else {
            self.lose("it has an event of another form");
            return Fate::Change(changes);
        };
        let mut replace = |value: Json, by: Vec<u8>| {
            if value.get().as_bytes() != by {
                changes.push((value.place(line), by));
            }
        };
        let is_rest = self.continued.is_some();
        for (value, kept) in [(event.id, &mut self.id), (event.created, &mut self.created)] {
            match (value, kept) {
                (Some(value), Some(kept)) if is_rest => replace(value, kept.clone().into_bytes()),
                (Some(value), kept @ None) => *kept = Some(value.get().to_owned()),
                _ => {}
            }
        }
        if let (Some(usage), Some(rest)) = (&event.usage, &self.continued) {
            let prompt = usage.prompt_tokens.map(|(value, count)| (value, count.saturating_sub(rest.told)));
            if let Some((value, count)) = prompt {
                replace(value, count.to_string().into_bytes());
            }
            if let Some((value, count)) = usage.completion_tokens {
                replace(value, count.saturating_add(rest.told).to_string().into_bytes());
            }
            if let (Some((value, cached)), Some((_, prompt))) = (usage.cached_tokens, prompt) {
                replace(value, cached.min(prompt).to_string().into_bytes());
            }
        }
        let choice = match &event.choices[..] {
            [] => return Fate::Change(changes),
            [choice] if choice.index.unwrap_or(0) == 0 => choice,
            _ => {
                self.lose("it is several answers");
                return Fate::Change(changes);
            }
        };
        if choice.is_more_than_text() {
            self.lose("it is more than text");
        }
        let mut is_news = choice.finish_reason.is_some() || event.usage.is_some() || choice.delta.other;
        if let Some(value) = choice.delta.role {
            if is_rest && self.has_role {
                replace(value, b"null".to_vec());
            } else {
                is_news = true;
            }
            self.has_role = true;
        }
        let (value, text) = match (choice.delta.content, choice.text) {
            // What is no string says nothing.
            (Some(value), _) | (None, Some(value)) => (value, value.string().unwrap_or_default()),
            (None, None) => return if is_rest && !is_news { Fate::Hide } else { Fate::Change(changes) },
        };
        let known = self.continued.as_mut().map_or(0, |rest| rest.known(&text));
        let new = &text[known..];
        if known > 0 {
            replace(value, quoted(new));
        }
        if known > 0 && new.is_empty() {
            self.blank_events += 1;
        }
        self.keep(new);
        if is_rest && new.is_empty() && !is_news { Fate::Hide } else { Fate::Change(changes) }
    }

    fn keep(&mut self, text: &str) {
        if text.is_empty() || self.lost.is_some() {
            return;
        }
        if self.text.len() + text.len() > MAX_KEPT {
            return self.lose("it is too long");
        }
        self.blank_events = if text.trim_end().is_empty() { self.blank_events + 1 } else { 0 };
        self.text.push_str(text);
        // What a model thinks aloud is cut out of its earlier messages by its template.
        if self.text.len() - text.len() < 2 * THOUGHT.len() && self.text.trim_start().starts_with(THOUGHT) {
            self.lose("it begins with a thought");
        }
    }
}

impl Rest {
    /// How many bytes of what comes the client has already.
    fn known(&mut self, text: &str) -> usize {
        if text.is_empty() {
            return 0;
        }
        let same = self.again.char_indices().zip(text.chars()).take_while(|((_, a), b)| a == b).map(|((at, a), _)| at + a.len_utf8()).last();
        let known = same.unwrap_or(0);
        if known < text.len() {
            self.again.clear();
        } else {
            self.again.drain(..known);
        }
        known
    }
}

/// Whether a value says anything.
fn says_something(value: Json) -> bool {
    !matches!(value.get(), "null" | "\"\"" | "[]" | "{}" | "false")
}

/// A value that is there and not null.
fn given(value: Json) -> Option<Json> {
    Some(value).filter(|value| !value.is_null())
}

#[derive(Default)]
struct Event<'a> {
    id: Option<Json<'a>>,
    created: Option<Json<'a>>,
    choices: Vec<Choice<'a>>,
    usage: Option<Usage<'a>>,
}

#[derive(Default)]
struct Choice<'a> {
    index: Option<u32>,
    delta: Delta<'a>,
    text: Option<Json<'a>>,
    finish_reason: Option<Json<'a>>,
    logprobs: Option<Json<'a>>,
}

#[derive(Default)]
struct Delta<'a> {
    role: Option<Json<'a>>,
    content: Option<Json<'a>>,
    /// It has something that is neither.
    other: bool,
}

/// Counts, and where they stand.
#[derive(Default)]
struct Usage<'a> {
    prompt_tokens: Option<(Json<'a>, Tokens)>,
    completion_tokens: Option<(Json<'a>, Tokens)>,
    cached_tokens: Option<(Json<'a>, Tokens)>,
}

// Each `of` gives `None` for what has another form than OpenAI's.

impl<'a> Event<'a> {
    fn of(payload: Json<'a>) -> Option<Event<'a>> {
        let mut event = Event::default();
        for (name, value) in payload.members()? {
            match &*name {
                "id" => event.id = given(value),
                "created" => event.created = given(value),
                "choices" if !value.is_null() => event.choices = value.elements()?.map(Choice::of).collect::<Option<_>>()?,
                "usage" if !value.is_null() => event.usage = Some(Usage::of(value)?),
                _ => {}
            }
        }
        Some(event)
    }
}

impl<'a> Choice<'a> {
    fn of(value: Json<'a>) -> Option<Choice<'a>> {
        let mut choice = Choice::default();
        for (name, value) in value.members()? {
            match &*name {
                "index" if !value.is_null() => choice.index = Some(value.get().parse().ok()?),
                "delta" if !value.is_null() => choice.delta = Delta::of(value)?,
                "text" => choice.text = given(value),
                "finish_reason" => choice.finish_reason = given(value),
                "logprobs" => choice.logprobs = given(value),
                _ => {}
            }
        }
        Some(choice)
    }

    fn is_more_than_text(&self) -> bool {
        self.delta.other || self.logprobs.is_some_and(says_something)
    }
}

impl<'a> Delta<'a> {
    fn of(value: Json<'a>) -> Option<Delta<'a>> {
        let mut delta = Delta::default();
        for (name, value) in value.members()? {
            match &*name {
                "role" => delta.role = Some(value).filter(|value| says_something(*value)),
                "content" => {
                    delta.content = Some(value).filter(|value| value.is_string());
                    delta.other |= delta.content.is_none() && says_something(value);
                }
                _ => delta.other |= says_something(value),
            }
        }
        Some(delta)
    }
}

impl<'a> Usage<'a> {
    fn of(value: Json<'a>) -> Option<Usage<'a>> {
        let counted = |value: Json<'a>| value.get().parse().ok().map(|count| (value, count));
        let mut usage = Usage::default();
        for (name, value) in value.members()? {
            match &*name {
                "prompt_tokens" => usage.prompt_tokens = counted(value),
                "completion_tokens" => usage.completion_tokens = counted(value),
                "prompt_tokens_details" if !value.is_null() => {
                    let cached = value.members()?.filter(|(name, _)| name == "cached_tokens").last();
                    usage.cached_tokens = cached.and_then(|(_, value)| counted(value));
                }
                _ => {}
            }
        }
        Some(usage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(payload: &str, fate: Fate) -> Option<String> {
        let Fate::Change(mut changes) = fate else { return None };
        changes.sort_by_key(|(range, _)| std::cmp::Reverse(range.start));
        let mut out = payload.to_owned();
        for (range, by) in changes {
            out.replace_range(range, std::str::from_utf8(&by).unwrap());
        }
        Some(out)
    }

    fn word(id: &str, delta: &str) -> String {
        format!(r#"{{"id":"{id}","created":{},"model":"m","choices":[{{"index":0,"delta":{delta},"finish_reason":null}}]}}"#, id.len())
    }

    fn pass(kept: &mut Kept, payload: &str) -> Option<String> {
        let fate = kept.event(Json::check(payload.as_bytes()).unwrap(), payload.as_bytes());
        changed(payload, fate)
    }

    fn begun(deltas: &[&str]) -> Kept {
        let mut kept = Kept::default();
        for delta in deltas {
            let payload = word("first", delta);
            assert_eq!(pass(&mut kept, &payload).as_ref(), Some(&payload), "the first backend's events pass as they are");
        }
        kept
    }

    const ROLE: &str = r#"{"role":"assistant","content":null}"#;

    #[test]
    fn the_rest_has_the_first_ones_names_and_no_second_role() {
        let mut kept = begun(&[ROLE, r#"{"content":"one"}"#, r#"{"content":" two"}"#]);
        assert_eq!(kept.told(true, 2), Ok(("one two", 2)));
        kept.goes_on(true, 2);
        assert_eq!(pass(&mut kept, &word("other", ROLE)), None);
        assert_eq!(pass(&mut kept, &word("other", r#"{"role":"assistant","content":""}"#)), None);
        assert_eq!(
            pass(&mut kept, &word("other", r#"{"role":"assistant","content":" three"}"#)).unwrap(),
            word("first", r#"{"role":null,"content":" three"}"#)
        );
        let usage = |id: &str, prompt, output, cached| {
            let details = format!(r#""prompt_tokens_details":{{"cached_tokens":{cached}}}"#);
            let counts = format!(r#""prompt_tokens":{prompt},"completion_tokens":{output},"total_tokens":15"#);
            format!(r#"{{"id":"{id}","created":5,"choices":[],"usage":{{{counts},{details}}}}}"#)
        };
        assert_eq!(pass(&mut kept, &usage("other", 12, 3, 11)).unwrap(), usage("first", 10, 5, 10));
        // And once more, from where the client is now.
        assert_eq!(kept.told(true, 3), Ok(("one two three", 3)));
        assert_eq!(kept.lost, None);
    }

    #[test]
    fn an_answer_that_has_only_its_role_begins_again() {
        let mut kept = begun(&[ROLE]);
        assert_eq!(kept.told(true, 0), Ok(("", 0)));
        kept.goes_on(true, 0);
        assert_eq!(pass(&mut kept, &word("other", ROLE)), None);
        assert_eq!(pass(&mut kept, &word("other", r#"{"content":"one"}"#)).unwrap(), word("first", r#"{"content":"one"}"#));

        let mut kept = Kept::default();
        kept.goes_on(true, 0);
        let role = word("other", ROLE);
        assert_eq!(pass(&mut kept, &role).unwrap(), role, "nothing came before it");
    }

    #[test]
    fn whitespace_at_the_end_is_not_told_and_does_not_come_twice() {
        let texts = |kept: &mut Kept, pieces: &[&str]| {
            let mut all = String::new();
            for piece in pieces {
                if let Some(out) = pass(kept, &word("x", &format!(r#"{{"content":{}}}"#, serde_json::json!(piece)))) {
                    let event: serde_json::Value = serde_json::from_str(&out).unwrap();
                    all.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap());
                }
            }
            all
        };
        for (rest, expected) in [
            (&["\n\n", "two"][..], "two"),
            (&["\n", "\n", "two"], "two"),
            (&["\n\ntwo"], "two"),
            (&["\n\n\n", "two"], "\ntwo"),
            (&["two"], "two"),
            (&["\n", " two"], " two"),
            (&["\n", "two", "\n"], "two\n"),
        ] {
            let mut kept = begun(&[r#"{"content":"one"}"#, r#"{"content":"\n"}"#, r#"{"content":"\n"}"#]);
            assert_eq!(kept.told(true, 3), Ok(("one", 1)));
            assert_eq!(kept.told(false, 3), Ok(("one\n\n", 3)));
            kept.goes_on(true, 3);
            assert_eq!(texts(&mut kept, rest), expected, "{rest:?}");
            assert_eq!(kept.text, format!("one\n\n{expected}"), "what the client has");
        }
        // A backend that dies at once, or after whitespace that the client has: the next is told of the same.
        let mut kept = begun(&[r#"{"content":"one"}"#, r#"{"content":"\n"}"#]);
        assert_eq!(kept.goes_on(true, 2), 1);
        assert_eq!(kept.told(true, 1), Ok(("one", 1)));
        assert_eq!(texts(&mut kept, &["\n"]), "");
        assert_eq!(kept.told(true, 2), Ok(("one", 1)));

        let mut kept = begun(&[r#"{"content":" \u00e9 "}"#]);
        assert_eq!(kept.told(true, 1), Ok((" é", 1)));
        kept.goes_on(true, 1);
        assert_eq!(texts(&mut kept, &["  b"]), " b");
    }

    #[test]
    fn completions_are_kept_too() {
        let text = |text: &str| format!(r#"{{"id":"c","choices":[{{"index":0,"text":"{text}","logprobs":null}}]}}"#);
        let mut kept = Kept::default();
        pass(&mut kept, &text("one"));
        pass(&mut kept, &text(" "));
        assert_eq!(kept.told(false, 2), Ok(("one ", 2)));
        kept.goes_on(false, 2);
        assert_eq!(pass(&mut kept, &text(" two")).unwrap(), text(" two"));
    }

    #[test]
    fn what_is_more_than_text_is_lost() {
        for delta in [
            r#"{"tool_calls":[{"index":0}]}"#,
            r#"{"reasoning_content":"hm"}"#,
            r#"{"reasoning":"hm"}"#,
            r#"{"refusal":"no"}"#,
            r#"{"content":[{"type":"text"}]}"#,
            r#"{"content":"<think>\nhm"}"#,
            r#"{"content":"x","audio":{"id":"y"}}"#,
        ] {
            assert!(begun(&[delta]).told(true, 1).is_err(), "{delta}");
        }
        assert!(begun(&[r#"{"content":"x","tool_calls":[],"reasoning_content":null,"function_call":null,"refusal":""}"#]).told(true, 1).is_ok());
        for payload in [
            "7",
            r#"{"choices":[{"index":"0"}]}"#,
            r#"{"choices":[{"index":1,"delta":{"content":"x"}}]}"#,
            r#"{"choices":[{"index":0},{"index":1}]}"#,
            r#"{"choices":[{"index":0,"text":"x","logprobs":{"tokens":["x"]}}]}"#,
        ] {
            let mut kept = Kept::default();
            pass(&mut kept, payload);
            assert!(kept.told(true, 1).is_err(), "{payload}");
        }
    }

    #[test]
    fn the_text_is_bounded() {
        let mut kept = Kept::default();
        let long = word("first", &format!(r#"{{"content":"{}"}}"#, "x".repeat(MAX_KEPT / 2)));
        for fits in [true, true, false] {
            pass(&mut kept, &long);
            assert_eq!(kept.told(true, 1).is_ok(), fits);
        }
        assert_eq!(kept.text.capacity(), 0);
    }
}
