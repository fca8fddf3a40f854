//! The running whole: the pools that a snapshot describes, kept across reloads where they stay, and swapped as one value that a request takes once.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::access_log::{AccessLog, AccessLogError};
use crate::config::{self, BackendSettings, RankerSettings, Snapshot};
use crate::dispatcher::{self, Dispatcher, Drained};
use crate::fleet::{self, Backend, Listener, Siblings};
use crate::learnt::{self, Keeper};
use crate::proxy::upstream::Connections;
use crate::ranker::{Ranker, RankerError, Shadow};
use crate::scheduler::{BackendId, BackendState, Learnt, Load, ModelId, RankerVersion};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::{Recent, Tracer, TracerError};
use crate::tenancy::{Room, Tenancy, Whose};
use crate::training_log::{TrainingLog, TrainingLogError};
use crate::usage_log::{UsageLog, UsageLogError};

/// Between two writings of what pools have learnt.
const KEEP: Duration = Duration::from_secs(60);
/// Names a pool keeps a calibration of its own for; later ones share one, so that clients cannot make it grow.
const MAX_MODELS: usize = 1024;

/// Everything a request may read: taken once, kept to its end.
pub struct Live {
    /// The configuration.
    pub snapshot: Arc<Snapshot>,
    /// Who may ask; `None`: anybody.
    pub tenancy: Option<Tenancy>,
    /// The scoring stage.
    pub ranker: Ranker,
    /// A second ranker, compared with the first.
    pub shadow: Option<Arc<Shadow>>,
    /// Where the lengths of answers are noted; `None`: nowhere.
    pub training_log: Option<Arc<TrainingLog>>,
    /// Where is written down what requests used; `None`: nowhere.
    pub usage_log: Option<Arc<UsageLog>>,
    /// Where the access log goes, if it has files of its own.
    pub access_log: Option<Arc<AccessLog>>,
    /// The running pools, parallel to `snapshot.pools`.
    pub pools: Vec<Arc<PoolRuntime>>,
}

/// Where a model name leads.
pub struct Routed<'a> {
    /// The pool's settings in this snapshot.
    pub settings: &'a Arc<config::Pool>,
    /// The pool.
    pub pool: &'a Arc<PoolRuntime>,
    /// The name the backends know the model by, where it differs from the client's.
    pub upstream: Option<&'a str>,
    /// The key of its calibration.
    pub model: ModelId,
}

impl Live {
    /// The pool that serves `model`, or `None` for a name that nobody here knows.
    pub fn route(&self, model: &str) -> Option<Routed<'_>> {
        if let Some(route) = self.snapshot.models.get(model) {
            let upstream = route.upstream.as_deref();
            return Some(self.routed(route.pool, upstream, upstream.unwrap_or(model)));
        }
        let index = self.pools.iter().zip(&self.snapshot.pools).position(|(pool, settings)| settings.models.is_empty() && pool.may_serve(model))?;
        Some(self.routed(index, None, model))
    }

    /// The pools that take a request for `model` when no backend of `routed` can, in this order, and the name that their backends know it by. A pool that does
    /// not serve the model serves its first one, unless the answer has to come from the `same`.
    pub fn fallbacks<'a>(&'a self, routed: &Routed<'a>, model: &'a str, same: bool) -> impl Iterator<Item = (Routed<'a>, String)> {
        routed.settings.fallback.iter().filter_map(move |name| {
            let index = self.snapshot.pools.iter().position(|pool| pool.name == *name)?;
            let (models, pool) = (&self.snapshot.pools[index].models, &self.pools[index]);
            let upstream = |(name, upstream): &(String, Option<String>)| upstream.clone().unwrap_or_else(|| name.clone());
            let serves = match models.iter().find(|(name, _)| name == model) {
                Some(serves) => Some(upstream(serves)),
                None => (models.is_empty() && pool.may_serve(model)).then(|| model.to_owned()),
            };
            let instead = || models.first().map(upstream).or_else(|| pool.learnt_models().into_iter().next());
            let upstream = serves.or_else(|| if same { None } else { instead() })?;
            Some((self.routed(index, None, &upstream), upstream))
        })
    }

    fn routed<'a>(&'a self, index: usize, upstream: Option<&'a str>, name: &str) -> Routed<'a> {
        let pool = &self.pools[index];
        Routed { settings: &self.snapshot.pools[index], pool, upstream, model: pool.model_id(name) }
    }

    /// Every model name a client may ask for, sorted.
    pub fn model_names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.snapshot.models.keys().cloned().collect();
        for (pool, settings) in self.pools.iter().zip(&self.snapshot.pools) {
            if settings.models.is_empty() {
                names.extend(pool.learnt_models());
            }
        }
        names.sort();
        names.dedup();
        names
    }
}

/// One pool, alive across reloads as long as its name stays in the configuration.
pub struct PoolRuntime {
    /// The pool's owner task.
    pub dispatcher: Dispatcher,
    /// Where it keeps what it has learnt.
    keeper: Option<Keeper>,
    targets: ArcSwap<BTreeMap<BackendId, Arc<Target>>>,
    models: ArcSwap<BTreeMap<String, ModelId>>,
    /// `None`: the pool retries nothing.
    retries: ArcSwap<Option<DefaultDirectRateLimiter>>,
    next_backend: AtomicU32,
    siblings: Siblings,
    /// Where the requests for models wait that have limits of their own.
    rooms: ArcSwap<BTreeMap<String, Room>>,
}

/// One backend and the connections to it.
pub struct Target {
    /// What is known of it.
    pub backend: Arc<Backend>,
    /// The edge's connections to it.
    pub connections: Arc<Connections>,
    /// Ends the probes with the last target of this backend. Set once the target can be found, since the first news of a backend may release a request to it.
    watch: Arc<OnceLock<fleet::WatchGuard>>,
}

impl Listener for Dispatcher {
    fn backend_changed(&self, backend: BackendId, state: BackendState) {
        Dispatcher::backend_changed(self, backend, state);
    }

    fn load_reported(&self, backend: BackendId, load: Load) {
        Dispatcher::load_reported(self, backend, load);
    }
}

impl PoolRuntime {
    /// Continues from what it learnt before, and from what is known of a ranker whose scores it has not seen.
    fn new(settings: &config::Pool, seed: u64, state: Option<&Path>, ranker: &Ranker) -> Self {
        let dispatcher = Dispatcher::spawn(dispatcher::Settings { policy: settings.policy.policy.clone(), limits: settings.limits, seed });
        let pool = PoolRuntime {
            dispatcher,
            keeper: state.map(|directory| Keeper::new(directory, &settings.name)),
            targets: ArcSwap::default(),
            models: ArcSwap::default(),
            retries: ArcSwap::from_pointee(retry_limiter(settings.retry_budget)),
            next_backend: AtomicU32::new(0),
            siblings: Siblings::default(),
            rooms: ArcSwap::default(),
        };
        let kept = pool.keeper.as_ref().and_then(|keeper| keeper.read(|name| pool.model_id(name))).unwrap_or_default();
        pool.dispatcher.restore(kept);
        pool.dispatcher.restore(Learnt::clone(&ranker.prior()));
        pool
    }

    /// Writes down what it has learnt.
    async fn keep(self: &Arc<Self>) {
        if self.keeper.is_none() {
            return;
        }
        // A pool whose task has ended wrote it down before.
        let Some(learnt) = self.dispatcher.learnt().await else { return };
        let pool = Arc::clone(self);
        let written = tokio::task::spawn_blocking(move || pool.keeper.as_ref().map(|keeper| keeper.write(&learnt, &pool.models.load())));
        match written.await {
            Ok(Some(Err(error))) => tracing::warn!("{error}"),
            Ok(_) => {}
            Err(stopped) if stopped.is_panic() => std::panic::resume_unwind(stopped.into_panic()),
            // The runtime ends.
            Err(_) => {}
        }
    }

    /// The backend that a permit names; `None` if it has left the pool since.
    pub fn target(&self, id: BackendId) -> Option<Arc<Target>> {
        self.targets.load().get(&id).cloned()
    }

    /// All backends, by id.
    pub fn targets(&self) -> Vec<Arc<Target>> {
        self.targets.load().values().cloned().collect()
    }

    /// Takes one retry from the pool's budget, if there is one left.
    pub fn may_retry(&self) -> bool {
        self.retries.load().as_ref().as_ref().is_some_and(|budget| budget.check().is_ok())
    }

    /// Where requests for this model wait, if that has limits.
    pub fn room(&self, model: &str) -> Option<Room> {
        self.rooms.load().get(model).cloned()
    }

    /// The models asked for so far and the keys of their calibrations.
    pub fn models(&self) -> Arc<BTreeMap<String, ModelId>> {
        self.models.load_full()
    }

    /// Model names that the backends of this pool reported.
    pub fn learnt_models(&self) -> Vec<String> {
        self.targets.load().values().flat_map(|target| target.backend.models().iter().cloned().collect::<Vec<_>>()).collect()
    }

    /// Whether a pool without configured models serves this one. Until a backend has told its models, every name is tried.
    fn may_serve(&self, model: &str) -> bool {
        let targets = self.targets.load();
        let mut known = targets.values().map(|target| target.backend.models()).filter(|models| !models.is_empty()).peekable();
        known.peek().is_none() || known.any(|models| models.iter().any(|name| name == model))
    }

    fn model_id(&self, name: &str) -> ModelId {
        if let Some(id) = self.models.load().get(name) {
            return *id;
        }
        self.models.rcu(|models| {
            let mut models = BTreeMap::clone(models);
            let next = ModelId(models.len() as u32 + 1);
            if models.len() < MAX_MODELS {
                models.entry(name.to_owned()).or_insert(next);
            }
            models
        });
        self.models.load().get(name).copied().unwrap_or(ModelId(0))
    }

    /// Makes the running pool match `settings`: backends that stay keep their queue, window and connections, those that go finish what runs there.
    fn apply(&self, settings: &config::Pool) {
        self.dispatcher.policy_changed(settings.policy.policy.clone());
        self.dispatcher.limits_changed(settings.limits);
        self.retries.store(Arc::new(retry_limiter(settings.retry_budget)));
        let before = self.rooms.load_full();
        let rooms = settings.model_queues.iter().map(|(model, limits)| (model.clone(), Room::new(Whose::Model, *limits, before.get(model))));
        self.rooms.store(Arc::new(rooms.collect()));
        let current = self.targets.load_full();
        let mut left: Vec<&Arc<Target>> = current.values().collect();
        let mut next = BTreeMap::new();
        for wanted in &settings.backends {
            let target = match left.iter().position(|target| target.backend.settings().url == wanted.url) {
                Some(index) => stays(left.swap_remove(index), wanted),
                None => self.joins(wanted),
            };
            next.insert(target.backend.id(), target);
        }
        let next = Arc::new(next);
        self.targets.store(Arc::clone(&next));
        for target in next.values() {
            target.watch.get_or_init(|| fleet::watch(Arc::clone(&target.backend), self.dispatcher.clone()));
        }
        for target in left {
            target.backend.leave();
        }
    }

    fn joins(&self, settings: &BackendSettings) -> Arc<Target> {
        // Relaxed is enough: the id only has to be unique.
        let id = BackendId(self.next_backend.fetch_add(1, Ordering::Relaxed));
        let backend = Arc::new(Backend::new(id, settings.clone(), &self.siblings));
        Arc::new(Target { connections: Arc::new(Connections::new(&settings.url)), backend, watch: Arc::default() })
    }
}

/// A backend whose address is still configured: it keeps everything but its settings.
fn stays(target: &Arc<Target>, settings: &BackendSettings) -> Arc<Target> {
    if target.backend.settings() == settings {
        return Arc::clone(target);
    }
    let backend = Arc::new(target.backend.reconfigured(settings.clone()));
    Arc::new(Target { backend, connections: Arc::clone(&target.connections), watch: Arc::clone(&target.watch) })
}

fn retry_limiter(per_second: u32) -> Option<DefaultDirectRateLimiter> {
    NonZeroU32::new(per_second).map(|budget| RateLimiter::direct(Quota::per_second(budget)))
}

/// Why a valid configuration was not applied; the running one stays.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The sockets are opened once, at start.
    #[error("{field}: cannot change from {old} to {new} while running; restart, or start a new process with --upgrade")]
    Restart {
        /// The field of the configuration.
        field: &'static str,
        /// Its value now.
        old: String,
        /// Its value in the new configuration.
        new: String,
    },
    /// There is no place to keep what pools learn.
    #[error("state: the directory {} cannot be made or written: {source}", directory.display())]
    State {
        /// Where it should be.
        directory: PathBuf,
        /// Why it is not.
        source: std::io::Error,
    },
    /// The ranker that the configuration names does not load.
    #[error("ranker: {0}")]
    Ranker(#[from] RankerError),
    /// The second ranker that the configuration names does not load.
    #[error("ranker.shadow: {}: {source}", directory.display())]
    Shadow {
        /// Its directory.
        directory: PathBuf,
        /// What is wrong with it.
        source: RankerError,
    },
    /// The training log cannot be kept as configured.
    #[error("{0}")]
    TrainingLog(#[from] TrainingLogError),
    /// The usage log cannot be kept as configured.
    #[error("{0}")]
    UsageLog(#[from] UsageLogError),
    #[error(transparent)]
    AccessLog(#[from] AccessLogError),
    /// Traces cannot be sent as configured.
    #[error("{0}")]
    Tracer(#[from] TracerError),
}

/// The process: one live value, replaced whole, and whether it is draining.
pub struct Gateway {
    live: ArcSwap<Live>,
    draining: watch::Sender<bool>,
    /// One reload at a time. Holds the runtime that carries the connections, once there is one.
    reload: tokio::sync::Mutex<Option<Handle>>,
    /// Counts of requests, over all pools and reloads.
    pub metrics: Metrics,
    /// The last requests that ended.
    pub recent: Recent,
    /// `None`: no request is recorded.
    pub tracer: Option<Tracer>,
}

impl Gateway {
    /// Starts the pools and the ranker of `snapshot`. Needs a tokio runtime; waits for no backend.
    pub async fn start(snapshot: Snapshot) -> Result<Arc<Gateway>, ApplyError> {
        if let Some(directory) = &snapshot.state {
            learnt::prepare(directory).map_err(|source| ApplyError::State { directory: directory.clone(), source })?;
        }
        let ranker = start_ranker(snapshot.ranker.clone()).await?;
        let metrics = Metrics::default();
        let tenancy = next_tenancy(None, &snapshot);
        let shadow = next_shadow(None, snapshot.ranker.as_ref()).await?;
        let training_log = next_training_log(None, &snapshot, &metrics).await?;
        let usage_log = next_usage_log(None, &snapshot, &metrics).await?;
        let access_log = next_access_log(None, &snapshot, &metrics).await?;
        let tracer = snapshot.otlp.as_ref().map(|otlp| Tracer::start(otlp, &metrics)).transpose()?;
        let pools =
            snapshot.pools.iter().enumerate().map(|(index, settings)| started(settings, index as u64, snapshot.state.as_deref(), &ranker)).collect();
        let live = Live { snapshot: Arc::new(snapshot), tenancy, ranker, shadow, training_log, usage_log, access_log, pools };
        let gateway = Arc::new(Gateway {
            live: ArcSwap::from_pointee(live),
            draining: watch::Sender::new(false),
            reload: tokio::sync::Mutex::new(None),
            metrics,
            recent: Recent::default(),
            tracer,
        });
        tokio::spawn(keep_every_minute(Arc::downgrade(&gateway)));
        Ok(gateway)
    }

    /// What a request takes when it begins.
    pub fn live(&self) -> Arc<Live> {
        self.live.load_full()
    }

    /// Makes the running gateway match `snapshot`, or changes nothing. Pools and backends that stay keep their queues, counters and connections;
    /// those that go accept nothing more and finish what they have.
    pub async fn apply(&self, snapshot: Snapshot) -> Result<(), ApplyError> {
        let runtime = self.reload.lock().await;
        let live = self.live();
        unchanged("listen", live.snapshot.listen, snapshot.listen)?;
        unchanged("admin", live.snapshot.admin, snapshot.admin)?;
        unchanged("threads", live.snapshot.threads, snapshot.threads)?;
        let tls = |snapshot: &Snapshot| shown(snapshot.tls.as_ref().map(|tls| format!("{} with {}", tls.cert.display(), tls.key.display())));
        unchanged("tls", tls(&live.snapshot), tls(&snapshot))?;
        let state = |snapshot: &Snapshot| shown(snapshot.state.as_ref().map(|state| state.display()));
        unchanged("state", state(&live.snapshot), state(&snapshot))?;
        let (collector, wanted) = (live.snapshot.otlp.as_ref(), snapshot.otlp.as_ref());
        unchanged("telemetry.otlp.endpoint", shown(collector.map(|otlp| &otlp.endpoint)), shown(wanted.map(|otlp| &otlp.endpoint)))?;
        unchanged("telemetry.otlp.service_name", shown(collector.map(|otlp| &otlp.service_name)), shown(wanted.map(|otlp| &otlp.service_name)))?;
        let training_log = next_training_log(Some(&live), &snapshot, &self.metrics).await?;
        let usage_log = next_usage_log(Some(&live), &snapshot, &self.metrics).await?;
        let access_log = next_access_log(Some(&live), &snapshot, &self.metrics).await?;
        let shadow = next_shadow(Some(&live), snapshot.ranker.as_ref()).await?;
        let ranker = next_ranker(&live, snapshot.ranker.as_ref()).await?;
        let mut pools = Vec::with_capacity(snapshot.pools.len());
        for (index, settings) in snapshot.pools.iter().enumerate() {
            let running = live.snapshot.pools.iter().position(|pool| pool.name == settings.name).map(|index| Arc::clone(&live.pools[index]));
            pools.push(match running {
                Some(pool) => {
                    pool.apply(settings);
                    pool.dispatcher.restore(Learnt::clone(&ranker.prior()));
                    pool
                }
                None => {
                    let pool = started(settings, index as u64, snapshot.state.as_deref(), &ranker);
                    if let Some(runtime) = &*runtime {
                        pool.dispatcher.move_to(runtime.clone());
                    }
                    pool
                }
            });
        }
        if let (Some(tracer), Some(otlp)) = (&self.tracer, &snapshot.otlp) {
            tracer.sample(otlp.sample);
        }
        for gone in live.pools.iter().filter(|pool| !pools.iter().any(|stays| Arc::ptr_eq(pool, stays))) {
            gone.keep().await;
        }
        let tenancy = next_tenancy(Some(&live), &snapshot);
        if live.tenancy.is_some() && tenancy.is_none() {
            tracing::warn!("keys are configured no more: whoever reaches {} may ask", snapshot.listen);
        }
        self.live.store(Arc::new(Live { snapshot: Arc::new(snapshot), tenancy, ranker, shadow, training_log, usage_log, access_log, pools }));
        Ok(())
    }

    /// The pools' owner tasks, those of later reloads too, run where the connections are.
    pub async fn move_to(&self, runtime: Handle) {
        let mut home = self.reload.lock().await;
        for pool in &self.live().pools {
            pool.dispatcher.move_to(runtime.clone());
        }
        *home = Some(runtime);
    }

    /// From now on the gateway is not ready; what it has accepted still runs.
    pub fn start_drain(&self) {
        self.draining.send_replace(true);
    }

    /// Whether the gateway is on its way out.
    pub fn draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Becomes true when the drain starts.
    pub fn drain_watch(&self) -> watch::Receiver<bool> {
        self.draining.subscribe()
    }

    /// Loads the ranker's directory again, whatever it holds.
    ///
    /// # Errors
    /// As for [`Ranker::reload`]; the old weights go on serving.
    pub async fn reload_ranker(self: &Arc<Self>) -> Result<RankerVersion, RankerError> {
        let gateway = Arc::clone(self);
        // A task of its own: whoever asked may leave in the middle.
        let reloading = tokio::spawn(async move {
            let _one_at_a_time = gateway.reload.lock().await;
            let live = gateway.live();
            let Some(settings) = live.snapshot.ranker.clone() else { return Err(RankerError::Off) };
            let ranker = live.ranker.clone();
            let reloaded = apart(move || ranker.reload(&settings.weights)).await;
            let version = reloaded.inspect_err(|error| tracing::error!("ranker not reloaded, the running one stays: {error}"))?;
            tracing::info!(version = format!("{:08x}", version.0), "ranker reloaded");
            live.pools.iter().for_each(|pool| pool.dispatcher.restore(Learnt::clone(&live.ranker.prior())));
            Ok(version)
        });
        reloading.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }

    /// Goes back to the weights before the present ones.
    ///
    /// # Errors
    /// As for [`Ranker::rollback`].
    pub async fn rollback_ranker(&self) -> Result<RankerVersion, RankerError> {
        let _one_at_a_time = self.reload.lock().await;
        self.live().ranker.rollback()
    }

    /// Writes down what the pools have learnt.
    pub async fn keep(&self) {
        for pool in &self.live().pools {
            pool.keep().await;
        }
    }

    /// Waits until every pool is empty or `within` has passed; see [`Dispatcher::drain`].
    pub async fn drain(&self, within: Duration) -> Drained {
        let live = self.live();
        let mut drains = tokio::task::JoinSet::new();
        for pool in &live.pools {
            let dispatcher = pool.dispatcher.clone();
            drains.spawn(async move { dispatcher.drain(within).await });
        }
        drains.join_all().await.into_iter().fold(Drained { turned_away: 0, running: 0 }, |sum, pool| Drained {
            turned_away: sum.turned_away + pool.turned_away,
            running: sum.running + pool.running,
        })
    }
}

fn started(settings: &config::Pool, seed: u64, state: Option<&Path>, ranker: &Ranker) -> Arc<PoolRuntime> {
    let pool = PoolRuntime::new(settings, seed, state, ranker);
    pool.apply(settings);
    Arc::new(pool)
}

fn unchanged<T: PartialEq + ToString>(field: &'static str, old: T, new: T) -> Result<(), ApplyError> {
    if old == new { Ok(()) } else { Err(ApplyError::Restart { field, old: old.to_string(), new: new.to_string() }) }
}

/// A setting as people read it.
fn shown(setting: Option<impl ToString>) -> String {
    setting.map_or_else(|| "nothing".to_owned(), |setting| setting.to_string())
}

/// The ranker that the next configuration asks for. The running one stays as far as it can.
async fn next_ranker(live: &Live, wanted: Option<&RankerSettings>) -> Result<Ranker, RankerError> {
    let stays = match (&live.snapshot.ranker, wanted) {
        (None, None) => return Ok(live.ranker.clone()),
        (Some(running), Some(wanted)) => {
            RankerSettings { weights: wanted.weights.clone(), shadow: wanted.shadow.clone(), ..running.clone() } == *wanted
        }
        _ => false,
    };
    match wanted {
        Some(wanted) if stays => {
            let (ranker, directory) = (live.ranker.clone(), wanted.weights.clone());
            if apart(move || ranker.follow(&directory)).await? {
                tracing::info!(version = live.ranker.version().map(|version| format!("{:08x}", version.0)), "ranker reloaded");
            }
            Ok(live.ranker.clone())
        }
        wanted => start_ranker(wanted.cloned()).await,
    }
}

/// The tenants that the next configuration knows. Those that are there already go on with what is counted against them.
fn next_tenancy(live: Option<&Live>, snapshot: &Snapshot) -> Option<Tenancy> {
    let before = live.and_then(|live| live.tenancy.as_ref());
    snapshot.keys.as_ref().map(|settings| Tenancy::new(settings, before, Instant::now()))
}

/// The second ranker that the next configuration asks for. The running one goes on where its directory is the same, with what that holds now.
async fn next_shadow(live: Option<&Live>, wanted: Option<&RankerSettings>) -> Result<Option<Arc<Shadow>>, ApplyError> {
    let Some((settings, directory)) = wanted.and_then(|wanted| Some((wanted.clone(), wanted.shadow.clone()?))) else { return Ok(None) };
    let running = live.and_then(|live| {
        let before = live.snapshot.ranker.as_ref()?;
        live.shadow.clone().filter(|_| before.shadow == settings.shadow && before.device == settings.device)
    });
    let failed = |source| ApplyError::Shadow { directory: directory.clone(), source };
    let place = directory.clone();
    match running {
        Some(shadow) => apart(move || shadow.follow(&place).map(|_| Some(shadow))).await.map_err(failed),
        None => apart(move || Shadow::start(&settings, &place)).await.map(|shadow| Some(Arc::new(shadow))).map_err(failed),
    }
}

async fn next_training_log(running: Option<&Live>, next: &Snapshot, metrics: &Metrics) -> Result<Option<Arc<TrainingLog>>, TrainingLogError> {
    let (running, counts) = (running.and_then(|live| live.training_log.as_ref()), metrics.training_rows());
    next_log(running, next.training_log.as_ref(), TrainingLog::settings, |wanted| TrainingLog::start(wanted, counts)).await
}

async fn next_usage_log(running: Option<&Live>, next: &Snapshot, metrics: &Metrics) -> Result<Option<Arc<UsageLog>>, UsageLogError> {
    let (running, lines) = (running.and_then(|live| live.usage_log.as_ref()), metrics.usage_lines());
    next_log(running, next.usage_log.as_ref(), UsageLog::settings, |wanted| UsageLog::start(wanted, lines)).await
}

async fn next_access_log(running: Option<&Live>, next: &Snapshot, metrics: &Metrics) -> Result<Option<Arc<AccessLog>>, AccessLogError> {
    let (running, lines) = (running.and_then(|live| live.access_log.as_ref()), metrics.access_lines());
    next_log(running, next.access_log.as_ref(), AccessLog::settings, |wanted| AccessLog::start(wanted, lines)).await
}

/// The log that the next configuration asks for. The running one goes on if it is the same; opening another reads its file.
async fn next_log<L: Send + Sync + 'static, S: PartialEq + Clone + Send + 'static, E: Send + 'static>(
    running: Option<&Arc<L>>,
    wanted: Option<&S>,
    settings: impl Fn(&L) -> &S,
    start: impl FnOnce(S) -> Result<L, E> + Send + 'static,
) -> Result<Option<Arc<L>>, E> {
    let Some(wanted) = wanted.cloned() else { return Ok(None) };
    match running.filter(|running| *settings(running) == wanted) {
        Some(same) => Ok(Some(Arc::clone(same))),
        None => apart(move || start(wanted)).await.map(|log| Some(Arc::new(log))),
    }
}

async fn keep_every_minute(gateway: Weak<Gateway>) {
    let mut minutes = tokio::time::interval(KEEP);
    minutes.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // The first tick comes at once.
    minutes.tick().await;
    loop {
        minutes.tick().await;
        let Some(gateway) = gateway.upgrade() else { return };
        // From then on the end of the process writes.
        if gateway.draining() {
            return;
        }
        gateway.keep().await;
    }
}

async fn start_ranker(settings: Option<RankerSettings>) -> Result<Ranker, RankerError> {
    match settings {
        None => Ok(Ranker::off()),
        Some(settings) => apart(move || Ranker::start(settings)).await,
    }
}

/// Loading reads and checks tens of megabytes: not on a runtime's worker.
async fn apart<T: Send + 'static>(load: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(load).await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranker::weights::tests::tiny_directory;

    fn snapshot(backends: &[&str]) -> Snapshot {
        let urls: Vec<_> = backends.iter().map(|url| url.parse().unwrap()).collect();
        let any = "127.0.0.1:0".parse().unwrap();
        config::from_backends(&urls, any, any, config::policy("fcfs").unwrap())
    }

    /// Nothing listens on port 9 of this machine: the backends of these tests are never healthy.
    const A: &str = "http://127.0.0.1:9";
    const B: &str = "http://127.0.0.2:9";

    fn ids(live: &Live) -> Vec<(BackendId, String)> {
        live.pools[0].targets().iter().map(|target| (target.backend.id(), target.backend.settings().url.to_string())).collect()
    }

    #[tokio::test]
    async fn a_backend_that_stays_keeps_its_id_and_ids_never_come_back() {
        let gateway = Gateway::start(snapshot(&[A, B])).await.unwrap();
        let before = gateway.live();
        assert_eq!(ids(&before), [(BackendId(0), A.to_owned()), (BackendId(1), B.to_owned())]);
        gateway.apply(snapshot(&[B])).await.unwrap();
        assert_eq!(ids(&gateway.live()), [(BackendId(1), B.to_owned())]);
        gateway.apply(snapshot(&[A, B])).await.unwrap();
        assert_eq!(ids(&gateway.live()), [(BackendId(1), B.to_owned()), (BackendId(2), A.to_owned())]);
        assert!(Arc::ptr_eq(&before.pools[0], &gateway.live().pools[0]), "the pool and its queue are the same all along");
    }

    #[tokio::test]
    async fn what_needs_a_restart_changes_nothing() {
        let gateway = Gateway::start(snapshot(&[A])).await.unwrap();
        let moved = Snapshot { listen: "127.0.0.1:1".parse().unwrap(), ..snapshot(&[A, B]) };
        let error = gateway.apply(moved).await.unwrap_err();
        assert!(matches!(error, ApplyError::Restart { field: "listen", .. }), "{error}");
        let error = gateway.apply(Snapshot { threads: 7, ..snapshot(&[A, B]) }).await.unwrap_err();
        assert!(matches!(error, ApplyError::Restart { field: "threads", .. }), "{error}");
        let error = gateway.apply(Snapshot { state: Some("/var/lib/x".into()), ..snapshot(&[A, B]) }).await.unwrap_err();
        assert!(error.to_string().starts_with("state: cannot change from nothing to /var/lib/x while running"), "{error}");
        assert_eq!(ids(&gateway.live()).len(), 1);
    }

    #[tokio::test]
    async fn a_reload_changes_the_share_of_traces_and_not_where_they_go() {
        let otlp = |endpoint: &str, sample| config::Otlp { endpoint: endpoint.to_owned(), sample, service_name: "headway".to_owned() };
        let with = |otlp| Snapshot { otlp, ..snapshot(&[A]) };
        let gateway = Gateway::start(with(Some(otlp(A, 0.0)))).await.unwrap();
        let recorded = || gateway.tracer.as_ref().unwrap().begin(&mut http::HeaderMap::new(), tokio::time::Instant::now()).is_some();
        assert!(!recorded());
        gateway.apply(with(Some(otlp(A, 1.0)))).await.unwrap();
        assert!(recorded());
        for refused in [Some(otlp(B, 0.0)), None] {
            let error = gateway.apply(with(refused)).await.unwrap_err();
            assert!(matches!(error, ApplyError::Restart { field: "telemetry.otlp.endpoint", .. }), "{error}");
            assert!(recorded());
        }
    }

    #[tokio::test]
    async fn clients_cannot_make_the_table_of_models_grow() {
        let gateway = Gateway::start(snapshot(&[A])).await.unwrap();
        let live = gateway.live();
        let first = live.route("model 0").unwrap().model;
        for index in 1..MAX_MODELS + 10 {
            live.route(&format!("model {index}")).unwrap();
        }
        assert_eq!(live.pools[0].models.load().len(), MAX_MODELS);
        assert_eq!(live.route("model 0").unwrap().model, first);
        assert_eq!(live.route("one too many").unwrap().model, ModelId(0), "shared by all that came too late");
    }

    fn with_ranker(weights: &Path) -> Snapshot {
        let ranker = RankerSettings {
            weights: weights.to_owned(),
            device: config::Device::Cpu,
            deadline: Some(Duration::from_secs(60)),
            threads: 1,
            shadow: None,
        };
        Snapshot { ranker: Some(ranker), ..snapshot(&[A]) }
    }

    #[tokio::test]
    async fn a_reload_follows_the_rankers_directory_and_a_damaged_one_changes_nothing() {
        let (first, second) = (tiny_directory(1), tiny_directory(2));
        let gateway = Gateway::start(with_ranker(first.path())).await.unwrap();
        let version = || gateway.live().ranker.version();
        let before = version();
        gateway.apply(with_ranker(first.path())).await.unwrap();
        assert_eq!(version(), before);
        // The same place with other weights, then another place.
        for file in ["model.safetensors", "card.json"] {
            std::fs::copy(second.path().join(file), first.path().join(file)).unwrap();
        }
        gateway.apply(with_ranker(first.path())).await.unwrap();
        let after = version();
        assert_ne!(after, before);
        gateway.apply(with_ranker(second.path())).await.unwrap();
        assert_eq!(version(), after);
        assert_eq!(gateway.live().ranker.previous(), before);

        std::fs::write(first.path().join("model.safetensors"), b"damaged").unwrap();
        std::fs::write(first.path().join("card.json"), std::fs::read(tiny_directory(3).path().join("card.json")).unwrap()).unwrap();
        let error = gateway.apply(with_ranker(first.path())).await.unwrap_err();
        assert!(matches!(error, ApplyError::Ranker(RankerError::Hash { .. })), "{error}");
        assert_eq!(version(), after);
    }

    #[tokio::test]
    async fn what_a_pool_has_learnt_is_there_after_a_restart() {
        let state = tempfile::tempdir().unwrap();
        let place = state.path().join("not/there/yet");
        let with_state = || Snapshot { state: Some(place.clone()), ..snapshot(&[A]) };
        let gateway = Gateway::start(with_state()).await.unwrap();
        let live = gateway.live();
        let model = live.route("llama").unwrap().model;
        let sample = |output| crate::scheduler::Sample { model: Some(model), score: None, output, cut: false };
        live.pools[0].dispatcher.restore(Learnt {
            scores: Vec::new(),
            samples: (0..500).map(|n| sample(1000 + n % 2)).collect(),
            gamma: Some(0.02),
            speed: None,
        });
        gateway.keep().await;

        let gateway = Gateway::start(with_state()).await.unwrap();
        let live = gateway.live();
        let view = live.pools[0].dispatcher.view().await.unwrap();
        let known = view.models.iter().find(|known| known.model == live.route("llama").unwrap().model).unwrap();
        assert!(known.samples > 400.0 && (known.mean_output / 1000.0 - 1.0).abs() < 0.2, "{known:?}");
        assert_eq!(live.pools[0].dispatcher.learnt().await.unwrap().gamma, Some(0.02));

        let file = state.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = Gateway::start(Snapshot { state: Some(file.join("below")), ..snapshot(&[A]) }).await.err().unwrap();
        assert!(matches!(error, ApplyError::State { .. }), "{error}");
    }

    #[tokio::test]
    async fn an_empty_gateway_drains_at_once() {
        let gateway = Gateway::start(snapshot(&[A])).await.unwrap();
        assert!(!gateway.draining());
        gateway.start_drain();
        assert!(gateway.draining());
        assert_eq!(gateway.drain(Duration::from_secs(60)).await, Drained { turned_away: 0, running: 0 });
    }
}
