#[cfg(feature = "gateway")]
pub mod config;
#[cfg(feature = "gateway")]
pub mod fleet;
pub mod scheduler;
