//! What other policies would have done to the requests of the last minutes. How far the model can be trusted shows in the answer: beside each policy's figures stand
//! those that were measured.

use std::sync::Arc;
use std::time::{Duration, Instant as Clock};

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout};

use super::feed::rounded;
use super::replay::{Material, Played, Replay};
use crate::config::{self, NamedPolicy};
use crate::gateway::Gateway;
use crate::scheduler::{Gamma, Lead, MaxOvertake, Order, Policy, PolicyParts, Time};
use crate::simulator::{Answer, Dispatch, End, Run, Summary};

/// How long the answer may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// Policies of one comparison.
const POLICIES: usize = 8;
/// The share of the requests that arrived within the time asked for that is in no figure: who was there before is known, but not how far engines were with each.
const WARM_UP: f64 = 0.2;
/// What is asked.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Question {
    /// The first pool, if none is named.
    pool: Option<String>,
    /// How far back to go.
    minutes: f64,
    policies: Vec<String>,
    /// A request whose own times are wanted too.
    request: Option<String>,
}

impl Default for Question {
    fn default() -> Self {
        let policies = ["fcfs", "pars", "uniboost", "headway"].map(str::to_owned).to_vec();
        Question { pool: None, minutes: 10.0, policies, request: None }
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum WhatIfError {
    #[error("the body is no question: {0}; send {{}} or, for example, {{\"minutes\": 10, \"policies\": [\"fcfs\", \"headway\"]}}")]
    Body(#[from] serde_json::Error),
    #[error("minutes must be more than 0 and at most 1440")]
    Minutes,
    #[error("there is no pool {name:?}; there are: {known}")]
    Pool { name: String, known: String },
    #[error("{0:?} is no policy to compare with; there are: fcfs, pars, uniboost, headway, sjf, round-robin, least-loaded and the pool's own")]
    Policy(String),
    #[error("1 to {POLICIES} policies can be compared")]
    Policies,
    #[error("{have} requests that arrived in this time have ended, and it takes {need}; ask for more minutes, or later")]
    Few { have: usize, need: usize },
    #[error("no backend is healthy")]
    NoBackend,
    #[error("the backends streamed too few answers to tell how fast they are: {have}, and it takes {need}")]
    Blind { have: usize, need: usize },
    #[error("the request {0:?} is not among those that are replayed")]
    Request(String),
    #[error("another one is being computed; ask again when it is over")]
    Busy,
    #[error("it takes more than {0:?}; ask for fewer minutes or policies")]
    Slow(Duration),
    #[error("the simulation failed: {0}")]
    Simulation(String),
}

/// A contender.
pub(super) struct Contender {
    name: String,
    pub dispatch: Dispatch,
}

/// Everything that a comparison is made of.
struct Comparison {
    material: Material,
    from: Option<Instant>,
    contenders: Vec<Contender>,
    /// A request whose own times are wanted.
    request: Option<String>,
}

/// Answers a question. One at a time.
pub(super) async fn answer(gateway: &Arc<Gateway>, one_at_a_time: &Arc<Semaphore>, body: &[u8]) -> Result<Value, WhatIfError> {
    let question: Question = if body.is_empty() { Question::default() } else { serde_json::from_slice(body)? };
    if !(question.minutes > 0.0 && question.minutes <= 1440.0) {
        return Err(WhatIfError::Minutes);
    }
    if question.policies.is_empty() || question.policies.len() > POLICIES {
        return Err(WhatIfError::Policies);
    }
    let turn = Arc::clone(one_at_a_time).try_acquire_owned().map_err(|_| WhatIfError::Busy)?;
    let live = gateway.live();
    let known = || live.snapshot.pools.iter().map(|pool| pool.name.as_str()).collect::<Vec<_>>().join(", ");
    let index = match &question.pool {
        None => 0,
        Some(name) => {
            live.snapshot.pools.iter().position(|pool| pool.name == *name).ok_or_else(|| WhatIfError::Pool { name: name.clone(), known: known() })?
        }
    };
    let settings = &live.snapshot.pools[index];
    let contenders = question.policies.iter().map(|name| contender(name, settings)).collect::<Result<Vec<_>, _>>()?;
    let from = Instant::now().checked_sub(Duration::from_secs_f64(question.minutes * 60.0));
    let comparison = Comparison { material: Material::take(&live, index).await, from, contenders, request: question.request };
    let mut told = apart(Arc::clone(gateway), comparison, turn).await?;
    told["pool"] = json!(settings.name);
    told["minutes"] = json!(question.minutes);
    Ok(told)
}

/// Computes on a thread of its own, which has its turn until it ends, whoever still waits for it.
async fn apart(gateway: Arc<Gateway>, comparison: Comparison, turn: OwnedSemaphorePermit) -> Result<Value, WhatIfError> {
    let (reply, answer) = oneshot::channel();
    let started = std::thread::Builder::new().name("whatif".into()).spawn(move || {
        let compared = compare(&gateway, &comparison, || reply.is_closed());
        drop(turn);
        // Whoever asked may have left.
        _ = reply.send(compared);
    });
    started.map_err(|error| WhatIfError::Simulation(error.to_string()))?;
    match timeout(PATIENCE, answer).await {
        Ok(Ok(compared)) => compared,
        Ok(Err(_)) => Err(WhatIfError::Simulation("its thread panicked".into())),
        Err(_) => Err(WhatIfError::Slow(PATIENCE)),
    }
}

/// The pool's own policy.
pub(super) fn gateway_of(settings: &config::Pool) -> Dispatch {
    Dispatch::Gateway { policy: settings.policy.policy.clone(), limits: settings.limits }
}

/// A policy by its name. Never a file: whoever asks is not the one who configures.
pub(super) fn contender(name: &str, settings: &config::Pool) -> Result<Contender, WhatIfError> {
    let gateway = |policy: Policy| Contender { name: name.to_owned(), dispatch: Dispatch::Gateway { policy, limits: settings.limits } };
    match name {
        _ if name == settings.policy.name => Ok(Contender { name: name.to_owned(), dispatch: gateway_of(settings) }),
        "fcfs" | "pars" | "uniboost" | "headway" => {
            let NamedPolicy { policy, .. } = config::policy(name).map_err(|error| WhatIfError::Simulation(error.to_string()))?;
            Ok(gateway(policy))
        }
        "sjf" => {
            let parts = PolicyParts {
                order: Order::Pars,
                gamma: Gamma::Adaptive,
                max_overtake: MaxOvertake::Auto,
                aging_threshold: Duration::from_secs(120),
                aging_share: 0.0,
                lead: Lead::Auto,
                overload: false,
            };
            Policy::new(parts).map(gateway).map_err(|error| WhatIfError::Simulation(error.to_string()))
        }
        "round-robin" => Ok(Contender { name: name.to_owned(), dispatch: Dispatch::RoundRobin }),
        "least-loaded" => Ok(Contender { name: name.to_owned(), dispatch: Dispatch::LeastLoaded }),
        _ => Err(WhatIfError::Policy(name.to_owned())),
    }
}

/// `left` is whether nobody waits for it any more: then the next policy is not begun.
fn compare(gateway: &Gateway, comparison: &Comparison, left: impl Fn() -> bool) -> Result<Value, WhatIfError> {
    let began = Clock::now();
    let own = &comparison.material.settings().policy.name;
    let mut replay = Replay::of(&comparison.material, &gateway.recent, comparison.from, usize::MAX)?;
    replay.tune(&gateway_of(comparison.material.settings()))?;
    let within = replay.played.iter().filter(|played| played.arrived_within).count();
    let skipped = (within as f64 * WARM_UP) as usize;
    // Those that arrived within the time asked for, less the first of them.
    let counted: Vec<bool> = replay
        .played
        .iter()
        .scan(0, |seen, played| {
            *seen += usize::from(played.arrived_within);
            Some(played.arrived_within && *seen > skipped)
        })
        .collect();
    let counted = |job: usize| counted.get(job) == Some(&true);
    let known = || (0..replay.played.len()).filter(|job| counted(*job)).filter_map(|job| replay.played[job].ended.as_deref());
    let asked_for = match &comparison.request {
        None => None,
        Some(id) => {
            let found = |played: &Played| played.ended.as_ref().is_some_and(|ended| *ended.id == **id);
            Some(replay.played.iter().position(found).ok_or_else(|| WhatIfError::Request(id.clone()))?)
        }
    };
    let (mut policies, mut of_request) = (Vec::new(), Vec::new());
    for Contender { name, dispatch } in &comparison.contenders {
        if left() {
            return Err(WhatIfError::Slow(PATIENCE));
        }
        let run = replay.run(dispatch.clone())?;
        policies.push(figures(name, name == own, &run, &replay, counted));
        if let Some(answer) = asked_for.and_then(|job| run.answers.iter().find(|answer| answer.job as usize == job)) {
            of_request.push(times(name, answer));
        }
    }
    let request = asked_for.and_then(|job| Some((job, replay.played[job].ended.as_deref()?))).map(|(job, each)| {
        json!({
            "id": *each.id,
            "counted": counted(job),
            "measured": {
                "waited_seconds": each.queued.map(|waited| rounded(waited.as_secs_f64())),
                "ttft_seconds": each.first_token.map(|first| rounded(first.as_secs_f64())),
                "ttlt_seconds": rounded(each.total.as_secs_f64()),
                "ended": each.reason,
            },
            "policies": of_request,
        })
    });
    let answered = || known().filter(|each| each.is_answered());
    Ok(json!({
        "requests": replay.played.len(),
        "running": replay.running,
        "waiting": replay.waiting,
        "counted": known().count(),
        "lengths_assumed": replay.assumed,
        "seconds": rounded(replay.span.as_secs_f64()),
        "engines": replay.engines(),
        "own_policy": own,
        "measured": {
            "ttft": summary(answered().filter_map(|each| each.first_token).map(|first| first.as_secs_f64())),
            "ttlt": summary(answered().map(|each| each.total.as_secs_f64())),
            "unanswered": known().filter(|each| !each.is_answered()).count(),
            "unfinished": replay.running + replay.waiting,
        },
        "policies": policies,
        "request": request,
        "took_seconds": rounded(began.elapsed().as_secs_f64()),
    }))
}

/// Mean, p50, p90 and p99 of a policy, of the same requests as what was measured: the time to the first token is known of streams alone.
fn figures(name: &str, is_own: bool, run: &Run, replay: &Replay, counted: impl Fn(usize) -> bool) -> Value {
    let ended = |answer: &Answer| replay.played[answer.job as usize].ended.as_deref().filter(|_| counted(answer.job as usize));
    let known = || run.answers.iter().filter_map(|answer| Some((answer, ended(answer)?)));
    let whole = || known().filter(|(answer, measured)| answer.end == End::Answered && measured.is_answered());
    let streamed = || whole().filter(|(_, measured)| measured.first_token.is_some());
    json!({
        "policy": name,
        "own": is_own,
        "ttft": summary(streamed().filter_map(|(answer, _)| answer.ttft()).map(|ttft| ttft.as_secs_f64())),
        "ttlt": summary(whole().map(|(answer, _)| answer.ttlt().as_secs_f64())),
        "unanswered": known().filter(|(answer, _)| answer.end != End::Answered).count(),
        "unfinished": run.answers.iter().filter(|answer| answer.ended.since(Time::ZERO) > replay.span).count(),
        "overtaken_seconds": rounded(run.overtaken),
    })
}

fn times(name: &str, answer: &Answer) -> Value {
    json!({
        "policy": name,
        "waited_seconds": answer.wait().map(|wait| rounded(wait.as_secs_f64())),
        "ttft_seconds": answer.ttft().map(|ttft| rounded(ttft.as_secs_f64())),
        "ttlt_seconds": rounded(answer.ttlt().as_secs_f64()),
        "answered": answer.end == End::Answered,
    })
}

/// In seconds; `null` of nothing.
fn summary(of: impl Iterator<Item = f64>) -> Value {
    let summary = Summary::of(of);
    if summary.count == 0 {
        return Value::Null;
    }
    json!({ "mean": rounded(summary.mean), "p50": rounded(summary.p50), "p90": rounded(summary.p90), "p99": rounded(summary.p99), "count": summary.count })
}
