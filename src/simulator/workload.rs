//! What is asked of the fleet: when, how long, and what the ranker thinks of it.

use std::sync::Arc;
use std::time::Duration;

use super::conversations::Turn;
use super::random::Random;
use crate::scheduler::{History, ModelId, Score, TenantId, Tokens, Weight, tau_b};

/// One request, before it is sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// When it is sent: after the start; in a closed loop, after its client's answer before it; a later turn of a conversation, after the answer to the turn before.
    pub after: Duration,
    /// At least 1.
    pub prompt: Tokens,
    /// The true length of its answer. 0 is a request without decode work, such as an embedding.
    pub output: Tokens,
    /// The ranker's opinion.
    pub score: Option<Score>,
    /// The client's limit on output; an answer that is longer is cut there.
    pub max_output: Option<Tokens>,
    /// How long after it was sent its client leaves, if it has no answer yet.
    pub patience: Option<Duration>,
    pub weight: Weight,
    pub share: Weight,
    pub attained: Tokens,
    pub model: ModelId,
    pub tenant: Option<TenantId>,
    pub history: Option<Arc<History>>,
    /// Which conversation it belongs to. Turns stand one behind the other.
    pub turn: Option<Turn>,
    /// Bytes of its body.
    pub bytes: u32,
}

impl Job {
    /// A plain request of these lengths, sent at once.
    pub fn new(prompt: Tokens, output: Tokens) -> Self {
        Job {
            after: Duration::ZERO,
            prompt: prompt.max(1),
            output,
            score: None,
            max_output: None,
            patience: None,
            weight: Weight::ONE,
            share: Weight::ONE,
            attained: 0,
            model: ModelId(0),
            tenant: None,
            history: None,
            turn: None,
            bytes: 0,
        }
    }

    /// Whether it is sent because the turn before it was answered.
    pub fn follows(&self) -> bool {
        self.turn.is_some_and(|turn| turn.number > 0)
    }

    /// Tokens it will produce.
    pub fn produces(&self) -> Tokens {
        self.max_output.map_or(self.output, |limit| self.output.min(limit))
    }
}

/// Requests in the order in which they are sent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Workload {
    pub jobs: Vec<Job>,
    /// A closed loop of this many clients, each with one request at a time; otherwise requests come whatever becomes of those before.
    pub clients: Option<u32>,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// Independent of each other.
    Poisson,
    /// Gamma-distributed gaps with this coefficient of variation: 1 is Poisson, more comes in bursts.
    Gamma { cv: f64 },
    /// All at once.
    Burst,
    /// By clients that wait for each answer, and then think for an exponential time with this mean.
    Closed { clients: u32, think: Duration },
}

/// How long prompts or answers are.
#[derive(Clone, Debug, PartialEq)]
pub enum Length {
    Fixed(Tokens),
    /// Exponential with this mean.
    Exponential(f64),
    /// A mixture of log-normal parts, never longer than `longest`.
    LogNormal {
        parts: Vec<Part>,
        longest: Tokens,
    },
}

/// One part of a mixture.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    /// How often, relative to the other parts.
    pub share: f64,
    pub median: f64,
    /// Standard deviation of the logarithm.
    pub sigma: f64,
}

impl Length {
    /// Draws one, at least 1.
    pub fn draw(&self, random: &mut Random) -> Tokens {
        match self {
            Length::Fixed(tokens) => (*tokens).max(1),
            Length::Exponential(mean) => random.exponential(*mean).round().max(1.0) as Tokens,
            Length::LogNormal { parts, longest } => {
                let mut at = random.unit() * parts.iter().map(|part| part.share).sum::<f64>();
                let part = parts.iter().find(|part| {
                    at -= part.share;
                    at < 0.0
                });
                // Rounding may leave a last sliver that belongs to the last part.
                let part = part.or(parts.last()).copied().unwrap_or(Part { share: 1.0, median: 1.0, sigma: 0.0 });
                let drawn = part.median * (part.sigma * random.normal()).exp();
                (drawn.round().max(1.0) as Tokens).min((*longest).max(1))
            }
        }
    }
}

/// One of those who send requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sender {
    /// How many of the requests are its, relative to the other senders.
    pub share: f64,
    pub weight: Weight,
    /// Requests that it sends beside those, all at once.
    pub flood: usize,
    /// When it sends them.
    pub at: Duration,
}

/// What the ranker thinks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scores {
    /// Nothing.
    Absent,
    /// The logarithm of the true length under normal noise, as much as gives this Kendall tau-b.
    Tau(f64),
    /// The true length.
    Oracle,
    /// The exact opposite.
    Inverted,
}

impl Workload {
    /// Draws requests with arrivals of mean rate 1/s; [`Workload::pace`] changes that.
    pub fn draw(requests: usize, arrivals: Arrivals, prompt: &Length, output: &Length, seed: u64) -> Self {
        let (mut prompts, mut outputs) = (Random::new(seed, "prompts"), Random::new(seed, "outputs"));
        let jobs = (0..requests).map(|_| Job::new(prompt.draw(&mut prompts), output.draw(&mut outputs))).collect();
        let mut workload = Workload { jobs, clients: None };
        workload.arrive(arrivals, seed);
        workload
    }

    /// Sends the same requests at other times, at mean rate 1/s where they have a rate.
    pub fn arrive(&mut self, arrivals: Arrivals, seed: u64) {
        let mut random = Random::new(seed, "arrivals");
        let mut at = 0.0;
        self.clients = None;
        for job in self.jobs.iter_mut().filter(|job| !job.follows()) {
            at = match arrivals {
                Arrivals::Poisson => at + random.exponential(1.0),
                Arrivals::Gamma { cv } => at + random.gamma(1.0 / (cv * cv)),
                Arrivals::Burst => 0.0,
                Arrivals::Closed { think, .. } => random.exponential(think.as_secs_f64()),
            };
            job.after = Duration::from_secs_f64(at);
        }
        if let Arrivals::Closed { clients, .. } = arrivals {
            self.clients = Some(clients.max(1));
        }
    }

    /// From the first request to the last that does not follow from another.
    pub fn span(&self) -> Duration {
        let last = self.jobs.iter().rev().find(|job| !job.follows());
        last.zip(self.jobs.first()).map_or(Duration::ZERO, |(last, first)| last.after.saturating_sub(first.after))
    }

    /// Stretches or squeezes time so that requests arrive at this mean rate in 1/s. Without effect on a burst and on a closed loop.
    pub fn pace(&mut self, rate: f64) {
        let (start, span) = (self.jobs.first().map_or(Duration::ZERO, |job| job.after), self.span().as_secs_f64());
        if self.clients.is_some() || span <= 0.0 {
            return;
        }
        let factor = self.jobs.len() as f64 / rate / span;
        for job in self.jobs.iter_mut().filter(|job| !job.follows()) {
            job.after = Duration::from_secs_f64((job.after - start).as_secs_f64() * factor);
        }
    }

    /// Gives each request to one of these, whose index is its [`TenantId`], and adds their floods, of lengths like those of the requests that are there.
    /// In a closed loop nothing comes at once: there are no floods. Not for conversations, whose turns it would take apart.
    pub fn send(&mut self, senders: &[Sender], seed: u64) {
        let mut random = Random::new(seed, "tenants");
        let shares: f64 = senders.iter().map(|sender| sender.share).sum();
        let steady = self.jobs.len() as u64;
        for job in &mut self.jobs {
            let mut at = random.unit() * shares;
            let tenant = senders.iter().position(|sender| {
                at -= sender.share;
                at < 0.0
            });
            job.tenant = tenant.map(|tenant| TenantId(tenant as u32));
            job.share = tenant.map_or(Weight::ONE, |tenant| senders[tenant].weight);
        }
        if self.clients.is_some() || steady == 0 {
            return;
        }
        for (tenant, sender) in senders.iter().enumerate() {
            for _ in 0..sender.flood {
                let like = &self.jobs[random.below(steady) as usize];
                let job = Job { after: sender.at, tenant: Some(TenantId(tenant as u32)), share: sender.weight, ..like.clone() };
                self.jobs.push(job);
            }
        }
        self.jobs.sort_by_key(|job| job.after);
    }

    /// Gives each request the ranker's opinion.
    pub fn score(&mut self, scores: Scores, seed: u64) {
        let sigma = match scores {
            Scores::Tau(tau) => self.noise(tau, seed),
            Scores::Absent | Scores::Oracle | Scores::Inverted => 0.0,
        };
        let mut random = Random::new(seed, "scores");
        for job in &mut self.jobs {
            let length = f64::from(job.output.max(1)).ln();
            let score = match scores {
                Scores::Absent => None,
                Scores::Oracle => Some(length),
                Scores::Inverted => Some(-length),
                Scores::Tau(_) => Some(noisy(length, sigma, random.normal())),
            };
            job.score = score.and_then(|score| Score::new(score as f32));
        }
    }

    /// Kendall's tau-b between scores and true lengths; `None` where one of them never varies.
    pub fn tau(&self) -> Option<f64> {
        let mut pairs: Vec<(Score, Tokens)> = self.jobs.iter().filter_map(|job| Some((job.score?, job.output))).collect();
        tau_b(&mut pairs)
    }

    /// The noise that leaves this much agreement, found by bisection on up to 2,000 requests; infinite for no agreement.
    fn noise(&self, tau: f64, seed: u64) -> f64 {
        if tau <= 0.0 {
            return f64::INFINITY;
        }
        let mut random = Random::new(seed, "noise");
        let stride = self.jobs.len().div_ceil(2_000).max(1);
        let sample: Vec<(Tokens, f64)> = self.jobs.iter().step_by(stride).map(|job| (job.output, random.normal())).collect();
        let agreement = |sigma: f64| {
            let score = |&(output, noise): &(Tokens, f64)| Some((Score::new(noisy(f64::from(output.max(1)).ln(), sigma, noise) as f32)?, output));
            tau_b(&mut sample.iter().filter_map(score).collect::<Vec<_>>()).unwrap_or(0.0)
        };
        let (mut low, mut high) = (0.0, 64.0);
        for _ in 0..40 {
            let middle = (low + high) / 2.0;
            if agreement(middle) > tau { low = middle } else { high = middle }
        }
        high
    }
}

/// A score: the logarithm of a length under noise of this size, or noise alone.
fn noisy(length: f64, sigma: f64, noise: f64) -> f64 {
    if sigma.is_finite() { length + sigma * noise } else { noise }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn long_tail() -> Length {
        Length::LogNormal {
            parts: vec![Part { share: 3.0, median: 100.0, sigma: 1.0 }, Part { share: 1.0, median: 2000.0, sigma: 0.5 }],
            longest: 8000,
        }
    }

    fn drawn(arrivals: Arrivals, seed: u64) -> Workload {
        Workload::draw(4000, arrivals, &Length::Fixed(100), &long_tail(), seed)
    }

    fn gaps(workload: &Workload) -> (f64, f64) {
        let gaps: Vec<f64> = workload.jobs.windows(2).map(|pair| (pair[1].after - pair[0].after).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        (mean, variance.sqrt() / mean)
    }

    #[test]
    fn a_seed_decides_all_of_it() {
        assert_eq!(drawn(Arrivals::Poisson, 1), drawn(Arrivals::Poisson, 1));
        assert_ne!(drawn(Arrivals::Poisson, 1), drawn(Arrivals::Poisson, 2));
    }

    #[test]
    fn arrivals_have_the_rate_and_the_bursts_that_were_asked_for() {
        for (arrivals, cv) in [(Arrivals::Poisson, 1.0), (Arrivals::Gamma { cv: 3.0 }, 3.0)] {
            let mut workload = drawn(arrivals, 1);
            workload.pace(5.0);
            let (mean, measured) = gaps(&workload);
            assert!((mean - 0.2).abs() < 0.001 && (measured / cv - 1.0).abs() < 0.1, "{arrivals:?}: mean gap {mean}, cv {measured}");
        }
        let mut burst = drawn(Arrivals::Burst, 1);
        burst.pace(5.0);
        assert!(burst.jobs.iter().all(|job| job.after.is_zero()));
        let closed = drawn(Arrivals::Closed { clients: 7, think: Duration::from_secs(2) }, 1);
        let think = closed.jobs.iter().map(|job| job.after.as_secs_f64()).sum::<f64>() / closed.jobs.len() as f64;
        assert!(closed.clients == Some(7) && (think - 2.0).abs() < 0.1, "{think}");
    }

    #[test]
    fn lengths_follow_their_distribution() {
        let mut lengths: Vec<Tokens> = drawn(Arrivals::Burst, 1).jobs.iter().map(|job| job.output).collect();
        lengths.sort_unstable();
        assert!(*lengths.last().unwrap() <= 8000 && lengths[0] >= 1);
        // Three of four from the short part, whose median is then the overall rank 1/2 * 3/4.
        let (short, long) = (lengths[1500], lengths[3500]);
        assert!((85..=115).contains(&short) && (1800..=2300).contains(&long), "{short} and {long}");
        let mut random = Random::new(1, "test");
        assert_eq!((Length::Fixed(0).draw(&mut random), Length::Exponential(1e-9).draw(&mut random)), (1, 1));
    }

    #[test]
    fn senders_have_their_shares_and_floods() {
        let second = Duration::from_secs(1);
        let sender = |share, flood| Sender { share, weight: Weight::ONE, flood, at: 100 * second };
        let mut workload = drawn(Arrivals::Poisson, 1);
        workload.send(&[sender(3.0, 0), Sender { weight: Weight::new(2.0).unwrap(), ..sender(1.0, 500) }], 1);
        let of = |tenant| workload.jobs.iter().filter(move |job| job.tenant == Some(TenantId(tenant)));
        assert!((2900..3100).contains(&of(0).count()) && of(0).count() + of(1).count() == 4500, "{}", of(0).count());
        assert_eq!(of(1).filter(|job| job.after == 100 * second).count(), 500);
        assert!(of(1).all(|job| job.share.get() == 2.0) && workload.jobs.is_sorted_by_key(|job| job.after));
        let mut closed = drawn(Arrivals::Closed { clients: 7, think: second }, 1);
        closed.send(&[sender(1.0, 500)], 1);
        assert_eq!(closed.jobs.len(), 4000);
    }

    #[test]
    fn scores_agree_as_much_as_was_asked() {
        let mut workload = drawn(Arrivals::Burst, 1);
        for tau in [0.2, 0.5, 0.8] {
            workload.score(Scores::Tau(tau), 3);
            let measured = workload.tau().unwrap();
            assert!((measured - tau).abs() < 0.03, "{measured} instead of {tau}");
        }
        workload.score(Scores::Tau(0.0), 3);
        assert!(workload.tau().unwrap().abs() < 0.03);
        workload.score(Scores::Oracle, 3);
        assert!(workload.tau().unwrap() > 0.999);
        workload.score(Scores::Inverted, 3);
        assert!(workload.tau().unwrap() < -0.999);
        workload.score(Scores::Absent, 3);
        assert!(workload.jobs.iter().all(|job| job.score.is_none()));
    }
}
