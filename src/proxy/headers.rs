//! Headers that end here, in both directions.

use std::time::Duration;

use http::Method;
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, HeaderMap, HeaderName, HeaderValue, PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;

use crate::telemetry::random;
use crate::tenancy::{API_KEYS, Priority};

/// Names a request end to end.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// How long, in seconds, its client waits for a request as a whole.
pub const REQUEST_TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout");
/// In how many milliseconds its client wants the first token.
pub const SLO_TTFT: HeaderName = HeaderName::from_static("x-slo-ttft-ms");
/// How urgent it is.
pub const PRIORITY: HeaderName = HeaderName::from_static("x-headway-priority");
/// Makes llama.cpp go on with a request whose client has left.
pub const CONVERSATION_ID: HeaderName = HeaderName::from_static("x-conversation-id");

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
/// The longest id that is kept from a client.
const LONGEST_ID: usize = 128;

/// Bytes of a head, as HTTP/1.1 writes it.
pub fn size(head: &Parts) -> usize {
    let target = head.uri.path_and_query().map_or(0, |target| target.as_str().len());
    let lines: usize = head.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + ": \r\n".len()).sum();
    head.method.as_str().len() + target + "  HTTP/1.1\r\n\r\n".len() + lines
}

/// Takes out what belongs to one hop (RFC 9110, 7.6.1), also what `connection` names.
fn strip_hop(headers: &mut HeaderMap) {
    if headers.contains_key(CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| HeaderName::try_from(name.trim()).ok())
            .collect();
        for name in named {
            headers.remove(name);
        }
        headers.remove(CONNECTION);
    }
    strip(headers, &[KEEP_ALIVE, PROXY_CONNECTION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE]);
}

/// Takes out what has one of these names. A head has few headers and fewer of these: looking at each costs less than looking each name up.
fn strip(headers: &mut HeaderMap, names: &[HeaderName]) {
    while let Some(name) = headers.keys().find(|name| names.contains(name)).cloned() {
        headers.remove(name);
    }
}

/// Makes a client's headers fit to be sent to a backend: nothing of the hop and no credentials. `host` and `content-length` stay where they are, to be
/// written over.
pub fn strip_request(headers: &mut HeaderMap, is_read: bool) {
    strip_hop(headers);
    strip(headers, &[EXPECT, AUTHORIZATION, PROXY_AUTHORIZATION, COOKIE]);
    strip(headers, &API_KEYS);
    if is_read {
        // What is compressed cannot be read on its way.
        headers.remove(ACCEPT_ENCODING);
    }
}

/// Says how long the body is; of one that is empty only where `method` lets a body be expected (RFC 9110, 8.6).
pub fn set_length(headers: &mut HeaderMap, length: usize, method: &Method) {
    if length == 0 && !matches!(*method, Method::POST | Method::PUT | Method::PATCH) {
        headers.remove(CONTENT_LENGTH);
    } else {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
}

/// Makes a backend's headers fit to be sent to a client.
pub fn strip_response(headers: &mut HeaderMap) {
    strip_hop(headers);
    headers.remove(PROXY_AUTHENTICATE);
}

/// How long the client waits for its request as a whole, where it says so.
///
/// # Errors
/// The header says no number of seconds that is a time.
pub fn request_timeout(headers: &HeaderMap) -> Result<Option<Duration>, BadHeader> {
    let Some(value) = headers.get(REQUEST_TIMEOUT) else { return Ok(None) };
    let seconds = value.to_str().ok().and_then(|text| text.trim().parse::<f64>().ok()).filter(|seconds| *seconds > 0.0);
    match seconds.map(Duration::try_from_secs_f64) {
        Some(Ok(timeout)) => Ok(Some(timeout)),
        // Longer than can be told is no limit.
        Some(Err(_)) => Ok(None),
        None => Err(BadHeader { name: REQUEST_TIMEOUT, expected: "a number of seconds above zero, such as 30 or 2.5" }),
    }
}

/// When the first token should be there, counted from the request, where the client says so. llm-d's name for it.
///
/// # Errors
/// The header says no number of milliseconds that is a time.
pub fn first_token_within(headers: &HeaderMap) -> Result<Option<Duration>, BadHeader> {
    let Some(value) = headers.get(SLO_TTFT) else { return Ok(None) };
    let millis = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok()).filter(|millis| *millis > 0);
    millis
        .map(|millis| Some(Duration::from_millis(millis)))
        .ok_or(BadHeader { name: SLO_TTFT, expected: "a whole number of milliseconds above zero, such as 500" })
}

/// How urgent the client says its request is.
///
/// # Errors
/// The header names no priority.
pub fn priority(headers: &HeaderMap) -> Result<Option<Priority>, BadHeader> {
    let Some(value) = headers.get(PRIORITY) else { return Ok(None) };
    let priority = value.to_str().ok().and_then(|text| Priority::named(text.trim()));
    priority.map(Some).ok_or(BadHeader { name: PRIORITY, expected: "low, normal or high" })
}

/// A header that cannot be read. Its text is for the client.
#[derive(Debug, thiserror::Error)]
#[error("the header `{name}` must be {expected}")]
pub struct BadHeader {
    name: HeaderName,
    expected: &'static str,
}

/// The client's own id if it has a plain one, otherwise a new one. New ones are all equally long, since SGLang aborts by prefix.
pub fn request_id(headers: &HeaderMap) -> HeaderValue {
    match headers.get(REQUEST_ID) {
        // A copy: see `Account::open`.
        Some(id) if !id.is_empty() && id.len() <= LONGEST_ID && id.to_str().is_ok() => HeaderValue::from_bytes(id.as_bytes()).unwrap_or(id.clone()),
        _ => {
            let bits = u128::from(random()) << 64 | u128::from(random());
            let id: [u8; 32] = std::array::from_fn(|digit| b"0123456789abcdef"[(bits >> (124 - 4 * digit) & 0xf) as usize]);
            // Hexadecimal digits are a header value.
            HeaderValue::from_bytes(&id).unwrap_or(HeaderValue::from_static("0"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs.iter().map(|&(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    fn names(headers: &HeaderMap) -> Vec<&str> {
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn what_belongs_to_a_hop_or_a_client_stays_behind() {
        let mut headers = map(&[
            ("host", "me"),
            ("connection", "close, X-Mine , keep-alive"),
            ("connection", "x-other"),
            ("x-mine", "1"),
            ("x-other", "2"),
            ("keep-alive", "5"),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
            ("expect", "100-continue"),
            ("content-length", "5"),
            ("authorization", "Bearer secret"),
            ("x-api-key", "secret"),
            ("api-key", "secret"),
            ("cookie", "secret"),
            ("accept-encoding", "gzip"),
            ("content-type", "application/json"),
            ("traceparent", "00-x"),
            ("anthropic-version", "2023-06-01"),
        ]);
        let mut unread = headers.clone();
        strip_request(&mut headers, true);
        assert_eq!(names(&headers), ["anthropic-version", "content-length", "content-type", "host", "traceparent"]);
        set_length(&mut headers, 7, &Method::GET);
        assert_eq!(headers[CONTENT_LENGTH], "7");
        set_length(&mut headers, 0, &Method::POST);
        assert_eq!(headers[CONTENT_LENGTH], "0");
        set_length(&mut headers, 0, &Method::GET);
        assert!(!headers.contains_key(CONTENT_LENGTH));
        strip_request(&mut unread, false);
        assert!(unread.contains_key(ACCEPT_ENCODING));

        let mut headers =
            map(&[("connection", "x-mine"), ("x-mine", "1"), ("transfer-encoding", "chunked"), ("content-length", "5"), ("retry-after", "1")]);
        strip_response(&mut headers);
        assert_eq!(names(&headers), ["content-length", "retry-after"]);
    }

    #[test]
    fn a_timeout_is_a_number_of_seconds() {
        let timeout = |value| request_timeout(&map(&[("x-request-timeout", value)]));
        assert_eq!(request_timeout(&map(&[])).unwrap(), None);
        for (value, expected) in [("30", Some(30.0)), (" 2.5 ", Some(2.5)), ("1e300", None), ("inf", None)] {
            assert_eq!(timeout(value).unwrap(), expected.map(Duration::from_secs_f64), "{value}");
        }
        for wrong in ["", "0", "-1", "soon", "30s", "NaN"] {
            assert!(timeout(wrong).unwrap_err().to_string().contains("`x-request-timeout` must be a number of seconds"), "{wrong}");
        }
    }

    #[test]
    fn an_objective_is_milliseconds_and_a_priority_a_name() {
        let within = |value| first_token_within(&map(&[("x-slo-ttft-ms", value)]));
        assert_eq!((first_token_within(&map(&[])).unwrap(), within(" 250 ").unwrap()), (None, Some(Duration::from_millis(250))));
        for wrong in ["", "0", "-1", "2.5", "1s"] {
            assert!(within(wrong).unwrap_err().to_string().contains("`x-slo-ttft-ms` must be a whole number of milliseconds"), "{wrong}");
        }
        let named = |value| priority(&map(&[("x-headway-priority", value)]));
        assert_eq!((priority(&map(&[])).unwrap(), named("high").unwrap()), (None, Some(Priority::High)));
        assert!(named("urgent").unwrap_err().to_string().contains("`x-headway-priority` must be low, normal or high"));
    }

    #[test]
    fn ids_are_kept_or_made() {
        assert_eq!(request_id(&map(&[("x-request-id", "mine-1")])), "mine-1");
        let (a, b) = (request_id(&map(&[])), request_id(&map(&[("x-request-id", "")])));
        assert_ne!(a, b);
        assert_eq!((a.len(), b.len()), (32, 32));
        let long = HeaderMap::from_iter([(REQUEST_ID, HeaderValue::try_from("x".repeat(129)).unwrap())]);
        assert_eq!(request_id(&long).len(), 32);
    }
}
