//! The state of the gateway as JSON. Field names say their units.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use tokio::time::timeout;

use crate::config::{self, ReloadError, ReloadStatus};
use crate::fleet;
use crate::gateway::{Gateway, Live, PoolRuntime};
use crate::scheduler::{self, PoolView, RankerVersion, Reason, Slots, Standing};
use crate::tenancy::Tenant;

/// How long a pool may take to describe itself: its task answers between two events.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// The pools of one moment, each with its view where it answered.
pub(super) async fn look(live: &Live) -> Vec<(Arc<config::Pool>, Arc<PoolRuntime>, Option<PoolView>)> {
    let mut all = Vec::with_capacity(live.pools.len());
    for (settings, pool) in live.snapshot.pools.iter().zip(&live.pools) {
        let view = timeout(PATIENCE, pool.dispatcher.view()).await.ok().flatten();
        all.push((Arc::clone(settings), Arc::clone(pool), view));
    }
    all
}

pub(super) async fn pools(gateway: &Gateway) -> Vec<Value> {
    let live = gateway.live();
    look(&live).await.into_iter().map(|(settings, runtime, view)| pool(&settings, &runtime, view.as_ref())).collect()
}

/// Versions as eight hexadecimal digits.
pub(super) fn ranker(live: &Live) -> Value {
    let hex = |version: Option<RankerVersion>| version.map(|version| format!("{:08x}", version.0));
    let counts = live.ranker.counts();
    json!({
        "version": hex(live.ranker.version()),
        "previous": hex(live.ranker.previous()),
        "directory": live.snapshot.ranker.as_ref().map(|settings| settings.weights.display().to_string()),
        "scored": counts.scored,
        "cached": counts.cached,
        "busy": counts.busy,
        "failed": counts.failed,
        "late": counts.late,
        "batches": counts.batches,
        "waiting": counts.waiting,
        "shadow": live.shadow.as_ref().map(|shadow| json!({
            "version": hex(shadow.version()),
            "directory": live.snapshot.ranker.as_ref().and_then(|settings| settings.shadow.as_ref()).map(|directory| directory.display().to_string()),
            "models": shadow.compared().iter().map(|of| json!({
                "pool": of.pool,
                "model": of.model,
                "answers": of.answers,
                "tau_serving": of.serving,
                "tau_shadow": of.shadow,
            })).collect::<Vec<_>>(),
        })),
    })
}

/// Who may ask and how their limits stand; `null` where nobody has to show a key.
pub(super) fn tenants(live: &Live) -> Value {
    live.tenancy.as_ref().map_or(Value::Null, |tenancy| tenancy.tenants().map(|of| tenant(of)).collect())
}

/// The same of those that have most requests here, at most `most` of them, and how many tenants there are.
pub(super) fn busiest_tenants(live: &Live, most: usize) -> (Value, usize) {
    let Some(tenancy) = &live.tenancy else { return (Value::Null, 0) };
    let mut all: Vec<_> = tenancy.tenants().map(|tenant| (Reverse(tenant.held()), tenant)).collect();
    let in_all = all.len();
    let order = |a: &(Reverse<u64>, &Arc<Tenant>), b: &(Reverse<u64>, &Arc<Tenant>)| a.0.cmp(&b.0).then_with(|| a.1.name().cmp(b.1.name()));
    if in_all > most {
        all.select_nth_unstable_by(most, order);
        all.truncate(most);
    }
    all.sort_by(order);
    (all.into_iter().map(|(_, of)| tenant(of)).collect(), in_all)
}

fn tenant(tenant: &Tenant) -> Value {
    let limits: Map<String, Value> = tenant
        .standing()
        .map(|(what, standing)| {
            let left = json!({ "per_minute": standing.per_minute, "left": standing.left, "full_in_s": standing.full_in.as_secs_f64() });
            (what.as_str().to_owned(), left)
        })
        .collect();
    let settings = tenant.settings();
    json!({
        "name": tenant.name(),
        "weight": settings.weight.get(),
        "models": settings.models,
        "keys": settings.keys.len(),
        "held": tenant.held(),
        "concurrent_requests": settings.limits.concurrent_requests,
        "queue": tenant.room().map(|room| {
            let (requests, bytes) = room.held();
            json!({ "requests": requests, "bytes": bytes, "most_requests": settings.queue.requests, "most_bytes": settings.queue.bytes })
        }),
        "limits": limits,
    })
}

pub(super) fn pool(settings: &config::Pool, runtime: &PoolRuntime, view: Option<&PoolView>) -> Value {
    let backends: Vec<Value> = runtime
        .targets()
        .iter()
        .map(|target| {
            let mut shown = backend(&target.backend.view());
            if let (Some(queue), Value::Object(shown)) =
                (view.and_then(|view| view.backends.iter().find(|queue| queue.id == target.backend.id())), &mut shown)
            {
                shown.append(&mut of_queue(queue));
            }
            shown
        })
        .collect();
    let mut shown = json!({ "name": settings.name, "policy": settings.policy.name, "backends": backends });
    if let (Some(view), Value::Object(shown)) = (view, &mut shown) {
        let models = runtime.models();
        shown.append(&mut of_pool(view, |id| models.iter().find(|(_, known)| **known == id).map(|(name, _)| name.as_str())));
    }
    shown
}

fn of_pool<'a>(view: &PoolView, name: impl Fn(scheduler::ModelId) -> Option<&'a str>) -> Map<String, Value> {
    let counters = &view.counters;
    let rejected: Map<String, Value> =
        Reason::ALL.iter().zip(counters.rejected).map(|(reason, count)| (reason.as_str().to_owned(), count.into())).collect();
    let models: Vec<Value> = view
        .models
        .iter()
        .map(|model| {
            json!({
                "model": name(model.model),
                "samples": model.samples,
                "mean_output_tokens": model.mean_output,
                "tau": model.tau,
                "trusted": model.trusted,
                "calibration_error": model.error,
                "calibration_drift_ratio": model.drift,
            })
        })
        .collect();
    object(json!({
        "mode": view.mode.as_str(),
        "waiting": view.waiting,
        "waiting_bytes": view.waiting_bytes,
        "aged": view.aged,
        "in_flight": view.in_flight,
        "gamma_per_second": view.gamma,
        "max_overtake_seconds": view.max_overtake,
        "backlog_seconds": view.backlog,
        "mean_work_seconds": view.mean_work,
        "draining": view.draining,
        "models": models,
        "counters": {
            "arrived": counters.arrived,
            "released": counters.released,
            "aged": counters.aged,
            "stolen": counters.stolen,
            "cancelled": counters.cancelled,
            "placed_again": counters.placed_again,
            "rejected": rejected,
            "finished": counters.finished,
            "pushbacks": counters.pushbacks,
            "rebuilds": counters.rebuilds,
            "overloads": counters.overloads,
            "neutral": counters.neutral,
        },
    }))
}

/// What the fleet knows of a backend.
pub(super) fn backend(view: &fleet::BackendView) -> Value {
    json!({
        "id": view.id.0,
        "url": view.url.to_string(),
        "engine": view.engine.map(fleet::EngineKind::as_str),
        "standing": standing(view.standing),
        "drained": view.drained,
        "wedged": view.wedged,
        "models": *view.models,
        "slots": slots(view.slots),
        "kv_tokens": view.kv_tokens,
        "context_tokens": view.context_tokens,
        "engine_running": view.load.running,
        "engine_waiting": view.load.waiting,
        "engine_kv_used": view.load.kv_used,
        "error": view.error,
    })
}

/// What the scheduler knows of it.
fn of_queue(queue: &scheduler::BackendView) -> Map<String, Value> {
    object(json!({
        "waiting": queue.waiting,
        "in_flight": queue.in_flight,
        "window": queue.window,
        "backlog_seconds": queue.backlog,
        "seconds_per_output_token": queue.speed.output,
        "seconds_per_prompt_token": queue.speed.prompt,
        "speed_learnt": queue.speed_learnt,
    }))
}

fn slots(slots: Slots) -> Value {
    match slots {
        Slots::Fixed(slots) => json!(slots),
        Slots::Auto { initial, max } => json!({ "initial": initial, "max": max }),
    }
}

/// The name of a standing in JSON and metrics.
pub(super) const fn standing(standing: Standing) -> &'static str {
    match standing {
        Standing::Healthy => "healthy",
        Standing::Ejected => "ejected",
        Standing::Probing => "probing",
        Standing::Draining => "draining",
        Standing::Gone => "gone",
    }
}

/// What configuration runs, and how the last try to change it went.
pub(super) fn configuration(gateway: &Gateway, status: &ReloadStatus) -> Value {
    let live = gateway.live();
    let files: Vec<String> = live.snapshot.sources.iter().map(|path| path.display().to_string()).collect();
    json!({
        "file": status.file.as_ref().map(|file| file.display().to_string()),
        "files": files,
        "version": status.version,
        "since_unix_seconds": seconds(status.since),
        "reloads": { "ok": status.succeeded, "failed": status.failed },
        "error": status.error.as_ref().map(|(at, error)| json!({ "at_unix_seconds": seconds(*at), "message": error.to_string(), "problems": problems(error) })),
    })
}

fn problems(error: &ReloadError) -> Vec<Value> {
    let ReloadError::Invalid(error) = error else { return Vec::new() };
    let shown = error.problems().iter().map(|problem| {
        let (line, column) = problem.position.unzip();
        let file = problem.file.display().to_string();
        json!({ "file": file, "line": line, "column": column, "field": problem.field, "message": problem.message, "hint": problem.hint })
    });
    shown.collect()
}

fn seconds(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The members of a value that is written as an object.
pub(super) fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}
