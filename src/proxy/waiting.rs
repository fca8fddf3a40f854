//! A stream whose answer has not begun: its client is sent comments, so that nothing between cuts the connection for being idle.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{Response, StatusCode};
use hyper::body::Incoming;
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep};

use super::account::{Account, Awaited};
use super::connection::Uploading;
use super::reply::{Reply, ReplyBody};
use super::response::{Failure, event_of};
use super::{Answered, MOST_READ, Proxy, Streaming, Told, headers};
use crate::scheduler::{Ending, Outlook};

/// Waits for what the request comes to. A stream for which that takes longer than `every` is answered with its head and comments instead.
pub(super) async fn wait(
    proxy: Arc<Proxy>,
    every: Duration,
    head: Box<Parts>,
    body: Incoming,
    uploading: Uploading,
    mut account: Box<Account>,
) -> Result<Told, Response<ReplyBody>> {
    let (awaited, committed) = (Arc::<Awaited>::default(), Arc::<AtomicBool>::default());
    account.is_awaited(Arc::clone(&awaited));
    let id = account.request_id_header().clone();
    let since = Instant::now();
    let mut tick = Box::pin(tokio::time::sleep(every));
    let mut story: Story = Box::pin({
        let (proxy, committed) = (Arc::clone(&proxy), Arc::clone(&committed));
        async move {
            let told = proxy.story(head, body, uploading, account).await;
            // Without a head of its own, what is no stream has to fit into an event.
            if committed.load(Ordering::Relaxed) { in_one_piece(told).await } else { told }
        }
    });
    loop {
        tokio::select! {
            biased;
            told = &mut story => return Ok(told),
            () = &mut tick => {}
        }
        if awaited.streams() {
            break;
        }
        tick.as_mut().reset(Instant::now() + every);
    }
    committed.store(true, Ordering::Relaxed);
    let mut response = Response::new(ReplyBody::Waiting(Box::new(Waiting { proxy, story, awaited, every, tick: None, asked: None, since })));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(headers::REQUEST_ID, id);
    Err(response)
}

type Story = Pin<Box<dyn Future<Output = Told> + Send>>;

/// Reads an answer that is no stream of events.
async fn in_one_piece(mut told: Told) -> Told {
    match told.ended {
        Ok(Answered::Streaming(head, rest)) if rest.observer.is_none() => {
            let Streaming { mut upstream, ending, permit, .. } = *rest;
            // What is too long for an event is not passed on in part.
            let bytes = upstream.whole(MOST_READ).await.and_then(|bytes| bytes.ok_or(Failure::CutShort));
            permit.finish(if bytes.is_ok() { ending } else { Ending::Failed { output: 0 } });
            told.ended = match bytes {
                Ok(bytes) => {
                    told.account.succeeded();
                    if let Some(written) = told.account.seal(false) {
                        written.await;
                    }
                    Ok(Answered::Whole(Response::from_parts(head, bytes)))
                }
                Err(failure) => Err(failure),
            };
            told
        }
        _ => told,
    }
}

/// The body of an answer that has not begun.
pub struct Waiting {
    proxy: Arc<Proxy>,
    story: Story,
    awaited: Arc<Awaited>,
    every: Duration,
    /// `None` before the first comment.
    tick: Option<Pin<Box<Sleep>>>,
    /// What the next comment is to say.
    asked: Option<oneshot::Receiver<Option<Outlook>>>,
    since: Instant,
}

impl Waiting {
    /// The next comment, or what comes instead of more of them.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Bytes, ReplyBody>> {
        if let Poll::Ready(told) = self.story.as_mut().poll(cx) {
            return Poll::Ready(Err(self.answer(told)));
        }
        if self.asked.is_none() {
            if let Some(tick) = &mut self.tick {
                ready!(tick.as_mut().poll(cx));
            }
            let tick = self.tick.get_or_insert_with(|| Box::pin(tokio::time::sleep(self.every)));
            tick.as_mut().reset(Instant::now() + self.every);
            // Whoever polls next waits for this one.
            _ = tick.as_mut().poll(cx);
            self.asked = self.awaited.place().map(|place| place.ask());
        }
        let outlook = match &mut self.asked {
            // A pool that has ended is no reason to say nothing.
            Some(asked) => ready!(Pin::new(asked).poll(cx)).ok().flatten(),
            None => None,
        };
        self.asked = None;
        Poll::Ready(Ok(self.comment(outlook)))
    }

    fn comment(&self, outlook: Option<Outlook>) -> Bytes {
        Bytes::from(match outlook {
            Some(Outlook { position, wait }) => format!(": queued position={position} eta={}s\n\n", wait.as_secs_f64().ceil()),
            None => format!(": waiting {}s\n\n", self.since.elapsed().as_secs()),
        })
    }

    fn answer(&self, told: Told) -> ReplyBody {
        let Told { ended, mut account, .. } = told;
        match ended {
            Ok(Answered::Streaming(_, rest)) => ReplyBody::Streaming(Box::new(Reply::new(*rest, self.proxy.cut.subscribe(), account))),
            Ok(Answered::Whole(response)) => ReplyBody::Whole(event_of(account.api(), response.status(), response.body())),
            Err(failure) => {
                account.told(StatusCode::OK, failure.verdict().1);
                ReplyBody::Whole(failure.event(account.api(), account.request_id()))
            }
        }
    }
}
