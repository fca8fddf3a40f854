//! Turns outcomes and stage timings into metrics and the access log. Nobody below knows it.

pub mod metrics;
