//! How requests end: closed, low-cardinality enums that double as metric labels.

use super::event::Tokens;

/// Why a request that asked to wait was turned away. It never reached a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The pool's limit on waiting requests is reached.
    QueueFull,
    /// The pool's limit on bytes of waiting request bodies is reached.
    QueueBytes,
    /// The requests of one tenant that wait fill its part of what the pool's limits leave.
    QueueShare,
    /// Every backend of the pool is ejected or gone.
    NoHealthyBackend,
    /// Every healthy backend has already been tried for this request.
    NoOtherBackend,
    /// No healthy backend has the context length or the KV budget that this request needs.
    TooLarge,
    /// The request waited in the queue until its deadline.
    Expired,
    /// The predicted wait ends after the request's deadline.
    Shed,
    /// The pool is shutting down.
    Draining,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Reason; 9] = [
        Reason::QueueFull,
        Reason::QueueBytes,
        Reason::QueueShare,
        Reason::NoHealthyBackend,
        Reason::NoOtherBackend,
        Reason::TooLarge,
        Reason::Expired,
        Reason::Shed,
        Reason::Draining,
    ];

    /// The stable lower-case name used in metrics, logs and the `x-headway-reason` header.
    pub const fn as_str(self) -> &'static str {
        match self {
            Reason::QueueFull => "queue_full",
            Reason::QueueBytes => "queue_bytes",
            Reason::QueueShare => "queue_share",
            Reason::NoHealthyBackend => "no_healthy_backend",
            Reason::NoOtherBackend => "no_other_backend",
            Reason::TooLarge => "too_large",
            Reason::Expired => "queue_timeout",
            Reason::Shed => "shed",
            Reason::Draining => "draining",
        }
    }
}

/// How a released request left its backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The answer is complete: it stopped by itself after `output` tokens. `prompt` is the backend's own count where it reported usage.
    Completed { output: Tokens, prompt: Option<Tokens> },
    /// The answer was cut by its token limit after `output` tokens: the true length is longer.
    Truncated { output: Tokens, prompt: Option<Tokens> },
    /// The client left after `output` tokens; the work was cancelled upstream.
    Cancelled { output: Tokens },
    /// The backend broke: connect failed, garbage, reset, timeout or 5xx, after `output` tokens.
    Failed { output: Tokens },
    /// The backend answered 429 or 503: it is full, not broken. Its window shrinks.
    Pushback,
    /// The backend answered with another 4xx: the client's fault, says nothing of the backend or the length.
    Refused,
    /// An answer without token counts (embeddings and other unscored paths) is complete.
    Uncounted,
}
