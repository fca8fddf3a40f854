//! An answer on its way to the client, and everything that the request still holds meanwhile: its slot, its upstream connection, its account.
//! Whatever ends it, dropping it settles all of them.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};

use super::Streaming;
use super::account::{Account, ERROR_IN_STREAM};
use super::response::Failure;
use super::resume::Again;
use super::stream::{Finish, Observer, Seen};
use super::upstream::{AnswerBody, UpstreamError};
use super::waiting::Waiting;
use crate::config::SlowStream;
use crate::dispatcher::Permit;
use crate::fleet::Observation;
use crate::scheduler::{Ending, Tokens};
use crate::telemetry::Resume;
use crate::usage_log::Written;

/// Bytes of a refused body that are still read, so that its sender gets to see the refusal.
const LINGER_BYTES: u64 = 64 << 20;
/// How long a refused body is still read.
const LINGER: Duration = Duration::from_secs(10);

/// The body of every answer.
pub enum ReplyBody {
    /// In one piece.
    Whole(Bytes),
    /// A refusal while the client still sends: what it sends is read and thrown away, since closing on it would take the refusal with it.
    Lingering(Box<Lingering>),
    /// From a backend.
    Streaming(Box<Reply>),
    /// Comments, until there is an answer.
    Waiting(Box<Waiting>),
    /// From the next backend, once there is one: the answer, and what the client gets before it goes on or at its end.
    Resuming(Pin<Box<dyn Future<Output = (Box<Reply>, Bytes)> + Send>>),
}

/// The answer broke off: the client must not take it for a whole one.
#[derive(Debug, thiserror::Error)]
#[error("the answer broke off")]
pub struct BrokenOff;

/// A refusal and the body it refuses.
pub struct Lingering {
    text: Bytes,
    request: Incoming,
    left: u64,
    until: Pin<Box<Sleep>>,
}

impl ReplyBody {
    /// A refusal of a request whose body has not been read.
    pub fn lingering(text: Bytes, request: Incoming) -> ReplyBody {
        ReplyBody::Lingering(Box::new(Lingering { text, request, left: LINGER_BYTES, until: Box::pin(tokio::time::sleep(LINGER)) }))
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = BrokenOff;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        loop {
            match &mut *self {
                ReplyBody::Whole(bytes) if bytes.is_empty() => return Poll::Ready(None),
                ReplyBody::Whole(bytes) => return Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
                ReplyBody::Lingering(lingering) => return lingering.poll_frame(cx).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes)))),
                ReplyBody::Streaming(reply) => match ready!(reply.poll_frame(cx)) {
                    Next::Bytes(bytes) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                    Next::BrokenOff => return Poll::Ready(Some(Err(BrokenOff))),
                    Next::End => return Poll::Ready(None),
                    Next::Elsewhere(failure) => {
                        // It comes back in the future.
                        if let ReplyBody::Streaming(reply) = std::mem::replace(&mut *self, ReplyBody::Whole(Bytes::new())) {
                            *self = ReplyBody::Resuming(Box::pin(reply.go_on(failure)));
                        }
                    }
                },
                ReplyBody::Waiting(waiting) => match ready!(waiting.poll_next(cx)) {
                    Ok(comment) => return Poll::Ready(Some(Ok(Frame::data(comment)))),
                    Err(answer) => *self = answer,
                },
                ReplyBody::Resuming(going_on) => {
                    let (reply, bytes) = ready!(going_on.as_mut().poll(cx));
                    *self = ReplyBody::Streaming(reply);
                    if !bytes.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(bytes))));
                    }
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, ReplyBody::Whole(bytes) if bytes.is_empty())
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            ReplyBody::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            ReplyBody::Lingering(_) | ReplyBody::Waiting(_) | ReplyBody::Resuming(_) => SizeHint::default(),
            ReplyBody::Streaming(reply) => reply.length().map_or_else(SizeHint::default, SizeHint::with_exact),
        }
    }
}

impl Lingering {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        if !self.text.is_empty() {
            return Poll::Ready(Some(std::mem::take(&mut self.text)));
        }
        while self.left > 0 {
            match Pin::new(&mut self.request).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => self.left = self.left.saturating_sub(frame.data_ref().map_or(0, |data| data.len() as u64)),
                Poll::Ready(_) => return Poll::Ready(None),
                Poll::Pending => {
                    ready!(self.until.as_mut().poll(cx));
                    return Poll::Ready(None);
                }
            }
        }
        Poll::Ready(None)
    }
}

/// The body of a backend's answer, held to its time limits.
pub struct Paced {
    /// Read already, not handed on yet.
    begun: Bytes,
    body: AnswerBody,
    limits: Pace,
    /// When bytes came last.
    last: Instant,
    /// Fires when a limit may be over; its deadline is only ever too early.
    timer: Option<Pin<Box<Sleep>>>,
    floor: Option<Floor>,
}

/// Limits of an answer that has begun.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    pub inter_chunk: Duration,
    /// When the request as a whole has taken too long, and how long that is.
    pub total: (Instant, Duration),
    /// How slowly its tokens may come.
    pub slow_stream: Option<SlowStream>,
}

/// Watches how fast tokens come, once the first one is there. Only the time counts in which they were waited for: who reads slowly does not make the backend slow.
struct Floor {
    settings: SlowStream,
    /// Tokens that came, and how many they were when the window began.
    tokens: Tokens,
    before: Tokens,
    /// Time that was waited in this window, and since when it is waited now.
    waited: Duration,
    since: Option<Instant>,
    is_slow: bool,
}

impl Floor {
    /// When the window ends if nothing comes before.
    fn until(&mut self, now: Instant) -> Option<Instant> {
        if self.tokens == 0 {
            return None;
        }
        let since = *self.since.get_or_insert(now);
        since.checked_add(self.settings.over.saturating_sub(self.waited))
    }

    /// The wait is over.
    fn came(&mut self, now: Instant) {
        if let Some(since) = self.since.take() {
            self.waited += now.saturating_duration_since(since);
        }
    }

    /// So many tokens have come.
    fn told(&mut self, tokens: Tokens) {
        // A backend's final count may be less than the events that came.
        let tokens = tokens.max(self.tokens);
        if self.tokens == 0 {
            (self.waited, self.before) = (Duration::ZERO, tokens);
        }
        self.tokens = tokens;
        if self.waited >= self.settings.over {
            self.is_slow = f64::from(tokens - self.before) < self.settings.tokens_per_second * self.settings.over.as_secs_f64();
            (self.waited, self.before) = (Duration::ZERO, tokens);
        }
    }
}

impl Paced {
    pub fn new(body: AnswerBody, limits: Pace) -> Paced {
        let floor = |settings| Floor { settings, tokens: 0, before: 0, waited: Duration::ZERO, since: None, is_slow: false };
        Paced { begun: Bytes::new(), body, limits, last: Instant::now(), timer: None, floor: limits.slow_stream.map(floor) }
    }

    /// So many tokens have come by now.
    fn told(&mut self, tokens: Tokens) {
        if let Some(floor) = &mut self.floor {
            floor.told(tokens);
        }
    }

    /// As of [`AnswerBody::is_until_close`].
    pub fn is_until_close(&self) -> bool {
        self.body.is_until_close()
    }

    /// Bytes still to come, where the backend said it.
    fn length(&self) -> Option<u64> {
        Some(self.body.length()? + self.begun.len() as u64)
    }

    /// The whole body, if it is not longer than `limit` bytes; `None` if it is, and then nothing of it is lost.
    pub async fn whole(&mut self, limit: usize) -> Result<Option<Bytes>, Failure> {
        let mut first = Bytes::new();
        let mut all = BytesMut::new();
        while let Some(chunk) = std::future::poll_fn(|cx| self.poll_chunk(cx)).await {
            let chunk = chunk?;
            if first.is_empty() {
                first = chunk;
            } else {
                if all.is_empty() {
                    all.extend_from_slice(&first);
                }
                all.extend_from_slice(&chunk);
            }
            if first.len().max(all.len()) > limit {
                self.begun = if all.is_empty() { first } else { all.freeze() };
                return Ok(None);
            }
        }
        Ok(Some(if all.is_empty() { first } else { all.freeze() }))
    }

    /// The next bytes; `None` at the end.
    pub fn poll_chunk(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Failure>>> {
        if !self.begun.is_empty() {
            return Poll::Ready(Some(Ok(std::mem::take(&mut self.begun))));
        }
        if let Some(floor) = self.floor.as_ref().filter(|floor| floor.is_slow) {
            return Poll::Ready(Some(Err(Failure::SlowStream(floor.settings))));
        }
        if let Poll::Ready(chunk) = self.body.poll_chunk(cx) {
            self.last = Instant::now();
            if let Some(floor) = &mut self.floor {
                floor.came(self.last);
            }
            return Poll::Ready(chunk.map(|chunk| {
                chunk.map_err(|error| match error {
                    UpstreamError::Broken(_) => Failure::CutShort,
                    other => Failure::Upstream(other),
                })
            }));
        }
        let (total, within) = self.limits.total;
        let silence = self.last.checked_add(self.limits.inter_chunk).map_or(total, |until| until.min(total));
        loop {
            let window = self.floor.as_mut().and_then(|floor| floor.until(Instant::now()));
            let until = window.map_or(silence, |window| window.min(silence));
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
            if timer.deadline() > until {
                timer.as_mut().reset(until);
            }
            ready!(timer.as_mut().poll(cx));
            let now = Instant::now();
            if now < until {
                timer.as_mut().reset(until);
            } else if now >= silence {
                return Poll::Ready(Some(Err(if now < total { Failure::InterChunk(self.limits.inter_chunk) } else { Failure::Total(within) })));
            } else if let Some(floor) = &mut self.floor {
                floor.came(now);
                floor.told(floor.tokens);
                if floor.is_slow {
                    return Poll::Ready(Some(Err(Failure::SlowStream(floor.settings))));
                }
            }
        }
    }
}

/// What comes next of a streamed answer.
enum Next {
    Bytes(Bytes),
    /// Nothing, and the client must not take that for an end.
    BrokenOff,
    End,
    /// The rest, from another backend if there is one.
    Elsewhere(Failure),
}

/// A streamed answer: the one guard of a request from its backend's first byte on.
pub struct Reply {
    /// Gone when the backend has nothing more to say.
    upstream: Option<Paced>,
    /// Reads an answer that is a stream of events and scored.
    observer: Option<Observer>,
    /// How the slot is given back if all goes well and nothing better is learnt.
    ending: Ending,
    permit: Option<Permit>,
    /// What it takes to go on from another backend, where that is wanted.
    again: Option<Box<Again>>,
    /// The last of the answer, and what it waits for.
    sealing: Option<(Written, Bytes)>,
    cut: Cut,
    account: Box<Account>,
}

/// Whether the process cuts what it cannot wait for.
struct Cut {
    word: watch::Receiver<bool>,
    /// Ready when it does.
    said: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// `said` knows whom to wake.
    watched: bool,
}

impl Cut {
    fn new(word: watch::Receiver<bool>) -> Cut {
        let mut told = word.clone();
        let said = Box::pin(async move {
            if told.wait_for(|cut| *cut).await.is_err() {
                // Whoever could cut is gone: nobody will.
                std::future::pending::<()>().await;
            }
        });
        Cut { word, said, watched: false }
    }

    /// Asked at every turn. The first leaves a waker (an HTTP/2 stream is a task of its own, which nothing else would wake), later ones only compare a number.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.watched && !self.word.has_changed().unwrap_or(false) {
            return Poll::Pending;
        }
        self.watched = true;
        self.said.as_mut().poll(cx)
    }
}

impl Reply {
    pub(super) fn new(rest: Streaming, cut: watch::Receiver<bool>, account: Box<Account>) -> Reply {
        let Streaming { upstream, observer, ending, permit, again } = rest;
        Reply { upstream: Some(upstream), observer, ending, permit: Some(permit), again, sealing: None, cut: Cut::new(cut), account }
    }

    /// The length of what is still to come, where nothing is changed on the way.
    fn length(&self) -> Option<u64> {
        let upstream = self.upstream.as_ref()?;
        if self.observer.is_some() { None } else { upstream.length() }
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Next> {
        loop {
            if let Some((written, _)) = &mut self.sealing {
                ready!(written.as_mut().poll(cx));
            }
            match self.sealing.take() {
                Some((_, bytes)) if !bytes.is_empty() => return Poll::Ready(Next::Bytes(bytes)),
                _ => {}
            }
            let Some(upstream) = &mut self.upstream else { return Poll::Ready(Next::End) };
            if self.cut.poll(cx).is_ready() {
                return Poll::Ready(self.ends(&Failure::ShuttingDown));
            }
            match ready!(upstream.poll_chunk(cx)) {
                Some(Ok(chunk)) => {
                    let Some(observer) = &mut self.observer else {
                        // Who has got as many bytes as were announced does not ask for more.
                        if upstream.length() == Some(0) {
                            // Hears of the end, so that the connection can carry another request.
                            _ = upstream.poll_chunk(cx);
                            self.complete(None);
                            if self.seals(None, &chunk) {
                                continue;
                            }
                        }
                        return Poll::Ready(Next::Bytes(chunk));
                    };
                    let out = observer.feed(chunk);
                    // Now, since a client may leave before the next chunk.
                    self.account.tokens(observer.seen());
                    if observer.seen().output() > 0 {
                        self.account.first_token();
                    }
                    if let Some(permit) = &mut self.permit {
                        permit.progress(observer.seen().here());
                    }
                    // Clients take the dialect's last word for the end.
                    let seen = *observer.seen();
                    upstream.told(seen.here());
                    if seen.done {
                        // Who leaves now has got everything.
                        if !seen.error {
                            self.account.succeeded();
                        }
                        // And the backend has nothing more to do: its slot waits for nobody.
                        if let Some(permit) = self.permit.take() {
                            permit.finish(ending_of(&seen));
                        }
                        if self.seals(Some(seen), &out) {
                            continue;
                        }
                    }
                    if !out.is_empty() {
                        return Poll::Ready(Next::Bytes(out));
                    }
                }
                Some(Err(failure)) => return Poll::Ready(self.broke(failure)),
                None => {
                    let proves_nothing = upstream.is_until_close();
                    if proves_nothing && self.observer.as_ref().is_some_and(|observer| !observer.seen().done && observer.seen().finish.is_none()) {
                        return Poll::Ready(self.broke(Failure::CutShort));
                    }
                    let rest = self.observer.as_mut().map(Observer::end).unwrap_or_default();
                    let seen = self.observer.as_ref().map(|observer| *observer.seen());
                    self.complete(seen);
                    if self.seals(seen, &rest) {
                        continue;
                    }
                    return Poll::Ready(if rest.is_empty() { Next::End } else { Next::Bytes(rest) });
                }
            }
        }
    }

    /// Whether `last`, the last of the answer, waits until the answer's usage is written down.
    fn seals(&mut self, seen: Option<Seen>, last: &Bytes) -> bool {
        let Some(written) = self.account.seal(seen.is_some_and(|seen| seen.error)) else { return false };
        self.sealing = Some((written, last.clone()));
        true
    }

    /// The backend has said all it has to say.
    fn complete(&mut self, seen: Option<Seen>) {
        self.upstream = None;
        let ending = match seen {
            Some(seen) => {
                self.account.tokens(&seen);
                ending_of(&seen)
            }
            None => self.ending,
        };
        match ending {
            Ending::Failed { .. } if seen.is_some() => self.account.ended(ERROR_IN_STREAM),
            _ => self.account.succeeded(),
        }
        if let Some(permit) = self.permit.take() {
            permit.finish(ending);
        }
    }

    /// The answer stops here. Where the dialect's last word has come, the client has all of it, whatever becomes of the connection.
    fn ends(&mut self, failure: &Failure) -> Next {
        let Some(seen) = self.observer.as_ref().map(|observer| *observer.seen()).filter(|seen| seen.done) else { return self.failed(failure) };
        if matches!(failure, Failure::CutShort) {
            self.account.observe(Observation::Transport);
        }
        self.complete(Some(seen));
        Next::End
    }

    /// The backend broke off: another one may go on.
    fn broke(&mut self, failure: Failure) -> Next {
        let all_said = self.observer.as_ref().is_some_and(|observer| observer.seen().done);
        if !all_said && self.again.is_some() && matches!(failure, Failure::CutShort | Failure::InterChunk(_) | Failure::SlowStream(_)) {
            Next::Elsewhere(failure)
        } else {
            self.ends(&failure)
        }
    }

    /// Goes on from another backend, or says why there is no more.
    async fn go_on(mut self: Box<Self>, failure: Failure) -> (Box<Reply>, Bytes) {
        self.backend_failed(&failure);
        self.account.failed(failure.verdict().1);
        let mut failure = failure;
        if let (Some(observer), Some(mut again)) = (self.observer.take(), self.again.take()) {
            let seen = *observer.seen();
            if seen.finish.is_some() && !seen.error && observer.hides_usage() && again.outgoing.prompt.single {
                // All that counts has come.
                self.complete(Some(seen));
                let last = Bytes::from_static(b"\ndata: [DONE]\n\n");
                let bytes = if self.seals(Some(seen), &last) { Bytes::new() } else { last };
                return (self, bytes);
            }
            let resumed = tokio::select! {
                biased;
                () = self.cut.said.as_mut() => None,
                resumed = resume(&mut again, &observer, &mut self.account) => Some(resumed),
            };
            match resumed {
                Some(Ok((upstream, permit))) => {
                    self.account.resumed(Resume::Resumed);
                    let observer = observer.of_the_rest(again.is_chat());
                    self.account.tokens(observer.seen());
                    (self.observer, self.again) = (Some(observer), Some(again));
                    (self.upstream, self.permit) = (Some(upstream), Some(permit));
                    // The blank line ends an event that has begun; where none has, it says nothing.
                    return (self, Bytes::from_static(b"\n"));
                }
                Some(Err(why)) => self.account.resumed(why),
                None => failure = Failure::ShuttingDown,
            }
            self.observer = Some(observer);
        }
        let Next::Bytes(words) = self.failed(&failure) else { return (self, Bytes::new()) };
        (self, words)
    }

    /// The answer cannot be finished: says so in a way that cannot be taken for its end.
    fn failed(&mut self, failure: &Failure) -> Next {
        self.backend_failed(failure);
        let seen = self.observer.take().map(|observer| *observer.seen());
        if let Some(seen) = &seen {
            self.account.tokens(seen);
        }
        self.account.ended(failure.verdict().1);
        match seen {
            Some(_) => Next::Bytes(failure.event(self.account.api(), self.account.request_id())),
            None => Next::BrokenOff,
        }
    }

    /// Gives back what the answer held of its backend, unless that is done already.
    fn backend_failed(&mut self, failure: &Failure) {
        if self.upstream.take().is_some() {
            self.account.broke_off(failure);
        }
        let output = self.observer.as_ref().map_or(0, |observer| observer.seen().here());
        if let Some(permit) = self.permit.take() {
            // A shutdown is not the backend's fault: the slot goes back as if the client had left.
            permit.finish(if matches!(failure, Failure::ShuttingDown) { Ending::Cancelled { output } } else { Ending::Failed { output } });
        }
    }
}

/// Asks another backend for what follows what `observer` has seen.
async fn resume(again: &mut Again, observer: &Observer, account: &mut Account) -> Result<(Paced, Permit), Resume> {
    match observer.kept() {
        // The client has been told of an error, and takes it for the end.
        _ if observer.seen().error => Err(Resume::Unfit),
        // The client asked for a count that went with the backend.
        _ if observer.seen().finish.is_some() => Err(Resume::Unfit),
        None => Err(Resume::Unfit),
        Some(kept) => again.go_on(kept, observer.seen().output(), account).await,
    }
}

/// What a complete answer that was read says about its length.
pub fn ending_of(seen: &Seen) -> Ending {
    let (output, prompt) = (seen.output(), seen.prompt_tokens);
    match seen.finish {
        _ if seen.error => Ending::Failed { output: seen.here() },
        // Its whole length is not what this backend produced, and what it produced is no whole length.
        _ if seen.is_the_rest() => Ending::Uncounted,
        Some(Finish::Truncated) => Ending::Truncated { output, prompt },
        Some(Finish::Stopped) | None => Ending::Completed { output, prompt },
    }
}
