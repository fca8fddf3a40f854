//! Who is scored when: a bounded queue in front of a few threads that share one model and form their batches late.
//!
//! Newest first. At normal load the order makes no difference; past capacity the newest are the only ones that can still make their deadline, while
//! oldest-first would score everything too late. A prompt whose request has stopped waiting is scored only when nothing else waits: for the cache.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::cache::{Cache, TextKey};
use super::tokenizer::Pieces;
use super::{Neutral, PromptText};
use crate::scheduler::{Learnt, RankerVersion, Score, Scored};

/// What the threads need of a model. A trait so that tests can script one.
pub(super) trait Model: Send + Sync {
    fn pieces(&self, text: &PromptText) -> Pieces;
    /// One number per entry of `batch`; the entries come sorted by length. An error costs this batch its scores and nothing else.
    fn scores(&self, batch: &[Pieces]) -> Result<Vec<f32>, super::RankerError>;
}

/// A verified model, the name of its weights and what to expect of its scores. One value, so that no score can carry the version of another model.
#[derive(Clone)]
pub(super) struct Loaded {
    pub(super) model: Arc<dyn Model>,
    pub(super) version: RankerVersion,
    pub(super) prior: Arc<Learnt>,
}

/// Limits of the stage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Prompts that may wait.
    pub(super) queue: usize,
    /// Prompts of one batch.
    pub(super) prompts: usize,
    /// Bytes of text of one batch, each prompt counted up to what is read of it. On a CPU a batch saves little and makes its first prompt wait for its
    /// last, so it is kept to what fits well inside a deadline.
    pub(super) bytes: usize,
    /// Texts whose scores are remembered.
    pub(super) cache: usize,
}

impl Bounds {
    pub(super) const CPU: Bounds = Bounds { queue: 256, prompts: 32, bytes: 1024, cache: 8192 };
    pub(super) const GPU: Bounds = Bounds { queue: 1024, prompts: 32, bytes: usize::MAX, cache: 8192 };
}

/// What has happened so far, for metrics. Every submitted prompt is counted once in one of the first four, or not yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Scored by the model while someone waited.
    pub scored: u64,
    /// Answered from memory.
    pub cached: u64,
    /// Turned away by a full queue.
    pub busy: u64,
    /// Not scored: the model refused the prompt, or the threads are gone.
    pub failed: u64,
    /// Scored although the request had gone on without it; the score was kept for the next one.
    pub late: u64,
    /// Batches run.
    pub batches: u64,
    /// Prompts waiting now.
    pub waiting: u64,
}

/// A score, or why there is none.
pub(super) type Answer = Result<Scored, Neutral>;

/// What a submission got.
pub(super) enum Submitted {
    /// The answer is there already.
    Answered(Answer),
    /// It will come here. A sender dropped without answering means the threads have died.
    Waits(oneshot::Receiver<Answer>),
}

/// The owner of queue, cache and threads. Dropping it ends the threads after the batch in hand.
pub(super) struct Batcher {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    work: Condvar,
    bounds: Bounds,
}

struct State {
    /// Oldest in front.
    jobs: VecDeque<Job>,
    loaded: Loaded,
    cache: Cache,
    counts: Counts,
    /// Threads that still run. Zero: nobody will ever answer.
    threads: usize,
    closed: bool,
}

struct Job {
    key: TextKey,
    text: PromptText,
    answer: oneshot::Sender<Answer>,
}

impl Batcher {
    pub(super) fn start(loaded: Loaded, bounds: Bounds, threads: usize) -> Result<Batcher, std::io::Error> {
        let state = State { jobs: VecDeque::new(), loaded, cache: Cache::new(bounds.cache), counts: Counts::default(), threads, closed: false };
        let batcher = Batcher { shared: Arc::new(Shared { state: Mutex::new(state), work: Condvar::new(), bounds }) };
        for index in 0..threads {
            let shared = batcher.shared.clone();
            // On an error the drop of `batcher` ends the threads already started.
            std::thread::Builder::new().name(format!("ranker-{index}")).spawn(move || Worker { shared }.run())?;
        }
        Ok(batcher)
    }

    pub(super) fn submit(&self, key: TextKey, text: PromptText) -> Submitted {
        let mut state = self.shared.lock();
        if let Some(scored) = state.cache.get(key) {
            state.counts.cached += 1;
            return Submitted::Answered(Ok(scored));
        }
        if state.threads == 0 {
            state.counts.failed += 1;
            return Submitted::Answered(Err(Neutral::Failed));
        }
        if state.jobs.len() >= self.shared.bounds.queue {
            // Those that nobody waits for any more make room first.
            state.jobs.retain(|job| !job.answer.is_closed());
            if state.jobs.len() >= self.shared.bounds.queue {
                state.counts.busy += 1;
                return Submitted::Answered(Err(Neutral::Busy));
            }
        }
        let (answer, waits) = oneshot::channel();
        state.jobs.push_back(Job { key, text, answer });
        drop(state);
        self.shared.work.notify_one();
        Submitted::Waits(waits)
    }

    /// Lets other weights score from the next batch on. A batch in hand finishes with the old ones and carries their version.
    /// Returns what was served until now.
    pub(super) fn swap(&self, loaded: Loaded) -> Loaded {
        let mut state = self.shared.lock();
        state.cache.clear();
        std::mem::replace(&mut state.loaded, loaded)
    }

    pub(super) fn loaded(&self) -> Loaded {
        self.shared.lock().loaded.clone()
    }

    pub(super) fn counts(&self) -> Counts {
        let state = self.shared.lock();
        Counts { waiting: state.jobs.len() as u64, ..state.counts }
    }
}

impl Drop for Batcher {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_all();
    }
}

impl Shared {
    /// A panic under the lock leaves nothing half-done that a later reader could trip over: every change below is complete before the next call.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One thread. Its drop, by return or by panic, is what tells the stage that it is gone.
struct Worker {
    shared: Arc<Shared>,
}

impl Worker {
    fn run(self) {
        yield_to_the_proxy();
        while let Some((jobs, loaded)) = self.next_batch() {
            self.score(jobs, &loaded);
        }
    }

    /// Waits for work and takes what is there, as late as possible. `None`: the stage is closed.
    fn next_batch(&self) -> Option<(Vec<Job>, Loaded)> {
        let mut state = self.shared.lock();
        loop {
            if state.closed {
                return None;
            }
            if !state.jobs.is_empty() {
                break;
            }
            state = self.shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let batch = state.take(self.shared.bounds);
        state.counts.batches += 1;
        Some((batch, state.loaded.clone()))
    }

    fn score(&self, jobs: Vec<Job>, loaded: &Loaded) {
        let mut jobs: Vec<(Pieces, Job)> = jobs.into_iter().map(|job| (loaded.model.pieces(&job.text), job)).collect();
        jobs.sort_by_key(|(pieces, _)| pieces.len());
        let (batch, jobs): (Vec<Pieces>, Vec<Job>) = jobs.into_iter().unzip();
        let answers: Vec<Answer> = match loaded.model.scores(&batch) {
            Ok(values) if values.len() == jobs.len() => values
                .into_iter()
                .map(|value| Score::new(value).map(|score| Scored { score, version: loaded.version }).ok_or(Neutral::Failed))
                .collect(),
            Ok(values) => {
                tracing::error!(prompts = jobs.len(), scores = values.len(), "the ranker returned the wrong number of scores");
                vec![Err(Neutral::Failed); jobs.len()]
            }
            Err(error) => {
                tracing::error!(%error, prompts = jobs.len(), "the ranker could not score a batch");
                vec![Err(Neutral::Failed); jobs.len()]
            }
        };
        let mut state = self.shared.lock();
        for (job, answer) in jobs.into_iter().zip(answers) {
            if let Ok(scored) = answer
                && scored.version == state.loaded.version
            {
                state.cache.insert(job.key, scored);
            }
            match (answer, job.answer.send(answer)) {
                (Ok(_), Ok(())) => state.counts.scored += 1,
                (Ok(_), Err(_)) => state.counts.late += 1,
                (Err(_), _) => state.counts.failed += 1,
            }
        }
    }
}

impl State {
    /// The newest prompts that someone waits for, within the bounds and at least one; where nobody waits for any, the newest abandoned ones.
    fn take(&mut self, bounds: Bounds) -> Vec<Job> {
        let waited_for = self.jobs.iter().any(|job| !job.answer.is_closed());
        let mut batch = Vec::new();
        let mut bytes = 0usize;
        let mut index = self.jobs.len();
        while index > 0 && batch.len() < bounds.prompts {
            index -= 1;
            if waited_for && self.jobs[index].answer.is_closed() {
                continue;
            }
            bytes = bytes.saturating_add(self.jobs[index].text.bytes());
            if bytes > bounds.bytes && !batch.is_empty() {
                break;
            }
            batch.extend(self.jobs.remove(index));
        }
        batch
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.threads -= 1;
        if state.threads == 0 {
            // Dropping the senders tells everyone who waits.
            let orphans = state.jobs.drain(..).count();
            state.counts.failed += orphans as u64;
        }
    }
}

/// The priority below which Linux has none.
#[cfg(target_os = "linux")]
const LOWEST: i32 = 19;

/// Gives the calling thread the lowest priority. Scoring must not take the processor from threads that move bytes: a score that comes late is a smaller loss than
/// a token that does.
pub(crate) fn yield_to_the_proxy() {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: takes and returns integers only. Process 0 is, on Linux, the calling thread.
        let failed = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, LOWEST) } != 0;
        if failed {
            tracing::debug!(error = %std::io::Error::last_os_error(), "a thread keeps normal priority");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::ranker::RankerError;

    /// A model that reports each batch it is given and answers when told what.
    struct Scripted {
        seen: mpsc::Sender<Vec<usize>>,
        replies: Mutex<mpsc::Receiver<Reply>>,
    }

    enum Reply {
        /// Each prompt's length times this.
        Lengths(f32),
        Error,
        Panic,
    }

    impl Model for Scripted {
        fn pieces(&self, text: &PromptText) -> Pieces {
            Pieces::of_ids(vec![7; text.user.len()])
        }

        fn scores(&self, batch: &[Pieces]) -> Result<Vec<f32>, RankerError> {
            self.seen.send(batch.iter().map(Pieces::len).collect()).unwrap();
            let reply = self.replies.lock().unwrap().recv().unwrap();
            match reply {
                Reply::Lengths(factor) => Ok(batch.iter().map(|pieces| pieces.len() as f32 * factor).collect()),
                Reply::Error => Err(RankerError::Compute("scripted".into())),
                Reply::Panic => panic!("scripted"),
            }
        }
    }

    struct Fixture {
        batcher: Option<Batcher>,
        seen: mpsc::Receiver<Vec<usize>>,
        reply: mpsc::Sender<Reply>,
    }

    impl Fixture {
        fn new(bounds: Bounds) -> Fixture {
            let (loaded, seen, reply) = scripted(1);
            Fixture { batcher: Some(Batcher::start(loaded, bounds, 1).unwrap()), seen, reply }
        }

        fn batcher(&self) -> &Batcher {
            self.batcher.as_ref().unwrap()
        }

        /// Submits a text of this length.
        fn submit(&self, length: usize) -> oneshot::Receiver<Answer> {
            match self.batcher().submit(length as TextKey, text(length)) {
                Submitted::Waits(waits) => waits,
                Submitted::Answered(answer) => panic!("answered at once: {answer:?}"),
            }
        }
    }

    fn scripted(version: u32) -> (Loaded, mpsc::Receiver<Vec<usize>>, mpsc::Sender<Reply>) {
        let (seen_tx, seen) = mpsc::channel();
        let (reply, replies) = mpsc::channel();
        let model = Arc::new(Scripted { seen: seen_tx, replies: Mutex::new(replies) });
        (Loaded { model, version: RankerVersion(version), prior: Arc::default() }, seen, reply)
    }

    fn text(length: usize) -> PromptText {
        PromptText { system: String::new(), user: "x".repeat(length) }
    }

    fn scored(value: f32, version: u32) -> Answer {
        Ok(Scored { score: Score::new(value).unwrap(), version: RankerVersion(version) })
    }

    const BOUNDS: Bounds = Bounds { queue: 8, prompts: 4, bytes: usize::MAX, cache: 16 };

    #[test]
    fn what_waits_while_the_model_is_busy_forms_the_next_batch_sorted_by_length() {
        let fixture = Fixture::new(BOUNDS);
        let first = fixture.submit(3);
        assert_eq!(fixture.seen.recv().unwrap(), [3]);
        let rest = [9, 5, 7].map(|length| fixture.submit(length));
        fixture.reply.send(Reply::Lengths(1.0)).unwrap();
        assert_eq!(first.blocking_recv().unwrap(), scored(3.0, 1));
        assert_eq!(fixture.seen.recv().unwrap(), [5, 7, 9]);
        fixture.reply.send(Reply::Lengths(1.0)).unwrap();
        assert_eq!(rest.map(|waits| waits.blocking_recv().unwrap()), [scored(9.0, 1), scored(5.0, 1), scored(7.0, 1)]);
    }

    #[test]
    fn a_batch_takes_the_newest_and_keeps_to_its_bounds() {
        let fixture = Fixture::new(Bounds { bytes: 20, ..BOUNDS });
        let _first = fixture.submit(1);
        assert_eq!(fixture.seen.recv().unwrap(), [1]);
        let _rest = [2, 30, 4, 8, 11].map(|length| fixture.submit(length));
        for expected in [vec![8, 11], vec![4], vec![30], vec![2]] {
            fixture.reply.send(Reply::Lengths(1.0)).unwrap();
            assert_eq!(fixture.seen.recv().unwrap(), expected);
        }
        drop(fixture.reply);
    }

    #[test]
    fn a_prompt_nobody_waits_for_is_scored_last_and_remembered() {
        let fixture = Fixture::new(BOUNDS);
        let _first = fixture.submit(1);
        assert_eq!(fixture.seen.recv().unwrap(), [1]);
        let waited_for = fixture.submit(2);
        drop(fixture.submit(3));
        fixture.reply.send(Reply::Lengths(1.0)).unwrap();
        assert_eq!(fixture.seen.recv().unwrap(), [2]);
        fixture.reply.send(Reply::Lengths(1.0)).unwrap();
        assert_eq!(waited_for.blocking_recv().unwrap(), scored(2.0, 1));
        assert_eq!(fixture.seen.recv().unwrap(), [3]);
        let last = fixture.submit(4);
        fixture.reply.send(Reply::Lengths(1.0)).unwrap();
        assert_eq!(fixture.seen.recv().unwrap(), [4]);
        assert!(matches!(fixture.batcher().submit(3, text(3)), Submitted::Answered(answer) if answer == scored(3.0, 1)));
        fixture.reply.send(Reply::Lengths(1.0)).unwrap();
        assert!(last.blocking_recv().is_ok());
        let counts = fixture.batcher().counts();
        assert_eq!((counts.scored, counts.late, counts.cached, counts.batches), (3, 1, 1, 4));
    }

    #[test]
    fn a_full_queue_turns_prompts_away_unless_someone_has_left_it() {
        let fixture = Fixture::new(Bounds { queue: 2, ..BOUNDS });
        let _first = fixture.submit(1);
        assert_eq!(fixture.seen.recv().unwrap(), [1]);
        let waiting = [fixture.submit(2), fixture.submit(3)];
        assert!(matches!(fixture.batcher().submit(4, text(4)), Submitted::Answered(Err(Neutral::Busy))));
        assert_eq!(fixture.batcher().counts().busy, 1);
        drop(waiting);
        assert!(matches!(fixture.batcher().submit(4, text(4)), Submitted::Waits(_)));
        drop(fixture.reply);
    }

    #[test]
    fn an_error_or_a_number_that_is_none_costs_only_its_batch() {
        let fixture = Fixture::new(BOUNDS);
        for reply in [Reply::Error, Reply::Lengths(f32::NAN)] {
            let waits = fixture.submit(2);
            fixture.reply.send(reply).unwrap();
            assert_eq!(waits.blocking_recv().unwrap(), Err(Neutral::Failed));
        }
        let waits = fixture.submit(2);
        fixture.reply.send(Reply::Lengths(1.0)).unwrap();
        assert_eq!(waits.blocking_recv().unwrap(), scored(2.0, 1));
    }

    #[test]
    fn when_the_last_thread_dies_those_who_wait_and_those_who_come_are_told() {
        let fixture = Fixture::new(BOUNDS);
        let inside = fixture.submit(1);
        assert_eq!(fixture.seen.recv().unwrap(), [1]);
        let waiting = fixture.submit(2);
        fixture.reply.send(Reply::Panic).unwrap();
        assert!(inside.blocking_recv().is_err());
        assert!(waiting.blocking_recv().is_err());
        assert!(matches!(fixture.batcher().submit(3, text(3)), Submitted::Answered(Err(Neutral::Failed))));
    }

    #[test]
    fn a_batch_in_hand_keeps_its_version_when_the_model_is_swapped_and_is_not_remembered() {
        let fixture = Fixture::new(BOUNDS);
        let old = fixture.submit(2);
        assert_eq!(fixture.seen.recv().unwrap(), [2]);
        let (loaded, seen, reply) = scripted(2);
        fixture.batcher().swap(loaded);
        assert_eq!(fixture.batcher().loaded().version, RankerVersion(2));
        fixture.reply.send(Reply::Lengths(1.0)).unwrap();
        assert_eq!(old.blocking_recv().unwrap(), scored(2.0, 1));
        let new = fixture.submit(2);
        assert_eq!(seen.recv().unwrap(), [2]);
        reply.send(Reply::Lengths(10.0)).unwrap();
        assert_eq!(new.blocking_recv().unwrap(), scored(20.0, 2));
    }

    #[test]
    fn the_threads_end_with_the_handle() {
        let mut fixture = Fixture::new(BOUNDS);
        fixture.batcher = None;
        // The model, and with it its end of the channel, lives as long as a thread does.
        assert!(fixture.seen.recv().is_err());
    }
}
