//! What a scenario file says: a workload, a fleet, and the policies to compare on them.
//!
//! Read by the same means as a configuration, so that a mistake is shown with its place, its field and what to write instead.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_yaml::Spanned;

use super::super::{AUTO_SLOTS, Arrivals, Conversations, Dispatch, Job, Length, Member, Part, Scores, Sender, Workload, capacity};
use super::trace;
use crate::config::DEFAULT_LIMITS;
use crate::config::reading::{Checker, ConfigError, FromText, Leaf, Mistake, Place, TextOr, choice, parse, policy_beside};
use crate::engine::{Boosting, Order as EngineOrder, Profile, Step, Timing};
use crate::scheduler::{Gamma, Limits, Order, Policy, PolicyParts, Slots, Target, Tokens, Weight};

/// A scenario, ready to run.
#[derive(Debug)]
pub(super) struct Scenario {
    pub seed: u64,
    pub fleet: Vec<Member>,
    /// Neither paced nor scored: both depend on the seed of the run.
    pub workload: Workload,
    /// Where arrivals and lengths are drawn: how, so that another seed draws others.
    pub drawn: Drawn,
    pub pace: Pace,
    /// Who sends the requests, by name; nobody in particular if there are none.
    pub tenants: Vec<(String, Sender)>,
    pub scores: Option<Scores>,
    pub policies: Vec<Contender>,
    /// Fixed gammas at which headway's order is tried as well.
    pub gammas: Vec<f64>,
    pub queue_timeout: Option<Duration>,
    /// The share of requests, from the start, that figures leave out.
    pub warm_up: f64,
}

/// What of the workload is drawn by seed.
#[derive(Clone, Debug)]
pub(super) struct Drawn {
    requests: usize,
    arrivals: Option<Arrivals>,
    lengths: Option<(Length, Length)>,
    conversations: Option<Conversations>,
}

/// How fast requests arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Pace {
    /// Share of what the fleet can do.
    Load(f64),
    /// Requests a second.
    Rate(f64),
    /// As the trace, the burst or the closed loop has it.
    AsIs,
}

/// A way to dispatch, and what it is called.
#[derive(Clone, Debug)]
pub(super) struct Contender {
    pub name: String,
    pub dispatch: Dispatch,
    /// How all engines order their requests, instead of as the fleet has it.
    pub order: Option<EngineOrder>,
    /// Whether they swap out whom they preempt.
    pub swaps: bool,
    /// Whether the gateway is told what prompts begin with.
    pub affinity: bool,
}

impl Contender {
    /// The fleet that it has to do with.
    pub fn fleet(&self, scenario: &Scenario) -> Vec<Member> {
        let ordered = |member: &Member| {
            let mut member = member.clone();
            member.profile.order = self.order.unwrap_or(member.profile.order);
            member.profile.swap = self.swaps.then_some(SWAP);
            member
        };
        scenario.fleet.iter().map(ordered).collect()
    }
}

/// The standard deviation of the logarithm of TRAIL's predictions, and the share of its predicted output until which a request gives way.
const TRAIL: (f64, f64) = (0.5, 0.8);

/// Seconds that a KV token of an 8B model takes to host memory or back: 128 KiB at the 25 GB/s of PCIe 4.0 with 16 lanes.
const SWAP: f64 = 5.2e-6;

/// The orders inside an engine, by name; those that boost at this gamma, or following the tail.
fn engine_orders(gamma: Option<f64>) -> [(&'static str, EngineOrder); 12] {
    let boost = |step| EngineOrder::Boost(Boosting { gamma, step });
    [
        ("fcfs", EngineOrder::Fcfs),
        ("priority", EngineOrder::Priority),
        ("score", EngineOrder::Priority),
        ("prefill-first", EngineOrder::PrefillFirst),
        ("oracle-sjf", EngineOrder::Shortest),
        ("trail", EngineOrder::Remaining { noise: TRAIL.0, until: TRAIL.1 }),
        ("trail-plus", EngineOrder::Remaining { noise: 0.0, until: TRAIL.1 }),
        ("srpt", EngineOrder::Remaining { noise: 0.0, until: 1.0 }),
        ("las", EngineOrder::Attained),
        ("distboost", boost(Step::Queues)),
        ("uniboost-base", boost(Step::Unified)),
        ("uniboost", boost(Step::Guarded)),
    ]
}

/// What follows the name of a policy in a gateway that does not know what prompts begin with.
const BLIND: &str = "+blind";

/// The queues' limits in a simulation: nobody is turned away for want of room, because then policies would be compared on different requests.
const LIMITS: Limits = Limits { queue_requests: 1_000_000, queue_bytes: u64::MAX, ..DEFAULT_LIMITS };

/// What is compared where a scenario names nothing.
const DEFAULT_POLICIES: [&str; 7] = ["round-robin", "least-loaded", "fcfs", "pars", "uniboost", "headway", "oracle-boost"];

impl Scenario {
    /// Requests per second that the fleet can do at most, of this workload's kind. Takes as long as a run.
    pub fn capacity(&self) -> f64 {
        capacity(&self.fleet, &self.workload)
    }

    /// The workload by a seed: drawn, paced for a fleet of this capacity, and scored.
    pub fn workload(&self, seed: u64, capacity: f64) -> Workload {
        let mut workload = match (&self.drawn.lengths, self.drawn.arrivals) {
            (Some((prompt, output)), Some(arrivals)) => self.drawn.draw(arrivals, prompt, output, seed),
            (_, Some(arrivals)) => {
                let mut workload = self.workload.clone();
                workload.arrive(arrivals, seed);
                workload
            }
            _ => self.workload.clone(),
        };
        match self.pace {
            Pace::Load(load) => workload.pace(load * capacity),
            Pace::Rate(rate) => workload.pace(rate),
            Pace::AsIs => {}
        }
        if !self.tenants.is_empty() {
            workload.send(&self.tenants.iter().map(|(_, sender)| *sender).collect::<Vec<_>>(), seed);
        }
        if let Some(scores) = self.scores {
            workload.score(scores, seed);
        }
        workload
    }
}

/// Reads a scenario file and the traces and policies that it names.
///
/// # Errors
/// Everything that is wrong with it.
pub(super) fn load(path: &Path) -> Result<Scenario, ConfigError> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        ConfigError::of_file(path, format!("cannot be read: {error}"), "name a scenario, for example examples/scenarios/conversation.yaml".into())
    })?;
    build(path, &text)
}

fn build(path: &Path, text: &str) -> Result<Scenario, ConfigError> {
    let raw: File = parse(path, text)?;
    let environment = |name: &str| std::env::var(name).ok();
    let mut reader = Reader { checker: Checker::new(path, &environment), dir: path.parent().unwrap_or(Path::new("")).to_owned() };
    let root = Place::root();
    let seed = reader.checker.number(raw.seed.as_ref(), &root.key("seed"), 0..=u64::MAX, 1);
    let fleet = reader.fleet(&raw.fleet, &root.key("fleet"));
    let place = root.key("workload");
    let work = &raw.workload.value;
    let arrivals = reader.arrivals(work.arrivals.as_ref(), &place.key("arrivals"));
    let (workload, drawn, scored) = reader.requests(work, raw.workload.referenced, arrivals, seed, &place)?;
    let pace = reader.pace(work, &place);
    let tenants = reader.tenants(work.tenants.as_ref(), &place.key("tenants"), arrivals);
    let scores = reader.scores(work.scores.as_ref(), &place.key("scores"), scored);
    let policies = reader.policies(raw.policies.as_ref(), &root.key("policies"))?;
    let gammas = reader.list(raw.gammas.as_ref(), &root.key("gammas"), |gamma| (1e-6..=1e3).contains(gamma), "a rate in 1/s, 0.000001 to 1000");
    let queue_timeout = raw.queue_timeout.as_ref().map(|leaf| reader.checker.duration(Some(leaf), &root.key("queue_timeout"), Duration::MAX));
    let warm_up = reader.checker.bounded(raw.warm_up.as_ref(), &root.key("warm_up"), 0.0..=0.9, 0.0, |share| share.to_string());
    reader.checker.finish()?;
    Ok(Scenario { seed, fleet, workload, drawn, pace, tenants, scores, policies, gammas, queue_timeout, warm_up })
}

/// A contender by its name: `round-robin`, `least-loaded`, `sticky`, `engine:ORDER`, `engine:ORDER+swap`, `sjf`, `oracle-sjf`, `oracle-boost`, a built-in policy or the path of one;
/// `NAME@GAMMA` is the same policy at a fixed gamma, or at one of the targets mean, balanced and tail; `NAME+blind` does not know what prompts begin with.
///
/// # Errors
/// There is no such policy, or its file is wrong.
pub(super) fn contender(reference: &str, dir: &Path) -> Result<Contender, ConfigError> {
    let (sighted, affinity) = reference.strip_suffix(BLIND).map_or((reference, true), |sighted| (sighted, false));
    let (name, gamma) = match sighted.rsplit_once('@') {
        Some((name, gamma)) => (name, Some(gamma)),
        None => (sighted, None),
    };
    let direct = match name {
        "round-robin" => Some(Dispatch::RoundRobin),
        "least-loaded" => Some(Dispatch::LeastLoaded),
        "sticky" => Some(Dispatch::Sticky),
        _ => None,
    };
    if let Some(dispatch) = direct {
        return Ok(Contender { name: reference.to_owned(), dispatch, order: None, swaps: false, affinity });
    }
    if let Some(order) = name.strip_prefix("engine:") {
        let wrong = |mistake: Mistake| ConfigError::of_file(Path::new(reference), mistake.message, mistake.hint);
        let gamma =
            gamma.map(|text| f64::from_text(text).ok().filter(|gamma| *gamma > 0.0).ok_or_else(|| not_a_gamma(reference, text))).transpose()?;
        let (order, swaps) = order.strip_suffix("+swap").map_or((order, false), |order| (order, true));
        let order = choice("order of an engine", order, &engine_orders(gamma)).map_err(wrong)?;
        if gamma.is_some() && !matches!(order, EngineOrder::Boost(_)) {
            return Err(wrong(Mistake::new("this order has no gamma", "leave out @ and what follows it")));
        }
        return Ok(Contender { name: reference.to_owned(), dispatch: Dispatch::RoundRobin, order: Some(order), swaps, affinity });
    }
    let default = || policy_beside("headway", dir).map(|named| parts(&named.policy));
    let mut parts = match name {
        // The ranker's score and nothing else: PARS without its aging.
        "sjf" => PolicyParts { order: Order::Pars, aging_share: 0.0, overload: false, ..default()? },
        "oracle-sjf" => PolicyParts { order: Order::OracleSjf, aging_share: 0.0, overload: false, ..default()? },
        "oracle-boost" => PolicyParts { order: Order::OracleBoost, ..default()? },
        _ => parts(&policy_beside(name, dir)?.policy),
    };
    if let Some(text) = gamma {
        parts.gamma = match text {
            "adaptive" => Gamma::Adaptive,
            "mean" => Gamma::Target(Target::Mean),
            "balanced" => Gamma::Target(Target::Balanced),
            "tail" => Gamma::Target(Target::Tail),
            _ => Gamma::Fixed(f64::from_text(text).map_err(|_| not_a_gamma(reference, text))?),
        };
    }
    let policy = Policy::new(parts).map_err(|error| ConfigError::of_file(Path::new(reference), error.to_string(), String::new()))?;
    let name = Path::new(name).file_stem().map_or_else(|| name.to_owned(), |stem| stem.to_string_lossy().into_owned());
    let name = gamma.map_or(name.clone(), |gamma| format!("{name}@{gamma}"));
    let name = if affinity { name } else { name + BLIND };
    Ok(Contender { name, dispatch: Dispatch::Gateway { policy, limits: LIMITS }, order: None, swaps: false, affinity })
}

fn not_a_gamma(reference: &str, text: &str) -> ConfigError {
    let hint = "write a rate in 1/s, adaptive, mean, balanced or tail: headway@0.01, headway@mean".into();
    ConfigError::of_file(Path::new(reference), format!("{text:?} is not a gamma"), hint)
}

fn parts(policy: &Policy) -> PolicyParts {
    PolicyParts {
        order: policy.order(),
        gamma: policy.gamma(),
        max_overtake: policy.max_overtake(),
        aging_threshold: policy.aging_threshold(),
        aging_share: policy.aging_share(),
        lead: policy.lead(),
        overload: policy.overload(),
    }
}

// What users write. Every field is described in docs/simulator.md.

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    seed: Option<Leaf<u64>>,
    workload: Spanned<RawWorkload>,
    fleet: Spanned<Vec<RawMember>>,
    policies: Option<Spanned<Vec<Leaf<String>>>>,
    gammas: Option<Spanned<Vec<Leaf<f64>>>>,
    queue_timeout: Option<Leaf<Duration>>,
    warm_up: Option<Leaf<f64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawWorkload {
    trace: Option<Leaf<PathBuf>>,
    requests: Option<Leaf<u64>>,
    arrivals: Option<TextOr<RawArrivals>>,
    prompt: Option<TextOr<RawLength>>,
    output: Option<TextOr<RawLength>>,
    conversations: Option<Spanned<RawConversations>>,
    load: Option<Leaf<f64>>,
    rate: Option<Leaf<f64>>,
    tenants: Option<Spanned<Vec<RawTenant>>>,
    scores: Option<TextOr<RawScores>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConversations {
    turns: Option<TextOr<RawLength>>,
    think: Option<Leaf<Duration>>,
    system: Option<Leaf<u64>>,
    systems: Option<Leaf<u64>>,
    longest: Option<Leaf<u64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawArrivals {
    cv: Option<Leaf<f64>>,
    clients: Option<Leaf<u64>>,
    think: Option<Leaf<Duration>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawLength {
    mean: Option<Leaf<f64>>,
    median: Option<Leaf<f64>>,
    sigma: Option<Leaf<f64>>,
    mixture: Option<Spanned<Vec<RawPart>>>,
    longest: Option<Leaf<u64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPart {
    share: Leaf<f64>,
    median: Leaf<f64>,
    sigma: Leaf<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTenant {
    name: Leaf<String>,
    share: Option<Leaf<f64>>,
    weight: Option<Leaf<Weight>>,
    flood: Option<Leaf<u64>>,
    at: Option<Leaf<Duration>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawScores {
    tau: Leaf<f64>,
}

/// Seconds, as [`Timing`] has them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTiming {
    base: Leaf<f64>,
    per_sequence: Leaf<f64>,
    per_prefill_token: Leaf<f64>,
    per_kv_token: Leaf<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawMember {
    engine: Leaf<String>,
    count: Option<Leaf<u64>>,
    speed: Option<Leaf<f64>>,
    timing: Option<RawTiming>,
    sequences: Option<Leaf<u64>>,
    kv_tokens: Option<Leaf<u64>>,
    context: Option<Leaf<u64>>,
    order: Option<Leaf<String>>,
    slots: Option<Leaf<String>>,
    weight: Option<Leaf<Weight>>,
}

struct Reader<'a> {
    checker: Checker<'a>,
    /// Where relative paths begin.
    dir: PathBuf,
}

impl Reader<'_> {
    fn positive(&mut self, leaf: Option<&Leaf<f64>>, place: &Place, most: f64, default: f64) -> f64 {
        self.checker.bounded(leaf, place, 1e-6..=most, default, |number| number.to_string())
    }

    /// A list of numbers, all of which are `fit`.
    fn list(&mut self, raw: Option<&Spanned<Vec<Leaf<f64>>>>, place: &Place, fit: impl Fn(&f64) -> bool, hint: &str) -> Vec<f64> {
        let leaves = raw.map_or(&[][..], |raw| &raw.value);
        let mut numbers = Vec::new();
        for (index, leaf) in leaves.iter().enumerate() {
            numbers.extend(self.checker.read_text(&leaf.text, &place.index(index), |text| {
                f64::from_text(text).ok().filter(&fit).ok_or_else(|| Mistake::new(format!("{text} is out of range"), format!("write {hint}")))
            }));
        }
        numbers
    }

    fn fleet(&mut self, raw: &Spanned<Vec<RawMember>>, place: &Place) -> Vec<Member> {
        if raw.value.is_empty() {
            self.checker.problem(raw.referenced, place, Mistake::new("there is no backend", "write fleet: [{ engine: medium }]"));
        }
        let mut fleet = Vec::new();
        for (index, raw) in raw.value.iter().enumerate() {
            let place = place.index(index);
            let engines = [("small", Profile::small()), ("medium", Profile::medium()), ("large", Profile::large())];
            let profile = self.checker.read_text(&raw.engine.text, &place.key("engine"), |text| choice("engine", text, &engines));
            let mut profile = profile.unwrap_or_else(Profile::medium);
            if let Some(raw) = &raw.timing {
                let place = place.key("timing");
                let mut seconds = |leaf, key| self.checker.bounded(Some(leaf), &place.key(key), 0.0..=100.0, 0.0, |seconds| seconds.to_string());
                profile.timing = Timing {
                    base: seconds(&raw.base, "base"),
                    per_sequence: seconds(&raw.per_sequence, "per_sequence"),
                    per_prefill_token: seconds(&raw.per_prefill_token, "per_prefill_token"),
                    per_kv_token: seconds(&raw.per_kv_token, "per_kv_token"),
                };
            }
            let sequences = self.checker.number(raw.sequences.as_ref(), &place.key("sequences"), 1..=100_000, u64::from(profile.max_num_seqs));
            profile.max_num_seqs = sequences as u32;
            let block = u64::from(crate::engine::BLOCK_TOKENS);
            let kv = u64::from(profile.kv_blocks) * block;
            let kv = self.checker.number(raw.kv_tokens.as_ref(), &place.key("kv_tokens"), block..=1 << 34, kv);
            profile.kv_blocks = (kv / block) as u32;
            let context = self.checker.number(raw.context.as_ref(), &place.key("context"), 1..=1 << 24, u64::from(profile.max_model_len));
            profile.max_model_len = context as Tokens;
            if let Some(leaf) = &raw.order {
                let order = self.checker.read_text(&leaf.text, &place.key("order"), |text| choice("order of an engine", text, &engine_orders(None)));
                profile.order = order.unwrap_or_default();
            }
            let slots = raw.slots.as_ref().and_then(|leaf| {
                self.checker.read_text(&leaf.text, &place.key("slots"), |text| match (text, text.parse()) {
                    ("auto", _) => Ok(AUTO_SLOTS),
                    (_, Ok(slots @ 1..=100_000)) => Ok(Slots::Fixed(slots)),
                    _ => Err(Mistake::new(format!("{text:?} is no number of slots"), "write auto, or 1 to 100000")),
                })
            });
            let member = Member {
                speed: self.positive(raw.speed.as_ref(), &place.key("speed"), 1e3, 1.0),
                slots: slots.unwrap_or(AUTO_SLOTS),
                weight: self.checker.optional(raw.weight.as_ref(), &place.key("weight"), Weight::ONE),
                ..Member::new(profile)
            };
            let count = self.checker.number(raw.count.as_ref(), &place.key("count"), 1..=1_000, 1);
            fleet.extend((0..count).map(|_| member.clone()));
        }
        fleet
    }

    fn arrivals(&mut self, raw: Option<&TextOr<RawArrivals>>, place: &Place) -> Option<Arrivals> {
        match raw? {
            TextOr::Text(text) => {
                let words = [("poisson", Arrivals::Poisson), ("burst", Arrivals::Burst)];
                self.checker.read_text(text, place, |text| choice("way to arrive", text, &words))
            }
            TextOr::Long(RawArrivals { clients: Some(clients), think, .. }) => {
                let clients = self.checker.number(Some(clients), &place.key("clients"), 1..=1_000_000, 1) as u32;
                Some(Arrivals::Closed { clients, think: self.checker.optional(think.as_ref(), &place.key("think"), Duration::ZERO) })
            }
            TextOr::Long(raw) => {
                Some(Arrivals::Gamma { cv: self.checker.bounded(raw.cv.as_ref(), &place.key("cv"), 0.05..=50.0, 1.0, |cv| cv.to_string()) })
            }
        }
    }

    fn length(&mut self, raw: &TextOr<RawLength>, place: &Place) -> Option<Length> {
        let longest = 1 << 24;
        let raw = match raw {
            TextOr::Text(text) => {
                return self.checker.read_text(text, place, |text| match u64::from_text(text)? {
                    tokens if tokens <= longest => Ok(Length::Fixed(tokens as Tokens)),
                    _ => Err(Mistake::new(format!("{text} is out of range"), format!("write 1 to {longest}"))),
                });
            }
            TextOr::Long(raw) => raw,
        };
        let most = longest as f64;
        if let Some(mean) = &raw.mean {
            return Some(Length::Exponential(self.positive(Some(mean), &place.key("mean"), most, 1.0)));
        }
        let longest = self.checker.number(raw.longest.as_ref(), &place.key("longest"), 1..=longest, longest) as Tokens;
        let mut parts = Vec::new();
        for (index, part) in raw.mixture.as_ref().map_or(&[][..], |raw| &raw.value).iter().enumerate() {
            let place = place.key("mixture").index(index);
            parts.push(Part {
                share: self.positive(Some(&part.share), &place.key("share"), 1e6, 1.0),
                median: self.positive(Some(&part.median), &place.key("median"), most, 1.0),
                sigma: self.positive(Some(&part.sigma), &place.key("sigma"), 10.0, 1.0),
            });
        }
        if parts.is_empty() {
            let median = self.positive(raw.median.as_ref(), &place.key("median"), most, 256.0);
            parts.push(Part { share: 1.0, median, sigma: self.positive(raw.sigma.as_ref(), &place.key("sigma"), 10.0, 1.0) });
        }
        Some(Length::LogNormal { parts, longest })
    }

    /// The requests, what of them a seed draws, and whether they came with scores.
    fn requests(
        &mut self,
        raw: &RawWorkload,
        at: serde_yaml::Location,
        arrivals: Option<Arrivals>,
        seed: u64,
        place: &Place,
    ) -> Result<(Workload, Drawn, bool), ConfigError> {
        let prompt = raw.prompt.as_ref().and_then(|raw| self.length(raw, &place.key("prompt")));
        let output = raw.output.as_ref().and_then(|raw| self.length(raw, &place.key("output")));
        let requests = raw.requests.as_ref().map(|leaf| self.checker.number(Some(leaf), &place.key("requests"), 1..=10_000_000, 1) as usize);
        if let Some(leaf) = &raw.trace {
            if prompt.is_some() || output.is_some() {
                self.checker.problem(
                    leaf.text.referenced,
                    &place.key("trace"),
                    Mistake::new("a trace brings its own lengths", "remove prompt and output, or trace"),
                );
                return Ok((Workload::default(), Drawn::nothing(), false));
            }
            let Some(path) = self.checker.read(leaf, &place.key("trace")) else { return Ok((Workload::default(), Drawn::nothing(), false)) };
            let path = self.dir.join(path);
            let mut jobs: Vec<Job> = trace::read(&path)?;
            jobs.truncate(requests.unwrap_or(usize::MAX));
            let scored = jobs.iter().any(|job| job.score.is_some());
            let mut workload = Workload { jobs, clients: None };
            if let Some(arrivals) = arrivals {
                workload.arrive(arrivals, seed);
            }
            if let Some(raw) = &raw.conversations {
                let mistake = Mistake::new("a trace has no conversations", "remove conversations, or write prompt and output instead of the trace");
                self.checker.problem(raw.referenced, &place.key("conversations"), mistake);
            }
            let drawn = Drawn { requests: workload.jobs.len(), arrivals, lengths: None, conversations: None };
            return Ok((workload, drawn, scored));
        }
        let (Some(prompt), Some(output)) = (prompt, output) else {
            let hint = "write trace: FILE, or prompt and output, for example output: { median: 300, sigma: 1.0 }";
            self.checker.problem(at, place, Mistake::new("nothing says how long prompts and answers are", hint));
            return Ok((Workload::default(), Drawn::nothing(), false));
        };
        let (arrivals, requests) = (arrivals.unwrap_or(Arrivals::Poisson), requests.unwrap_or(5_000));
        let conversations =
            raw.conversations.as_ref().map(|conversations| self.conversations(conversations, raw, arrivals, &place.key("conversations")));
        let drawn = Drawn { requests, arrivals: Some(arrivals), lengths: None, conversations };
        let workload = drawn.draw(arrivals, &prompt, &output, seed);
        Ok((workload, Drawn { lengths: Some((prompt, output)), ..drawn }, false))
    }

    fn conversations(&mut self, raw: &Spanned<RawConversations>, work: &RawWorkload, arrivals: Arrivals, place: &Place) -> Conversations {
        if let Arrivals::Closed { .. } = arrivals {
            let mistake = Mistake::new("conversations wait for their answers by themselves", "remove arrivals: { clients: ... }, or conversations");
            self.checker.problem(raw.referenced, place, mistake);
        }
        if work.tenants.is_some() {
            let mistake = Mistake::new("conversations of several tenants are not simulated", "remove tenants, or conversations");
            self.checker.problem(raw.referenced, place, mistake);
        }
        let raw = &raw.value;
        let most = 1 << 24;
        Conversations {
            turns: raw.turns.as_ref().and_then(|turns| self.length(turns, &place.key("turns"))).unwrap_or(Length::Exponential(5.0)),
            think: self.checker.optional(raw.think.as_ref(), &place.key("think"), Duration::from_secs(20)),
            system: self.checker.number(raw.system.as_ref(), &place.key("system"), 0..=most, 0) as Tokens,
            systems: self.checker.number(raw.systems.as_ref(), &place.key("systems"), 1..=1_000_000, 1) as u32,
            longest: self.checker.number(raw.longest.as_ref(), &place.key("longest"), 1..=most, 16_000) as Tokens,
        }
    }

    fn pace(&mut self, raw: &RawWorkload, place: &Place) -> Pace {
        match (&raw.load, &raw.rate) {
            (Some(leaf), Some(_)) => {
                self.checker.problem(leaf.text.referenced, &place.key("load"), Mistake::new("load and rate are both written", "keep one of them"));
                Pace::AsIs
            }
            (Some(load), None) => Pace::Load(self.positive(Some(load), &place.key("load"), 100.0, 1.0)),
            (None, Some(rate)) => Pace::Rate(self.positive(Some(rate), &place.key("rate"), 1e6, 1.0)),
            (None, None) if raw.trace.is_some() => Pace::AsIs,
            (None, None) => Pace::Load(0.85),
        }
    }

    fn tenants(&mut self, raw: Option<&Spanned<Vec<RawTenant>>>, place: &Place, arrivals: Option<Arrivals>) -> Vec<(String, Sender)> {
        let Some(raw) = raw else { return Vec::new() };
        let mut tenants: Vec<(String, Sender)> = Vec::new();
        for (index, raw) in raw.value.iter().enumerate() {
            let place = place.index(index);
            let Some(name) = self.checker.read(&raw.name, &place.key("name")) else { continue };
            if tenants.iter().any(|(other, _)| *other == name) {
                let mistake = Mistake::new(format!("{name} is named twice"), "give each tenant a name of its own");
                self.checker.problem(raw.name.text.referenced, &place.key("name"), mistake);
            }
            if let (Some(leaf), Some(Arrivals::Closed { .. })) = (&raw.flood, arrivals) {
                let mistake = Mistake::new("in a closed loop nothing comes at once", "remove flood, or arrivals: { clients: ... }");
                self.checker.problem(leaf.text.referenced, &place.key("flood"), mistake);
            }
            // Whoever floods sends nothing else, unless it says so.
            let share = if raw.flood.is_some() { 0.0 } else { 1.0 };
            let sender = Sender {
                share: self.checker.bounded(raw.share.as_ref(), &place.key("share"), 0.0..=1e6, share, |share| share.to_string()),
                weight: self.checker.optional(raw.weight.as_ref(), &place.key("weight"), Weight::ONE),
                flood: self.checker.number(raw.flood.as_ref(), &place.key("flood"), 0..=1_000_000, 0) as usize,
                at: self.checker.optional(raw.at.as_ref(), &place.key("at"), Duration::ZERO),
            };
            tenants.push((name, sender));
        }
        if tenants.iter().all(|(_, sender)| sender.share <= 0.0) {
            let hint = "give at least one tenant a share, for example { name: chat, share: 1 }";
            self.checker.problem(raw.referenced, place, Mistake::new("nobody sends the requests of the workload", hint));
        }
        tenants
    }

    /// `None` keeps what the trace brought.
    fn scores(&mut self, raw: Option<&TextOr<RawScores>>, place: &Place, scored: bool) -> Option<Scores> {
        match raw {
            None if scored => None,
            None => Some(Scores::Tau(0.5)),
            Some(TextOr::Long(RawScores { tau })) => {
                Some(Scores::Tau(self.checker.bounded(Some(tau), &place.key("tau"), 0.0..=0.99, 0.5, |tau| tau.to_string())))
            }
            Some(TextOr::Text(text)) => self.checker.read_text(text, place, |text| match text {
                "trace" if scored => Ok(None),
                "trace" => Err(Mistake::new("there is no trace with a column score", "add the column, or write { tau: 0.5 }")),
                _ => {
                    let words = [("none", Scores::Absent), ("oracle", Scores::Oracle), ("inverted", Scores::Inverted)];
                    choice("kind of score", text, &words).map(Some)
                }
            })?,
        }
    }

    fn policies(&mut self, raw: Option<&Spanned<Vec<Leaf<String>>>>, place: &Place) -> Result<Vec<Contender>, ConfigError> {
        let Some(raw) = raw else { return DEFAULT_POLICIES.into_iter().map(|name| contender(name, &self.dir)).collect() };
        if raw.value.is_empty() {
            let hint = format!("write policies: [{}], or leave it out for {}", DEFAULT_POLICIES[2], DEFAULT_POLICIES.join(", "));
            self.checker.problem(raw.referenced, place, Mistake::new("there is nothing to compare", hint));
        }
        let mut contenders = Vec::new();
        for (index, leaf) in raw.value.iter().enumerate() {
            if let Some(reference) = self.checker.read(leaf, &place.index(index)) {
                contenders.push(contender(&reference, &self.dir)?);
            }
        }
        Ok(contenders)
    }
}

impl Drawn {
    fn nothing() -> Self {
        Drawn { requests: 0, arrivals: None, lengths: None, conversations: None }
    }

    fn draw(&self, arrivals: Arrivals, prompt: &Length, output: &Length, seed: u64) -> Workload {
        match &self.conversations {
            Some(like) => Workload::converse(self.requests, like, arrivals, prompt, output, seed),
            None => Workload::draw(self.requests, arrivals, prompt, output, seed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario(text: &str) -> Result<Scenario, ConfigError> {
        build(Path::new("a/s.yaml"), text)
    }

    const PLAIN: &str =
        "workload: { requests: 200, prompt: 100, output: { median: 50, sigma: 1.0, longest: 400 }, load: 0.5 }\nfleet: [{ engine: small }]\n";

    #[test]
    fn what_is_left_out_has_a_default() {
        let scenario = scenario(PLAIN).unwrap();
        assert_eq!(scenario.policies.iter().map(|contender| contender.name.as_str()).collect::<Vec<_>>(), DEFAULT_POLICIES);
        assert_eq!((scenario.fleet.len(), scenario.pace, scenario.scores, scenario.warm_up), (1, Pace::Load(0.5), Some(Scores::Tau(0.5)), 0.0));
        let capacity = scenario.capacity();
        let workload = scenario.workload(7, capacity);
        assert_eq!(workload.jobs.len(), 200);
        assert_ne!(workload.jobs, scenario.workload(8, capacity).jobs, "a seed draws its own");
        let (rate, span) = (0.5 * capacity, workload.jobs[199].after.as_secs_f64());
        assert!((span * rate / 200.0 - 1.0).abs() < 0.01, "{span} s at {rate} a second");
    }

    #[test]
    fn every_field_is_read() {
        let text = "seed: 9
workload: { requests: 50, arrivals: { clients: 4, think: 2s }, prompt: { mean: 80 }, output: { mixture: [{ share: 2, median: 10, sigma: 0.5 }, { share: 1, median: 90, sigma: 0.1 }], longest: 200 }, scores: oracle, tenants: [{ name: a, weight: 3 }, { name: b, share: 0.5 }] }
fleet: [{ engine: large, count: 2, speed: 0.5, sequences: 16, kv_tokens: 32000, context: 9000, order: priority, slots: 12, weight: 2 }, { engine: small, timing: { base: 0.01, per_sequence: 0.001, per_prefill_token: 2e-4, per_kv_token: 0 } }]
policies: [headway@0.01, headway@mean, sjf, oracle-sjf, engine:trail-plus, engine:distboost@0.2, engine:las+swap, headway@0.02+blind, sticky]
gammas: [0.01, 0.1]
queue_timeout: 10m
warm_up: 0.1
";
        let scenario = scenario(text).unwrap();
        let first = &scenario.fleet[0];
        assert_eq!((scenario.fleet.len(), first.speed, first.slots, first.weight.get()), (3, 0.5, Slots::Fixed(12), 2.0));
        assert_eq!((first.profile.max_num_seqs, first.profile.kv_blocks, first.profile.order), (16, 2000, EngineOrder::Priority));
        assert_eq!(first.profile.max_model_len, 9000);
        let timing = Timing { base: 0.01, per_sequence: 0.001, per_prefill_token: 2e-4, per_kv_token: 0.0 };
        assert_eq!(scenario.fleet[2].profile.timing, timing);
        let workload = scenario.workload(9, 1.0);
        assert_eq!((workload.clients, scenario.scores, scenario.gammas.len(), scenario.warm_up), (Some(4), Some(Scores::Oracle), 2, 0.1));
        let tenants: Vec<_> = scenario.tenants.iter().map(|(name, sender)| (name.as_str(), sender.share, sender.weight.get())).collect();
        assert_eq!(tenants, [("a", 1.0, 3.0), ("b", 0.5, 1.0)]);
        assert!(workload.jobs.iter().all(|job| job.tenant.is_some()));
        assert_eq!((scenario.seed, scenario.queue_timeout), (9, Some(Duration::from_secs(600))));
        let gamma = |index: usize| match &scenario.policies[index].dispatch {
            Dispatch::Gateway { policy, .. } => (policy.order(), policy.gamma()),
            other => panic!("{other:?}"),
        };
        assert_eq!(gamma(0), (Order::Headway, Gamma::Fixed(0.01)));
        assert_eq!(gamma(1), (Order::Headway, Gamma::Target(Target::Mean)));
        assert_eq!((gamma(2).0, gamma(3).0), (Order::Pars, Order::OracleSjf));
        let inside = |index: usize| scenario.policies[index].fleet(&scenario)[0].profile.order;
        assert_eq!((inside(3), inside(4)), (EngineOrder::Priority, EngineOrder::Remaining { noise: 0.0, until: 0.8 }));
        let swaps = |index: usize| scenario.policies[index].fleet(&scenario)[0].profile.swap;
        assert_eq!((inside(6), swaps(6), swaps(5)), (EngineOrder::Attained, Some(SWAP), None));
        let sees = |index: usize| (scenario.policies[index].name.as_str(), scenario.policies[index].affinity);
        assert_eq!((sees(0), sees(7), sees(8)), (("headway@0.01", true), ("headway@0.02+blind", false), ("sticky", true)));
        assert_eq!(gamma(7), (Order::Headway, Gamma::Fixed(0.02)));
        assert_eq!(inside(5), EngineOrder::Boost(Boosting { gamma: Some(0.2), step: Step::Queues }));
    }

    #[test]
    fn a_flood_comes_on_top_of_the_load() {
        let tenants = "tenants: [{ name: chat }, { name: batch, flood: 70, at: 5s }]";
        let scenario = scenario(&PLAIN.replace("load: 0.5", &format!("load: 0.5, {tenants}"))).unwrap();
        let workload = scenario.workload(1, 2.0);
        let flood: Vec<&Job> = workload.jobs.iter().filter(|job| job.after == Duration::from_secs(5)).collect();
        assert!(workload.jobs.len() == 270 && flood.len() == 70, "{} of {}", flood.len(), workload.jobs.len());
        let last = workload.jobs[269].after.as_secs_f64();
        assert!((last - 200.0).abs() < 2.0, "200 requests at one a second, whatever is flooded: {last}");
        assert!(workload.jobs.iter().all(|job| job.score.is_some()));
    }

    #[test]
    fn conversations_are_drawn_by_the_seed_of_the_run() {
        let talk = "conversations: { turns: 3, think: 4s, system: 160, systems: 2, longest: 900 }";
        let scenario = scenario(&PLAIN.replace("load: 0.5", &format!("load: 0.5, {talk}"))).unwrap();
        let like = Conversations { turns: Length::Fixed(3), think: Duration::from_secs(4), system: 160, systems: 2, longest: 900 };
        assert_eq!(scenario.drawn.conversations, Some(like));
        let workload = scenario.workload(7, 2.0);
        assert_eq!((workload.jobs.len(), workload.jobs[0].prompt, workload.jobs[0].follows(), workload.jobs[1].follows()), (200, 260, false, true));
        assert!((workload.span().as_secs_f64() - 200.0).abs() < 1e-3, "{:?}", workload.span());
        assert_ne!(workload.jobs, scenario.workload(8, 2.0).jobs);
    }

    #[test]
    fn mistakes_are_shown_with_their_place_and_all_at_once() {
        let text = "workload: { requests: many, prompt: 100, output: { median: 50 }, load: 0.5, rate: 3, scores: clever }\nfleet: [{ engine: medum, slots: none }]\nwarm_up: 3\n";
        let problems: Vec<(String, u64)> =
            scenario(text).unwrap_err().problems().iter().map(|problem| (problem.field.clone(), problem.position.unwrap().0)).collect();
        let expected =
            [("workload.requests", 1), ("workload.load", 1), ("workload.scores", 1), ("fleet[0].engine", 2), ("fleet[0].slots", 2), ("warm_up", 3)];
        assert_eq!(problems, expected.map(|(field, line)| (field.to_owned(), line)));
        for (text, hint) in [
            ("", "workload and fleet"),
            ("fleet: []\n", "trace: requests.csv"),
            ("workload: { load: 1 }\nfleet: [{ engine: small }]\n", "median: 300"),
            (&PLAIN.replace("small", "smal"), "did you mean small?"),
            (&format!("{PLAIN}policies: [headwya]\n"), "did you mean headway?"),
            (&format!("{PLAIN}policies: [headway@fast]\n"), "headway@0.01"),
            (&format!("{PLAIN}policies: [engine:trial]\n"), "did you mean trail?"),
            (&format!("{PLAIN}policies: [engine:uniboost@0]\n"), "not a gamma"),
            (&format!("{PLAIN}policies: [engine:las@0.1]\n"), "this order has no gamma"),
            (&format!("{PLAIN}policies: []\n"), "policies: there is nothing to compare"),
            (&PLAIN.replace("load: 0.5", "scores: trace"), "column"),
            (&PLAIN.replace("requests: 200", "trace: no.csv"), "remove prompt and output"),
            (&PLAIN.replace(" load:", " laod:"), "did you mean load?"),
            (&PLAIN.replace("load: 0.5", "tenants: [{ name: a }, { name: a }]"), "a is named twice"),
            (&PLAIN.replace("load: 0.5", "tenants: [{ name: a, flood: 9 }]"), "share: 1"),
            (&PLAIN.replace("load: 0.5", "tenants: []"), "nobody sends"),
            (&PLAIN.replace("load: 0.5", "arrivals: { clients: 3 }, tenants: [{ name: a }, { name: b, flood: 9 }]"), "remove flood"),
            (&PLAIN.replace("load: 0.5", "conversations: { turns: 3 }, arrivals: { clients: 3 }"), "wait for their answers by themselves"),
            (&PLAIN.replace("load: 0.5", "conversations: { turns: 3 }, tenants: [{ name: a }]"), "remove tenants, or conversations"),
            (&PLAIN.replace("load: 0.5", "conversations: { turn: 3 }"), "did you mean turns?"),
        ] {
            let error = scenario(text).unwrap_err().to_string();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }
}
