//! How urgent a request is.

use crate::scheduler::Weight;

/// A request's priority, the least urgent first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Counts as four times the work; OpenAI's `flex`.
    Low,
    /// As it is.
    #[default]
    Normal,
    /// Counts as a quarter of the work; OpenAI's `priority`.
    High,
}

impl Priority {
    /// The priority of this name, as configuration and clients write it.
    pub fn named(name: &str) -> Option<Priority> {
        match name {
            "low" => Some(Priority::Low),
            "normal" => Some(Priority::Normal),
            "high" => Some(Priority::High),
            _ => None,
        }
    }

    /// What OpenAI's `service_tier` asks for, where it asks for anything: `flex` and `priority`.
    pub fn of_tier(tier: &str) -> Option<Priority> {
        match tier {
            "flex" => Some(Priority::Low),
            "priority" => Some(Priority::High),
            _ => None,
        }
    }

    /// By how much it goes ahead in orders that boost: it counts as so many times less work.
    pub fn weight(self) -> Weight {
        let weight = match self {
            Priority::Low => 0.25,
            Priority::Normal => 1.0,
            Priority::High => 4.0,
        };
        Weight::new(weight).unwrap_or(Weight::ONE)
    }
}
