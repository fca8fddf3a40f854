//! A request for an answer that has begun elsewhere: which ones can be made, and where the beginning goes.

use std::borrow::Cow;
use std::ops::Range;

use super::json::Json;
use super::{Api, Splices, count, quoted};
use crate::scheduler::Tokens;

/// Fields that shape an answer as a whole, so that its second half cannot be asked for alone: grammars and schemas by their names in OpenAI's API, vLLM,
/// SGLang and llama.cpp, what counts tokens or prompts, and the fields that are set here.
const UNFIT_IF_SET: [&str; 20] = [
    "add_generation_prompt",
    "audio",
    "continue_final_message",
    "ebnf",
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "json_schema",
    "n_probs",
    "prompt_logprobs",
    "regex",
    "return_token_ids",
    "structural_tag",
    "structured_outputs",
    "suffix",
    "top_logprobs",
    "truncate_prompt_tokens",
    "use_beam_search",
];
/// Limits on the answer's length, as the dialects and engines name them.
const LIMITS: [&str; 4] = ["max_tokens", "max_completion_tokens", "n_predict", "min_tokens"];

/// Why the rest of an answer cannot be asked for, for logs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    #[error("the dialect has no way to ask for the rest of an answer")]
    Dialect,
    #[error("the request sets {0:.64?}")]
    Field(Cow<'static, str>),
    #[error("the request ends with a message of the assistant")]
    EndsWithAssistant,
    #[error("the request has no list of messages that an answer could be added to")]
    Messages,
    #[error("the prompt is not one text")]
    Prompt,
    #[error("nothing is left of the tokens that were asked for")]
    Complete,
    #[error("the request cannot be read again")]
    Unread,
}

/// Where an answer that has begun goes in the body of its request.
#[derive(Debug, PartialEq, Eq)]
pub struct Places {
    /// Behind the opening brace.
    front: usize,
    /// Before the bracket that closes the messages, or before the quote that closes the prompt.
    end: usize,
    chat: bool,
    /// Values of [`LIMITS`], and what is left of each.
    limits: Vec<(Range<usize>, Tokens)>,
    left: Option<Tokens>,
}

/// Reads the body of a request once more, for where its answer could go on after `produced` tokens.
///
/// # Errors
/// It asks for something of which the rest cannot be had alone, or there is no rest.
pub fn places(api: Api, body: &[u8], produced: Tokens) -> Result<Places, Unfit> {
    if !matches!(api, Api::Chat | Api::Completions) {
        return Err(Unfit::Dialect);
    }
    let fields: Vec<_> = Json::check(body).ok().and_then(Json::members).ok_or(Unfit::Unread)?.collect();
    let chat = api == Api::Chat;
    let (mut limits, mut left) = (Vec::new(), None);
    let mut end = None;
    let mut choice = None;
    let mut tools = false;
    for (index, (name, value)) in fields.iter().enumerate() {
        let value = *value;
        let unfit = || Err(Unfit::Field(Cow::Owned(name.to_string())));
        // Parsers disagree about which of several equal keys counts.
        if fields[..index].iter().any(|(other, _)| other == name) {
            return unfit();
        }
        match name.as_ref() {
            "messages" if chat => end = Some(end_of_messages(body, value)?),
            "prompt" if !chat => end = Some(end_of_prompt(body, value)?),
            "tool_choice" => choice = value.string(),
            "tools" | "functions" => tools |= !is_empty(value),
            "response_format" if is_text_format(value) => {}
            "response_format" if !value.is_null() => return unfit(),
            "n" | "best_of" if !matches!(value.get(), "null" | "1") => return unfit(),
            "echo" | "logprobs" if !matches!(value.get(), "null" | "false") => return unfit(),
            limit if LIMITS.contains(&limit) => {
                // The request was understood before, so that this is a number.
                let Some(limit) = count(Some(value), "").ok().flatten() else { continue };
                let rest = limit.saturating_sub(produced);
                limits.push((value.place(body), rest));
                if name != "min_tokens" {
                    left = Some(left.map_or(rest, |left: Tokens| left.min(rest)));
                }
            }
            other if UNFIT_IF_SET.contains(&other) && !matches!(value.get(), "null" | "false") => return unfit(),
            _ => {}
        }
    }
    if tools && choice.as_deref() != Some("none") {
        return Err(Unfit::Field("tools".into()));
    }
    if left == Some(0) {
        return Err(Unfit::Complete);
    }
    let end = end.ok_or(if chat { Unfit::Messages } else { Unfit::Prompt })?;
    // The body parsed as an object, so it has a brace.
    let front = body.iter().position(|&byte| byte == b'{').map_or(0, |at| at + 1);
    Ok(Places { front, end, chat, limits, left })
}

impl Places {
    /// Asks for what follows `text`. vLLM, SGLang and llama.cpp (from May 2026 on) read the two flags; older llama.cpp servers go on with an assistant's
    /// message that comes last in any case.
    pub fn ask(&self, splices: &mut Splices, text: &str) {
        for (place, left) in &self.limits {
            splices.replace(place.clone(), left.to_string().into_bytes());
        }
        let text = quoted(text);
        if self.chat {
            splices.insert(self.front, br#""continue_final_message":true,"add_generation_prompt":false,"#.to_vec());
            splices.insert(self.end, [br#",{"role":"assistant","content":"#, &text[..], b"}"].concat());
        } else {
            splices.insert(self.end, text[1..text.len() - 1].to_vec());
        }
    }

    /// The most tokens that may still come, by the client's own limit.
    pub fn left(&self) -> Option<Tokens> {
        self.left
    }
}

fn end_of_messages(body: &[u8], value: Json) -> Result<usize, Unfit> {
    let last = value.elements().and_then(Iterator::last).ok_or(Unfit::Messages)?;
    let role = last.members().ok_or(Unfit::Messages)?.filter(|(name, _)| name == "role").last().and_then(|(_, role)| role.string());
    match role.as_deref() {
        Some("assistant") => Err(Unfit::EndsWithAssistant),
        _ => Ok(value.place(body).end - 1),
    }
}

fn end_of_prompt(body: &[u8], value: Json) -> Result<usize, Unfit> {
    if value.is_string() { Ok(value.place(body).end - 1) } else { Err(Unfit::Prompt) }
}

fn is_empty(value: Json) -> bool {
    value.is_null() || value.elements().is_some_and(|mut elements| elements.next().is_none())
}

fn is_text_format(value: Json) -> bool {
    let kind = value.members().and_then(|mut members| members.find(|(name, _)| name == "type"));
    kind.and_then(|(_, kind)| kind.string()).is_some_and(|kind| kind == "text")
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use serde_json::{Value, json};

    use super::*;

    fn asked(api: Api, body: &str, text: &str, produced: Tokens) -> Result<Value, Unfit> {
        let mut splices = Splices::default();
        places(api, body.as_bytes(), produced)?.ask(&mut splices, text);
        Ok(serde_json::from_slice(&splices.apply(&Bytes::copy_from_slice(body.as_bytes())).concat()).unwrap())
    }

    #[test]
    fn a_chat_goes_on_with_its_last_message() {
        let body = r#" {"model":"m","max_tokens": 10,"min_tokens":2,"messages": [{"role":"user","content":"a]"} ] ,"max_completion_tokens":9.0,"tools":[],"n":1}"#;
        assert_eq!(
            asked(Api::Chat, body, "so \"far\"\n", 4).unwrap(),
            json!({
                "model": "m", "max_tokens": 6, "min_tokens": 0, "max_completion_tokens": 5, "tools": [], "n": 1,
                "continue_final_message": true, "add_generation_prompt": false,
                "messages": [{"role": "user", "content": "a]"}, {"role": "assistant", "content": "so \"far\"\n"}],
            })
        );
        assert_eq!(places(Api::Chat, body.as_bytes(), 4).unwrap().left(), Some(5));
        assert_eq!(asked(Api::Chat, body, "x", 9), Err(Unfit::Complete));
    }

    #[test]
    fn a_completion_goes_on_with_its_prompt() {
        let body = r#"{"prompt":"once \"upon\"","stream":true}"#;
        assert_eq!(asked(Api::Completions, body, " a \"time\"", 3).unwrap(), json!({"prompt": "once \"upon\" a \"time\"", "stream": true}));
        for prompt in ["[1,2]", r#"["a"]"#, "null"] {
            assert_eq!(asked(Api::Completions, &format!(r#"{{"prompt":{prompt}}}"#), "x", 1), Err(Unfit::Prompt), "{prompt}");
        }
        assert_eq!(asked(Api::Completions, "{}", "x", 1), Err(Unfit::Prompt));
    }

    #[test]
    fn what_has_no_second_half_is_told() {
        let unfit = |fields: &str| {
            let body = format!(r#"{{"messages":[{{"role":"user","content":"Hi"}}],{fields}}}"#);
            match asked(Api::Chat, &body, "x", 1) {
                Err(Unfit::Field(name)) => Some(name.into_owned()),
                Err(other) => panic!("{fields}: {other}"),
                Ok(_) => None,
            }
        };
        for (fields, name) in [
            (r#""n":2"#, "n"),
            (r#""logprobs":true"#, "logprobs"),
            (r#""logprobs":0"#, "logprobs"),
            (r#""echo":true"#, "echo"),
            (r#""tools":[{"type":"function"}]"#, "tools"),
            (r#""tools":[{}],"tool_choice":"auto""#, "tools"),
            (r#""functions":[{}]"#, "tools"),
            (r#""response_format":{"type":"json_object"}"#, "response_format"),
            (r#""guided_json":{}"#, "guided_json"),
            (r#""grammar":"root ::= x""#, "grammar"),
            (r#""continue_final_message":true"#, "continue_final_message"),
            (r#""max_tokens":5,"max_tokens":6"#, "max_tokens"),
            (r#""m\u0065ssages":[]"#, "messages"),
        ] {
            assert_eq!(unfit(fields).as_deref(), Some(name), "{fields}");
        }
        for fields in [
            r#""n":null,"logprobs":false,"tools":null,"response_format":null,"echo":false,"suffix":null,"max_tokens":null"#,
            r#""tools":[{}],"tool_choice":"none","response_format":{"type":"text"},"temperature":0,"stop":["x"]"#,
        ] {
            assert_eq!(unfit(fields), None, "{fields}");
        }
        for (body, why) in [
            (r#"{"messages":[]}"#, Unfit::Messages),
            (r#"{"messages":"x"}"#, Unfit::Messages),
            (r#"{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y"}]}"#, Unfit::EndsWithAssistant),
            ("[]", Unfit::Unread),
        ] {
            assert_eq!(asked(Api::Chat, body, "x", 1), Err(why), "{body}");
        }
        for api in [Api::Messages, Api::Responses, Api::Other] {
            assert_eq!(asked(api, "{}", "x", 1), Err(Unfit::Dialect));
        }
    }
}
