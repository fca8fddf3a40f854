//! From the JSON of the four generating APIs to one [`Ask`].
//!
//! Prompt tokens are characters (Unicode scalar values) of all message texts together, divided by 4 and rounded up; an image, a sound or a file counts
//! 256. Token arrays count as they are. Fields that change nothing here (`temperature`, `stop`, `seed`, ...) are accepted and ignored.

use serde::Deserialize;
use serde_json::Value;

use super::answer::{extend, fingerprint};
use crate::engine::BLOCK_TOKENS;
use crate::scheduler::Tokens;

/// Characters in one token of a prompt.
const CHARS_PER_TOKEN: usize = 4;
/// Tokens that an image, a sound or a file adds to a prompt.
const MEDIA_TOKENS: usize = 256;
/// vLLM's and OpenAI's default for /v1/completions.
const COMPLETION_DEFAULT_TOKENS: Tokens = 16;

/// Which API a request came by, and so in which shape it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Api {
    Chat,
    Completions,
    Messages,
    Responses,
}

/// Why a request is a bad one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Invalid {
    pub(super) message: String,
    /// The field at fault.
    pub(super) param: Option<&'static str>,
}

impl Invalid {
    fn new(param: &'static str, message: impl Into<String>) -> Self {
        Invalid { message: message.into(), param: Some(param) }
    }
}

/// A prompt, reduced to what the model of an engine needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Prompt {
    pub(super) tokens: Tokens,
    pub(super) hashes: Vec<u64>,
    /// Fingerprint of all of it.
    pub(super) whole: u64,
    /// Fingerprint of the text of the last user message; that of all of it where there are no messages.
    pub(super) question: u64,
}

/// A tool that must be called.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Tool {
    pub(super) name: String,
    /// JSON schema of its arguments.
    pub(super) schema: Value,
}

/// A request to generate.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Ask {
    pub(super) model: String,
    pub(super) prompt: Prompt,
    pub(super) max_tokens: Option<Tokens>,
    pub(super) min_tokens: Tokens,
    pub(super) ignore_eos: bool,
    pub(super) priority: i64,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) tool: Option<Tool>,
    pub(super) sim_output_tokens: Option<Tokens>,
}

/// A request to embed; each input is a prompt of its own.
#[derive(Clone, Debug)]
pub(super) struct Embed {
    pub(super) model: String,
    pub(super) inputs: Vec<Prompt>,
    pub(super) base64: bool,
    pub(super) dimensions: usize,
}

#[derive(Deserialize)]
struct Raw {
    model: Option<String>,
    messages: Option<Vec<Message>>,
    prompt: Option<Value>,
    input: Option<Value>,
    system: Option<Value>,
    instructions: Option<Value>,
    max_tokens: Option<i64>,
    max_completion_tokens: Option<i64>,
    max_output_tokens: Option<i64>,
    min_tokens: Option<u32>,
    n: Option<i64>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    ignore_eos: Option<bool>,
    priority: Option<i64>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    sim_output_tokens: Option<Tokens>,
    encoding_format: Option<String>,
    dimensions: Option<usize>,
}

#[derive(Deserialize)]
struct Message {
    role: Option<String>,
    #[serde(default)]
    content: Value,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

impl Ask {
    /// Reads the body of a request.
    pub(super) fn parse(api: Api, body: &[u8]) -> Result<Ask, Invalid> {
        let raw = parse(body)?;
        let model = raw.model.clone().ok_or_else(|| Invalid::new("model", "field required: model"))?;
        if raw.n.is_some_and(|n| n != 1) {
            return Err(Invalid::new("n", "this engine gives one choice: n must be 1"));
        }
        let stream = raw.stream.unwrap_or(false);
        let include_usage = raw.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false);
        if raw.stream_options.is_some() && !stream {
            return Err(Invalid::new("stream_options", "Stream options can only be defined when `stream=True`."));
        }
        Ok(Ask {
            model,
            prompt: prompt(api, &raw)?,
            max_tokens: max_tokens(api, &raw)?,
            min_tokens: raw.min_tokens.unwrap_or(0),
            ignore_eos: raw.ignore_eos.unwrap_or(false),
            priority: raw.priority.unwrap_or(0),
            stream,
            include_usage,
            tool: chosen_tool(&raw)?,
            sim_output_tokens: raw.sim_output_tokens,
        })
    }
}

impl Embed {
    /// Reads the body of a request.
    pub(super) fn parse(body: &[u8]) -> Result<Embed, Invalid> {
        let raw = parse(body)?;
        let model = raw.model.clone().ok_or_else(|| Invalid::new("model", "field required: model"))?;
        let base64 = match raw.encoding_format.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(_) => return Err(Invalid::new("encoding_format", "encoding_format must be float or base64")),
        };
        let dimensions = raw.dimensions.unwrap_or(64);
        if !(1..=4096).contains(&dimensions) {
            return Err(Invalid::new("dimensions", "dimensions must be between 1 and 4096"));
        }
        let input = raw.input.ok_or_else(|| Invalid::new("input", "field required: input"))?;
        Ok(Embed { model, inputs: inputs(&input).ok_or_else(|| Invalid::new("input", INPUT_SHAPE))?, base64, dimensions })
    }
}

const INPUT_SHAPE: &str = "must be a string, an array of strings, an array of tokens or an array of token arrays, and not empty";

fn parse(body: &[u8]) -> Result<Raw, Invalid> {
    serde_json::from_slice(body).map_err(|error| Invalid { message: format!("the body is not a valid request: {error}"), param: None })
}

fn max_tokens(api: Api, raw: &Raw) -> Result<Option<Tokens>, Invalid> {
    let (name, given) = match api {
        Api::Chat if raw.max_completion_tokens.is_some() => ("max_completion_tokens", raw.max_completion_tokens),
        Api::Chat | Api::Completions => ("max_tokens", raw.max_tokens),
        Api::Messages if raw.max_tokens.is_none() => return Err(Invalid::new("max_tokens", "max_tokens: Field required")),
        Api::Messages => ("max_tokens", raw.max_tokens),
        Api::Responses => ("max_output_tokens", raw.max_output_tokens),
    };
    match given {
        None if api == Api::Completions => Ok(Some(COMPLETION_DEFAULT_TOKENS)),
        None => Ok(None),
        Some(tokens) if tokens < 1 => Err(Invalid::new(name, format!("{name} must be at least 1, got {tokens}."))),
        Some(tokens) => Ok(Some(Tokens::try_from(tokens).unwrap_or(Tokens::MAX))),
    }
}

fn prompt(api: Api, raw: &Raw) -> Result<Prompt, Invalid> {
    let mut text = String::new();
    let mut question = None;
    match api {
        Api::Completions => {
            let given = raw.prompt.as_ref().ok_or_else(|| Invalid::new("prompt", "field required: prompt"))?;
            let mut prompts = inputs(given).ok_or_else(|| Invalid::new("prompt", format!("prompt {INPUT_SHAPE}")))?;
            return match (prompts.pop(), prompts.is_empty()) {
                (Some(prompt), true) => Ok(prompt),
                _ => Err(Invalid::new("prompt", "this engine takes one prompt a request")),
            };
        }
        Api::Chat | Api::Messages => {
            let messages = raw.messages.as_deref().ok_or_else(|| Invalid::new("messages", "field required: messages"))?;
            if messages.is_empty() {
                return Err(Invalid::new("messages", "messages must not be empty"));
            }
            if let Some(system) = &raw.system {
                push_content(system, "system", &mut text)?;
            }
            push_messages(messages, "messages", &mut text, &mut question)?;
        }
        Api::Responses => {
            if let Some(instructions) = &raw.instructions {
                push_content(instructions, "instructions", &mut text)?;
            }
            match raw.input.as_ref().ok_or_else(|| Invalid::new("input", "field required: input"))? {
                Value::String(input) => {
                    question = Some(fingerprint(input));
                    text.push_str(input);
                }
                input => {
                    let messages = Vec::<Message>::deserialize(input)
                        .map_err(|error| Invalid::new("input", format!("input must be a string or an array of items: {error}")))?;
                    push_messages(&messages, "input", &mut text, &mut question)?;
                }
            }
        }
    }
    let mut prompt = Prompt::of_text(&text);
    prompt.question = question.unwrap_or(prompt.whole);
    Ok(prompt)
}

fn push_messages(messages: &[Message], param: &'static str, text: &mut String, question: &mut Option<u64>) -> Result<(), Invalid> {
    for message in messages {
        let from = text.len();
        push_content(&message.content, param, text)?;
        if message.role.as_deref() == Some("user") {
            *question = Some(fingerprint(&text[from..]));
        }
    }
    Ok(())
}

/// A message's content: nothing, a text, or parts. A part is text, or holds content itself (a tool result), or is some medium.
fn push_content(content: &Value, param: &'static str, text: &mut String) -> Result<(), Invalid> {
    match content {
        Value::Null => Ok(()),
        Value::String(string) => {
            text.push_str(string);
            Ok(())
        }
        Value::Array(parts) => parts.iter().try_for_each(|part| {
            if let Some(string) = part.get("text").and_then(Value::as_str) {
                text.push_str(string);
                return Ok(());
            }
            match (part.get("type").and_then(Value::as_str), part.get("content")) {
                (_, Some(inner)) => push_content(inner, param, text),
                (Some(kind), None) if ["image", "audio", "video", "file", "document"].iter().any(|medium| kind.contains(medium)) => {
                    push_medium(part, text);
                    Ok(())
                }
                (Some(_), None) => Ok(()),
                (None, None) => Err(Invalid::new(param, "a content part needs a type")),
            }
        }),
        _ => Err(Invalid::new(param, "content must be a string, null or an array of parts")),
    }
}

/// Stands for a medium: as many characters as it has tokens, and different ones for a different medium, so that the prefix cache tells them apart.
fn push_medium(part: &Value, text: &mut String) {
    let mark = format!("{:016x}", fingerprint(&part.to_string()));
    for _ in 0..MEDIA_TOKENS * CHARS_PER_TOKEN / mark.len() {
        text.push_str(&mark);
    }
}

/// The prompts in a `prompt` or `input` field.
fn inputs(value: &Value) -> Option<Vec<Prompt>> {
    match value {
        Value::String(text) => Some(vec![Prompt::of_text(text)]),
        Value::Array(items) if items.first()?.is_number() => Some(vec![Prompt::of_tokens(items)?]),
        Value::Array(items) => items
            .iter()
            .map(|item| match item {
                Value::String(text) => Some(Prompt::of_text(text)),
                Value::Array(tokens) => Prompt::of_tokens(tokens),
                _ => None,
            })
            .collect(),
        _ => None,
    }
}

impl Prompt {
    fn of_text(text: &str) -> Prompt {
        let block_chars = CHARS_PER_TOKEN * BLOCK_TOKENS as usize;
        let mut hash = fingerprint("");
        let mut hashes = Vec::with_capacity(text.len() / block_chars);
        let (mut from, mut chars) = (0, 0);
        for (at, _) in text.char_indices() {
            if chars > 0 && chars % block_chars == 0 {
                hash = extend(hash, &text.as_bytes()[from..at]);
                hashes.push(hash);
                from = at;
            }
            chars += 1;
        }
        if chars > 0 && chars % block_chars == 0 {
            hashes.push(extend(hash, &text.as_bytes()[from..]));
        }
        let whole = fingerprint(text);
        Prompt { tokens: count(chars.div_ceil(CHARS_PER_TOKEN)), hashes, whole, question: whole }
    }

    fn of_tokens(tokens: &[Value]) -> Option<Prompt> {
        let tokens: Vec<u64> = tokens.iter().map(Value::as_u64).collect::<Option<_>>()?;
        let mut hash = fingerprint("tokens");
        let mut hashes = Vec::with_capacity(tokens.len() / BLOCK_TOKENS as usize);
        for (at, token) in tokens.iter().enumerate() {
            hash = extend(hash, &token.to_le_bytes());
            if (at + 1) % BLOCK_TOKENS as usize == 0 {
                hashes.push(hash);
            }
        }
        Some(Prompt { tokens: count(tokens.len()), hashes, whole: hash, question: hash })
    }
}

/// An empty prompt still has its beginning-of-text token.
fn count(tokens: usize) -> Tokens {
    Tokens::try_from(tokens).unwrap_or(Tokens::MAX).max(1)
}

/// The tool that `tool_choice` demands. `auto` and `none` demand none, and such requests are answered with text.
fn chosen_tool(raw: &Raw) -> Result<Option<Tool>, Invalid> {
    let Some(choice) = &raw.tool_choice else { return Ok(None) };
    let tools = raw.tools.as_deref().unwrap_or_default();
    let kind = choice.as_str().or_else(|| choice.get("type").and_then(Value::as_str));
    let name = choice.get("name").or_else(|| choice.get("function").and_then(|function| function.get("name"))).and_then(Value::as_str);
    let tool = match (kind, name) {
        (Some("auto" | "none"), _) => return Ok(None),
        (Some("required" | "any"), _) => {
            tools.first().ok_or_else(|| Invalid::new("tool_choice", "tool_choice demands a tool, but tools is empty"))?
        }
        (_, Some(name)) => tools
            .iter()
            .find(|tool| function(tool).get("name").and_then(Value::as_str) == Some(name))
            .ok_or_else(|| Invalid::new("tool_choice", format!("tool_choice names {name}, which is not in tools")))?,
        _ => return Err(Invalid::new("tool_choice", "tool_choice must be auto, none, required or name a function")),
    };
    let function = function(tool);
    let name = function.get("name").and_then(Value::as_str).ok_or_else(|| Invalid::new("tools", "a tool needs a name"))?;
    let schema = function.get("parameters").or_else(|| function.get("input_schema")).cloned().unwrap_or(Value::Null);
    Ok(Some(Tool { name: name.to_owned(), schema }))
}

/// Where a tool keeps its name and schema: chat completions nest them, the other APIs do not.
fn function(tool: &Value) -> &Value {
    tool.get("function").unwrap_or(tool)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn prompts_share_hashes_as_far_as_they_share_blocks() {
        let beginning = "x".repeat(64 * 3 + 10);
        let (one, other) = (Prompt::of_text(&format!("{beginning}{}", "a".repeat(100))), Prompt::of_text(&format!("{beginning}{}", "b".repeat(200))));
        assert_eq!((one.tokens, one.hashes.len(), other.hashes.len()), (76, 4, 6));
        assert_eq!(one.hashes[..3], other.hashes[..3]);
        assert_ne!(one.hashes[3], other.hashes[3]);
        assert_eq!(Prompt::of_text(&"é".repeat(64)).hashes.len(), 1, "characters count, not bytes");
    }

    #[test]
    fn two_images_are_two_prompts() {
        let body = |url: &str| {
            let image = serde_json::json!({"type": "image_url", "image_url": {"url": url}});
            serde_json::json!({"model": "m", "messages": [{"role": "user", "content": [image]}]}).to_string()
        };
        let prompt = |url| Ask::parse(Api::Chat, body(url).as_bytes()).expect("a request").prompt;
        assert_eq!(prompt("a"), prompt("a"));
        assert_eq!(prompt("a").tokens, 256);
        assert_ne!(prompt("a").hashes[0], prompt("b").hashes[0]);
    }

    proptest! {
        #[test]
        fn every_full_block_of_a_text_has_a_hash(text in ".{0,400}") {
            let prompt = Prompt::of_text(&text);
            let chars = text.chars().count();
            prop_assert_eq!(prompt.hashes.len(), chars / 64);
            prop_assert_eq!(prompt.tokens as usize, chars.div_ceil(4).max(1));
        }

        #[test]
        fn no_body_breaks_the_parser(body in prop::collection::vec(any::<u8>(), 0..200), api in prop::sample::select(vec![
            Api::Chat, Api::Completions, Api::Messages, Api::Responses,
        ])) {
            prop_assert!(Ask::parse(api, &body).is_err());
        }
    }
}
