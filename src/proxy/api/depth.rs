//! A body that is nested absurdly deep is refused before anything parses it, here or behind us.

use memchr::{memchr2, memchr2_iter};

/// Levels of arrays and objects that a body may have. Recursive parsers behind us give up between 128 and 1,000.
pub const MAX_DEPTH: usize = 128;

/// Whether brackets outside strings nest deeper than [`MAX_DEPTH`]. Says nothing about text that is not JSON.
pub fn is_too_deep(json: &[u8]) -> bool {
    // Almost every body has fewer opening brackets than that, whether in strings or not.
    if memchr2_iter(b'{', b'[', json).nth(MAX_DEPTH).is_none() {
        return false;
    }
    let mut depth = 0_usize;
    let mut at = 0;
    while at < json.len() {
        match json[at] {
            b'"' => at = end_of_string(json, at + 1),
            b'{' | b'[' => {
                depth += 1;
                if depth > MAX_DEPTH {
                    return true;
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    false
}

/// The index of the quote that ends a string whose text starts at `at`.
fn end_of_string(json: &[u8], mut at: usize) -> usize {
    while let Some(found) = memchr2(b'"', b'\\', json.get(at..).unwrap_or_default()) {
        at += found;
        if json[at] == b'"' {
            return at;
        }
        at += 2;
    }
    json.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn brackets_count_where_they_nest_and_not_in_strings() {
        let nested = |levels: usize| [vec![b'['; levels], vec![b']'; levels]].concat();
        assert!(!is_too_deep(&nested(MAX_DEPTH)));
        assert!(is_too_deep(&nested(MAX_DEPTH + 1)));
        assert!(is_too_deep(&vec![b'['; 10_000]));
        assert!(!is_too_deep(&[b"\"".to_vec(), vec![b'['; 10_000], b"\"".to_vec()].concat()));
        assert!(!is_too_deep(&b"[]".repeat(10_000)));
        assert!(!is_too_deep(&[br#""\"[""#.to_vec(), vec![b'['; 100]].concat().repeat(1)));
    }

    proptest! {
        /// Agrees with a parser that counts as it descends.
        #[test]
        fn agrees_with_a_naive_count(text in prop::collection::vec(prop::sample::select(b"[]{}\"\\a".to_vec()), 0..2_000)) {
            let (mut depth, mut deepest, mut quoted, mut escaped) = (0_usize, 0, false, false);
            for byte in &text {
                match (quoted, escaped, byte) {
                    (true, true, _) => escaped = false,
                    (true, false, b'\\') => escaped = true,
                    (_, false, b'"') => quoted = !quoted,
                    (false, _, b'[' | b'{') => { depth += 1; deepest = deepest.max(depth) }
                    (false, _, b']' | b'}') => depth = depth.saturating_sub(1),
                    _ => {}
                }
            }
            prop_assert_eq!(is_too_deep(&text), deepest > MAX_DEPTH);
        }
    }
}
