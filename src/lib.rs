//! Headway keeps short LLM requests from waiting behind long ones.
//!
//! A gateway in front of a fleet of OpenAI-compatible backends. Each prompt is scored once, each request gets a place in a backend's priority queue,
//! and is released by its boosted arrival time. One pure scheduling core has two shells: the gateway drives it in real time, the simulator under
//! virtual time.
//!
//! ```text
//!            hyper on pingora's threads                           one owner task per pool
//!  client ──────▶ proxy ── text ──▶ ranker ── score ──▶ dispatcher ── events ──▶ scheduler
//!    ▲              │                                       │ ◀──── actions ──────  (pure)
//!    │              │ ◀───────────── permit ────────────────┘                        ▲
//!    └── stream ──  └─ request ──▶ backend ◀─ probes ─ fleet ─ states, load ─────────┘
//! ```
//!
//! # Modules in reading order
//!
//! | module | what it is about | never imports |
//! |---|---|---|
//! | [`scheduler`] | who waits, where, and who goes next | tokio, hyper, pingora, candle, serde, tracing, clocks, files |
//! | [`dispatcher`] | the owner task of one pool; tickets and permits | proxy, ranker, config |
//! | [`proxy`] | HTTP in, HTTP out; one request's story | |
//! | [`ranker`] | prompt to score | proxy, dispatcher |
//! | [`fleet`] | what is known of the backends | proxy, ranker |
//! | [`config`] | files to one validated snapshot; the only place that knows YAML | pingora, candle |
//! | [`gateway`] | the running whole: pools kept across reloads, one live value swapped | |
//! | [`learnt`] | what a pool has learnt, kept over a restart | |
//! | [`tenancy`] | who asks, what he may ask for, and how much of it | proxy, dispatcher, gateway |
//! | [`row_log`] | files of lines, written beside the requests | proxy, dispatcher, gateway |
//! | [`access_log`] | a line for each request that has ended, in a file | proxy, dispatcher, gateway |
//! | [`usage_log`] | what every request used, written down for billing | proxy, dispatcher, gateway |
//! | [`training_log`] | prompts and the lengths of their answers, written down for training | proxy, dispatcher |
//! | [`admin`] | what operators see and may do | |
//! | [`telemetry`] | outcomes and stage timings to logs, metrics and traces; nobody below knows it | proxy, dispatcher, gateway |
//! | [`engine`] | a model of a continuous-batching engine, and a server that runs it in real time | as `scheduler`, but for its server |
//! | [`simulator`] | the scheduler and the engine model under virtual time: policies compared, and broken by seed | dispatcher, proxy |
//! | [`demo`] | the gateway, three simulated engines and a load in one process | |
//! | `top` | what operators see, in a terminal | |
//! | [`training`] | lengths to ranker weights | proxy, dispatcher |
//!
//! `cargo check --no-default-features` builds the pure core alone, and a test reads every `use crate::` line against this table.
//!
//! # Three invariants
//!
//! 1. The scheduler performs no IO, reads no clock and cannot fail: time, events and a seed come in, actions go out.
//! 2. One dispatcher task owns one pool's scheduler; everyone else sends it events. Every request has exactly one ending, settled on drop.
//! 3. A request reads one snapshot from start to finish.

#[cfg(feature = "gateway")]
pub mod access_log;
#[cfg(feature = "gateway")]
pub mod admin;
#[cfg(feature = "gateway")]
pub mod config;
#[cfg(feature = "gateway")]
pub mod dispatcher;
pub mod engine;
#[cfg(feature = "gateway")]
pub mod fleet;
#[cfg(feature = "gateway")]
pub mod gateway;
#[cfg(feature = "gateway")]
pub mod learnt;
#[cfg(feature = "gateway")]
pub mod proxy;
#[cfg(feature = "gateway")]
pub mod ranker;
#[cfg(feature = "gateway")]
pub mod row_log;
pub mod scheduler;
pub mod simulator;
#[cfg(feature = "gateway")]
pub mod telemetry;
#[cfg(feature = "gateway")]
pub mod tenancy;
#[cfg(feature = "gateway")]
pub mod training;
#[cfg(feature = "gateway")]
pub mod training_log;
#[cfg(feature = "gateway")]
pub mod usage_log;
