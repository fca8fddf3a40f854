//! The `model` field of a multipart form (audio transcriptions), found without touching the form.

use std::ops::Range;

use memchr::memmem;

use super::{BadBody, LONGEST_NAME};

/// The value of the form's `model` field and where it stands. `content_type` is the request's header.
pub fn model_field<'a>(content_type: &str, body: &'a [u8]) -> Result<(&'a str, Range<usize>), BadBody> {
    let boundary = boundary(content_type).ok_or(BadBody::Multipart("the content type names no boundary"))?;
    let delimiter = [b"--", boundary.as_bytes()].concat();
    let finder = memmem::Finder::new(&delimiter);
    let mut rest = body;
    while let Some(at) = finder.find(rest) {
        rest = &rest[at + delimiter.len()..];
        let Some(part) = rest.strip_prefix(b"\r\n") else {
            // `--` ends the form; anything else is content that looks like the delimiter.
            if rest.starts_with(b"--") {
                break;
            }
            continue;
        };
        let head_end = memmem::find(part, b"\r\n\r\n").ok_or(BadBody::Multipart("a part has no end of its headers"))?;
        let (head, content) = (&part[..head_end], &part[head_end + 4..]);
        if is_model(head) {
            let end = memmem::find(content, &[b"\r\n", delimiter.as_slice()].concat()).ok_or(BadBody::Multipart("the last part has no end"))?;
            let start = body.len() - content.len();
            return match std::str::from_utf8(&content[..end]) {
                Ok(name) if name.len() > LONGEST_NAME => Err(BadBody::NameTooLong),
                Ok(name) if !name.is_empty() => Ok((name, start..start + end)),
                _ => Err(BadBody::wrong("model", "a name")),
            };
        }
        rest = content;
    }
    Err(BadBody::Missing("model"))
}

/// The boundary parameter, quoted or not.
fn boundary(content_type: &str) -> Option<&str> {
    let value = content_type.split(';').skip(1).find_map(|parameter| {
        let (name, value) = parameter.split_once('=')?;
        name.trim().eq_ignore_ascii_case("boundary").then(|| value.trim())
    })?;
    let value = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
    (!value.is_empty() && value.len() <= 70).then_some(value)
}

/// Whether a part's headers say that it is the field `model`.
fn is_model(head: &[u8]) -> bool {
    head.split(|&b| b == b'\n').any(|line| {
        let Ok(line) = std::str::from_utf8(line) else { return false };
        let Some((name, value)) = line.split_once(':') else { return false };
        name.eq_ignore_ascii_case("content-disposition")
            && value.split(';').any(|parameter| matches!(parameter.trim(), "name=\"model\"" | "name=model"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=\"x-y\"";

    fn form(parts: &[(&str, &[u8])]) -> Vec<u8> {
        let mut body = Vec::new();
        for (name, content) in parts {
            body.extend_from_slice(format!("--x-y\r\nContent-Disposition: form-data; name=\"{name}\"\r\nX: y\r\n\r\n").as_bytes());
            body.extend_from_slice(content);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(b"--x-y--\r\n");
        body
    }

    #[test]
    fn the_model_is_found_wherever_it_stands() {
        let audio = [b"RIFF\0\xff--x-y name=\"model\"\r\n\r\n".as_slice(), &[7; 5000]].concat();
        for (kind, body, expected) in [
            (TYPE, form(&[("file", &audio), ("model", b"whisper-1")]), "whisper-1"),
            ("Multipart/Form-Data;boundary=x-y", form(&[("model", b"m"), ("file", &audio)]), "m"),
        ] {
            let (name, place) = model_field(kind, &body).unwrap();
            assert_eq!((name, &body[place]), (expected, expected.as_bytes()));
        }
    }

    #[test]
    fn what_is_no_form_is_refused() {
        assert_eq!(model_field(TYPE, &form(&[("file", b"a")])), Err(BadBody::Missing("model")));
        assert_eq!(model_field(TYPE, b""), Err(BadBody::Missing("model")));
        assert!(matches!(model_field("multipart/form-data", &form(&[("model", b"m")])), Err(BadBody::Multipart(_))));
        let whole = form(&[("file", b"a"), ("model", b"m")]);
        for end in 0..whole.len() - 9 {
            assert!(model_field(TYPE, &whole[..end]).is_err(), "cut at {end}");
        }
        assert_eq!(model_field(TYPE, &form(&[("model", b"")])), Err(BadBody::wrong("model", "a name")));
        assert_eq!(model_field(TYPE, &form(&[("model", &[b'm'; LONGEST_NAME + 1])])), Err(BadBody::NameTooLong));
    }
}
