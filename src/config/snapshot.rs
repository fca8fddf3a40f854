//! Everything a request may read, validated together. A request takes one snapshot and keeps it from start to finish.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::fleet::EngineKind;
use crate::scheduler::{Limits, Policy, Slots, Weight};
use crate::tenancy::{KeyHash, Priority};

/// One validated configuration. Built by [`super::load`], never changed.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Where clients connect. A change needs a restart; everything else is reloadable.
    pub listen: SocketAddr,
    /// Certificate chain and key for TLS on `listen`.
    pub tls: Option<Tls>,
    /// Where operators connect.
    pub admin: SocketAddr,
    /// Worker threads of the listener; 0 is one per core.
    pub threads: usize,
    /// The policy of pools that name none.
    pub policy: Arc<NamedPolicy>,
    /// The scoring stage; `None` orders by prompt length.
    pub ranker: Option<RankerSettings>,
    /// Where traces of requests go; `None`: nowhere, and none are recorded.
    pub otlp: Option<Otlp>,
    /// Who may ask; `None`: anybody.
    pub keys: Option<Arc<KeySettings>>,
    /// Where the lengths of answers are written down for training; `None`: nowhere.
    pub training_log: Option<TrainingLogSettings>,
    /// Where is written down what requests used; `None`: nowhere.
    pub usage_log: Option<UsageLogSettings>,
    /// Where the access log goes; `None` is among the lines of the log.
    pub access_log: Option<AccessLogSettings>,
    /// The directory where pools keep what they have learnt; `None` forgets it at the end.
    pub state: Option<PathBuf>,
    /// Body, header and wait limits of the edge.
    pub edge: Edge,
    /// The pools in the order of the file.
    pub pools: Vec<Arc<Pool>>,
    /// Every name a client may ask for, aliases included.
    pub models: BTreeMap<String, Route>,
    /// The files it was read from, the configuration itself first; empty when it came from the command line.
    pub sources: Vec<PathBuf>,
}

/// Where clients connect when nothing else is said.
pub const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 8080);
/// Where operators connect when nothing else is said: not reachable from other machines.
pub const DEFAULT_ADMIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9090);
/// Limits of a pool's queue when nothing else is said.
pub const DEFAULT_LIMITS: Limits = Limits { queue_requests: 100_000, queue_bytes: 1 << 30, max_output: 32_768 };
/// Share of requests whose traces are recorded when nothing else is said.
pub const DEFAULT_SAMPLE: f64 = 0.01;
/// What the gateway is called in traces when nothing else is said.
pub const DEFAULT_SERVICE_NAME: &str = "headway";
/// Size of a training log when nothing else is said, in bytes.
pub const DEFAULT_TRAINING_LOG: u64 = 256 << 20;
/// Size of one file of the usage log when nothing else is said, in bytes.
pub const DEFAULT_USAGE_LOG: u64 = 64 << 20;
/// The access log's `max_size` and `keep` where none are set.
pub const DEFAULT_ACCESS_LOG: (u64, u32) = (64 << 20, 5);
/// Attempts on other backends when nothing else is said.
pub const DEFAULT_RETRIES: u32 = 2;
/// Retries per second of one pool when nothing else is said.
pub const DEFAULT_RETRY_BUDGET: u32 = 10;
/// The time over which the rate of a stream is taken when nothing else is said.
pub const DEFAULT_SLOW_OVER: Duration = Duration::from_secs(30);
/// Where an automatic window starts when the engine does not say how many slots it has.
pub const DEFAULT_INITIAL_SLOTS: u32 = 8;
/// What an automatic window never grows above when nothing else is said.
pub const DEFAULT_MAX_SLOTS: u32 = 1024;
/// The largest window that can be asked for.
pub const MAX_SLOTS: u32 = 65_536;

/// The silence of a backend from which on it counts as wedged when nothing else is said.
pub const DEFAULT_WEDGED_AFTER: Duration = Duration::from_secs(60);
/// Requests a minute from one address that may show unknown keys when nothing else is said.
pub const DEFAULT_UNKNOWN_KEYS: u32 = 60;

/// A policy and the name it was loaded under, for headers and metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedPolicy {
    pub name: String,
    pub policy: Policy,
}

/// Files of the listener's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// Where the ranker is and how long a request waits for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankerSettings {
    /// A model directory.
    pub weights: PathBuf,
    pub device: Device,
    /// `None`: 15 ms on a GPU, 50 ms on a CPU.
    pub deadline: Option<Duration>,
    /// CPU threads; 0 is one per core less one, at least one.
    pub threads: usize,
    /// Another model directory, whose scores are compared with those that serve and not used.
    pub shadow: Option<PathBuf>,
}

/// A collector of traces, and which requests it hears of.
#[derive(Clone, Debug, PartialEq)]
pub struct Otlp {
    /// `http://host:port` of a collector that takes OTLP over gRPC.
    pub endpoint: String,
    /// Share of requests that are recorded, 0 to 1, of those that come without a trace of their own.
    pub sample: f64,
    /// What this gateway is called in the traces.
    pub service_name: String,
}

/// Who may ask, and what happens to others.
#[derive(Clone, Debug, PartialEq)]
pub struct KeySettings {
    pub tenants: Vec<Arc<TenantSettings>>,
    /// Requests a minute from one address that are told of their unknown key; more are 429.
    pub unknown_per_minute: u32,
}

/// One tenant as configured.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantSettings {
    /// A metric label, and the tenant's identity across reloads.
    pub name: String,
    /// Its share of a pool relative to other tenants that wait.
    pub weight: Weight,
    /// The most urgent that its requests may be.
    pub max_priority: Priority,
    /// Names that it may ask for; `None`: all.
    pub models: Option<BTreeSet<String>>,
    pub limits: TenantLimits,
    /// How much of it may wait at once.
    pub queue: QueueLimits,
    pub keys: Vec<TenantKey>,
}

/// One key of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantKey {
    pub hash: KeyHash,
    /// How much that shows it may wait at once.
    pub queue: QueueLimits,
}

/// How much of a key, a tenant or a model may wait for a slot at once; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueLimits {
    pub requests: Option<u64>,
    /// Of their bodies.
    pub bytes: Option<u64>,
}

impl QueueLimits {
    /// Whether there is any limit.
    pub fn is_limited(&self) -> bool {
        self.requests.is_some() || self.bytes.is_some()
    }
}

/// How much one tenant may ask for; `None` is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantLimits {
    pub requests_per_minute: Option<u64>,
    pub input_tokens_per_minute: Option<u64>,
    pub output_tokens_per_minute: Option<u64>,
    /// Requests that are here at once, waiting or running.
    pub concurrent_requests: Option<u64>,
}

/// A file of prompts and the lengths of their answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrainingLogSettings {
    pub file: PathBuf,
    /// Bytes from which on the file becomes the older one, in place of the one before.
    pub max_size: u64,
}

/// Files of what requests used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageLogSettings {
    pub file: PathBuf,
    /// Bytes from which on the file is put away under a name of its own.
    pub max_size: u64,
}

/// Files with a line for each request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessLogSettings {
    pub file: PathBuf,
    /// Bytes from which on the file is put away.
    pub max_size: u64,
    /// How many that were put away are kept.
    pub keep: u32,
}

/// Where the ranker computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Auto,
    Cpu,
    Cuda(usize),
}

/// Limits of the HTTP edge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    /// Largest request body, in bytes.
    pub max_body: u64,
    /// Sum of request bodies held at once, in bytes.
    pub max_body_total: u64,
    /// Largest request head (request line and headers), in bytes.
    pub max_head: usize,
    /// How long a client may take to send its head.
    pub head_timeout: Duration,
    /// How long a client may take to send its body.
    pub body_timeout: Duration,
    /// How long running requests may go on after SIGTERM.
    pub drain: Duration,
    /// Whether an HTTP/1.1 client that closes its sending side still waits for its answer. Then one that left is noticed only when it is written to.
    pub half_close: bool,
    /// Whether `x-headway-*` response headers are sent.
    pub headers: bool,
    /// How often a stream that waits for its answer gets a comment, and how long it waits for the first one; `None`: no comments.
    pub keepalive: Option<Duration>,
    /// What names the session that a request belongs to.
    pub sessions: Sessions,
}

/// What names the session or agent program that a request belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sessions {
    /// Nothing.
    Off,
    /// `x-session-id`, or else OpenAI's `prompt_cache_key`.
    Named,
    /// Those, or else OpenAI's `user`: all that a user asks for counts as one.
    User,
}

impl Default for Edge {
    fn default() -> Self {
        Edge {
            max_body: 30 << 20,
            max_body_total: 2 << 30,
            max_head: 64 << 10,
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(120),
            drain: Duration::from_secs(120),
            half_close: false,
            headers: true,
            keepalive: None,
            sessions: Sessions::Named,
        }
    }
}

/// Where a model name leads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// Index into [`Snapshot::pools`].
    pub pool: usize,
    /// The name the backends know it by, where it differs from the client's.
    pub upstream: Option<String>,
}

/// Interchangeable backends that serve the same models.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    pub name: String,
    pub policy: Arc<NamedPolicy>,
    /// Names clients may ask for and the upstream name of each, in the order of the file. Empty: any model (a pool made by `--backend`), learnt from /v1/models.
    pub models: Vec<(String, Option<String>)>,
    /// How much of a model may wait at once, for those that have such a limit, by the name that clients ask for.
    pub model_queues: BTreeMap<String, QueueLimits>,
    /// Names of the pools that take a request when no backend here can.
    pub fallback: Vec<String>,
    pub backends: Vec<BackendSettings>,
    pub limits: Limits,
    pub timeouts: Timeouts,
    /// Attempts on other backends before the first byte.
    pub retries: u32,
    /// Retries per second the whole pool may spend.
    pub retry_budget: u32,
    /// Whether another backend goes on with an answer whose backend dies while it streams.
    pub resume: bool,
    /// How slowly a stream may come; `None`: as slowly as it likes.
    pub slow_stream: Option<SlowStream>,
}

/// A floor under the rate of a stream's tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowStream {
    pub tokens_per_second: f64,
    /// The time over which the rate is taken.
    pub over: Duration,
}

/// One backend as configured. Its `url` is its identity across reloads.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendSettings {
    pub url: BackendUrl,
    /// `None`: found out.
    pub engine: Option<EngineKind>,
    /// `None`: `auto`.
    pub slots: Option<Slots>,
    pub weight: Weight,
    /// Sent as `authorization: Bearer`; never printed.
    pub api_key: Option<Secret>,
    /// Tokens that fit its KV cache; `None`: found out where the engine tells.
    pub kv_tokens: Option<u64>,
    /// Whether it keeps the beginnings of prompts; `None`: found out where the engine tells, otherwise it is taken to.
    pub prefix_cache: Option<bool>,
    /// Send the queue key as the engine's own `priority` field (vLLM, SGLang); asks for an engine started with priority scheduling.
    pub priority: bool,
    /// From which silence on it counts as wedged, unless that can be explained; its pool's.
    pub wedged_after: Duration,
}

impl BackendSettings {
    /// A backend of which nothing is said but where it is.
    pub fn new(url: BackendUrl) -> BackendSettings {
        BackendSettings {
            url,
            engine: None,
            slots: None,
            weight: Weight::ONE,
            api_key: None,
            kv_tokens: None,
            prefix_cache: None,
            priority: false,
            wedged_after: DEFAULT_WEDGED_AFTER,
        }
    }
}

/// `http://host:port` with an optional path prefix.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BackendUrl {
    pub host: String,
    pub port: u16,
    /// Without a trailing slash; empty for none.
    pub prefix: String,
}

impl BackendUrl {
    /// `host:port`, as in a `host` header; an IPv6 host has its brackets.
    pub fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }
}

impl std::fmt::Display for BackendUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "http://{}:{}{}", self.host, self.port, self.prefix)
    }
}

/// The five waits of a request, each with its own name in errors and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    pub connect: Duration,
    pub queue: Duration,
    pub first_byte: Duration,
    pub inter_chunk: Duration,
    pub total: Duration,
}

/// Long enough for reasoning models on busy backends, short enough that a dead connection is noticed.
impl Default for Timeouts {
    fn default() -> Self {
        Timeouts {
            connect: Duration::from_secs(2),
            queue: Duration::from_secs(600),
            first_byte: Duration::from_secs(300),
            inter_chunk: Duration::from_secs(120),
            total: Duration::from_secs(7200),
        }
    }
}

/// A value that does not show itself.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub fn new(value: String) -> Self {
        Secret(value)
    }

    /// The value, for the one place that sends it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}
