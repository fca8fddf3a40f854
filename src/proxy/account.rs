//! What is known of one request, from its head to its end; told to telemetry when it is dropped, once.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::request::Parts;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use tokio::time::Instant;

use super::api::Api;
use super::response::Failure;
use super::stream::{Finish, Seen};
use crate::config::Pool;
use crate::dispatcher::{Asker, Ticket};
use crate::fleet::Observation;
use crate::gateway::{Gateway, Target};
use crate::ranker::{Neutral, Opinion, Pending, PromptText};
use crate::row_log;
use crate::scheduler::{Facts, Scored, Time, Tokens};
use crate::telemetry::{self, Line, Outcome, Resume, Stage, Trace};
use crate::tenancy::{Admission, Known, Place, Refused, Room, Tenant};
use crate::training_log::TrainingLog;
use crate::usage_log::{Usage, UsageLog, Written};

/// What an answer is called in which the backend told of an error.
pub const ERROR_IN_STREAM: &str = "error_in_stream";
/// Bytes of a path in the usage log.
const LONGEST_PATH: usize = 256;
/// What a client that left is called, here and in nginx's log.
const CLIENT_LEFT: (u16, &str) = (499, "client_left");

/// One request's story so far. Until something else is said, its client has left.
pub struct Account {
    gateway: Arc<Gateway>,
    from: IpAddr,
    started: Instant,
    method: Method,
    path: Cow<'static, str>,
    request_id: HeaderValue,
    /// Present where the request is recorded.
    trace: Option<Box<Trace>>,
    api: Api,
    tenant: Option<Arc<Tenant>>,
    /// Where what shows its key waits, if that has limits.
    room: Option<Room>,
    /// What it holds of its tenant's limits.
    admission: Option<Admission>,
    model: String,
    streamed: bool,
    pool: Option<Arc<Pool>>,
    /// The pool that the model belongs to, where another one took over, and the model that the latter serves instead.
    fell_from: Option<Arc<Pool>>,
    instead: Option<String>,
    target: Option<Arc<Target>>,
    queued: Option<Duration>,
    released: Option<Duration>,
    first_token: Option<Duration>,
    score: Option<f32>,
    scoring: Option<&'static str>,
    predicted_tokens: Option<u32>,
    work: Option<f64>,
    boost: Option<i64>,
    aged: bool,
    stolen: bool,
    /// Attempts before the answer began.
    attempts: u32,
    /// Backends that went on with it.
    resumed: u32,
    /// Why nobody went on with it.
    not_resumed: Option<&'static str>,
    /// The client has the answer's head.
    goes_on: bool,
    prompt_tokens: Option<u32>,
    output_tokens: u32,
    /// They are the backend's own counts.
    counted: bool,
    /// Output tokens that it can have at most: a backend that counts more has miscounted.
    most_output: Tokens,
    /// The answer said that it ended by itself.
    stopped: bool,
    /// What the ranker that serves said, and the question to its shadow.
    compared: Option<(Scored, Pending)>,
    /// Where its length is to be noted, and for which prompt.
    noted: Option<Box<(Arc<TrainingLog>, PromptText)>>,
    /// Where its usage is to be written down; gone once that is done.
    usage_log: Option<Arc<UsageLog>>,
    /// What whoever waits for its answer wants to know.
    awaited: Option<Arc<Awaited>>,
    status: u16,
    reason: &'static str,
    /// The backend's answer and what its status is called.
    answer: (u16, &'static str),
}

/// What whoever waits for an answer is told of it.
#[derive(Default)]
pub struct Awaited {
    /// It will be a stream of events.
    streams: AtomicBool,
    /// Its place in a queue.
    place: Mutex<Option<Asker>>,
}

impl Awaited {
    pub fn streams(&self) -> bool {
        self.streams.load(Ordering::Relaxed)
    }

    /// Who can be asked when it is its turn, while it waits for one.
    pub fn place(&self) -> Option<Asker> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn queued(&self, place: Option<Asker>) {
        *self.place.lock().unwrap_or_else(PoisonError::into_inner) = place;
    }
}

impl Account {
    /// A request whose head has come. Where traces are recorded, the head says afterwards which one it belongs to.
    pub fn open(gateway: &Arc<Gateway>, head: &mut Parts, request_id: HeaderValue, from: IpAddr) -> Box<Account> {
        let started = Instant::now();
        Box::new(Account {
            gateway: Arc::clone(gateway),
            from,
            started,
            trace: gateway.tracer.as_ref().and_then(|tracer| tracer.begin(&mut head.headers, started)),
            method: head.method.clone(),
            // A copy: a slice of the head would keep the whole of its buffer for as long as the answer streams.
            path: known_path(head.uri.path()).map_or_else(|| Cow::Owned(head.uri.path().to_owned()), Cow::Borrowed),
            request_id,
            api: Api::Other,
            tenant: None,
            room: None,
            admission: None,
            model: String::new(),
            streamed: false,
            pool: None,
            fell_from: None,
            instead: None,
            target: None,
            queued: None,
            released: None,
            first_token: None,
            score: None,
            scoring: None,
            predicted_tokens: None,
            work: None,
            boost: None,
            aged: false,
            stolen: false,
            attempts: 0,
            resumed: 0,
            not_resumed: None,
            goes_on: false,
            prompt_tokens: None,
            output_tokens: 0,
            counted: false,
            most_output: Tokens::MAX,
            stopped: false,
            compared: None,
            noted: None,
            usage_log: None,
            awaited: None,
            status: CLIENT_LEFT.0,
            reason: CLIENT_LEFT.1,
            answer: CLIENT_LEFT,
        })
    }

    /// Where its connection comes from.
    pub fn from(&self) -> IpAddr {
        self.from
    }

    /// When its head came.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Its id as text.
    pub fn request_id(&self) -> &str {
        // It was made here, or looked at as text before it was kept.
        self.request_id.to_str().unwrap_or_default()
    }

    /// Its id as a header.
    pub fn request_id_header(&self) -> &HeaderValue {
        &self.request_id
    }

    pub fn api(&self) -> Api {
        self.api
    }

    pub fn speaks(&mut self, api: Api) {
        self.api = api;
    }

    /// Its key is this one.
    pub fn belongs_to(&mut self, known: &Known) {
        (self.tenant, self.room) = (Some(Arc::clone(&known.tenant)), known.room.clone());
    }

    /// Takes a place among those that wait, of its key, its tenant and its `model`, until they are dropped: however the wait ends.
    ///
    /// # Errors
    /// Too much waits already. Who has waited before is not refused.
    pub fn takes_places(&self, model: Option<Room>, bytes: u64) -> Result<[Option<Place>; 3], Refused> {
        let enter = |room: Option<&Room>| room.map(|room| room.enter(bytes, self.queued.is_some(), Instant::now())).transpose();
        Ok([enter(self.room.as_ref())?, enter(self.tenant().and_then(Tenant::room))?, enter(model.as_ref())?])
    }

    /// Whose request it is, where keys are asked for.
    pub fn tenant(&self) -> Option<&Tenant> {
        self.tenant.as_deref()
    }

    /// Takes what it needs of its tenant's limits; `input` and `most` as of [`Tenant::admit`].
    ///
    /// # Errors
    /// The tenant may not use the model, or not now.
    pub fn admit(&mut self, input: Tokens, most: Tokens) -> Result<(), Refused> {
        self.most_output = most;
        let Some(tenant) = &self.tenant else { return Ok(()) };
        if !tenant.may_use(&self.model) {
            return Err(Refused::Model(self.model.clone()));
        }
        self.admission = Some(tenant.admit(input, most, Instant::now())?);
        Ok(())
    }

    /// How the tenant's limits stand, as headers.
    pub fn explain_limits(&self, headers: &mut HeaderMap) {
        if let Some(tenant) = &self.tenant {
            tenant.explain(headers);
        }
    }

    /// Whoever has this waits for its answer.
    pub fn is_awaited(&mut self, awaited: Arc<Awaited>) {
        self.awaited = Some(awaited);
    }

    /// Its answer will be a stream of events, unless something goes wrong.
    pub fn streams(&self) {
        if let Some(awaited) = &self.awaited {
            awaited.streams.store(true, Ordering::Relaxed);
        }
    }

    /// It has a place in a queue.
    pub fn queues(&self, ticket: &Ticket) {
        if let Some(awaited) = &self.awaited {
            awaited.queued(Some(ticket.asker()));
        }
    }

    pub fn asks_for(&mut self, model: String, streamed: bool) {
        (self.model, self.streamed) = (model, streamed);
    }

    /// The model as the client named it.
    pub fn model(&self) -> &str {
        &self.model
    }

    pub fn goes_to(&mut self, pool: &Arc<Pool>) {
        self.pool = Some(Arc::clone(pool));
    }

    /// No backend of its pool could serve it: now one of this pool is tried, whose backends know the model as `upstream`.
    pub fn falls_back(&mut self, pool: &Arc<Pool>, upstream: &str) {
        self.instead = Some(upstream.to_owned());
        let before = self.pool.replace(Arc::clone(pool));
        self.fell_from = self.fell_from.take().or(before);
    }

    pub fn scored(&mut self, opinion: &Opinion) {
        self.scoring = Some(match opinion {
            Opinion::Scored(scored) => {
                self.score = Some(scored.score.get());
                "scored"
            }
            Opinion::Neutral(Neutral::Off) => "off",
            Opinion::Neutral(Neutral::Deadline) => "deadline",
            Opinion::Neutral(Neutral::Busy) => "busy",
            Opinion::Neutral(Neutral::Failed) => "failed",
        });
    }

    /// If it is answered, the length of the answer says which ranker was right.
    pub fn is_compared(&mut self, serving: Scored, shadow: Pending) {
        self.compared = Some((serving, shadow));
    }

    /// If it is answered, the length of the answer is to be noted.
    pub fn is_noted(&mut self, log: &Arc<TrainingLog>, text: PromptText) {
        self.noted = Some(Box::new((Arc::clone(log), text)));
    }

    /// It waited this long for a slot, in addition to earlier waits.
    pub fn waited(&mut self, wait: Duration) {
        if let Some(awaited) = &self.awaited {
            awaited.queued(None);
        }
        *self.queued.get_or_insert_default() += wait;
    }

    /// It goes on to this stage.
    pub fn enters(&mut self, stage: Stage) {
        if let Some(trace) = &mut self.trace {
            trace.enters(stage);
        }
    }

    /// It has got a slot on a backend, having arrived at this time of the pool's clock.
    pub fn released(&mut self, target: &Arc<Target>, facts: Facts, arrived: Time) {
        self.target = Some(Arc::clone(target));
        if !self.goes_on {
            (self.aged, self.stolen) = (facts.aged, facts.stolen);
            self.released = Some(self.started.elapsed());
            (self.predicted_tokens, self.work) = (Some(facts.expected_output), Some(facts.work));
            self.boost = i64::try_from(arrived.as_micros()).ok().map(|arrived| arrived.saturating_sub(facts.boosted_arrival));
            self.attempts += 1;
        }
        if let Some(trace) = &mut self.trace {
            trace.released(&target.backend.settings().url);
        }
    }

    /// It is sent to the backend with these headers.
    pub fn sent(&mut self, headers: &mut HeaderMap) {
        if let Some(trace) = &mut self.trace {
            trace.sent(headers);
        }
    }

    /// The attempt on this backend failed, for this reason.
    pub fn failed(&mut self, reason: &'static str) {
        if let Some(trace) = &mut self.trace {
            trace.failed(reason);
        }
    }

    /// How long it waited for slots.
    pub fn queued(&self) -> Duration {
        self.queued.unwrap_or_default()
    }

    pub fn score(&self) -> Option<f32> {
        self.score
    }

    /// The backend that it was sent to last learns how that went.
    pub fn observe(&self, observation: Observation) {
        if let Some(target) = &self.target {
            target.backend.observe(observation);
        }
    }

    /// The backend learns why its answer does not come to its end.
    pub fn broke_off(&self, failure: &Failure) {
        match failure {
            Failure::CutShort => self.observe(Observation::Transport),
            Failure::InterChunk(after) => self.observe(Observation::Silent(*after)),
            _ => {}
        }
    }

    /// The backend's answer has begun.
    pub fn answered(&mut self, status: StatusCode) {
        if let Some(trace) = &mut self.trace {
            trace.answered(status.as_u16());
        }
        if self.goes_on {
            return;
        }
        self.answer = (
            status.as_u16(),
            match status {
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => "backend_busy",
                status if status.is_server_error() => "backend_error",
                status if status.is_client_error() => "backend_refused",
                _ => "ok",
            },
        );
    }

    /// What comes from now on belongs to an answer that has begun: the client has been told its status.
    pub fn goes_on(&mut self) {
        self.goes_on = true;
    }

    /// Whether the client has the beginning of the answer already: what another backend says instead is no answer to it.
    pub fn has_begun(&self) -> bool {
        self.goes_on
    }

    /// The backend of its answer died, and this is what became of it.
    pub fn resumed(&mut self, how: Resume) {
        match how {
            Resume::Resumed => self.resumed += 1,
            why => self.not_resumed = Some(why.as_str()),
        }
    }

    /// The first token has come, if it has not before.
    pub fn first_token(&mut self) {
        if self.first_token.is_none() {
            self.first_token = Some(self.started.elapsed());
        }
    }

    /// What the answer told of its tokens.
    pub fn tokens(&mut self, seen: &Seen) {
        self.output_tokens = seen.output();
        self.prompt_tokens = seen.prompt_tokens;
        self.counted = seen.is_counted();
        self.stopped = seen.finish == Some(Finish::Stopped);
    }

    /// Whether a backend has worked on it, if it ends for this reason, rather than refused it or not been reached.
    fn has_run(&self, reason: &str) -> bool {
        const CUT_OFF: [&str; 4] = [CLIENT_LEFT.1, "first_byte_timeout", "inter_chunk_timeout", "total_timeout"];
        self.output_tokens > 0 || self.target.is_some() && (reason == "ok" || CUT_OFF.contains(&reason))
    }

    /// What it uses is written down.
    pub fn is_written_down(&mut self, log: &Arc<UsageLog>) {
        self.usage_log = Some(Arc::clone(log));
    }

    /// The answer is complete but for the last of it, which is not to reach the client before its usage is written down. `None`: nothing has to be.
    pub fn seal(&mut self, is_error: bool) -> Option<Written> {
        let reason = if is_error { ERROR_IN_STREAM } else { self.answer.1 };
        if !self.has_run(reason) {
            return None;
        }
        let log = self.usage_log.take()?;
        Some(log.write(&self.usage(reason)))
    }

    fn usage<'a>(&'a self, reason: &'a str) -> Usage<'a> {
        Usage {
            time: row_log::now(),
            id: self.request_id(),
            tenant: self.tenant.as_ref().map(|tenant| tenant.name()),
            model: &self.model,
            upstream_model: self.upstream_model(),
            pool: self.pool.as_ref().map(|pool| pool.name.as_str()),
            // A path of a client's own making may be as long as a head.
            path: self.path.get(..LONGEST_PATH).unwrap_or(&self.path),
            reason,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens.min(self.most_output),
            counted: self.counted,
            resumed: self.resumed,
        }
    }

    /// The model as the backends of its pool know it.
    fn upstream_model(&self) -> Option<&str> {
        if let Some(instead) = &self.instead {
            return Some(instead);
        }
        let alias = self.pool.as_ref()?.models.iter().find(|(name, _)| *name == self.model);
        Some(alias.and_then(|(_, upstream)| upstream.as_deref()).unwrap_or(&self.model))
    }

    /// The backend's answer is complete.
    pub fn succeeded(&mut self) {
        (self.status, self.reason) = self.answer;
    }

    /// The backend's answer ended in this way after it had begun.
    pub fn ended(&mut self, reason: &'static str) {
        (self.status, self.reason) = (self.answer.0, reason);
    }

    /// The gateway answered itself.
    pub fn told(&mut self, status: StatusCode, reason: &'static str) {
        (self.status, self.reason) = (status.as_u16(), reason);
    }
}

/// The same path for as long as the process lives, if it is a common one.
fn known_path(path: &str) -> Option<&'static str> {
    const COMMON: [&str; 5] = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"];
    COMMON.into_iter().find(|common| *common == path)
}

/// What is asked for and whose API is spoken, in the words of OpenTelemetry's GenAI conventions.
fn operation(api: Api, path: &str) -> (Option<&'static str>, &'static str) {
    match api {
        Api::Chat | Api::Responses => (Some("chat"), "openai"),
        Api::Completions => (Some("text_completion"), "openai"),
        Api::Messages => ((path == "/v1/messages").then_some("chat"), "anthropic"),
        Api::Other => ((path == "/v1/embeddings").then_some("embeddings"), "openai"),
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        if let Some(log) = self.usage_log.take().filter(|_| self.has_run(self.reason)) {
            log.note(&self.usage(self.reason));
        }
        let admission = self.admission.take();
        let (trace, noted, compared) = (self.trace.take(), self.noted.take(), self.compared.take());
        let (operation, provider) = operation(self.api, &self.path);
        let backend = self.target.as_ref().map(|target| target.connections.host());
        let outcome = Outcome {
            request_id: self.request_id(),
            trace: trace.as_ref().map(|trace| trace.id()),
            method: self.method.as_str(),
            path: &self.path,
            operation,
            provider,
            tenant: self.tenant.as_ref().map(|tenant| tenant.name()),
            streamed: self.streamed,
            model: &self.model,
            upstream_model: trace.as_ref().filter(|_| self.reason == "ok").and_then(|_| self.upstream_model()),
            pool: self.pool.as_ref().map(|pool| pool.name.as_str()),
            fell_from: self.fell_from.as_ref().map(|pool| pool.name.as_str()),
            backend: backend.and_then(|host| host.to_str().ok()),
            status: self.status,
            reason: self.reason,
            queued: self.queued,
            released: self.released,
            first_token: self.first_token,
            total: self.started.elapsed(),
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            max_output: self.pool.as_ref().and_then(|pool| (1..pool.limits.max_output).contains(&self.most_output).then_some(self.most_output)),
            score: self.score,
            scoring: self.scoring,
            predicted_tokens: self.predicted_tokens,
            work: self.work,
            boost: self.boost,
            aged: self.aged,
            stolen: self.stolen,
            retries: self.attempts.saturating_sub(1),
            resumed: self.resumed,
            not_resumed: self.not_resumed,
        };
        if let Some(admission) = admission.filter(|_| self.has_run(self.reason)) {
            admission.used(self.prompt_tokens, self.output_tokens.min(self.most_output));
        }
        let is_learnt_from =
            (noted.is_some() || compared.is_some()) && self.reason == "ok" && self.stopped && (1..=self.most_output).contains(&self.output_tokens);
        if let (true, Some(pool), Some(model)) = (is_learnt_from, &self.pool, self.upstream_model()) {
            if let Some((log, text)) = noted.map(|noted| *noted) {
                log.note(&pool.name, model, text, self.output_tokens);
            }
            if let Some((serving, shadow)) = compared {
                shadow.answered(&pool.name, model, serving, self.output_tokens);
            }
        }
        telemetry::record(&outcome, &self.gateway.metrics, &self.gateway.recent);
        let line = Line::of(&outcome);
        match &self.gateway.live().access_log {
            Some(log) => log.write(&line),
            None => line.log(),
        }
        if let (Some(trace), Some(tracer)) = (&trace, &self.gateway.tracer) {
            tracer.end(trace, &outcome);
        }
    }
}
