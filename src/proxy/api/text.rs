//! Strings out of JSON, as much of them as anyone looks at.

use super::json::Json;

/// Bytes read from each end of a long text: more than the ranker keeps.
const END: usize = 4096;
/// How far back from a cut a space is looked for.
const SLACK: usize = 1024;
/// Bytes of text after which no further part is read.
pub const MOST: usize = 4 * END;
/// Markers that are worth writing one after another.
pub const MOST_MARKERS: usize = 8;

/// The beginning of a JSON string.
pub fn head(value: Json) -> String {
    let inner = value.inner().unwrap_or_default();
    if inner.len() > END
        && let Some(cut) = last_space(&inner.as_bytes()[END - SLACK..END])
    {
        return unescape(&inner[..END - SLACK + cut]);
    }
    value.string().map(|text| text[..text.floor_char_boundary(END)].to_owned()).unwrap_or_default()
}

/// Both ends of a JSON string, or all of it if it is short.
pub fn ends(value: Json) -> String {
    let inner = value.inner().unwrap_or_default();
    if inner.len() > 2 * END {
        let (bytes, tail) = (inner.as_bytes(), inner.len() - END);
        // A space is never part of an escape, so the text can be cut there without reading what lies between.
        if let (Some(cut), Some(resume)) = (last_space(&bytes[END - SLACK..END]), bytes[tail..tail + SLACK].iter().position(|&b| b == b' ')) {
            return format!("{} {}", unescape(&inner[..END - SLACK + cut]), unescape(&inner[tail + resume + 1..]));
        }
    }
    let text = value.string().unwrap_or_default();
    if text.len() <= 2 * END {
        return text.into_owned();
    }
    format!("{} {}", &text[..text.floor_char_boundary(END)], &text[text.ceil_char_boundary(text.len() - END)..])
}

/// Appends `more` on a line of its own.
pub fn join(all: &mut String, more: &str) {
    if !all.is_empty() && !more.is_empty() {
        all.push('\n');
    }
    all.push_str(more);
}

fn last_space(bytes: &[u8]) -> Option<usize> {
    bytes.iter().rposition(|&b| b == b' ')
}

/// The text that the inside of a JSON string stands for; empty if it is not one.
fn unescape(inner: &str) -> String {
    if !inner.contains('\\') {
        return inner.to_owned();
    }
    serde_json::from_str(&format!("\"{inner}\"")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn json(text: &str) -> String {
        serde_json::to_string(text).unwrap()
    }

    fn value(json: &str) -> Json<'_> {
        Json::check(json.as_bytes()).unwrap()
    }

    #[test]
    fn long_texts_keep_their_ends() {
        let words = (0..20_000).map(|i| format!("w{i}\n")).collect::<Vec<_>>().join(" ");
        let words = json(&words);
        let ends = ends(value(&words));
        assert!(ends.starts_with("w0\n w1\n") && ends.ends_with("w19999\n") && ends.len() < 2 * END + 2);
        assert!(head(value(&words)).len() > END - SLACK - 8);
        let wall = "é".repeat(20_000);
        assert_eq!(super::ends(value(&json(&wall))).chars().filter(|&c| c == 'é').count(), END);
    }

    proptest! {
        #[test]
        fn whatever_is_kept_is_the_text_itself(words in prop::collection::vec("[ -~é\n\"\\\\]{0,40}", 0..400)) {
            let text = words.join(" ");
            let json = json(&text);
            let kept = ends(value(&json));
            if text.len() <= END {
                prop_assert_eq!(&kept, &text);
            } else {
                let half = END / 2;
                prop_assert!(text.as_bytes().starts_with(&kept.as_bytes()[..half]));
                prop_assert!(text.as_bytes().ends_with(&kept.as_bytes()[kept.len() - half..]));
            }
            prop_assert!(head(value(&json)).len() <= END);
            prop_assert!(text.starts_with(&head(value(&json))));
        }
    }
}
