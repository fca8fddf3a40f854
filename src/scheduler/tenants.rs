//! Tenants whose prompts look shorter or longer than they run: a factor on their expected output, and whether their scores say anything.

use std::collections::BTreeMap;

use super::event::{TenantId, Tokens};
use super::score::Scored;
use super::view::TenantView;

/// Tenants with a correction of their own; more get none.
const TENANTS: usize = 4096;
/// Answers of a tenant until one counts half.
const HALF_LIFE: f32 = 1400.0;
/// How many answers without surprise a tenant is credited with.
const LEAN: f32 = 30.0;
/// Answers that a new one is compared with.
const RECENT: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Tenants(BTreeMap<TenantId, Record>);

#[derive(Clone, Debug, Default)]
struct Record {
    answers: f32,
    expected: f32,
    actual: f32,
    /// The last answers, as a ring.
    recent: [Option<(Scored, Tokens)>; RECENT],
    next: usize,
    /// Decayed pairs of answers, and how many more of them agreed than disagreed.
    pairs: f32,
    agreement: f32,
}

impl Tenants {
    pub fn answered(&mut self, tenant: TenantId, score: Option<Scored>, expected: f32, actual: Tokens) {
        if self.0.len() >= TENANTS && !self.0.contains_key(&tenant) {
            return;
        }
        let record = self.0.entry(tenant).or_default();
        let keep = (-1.0 / HALF_LIFE).exp2();
        record.answers = record.answers * keep + 1.0;
        record.expected = record.expected * keep + expected;
        record.actual = record.actual * keep + actual as f32;
        if let Some(scored) = score {
            record.pairs *= keep;
            record.agreement *= keep;
            for (other, output) in record.recent.iter().flatten().filter(|(other, _)| other.version == scored.version) {
                let (by_score, by_length) = (scored.score.cmp(&other.score) as i32, actual.cmp(output) as i32);
                record.pairs += (by_score * by_length).unsigned_abs() as f32;
                record.agreement += (by_score * by_length) as f32;
            }
            record.recent[record.next] = Some((scored, actual));
            record.next = (record.next + 1) % RECENT;
        }
    }

    /// The factor on a tenant's expected output, 1/4 to 4.
    pub fn correction(&self, tenant: TenantId) -> f32 {
        self.0.get(&tenant).map_or(1.0, Record::correction)
    }

    /// Every tenant with its correction and its concordance.
    pub fn iter(&self) -> impl Iterator<Item = TenantView> {
        self.0.iter().map(|(&tenant, record)| TenantView { tenant, correction: record.correction(), concordance: record.concordance() })
    }
}

impl Record {
    /// The ratio of sums, not the mean of ratios: lengths spread over orders of magnitude, and the mean of their logarithms says nothing of their mean.
    fn correction(&self) -> f32 {
        if self.answers == 0.0 {
            return 1.0;
        }
        let lean = LEAN * self.expected / self.answers;
        ((self.actual + lean) / (self.expected + lean)).clamp(0.25, 4.0)
    }

    /// How many more pairs agree than disagree, as a share, -1 to 1 (tau-a over recent neighbours); `None` before a hundred pairs.
    fn concordance(&self) -> Option<f32> {
        (self.pairs >= 100.0).then(|| self.agreement / self.pairs)
    }
}

#[cfg(test)]
mod tests {
    use super::super::score::{RankerVersion, Score};
    use super::*;

    const TENANT: TenantId = TenantId(1);

    fn scored(score: u32, version: u32) -> Option<Scored> {
        Some(Scored { score: Score::new(score as f32).unwrap(), version: RankerVersion(version) })
    }

    #[test]
    fn corrects_by_the_ratio_of_what_came_to_what_was_expected() {
        let mut tenants = Tenants::default();
        for _ in 0..30 {
            tenants.answered(TENANT, None, 100.0, 300);
        }
        // Thirty answers and thirty without surprise.
        assert!((tenants.correction(TENANT) - 2.0).abs() < 0.05, "{}", tenants.correction(TENANT));
        assert_eq!(tenants.correction(TenantId(2)), 1.0);
        for (actual, limit) in [(0, 0.25), (1000, 4.0)] {
            (0..10_000).for_each(|_| tenants.answered(TENANT, None, 100.0, actual));
            assert_eq!(tenants.correction(TENANT), limit);
        }
        // It follows within a few half-lives.
        (0..20_000).for_each(|_| tenants.answered(TENANT, None, 100.0, 100));
        assert!((tenants.correction(TENANT) - 1.0).abs() < 0.02, "{}", tenants.correction(TENANT));
    }

    #[test]
    fn concordance_says_whether_scores_order_lengths() {
        let concordance = |length: &dyn Fn(u32) -> Tokens, version: &dyn Fn(u32) -> u32, answers: u32| {
            let mut tenants = Tenants::default();
            (0..answers).for_each(|n| tenants.answered(TENANT, scored(n * 37 % 100, version(n)), 1.0, length(n * 37 % 100)));
            tenants.iter().next().unwrap().concordance
        };
        let one = |_| 1;
        assert_eq!(concordance(&|score| score + 1, &one, 10), None, "too few pairs");
        assert_eq!(concordance(&|score| score + 1, &one, 100), Some(1.0));
        assert_eq!(concordance(&|score| 1000 - score, &one, 100), Some(-1.0));
        assert_eq!(concordance(&|_| 5, &one, 100), None, "equal lengths are no pairs");
        assert_eq!(concordance(&|score| score + 1, &|n| n, 100), None, "scores of different rankers are no pairs");
        let mixed = concordance(&|score| if score % 2 == 0 { score } else { 1000 - score }, &one, 1000).unwrap();
        assert!(mixed.abs() < 0.3, "{mixed}");
    }

    #[test]
    fn more_tenants_than_the_limit_are_not_corrected() {
        let mut tenants = Tenants::default();
        for tenant in 0..TENANTS as u32 + 1 {
            (0..2).for_each(|_| tenants.answered(TenantId(tenant), None, 1.0, 100));
        }
        assert_eq!(tenants.iter().count(), TENANTS);
        assert!(tenants.correction(TenantId(TENANTS as u32 - 1)) > 1.0);
        assert_eq!(tenants.correction(TenantId(TENANTS as u32)), 1.0);
    }
}
