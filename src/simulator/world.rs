//! The run itself: one heap of what is to come, and what each of it does to clients, gateway and engines.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::time::Duration;

use super::account::{Answer, End, Foretold, Moment, Run};
use super::check::{Broken, Check, Wrong};
use super::fairness::{self, Fairness};
use super::faults::{Fault, Tells};
use super::member::{Clock, Member};
use super::random::Random;
use super::workload::{Job, Workload};
use super::{Dispatch, Setup};
use crate::engine::{Counters, Engine, Event as Computed, What, Work};
use crate::scheduler::{
    Action, BackendId, Ending, Event, Facts, LEVEL, Load, Reason, Request, RequestId, Scheduler, Score, Scored, Standing, Time, Tokens,
};

/// Between two readings of a metrics page under traffic, and otherwise, as the fleet reads them.
const BUSY_READING: Duration = Duration::from_millis(250);
const IDLE_READING: Duration = Duration::from_secs(1);
/// Traffic is a release within this span, or anything that runs in the engine.
const TRAFFIC: Duration = Duration::from_secs(2);
/// How long it takes to find out that nobody listens, or that an answer is an error.
const FAILING: Duration = Duration::from_millis(1);
/// Nothing that a client would notice for this long, with nobody left to come, is a standstill.
const STANDSTILL: Duration = Duration::from_secs(3600);
/// The unit of an engine's priority field, in microseconds of boosted arrival.
const PRIORITY_UNIT: i64 = 100_000;

/// How finely an engine's priority field tells scores apart.
const SCORE_UNITS: f64 = 1e6;

/// Something to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    /// A job is sent for the first time.
    Sent(u32),
    /// It is sent again after a failed attempt.
    SentAgain(u32),
    /// An iteration ends, unless the backend's plans have changed since.
    Iteration {
        backend: u32,
        plan: u32,
    },
    /// A backend's metrics page is read.
    Reading(u32),
    /// The client of a job loses patience.
    Impatient(u32),
    /// The client of a stay asks when it is its turn.
    Asks(u32),
    /// The gateway hears that a stay has ended: now, or once more.
    Heard(u32),
    HeardTwice(u32),
    /// The gateway notices that a backend is down.
    Noticed(u32),
    /// A backend comes back.
    Back(u32),
    Fault(u32),
    Look,
    /// A window of fairness is over.
    Window,
}

/// One attempt to get a job done: a stay in the gateway's queue and at a backend. Its id is its place in the list.
#[derive(Clone, Copy, Debug)]
struct Stay {
    job: u32,
    stage: Stage,
    backend: u32,
    output: Tokens,
    /// At which output the gateway's edge next tells the scheduler.
    next_level: Tokens,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Waiting,
    Running,
    /// Over at the backend; the gateway has yet to hear of it.
    Over(Ending),
    /// Known to be over.
    Settled(Ending),
    /// Never reached a backend.
    Left,
}

/// What becomes of a job.
#[derive(Clone, Debug)]
struct Trip {
    answer: Answer,
    /// The stay under way.
    stay: u32,
    excluded: Vec<BackendId>,
    over: bool,
}

struct Backend {
    member: Member,
    engine: Engine,
    clock: Clock,
    standing: Standing,
    drained: bool,
    up: bool,
    /// When, by the engine's clock, its iteration ends.
    wake: Option<Time>,
    /// Goes up whenever a planned end of an iteration no longer holds.
    plan: u32,
    tells: Tells,
    /// What it told when it began to be stale.
    stale: Load,
    traffic: Time,
    /// Requests of ours that it has.
    holds: u32,
    /// Counts of engines that crashed.
    before: Counters,
}

impl Backend {
    fn new(member: Member, now: Time) -> Self {
        Backend {
            engine: Engine::new(member.profile),
            clock: Clock::new(now, member.speed),
            standing: Standing::Healthy,
            drained: false,
            up: true,
            wake: None,
            plan: 0,
            tells: Tells::Truth,
            stale: Load::default(),
            traffic: now,
            holds: 0,
            before: Counters::default(),
            member,
        }
    }

    fn truth(&self) -> Load {
        Load {
            running: Some(self.engine.running() as u32),
            waiting: Some(self.engine.waiting() as u32),
            kv_used: Some(self.engine.kv_usage() as f32),
        }
    }

    fn load(&self) -> Load {
        match self.tells {
            _ if !self.up => Load::default(),
            Tells::Truth => self.truth(),
            Tells::Stale => self.stale,
            Tells::Lie(load) => load,
            Tells::Nothing => Load::default(),
        }
    }

    fn shown(&self) -> Standing {
        if self.drained && self.standing != Standing::Gone { Standing::Draining } else { self.standing }
    }

    fn counters(&self) -> Counters {
        sum(self.before, *self.engine.counters())
    }
}

fn sum(a: Counters, b: Counters) -> Counters {
    Counters {
        prompt_tokens: a.prompt_tokens + b.prompt_tokens,
        generation_tokens: a.generation_tokens + b.generation_tokens,
        prefix_queries: a.prefix_queries + b.prefix_queries,
        prefix_hits: a.prefix_hits + b.prefix_hits,
        preemptions: a.preemptions + b.preemptions,
        finished: a.finished + b.finished,
        cancelled: a.cancelled + b.cancelled,
        iterations: a.iterations + b.iterations,
        busy: a.busy + b.busy,
    }
}

/// The gateway with its queues, or none.
enum Front {
    Gateway(Box<Scheduler>),
    Direct,
}

pub(super) struct World<'a> {
    setup: &'a Setup,
    workload: &'a Workload,
    now: Time,
    due: BinaryHeap<Reverse<(Time, u64, Due)>>,
    /// How much was ever put on the heap: ties go in this order.
    planned: u64,
    front: Front,
    backends: Vec<Backend>,
    stays: Vec<Stay>,
    trips: Vec<Trip>,
    /// The next job to be sent, and how many are on the heap.
    next_job: u32,
    to_come: u32,
    /// Jobs that were sent and have not ended.
    open: usize,
    /// When a client or an engine last had something from it.
    stirred: Time,
    /// Whose turn it is, for those that take turns.
    turn: usize,
    /// What waits in the gateway, oldest first.
    waiting: BTreeSet<(Time, RequestId)>,
    random: Random,
    check: Option<Check>,
    actions: Vec<Action>,
    computed: Vec<Computed>,
    moments: Vec<Moment>,
    foretold: Vec<Foretold>,
    overtaken: f64,
    fairness: Fairness,
    request_iterations: u64,
    events: u64,
}

impl<'a> World<'a> {
    pub fn new(setup: &'a Setup, workload: &'a Workload, seed: u64) -> Self {
        let front = match &setup.dispatch {
            Dispatch::Gateway { policy, limits } => {
                let mut scheduler = Scheduler::new(policy.clone(), *limits, seed);
                scheduler.restore(&setup.learnt);
                Front::Gateway(Box::new(scheduler))
            }
            Dispatch::RoundRobin | Dispatch::LeastLoaded | Dispatch::Sticky => Front::Direct,
        };
        let check = match &setup.dispatch {
            Dispatch::Gateway { policy, .. } if setup.check => Some(Check::new(policy)),
            _ => None,
        };
        World {
            setup,
            workload,
            now: Time::ZERO,
            due: BinaryHeap::new(),
            planned: 0,
            front,
            backends: Vec::new(),
            stays: Vec::with_capacity(workload.jobs.len()),
            trips: Vec::with_capacity(workload.jobs.len()),
            next_job: 0,
            to_come: 0,
            open: 0,
            stirred: Time::ZERO,
            turn: 0,
            waiting: BTreeSet::new(),
            random: Random::new(seed, "mess"),
            check,
            actions: Vec::new(),
            computed: Vec::new(),
            moments: Vec::new(),
            foretold: Vec::new(),
            overtaken: 0.0,
            fairness: Fairness::default(),
            request_iterations: 0,
            events: 0,
        }
    }

    pub fn run(mut self) -> Result<Run, Broken> {
        match self.play() {
            Ok(()) => Ok(self.finish()),
            Err(wrong) => Err(Broken { at: self.now, wrong, history: self.check.map(|check| check.history()).unwrap_or_default() }),
        }
    }

    fn play(&mut self) -> Result<(), Wrong> {
        for member in &self.setup.fleet {
            self.join(member.clone())?;
        }
        for (index, (at, _)) in self.setup.plan.faults.iter().enumerate() {
            self.plan(*at, Due::Fault(index as u32));
        }
        self.plan(Time::ZERO, Due::Look);
        self.plan(Time::ZERO.after(fairness::WINDOW), Due::Window);
        for _ in 0..self.workload.clients.unwrap_or(1) {
            self.send_next();
        }
        while self.open > 0 || self.to_come > 0 {
            let next = self.due.peek().map(|Reverse((at, ..))| *at);
            if let Front::Gateway(scheduler) = &self.front
                && let Some(deadline) = scheduler.next_deadline().filter(|deadline| next.is_none_or(|next| *deadline < next))
            {
                self.now = self.now.max(deadline);
                self.tell(Event::Tick)?;
                self.ticked(deadline)?;
                continue;
            }
            let Some(Reverse((at, _, due))) = self.due.pop() else { return Err(Wrong::Stuck { open: self.open }) };
            self.now = at;
            self.happens(due)?;
            if self.to_come == 0 && self.now.since(self.stirred) > STANDSTILL {
                return Err(Wrong::Stuck { open: self.open });
            }
        }
        Ok(())
    }

    fn finish(self) -> Run {
        Run {
            answers: self.trips.into_iter().map(|trip| trip.answer).collect(),
            moments: self.moments,
            foretold: self.foretold,
            counters: match &self.front {
                Front::Gateway(scheduler) => Some(scheduler.view().counters),
                Front::Direct => None,
            },
            engines: self.backends.iter().map(Backend::counters).collect(),
            overtaken: self.overtaken,
            reached: self.check.as_ref().map_or(0.0, Check::reached),
            jain: self.fairness.mean(),
            request_iterations: self.request_iterations,
            events: self.events,
            end: self.now,
        }
    }

    fn plan(&mut self, at: Time, due: Due) {
        self.planned += 1;
        self.due.push(Reverse((at, self.planned, due)));
    }

    fn happens(&mut self, due: Due) -> Result<(), Wrong> {
        match due {
            Due::Sent(job) => self.sent(job),
            Due::SentAgain(job) => self.attempt(job),
            Due::Iteration { backend, plan } => self.iteration(backend as usize, plan),
            Due::Reading(backend) => self.reading(backend as usize),
            Due::Impatient(job) => self.impatient(job),
            Due::Asks(stay) => {
                self.asks(stay);
                Ok(())
            }
            Due::Heard(stay) => self.heard(stay),
            Due::HeardTwice(stay) => match self.stays[stay as usize].stage {
                Stage::Settled(ending) => self.tell(Event::Finished(id(stay), ending)),
                _ => Ok(()),
            },
            Due::Noticed(backend) => self.noticed(backend as usize),
            Due::Back(backend) => self.back(backend as usize),
            Due::Fault(index) => self.fault(&self.setup.plan.faults[index as usize].1),
            Due::Look => {
                self.look();
                Ok(())
            }
            Due::Window => {
                self.fairness.close();
                self.plan(self.now.after(fairness::WINDOW), Due::Window);
                Ok(())
            }
        }
    }

    // Clients.

    /// Plans the sending of the next job.
    fn send_next(&mut self) {
        let Some(job) = self.workload.jobs.get(self.next_job as usize) else { return };
        let from = if self.workload.clients.is_some() { self.now } else { Time::ZERO };
        self.to_come += 1;
        self.plan(from.after(job.after).max(self.now), Due::Sent(self.next_job));
        self.next_job += 1;
        // Later turns wait for the answer to the one before.
        while self.workload.jobs.get(self.next_job as usize).is_some_and(Job::follows) {
            self.next_job += 1;
        }
    }

    fn sent(&mut self, job: u32) -> Result<(), Wrong> {
        self.to_come -= 1;
        self.open += 1;
        self.stirred = self.now;
        let tenant = self.job(job).tenant;
        let answer =
            Answer { job, tenant, arrived: self.now, released: None, first: None, ended: self.now, end: End::Failed, output: 0, attempts: 0 };
        let trip = Trip { answer, stay: 0, excluded: Vec::new(), over: false };
        // A closed loop sends jobs in the order of their thinking times' ends.
        let place = job as usize;
        while self.trips.len() <= place {
            self.trips.push(trip.clone());
        }
        self.trips[place] = trip;
        if self.workload.clients.is_none() && !self.job(job).follows() {
            self.send_next();
        }
        if let Some(patience) = self.job(job).patience {
            self.plan(self.now.after(patience), Due::Impatient(job));
        }
        self.attempt(job)
    }

    fn job(&self, job: u32) -> &'a Job {
        &self.workload.jobs[job as usize]
    }

    /// Sends a job: to the gateway, or to the backend that a client would choose.
    fn attempt(&mut self, job: u32) -> Result<(), Wrong> {
        if self.trips[job as usize].over {
            // The client left between two attempts.
            return Ok(());
        }
        let stay = self.stays.len() as u32;
        self.stays.push(Stay { job, stage: Stage::Waiting, backend: 0, output: 0, next_level: 1 });
        let trip = &mut self.trips[job as usize];
        trip.stay = stay;
        let (arrived, excluded) = (trip.answer.arrived, trip.excluded.clone());
        let asked = self.job(job);
        self.fairness.asked(asked.tenant, asked.share, size(asked));
        match &self.front {
            Front::Gateway(_) => {
                self.waiting.insert((arrived, id(stay)));
                let request = self.request(job, stay, arrived, excluded);
                self.tell(Event::Arrived(request))?;
                // Figures are of the wait for the first release.
                if let Some(every) = self.setup.ask.filter(|_| self.trips[job as usize].answer.attempts == 0) {
                    self.plan(self.now.after(every), Due::Asks(stay));
                }
                Ok(())
            }
            Front::Direct => {
                let backend = self.direct(job);
                // Whoever has no gateway but a ranker gives the engine its score.
                let score = self.job(job).score.map_or(0.0, Score::get);
                self.submit(stay, backend, (f64::from(score) * SCORE_UNITS) as i64);
                Ok(())
            }
        }
    }

    fn asks(&mut self, stay: u32) {
        let (Some(every), Front::Gateway(scheduler)) = (self.setup.ask, &mut self.front) else { return };
        if let Some(outlook) = scheduler.outlook(self.now, id(stay)) {
            self.foretold.push(Foretold { job: self.stays[stay as usize].job, at: self.now, position: outlook.position, wait: outlook.wait });
            self.plan(self.now.after(every), Due::Asks(stay));
        }
    }

    fn request(&self, job: u32, stay: u32, arrived: Time, excluded: Vec<BackendId>) -> Request {
        let job = self.job(job);
        Request {
            id: id(stay),
            arrived,
            model: job.model,
            score: job.score.map(|score| Scored { score, version: self.setup.ranker }),
            prompt_tokens: job.prompt,
            max_output: job.max_output,
            attained: job.attained,
            weight: job.weight,
            share: job.share,
            expires: self.setup.queue_timeout.map_or(Time::MAX, |timeout| self.now.after(timeout)),
            bytes: job.bytes,
            unscored: job.output == 0,
            excluded,
            tenant: job.tenant,
            history: job.history.clone().filter(|_| self.setup.affinity),
            oracle_output: Some(job.produces()),
        }
    }

    fn impatient(&mut self, job: u32) -> Result<(), Wrong> {
        let trip = &self.trips[job as usize];
        if trip.over {
            return Ok(());
        }
        let stay = trip.stay;
        let Stay { stage, backend, output, .. } = self.stays[stay as usize];
        match stage {
            Stage::Waiting => {
                self.stays[stay as usize].stage = Stage::Left;
                self.unserved(stay);
                self.waiting.remove(&(self.trips[job as usize].answer.arrived, id(stay)));
                self.end(job, End::Left)?;
                self.tell(Event::Cancelled(id(stay)))
            }
            Stage::Running => {
                self.backends[backend as usize].engine.cancel(id(stay));
                self.end(job, End::Left)?;
                self.over(stay, Ending::Cancelled { output })
            }
            // Its attempt has failed and the next one is on its way.
            Stage::Over(_) | Stage::Settled(_) | Stage::Left => self.end(job, End::Left),
        }
    }

    /// A job is over, as its client sees it.
    fn end(&mut self, job: u32, end: End) -> Result<(), Wrong> {
        let trip = &mut self.trips[job as usize];
        if trip.over {
            return Err(Wrong::EndedTwice(job));
        }
        trip.over = true;
        trip.answer.ended = self.now;
        trip.answer.end = end;
        trip.answer.output = self.stays[trip.stay as usize].output;
        self.open -= 1;
        self.stirred = self.now;
        if self.workload.clients.is_some() {
            self.send_next();
        }
        if let Some(next) = self.workload.jobs.get(job as usize + 1).filter(|next| next.follows()) {
            self.to_come += 1;
            self.plan(self.now.after(next.after), Due::Sent(job + 1));
        }
        Ok(())
    }

    /// The backend a client would choose by itself.
    fn direct(&mut self, job: u32) -> usize {
        let n = self.backends.len();
        let in_turn = (0..n).map(|step| (self.turn + step) % n);
        let chosen = match (&self.setup.dispatch, self.job(job).turn) {
            (Dispatch::LeastLoaded, _) => in_turn.min_by_key(|&backend| self.backends[backend].holds).unwrap_or(0),
            (Dispatch::Sticky, Some(turn)) => return turn.conversation as usize % n,
            _ => self.turn,
        };
        self.turn = (chosen + 1) % n;
        chosen
    }

    // The gateway.

    /// Tells the scheduler, and does what it asks for.
    fn tell(&mut self, event: Event) -> Result<(), Wrong> {
        if self.check.as_ref().is_some_and(|check| check.is_unknown(&event)) {
            // What time alone brings about comes first, so that nothing is left that the event could be mistaken for.
            self.tell(Event::Tick)?;
        }
        let Front::Gateway(scheduler) = &mut self.front else { return Ok(()) };
        let mut actions = std::mem::take(&mut self.actions);
        self.events += 1;
        match &mut self.check {
            None => scheduler.handle(self.now, event, &mut actions),
            Some(check) => {
                let before = check.before(self.now, scheduler, &event);
                scheduler.handle(self.now, event, &mut actions);
                check.after(self.now, scheduler, &before, &actions)?;
            }
        }
        for action in actions.drain(..) {
            match action {
                Action::Release { request, backend, facts } => self.released(request, backend, facts)?,
                Action::Reject { request, reason, .. } => self.rejected(request, reason)?,
            }
        }
        self.actions = actions;
        Ok(())
    }

    fn ticked(&self, deadline: Time) -> Result<(), Wrong> {
        match &self.front {
            Front::Gateway(scheduler) if scheduler.next_deadline().is_some_and(|next| next <= deadline) => Err(Wrong::BusyLoop(deadline)),
            _ => Ok(()),
        }
    }

    fn released(&mut self, request: RequestId, backend: BackendId, facts: Facts) -> Result<(), Wrong> {
        let stay = request.0 as u32;
        let arrived = self.trips[self.stay(request)?.job as usize].answer.arrived;
        self.waiting.remove(&(arrived, request));
        if let Some((oldest, _)) = self.waiting.first()
            && !facts.aged
        {
            self.overtaken = self.overtaken.max(arrived.since(*oldest).as_secs_f64());
        }
        self.submit(stay, backend.0 as usize, facts.boosted_arrival.div_euclid(PRIORITY_UNIT));
        Ok(())
    }

    fn rejected(&mut self, request: RequestId, reason: Reason) -> Result<(), Wrong> {
        let job = self.stay(request)?.job;
        self.waiting.remove(&(self.trips[job as usize].answer.arrived, request));
        self.stays[request.0 as usize].stage = Stage::Left;
        self.unserved(request.0 as u32);
        self.end(job, End::Rejected(reason))
    }

    /// A stay is over: what of its request it did not get is not owed any more. Another attempt asks for all of it again.
    fn unserved(&mut self, stay: u32) {
        let Stay { job, output, stage, .. } = self.stays[stay as usize];
        let job = self.job(job);
        let computed = output > 0 || stage == Stage::Over(Ending::Uncounted);
        let served = if computed { fairness::size(job.prompt, output) } else { 0.0 };
        self.fairness.dropped(job.tenant, size(job) - served);
    }

    /// A stay that waits.
    fn stay(&self, request: RequestId) -> Result<&Stay, Wrong> {
        self.stays.get(request.0 as usize).filter(|stay| stay.stage == Stage::Waiting).ok_or(Wrong::NotWaiting(request))
    }

    /// The gateway hears how a stay at a backend has ended, and sends the job again if that helps.
    fn heard(&mut self, stay: u32) -> Result<(), Wrong> {
        let Stay { job, stage: Stage::Over(ending), backend, output, .. } = self.stays[stay as usize] else { return Ok(()) };
        self.stays[stay as usize].stage = Stage::Settled(ending);
        let answered = matches!(ending, Ending::Completed { .. } | Ending::Truncated { .. } | Ending::Uncounted | Ending::Refused);
        self.tell(Event::Finished(id(stay), ending))?;
        if answered && self.backends[backend as usize].standing == Standing::Probing {
            self.becomes(backend as usize, Standing::Healthy)?;
        }
        let trip = &mut self.trips[job as usize];
        if trip.over {
            return Ok(());
        }
        // Whatever was answered ended for its client when it was.
        let again = output == 0 && matches!(ending, Ending::Failed { .. } | Ending::Pushback) && trip.answer.attempts <= self.setup.retries;
        if again && matches!(self.front, Front::Gateway(_)) {
            trip.excluded.push(BackendId(backend));
            self.plan(self.now, Due::SentAgain(job));
            return Ok(());
        }
        self.end(job, if ending == Ending::Refused { End::Refused } else { End::Failed })
    }

    fn becomes(&mut self, backend: usize, standing: Standing) -> Result<(), Wrong> {
        if self.backends[backend].standing == Standing::Gone {
            return Ok(());
        }
        self.backends[backend].standing = standing;
        self.state_changed(backend)
    }

    fn state_changed(&mut self, index: usize) -> Result<(), Wrong> {
        let backend = &self.backends[index];
        let state = backend.member.state(backend.shown());
        self.tell(Event::BackendChanged(BackendId(index as u32), state))
    }

    fn reading(&mut self, index: usize) -> Result<(), Wrong> {
        let backend = &self.backends[index];
        if backend.standing == Standing::Gone {
            return Ok(());
        }
        let busy = backend.engine.running() > 0 || self.now.since(backend.traffic) < TRAFFIC;
        let load = if backend.standing == Standing::Ejected { Load::default() } else { backend.load() };
        self.plan(self.now.after(if busy { BUSY_READING } else { IDLE_READING }), Due::Reading(index as u32));
        self.tell(Event::LoadReported(BackendId(index as u32), load))
    }

    fn look(&mut self) {
        let (waiting, gamma, max_overtake, mode) = match &self.front {
            Front::Gateway(scheduler) => {
                let view = scheduler.view();
                (view.waiting as u32, view.gamma, view.max_overtake, Some(view.mode))
            }
            Front::Direct => (0, 0.0, 0.0, None),
        };
        let in_flight = self.backends.iter().map(|backend| backend.holds).sum();
        self.moments.push(Moment { at: self.now, waiting, in_flight, gamma, max_overtake, mode });
        self.plan(self.now.after(self.setup.look), Due::Look);
    }

    // Backends.

    fn join(&mut self, member: Member) -> Result<(), Wrong> {
        let index = self.backends.len();
        self.backends.push(Backend::new(member, self.now));
        if let Front::Gateway(_) = self.front {
            // Readings of different backends do not come at the same moment.
            self.plan(self.now.after(BUSY_READING.mul_f64(0.618 * index as f64 % 1.0)), Due::Reading(index as u32));
        }
        self.state_changed(index)
    }

    /// Puts a request into an engine's own queue.
    fn submit(&mut self, stay: u32, index: usize, priority: i64) {
        let job = self.job(self.stays[stay as usize].job);
        let trip = &mut self.trips[self.stays[stay as usize].job as usize];
        trip.answer.attempts += 1;
        trip.answer.released.get_or_insert(self.now);
        (self.stays[stay as usize].stage, self.stays[stay as usize].backend) = (Stage::Running, index as u32);
        let full = self.setup.plan.mess.pushback > 0.0 && self.random.chance(self.setup.plan.mess.pushback);
        let backend = &mut self.backends[index];
        backend.holds += 1;
        backend.traffic = self.now;
        if !backend.up || full {
            let ending = if full { Ending::Pushback } else { Ending::Failed { output: 0 } };
            self.stays[stay as usize].stage = Stage::Over(ending);
            backend.holds -= 1;
            self.unserved(stay);
            self.plan(self.now.after(FAILING), Due::Heard(stay));
            return;
        }
        let engine_now = backend.clock.engine(self.now);
        let prefix_hashes = job.turn.map_or_else(Vec::new, |turn| turn.blocks(job.prompt));
        let work = Work { prompt_tokens: job.prompt, output_tokens: job.produces(), prefix_hashes, priority };
        if backend.engine.submit(engine_now, id(stay), work).is_err() {
            self.stays[stay as usize].stage = Stage::Over(Ending::Refused);
            backend.holds -= 1;
            self.unserved(stay);
            self.plan(self.now.after(FAILING), Due::Heard(stay));
        } else if backend.engine.iteration().is_none() {
            // An engine without an iteration has nothing to complete, so nothing of consequence is said.
            backend.wake = backend.engine.advance(engine_now, &mut self.computed);
            self.computed.clear();
            self.plan_iteration(index);
        }
    }

    fn plan_iteration(&mut self, index: usize) {
        let backend = &mut self.backends[index];
        backend.plan += 1;
        self.request_iterations += u64::from(backend.engine.iteration().map_or(0, |iteration| iteration.sequences));
        let Some(at) = backend.wake.and_then(|wake| backend.clock.global(wake)) else { return };
        let due = Due::Iteration { backend: index as u32, plan: backend.plan };
        self.plan(at.max(self.now), due);
    }

    /// An iteration is over: tokens reach clients, and the gateway hears what it would.
    fn iteration(&mut self, index: usize, plan: u32) -> Result<(), Wrong> {
        let backend = &mut self.backends[index];
        if backend.plan != plan {
            return Ok(());
        }
        let Some(wake) = backend.wake else { return Ok(()) };
        let mut computed = std::mem::take(&mut self.computed);
        backend.wake = backend.engine.advance(wake, &mut computed);
        self.plan_iteration(index);
        self.stirred = self.now;
        for Computed { id, what, .. } in computed.drain(..) {
            match what {
                What::Token(output) => {
                    let stay = &mut self.stays[id.0 as usize];
                    let job = &self.workload.jobs[stay.job as usize];
                    // The first token shows that the prompt has been computed.
                    let prompt = if stay.output == 0 { job.prompt } else { 0 };
                    self.fairness.served(job.tenant, fairness::size(prompt, output - stay.output));
                    stay.output = output;
                    if output == 1 {
                        self.trips[stay.job as usize].answer.first.get_or_insert(self.now);
                    }
                    if output >= stay.next_level {
                        stay.next_level = (output / LEVEL + 1).next_power_of_two().saturating_mul(LEVEL);
                        self.tell(Event::Progress(id, output))?;
                    }
                }
                What::Finished => self.computed_all(id.0 as u32)?,
                What::Admitted { .. } | What::Preempted => {}
            }
        }
        self.computed = computed;
        Ok(())
    }

    /// An engine is done with a request.
    fn computed_all(&mut self, stay: u32) -> Result<(), Wrong> {
        let Stay { job, output, .. } = self.stays[stay as usize];
        let Job { output: whole, prompt, tenant, .. } = *self.job(job);
        let ending = match output {
            0 => {
                self.fairness.served(tenant, fairness::size(prompt, 0));
                Ending::Uncounted
            }
            _ if output < whole => Ending::Truncated { output, prompt: Some(prompt) },
            _ => Ending::Completed { output, prompt: Some(prompt) },
        };
        self.end(job, End::Answered)?;
        self.over(stay, ending)
    }

    /// A stay at a backend is over; the gateway hears of it now or later, once or twice.
    fn over(&mut self, stay: u32, ending: Ending) -> Result<(), Wrong> {
        let place = stay as usize;
        self.stays[place].stage = Stage::Over(ending);
        self.unserved(stay);
        self.backends[self.stays[place].backend as usize].holds -= 1;
        let mess = self.setup.plan.mess;
        if mess.twice > 0.0 && self.random.chance(mess.twice) {
            let at = self.now.after(mess.by.mul_f64(1.0 + self.random.unit()));
            self.plan(at, Due::HeardTwice(stay));
        }
        if mess.late > 0.0 && self.random.chance(mess.late) {
            let at = self.now.after(mess.by.mul_f64(self.random.unit()));
            self.plan(at, Due::Heard(stay));
            return Ok(());
        }
        self.heard(stay)
    }

    fn noticed(&mut self, backend: usize) -> Result<(), Wrong> {
        if self.backends[backend].up { Ok(()) } else { self.becomes(backend, Standing::Ejected) }
    }

    fn back(&mut self, index: usize) -> Result<(), Wrong> {
        let backend = &mut self.backends[index];
        backend.up = true;
        backend.clock = Clock::new(self.now, backend.member.speed);
        if backend.standing == Standing::Ejected { self.becomes(index, Standing::Probing) } else { Ok(()) }
    }

    // Faults.

    fn fault(&mut self, fault: &Fault) -> Result<(), Wrong> {
        match fault {
            Fault::Crash { backend, noticed_after, back_after } => self.crash(*backend, *noticed_after, *back_after),
            Fault::Pace { backend, factor } => {
                let (index, backend) = (*backend, &mut self.backends[*backend]);
                backend.clock.set_rate(self.now, backend.member.speed * factor);
                backend.plan += 1;
                if let Some(at) = backend.wake.and_then(|wake| backend.clock.global(wake)) {
                    let due = Due::Iteration { backend: index as u32, plan: backend.plan };
                    self.plan(at.max(self.now), due);
                }
                Ok(())
            }
            Fault::Tells { backend, tells } => {
                let backend = &mut self.backends[*backend];
                backend.stale = backend.truth();
                backend.tells = *tells;
                Ok(())
            }
            Fault::Drained { backend, drained } => {
                self.backends[*backend].drained = *drained;
                if self.backends[*backend].standing == Standing::Gone { Ok(()) } else { self.state_changed(*backend) }
            }
            Fault::Leaves { backend } => self.becomes(*backend, Standing::Gone),
            Fault::Joins(member) => self.join(member.clone()),
            Fault::Policy(policy) => self.tell(Event::PolicyChanged(policy.clone())),
            Fault::Limits(limits) => self.tell(Event::LimitsChanged(*limits)),
            Fault::Drain => self.tell(Event::DrainStarted),
            Fault::Strangers => {
                let stranger = RequestId(1 << 62 | self.random.below(1 << 32));
                self.tell(Event::Cancelled(stranger))?;
                self.tell(Event::Progress(stranger, 100))?;
                self.tell(Event::Finished(stranger, Ending::Pushback))?;
                self.tell(Event::LoadReported(BackendId(1 << 20), Load::default()))
            }
        }
    }

    fn crash(&mut self, index: usize, noticed_after: Duration, back_after: Duration) -> Result<(), Wrong> {
        let backend = &mut self.backends[index];
        if !backend.up {
            return Ok(());
        }
        backend.up = false;
        backend.before = backend.counters();
        backend.engine = Engine::new(backend.member.profile);
        backend.wake = None;
        backend.plan += 1;
        self.plan(self.now.after(noticed_after), Due::Noticed(index as u32));
        self.plan(self.now.after(back_after), Due::Back(index as u32));
        let lost: Vec<u32> = (0..self.stays.len())
            .filter(|&stay| self.stays[stay].stage == Stage::Running && self.stays[stay].backend as usize == index)
            .map(|stay| stay as u32)
            .collect();
        for stay in lost {
            let output = self.stays[stay as usize].output;
            self.over(stay, Ending::Failed { output })?;
        }
        Ok(())
    }
}

/// All that a request asks for.
fn size(job: &Job) -> f64 {
    fairness::size(job.prompt, job.produces())
}

fn id(stay: u32) -> RequestId {
    RequestId(u64::from(stay))
}

#[cfg(test)]
mod tests {
    use super::super::{Arrivals, Length, Part};
    use super::*;
    use crate::engine::{Profile, Timing};
    use crate::scheduler::{Gamma, Lead, Limits, MaxOvertake, Order, Policy, PolicyParts, Slots};

    /// Where prompts are most of the work, an order by work must not be one by answers: what a prompt token costs is learnt from when prompts were computed.
    #[test]
    fn the_gateway_learns_what_prompts_and_answers_cost() {
        let timing = Timing { base: 8e-3, per_sequence: 0.0, per_prefill_token: 1e-4, per_kv_token: 0.0 };
        let profile = Profile { timing, max_num_seqs: 16, ..Profile::medium() };
        let lengths = |median, longest| Length::LogNormal { parts: vec![Part { share: 1.0, median, sigma: 0.7 }], longest };
        let mut workload = Workload::draw(4000, Arrivals::Poisson, &lengths(1000.0, 8000), &lengths(150.0, 2000), 1);
        workload.pace(8.0);
        let parts = PolicyParts {
            order: Order::Headway,
            gamma: Gamma::Fixed(0.01),
            max_overtake: MaxOvertake::Auto,
            aging_threshold: Duration::from_secs(120),
            aging_share: 0.1,
            lead: Lead::Auto,
            overload: false,
        };
        let limits = Limits { queue_requests: 100_000, queue_bytes: u64::MAX, max_output: 4096 };
        let dispatch = Dispatch::Gateway { policy: Policy::new(parts).expect("the parts fit"), limits };
        let setup = Setup::new(vec![Member { slots: Slots::Fixed(16), ..Member::new(profile) }], dispatch);
        let mut world = World::new(&setup, &workload, 1);
        world.play().expect("every request ends");
        let Front::Gateway(scheduler) = &world.front else { unreachable!("it has a gateway") };
        let speed = scheduler.view().speed;
        // An iteration's 8 ms make up to 16 tokens.
        assert!((speed.prompt / 1e-4 - 1.0).abs() < 0.5, "{speed:?}");
        assert!((speed.output / 5e-4 - 1.0).abs() < 0.5, "{speed:?}");
    }
}
