//! What arrival order would have given the requests that are drawn over time: the same requests, played once more as they came, on engines like the pool's.
//!
//! While somebody looks on it is computed about once a minute, on a thread of the lowest priority, and never for more than a fiftieth of the time.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::feed::{SPAN, rounded};
use super::replay::{Material, Replay};
use super::whatif::{WhatIfError, contender, gateway_of};
use crate::gateway::Gateway;
use crate::ranker::yield_to_the_proxy;
use crate::scheduler::Order;
use crate::simulator::End;

/// Ended requests of a pool that are played.
const MOST: usize = 8000;
/// Between two points, and how many there are: half an hour.
const STEP: Duration = Duration::from_secs(15);
const POINTS: u32 = 120;
/// From the end of one to the beginning of the next, at least.
const EVERY: Duration = Duration::from_secs(60);
/// The same, in times of what it took.
const REST: u32 = 49;

/// What is drawn, and when to compute it again.
pub(super) struct Computed {
    pub pools: Value,
    pub next: Instant,
}

/// Computes it for the first `most` pools, at this moment of the page's clock in seconds since 1970. `None`: there is no thread to be had.
pub(super) async fn compute(gateway: Arc<Gateway>, most: usize, unix: u64) -> Option<Computed> {
    let live = gateway.live();
    let mut materials = Vec::new();
    for index in 0..live.pools.len().min(most) {
        // In the order of arrival already: there is nothing beside it.
        if live.snapshot.pools[index].policy.policy.order() != Order::Fcfs {
            materials.push(Material::take(&live, index).await);
        }
    }
    let now = Instant::now();
    let (reply, answer) = oneshot::channel();
    let started = std::thread::Builder::new().name("counterfactual".into()).spawn(move || {
        yield_to_the_proxy();
        let began = std::time::Instant::now();
        let mut pools = Map::new();
        for material in &materials {
            // Of a pool of which too little is known nothing is drawn.
            if let Ok(of_pool) = of_pool(&gateway, material, now, unix) {
                pools.insert(material.settings().name.clone(), of_pool);
            }
        }
        // Whoever asked may have stopped.
        _ = reply.send(Computed { pools: pools.into(), next: Instant::now() + EVERY.max(began.elapsed() * REST) });
    });
    started.ok()?;
    answer.await.ok()
}

fn of_pool(gateway: &Gateway, material: &Material, now: Instant, unix: u64) -> Result<Value, WhatIfError> {
    let from = now.checked_sub(STEP * POINTS + SPAN);
    let mut replay = Replay::of(material, &gateway.recent, from, MOST)?;
    let own = replay.tune(&gateway_of(material.settings()))?;
    let fcfs = replay.run(contender("fcfs", material.settings())?.dispatch)?;
    // When each really ended, and how long each took under arrival order: to the first token where that was measured, and in all.
    let mut ended: Vec<(Instant, Option<f64>, f64)> = Vec::with_capacity(fcfs.answers.len());
    let mut measured = 0.0;
    for answer in fcfs.answers.iter().filter(|answer| answer.end == End::Answered) {
        let played = &replay.played[answer.job as usize];
        let Some(real) = played.ended.as_ref().filter(|real| played.arrived_within && real.is_answered()) else { continue };
        measured += real.total.as_secs_f64();
        ended.push((real.at, real.first_token.and(answer.ttft()).map(|ttft| ttft.as_secs_f64()), answer.ttlt().as_secs_f64()));
    }
    ended.sort_by_key(|(at, ..)| *at);
    let points: Vec<Value> =
        (0..POINTS).rev().filter_map(|step| point(&ended, now.checked_sub(STEP * step)?, unix.checked_sub((STEP * step).as_secs())?)).collect();
    let count = ended.len().max(1) as f64;
    let mean = ended.iter().map(|(_, _, ttlt)| ttlt).sum::<f64>() / count;
    Ok(json!({
        "points": points,
        "requests": ended.len(),
        "ttlt_mean": { "fcfs": rounded(mean), "measured": rounded(measured / count) },
        // By how much the policy in force comes out above what was measured, by mean time to the last token.
        "off": own.map(rounded),
    }))
}

/// Percentiles of those that ended within the span before a moment; `None` of none.
fn point(ended: &[(Instant, Option<f64>, f64)], at: Instant, unix: u64) -> Option<Value> {
    let until = ended.partition_point(|(end, ..)| *end <= at);
    let since = ended.partition_point(|(end, ..)| at.checked_duration_since(*end).is_some_and(|ago| ago > SPAN));
    let within = &ended[since..until.max(since)];
    let both = |mut of: Vec<f64>| {
        of.sort_unstable_by(f64::total_cmp);
        let rank = |share: f64| of.get(((share * of.len() as f64).ceil() as usize).saturating_sub(1)).copied().map(rounded);
        json!({ "p50": rank(0.5), "p99": rank(0.99) })
    };
    let point = || {
        json!({
            "at": unix,
            "ttft": both(within.iter().filter_map(|(_, ttft, _)| *ttft).collect()),
            "ttlt": both(within.iter().map(|(_, _, ttlt)| *ttlt).collect()),
        })
    };
    (!within.is_empty()).then(point)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_point_is_of_those_that_ended_just_before() {
        let start = Instant::now();
        let second = |second| start + Duration::from_secs(second);
        let ended: Vec<_> = (0..100).map(|n| (second(n), (n % 2 == 0).then_some(n as f64 / 100.0), n as f64)).collect();
        let told = point(&ended, second(60), 1060).unwrap();
        assert_eq!(told, json!({ "at": 1060, "ttft": { "p50": 0.44, "p99": 0.6 }, "ttlt": { "p50": 45.0, "p99": 60.0 } }), "30 to 60");
        assert_eq!(point(&ended, second(200), 1200), None);
        let single = point(&ended[1..2], second(1), 7).unwrap();
        assert_eq!(single, json!({ "at": 7, "ttft": { "p50": null, "p99": null }, "ttlt": { "p50": 1.0, "p99": 1.0 } }));
    }
}
