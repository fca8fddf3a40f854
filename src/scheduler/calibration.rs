//! From a score to expected tokens, learnt online per served model.
//!
//! A score is trusted for its order only. Its place among recent scores of the same ranker picks one of twelve bins; each (model, bin) has a survival curve of
//! answer lengths, estimated from recent answers with those that were cut or still run counted as longer. Bins with little evidence lean on the model's pooled
//! curve, and the curves are made to rise with the score. So scores that say nothing flatten by themselves, and the order becomes that of arrival.

use std::collections::{BTreeMap, VecDeque};

use super::concordance::{tau_b, tau_error};
use super::curve::{Curve, Histogram, LONGEST, Survival, make_monotone};
use super::event::{ModelId, TenantId, Tokens};
use super::outcome::Ending;
use super::score::{RankerVersion, Score, Scored};
use super::table::{Entry, Stage};
use super::tenants::Tenants;
use super::view::ModelView;

/// How many bins the scores of one ranker fall into.
const BINS: usize = 12;
/// Recent scores of one ranker whose quantiles are the edges of the bins.
const SCORES: usize = 2000;
/// Answers remembered per model. At the half-life below, those before count an eighth and less.
const SAMPLES: usize = 4096;
/// Answers of a model until one counts half.
const HALF_LIFE: f64 = 1400.0;
/// How much evidence the curve that a bin or a model leans on is worth, in answers.
const LEAN: f32 = 30.0;
/// A model with this much evidence that its scores say nothing is flat, whatever the scores say elsewhere.
const DOUBT: usize = 100;
/// Models with curves of their own; more are pooled.
const MODELS: usize = 256;
/// Rankers whose scores are remembered; at a change of weights there are two.
const VERSIONS: usize = 4;
/// Mean output, in tokens, that is assumed before anything was seen, and how many answers that is worth.
const ASSUMED: (f32, f32) = (256.0, 8.0);
/// How many looks in a row may be left out for want of new answers.
const MOST_LEFT_OUT: usize = 6;
/// Tau below which scores are not trusted, whatever the evidence.
const LEAST_TAU: f64 = 0.05;

/// What is expected of a request's output.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    pub mean: Tokens,
    /// Nine of ten answers are at most this long.
    pub at_most: Tokens,
}

/// One answer and the score of its prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Whose answer; `None` is nobody's in particular, such as the calibration that ships with a ranker.
    pub model: Option<ModelId>,
    pub score: Option<Scored>,
    pub output: Tokens,
    /// Whether the answer was cut there: it is longer than `output`.
    pub cut: bool,
}

/// What a calibration has learnt, as plain data: to be kept over a restart, or shipped with a ranker.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Learnt {
    /// Recent scores of each ranker, oldest first.
    pub scores: Vec<Scored>,
    /// Recent answers, oldest first.
    pub samples: Vec<Sample>,
    /// The decay rate of the boost in 1/s, once it follows the tail.
    pub gamma: Option<f64>,
}

#[derive(Debug, Default)]
pub(super) struct Calibration {
    scores: BTreeMap<RankerVersion, VecDeque<Score>>,
    /// Rankers by when they were first seen, the current one last.
    versions: Vec<RankerVersion>,
    models: BTreeMap<ModelId, VecDeque<Sample>>,
    /// Answers of no model in particular.
    others: VecDeque<Sample>,
    tenants: Tenants,
    /// Answers since the last fit, and how often it was left out since.
    fresh: usize,
    left_out: usize,
    /// What estimates are made from. Replaced as a whole, so that keys made from it stay comparable.
    fit: Fit,
}

/// Curves for everything there is evidence of.
#[derive(Clone, Debug)]
struct Fit {
    pooled: Curve,
    versions: BTreeMap<RankerVersion, Bins>,
    models: BTreeMap<ModelId, ModelFit>,
}

/// One ranker's bins.
#[derive(Clone, Debug, Default)]
struct Bins {
    /// Between the bins: a score belongs to the bin of as many edges as are smaller than it.
    edges: Vec<Score>,
    /// One per bin.
    curves: Vec<Curve>,
}

#[derive(Clone, Debug)]
struct ModelFit {
    pooled: Curve,
    bins: BTreeMap<RankerVersion, Bins>,
    samples: f64,
    tau: Option<f64>,
    trusted: bool,
}

impl Default for Fit {
    fn default() -> Self {
        Fit { pooled: Survival::exponential(ASSUMED.0).into(), versions: BTreeMap::new(), models: BTreeMap::new() }
    }
}

impl Calibration {
    /// A prompt was scored.
    pub fn scored(&mut self, scored: Scored) {
        if !self.scores.contains_key(&scored.version) {
            self.versions.push(scored.version);
            if self.versions.len() > VERSIONS {
                self.scores.remove(&self.versions.remove(0));
            }
        }
        remember(self.scores.entry(scored.version).or_default(), SCORES, scored.score);
    }

    /// An answer ended, or was cut.
    pub fn answered(&mut self, entry: &Entry, ending: Ending, limit: Tokens) {
        let (output, cut) = match ending {
            Ending::Completed { output, .. } => (output, false),
            Ending::Truncated { output, .. } => (output, true),
            Ending::Cancelled { output } | Ending::Failed { output } if output > 0 => (output, true),
            _ => return,
        };
        if let (Ending::Completed { .. } | Ending::Truncated { .. }, Some(tenant)) = (ending, entry.tenant()) {
            // Both are cut at the same limit, so that cut answers do not look short.
            let expected = self.curve(entry.model, entry.score()).mean(limit);
            self.tenants.answered(tenant, entry.score(), expected, output);
        }
        self.remember(Sample { model: Some(entry.model), score: entry.score(), output, cut });
    }

    fn remember(&mut self, sample: Sample) {
        self.fresh += 1;
        match sample.model {
            Some(model) if self.models.contains_key(&model) || self.models.len() < MODELS => {
                remember(self.models.entry(model).or_default(), SAMPLES, sample);
            }
            _ => remember(&mut self.others, SAMPLES, sample),
        }
    }

    /// What to expect of a request that may produce at most `limit` tokens.
    pub fn estimate(&self, model: ModelId, score: Option<Scored>, tenant: Option<TenantId>, limit: Tokens) -> Estimate {
        let curve = self.curve(model, score);
        let correction = tenant.map_or(1.0, |tenant| self.tenants.correction(tenant));
        let tokens = |length: f32| ((length * correction).round() as Tokens).clamp(1, limit.max(1));
        Estimate { mean: tokens(curve.mean(limit)), at_most: tokens(curve.at_most()) }
    }

    fn curve(&self, model: ModelId, score: Option<Scored>) -> &Curve {
        let (pooled, bins) = match self.fit.models.get(&model) {
            Some(fit) => (&fit.pooled, &fit.bins),
            None => (&self.fit.pooled, &self.fit.versions),
        };
        let bin = score.and_then(|scored| {
            let bins = bins.get(&scored.version)?;
            bins.curves.get(bin_of(&bins.edges, scored.score))
        });
        bin.unwrap_or(pooled)
    }

    /// The ranker whose scores count, and its median score: what stands in for a missing score, or for one that is not comparable.
    pub fn current_ranker(&self) -> Option<Scored> {
        let version = *self.versions.last()?;
        let mut scores: Vec<Score> = self.scores.get(&version)?.iter().copied().collect();
        let middle = scores.len() / 2;
        let (_, median, _) = scores.select_nth_unstable(middle);
        Some(Scored { score: *median, version })
    }

    /// Learns from all answers so far and from the requests still running. True if an estimate moved by more than a tenth: then the new curves apply and keys
    /// that were made from the old ones have to be rebuilt. Otherwise the old ones stay, unless nothing waits (`idle`).
    pub fn refresh<'a>(&mut self, running: impl Iterator<Item = &'a Entry>, idle: bool) -> bool {
        // A hundredth of the answers moves no estimate by a tenth. Long requests that run and end nothing may, with time.
        let remembered: usize = self.models.values().map(VecDeque::len).sum::<usize>() + self.others.len();
        if self.fresh * 100 < remembered && self.left_out < MOST_LEFT_OUT {
            self.left_out += 1;
            return false;
        }
        (self.fresh, self.left_out) = (0, 0);
        let fit = self.fit(running);
        let moved = fit.differs(&self.fit);
        if moved || idle {
            self.fit = fit;
        }
        moved
    }

    /// What is known of each model.
    pub fn known(&self) -> impl Iterator<Item = ModelView> {
        self.fit.models.iter().map(|(&model, fit)| ModelView {
            model,
            samples: fit.samples,
            mean_output: f64::from(fit.pooled.mean(LONGEST)),
            tau: fit.tau,
            trusted: fit.trusted,
        })
    }

    pub fn tenants(&self) -> &Tenants {
        &self.tenants
    }

    /// Everything learnt, but for tenants: their corrections are learnt again soon.
    pub fn learnt(&self) -> (Vec<Scored>, Vec<Sample>) {
        let scores = self.versions.iter().flat_map(|&version| {
            let scores = self.scores.get(&version).into_iter().flatten();
            scores.map(move |&score| Scored { score, version })
        });
        let samples = self.others.iter().chain(self.models.values().flatten());
        (scores.collect(), samples.copied().collect())
    }

    /// Adds what was learnt elsewhere or before, as if it happened now.
    pub fn restore(&mut self, scores: &[Scored], samples: &[Sample]) {
        for &scored in scores {
            self.scored(scored);
        }
        for &sample in samples {
            self.remember(sample);
        }
        self.fit = self.fit(std::iter::empty());
    }

    fn fit<'a>(&self, running: impl Iterator<Item = &'a Entry>) -> Fit {
        let edges: BTreeMap<RankerVersion, Vec<Score>> = self.scores.iter().map(|(&version, scores)| (version, quantiles(scores))).collect();
        let mut models: BTreeMap<Option<ModelId>, Evidence> = BTreeMap::new();
        for (&model, samples) in &self.models {
            models.entry(Some(model)).or_default().add(samples, &edges);
        }
        models.entry(None).or_default().add(&self.others, &edges);
        for entry in running {
            if let Stage::Running { produced, .. } = entry.stage
                && produced > 0
                && !entry.unscored
                && let Some(evidence) = models.get_mut(&Some(entry.model))
            {
                evidence.count(entry.score(), &edges, |histogram| histogram.cut(produced, 1.0));
            }
        }

        let mut everyone = Evidence::default();
        models.values().for_each(|evidence| everyone.merge(evidence));
        let assumed = Survival::exponential(ASSUMED.0);
        let pooled = lean(&everyone.pooled, &assumed, ASSUMED.1);
        let trust = everyone.trust();
        let versions: BTreeMap<RankerVersion, [Survival; BINS]> =
            edges.keys().map(|&version| (version, everyone.bins(version, &pooled, trust.is_trusted()))).collect();

        let mut fits = BTreeMap::new();
        for (model, evidence) in models {
            let Some(model) = model else { continue };
            let trust = evidence.trust();
            let weight = evidence.pooled.weight();
            let own = lean(&evidence.pooled, &pooled, LEAN);
            let mut bins = BTreeMap::new();
            for (&version, edges) in &edges {
                let mut curves = evidence.bins(version, &own, trust.is_trusted());
                if trust.is_trusted() || trust.pairs < DOUBT {
                    // A model seen rarely leans on what the same scores mean elsewhere.
                    for (curve, elsewhere) in curves.iter_mut().zip(&versions[&version]) {
                        *curve = curve.blend(weight, elsewhere, LEAN);
                    }
                    make_monotone(&mut curves, &evidence.weights(version));
                }
                bins.insert(version, Bins { edges: edges.clone(), curves: curves.into_iter().map(Curve::from).collect() });
            }
            fits.insert(model, ModelFit { pooled: own.into(), bins, samples: f64::from(weight), tau: trust.tau, trusted: trust.is_trusted() });
        }
        let versions = versions
            .into_iter()
            .map(|(version, curves)| (version, Bins { edges: edges[&version].clone(), curves: curves.into_iter().map(Curve::from).collect() }))
            .collect();
        Fit { pooled: pooled.into(), versions, models: fits }
    }
}

impl Fit {
    /// Whether an estimate made from one is more than a tenth off one made from the other.
    fn differs(&self, other: &Fit) -> bool {
        let curve = |a: &Curve, b: &Curve| {
            let ratio = a.mean(LONGEST) / b.mean(LONGEST);
            !(1.0 / 1.1..=1.1).contains(&ratio)
        };
        let bins = |a: &BTreeMap<RankerVersion, Bins>, b: &BTreeMap<RankerVersion, Bins>| {
            a.len() != b.len() || a.iter().any(|(version, a)| b.get(version).is_none_or(|b| a.curves.iter().zip(&b.curves).any(|(a, b)| curve(a, b))))
        };
        curve(&self.pooled, &other.pooled)
            || bins(&self.versions, &other.versions)
            || self.models.len() != other.models.len()
            || self.models.iter().any(|(model, a)| other.models.get(model).is_none_or(|b| curve(&a.pooled, &b.pooled) || bins(&a.bins, &b.bins)))
    }
}

/// What there is to learn from about one model, or about all of them.
#[derive(Debug, Default)]
struct Evidence {
    pooled: Histogram,
    bins: BTreeMap<RankerVersion, [Histogram; BINS]>,
    /// Scores and lengths of complete answers, by ranker.
    pairs: BTreeMap<RankerVersion, Vec<(Score, Tokens)>>,
}

impl Evidence {
    fn add(&mut self, samples: &VecDeque<Sample>, edges: &BTreeMap<RankerVersion, Vec<Score>>) {
        for (age, sample) in samples.iter().rev().enumerate() {
            let weight = (-(age as f64) / HALF_LIFE).exp2() as f32;
            self.count(sample.score, edges, |histogram| match sample.cut {
                true => histogram.cut(sample.output, weight),
                false => histogram.ended(sample.output, weight),
            });
            if let (Some(scored), false, true) = (sample.score, sample.cut, age < SCORES) {
                self.pairs.entry(scored.version).or_default().push((scored.score, sample.output));
            }
        }
    }

    fn count(&mut self, score: Option<Scored>, edges: &BTreeMap<RankerVersion, Vec<Score>>, mut into: impl FnMut(&mut Histogram)) {
        into(&mut self.pooled);
        if let Some(scored) = score
            && let Some(edges) = edges.get(&scored.version)
        {
            into(&mut self.bins.entry(scored.version).or_default()[bin_of(edges, scored.score)]);
        }
    }

    fn merge(&mut self, other: &Evidence) {
        self.pooled.add(&other.pooled);
        for (&version, bins) in &other.bins {
            let own = self.bins.entry(version).or_default();
            own.iter_mut().zip(bins).for_each(|(own, other)| own.add(other));
        }
        for (&version, pairs) in &other.pairs {
            self.pairs.entry(version).or_default().extend(pairs);
        }
    }

    /// One curve per bin: the pooled one for all, unless the scores are trusted.
    fn bins(&self, version: RankerVersion, pooled: &Survival, trusted: bool) -> [Survival; BINS] {
        let mut curves = [*pooled; BINS];
        if let (true, Some(histograms)) = (trusted, self.bins.get(&version)) {
            for (curve, histogram) in curves.iter_mut().zip(histograms) {
                *curve = lean(histogram, pooled, LEAN);
            }
            make_monotone(&mut curves, &self.weights(version));
        }
        curves
    }

    /// The evidence in each bin; never nothing, so that means of neighbours exist.
    fn weights(&self, version: RankerVersion) -> [f32; BINS] {
        self.bins.get(&version).map_or([1.0; BINS], |bins| bins.each_ref().map(|histogram| histogram.weight() + 1.0))
    }

    /// Whether scores and lengths agree, by the ranker there is most evidence of.
    fn trust(&self) -> Trust {
        let Some(pairs) = self.pairs.values().max_by_key(|pairs| pairs.len()) else { return Trust { tau: None, pairs: 0 } };
        Trust { tau: tau_b(&mut pairs.clone()), pairs: pairs.len() }
    }
}

#[derive(Clone, Copy, Debug)]
struct Trust {
    tau: Option<f64>,
    pairs: usize,
}

impl Trust {
    /// Whether tau is positive beyond chance.
    fn is_trusted(self) -> bool {
        self.tau.is_some_and(|tau| tau > LEAST_TAU.max(3.0 * tau_error(self.pairs)))
    }
}

/// What a histogram says, as far as its evidence goes, and another curve beyond that.
fn lean(histogram: &Histogram, on: &Survival, worth: f32) -> Survival {
    histogram.survival().blend(histogram.weight(), on, worth)
}

fn bin_of(edges: &[Score], score: Score) -> usize {
    edges.partition_point(|edge| *edge < score)
}

/// The scores between twelve groups of equal size.
fn quantiles(scores: &VecDeque<Score>) -> Vec<Score> {
    let mut sorted: Vec<Score> = scores.iter().copied().collect();
    sorted.sort_unstable();
    (1..BINS).filter_map(|bin| sorted.get((bin * sorted.len() / BINS).saturating_sub(1)).copied()).collect()
}

fn remember<T>(ring: &mut VecDeque<T>, most: usize, value: T) {
    if ring.len() >= most {
        ring.pop_front();
    }
    ring.push_back(value);
}
