//! HTTP/1.1 (RFC 9112) as a client writes and reads it: the head of a request, the head of its answer, and where the answer's body ends. No IO.
//!
//! An answer that two readers could take for two different ones is refused, as nginx does, since what follows it on the connection is somebody else's.

use std::mem::MaybeUninit;

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, HeaderMap, HeaderName, HeaderValue, TRANSFER_ENCODING};
use http::{Method, Request, Response, StatusCode, Version, response};

/// The longest head of an answer, in bytes.
const LONGEST_HEAD: usize = 64 << 10;
/// Headers of an answer.
const MOST_HEADERS: usize = 100;
/// The longest line that says how long the next chunk is, with its extensions, and the most that may follow the last chunk, in bytes.
const LONGEST_LINE: usize = 16 << 10;

/// Why what a backend sent is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    #[error("no HTTP: {0}")]
    Head(#[from] httparse::Error),
    #[error("a head of more than {LONGEST_HEAD} bytes")]
    LongHead,
    #[error("a status or header that is none")]
    Field,
    #[error("a `content-length` that is no one number")]
    Length,
    #[error("a `transfer-encoding` other than `chunked`, in HTTP/1.0, or beside a `content-length`")]
    Coding,
    #[error("a chunk without its length or its end")]
    Chunk,
    #[error("more than {LONGEST_LINE} bytes of extensions or trailers of chunks")]
    LongLine,
}

/// The head of an answer.
#[derive(Debug)]
pub struct Head {
    pub parts: response::Parts,
    pub framing: Framing,
    /// The connection can carry another request after this answer.
    pub keeps: bool,
}

/// Where the body of an answer ends: what of it is still to come.
#[derive(Debug, PartialEq)]
pub enum Framing {
    /// After so many bytes.
    Length(u64),
    /// After the last chunk.
    Chunked(Chunked),
    /// Where the connection does.
    UntilClose,
}

/// What comes next of a body in chunks.
#[derive(Debug, PartialEq)]
pub enum Chunked {
    /// The line that says how long the next chunk is.
    Size,
    /// So many bytes of a chunk, then a line's end.
    Data(u64),
    /// Lines up to an empty one, of which so many bytes have come.
    Trailers(usize),
}

/// What the bytes at hand are.
#[derive(Debug, PartialEq)]
pub enum Next {
    /// So many at the front are of the body, and are to be taken.
    Body(usize),
    /// Too few to say.
    More,
    /// The body has ended.
    End,
}

/// Writes the head of `request`, whose headers say what its body is.
pub fn write_head<T>(request: &Request<T>) -> Vec<u8> {
    let mut head = Vec::with_capacity(1024);
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    for part in [request.method().as_str(), " ", target, " HTTP/1.1\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
    for (name, value) in request.headers() {
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(b"\r\n");
    head
}

/// Takes the head of the answer to a request of this method from the front of `bytes`, once all of it is there. Interim answers (1xx) are passed over, but for
/// the one that switches protocols.
///
/// # Errors
/// It is no HTTP/1, too long, or its body's end cannot be told.
pub fn read_head(bytes: &mut BytesMut, method: &Method) -> Result<Option<Head>, Malformed> {
    loop {
        let Some((parts, length)) = parse(bytes)? else {
            return if bytes.len() > LONGEST_HEAD { Err(Malformed::LongHead) } else { Ok(None) };
        };
        bytes.advance(length);
        if parts.status.is_informational() && parts.status != StatusCode::SWITCHING_PROTOCOLS {
            continue;
        }
        let framing = framing(&parts, method)?;
        let keeps = keeps(&parts) && framing != Framing::UntilClose;
        return Ok(Some(Head { parts, framing, keeps }));
    }
}

/// The head at the front of `bytes` and its length.
fn parse(bytes: &[u8]) -> Result<Option<(response::Parts, usize)>, Malformed> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let mut room = [const { MaybeUninit::uninit() }; MOST_HEADERS];
    let mut head = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    let httparse::Status::Complete(length) = config.parse_response_with_uninit_headers(&mut head, bytes, &mut room)? else { return Ok(None) };
    if length > LONGEST_HEAD {
        return Err(Malformed::LongHead);
    }
    let (mut parts, ()) = Response::new(()).into_parts();
    parts.status = head.code.and_then(|code| StatusCode::from_u16(code).ok()).ok_or(Malformed::Field)?;
    parts.version = if head.version == Some(1) { Version::HTTP_11 } else { Version::HTTP_10 };
    if let Some(reason) = head.reason.filter(|reason| Some(*reason) != parts.status.canonical_reason() && !reason.is_empty())
        && let Ok(reason) = hyper::ext::ReasonPhrase::try_from(reason.as_bytes())
    {
        parts.extensions.insert(reason);
    }
    // The values share one copy of the head.
    let shared = Bytes::copy_from_slice(&bytes[..length]);
    parts.headers.reserve(head.headers.len());
    for header in head.headers.iter() {
        let name = HeaderName::from_bytes(header.name.as_bytes()).map_err(|_| Malformed::Field)?;
        let from = header.value.as_ptr().addr() - bytes.as_ptr().addr();
        let value = HeaderValue::from_maybe_shared(shared.slice(from..from + header.value.len())).map_err(|_| Malformed::Field)?;
        parts.headers.append(name, value);
    }
    Ok(Some((parts, length)))
}

/// Where the body ends (RFC 9112, 6.3).
fn framing(head: &response::Parts, method: &Method) -> Result<Framing, Malformed> {
    let bodiless =
        *method == Method::HEAD || matches!(head.status, StatusCode::SWITCHING_PROTOCOLS | StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    let mut codings = head.headers.get_all(TRANSFER_ENCODING).iter();
    let framing = match codings.next() {
        Some(coding) => {
            let is_alone = codings.next().is_none() && !head.headers.contains_key(CONTENT_LENGTH) && head.version == Version::HTTP_11;
            if !is_alone || !coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
                return Err(Malformed::Coding);
            }
            Framing::Chunked(Chunked::Size)
        }
        None => content_length(&head.headers)?.map_or(Framing::UntilClose, Framing::Length),
    };
    Ok(if bodiless { Framing::Length(0) } else { framing })
}

/// What `content-length` says; a number that is said twice is one (RFC 9110, 8.6).
fn content_length(headers: &HeaderMap) -> Result<Option<u64>, Malformed> {
    let mut length = None;
    for value in headers.get_all(CONTENT_LENGTH) {
        for digits in value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii) {
            // `parse` takes a sign.
            let number = std::str::from_utf8(digits).ok().filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
            let number: u64 = number.and_then(|digits| digits.parse().ok()).ok_or(Malformed::Length)?;
            if length.is_some_and(|length| length != number) {
                return Err(Malformed::Length);
            }
            length = Some(number);
        }
    }
    Ok(length)
}

/// Whether the backend keeps the connection open (RFC 9112, 9.3).
fn keeps(head: &response::Parts) -> bool {
    let mut keeps = head.version == Version::HTTP_11;
    for option in head.headers.get_all(CONNECTION).iter().flat_map(|value| value.as_bytes().split(|byte| *byte == b',')).map(<[u8]>::trim_ascii) {
        if option.eq_ignore_ascii_case(b"close") {
            return false;
        }
        keeps |= option.eq_ignore_ascii_case(b"keep-alive");
    }
    keeps
}

impl Framing {
    /// What is at the front of `bytes`. Whoever is told of bytes of the body takes them before asking again; all else is taken here.
    ///
    /// # Errors
    /// The chunks are not as they should be.
    pub fn next(&mut self, bytes: &mut BytesMut) -> Result<Next, Malformed> {
        loop {
            match self {
                Framing::Length(0) => return Ok(Next::End),
                _ if bytes.is_empty() => return Ok(Next::More),
                Framing::UntilClose => return Ok(Next::Body(bytes.len())),
                Framing::Length(left) => return Ok(Next::Body(take(left, bytes))),
                Framing::Chunked(Chunked::Size) => {
                    let Some(line) = line(bytes)? else { return Ok(Next::More) };
                    let size = chunk_size(&bytes[..line])?;
                    bytes.advance(line + 2);
                    *self = Framing::Chunked(if size == 0 { Chunked::Trailers(0) } else { Chunked::Data(size) });
                }
                Framing::Chunked(Chunked::Data(0)) => {
                    let end = &bytes[..bytes.len().min(2)];
                    if !b"\r\n".starts_with(end) {
                        return Err(Malformed::Chunk);
                    }
                    if end.len() < 2 {
                        return Ok(Next::More);
                    }
                    bytes.advance(2);
                    *self = Framing::Chunked(Chunked::Size);
                }
                Framing::Chunked(Chunked::Data(left)) => return Ok(Next::Body(take(left, bytes))),
                Framing::Chunked(Chunked::Trailers(before)) => {
                    let Some(line) = line(bytes)? else { return Ok(Next::More) };
                    *before += line + 2;
                    if *before > LONGEST_LINE {
                        return Err(Malformed::LongLine);
                    }
                    match line {
                        0 => *self = Framing::Length(0),
                        // Not passed on, but a line that is no field shows that this is not where the chunks end.
                        _ if !is_field(&bytes[..line]) => return Err(Malformed::Chunk),
                        _ => {}
                    }
                    bytes.advance(line + 2);
                }
            }
        }
    }

    /// The bytes of the body that are still to come, where the backend said it.
    pub fn left(&self) -> Option<u64> {
        match self {
            Framing::Length(left) => Some(*left),
            Framing::Chunked(_) | Framing::UntilClose => None,
        }
    }
}

/// How many of `bytes` are of the `left` ones, which are fewer then.
fn take(left: &mut u64, bytes: &[u8]) -> usize {
    let here = usize::try_from(*left).map_or(bytes.len(), |left| left.min(bytes.len()));
    *left -= here as u64;
    here
}

/// The length of the line at the front, without its end. There is no other end in it, nor half of one.
fn line(bytes: &[u8]) -> Result<Option<usize>, Malformed> {
    match memchr::memchr2(b'\r', b'\n', bytes) {
        Some(end) if end > LONGEST_LINE => Err(Malformed::LongLine),
        Some(end) if bytes[end..].starts_with(b"\r\n") => Ok(Some(end)),
        Some(end) if bytes[end..] != *b"\r" => Err(Malformed::Chunk),
        None if bytes.len() > LONGEST_LINE => Err(Malformed::LongLine),
        _ => Ok(None),
    }
}

/// Whether the line is a header's name and value.
fn is_field(line: &[u8]) -> bool {
    memchr::memchr(b':', line)
        .is_some_and(|colon| HeaderName::from_bytes(&line[..colon]).is_ok() && HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).is_ok())
}

/// What the line before a chunk says (RFC 9112, 7.1); extensions say nothing here.
fn chunk_size(line: &[u8]) -> Result<u64, Malformed> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    if digits == 0 || !matches!(line[digits..].trim_ascii_start().first(), None | Some(b';')) {
        return Err(Malformed::Chunk);
    }
    let digit = |byte: u8| u64::from(char::from(byte).to_digit(16).unwrap_or(0));
    let size = line[..digits].iter().try_fold(0, |size: u64, byte| Some(size.checked_mul(16)? | digit(*byte)));
    size.ok_or(Malformed::Chunk)
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::BufMut;

    fn head(text: &str, method: Method) -> Result<Option<Head>, Malformed> {
        read_head(&mut BytesMut::from(text), &method)
    }

    /// How the head's body is framed, and whether the connection is kept.
    fn framed(lines: &str) -> Result<(Framing, bool), Malformed> {
        let head = head(&format!("HTTP/1.1 200 OK\r\n{lines}\r\n"), Method::POST)?.expect("a whole head");
        Ok((head.framing, head.keeps))
    }

    #[test]
    fn a_request_is_written_as_it_stands() {
        let request = Request::post("http://ignored/v1/x?y=1").header("host", "a:1").header("x-two", "1").header("x-two", "2").body(()).unwrap();
        assert_eq!(write_head(&request), b"POST /v1/x?y=1 HTTP/1.1\r\nhost: a:1\r\nx-two: 1\r\nx-two: 2\r\n\r\n");
    }

    #[test]
    fn a_head_says_where_its_body_ends() {
        assert_eq!(framed("content-length: 7\r\n").unwrap(), (Framing::Length(7), true));
        assert_eq!(framed("content-length: 7, 7\r\nContent-Length: 7\r\n").unwrap(), (Framing::Length(7), true));
        assert_eq!(framed("transfer-encoding: Chunked\r\n").unwrap(), (Framing::Chunked(Chunked::Size), true));
        assert_eq!(framed("").unwrap(), (Framing::UntilClose, false));
        assert_eq!(framed("content-length: 7\r\nconnection: x, Close\r\n").unwrap(), (Framing::Length(7), false));
        for (version, lines, keeps) in
            [("1.0", "", false), ("1.0", "connection: keep-alive\r\n", true), ("1.1", "connection: keep-alive, close\r\n", false)]
        {
            let read = head(&format!("HTTP/{version} 200 OK\r\ncontent-length: 0\r\n{lines}\r\n"), Method::POST).unwrap().unwrap();
            assert_eq!(read.keeps, keeps, "{version} {lines}");
        }
        for (status, method) in [("204 No Content", Method::POST), ("304 Not Modified", Method::GET), ("200 OK", Method::HEAD)] {
            let read = head(&format!("HTTP/1.1 {status}\r\ncontent-length: 7\r\n\r\n"), method).unwrap().unwrap();
            assert_eq!((read.framing, read.keeps), (Framing::Length(0), true), "{status}");
        }
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        for lines in [
            "content-length: 7\r\ncontent-length: 8\r\n",
            "content-length: +7\r\n",
            "content-length:\r\n",
            "content-length: 7,\r\n",
            "content-length: 99999999999999999999\r\n",
        ] {
            assert!(matches!(framed(lines), Err(Malformed::Length)), "{lines}");
        }
        for lines in [
            "transfer-encoding: gzip, chunked\r\n",
            "transfer-encoding: identity\r\n",
            "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
            "transfer-encoding: chunked\r\ncontent-length: 7\r\n",
        ] {
            assert!(matches!(framed(lines), Err(Malformed::Coding)), "{lines}");
        }
        assert!(matches!(head("HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", Method::POST), Err(Malformed::Coding)));
        assert!(matches!(head("HTTP/1.1 099 OK\r\n\r\n", Method::POST), Err(Malformed::Field)));
        for lines in ["a b: c\r\n", " folded\r\n", "a : b\r\n", "no colon\r\n"] {
            assert!(matches!(framed(lines), Err(Malformed::Head(_))), "{lines}");
        }
    }

    #[test]
    fn a_head_is_read_once_all_of_it_is_there() {
        let text = "HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 503 Out of luck\r\ncontent-length: 2\r\nx-two: 1\r\nx-two: 2\r\n\r\n";
        let mut bytes = BytesMut::new();
        for byte in text.as_bytes() {
            assert!(read_head(&mut bytes, &Method::POST).unwrap().is_none());
            bytes.put_u8(*byte);
        }
        bytes.put_slice(b"ok");
        let Head { parts, framing, .. } = read_head(&mut bytes, &Method::POST).unwrap().unwrap();
        assert_eq!((parts.status, framing, &*bytes), (StatusCode::SERVICE_UNAVAILABLE, Framing::Length(2), b"ok".as_slice()));
        assert_eq!(parts.headers.get_all("x-two").iter().collect::<Vec<_>>(), ["1", "2"]);
        assert!(!parts.headers.contains_key("link"));
        assert_eq!(parts.extensions.get::<hyper::ext::ReasonPhrase>().unwrap().as_bytes(), b"Out of luck");
    }

    #[test]
    fn heads_and_lines_have_an_end() {
        let long = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(LONGEST_HEAD));
        assert!(matches!(head(&long, Method::POST), Err(Malformed::LongHead)));
        assert!(matches!(head(&format!("{long}\r\n\r\n"), Method::POST), Err(Malformed::LongHead)));
        for (state, text) in
            [(Chunked::Size, "1;".to_owned() + &"x".repeat(LONGEST_LINE)), (Chunked::Trailers(0), "x: yy\r\n".repeat(LONGEST_LINE / 7 + 1))]
        {
            let mut framing = Framing::Chunked(state);
            assert!(matches!(framing.next(&mut BytesMut::from(&*text)), Err(Malformed::LongLine)));
        }
    }

    /// The body in `text`, which comes byte by byte, and what is left of it after its end; `None` if there is no end.
    fn body(mut framing: Framing, text: &str) -> Result<Option<(String, String)>, Malformed> {
        let (mut bytes, mut body) = (BytesMut::new(), Vec::new());
        let mut coming = text.bytes();
        loop {
            match framing.next(&mut bytes)? {
                Next::Body(length) => body.extend_from_slice(&bytes.split_to(length)),
                Next::End => return Ok(Some((String::from_utf8(body).unwrap(), coming.map(char::from).collect()))),
                Next::More => match coming.next() {
                    Some(byte) => bytes.put_u8(byte),
                    None => return Ok(None),
                },
            }
        }
    }

    #[test]
    fn a_body_ends_where_it_says() {
        let chunked = || Framing::Chunked(Chunked::Size);
        let ended = |body: &str, rest: &str| Some((body.to_owned(), rest.to_owned()));
        assert_eq!(body(Framing::Length(3), "abcd").unwrap(), ended("abc", "d"));
        assert_eq!(body(Framing::Length(3), "ab").unwrap(), None);
        assert_eq!(body(chunked(), "2\r\nab\r\n00A ; x=\"y\"\r\n0123456789\r\n0\r\n\r\nHTTP").unwrap(), ended("ab0123456789", "HTTP"));
        assert_eq!(body(chunked(), "1\r\na\r\n0\r\nx-trailer: y\r\nx-other:\r\n\r\n").unwrap(), ended("a", ""));
        assert_eq!(body(chunked(), "1\r\na\r\n0\r\nx-trailer: y\r\n").unwrap(), None);
        for text in [
            "\r\n",
            "x\r\n",
            "-1\r\n",
            "1x\r\na\r\n",
            "1\na\r\n",
            "1\r\nab\r\n",
            "1\r\na\n",
            "10000000000000000\r\n",
            "1;\rx\r\n",
            "0\r\n: y\r\n\r\n",
            "0\r\nno field\r\n\r\n",
        ] {
            assert!(matches!(body(chunked(), text), Err(Malformed::Chunk)), "{text:?}");
        }
    }
}
