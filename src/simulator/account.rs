//! What became of each request, and what is said about all of them together.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::engine;
use crate::scheduler::{Counters, Mode, Reason, TenantId, Time, Tokens};

/// How a client's request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With its whole answer.
    Answered,
    /// The gateway turned it away.
    Rejected(Reason),
    /// An engine cannot take it.
    Refused,
    /// The client left.
    Left,
    /// A backend broke, and it could not be sent again.
    Failed,
}

/// What became of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer {
    /// Index of the job.
    pub job: u32,
    pub tenant: Option<TenantId>,
    pub arrived: Time,
    /// When it first went to a backend.
    pub released: Option<Time>,
    /// When its first token came.
    pub first: Option<Time>,
    pub ended: Time,
    pub end: End,
    /// Tokens produced.
    pub output: Tokens,
    /// How often it was sent to a backend.
    pub attempts: u32,
}

impl Answer {
    /// From arrival to the first token.
    pub fn ttft(&self) -> Option<Duration> {
        self.first.map(|first| first.since(self.arrived))
    }

    /// From arrival to the end.
    pub fn ttlt(&self) -> Duration {
        self.ended.since(self.arrived)
    }

    /// From arrival to the first release.
    pub fn wait(&self) -> Option<Duration> {
        self.released.map(|released| released.since(self.arrived))
    }
}

/// The pool at one moment of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moment {
    pub at: Time,
    /// Requests that wait in the gateway.
    pub waiting: u32,
    /// Requests at backends.
    pub in_flight: u32,
    /// The decay rate of the boost in 1/s; 0 without a gateway.
    pub gamma: f64,
    /// B in seconds; 0 without a gateway.
    pub max_overtake: f64,
    /// Which order applies; `None` without a gateway.
    pub mode: Option<Mode>,
}

/// What a request that waited was told.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Foretold {
    /// Index of the job.
    pub job: u32,
    /// When it asked.
    pub at: Time,
    /// What it was told: its place in its queue, from 1, and the wait until its release.
    pub position: usize,
    pub wait: Duration,
}

/// How good that was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Foresight {
    /// Seconds between the moment foretold and the one that came.
    pub error: Summary,
    /// The same as a share of the wait that came.
    pub relative: Summary,
    /// All waits foretold over all that came: above 1 they were shorter.
    pub bias: f64,
}

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// In the order of the requests.
    pub answers: Vec<Answer>,
    pub moments: Vec<Moment>,
    /// What those that waited were told, where they asked.
    pub foretold: Vec<Foretold>,
    /// The scheduler's own counts; `None` without a gateway.
    pub counters: Option<Counters>,
    /// Each engine's counts.
    pub engines: Vec<engine::Counters>,
    /// By how many seconds at most a released request had arrived after one that still waited anywhere in the pool.
    pub overtaken: f64,
    /// The largest share of B by which a request was overtaken in its own queue, weights taken into account: 1 is all that is promised. 0 unless everything was
    /// checked.
    pub reached: f64,
    /// How evenly tenants were served, 1/n to 1: the mean over minutes of Jain's index of what each got over its max-min fair share. `None` where no two tenants
    /// asked for anything at once.
    pub jain: Option<f64>,
    /// Sequences in iterations, summed over all engines: what simulated work is measured in.
    pub request_iterations: u64,
    /// Events that the scheduler was told.
    pub events: u64,
    /// When the last request ended.
    pub end: Time,
}

/// Mean and percentiles (nearest rank) of one quantity.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    pub count: usize,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

impl Summary {
    /// Of any number of values; all zero for none.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        if values.is_empty() {
            return Summary::default();
        }
        values.sort_unstable_by(f64::total_cmp);
        let rank = |share: f64| values[((share * values.len() as f64).ceil() as usize).clamp(1, values.len()) - 1];
        Summary {
            count: values.len(),
            mean: values.iter().sum::<f64>() / values.len() as f64,
            p50: rank(0.5),
            p90: rank(0.9),
            p99: rank(0.99),
            p999: rank(0.999),
            max: rank(1.0),
        }
    }
}

/// What is said about one tenant's requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TenantFigures {
    pub tenant: TenantId,
    /// Seconds from arrival to the last token, of whole answers.
    pub ttlt: Summary,
    /// Seconds from arrival to the first token, of whole answers.
    pub ttft: Summary,
    /// Requests that got no whole answer.
    pub unanswered: usize,
}

/// What is said about one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Figures {
    /// Seconds from arrival to the last token, of whole answers.
    pub ttlt: Summary,
    /// Seconds from arrival to the first token, of whole answers.
    pub ttft: Summary,
    /// Seconds of TTLT for each output token (PARS' metric), of whole answers.
    pub per_token: Summary,
    /// Seconds from arrival to the first release, of everything released.
    pub wait: Summary,
    /// Requests that got no whole answer.
    pub unanswered: usize,
    /// Output tokens a second.
    pub tokens_per_second: f64,
    /// Whole answers a second.
    pub answers_per_second: f64,
    pub preemptions: u64,
    /// The share of prompt tokens that engines found in their prefix caches.
    pub cached: f64,
    /// Of all releases, those by age.
    pub aged: f64,
    /// See [`Run::overtaken`].
    pub overtaken: f64,
    /// The largest B of the run, in seconds.
    pub max_overtake: f64,
    /// The share of moments in overload, when B does not hold.
    pub overloaded: f64,
    /// See [`Run::jain`].
    pub jain: Option<f64>,
    /// Of each tenant that sent something, by its id.
    pub tenants: Vec<TenantFigures>,
    /// `None` where nobody asked.
    pub foresight: Option<Foresight>,
}

impl Run {
    /// What became of the requests after the first share `warm_up` of the arrivals.
    pub fn counted(&self, warm_up: f64) -> impl Iterator<Item = &Answer> + Clone {
        let mut arrivals: Vec<Time> = self.answers.iter().map(|answer| answer.arrived).collect();
        arrivals.sort_unstable();
        let from = arrivals.get((arrivals.len() as f64 * warm_up) as usize).copied().unwrap_or(Time::ZERO);
        self.answers.iter().filter(move |answer| answer.arrived >= from)
    }

    /// Of those, the ones with a whole answer.
    pub fn whole(&self, warm_up: f64) -> impl Iterator<Item = &Answer> + Clone {
        self.counted(warm_up).filter(|answer| answer.end == End::Answered)
    }

    /// Sums up. The first share `warm_up` of the arrivals is left out of what is said about single requests.
    pub fn figures(&self, warm_up: f64) -> Figures {
        let (counted, whole) = (self.counted(warm_up), self.whole(warm_up));
        let (counted, whole) = (|| counted.clone(), || whole.clone());
        let seconds = |span: Duration| span.as_secs_f64();
        let first = self.answers.iter().map(|answer| answer.arrived).min();
        let span = self.end.since(first.unwrap_or_default()).as_secs_f64().max(1e-6);
        let produced: u64 = self.answers.iter().map(|answer| u64::from(answer.output)).sum();
        let (aged, released) = self.counters.as_ref().map_or((0, 0), |counters| (counters.aged, counters.released));
        let (queries, hits) =
            self.engines.iter().fold((0, 0), |(queries, hits), engine| (queries + engine.prefix_queries, hits + engine.prefix_hits));
        let overloaded = self.moments.iter().filter(|moment| moment.mode == Some(Mode::Overload)).count();
        Figures {
            ttlt: Summary::of(whole().map(|answer| seconds(answer.ttlt()))),
            ttft: Summary::of(whole().filter_map(|answer| answer.ttft().map(seconds))),
            per_token: Summary::of(whole().filter(|answer| answer.output > 0).map(|answer| seconds(answer.ttlt()) / f64::from(answer.output))),
            wait: Summary::of(counted().filter_map(|answer| answer.wait().map(seconds))),
            unanswered: counted().filter(|answer| answer.end != End::Answered).count(),
            tokens_per_second: produced as f64 / span,
            answers_per_second: self.answers.iter().filter(|answer| answer.end == End::Answered).count() as f64 / span,
            preemptions: self.engines.iter().map(|engine| engine.preemptions).sum(),
            cached: hits as f64 / queries.max(1) as f64,
            aged: if released == 0 { 0.0 } else { aged as f64 / released as f64 },
            overtaken: self.overtaken,
            max_overtake: self.moments.iter().map(|moment| moment.max_overtake).fold(0.0, f64::max),
            overloaded: overloaded as f64 / self.moments.len().max(1) as f64,
            jain: self.jain,
            tenants: self.tenants(warm_up),
            foresight: self.foresight(warm_up),
        }
    }

    fn foresight(&self, warm_up: f64) -> Option<Foresight> {
        let counted: BTreeSet<u32> = self.counted(warm_up).map(|answer| answer.job).collect();
        let pairs = self.foretold.iter().filter(|told| counted.contains(&told.job)).filter_map(|told| {
            let released = self.answers.get(told.job as usize)?.released?;
            Some((told.wait.as_secs_f64(), released.since(told.at).as_secs_f64()))
        });
        let pairs: Vec<(f64, f64)> = pairs.collect();
        let came: f64 = pairs.iter().map(|(_, came)| came).sum();
        (came > 0.0).then(|| Foresight {
            error: Summary::of(pairs.iter().map(|(told, came)| (told - came).abs())),
            // Who is released in the very moment is told nothing that could be wrong.
            relative: Summary::of(pairs.iter().filter(|(_, came)| *came > 0.0).map(|(told, came)| (told - came).abs() / came)),
            bias: pairs.iter().map(|(told, _)| told).sum::<f64>() / came,
        })
    }

    fn tenants(&self, warm_up: f64) -> Vec<TenantFigures> {
        let mut answers: BTreeMap<TenantId, Vec<&Answer>> = BTreeMap::new();
        for answer in self.counted(warm_up) {
            if let Some(tenant) = answer.tenant {
                answers.entry(tenant).or_default().push(answer);
            }
        }
        let figures = |(tenant, answers): (TenantId, Vec<&Answer>)| {
            let whole = || answers.iter().filter(|answer| answer.end == End::Answered);
            TenantFigures {
                tenant,
                ttlt: Summary::of(whole().map(|answer| answer.ttlt().as_secs_f64())),
                ttft: Summary::of(whole().filter_map(|answer| Some(answer.ttft()?.as_secs_f64()))),
                unanswered: answers.len() - whole().count(),
            }
        };
        answers.into_iter().map(figures).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let summary = Summary::of((1..=1000).rev().map(f64::from));
        assert_eq!(summary, Summary { count: 1000, mean: 500.5, p50: 500.0, p90: 900.0, p99: 990.0, p999: 999.0, max: 1000.0 });
        assert_eq!(Summary::of([]), Summary::default());
    }

    #[test]
    fn figures_leave_out_the_warm_up_and_what_got_no_answer() {
        let second = |second: u64| Time::from_micros(second * 1_000_000);
        let answer = |job: u32, arrived, ended, end| Answer {
            job,
            tenant: Some(TenantId(job % 2)),
            arrived: second(arrived),
            released: Some(second(arrived + 1)),
            first: Some(second(arrived + 2)),
            ended: second(ended),
            end,
            output: 10,
            attempts: 1,
        };
        let answers =
            vec![answer(0, 0, 100, End::Answered), answer(1, 10, 14, End::Answered), answer(2, 20, 30, End::Left), answer(3, 30, 36, End::Answered)];
        let run = Run {
            answers,
            moments: vec![],
            foretold: vec![Foretold { job: 1, at: second(10), position: 1, wait: Duration::from_secs(3) }],
            counters: None,
            engines: vec![],
            overtaken: 0.0,
            reached: 0.0,
            jain: None,
            request_iterations: 0,
            events: 0,
            end: second(100),
        };
        let figures = run.figures(0.25);
        assert_eq!((figures.ttlt.count, figures.ttlt.mean, figures.ttft.mean, figures.wait.count), (2, 5.0, 2.0, 3));
        let foresight = figures.foresight.unwrap();
        assert_eq!((foresight.error.p50, foresight.relative.p50, foresight.bias), (2.0, 2.0, 3.0), "it was released after a second");
        assert_eq!((run.counted(0.25).count(), run.whole(0.25).map(|answer| answer.job).collect::<Vec<_>>()), (3, vec![1, 3]));
        let tenants: Vec<_> = figures.tenants.iter().map(|of| (of.tenant.0, of.ttlt.count, of.ttlt.mean, of.unanswered)).collect();
        assert_eq!(tenants, [(0, 0, 0.0, 1), (1, 2, 5.0, 0)]);
        assert_eq!((figures.per_token.mean, figures.unanswered, figures.tokens_per_second), (0.5, 1, 0.4));
    }
}
