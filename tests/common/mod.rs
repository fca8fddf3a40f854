//! What tests of the simulator share.

use std::time::Duration;

use headway::scheduler::{Gamma, Lead, Limits, MaxOvertake, Order, Policy, PolicyParts};
use headway::simulator::Dispatch;

/// A gateway with this order and gamma, otherwise as `policies/headway.yaml` has it, and a queue without limits.
pub fn gateway(order: Order, gamma: Gamma) -> Dispatch {
    let parts = PolicyParts {
        order,
        gamma,
        max_overtake: MaxOvertake::Auto,
        aging_threshold: Duration::from_secs(120),
        aging_share: 0.1,
        lead: Lead::Auto,
        overload: true,
    };
    let limits = Limits { queue_requests: 1_000_000, queue_bytes: u64::MAX, max_output: 32_768 };
    Dispatch::Gateway { policy: Policy::new(parts).expect("the parts fit"), limits }
}
