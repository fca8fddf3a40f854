//! What can be seen of single requests from outside: the heads of the queues and what runs, as plain values.

use super::Scheduler;
use super::event::{BackendId, ModelId, RequestId, TenantId, Tokens};
use super::queue::Key;
use super::score::{Score, Scored};
use super::table::{Entry, Stage};
use super::time::Time;

/// The requests at one backend.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueView {
    pub backend: BackendId,
    /// Those that hold a slot, in no particular order.
    pub running: Vec<RequestView>,
    /// The first of its queue, next one first.
    pub waiting: Vec<RequestView>,
}

/// One request at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestView {
    pub id: RequestId,
    pub model: ModelId,
    pub tenant: Option<TenantId>,
    pub arrived: Time,
    pub prompt: Tokens,
    /// The ranker's opinion.
    pub score: Option<Scored>,
    /// How much ahead of others it goes, by its priority; 1 is normal.
    pub weight: f64,
    /// Expected work in capacity-seconds, as keyed.
    pub work: f64,
    /// Expected output: all of it while it waits, what is still to come while it runs.
    pub expected_output: Tokens,
    /// What the client allows.
    pub max_output: Option<Tokens>,
    pub stage: StageView,
}

/// Where in its life a request is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StageView {
    Waiting {
        /// Its key; the smallest goes first.
        phi: i64,
        /// Its key as a time in microseconds, its arrival where keys are no times.
        boosted_arrival: i64,
        /// When it is turned away.
        expires: Time,
        aged: bool,
    },
    Running {
        released: Time,
        /// Output tokens, as last told.
        produced: Tokens,
    },
}

/// Where a waiting request stands among the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Position {
    /// How many of its queue go before it, as things are.
    pub ahead: usize,
    /// Its tenant has had more than its share: whoever else waits goes first.
    pub stands_back: bool,
    /// Of those, how many arrived after it: they overtake it.
    pub overtaken_by: usize,
    /// How many behind it arrived before it: it overtakes them.
    pub overtakes: usize,
    /// Some of both, nearest to it first.
    pub overtaking: Vec<RequestView>,
    pub overtaken: Vec<RequestView>,
}

/// One request and all that is known of why it is where it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Standpoint {
    pub request: RequestView,
    /// In whose queue it waits, or on which it runs.
    pub backend: BackendId,
    /// `None` once it runs.
    pub position: Option<Position>,
}

/// What the calibration makes of a score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Calibrated {
    /// Its bin among those of the ranker that scores now, shortest answers first, and how many there are; `None` where there are none yet.
    pub bin: Option<(usize, usize)>,
    /// Output tokens that are expected now of a prompt with this score.
    pub expected_output: Tokens,
}

impl Scheduler {
    /// Where a request stands, with at most `most` examples of each kind; `None` if it neither waits nor runs. Walks through its queue.
    pub fn standpoint(&self, id: RequestId, most: usize) -> Option<Standpoint> {
        let entry = self.table.get(self.table.slot_of(id)?);
        let backend = &self.backends[entry.backend as usize];
        let position = match entry.stage {
            Stage::Running { .. } => None,
            Stage::Waiting { phi, .. } => {
                let own = Key { phi, place: entry.place };
                let stands_back = backend.queue.is_ahead(entry.tenant());
                let mut position = Position { ahead: 0, stands_back, overtaken_by: 0, overtakes: 0, overtaking: Vec::new(), overtaken: Vec::new() };
                let mut passed = false;
                for key in backend.queue.keys() {
                    if key == own {
                        passed = true;
                        continue;
                    }
                    let other = self.table.get(key.place.slot());
                    if !passed {
                        position.ahead += 1;
                        if other.arrived > entry.arrived {
                            position.overtaken_by += 1;
                            // The nearest are the last ones seen.
                            if position.overtaking.len() == most {
                                position.overtaking.remove(0);
                            }
                            position.overtaking.push(self.seen(other));
                        }
                    } else if other.arrived < entry.arrived {
                        position.overtakes += 1;
                        if position.overtaken.len() < most {
                            position.overtaken.push(self.seen(other));
                        }
                    }
                }
                position.overtaking.reverse();
                Some(position)
            }
        };
        Some(Standpoint { request: self.seen(entry), backend: backend.id, position })
    }

    /// What the calibration makes of a score now, for this model.
    pub fn calibrated(&self, model: ModelId, score: Score) -> Calibrated {
        let scored = self.calibration.current_ranker().map(|current| Scored { score, version: current.version });
        let estimate = self.calibration.estimate(model, scored, None, self.limits.max_output);
        Calibrated { bin: scored.and_then(|scored| self.calibration.bin(model, scored)), expected_output: estimate.mean }
    }

    /// At most `most` requests that run and `most` that wait for each backend. Costs what it returns, and a walk over everything that runs.
    pub fn queues(&self, most: usize) -> Vec<QueueView> {
        let mut queues: Vec<QueueView> = self
            .backends
            .iter()
            .map(|backend| QueueView {
                backend: backend.id,
                running: Vec::new(),
                waiting: backend.queue.keys().take(most).map(|key| self.seen(self.table.get(key.place.slot()))).collect(),
            })
            .collect();
        for slot in &self.running {
            let entry = self.table.get(*slot);
            let running = &mut queues[entry.backend as usize].running;
            if running.len() < most {
                running.push(self.seen(entry));
            }
        }
        queues
    }

    fn seen(&self, entry: &Entry) -> RequestView {
        let (expected_output, stage) = match entry.stage {
            Stage::Waiting { phi, expires, .. } => {
                let boosted_arrival = self.keying.boosted_arrival(entry, phi);
                (entry.expected, StageView::Waiting { phi, boosted_arrival, expires, aged: self.aging.is_aged(self.now, entry.arrived) })
            }
            Stage::Running { released, produced, remaining } => (remaining, StageView::Running { released, produced }),
        };
        RequestView {
            id: entry.id,
            model: entry.model,
            tenant: entry.tenant(),
            arrived: entry.arrived,
            prompt: entry.prompt,
            score: entry.score(),
            weight: entry.weight().get(),
            work: f64::from(entry.work),
            expected_output,
            max_output: entry.max_output(),
            stage,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{backend, request};
    use super::super::*;
    use super::*;

    fn pool() -> Scheduler {
        let limits = Limits { queue_requests: 10, queue_bytes: 10_000, max_output: 1024 };
        let mut pool = Scheduler::new(super::super::tests::policy(Order::Pars), limits, 1);
        backend(&mut pool, 0, 1, Standing::Healthy);
        let scored = |id, score| Request {
            expires: Time::MAX,
            score: Score::new(score).map(|score| Scored { score, version: RankerVersion(1) }),
            excluded: if id == 3 { vec![BackendId(9)] } else { Vec::new() },
            ..request(id, id)
        };
        for (id, score) in [(1, 0.5), (2, 0.9), (3, 0.1), (4, 0.7)] {
            pool.handle(Time::from_micros(id), Event::Arrived(scored(id, score)), &mut Vec::new());
        }
        pool
    }

    #[test]
    fn the_heads_of_queues_are_in_their_order() {
        let mut pool = pool();
        let ids = |requests: &[RequestView]| requests.iter().map(|request| request.id.0).collect::<Vec<_>>();
        let [all] = &pool.queues(10)[..] else { panic!("one backend") };
        assert_eq!((ids(&all.running), ids(&all.waiting)), (vec![1], vec![3, 4, 2]), "by score, whether or not some may not go everywhere");
        assert_eq!(ids(&pool.queues(2)[0].waiting), [3, 4]);
        assert!(pool.queues(0)[0].running.is_empty());
        assert!(matches!(all.waiting[0].stage, StageView::Waiting { aged: false, .. }));
        assert_eq!(all.running[0].stage, StageView::Running { released: Time::from_micros(1), produced: 0 });

        let later = Time::from_micros(121_000_000);
        pool.handle(later, Event::Progress(RequestId(1), 7), &mut Vec::new());
        let [all] = &pool.queues(10)[..] else { panic!("one backend") };
        assert!(all.waiting.iter().all(|request| matches!(request.stage, StageView::Waiting { aged: true, .. })));
        assert_eq!(all.running[0].stage, StageView::Running { released: Time::from_micros(1), produced: 7 });
    }
    #[test]
    fn a_request_knows_who_passes_it_and_whom_it_passes() {
        let mut pool = pool();
        let ids = |requests: &[RequestView]| requests.iter().map(|request| request.id.0).collect::<Vec<_>>();
        // The order is 3, 4, 2, and they arrived as 2, 3, 4.
        let last = pool.standpoint(RequestId(2), 1).unwrap();
        let position = last.position.unwrap();
        assert_eq!((last.backend, position.ahead, position.overtaken_by, position.overtakes), (BackendId(0), 2, 2, 0));
        assert_eq!((ids(&position.overtaking), ids(&position.overtaken)), (vec![4], vec![]), "the nearest");
        let first = pool.standpoint(RequestId(3), 9).unwrap().position.unwrap();
        assert_eq!((first.ahead, first.overtaken_by, first.overtakes, ids(&first.overtaken)), (0, 0, 1, vec![2]));
        assert_eq!(pool.standpoint(RequestId(1), 9).unwrap().position, None, "it runs");
        assert_eq!(pool.standpoint(RequestId(9), 9), None);
        assert_eq!(pool.calibrated(ModelId(0), Score::new(0.5).unwrap()).bin, None, "nothing was answered");

        let scored = |n: u32| Scored { score: Score::new(n as f32).unwrap(), version: RankerVersion(1) };
        let samples = (0..400).map(|n| Sample { model: Some(ModelId(0)), score: Some(scored(n)), output: 10 * n + 1, cut: false }).collect();
        pool.restore(&Learnt { scores: (0..400).map(scored).collect(), samples, gamma: None, speed: None });
        pool.handle(Time::from_micros(60_000_000), Event::Tick, &mut Vec::new());
        let [short, long] = [1, 399].map(|n| pool.calibrated(ModelId(0), scored(n).score));
        assert!(short.bin.unwrap().0 < long.bin.unwrap().0 && short.expected_output < long.expected_output, "{short:?} {long:?}");
    }
}
