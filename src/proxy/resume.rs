//! An answer whose backend has died goes on from another one, where its pool says so.

use std::sync::Arc;

use super::account::Account;
use super::api::Api;
use super::api::resume::{Places, Unfit, places};
use super::kept::Kept;
use super::reply::Paced;
use super::{Answered, Outgoing, PARSED_APART};
use crate::config::Pool;
use crate::dispatcher::Permit;
use crate::gateway::{PoolRuntime, Routed};
use crate::scheduler::{ModelId, Tokens};
use crate::telemetry::Resume;

/// Where an answer comes from.
pub struct Place {
    settings: Arc<Pool>,
    pool: Arc<PoolRuntime>,
    /// The name its backends know the model by, where it differs from the client's.
    upstream: Option<String>,
    model: ModelId,
}

impl Place {
    pub fn of(routed: &Routed<'_>) -> Place {
        let (settings, pool) = (Arc::clone(routed.settings), Arc::clone(routed.pool));
        Place { settings, pool, upstream: routed.upstream.map(str::to_owned), model: routed.model }
    }

    /// Whether answers of this dialect go on elsewhere when their backend dies.
    pub fn resumes(&self, api: Api) -> bool {
        self.settings.resume && matches!(api, Api::Chat | Api::Completions)
    }
}

/// What an answer needs to go on elsewhere: its request, for as long as it streams.
pub struct Again {
    pub(super) outgoing: Box<Outgoing>,
    pub(super) place: Place,
}

/// What another backend is told of the answer.
pub struct Begun {
    pub places: Places,
    pub text: String,
    /// Tokens of the text.
    pub told: Tokens,
}

impl Again {
    pub fn is_chat(&self) -> bool {
        self.outgoing.api == Api::Chat
    }

    /// Asks another backend of the pool for what follows `kept`, of which `output` tokens have come: with its first arrival, never a backend twice, and within
    /// what is left of its retries and of the pool's budget.
    ///
    /// # Errors
    /// Why nobody goes on with it.
    pub async fn go_on(&mut self, kept: &Kept, output: Tokens, account: &mut Account) -> Result<(Paced, Permit), Resume> {
        let unfit = |why: &dyn std::fmt::Display| {
            tracing::debug!(%why, "an answer that broke off cannot be gone on with");
            Resume::Unfit
        };
        let (text, told) = kept.told(self.is_chat(), output).map_err(|why| unfit(&why))?;
        let begun = match text {
            "" => None,
            text => Some(Begun { places: self.places(told).await.map_err(|why| unfit(&why))?, text: text.to_owned(), told }),
        };
        if self.outgoing.retries == 0 || !self.place.pool.may_retry() {
            return Err(Resume::Budget);
        }
        self.outgoing.retries -= 1;
        self.outgoing.begun = begun;
        if self.outgoing.begun.is_some() {
            // Who does not understand the request would begin anew in the middle of an answer.
            let chat = self.is_chat();
            let targets = self.place.pool.targets();
            let unable = targets.iter().filter(|target| !target.backend.engine().is_some_and(|engine| engine.continues(chat)));
            self.outgoing.excluded.extend(unable.map(|target| target.backend.id()));
        }
        account.goes_on();
        let Place { settings, pool, upstream, model } = &self.place;
        let routed = Routed { settings, pool, upstream: upstream.as_deref(), model: *model };
        match self.outgoing.run(&routed, account).await {
            Ok(Answered::Streaming(_, rest)) if rest.observer.is_some() => Ok((rest.upstream, rest.permit)),
            Ok(Answered::Streaming(_, rest)) => {
                rest.permit.finish(rest.ending);
                Err(Resume::Refused)
            }
            Ok(Answered::Whole(_)) => Err(Resume::Refused),
            Err(_) => Err(Resume::NoBackend),
        }
    }

    async fn places(&self, told: Tokens) -> Result<Places, Unfit> {
        let (api, body) = (self.outgoing.api, self.outgoing.held.bytes.clone());
        if body.len() <= PARSED_APART {
            return places(api, &body, told);
        }
        match tokio::task::spawn_blocking(move || places(api, &body, told)).await {
            Ok(places) => places,
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }
}
