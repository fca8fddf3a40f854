//! From what was written to a [`Snapshot`]: every value read and checked, all problems collected.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_yaml::{Location, Spanned};

use super::error::{ConfigError, Problem};
use super::keys;
use super::policy;
use super::raw::{self, Leaf, TextOr};
use super::snapshot::*;
use super::text::{Bytes, FromText, Mistake};
use crate::scheduler::{Limits, Slots, Weight};

/// Looks up an environment variable.
pub(crate) type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The longest a timeout may be: a week. Longer is off, and nothing is off.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);

/// The path of a field, like `pools[0].backends[1].url`.
#[derive(Clone, Debug)]
pub(crate) struct Place(String);

impl Place {
    pub(crate) fn root() -> Self {
        Place(String::new())
    }

    pub(crate) fn key(&self, key: &str) -> Self {
        if self.0.is_empty() { Place(key.to_owned()) } else { Place(format!("{}.{key}", self.0)) }
    }

    pub(crate) fn index(&self, index: usize) -> Self {
        Place(format!("{}[{index}]", self.0))
    }
}

/// Reads leaves of one file and keeps what is wrong with them.
pub(crate) struct Checker<'a> {
    file: &'a Path,
    environment: Environment<'a>,
    problems: Vec<Problem>,
}

impl<'a> Checker<'a> {
    pub(crate) fn new(file: &'a Path, environment: Environment<'a>) -> Self {
        Checker { file, environment, problems: Vec::new() }
    }

    pub(crate) fn finish(self) -> Result<(), ConfigError> {
        ConfigError::from_problems(self.problems).map_or(Ok(()), Err)
    }

    pub(crate) fn problem(&mut self, at: Location, place: &Place, mistake: Mistake) {
        // A location the YAML crate could not tell is line 0.
        let position = (at.line() > 0).then(|| (at.line(), at.column()));
        self.problems.push(Problem { file: self.file.to_owned(), position, field: place.0.clone(), message: mistake.message, hint: mistake.hint });
    }

    /// Reads one text, after replacing `${NAME}`; `None` when that was a problem.
    pub(crate) fn read_text<T>(&mut self, text: &Spanned<String>, place: &Place, read: impl FnOnce(&str) -> Result<T, Mistake>) -> Option<T> {
        let value = expand(&text.value, self.environment).and_then(|text| read(&text));
        value.map_err(|mistake| self.problem(text.referenced, place, mistake)).ok()
    }

    pub(crate) fn read<T: FromText>(&mut self, leaf: &Leaf<T>, place: &Place) -> Option<T> {
        self.read_text(&leaf.text, place, T::from_text)
    }

    /// The value, or the default where there is none (or none that can be read).
    pub(crate) fn optional<T: FromText>(&mut self, leaf: Option<&Leaf<T>>, place: &Place, default: T) -> T {
        leaf.and_then(|leaf| self.read(leaf, place)).unwrap_or(default)
    }

    pub(crate) fn bounded<T: FromText + PartialOrd + Copy>(
        &mut self,
        leaf: Option<&Leaf<T>>,
        place: &Place,
        range: RangeInclusive<T>,
        default: T,
        show: impl Fn(T) -> String,
    ) -> T {
        let Some(leaf) = leaf else { return default };
        let value = self.read_text(&leaf.text, place, |text| {
            let value = T::from_text(text)?;
            if range.contains(&value) {
                return Ok(value);
            }
            let (low, high) = (show(*range.start()), show(*range.end()));
            Err(Mistake::new(format!("{text} is out of range"), format!("write {low} to {high}; the default is {}", show(default))))
        });
        value.unwrap_or(default)
    }

    pub(crate) fn number(&mut self, leaf: Option<&Leaf<u64>>, place: &Place, range: RangeInclusive<u64>, default: u64) -> u64 {
        self.bounded(leaf, place, range, default, |number| number.to_string())
    }

    fn bytes(&mut self, leaf: Option<&Leaf<Bytes>>, place: &Place, range: RangeInclusive<u64>, default: u64) -> u64 {
        self.bounded(leaf, place, Bytes(*range.start())..=Bytes(*range.end()), Bytes(default), |bytes| show_bytes(bytes.0)).0
    }

    pub(super) fn queue_limits(&mut self, requests: &Option<Leaf<u64>>, bytes: &Option<Leaf<Bytes>>, place: &Place) -> QueueLimits {
        QueueLimits {
            requests: requests.as_ref().map(|leaf| self.number(Some(leaf), &place.key("queue_requests"), 1..=10_000_000, 1)),
            bytes: bytes.as_ref().map(|leaf| self.bytes(Some(leaf), &place.key("queue_bytes"), 1024..=(1 << 40), 1024)),
        }
    }

    pub(crate) fn duration(&mut self, leaf: Option<&Leaf<Duration>>, place: &Place, default: Duration) -> Duration {
        self.bounded(leaf, place, Duration::from_millis(1)..=LONGEST, default, show_duration)
    }
}

/// Replaces every `${NAME}` by the environment's value; `$${` stands for a plain `${`.
fn expand(text: &str, environment: Environment) -> Result<String, Mistake> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        if rest[..at].ends_with('$') {
            out.push_str(&rest[..at]);
            out.push('{');
            rest = &rest[at + 2..];
            continue;
        }
        out.push_str(&rest[..at]);
        let tail = &rest[at + 2..];
        let end = tail.find('}').ok_or_else(|| Mistake::new("${ has no closing brace", "write ${NAME}, or $${ for a plain ${"))?;
        let name = &tail[..end];
        let valid = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if !valid {
            return Err(Mistake::new(format!("{name:?} is not the name of an environment variable"), "write ${NAME}, or $${ for a plain ${"));
        }
        let value = environment(name).ok_or_else(|| {
            Mistake::new(
                format!("the environment variable {name} is not set"),
                format!("export {name}=... before starting; secrets can also come from a file (api_key_file)"),
            )
        })?;
        out.push_str(&value);
        rest = &tail[end + 1..];
    }
    out.push_str(rest);
    Ok(out)
}

/// Whether a name can be a metric label and a part of a path as it is.
pub(super) fn is_label(text: &str) -> bool {
    (1..=64).contains(&text.len()) && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

/// `30MiB`: the largest unit that divides it.
pub(super) fn show_bytes(bytes: u64) -> String {
    for (unit, shift) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        if bytes > 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    format!("{bytes}B")
}

/// `10m`: the largest unit that divides it.
pub(super) fn show_duration(span: Duration) -> String {
    let millis = span.as_millis();
    for (unit, size) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)] {
        if millis > 0 && millis.is_multiple_of(size) {
            return format!("{}{unit}", millis / size);
        }
    }
    format!("{millis}ms")
}

/// Builds the snapshot of a parsed file.
pub(super) fn validate(path: &Path, file: &raw::File, environment: Environment) -> Result<Snapshot, ConfigError> {
    let mut builder = Builder {
        checker: Checker::new(path, environment),
        dir: path.parent().unwrap_or(Path::new("")).to_owned(),
        sources: vec![path.to_owned()],
        policies: BTreeMap::new(),
        other_files: Vec::new(),
    };
    let snapshot = builder.snapshot(file);
    let mut problems = builder.checker.problems;
    problems.append(&mut builder.other_files);
    ConfigError::from_problems(problems).map_or(Ok(snapshot), Err)
}

struct Builder<'a> {
    checker: Checker<'a>,
    /// Where relative paths begin.
    dir: PathBuf,
    /// Files read on the way.
    sources: Vec<PathBuf>,
    /// Policies by what was written for them, so that a file shared by pools is read (and wrong) once.
    policies: BTreeMap<String, Option<Arc<NamedPolicy>>>,
    /// Problems of policy files.
    other_files: Vec<Problem>,
}

impl Builder<'_> {
    fn snapshot(&mut self, file: &raw::File) -> Snapshot {
        let root = Place::root();
        let listen = self.checker.optional(file.listen.as_ref(), &root.key("listen"), DEFAULT_LISTEN);
        let admin = self.checker.optional(file.admin.as_ref(), &root.key("admin"), DEFAULT_ADMIN);
        self.distinct(file, listen, admin);
        let threads = self.checker.number(file.threads.as_ref(), &root.key("threads"), 0..=1024, 0) as usize;
        let tls = file.tls.as_ref().and_then(|tls| self.tls(tls, &root.key("tls")));
        let policy = match &file.policy {
            Some(leaf) => self.policy(leaf, &root.key("policy")),
            None => Some(Arc::new(NamedPolicy::default())),
        };
        // A policy with a problem makes the whole result an error: what stands in for it here is never used.
        let policy = policy.unwrap_or_else(|| Arc::new(NamedPolicy::default()));
        let ranker = file.ranker.as_ref().and_then(|ranker| self.ranker(ranker, &root.key("ranker")));
        let otlp = file.telemetry.as_ref().and_then(|telemetry| telemetry.otlp.as_ref());
        let otlp = otlp.and_then(|otlp| self.otlp(otlp, &root.key("telemetry").key("otlp")));
        let training_log = file.training_log.as_ref().and_then(|log| self.training_log(log, &root.key("training_log")));
        let usage_log = file.usage_log.as_ref().and_then(|log| self.usage_log(log, &root.key("usage_log"), training_log.as_ref()));
        let own: Vec<&Path> = training_log.iter().map(|log| log.file.as_path()).chain(usage_log.iter().map(|log| log.file.as_path())).collect();
        let access_log = file.access_log.as_ref().and_then(|log| self.access_log(log, &root.key("access_log"), &own));
        let state = file.state.as_ref().and_then(|leaf| self.state(leaf, &root.key("state")));
        let edge = self.edge(file.edge.as_ref().unwrap_or(&raw::Edge::default()), &root.key("edge"));
        let limits = self.limits(file.limits.as_ref(), &root.key("limits"), DEFAULT_LIMITS, &edge);
        let timeouts = self.timeouts(file.timeouts.as_ref(), &root.key("timeouts"), Timeouts::default());

        let place = root.key("pools");
        if file.pools.value.is_empty() {
            self.checker.problem(
                file.pools.referenced,
                &place,
                Mistake::new("there is no pool", "a pool names models and the backends that serve them"),
            );
        }
        let mut names = BTreeMap::new();
        let mut urls = BTreeMap::new();
        let mut pools = Vec::new();
        for (index, raw) in file.pools.value.iter().enumerate() {
            let place = place.index(index);
            let defaults = Defaults { policy: &policy, limits, timeouts, edge: &edge };
            if let Some(pool) = self.pool(raw, &place, &defaults, &mut urls) {
                self.unique(&mut names, &pool.name, raw.name.text.referenced, &place.key("name"), "pool");
                pools.push(pool);
            }
        }
        let models = self.routes(&file.pools.value, &pools, &place);
        self.fallbacks(&file.pools.value, &pools, &place);
        let served = pools.iter().all(|pool| !pool.models.is_empty()).then(|| models.keys().cloned().collect());
        let keys = file.keys.as_ref().and_then(|keys| self.keys(keys, &root.key("keys"), served.as_ref()));
        let pools = pools.into_iter().map(Arc::new).collect();
        Snapshot {
            listen,
            tls,
            admin,
            threads,
            policy,
            ranker,
            otlp,
            keys,
            training_log,
            usage_log,
            access_log,
            state,
            edge,
            pools,
            models,
            sources: std::mem::take(&mut self.sources),
        }
    }

    fn distinct(&mut self, file: &raw::File, listen: SocketAddr, admin: SocketAddr) {
        let overlap = listen.ip() == admin.ip() || listen.ip().is_unspecified() || admin.ip().is_unspecified();
        if listen.port() != 0 && listen.port() == admin.port() && overlap {
            let mistake =
                Mistake::new(format!("{admin} is also where clients connect"), "write another port: the admin address is for operators only");
            let at = file.admin.as_ref().or(file.listen.as_ref()).map_or(file.pools.referenced, |leaf| leaf.text.referenced);
            self.checker.problem(at, &Place::root().key("admin"), mistake);
        }
    }

    /// Says so when `name` was there before, and where.
    fn unique(&mut self, seen: &mut BTreeMap<String, Location>, name: &str, at: Location, place: &Place, what: &str) {
        if let Some(first) = seen.get(name) {
            let mistake = Mistake::new(
                format!("the {what} {name:?} is already on line {}", first.line()),
                format!("keep one of them, or give this {what} another name"),
            );
            self.checker.problem(at, place, mistake);
        } else {
            seen.insert(name.to_owned(), at);
        }
    }

    fn path(&mut self, leaf: &Leaf<PathBuf>, place: &Place) -> Option<PathBuf> {
        let path = self.checker.read(leaf, place)?;
        Some(self.dir.join(path))
    }

    /// A file that must be readable now; also remembered as a source.
    fn text_file(&mut self, leaf: &Leaf<PathBuf>, place: &Place) -> Option<(PathBuf, String)> {
        let path = self.path(leaf, place)?;
        match std::fs::read_to_string(&path) {
            Ok(text) => {
                self.sources.push(path.clone());
                Some((path, text))
            }
            Err(error) => {
                let mistake = Mistake::new(format!("{} cannot be read: {error}", path.display()), "paths are relative to the configuration file");
                self.checker.problem(leaf.text.referenced, place, mistake);
                None
            }
        }
    }

    fn tls(&mut self, raw: &raw::Tls, place: &Place) -> Option<Tls> {
        let mut pem = |leaf: &Leaf<PathBuf>, place: Place, label: &str| {
            let (path, text) = self.text_file(leaf, &place)?;
            // Labels are "CERTIFICATE" and "PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY" (RFC 7468).
            if !text.lines().any(|line| line.starts_with("-----BEGIN ") && line.trim_end().ends_with(&format!("{label}-----"))) {
                let mistake =
                    Mistake::new(format!("{} holds no PEM {label}", path.display()), format!("a PEM file has a line -----BEGIN {label}-----"));
                self.checker.problem(leaf.text.referenced, &place, mistake);
            }
            Some(path)
        };
        let cert = pem(&raw.cert, place.key("cert"), "CERTIFICATE");
        let key = pem(&raw.key, place.key("key"), "PRIVATE KEY");
        Some(Tls { cert: cert?, key: key? })
    }

    fn policy(&mut self, leaf: &Leaf<String>, place: &Place) -> Option<Arc<NamedPolicy>> {
        let dir = self.dir.clone();
        let (reference, source) = self.checker.read_text(&leaf.text, place, |text| Ok((text.to_owned(), policy::locate(text, &dir)?)))?;
        if let Some(known) = self.policies.get(&reference) {
            return known.clone();
        }
        if let policy::Source::File(path) = &source {
            self.sources.push(path.clone());
        }
        let read = match policy::read(&source) {
            Ok(policy) if policy::simulation_only(&policy.policy) => {
                let mistake = Mistake::new(
                    format!("the policy {reference:?} reads true lengths, which only a simulation knows"),
                    "use headway, pars, uniboost or fcfs",
                );
                self.checker.problem(leaf.text.referenced, place, mistake);
                None
            }
            Ok(policy) => Some(Arc::new(policy)),
            Err(error) => {
                self.other_files.extend_from_slice(error.problems());
                None
            }
        };
        self.policies.insert(reference, read.clone());
        read
    }

    fn ranker(&mut self, raw: &raw::Ranker, place: &Place) -> Option<RankerSettings> {
        let weights = self.model_directory(&raw.weights, &place.key("weights"));
        let device = self.checker.optional(raw.device.as_ref(), &place.key("device"), Device::Auto);
        let deadline = raw.deadline.as_ref().map(|leaf| self.checker.duration(Some(leaf), &place.key("deadline"), Duration::from_millis(50)));
        let threads = self.checker.number(raw.threads.as_ref(), &place.key("threads"), 0..=1024, 0) as usize;
        let shadow = raw.shadow.as_ref().and_then(|leaf| self.model_directory(leaf, &place.key("shadow")));
        Some(RankerSettings { weights: weights?, device, deadline, threads, shadow })
    }

    fn model_directory(&mut self, leaf: &Leaf<PathBuf>, place: &Place) -> Option<PathBuf> {
        let directory = self.path(leaf, place)?;
        if !directory.is_dir() {
            let mistake =
                Mistake::new(format!("the model directory {} is not there", directory.display()), "paths are relative to the configuration file");
            self.checker.problem(leaf.text.referenced, place, mistake);
        }
        // The card names every other file of the directory by its hash: no change of the ranker leaves it as it was.
        self.sources.push(directory.join("card.json"));
        Some(directory)
    }

    /// A directory that is there, or can be made when it is needed.
    fn state(&mut self, leaf: &Leaf<PathBuf>, place: &Place) -> Option<PathBuf> {
        let directory = self.path(leaf, place)?;
        if directory.exists() && !directory.is_dir() {
            let mistake =
                Mistake::new(format!("{} is not a directory", directory.display()), "name a directory of its own; it is made if it is missing");
            self.checker.problem(leaf.text.referenced, place, mistake);
        }
        Some(directory)
    }

    /// `served` are the names that clients may ask for, `None` where a pool takes any.
    fn keys(&mut self, raw: &raw::Keys, place: &Place, served: Option<&BTreeSet<String>>) -> Option<Arc<KeySettings>> {
        let most =
            self.checker.number(raw.unknown_per_minute.as_ref(), &place.key("unknown_per_minute"), 1..=1_000_000, u64::from(DEFAULT_UNKNOWN_KEYS));
        let (path, text) = self.text_file(&raw.file, &place.key("file"))?;
        match keys::read(&path, &text, served, self.checker.environment) {
            Ok(tenants) => Some(Arc::new(KeySettings { tenants, unknown_per_minute: most as u32 })),
            Err(error) => {
                self.other_files.extend_from_slice(error.problems());
                None
            }
        }
    }

    fn training_log(&mut self, raw: &raw::TrainingLog, place: &Place) -> Option<TrainingLogSettings> {
        let file = self.file_of_lines(&raw.file, &place.key("file"), &[])?;
        let max_size = self.checker.bytes(raw.max_size.as_ref(), &place.key("max_size"), 1 << 20..=1 << 40, DEFAULT_TRAINING_LOG);
        Some(TrainingLogSettings { file, max_size })
    }

    fn usage_log(&mut self, raw: &raw::UsageLog, place: &Place, training: Option<&TrainingLogSettings>) -> Option<UsageLogSettings> {
        let taken: Vec<&Path> = training.iter().map(|training| training.file.as_path()).collect();
        let file = self.file_of_lines(&raw.file, &place.key("file"), &taken)?;
        let max_size = self.checker.bytes(raw.max_size.as_ref(), &place.key("max_size"), 1 << 20..=1 << 40, DEFAULT_USAGE_LOG);
        Some(UsageLogSettings { file, max_size })
    }

    fn access_log(&mut self, raw: &raw::AccessLog, place: &Place, taken: &[&Path]) -> Option<AccessLogSettings> {
        let file = self.file_of_lines(&raw.file, &place.key("file"), taken)?;
        let (max_size, keep) = DEFAULT_ACCESS_LOG;
        let max_size = self.checker.bytes(raw.max_size.as_ref(), &place.key("max_size"), 1 << 20..=1 << 40, max_size);
        let keep = self.checker.number(raw.keep.as_ref(), &place.key("keep"), 1..=1000, keep.into()) as u32;
        Some(AccessLogSettings { file, max_size, keep })
    }

    /// A file that the gateway writes; `taken` are others of its own.
    fn file_of_lines(&mut self, leaf: &Leaf<PathBuf>, place: &Place, taken: &[&Path]) -> Option<PathBuf> {
        let file = self.path(leaf, place)?;
        let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let same = |other: &PathBuf| file.canonicalize().is_ok_and(|file| other.canonicalize().is_ok_and(|other| other == file));
        let mistake = if !parent.is_dir() {
            Some(Mistake::new(format!("the directory {} is not there", parent.display()), "paths are relative to the configuration file"))
        } else if file.exists() && !file.is_file() {
            Some(Mistake::new(format!("{} is no regular file", file.display()), "name a file; it is made if it is missing"))
        } else if self.sources.iter().any(same) {
            Some(Mistake::new(format!("{} belongs to the configuration", file.display()), "name a file of its own"))
        } else if taken.iter().any(|taken| *taken == file || same(&taken.to_path_buf())) {
            Some(Mistake::new(format!("{} is another log already", file.display()), "name a file of its own"))
        } else {
            None
        };
        if let Some(mistake) = mistake {
            self.checker.problem(leaf.text.referenced, place, mistake);
        }
        Some(file)
    }

    fn otlp(&mut self, raw: &raw::Otlp, place: &Place) -> Option<Otlp> {
        let endpoint = self.checker.read(&raw.endpoint, &place.key("endpoint"));
        let sample = self.checker.bounded(raw.sample.as_ref(), &place.key("sample"), 0.0..=1.0, DEFAULT_SAMPLE, |share| share.to_string());
        let service_name = self.checker.optional(raw.service_name.as_ref(), &place.key("service_name"), DEFAULT_SERVICE_NAME.to_owned());
        Some(Otlp { endpoint: endpoint?.0, sample, service_name })
    }

    fn edge(&mut self, raw: &raw::Edge, place: &Place) -> Edge {
        let default = Edge::default();
        let max_body = self.checker.bytes(raw.max_body.as_ref(), &place.key("max_body"), 1024..=(4 << 30), default.max_body);
        let total_place = place.key("max_body_total");
        let max_body_total = self.checker.bytes(raw.max_body_total.as_ref(), &total_place, 1024..=(1 << 40), default.max_body_total.max(max_body));
        if let Some(leaf) = raw.max_body_total.as_ref().filter(|_| max_body_total < max_body) {
            let mistake =
                Mistake::new("is less than max_body, so the largest body could never be held", format!("write at least {}", show_bytes(max_body)));
            self.checker.problem(leaf.text.referenced, &total_place, mistake);
        }
        Edge {
            max_body,
            max_body_total,
            max_head: self.checker.bytes(raw.max_head.as_ref(), &place.key("max_head"), 8192..=(1 << 20), default.max_head as u64) as usize,
            head_timeout: self.checker.duration(raw.head_timeout.as_ref(), &place.key("head_timeout"), default.head_timeout),
            body_timeout: self.checker.duration(raw.body_timeout.as_ref(), &place.key("body_timeout"), default.body_timeout),
            drain: self.checker.duration(raw.drain.as_ref(), &place.key("drain"), default.drain),
            half_close: self.checker.optional(raw.half_close.as_ref(), &place.key("half_close"), default.half_close),
            headers: self.checker.optional(raw.headers.as_ref(), &place.key("headers"), default.headers),
            keepalive: raw.keepalive.as_ref().map(|leaf| self.checker.duration(Some(leaf), &place.key("keepalive"), Duration::from_secs(15))),
            sessions: self.checker.optional(raw.sessions.as_ref(), &place.key("sessions"), default.sessions),
        }
    }

    fn limits(&mut self, raw: Option<&raw::Limits>, place: &Place, default: Limits, edge: &Edge) -> Limits {
        let none = raw::Limits::default();
        let raw = raw.unwrap_or(&none);
        let requests = self.checker.number(raw.queue_requests.as_ref(), &place.key("queue_requests"), 1..=10_000_000, default.queue_requests as u64);
        let queue_bytes =
            self.checker.bytes(raw.queue_bytes.as_ref(), &place.key("queue_bytes"), 1024..=(1 << 40), default.queue_bytes.max(edge.max_body));
        if let Some(leaf) = raw.queue_bytes.as_ref().filter(|_| queue_bytes < edge.max_body) {
            let hint = format!("write at least {}, or lower edge.max_body", show_bytes(edge.max_body));
            self.checker.problem(
                leaf.text.referenced,
                &place.key("queue_bytes"),
                Mistake::new("is less than edge.max_body, so the largest body could never wait", hint),
            );
        }
        let max_output = self.checker.number(raw.max_output.as_ref(), &place.key("max_output"), 1..=10_000_000, u64::from(default.max_output));
        Limits { queue_requests: requests as usize, queue_bytes, max_output: max_output as u32 }
    }

    fn timeouts(&mut self, raw: Option<&raw::Timeouts>, place: &Place, default: Timeouts) -> Timeouts {
        let none = raw::Timeouts::default();
        let raw = raw.unwrap_or(&none);
        let mut read = |leaf: &Option<Leaf<Duration>>, key: &str, default| self.checker.duration(leaf.as_ref(), &place.key(key), default);
        let timeouts = Timeouts {
            connect: read(&raw.connect, "connect", default.connect),
            queue: read(&raw.queue, "queue", default.queue),
            first_byte: read(&raw.first_byte, "first_byte", default.first_byte),
            inter_chunk: read(&raw.inter_chunk, "inter_chunk", default.inter_chunk),
            total: read(&raw.total, "total", default.total),
        };
        for (leaf, key, span) in [
            (&raw.connect, "connect", timeouts.connect),
            (&raw.first_byte, "first_byte", timeouts.first_byte),
            (&raw.inter_chunk, "inter_chunk", timeouts.inter_chunk),
        ] {
            if let Some(leaf) = leaf.as_ref().filter(|_| span > timeouts.total) {
                let hint = format!("lower it, or raise total (now {})", show_duration(timeouts.total));
                self.checker.problem(leaf.text.referenced, &place.key(key), Mistake::new("is longer than total, so it could never fire", hint));
            }
        }
        timeouts
    }

    fn pool(&mut self, raw: &raw::Pool, place: &Place, defaults: &Defaults, urls: &mut BTreeMap<String, Location>) -> Option<Pool> {
        let name = self.checker.read_text(&raw.name.text, &place.key("name"), |text| {
            if text == "other" {
                Err(Mistake::new("\"other\" is what metrics call everything without a pool", "give it another name"))
            } else if is_label(text) {
                Ok(text.to_owned())
            } else {
                Err(Mistake::new(format!("{text:?} is not a pool name"), "1 to 64 letters, digits, '-', '_' or '.': it becomes a metric label"))
            }
        });
        let policy = match &raw.policy {
            Some(leaf) => self.policy(leaf, &place.key("policy")),
            None => Some(Arc::clone(defaults.policy)),
        };
        let (models, model_queues) = raw.models.as_ref().map(|models| self.models(&models.value, &place.key("models"))).unwrap_or_default();
        let limits = self.limits(raw.limits.as_ref(), &place.key("limits"), defaults.limits, defaults.edge);
        let timeouts = self.timeouts(raw.timeouts.as_ref(), &place.key("timeouts"), defaults.timeouts);
        let retries = self.checker.number(raw.retries.as_ref(), &place.key("retries"), 0..=10, u64::from(DEFAULT_RETRIES)) as u32;
        let budget =
            self.checker.number(raw.retry_budget.as_ref(), &place.key("retry_budget"), 1..=1_000_000, u64::from(DEFAULT_RETRY_BUDGET)) as u32;
        let resume = self.checker.optional(raw.resume.as_ref(), &place.key("resume"), false);
        if let Some(leaf) = raw.resume.as_ref().filter(|_| resume && retries == 0) {
            let mistake = Mistake::new("retries is 0, so that no answer could go on elsewhere", "write retries: 1 or more, or resume: false");
            self.checker.problem(leaf.text.referenced, &place.key("resume"), mistake);
        }
        let slow_stream = raw.slow_stream.as_ref().map(|slow| {
            let place = place.key("slow_stream");
            let rate =
                self.checker.bounded(Some(&slow.tokens_per_second), &place.key("tokens_per_second"), 0.001..=1000.0, 1.0, |rate| rate.to_string());
            SlowStream { tokens_per_second: rate, over: self.checker.duration(slow.over.as_ref(), &place.key("over"), DEFAULT_SLOW_OVER) }
        });
        let wedged_after = self.checker.duration(raw.wedged_after.as_ref(), &place.key("wedged_after"), DEFAULT_WEDGED_AFTER);
        let backends_place = place.key("backends");
        if raw.backends.value.is_empty() {
            self.checker.problem(
                raw.backends.referenced,
                &backends_place,
                Mistake::new("the pool has no backend", "backends: [{ url: \"http://127.0.0.1:8000\" }]"),
            );
        }
        let mut backends = Vec::new();
        for (index, raw) in raw.backends.value.iter().enumerate() {
            let place = backends_place.index(index);
            if let Some(backend) = self.backend(raw, &place, wedged_after) {
                self.unique_backend(urls, &backend.url, raw.url.text.referenced, &place.key("url"));
                backends.push(backend);
            }
        }
        let fallback_place = place.key("fallback");
        let fallback = raw.fallback.as_ref().map_or(&[][..], |fallback| &fallback.value);
        let fallback = fallback.iter().enumerate().filter_map(|(index, leaf)| self.checker.read(leaf, &fallback_place.index(index))).collect();
        Some(Pool {
            name: name?,
            policy: policy?,
            models,
            model_queues,
            fallback,
            backends,
            limits,
            timeouts,
            retries,
            retry_budget: budget,
            resume,
            slow_stream,
        })
    }

    /// A backend's window belongs to one pool: two owners would each fill it.
    fn unique_backend(&mut self, urls: &mut BTreeMap<String, Location>, url: &BackendUrl, at: Location, place: &Place) {
        if let Some(first) = urls.get(&url.to_string()) {
            let mistake = Mistake::new(
                format!("the backend {url} is already on line {}", first.line()),
                "a backend belongs to one pool: list all of its models there, and use weight or slots to give it more",
            );
            self.checker.problem(at, place, mistake);
        } else {
            urls.insert(url.to_string(), at);
        }
    }

    /// The models of one pool: (name, upstream name where it differs), and how much of them may wait.
    fn models(&mut self, raw: &[TextOr<raw::Model>], place: &Place) -> Models {
        let (mut models, mut queues) = (Vec::new(), BTreeMap::new());
        for (index, raw) in raw.iter().enumerate() {
            let place = place.index(index);
            let (name, upstream, queue) = match raw {
                TextOr::Text(text) => (self.checker.read_text(text, &place, model_name), None, QueueLimits::default()),
                TextOr::Long(model) => {
                    let name = self.checker.read_text(&model.name.text, &place.key("name"), model_name);
                    let upstream = model.upstream.as_ref().and_then(|leaf| self.checker.read_text(&leaf.text, &place.key("upstream"), model_name));
                    let limits = model.limits.as_ref();
                    let queue = limits.map(|limits| self.checker.queue_limits(&limits.queue_requests, &limits.queue_bytes, &place.key("limits")));
                    (name, upstream, queue.unwrap_or_default())
                }
            };
            if let Some(name) = name {
                if queue.is_limited() {
                    queues.insert(name.clone(), queue);
                }
                let upstream = upstream.filter(|upstream| *upstream != name);
                models.push((name, upstream));
            }
        }
        (models, queues)
    }

    fn backend(&mut self, raw: &raw::Backend, place: &Place, wedged_after: Duration) -> Option<BackendSettings> {
        let url = self.checker.read(&raw.url, &place.key("url"));
        let engine = self.checker.optional(raw.engine.as_ref(), &place.key("engine"), None);
        let slots = raw.slots.as_ref().and_then(|slots| self.slots(slots, &place.key("slots")));
        let weight = self.checker.optional(raw.weight.as_ref(), &place.key("weight"), Weight::ONE);
        let kv_tokens = raw.kv_tokens.as_ref().map(|leaf| self.checker.number(Some(leaf), &place.key("kv_tokens"), 128..=1 << 40, 1 << 20));
        let prefix_cache = raw.prefix_cache.as_ref().and_then(|leaf| self.checker.read(leaf, &place.key("prefix_cache")));
        let priority = self.checker.optional(raw.priority.as_ref(), &place.key("priority"), false);
        let api_key = self.secret(raw.api_key.as_ref(), raw.api_key_file.as_ref(), place);
        Some(BackendSettings { url: url?, engine, slots, weight, api_key, kv_tokens, prefix_cache, priority, wedged_after })
    }

    fn slots(&mut self, raw: &TextOr<raw::Slots>, place: &Place) -> Option<Slots> {
        match raw {
            TextOr::Text(text) => self.checker.read_text(text, place, |text| match text {
                "auto" => Ok(None),
                _ => match u32::try_from(u64::from_text(text).unwrap_or(0)) {
                    Ok(slots @ 1..=MAX_SLOTS) => Ok(Some(Slots::Fixed(slots))),
                    _ => Err(Mistake::new(
                        format!("{text:?} is not a number of slots"),
                        "write auto, a number such as 64, or { initial: 16, max: 256 }",
                    )),
                },
            })?,
            TextOr::Long(long) => {
                let range = 1..=u64::from(MAX_SLOTS);
                let max = self.checker.number(long.max.as_ref(), &place.key("max"), range.clone(), u64::from(DEFAULT_MAX_SLOTS)) as u32;
                let initial =
                    self.checker.number(long.initial.as_ref(), &place.key("initial"), range, u64::from(DEFAULT_INITIAL_SLOTS.min(max))) as u32;
                if let Some(leaf) = long.initial.as_ref().filter(|_| initial > max) {
                    let mistake =
                        Mistake::new(format!("{initial} is more than max, which is {max}"), "the window starts at initial and never grows above max");
                    self.checker.problem(leaf.text.referenced, &place.key("initial"), mistake);
                }
                Some(Slots::Auto { initial, max })
            }
        }
    }

    fn secret(&mut self, text: Option<&Leaf<String>>, file: Option<&Leaf<PathBuf>>, place: &Place) -> Option<Secret> {
        let (place_text, place_file) = (place.key("api_key"), place.key("api_key_file"));
        let (value, at, place) = match (text, file) {
            (None, None) => return None,
            (Some(_), Some(file)) => {
                self.checker.problem(file.text.referenced, &place_file, Mistake::new("api_key is there as well", "keep one of the two"));
                return None;
            }
            (Some(leaf), None) => (self.checker.read_text(&leaf.text, &place_text, |text| Ok(text.to_owned()))?, leaf.text.referenced, place_text),
            (None, Some(leaf)) => (self.text_file(leaf, &place_file)?.1, leaf.text.referenced, place_file),
        };
        let value = value.trim();
        // What a header value may hold (RFC 9110, 5.5), without the obsolete bytes above 0x7e.
        if value.is_empty() || !value.bytes().all(|byte| (0x20..=0x7e).contains(&byte)) {
            self.checker.problem(
                at,
                &place,
                Mistake::new("the secret is empty, or holds characters that an HTTP header cannot carry", "it is one line of printable ASCII"),
            );
            return None;
        }
        Some(Secret::new(value.to_owned()))
    }

    /// Looks for pools that fall back on what is no other pool.
    fn fallbacks(&mut self, raw: &[raw::Pool], pools: &[Pool], place: &Place) {
        // Pools with problems are missing from `pools`: names are compared only where all could be read.
        for (index, (raw, pool)) in raw.iter().zip(pools).filter(|_| raw.len() == pools.len()).enumerate() {
            let leaves = raw.fallback.as_ref().map_or(&[][..], |fallback| &fallback.value);
            for (position, (leaf, name)) in leaves.iter().zip(&pool.fallback).enumerate() {
                let others = || pools.iter().map(|other| other.name.as_str()).filter(|other| *other != pool.name);
                let mistake = if pool.fallback[..position].contains(name) {
                    Mistake::new(format!("the pool {name:?} is there twice"), "keep one of them")
                } else if others().any(|other| other == name) {
                    continue;
                } else {
                    let close = super::near(name, others()).first().map(|close| format!("did you mean {close}? ")).unwrap_or_default();
                    Mistake::new(format!("{name:?} is no other pool"), format!("{close}other pools: {}", others().collect::<Vec<_>>().join(", ")))
                };
                self.checker.problem(leaf.text.referenced, &place.index(index).key("fallback").index(position), mistake);
            }
        }
    }

    /// Every name a client may ask for, and what is wrong among them.
    fn routes(&mut self, raw: &[raw::Pool], pools: &[Pool], place: &Place) -> BTreeMap<String, Route> {
        let mut routes: BTreeMap<String, Route> = BTreeMap::new();
        let mut open: Option<u64> = None;
        // Pools with problems are missing from `pools`: names are compared only where both sides could be read.
        for (index, (raw, pool)) in raw.iter().zip(pools).filter(|_| raw.len() == pools.len()).enumerate() {
            let place = place.index(index).key("models");
            let at = raw.models.as_ref().map_or(raw.name.text.referenced, |models| models.referenced);
            if pool.models.is_empty() {
                if let Some(line) = open {
                    let mistake = Mistake::new(
                        format!("a second pool without models (the first is on line {line})"),
                        "only one pool can take every model that no other pool names",
                    );
                    self.checker.problem(at, &place, mistake);
                }
                open = Some(raw.name.text.referenced.line());
            }
            for (position, (name, upstream)) in pool.models.iter().enumerate() {
                let at = raw.models.as_ref().and_then(|models| models.value.get(position)).map_or(at, where_model_is);
                let place = place.index(position);
                if let Some(route) = routes.get(name) {
                    let other = pools[route.pool].name.as_str();
                    let hint = if route.pool == index {
                        "keep one of them"
                    } else {
                        "a model is served by one pool: move its backends there, or give clients another name with { name: ..., upstream: ... }"
                    };
                    self.checker.problem(at, &place, Mistake::new(format!("the model {name:?} is already in the pool {other:?}"), hint));
                    continue;
                }
                routes.insert(name.clone(), Route { pool: index, upstream: upstream.clone() });
            }
            self.alias_chains(raw, pool, &place, at);
        }
        routes
    }

    /// An alias leads to a name the backends know, in one step: an alias of an alias would send them a name they do not.
    fn alias_chains(&mut self, raw: &raw::Pool, pool: &Pool, place: &Place, pool_at: Location) {
        let aliases: BTreeMap<&str, &str> = pool.models.iter().filter_map(|(name, upstream)| Some((name.as_str(), upstream.as_deref()?))).collect();
        for (position, (name, upstream)) in pool.models.iter().enumerate() {
            let Some(upstream) = upstream.as_deref().filter(|upstream| aliases.contains_key(upstream)) else { continue };
            let mut chain = vec![name.as_str()];
            let mut seen = BTreeSet::from([name.as_str()]);
            let mut next = upstream;
            let loops = loop {
                chain.push(next);
                if !seen.insert(next) {
                    break true;
                }
                match aliases.get(next) {
                    Some(further) => next = further,
                    None => break false,
                }
            };
            let path = chain.join(" -> ");
            let mistake = if loops {
                Mistake::new(format!("the aliases go in a circle: {path}"), "upstream is the name the backends know the model by")
            } else {
                Mistake::new(format!("an alias of an alias: {path}"), format!("write upstream: {next}, the name the backends know"))
            };
            let at = raw.models.as_ref().and_then(|models| models.value.get(position)).map_or(pool_at, where_model_is);
            self.checker.problem(at, &place.index(position), mistake);
        }
    }
}

/// The models of one pool, as [`Pool::models`] and [`Pool::model_queues`] have them.
type Models = (Vec<(String, Option<String>)>, BTreeMap<String, QueueLimits>);

/// What pools take over where they say nothing themselves.
struct Defaults<'a> {
    policy: &'a Arc<NamedPolicy>,
    limits: Limits,
    timeouts: Timeouts,
    edge: &'a Edge,
}

fn where_model_is(model: &TextOr<raw::Model>) -> Location {
    match model {
        TextOr::Text(text) => text.referenced,
        TextOr::Long(model) => model.name.text.referenced,
    }
}

fn model_name(text: &str) -> Result<String, Mistake> {
    if text.is_empty() || text.len() > 256 || text.chars().any(char::is_control) || text.trim() != text {
        return Err(Mistake::new(format!("{text:?} is not a model name"), "1 to 256 characters, without spaces around"));
    }
    Ok(text.to_owned())
}
