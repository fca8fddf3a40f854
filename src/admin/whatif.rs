//! What other policies would have done to the requests of the last minutes: they are sent again, without their prompts, through the simulator.
//!
//! The scheduler is the gateway's own, told the same arrivals, scores and lengths; the engines are modelled on the streams that they gave. How far the model can be
//! trusted shows in the answer: beside each policy's figures stand those that were measured.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant as Clock};

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout};

use super::feed::rounded;
use super::likeness::{ENOUGH, Stay, room, timing};
use super::view;
use crate::config::{self, NamedPolicy};
use crate::engine::{BLOCK_TOKENS, Profile};
use crate::gateway::{Gateway, Live, PoolRuntime};
use crate::scheduler::{Gamma, Lead, MaxOvertake, ModelId, Order, Policy, PolicyParts, Score, Slots, Standing, TenantId, Tokens, Weight};
use crate::simulator::{Answer, Dispatch, End, Job, Member, Run, Setup, Summary, Workload, run};
use crate::telemetry::Ended;

/// How long the answer may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// Policies of one comparison.
const POLICIES: usize = 8;
/// Requests that it takes to compare anything.
const FEWEST: usize = 50;
/// The share of requests that only fills the queues and teaches the calibration, and is in no figure.
const WARM_UP: f64 = 0.2;
/// The KV cache and context of an engine that does not tell.
const UNKNOWN: u32 = 1 << 26;

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
struct Contender {
    name: String,
    dispatch: Dispatch,
}

/// Everything that a comparison is made of.
struct Replay {
    jobs: Vec<Job>,
    /// In the order of the jobs.
    ended: Vec<Arc<Ended>>,
    assumed: usize,
    fleet: Vec<Member>,
    engines: Value,
    contenders: Vec<Contender>,
    own: String,
    queue_timeout: Duration,
    asked_for: Option<usize>,
}

/// Answers a question. One at a time.
pub(super) async fn answer(gateway: &Gateway, one_at_a_time: &Arc<Semaphore>, body: &[u8]) -> Result<Value, WhatIfError> {
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
    let replay = prepare(gateway, &live, index, &question).await?;
    let pool = live.snapshot.pools[index].name.clone();
    let mut told = apart(replay, turn).await?;
    told["pool"] = json!(pool);
    told["minutes"] = json!(question.minutes);
    Ok(told)
}

/// Computes on a thread of its own, which has its turn until it ends, whoever still waits for it.
async fn apart(replay: Replay, turn: OwnedSemaphorePermit) -> Result<Value, WhatIfError> {
    let (reply, answer) = oneshot::channel();
    let started = std::thread::Builder::new().name("whatif".into()).spawn(move || {
        let compared = compare(&replay, || reply.is_closed());
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

async fn prepare(gateway: &Gateway, live: &Live, index: usize, question: &Question) -> Result<Replay, WhatIfError> {
    let (settings, runtime) = (&live.snapshot.pools[index], &live.pools[index]);
    let now = Instant::now();
    let from = now.checked_sub(Duration::from_secs_f64(question.minutes * 60.0));
    let mut ended = gateway.recent.all();
    // What never asked for a slot is no load.
    ended.retain(|each| {
        each.pool.as_deref() == Some(settings.name.as_str()) && each.queued.is_some() && from.is_none_or(|from| each.arrived() >= from)
    });
    ended.sort_by_key(|each| each.arrived());
    if ended.len() < FEWEST {
        return Err(WhatIfError::Few { have: ended.len(), need: FEWEST });
    }
    let asked_for = match &question.request {
        None => None,
        Some(id) => Some(ended.iter().position(|each| &*each.id == id.as_str()).ok_or_else(|| WhatIfError::Request(id.clone()))?),
    };
    let view = timeout(view::PATIENCE, runtime.dispatcher.view()).await.ok().flatten();
    let windows: BTreeMap<u32, u32> = view.iter().flat_map(|view| &view.backends).map(|backend| (backend.id.0, backend.window)).collect();
    let (fleet, engines) = likeness(runtime, &ended, &windows)?;
    let contenders = question.policies.iter().map(|name| contender(name, settings)).collect::<Result<Vec<_>, _>>()?;
    let (jobs, assumed) = jobs(live, &ended, settings.limits.max_output);
    let own = settings.policy.name.clone();
    Ok(Replay { jobs, ended, assumed, fleet, engines, contenders, own, queue_timeout: settings.timeouts.queue, asked_for })
}

/// Engines like the pool's healthy ones.
fn likeness(runtime: &PoolRuntime, ended: &[Arc<Ended>], windows: &BTreeMap<u32, u32>) -> Result<(Vec<Member>, Value), WhatIfError> {
    let start = ended[0].arrived();
    let seconds = |moment: Instant| moment.saturating_duration_since(start).as_secs_f64();
    let stays = |backend: Option<&str>| -> Vec<Stay> {
        let of = ended.iter().filter(|each| backend.is_none() || each.backend.as_deref() == backend);
        of.filter_map(|each| {
            let released = each.released_at()?;
            Some(Stay {
                released: seconds(released),
                first: each.first_token.filter(|_| each.is_answered()).map(|first| seconds(each.arrived() + first)),
                ended: seconds(each.at),
                prompt: each.prompt_tokens.unwrap_or(0),
                output: each.output_tokens,
            })
        })
        .collect()
    };
    let (mut fleet, mut shown, mut most) = (Vec::new(), Vec::new(), 0);
    let targets: Vec<_> = runtime.targets().into_iter().filter(|target| target.backend.view().standing == Standing::Healthy).collect();
    if targets.is_empty() {
        return Err(WhatIfError::NoBackend);
    }
    for target in &targets {
        let (known, host) = (target.backend.view(), target.connections.host().to_str().unwrap_or_default());
        let own = stays(Some(host));
        most = most.max(own.len());
        // One that has served too little to be told apart is like the others together.
        let (timing, streams) = timing(&own).or_else(|| timing(&stays(None))).ok_or(WhatIfError::Blind { have: most, need: ENOUGH })?;
        let (slots, runs) = room(&own, windows.get(&known.id.0).copied().unwrap_or(0));
        let context = known.context_tokens.unwrap_or(UNKNOWN);
        let kv_blocks = known.kv_tokens.and_then(|tokens| u32::try_from(tokens / u64::from(BLOCK_TOKENS)).ok()).unwrap_or(UNKNOWN / BLOCK_TOKENS);
        let profile = Profile { timing, kv_blocks, max_num_seqs: runs, max_model_len: context, prefix_cache: false, ..Profile::large() };
        fleet.push(Member { slots: Slots::Fixed(slots), weight: target.backend.settings().weight, ..Member::new(profile) });
        shown.push(json!({
            "backend": known.url.to_string(),
            "streams": streams,
            "slots": slots,
            "runs_at_once": runs,
            "iteration_ms": rounded(timing.base * 1e3),
            "per_request_ms": rounded(timing.per_sequence * 1e3),
            "per_prompt_token_ms": rounded(timing.per_prefill_token * 1e3),
        }));
    }
    Ok((fleet, shown.into()))
}

/// What was asked of the pool, and for how many the length is not known: they are taken for as long as the others are on average.
/// `most` is what a pool allows an answer to have: what a backend says beyond it would be played token by token.
fn jobs(live: &Live, ended: &[Arc<Ended>], most: Tokens) -> (Vec<Job>, usize) {
    let start = ended[0].arrived();
    let mean = |of: Vec<u32>| of.iter().map(|tokens| u64::from(*tokens)).sum::<u64>().checked_div(of.len() as u64).unwrap_or(1).max(1) as u32;
    let mean_output = mean(ended.iter().filter(|each| each.is_answered() && each.scoring.is_some()).map(|each| each.output_tokens).collect());
    let mean_prompt = mean(ended.iter().filter_map(|each| each.prompt_tokens).collect());
    let (mut models, mut tenants) = (BTreeMap::new(), BTreeMap::new());
    let mut assumed = 0;
    let each = ended.iter().map(|each| {
        let known = each.is_answered() || each.output_tokens > 0 || each.scoring.is_none();
        assumed += usize::from(!known);
        let next = models.len() as u32;
        let model = *models.entry(&*each.model).or_insert(next);
        let tenant = each.tenant.as_deref().map(|name| {
            let next = tenants.len() as u32;
            *tenants.entry(name).or_insert(next)
        });
        let share = live.tenancy.iter().flat_map(|tenancy| tenancy.tenants()).find(|tenant| Some(tenant.name()) == each.tenant.as_deref());
        let output = if known { each.output_tokens } else { mean_output }.min(most);
        Job {
            after: each.arrived().saturating_duration_since(start),
            score: each.score.and_then(Score::new),
            // Who left without an answer would leave again.
            patience: (each.reason == "client_left" && each.output_tokens == 0).then_some(each.total),
            share: share.map_or(Weight::ONE, |tenant| tenant.settings().weight),
            model: ModelId(model),
            tenant: tenant.map(TenantId),
            ..Job::new(each.prompt_tokens.unwrap_or(mean_prompt), if each.scoring.is_none() { 0 } else { output })
        }
    });
    let jobs = each.collect();
    (jobs, assumed)
}

/// A policy by its name. Never a file: whoever asks is not the one who configures.
fn contender(name: &str, settings: &config::Pool) -> Result<Contender, WhatIfError> {
    let gateway = |policy: Policy| Contender { name: name.to_owned(), dispatch: Dispatch::Gateway { policy, limits: settings.limits } };
    match name {
        _ if name == settings.policy.name => Ok(gateway(settings.policy.policy.clone())),
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
fn compare(replay: &Replay, left: impl Fn() -> bool) -> Result<Value, WhatIfError> {
    let began = Clock::now();
    let counted_from = (replay.ended.len() as f64 * WARM_UP) as usize;
    let counted = &replay.ended[counted_from..];
    let workload = Workload { jobs: replay.jobs.clone(), clients: None };
    let mut policies = Vec::new();
    let mut of_request = Vec::new();
    for Contender { name, dispatch } in &replay.contenders {
        if left() {
            return Err(WhatIfError::Slow(PATIENCE));
        }
        let setup = Setup { queue_timeout: Some(replay.queue_timeout), ..Setup::new(replay.fleet.clone(), dispatch.clone()) };
        let run = run(&setup, &workload, 1).map_err(|broken| WhatIfError::Simulation(broken.to_string()))?;
        policies.push(figures(name, *name == replay.own, &run, &replay.ended, counted_from));
        if let Some(answer) = replay.asked_for.and_then(|job| run.answers.iter().find(|answer| answer.job as usize == job)) {
            of_request.push(times(name, answer));
        }
    }
    let answered = || counted.iter().filter(|each| each.is_answered());
    let request = replay.asked_for.map(|job| {
        let each = &replay.ended[job];
        json!({
            "id": *each.id,
            "counted": job >= counted_from,
            "measured": {
                "waited_seconds": each.queued.map(|waited| rounded(waited.as_secs_f64())),
                "ttft_seconds": each.first_token.map(|first| rounded(first.as_secs_f64())),
                "ttlt_seconds": rounded(each.total.as_secs_f64()),
                "ended": each.reason,
            },
            "policies": of_request,
        })
    });
    Ok(json!({
        "requests": replay.ended.len(),
        "counted": counted.len(),
        "lengths_assumed": replay.assumed,
        "seconds": rounded(replay.jobs.last().map_or(0.0, |job| job.after.as_secs_f64())),
        "engines": replay.engines,
        "own_policy": replay.own,
        "measured": {
            "ttft": summary(answered().filter_map(|each| each.first_token).map(|first| first.as_secs_f64())),
            "ttlt": summary(answered().map(|each| each.total.as_secs_f64())),
            "unanswered": counted.iter().filter(|each| !each.is_answered()).count(),
        },
        "policies": policies,
        "request": request,
        "took_seconds": rounded(began.elapsed().as_secs_f64()),
    }))
}

/// Mean, p50, p90 and p99 of a policy, of the same requests as what was measured: the time to the first token is known of streams alone.
fn figures(name: &str, is_own: bool, run: &Run, ended: &[Arc<Ended>], counted_from: usize) -> Value {
    let counted = || run.answers.iter().filter(|answer| answer.job as usize >= counted_from);
    let measured = |answer: &&Answer| ended[answer.job as usize].is_answered();
    let whole = || counted().filter(|answer| answer.end == End::Answered).filter(measured);
    let streamed = || whole().filter(|answer| ended[answer.job as usize].first_token.is_some());
    json!({
        "policy": name,
        "own": is_own,
        "ttft": summary(streamed().filter_map(Answer::ttft).map(|ttft| ttft.as_secs_f64())),
        "ttlt": summary(whole().map(|answer| answer.ttlt().as_secs_f64())),
        "unanswered": counted().filter(|answer| answer.end != End::Answered).count(),
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
