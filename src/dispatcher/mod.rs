//! The owner task of one pool. It waits in [`Owner::next`], changes the scheduler in [`Owner::apply`] and acts in [`Owner::perform`]; everyone else
//! holds a [`Dispatcher`], a [`Ticket`] or a [`Permit`] and sends it messages.
//!
//! The channel has no bound of its own and needs none: apart from the fleet's reports, every message belongs to a ticket or a permit, each of which sends
//! at most a few dozen in its life (progress is told at geometric levels only), and the number of tickets is bounded by the connections of the edge.

mod permit;
#[cfg(test)]
mod tests;
mod ticket;

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

pub use permit::Permit;
pub use ticket::{Asker, Rejection, Ticket};

use crate::scheduler::{
    Action, BackendId, BackendState, Calibrated, Event, Facts, History, Learnt, Limits, Load, ModelId, Outlook, Policy, PoolView, QueueView, Reason,
    Request, RequestId, RequestView, Scheduler, Score, Scored, Standpoint, TenantId, Time, Tokens, Weight,
};

/// More waiting requests than this are not ordered anew on a thread that others need.
const MANY: usize = 4096;

/// What a pool's scheduler starts with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What to order by.
    pub policy: Policy,
    /// How much may wait.
    pub limits: Limits,
    /// Decides ties of placement; the same seed and events give the same actions.
    pub seed: u64,
}

/// A request as the edge describes it; see [`Request`] for the fields.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// When the client's request arrived, by [`Dispatcher::now`]; kept when it is sent again.
    pub arrived: Time,
    /// Whose lengths to expect.
    pub model: ModelId,
    /// The ranker's opinion; `None` is neutral.
    pub score: Option<Scored>,
    /// What came before it, where that is known.
    pub history: Option<Arc<History>>,
    /// Estimated prompt tokens.
    pub prompt_tokens: Tokens,
    /// The client's limit on output tokens.
    pub max_output: Option<Tokens>,
    /// Output already produced for this piece of work.
    pub attained: Tokens,
    /// Whose it is, where that is known.
    pub tenant: Option<TenantId>,
    /// How much ahead of others it goes.
    pub weight: Weight,
    /// Its tenant's share of the pool.
    pub share: Weight,
    /// When waiting becomes pointless.
    pub expires: Time,
    /// Bytes of the body that waits with it.
    pub bytes: u32,
    /// Produces no decode work.
    pub unscored: bool,
    /// Backends already tried.
    pub excluded: Vec<BackendId>,
    /// What operators know it by.
    pub label: Arc<str>,
}

/// A pool with the requests in it.
#[derive(Clone, Debug)]
pub struct Closeup {
    /// The pool as a whole.
    pub pool: PoolView,
    /// Of each backend, what runs and what waits.
    pub queues: Vec<QueueView>,
    /// What operators know these requests by.
    pub labels: HashMap<RequestId, Arc<str>>,
}

/// One request that waits or runs, found by its label.
#[derive(Clone, Debug)]
pub struct Found {
    /// Where it is and why.
    pub standpoint: Standpoint,
    /// What the calibration makes of its score, if it has one.
    pub calibrated: Option<Calibrated>,
    /// What operators know the others in it by.
    pub labels: HashMap<RequestId, Arc<str>>,
}

/// A handle to one pool's owner task; cheap to clone. The task ends when the last handle, ticket and permit are gone.
#[derive(Clone)]
pub struct Dispatcher {
    messages: mpsc::UnboundedSender<Message>,
    ids: Arc<AtomicU64>,
    start: Instant,
}

/// What the owner task is told.
enum Message {
    Enqueue(Box<Request>, Waiter),
    Happened(Event),
    View(oneshot::Sender<PoolView>),
    Closeup { most: usize, reply: oneshot::Sender<Closeup> },
    Find { label: Arc<str>, most: usize, reply: oneshot::Sender<Option<Found>> },
    Calibrated { model: ModelId, score: Score, reply: oneshot::Sender<Calibrated> },
    Outlook { id: RequestId, reply: oneshot::Sender<Option<Outlook>> },
    Move(Handle),
    Restore(Box<Learnt>),
    Learnt(oneshot::Sender<Learnt>),
    Drain { deadline: Instant, done: oneshot::Sender<Drained> },
}

/// Who waits for a slot.
struct Waiter {
    label: Arc<str>,
    grant: oneshot::Sender<Result<Permit, Rejection>>,
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Requests that were turned away because they still waited at the deadline.
    pub turned_away: usize,
    /// Requests that were still running at the deadline.
    pub running: usize,
}

impl Dispatcher {
    /// Starts the owner task of a pool without backends. Needs a tokio runtime.
    pub fn spawn(settings: Settings) -> Dispatcher {
        let (messages, inbox) = mpsc::unbounded_channel();
        let start = Instant::now();
        let owner = Owner {
            scheduler: Scheduler::new(settings.policy, settings.limits, settings.seed),
            inbox,
            messages: messages.downgrade(),
            start,
            waiting: HashMap::new(),
            running: HashMap::new(),
            draining: None,
            actions: Vec::new(),
        };
        tokio::spawn(owner.run());
        Dispatcher { messages, ids: Arc::new(AtomicU64::new(0)), start }
    }

    /// The pool's time now.
    pub fn now(&self) -> Time {
        time_since(self.start)
    }

    /// This moment by the pool's clock; its start for what was before it.
    pub fn at(&self, moment: Instant) -> Time {
        Time::ZERO.after(moment.saturating_duration_since(self.start))
    }

    /// Asks for a slot. The answer comes through the ticket; dropping the ticket leaves the queue.
    pub fn enqueue(&self, arrival: Arrival) -> Ticket {
        // Relaxed is enough: the id only has to be unique, the channel orders everything else.
        let id = RequestId(self.ids.fetch_add(1, Ordering::Relaxed));
        let request = Request {
            id,
            arrived: arrival.arrived,
            model: arrival.model,
            score: arrival.score,
            prompt_tokens: arrival.prompt_tokens,
            max_output: arrival.max_output,
            attained: arrival.attained,
            weight: arrival.weight,
            share: arrival.share,
            expires: arrival.expires,
            bytes: arrival.bytes,
            unscored: arrival.unscored,
            excluded: arrival.excluded,
            tenant: arrival.tenant,
            history: arrival.history,
            oracle_output: None,
        };
        let (grant, answer) = oneshot::channel();
        self.send(Message::Enqueue(Box::new(request), Waiter { label: arrival.label, grant }));
        Ticket::new(id, answer, self.messages.clone())
    }

    /// A backend joined or its state changed.
    pub fn backend_changed(&self, backend: BackendId, state: BackendState) {
        self.send(Message::Happened(Event::BackendChanged(backend, state)));
    }

    /// The backend's own numbers; unknown where they are too old.
    pub fn load_reported(&self, backend: BackendId, load: Load) {
        self.send(Message::Happened(Event::LoadReported(backend, load)));
    }

    /// Another policy applies from now on.
    pub fn policy_changed(&self, policy: Policy) {
        self.send(Message::Happened(Event::PolicyChanged(policy)));
    }

    /// Other limits apply from now on.
    pub fn limits_changed(&self, limits: Limits) {
        self.send(Message::Happened(Event::LimitsChanged(limits)));
    }

    /// The owner task goes on in another runtime: where the requests are, a message to it or from it wakes no other thread.
    pub fn move_to(&self, runtime: Handle) {
        self.send(Message::Move(runtime));
    }

    /// Adds what was learnt before, or what ships with a ranker.
    pub fn restore(&self, learnt: Learnt) {
        self.send(Message::Restore(Box::new(learnt)));
    }

    /// What was learnt so far; `None` once the task has ended.
    pub async fn learnt(&self) -> Option<Learnt> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Learnt(reply));
        answer.await.ok()
    }

    /// What the pool looks like now; `None` once its task has ended.
    pub async fn view(&self) -> Option<PoolView> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::View(reply));
        answer.await.ok()
    }

    /// The same, with at most `most` requests that run and `most` that wait for each backend.
    pub async fn closeup(&self, most: usize) -> Option<Closeup> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Closeup { most, reply });
        answer.await.ok()
    }

    /// The request with this label, and at most `most` of those it passes and that pass it; `None` if it neither waits nor runs here. Walks through all of them.
    pub async fn find(&self, label: &str, most: usize) -> Option<Found> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Find { label: label.into(), most, reply });
        answer.await.ok().flatten()
    }

    /// What the pool's calibration makes of a score now.
    pub async fn calibrated(&self, model: ModelId, score: Score) -> Option<Calibrated> {
        let (reply, answer) = oneshot::channel();
        self.send(Message::Calibrated { model, score, reply });
        answer.await.ok()
    }

    /// Accepts nothing more, lets everything that waits and runs finish until `within` has passed, then turns away what still waits.
    /// What still runs then is the caller's to cut.
    pub async fn drain(&self, within: Duration) -> Drained {
        let (done, answer) = oneshot::channel();
        self.send(Message::Drain { deadline: Instant::now() + within, done });
        // No answer: the task has ended with its runtime, and nothing waits or runs.
        answer.await.unwrap_or(Drained { turned_away: 0, running: 0 })
    }

    /// A failed send means that the task has ended with its runtime; tickets then answer with [`Reason::Draining`] by themselves.
    fn send(&self, message: Message) {
        let _ = self.messages.send(message);
    }
}

fn time_since(start: Instant) -> Time {
    Time::from_micros(u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX))
}

/// A drain in progress.
struct Draining {
    deadline: Instant,
    turned_away: usize,
    /// Taken when the drain is over.
    done: Option<oneshot::Sender<Drained>>,
}

/// The task that owns one pool's scheduler.
struct Owner {
    scheduler: Scheduler,
    inbox: mpsc::UnboundedReceiver<Message>,
    /// For the permits made here. Weak, so that the owner does not keep itself alive.
    messages: mpsc::WeakUnboundedSender<Message>,
    start: Instant,
    /// Where to send the answer of each waiting request.
    waiting: HashMap<RequestId, Waiter>,
    /// Permits that have not come back, and what operators know their requests by.
    running: HashMap<RequestId, Arc<str>>,
    draining: Option<Draining>,
    /// Scratch space for the scheduler's answers.
    actions: Vec<Action>,
}

/// Why the owner woke up.
enum Woken {
    Told(Message),
    Deadline,
    DrainDeadline,
    Abandoned,
}

impl Owner {
    async fn run(mut self) {
        loop {
            match self.next().await {
                Woken::Told(Message::Move(runtime)) => return self.go_on_in(&runtime),
                Woken::Told(message) => self.apply(message),
                Woken::Deadline => self.handle(Event::Tick),
                // The drain's own end is settled below.
                Woken::DrainDeadline => {}
                Woken::Abandoned => return,
            }
            self.settle_drain();
        }
    }

    fn go_on_in(self, runtime: &Handle) {
        // Boxed, since the future of `run` would otherwise be part of its own type.
        let run: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(self.run());
        runtime.spawn(run);
    }

    /// Waits: nothing changes here.
    async fn next(&mut self) -> Woken {
        let deadline = self.scheduler.next_deadline().map(|time| self.start + Duration::from_micros(time.as_micros()));
        let drain_deadline = self.draining.as_ref().filter(|draining| draining.done.is_some()).map(|draining| draining.deadline);
        tokio::select! {
            // Messages first: an event that has happened is known before time is said to have passed.
            biased;
            message = self.inbox.recv() => message.map_or(Woken::Abandoned, Woken::Told),
            () = sleep_until(deadline) => Woken::Deadline,
            () = sleep_until(drain_deadline) => Woken::DrainDeadline,
        }
    }

    /// Changes: the scheduler hears what happened.
    fn apply(&mut self, message: Message) {
        match message {
            Message::Enqueue(request, waiter) => {
                self.waiting.insert(request.id, waiter);
                self.handle(Event::Arrived(*request));
            }
            Message::Happened(event) => {
                match event {
                    Event::Cancelled(id) => drop(self.waiting.remove(&id)),
                    // Every permit sends this exactly once.
                    Event::Finished(id, _) => drop(self.running.remove(&id)),
                    _ => {}
                }
                self.handle(event);
            }
            // A reader that has stopped waiting for the answer is no concern of the pool.
            Message::View(reply) => drop(reply.send(self.scheduler.view())),
            Message::Closeup { most, reply } => drop(reply.send(apart(self.waiting.len() > MANY, || self.closeup(most)))),
            Message::Find { label, most, reply } => drop(reply.send(apart(self.waiting.len() > MANY, || self.find(&label, most)))),
            Message::Calibrated { model, score, reply } => drop(reply.send(self.scheduler.calibrated(model, score))),
            Message::Outlook { id, reply } => {
                let now = time_since(self.start);
                _ = reply.send(apart(self.waiting.len() > MANY, || self.scheduler.outlook(now, id)));
            }
            Message::Restore(learnt) => apart(true, || self.scheduler.restore(&learnt)),
            Message::Learnt(reply) => drop(reply.send(apart(true, || self.scheduler.learnt()))),
            // `run` has taken it.
            Message::Move(_) => {}
            Message::Drain { deadline, done } => {
                self.draining = Some(Draining { deadline, turned_away: 0, done: Some(done) });
                self.handle(Event::DrainStarted);
            }
        }
    }

    fn closeup(&self, most: usize) -> Closeup {
        let queues = self.scheduler.queues(most);
        let labels = self.labels(queues.iter().flat_map(|queue| queue.running.iter().chain(&queue.waiting)));
        Closeup { pool: self.scheduler.view(), queues, labels }
    }

    fn labels<'a>(&self, requests: impl Iterator<Item = &'a RequestView>) -> HashMap<RequestId, Arc<str>> {
        let label = |id| self.running.get(&id).or_else(|| self.waiting.get(&id).map(|waiter| &waiter.label));
        requests.filter_map(|request| Some((request.id, Arc::clone(label(request.id)?)))).collect()
    }

    fn find(&self, label: &str, most: usize) -> Option<Found> {
        let running = self.running.iter().find(|(_, known)| &***known == label).map(|(id, _)| *id);
        let id = running.or_else(|| self.waiting.iter().find(|(_, waiter)| &*waiter.label == label).map(|(id, _)| *id))?;
        let standpoint = self.scheduler.standpoint(id, most)?;
        let calibrated = standpoint.request.score.map(|scored| self.scheduler.calibrated(standpoint.request.model, scored.score));
        let labels = self.labels(standpoint.position.iter().flat_map(|position| position.overtaking.iter().chain(&position.overtaken)));
        Some(Found { standpoint, calibrated, labels })
    }

    fn handle(&mut self, event: Event) {
        let mut actions = std::mem::take(&mut self.actions);
        let now = time_since(self.start);
        let reorders =
            self.scheduler.chores_due(now) || matches!(event, Event::PolicyChanged(_) | Event::LimitsChanged(_) | Event::BackendChanged(..));
        apart(reorders && self.waiting.len() > MANY, || self.scheduler.handle(now, event, &mut actions));
        for action in actions.drain(..) {
            self.perform(action);
        }
        self.actions = actions;
    }

    fn perform(&mut self, action: Action) {
        match action {
            Action::Release { request, backend, facts } => self.release(request, backend, facts),
            Action::Reject { request, reason, retry_after } => self.reject(request, Rejection { reason, retry_after }),
        }
    }

    /// Hands out a permit. When the ticket has gone in the meantime, the permit comes back in the failed send and settles on drop.
    fn release(&mut self, request: RequestId, backend: BackendId, facts: Facts) {
        let Some(messages) = self.messages.upgrade() else {
            // No handle, ticket or permit is left: nobody to run for, and the next wait ends this task.
            return;
        };
        let permit = Permit::new(request, backend, facts, messages);
        let Some(Waiter { label, grant }) = self.waiting.remove(&request) else {
            self.running.insert(request, Arc::default());
            return drop(permit);
        };
        self.running.insert(request, label);
        drop(grant.send(Ok(permit)));
    }

    fn reject(&mut self, request: RequestId, rejection: Rejection) {
        if let Some(Waiter { grant, .. }) = self.waiting.remove(&request) {
            // A client that left at the same moment needs no answer.
            drop(grant.send(Err(rejection)));
        }
    }

    /// The drain deadline has passed: whatever still waits is turned away.
    fn end_drain(&mut self) {
        let mut left: Vec<RequestId> = self.waiting.keys().copied().collect();
        left.sort_unstable();
        if let Some(draining) = &mut self.draining {
            draining.turned_away = left.len();
        }
        for request in left {
            self.reject(request, Rejection { reason: Reason::Draining, retry_after: 1 });
            self.handle(Event::Cancelled(request));
        }
    }

    /// Reports a drain that is over: nothing is left, or its deadline has passed.
    fn settle_drain(&mut self) {
        let Some(Draining { deadline, done: Some(_), .. }) = self.draining else { return };
        // Whatever woke the task at that moment: nobody who waits may be left out of the report.
        let over = Instant::now() >= deadline;
        if over {
            self.end_drain();
        }
        let idle = self.waiting.is_empty() && self.running.is_empty();
        if (idle || over)
            && let Some(draining) = &mut self.draining
            && let Some(done) = draining.done.take()
        {
            // Whoever started the drain may have stopped waiting for its end.
            let _ = done.send(Drained { turned_away: draining.turned_away, running: self.running.len() });
        }
    }
}

/// Does what may take milliseconds while the other tasks of this thread go on on another; where there is no other, they wait.
fn apart<T>(is_long: bool, work: impl FnOnce() -> T) -> T {
    if is_long && Handle::current().runtime_flavor() == RuntimeFlavor::MultiThread { tokio::task::block_in_place(work) } else { work() }
}

async fn sleep_until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// Tells the owner what happened to a ticket or a permit, from wherever that is dropped.
fn tell(messages: &mpsc::UnboundedSender<Message>, event: Event) {
    // The owner is gone only when its runtime is: nothing is left to settle then.
    let _ = messages.send(Message::Happened(event));
}
