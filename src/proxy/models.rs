//! The list of models: answered here, also while backends are down.

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::request::Parts;
use http::{Method, Response};
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use super::response::Failure;
use crate::config::near;
use crate::gateway::Live;
use crate::tenancy::Tenant;

const LIST: &str = "/v1/models";

/// The answer to a request for the list or for one model of it, as far as `tenant` may use them; `None` if it asks for something else.
pub fn answer(live: &Live, tenant: Option<&Tenant>, head: &Parts) -> Option<Result<Response<Bytes>, Failure>> {
    let rest = head.uri.path().strip_prefix(LIST)?;
    let wanted = match rest.strip_prefix('/') {
        None if rest.is_empty() => None,
        None => return None,
        Some("") => None,
        // Clients write the slash of a name like `org/model` as %2F.
        Some(name) => Some(percent_decode_str(name).decode_utf8_lossy()),
    };
    if !matches!(head.method, Method::GET | Method::HEAD) {
        return Some(Err(Failure::WrongMethod { path: LIST.to_owned(), allowed: "GET, HEAD" }));
    }
    // Clients of both APIs ask at the same path.
    let entry = if head.headers.contains_key("anthropic-version") { anthropic } else { openai };
    let names = names(live, tenant);
    let document = match wanted {
        None => {
            let data: Vec<Value> = names.iter().map(|name| entry(name)).collect();
            json!({"object": "list", "data": data, "has_more": false, "first_id": names.first(), "last_id": names.last()})
        }
        Some(wanted) => match names.iter().find(|known| **known == wanted) {
            Some(name) => entry(name),
            None => return Some(Err(unknown(live, tenant, &wanted))),
        },
    };
    let mut response = Response::new(Bytes::from(document.to_string()));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Some(Ok(response))
}

/// A model that nobody here serves, and the names that it may have meant.
pub fn unknown(live: &Live, tenant: Option<&Tenant>, model: &str) -> Failure {
    let names = names(live, tenant);
    let near = near(model, names.iter().map(String::as_str)).into_iter().map(str::to_owned).collect();
    Failure::UnknownModel { model: model.to_owned(), near }
}

/// The names that this tenant may ask for.
fn names(live: &Live, tenant: Option<&Tenant>) -> Vec<String> {
    let mut names = live.model_names();
    names.retain(|name| tenant.is_none_or(|tenant| tenant.may_use(name)));
    names
}

fn openai(name: &str) -> Value {
    json!({"id": name, "object": "model", "created": 0, "owned_by": "headway"})
}

fn anthropic(name: &str) -> Value {
    json!({"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"})
}
