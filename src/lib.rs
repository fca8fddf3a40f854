#[cfg(feature = "gateway")]
pub mod config;
#[cfg(feature = "gateway")]
pub mod fleet;
#[cfg(feature = "gateway")]
pub mod ranker;
pub mod scheduler;
