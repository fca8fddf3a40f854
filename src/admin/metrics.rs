//! The metrics page: the counters of requests, and what pools, backends, scoring and configuration look like at this moment.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;

use super::view::{look, standing};
use crate::config::ReloadStatus;
use crate::fleet;
use crate::gateway::Gateway;
use crate::ranker::Compared;
use crate::scheduler::{BackendView, Mode, ModelId, PoolView, Reason, Standing};

type Labels = Vec<(&'static str, String)>;
type Number = Gauge<f64, AtomicU64>;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    result: &'static str,
}

/// The whole page, in the OpenMetrics text format.
///
/// # Errors
/// Only those of formatting.
pub(super) async fn page(gateway: &Gateway, reloads: &ReloadStatus) -> Result<String, std::fmt::Error> {
    let live = gateway.live();
    let mut now = Now::default();
    for (settings, runtime, view) in look(&live).await {
        let Some(view) = view else { continue };
        now.pool(&settings.name, &view, &runtime.models());
        for target in runtime.targets() {
            let known = target.backend.view();
            now.backend(&settings.name, &known, view.backends.iter().find(|queue| queue.id == known.id));
        }
    }
    for compared in live.shadow.iter().flat_map(|shadow| shadow.compared()) {
        now.shadow(&compared);
    }
    let mut registry = now.registered();

    let outcomes = Family::<Outcome, Counter>::default();
    outcomes.get_or_create(&Outcome { result: "ok" }).inc_by(reloads.succeeded);
    outcomes.get_or_create(&Outcome { result: "failed" }).inc_by(reloads.failed);
    registry.register("config_reloads", "Reloads of the configuration", outcomes);
    registry.register("config", "The configuration in force", Info::new(vec![("version", reloads.version.clone())]));
    registry.register("build", "This program", Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]));
    if let Some(version) = live.ranker.version() {
        registry.register("ranker", "The ranker whose scores decide", Info::new(vec![("version", format!("{:08x}", version.0))]));
    }
    let draining = Gauge::<i64>::default();
    draining.set(i64::from(gateway.draining()));
    registry.register("draining", "Whether the gateway is on its way out", draining);
    if let Some(bytes) = resident_bytes() {
        let resident = Gauge::<i64>::default();
        resident.set(bytes);
        registry.register_with_unit("resident_memory", "Memory of the process", Unit::Bytes, resident);
    }

    let mut out = String::new();
    gateway.metrics.write(&mut out)?;
    encode_registry(&mut out, &registry)?;
    encode_eof(&mut out)?;
    Ok(out)
}

/// Series of one moment, built anew for each page: what has left the configuration leaves the page.
#[derive(Default)]
struct Now {
    waiting: Family<Labels, Gauge>,
    waiting_bytes: Family<Labels, Gauge>,
    aged: Family<Labels, Gauge>,
    gamma: Family<Labels, Number>,
    max_overtake: Family<Labels, Number>,
    backlog: Family<Labels, Number>,
    overload: Family<Labels, Gauge>,
    tau: Family<Labels, Number>,
    shadow_tau: Family<Labels, Number>,
    calibration_error: Family<Labels, Number>,
    calibration_drift: Family<Labels, Number>,
    arrived: Family<Labels, Counter>,
    released: Family<Labels, Counter>,
    released_aged: Family<Labels, Counter>,
    stolen: Family<Labels, Counter>,
    placed_again: Family<Labels, Counter>,
    rejected: Family<Labels, Counter>,
    pushbacks: Family<Labels, Counter>,
    rebuilds: Family<Labels, Counter>,
    overloads: Family<Labels, Counter>,
    neutral: Family<Labels, Counter>,
    backend_waiting: Family<Labels, Gauge>,
    in_flight: Family<Labels, Gauge>,
    window: Family<Labels, Gauge>,
    standing: Family<Labels, Gauge>,
    wedged: Family<Labels, Gauge>,
    engine_running: Family<Labels, Gauge>,
    engine_waiting: Family<Labels, Gauge>,
    engine_kv: Family<Labels, Number>,
}

impl Now {
    fn pool(&mut self, name: &str, view: &PoolView, models: &BTreeMap<String, ModelId>) {
        let labels = vec![("pool", name.to_owned())];
        self.waiting.get_or_create(&labels).set(whole(view.waiting));
        self.waiting_bytes.get_or_create(&labels).set(whole(view.waiting_bytes));
        self.aged.get_or_create(&labels).set(whole(view.aged));
        self.gamma.get_or_create(&labels).set(view.gamma);
        self.max_overtake.get_or_create(&labels).set(view.max_overtake);
        self.backlog.get_or_create(&labels).set(view.backlog);
        self.overload.get_or_create(&labels).set(i64::from(view.mode == Mode::Overload));
        let counters = &view.counters;
        for (family, count) in [
            (&self.arrived, counters.arrived),
            (&self.released, counters.released),
            (&self.released_aged, counters.aged),
            (&self.stolen, counters.stolen),
            (&self.placed_again, counters.placed_again),
            (&self.pushbacks, counters.pushbacks),
            (&self.rebuilds, counters.rebuilds),
            (&self.overloads, counters.overloads),
            (&self.neutral, counters.neutral),
        ] {
            family.get_or_create(&labels).inc_by(count);
        }
        for (reason, count) in Reason::ALL.iter().zip(counters.rejected) {
            self.rejected.get_or_create(&with(&labels, "reason", reason.as_str())).inc_by(count);
        }
        let taus = view.models.iter().filter_map(|model| model.tau);
        // The worst of the pool's models: which one it is, the admin view tells.
        if let Some(tau) = taus.reduce(f64::min) {
            self.tau.get_or_create(&labels).set(tau);
        }
        self.accuracy(&labels, view, models);
    }

    fn accuracy(&mut self, labels: &Labels, view: &PoolView, models: &BTreeMap<String, ModelId>) {
        for model in &view.models {
            let name = models.iter().find(|(_, id)| **id == model.model).map_or("other", |(name, _)| name);
            let labels = with(labels, "model", name);
            for (family, value) in [(&self.calibration_error, model.error), (&self.calibration_drift, model.drift)] {
                if let Some(value) = value {
                    family.get_or_create(&labels).set(value);
                }
            }
        }
    }

    fn shadow(&mut self, compared: &Compared) {
        let labels = vec![("pool", compared.pool.clone()), ("model", compared.model.clone())];
        for (ranker, tau) in [("serving", compared.serving), ("shadow", compared.shadow)] {
            if let Some(tau) = tau {
                self.shadow_tau.get_or_create(&with(&labels, "ranker", ranker)).set(tau);
            }
        }
    }

    fn backend(&mut self, pool: &str, known: &fleet::BackendView, queue: Option<&BackendView>) {
        let labels = vec![("pool", pool.to_owned()), ("backend", known.url.to_string())];
        for possible in [Standing::Healthy, Standing::Ejected, Standing::Probing, Standing::Draining] {
            let series = with(&labels, "standing", standing(possible));
            self.standing.get_or_create(&series).set(i64::from(known.standing == possible));
        }
        self.wedged.get_or_create(&labels).set(i64::from(known.wedged));
        if let Some(queue) = queue {
            self.backend_waiting.get_or_create(&labels).set(whole(queue.waiting));
            self.in_flight.get_or_create(&labels).set(queue.in_flight.into());
            self.window.get_or_create(&labels).set(queue.window.into());
        }
        // Unknown is absent, never zero.
        if let Some(running) = known.load.running {
            self.engine_running.get_or_create(&labels).set(running.into());
        }
        if let Some(waiting) = known.load.waiting {
            self.engine_waiting.get_or_create(&labels).set(waiting.into());
        }
        if let Some(used) = known.load.kv_used {
            self.engine_kv.get_or_create(&labels).set(used.into());
        }
    }

    fn registered(self) -> Registry {
        let mut registry = Registry::with_prefix("headway");
        registry.register("waiting", "Requests that wait", self.waiting);
        registry.register_with_unit("waiting", "Bodies of requests that wait", Unit::Bytes, self.waiting_bytes);
        registry.register("waiting_aged", "Of those that wait, those that have waited long", self.aged);
        registry.register("gamma_per_second", "Decay rate of the boost", self.gamma);
        registry.register_with_unit("max_overtake", "How much later a request may arrive and still overtake", Unit::Seconds, self.max_overtake);
        registry.register_with_unit("backlog", "Predicted time until everything that waits has started", Unit::Seconds, self.backlog);
        registry.register("overload", "Whether the pool is in overload mode", self.overload);
        registry.register("ranker_tau", "Rank correlation of scores and lengths, of the pool's worst model", self.tau);
        registry.register(
            "ranker_shadow_tau",
            "Rank correlation of scores and lengths, of the ranker that serves and of its shadow, on answers that both have scored",
            self.shadow_tau,
        );
        registry.register("calibration_error", "Mean distance of the logarithms of expected and real lengths of answers", self.calibration_error);
        registry.register("calibration_drift_ratio", "Real lengths of answers over expected ones", self.calibration_drift);
        registry.register("queue_arrived", "Requests that asked to wait", self.arrived);
        registry.register("queue_released", "Requests released to a backend", self.released);
        registry.register("queue_released_aged", "Of those released, those by age", self.released_aged);
        registry.register("queue_stolen", "Of those released, those to another backend than the one they waited for", self.stolen);
        registry.register("queue_placed_again", "Requests moved because their backend went away", self.placed_again);
        registry.register("queue_rejected", "Requests turned away before they reached a backend", self.rejected);
        registry.register("backend_pushbacks", "Answers of backends that said they are full", self.pushbacks);
        registry.register("queue_rebuilds", "Rebuilds of all keys", self.rebuilds);
        registry.register("overloads", "Times that overload mode began", self.overloads);
        registry.register("queue_neutral", "Requests queued without a score", self.neutral);
        registry.register("backend_waiting", "Requests in the backend's queue here", self.backend_waiting);
        registry.register("backend_in_flight", "Requests that hold a slot of the backend", self.in_flight);
        registry.register("backend_window", "Requests that the backend may hold", self.window);
        registry.register("backend_wedged", "Whether the backend holds requests and gives no sign of life", self.wedged);
        registry.register("backend_standing", "Which standing the backend has", self.standing);
        registry.register("engine_running", "Requests in the engine's batch, by its own metrics", self.engine_running);
        registry.register("engine_waiting", "Requests in the engine's own queue, by its own metrics", self.engine_waiting);
        registry.register("engine_kv_used_ratio", "Share of the engine's KV cache in use, by its own metrics", self.engine_kv);
        registry
    }
}

fn with(labels: &Labels, name: &'static str, value: &str) -> Labels {
    let mut labels = labels.clone();
    labels.push((name, value.to_owned()));
    labels
}

/// As the gauges want it; nothing here counts beyond 2^63.
fn whole(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

/// The resident set, from the kernel's `/proc/self/statm` (second field, in pages of 4 KiB); `None` where there is none.
fn resident_bytes() -> Option<i64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: i64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * 4096)
}
