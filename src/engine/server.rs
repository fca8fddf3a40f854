//! The engine in real time, behind HTTP: the OpenAI API, Anthropic's /v1/messages, and what vLLM says about itself.
//!
//! | path | what it does |
//! |---|---|
//! | `POST /v1/chat/completions`, `/v1/completions`, `/v1/messages`, `/v1/responses` | generate, streaming or not |
//! | `POST /v1/embeddings` | prefill only |
//! | `GET /v1/models`, `/health`, `/version`, `/metrics` | as vLLM's |
//! | `POST /sim/faults`, `GET /sim/faults` | [`Faults`] in force |
//! | `GET /sim/state` | [`Report`] |
//! | `POST /sim/reset` | cuts every request; the engine, its cache, counters and faults are as at the start |
//!
//! As in vLLM, a stream's headers are sent at once and its first event with the first token; a client that leaves frees its slot and KV at once,
//! streaming or not; connections that idle for 5 seconds are closed; `priority` is ignored under [`Order::Fcfs`](super::Order).
//!
//! How long an answer is: the header `x-sim-output-tokens` or the field `sim_output_tokens`, else [`ServerConfig::lengths`], else drawn by
//! [`ServerConfig::length_model`] from the prompt and the seed; at least `min_tokens`, at most the limit; `ignore_eos` makes it the limit exactly.
//! A request that must call a tool (`tool_choice` "required", "any" or a name) is answered with a call whose arguments fit the tool's schema.
#![allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "this is the model's shell: it has a clock, sockets and hash maps")]

mod answer;
mod command;
mod driver;
mod faults;
mod feed;
mod metrics;
mod render;
mod reply;
mod request;
mod socket;

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioTimer;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

use super::{Profile, Work};
use crate::scheduler::Tokens;
use answer::{Answer, mix};
pub use answer::{LengthModel, Lengths};
pub use command::{Args, EngineError, run};
use driver::Client;
pub use driver::Report;
pub use faults::{Faults, Garbage};
use feed::End;
use render::Rendering;
use reply::{Fall, Reply, Streaming};
use request::{Api, Ask, Embed, Invalid, Prompt};
use socket::Socket;

/// uvicorn's `timeout_keep_alive`, which vLLM leaves as it is.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Larger bodies are refused with 413.
const MAX_BODY: usize = 64 << 20;
/// Pause after the operating system refused a connection (out of file descriptors), so that the loop is not a busy one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const OUTPUT_TOKENS: HeaderName = HeaderName::from_static("x-sim-output-tokens");
const LOAD_FORMAT: HeaderName = HeaderName::from_static("endpoint-load-metrics-format");
const LOAD: HeaderName = HeaderName::from_static("endpoint-load-metrics");

/// What to serve.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Names under which the model can be asked for; the first is the one that /metrics shows.
    pub models: Vec<String>,
    pub profile: Profile,
    /// Seconds of the model in one real second.
    pub speed: f64,
    pub seed: u64,
    pub lengths: Lengths,
    pub length_model: LengthModel,
}

impl Default for ServerConfig {
    fn default() -> Self {
        ServerConfig {
            models: vec!["sim".to_owned()],
            profile: Profile::medium(),
            speed: 1.0,
            seed: 0,
            lengths: Lengths::default(),
            length_model: LengthModel::default(),
        }
    }
}

/// A server that runs in this process. Dropping it stops it as a crash would: every connection is closed.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    task: JoinHandle<Infallible>,
}

impl Server {
    /// Starts a server on a free port of 127.0.0.1. Needs a tokio runtime.
    ///
    /// # Errors
    /// When no port can be bound.
    pub async fn start(config: ServerConfig) -> io::Result<Server> {
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let address = listener.local_addr()?;
        Ok(Server { address, task: tokio::spawn(serve(listener, config)) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its base URL, without a path.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Serves until the future is dropped; that closes every connection.
pub async fn serve(listener: TcpListener, config: ServerConfig) -> Infallible {
    let (client, driver) = Client::new(config.profile, config.speed);
    let mut tasks = JoinSet::new();
    tasks.spawn(driver.run());
    let shared = Arc::new(Shared { config, client, faults: Mutex::default(), minted: AtomicU64::new(0) });
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => { tasks.spawn(connection(stream, Arc::clone(&shared))); }
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
            // Finished connections are taken out of the set; the driver ends only with the last client, which `shared` holds.
            Some(_) = tasks.join_next() => {}
        }
    }
}

struct Shared {
    config: ServerConfig,
    client: Client,
    faults: Mutex<Faults>,
    minted: AtomicU64,
}

async fn connection(stream: TcpStream, shared: Arc<Shared>) {
    // Fails only for a socket that is gone already.
    let _ = stream.set_nodelay(true);
    let (socket, spoiled) = Socket::new(stream);
    let service = service_fn(|request| {
        let (shared, spoiled) = (Arc::clone(&shared), Arc::clone(&spoiled));
        async move { shared.answer(request, &spoiled).await }
    });
    let result =
        hyper::server::conn::http1::Builder::new().timer(TokioTimer::new()).header_read_timeout(KEEP_ALIVE).serve_connection(socket, service).await;
    if let Err(error) = result {
        tracing::debug!(%error, "a connection ended early");
    }
}

type Answered = Result<Response<Reply>, io::Error>;

impl Shared {
    /// An error closes the connection.
    async fn answer(&self, request: Request<Incoming>, spoiled: &AtomicBool) -> Answered {
        let (parts, body) = request.into_parts();
        let mut response = match (&parts.method, parts.uri.path()) {
            (&Method::POST, "/v1/chat/completions") => self.generate(Api::Chat, &parts.headers, body, spoiled).await?,
            (&Method::POST, "/v1/completions") => self.generate(Api::Completions, &parts.headers, body, spoiled).await?,
            (&Method::POST, "/v1/messages") => self.generate(Api::Messages, &parts.headers, body, spoiled).await?,
            (&Method::POST, "/v1/responses") => self.generate(Api::Responses, &parts.headers, body, spoiled).await?,
            (&Method::POST, "/v1/embeddings") => self.embed(&parts.headers, body, spoiled).await?,
            (&Method::GET, "/v1/models") => document(StatusCode::OK, &self.models()),
            (&Method::GET, "/health") => self.health(),
            (&Method::GET, "/version") => document(StatusCode::OK, &json!({"version": concat!("headway-engine ", env!("CARGO_PKG_VERSION"))})),
            (&Method::GET, "/metrics") => self.metrics().await,
            (&Method::GET, "/sim/state") => document(StatusCode::OK, &json!(self.client.report().await)),
            (&Method::GET, "/sim/faults") => document(StatusCode::OK, &json!(*self.faults())),
            (&Method::POST, "/sim/faults") => self.set_faults(body).await?,
            (&Method::POST, "/sim/reset") => self.reset().await,
            (_, path) => {
                let known = [
                    "/v1/chat/completions",
                    "/v1/completions",
                    "/v1/messages",
                    "/v1/responses",
                    "/v1/embeddings",
                    "/v1/models",
                    "/health",
                    "/version",
                    "/metrics",
                    "/sim/state",
                    "/sim/faults",
                    "/sim/reset",
                ];
                if known.contains(&path) {
                    document(StatusCode::METHOD_NOT_ALLOWED, &json!({"detail": "Method Not Allowed"}))
                } else {
                    document(StatusCode::NOT_FOUND, &json!({"detail": "Not Found"}))
                }
            }
        };
        if let Some(id) = parts.headers.get(REQUEST_ID) {
            response.headers_mut().insert(REQUEST_ID, id.clone());
        }
        Ok(response)
    }

    async fn generate(&self, api: Api, headers: &HeaderMap, body: Incoming, spoiled: &AtomicBool) -> Answered {
        let Some(body) = read(body).await? else { return Ok(failure(api, StatusCode::PAYLOAD_TOO_LARGE, "the body is too large", None)) };
        let fault = self.faults().strike();
        if let Some(response) = misbehave(&fault, api, spoiled).await? {
            return Ok(response);
        }
        let mut ask = match Ask::parse(api, &body) {
            Ok(ask) => ask,
            Err(invalid) => return Ok(refusal(api, &invalid)),
        };
        if let Some(tokens) = headers.get(OUTPUT_TOKENS).and_then(|value| value.to_str().ok()).and_then(|value| value.parse().ok()) {
            ask.sim_output_tokens = Some(tokens);
        }
        if let Some(response) = self.unknown_model(api, &ask.model) {
            return Ok(response);
        }
        let limit = match limit(&ask.prompt, ask.max_tokens, self.config.profile.context()) {
            Ok(limit) => limit,
            Err(invalid) => return Ok(refusal(api, &invalid)),
        };
        let answer = Answer::plan(&ask, limit, self.config.seed, &self.config.lengths, self.config.length_model);
        let id = self.mint();
        let label = label(headers, &id);
        let prompt_tokens = ask.prompt.tokens;
        let work = Work { prompt_tokens, prefix_hashes: ask.prompt.hashes, output_tokens: answer.tokens, priority: ask.priority };
        let load = self.load_header(headers).await;
        let running = self.client.submit(label, work);
        let rendering = Rendering::new(api, id, now(), ask.model, prompt_tokens, ask.include_usage, answer);
        let mut response = if ask.stream {
            let mut response = Response::new(Reply::Stream(Box::new(Streaming::new(running, rendering, fault.die_after_chunks))));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
            response
        } else {
            let progress = running.feed.ended().await;
            if progress.end == Some(End::Cut) {
                return Err(io::Error::other("the engine was reset"));
            }
            halve(document(StatusCode::OK, &rendering.whole(progress.cached)), &fault)
        };
        response.headers_mut().extend(load.map(|load| (LOAD, load)));
        Ok(response)
    }

    async fn embed(&self, headers: &HeaderMap, body: Incoming, spoiled: &AtomicBool) -> Answered {
        let api = Api::Completions;
        let Some(body) = read(body).await? else { return Ok(failure(api, StatusCode::PAYLOAD_TOO_LARGE, "the body is too large", None)) };
        let fault = self.faults().strike();
        if let Some(response) = misbehave(&fault, api, spoiled).await? {
            return Ok(response);
        }
        let embed = match Embed::parse(&body) {
            Ok(embed) => embed,
            Err(invalid) => return Ok(refusal(api, &invalid)),
        };
        if let Some(response) = self.unknown_model(api, &embed.model) {
            return Ok(response);
        }
        let context = self.config.profile.context();
        if let Some(prompt) = embed.inputs.iter().find(|prompt| prompt.tokens > context) {
            return Ok(refusal(api, &too_long(prompt, 0, context)));
        }
        let id = self.mint();
        let tokens: u64 = embed.inputs.iter().map(|prompt| u64::from(prompt.tokens)).sum();
        let vectors: Vec<Vec<f32>> = embed.inputs.iter().map(|prompt| vector(prompt.whole, embed.dimensions)).collect();
        let running: Vec<_> = embed
            .inputs
            .into_iter()
            .map(|prompt| {
                let work = Work { prompt_tokens: prompt.tokens, prefix_hashes: prompt.hashes, output_tokens: 0, priority: 0 };
                self.client.submit(label(headers, &id), work)
            })
            .collect();
        for request in &running {
            if request.feed.ended().await.end == Some(End::Cut) {
                return Err(io::Error::other("the engine was reset"));
            }
        }
        let data: Vec<Value> = vectors
            .iter()
            .enumerate()
            .map(|(index, vector)| json!({"object": "embedding", "index": index, "embedding": encode(vector, embed.base64)}))
            .collect();
        let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
        let body = json!({"id": format!("embd-{id}"), "object": "list", "created": now(), "model": embed.model, "data": data, "usage": usage});
        Ok(halve(document(StatusCode::OK, &body), &fault))
    }

    fn unknown_model(&self, api: Api, model: &str) -> Option<Response<Reply>> {
        let known = self.config.models.iter().any(|known| known == model);
        (!known).then(|| failure(api, StatusCode::NOT_FOUND, &format!("The model `{model}` does not exist."), Some("model")))
    }

    fn models(&self) -> Value {
        let root = self.config.models.first();
        let data: Vec<Value> = self
            .config
            .models
            .iter()
            .map(|model| {
                json!({
                    "id": model, "object": "model", "created": now(), "owned_by": "headway-engine", "root": root, "parent": null,
                    "max_model_len": self.config.profile.context(),
                })
            })
            .collect();
        json!({"object": "list", "data": data})
    }

    fn health(&self) -> Response<Reply> {
        let status = self.faults().health.and_then(|status| StatusCode::from_u16(status).ok()).unwrap_or(StatusCode::OK);
        let mut response = Response::new(Reply::Whole(None));
        *response.status_mut() = status;
        response
    }

    async fn metrics(&self) -> Response<Reply> {
        let report = self.client.report().await;
        let model = self.config.models.first().map_or("", String::as_str);
        let mut response = Response::new(Reply::Whole(Some(metrics::text(&report, &self.config.profile, model).into())));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"));
        response
    }

    async fn load_header(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let format = headers.get(LOAD_FORMAT)?.to_str().ok()?;
        metrics::load_header(format, &self.client.report().await)?.try_into().ok()
    }

    async fn set_faults(&self, body: Incoming) -> Answered {
        let bad = |message: &str| Ok(failure(Api::Chat, StatusCode::BAD_REQUEST, message, None));
        let Some(body) = read(body).await? else { return bad("the body is too large") };
        let faults: Faults = match serde_json::from_slice(&body) {
            Ok(faults) => faults,
            Err(error) => return bad(&format!("no valid faults: {error}")),
        };
        if faults.slow.is_some_and(|factor| !factor.is_finite() || factor <= 0.0) {
            return bad("slow must be a finite number above 0");
        }
        if [faults.status, faults.health].into_iter().flatten().any(|status| !(200..=599).contains(&status)) {
            return bad("status and health must be between 200 and 599");
        }
        self.client.slow(faults.slow.unwrap_or(1.0));
        let reply = document(StatusCode::OK, &json!(faults));
        *self.faults() = faults;
        Ok(reply)
    }

    /// Answers once the engine is empty.
    async fn reset(&self) -> Response<Reply> {
        *self.faults() = Faults::default();
        self.client.slow(1.0);
        self.client.reset();
        document(StatusCode::OK, &json!(self.client.report().await))
    }

    /// Nothing can panic while the lock is held, so a poisoned one is still consistent.
    fn faults(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An id for one answer, unique in this server.
    fn mint(&self) -> String {
        format!("{:016x}", mix(self.config.seed ^ self.minted.fetch_add(1, Ordering::Relaxed)))
    }
}

/// `None` when it is too large; an error when the client did not send it whole.
async fn read(body: Incoming) -> io::Result<Option<Bytes>> {
    match Limited::new(body, MAX_BODY).collect().await {
        Ok(body) => Ok(Some(body.to_bytes())),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => Ok(None),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// What a fault makes of a request before the engine sees it.
async fn misbehave(fault: &Faults, api: Api, spoiled: &AtomicBool) -> io::Result<Option<Response<Reply>>> {
    if fault.hang {
        std::future::pending::<()>().await;
    }
    match fault.garbage {
        Some(Garbage::Http) => {
            spoiled.store(true, Ordering::Relaxed);
            return Ok(Some(Response::new(Reply::Whole(None))));
        }
        Some(Garbage::Body) => {
            let mut response = Response::new(Reply::Whole(Some(Bytes::from_static(b"<<< this is neither JSON nor an event stream"))));
            response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            return Ok(Some(response));
        }
        None => {}
    }
    if let Some(status) = fault.status.and_then(|status| StatusCode::from_u16(status).ok()) {
        let mut response = failure(api, status, "a fault is in force", None);
        response.headers_mut().extend(fault.retry_after.map(|seconds| (RETRY_AFTER, HeaderValue::from(seconds))));
        return Ok(Some(response));
    }
    match fault.die_after_chunks {
        Some(0) => Err(io::Error::other("the connection is closed, as the fault in force demands")),
        _ => Ok(None),
    }
}

/// With `die_after_chunks` in force, only the first half of a document arrives.
fn halve(response: Response<Reply>, fault: &Faults) -> Response<Reply> {
    if fault.die_after_chunks.is_none() {
        return response;
    }
    response.map(|reply| match reply {
        Reply::Whole(Some(bytes)) => Reply::Half { promised: bytes.len() as u64, bytes: Some(bytes.slice(..bytes.len() / 2)), fall: Fall::default() },
        other => other,
    })
}

/// How many tokens the answer may have: what was asked for, or what the context leaves.
fn limit(prompt: &Prompt, max_tokens: Option<Tokens>, context: Tokens) -> Result<Tokens, Invalid> {
    let asked = max_tokens.unwrap_or(0);
    if u64::from(prompt.tokens) + u64::from(asked.max(1)) > u64::from(context) {
        return Err(too_long(prompt, asked, context));
    }
    Ok(max_tokens.unwrap_or(context - prompt.tokens))
}

/// vLLM's words for a prompt and an answer that do not fit the context together.
fn too_long(prompt: &Prompt, asked: Tokens, context: Tokens) -> Invalid {
    let (input, total) = (prompt.tokens, u64::from(prompt.tokens) + u64::from(asked));
    let message = format!(
        "This model's maximum context length is {context} tokens. However, you requested {asked} output tokens and your prompt contains at least \
         {input} input tokens, for a total of at least {total} tokens. Please reduce the length of the input prompt or the number of requested output \
         tokens. (parameter=input_tokens, value={input})"
    );
    Invalid { message, param: Some("input_tokens") }
}

fn label(headers: &HeaderMap, minted: &str) -> String {
    headers.get(REQUEST_ID).and_then(|value| value.to_str().ok()).unwrap_or(minted).to_owned()
}

/// A unit vector that follows from the prompt.
fn vector(hash: u64, dimensions: usize) -> Vec<f32> {
    let raw: Vec<f32> = (0..dimensions as u64).map(|at| (mix(hash.wrapping_add(at)) >> 40) as f32 / (1u32 << 23) as f32 - 1.0).collect();
    let norm = raw.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
    raw.iter().map(|x| x / norm).collect()
}

fn encode(vector: &[f32], base64: bool) -> Value {
    if base64 {
        let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
        return base64::engine::general_purpose::STANDARD.encode(bytes).into();
    }
    json!(vector)
}

fn refusal(api: Api, invalid: &Invalid) -> Response<Reply> {
    failure(api, StatusCode::BAD_REQUEST, &invalid.message, invalid.param)
}

/// An error in the API's own shape, with vLLM's names for the types.
fn failure(api: Api, status: StatusCode, message: &str, param: Option<&str>) -> Response<Reply> {
    if api == Api::Messages {
        let kind = match status.as_u16() {
            400 => "invalid_request_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 | 529 => "overloaded_error",
            _ => "api_error",
        };
        return document(status, &json!({"type": "error", "error": {"type": kind, "message": message}}));
    }
    let kind = match status.as_u16() {
        400 | 413 => "BadRequestError",
        404 => "NotFoundError",
        429 => "RateLimitError",
        503 => "ServiceUnavailableError",
        _ => "InternalServerError",
    };
    document(status, &json!({"error": {"message": message, "type": kind, "param": param, "code": status.as_u16()}}))
}

fn document(status: StatusCode, body: &Value) -> Response<Reply> {
    let mut response = Response::new(Reply::Whole(Some(body.to_string().into())));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Seconds since 1970; 0 if the machine's clock is before that.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
