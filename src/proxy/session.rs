//! What a request goes on from: its session, and the beginnings of its prompt that others share.

use std::sync::Arc;

use http::HeaderMap;
use http::header::HeaderName;

use super::api::{Prompt, salted};
use crate::config::Sessions;
use crate::scheduler::History;

/// Names the session or agent program that a request belongs to.
const SESSION_ID: HeaderName = HeaderName::from_static("x-session-id");

/// `None` where nothing is known of what came before.
pub fn history(sessions: Sessions, headers: &HeaderMap, prompt: &Prompt) -> Option<Arc<History>> {
    let history = prompt.history.in_session(session(sessions, headers, prompt));
    (!history.is_empty()).then(|| Arc::new(history))
}

fn session(sessions: Sessions, headers: &HeaderMap, prompt: &Prompt) -> Option<u64> {
    // A name is any text; an empty one names nothing.
    let header = || headers.get(SESSION_ID).filter(|value| !value.is_empty()).map(|value| salted(value.as_bytes()));
    match sessions {
        Sessions::Off => None,
        Sessions::Named => header().or(prompt.cache_key),
        Sessions::User => header().or(prompt.cache_key).or(prompt.user),
    }
}

#[cfg(test)]
mod tests {
    use super::super::api::{Api, parse};
    use super::*;

    fn named(sessions: Sessions, header: Option<&'static str>, fields: &str) -> Option<u64> {
        let mut headers = HeaderMap::new();
        if let Some(value) = header {
            headers.insert(SESSION_ID, value.parse().unwrap());
        }
        let body = format!(r#"{{"model":"m",{fields}"messages":[]}}"#);
        history(sessions, &headers, &parse(Api::Chat, body.as_bytes()).unwrap())?.session()
    }

    #[test]
    fn a_session_is_named_by_the_header_or_else_by_the_body() {
        let (key, user) = (r#""prompt_cache_key":"b","#, r#""user":"b","#);
        let all = format!("{key}{user}");
        let [a, b] = ["a", "b"].map(|name| Some(salted(name.as_bytes())));
        assert_eq!(named(Sessions::Named, Some("a"), &all), a);
        assert_eq!(named(Sessions::Named, None, key), b);
        assert_eq!(named(Sessions::Named, Some(""), user), None, "a user has many sessions, unless it is said that they count as one");
        assert_eq!(named(Sessions::User, None, user), b);
        assert_eq!(named(Sessions::Named, None, r#""prompt_cache_key":"","user":7,"#), None);
        assert_eq!(named(Sessions::Off, Some("a"), &all), None);
    }
}
