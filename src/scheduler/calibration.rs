//! From a score to expected tokens, learnt online per served model.
//!
//! A score is trusted for its order only. Its place among recent scores of the same ranker picks one of twelve bins; each (model, bin) has a survival curve of
//! answer lengths, estimated from recent answers with those that were cut or still run counted as longer. Bins with little evidence lean on the model's pooled
//! curve, the more the less the scores say, and the curves are made to rise with the score. So scores that say nothing flatten by themselves, and the order
//! becomes that of arrival.

use std::collections::{BTreeMap, VecDeque};
use std::f64::consts::FRAC_PI_2;

use super::accuracy::Accuracy;
use super::concordance::{tau_b, tau_error};
use super::curve::{Curve, Histogram, LONGEST, Survival, make_monotone};
use super::event::{ModelId, TenantId, Tokens};
use super::outcome::Ending;
use super::score::{RankerVersion, Score, Scored};
use super::speed::Speed;
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
/// How much evidence the curve that a model leans on is worth, in answers, and the most that the model's own curve is worth to its bins.
const LEAN: f32 = 30.0;
/// The least that it is worth to them: a bin without any answer still has a curve.
const LEAST_LEAN: f32 = 0.1;
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
    /// That of a backend of weight 1, to be assumed of those that have not shown theirs.
    pub speed: Option<Speed>,
}

#[derive(Debug, Default)]
pub(super) struct Calibration {
    scores: BTreeMap<RankerVersion, VecDeque<Score>>,
    /// Rankers by when they last began to score, the current one last.
    versions: Vec<RankerVersion>,
    models: BTreeMap<ModelId, VecDeque<Sample>>,
    /// Answers of no model in particular.
    others: VecDeque<Sample>,
    tenants: Tenants,
    /// Of the models above.
    accuracy: BTreeMap<ModelId, Accuracy>,
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
        if self.versions.last() != Some(&scored.version) {
            // The ranker may have gone back to earlier weights: whoever scores now is the current one.
            self.versions.retain(|version| *version != scored.version);
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
        // Expected was what an answer has that ends at its limit at the latest.
        if let Ending::Completed { .. } | Ending::Truncated { .. } = ending
            && self.models.contains_key(&entry.model)
        {
            self.accuracy.entry(entry.model).or_default().answered(entry.expected, output);
        }
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

    /// The bin of a score, shortest answers first, and how many bins its ranker has.
    pub fn bin(&self, model: ModelId, scored: Scored) -> Option<(usize, usize)> {
        let bins = self.fit.models.get(&model).map_or(&self.fit.versions, |fit| &fit.bins).get(&scored.version)?;
        Some((bin_of(&bins.edges, scored.score), bins.curves.len()))
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
        let accuracy = |model| self.accuracy.get(&model).copied().unwrap_or_default();
        self.fit.models.iter().map(move |(&model, fit)| ModelView {
            model,
            samples: fit.samples,
            mean_output: f64::from(fit.pooled.mean(LONGEST)),
            tau: fit.tau,
            trusted: fit.trusted,
            error: accuracy(model).error(),
            drift: accuracy(model).drift(),
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

    /// Whether as many scores of each of these rankers are remembered: then nothing more is to be learnt from them.
    pub fn knows(&self, scores: &[Scored]) -> bool {
        let known = |version| self.scores.get(version).map_or(0, VecDeque::len);
        let mut versions: BTreeMap<RankerVersion, usize> = BTreeMap::new();
        scores.iter().for_each(|scored| *versions.entry(scored.version).or_default() += 1);
        !versions.is_empty() && versions.iter().all(|(version, &count)| known(version) >= count)
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
            edges.keys().map(|&version| (version, everyone.bins(version, &pooled, trust))).collect();

        let mut fits = BTreeMap::new();
        for (model, evidence) in models {
            let Some(model) = model else { continue };
            let trust = evidence.trust();
            let weight = evidence.pooled.weight();
            let own = lean(&evidence.pooled, &pooled, LEAN);
            let mut bins = BTreeMap::new();
            for (&version, edges) in &edges {
                let mut curves = evidence.bins(version, &own, trust);
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
    fn bins(&self, version: RankerVersion, pooled: &Survival, trust: Trust) -> [Survival; BINS] {
        let mut curves = [*pooled; BINS];
        if let (true, Some(histograms)) = (trust.is_trusted(), self.bins.get(&version)) {
            for (curve, histogram) in curves.iter_mut().zip(histograms) {
                *curve = lean(histogram, pooled, trust.lean());
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

    /// How many answers the pooled curve is worth to a bin. The best estimate of a group's mean leans on the mean of all by the variance within groups over
    /// that between them (empirical Bayes; Efron and Morris, 1973). Between scores and log lengths the latter is r^2 of the whole, and r follows from tau where
    /// both are normal (Greiner's relation; Kruskal, 1958). So the more scores say, the less the shortest answers are taken for middling ones.
    fn lean(self) -> f32 {
        let r = (FRAC_PI_2 * self.tau.unwrap_or(0.0)).sin();
        ((1.0 - r * r) / (r * r)).clamp(f64::from(LEAST_LEAN), f64::from(LEAN)) as f32
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

#[cfg(test)]
mod tests {
    use super::super::event::{Request, RequestId};
    use super::super::queue::Place;
    use super::super::rng::Rng;
    use super::super::score::Weight;
    use super::super::time::Time;
    use super::*;

    const MODEL: ModelId = ModelId(0);

    fn scored(score: u32, version: u32) -> Scored {
        Scored { score: Score::new(score as f32).unwrap(), version: RankerVersion(version) }
    }

    /// Answers of a model to prompts scored 0 to 99, evenly and mixed, with these lengths.
    fn teach(calibration: &mut Calibration, model: ModelId, version: u32, answers: u32, mut length: impl FnMut(u32) -> Tokens) {
        for n in 0..answers {
            let score = n * 37 % 100;
            calibration.scored(scored(score, version));
            calibration.remember(Sample { model: Some(model), score: Some(scored(score, version)), output: length(score), cut: false });
        }
        // However few they are.
        calibration.left_out = MOST_LEFT_OUT;
        calibration.refresh(std::iter::empty(), true);
    }

    /// Expected output by score.
    fn expected(calibration: &Calibration, model: ModelId, version: u32) -> Vec<Tokens> {
        (0..100).map(|score| calibration.estimate(model, Some(scored(score, version)), None, 100_000).mean).collect()
    }

    fn is_flat(expected: &[Tokens]) -> bool {
        expected.iter().all(|tokens| *tokens == expected[0])
    }

    fn near(tokens: Tokens, expected: Tokens, tolerance: f64) -> bool {
        (f64::from(tokens) / f64::from(expected) - 1.0).abs() < tolerance
    }

    #[test]
    fn scores_that_order_lengths_become_lengths() {
        let mut calibration = Calibration::default();
        assert!(is_flat(&expected(&calibration, MODEL, 1)), "before anything was seen");
        teach(&mut calibration, MODEL, 1, 2000, |score| 10 * (score + 1));
        let expected = expected(&calibration, MODEL, 1);
        assert!(expected.is_sorted(), "{expected:?}");
        // The mean of a twelfth of the scores, next to which the mean of all says nothing.
        for (score, length) in [(20, 215), (55, 550), (90, 885)] {
            assert!(near(expected[score], length, 0.1), "{} at {score}", expected[score]);
        }
        let estimate = |limit| calibration.estimate(MODEL, Some(scored(90, 1)), None, limit);
        assert!(estimate(100_000).at_most > estimate(100_000).mean);
        assert!(estimate(200).mean <= 200 && estimate(200).at_most == 200, "cut at the limit");
        assert_eq!(estimate(0), Estimate { mean: 1, at_most: 1 });
        let neutral = calibration.estimate(MODEL, None, None, 100_000).mean;
        assert!(near(neutral, 505, 0.1), "{neutral} without a score");
        let view = calibration.known().next().unwrap();
        assert!(
            view.trusted && view.tau.unwrap() > 0.9 && (view.samples - 1270.0).abs() < 20.0 && (view.mean_output / 505.0 - 1.0).abs() < 0.1,
            "{view:?}"
        );
    }

    #[test]
    fn the_less_scores_say_the_more_a_bin_leans() {
        let lean = |tau| Trust { tau: Some(tau), pairs: 1000 }.lean();
        assert!((lean(0.5) - 1.0).abs() < 1e-6, "half of the variance is between the bins");
        assert!((lean(0.2) - 9.47).abs() < 0.01, "{}", lean(0.2));
        assert_eq!((lean(0.05), lean(0.0), lean(1.0)), (LEAN, LEAN, LEAST_LEAN));
        assert_eq!(Trust { tau: None, pairs: 0 }.lean(), LEAN);
    }

    #[test]
    fn scores_that_say_nothing_are_flat() {
        let mut rng = Rng::new(1);
        let mut random = || (rng.next() % 2000) as Tokens + 1;
        for length in [&mut |_| 300, &mut |score| 1000 - 10 * score, &mut |_| random()] as [&mut dyn FnMut(u32) -> Tokens; 3] {
            let mut calibration = Calibration::default();
            teach(&mut calibration, MODEL, 1, 2000, length);
            assert!(is_flat(&expected(&calibration, MODEL, 1)));
            assert!(!calibration.known().next().unwrap().trusted);
        }
        let mut calibration = Calibration::default();
        for n in 0..500 {
            calibration.scored(scored(7, 1));
            calibration.remember(Sample { model: Some(MODEL), score: Some(scored(7, 1)), output: n, cut: false });
        }
        calibration.refresh(std::iter::empty(), true);
        assert!(is_flat(&expected(&calibration, MODEL, 1)), "equal scores");
    }

    /// One model's scores are of use, another's are inverted: each has what it deserves.
    #[test]
    fn a_model_is_doubted_alone() {
        let (mut calibration, other) = (Calibration::default(), ModelId(1));
        teach(&mut calibration, MODEL, 1, 2000, |score| 10 * (score + 1));
        teach(&mut calibration, other, 1, 400, |score| 1000 - 10 * score);
        assert!(is_flat(&expected(&calibration, other, 1)));
        assert!(expected(&calibration, MODEL, 1)[90] > 2 * expected(&calibration, MODEL, 1)[20]);
    }

    #[test]
    fn a_model_seen_rarely_leans_on_the_others() {
        let (mut calibration, rare, unseen) = (Calibration::default(), ModelId(1), ModelId(2));
        teach(&mut calibration, MODEL, 1, 2000, |score| 10 * (score + 1));
        teach(&mut calibration, rare, 1, 3, |_| 4000);
        let at = |model, score: usize| expected(&calibration, model, 1)[score];
        assert!(near(at(unseen, 90), at(MODEL, 90), 0.1) && near(at(unseen, 20), at(MODEL, 20), 0.2));
        let pooled = calibration.estimate(rare, None, None, 100_000).mean;
        assert!(near(pooled, (3 * 4000 + 30 * 505) / 33, 0.1), "{pooled}");
        assert!(at(rare, 90) > at(rare, 20), "three answers do not show that scores say nothing");
    }

    #[test]
    fn a_ranker_starts_bins_of_its_own() {
        let mut calibration = Calibration::default();
        teach(&mut calibration, MODEL, 1, 2000, |score| 10 * (score + 1));
        let old = expected(&calibration, MODEL, 1);
        calibration.scored(scored(5, 2));
        calibration.left_out = MOST_LEFT_OUT;
        calibration.refresh(std::iter::empty(), true);
        assert!(is_flat(&expected(&calibration, MODEL, 2)), "scores of another ranker are not comparable");
        assert_eq!(calibration.current_ranker().unwrap(), scored(5, 2));
        teach(&mut calibration, MODEL, 2, 2000, |score| 2 * (score + 1));
        let new = expected(&calibration, MODEL, 2);
        assert!(new[20] < new[90] && new[90] < old[90] / 2, "{new:?}");
        assert!(
            calibration.current_ranker().unwrap().score > scored(45, 2).score && calibration.current_ranker().unwrap().score < scored(55, 2).score
        );
        (3..=VERSIONS as u32 + 1).for_each(|version| calibration.scored(scored(1, version)));
        assert_eq!(calibration.learnt().0.first().unwrap().version, RankerVersion(2), "the oldest ranker is forgotten");
    }

    #[test]
    fn a_ranker_that_comes_back_is_the_current_one_again() {
        let mut calibration = Calibration::default();
        for version in [1, 2, 1] {
            (0..20).for_each(|score| calibration.scored(scored(score + 100 * version, version)));
        }
        assert_eq!(calibration.current_ranker().unwrap().version, RankerVersion(1));
        assert!(calibration.knows(&[scored(5, 1), scored(6, 2)]));
        assert!(!calibration.knows(&[scored(5, 1), scored(6, 3)]) && !calibration.knows(&[]));
        assert!(!calibration.knows(&[scored(5, 2); 21]), "more than is known");
    }

    #[test]
    fn what_was_learnt_survives_a_restart() {
        let mut calibration = Calibration::default();
        teach(&mut calibration, MODEL, 1, 3000, |score| 10 * (score + 1));
        calibration.remember(Sample { model: None, score: None, output: 5, cut: true });
        calibration.refresh(std::iter::empty(), true);
        let (scores, samples) = calibration.learnt();
        assert_eq!((scores.len(), samples.len()), (SCORES, 3001));
        let mut restarted = Calibration::default();
        restarted.restore(&scores, &samples);
        assert_eq!(expected(&restarted, MODEL, 1), expected(&calibration, MODEL, 1));
    }

    #[test]
    fn old_answers_fade() {
        let mut calibration = Calibration::default();
        teach(&mut calibration, MODEL, 1, 3000, |_| 1000);
        teach(&mut calibration, MODEL, 1, HALF_LIFE as u32, |_| 100);
        let mean = calibration.estimate(MODEL, None, None, 100_000).mean;
        assert!(near(mean, 500, 0.2), "{mean}: the last ones weigh 1, the ones before 1/2 + 1/4 in sum");
    }

    fn entry(output_limit: Tokens) -> Entry {
        let request = Request {
            id: RequestId(1),
            arrived: Time::ZERO,
            model: MODEL,
            score: Some(scored(50, 1)),
            prompt_tokens: 1,
            max_output: Some(output_limit),
            attained: 0,
            weight: Weight::ONE,
            share: Weight::ONE,
            expires: Time::MAX,
            bytes: 0,
            unscored: false,
            excluded: Vec::new(),
            tenant: Some(TenantId(1)),
            history: None,
            oracle_output: None,
        };
        Entry::new(&request, Place::new(0, 0))
    }

    #[test]
    fn what_was_cut_or_runs_is_longer() {
        let endings: [(Ending, Option<bool>); 7] = [
            (Ending::Completed { output: 100, prompt: None }, Some(false)),
            (Ending::Truncated { output: 100, prompt: None }, Some(true)),
            (Ending::Cancelled { output: 100 }, Some(true)),
            (Ending::Failed { output: 100 }, Some(true)),
            (Ending::Cancelled { output: 0 }, None),
            (Ending::Pushback, None),
            (Ending::Uncounted, None),
        ];
        for (ending, cut) in endings {
            let mut calibration = Calibration::default();
            calibration.answered(&entry(100), ending, 100);
            let (_, samples) = calibration.learnt();
            assert_eq!(samples.first().map(|sample| sample.cut), cut, "{ending:?}");
        }

        let mut calibration = Calibration::default();
        teach(&mut calibration, MODEL, 1, 100, |_| 100);
        let mean = |calibration: &Calibration| calibration.estimate(MODEL, None, None, 100_000).mean;
        let before = mean(&calibration);
        let mut running = entry(100_000);
        running.stage = Stage::Running { released: Time::ZERO, produced: 5000, remaining: 1 };
        calibration.fresh = 100;
        calibration.refresh(std::iter::repeat_n(&running, 50), true);
        assert!(mean(&calibration) > before * 13 / 10, "{} then {}", before, mean(&calibration));
        running.unscored = true;
        calibration.fresh = 100;
        calibration.refresh(std::iter::repeat_n(&running, 50), true);
        assert_eq!(mean(&calibration), before, "what produces no tokens says nothing of lengths");
    }

    #[test]
    fn estimates_stay_until_they_move_by_a_tenth() {
        let mut calibration = Calibration::default();
        teach(&mut calibration, MODEL, 1, 1000, |score| 10 * (score + 1));
        let before = expected(&calibration, MODEL, 1);
        let learn = |calibration: &mut Calibration, answers: u32, factor| {
            for score in 0..answers {
                calibration.remember(Sample { model: Some(MODEL), score: Some(scored(score, 1)), output: factor * (score + 1), cut: false });
            }
        };
        learn(&mut calibration, 100, 11);
        assert!(!calibration.refresh(std::iter::empty(), false));
        assert_eq!(expected(&calibration, MODEL, 1), before);
        // Too few to look at, until they have waited for long enough.
        learn(&mut calibration, 5, 20_000);
        for _ in 0..MOST_LEFT_OUT {
            assert!(!calibration.refresh(std::iter::empty(), false));
        }
        assert!(calibration.refresh(std::iter::empty(), false));
        assert!(expected(&calibration, MODEL, 1) != before);
    }

    #[test]
    fn a_tenant_whose_answers_run_long_is_expected_to() {
        let mut calibration = Calibration::default();
        teach(&mut calibration, MODEL, 1, 2000, |_| 200);
        let mean = |calibration: &Calibration, tenant| calibration.estimate(MODEL, None, Some(TenantId(tenant)), 100_000).mean;
        let before = mean(&calibration, 1);
        for _ in 0..300 {
            calibration.answered(&entry(100_000), Ending::Completed { output: 600, prompt: None }, 100_000);
            calibration.answered(&entry(100_000), Ending::Cancelled { output: 1 }, 100_000);
        }
        assert!(near(mean(&calibration, 1), before * 14 / 5, 0.1), "{} then {}", before, mean(&calibration, 1));
        assert_eq!(mean(&calibration, 2), before);
    }

    #[test]
    fn models_beyond_the_limit_share_what_is_known() {
        let mut calibration = Calibration::default();
        for model in 0..MODELS as u32 + 10 {
            calibration.remember(Sample { model: Some(ModelId(model)), score: None, output: 10, cut: false });
        }
        calibration.refresh(std::iter::empty(), true);
        assert_eq!((calibration.models.len(), calibration.others.len(), calibration.known().count()), (MODELS, 10, MODELS));
    }
}
