//! The edge: HTTP in, HTTP out. This page tells one request's story from top to bottom, see [`Proxy::answer`].
//!
//! A request is one future, and then one body; hyper drops whichever it is when the client leaves. So nothing here waits for a client that is gone: what a
//! request holds (its share of memory, its place in a queue, its slot, its connection to a backend, its account) is held by that future or body, and
//! settles on drop.
//!
//! `server` accepts · `connection` who is there · `body` read whole · `api` understood · `headers` cleaned · `upstream` sent, in the words of `http1` · `stream` observed, by a `pattern` where it can ·
//! `reply` on its way back · `kept` what came of it, and `resume` going on with it from another backend · `response` what is said when there is no answer · `account` what is told of it all.

mod account;
pub mod api;
pub mod body;
mod connection;
mod headers;
pub mod http1;
mod kept;
mod models;
mod pattern;
mod reply;
pub mod response;
mod resume;
pub mod server;
mod session;
pub mod stream;
pub mod upstream;
mod waiting;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::{Buf, Bytes};
use http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, HeaderMap, HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Uri, response as reply_head};
use hyper::body::Incoming;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::Instant;

use account::Account;
use api::{Api, BadBody, Payload, Prompt, Splices};
use body::{BodyError, Budget, Held};
use connection::Uploading;
use reply::{Pace, Paced, Reply, ReplyBody, ending_of};
use response::Failure;
use resume::{Again, Begun, Place};
use server::Handler;
use stream::{Observer, read_answer};
use upstream::{Answer, AnswerBody, UpstreamError, Waits};

use crate::config::{Edge, Timeouts};
use crate::dispatcher::{Arrival, Permit, Rejection};
use crate::fleet::{EngineKind, Observation};
use crate::gateway::{Gateway, Live, Routed, Target};
use crate::ranker::Opinion;
use crate::scheduler::{BackendId, Ending, Facts, History, Reason, Scored, Tokens, Weight};
use crate::telemetry::Stage;
use crate::tenancy::{Priority, Tenant};

/// Bodies longer than this are parsed apart from the threads that serve connections.
const PARSED_APART: usize = 256 << 10;
/// Answers of one piece that are longer than this pass unread.
const MOST_READ: usize = 1 << 20;
/// Further than any request reaches, where a configured time is too long to be added to a clock.
const FAR: Duration = Duration::from_secs(365 * 86_400);

const BACKEND: HeaderName = HeaderName::from_static("x-headway-backend");
const QUEUE_MS: HeaderName = HeaderName::from_static("x-headway-queue-ms");
const SCORE: HeaderName = HeaderName::from_static("x-headway-score");
const POLICY: HeaderName = HeaderName::from_static("x-headway-policy");

/// Answers every request of the listener.
pub struct Proxy {
    gateway: Arc<Gateway>,
    bodies: Budget,
    cut: watch::Sender<bool>,
}

/// An answer, as far as it has come.
enum Answered {
    /// All of it.
    Whole(Response<Bytes>),
    /// Its head; the rest comes from the backend.
    Streaming(reply_head::Parts, Box<Streaming>),
}

/// The rest of an answer.
struct Streaming {
    upstream: Paced,
    /// Reads it, where it is a stream of events and scored.
    observer: Option<Observer>,
    /// How the slot is given back if all goes well and nothing better is learnt.
    ending: Ending,
    permit: Permit,
    /// What it takes to go on from another backend, where that is wanted.
    again: Option<Box<Again>>,
}

/// What a client can be told.
struct Told {
    ended: Result<Answered, Failure>,
    account: Box<Account>,
    /// What the client still sends.
    body: Option<Incoming>,
}

/// What is sent, whichever backend it goes to.
struct Outgoing {
    /// Headers as the client sent them, without those that end here.
    head: Box<Parts>,
    api: Api,
    prompt: Prompt,
    held: Held,
    /// The usage chunk is asked for by us alone.
    hide_usage: bool,
    score: Option<Scored>,
    /// What came before it, where that is known.
    history: Option<Arc<History>>,
    /// When it was ready to wait.
    ready: Instant,
    /// How long it may take as a whole, and when that is over.
    total: Duration,
    deadline: Instant,
    /// Whether the answer's headers say how the request fared here.
    explained: bool,
    /// Attempts on other backends that are left.
    retries: u32,
    /// Backends that it may not go to: they were tried.
    excluded: Vec<BackendId>,
    /// What was answered already, where this is for the rest of it.
    begun: Option<Begun>,
    /// When it is over unless it has begun to be answered.
    start_by: Instant,
    priority: Priority,
}

impl Handler for Proxy {
    type Body = ReplyBody;

    async fn begin(&self, runtime: Handle) {
        self.gateway.move_to(runtime).await;
    }

    async fn handle(self: Arc<Self>, request: Request<Incoming>, from: IpAddr, uploading: Uploading) -> Response<ReplyBody> {
        let (head, body) = request.into_parts();
        // Head and account go from hand to hand as pointers: what is moved by value is copied each time.
        let mut head = Box::new(head);
        // Who expects to be told to go on has not sent the body, and does not when it is refused.
        let expects = head.headers.contains_key(EXPECT);
        let request_id = headers::request_id(&head.headers);
        let account = Account::open(&self.gateway, &mut head, request_id, from);
        let Told { ended, account, body } = match self.gateway.live().snapshot.edge.keepalive {
            None => self.story(head, body, uploading, account).await,
            Some(every) => match waiting::wait(Arc::clone(&self), every, head, body, uploading, account).await {
                Ok(told) => told,
                Err(response) => return response,
            },
        };
        match ended {
            Ok(answered) => self.reply(answered, account),
            Err(failure) => {
                let gone = matches!(failure, Failure::Body(BodyError::Timeout(_) | BodyError::Broken));
                refuse(&failure, account, body.filter(|_| !expects && !gone))
            }
        }
    }

    fn limits(&self) -> Edge {
        self.gateway.live().snapshot.edge.clone()
    }

    fn start_drain(&self) {
        self.gateway.start_drain();
    }

    async fn drained(&self, within: Duration) {
        self.gateway.drain(within).await;
    }

    fn cut(&self) {
        self.cut.send_replace(true);
    }

    async fn end(&self, handed_over: bool) {
        // Who goes on has read what was kept, and writes there from now on.
        if !handed_over {
            self.gateway.keep().await;
        }
    }
}

impl Proxy {
    pub fn new(gateway: Arc<Gateway>) -> Proxy {
        Proxy { gateway, bodies: Budget::default(), cut: watch::Sender::new(false) }
    }

    /// Bytes of request bodies that are held now.
    pub fn held_bytes(&self) -> u64 {
        self.bodies.used()
    }

    /// One request, until there is something to tell its client.
    async fn story(&self, head: Box<Parts>, body: Incoming, uploading: Uploading, mut account: Box<Account>) -> Told {
        let mut body = Some(body);
        let mut cut = self.cut.subscribe();
        let ended = tokio::select! {
            biased;
            ended = self.answer(head, &mut body, uploading, &mut account) => ended,
            // The sender lives as long as this handler.
            _ = cut.wait_for(|cut| *cut) => Err(Failure::ShuttingDown),
        };
        if matches!(ended, Ok(Answered::Whole(_)))
            && let Some(written) = account.seal(false)
        {
            written.await;
        }
        Told { ended, account, body }
    }

    /// One request, from its head to the head of its answer. `body` is left where it was not read.
    async fn answer(&self, head: Box<Parts>, body: &mut Option<Incoming>, uploading: Uploading, account: &mut Account) -> Result<Answered, Failure> {
        // One value for the whole request: a reload in between changes nothing for it.
        let live = self.gateway.live();
        // Even a refusal has the shape that the client can read.
        account.speaks(Api::understood_at(head.uri.path()));
        if self.gateway.draining() {
            return Err(Failure::Rejected(Rejection { reason: Reason::Draining, retry_after: 1 }));
        }
        if headers::size(&head) > live.snapshot.edge.max_head {
            return Err(Failure::HeadTooLarge { limit: live.snapshot.edge.max_head });
        }
        let known = live.tenancy.as_ref().map(|tenancy| tenancy.who(&head.headers, account.from())).transpose()?;
        if let Some(known) = known {
            account.belongs_to(known);
        }
        let tenant = known.map(|known| known.tenant.as_ref());
        if let Some(list) = models::answer(&live, tenant, &head) {
            return list.map(Answered::Whole).inspect(|_| account.told(StatusCode::OK, "ok"));
        }
        let (mut outgoing, routed) = self.prepare(&live, tenant, head, body, uploading, account).await?;
        let mut ended = outgoing.run(&routed, account).await;
        let mut place = None;
        if ended.as_ref().is_err_and(Failure::is_the_pools) {
            // Boxed: most requests need no room for this.
            place = Box::pin(outgoing.fall_back(&live, &routed, &mut ended, account)).await;
        }
        if let Ok(Answered::Streaming(_, rest)) = &mut ended
            && let Some(observer) = &mut rest.observer
        {
            let place = place.unwrap_or_else(|| Place::of(&routed));
            if place.resumes(outgoing.api) {
                observer.keep(Box::default());
                rest.again = Some(Box::new(Again { outgoing, place }));
            }
        }
        ended
    }

    /// All that can be done before a request waits: reads it, finds its pool, takes what it needs of its tenant's limits and has it scored.
    async fn prepare<'a>(
        &self,
        live: &'a Live,
        tenant: Option<&Tenant>,
        mut head: Box<Parts>,
        body: &mut Option<Incoming>,
        uploading: Uploading,
        account: &mut Account,
    ) -> Result<(Box<Outgoing>, Routed<'a>), Failure> {
        let api = dialect(&head)?;
        if let Some(log) = &live.usage_log {
            account.is_written_down(log);
        }
        let patience = headers::request_timeout(&head.headers)?;
        let objective = headers::first_token_within(&head.headers)?;
        let priority = headers::priority(&head.headers)?;

        let (held, mut prompt) = self.read(api, &head, body, uploading, &live.snapshot.edge).await?;
        account.asks_for(std::mem::take(&mut prompt.model), prompt.stream);
        let routed = live.route(account.model()).ok_or_else(|| models::unknown(live, tenant, account.model()))?;
        account.goes_to(routed.settings);
        let most = if api.is_scored() { most_output(&prompt, routed.settings.limits.max_output) } else { 0 };
        account.admit(prompt.prompt_tokens, most)?;
        if prompt.stream && api.is_scored() {
            account.streams();
        }

        let ready = Instant::now();
        let score = if api.is_scored() { score(live, &mut prompt, account).await } else { None };
        let history = if api.is_scored() { session::history(live.snapshot.edge.sessions, &head.headers, &prompt) } else { None };
        headers::strip_request(&mut head.headers, api.is_scored());
        head.headers.insert(headers::REQUEST_ID, account.request_id_header().clone());
        let hide_usage = prompt.stream && !prompt.include_usage && matches!(api, Api::Chat | Api::Completions);
        let total = patience.map_or(routed.settings.timeouts.total, |patience| patience.min(routed.settings.timeouts.total));
        let deadline = after(account.started(), total);
        // Once its first token cannot come in time, waiting has no point any more.
        let start_by = objective.map_or(deadline, |objective| deadline.min(after(account.started(), objective)));
        let priority = priority.or(prompt.priority).unwrap_or_default().min(tenant.map_or(Priority::High, |tenant| tenant.settings().max_priority));
        let outgoing = Outgoing {
            head,
            api,
            prompt,
            held,
            hide_usage,
            score,
            history,
            ready,
            total,
            deadline,
            explained: live.snapshot.edge.headers,
            retries: routed.settings.retries,
            excluded: Vec::new(),
            begun: None,
            start_by,
            priority,
        };
        Ok((Box::new(outgoing), routed))
    }

    /// The body, whole, and what it says; `body` is gone once it has been read.
    async fn read(
        &self,
        api: Api,
        head: &Parts,
        body: &mut Option<Incoming>,
        uploading: Uploading,
        limits: &Edge,
    ) -> Result<(Held, Prompt), Failure> {
        let held = match body {
            Some(incoming) => body::read(incoming, limits, &self.bodies).await?,
            None => Held::default(),
        };
        *body = None;
        drop(uploading);
        let prompt = read_prompt(api, head, &held.bytes).await?;
        Ok((held, prompt))
    }

    /// Puts head, body and account together.
    fn reply(&self, answered: Answered, account: Box<Account>) -> Response<ReplyBody> {
        let id = account.request_id_header().clone();
        let mut limits = HeaderMap::new();
        account.explain_limits(&mut limits);
        let mut response = match answered {
            Answered::Whole(response) => response.map(ReplyBody::Whole),
            Answered::Streaming(head, rest) => {
                Response::from_parts(head, ReplyBody::Streaming(Box::new(Reply::new(*rest, self.cut.subscribe(), account))))
            }
        };
        response.headers_mut().insert(headers::REQUEST_ID, id);
        response.headers_mut().extend(limits);
        response
    }
}

impl Outgoing {
    /// Waits for a slot, sends, and tries elsewhere what failed before its first byte or met a full backend: with its first arrival, never on the same
    /// backend twice, and within the pool's budget of retries.
    async fn run(&mut self, routed: &Routed<'_>, account: &mut Account) -> Result<Answered, Failure> {
        let mut last = None;
        loop {
            let places = account.takes_places(routed.pool.room(account.model()), self.held.bytes.len() as u64)?;
            let permit = match self.slot(routed, account).await {
                Ok(permit) => permit,
                Err(rejection) => return self.turned_away(rejection, last),
            };
            drop(places);
            let backend = permit.backend();
            self.excluded.push(backend);
            // Without a target it has just left the pool, and nothing was tried.
            if let Some(target) = routed.pool.target(backend) {
                account.released(&target, permit.facts(), routed.pool.dispatcher.at(self.ready));
                let ended = self.attempt(routed, &target, permit, account).await;
                if let Err(failure) = &ended {
                    account.failed(failure.verdict().1);
                }
                if !is_worth_another(&ended) || self.retries == 0 || !routed.pool.may_retry() {
                    return ended;
                }
                self.retries -= 1;
                last = Some(ended);
            }
        }
    }

    /// Tries the pools that take over from `routed`, none of whose backends could serve it, until one of them can; the last one tried.
    async fn fall_back(&mut self, live: &Live, routed: &Routed<'_>, ended: &mut Result<Answered, Failure>, account: &mut Account) -> Option<Place> {
        let model = account.model().to_owned();
        let mut place = None;
        // What another model embeds cannot be compared with what the one asked for embeds.
        for (next, upstream) in live.fallbacks(routed, &model, !self.api.is_scored()) {
            if !ended.as_ref().is_err_and(Failure::is_the_pools) {
                break;
            }
            let next = Routed { upstream: (upstream != model).then_some(upstream.as_str()), ..next };
            account.falls_back(next.settings, &upstream);
            self.retries = next.settings.retries;
            self.excluded.clear();
            *ended = self.run(&next, account).await;
            place = Some(Place::of(&next));
        }
        place
    }

    /// Waits in the queue. Dropping this leaves it.
    async fn slot(&self, routed: &Routed<'_>, account: &mut Account) -> Result<Permit, Rejection> {
        account.enters(Stage::Queue);
        let asked = Instant::now();
        // What an attempt took before it failed was no wait in the queue.
        let ends = if self.begun.is_some() { self.deadline } else { self.start_by };
        let until = routed.settings.timeouts.queue.saturating_sub(account.queued()).min(ends.saturating_duration_since(asked));
        // What was answered already is prompt to the next backend, and work that was done.
        let told = self.begun.as_ref().map_or(0, |begun| begun.told);
        let mut ticket = routed.pool.dispatcher.enqueue(Arrival {
            arrived: routed.pool.dispatcher.at(self.ready),
            model: routed.model,
            score: self.score,
            history: self.history.clone(),
            prompt_tokens: self.prompt.prompt_tokens.saturating_add(told),
            max_output: self.begun.as_ref().map_or(self.prompt.max_output, |begun| begun.places.left()),
            attained: told,
            tenant: account.tenant().map(|tenant| tenant.id()),
            weight: self.priority.weight(),
            share: account.tenant().map_or(Weight::ONE, |tenant| tenant.settings().weight),
            expires: routed.pool.dispatcher.at(asked).after(until),
            bytes: u32::try_from(self.held.bytes.len()).unwrap_or(u32::MAX),
            unscored: !self.api.is_scored(),
            excluded: self.excluded.clone(),
            label: account.request_id().into(),
        });
        account.queues(&ticket);
        let granted = ticket.granted().await;
        account.waited(asked.elapsed());
        granted
    }

    /// What a refusal of the queue means to the client: after an attempt, that attempt is the story.
    fn turned_away(&self, rejection: Rejection, last: Option<Result<Answered, Failure>>) -> Result<Answered, Failure> {
        match (rejection.reason, last) {
            (Reason::NoOtherBackend | Reason::NoHealthyBackend, Some(ended)) => ended,
            (Reason::Expired, _) if Instant::now() >= self.deadline => Err(Failure::TotalInQueue { retry_after: rejection.retry_after }),
            _ => Err(Failure::Rejected(rejection)),
        }
    }

    /// Sends it to one backend and waits for the head of the answer, or for all of one that is read whole.
    async fn attempt(&self, routed: &Routed<'_>, target: &Target, permit: Permit, account: &mut Account) -> Result<Answered, Failure> {
        let sent = self.send(routed, target, &permit.facts(), account).await;
        let Answer { head, body } = match sent {
            Ok(answer) => answer,
            Err(error) => {
                match error {
                    UpstreamError::TotalTimeout | UpstreamError::Wedged => {}
                    UpstreamError::FirstByteTimeout(after) => account.observe(Observation::Silent(after)),
                    _ => account.observe(Observation::Transport),
                }
                tracing::debug!(backend = %target.backend.settings().url, %error, "attempt failed");
                permit.finish(Ending::Failed { output: 0 });
                return Err(error.into());
            }
        };
        self.receive(routed, target, head, body, permit, account).await
    }

    /// Sends it and waits for the head of the answer.
    async fn send(&self, routed: &Routed<'_>, target: &Target, facts: &Facts, account: &mut Account) -> Result<Answer, UpstreamError> {
        let Timeouts { connect, first_byte, .. } = routed.settings.timeouts;
        let waits = Waits { connect, first_byte, total: self.deadline };
        let payload = self.payload(routed, target, facts);
        let request = || {
            let mut request = self.request(target, payload.clone());
            account.sent(request.headers_mut());
            request
        };
        let mut beat = target.backend.begins(self.prompt.stream, facts.work);
        let mut answer = tokio::select! {
            biased;
            answer = target.connections.send(waits, request) => answer?,
            () = beat.given_up() => return Err(UpstreamError::Wedged),
        };
        if answer.head.status.is_success() {
            answer.body.beats(beat);
        }
        Ok(answer)
    }

    /// What comes of an answer that has begun: all of one that is read whole, or its head and the way to the rest.
    async fn receive(
        &self,
        routed: &Routed<'_>,
        target: &Target,
        mut head: reply_head::Parts,
        body: AnswerBody,
        permit: Permit,
        account: &mut Account,
    ) -> Result<Answered, Failure> {
        let (observation, ending) = judge(head.status);
        account.observe(observation);
        account.answered(head.status);
        headers::strip_response(&mut head.headers);
        if self.explained {
            explain(&mut head.headers, routed, target, account);
        }
        let inter_chunk = routed.settings.timeouts.inter_chunk;
        let mut upstream = Paced::new(body, Pace { inter_chunk, total: (self.deadline, self.total), slow_stream: routed.settings.slow_stream });
        if ending == Ending::Pushback {
            // Read whole, so that the slot is free while another backend is tried; a refusal of more than a mebibyte loses its text.
            let body = upstream.whole(MOST_READ).await;
            permit.finish(ending);
            let bytes = body?.unwrap_or_default();
            if !account.has_begun() {
                account.succeeded();
            }
            head.headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes.len()));
            return Ok(Answered::Whole(Response::from_parts(head, bytes)));
        }
        let is_read = head.status.is_success() && self.api.is_scored();
        if is_read && has_type(&head.headers, "text/event-stream") {
            head.headers.remove(CONTENT_LENGTH);
            let observer = Some(Observer::new(account.model(), self.hide_usage));
            return Ok(Answered::Streaming(head, Box::new(Streaming { upstream, observer, ending, permit, again: None })));
        }
        if is_read && has_type(&head.headers, "application/json") {
            match whole(&mut upstream, account).await {
                Ok(Some((bytes, ending))) => {
                    permit.finish(ending);
                    if !account.has_begun() {
                        account.succeeded();
                    }
                    head.headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes.len()));
                    return Ok(Answered::Whole(Response::from_parts(head, bytes)));
                }
                Ok(None) => {}
                Err(failure) => {
                    account.broke_off(&failure);
                    permit.finish(Ending::Failed { output: 0 });
                    return Err(failure);
                }
            }
        }
        Ok(Answered::Streaming(head, Box::new(Streaming { upstream, observer: None, ending, permit, again: None })))
    }

    /// The body as this backend is to read it.
    fn payload(&self, routed: &Routed<'_>, target: &Target, facts: &Facts) -> Payload {
        let mut splices = Splices::default();
        if let Some(name) = routed.upstream {
            self.prompt.rename_model(&mut splices, name);
        }
        if self.hide_usage {
            self.prompt.ask_for_usage(&mut splices);
        }
        if let Some(begun) = &self.begun {
            begun.places.ask(&mut splices, &begun.text);
        }
        let settings = target.backend.settings();
        if settings.priority
            && self.api.is_scored()
            && let Some(field) = target.backend.engine().and_then(EngineKind::priority)
        {
            let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let clock_start = micros(unix).saturating_sub(micros(Duration::from_micros(routed.pool.dispatcher.now().as_micros())));
            let steps = clock_start.saturating_add(facts.boosted_arrival) / micros(field.unit).max(1);
            self.prompt.set_priority(&mut splices, if field.lower_first { steps } else { -steps });
        }
        splices.apply(&self.held.bytes)
    }

    /// The request as this backend is to get it.
    fn request(&self, target: &Target, payload: Payload) -> Request<Payload> {
        let settings = target.backend.settings();
        let length = payload.remaining();
        let mut request = Request::new(payload);
        *request.method_mut() = self.head.method.clone();
        *request.uri_mut() = upstream_uri(&settings.url.prefix, &self.head.uri);
        let headers = request.headers_mut();
        headers.clone_from(&self.head.headers);
        headers.insert(HOST, target.connections.host().clone());
        headers::set_length(headers, length, &self.head.method);
        if let Some(key) = &settings.api_key
            && let Ok(mut bearer) = HeaderValue::try_from(format!("Bearer {}", key.expose()))
        {
            bearer.set_sensitive(true);
            headers.insert(AUTHORIZATION, bearer);
        }
        if headers.contains_key(headers::CONVERSATION_ID) && target.backend.engine() == Some(EngineKind::LlamaCpp) {
            headers.remove(headers::CONVERSATION_ID);
        }
        request
    }
}

/// The dialect of a request that can be routed.
fn dialect(head: &Parts) -> Result<Api, Failure> {
    let path = head.uri.path();
    let api = Api::of(path).filter(|_| !climbs(path)).ok_or_else(|| Failure::UnknownPath(path.to_owned()))?;
    if api.is_scored() && head.method != Method::POST {
        return Err(Failure::WrongMethod { path: path.to_owned(), allowed: "POST" });
    }
    Ok(api)
}

/// Whether a path has segments that a server behind us might resolve to a place that was not asked for.
fn climbs(path: &str) -> bool {
    /// Dots that the segment is made of, written out or encoded; 0 where it is anything else.
    fn dots(mut segment: &[u8]) -> usize {
        let mut dots = 0;
        while let [b'.', rest @ ..] | [b'%', b'2', b'e' | b'E', rest @ ..] = segment {
            (segment, dots) = (rest, dots + 1);
        }
        if segment.is_empty() { dots } else { 0 }
    }
    path.as_bytes().split(|byte| matches!(byte, b'/' | b'\\')).any(|segment| matches!(dots(segment), 1 | 2))
}

/// Reads the body, or what stands for it.
async fn read_prompt(api: Api, head: &Parts, body: &Bytes) -> Result<Prompt, BadBody> {
    if !api.is_scored() && body.is_empty() {
        return Prompt::of_query(head.uri.query());
    }
    let form = if api.is_scored() { None } else { head.headers.get(CONTENT_TYPE).filter(|_| has_type(&head.headers, "multipart/form-data")) };
    let read = move |form: Option<&HeaderValue>, body: &[u8]| match form {
        None => api::parse(api, body),
        Some(form) => Prompt::of_form(form.to_str().unwrap_or_default(), body),
    };
    if body.len() <= PARSED_APART {
        return read(form, body);
    }
    let (form, body) = (form.cloned(), body.clone());
    match tokio::task::spawn_blocking(move || read(form.as_ref(), &body)).await {
        Ok(prompt) => prompt,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Output tokens that the answers to a request can have at most.
fn most_output(prompt: &Prompt, of_the_pool: Tokens) -> Tokens {
    // The most answers that OpenAI's API gives to one request.
    const ANSWERS: Tokens = 128;
    prompt.max_output.unwrap_or(if prompt.single { of_the_pool } else { of_the_pool.saturating_mul(ANSWERS) })
}

/// Asks the ranker, which answers within its deadline whatever happens.
async fn score(live: &Live, prompt: &mut Prompt, account: &mut Account) -> Option<Scored> {
    account.enters(Stage::Score);
    let text = std::mem::take(&mut prompt.text);
    if let Some(log) = live.training_log.as_ref().filter(|_| prompt.single && !text.user.is_empty()) {
        account.is_noted(log, text.clone());
    }
    let asked = live.shadow.as_ref().filter(|_| prompt.single).map(|shadow| shadow.ask(text.clone()));
    let opinion = live.ranker.score(text).await;
    account.scored(&opinion);
    let Opinion::Scored(scored) = opinion else { return None };
    if let Some(shadow) = asked {
        account.is_compared(scored, shadow);
    }
    Some(scored)
}

/// Whether another backend may do better: this one failed before its first byte, or is full.
fn is_worth_another(ended: &Result<Answered, Failure>) -> bool {
    match ended {
        Ok(Answered::Whole(response)) => matches!(judge(response.status()), (Observation::Pushback, _)),
        Ok(Answered::Streaming(..)) => false,
        Err(failure) => failure.is_retriable(),
    }
}

/// What a backend's status says of the backend and of the slot.
fn judge(status: StatusCode) -> (Observation, Ending) {
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => (Observation::Pushback, Ending::Pushback),
        status if status.is_server_error() => (Observation::ServerError, Ending::Failed { output: 0 }),
        status if status.is_client_error() => (Observation::Answered, Ending::Refused),
        _ => (Observation::Answered, Ending::Uncounted),
    }
}

/// Reads an answer of one JSON document, if it is not too long for that, and what it says of its length.
async fn whole(upstream: &mut Paced, account: &mut Account) -> Result<Option<(Bytes, Ending)>, Failure> {
    let Some(bytes) = upstream.whole(MOST_READ).await? else { return Ok(None) };
    match read_answer(&bytes, account.model()) {
        Some((seen, bytes)) => {
            account.tokens(&seen);
            Ok(Some((bytes, ending_of(&seen))))
        }
        // Where the connection's end is the body's end, half a document is all that a cut shows.
        None if upstream.is_until_close() => Err(Failure::CutShort),
        None => Ok(Some((bytes, Ending::Uncounted))),
    }
}

/// Says in headers how the request fared here.
fn explain(headers: &mut HeaderMap, routed: &Routed<'_>, target: &Target, account: &Account) {
    headers.insert(BACKEND, target.connections.host().clone());
    headers.insert(QUEUE_MS, HeaderValue::from(u64::try_from(account.queued().as_millis()).unwrap_or(u64::MAX)));
    if let Some(score) = account.score().and_then(|score| HeaderValue::try_from(format!("{score:.4}")).ok()) {
        headers.insert(SCORE, score);
    }
    if let Ok(policy) = HeaderValue::from_str(&routed.settings.policy.name) {
        headers.insert(POLICY, policy);
    }
}

/// Tells a client why it gets no answer; `body` is what it still sends.
fn refuse(failure: &Failure, mut account: Box<Account>, body: Option<Incoming>) -> Response<ReplyBody> {
    let (status, reason) = failure.verdict();
    account.told(status, reason);
    let mut response = failure.response(account.api(), account.request_id());
    response.headers_mut().insert(headers::REQUEST_ID, account.request_id_header().clone());
    account.explain_limits(response.headers_mut());
    response.map(|text| match body {
        Some(body) if !http_body::Body::is_end_stream(&body) => ReplyBody::lingering(text, body),
        _ => ReplyBody::Whole(text),
    })
}

/// Whether the content type is this one, whatever its parameters.
fn has_type(headers: &HeaderMap, wanted: &str) -> bool {
    let value = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.get(..wanted.len()).is_some_and(|start| start.eq_ignore_ascii_case(wanted))
        && !value[wanted.len()..].starts_with(|c: char| c.is_alphanumeric())
}

/// The path and query behind the backend's prefix.
fn upstream_uri(prefix: &str, uri: &Uri) -> Uri {
    let Some(path) = uri.path_and_query() else { return Uri::default() };
    if prefix.is_empty() {
        return Uri::from(path.clone());
    }
    // The configuration checked the prefix; the path came through a parser.
    Uri::try_from(format!("{prefix}{path}")).unwrap_or_default()
}

fn after(start: Instant, span: Duration) -> Instant {
    start.checked_add(span).unwrap_or(start + FAR)
}

fn micros(span: Duration) -> i64 {
    i64::try_from(span.as_micros()).unwrap_or(i64::MAX)
}
