//! Files to one validated [`Snapshot`]. The only place that knows YAML.

mod snapshot;

pub use snapshot::*;
