//! Ways to misbehave, switchable while the server runs, so that whatever stands in front of an engine can be tested against them.

use serde::{Deserialize, Serialize};

/// The faults in force: the body of `POST /sim/faults`, which replaces them all (`{}` ends them). They hit the generating and embedding endpoints, but
/// for `health`. In order of precedence: `hang`, `garbage`, `status`, `die_after_chunks`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Faults {
    /// Never answers: no byte is sent until the client gives up.
    pub hang: bool,
    /// Bytes that are no HTTP, or a body that is none of the API's.
    pub garbage: Option<Garbage>,
    /// Answers with this status and an error body; a 429 or 503 with `retry-after`, if that is set.
    pub status: Option<u16>,
    /// Seconds, for `status`.
    pub retry_after: Option<u32>,
    /// Closes the connection after this many events of a stream, or in the middle of a body that is no stream; 0 closes it before any byte.
    pub die_after_chunks: Option<u32>,
    /// Iterations take this many times as long.
    pub slow: Option<f64>,
    /// What /health answers.
    pub health: Option<u16>,
    /// How many requests are hit before `hang`, `garbage`, `status` and `die_after_chunks` end by themselves; without it, all are.
    pub times: Option<u32>,
}

/// See [`Faults::garbage`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Garbage {
    /// Bytes that are no HTTP response.
    Http,
    /// Status 200 and a body that is neither JSON nor an event stream.
    Body,
}

impl Faults {
    /// The faults that hit the request that has just arrived; counts it.
    pub(super) fn strike(&mut self) -> Faults {
        let hit = self.hang || self.garbage.is_some() || self.status.is_some() || self.die_after_chunks.is_some();
        let struck = self.clone();
        if hit && let Some(times) = &mut self.times {
            *times = times.saturating_sub(1);
            if *times == 0 {
                *self = Faults { slow: self.slow, health: self.health, ..Faults::default() };
            }
        }
        struck
    }
}
