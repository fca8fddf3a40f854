//! Conversations: which words decide the answer's length, and how long the prompt is.

use std::borrow::Cow;

use super::beginnings::{Beginnings, Speaker};
use super::json::Json;
use super::{BadBody, text, tokens};
use crate::ranker::PromptText;
use crate::scheduler::Tokens;

/// Tokens a message costs besides its text: role and separators.
const TOKENS_PER_MESSAGE: Tokens = 4;
/// Tokens of an image, roughly, whatever its bytes.
const TOKENS_PER_IMAGE: Tokens = 512;
/// Tokens of a piece of audio or a document, roughly.
const TOKENS_PER_FILE: Tokens = 256;

/// What a conversation says and how long it is.
#[derive(Debug, Default)]
pub struct Content {
    pub text: PromptText,
    /// Estimated.
    pub tokens: Tokens,
    /// These are several prompts, of which the text is the first.
    pub several: bool,
}

/// One element of a conversation: a chat message, or an item of a response's input.
#[derive(Default)]
struct Turn<'a> {
    role: Option<Cow<'a, str>>,
    kind: Option<Cow<'a, str>>,
    content: Option<Json<'a>>,
    /// Bytes of a tool's output, where items have one of their own; of a tool call's arguments.
    other: usize,
}

/// One part of a message's content.
struct Part<'a> {
    kind: Kind,
    text: Option<Json<'a>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Image,
    Audio,
    File,
    ToolResult,
    Unknown,
}

impl Kind {
    fn of(name: &str) -> Kind {
        match name {
            "text" | "input_text" | "output_text" => Kind::Text,
            "image_url" | "image" | "input_image" => Kind::Image,
            "input_audio" | "audio" | "audio_url" => Kind::Audio,
            "file" | "input_file" | "document" | "video_url" | "input_video" => Kind::File,
            "tool_result" => Kind::ToolResult,
            _ => Kind::Unknown,
        }
    }

    /// What stands for it in the text that is scored.
    fn marker(self) -> &'static str {
        match self {
            Kind::Image => "[image]",
            Kind::Audio => "[audio]",
            Kind::File => "[file]",
            Kind::ToolResult => "[tool result]",
            Kind::Text | Kind::Unknown => "",
        }
    }
}

/// Reads an array of messages or items (or, for a response's input, a plain string). `system` is a system prompt given apart, with its field's name.
/// `along` goes along with what is read, from `before` tokens on.
pub fn turns<'a>(
    value: Json<'a>,
    field: &'static str,
    system: Option<(&'static str, Json<'a>)>,
    along: &mut Beginnings,
    before: Tokens,
) -> Result<Content, BadBody> {
    let mut content = Content { tokens: before, ..Content::default() };
    if let Some((name, value)) = system.filter(|(_, value)| !value.is_null()) {
        let parts = Parts::of(value, along, content.tokens).ok_or(BadBody::wrong(name, "a string or an array of parts"))?;
        content.tokens = content.tokens.saturating_add(parts.tokens);
        content.text.system = parts.text(text::head);
    }
    if value.is_string() && field == "input" {
        along.turn(Speaker::Client, content.tokens);
        along.text(value.get(), content.tokens);
        content.tokens = content.tokens.saturating_add(tokens(value.get().len()));
        content.text.user = text::ends(value);
        return Ok(content);
    }

    let turns = value.elements().ok_or(BadBody::wrong(field, if field == "input" { "a string or an array" } else { "an array" }))?;
    // Tool results that came after the last words of the user, and those words.
    let (mut results, mut user) = (0, None);
    for (index, element) in turns.enumerate() {
        let wrong = |part: &str, expected| BadBody::WrongType { field: format!("{field}[{index}]{part}").into(), expected };
        let turn = Turn::of(element).ok_or_else(|| wrong("", "an object with a `role` and `content`"))?;
        along.turn(turn.speaker(), content.tokens);
        if turn.content.is_none_or(Json::is_null) || turn.other > 0 {
            along.text(element.get(), content.tokens);
        }
        let parts = match turn.content.filter(|value| !value.is_null()) {
            None => Parts::default(),
            Some(value) => Parts::of(value, along, content.tokens).ok_or_else(|| wrong(".content", "a string, null or an array of parts"))?,
        };
        content.tokens = content.tokens.saturating_add(TOKENS_PER_MESSAGE + parts.tokens.saturating_add(tokens(turn.other)));
        match (turn.role.as_deref(), turn.kind.as_deref()) {
            (Some("system" | "developer"), _) if content.text.system.is_empty() => content.text.system = parts.text(text::head),
            (Some("user"), _) if parts.is_tool_result => results += 1,
            (Some("user"), _) => (results, user) = (0, Some(parts)),
            (Some("tool" | "function"), _) => results += 1,
            (None, Some(kind)) if kind.ends_with("_output") => results += 1,
            _ => {}
        }
    }
    if let Some(user) = user {
        content.text.user = user.text(text::ends);
    }
    for _ in 0..results.min(text::MOST_MARKERS) {
        text::join(&mut content.text.user, Kind::ToolResult.marker());
    }
    Ok(content)
}

/// Reads the prompt of a legacy completion: a string, strings, or tokens.
pub fn plain(value: Json, along: &mut Beginnings) -> Result<Content, BadBody> {
    let wrong = || BadBody::wrong("prompt", "a string, an array of strings, or an array of tokens");
    let length = tokens(value.get().len());
    let text_of = |value| PromptText { system: String::new(), user: text::ends(value) };
    if value.is_string() {
        along.text(value.get(), 0);
        return Ok(Content { text: text_of(value), tokens: length, several: false });
    }
    let mut prompts = value.elements().ok_or_else(wrong)?;
    let first = prompts.next().ok_or_else(wrong)?;
    match first.get().as_bytes()[0] {
        // Of several prompts the first stands for all.
        b'"' => {
            let several = prompts.next().is_some();
            along.text(first.get(), 0);
            if several {
                along.unreadable();
            }
            Ok(Content { text: text_of(first), tokens: length, several })
        }
        // Tokens cannot be read here: the request is neutral, but its length is known.
        b'0'..=b'9' => {
            along.text(value.get(), 0);
            Ok(Content { text: PromptText::default(), tokens: u32::try_from(1 + prompts.count()).unwrap_or(u32::MAX), several: false })
        }
        b'[' => Ok(Content { text: PromptText::default(), tokens: length, several: true }),
        _ => Err(wrong()),
    }
}

/// A content: one string, or parts.
#[derive(Default)]
struct Parts<'a> {
    value: Option<Json<'a>>,
    tokens: Tokens,
    /// Only results of tools, no words of a person: how Anthropic's API returns them.
    is_tool_result: bool,
}

impl<'a> Parts<'a> {
    /// `None` unless it is a string or an array of objects (or of strings, which some clients send).
    fn of(value: Json<'a>, along: &mut Beginnings, before: Tokens) -> Option<Parts<'a>> {
        let mut parts = Parts { value: Some(value), tokens: 0, is_tool_result: false };
        if value.is_string() {
            along.text(value.get(), before);
            parts.tokens = tokens(value.get().len());
            return Some(parts);
        }
        let (mut count, mut results) = (0, 0);
        for element in value.elements()? {
            let part = Part::of(element)?;
            match (part.kind, part.text) {
                // A text by itself: that it may be cached is written beside it, and moves on from turn to turn.
                (Kind::Text | Kind::ToolResult, Some(text)) => along.text(text.get(), before.saturating_add(parts.tokens)),
                (Kind::Image | Kind::Audio | Kind::File, _) => along.unreadable(),
                (Kind::Text | Kind::ToolResult | Kind::Unknown, _) => along.text(element.get(), before.saturating_add(parts.tokens)),
            }
            parts.tokens = parts.tokens.saturating_add(part.tokens());
            count += 1;
            results += usize::from(part.kind == Kind::ToolResult);
        }
        parts.is_tool_result = count > 0 && count == results;
        Some(parts)
    }

    fn text(&self, read: fn(Json) -> String) -> String {
        let mut all = String::new();
        let Some(value) = self.value else { return all };
        let Some(elements) = value.elements() else { return read(value) };
        for part in elements.filter_map(Part::of) {
            match (part.kind, part.text) {
                (Kind::Text, Some(value)) => text::join(&mut all, &read(value)),
                (kind, _) => text::join(&mut all, kind.marker()),
            }
            if all.len() > text::MOST {
                break;
            }
        }
        all
    }
}

impl<'a> Part<'a> {
    fn of(value: Json<'a>) -> Option<Part<'a>> {
        if value.is_string() {
            return Some(Part { kind: Kind::Text, text: Some(value) });
        }
        let (mut kind, mut text, mut content) = (Kind::Text, None, None);
        for (name, value) in value.members()? {
            match &*name {
                "type" if !value.is_null() => kind = Kind::of(&value.string()?),
                "text" => text = Some(value).filter(|value| value.is_string()),
                "content" => content = Some(value).filter(|value| !value.is_null()),
                _ => {}
            }
        }
        Some(Part { kind, text: if kind == Kind::ToolResult { content } else { text } })
    }

    fn tokens(&self) -> Tokens {
        match self.kind {
            Kind::Text | Kind::Unknown | Kind::ToolResult => self.text.map_or(0, |value| tokens(value.get().len())),
            Kind::Image => TOKENS_PER_IMAGE,
            Kind::Audio | Kind::File => TOKENS_PER_FILE,
        }
    }
}

impl<'a> Turn<'a> {
    fn of(value: Json<'a>) -> Option<Turn<'a>> {
        let mut turn = Turn::default();
        for (name, value) in value.members()? {
            match &*name {
                "role" if !value.is_null() => turn.role = Some(value.string()?),
                "type" if !value.is_null() => turn.kind = Some(value.string()?),
                "content" => turn.content = Some(value),
                "output" | "arguments" | "tool_calls" => turn.other += value.get().len(),
                _ => {}
            }
        }
        Some(turn)
    }

    fn speaker(&self) -> Speaker {
        match (self.role.as_deref(), self.kind.as_deref()) {
            (Some("system" | "developer"), _) => Speaker::System,
            (Some("assistant" | "model"), _) => Speaker::Model,
            (Some(_), _) | (None, None) => Speaker::Client,
            (None, Some(kind)) if kind.ends_with("_output") => Speaker::Client,
            // Calls of tools, thoughts: items of an answer have no role of their own.
            (None, Some(_)) => Speaker::Model,
        }
    }
}
