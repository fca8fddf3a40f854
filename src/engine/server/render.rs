//! Answers in the shape of the API they were asked by: the events of a stream, one for each token, or one JSON document.

use std::io::Write;

use serde_json::{Value, json};

use super::answer::{Answer, Finish, ToolCall};
use super::request::Api;
use crate::scheduler::Tokens;

/// One answer on its way out.
pub(super) struct Rendering {
    pub(super) api: Api,
    /// Without the API's prefix.
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) prompt_tokens: Tokens,
    pub(super) include_usage: bool,
    pub(super) answer: Answer,
    /// Events written so far; also the Responses API's sequence number.
    pub(super) events: u32,
    /// What stands before and after a token's text in its event; made once.
    around_token: Option<(Vec<u8>, Vec<u8>)>,
}

impl Rendering {
    pub(super) fn new(api: Api, id: String, created: u64, model: String, prompt_tokens: Tokens, include_usage: bool, answer: Answer) -> Self {
        Rendering { api, id, created, model, prompt_tokens, include_usage, answer, events: 0, around_token: None }
    }

    fn tool(&self) -> Option<&ToolCall> {
        self.answer.tool.as_ref()
    }

    /// Everything before the first token.
    pub(super) fn head(&mut self, cached: Tokens, out: &mut Vec<u8>) {
        match self.api {
            Api::Chat => {
                self.chat_event(json!({"role": "assistant", "content": ""}), None, out);
                if let Some(call) = self.tool() {
                    let call = json!([{"index": 0, "id": self.tool_id(), "type": "function", "function": {"name": call.name, "arguments": ""}}]);
                    self.chat_event(json!({"tool_calls": call}), None, out);
                }
            }
            Api::Completions => {}
            Api::Messages => {
                let mut message = self.message(Vec::new(), None);
                message["usage"] = self.message_usage(cached, 0);
                self.typed_event("message_start", json!({"message": message}), out);
                let block = match self.tool() {
                    None => json!({"type": "text", "text": ""}),
                    Some(call) => json!({"type": "tool_use", "id": self.tool_id(), "name": call.name, "input": {}}),
                };
                self.typed_event("content_block_start", json!({"index": 0, "content_block": block}), out);
                self.typed_event("ping", json!({}), out);
            }
            Api::Responses => {
                let response = self.response("in_progress", Vec::new(), None);
                self.typed_event("response.created", json!({"response": response}), out);
                self.typed_event("response.in_progress", json!({"response": response}), out);
                let item = self.response_item("in_progress", "");
                self.typed_event("response.output_item.added", json!({"output_index": 0, "item": item}), out);
                if self.tool().is_none() {
                    let part = json!({"type": "output_text", "text": "", "annotations": []});
                    self.typed_event("response.content_part.added", self.content_part("part", part), out);
                }
            }
        }
    }

    /// Token `at`, counted from 0.
    pub(super) fn token(&mut self, at: Tokens, out: &mut Vec<u8>) {
        let mut piece = String::new();
        self.answer.piece(at, &mut piece);
        if self.api == Api::Responses {
            let (kind, event) = match self.tool() {
                None => ("response.output_text.delta", self.content_part("delta", piece.into())),
                Some(_) => ("response.function_call_arguments.delta", json!({"item_id": self.item_id(), "output_index": 0, "delta": piece})),
            };
            self.typed_event(kind, event, out);
            return;
        }
        let (before, after) = match self.around_token.take() {
            Some(around) => around,
            None => self.around_token(),
        };
        out.extend_from_slice(&before);
        // Writing a string as JSON into memory cannot fail.
        let _ = serde_json::to_writer(&mut *out, &piece);
        out.extend_from_slice(&after);
        self.around_token = Some((before, after));
        self.events += 1;
    }

    /// Everything after the last token.
    pub(super) fn tail(&mut self, cached: Tokens, out: &mut Vec<u8>) {
        let tokens = self.answer.tokens;
        match self.api {
            Api::Chat => {
                self.chat_event(json!({}), Some(self.finish_reason()), out);
                if self.include_usage {
                    let mut chunk = self.chunk("chat.completion.chunk", json!([]));
                    chunk["usage"] = self.usage(cached, tokens);
                    self.data(&chunk, out);
                }
                out.extend_from_slice(b"data: [DONE]\n\n");
            }
            Api::Completions => {
                let chunk = self.chunk("text_completion", json!([{"index": 0, "text": "", "logprobs": null, "finish_reason": self.finish_reason()}]));
                self.data(&chunk, out);
                if self.include_usage {
                    let mut chunk = self.chunk("text_completion", json!([]));
                    chunk["usage"] = self.usage(cached, tokens);
                    self.data(&chunk, out);
                }
                out.extend_from_slice(b"data: [DONE]\n\n");
            }
            Api::Messages => {
                self.typed_event("content_block_stop", json!({"index": 0}), out);
                let delta = json!({"stop_reason": self.finish_reason(), "stop_sequence": null});
                self.typed_event("message_delta", json!({"delta": delta, "usage": {"output_tokens": tokens}}), out);
                self.typed_event("message_stop", json!({}), out);
            }
            Api::Responses => {
                let text = self.answer.text(tokens);
                if self.tool().is_none() {
                    self.typed_event("response.output_text.done", self.content_part("text", text.as_str().into()), out);
                    let part = json!({"type": "output_text", "text": text, "annotations": []});
                    self.typed_event("response.content_part.done", self.content_part("part", part), out);
                } else {
                    let done = json!({"item_id": self.item_id(), "output_index": 0, "arguments": text});
                    self.typed_event("response.function_call_arguments.done", done, out);
                }
                let item = self.response_item("completed", &text);
                self.typed_event("response.output_item.done", json!({"output_index": 0, "item": item}), out);
                let response = self.whole(cached);
                let kind = if self.answer.finish == Finish::Length { "response.incomplete" } else { "response.completed" };
                self.typed_event(kind, json!({"response": response}), out);
            }
        }
    }

    /// The answer as one document.
    pub(super) fn whole(&self, cached: Tokens) -> Value {
        let tokens = self.answer.tokens;
        let text = self.answer.text(tokens);
        match self.api {
            Api::Chat => {
                let message = match self.tool() {
                    None => json!({"role": "assistant", "content": text}),
                    Some(call) => {
                        let function = json!({"name": call.name, "arguments": text});
                        json!({"role": "assistant", "content": null, "tool_calls": [{"id": self.tool_id(), "type": "function", "function": function}]})
                    }
                };
                let choice = json!({"index": 0, "message": message, "logprobs": null, "finish_reason": self.finish_reason()});
                let mut whole = self.chunk("chat.completion", json!([choice]));
                whole["usage"] = self.usage(cached, tokens);
                whole
            }
            Api::Completions => {
                let choice = json!({"index": 0, "text": text, "logprobs": null, "finish_reason": self.finish_reason()});
                let mut whole = self.chunk("text_completion", json!([choice]));
                whole["usage"] = self.usage(cached, tokens);
                whole
            }
            Api::Messages => {
                let block = match self.tool() {
                    None => json!({"type": "text", "text": text}),
                    // Arguments that max_tokens cut short are no JSON; the API has no other place for them than none.
                    Some(call) => {
                        let input: Value = serde_json::from_str(&text).unwrap_or_else(|_| json!({}));
                        json!({"type": "tool_use", "id": self.tool_id(), "name": call.name, "input": input})
                    }
                };
                let mut message = self.message(vec![block], Some(self.finish_reason()));
                message["usage"] = self.message_usage(cached, tokens);
                message
            }
            Api::Responses => {
                let status = if self.answer.finish == Finish::Length { "incomplete" } else { "completed" };
                let usage = json!({
                    "input_tokens": self.prompt_tokens,
                    "input_tokens_details": {"cached_tokens": cached},
                    "output_tokens": tokens,
                    "output_tokens_details": {"reasoning_tokens": 0},
                    "total_tokens": self.prompt_tokens + tokens,
                });
                self.response(status, vec![self.response_item(status, &text)], Some(usage))
            }
        }
    }

    fn finish_reason(&self) -> &'static str {
        match (self.api, self.answer.finish) {
            (Api::Messages, Finish::Stop) => "end_turn",
            (Api::Messages, Finish::Length) => "max_tokens",
            (Api::Messages, Finish::ToolCall) => "tool_use",
            (_, Finish::Stop) => "stop",
            (_, Finish::Length) => "length",
            (_, Finish::ToolCall) => "tool_calls",
        }
    }

    fn usage(&self, cached: Tokens, produced: Tokens) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": produced,
            "total_tokens": self.prompt_tokens + produced,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }

    /// Anthropic counts cached tokens beside the input, not in it.
    fn message_usage(&self, cached: Tokens, produced: Tokens) -> Value {
        json!({"input_tokens": self.prompt_tokens - cached, "cache_read_input_tokens": cached, "output_tokens": produced})
    }

    /// A chunk, or the whole document, of the two older OpenAI APIs.
    fn chunk(&self, object: &str, choices: Value) -> Value {
        let prefix = if self.api == Api::Chat { "chatcmpl-" } else { "cmpl-" };
        json!({"id": format!("{prefix}{}", self.id), "object": object, "created": self.created, "model": self.model, "choices": choices})
    }

    fn chat_event(&mut self, delta: Value, finish_reason: Option<&str>, out: &mut Vec<u8>) {
        let choice = json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason});
        let chunk = self.chunk("chat.completion.chunk", json!([choice]));
        self.data(&chunk, out);
    }

    /// The event of a token with the text cut out.
    fn around_token(&self) -> (Vec<u8>, Vec<u8>) {
        const MARK: &str = "\u{1}";
        let event = match (self.api, self.tool().is_some()) {
            (Api::Completions, _) => self.chunk("text_completion", json!([{"index": 0, "text": MARK, "logprobs": null, "finish_reason": null}])),
            (Api::Messages, false) => json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": MARK}}),
            (Api::Messages, true) => json!({"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": MARK}}),
            (_, tool) => {
                let delta = if tool { json!({"tool_calls": [{"index": 0, "function": {"arguments": MARK}}]}) } else { json!({"content": MARK}) };
                self.chunk("chat.completion.chunk", json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": null}]))
            }
        };
        let name = if self.api == Api::Messages { "event: content_block_delta\n" } else { "" };
        let text = event.to_string();
        let (before, after) = text.split_once("\"\\u0001\"").unwrap_or((&text, ""));
        (format!("{name}data: {before}").into_bytes(), format!("{after}\n\n").into_bytes())
    }

    fn data(&mut self, value: &Value, out: &mut Vec<u8>) {
        // Writing into memory cannot fail.
        let _ = write!(out, "data: {value}\n\n");
        self.events += 1;
    }

    /// An event with a name, as the Messages and Responses APIs have them.
    fn typed_event(&mut self, kind: &str, mut value: Value, out: &mut Vec<u8>) {
        value["type"] = kind.into();
        if self.api == Api::Responses {
            value["sequence_number"] = self.events.into();
        }
        let _ = write!(out, "event: {kind}\ndata: {value}\n\n");
        self.events += 1;
    }

    fn tool_id(&self) -> String {
        let prefix = if self.api == Api::Messages { "toolu_" } else { "call_" };
        format!("{prefix}{}", self.id)
    }

    fn message(&self, content: Vec<Value>, stop_reason: Option<&str>) -> Value {
        json!({
            "id": format!("msg_{}", self.id),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": null,
        })
    }

    fn item_id(&self) -> String {
        let prefix = if self.tool().is_some() { "fc_" } else { "msg_" };
        format!("{prefix}{}", self.id)
    }

    fn response_item(&self, status: &str, text: &str) -> Value {
        match self.tool() {
            Some(call) => json!({
                "id": self.item_id(), "type": "function_call", "status": status, "call_id": self.tool_id(), "name": call.name, "arguments": text,
            }),
            None => {
                let content = if status == "in_progress" { json!([]) } else { json!([{"type": "output_text", "text": text, "annotations": []}]) };
                json!({"id": self.item_id(), "type": "message", "status": status, "role": "assistant", "content": content})
            }
        }
    }

    fn content_part(&self, name: &str, value: Value) -> Value {
        json!({"item_id": self.item_id(), "output_index": 0, "content_index": 0, name: value})
    }

    fn response(&self, status: &str, output: Vec<Value>, usage: Option<Value>) -> Value {
        let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        json!({
            "id": format!("resp_{}", self.id),
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": null,
            "incomplete_details": incomplete,
            "instructions": null,
            "metadata": {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": true,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": usage,
        })
    }
}
