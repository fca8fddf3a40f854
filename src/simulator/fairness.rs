//! How evenly tenants are served.
//!
//! Jain's index (Jain, Chiu and Hawe, 1984) of what each tenant got over what it should have got, minute by minute. What was served is counted in tokens, an output
//! token as two prompt tokens, as fair schedulers of LLM engines do (Sheng et al., arXiv 2401.00588). What a tenant should have got is its max-min fair share of all that was served:
//! in proportion to weights, but never more than it asked for, and what is left over goes to the others.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::scheduler::{TenantId, Tokens, Weight};

/// Over how long a tenant may be served unevenly before it counts.
pub(super) const WINDOW: Duration = Duration::from_secs(60);
/// An output token, in prompt tokens.
const OUTPUT: f64 = 2.0;

/// The size of a request, or of what of it was served.
pub(super) fn size(prompt: Tokens, output: Tokens) -> f64 {
    f64::from(prompt) + OUTPUT * f64::from(output)
}

/// One tenant in the window under way.
#[derive(Clone, Copy, Debug)]
struct Tenant {
    weight: f64,
    /// What was left to do when the window began, and what came since.
    asked: f64,
    served: f64,
}

/// What tenants asked for and got.
#[derive(Clone, Debug, Default)]
pub(super) struct Fairness {
    tenants: BTreeMap<TenantId, Tenant>,
    /// Of the windows that are over: the sum of their indices, and how many say something.
    sum: f64,
    windows: u32,
}

impl Fairness {
    /// A request of this size came. The weight is that of all its tenant's requests.
    pub fn asked(&mut self, tenant: Option<TenantId>, weight: Weight, size: f64) {
        let Some(tenant) = tenant else { return };
        let tenant = self.tenants.entry(tenant).or_insert(Tenant { weight: 1.0, asked: 0.0, served: 0.0 });
        tenant.weight = weight.get();
        tenant.asked += size;
    }

    /// So much was computed for it.
    pub fn served(&mut self, tenant: Option<TenantId>, size: f64) {
        if let Some(tenant) = tenant.and_then(|tenant| self.tenants.get_mut(&tenant)) {
            tenant.served += size;
        }
    }

    /// So much of what it asked for will never be served.
    pub fn dropped(&mut self, tenant: Option<TenantId>, size: f64) {
        if let Some(tenant) = tenant.and_then(|tenant| self.tenants.get_mut(&tenant)) {
            tenant.asked -= size;
        }
    }

    /// A window is over. It says something if anything was served and at least two tenants asked for it.
    pub fn close(&mut self) {
        if let Some(index) = self.index() {
            self.sum += index;
            self.windows += 1;
        }
        for tenant in self.tenants.values_mut() {
            tenant.asked = (tenant.asked - tenant.served).max(0.0);
            tenant.served = 0.0;
        }
    }

    /// The mean over all windows, or that of the only one although it is not over; `None` where there was nothing to share.
    pub fn mean(&self) -> Option<f64> {
        if self.windows == 0 { self.index() } else { Some(self.sum / f64::from(self.windows)) }
    }

    fn index(&self) -> Option<f64> {
        let mut asking: Vec<Tenant> = self.tenants.values().copied().filter(|tenant| tenant.asked >= 1.0).collect();
        let mut left: f64 = asking.iter().map(|tenant| tenant.served).sum();
        if asking.len() < 2 || left <= 0.0 {
            return None;
        }
        // Whoever asks for the least, for its weight, is satisfied first, and leaves the rest to the others.
        asking.sort_by(|a, b| (a.asked / a.weight).total_cmp(&(b.asked / b.weight)));
        let mut weights: f64 = asking.iter().map(|tenant| tenant.weight).sum();
        let of_share = asking.iter().map(|tenant| {
            let share = tenant.asked.min(left * tenant.weight / weights);
            left -= share;
            weights -= tenant.weight;
            tenant.served / share
        });
        jain(&of_share.collect::<Vec<f64>>())
    }
}

/// 1 where all are equal, 1/n where one of n has everything.
fn jain(values: &[f64]) -> Option<f64> {
    let (sum, squares) = values.iter().fold((0.0, 0.0), |(sum, squares), value| (sum + value, squares + value * value));
    let index: f64 = sum * sum / (values.len() as f64 * squares);
    index.is_finite().then_some(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Option<TenantId> = Some(TenantId(1));
    const B: Option<TenantId> = Some(TenantId(2));

    /// What both asked for and got in one window, with these weights.
    fn index(asked: (f64, f64), served: (f64, f64), weights: (f64, f64)) -> Option<f64> {
        let mut fairness = Fairness::default();
        for (tenant, weight, asked, served) in [(A, weights.0, asked.0, served.0), (B, weights.1, asked.1, served.1)] {
            fairness.asked(tenant, Weight::new(weight).unwrap(), asked);
            fairness.served(tenant, served);
        }
        fairness.close();
        fairness.mean()
    }

    #[test]
    fn shares_are_fair_by_weight_and_never_more_than_was_asked_for() {
        let equal = (1.0, 1.0);
        assert_eq!(index((100.0, 100.0), (50.0, 50.0), equal), Some(1.0));
        assert_eq!(index((100.0, 100.0), (50.0, 0.0), equal), Some(0.5), "one has everything");
        assert_eq!(index((1000.0, 10.0), (90.0, 10.0), equal), Some(1.0), "the other asked for no more");
        assert_eq!(index((1000.0, 10.0), (100.0, 0.0), equal), Some(0.5), "and got nothing");
        assert_eq!(index((100.0, 100.0), (60.0, 20.0), (3.0, 1.0)), Some(1.0));
        let uneven = index((100.0, 100.0), (40.0, 40.0), (3.0, 1.0)).unwrap();
        let (a, b) = (40.0 / 60.0, 40.0 / 20.0);
        assert!((uneven - (a + b) * (a + b) / (2.0 * (a * a + b * b))).abs() < 1e-12, "{uneven}");
    }

    #[test]
    fn what_is_left_to_do_counts_in_the_next_window() {
        let mut fairness = Fairness::default();
        fairness.asked(A, Weight::ONE, 100.0);
        fairness.asked(B, Weight::ONE, 100.0);
        fairness.served(A, 60.0);
        fairness.served(B, 60.0);
        fairness.close();
        // 40 are left of each; one gives up half of it.
        fairness.dropped(A, 20.0);
        fairness.served(A, 20.0);
        fairness.served(B, 40.0);
        fairness.close();
        assert_eq!(fairness.mean(), Some(1.0));
        fairness.asked(A, Weight::ONE, 10.0);
        fairness.served(A, 10.0);
        fairness.close();
        assert_eq!(fairness.windows, 2, "alone there is nothing to share");
    }

    #[test]
    fn without_two_tenants_there_is_no_index() {
        let mut fairness = Fairness::default();
        fairness.asked(None, Weight::ONE, 5.0);
        fairness.asked(A, Weight::ONE, 5.0);
        fairness.served(A, 5.0);
        assert_eq!(fairness.mean(), None);
        fairness.asked(B, Weight::ONE, 5.0);
        assert_eq!(fairness.mean(), Some(0.5), "a run shorter than a window");
    }
}
