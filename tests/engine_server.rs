//! The simulated engine over real sockets: what a client of vLLM would see, and what leaves no trace when the client goes.
#![cfg(feature = "gateway")]

use std::time::{Duration, Instant};

use bytes::Bytes;
use headway::engine::server::{Faults, Garbage, Lengths, Server, ServerConfig};
use headway::engine::{Order, Profile, Timing};
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, Response, body::Incoming};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// 2 ms an iteration.
fn config() -> ServerConfig {
    let timing = Timing { base: 2e-3, per_sequence: 0.0, per_prefill_token: 0.0, per_kv_token: 0.0 };
    ServerConfig { models: vec!["m".into()], profile: Profile { timing, max_num_seqs: 2, ..Profile::medium() }, ..ServerConfig::default() }
}

async fn start(config: ServerConfig) -> Server {
    Server::start(config).await.expect("a free port")
}

type Sent = Result<Response<Incoming>, hyper::Error>;

/// One request on a connection of its own, which the response keeps open.
async fn send(server: &Server, method: Method, path: &str, headers: &[(&str, &str)], body: String) -> Sent {
    let stream = TcpStream::connect(server.address()).await.expect("it listens");
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let mut request = Request::builder().method(method).uri(path).header("host", "engine");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    sender.send_request(request.body(Full::new(Bytes::from(body))).expect("a request")).await
}

async fn post(server: &Server, path: &str, headers: &[(&str, &str)], body: &Value) -> Sent {
    send(server, Method::POST, path, headers, body.to_string()).await
}

/// A chat on a bare socket: dropping it is a client that leaves, whatever it was told so far.
async fn post_raw(server: &Server, id: &str, body: &Value) -> TcpStream {
    let body = body.to_string();
    let mut socket = TcpStream::connect(server.address()).await.expect("it listens");
    let length = body.len();
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: e\r\nconnection: close\r\nx-request-id: {id}\r\ncontent-length: {length}\r\n\r\n");
    socket.write_all((head + &body).as_bytes()).await.expect("sent");
    socket
}

async fn text(response: Response<Incoming>) -> String {
    String::from_utf8(response.into_body().collect().await.expect("a whole body").to_bytes().to_vec()).expect("UTF-8")
}

async fn json_of(response: Response<Incoming>) -> Value {
    serde_json::from_str(&text(response).await).expect("JSON")
}

/// Status and JSON of a request that is answered whole.
async fn ask(server: &Server, path: &str, body: &Value) -> (u16, Value) {
    let response = post(server, path, &[], body).await.expect("answered");
    (response.status().as_u16(), json_of(response).await)
}

async fn get(server: &Server, path: &str) -> (u16, String) {
    let response = send(server, Method::GET, path, &[], String::new()).await.expect("answered");
    (response.status().as_u16(), text(response).await)
}

async fn state(server: &Server) -> Value {
    serde_json::from_str(&get(server, "/sim/state").await.1).expect("JSON")
}

async fn set(server: &Server, faults: Faults) {
    let (status, now) = ask(server, "/sim/faults", &json!(faults)).await;
    assert_eq!((status, now), (200, json!(faults)));
}

/// Polls the state until it is as wanted; the state arrives over another connection than what changes it.
async fn until(server: &Server, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let state = state(server).await;
        if wanted(&state) {
            return state;
        }
        assert!(Instant::now() < deadline, "{what} did not come about: {state}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

fn chat(content: &str) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": content}]})
}

fn with(mut body: Value, more: Value) -> Value {
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

/// The data of each event of a stream.
fn events(stream: &str) -> Vec<&str> {
    assert!(stream.ends_with("\n\n"), "the last event is not whole");
    stream.split_terminator("\n\n").map(|event| event.split_once("data: ").expect("every event has data").1).collect()
}

async fn stream_of(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let response = post(server, path, &[], body).await.expect("answered");
    assert_eq!(
        (response.status().as_u16(), &response.headers()["content-type"]),
        (200, &"text/event-stream; charset=utf-8".parse().expect("a value"))
    );
    let stream = text(response).await;
    let mut events = events(&stream);
    if path.ends_with("completions") {
        assert_eq!(events.pop(), Some("[DONE]"));
    }
    events.into_iter().map(|event| serde_json::from_str(event).expect("JSON")).collect()
}

#[tokio::test]
async fn a_chat_streams_role_then_a_word_a_token_then_reason_then_usage() {
    let server = start(config()).await;
    let body = with(chat("hello there"), json!({"max_tokens": 4, "stream": true, "stream_options": {"include_usage": true}, "ignore_eos": true}));
    let chunks = stream_of(&server, "/v1/chat/completions", &body).await;
    assert_eq!(chunks.len(), 1 + 4 + 1 + 1);
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let words: Vec<&str> = chunks[1..5].iter().map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().expect("text")).collect();
    assert!(words[1..].iter().all(|word| word.starts_with(' ')) && !words[0].starts_with(' '), "{words:?}");
    assert_eq!(chunks[5]["choices"][0]["finish_reason"], "length");
    assert!(chunks[..5].iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null() && chunk.get("usage").is_none()));
    assert_eq!(chunks[6]["choices"], json!([]));
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!(chunks[6]["usage"], usage);
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"] && chunk["object"] == "chat.completion.chunk" && chunk["model"] == "m"));

    let (_, whole) = ask(&server, "/v1/chat/completions", &with(chat("hello there"), json!({"max_tokens": 4, "ignore_eos": true}))).await;
    assert_eq!(whole["choices"][0]["message"]["content"], words.concat(), "the same words in one piece");
    assert_eq!((&whole["usage"], &whole["object"]), (&usage, &json!("chat.completion")));

    let without = stream_of(&server, "/v1/chat/completions", &with(chat("hello there"), json!({"max_tokens": 4, "stream": true}))).await;
    assert!(without.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn tokens_arrive_one_by_one_and_in_real_time() {
    let server = start(config()).await;
    let before = Instant::now();
    let body = with(chat("x"), json!({"stream": true, "max_tokens": 50, "ignore_eos": true}));
    let mut response = post(&server, "/v1/chat/completions", &[], &body).await.expect("answered");
    let mut frames = 0;
    while let Some(frame) = response.body_mut().frame().await {
        frames += usize::from(!frame.expect("whole").into_data().expect("data").is_empty());
    }
    assert!(before.elapsed() >= Duration::from_millis(100), "50 iterations of 2 ms, but {:?}", before.elapsed());
    assert!(frames >= 5, "tokens were held back: {frames} frames");
    let state = state(&server).await;
    assert_eq!((&state["iterations"], &state["generation_tokens"]), (&json!(50), &json!(50)));
}

#[tokio::test]
async fn lengths_follow_the_request_then_the_table_then_the_seed() {
    let mut lengths = Lengths::default();
    lengths.insert("known question", 7);
    let server = start(ServerConfig { lengths: lengths.clone(), ..config() }).await;
    let length = async |server: &Server, headers: &[(&str, &str)], body: &Value| {
        let answer = json_of(post(server, "/v1/chat/completions", headers, body).await.expect("answered")).await;
        let reason = answer["choices"][0]["finish_reason"].as_str().expect("a reason").to_owned();
        (answer["usage"]["completion_tokens"].as_u64().expect("a count"), reason)
    };
    let stop = |tokens: u64| (tokens, "stop".to_owned());
    let cut = |tokens: u64| (tokens, "length".to_owned());
    assert_eq!(length(&server, &[("x-sim-output-tokens", "5")], &with(chat("a"), json!({"sim_output_tokens": 6}))).await, stop(5));
    assert_eq!(length(&server, &[], &with(chat("known question"), json!({"sim_output_tokens": 6}))).await, stop(6));
    assert_eq!(length(&server, &[], &chat("known question")).await, stop(7));
    let long = json!({"model": "m", "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "known question"}]}]});
    assert_eq!(length(&server, &[], &long).await, stop(7), "the last user message decides");
    assert_eq!(length(&server, &[], &with(chat("known question"), json!({"max_tokens": 7}))).await, stop(7));
    assert_eq!(length(&server, &[], &with(chat("known question"), json!({"max_tokens": 3}))).await, cut(3));
    assert_eq!(length(&server, &[], &with(chat("known question"), json!({"max_tokens": 9, "max_completion_tokens": 2}))).await, cut(2));
    assert_eq!(length(&server, &[], &with(chat("known question"), json!({"max_tokens": 20, "min_tokens": 12}))).await, stop(12));
    assert_eq!(length(&server, &[], &with(chat("known question"), json!({"max_tokens": 20, "ignore_eos": true}))).await, cut(20));

    let fast = |seed| ServerConfig { speed: 100.0, seed, ..config() };
    let (one, same, other) = (start(fast(1)).await, start(fast(1)).await, start(fast(2)).await);
    let mut drawn = [vec![], vec![], vec![]];
    for question in ["first", "second", "third"] {
        for (server, drawn) in [&one, &same, &other].into_iter().zip(&mut drawn) {
            drawn.push(ask(server, "/v1/chat/completions", &chat(question)).await.1["choices"][0]["message"]["content"].clone());
        }
    }
    assert_eq!(drawn[0], drawn[1]);
    assert_ne!(drawn[0], drawn[2]);
}

#[tokio::test]
async fn every_api_answers_in_its_own_shape() {
    let server = start(config()).await;
    let limits = json!({"max_tokens": 2, "max_output_tokens": 2, "ignore_eos": true});
    let kinds = |events: &[Value]| events.iter().map(|event| event["type"].as_str().expect("a type").to_owned()).collect::<Vec<_>>();

    let chunks = stream_of(&server, "/v1/completions", &with(json!({"model": "m", "prompt": "x", "stream": true}), limits.clone())).await;
    assert_eq!(chunks.len(), 3);
    assert!(chunks.iter().all(|chunk| chunk["object"] == "text_completion" && chunk["choices"][0]["text"].is_string()));
    let (_, whole) = ask(&server, "/v1/completions", &json!({"model": "m", "prompt": [1, 2, 3], "ignore_eos": true})).await;
    assert_eq!(whole["usage"]["prompt_tokens"], 3);
    assert_eq!(whole["usage"]["completion_tokens"], 16, "the default of this API");

    let body = with(json!({"model": "m", "system": "be kind", "messages": [{"role": "user", "content": "hi"}]}), limits.clone());
    let events = stream_of(&server, "/v1/messages", &with(body.clone(), json!({"stream": true}))).await;
    let expected = "message_start content_block_start ping content_block_delta content_block_delta content_block_stop message_delta message_stop";
    assert_eq!(kinds(&events).join(" "), expected);
    assert_eq!((&events[6]["delta"]["stop_reason"], &events[6]["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(2)));
    let (_, message) = ask(&server, "/v1/messages", &body).await;
    let streamed: String = events[3..5].iter().map(|event| event["delta"]["text"].as_str().expect("text")).collect();
    assert_eq!((&message["type"], &message["content"][0]["text"]), (&json!("message"), &json!(streamed)));
    assert_eq!(message["usage"], json!({"input_tokens": 3, "cache_read_input_tokens": 0, "output_tokens": 2}));

    let body = with(json!({"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]}), limits);
    let events = stream_of(&server, "/v1/responses", &with(body.clone(), json!({"stream": true}))).await;
    assert!(events.iter().enumerate().all(|(at, event)| event["sequence_number"] == json!(at)));
    let names = kinds(&events);
    assert_eq!((names[0].as_str(), names.last().map(String::as_str)), ("response.created", Some("response.incomplete")));
    assert_eq!(names.iter().filter(|name| *name == "response.output_text.delta").count(), 2);
    let (_, response) = ask(&server, "/v1/responses", &body).await;
    assert_eq!((&response["status"], &response["incomplete_details"]["reason"]), (&json!("incomplete"), &json!("max_output_tokens")));
    assert_eq!(response["output"][0]["content"][0]["text"], events.last().expect("some")["response"]["output"][0]["content"][0]["text"]);
    assert_eq!((&response["usage"]["input_tokens"], &response["usage"]["output_tokens"]), (&json!(1), &json!(2)));
}

#[tokio::test]
async fn embeddings_compute_each_input_and_nothing_more() {
    let server = start(config()).await;
    let (_, floats) = ask(&server, "/v1/embeddings", &json!({"model": "m", "input": ["one", "two"], "dimensions": 8})).await;
    let vector: Vec<f64> = floats["data"][0]["embedding"].as_array().expect("numbers").iter().map(|x| x.as_f64().expect("a number")).collect();
    assert_eq!((floats["data"].as_array().map(Vec::len), vector.len(), &floats["usage"]["prompt_tokens"]), (Some(2), 8, &json!(2)));
    assert!((vector.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-5);
    assert_ne!(floats["data"][0]["embedding"], floats["data"][1]["embedding"]);
    let (_, packed) = ask(&server, "/v1/embeddings", &json!({"model": "m", "input": "one", "dimensions": 8, "encoding_format": "base64"})).await;
    assert_eq!(packed["data"][0]["embedding"].as_str().map(str::len), Some(44), "32 bytes");
    let state = state(&server).await;
    assert_eq!((&state["finished"], &state["generation_tokens"], &state["kv_blocks_held"]), (&json!(3), &json!(0), &json!(0)));
}

#[tokio::test]
async fn a_demanded_tool_is_called_with_arguments_of_its_schema() {
    let server = start(config()).await;
    let schema = json!({
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}, "note": {"type": "string"}},
        "required": ["city", "days", "unit"],
    });
    let tools =
        json!([{"type": "function", "function": {"name": "other"}}, {"type": "function", "function": {"name": "weather", "parameters": schema}}]);
    let choice = json!({"type": "function", "function": {"name": "weather"}});
    let body = with(chat("rain?"), json!({"tools": tools, "tool_choice": choice}));
    let (_, whole) = ask(&server, "/v1/chat/completions", &body).await;
    let call = &whole["choices"][0]["message"]["tool_calls"][0];
    assert_eq!((&whole["choices"][0]["finish_reason"], &call["function"]["name"]), (&json!("tool_calls"), &json!("weather")));
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().expect("text")).expect("JSON");
    assert!(
        arguments["city"].is_string() && arguments["days"].is_u64() && arguments["unit"] == "C" && arguments.get("note").is_none(),
        "{arguments}"
    );

    let chunks = stream_of(&server, "/v1/chat/completions", &with(body.clone(), json!({"stream": true}))).await;
    let pieces: Vec<&Value> = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].get(0)).collect();
    assert_eq!(pieces[0]["function"], json!({"name": "weather", "arguments": ""}));
    assert!(pieces[0]["id"].is_string() && pieces[1..].iter().all(|piece| piece.get("id").is_none()));
    let joined: String = pieces.iter().map(|piece| piece["function"]["arguments"].as_str().expect("text")).collect();
    assert_eq!(serde_json::from_str::<Value>(&joined).expect("JSON"), arguments);

    let (_, plain) = ask(&server, "/v1/chat/completions", &with(body, json!({"tool_choice": "auto", "max_tokens": 1}))).await;
    assert!(plain["choices"][0]["message"]["content"].is_string());
    let anthropic = json!({
        "model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "rain?"}], "tool_choice": {"type": "any"},
        "tools": [{"name": "weather", "input_schema": schema}],
    });
    let (_, message) = ask(&server, "/v1/messages", &anthropic).await;
    assert_eq!((&message["stop_reason"], &message["content"][0]["type"]), (&json!("tool_use"), &json!("tool_use")));
    assert!(message["content"][0]["input"]["days"].is_u64());
}

#[tokio::test]
async fn prompts_count_a_token_for_four_characters_and_256_for_a_medium() {
    let server = start(config()).await;
    for (content, tokens) in [
        (json!("12345"), 2),
        (json!("äöüß"), 1),
        (json!(""), 1),
        (json!(null), 1),
        (json!([{"type": "text", "text": "1234"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]), 1 + 256),
        (json!([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "12345678"}]}]), 2),
    ] {
        let body = json!({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]});
        let (status, answer) = ask(&server, "/v1/chat/completions", &body).await;
        assert_eq!((status, &answer["usage"]["prompt_tokens"]), (200, &json!(tokens)), "{content}");
    }
}

#[tokio::test]
async fn a_repeated_prompt_is_found_in_the_cache() {
    let server = start(config()).await;
    let body = with(chat(&"a long system prompt ".repeat(20)), json!({"max_tokens": 1}));
    let cached = async || ask(&server, "/v1/chat/completions", &body).await.1["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert_eq!(cached().await, 0);
    assert_eq!(cached().await, 96, "105 tokens, 6 full blocks");
    let metrics = get(&server, "/metrics").await.1;
    assert!(metrics.contains("\nvllm:prefix_cache_hits_total{engine=\"0\",model_name=\"m\"} 96.0\n"), "{metrics}");
}

#[tokio::test]
async fn bad_requests_are_told_what_is_wrong() {
    let server = start(config()).await;
    let long = "x".repeat(4 * 32_768);
    for (path, body, param, says) in [
        ("/v1/chat/completions", json!({"messages": []}), json!("model"), "model"),
        ("/v1/chat/completions", json!({"model": "m"}), json!("messages"), "messages"),
        ("/v1/chat/completions", json!({"model": "m", "messages": []}), json!("messages"), "empty"),
        ("/v1/chat/completions", json!({"model": "m", "messages": [{"role": "user", "content": 5}]}), json!("messages"), "content must be"),
        ("/v1/chat/completions", json!({"model": "m", "messages": "hi"}), json!(null), "invalid type"),
        ("/v1/chat/completions", with(chat("x"), json!({"n": 2})), json!("n"), "n must be 1"),
        ("/v1/chat/completions", with(chat("x"), json!({"max_tokens": 0})), json!("max_tokens"), "at least 1"),
        ("/v1/chat/completions", with(chat("x"), json!({"max_completion_tokens": -5})), json!("max_completion_tokens"), "at least 1"),
        ("/v1/chat/completions", with(chat("x"), json!({"stream_options": {}})), json!("stream_options"), "stream=True"),
        ("/v1/chat/completions", with(chat("x"), json!({"tool_choice": "required"})), json!("tool_choice"), "tools is empty"),
        ("/v1/chat/completions", with(chat("x"), json!({"max_tokens": 32_768})), json!("input_tokens"), "you requested 32768 output tokens"),
        ("/v1/chat/completions", chat(&long), json!("input_tokens"), "maximum context length is 32768 tokens"),
        ("/v1/completions", json!({"model": "m", "prompt": ["a", "b"]}), json!("prompt"), "one prompt"),
        ("/v1/completions", json!({"model": "m", "prompt": []}), json!("prompt"), "not empty"),
        ("/v1/embeddings", json!({"model": "m", "input": long.clone() + "x"}), json!("input_tokens"), "maximum context length"),
        ("/v1/embeddings", json!({"model": "m", "input": {}}), json!("input"), "array"),
        ("/v1/responses", json!({"model": "m"}), json!("input"), "input"),
    ] {
        let (status, answer) = ask(&server, path, &body).await;
        let error = &answer["error"];
        assert_eq!((status, &error["code"], &error["type"], &error["param"]), (400, &json!(400), &json!("BadRequestError"), &param), "{answer}");
        assert!(error["message"].as_str().expect("text").contains(says), "{says}: {answer}");
    }
    let (status, answer) = ask(&server, "/v1/messages", &json!({"model": "m", "messages": [{"role": "user", "content": "x"}]})).await;
    assert_eq!((status, &answer["type"], &answer["error"]["type"]), (400, &json!("error"), &json!("invalid_request_error")));
    let (status, answer) = ask(&server, "/v1/chat/completions", &json!({"model": "gone", "messages": [{"role": "user", "content": "x"}]})).await;
    assert_eq!((status, &answer["error"]["type"], &answer["error"]["param"]), (404, &json!("NotFoundError"), &json!("model")));
    let nested = format!("{{\"model\": \"m\", \"messages\": {}", "[".repeat(10_000));
    let response = send(&server, Method::POST, "/v1/chat/completions", &[], nested).await.expect("answered");
    assert_eq!(response.status(), 400);
    assert_eq!((get(&server, "/v1/nothing").await.0, get(&server, "/v1/chat/completions").await.0), (404, 405));
    assert_eq!(state(&server).await["arrived"], json!([]), "none of them reached the engine");
}

#[tokio::test]
async fn a_client_that_leaves_frees_everything_at_once() {
    let server = start(config()).await;
    let endless = json!({"max_tokens": 20_000, "ignore_eos": true});
    let mut streaming =
        post(&server, "/v1/chat/completions", &[], &with(with(chat("a"), endless.clone()), json!({"stream": true}))).await.expect("answered");
    streaming.body_mut().frame().await.expect("a first token").expect("data");
    // Clients that send a request and are told nothing until it is finished: one runs, one waits.
    let mut plain = Vec::new();
    for (content, running, waiting) in [("b", 2, 0), ("c", 2, 1)] {
        plain.push(post_raw(&server, content, &with(chat(content), endless.clone())).await);
        until(&server, "queueing", |state| (&state["running"], &state["waiting"]) == (&json!(running), &json!(waiting))).await;
    }
    drop(plain.pop());
    until(&server, "leaving while waiting", |state| (&state["waiting"], &state["aborted"]) == (&json!(0), &json!(1))).await;
    drop(plain.pop());
    until(&server, "leaving without a stream", |state| (&state["running"], &state["aborted"]) == (&json!(1), &json!(2))).await;
    drop(streaming);
    let state = until(&server, "leaving a stream", |state| (&state["running"], &state["aborted"]) == (&json!(0), &json!(3))).await;
    assert_eq!((&state["kv_blocks_held"], &state["finished"]), (&json!(0), &json!(0)));
}

#[tokio::test]
async fn the_queue_inside_follows_priority() {
    for (order, expected) in [(Order::Priority, ["first", "urgent", "normal", "later"]), (Order::Fcfs, ["first", "later", "normal", "urgent"])] {
        let base = config();
        let server = start(ServerConfig { profile: Profile { max_num_seqs: 1, order, ..base.profile }, ..base }).await;
        let mut clients = Vec::new();
        for (at, (name, priority)) in [("first", 0), ("later", 5), ("normal", 0), ("urgent", -5)].into_iter().enumerate() {
            let body = with(chat(name), json!({"priority": priority, "sim_output_tokens": 200, "max_tokens": 200}));
            clients.push((name, post_raw(&server, name, &body).await));
            until(&server, "queueing", |state| state["arrived"].as_array().map(Vec::len) == Some(at + 1)).await;
        }
        for (name, mut client) in clients {
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.expect("answered");
            assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(&format!("x-request-id: {name}\r\n")), "{answer}");
        }
        assert_eq!(state(&server).await["admitted"], json!(expected));
    }
}

#[tokio::test]
async fn it_says_about_itself_what_vllm_says() {
    let server = start(config()).await;
    let models: Value = serde_json::from_str(&get(&server, "/v1/models").await.1).expect("JSON");
    let model = &models["data"][0];
    assert_eq!((&model["id"], &model["owned_by"], &model["max_model_len"]), (&json!("m"), &json!("headway-engine"), &json!(32_768)));
    assert_eq!(get(&server, "/health").await, (200, String::new()));
    assert!(get(&server, "/version").await.1.contains("headway-engine"));

    let body = with(chat("a"), json!({"max_tokens": 20_000, "ignore_eos": true, "stream": true}));
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(post(&server, "/v1/chat/completions", &[], &body).await.expect("answered"));
    }
    until(&server, "running", |state| (&state["running"], &state["waiting"]) == (&json!(2), &json!(1))).await;
    // A prompt counts once it is computed.
    for response in &mut held[..2] {
        response.body_mut().frame().await.expect("a first token").expect("data");
    }
    let metrics = get(&server, "/metrics").await.1;
    let value = |name: &str| -> f64 {
        let prefix = format!("{name}{{engine=\"0\",model_name=\"m\"");
        let line = metrics.lines().find(|line| line.starts_with(&prefix)).unwrap_or_else(|| panic!("{name} is missing in {metrics}"));
        line.rsplit_once(' ').expect("a value").1.parse().expect("a number")
    };
    assert_eq!((value("vllm:num_requests_running"), value("vllm:num_requests_waiting")), (2.0, 1.0));
    assert!(value("vllm:kv_cache_usage_perc") > 0.0 && value("vllm:kv_cache_usage_perc") < 1.0);
    assert_eq!(value("vllm:prompt_tokens_total"), 2.0);
    assert_eq!(value("vllm:prefix_cache_queries_total"), 2.0);
    assert!(metrics.contains("block_size=\"16\"") && metrics.contains("num_gpu_blocks=\"24000\""), "{metrics}");

    let short = with(chat("a"), json!({"max_tokens": 1, "stream": true}));
    let response = post(&server, "/v1/chat/completions", &[("endpoint-load-metrics-format", "JSON")], &short).await.expect("answered");
    let load = response.headers()["endpoint-load-metrics"].to_str().expect("text").to_owned();
    let load: Value = serde_json::from_str(load.strip_prefix("JSON ").expect("says its format")).expect("JSON");
    assert_eq!(load["named_metrics"]["num_requests_waiting"], 1.0);
}

#[tokio::test]
async fn faults_break_what_they_say_and_nothing_else() {
    let server = start(config()).await;
    let short = with(chat("a"), json!({"max_tokens": 3, "ignore_eos": true}));
    let streamed = with(short.clone(), json!({"stream": true}));

    set(&server, Faults { status: Some(503), retry_after: Some(7), times: Some(2), ..Faults::default() }).await;
    for _ in 0..2 {
        let response = post(&server, "/v1/chat/completions", &[], &short).await.expect("answered");
        assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (503, &"7".parse().expect("a value")));
        assert_eq!(json_of(response).await["error"]["type"], "ServiceUnavailableError");
    }
    assert_eq!(ask(&server, "/v1/chat/completions", &short).await.0, 200, "it was to hit two");

    set(&server, Faults { die_after_chunks: Some(2), ..Faults::default() }).await;
    let mut response = post(&server, "/v1/chat/completions", &[], &streamed).await.expect("a head");
    let mut got = Vec::new();
    let broke = loop {
        match response.body_mut().frame().await {
            Some(Ok(frame)) => got.extend_from_slice(&frame.into_data().expect("data")),
            Some(Err(_)) => break true,
            None => break false,
        }
    };
    let got = String::from_utf8(got).expect("UTF-8");
    assert!(broke && events(&got).len() == 2, "two events and a broken connection, but {got}");
    let response = post(&server, "/v1/chat/completions", &[], &short).await.expect("a head");
    assert!(response.into_body().collect().await.is_err(), "half a document");
    set(&server, Faults { die_after_chunks: Some(0), ..Faults::default() }).await;
    assert!(post(&server, "/v1/chat/completions", &[], &short).await.is_err(), "no byte at all");

    set(&server, Faults { garbage: Some(Garbage::Http), ..Faults::default() }).await;
    assert!(post(&server, "/v1/chat/completions", &[], &short).await.expect_err("no HTTP").is_parse());
    set(&server, Faults { garbage: Some(Garbage::Body), ..Faults::default() }).await;
    let response = post(&server, "/v1/chat/completions", &[], &short).await.expect("answered");
    assert!(response.status() == 200 && serde_json::from_str::<Value>(&text(response).await).is_err());

    set(&server, Faults { hang: true, health: Some(503), ..Faults::default() }).await;
    assert_eq!(get(&server, "/health").await.0, 503);
    let hanging = post(&server, "/v1/chat/completions", &[], &short);
    assert!(tokio::time::timeout(Duration::from_millis(100), hanging).await.is_err());
    until(&server, "nothing left", |state| state["running"] == 0 && state["kv_blocks_held"] == 0).await;

    set(&server, Faults { slow: Some(20.0), ..Faults::default() }).await;
    let before = Instant::now();
    assert_eq!(ask(&server, "/v1/chat/completions", &short).await.0, 200);
    assert!(before.elapsed() >= Duration::from_millis(120), "three iterations of 40 ms, but {:?}", before.elapsed());

    for wrong in [json!({"slow": 0}), json!({"status": 99}), json!({"hangs": true})] {
        assert_eq!(ask(&server, "/sim/faults", &wrong).await.0, 400, "{wrong}");
    }
    assert_eq!(
        get(&server, "/sim/faults").await.1,
        json!(Faults { slow: Some(20.0), ..Faults::default() }).to_string(),
        "a wrong one changes nothing"
    );
    set(&server, Faults::default()).await;
    assert_eq!((ask(&server, "/v1/chat/completions", &short).await.0, get(&server, "/health").await.0), (200, 200));
}

#[tokio::test]
async fn a_reset_cuts_what_runs_and_forgets_what_was() {
    let server = start(config()).await;
    set(&server, Faults { health: Some(500), ..Faults::default() }).await;
    let body = with(chat("a"), json!({"max_tokens": 20_000, "ignore_eos": true, "stream": true}));
    let mut response = post(&server, "/v1/chat/completions", &[], &body).await.expect("answered");
    response.body_mut().frame().await.expect("a first token").expect("data");
    let (_, state) = ask(&server, "/sim/reset", &json!({})).await;
    assert_eq!((&state["running"], &state["aborted"], &state["arrived"], &state["iterations"]), (&json!(0), &json!(0), &json!([]), &json!(0)));
    assert!(response.into_body().collect().await.is_err(), "the stream is cut, not ended");
    let long = with(chat(&"a prompt of several blocks ".repeat(10)), json!({"max_tokens": 1}));
    let cached = async || ask(&server, "/v1/chat/completions", &long).await.1["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert_eq!((cached().await, cached().await), (json!(0), json!(64)));
    ask(&server, "/sim/reset", &json!({})).await;
    assert_eq!(cached().await, 0, "the cache is empty again");
    assert_eq!(get(&server, "/health").await.0, 200);
}

#[tokio::test]
async fn a_dropped_server_closes_its_connections() {
    let server = start(config()).await;
    let address = server.address();
    let body = with(chat("a"), json!({"max_tokens": 20_000, "ignore_eos": true, "stream": true}));
    let mut response = post(&server, "/v1/chat/completions", &[], &body).await.expect("answered");
    response.body_mut().frame().await.expect("a first token").expect("data");
    drop(server);
    assert!(response.into_body().collect().await.is_err());
    let deadline = Instant::now() + Duration::from_secs(5);
    while TcpStream::connect(address).await.is_ok() {
        assert!(Instant::now() < deadline, "it still accepts");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
