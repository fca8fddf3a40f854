//! Where the values of a JSON text stand, without reading them. Pure.
//!
//! A body is mostly one long text between quotes of which a few bytes are looked at. [`Json::check`] walks it once, as strictly as serde_json and as fast
//! as quotes are found (RFC 8259; `benches/compare/instructions.py` counts it); what it has let through can be taken apart without another thought.
//! Single values are read by serde_json.

use std::borrow::Cow;
use std::ops::Range;

use memchr::memchr2;
use serde::Deserialize;

/// Levels of arrays and objects that a text may have. Recursive parsers behind us give up between 128 and 1,000.
pub const MAX_DEPTH: usize = 128;

/// One value of a valid JSON text, as it stands there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Json<'a>(&'a str);

/// Why a text is not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotJson {
    #[error("{0}")]
    Syntax(String),
    #[error("nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
}

/// What the walk meets where it cannot go on.
#[derive(Debug)]
enum Fault {
    Syntax,
    TooDeep,
}

impl<'a> Json<'a> {
    /// Checks that `text` is one JSON value.
    ///
    /// # Errors
    /// It is not, or it is nested too deep. A text that is cut short inside of too many brackets is too deep.
    pub fn check(text: &'a [u8]) -> Result<Json<'a>, NotJson> {
        let fault = match std::str::from_utf8(text) {
            Err(error) => return Err(NotJson::Syntax(format!("invalid UTF-8 at byte {}", error.valid_up_to()))),
            Ok(text) => match walk(text.as_bytes()) {
                Ok(()) => return Ok(Json(text.trim_matches(is_blank_char))),
                Err(fault) => fault,
            },
        };
        Err(match fault {
            Fault::TooDeep => NotJson::TooDeep,
            Fault::Syntax => NotJson::Syntax(match serde_json::from_slice::<serde::de::IgnoredAny>(text) {
                Err(error) => error.to_string(),
                Ok(_) => "malformed".to_owned(),
            }),
        })
    }

    /// The text of the value.
    pub fn get(self) -> &'a str {
        self.0
    }

    /// Where it stands in `whole`, of which it is a part.
    pub fn place(self, whole: &[u8]) -> Range<usize> {
        place(self.0, whole)
    }

    pub fn is_null(self) -> bool {
        self.0 == "null"
    }

    pub fn is_string(self) -> bool {
        self.0.starts_with('"')
    }

    /// The text of a string; `None` if it is something else, or has an escape that stands for no character.
    pub fn string(self) -> Option<Cow<'a, str>> {
        let inner = self.inner()?;
        match next_of(inner.as_bytes(), 0, b'\\', b'\\') {
            None => Some(Cow::Borrowed(inner)),
            Some(_) => self.read().map(Cow::Owned),
        }
    }

    /// A string as it is written between its quotes.
    pub fn inner(self) -> Option<&'a str> {
        self.0.strip_prefix('"')?.strip_suffix('"')
    }

    /// The value as serde_json reads it; `None` if it is of another type.
    pub fn read<T: Deserialize<'a>>(self) -> Option<T> {
        serde_json::from_str(self.0).ok()
    }

    /// The elements of an array, in order; `None` if it is none.
    pub fn elements(self) -> Option<Elements<'a>> {
        self.0.starts_with('[').then_some(Elements { text: self.0, at: 1 })
    }

    /// The members of an object, in order; `None` if it is none.
    pub fn members(self) -> Option<Members<'a>> {
        self.0.starts_with('{').then_some(Members(Elements { text: self.0, at: 1 }))
    }
}

/// Where `part` stands in `whole`, of which it is a slice.
pub fn place(part: &str, whole: &[u8]) -> Range<usize> {
    let start = part.as_ptr() as usize - whole.as_ptr() as usize;
    start..start + part.len()
}

/// The elements of an array.
#[derive(Clone, Debug)]
pub struct Elements<'a> {
    /// From its bracket to its bracket.
    text: &'a str,
    at: usize,
}

impl<'a> Iterator for Elements<'a> {
    type Item = Json<'a>;

    fn next(&mut self) -> Option<Json<'a>> {
        let text = self.text.as_bytes();
        let start = blank(text, self.at);
        if matches!(text.get(start)?, b']' | b'}') {
            return None;
        }
        let end = end_of_value(text, start);
        // Behind it comes a comma, a colon or the closing bracket; the bracket stays.
        let next = blank(text, end);
        self.at = if matches!(text.get(next), Some(b',' | b':')) { next + 1 } else { next };
        Some(Json(self.text.get(start..end)?))
    }
}

/// The members of an object: names and values.
#[derive(Clone, Debug)]
pub struct Members<'a>(Elements<'a>);

impl<'a> Iterator for Members<'a> {
    type Item = (Cow<'a, str>, Json<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let name = self.0.next()?;
        // A name that stands for no text is none that is looked for.
        Some((name.string().unwrap_or_default(), self.0.next()?))
    }
}

/// Walks over one value and what is blank around it.
fn walk(text: &[u8]) -> Result<(), Fault> {
    // Which of the open brackets are of objects, the innermost in the lowest bit.
    let (mut objects, mut depth) = (0_u128, 0);
    // Raw control characters may not stand in strings. Where there are none at all, as in what programs write, no string is searched for them.
    // The least byte is found sixteen at a time (as this is written); a search that may end early looks at each.
    let controls = text.iter().fold(u8::MAX, |least, byte| least.min(*byte)) < 0x20;
    let mut at = 0;
    'value: loop {
        at = blank(text, at);
        match *text.get(at).ok_or(Fault::Syntax)? {
            b'"' => at = string(text, at, controls)?,
            open @ (b'{' | b'[') => {
                if depth == MAX_DEPTH {
                    return Err(Fault::TooDeep);
                }
                depth += 1;
                objects = objects << 1 | u128::from(open == b'{');
                at = blank(text, at + 1);
                // In ASCII the closing bracket is two behind the opening one.
                if text.get(at) != Some(&(open + 2)) {
                    if open == b'{' {
                        at = name(text, at, controls)?;
                    }
                    continue;
                }
            }
            b't' => at = literal(text, at, b"true")?,
            b'f' => at = literal(text, at, b"false")?,
            b'n' => at = literal(text, at, b"null")?,
            _ => at = number(text, at)?,
        }
        // A value ends here, and perhaps what it stands in.
        loop {
            at = blank(text, at);
            if depth == 0 {
                return if at == text.len() { Ok(()) } else { Err(Fault::Syntax) };
            }
            let in_object = objects & 1 == 1;
            match text.get(at) {
                Some(b',') => {
                    at += 1;
                    if in_object {
                        at = name(text, blank(text, at), controls)?;
                    }
                    continue 'value;
                }
                Some(b'}') if in_object => {}
                Some(b']') if !in_object => {}
                _ => return Err(Fault::Syntax),
            }
            at += 1;
            depth -= 1;
            objects >>= 1;
        }
    }
}

/// Behind a member's name and its colon.
fn name(text: &[u8], at: usize, controls: bool) -> Result<usize, Fault> {
    if text.get(at) != Some(&b'"') {
        return Err(Fault::Syntax);
    }
    let at = blank(text, string(text, at, controls)?);
    if text.get(at) == Some(&b':') { Ok(at + 1) } else { Err(Fault::Syntax) }
}

/// Behind the string whose opening quote is at `at`.
fn string(text: &[u8], at: usize, controls: bool) -> Result<usize, Fault> {
    let start = at + 1;
    let mut at = start;
    let end = loop {
        at = next_of(text, at, b'"', b'\\').ok_or(Fault::Syntax)?;
        // Escapes often come in rows: texts in other scripts are written so.
        while text.get(at) == Some(&b'\\') {
            at += match text.get(at + 1) {
                Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => 2,
                Some(b'u') if text.get(at + 2..at + 6).is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit)) => 6,
                _ => return Err(Fault::Syntax),
            };
        }
        if text.get(at) == Some(&b'"') {
            break at;
        }
    };
    if controls && text[start..end].iter().any(|byte| *byte < 0x20) {
        return Err(Fault::Syntax);
    }
    Ok(end + 1)
}

fn literal(text: &[u8], at: usize, literal: &[u8]) -> Result<usize, Fault> {
    if text[at..].starts_with(literal) { Ok(at + literal.len()) } else { Err(Fault::Syntax) }
}

/// Behind the number that starts at `at` (RFC 8259, 6).
fn number(text: &[u8], mut at: usize) -> Result<usize, Fault> {
    let digits = |at: usize| -> Result<usize, Fault> {
        let count = text[at.min(text.len())..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        if count == 0 { Err(Fault::Syntax) } else { Ok(at + count) }
    };
    if text.get(at) == Some(&b'-') {
        at += 1;
    }
    at = if text.get(at) == Some(&b'0') { at + 1 } else { digits(at)? };
    if text.get(at) == Some(&b'.') {
        at = digits(at + 1)?;
    }
    if matches!(text.get(at), Some(b'e' | b'E')) {
        at += 1;
        if matches!(text.get(at), Some(b'+' | b'-')) {
            at += 1;
        }
        at = digits(at)?;
    }
    Ok(at)
}

/// Behind the value that starts at `at` of a text that was walked over.
fn end_of_value(text: &[u8], mut at: usize) -> usize {
    let mut depth = 0;
    loop {
        match text.get(at) {
            Some(b'"') => at = end_of_string(text, at + 1) + 1,
            Some(b'{' | b'[') => (at, depth) = (at + 1, depth + 1),
            Some(b'}' | b']') => (at, depth) = (at + 1, depth - 1),
            Some(_) if depth == 0 => return at + text[at..].iter().take_while(|byte| !b",]} \t\n\r".contains(byte)).count(),
            Some(_) => {}
            None => return text.len(),
        }
        if depth == 0 {
            return at;
        }
        // What else stands between brackets begins and ends nothing.
        at += text[at.min(text.len())..].iter().take_while(|byte| !BOUNDS[usize::from(**byte)]).count();
    }
}

/// The bytes that begin or end strings, arrays and objects.
const BOUNDS: [bool; 256] = {
    let mut bounds = [false; 256];
    let mut at = 0;
    while at < 5 {
        bounds[br#""{}[]"#[at] as usize] = true;
        at += 1;
    }
    bounds
};

/// The index of the quote that ends a string whose text starts at `at`.
fn end_of_string(text: &[u8], mut at: usize) -> usize {
    while let Some(found) = next_of(text, at, b'"', b'\\') {
        if text[found] == b'"' {
            return found;
        }
        at = found + 2;
    }
    text.len()
}

/// The first `a` or `b` from `at` on. Most strings are short: a few bytes are looked at one by one before the search that is fast on long ones is begun.
fn next_of(text: &[u8], at: usize, a: u8, b: u8) -> Option<usize> {
    const FEW: usize = 16;
    let rest = text.get(at..)?;
    let few = rest.len().min(FEW);
    let near = rest[..few].iter().position(|byte| *byte == a || *byte == b);
    near.or_else(|| memchr2(a, b, &rest[few..]).map(|found| few + found)).map(|found| at + found)
}

/// The first place from `at` on that is not blank.
fn blank(text: &[u8], mut at: usize) -> usize {
    while matches!(text.get(at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
        at += 1;
    }
    at
}

fn is_blank_char(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;
    use serde_json::value::RawValue;
    use std::collections::BTreeMap;

    fn is_valid(text: &[u8]) -> bool {
        Json::check(text).is_ok()
    }

    #[test]
    fn brackets_count_where_they_nest_and_not_in_strings() {
        let nested = |levels: usize| [vec![b'['; levels], vec![b']'; levels]].concat();
        assert!(is_valid(&nested(MAX_DEPTH)));
        assert_eq!(Json::check(&nested(MAX_DEPTH + 1)), Err(NotJson::TooDeep));
        assert_eq!(Json::check(&vec![b'['; 10_000]), Err(NotJson::TooDeep));
        assert!(is_valid(&[b"\"".to_vec(), vec![b'['; 10_000], b"\"".to_vec()].concat()));
        assert!(is_valid(&[b"[[]".to_vec(), b",{}".repeat(10_000), b"]".to_vec()].concat()));
    }

    #[test]
    fn what_is_no_json_is_told_as_a_parser_tells_it() {
        let fault = |text: &[u8]| Json::check(text).unwrap_err().to_string();
        assert_eq!(fault(b"{\"a\":1,}"), "key must be a string at line 1 column 8");
        assert_eq!(fault(b"\"a\nb\""), "control character (\\u0000-\\u001F) found while parsing a string at line 1 column 2");
        assert_eq!(fault(b"\"\xff\""), "invalid UTF-8 at byte 1");
    }

    #[test]
    fn values_stand_where_they_are_written() {
        let text = r#" { "a" : [ 1 , "x,]\"" ,{"b":null}, -0.5e+3 ] ,"\u0061":{} , "c" : "é\n" } "#;
        let json = Json::check(text.as_bytes()).unwrap();
        let members: Vec<_> = json.members().unwrap().map(|(name, value)| (name, value.get())).collect();
        assert_eq!(members, [("a".into(), r#"[ 1 , "x,]\"" ,{"b":null}, -0.5e+3 ]"#), ("a".into(), "{}"), ("c".into(), r#""é\n""#)]);
        let elements: Vec<_> = json.members().unwrap().next().unwrap().1.elements().unwrap().map(Json::get).collect();
        assert_eq!(elements, ["1", r#""x,]\"""#, r#"{"b":null}"#, "-0.5e+3"]);
        let (_, last) = json.members().unwrap().last().unwrap();
        assert_eq!((last.string().as_deref(), &text[last.place(text.as_bytes())]), (Some("é\n"), r#""é\n""#));
        assert_eq!((json.elements().map(Iterator::count), last.members().map(Iterator::count)), (None, None));
    }

    /// Bytes that mean something to a parser, and whole words of them.
    fn crumbs() -> impl Strategy<Value = Vec<u8>> {
        const WORDS: [&str; 36] = [
            "{", "}", "[", "]", ",", ":", "\"", "\\", "\\\"", "\\n", "\\u00e9", "\\ud800", "\\u12", "\\x", "true", "false", "null", "nul", "0", "-",
            "1", ".", "e", "E+", "-0", "01", "1.5e-7", " ", "\t", "\n", "\"a\"", "\"é\"", "\u{7f}", "\u{1}", "{\"a\":", "[1,",
        ];
        let word = prop_oneof![
            20 => prop::sample::select(WORDS.to_vec()).prop_map(|word| word.as_bytes().to_vec()),
            1 => any::<u8>().prop_map(|byte| vec![byte]),
        ];
        prop::collection::vec(word, 0..12).prop_map(|words| words.concat())
    }

    /// Values of every type, with strings and names as these patterns have them.
    pub fn any_json(texts: &'static str, names: &'static str) -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<i32>().prop_map(|eighths| Value::from(f64::from(eighths) / 8.0)),
            texts.prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 64, 8, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((names, inner), 0..6).prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    /// Every value within is where another parser finds it.
    fn agrees(json: Json) {
        if let Some(elements) = json.elements() {
            let raws: Vec<&RawValue> = json.read().unwrap();
            let elements: Vec<Json> = elements.collect();
            assert_eq!(elements.iter().map(|value| value.get()).collect::<Vec<_>>(), raws.iter().map(|raw| raw.get()).collect::<Vec<_>>());
            elements.into_iter().for_each(agrees);
        } else if let Some(members) = json.members() {
            // A name of half a character is nothing to serde_json.
            let Some(raws) = json.read::<BTreeMap<String, &RawValue>>() else { return };
            let members: BTreeMap<String, Json> = members.map(|(name, value)| (name.into_owned(), value)).collect();
            assert_eq!(
                members.iter().map(|(name, value)| (name, value.get())).collect::<Vec<_>>(),
                raws.iter().map(|(name, raw)| (name, raw.get())).collect::<Vec<_>>()
            );
            members.into_values().for_each(agrees);
        } else {
            assert_eq!(json.string().map(Cow::into_owned), json.read::<String>());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        /// What it takes and what not is what serde_json takes, which also looks at UTF-8 where it reads a value raw.
        #[test]
        fn agrees_about_what_is_json(whole in any_json("[ -~é\n]{0,40}", "[a-z\"é]{0,3}"), pretty: bool, at in any::<prop::sample::Index>(), crumbs in crumbs(), insert: bool) {
            let mut text = if pretty { serde_json::to_vec_pretty(&whole) } else { serde_json::to_vec(&whole) }.unwrap();
            if insert {
                let at = at.index(text.len() + 1);
                text.splice(at..at, crumbs);
            } else {
                text = crumbs;
            }
            prop_assert_eq!(is_valid(&text), serde_json::from_slice::<&RawValue>(&text).is_ok(), "{}", String::from_utf8_lossy(&text));
            if let Ok(json) = Json::check(&text) {
                agrees(json);
            }
        }
    }
}
