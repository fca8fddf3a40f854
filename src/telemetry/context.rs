//! Which trace a request belongs to: the headers `traceparent` and `tracestate` of W3C Trace Context (level 1, Recommendation of 23 November 2021), read
//! as it says and written for what goes upstream.

use std::hash::{BuildHasher, RandomState};
use std::str::FromStr;

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanId, TraceId, TraceState};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");
/// Length of version 00: `00-`, 32 digits, `-`, 16 digits, `-`, 2 digits.
const LENGTH: usize = 55;
/// Bytes of the longest `tracestate` that is recorded.
const LONGEST_STATE: usize = 512;
/// The only flag that level 1 knows.
const SAMPLED: u8 = 1;

/// The caller's part of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Caller {
    pub trace: TraceId,
    /// What the caller was doing when it called.
    pub span: SpanId,
    /// Whether the caller records the trace.
    pub sampled: bool,
}

/// The trace that a request comes with; `None` if it comes with none, with one that is malformed, or with several, which is the same.
pub(super) fn caller(headers: &HeaderMap) -> Option<Caller> {
    let mut all = headers.get_all(TRACEPARENT).iter();
    let only = all.next().filter(|_| all.next().is_none())?;
    parse(only.as_bytes())
}

/// What other tracing systems say of the caller's trace. Takes out what is malformed.
pub(super) fn state(headers: &mut HeaderMap) -> TraceState {
    // The lines are one list (RFC 9110, 5.3).
    let joined = headers.get_all(TRACESTATE).iter().map(|line| line.to_str().ok()).collect::<Option<Vec<_>>>().map(|lines| lines.join(","));
    match joined.map(|list| TraceState::from_str(&list)) {
        // It goes into every span. Shorter ones must be passed on, longer ones need not be (W3C, 3.3.1.5).
        Some(Ok(state)) if state.header().len() <= LONGEST_STATE => state,
        Some(Ok(_)) => TraceState::default(),
        Some(Err(_)) | None => {
            headers.remove(TRACESTATE);
            TraceState::default()
        }
    }
}

/// Makes this the context that the receiver of these headers continues.
pub(super) fn set(headers: &mut HeaderMap, trace: TraceId, span: SpanId, sampled: bool) {
    let text = format!("00-{trace}-{span}-{:02x}", u8::from(sampled) * SAMPLED);
    // Digits and dashes are a header value.
    if let Ok(value) = HeaderValue::try_from(text) {
        headers.insert(TRACEPARENT, value);
    }
}

/// Leaves nothing of a trace that is not continued.
pub(super) fn clear_state(headers: &mut HeaderMap) {
    headers.remove(TRACESTATE);
}

/// A trace that nobody else has.
pub(super) fn new_trace() -> TraceId {
    let (high, low) = (random(), random());
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&high.to_be_bytes());
    bytes[8..].copy_from_slice(&low.to_be_bytes());
    TraceId::from_bytes(bytes)
}

/// A span that the trace does not have yet.
pub(super) fn new_span() -> SpanId {
    SpanId::from_bytes(random().to_be_bytes())
}

/// For ids. Unpredictable enough to be unique: SipHash of a counter under this thread's random key. Zero, which stands for "none" in traces, never comes out.
pub fn random() -> u64 {
    RandomState::new().hash_one(()).max(1)
}

/// Reads `version-trace-span-flags`. A later version may say more behind that, and its other flags are not ours to read.
fn parse(text: &[u8]) -> Option<Caller> {
    let [version] = hex(text.get(..2)?)?;
    let whole = match version {
        0 => text.len() == LENGTH,
        0xff => false,
        _ => text.len() == LENGTH || text.get(LENGTH) == Some(&b'-'),
    };
    if !whole || [2, 35, 52].into_iter().any(|dash| text.get(dash) != Some(&b'-')) {
        return None;
    }
    let trace = TraceId::from_bytes(hex(text.get(3..35)?)?);
    let span = SpanId::from_bytes(hex(text.get(36..52)?)?);
    let [flags] = hex(text.get(53..55)?)?;
    (trace != TraceId::INVALID && span != SpanId::INVALID).then_some(Caller { trace, span, sampled: flags & SAMPLED != 0 })
}

/// Bytes of lower-case digits, two each; the standard knows no upper case.
fn hex<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let digit = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const SPAN: &str = "b7ad6b7169203331";

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name.clone(), HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    #[test]
    fn a_caller_is_understood() {
        for (text, sampled) in [
            (format!("00-{TRACE}-{SPAN}-01"), true),
            (format!("00-{TRACE}-{SPAN}-00"), false),
            (format!("00-{TRACE}-{SPAN}-ff"), true),
            (format!("00-{TRACE}-{SPAN}-02"), false),
            (format!("01-{TRACE}-{SPAN}-01"), true),
            (format!("cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like"), true),
        ] {
            let caller = parse(text.as_bytes()).unwrap_or_else(|| panic!("{text}"));
            assert_eq!((caller.trace.to_string(), caller.span.to_string(), caller.sampled), (TRACE.to_owned(), SPAN.to_owned(), sampled), "{text}");
        }
    }

    #[test]
    fn what_is_malformed_is_no_caller() {
        let upper = TRACE.to_uppercase();
        for text in [
            String::new(),
            "00".to_owned(),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{TRACE}-{SPAN}-1"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("00-{TRACE}-{SPAN}-01-"),
            format!("cc-{TRACE}-{SPAN}-01.more"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("0-{TRACE}-{SPAN}-01"),
            format!("0g-{TRACE}-{SPAN}-01"),
            format!("00-{upper}-{SPAN}-01"),
            format!("00-{TRACE}-{SPAN}-0x"),
            format!("00_{TRACE}_{SPAN}_01"),
            format!("00-{}-{SPAN}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{}-{SPAN}-01", &TRACE[1..]),
            format!(" 00-{TRACE}-{SPAN}-01"),
        ] {
            assert_eq!(parse(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn one_caller_at_a_time() {
        let one = format!("00-{TRACE}-{SPAN}-01");
        assert!(caller(&headers(&[(TRACEPARENT, &one)])).is_some());
        assert_eq!(caller(&headers(&[(TRACEPARENT, &one), (TRACEPARENT, &one)])), None);
        assert_eq!(caller(&HeaderMap::new()), None);
    }

    #[test]
    fn the_state_is_one_list_of_many_lines() {
        let mut lines = headers(&[(TRACESTATE, "a=1, b@c=2"), (TRACESTATE, ""), (TRACESTATE, "d=3")]);
        assert_eq!(state(&mut lines).header(), "a=1,b@c=2,d=3");
        assert_eq!(lines.get_all(TRACESTATE).iter().count(), 3, "passed on as it came");
        let long = format!("a={}", "x".repeat(250));
        let mut lines = headers(&[(TRACESTATE, &long), (TRACESTATE, &long.replace('a', "b")), (TRACESTATE, &long.replace('a', "c"))]);
        assert_eq!(state(&mut lines), TraceState::default());
        assert_eq!(lines.get_all(TRACESTATE).iter().count(), 3, "passed on, not recorded");
        for bad in ["a", "A=1", "a=1=2", "a=é"] {
            let mut malformed = headers(&[(TRACESTATE, bad)]);
            assert_eq!(state(&mut malformed), TraceState::default(), "{bad}");
            assert!(malformed.is_empty(), "{bad}");
        }
    }

    #[test]
    fn what_goes_out_is_read_again() {
        let mut out = headers(&[(TRACEPARENT, "x"), (TRACEPARENT, "y")]);
        for sampled in [false, true] {
            let (trace, span) = (new_trace(), new_span());
            set(&mut out, trace, span, sampled);
            assert_eq!(caller(&out), Some(Caller { trace, span, sampled }));
        }
        assert_ne!(new_trace(), new_trace());
        assert_ne!(new_span(), new_span());
    }
}
