//! What the page shows, as server-sent events. One task takes one look a second for all viewers and writes it down once; without a viewer it looks every five
//! seconds, for what is drawn over time.
//!
//! Events: `history`, all that is drawn over time; `point`, one more of it; `counterfactual`, what arrival order would have given; `now`, everything else.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use bytes::Bytes;
use http_body_util::channel::Channel;
use serde_json::{Map, Value, json};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::counterfactual::{self, Computed};
use super::view;
use crate::config::Reloader;
use crate::dispatcher::Closeup;
use crate::gateway::{Gateway, Live};
use crate::scheduler::{RequestView, StageView, Time};
use crate::telemetry::{Ended, Totals};

/// Between two looks while somebody looks on.
const LOOK: Duration = Duration::from_secs(1);
/// Looks between two points of the history.
const LOOKS_A_POINT: u64 = 5;
/// Points that are remembered: half an hour.
const POINTS: usize = 360;
/// Pools that have a history.
const POOLS: usize = 32;
/// What percentiles and rates are of: requests that ended within this span.
pub(super) const SPAN: Duration = Duration::from_secs(30);
/// Requests of one queue that are shown, and of all queues together.
const OF_A_QUEUE: usize = 200;
const OF_ALL: usize = 2000;
/// Kinds of failures that are shown.
const FAILURES: usize = 20;
/// Answers whose predicted and real lengths are shown for a pool.
const PAIRS: usize = 150;
/// Answers that the calibration's error is measured on.
const JUDGED: usize = 1000;
/// Tenants that are shown: those with most requests here.
const TENANTS: usize = 50;
/// Viewers at a time.
const VIEWERS: usize = 128;
/// A viewer that takes nothing for this long has gone.
const PATIENCE: Duration = Duration::from_secs(30);

/// Where viewers come in.
#[derive(Clone)]
pub(super) struct Feed {
    frames: watch::Sender<Arc<Frame>>,
    viewers: Arc<Semaphore>,
    /// The first viewer has come.
    wanted: Arc<Notify>,
}

/// One look, written down.
#[derive(Default)]
struct Frame {
    now: Bytes,
    /// Everything up to the last point, that point, and how many there have been.
    history: Bytes,
    point: Bytes,
    points: u64,
    /// What arrival order would have given, and how often that was computed.
    counterfactual: Bytes,
    computed: u64,
}

impl Feed {
    /// Starts the task that looks. It ends with the gateway.
    pub fn start(gateway: &Arc<Gateway>, reloader: Reloader) -> Feed {
        let feed = Feed { frames: watch::Sender::new(Arc::default()), viewers: Arc::new(Semaphore::new(VIEWERS)), wanted: Arc::new(Notify::new()) };
        tokio::spawn(run(Arc::downgrade(gateway), reloader, feed.clone()));
        feed
    }

    /// A body that never ends; `None` when there are too many already.
    pub fn view(&self) -> Option<Body> {
        let place = Arc::clone(&self.viewers).try_acquire_owned().ok()?;
        let mut frames = self.frames.subscribe();
        if self.frames.receiver_count() == 1 {
            self.wanted.notify_one();
        }
        let (mut sender, body) = Channel::<Bytes, std::convert::Infallible>::new(1);
        tokio::spawn(async move {
            let _place = place;
            // Says at once that it goes well; a browser asks again this long after a cut.
            let mut next = vec![Bytes::from_static(b"retry: 2000\n\n")];
            let (mut points, mut computed) = (0, 0);
            loop {
                for part in next.drain(..) {
                    match timeout(PATIENCE, sender.send_data(part)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(_)) | Err(_) => return,
                    }
                }
                if frames.changed().await.is_err() {
                    return;
                }
                let frame = Arc::clone(&frames.borrow_and_update());
                match frame.points - points {
                    0 => {}
                    1 if points > 0 => next.push(frame.point.clone()),
                    _ => next.push(frame.history.clone()),
                }
                points = frame.points;
                if frame.computed != computed {
                    next.push(frame.counterfactual.clone());
                }
                computed = frame.computed;
                next.push(frame.now.clone());
            }
        });
        Some(Body::new(body))
    }
}

async fn run(gateway: Weak<Gateway>, reloader: Reloader, feed: Feed) {
    let mut seconds = interval(LOOK);
    seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut history = History::default();
    let mut counted = Counted::default();
    let (mut looked, mut ticks) = (Instant::now(), 0_u64);
    let (mut computing, mut compute_at) = (None::<JoinHandle<Option<Computed>>>, Instant::now());
    loop {
        let asked = tokio::select! {
            _ = seconds.tick() => false,
            () = feed.wanted.notified() => true,
        };
        let (is_point, is_watched) = (!asked && ticks.is_multiple_of(LOOKS_A_POINT), feed.frames.receiver_count() > 0);
        ticks += u64::from(!asked);
        // Whoever comes and goes does not make it look more often.
        if !(is_point || is_watched) || asked && looked.elapsed() < LOOK {
            continue;
        }
        looked = Instant::now();
        let Some(gateway) = gateway.upgrade() else { return };
        let seen = Seen::take(&gateway, if is_watched { OF_A_QUEUE } else { 0 }, &mut counted).await;
        let before = feed.frames.borrow().clone();
        let mut frame = Frame {
            history: before.history.clone(),
            point: before.point.clone(),
            points: before.points,
            now: Bytes::new(),
            counterfactual: before.counterfactual.clone(),
            computed: before.computed,
        };
        if let Some(task) = computing.take_if(|task| task.is_finished())
            && let Ok(Some(Computed { pools, next })) = task.await
        {
            // Nothing is an answer where there was something.
            if frame.computed > 0 || pools.as_object().is_some_and(|pools| !pools.is_empty()) {
                frame.counterfactual = event("counterfactual", &pools.to_string());
                frame.computed += 1;
            }
            compute_at = next;
        }
        if is_watched && computing.is_none() && Instant::now() >= compute_at {
            computing = Some(tokio::spawn(counterfactual::compute(Arc::clone(&gateway), POOLS, seen.unix)));
        }
        if is_point {
            let point = seen.point().to_string();
            frame.point = event("point", &point);
            history.push(point);
            frame.history = event("history", &history.shown());
            frame.points += 1;
        }
        if is_watched {
            frame.now = event("now", &seen.now(&gateway, &reloader).to_string());
        }
        feed.frames.send_replace(Arc::new(frame));
    }
}

fn event(name: &str, data: &str) -> Bytes {
    // JSON has no line break outside its strings, and none inside them.
    Bytes::from(format!("event: {name}\ndata: {data}\n\n"))
}

/// Everything of one look.
struct Seen {
    live: Arc<Live>,
    unix: u64,
    /// Parallel to the pools of `live`; `None` for one that did not answer in time.
    pools: Vec<Option<(Closeup, Time)>>,
    /// The latest first.
    ended: Vec<Arc<Ended>>,
    /// When the look was taken.
    at: Instant,
    /// Counts by then, and those of the look a span ago or since.
    totals: BTreeMap<Arc<str>, Totals>,
    before: BTreeMap<Arc<str>, Totals>,
    since: Duration,
}

/// Counts at the looks of the last span.
#[derive(Default)]
struct Counted(VecDeque<(Instant, BTreeMap<Arc<str>, Totals>)>);

impl Counted {
    /// Adds a look, and tells the counts that rates are taken from, and how long ago they were.
    fn look(&mut self, at: Instant, totals: &BTreeMap<Arc<str>, Totals>) -> (BTreeMap<Arc<str>, Totals>, Duration) {
        self.0.push_back((at, totals.clone()));
        // The one that is followed by another as old as the span is too old.
        while self.0.get(1).is_some_and(|(next, _)| at.duration_since(*next) >= SPAN) {
            self.0.pop_front();
        }
        self.0.front().map(|(then, before)| (before.clone(), at.duration_since(*then))).unwrap_or_default()
    }
}

impl Seen {
    async fn take(gateway: &Gateway, of_a_queue: usize, counted: &mut Counted) -> Seen {
        let live = gateway.live();
        let backends: usize = live.pools.iter().map(|pool| pool.targets().len()).sum();
        let most = of_a_queue.min(OF_ALL / backends.max(1));
        let mut pools = Vec::with_capacity(live.pools.len());
        for pool in &live.pools {
            let closeup = timeout(view::PATIENCE, pool.dispatcher.closeup(most)).await.ok().flatten();
            pools.push(closeup.map(|closeup| (closeup, pool.dispatcher.now())));
        }
        let at = Instant::now();
        let ended = gateway.recent.since(at.checked_sub(10 * SPAN).unwrap_or(at));
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let totals = gateway.recent.totals();
        let (before, since) = counted.look(at, &totals);
        Seen { live, unix, pools, ended, at, totals, before, since }
    }

    /// Of one pool, the latest first.
    fn ended<'a>(&'a self, pool: &'a str) -> impl Iterator<Item = &'a Ended> {
        self.ended.iter().map(Arc::as_ref).filter(move |ended| ended.pool.as_deref() == Some(pool))
    }

    /// Rates and percentiles of those of a pool that ended within the last span; percentiles of the last of them, where they are more than are remembered.
    fn recent(&self, pool: &str) -> Map<String, Value> {
        let within = || self.ended(pool).take_while(|ended| self.at.duration_since(ended.at) <= SPAN);
        let of = |totals: &BTreeMap<Arc<str>, Totals>| totals.get(pool).copied().unwrap_or_default();
        let (before, now) = (of(&self.before), of(&self.totals));
        let rate = |before: u64, now: u64| rounded((now - before) as f64 / self.since.as_secs_f64().max(1.0));
        view::object(json!({
            "ttft": percentiles(within().filter_map(|ended| ended.first_token)),
            "ttlt": percentiles(within().filter(|ended| ended.is_answered()).map(|ended| ended.total)),
            "wait": percentiles(within().filter_map(|ended| ended.queued)),
            "answered_per_second": rate(before.answered, now.answered),
            "failed_per_second": rate(before.failed, now.failed),
            "tokens_per_second": rate(before.output_tokens, now.output_tokens),
        }))
    }

    /// What is drawn over time.
    fn point(&self) -> Value {
        let pools = self.live.snapshot.pools.iter().zip(&self.pools).take(POOLS).filter_map(|(settings, closeup)| {
            let view = &closeup.as_ref()?.0.pool;
            let mut point = self.recent(&settings.name);
            point.append(&mut view::object(json!({
                "waiting": view.waiting,
                "in_flight": view.in_flight,
                "window": view.backends.iter().map(|backend| backend.window).sum::<u32>(),
                "gamma": view.gamma,
                "mode": view.mode.as_str(),
            })));
            Some((settings.name.clone(), Value::Object(point)))
        });
        json!({ "at": self.unix, "pools": pools.collect::<Map<_, _>>() })
    }

    fn now(&self, gateway: &Gateway, reloader: &Reloader) -> Value {
        let pools: Vec<Value> = (0..self.pools.len()).map(|index| self.pool(index)).collect();
        let (tenants, in_all) = view::busiest_tenants(&self.live, TENANTS);
        json!({
            "at": self.unix,
            "version": env!("CARGO_PKG_VERSION"),
            "draining": gateway.draining(),
            "config": view::configuration(gateway, &reloader.status()),
            "ranker": view::ranker(&self.live),
            "tenants": tenants,
            "tenants_in_all": in_all,
            "span_seconds": SPAN.as_secs(),
            "pools": pools,
            "failures": self.failures(&gateway.recent.failures()),
        })
    }

    fn pool(&self, index: usize) -> Value {
        let (settings, runtime) = (&self.live.snapshot.pools[index], &self.live.pools[index]);
        let closeup = self.pools[index].as_ref();
        let mut shown = view::pool(settings, runtime, closeup.map(|(closeup, _)| &closeup.pool));
        let (Value::Object(members), Some((closeup, now))) = (&mut shown, closeup) else { return shown };
        if let Some(Value::Array(backends)) = members.get_mut("backends") {
            for backend in backends.iter_mut() {
                let Some(queue) = closeup.queues.iter().find(|queue| backend["id"] == queue.backend.0) else { continue };
                let each = |requests: &[RequestView]| requests.iter().map(|request| bar(request, &closeup.labels, *now)).collect::<Vec<_>>();
                backend["queue"] = each(&queue.waiting).into();
                backend["running"] = each(&queue.running).into();
            }
        }
        members.insert("recent".into(), self.recent(&settings.name).into());
        members.insert("calibration".into(), self.calibration(&settings.name));
        shown
    }

    /// How predictions of a pool's lengths compare with its answers.
    fn calibration(&self, pool: &str) -> Value {
        let pair = |ended: &Ended| {
            let (predicted, real) = (ended.predicted_tokens?, ended.output_tokens);
            (ended.is_answered() && ended.scoring.is_some() && predicted > 0 && real > 0).then_some((predicted, real))
        };
        let pairs: Vec<(u32, u32)> = self.ended(pool).filter_map(pair).take(JUDGED).collect();
        let sum = |of: fn(&(u32, u32)) -> f64| pairs.iter().map(of).sum::<f64>();
        let real = sum(|(_, real)| f64::from(*real));
        let share = |part: f64| if real > 0.0 { Some(rounded(part / real)) } else { None };
        json!({
            "answers": pairs.len(),
            // Of the real tokens: by how much all predictions together are off, and how far each is off on average.
            "bias": share(sum(|(predicted, real)| f64::from(*predicted) - f64::from(*real))),
            "error": share(sum(|(predicted, real)| f64::from(predicted.abs_diff(*real)))),
            "pairs": pairs.iter().take(PAIRS).map(|(predicted, real)| json!([predicted, real])).collect::<Vec<_>>(),
        })
    }

    /// Those that failed in the same way are counted together, the kind that happened last first.
    fn failures(&self, failures: &[Arc<Ended>]) -> Value {
        let kind = |ended: &Ended| (ended.reason, ended.status, ended.pool.clone(), ended.model.clone(), ended.backend.clone(), ended.tenant.clone());
        let mut kinds: Vec<(&Ended, usize)> = Vec::new();
        for ended in failures {
            match kinds.iter_mut().find(|(latest, _)| kind(latest) == kind(ended)) {
                Some((_, times)) => *times += 1,
                None => kinds.push((ended, 1)),
            }
        }
        let shown = kinds.iter().take(FAILURES).map(|(latest, times)| {
            json!({
                "reason": latest.reason,
                "status": latest.status,
                "pool": latest.pool.as_deref(),
                "model": *latest.model,
                "backend": latest.backend.as_deref(),
                "tenant": latest.tenant.as_deref(),
                "times": times,
                "id": *latest.id,
                "seconds_ago": rounded(self.at.duration_since(latest.at).as_secs_f64()),
                "after_seconds": rounded(latest.total.as_secs_f64()),
            })
        });
        shown.collect()
    }
}

/// One request of a lane, short because there are hundreds: id, expected tokens, seconds that it has waited or run, and whether it is aged or the tokens that it
/// has produced.
fn bar(request: &RequestView, labels: &HashMap<crate::scheduler::RequestId, Arc<str>>, now: Time) -> Value {
    let label = labels.get(&request.id).map_or("", |label| &**label);
    let since = |moment: Time| rounded(now.since(moment).as_secs_f64());
    match request.stage {
        StageView::Waiting { aged, .. } => json!([label, request.expected_output, since(request.arrived), u8::from(aged)]),
        StageView::Running { released, produced } => json!([label, request.expected_output, since(released), produced]),
    }
}

/// p50, p90 and p99 in seconds, by nearest rank; `null` for nothing.
fn percentiles(of: impl Iterator<Item = Duration>) -> Value {
    let mut seconds: Vec<f64> = of.map(|span| span.as_secs_f64()).collect();
    if seconds.is_empty() {
        return Value::Null;
    }
    seconds.sort_unstable_by(f64::total_cmp);
    let rank = |share: f64| rounded(seconds[((share * seconds.len() as f64).ceil() as usize).clamp(1, seconds.len()) - 1]);
    json!({ "p50": rank(0.5), "p90": rank(0.9), "p99": rank(0.99), "count": seconds.len() })
}

/// Three decimals are as many as anybody can see. Never negative zero, which the sum of nothing is.
pub(super) fn rounded(number: f64) -> f64 {
    (number * 1e3).round() / 1e3 + 0.0
}

/// The last points, as the JSON text that each was written as.
#[derive(Default)]
struct History(VecDeque<String>);

impl History {
    fn push(&mut self, point: String) {
        if self.0.len() >= POINTS {
            self.0.pop_front();
        }
        self.0.push_back(point);
    }

    fn shown(&self) -> String {
        let mut points = String::with_capacity(self.0.iter().map(|point| point.len() + 1).sum::<usize>() + 2);
        points.push('[');
        for (index, point) in self.0.iter().enumerate() {
            points.extend((index > 0).then_some(','));
            points.push_str(point);
        }
        points.push(']');
        points
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn rates_are_of_the_last_span_however_often_it_is_looked_at() {
        let start = Instant::now();
        let mut counted = Counted::default();
        let totals = |answered| BTreeMap::from([(Arc::from("chat"), Totals { answered, ..Totals::default() })]);
        let mut look = |second: u64, answered| {
            let (before, since) = counted.look(start + Duration::from_secs(second), &totals(answered));
            (before["chat"].answered, since.as_secs())
        };
        assert_eq!([look(0, 7), look(5, 8), look(10, 10)], [(7, 0), (7, 5), (7, 10)], "as long as there is less");
        assert_eq!([look(30, 20), look(34, 30), look(36, 40)], [(7, 30), (7, 34), (8, 31)]);
        assert_eq!(look(1000, 50), (40, 964), "nobody looked on");
    }
}
