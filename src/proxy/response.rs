//! What a client is told when there is no answer from a backend: the only place with status codes.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Response, StatusCode};
use serde_json::json;

use super::api::{Api, BadBody};
use super::body::BodyError;
use super::headers::BadHeader;
use super::upstream::UpstreamError;
use crate::config::SlowStream;
use crate::dispatcher::Rejection;
use crate::scheduler::Reason;
use crate::tenancy::{Full, Refused, What, Whose};

/// Says in one word why a request was refused or failed.
pub const REASON: HeaderName = HeaderName::from_static("x-headway-reason");

/// Why a client gets no answer, or no whole one. Its text is for the client: it names no backend and no secret.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{0}")]
    BadBody(#[from] BadBody),
    #[error("{0}")]
    Body(#[from] BodyError),
    #[error("{0}")]
    Refused(#[from] Refused),
    #[error("{0}")]
    BadHeader(#[from] BadHeader),
    #[error("the headers are larger than the limit of {limit} bytes")]
    HeadTooLarge { limit: usize },
    #[error("there is nothing at {0}")]
    UnknownPath(String),
    #[error("{path} is answered to {allowed} only")]
    WrongMethod { path: String, allowed: &'static str },
    #[error("the model `{model}` is not served here{}", suggestion(near))]
    UnknownModel { model: String, near: Vec<String> },
    #[error("{}", rejection(.0))]
    Rejected(Rejection),
    #[error("the request waited in the queue until its time was over")]
    TotalInQueue { retry_after: u32 },
    /// The last of the attempts that were made.
    #[error("{}", upstream(.0))]
    Upstream(#[from] UpstreamError),
    #[error("the answer stopped: nothing came for {0:?}")]
    InterChunk(Duration),
    #[error("the answer came slower than {} tokens a second for {:?}", .0.tokens_per_second, .0.over)]
    SlowStream(SlowStream),
    #[error("the answer was not complete after {0:?}")]
    Total(Duration),
    #[error("the answer broke off")]
    CutShort,
    #[error("the gateway is shutting down and cannot finish the answer")]
    ShuttingDown,
}

fn suggestion(near: &[String]) -> String {
    if near.is_empty() { String::new() } else { format!("; did you mean `{}`?", near.join("`, `")) }
}

fn rejection(Rejection { reason, retry_after }: &Rejection) -> String {
    let why = match reason {
        Reason::QueueFull => "too many requests wait already",
        Reason::QueueBytes => "the requests that wait already hold as many bytes as they may",
        Reason::QueueShare => "this tenant's requests that wait already fill its part of the queue",
        Reason::NoHealthyBackend => "no backend of this model is healthy",
        Reason::NoOtherBackend => "every backend of this model was tried",
        Reason::TooLarge => return "the prompt and its output are larger than any backend of this model can hold".to_owned(),
        Reason::Expired => "the request waited in the queue as long as it may",
        Reason::Shed => "under the present load the request could not be answered in time",
        Reason::Draining => "the gateway is shutting down",
    };
    format!("{why}; try again in {retry_after} s")
}

fn upstream(error: &UpstreamError) -> String {
    match error {
        UpstreamError::Connect(_) => "the backend cannot be reached".to_owned(),
        UpstreamError::ConnectTimeout(after) => format!("the backend could not be reached within {after:?} (connect timeout)"),
        UpstreamError::FirstByteTimeout(after) => format!("the backend sent nothing within {after:?} (first byte timeout)"),
        UpstreamError::Wedged => "the backend gives no sign of life".to_owned(),
        UpstreamError::TotalTimeout => "the request was not answered within its total time (total timeout)".to_owned(),
        UpstreamError::Broken(_) => "the backend broke before it answered".to_owned(),
    }
}

impl Failure {
    /// The status of an answer that has not begun, and the word for metrics, the `code` field and [`REASON`].
    pub fn verdict(&self) -> (StatusCode, &'static str) {
        match self {
            Failure::BadBody(BadBody::Missing(_)) => (StatusCode::BAD_REQUEST, "missing_field"),
            Failure::BadBody(BadBody::WrongType { .. }) => (StatusCode::BAD_REQUEST, "wrong_type"),
            Failure::BadBody(_) => (StatusCode::BAD_REQUEST, "invalid_body"),
            Failure::Body(BodyError::TooLarge { .. }) => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large"),
            Failure::Body(BodyError::NoRoom { .. }) => (StatusCode::TOO_MANY_REQUESTS, "body_memory"),
            Failure::Body(BodyError::Timeout(_)) => (StatusCode::REQUEST_TIMEOUT, "body_timeout"),
            Failure::Body(BodyError::Broken) => (StatusCode::BAD_REQUEST, "body_broken"),
            Failure::Refused(Refused::NoKey) => (StatusCode::UNAUTHORIZED, "missing_api_key"),
            Failure::Refused(Refused::UnknownKey) => (StatusCode::UNAUTHORIZED, "invalid_api_key"),
            Failure::Refused(Refused::UnknownKeys { .. }) => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_unknown_keys"),
            Failure::Refused(Refused::Model(_)) => (StatusCode::FORBIDDEN, "model_forbidden"),
            Failure::Refused(Refused::Rate { what: What::Requests, .. }) => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_requests"),
            Failure::Refused(Refused::Rate { what: What::InputTokens, .. }) => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_input_tokens"),
            Failure::Refused(Refused::Rate { what: What::OutputTokens, .. }) => (StatusCode::TOO_MANY_REQUESTS, "rate_limit_output_tokens"),
            Failure::Refused(Refused::Concurrent { .. }) => (StatusCode::TOO_MANY_REQUESTS, "concurrent_requests"),
            Failure::Refused(Refused::Waiting { whose, what, .. }) => {
                let reason = match (whose, what) {
                    (Whose::Key, Full::Requests(_)) => "key_queue_requests",
                    (Whose::Key, Full::Bytes(_)) => "key_queue_bytes",
                    (Whose::Tenant, Full::Requests(_)) => "tenant_queue_requests",
                    (Whose::Tenant, Full::Bytes(_)) => "tenant_queue_bytes",
                    (Whose::Model, Full::Requests(_)) => "model_queue_requests",
                    (Whose::Model, Full::Bytes(_)) => "model_queue_bytes",
                };
                (StatusCode::TOO_MANY_REQUESTS, reason)
            }
            Failure::BadHeader(_) => (StatusCode::BAD_REQUEST, "invalid_header"),
            Failure::HeadTooLarge { .. } => (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "head_too_large"),
            Failure::UnknownPath(_) => (StatusCode::NOT_FOUND, "unknown_path"),
            Failure::WrongMethod { .. } => (StatusCode::METHOD_NOT_ALLOWED, "wrong_method"),
            Failure::UnknownModel { .. } => (StatusCode::NOT_FOUND, "model_not_found"),
            Failure::Rejected(Rejection { reason, .. }) => (status_of(*reason), reason.as_str()),
            Failure::Upstream(UpstreamError::Connect(_)) => (StatusCode::BAD_GATEWAY, "connect_failed"),
            Failure::Upstream(UpstreamError::ConnectTimeout(_)) => (StatusCode::GATEWAY_TIMEOUT, "connect_timeout"),
            Failure::Upstream(UpstreamError::FirstByteTimeout(_)) => (StatusCode::GATEWAY_TIMEOUT, "first_byte_timeout"),
            Failure::Upstream(UpstreamError::Wedged) => (StatusCode::GATEWAY_TIMEOUT, "backend_wedged"),
            Failure::Upstream(UpstreamError::Broken(_)) | Failure::CutShort => (StatusCode::BAD_GATEWAY, "backend_broke"),
            Failure::InterChunk(_) => (StatusCode::GATEWAY_TIMEOUT, "inter_chunk_timeout"),
            Failure::SlowStream(_) => (StatusCode::GATEWAY_TIMEOUT, "slow_stream"),
            Failure::TotalInQueue { .. } | Failure::Total(_) | Failure::Upstream(UpstreamError::TotalTimeout) => {
                (StatusCode::GATEWAY_TIMEOUT, "total_timeout")
            }
            Failure::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
        }
    }

    /// Whether another backend might do better: nothing has reached the client and the time is not over.
    pub fn is_retriable(&self) -> bool {
        match self {
            Failure::Upstream(error) => !matches!(error, UpstreamError::TotalTimeout),
            Failure::CutShort => true,
            _ => false,
        }
    }

    /// Whether no backend of the pool could serve the request, and those of another might.
    pub fn is_the_pools(&self) -> bool {
        self.is_retriable() || matches!(self, Failure::Rejected(Rejection { reason: Reason::NoHealthyBackend | Reason::NoOtherBackend, .. }))
    }

    /// Seconds after which it is worth trying again, where that can be said.
    fn retry_after(&self) -> Option<u32> {
        let seconds = match self {
            Failure::Rejected(Rejection { reason: Reason::TooLarge | Reason::NoOtherBackend, .. }) => return None,
            Failure::Rejected(rejection) => rejection.retry_after,
            Failure::Refused(refused) => refused.retry_after()?,
            Failure::TotalInQueue { retry_after } => *retry_after,
            Failure::Body(BodyError::NoRoom { .. }) | Failure::ShuttingDown => 1,
            _ => return None,
        };
        Some(seconds.max(1))
    }

    /// The field at fault.
    fn field(&self) -> Option<&str> {
        match self {
            Failure::BadBody(bad) => bad.field(),
            Failure::UnknownModel { .. } | Failure::Refused(Refused::Model(_)) => Some("model"),
            _ => None,
        }
    }

    /// The error object in the shape of the request's dialect.
    fn document(&self, api: Api, request_id: &str) -> serde_json::Value {
        let (status, code) = self.verdict();
        let message = self.to_string();
        match api {
            Api::Messages => json!({
                "type": "error",
                "error": {"type": anthropic_type(status), "message": message, "code": code},
                "request_id": request_id,
            }),
            _ => json!({"error": {"message": message, "type": openai_type(status), "param": self.field(), "code": code}}),
        }
    }

    /// The answer to a request that has not been answered yet.
    pub fn response(&self, api: Api, request_id: &str) -> Response<Bytes> {
        let (status, code) = self.verdict();
        let mut response = Response::new(Bytes::from(self.document(api, request_id).to_string()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(REASON, HeaderValue::from_static(code));
        if let Failure::WrongMethod { allowed, .. } = self {
            headers.insert(ALLOW, HeaderValue::from_static(allowed));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(seconds) = self.retry_after() {
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }

    /// The last event of a stream that has begun, behind whatever was cut.
    pub fn event(&self, api: Api, request_id: &str) -> Bytes {
        let mut document = self.document(api, request_id);
        let name = match api {
            Api::Messages => "event: error\n",
            Api::Responses => {
                document["type"] = "error".into();
                document["code"] = self.verdict().1.into();
                document["message"] = self.to_string().into();
                document["param"] = serde_json::Value::Null;
                "event: error\n"
            }
            Api::Chat | Api::Completions | Api::Other => "",
        };
        // The blank line ends an event that has begun; where none has, it says nothing.
        Bytes::from(format!("\n{name}data: {document}\n\n"))
    }
}

/// A document that a backend answered with this status, as an event of a stream.
pub fn event_of(api: Api, status: StatusCode, document: &[u8]) -> Bytes {
    let name: &[u8] = if matches!(api, Api::Messages | Api::Responses) && !status.is_success() { b"event: error\n" } else { b"" };
    // Line ends stand between JSON's tokens only.
    let line: Vec<u8> = document.iter().map(|&byte| if matches!(byte, b'\r' | b'\n') { b' ' } else { byte }).collect();
    Bytes::from([name, b"data: ", &line, b"\n\n"].concat())
}

fn status_of(reason: Reason) -> StatusCode {
    match reason {
        Reason::QueueFull | Reason::QueueBytes | Reason::QueueShare | Reason::Expired | Reason::Shed => StatusCode::TOO_MANY_REQUESTS,
        Reason::NoHealthyBackend | Reason::Draining => StatusCode::SERVICE_UNAVAILABLE,
        Reason::NoOtherBackend => StatusCode::BAD_GATEWAY,
        Reason::TooLarge => StatusCode::BAD_REQUEST,
    }
}

/// OpenAI's `type` of errors with this status.
fn openai_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "server_error",
    }
}

/// Anthropic's `type` of errors with this status (docs.anthropic.com, "Errors").
fn anthropic_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn rejected(reason: Reason) -> Failure {
        Failure::Rejected(Rejection { reason, retry_after: 7 })
    }

    #[test]
    fn every_case_of_the_contract_has_its_status() {
        let second = Duration::from_secs(1);
        let io = || std::io::Error::other("x");
        let rate = |what| Failure::from(Refused::Rate { what, limit: 10, wait: Duration::from_millis(1001) });
        let waiting = |whose, what| Failure::from(Refused::Waiting { whose, what, wait: Duration::from_millis(2001) });
        for (failure, status, code, retry) in [
            (BadBody::Missing("model").into(), 400, "missing_field", None),
            (BadBody::TooDeep.into(), 400, "invalid_body", None),
            (Failure::UnknownModel { model: "m".into(), near: vec![] }, 404, "model_not_found", None),
            (Refused::NoKey.into(), 401, "missing_api_key", None),
            (Refused::UnknownKey.into(), 401, "invalid_api_key", None),
            (Refused::UnknownKeys { limit: 5, wait: second }.into(), 429, "rate_limit_unknown_keys", Some("1")),
            (Refused::Model("m".into()).into(), 403, "model_forbidden", None),
            (rate(What::Requests), 429, "rate_limit_requests", Some("2")),
            (rate(What::InputTokens), 429, "rate_limit_input_tokens", Some("2")),
            (rate(What::OutputTokens), 429, "rate_limit_output_tokens", Some("2")),
            (Refused::Concurrent { limit: 5, wait: second }.into(), 429, "concurrent_requests", Some("1")),
            (waiting(Whose::Key, Full::Requests(5)), 429, "key_queue_requests", Some("3")),
            (waiting(Whose::Tenant, Full::Requests(5)), 429, "tenant_queue_requests", Some("3")),
            (waiting(Whose::Model, Full::Bytes(5)), 429, "model_queue_bytes", Some("3")),
            (Failure::UnknownPath("/x".into()), 404, "unknown_path", None),
            (Failure::WrongMethod { path: "/v1/models".into(), allowed: "GET" }, 405, "wrong_method", None),
            (Failure::HeadTooLarge { limit: 5 }, 431, "head_too_large", None),
            (BodyError::TooLarge { limit: 5 }.into(), 413, "body_too_large", None),
            (BodyError::NoRoom { limit: 5 }.into(), 429, "body_memory", Some("1")),
            (BodyError::Timeout(second).into(), 408, "body_timeout", None),
            (rejected(Reason::QueueFull), 429, "queue_full", Some("7")),
            (rejected(Reason::QueueBytes), 429, "queue_bytes", Some("7")),
            (rejected(Reason::QueueShare), 429, "queue_share", Some("7")),
            (rejected(Reason::Expired), 429, "queue_timeout", Some("7")),
            (rejected(Reason::Shed), 429, "shed", Some("7")),
            (rejected(Reason::NoHealthyBackend), 503, "no_healthy_backend", Some("7")),
            (rejected(Reason::Draining), 503, "draining", Some("7")),
            (rejected(Reason::NoOtherBackend), 502, "no_other_backend", None),
            (rejected(Reason::TooLarge), 400, "too_large", None),
            (UpstreamError::Connect(io()).into(), 502, "connect_failed", None),
            (UpstreamError::Broken("secret".into()).into(), 502, "backend_broke", None),
            (UpstreamError::ConnectTimeout(second).into(), 504, "connect_timeout", None),
            (UpstreamError::FirstByteTimeout(second).into(), 504, "first_byte_timeout", None),
            (UpstreamError::TotalTimeout.into(), 504, "total_timeout", None),
            (UpstreamError::Wedged.into(), 504, "backend_wedged", None),
            (Failure::InterChunk(second), 504, "inter_chunk_timeout", None),
            (Failure::SlowStream(SlowStream { tokens_per_second: 0.5, over: second }), 504, "slow_stream", None),
            (Failure::Total(second), 504, "total_timeout", None),
        ] {
            for api in [Api::Chat, Api::Messages] {
                let response = failure.response(api, "r1");
                assert_eq!((response.status().as_u16(), response.headers()[REASON].to_str().unwrap()), (status, code));
                assert_eq!(response.headers().get(RETRY_AFTER).map(|value| value.to_str().unwrap()), retry);
                let document: Value = serde_json::from_slice(response.body()).unwrap();
                assert_eq!(document["error"]["code"], code);
                assert!(!document["error"]["message"].as_str().unwrap().contains("secret"));
            }
        }
    }

    #[test]
    fn errors_have_their_dialects_shape() {
        let failure = Failure::UnknownModel { model: "gpt-5".into(), near: vec!["gpt-4o".into()] };
        let openai: Value = serde_json::from_slice(failure.response(Api::Responses, "r1").body()).unwrap();
        assert_eq!(
            openai,
            json!({"error": {"message": "the model `gpt-5` is not served here; did you mean `gpt-4o`?", "type": "invalid_request_error",
                   "param": "model", "code": "model_not_found"}})
        );
        let anthropic: Value = serde_json::from_slice(failure.response(Api::Messages, "r1").body()).unwrap();
        assert_eq!((&anthropic["type"], &anthropic["error"]["type"]), (&json!("error"), &json!("not_found_error")));
        assert_eq!(anthropic["request_id"], "r1");
    }

    #[test]
    fn a_stream_ends_with_an_event_of_its_dialect() {
        let event = |api| String::from_utf8(Failure::CutShort.event(api, "r1").to_vec()).unwrap();
        let data = |text: &str| serde_json::from_str::<Value>(text.split("data: ").nth(1).unwrap().trim()).unwrap();
        assert!(event(Api::Chat).starts_with("\ndata: {"));
        assert_eq!(data(&event(Api::Chat))["error"]["code"], "backend_broke");
        assert!(event(Api::Messages).starts_with("\nevent: error\ndata: {"));
        assert_eq!(data(&event(Api::Messages))["error"]["type"], "api_error");
        assert_eq!(data(&event(Api::Responses))["type"], "error");
        for api in [Api::Chat, Api::Messages, Api::Responses] {
            assert!(event(api).ends_with("}\n\n"));
        }
    }
}
