//! The last requests that ended, without their prompts: what operators look at, ask about and replay.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::Outcome;

/// How many are remembered: some 5 MB of them.
const REQUESTS: usize = 16_384;
/// How many of those that got no whole answer are remembered beyond that, so that a crowd of good ones does not push them out.
const FAILURES: usize = 256;
/// Models that are kept by name; later ones are `other`, since clients make some up where nobody can tell which there are.
const MODELS: usize = 2048;

/// One request that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The client's own, or one made here.
    pub id: Box<str>,
    /// Where it ran or was to run; `None` where no pool was found for it.
    pub pool: Option<Arc<str>>,
    /// As the client named it; empty where no pool was found for it, `other` for one name too many.
    pub model: Arc<str>,
    /// Whose request it was, where keys are asked for.
    pub tenant: Option<Arc<str>>,
    /// `host:port` of the backend that answered or failed last.
    pub backend: Option<Arc<str>>,
    /// When it ended.
    pub at: Instant,
    /// What the client was told, and in one word why.
    pub status: u16,
    pub reason: &'static str,
    /// From arrival to the end.
    pub total: Duration,
    /// From arrival to its last release to a backend.
    pub released: Option<Duration>,
    /// From arrival to the first token of a streamed answer.
    pub first_token: Option<Duration>,
    /// Wait in the queue, over all attempts.
    pub queued: Option<Duration>,
    /// Prompt tokens by the backend's count.
    pub prompt_tokens: Option<u32>,
    /// Output tokens, the backend's count where it told one.
    pub output_tokens: u32,
    /// The client's limit on them; `None` where it is no tighter than the pool's.
    pub max_output: Option<u32>,
    /// What was expected when it was released, in output tokens and in capacity-seconds.
    pub predicted_tokens: Option<u32>,
    pub work: Option<f64>,
    /// The ranker's opinion.
    pub score: Option<f32>,
    /// Where that came from, one of a closed set of names; `None` for requests that are not scored.
    pub scoring: Option<&'static str>,
    /// How much earlier than its arrival the order took it for, in microseconds.
    pub boost: Option<i64>,
    /// Released for its age rather than by its key.
    pub aged: bool,
    /// Released by another backend than the one it waited for.
    pub stolen: bool,
    /// Attempts on other backends before the answer began.
    pub retries: u32,
    /// A stream was asked for.
    pub streamed: bool,
}

impl Ended {
    /// Whether it got its whole answer.
    pub fn is_answered(&self) -> bool {
        self.reason == "ok"
    }

    /// When it arrived.
    pub fn arrived(&self) -> Instant {
        self.at.checked_sub(self.total).unwrap_or(self.at)
    }

    /// When it was last released to a backend, if it ever was.
    pub fn released_at(&self) -> Option<Instant> {
        self.released.map(|released| self.arrived() + released)
    }
}

/// Counts of one pool's requests since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Those that got their whole answer, and those that did not.
    pub answered: u64,
    pub failed: u64,
    /// Output tokens of both.
    pub output_tokens: u64,
}

/// The memory of one gateway.
#[derive(Default)]
pub struct Recent(Mutex<Rings>);

#[derive(Default)]
struct Rings {
    all: VecDeque<Arc<Ended>>,
    failures: VecDeque<Arc<Ended>>,
    models: BTreeSet<Arc<str>>,
    /// Of pools, tenants and backends: as many as were ever configured.
    names: BTreeSet<Arc<str>>,
    totals: BTreeMap<Arc<str>, Totals>,
}

impl Recent {
    /// Remembers a request that ends now.
    pub(super) fn record(&self, outcome: &Outcome) {
        let (id, at) = (outcome.request_id.into(), Instant::now());
        let mut rings = self.rings();
        // Clients make up models that nobody serves.
        let model = if outcome.pool.is_some() { name(&mut rings.models, outcome.model, MODELS) } else { Arc::default() };
        let ended = Arc::new(Ended {
            id,
            pool: outcome.pool.map(|pool| name(&mut rings.names, pool, usize::MAX)),
            model,
            tenant: outcome.tenant.map(|tenant| name(&mut rings.names, tenant, usize::MAX)),
            backend: outcome.backend.map(|backend| name(&mut rings.names, backend, usize::MAX)),
            at,
            status: outcome.status,
            reason: outcome.reason,
            total: outcome.total,
            released: outcome.released,
            first_token: outcome.first_token,
            queued: outcome.queued,
            prompt_tokens: outcome.prompt_tokens,
            output_tokens: outcome.output_tokens,
            max_output: outcome.max_output,
            predicted_tokens: outcome.predicted_tokens,
            work: outcome.work,
            score: outcome.score,
            scoring: outcome.scoring,
            boost: outcome.boost,
            aged: outcome.aged,
            stolen: outcome.stolen,
            retries: outcome.retries,
            streamed: outcome.streamed,
        });
        if let Some(pool) = &ended.pool {
            let totals = rings.totals.entry(Arc::clone(pool)).or_default();
            *(if ended.is_answered() { &mut totals.answered } else { &mut totals.failed }) += 1;
            totals.output_tokens += u64::from(ended.output_tokens);
        }
        if !ended.is_answered() {
            push(&mut rings.failures, FAILURES, Arc::clone(&ended));
        }
        push(&mut rings.all, REQUESTS, ended);
    }

    /// Those that ended at `from` or later, the latest first.
    pub fn since(&self, from: Instant) -> Vec<Arc<Ended>> {
        self.rings().all.iter().rev().take_while(|ended| ended.at >= from).cloned().collect()
    }

    /// All of them, the latest first.
    pub fn all(&self) -> Vec<Arc<Ended>> {
        self.rings().all.iter().rev().cloned().collect()
    }

    /// What each pool has done since the start, whatever is forgotten.
    pub fn totals(&self) -> BTreeMap<Arc<str>, Totals> {
        self.rings().totals.clone()
    }

    /// When the oldest of them ended, if older ones are forgotten.
    pub fn forgotten(&self) -> Option<Instant> {
        let rings = self.rings();
        rings.all.front().filter(|_| rings.all.len() >= REQUESTS).map(|oldest| oldest.at)
    }

    /// The last one with this id.
    pub fn find(&self, id: &str) -> Option<Arc<Ended>> {
        let rings = self.rings();
        rings.all.iter().rev().chain(rings.failures.iter().rev()).find(|ended| &*ended.id == id).cloned()
    }

    /// The last that got no whole answer, the latest first.
    pub fn failures(&self) -> Vec<Arc<Ended>> {
        self.rings().failures.iter().rev().cloned().collect()
    }

    /// A lock on values that are sound whatever their holder did.
    fn rings(&self) -> std::sync::MutexGuard<'_, Rings> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of `names`, or `other` where there are as many as may be.
fn name(names: &mut BTreeSet<Arc<str>>, name: &str, most: usize) -> Arc<str> {
    if let Some(known) = names.get(name) {
        return Arc::clone(known);
    }
    if names.len() >= most {
        return "other".into();
    }
    let new: Arc<str> = name.into();
    names.insert(Arc::clone(&new));
    new
}

fn push(ring: &mut VecDeque<Arc<Ended>>, most: usize, ended: Arc<Ended>) {
    if ring.len() >= most {
        ring.pop_front();
    }
    ring.push_back(ended);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_crowd_pushes_out_what_was_answered_and_not_what_failed() {
        let recent = Recent::default();
        recent.record(&Outcome { request_id: "failed", ..Outcome::refused() });
        let start = Instant::now();
        tokio::time::advance(Duration::from_secs(1)).await;
        let answered = Outcome { reason: "ok", ..Outcome::refused() };
        for n in 0..REQUESTS {
            recent.record(&Outcome { request_id: &n.to_string(), model: &format!("model {n}"), ..answered.clone() });
        }
        let all = recent.since(start);
        assert_eq!(all.len(), REQUESTS);
        let totals = recent.totals()["chat"];
        assert_eq!((totals.answered, totals.failed), (REQUESTS as u64, 1), "whatever is forgotten");
        assert_eq!((&*all[0].id, &*all[REQUESTS - 1].id), ((REQUESTS - 1).to_string().as_str(), "0"));
        assert_eq!((&*all[REQUESTS - 1].model, &*all[0].model), ("model 0", "other"), "clients cannot make names grow");
        assert_eq!(recent.failures().iter().map(|failed| &*failed.id).collect::<Vec<_>>(), ["failed"]);
        assert_eq!(recent.since(start + Duration::from_secs(2)).len(), 0);
        assert!(recent.find("failed").is_some() && recent.find("7").is_some() && recent.find("eight").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn what_came_to_no_pool_keeps_no_name_of_the_clients() {
        let recent = Recent::default();
        recent.record(&Outcome { pool: None, model: "made up", ..Outcome::refused() });
        let [only] = &recent.failures()[..] else { panic!("one") };
        assert_eq!((&only.pool, &*only.model), (&None, ""));
    }
}
