//! Why one request is where it is, or went as it did: what was predicted for it, where that put it, who passed whom, and what each wait did.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use super::feed::rounded;
use super::view;
use crate::config;
use crate::dispatcher::Found;
use crate::gateway::{Gateway, Live, PoolRuntime};
use crate::scheduler::{Calibrated, RequestId, RequestView, Score, StageView, Time};
use crate::telemetry::Ended;

/// Others that are named of each kind.
const OTHERS: usize = 5;

/// All that is known of the request with this id; `None` if it neither waits nor runs nor ended lately.
pub(super) async fn explain(gateway: &Gateway, id: &str) -> Option<Value> {
    let live = gateway.live();
    for (settings, runtime) in live.snapshot.pools.iter().zip(&live.pools) {
        if let Some(found) = timeout(view::PATIENCE, runtime.dispatcher.find(id, OTHERS)).await.ok().flatten() {
            return Some(present(gateway, &live, settings, runtime, id, &found));
        }
    }
    let ended = gateway.recent.find(id)?;
    let place = live.snapshot.pools.iter().position(|settings| Some(settings.name.as_str()) == ended.pool.as_deref());
    let calibrated = match (place, ended.score.and_then(Score::new)) {
        (Some(index), Some(score)) => {
            let runtime = &live.pools[index];
            let model = runtime.models().get(&*ended.model).copied();
            match model {
                Some(model) => timeout(view::PATIENCE, runtime.dispatcher.calibrated(model, score)).await.ok().flatten(),
                None => None,
            }
        }
        _ => None,
    };
    Some(past(gateway, place.map(|index| &*live.snapshot.pools[index]), &ended, calibrated))
}

/// One that waits or runs.
fn present(gateway: &Gateway, live: &Live, settings: &config::Pool, runtime: &PoolRuntime, id: &str, found: &Found) -> Value {
    let (request, now) = (&found.standpoint.request, runtime.dispatcher.now());
    let since = |moment: Time| rounded(now.since(moment).as_secs_f64());
    let backend = runtime.target(found.standpoint.backend).map(|target| target.backend.settings().url.to_string());
    let tenants = live.tenancy.iter().flat_map(|tenancy| tenancy.tenants());
    let models = runtime.models();
    let timeouts = &settings.timeouts;
    let mut story = vec![prediction(request.score.map(|scored| scored.score.get()), request_expected(request), request.work, found.calibrated)];
    let mut shown = json!({
        "id": id,
        "pool": settings.name,
        "model": models.iter().find(|(_, known)| **known == request.model).map(|(name, _)| name),
        "tenant": tenants.filter(|tenant| Some(tenant.id()) == request.tenant).map(|tenant| tenant.name()).next(),
        "backend": backend,
        "policy": settings.policy.name,
        "arrived_seconds_ago": since(request.arrived),
        "score": request.score.map(|scored| scored.score.get()),
        "calibration": found.calibrated.map(calibration),
        "weight": request.weight,
        "prompt_tokens": request.prompt,
        "predicted": { "output_tokens": request_expected(request), "work_seconds": rounded(request.work) },
    });
    let waited = |until: Time| until.since(request.arrived);
    match (request.stage, &found.standpoint.position) {
        (StageView::Waiting { phi, boosted_arrival, expires, aged }, Some(position)) => {
            let boost = (i64::try_from(request.arrived.as_micros()).unwrap_or(i64::MAX).saturating_sub(boosted_arrival)) as f64 / 1e6;
            shown["state"] = json!("waits");
            shown["position"] = json!(position.ahead + 1);
            shown["phi"] = json!(phi);
            shown["stands_back"] = json!(position.stands_back);
            shown["boost_seconds"] = json!(rounded(boost));
            shown["aged"] = json!(aged);
            shown["overtaken_by"] = json!({ "count": position.overtaken_by, "examples": others(&position.overtaking, request, &found.labels) });
            shown["overtakes"] = json!({ "count": position.overtakes, "examples": others(&position.overtaken, request, &found.labels) });
            shown["timeouts"] =
                json!([wait("queue", timeouts.queue, Some(waited(now)), false), wait("total", timeouts.total, Some(waited(now)), false),]);
            shown["turned_away_in_seconds"] = json!(rounded(expires.since(now).as_secs_f64()));
            story.push(boosted(boost));
            story.push(format!(
                "It waits as number {} of its queue. {} ahead of it arrived later; {} behind it arrived earlier.",
                position.ahead + 1,
                position.overtaken_by,
                position.overtakes
            ));
            if position.stands_back {
                story.push("Its tenant has had more than its share of the pool: requests of others go first, whatever their keys.".into());
            }
            if aged && !position.stands_back {
                story
                    .push("It is aged: a share of all releases goes to the oldest of those whose tenants are not ahead, whatever their keys.".into());
            }
        }
        (StageView::Running { released, produced }, _) => {
            shown["state"] = json!("runs");
            shown["waited_seconds"] = json!(rounded(waited(released).as_secs_f64()));
            shown["released_seconds_ago"] = json!(since(released));
            shown["output_tokens"] = json!(produced);
            shown["timeouts"] = json!([
                wait("queue", timeouts.queue, Some(waited(released)), false),
                wait("first_byte", timeouts.first_byte, (produced == 0).then(|| now.since(released)), false),
                wait("total", timeouts.total, Some(waited(now)), false),
            ]);
            let (arrived, moment) = (instant(now, request.arrived), instant(now, released));
            passed(&mut shown, &mut story, &crowd(gateway, &settings.name), arrived, moment, None);
            story.push(format!("It has run for {} s and produced {produced} tokens so far.", since(released)));
        }
        (StageView::Waiting { .. }, None) => shown["state"] = json!("waits"),
    }
    shown["story"] = json!(story);
    shown
}

/// One that has ended.
fn past(gateway: &Gateway, settings: Option<&config::Pool>, ended: &Ended, calibrated: Option<Calibrated>) -> Value {
    let boost = ended.boost.map(|micros| micros as f64 / 1e6);
    let seconds = |span: Option<Duration>| span.map(|span| rounded(span.as_secs_f64()));
    let mut shown = json!({
        "id": *ended.id,
        "state": "ended",
        "ended_seconds_ago": rounded(ended.at.elapsed().as_secs_f64()),
        "pool": ended.pool.as_deref(),
        "model": *ended.model,
        "tenant": ended.tenant.as_deref(),
        "backend": ended.backend.as_deref(),
        "policy": settings.map(|settings| settings.policy.name.as_str()),
        "status": ended.status,
        "reason": ended.reason,
        "waited_seconds": seconds(ended.queued),
        "first_token_seconds": seconds(ended.first_token),
        "total_seconds": seconds(Some(ended.total)),
        "score": ended.score,
        "scoring": ended.scoring,
        "calibration": calibrated.map(calibration),
        "predicted": ended.predicted_tokens.map(|tokens| json!({ "output_tokens": tokens, "work_seconds": ended.work.map(rounded) })),
        "prompt_tokens": ended.prompt_tokens,
        "output_tokens": ended.output_tokens,
        "boost_seconds": boost.map(rounded),
        "released_by": ended.released.map(|_| if ended.aged { "age" } else { "key" }),
        "stolen": ended.stolen,
        "retries": ended.retries,
    });
    let mut story = Vec::new();
    if let (Some(predicted), Some(work)) = (ended.predicted_tokens, ended.work) {
        story.push(prediction(ended.score, predicted, work, calibrated));
        story.extend(boost.map(boosted));
    }
    if let Some(settings) = settings {
        let limits = &settings.timeouts;
        let fired = |reason: &str| ended.reason == reason;
        let before_first = ended.first_token.zip(ended.released).map(|(first, released)| first.saturating_sub(released));
        let mut timeouts = vec![
            wait("queue", limits.queue, ended.queued, fired("queue_timeout")),
            wait("connect", limits.connect, None, fired("connect_timeout")),
            wait("first_byte", limits.first_byte, before_first, fired("first_byte_timeout")),
            wait("inter_chunk", limits.inter_chunk, None, fired("inter_chunk_timeout")),
            wait("total", limits.total, Some(ended.total), fired("total_timeout")),
        ];
        timeouts.extend(settings.slow_stream.map(|floor| wait("slow_stream", floor.over, None, fired("slow_stream"))));
        shown["timeouts"] = timeouts.into();
    }
    if let (Some(pool), Some(released)) = (ended.pool.as_deref(), ended.released_at()) {
        passed(&mut shown, &mut story, &crowd(gateway, pool), ended.arrived(), released, Some(ended));
    }
    story.push(match (ended.is_answered(), ended.predicted_tokens) {
        (true, Some(predicted)) => format!("It produced {} tokens, where {predicted} were expected.", ended.output_tokens),
        (true, None) => format!("It produced {} tokens.", ended.output_tokens),
        (false, _) => format!("It ended as {} ({}) after {} s.", ended.reason, ended.status, rounded(ended.total.as_secs_f64())),
    });
    if ended.stolen {
        story.push("Another backend than the one it waited for had room and took it.".into());
    }
    if ended.retries > 0 {
        story.push(format!("It was tried on {} other backends before the first byte.", ended.retries));
    }
    shown["story"] = json!(story);
    shown
}

/// Those of a pool that ended lately.
fn crowd(gateway: &Gateway, pool: &str) -> Vec<Arc<Ended>> {
    let mut all = gateway.recent.all();
    all.retain(|other| other.pool.as_deref() == Some(pool));
    all
}

/// Who passed a request that was released, and whom it passed, as far as they have ended: whoever arrived later and was released earlier has overtaken.
fn passed(shown: &mut Value, story: &mut Vec<String>, crowd: &[Arc<Ended>], arrived: Instant, released: Instant, own: Option<&Ended>) {
    let others = || {
        let but_itself = crowd.iter().filter(move |other| own.is_none_or(|own| !std::ptr::eq(own, Arc::as_ptr(other))));
        but_itself.filter_map(|other| Some((other, other.arrived(), other.released_at()?)))
    };
    let mut before: Vec<_> = others().filter(|(_, other_arrived, other_released)| *other_arrived > arrived && *other_released < released).collect();
    let mut after: Vec<_> = others().filter(|(_, other_arrived, other_released)| *other_arrived < arrived && *other_released > released).collect();
    before.sort_by_key(|(_, _, other_released)| std::cmp::Reverse(*other_released));
    after.sort_by_key(|(_, _, other_released)| *other_released);
    let example = |(other, other_arrived, _): &(&Arc<Ended>, Instant, Instant)| {
        let later = other_arrived.saturating_duration_since(arrived).as_secs_f64() - arrived.saturating_duration_since(*other_arrived).as_secs_f64();
        json!({
            "id": *other.id,
            "arrived_later_seconds": rounded(later),
            "predicted_tokens": other.predicted_tokens,
            "work_seconds": other.work.map(rounded),
            "boost_seconds": other.boost.map(|micros| rounded(micros as f64 / 1e6)),
            "released_by": if other.aged { "age" } else { "key" },
            "stolen": other.stolen,
            "backend": other.backend.as_deref(),
        })
    };
    shown["overtaken_by"] = json!({ "count": before.len(), "examples": before.iter().take(OTHERS).map(example).collect::<Vec<_>>() });
    shown["overtook"] = json!({ "count": after.len(), "examples": after.iter().take(OTHERS).map(example).collect::<Vec<_>>() });
    story.push(format!(
        "Of the pool's requests that have ended since, {} arrived later and were released earlier, and it was released before {} that had arrived earlier.",
        before.len(),
        after.len()
    ));
}

fn prediction(score: Option<f32>, expected: u32, work: f64, calibrated: Option<Calibrated>) -> String {
    let from = match (score, calibrated.and_then(|calibrated| calibrated.bin)) {
        (Some(score), Some((bin, bins))) => format!("by its score of {score:.3}, which is in bin {} of {bins}", bin + 1),
        (Some(score), None) => format!("with a score of {score:.3}"),
        (None, _) => "without a score, by its model's usual answers".into(),
    };
    format!("It was expected to produce {expected} tokens, {from}: a work of {} s.", rounded(work))
}

fn boosted(boost: f64) -> String {
    if boost > 0.0 {
        format!("That is worth a boost: it is treated as if it had arrived {} s earlier.", rounded(boost))
    } else {
        "That is worth no boost: it is treated by its arrival.".into()
    }
}

fn calibration(calibrated: Calibrated) -> Value {
    let (bin, bins) = calibrated.bin.unzip();
    json!({ "bin": bin.map(|bin| bin + 1), "bins": bins, "expects_now_output_tokens": calibrated.expected_output })
}

/// One of the waits that a request has, and what became of it. `took` is unknown where it has not begun or nobody measures it.
fn wait(name: &str, limit: Duration, took: Option<Duration>, fired: bool) -> Value {
    json!({
        "name": name,
        "limit_seconds": limit.as_secs_f64(),
        "took_seconds": took.map(|took| rounded(took.as_secs_f64())),
        "fired": fired,
    })
}

fn others(requests: &[RequestView], own: &RequestView, labels: &HashMap<RequestId, Arc<str>>) -> Vec<Value> {
    let seconds = |from: Time, to: Time| to.since(from).as_secs_f64() - from.since(to).as_secs_f64();
    let each = requests.iter().map(|other| {
        let boosted = match other.stage {
            StageView::Waiting { boosted_arrival, .. } => {
                i64::try_from(other.arrived.as_micros()).ok().map(|arrived| arrived.saturating_sub(boosted_arrival))
            }
            StageView::Running { .. } => None,
        };
        json!({
            "id": labels.get(&other.id).map(|label| &**label),
            "arrived_later_seconds": rounded(seconds(own.arrived, other.arrived)),
            "predicted_tokens": other.expected_output,
            "work_seconds": rounded(other.work),
            "boost_seconds": boosted.map(|micros| rounded(micros as f64 / 1e6)),
        })
    });
    each.collect()
}

/// What a request was expected to produce in all.
fn request_expected(request: &RequestView) -> u32 {
    match request.stage {
        StageView::Waiting { .. } => request.expected_output,
        StageView::Running { produced, .. } => request.expected_output.saturating_add(produced),
    }
}

/// A moment of the pool's clock on the process's.
fn instant(now: Time, moment: Time) -> Instant {
    let present = Instant::now();
    present.checked_sub(now.since(moment)).unwrap_or(present)
}
