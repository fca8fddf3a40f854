//! What a request says, read out of its bytes; and bytes that say something else in one place. Pure.
//!
//! A body is never written anew: what has to change is spliced (see [`Splices`]), so that key order, unknown fields and number formats reach the
//! backend as the client wrote them.

mod beginnings;
mod chat;
pub mod json;
mod multipart;
pub mod resume;
mod splice;
mod text;

use std::borrow::Cow;
use std::ops::Range;

use crate::ranker::PromptText;
use crate::scheduler::{History, Tokens};
use crate::tenancy::Priority;
use beginnings::Beginnings;
use json::{Json, NotJson};
use percent_encoding::percent_decode_str;

pub use beginnings::salted;
pub use json::MAX_DEPTH;
pub use splice::{Payload, Splices};

/// The longest model name, in bytes: it is kept, logged, compared and told back.
const LONGEST_NAME: usize = 1024;

/// Bytes of text that make one token, roughly: used before the backend reports its own count.
const BYTES_PER_TOKEN: usize = 4;

/// The dialects of a request. What is scored has its own; everything else is [`Api::Other`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Api {
    /// OpenAI chat completions.
    Chat,
    /// OpenAI (legacy) completions.
    Completions,
    /// OpenAI responses.
    Responses,
    /// Anthropic messages.
    Messages,
    /// Embeddings, rerank, tokenize, audio and whatever else goes by `model`: counted, not scored.
    Other,
}

/// Paths outside /v1 that engines serve and that name a model in their body.
const ROOT_PATHS: [&str; 7] = ["/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score", "/pooling", "/classify"];

impl Api {
    /// The dialect of a POST to `path`; `None` for a path that is not ours to route.
    pub fn of(path: &str) -> Option<Api> {
        match path {
            "/v1/chat/completions" => Some(Api::Chat),
            "/v1/completions" => Some(Api::Completions),
            "/v1/responses" => Some(Api::Responses),
            "/v1/messages" => Some(Api::Messages),
            _ if path.starts_with("/v1/") || ROOT_PATHS.contains(&path) => Some(Api::Other),
            _ => None,
        }
    }

    /// The dialect in which the client of `path` understands errors. Below `/v1/messages` (token counts, batches) it is Anthropic's.
    pub fn understood_at(path: &str) -> Api {
        if path.starts_with("/v1/messages/") { Api::Messages } else { Api::of(path).unwrap_or(Api::Other) }
    }

    /// Whether the ranker is asked and the answer's length learnt.
    pub fn is_scored(self) -> bool {
        self != Api::Other
    }
}

/// What a body asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// The model as the client named it.
    pub model: String,
    /// The answer is to come as server-sent events.
    pub stream: bool,
    /// What is scored; empty for [`Api::Other`].
    pub text: PromptText,
    /// Estimated prompt tokens.
    pub prompt_tokens: Tokens,
    /// The client's limit on output tokens, over all of its `n` answers.
    pub max_output: Option<Tokens>,
    /// It asks for one answer to one prompt, so that the answer's length is the prompt's.
    pub single: bool,
    /// The client asked for a usage chunk at the end of its stream.
    pub include_usage: bool,
    /// How urgent it is, by OpenAI's `service_tier`.
    pub priority: Option<Priority>,
    /// Beginnings of it that others may share.
    pub history: History,
    /// OpenAI's `prompt_cache_key` and `user`, as [`salted`] hashes.
    pub cache_key: Option<u64>,
    pub user: Option<u64>,
    /// Where the fields stand that may have to change.
    places: Places,
}

/// Where the fields stand that may have to change. Parsers disagree about which of several equal keys counts, so every one of them is changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Places {
    /// Behind the opening brace.
    front: usize,
    /// Values of `model`.
    model: Vec<Range<usize>>,
    /// The value of a form's `model`.
    form_model: Option<Range<usize>>,
    /// Values of `priority`.
    priority: Vec<Range<usize>>,
    /// Values of `stream_options`.
    stream_options: Vec<StreamOptions>,
}

/// One `stream_options` and what it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
struct StreamOptions {
    /// The value itself.
    value: Range<usize>,
    /// Behind its opening brace, and whether anything follows; `None` if it is not an object.
    front: Option<(usize, bool)>,
    /// Values of `include_usage` in it.
    include_usage: Vec<Range<usize>>,
}

/// Why a body cannot be routed. Its text is for the client.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadBody {
    #[error("the body is not valid JSON: {0}")]
    Syntax(String),
    #[error("the body must be a JSON object")]
    NotAnObject,
    #[error("`{0}` is required")]
    Missing(&'static str),
    #[error("`{field}` must be {expected}")]
    WrongType { field: Cow<'static, str>, expected: &'static str },
    #[error("`model` is longer than {LONGEST_NAME} bytes")]
    NameTooLong,
    #[error("the body is nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    #[error("the multipart body is malformed: {0}")]
    Multipart(&'static str),
}

impl BadBody {
    /// The field at fault, where it is one.
    pub fn field(&self) -> Option<&str> {
        match self {
            BadBody::Missing(field) => Some(field),
            BadBody::WrongType { field, .. } => Some(field),
            BadBody::NameTooLong => Some("model"),
            BadBody::Syntax(_) | BadBody::NotAnObject | BadBody::TooDeep | BadBody::Multipart(_) => None,
        }
    }

    fn wrong(field: &'static str, expected: &'static str) -> BadBody {
        BadBody::WrongType { field: Cow::Borrowed(field), expected }
    }
}

impl From<NotJson> for BadBody {
    fn from(fault: NotJson) -> BadBody {
        match fault {
            NotJson::Syntax(text) => BadBody::Syntax(text),
            NotJson::TooDeep => BadBody::TooDeep,
        }
    }
}

/// Reads a JSON body.
pub fn parse(api: Api, body: &[u8]) -> Result<Prompt, BadBody> {
    let fields = Fields::of(Json::check(body)?).ok_or(BadBody::NotAnObject)?;
    let place = |value: &Json| value.place(body);

    let model = match fields.model.last() {
        None => return Err(BadBody::Missing("model")),
        Some(value) => value.string().ok_or(BadBody::wrong("model", "a string"))?.into_owned(),
    };
    if model.len() > LONGEST_NAME {
        return Err(BadBody::NameTooLong);
    }
    let mut prompt = Prompt {
        model,
        stream: flag(fields.stream, "stream")?,
        text: PromptText::default(),
        prompt_tokens: 0,
        max_output: None,
        single: false,
        include_usage: false,
        priority: None,
        history: History::default(),
        cache_key: None,
        user: None,
        places: Places {
            // The body parsed as an object, so it has a brace.
            front: body.iter().position(|&b| b == b'{').map_or(0, |at| at + 1),
            model: fields.model.iter().map(place).collect(),
            form_model: None,
            priority: fields.priority.iter().map(place).collect(),
            stream_options: Vec::new(),
        },
    };
    if !api.is_scored() {
        prompt.prompt_tokens = tokens(body.len());
        return Ok(prompt);
    }

    for &value in &fields.stream_options {
        let options = stream_options(body, value)?;
        prompt.include_usage = options.1;
        prompt.places.stream_options.push(options.0);
    }
    let limit = match api {
        // The newer name wins where both are given, as in OpenAI's own API.
        Api::Chat => count(fields.max_completion_tokens, "max_completion_tokens")?.or(count(fields.max_tokens, "max_tokens")?),
        Api::Responses => count(fields.max_output_tokens, "max_output_tokens")?,
        Api::Completions | Api::Messages | Api::Other => count(fields.max_tokens, "max_tokens")?,
    };
    // A tier of the backend's own says nothing here.
    prompt.priority = fields.service_tier.and_then(Json::string).and_then(|tier| Priority::of_tier(&tier));
    let answers = count(fields.n, "n")?.unwrap_or(1).max(1);
    prompt.max_output = limit.map(|limit| limit.saturating_mul(answers));

    let tools = fields.tools.map(Json::get);
    let before = tokens(tools.map_or(0, str::len));
    let mut along = Beginnings::new(&prompt.model, tools);
    let content = match api {
        Api::Chat => chat::turns(required(fields.messages, "messages")?, "messages", None, &mut along, before)?,
        Api::Messages => {
            chat::turns(required(fields.messages, "messages")?, "messages", fields.system.map(|value| ("system", value)), &mut along, before)?
        }
        Api::Responses => {
            // A stored prompt or an earlier response can stand in for the input.
            let instructions = fields.instructions.map(|value| ("instructions", value));
            match fields.input {
                Some(input) => chat::turns(input, "input", instructions, &mut along, before)?,
                None => chat::Content { tokens: before, ..chat::Content::default() },
            }
        }
        Api::Completions => chat::plain(required(fields.prompt, "prompt")?, &mut along)?,
        Api::Other => chat::Content::default(),
    };
    prompt.prompt_tokens = content.tokens;
    prompt.history = along.end(prompt.prompt_tokens);
    prompt.cache_key = session(fields.prompt_cache_key);
    prompt.user = session(fields.user);
    prompt.single = answers == 1 && !content.several;
    prompt.text = content.text;
    Ok(prompt)
}

impl Prompt {
    /// A prompt that is known by its model alone: what a path names that comes without a body.
    pub fn of_query(query: Option<&str>) -> Result<Prompt, BadBody> {
        let named = query.and_then(|query| query.split('&').find_map(|pair| pair.strip_prefix("model=")));
        let model = percent_decode_str(named.ok_or(BadBody::Missing("model"))?).decode_utf8_lossy().into_owned();
        if model.len() > LONGEST_NAME {
            return Err(BadBody::NameTooLong);
        }
        Ok(Prompt::unread(model, 0, None))
    }

    /// A prompt that is known by its model alone: a multipart form. `content_type` is the request's header.
    pub fn of_form(content_type: &str, body: &[u8]) -> Result<Prompt, BadBody> {
        let (model, place) = multipart::model_field(content_type, body)?;
        Ok(Prompt::unread(model.to_owned(), body.len(), Some(place)))
    }

    fn unread(model: String, body: usize, form_model: Option<Range<usize>>) -> Prompt {
        Prompt {
            model,
            stream: false,
            text: PromptText::default(),
            prompt_tokens: tokens(body),
            max_output: None,
            single: false,
            include_usage: false,
            priority: None,
            history: History::default(),
            cache_key: None,
            user: None,
            places: Places { form_model, ..Places::default() },
        }
    }

    /// Names another model. Nothing happens to a request that names its model in the query.
    pub fn rename_model(&self, splices: &mut Splices, name: &str) {
        let quoted = quoted(name);
        for place in &self.places.model {
            splices.replace(place.clone(), quoted.clone());
        }
        if let Some(place) = &self.places.form_model {
            splices.replace(place.clone(), name.as_bytes().to_vec());
        }
    }

    /// Sets the engine's own priority.
    pub fn set_priority(&self, splices: &mut Splices, priority: i64) {
        let value = priority.to_string().into_bytes();
        if self.places.priority.is_empty() {
            // The object has a model, so something follows.
            splices.insert(self.places.front, format!("\"priority\":{priority},").into_bytes());
        }
        for place in &self.places.priority {
            splices.replace(place.clone(), value.clone());
        }
    }

    /// Asks for a usage chunk at the end of the stream.
    pub fn ask_for_usage(&self, splices: &mut Splices) {
        const OPTION: &[u8] = br#""include_usage":true"#;
        if self.places.stream_options.is_empty() {
            splices.insert(self.places.front, br#""stream_options":{"include_usage":true},"#.to_vec());
        }
        for options in &self.places.stream_options {
            match options.front {
                None => splices.replace(options.value.clone(), [b"{", OPTION, b"}"].concat()),
                Some(_) if !options.include_usage.is_empty() => {
                    for place in &options.include_usage {
                        splices.replace(place.clone(), b"true".to_vec());
                    }
                }
                Some((front, more)) => splices.insert(front, [OPTION, if more { b"," } else { b"" }].concat()),
            }
        }
    }
}

/// The JSON string that says `text`.
pub fn quoted(text: &str) -> Vec<u8> {
    // A string serialises without fail: it has no keys to refuse and the writer is memory.
    serde_json::to_vec(text).unwrap_or_default()
}

/// The top-level fields that are looked at. Of equal names the last one counts, as in most parsers behind us.
#[derive(Default)]
struct Fields<'a> {
    model: Vec<Json<'a>>,
    priority: Vec<Json<'a>>,
    stream_options: Vec<Json<'a>>,
    service_tier: Option<Json<'a>>,
    stream: Option<Json<'a>>,
    max_tokens: Option<Json<'a>>,
    max_completion_tokens: Option<Json<'a>>,
    max_output_tokens: Option<Json<'a>>,
    n: Option<Json<'a>>,
    messages: Option<Json<'a>>,
    prompt: Option<Json<'a>>,
    input: Option<Json<'a>>,
    instructions: Option<Json<'a>>,
    system: Option<Json<'a>>,
    tools: Option<Json<'a>>,
    prompt_cache_key: Option<Json<'a>>,
    user: Option<Json<'a>>,
}

impl<'a> Fields<'a> {
    fn of(body: Json<'a>) -> Option<Fields<'a>> {
        let mut fields = Fields::default();
        for (name, value) in body.members()? {
            let slot = match &*name {
                "model" => {
                    fields.model.push(value);
                    continue;
                }
                "priority" => {
                    fields.priority.push(value);
                    continue;
                }
                "stream_options" => {
                    fields.stream_options.push(value);
                    continue;
                }
                "service_tier" => &mut fields.service_tier,
                "stream" => &mut fields.stream,
                "max_tokens" => &mut fields.max_tokens,
                "max_completion_tokens" => &mut fields.max_completion_tokens,
                "max_output_tokens" => &mut fields.max_output_tokens,
                "n" => &mut fields.n,
                "messages" => &mut fields.messages,
                "prompt" => &mut fields.prompt,
                "input" => &mut fields.input,
                "instructions" => &mut fields.instructions,
                "system" => &mut fields.system,
                "tools" => &mut fields.tools,
                "prompt_cache_key" => &mut fields.prompt_cache_key,
                "user" => &mut fields.user,
                _ => continue,
            };
            *slot = Some(value);
        }
        Some(fields)
    }
}

/// The name of a session; `None` for an empty one, which names nothing.
fn session(value: Option<Json>) -> Option<u64> {
    value.and_then(Json::string).filter(|name| !name.is_empty()).map(|name| salted(name.as_bytes()))
}

fn required<'a>(value: Option<Json<'a>>, field: &'static str) -> Result<Json<'a>, BadBody> {
    value.filter(|value| !value.is_null()).ok_or(BadBody::Missing(field))
}

/// A boolean; absent and null are false.
fn flag(value: Option<Json>, field: &'static str) -> Result<bool, BadBody> {
    match value.map(Json::get) {
        None | Some("null") | Some("false") => Ok(false),
        Some("true") => Ok(true),
        Some(_) => Err(BadBody::wrong(field, "a boolean")),
    }
}

/// A count; null is absent, and what does not fit is as large as can be.
fn count(value: Option<Json>, field: &'static str) -> Result<Option<u32>, BadBody> {
    let Some(value) = value.filter(|value| !value.is_null()) else { return Ok(None) };
    if let Some(whole) = value.read::<u64>() {
        return Ok(Some(u32::try_from(whole).unwrap_or(u32::MAX)));
    }
    // 100.0 is what some clients make of 100.
    match value.read::<f64>() {
        Some(number) if number >= 0.0 && number.fract() == 0.0 => Ok(Some(number as u32)),
        _ => Err(BadBody::wrong(field, "a whole number, zero or more")),
    }
}

/// Where `stream_options` and its parts stand, and whether it asks for usage.
fn stream_options(body: &[u8], options: Json) -> Result<(StreamOptions, bool), BadBody> {
    let value = options.place(body);
    if options.is_null() {
        return Ok((StreamOptions { value, front: None, include_usage: Vec::new() }, false));
    }
    let members = options.members().ok_or(BadBody::wrong("stream_options", "an object"))?;
    let more = members.clone().next().is_some();
    let include_usage: Vec<Json> = members.filter(|(name, _)| name == "include_usage").map(|(_, value)| value).collect();
    let asked = flag(include_usage.last().copied(), "stream_options.include_usage")?;
    let include_usage = include_usage.iter().map(|value| value.place(body)).collect();
    Ok((StreamOptions { front: Some((value.start + 1, more)), include_usage, value }, asked))
}

/// Roughly how many tokens `bytes` of text are.
fn tokens(bytes: usize) -> Tokens {
    u32::try_from(bytes / BYTES_PER_TOKEN).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn chat(body: &str) -> Result<Prompt, BadBody> {
        parse(Api::Chat, body.as_bytes())
    }

    fn edited(body: &str, edit: impl Fn(&Prompt, &mut Splices)) -> String {
        let mut splices = Splices::default();
        edit(&chat(body).unwrap(), &mut splices);
        String::from_utf8(splices.apply(&Bytes::copy_from_slice(body.as_bytes())).concat()).unwrap()
    }

    #[test]
    fn paths_have_their_dialect() {
        assert_eq!(Api::of("/v1/chat/completions"), Some(Api::Chat));
        assert_eq!(Api::of("/v1/messages/count_tokens"), Some(Api::Other));
        assert_eq!(Api::of("/tokenize"), Some(Api::Other));
        assert_eq!(Api::of("/v1"), None);
        assert_eq!(Api::of("/admin"), None);
    }

    #[test]
    fn a_models_name_has_a_limit() {
        let name = "m".repeat(LONGEST_NAME);
        assert_eq!(chat(&format!(r#"{{"model":"{name}","messages":[]}}"#)).unwrap().model, name);
        assert_eq!(chat(&format!(r#"{{"model":"{name}m","messages":[]}}"#)), Err(BadBody::NameTooLong));
        assert_eq!(Prompt::of_query(Some(&format!("model={name}m"))), Err(BadBody::NameTooLong));
        assert_eq!(Prompt::of_query(Some("a=b&model=org%2Fname")).unwrap().model, "org/name");
    }

    #[test]
    fn a_chat_is_read() {
        let prompt = chat(
            r#" {"model":"m\u0061","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"old"},
               {"role":"assistant","content":null,"tool_calls":[{"id":"x","function":{"arguments":"{}"}}]},
               {"role":"user","content":[{"type":"text","text":"What is \"this\"?"},{"type":"image_url","image_url":{"url":"data:..."}},
               {"type":"input_audio","input_audio":{}}]},{"role":"tool","content":"42"}],
               "max_tokens":7,"max_completion_tokens":100.0,"n":2,"stream":true,"stream_options":{"include_usage":true},"x":[[{}]]} "#,
        )
        .unwrap();
        assert_eq!(prompt.model, "ma");
        assert_eq!(prompt.text.system, "Be brief.");
        assert_eq!(prompt.text.user, "What is \"this\"?\n[image]\n[audio]\n[tool result]");
        assert_eq!(prompt.max_output, Some(200));
        assert!(prompt.stream && prompt.include_usage);
        assert!(prompt.prompt_tokens > 512 + 256);
    }

    #[test]
    fn completions_are_read() {
        let read = |body: Value| parse(Api::Completions, body.to_string().as_bytes());
        assert_eq!(read(json!({"model": "m", "prompt": "Hi"})).unwrap().text.user, "Hi");
        assert_eq!(read(json!({"model": "m", "prompt": ["Hi", "there"]})).unwrap().text.user, "Hi");
        assert_eq!(read(json!({"model": "m", "prompt": [1, 2, 3]})).unwrap().prompt_tokens, 3);
        assert_eq!(read(json!({"model": "m", "prompt": [[1, 2], [3]]})).unwrap().text.user, "");
        assert_eq!(read(json!({"model": "m"})), Err(BadBody::Missing("prompt")));
        assert!(matches!(read(json!({"model": "m", "prompt": 5})), Err(BadBody::WrongType { .. })));
        assert!(matches!(read(json!({"model": "m", "prompt": [true]})), Err(BadBody::WrongType { .. })));
    }

    #[test]
    fn responses_are_read() {
        let read = |body: Value| parse(Api::Responses, body.to_string().as_bytes()).unwrap();
        let prompt = read(json!({"model": "m", "input": "Hi", "instructions": "Be kind.", "max_output_tokens": 9}));
        assert_eq!((prompt.text.user.as_str(), prompt.text.system.as_str(), prompt.max_output), ("Hi", "Be kind.", Some(9)));
        let prompt = read(json!({"model": "m", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Look"}, {"type": "input_image", "image_url": "x"}]},
            {"type": "function_call", "arguments": "{}"}, {"type": "function_call_output", "output": "3"}]}));
        assert_eq!(prompt.text.user, "Look\n[image]\n[tool result]");
        assert_eq!(read(json!({"model": "m", "previous_response_id": "r"})).text.user, "");
    }

    #[test]
    fn anthropic_messages_are_read() {
        let prompt = parse(
            Api::Messages,
            json!({"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "Be brief."}], "messages": [
                {"role": "user", "content": "Use the tool"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "3"}]}]}]})
            .to_string()
            .as_bytes(),
        )
        .unwrap();
        assert_eq!((prompt.text.system.as_str(), prompt.text.user.as_str()), ("Be brief.", "Use the tool\n[tool result]"));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let field = |body: &str| chat(body).unwrap_err().field().map(str::to_owned);
        assert_eq!(field(r#"{"messages":[]}"#), Some("model".into()));
        assert_eq!(field(r#"{"model":5,"messages":[]}"#), Some("model".into()));
        assert_eq!(field(r#"{"model":"m"}"#), Some("messages".into()));
        assert_eq!(field(r#"{"model":"m","messages":null}"#), Some("messages".into()));
        assert_eq!(field(r#"{"model":"m","messages":"hi"}"#), Some("messages".into()));
        assert_eq!(field(r#"{"model":"m","messages":[{"role":"user","content":"a"},7]}"#), Some("messages[1]".into()));
        assert_eq!(field(r#"{"model":"m","messages":[{"role":1}]}"#), Some("messages[0]".into()));
        assert_eq!(field(r#"{"model":"m","messages":[{"role":"user","content":{}}]}"#), Some("messages[0].content".into()));
        assert_eq!(field(r#"{"model":"m","messages":[],"stream":"yes"}"#), Some("stream".into()));
        assert_eq!(field(r#"{"model":"m","messages":[],"max_tokens":-1}"#), Some("max_tokens".into()));
        assert_eq!(field(r#"{"model":"m","messages":[],"max_tokens":1.5}"#), Some("max_tokens".into()));
        assert_eq!(field(r#"{"model":"m","messages":[],"stream_options":true}"#), Some("stream_options".into()));
        assert_eq!(chat("[]"), Err(BadBody::NotAnObject));
        assert!(matches!(chat(""), Err(BadBody::Syntax(_))));
        assert!(matches!(chat(r#"{"model":"m","messages":[]}}"#), Err(BadBody::Syntax(_))));
        assert!(matches!(chat(r#"{"model":"m","messages":[],}"#), Err(BadBody::Syntax(_))));
        assert!(matches!(parse(Api::Chat, b"{\"model\":\"\xff\",\"messages\":[]}"), Err(BadBody::Syntax(_))));
    }

    #[test]
    fn depth_is_refused_before_it_is_parsed() {
        for open in ["[", r#"{"a":"#] {
            let bomb = open.repeat(10_000);
            assert_eq!(chat(&bomb), Err(BadBody::TooDeep));
            assert_eq!(chat(&format!(r#"{{"model":"m","messages":[{{"role":"user","content":{bomb}"#)), Err(BadBody::TooDeep));
        }
    }

    #[test]
    fn only_what_must_change_changes() {
        let body = r#"{ "stream" : true,"b":1e400,"model" : "alias" , "messages":[],"a": {"model":"no"} }"#;
        assert_eq!(
            edited(body, |prompt, splices| prompt.rename_model(splices, "re\"al")),
            r#"{ "stream" : true,"b":1e400,"model" : "re\"al" , "messages":[],"a": {"model":"no"} }"#
        );
        assert_eq!(
            edited(body, |prompt, splices| {
                prompt.set_priority(splices, -5);
                prompt.ask_for_usage(splices);
                prompt.rename_model(splices, "x");
            }),
            r#"{"priority":-5,"stream_options":{"include_usage":true}, "stream" : true,"b":1e400,"model" : "x" , "messages":[],"a": {"model":"no"} }"#
        );
    }

    #[test]
    fn whichever_of_equal_keys_the_backend_reads_it_reads_the_same() {
        let body = r#"{"model":"a","messages":[],"model":"b","priority":1,"mod\u0065l":"c","priority":2}"#;
        assert_eq!(chat(body).unwrap().model, "c");
        assert_eq!(
            edited(body, |prompt, splices| {
                prompt.rename_model(splices, "z");
                prompt.set_priority(splices, 9);
            }),
            r#"{"model":"z","messages":[],"model":"z","priority":9,"mod\u0065l":"z","priority":9}"#
        );
    }

    #[test]
    fn usage_is_asked_for_in_every_form_of_the_option() {
        for (options, expected) in [
            (r#"{}"#, r#"{"include_usage":true}"#),
            (r#"null"#, r#"{"include_usage":true}"#),
            (r#"{ "other":1 }"#, r#"{"include_usage":true, "other":1 }"#),
            (r#"{"include_usage":false}"#, r#"{"include_usage":true}"#),
            (r#"{"include_usage":null,"include_usage":false}"#, r#"{"include_usage":true,"include_usage":true}"#),
        ] {
            let with = |options: &str| format!(r#"{{"model":"m","messages":[],"stream_options":{options}}}"#);
            assert_eq!(edited(&with(options), Prompt::ask_for_usage), with(expected));
        }
    }

    fn any_json() -> impl Strategy<Value = Value> {
        json::tests::any_json("[a-z\"\\\\{}\\[\\]é ]{0,12}", "(model|priority|stream_options|include_usage|messages|role|content|[a-z]{1,4})")
    }

    proptest! {
        /// A splice changes the value that a parser sees to what a parser that edits would have made of it, and nothing else.
        #[test]
        fn splices_agree_with_editing_the_parsed_value(mut value in any_json(), pretty: bool) {
            if let Some(fields) = value.as_object_mut() {
                fields.insert("model".into(), "m".into());
                fields.insert("messages".into(), json!([]));
                fields.remove("stream_options").filter(Value::is_object).map(|options| fields.insert("stream_options".into(), options));
            }
            let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) }.unwrap();
            let Ok(prompt) = chat(&text) else { return Ok(()) };
            let mut splices = Splices::default();
            prompt.rename_model(&mut splices, "other");
            prompt.set_priority(&mut splices, 3);
            prompt.ask_for_usage(&mut splices);
            let spliced: Value = serde_json::from_slice(&splices.apply(&Bytes::from(text)).concat()).unwrap();
            value["model"] = "other".into();
            value["priority"] = 3.into();
            value["stream_options"]["include_usage"] = true.into();
            prop_assert_eq!(spliced, value);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in any::<prop::sample::Index>(), api in 0..5) {
            let api = [Api::Chat, Api::Completions, Api::Responses, Api::Messages, Api::Other][api as usize];
            let _ = parse(api, &bytes);
            let whole = br#"{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a\u00e9"}]}],"prompt":["a"],"input":[{"type":"x"}]}"#;
            let mut mixed = whole.to_vec();
            mixed.splice(cut.index(whole.len())..cut.index(whole.len()), bytes);
            let _ = parse(api, &mixed);
        }
    }
}
