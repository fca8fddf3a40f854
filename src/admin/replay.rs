//! The requests of the last minutes, without their prompts, as something that the simulator can play: those that ended, those that run and those that wait, and
//! engines like the pool's.
//!
//! The scheduler is the gateway's own, told the same arrivals, scores and lengths, and knows what the pool has learnt; the engines are modelled on the streams
//! that they gave.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::feed::rounded;
use super::likeness::{ENOUGH, Stay, room, timing};
use super::view;
use super::whatif::WhatIfError;
use crate::config;
use crate::dispatcher::Closeup;
use crate::engine::{BLOCK_TOKENS, Profile};
use crate::gateway::{Live, PoolRuntime};
use crate::scheduler::{Learnt, ModelId, RankerVersion, RequestView, Score, Slots, StageView, Standing, TenantId, Time, Tokens, Weight};
use crate::simulator::{Dispatch, End, Job, Member, Run, Setup, Workload, run};
use crate::telemetry::{Ended, Recent};

/// Requests that it takes to compare anything.
const FEWEST: usize = 50;
/// Requests of one backend that wait, and as many that run, that are played.
const MOST_OPEN: usize = 10_000;
/// Rounds in which the speed of engines is set right, and the factor by which at most in each.
const ROUNDS: usize = 2;
const FURTHEST: f64 = 2.0;
/// The KV cache and context of an engine that does not tell.
const UNKNOWN: u32 = 1 << 26;

/// What is known of a pool at one moment, as far as its own task has to be asked.
pub(super) struct Material {
    live: Arc<Live>,
    settings: Arc<config::Pool>,
    runtime: Arc<PoolRuntime>,
    open: Option<Closeup>,
    /// The moment, by both clocks.
    now: Time,
    at: Instant,
    learnt: Learnt,
}

impl Material {
    pub async fn take(live: &Arc<Live>, index: usize) -> Material {
        let (settings, runtime) = (Arc::clone(&live.snapshot.pools[index]), Arc::clone(&live.pools[index]));
        let learnt = timeout(view::PATIENCE, runtime.dispatcher.learnt()).await.ok().flatten().unwrap_or_default();
        let open = timeout(view::PATIENCE, runtime.dispatcher.closeup(MOST_OPEN)).await.ok().flatten();
        Material { live: Arc::clone(live), now: runtime.dispatcher.now(), at: Instant::now(), settings, runtime, open, learnt }
    }

    pub fn settings(&self) -> &Arc<config::Pool> {
        &self.settings
    }
}

/// One request that is played.
pub(super) struct Played {
    /// `None`: it runs or waits.
    pub ended: Option<Arc<Ended>>,
    /// It arrived within the time that is played, rather than being there when that began.
    pub arrived_within: bool,
}

/// Everything that a run is made of.
pub(super) struct Replay {
    workload: Workload,
    /// In the order of the jobs.
    pub played: Vec<Played>,
    /// How many got no answer, and are taken for average ones.
    pub assumed: usize,
    pub running: usize,
    pub waiting: usize,
    fleet: Vec<Member>,
    engines: Vec<Read>,
    learnt: Learnt,
    ranker: RankerVersion,
    queue_timeout: Duration,
    /// How long what is played took.
    pub span: Duration,
}

/// A request as it is gathered.
struct Gathered {
    job: Job,
    ended: Option<Arc<Ended>>,
    arrived: Instant,
    /// Released before the time that is played began.
    ran: bool,
}

impl Replay {
    /// Of a pool's requests since `from`, as far as they are remembered, and at most `most` of those that have ended. May take milliseconds.
    ///
    /// # Errors
    /// Too little is known.
    pub fn of(material: &Material, recent: &Recent, from: Option<Instant>, most: usize) -> Result<Replay, WhatIfError> {
        let name = material.settings.name.as_str();
        let mut ended = recent.all();
        // What never asked for a slot is no load.
        ended.retain(|each| each.pool.as_deref() == Some(name) && each.queued.is_some());
        let cut_off = ended.get(most.saturating_sub(1)).map(|each| each.at);
        ended.truncate(most);
        let from = [from, recent.forgotten(), cut_off].into_iter().flatten().max();
        ended.retain(|each| from.is_none_or(|from| each.at >= from));
        let from = from.or_else(|| ended.iter().map(|each| each.arrived()).min()).unwrap_or(material.at);
        let arrived = ended.iter().filter(|each| each.arrived() >= from).count();
        if arrived < FEWEST {
            return Err(WhatIfError::Few { have: arrived, need: FEWEST });
        }
        let (fleet, engines) = likeness(material, &ended)?;
        let names = Names::of(material);
        let (mut gathered, assumed) = of_ended(&ended, &names, material.settings.limits.max_output, from);
        let (running, waiting) = add_open(&mut gathered, material, &ended, from);
        // What ran is on the engines before what waited comes to them; each in the order of arrival.
        gathered.sort_by_key(|each| (each.job.after, !each.ran, each.arrived));
        let (jobs, played) = gathered.into_iter().map(|each| (each.job, Played { ended: each.ended, arrived_within: each.arrived >= from })).unzip();
        Ok(Replay {
            workload: Workload { jobs, clients: None },
            played,
            assumed,
            running,
            waiting,
            fleet,
            engines,
            learnt: material.learnt.clone(),
            ranker: material.live.ranker.version().unwrap_or(RankerVersion(0)),
            queue_timeout: material.settings.timeouts.queue,
            span: material.at.saturating_duration_since(from),
        })
    }

    /// Makes the engines as much faster or slower as it takes for stays at them to be as long, under the policy that was in force, as they were: small errors of
    /// the model would add up over a queue that is never empty.
    ///
    /// Tells by how much, as a share, the mean time to the last token still comes out above what was measured; `None` of nothing.
    ///
    /// # Errors
    /// The simulator is at fault.
    pub fn tune(&mut self, own: &Dispatch) -> Result<Option<f64>, WhatIfError> {
        let mut off = None;
        for _ in 0..ROUNDS {
            let run = self.run(own.clone())?;
            let [mut real, mut simulated, mut whole, mut simulated_whole] = [0.0; 4];
            for answer in run.answers.iter().filter(|answer| answer.end == End::Answered) {
                let Played { ended: Some(ended), arrived_within: true } = &self.played[answer.job as usize] else { continue };
                let (Some(released), Some(was)) = (answer.released, ended.released.filter(|_| ended.is_answered())) else { continue };
                real += ended.total.saturating_sub(was).as_secs_f64();
                simulated += answer.ended.since(released).as_secs_f64();
                whole += ended.total.as_secs_f64();
                simulated_whole += answer.ttlt().as_secs_f64();
            }
            off = (whole > 0.0).then(|| simulated_whole / whole - 1.0);
            let factor = real / simulated;
            if !factor.is_finite() || factor <= 0.0 {
                break;
            }
            let factor = factor.clamp(1.0 / FURTHEST, FURTHEST);
            self.fleet.iter_mut().for_each(|member| member.speed /= factor);
        }
        Ok(off)
    }

    /// The engines as they are played.
    pub fn engines(&self) -> Value {
        let shown = self.engines.iter().zip(&self.fleet).map(|((backend, streams), member)| {
            let milliseconds = |seconds: f64| rounded(seconds / member.speed * 1e3);
            let timing = member.profile.timing;
            json!({
                "backend": backend,
                "streams": streams,
                "slots": if let Slots::Fixed(slots) = member.slots { Some(slots) } else { None },
                "runs_at_once": member.profile.max_num_seqs,
                "iteration_ms": milliseconds(timing.base),
                "per_request_ms": milliseconds(timing.per_sequence),
                "per_prompt_token_ms": milliseconds(timing.per_prefill_token),
            })
        });
        shown.collect()
    }

    /// Plays it.
    ///
    /// # Errors
    /// The simulator is at fault.
    pub fn run(&self, dispatch: Dispatch) -> Result<Run, WhatIfError> {
        let setup = Setup {
            queue_timeout: Some(self.queue_timeout),
            learnt: self.learnt.clone(),
            ranker: self.ranker,
            ..Setup::new(self.fleet.clone(), dispatch)
        };
        run(&setup, &self.workload, 1).map_err(|broken| WhatIfError::Simulation(broken.to_string()))
    }
}

/// Under which keys a pool's scheduler knows models and tenants.
struct Names<'a> {
    settings: &'a config::Pool,
    models: Arc<BTreeMap<String, ModelId>>,
    tenants: HashMap<&'a str, (TenantId, Weight)>,
    shares: HashMap<TenantId, Weight>,
}

impl<'a> Names<'a> {
    fn of(material: &'a Material) -> Self {
        let tenants = material.live.tenancy.iter().flat_map(|tenancy| tenancy.tenants());
        let tenants: HashMap<&str, _> = tenants.map(|tenant| (tenant.name(), (tenant.id(), tenant.settings().weight))).collect();
        let shares = tenants.values().copied().collect();
        Names { settings: &material.settings, models: material.runtime.models(), tenants, shares }
    }

    fn model(&self, asked: &str) -> ModelId {
        let alias = self.settings.models.iter().find(|(name, _)| name == asked).and_then(|(_, upstream)| upstream.as_deref());
        self.models.get(alias.unwrap_or(asked)).copied().unwrap_or(ModelId(0))
    }
}

/// What of a length was still to come at `from`, of something that ran from `began` to `ended`.
fn left(output: Tokens, began: Instant, ended: Instant, from: Instant) -> Tokens {
    let (whole, rest) = (ended.saturating_duration_since(began).as_secs_f64(), ended.saturating_duration_since(from).as_secs_f64());
    if whole > 0.0 { ((f64::from(output) * (rest / whole).min(1.0)).ceil() as Tokens).max(1) } else { 1 }
}

/// Requests that have ended, and for how many the length is not known: they are taken for as long as the others are on average.
/// `most` is what a pool allows an answer to have: what a backend says beyond it would be played token by token.
fn of_ended(ended: &[Arc<Ended>], names: &Names, most: Tokens, from: Instant) -> (Vec<Gathered>, usize) {
    let mean = |of: &mut dyn Iterator<Item = u32>| {
        let (count, sum) = of.fold((0_u64, 0_u64), |(count, sum), tokens| (count + 1, sum + u64::from(tokens)));
        sum.checked_div(count).unwrap_or(1).max(1) as u32
    };
    let mean_output = mean(&mut ended.iter().filter(|each| each.is_answered() && each.scoring.is_some()).map(|each| each.output_tokens));
    let mean_prompt = mean(&mut ended.iter().filter_map(|each| each.prompt_tokens));
    let mut assumed = 0;
    let each = ended.iter().map(|each| {
        let arrived = each.arrived();
        let known = each.is_answered() || each.output_tokens > 0 || each.scoring.is_none();
        assumed += usize::from(!known);
        let mut output = if known { each.output_tokens } else { mean_output }.min(most);
        let mut prompt = each.prompt_tokens.unwrap_or(mean_prompt);
        let began = each.released_at().filter(|released| *released < from);
        if let Some(released) = began {
            let first = each.first_token.map_or(released, |first| arrived + first);
            if first < from {
                (prompt, output) = (1, left(output, first, each.at, from));
            }
        }
        if each.scoring.is_none() {
            output = 0;
        }
        let (tenant, share) = each.tenant.as_deref().and_then(|name| names.tenants.get(name)).copied().unzip();
        let job = Job {
            after: arrived.saturating_duration_since(from),
            score: each.score.and_then(Score::new),
            // Who left without an answer would leave again.
            patience: (each.reason == "client_left" && each.output_tokens == 0).then(|| each.at.saturating_duration_since(arrived.max(from))),
            share: share.unwrap_or(Weight::ONE),
            max_output: each.max_output,
            model: names.model(&each.model),
            tenant,
            ..Job::new(prompt, output)
        };
        Gathered { job, ended: Some(Arc::clone(each)), arrived, ran: began.is_some() }
    });
    (each.collect(), assumed)
}

/// Adds what runs and what waits, and tells how many of each. Nobody knows their lengths: what waits is as far off what is expected of it as answers were of late.
fn add_open(gathered: &mut Vec<Gathered>, material: &Material, ended: &[Arc<Ended>], from: Instant) -> (usize, usize) {
    let Some(open) = &material.open else { return (0, 0) };
    // It may have ended since the pool was asked.
    let over: HashSet<&str> = ended.iter().map(|each| &*each.id).collect();
    let is_over = |request: &RequestView| open.labels.get(&request.id).is_some_and(|label| over.contains(&**label));
    let factors: Vec<f64> = ended
        .iter()
        .filter(|each| each.is_answered() && each.output_tokens > 0)
        .filter_map(|each| Some(f64::from(each.output_tokens) / f64::from(each.predicted_tokens.filter(|tokens| *tokens > 0)?)))
        .collect();
    let shares = Names::of(material).shares;
    let most = material.settings.limits.max_output;
    let moment = |time: Time| material.at.checked_sub(material.now.since(time)).unwrap_or(from);
    let (mut running, mut waiting) = (0, 0);
    for request in open.queues.iter().flat_map(|queue| queue.running.iter().chain(&queue.waiting)).filter(|request| !is_over(request)) {
        let arrived = moment(request.arrived);
        let (mut prompt, mut ran) = (request.prompt, false);
        let output = match request.stage {
            StageView::Waiting { .. } => {
                waiting += 1;
                // Any order will do, as long as it is the same each time.
                let factor = factors.get(waiting * 7919 % factors.len().max(1)).copied().unwrap_or(1.0);
                (f64::from(request.expected_output) * factor).round() as Tokens
            }
            StageView::Running { released, produced } => {
                running += 1;
                let released = moment(released);
                ran = released < from;
                if ran && produced > 0 {
                    prompt = 1;
                }
                let since = if ran { left(produced, released, material.at, from) } else { produced };
                since.saturating_add(request.expected_output)
            }
        };
        let job = Job {
            after: arrived.saturating_duration_since(from),
            score: request.score.map(|scored| scored.score),
            weight: Weight::new(request.weight).unwrap_or(Weight::ONE),
            share: request.tenant.and_then(|tenant| shares.get(&tenant)).copied().unwrap_or(Weight::ONE),
            max_output: request.max_output,
            model: request.model,
            tenant: request.tenant,
            ..Job::new(prompt, output.clamp(1, most.max(1)))
        };
        gathered.push(Gathered { job, ended: None, arrived, ran });
    }
    (running, waiting)
}

/// The address of an engine, and how many streams it was read from.
type Read = (String, usize);

/// Engines like the pool's healthy ones.
fn likeness(material: &Material, ended: &[Arc<Ended>]) -> Result<(Vec<Member>, Vec<Read>), WhatIfError> {
    let start = ended.iter().map(|each| each.arrived()).min().unwrap_or(material.at);
    let seconds = |moment: Instant| moment.saturating_duration_since(start).as_secs_f64();
    let (mut all, mut of_backends) = (Vec::with_capacity(ended.len()), HashMap::<&str, Vec<Stay>>::new());
    for each in ended {
        let Some(released) = each.released_at() else { continue };
        let stay = Stay {
            released: seconds(released),
            first: each.first_token.filter(|_| each.is_answered()).map(|first| seconds(each.arrived() + first)),
            ended: seconds(each.at),
            prompt: each.prompt_tokens.unwrap_or(0),
            output: each.output_tokens,
        };
        all.push(stay);
        if let Some(backend) = each.backend.as_deref() {
            of_backends.entry(backend).or_default().push(stay);
        }
    }
    let targets: Vec<_> = material.runtime.targets().into_iter().filter(|target| target.backend.view().standing == Standing::Healthy).collect();
    if targets.is_empty() {
        return Err(WhatIfError::NoBackend);
    }
    let together = timing(&all);
    let windows: HashMap<u32, u32> =
        material.open.iter().flat_map(|open| &open.pool.backends).map(|backend| (backend.id.0, backend.window)).collect();
    let (mut fleet, mut shown, mut most) = (Vec::new(), Vec::new(), 0);
    for target in &targets {
        let (known, host) = (target.backend.view(), target.connections.host().to_str().unwrap_or_default());
        let own = of_backends.get(host).map(Vec::as_slice).unwrap_or_default();
        most = most.max(own.len());
        // One that has served too little to be told apart is like the others together.
        let (timing, streams) = timing(own).or(together).ok_or(WhatIfError::Blind { have: most, need: ENOUGH })?;
        let (slots, runs) = room(own, windows.get(&known.id.0).copied().unwrap_or(0));
        let context = known.context_tokens.unwrap_or(UNKNOWN);
        let kv_blocks = known.kv_tokens.and_then(|tokens| u32::try_from(tokens / u64::from(BLOCK_TOKENS)).ok()).unwrap_or(UNKNOWN / BLOCK_TOKENS);
        let profile = Profile { timing, kv_blocks, max_num_seqs: runs, max_model_len: context, prefix_cache: false, ..Profile::large() };
        fleet.push(Member { slots: Slots::Fixed(slots), weight: target.backend.settings().weight, ..Member::new(profile) });
        shown.push((known.url.to_string(), streams));
    }
    Ok((fleet, shown))
}
