//! One backend: what is configured, what was learnt, how it is doing. The only place that tells the pool's dispatcher about it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::engines::{Capacity, EngineKind, Identity, TOLERANCE, UNKNOWN_SLOTS};
use super::health::{Health, Observation, Probe, Siblings, Tolerance};
use super::pulse::Pulse;
use crate::config::{BackendSettings, BackendUrl};
use crate::scheduler::{BackendId, BackendState, Load, Slots, Standing, Tokens};

/// Where news of a backend go: its pool's dispatcher. Both calls return at once.
pub trait Listener: Send + 'static {
    /// It joined, or what is known of it changed.
    fn backend_changed(&self, backend: BackendId, state: BackendState);
    /// The engine's own numbers, as of now.
    fn load_reported(&self, backend: BackendId, load: Load);
}

/// A configured backend. Shared by the edge, which reports how attempts went, and the tasks that watch it.
pub struct Backend {
    id: BackendId,
    settings: BackendSettings,
    shared: Arc<Shared>,
}

/// What survives a change of the settings.
struct Shared {
    state: Mutex<State>,
    /// A probe is wanted now.
    probe: Notify,
    pulse: Pulse,
    /// A sign of life is news.
    wedged: AtomicBool,
    /// How often it was ejected as wedged: what waits for its answer goes elsewhere then.
    given_up: watch::Sender<u64>,
}

struct State {
    health: Health,
    /// As the newest configuration has them; [`Backend::settings`] are those of one snapshot.
    settings: BackendSettings,
    engine: Option<EngineKind>,
    models: Arc<Vec<String>>,
    capacity: Capacity,
    /// An operator took it out.
    drained: bool,
    /// It left the pool: nothing is told of it any more.
    gone: bool,
    listener: Option<Box<dyn Listener>>,
    /// What the listener heard last.
    told: Option<BackendState>,
    load: Load,
    load_at: Option<Instant>,
    /// When a request was last seen, for how often the load is worth reading.
    traffic_at: Option<Instant>,
    error: Option<String>,
    /// Since when it is wedged.
    wedged_since: Option<Instant>,
    /// Its health as it was last looked at.
    was: Standing,
}

/// What operators see of a backend.
#[derive(Clone, Debug, PartialEq)]
pub struct BackendView {
    pub id: BackendId,
    pub url: BackendUrl,
    /// `None`: not found out yet.
    pub engine: Option<EngineKind>,
    pub standing: Standing,
    /// Drained by an operator.
    pub drained: bool,
    pub models: Arc<Vec<String>>,
    /// Its window's setting, as told to the scheduler.
    pub slots: Slots,
    /// Tokens that fit its KV cache, where known.
    pub kv_tokens: Option<u64>,
    /// Longest context it serves, where known.
    pub context_tokens: Option<Tokens>,
    /// The engine's own numbers, unknown where they are too old.
    pub load: Load,
    /// The last failure of a probe or a metrics page, until one succeeds.
    pub error: Option<String>,
    /// It held requests and gave no sign for longer than can be explained, and has given none since.
    pub wedged: bool,
}

/// A request that was sent to a backend: there until it is dropped. Told of the signs of life that come.
pub struct Beat {
    shared: Arc<Shared>,
    streamed: bool,
    work: Duration,
    given_up: watch::Receiver<u64>,
}

impl Beat {
    /// A piece of its answer came, if it went well; comments are none.
    pub fn sign(&self) {
        self.shared.pulse.sign(Instant::now());
        if self.shared.wedged.load(Ordering::Relaxed) {
            self.shared.probe.notify_one();
        }
    }

    /// Resolves when the backend has been ejected as wedged, and another one should be tried.
    pub async fn given_up(&mut self) {
        // The sender is in `shared`.
        _ = self.given_up.changed().await;
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        self.shared.pulse.ends(self.streamed, self.work, Instant::now());
    }
}

impl Backend {
    /// A backend nothing is known of. `siblings` is the pool's, shared by all of its backends.
    pub fn new(id: BackendId, settings: BackendSettings, siblings: &Siblings) -> Backend {
        let state = State {
            health: Health::new(siblings.clone()),
            settings: settings.clone(),
            engine: settings.engine,
            models: Arc::default(),
            capacity: Capacity::default(),
            drained: false,
            gone: false,
            listener: None,
            told: None,
            load: Load::default(),
            load_at: None,
            traffic_at: None,
            error: None,
            wedged_since: None,
            was: Standing::Probing,
        };
        let shared = Shared {
            state: Mutex::new(state),
            probe: Notify::new(),
            pulse: Pulse::new(Instant::now()),
            wedged: AtomicBool::new(false),
            given_up: watch::Sender::new(0),
        };
        Backend { id, settings, shared: Arc::new(shared) }
    }

    /// The same backend with other settings: it keeps its id, its standing and what was learnt. Its address must be the same.
    pub fn reconfigured(&self, settings: BackendSettings) -> Backend {
        let mut state = self.state();
        if settings.engine.is_some() {
            state.engine = settings.engine;
        }
        state.settings = settings.clone();
        self.tell(&mut state);
        Backend { id: self.id, settings, shared: Arc::clone(&self.shared) }
    }

    /// Its id in the pool.
    pub fn id(&self) -> BackendId {
        self.id
    }

    /// What is configured.
    pub fn settings(&self) -> &BackendSettings {
        &self.settings
    }

    /// The engine family; `None` until it is found out.
    pub fn engine(&self) -> Option<EngineKind> {
        self.state().engine
    }

    /// The models it serves, as its own list says; empty until it was read.
    pub fn models(&self) -> Arc<Vec<String>> {
        Arc::clone(&self.state().models)
    }

    /// Whether it has been looked at, well or not.
    pub fn known(&self) -> bool {
        self.state().health.known()
    }

    /// A request is sent to it; `streamed` if its answer comes in pieces, `work` in seconds of its capacity, as expected.
    pub fn begins(&self, streamed: bool, work: f64) -> Beat {
        let work = Duration::try_from_secs_f64(work).unwrap_or_default();
        self.shared.pulse.begins(streamed, work, Instant::now());
        Beat { shared: Arc::clone(&self.shared), streamed, work, given_up: self.shared.given_up.subscribe() }
    }

    /// The edge says how an attempt went.
    pub fn observe(&self, observation: Observation) {
        let mut state = self.state();
        state.traffic_at = Some(Instant::now());
        if let Observation::Silent(span) = observation
            && !self.shared.pulse.is_silent_for(span, Instant::now())
        {
            // One slow request among others that progress says nothing against the backend.
            return;
        }
        let tolerance = state.tolerance();
        let probe = state.health.observed(observation, tolerance);
        self.tell(&mut state);
        if probe {
            self.shared.probe.notify_one();
        }
    }

    /// Looks for signs of life. Whether it has been ejected just now for giving none.
    pub(super) fn look(&self) -> bool {
        let mut state = self.state();
        let (now, pulse) = (Instant::now(), &self.shared.pulse);
        if state.wedged_since.is_some_and(|since| !pulse.is_silent_for(now.saturating_duration_since(since), now)) {
            state.health.gives_signs();
        }
        let silence = state.settings.wedged_after;
        let ejected = pulse.silence(silence, now) == Some(Duration::ZERO) && state.health.wedges(silence);
        if ejected {
            // Whatever it is tried with later has the same time as the first.
            pulse.forget(now);
        }
        self.tell(&mut state);
        ejected
    }

    /// Takes it out for an operator, or puts it back.
    pub fn set_drained(&self, drained: bool) {
        let mut state = self.state();
        state.drained = drained;
        self.tell(&mut state);
        self.shared.probe.notify_one();
    }

    /// It leaves the pool for good. What runs there may finish.
    pub fn leave(&self) {
        let mut state = self.state();
        state.gone = true;
        self.tell(&mut state);
        // Whatever a task finds out from now on is nobody's business.
        state.listener = None;
    }

    /// What operators see.
    pub fn view(&self) -> BackendView {
        let state = self.state();
        let BackendState { standing, slots, kv_tokens, context_tokens, .. } = state.news();
        BackendView {
            id: self.id,
            url: self.settings.url.clone(),
            engine: state.engine,
            standing,
            drained: state.drained,
            models: Arc::clone(&state.models),
            slots,
            kv_tokens,
            context_tokens,
            load: state.load,
            error: match state.wedged_since {
                Some(since) => Some(format!("wedged for {} s: it holds requests and gives no sign of life", since.elapsed().as_secs())),
                None => state.error.clone(),
            },
            wedged: state.wedged_since.is_some(),
        }
    }

    /// Sends news to `listener` from now on, beginning with how things stand.
    pub(super) fn listen(&self, listener: Box<dyn Listener>) {
        let mut state = self.state();
        if state.gone {
            return;
        }
        state.listener = Some(listener);
        state.told = None;
        self.tell(&mut state);
    }

    /// Whether a probe that finds it well should also ask what runs there: at the start, and when it comes back, possibly as something else.
    pub(super) fn wants_identity(&self) -> bool {
        let state = self.state();
        !state.health.known() || state.health.standing() == Standing::Ejected || state.engine.is_none()
    }

    /// What runs there. `again`: it was known and stayed up, so a question that went unanswered now keeps its earlier answer.
    pub(super) fn identified(&self, mut identity: Identity, again: bool) {
        let mut state = self.state();
        if again {
            identity.capacity = identity.capacity.or(state.capacity);
        }
        state.engine = Some(identity.kind);
        if *state.models != identity.models {
            state.models = Arc::new(identity.models);
        }
        state.capacity = identity.capacity;
        self.tell(&mut state);
    }

    /// How a probe went; `error` says why it failed.
    pub(super) fn probed(&self, probe: Probe, error: Option<String>) {
        let mut state = self.state();
        let tolerance = state.tolerance();
        state.health.probed(probe, tolerance);
        state.error = error;
        self.tell(&mut state);
    }

    /// The settings of the newest configuration, also for tasks that began under an older one.
    pub(super) fn newest_settings(&self) -> BackendSettings {
        self.state().settings.clone()
    }

    /// How long to wait for the next probe, before jitter.
    pub(super) fn next_probe(&self) -> Duration {
        self.state().health.next_probe()
    }

    /// Resolves when a probe is wanted before its time.
    pub(super) async fn probe_wanted(&self) {
        self.shared.probe.notified().await;
    }

    /// The engine's numbers; unknown ones once what was known is too old.
    pub(super) fn load_read(&self, load: Load) {
        let mut state = self.state();
        if load == Load::default() && state.load == load {
            return;
        }
        state.load = load;
        state.load_at = Some(Instant::now());
        if let Some(listener) = &state.listener {
            listener.load_reported(self.id, load);
        }
    }

    /// The metrics page could not be read. Numbers older than `limit` become unknown; a broken connection asks for a probe.
    pub(super) fn load_failed(&self, error: String, broken: bool, limit: Duration) {
        let stale = {
            let mut state = self.state();
            state.error = Some(error);
            state.load_at.is_some_and(|at| at.elapsed() > limit)
        };
        if stale {
            self.load_read(Load::default());
        }
        if broken {
            self.shared.probe.notify_one();
        }
    }

    /// Whether requests were seen within `span`, here or in the engine.
    pub(super) fn busy(&self, span: Duration) -> bool {
        let state = self.state();
        state.traffic_at.is_some_and(|at| at.elapsed() < span) || state.load.running.unwrap_or(0) > 0 || state.load.waiting.unwrap_or(0) > 0
    }

    /// Tells the listener what it does not know yet.
    fn tell(&self, state: &mut State) {
        self.note_wedge(state);
        let news = state.news();
        if state.told.as_ref() == Some(&news) {
            return;
        }
        if let Some(listener) = &state.listener {
            if state.told.as_ref().is_none_or(|told| told.standing != news.standing) {
                tracing::info!(backend = %state.settings.url, standing = ?news.standing, error = state.error.as_deref(), "backend");
            }
            listener.backend_changed(self.id, news.clone());
            state.told = Some(news);
        }
    }

    fn note_wedge(&self, state: &mut State) {
        let (wedged, standing) = (state.health.is_wedged(), state.health.standing());
        let was = std::mem::replace(&mut state.was, standing);
        if wedged != state.wedged_since.is_some() {
            state.wedged_since = wedged.then(Instant::now);
            self.shared.wedged.store(wedged, Ordering::Relaxed);
            match wedged {
                true => tracing::warn!(backend = %state.settings.url, ?standing, "wedged: it holds requests and gives no sign of life"),
                false => tracing::info!(backend = %state.settings.url, ?standing, "no longer wedged"),
            }
        }
        if wedged && standing == Standing::Ejected && was != Standing::Ejected {
            self.shared.given_up.send_modify(|times| *times += 1);
        }
    }

    /// The state is only ever replaced by whole values under the lock, so what a panicking holder left behind is still sound.
    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn tolerance(&self) -> Tolerance {
        self.engine.map_or(TOLERANCE, EngineKind::tolerance)
    }

    fn standing(&self) -> Standing {
        if self.gone {
            Standing::Gone
        } else if self.drained {
            Standing::Draining
        } else {
            self.health.standing()
        }
    }

    fn news(&self) -> BackendState {
        BackendState {
            standing: self.standing(),
            slots: self.slots(),
            weight: self.settings.weight,
            kv_tokens: self.settings.kv_tokens.or(self.capacity.kv_tokens),
            context_tokens: self.capacity.context_tokens,
            prefix_cache: self.settings.prefix_cache.or(self.capacity.prefix_cache).unwrap_or(true),
        }
    }

    fn slots(&self) -> Slots {
        self.settings.slots.unwrap_or_else(|| self.engine.map_or(UNKNOWN_SLOTS, |engine| engine.auto_slots(self.capacity.slots)))
    }
}
