//! Conversations: which words decide the answer's length, and how long the prompt is.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::{BadBody, is_null, text, tokens};
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
    content: Option<&'a RawValue>,
    /// A tool's output, where items have one of their own; a tool call's arguments.
    other: usize,
}

/// One part of a message's content.
struct Part<'a> {
    kind: Kind,
    text: Option<&'a RawValue>,
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
pub fn turns<'a>(raw: &'a RawValue, field: &'static str, system: Option<(&'static str, &'a RawValue)>) -> Result<Content, BadBody> {
    let mut content = Content::default();
    if let Some((name, raw)) = system.filter(|(_, raw)| !is_null(raw)) {
        let parts = Parts::of(raw).ok_or(BadBody::wrong(name, "a string or an array of parts"))?;
        content.tokens = parts.tokens();
        content.text.system = parts.text(text::head);
    }
    if raw.get().starts_with('"') && field == "input" {
        content.tokens = content.tokens.saturating_add(tokens(raw.get().len()));
        content.text.user = text::ends(raw);
        return Ok(content);
    }

    let turns: Vec<Turn> = serde_json::from_str(raw.get()).map_err(|_| wrong_turn(raw, field))?;
    // Tool results that came after the last words of the user, and those words.
    let (mut results, mut user) = (0, None);
    for (index, turn) in turns.iter().enumerate() {
        let parts = match turn.content.filter(|raw| !is_null(raw)) {
            None => Parts::default(),
            Some(raw) => Parts::of(raw).ok_or_else(|| BadBody::WrongType {
                field: format!("{field}[{index}].content").into(),
                expected: "a string, null or an array of parts",
            })?,
        };
        content.tokens = content.tokens.saturating_add(TOKENS_PER_MESSAGE + parts.tokens().saturating_add(tokens(turn.other)));
        match (turn.role.as_deref(), turn.kind.as_deref()) {
            (Some("system" | "developer"), _) if content.text.system.is_empty() => content.text.system = parts.text(text::head),
            (Some("user"), _) if parts.is_tool_result() => results += 1,
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
pub fn plain(raw: &RawValue) -> Result<Content, BadBody> {
    let wrong = || BadBody::wrong("prompt", "a string, an array of strings, or an array of tokens");
    let bytes = raw.get().len();
    match raw.get().as_bytes()[0] {
        b'"' => Ok(Content { text: PromptText { system: String::new(), user: text::ends(raw) }, tokens: tokens(bytes), several: false }),
        b'[' => {
            let prompts: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|_| wrong())?;
            let first = prompts.first().map_or(b' ', |raw| raw.get().as_bytes()[0]);
            match first {
                // Of several prompts the first stands for all.
                b'"' => Ok(Content {
                    text: PromptText { system: String::new(), user: text::ends(prompts[0]) },
                    tokens: tokens(bytes),
                    several: prompts.len() > 1,
                }),
                // Tokens cannot be read here: the request is neutral, but its length is known.
                b'0'..=b'9' => Ok(Content { text: PromptText::default(), tokens: u32::try_from(prompts.len()).unwrap_or(u32::MAX), several: false }),
                b'[' => Ok(Content { text: PromptText::default(), tokens: tokens(bytes), several: true }),
                _ => Err(wrong()),
            }
        }
        _ => Err(wrong()),
    }
}

/// Names the first element that is not an object, or the field itself.
fn wrong_turn(raw: &RawValue, field: &'static str) -> BadBody {
    let Ok(elements) = serde_json::from_str::<Vec<&RawValue>>(raw.get()) else {
        return BadBody::wrong(field, if field == "input" { "a string or an array" } else { "an array" });
    };
    match elements.iter().position(|element| serde_json::from_str::<Turn>(element.get()).is_err()) {
        Some(index) => BadBody::WrongType { field: format!("{field}[{index}]").into(), expected: "an object with a `role` and `content`" },
        None => BadBody::wrong(field, "an array"),
    }
}

/// A content: one string, or parts.
#[derive(Default)]
struct Parts<'a>(Vec<Part<'a>>);

impl<'a> Parts<'a> {
    /// `None` unless it is a string or an array of objects (or of strings, which some clients send).
    fn of(raw: &'a RawValue) -> Option<Parts<'a>> {
        match raw.get().as_bytes()[0] {
            b'"' => Some(Parts(vec![Part { kind: Kind::Text, text: Some(raw) }])),
            b'[' => {
                let raws: Vec<&RawValue> = serde_json::from_str(raw.get()).ok()?;
                raws.into_iter().map(Part::of).collect::<Option<_>>().map(Parts)
            }
            _ => None,
        }
    }

    fn tokens(&self) -> Tokens {
        self.0.iter().fold(0, |sum, part| sum.saturating_add(part.tokens()))
    }

    /// Only results of tools, no words of a person: how Anthropic's API returns them.
    fn is_tool_result(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(|part| part.kind == Kind::ToolResult)
    }

    fn text(&self, read: fn(&RawValue) -> String) -> String {
        let mut all = String::new();
        for part in &self.0 {
            match (part.kind, part.text) {
                (Kind::Text, Some(raw)) => text::join(&mut all, &read(raw)),
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
    fn of(raw: &'a RawValue) -> Option<Part<'a>> {
        #[derive(Deserialize)]
        struct Fields<'a> {
            #[serde(rename = "type", borrow, default)]
            kind: Option<Cow<'a, str>>,
            #[serde(borrow, default)]
            text: Option<&'a RawValue>,
            #[serde(borrow, default)]
            content: Option<&'a RawValue>,
        }
        match raw.get().as_bytes()[0] {
            b'"' => Some(Part { kind: Kind::Text, text: Some(raw) }),
            b'{' => {
                let fields: Fields = serde_json::from_str(raw.get()).ok()?;
                let kind = Kind::of(fields.kind.as_deref().unwrap_or("text"));
                let text = if kind == Kind::ToolResult { fields.content } else { fields.text };
                Some(Part { kind, text: text.filter(|raw| kind == Kind::ToolResult || raw.get().starts_with('"')) })
            }
            _ => None,
        }
    }

    fn tokens(&self) -> Tokens {
        match self.kind {
            Kind::Text | Kind::Unknown | Kind::ToolResult => self.text.map_or(0, |raw| tokens(raw.get().len())),
            Kind::Image => TOKENS_PER_IMAGE,
            Kind::Audio | Kind::File => TOKENS_PER_FILE,
        }
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Turn<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        #[derive(Deserialize)]
        #[serde(field_identifier, rename_all = "snake_case")]
        enum Field {
            Role,
            Type,
            Content,
            Output,
            Arguments,
            ToolCalls,
            #[serde(other)]
            Unknown,
        }

        #[derive(Deserialize)]
        #[serde(transparent)]
        struct Name<'a>(#[serde(borrow)] Option<Cow<'a, str>>);

        impl<'de> Visitor<'de> for Object {
            type Value = Turn<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Turn<'de>, A::Error> {
                let mut turn = Turn::default();
                while let Some(key) = map.next_key::<Field>()? {
                    match key {
                        Field::Role => turn.role = map.next_value::<Name>()?.0,
                        Field::Type => turn.kind = map.next_value::<Name>()?.0,
                        Field::Content => turn.content = Some(map.next_value()?),
                        Field::Output | Field::Arguments | Field::ToolCalls => turn.other += map.next_value::<&RawValue>()?.get().len(),
                        Field::Unknown => drop(map.next_value::<serde::de::IgnoredAny>()?),
                    }
                }
                Ok(turn)
            }
        }
        deserializer.deserialize_map(Object)
    }
}
