//! The one task that owns the engine: it steps the model in real time and tells each request how far it is.
//!
//! An iteration begins where the one before it ended, not when the timer happened to fire, so late timers (tokio's tick is a millisecond) never add up.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

use super::feed::{End, Feed};
use crate::engine::{Engine, Event, Profile, What, Work};
use crate::scheduler::{RequestId, Time};

/// The newest labels that a report keeps of arrivals and admissions.
const LABELS_KEPT: usize = 100_000;

enum Command {
    Submit { id: RequestId, label: String, work: Work, feed: Feed },
    Cancel(RequestId),
    Report(oneshot::Sender<Report>),
    Slow(f64),
    Reset,
}

/// The engine's state, as `GET /sim/state` shows it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    pub running: usize,
    pub waiting: usize,
    pub kv_blocks: u32,
    pub kv_blocks_held: u32,
    pub kv_usage: f64,
    pub finished: u64,
    pub aborted: u64,
    pub preemptions: u64,
    pub prompt_tokens: u64,
    pub generation_tokens: u64,
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub iterations: u64,
    /// Seconds of the model's time spent in iterations.
    pub busy_seconds: f64,
    /// `x-request-id` of requests in the order they reached the engine's queue.
    pub arrived: Vec<String>,
    /// The same in the order they were first admitted to run.
    pub admitted: Vec<String>,
}

/// Talks to the driver's task.
#[derive(Clone)]
pub(super) struct Client {
    // Unbounded, because a guard must be able to cancel from `drop`. Each connection has at most one request's commands in it.
    commands: mpsc::UnboundedSender<Command>,
    next: std::sync::Arc<AtomicU64>,
}

/// A request inside the engine. Dropping it frees what it holds there.
pub(super) struct Running {
    id: RequestId,
    pub(super) feed: Feed,
    commands: mpsc::UnboundedSender<Command>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // A finished request is unknown to the engine by now, which then ignores this.
        let _ = self.commands.send(Command::Cancel(self.id));
    }
}

impl Client {
    /// A client and the task to run.
    pub(super) fn new(profile: Profile, speed: f64) -> (Client, Driver) {
        let (commands, inbox) = mpsc::unbounded_channel();
        let driver = Driver {
            engine: Engine::new(profile),
            clock: Clock { anchor: Instant::now(), at_anchor: Time::ZERO, rate: speed },
            speed,
            inbox,
            requests: HashMap::new(),
            arrived: Vec::new(),
            admitted: Vec::new(),
        };
        (Client { commands, next: Default::default() }, driver)
    }

    /// Puts work into the engine's queue.
    pub(super) fn submit(&self, label: String, work: Work) -> Running {
        let id = RequestId(self.next.fetch_add(1, Ordering::Relaxed));
        let feed = Feed::default();
        if self.commands.send(Command::Submit { id, label, work, feed: feed.clone() }).is_err() {
            feed.update(|progress| progress.end = Some(End::Cut));
        }
        Running { id, feed, commands: self.commands.clone() }
    }

    /// The engine's state now; an empty one if its task has ended.
    pub(super) async fn report(&self) -> Report {
        let (reply, report) = oneshot::channel();
        let _ = self.commands.send(Command::Report(reply));
        report.await.unwrap_or_default()
    }

    /// Makes iterations `factor` times as long as the profile says.
    pub(super) fn slow(&self, factor: f64) {
        let _ = self.commands.send(Command::Slow(factor));
    }

    /// Cuts every request and begins anew.
    pub(super) fn reset(&self) {
        let _ = self.commands.send(Command::Reset);
    }
}

/// The model's time against the real one.
struct Clock {
    anchor: Instant,
    at_anchor: Time,
    /// Seconds of the model in one real second.
    rate: f64,
}

impl Clock {
    fn now(&self) -> Time {
        self.at_anchor.after(self.anchor.elapsed().mul_f64(self.rate))
    }

    fn real(&self, time: Time) -> Instant {
        // A day is longer than any iteration; the cap keeps a factor near zero from overflowing.
        let seconds = (time.since(self.at_anchor).as_secs_f64() / self.rate).min(86_400.0);
        self.anchor + Duration::from_secs_f64(seconds)
    }

    fn change_rate(&mut self, rate: f64) {
        self.at_anchor = self.now();
        self.anchor = Instant::now();
        self.rate = rate;
    }
}

struct Live {
    label: String,
    feed: Feed,
    admitted: bool,
}

/// See the module.
pub(super) struct Driver {
    engine: Engine,
    clock: Clock,
    speed: f64,
    inbox: mpsc::UnboundedReceiver<Command>,
    requests: HashMap<RequestId, Live>,
    arrived: Vec<String>,
    admitted: Vec<String>,
}

impl Driver {
    /// Runs until every client is gone.
    pub(super) async fn run(mut self) {
        let mut events = Vec::new();
        loop {
            let next = self.engine.advance(self.clock.now(), &mut events);
            self.tell(&mut events);
            let command = match next {
                None => self.inbox.recv().await,
                Some(time) => tokio::select! {
                    biased;
                    command = self.inbox.recv() => command,
                    () = sleep_until(self.clock.real(time)) => continue,
                },
            };
            let Some(command) = command else { return };
            // What is over by now must be so before the command changes anything.
            self.engine.advance(self.clock.now(), &mut events);
            self.tell(&mut events);
            self.obey(command);
            while let Ok(command) = self.inbox.try_recv() {
                self.obey(command);
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit { id, label, work, feed } => match self.engine.submit(self.clock.now(), id, work) {
                Ok(()) => {
                    keep(&mut self.arrived, &label);
                    self.requests.insert(id, Live { label, feed, admitted: false });
                }
                // The handler has checked the length, and ids are never reused.
                Err(_) => feed.update(|progress| progress.end = Some(End::Cut)),
            },
            Command::Cancel(id) => {
                self.engine.cancel(id);
                self.requests.remove(&id);
            }
            Command::Report(reply) => {
                // The asker may be gone.
                let _ = reply.send(self.report());
            }
            Command::Slow(factor) => self.clock.change_rate(self.speed / factor),
            Command::Reset => self.reset(),
        }
    }

    /// Everything as at the start, but for the clock.
    fn reset(&mut self) {
        for (_, live) in self.requests.drain() {
            live.feed.update(|progress| progress.end = Some(End::Cut));
        }
        self.engine = Engine::new(*self.engine.profile());
        self.arrived.clear();
        self.admitted.clear();
    }

    fn report(&self) -> Report {
        let counters = self.engine.counters();
        Report {
            running: self.engine.running(),
            waiting: self.engine.waiting(),
            kv_blocks: self.engine.profile().kv_blocks,
            kv_blocks_held: self.engine.kv_blocks_held(),
            kv_usage: self.engine.kv_usage(),
            finished: counters.finished,
            aborted: counters.cancelled,
            preemptions: counters.preemptions,
            prompt_tokens: counters.prompt_tokens,
            generation_tokens: counters.generation_tokens,
            prefix_queries: counters.prefix_queries,
            prefix_hits: counters.prefix_hits,
            iterations: counters.iterations,
            busy_seconds: counters.busy.as_secs_f64(),
            arrived: self.arrived.clone(),
            admitted: self.admitted.clone(),
        }
    }

    fn tell(&mut self, events: &mut Vec<Event>) {
        for Event { id, what, .. } in events.drain(..) {
            let Some(live) = self.requests.get_mut(&id) else { continue };
            match what {
                What::Admitted { cached } if !live.admitted => {
                    live.admitted = true;
                    keep(&mut self.admitted, &live.label);
                    live.feed.update(|progress| progress.cached = cached);
                }
                What::Admitted { .. } | What::Preempted => {}
                What::Token(produced) => live.feed.update(|progress| progress.produced = produced),
                What::Finished => {
                    live.feed.update(|progress| progress.end = Some(End::Finished));
                    self.requests.remove(&id);
                }
            }
        }
    }
}

fn keep(labels: &mut Vec<String>, label: &str) {
    if labels.len() == LABELS_KEPT {
        labels.remove(0);
    }
    labels.push(label.to_owned());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Timing;

    /// 1.3 ms an iteration: never a whole number of the timer's ticks.
    fn profile() -> Profile {
        let timing = Timing { base: 1.3e-3, per_sequence: 0.0, per_prefill_token: 0.0, per_kv_token: 0.0 };
        Profile { timing, max_num_seqs: 1, ..Profile::medium() }
    }

    fn work(output_tokens: u32) -> Work {
        Work { prompt_tokens: 5, output_tokens, ..Work::default() }
    }

    fn start(speed: f64) -> Client {
        let (client, driver) = Client::new(profile(), speed);
        tokio::spawn(driver.run());
        client
    }

    #[tokio::test(start_paused = true)]
    async fn late_timers_do_not_add_up() {
        let client = start(1.0);
        let before = Instant::now();
        let running = client.submit("a".into(), work(1_000));
        assert_eq!(running.feed.ended().await.produced, 1_000);
        let took = before.elapsed();
        assert!(took >= Duration::from_millis(1_300) && took < Duration::from_millis(1_303), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn speed_and_slowness_scale_real_time_from_then_on() {
        let client = start(10.0);
        let before = Instant::now();
        client.submit("a".into(), work(1_000)).feed.ended().await;
        let fast = before.elapsed();
        assert!(fast >= Duration::from_millis(130) && fast < Duration::from_millis(133), "{fast:?}");

        let running = client.submit("b".into(), work(1_000));
        std::future::poll_fn(|context| running.feed.poll(499, context)).await;
        client.slow(4.0);
        running.feed.ended().await;
        let both = before.elapsed() - fast;
        assert!(both >= Duration::from_millis(65 + 4 * 65 - 3) && both < Duration::from_millis(65 + 4 * 65 + 5), "{both:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn dropping_a_request_lets_the_next_one_run() {
        let client = start(1.0);
        let first = client.submit("first".into(), work(10_000));
        let second = client.submit("second".into(), work(3));
        let third = client.submit("third".into(), work(3));
        std::future::poll_fn(|context| first.feed.poll(0, context)).await;
        drop(second);
        drop(first);
        assert_eq!(third.feed.ended().await, crate::engine::server::feed::Progress { produced: 3, cached: 0, end: Some(End::Finished) });
        let report = client.report().await;
        assert_eq!((report.running, report.waiting, report.kv_blocks_held, report.aborted, report.finished), (0, 0, 0, 2, 1));
        assert_eq!((report.arrived, report.admitted), (vec!["first".into(), "second".into(), "third".into()], vec!["first".into(), "third".into()]));
    }
}
