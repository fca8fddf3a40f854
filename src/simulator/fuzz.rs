//! Setups drawn by seed: fleets, loads, policies and whatever can go wrong, with every invariant checked after every event.

use std::sync::Arc;
use std::time::Duration;

use super::conversations::Conversations;
use super::faults::{Fault, Mess, Plan, Tells};
use super::member::Member;
use super::random::Random;
use super::workload::{Arrivals, Job, Length, Part, Scores, Workload};
use super::{Broken, Dispatch, Run, Setup, run};
use crate::engine::{Order as EngineOrder, Profile, Timing};
use crate::scheduler::{
    Gamma, History, Lead, Learnt, Limits, Load, MaxOvertake, ModelId, Order, Policy, PolicyParts, Prefix, RankerVersion, Slots, Target, TenantId,
    Time, Tokens, Weight,
};

/// Runs what a seed draws.
///
/// # Errors
/// Something that must always hold did not.
pub fn try_seed(seed: u64) -> Result<Run, Broken> {
    let (setup, workload) = draw(seed);
    run(&setup, &workload, seed)
}

/// What a seed stands for.
pub fn draw(seed: u64) -> (Setup, Workload) {
    let random = &mut Random::new(seed, "fuzz");
    // Boosts meet their cap where works differ by more than a factor of e^4, and show it where waits are longer than B: rare unless it is asked for.
    let capped = random.chance(0.25);
    let fleet: Vec<Member> = (0..random.within(1, if capped { 2 } else { 4 })).map(|_| member(random)).collect();
    let workload = workload(random, &fleet, seed, capped);
    // About when the last one is sent; a closed loop and a burst have no such time.
    let span = workload.jobs.iter().map(|job| job.after.as_secs_f64()).fold(1.0, f64::max);
    let plan = plan(random, fleet.len(), span);
    let setup = Setup {
        dispatch: if capped {
            let limits = Limits { queue_requests: 1000, queue_bytes: 1 << 30, max_output: 4096 };
            Dispatch::Gateway { policy: capping(random, mean_work(&fleet, &workload)), limits }
        } else {
            Dispatch::Gateway { policy: policy(random), limits: limits(random) }
        },
        affinity: true,
        queue_timeout: random.chance(if capped { 0.1 } else { 0.5 }).then(|| seconds(0.1 + 60.0 * random.unit().powi(2))),
        retries: random.below(4) as u32,
        plan,
        look: Duration::from_secs(5),
        check: true,
        ask: Some(Duration::from_secs(2)),
        learnt: Learnt::default(),
        ranker: RankerVersion(0),
        fleet,
    };
    (setup, workload)
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// A small engine: little fits, so that everything runs out now and then.
fn member(random: &mut Random) -> Member {
    let timing = Timing { base: 2e-3 + 0.02 * random.unit(), per_sequence: 1e-4, per_prefill_token: 2e-5, per_kv_token: 1e-7 };
    let profile = Profile {
        timing,
        kv_blocks: random.within(40, 400) as u32,
        max_num_seqs: random.within(1, 8) as u32,
        max_batched_tokens: random.within(64, 512) as Tokens,
        max_model_len: 4096,
        order: random.pick(&[EngineOrder::Fcfs, EngineOrder::Priority]),
        prefix_cache: true,
        swap: None,
    };
    let initial = random.within(1, 8) as u32;
    let slots = if random.chance(0.5) { Slots::Fixed(initial) } else { Slots::Auto { initial, max: initial + random.below(20) as u32 } };
    Member { profile, speed: random.pick(&[0.3, 1.0, 1.0, 1.0, 2.5]), slots, weight: weight(random), known: random.chance(0.7) }
}

fn weight(random: &mut Random) -> Weight {
    let drawn = random.pick(&[1.0, 1.0, 1.0, 0.1, 0.5, 2.0, 8.0]);
    Weight::new(drawn).unwrap_or(Weight::ONE)
}

fn policy(random: &mut Random) -> Policy {
    let order = random.pick(&[Order::Headway, Order::Headway, Order::Uniboost, Order::Pars, Order::Fcfs, Order::OracleSjf, Order::OracleBoost]);
    let within = seconds(1.0 + 100.0 * random.unit());
    let max_overtake = if random.chance(0.6) { MaxOvertake::Auto } else { MaxOvertake::Within(within) };
    let least = if max_overtake == MaxOvertake::Auto { 1e-3 } else { 4.0 / within.as_secs_f64() * (1.0 + 1e-9) };
    let gamma = match random.below(5) {
        0 => Gamma::Adaptive,
        1 => Gamma::Ttft(seconds(0.05 + 5.0 * random.unit())),
        2 => Gamma::Target(random.pick(&[Target::Mean, Target::Balanced, Target::Tail])),
        _ => Gamma::Fixed(least * (10_f64).powf(3.0 * random.unit())),
    };
    let parts = PolicyParts {
        order,
        gamma,
        max_overtake,
        aging_threshold: seconds(0.1 + 30.0 * random.unit().powi(2)),
        aging_share: random.pick(&[0.0, 0.1, 0.25, 0.25, 0.5, 1.0]),
        lead: random.pick(&[Lead::Auto, Lead::Auto, Lead::Within(Duration::ZERO), Lead::Within(within), Lead::Unlimited]),
        overload: random.chance(0.6),
    };
    Policy::new(parts).unwrap_or_else(|error| unreachable!("gamma is above what the promise asks for: {error}"))
}

/// B is as long as some dozen requests of this mean work, in seconds, take: boosts of the smallest would be longer, and so are waits.
fn capping(random: &mut Random, mean_work: f64) -> Policy {
    let within = seconds(mean_work * (8.0 + 16.0 * random.unit()));
    let bound = within.as_secs_f64();
    let parts = PolicyParts {
        order: random.pick(&[Order::OracleBoost, Order::OracleBoost, Order::Headway]),
        gamma: Gamma::Fixed(4.0 / bound * (1.0 + 1e-9)),
        max_overtake: random.pick(&[MaxOvertake::Auto, MaxOvertake::Within(within)]),
        aging_threshold: seconds(bound * (1.0 + 4.0 * random.unit())),
        aging_share: random.pick(&[0.0, 0.0, 0.1, 0.25]),
        lead: random.pick(&[Lead::Auto, Lead::Auto, Lead::Within(Duration::ZERO), Lead::Within(within), Lead::Unlimited]),
        overload: random.chance(0.2),
    };
    Policy::new(parts).unwrap_or_else(|error| unreachable!("gamma is what the promise asks for: {error}"))
}

fn limits(random: &mut Random) -> Limits {
    Limits {
        queue_requests: random.pick(&[3, 20, 200, 100_000]),
        queue_bytes: random.pick(&[20_000, 1 << 30]),
        max_output: random.pick(&[32, 512, 4096]),
    }
}

/// `spread`: works that differ by a factor of hundreds, and more of them than the fleet can do.
fn workload(random: &mut Random, fleet: &[Member], seed: u64, spread: bool) -> Workload {
    let requests = if spread { 160 } else { random.within(20, 160) as usize };
    let arrivals = match random.below(8) {
        0 => Arrivals::Burst,
        1 => Arrivals::Closed { clients: random.within(1, 30) as u32, think: seconds(random.unit()) },
        2 | 3 => Arrivals::Gamma { cv: 3.0 },
        _ => Arrivals::Poisson,
    };
    let mut part = |median: f64, sigma: f64| Part { share: 0.1 + random.unit(), median: 1.0 + median * random.unit(), sigma };
    let mut prompt = Length::LogNormal { parts: vec![part(60.0, 1.0), part(600.0, 0.5)], longest: 3000 };
    let mut output = Length::LogNormal { parts: vec![part(10.0, 1.0), part(100.0, 1.0)], longest: 1500 };
    if spread {
        prompt = Length::LogNormal { parts: vec![part(0.1, 0.1), part(60.0, 1.0)], longest: 3000 };
        output = Length::LogNormal { parts: vec![part(0.1, 0.1), part(400.0, 1.0)], longest: 1500 };
    }
    let talk = &mut Random::new(seed, "fuzzed conversations");
    let conversations = !spread && !matches!(arrivals, Arrivals::Closed { .. }) && talk.chance(0.25);
    let mut workload = if conversations {
        let think = seconds(talk.exponential(2.0));
        let like = Conversations { turns: Length::Exponential(4.0), think, system: talk.below(300) as Tokens, systems: 3, longest: 4000 };
        Workload::converse(requests, &like, arrivals, &prompt, &output, seed)
    } else {
        Workload::draw(requests, arrivals, &prompt, &output, seed)
    };
    let load = if spread { 4.0 } else { 0.2 } + 2.5 * random.unit();
    workload.pace(load / mean_work(fleet, &workload));
    workload.score(random.pick(&[Scores::Absent, Scores::Tau(0.5), Scores::Tau(0.5), Scores::Oracle, Scores::Inverted, Scores::Tau(0.0)]), seed);
    let impatient = if random.chance(0.5) { 0.25 } else { 0.0 };
    let plain = random.chance(0.3);
    for job in &mut workload.jobs {
        job.patience = random.chance(impatient).then(|| seconds(random.exponential(3.0)));
        if !plain {
            adorn(job, random);
        }
    }
    workload
}

/// About how long the whole fleet takes for one of these requests, in seconds.
fn mean_work(fleet: &[Member], workload: &Workload) -> f64 {
    let tokens: u64 = workload.jobs.iter().map(|job| u64::from(job.output)).sum();
    let served: f64 = fleet.iter().map(|member| member.speed * f64::from(member.profile.max_num_seqs) / (member.profile.timing.base + 1e-3)).sum();
    tokens as f64 / workload.jobs.len() as f64 / served
}

/// Everything else that a request may say.
fn adorn(job: &mut Job, random: &mut Random) {
    job.max_output = random.chance(0.3).then(|| random.within(1, 200) as Tokens);
    job.weight = weight(random);
    job.share = weight(random);
    job.attained = if random.chance(0.1) { random.below(2000) as Tokens } else { 0 };
    job.model = ModelId(random.below(3) as u32);
    job.tenant = random.chance(0.5).then(|| TenantId(random.below(4) as u32));
    if random.chance(0.3) {
        let beginnings: Vec<Prefix> = (0..random.below(8))
            .map(|_| Prefix { hash: random.below(5) << 32, tokens: random.below(u64::from(job.prompt) + 20) as Tokens })
            .collect();
        let session = random.chance(0.5).then(|| random.below(4));
        job.history = Some(Arc::new(History::new(beginnings, session)));
    }
    job.bytes = random.below(3000) as u32;
    if random.chance(0.05) {
        job.output = 0;
    }
    if random.chance(0.1) {
        job.score = None;
    }
}

fn plan(random: &mut Random, backends: usize, span: f64) -> Plan {
    let mut faults = Vec::new();
    let count = random.below(9);
    for _ in 0..count {
        let at = span * 1.2 * random.unit();
        let until = at + random.exponential(span / 4.0).min(300.0);
        let backend = random.below(backends as u64) as usize;
        let mut happens = |at: f64, fault| faults.push((Time::from_secs_f64(at), fault));
        match random.below(12) {
            0 | 1 => {
                let noticed_after = seconds(random.exponential(0.5));
                happens(at, Fault::Crash { backend, noticed_after, back_after: seconds(0.1 + until - at) });
            }
            2 | 3 => {
                happens(at, Fault::Pace { backend, factor: random.pick(&[0.0, 0.0, 0.1, 0.5, 3.0]) });
                happens(until, Fault::Pace { backend, factor: 1.0 });
            }
            4 | 5 => {
                let lie = Load {
                    running: random.chance(0.8).then(|| random.below(40) as u32),
                    waiting: random.chance(0.8).then(|| random.below(10) as u32),
                    kv_used: random.chance(0.8).then(|| random.unit() as f32),
                };
                happens(at, Fault::Tells { backend, tells: random.pick(&[Tells::Stale, Tells::Nothing, Tells::Lie(lie), Tells::Lie(lie)]) });
                happens(until, Fault::Tells { backend, tells: Tells::Truth });
            }
            6 => {
                happens(at, Fault::Drained { backend, drained: true });
                happens(until, Fault::Drained { backend, drained: false });
            }
            7 => happens(at, Fault::Leaves { backend }),
            8 => happens(at, Fault::Joins(member(random))),
            9 => happens(at, Fault::Policy(policy(random))),
            10 => happens(at, Fault::Limits(limits(random))),
            _ if random.chance(0.3) => happens(at, Fault::Drain),
            _ => happens(at, Fault::Strangers),
        }
    }
    let messy = random.chance(0.4);
    let mut share = |most: f64| if messy { most * random.unit() } else { 0.0 };
    let mess = Mess { late: share(0.3), by: seconds(share(4.0)), twice: share(0.3), pushback: share(0.1) };
    Plan { faults, mess }
}
