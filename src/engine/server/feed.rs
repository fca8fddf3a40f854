//! How far one request has got, as the engine's task says and the response's body reads it. Only the latest state counts, so a slow reader holds back
//! nobody and nothing piles up.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::scheduler::Tokens;

/// A request's progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    pub(super) produced: Tokens,
    /// Prompt tokens found in the prefix cache.
    pub(super) cached: Tokens,
    pub(super) end: Option<End>,
}

/// How a request ended inside the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Finished,
    /// The engine was reset under it.
    Cut,
}

#[derive(Default)]
struct State {
    progress: Progress,
    reader: Option<Waker>,
}

/// The shared cell; both sides hold a clone.
#[derive(Clone, Default)]
pub(super) struct Feed(Arc<Mutex<State>>);

impl Feed {
    /// Nothing can panic while the lock is held, so a poisoned one is still consistent.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the progress and wakes the reader.
    pub(super) fn update(&self, change: impl FnOnce(&mut Progress)) {
        let reader = {
            let mut state = self.lock();
            change(&mut state.progress);
            state.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// The progress, once more than `seen` tokens are there or the request has ended.
    pub(super) fn poll(&self, seen: Tokens, context: &mut Context<'_>) -> Poll<Progress> {
        let mut state = self.lock();
        if state.progress.produced > seen || state.progress.end.is_some() {
            return Poll::Ready(state.progress);
        }
        state.reader = Some(context.waker().clone());
        Poll::Pending
    }

    /// The progress when the request has ended.
    pub(super) async fn ended(&self) -> Progress {
        std::future::poll_fn(|context| self.poll(Tokens::MAX, context)).await
    }
}
