//! Text to word pieces, the same way in training and in serving.

use tokenizers::normalizers::{NFKC, NormalizerWrapper, Sequence};

use super::PromptText;
use super::weights::RankerError;

/// The ids of one prompt, special pieces included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pieces(Vec<u32>);

impl Pieces {
    /// From ids that are pieces of the model's vocabulary, beginning with [CLS].
    pub fn of_ids(ids: Vec<u32>) -> Pieces {
        Pieces(ids)
    }

    pub fn ids(&self) -> &[u32] {
        &self.0
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// How much of a prompt is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Truncation {
    /// Pieces in all, special ones included.
    pub pieces: usize,
    /// Of these, how many the system prompt may take.
    pub system: usize,
}

/// Bytes that are tokenized for each piece wanted of a long text, before all of it is.
const BYTES: usize = 8;

/// WordPiece over normalised code points.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    truncation: Truncation,
    cls: u32,
    sep: u32,
    unknown: u32,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`RankerError::Tokenizer`] where it is none, lacks the special pieces of a BERT or leaves the truncation no room.
    pub fn from_json(json: &[u8], truncation: Truncation) -> Result<Tokenizer, RankerError> {
        let broken = |reason: String| RankerError::Tokenizer(reason);
        if truncation.pieces < 8 || truncation.system + 4 > truncation.pieces {
            return Err(broken(format!("no room for the prompt in {} pieces with {} for the system prompt", truncation.pieces, truncation.system)));
        }
        let mut value: serde_json::Value = serde_json::from_slice(json).map_err(|error| broken(error.to_string()))?;
        let fields = value.as_object_mut().ok_or_else(|| broken("not an object".into()))?;
        // Padding, truncation and special pieces are placed here, by this type. Without added tokens, a "[SEP]" that a prompt contains is five characters.
        for field in ["truncation", "padding", "post_processor"] {
            fields.insert(field.into(), serde_json::Value::Null);
        }
        fields.insert("added_tokens".into(), serde_json::Value::Array(Vec::new()));
        let mut inner = tokenizers::Tokenizer::from_bytes(value.to_string()).map_err(|error| broken(error.to_string()))?;
        let special =
            |inner: &tokenizers::Tokenizer, piece: &str| inner.token_to_id(piece).ok_or_else(|| broken(format!("no {piece} in the vocabulary")));
        let (cls, sep, unknown) = (special(&inner, "[CLS]")?, special(&inner, "[SEP]")?, special(&inner, "[UNK]")?);
        let mut steps = vec![NormalizerWrapper::NFKC(NFKC)];
        steps.extend(inner.get_normalizer().cloned());
        inner.with_normalizer(Some(Sequence::new(steps))).map_err(|error| broken(error.to_string()))?;
        Ok(Tokenizer { inner, truncation, cls, sep, unknown })
    }

    /// Ids it can produce are below this.
    pub fn vocabulary(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// `[CLS] user [SEP]`, or `[CLS] system [SEP] user [SEP]`. Of a longer system prompt the head is kept; of a longer user turn the first two thirds
    /// of the room and the last third: instructions often stand at the end, but so do templates that many prompts share.
    pub fn pieces(&self, text: &PromptText) -> Pieces {
        let mut ids = vec![self.cls];
        let mut system = self.encode(&text.system);
        if !system.is_empty() {
            system.truncate(self.truncation.system);
            ids.append(&mut system);
            ids.push(self.sep);
        }
        let room = self.truncation.pieces - ids.len() - 1;
        ids.extend(self.ends(&text.user, room));
        ids.push(self.sep);
        Pieces(ids)
    }

    /// All pieces of a text, or of a longer one the first two thirds and the last third of `room`.
    fn ends(&self, text: &str, room: usize) -> Vec<u32> {
        let tail = room / 3;
        let head = room - tail;
        if let Some((first, last)) = outer(text, head * BYTES, tail * BYTES) {
            let (mut first, last) = (self.encode(first), self.encode(last));
            if first.len() >= head && last.len() >= tail {
                first.truncate(head);
                first.extend_from_slice(&last[last.len() - tail..]);
                return first;
            }
        }
        let mut all = self.encode(text);
        if all.len() > room {
            all.drain(head..all.len() - tail);
        }
        all
    }

    /// Pieces of a text without special ones. A text that the tokenizer cannot take counts as one unknown word.
    fn encode(&self, text: &str) -> Vec<u32> {
        self.inner.encode_fast(text, false).map_or_else(|_| vec![self.unknown], |encoding| encoding.get_ids().to_vec())
    }
}

/// At least so many bytes of the beginning and of the end of a longer text. It is cut at spaces before a plain letter or digit: what stands on the two
/// sides of one shares no word, and no code point that normalisation could join.
fn outer(text: &str, head: usize, tail: usize) -> Option<(&str, &str)> {
    let bytes = text.as_bytes();
    let cut = |at: usize| bytes[at] == b' ' && bytes.get(at + 1).is_some_and(u8::is_ascii_alphanumeric);
    let end = (head..bytes.len()).find(|at| cut(*at))?;
    let start = (end..bytes.len().checked_sub(tail)?).rev().find(|at| cut(*at))?;
    Some((&text[..end], &text[start..]))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A WordPiece tokenizer of a few words.
    pub(crate) fn tiny_json() -> Vec<u8> {
        let words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[", "]", "cls", "sep", "a", "b", "c", "d", "e", "hello", "world", "##s"];
        let vocab: serde_json::Map<String, serde_json::Value> = words.iter().enumerate().map(|(id, word)| (word.to_string(), id.into())).collect();
        serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [{"id": 2, "content": "[CLS]", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
            "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true},
            "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": null, "decoder": null,
            "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "vocab": vocab},
        })
        .to_string()
        .into_bytes()
    }

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_json(&tiny_json(), Truncation { pieces: 10, system: 2 }).unwrap()
    }

    fn pieces(system: &str, user: &str) -> Vec<u32> {
        tokenizer().pieces(&PromptText { system: system.into(), user: user.into() }).ids().to_vec()
    }

    #[test]
    fn special_pieces_stand_where_this_type_puts_them() {
        assert_eq!(pieces("", "Hello worlds"), [2, 13, 14, 15, 3]);
        assert_eq!(pieces("a", "b"), [2, 8, 3, 9, 3]);
        assert_eq!(pieces("", ""), [2, 3]);
    }

    #[test]
    fn a_prompt_cannot_write_special_pieces() {
        assert_eq!(pieces("", "[CLS] [SEP]"), [2, 4, 6, 5, 4, 7, 5, 3]);
    }

    #[test]
    fn of_a_long_prompt_head_and_tail_are_kept() {
        assert_eq!(pieces("", "a a a a b b c c d d d d e"), [2, 8, 8, 8, 8, 9, 9, 11, 12, 3]);
        assert_eq!(pieces("a b c", "a a a b b b c c c"), [2, 8, 9, 3, 8, 8, 8, 9, 10, 3]);
    }

    #[test]
    fn of_a_long_text_only_the_ends_are_tokenized_and_nothing_changes() {
        let tokenizer = tokenizer();
        let words = ["a", "b", "hello", "worlds", " ", "Ｃ", "e\u{301}", "\u{301}", "\u{0}", "。", "\n", "[", "xyz", "é", "ﬁ"];
        let mut shortened = 0;
        for seed in 0..300usize {
            let text = (0..seed).map(|at| words[(at * at * 7 + at * seed + seed) % words.len()]).collect::<Vec<_>>().join(if seed % 3 == 0 {
                ""
            } else {
                " "
            });
            let mut expected = tokenizer.encode(&text);
            if expected.len() > 9 {
                expected.drain(6..expected.len() - 3);
            }
            shortened += usize::from(outer(&text, 48, 24).is_some());
            assert_eq!(tokenizer.ends(&text, 9), expected, "{text:?}");
        }
        assert!(shortened > 100, "{shortened}");
        assert_eq!(outer("ab cd ef", 2, 3), Some(("ab", " cd ef")));
        assert_eq!(outer("ab cd ef", 3, 3), None);
    }

    #[test]
    fn code_points_are_normalised() {
        assert_eq!(pieces("", "ＨＥＬＬＯ 𝐰𝐨𝐫𝐥𝐝"), pieces("", "hello world"));
        assert_eq!(pieces("", "he\u{0}llo"), pieces("", "hello"));
    }

    #[test]
    fn a_file_that_is_no_tokenizer_is_refused() {
        let truncation = Truncation { pieces: 10, system: 2 };
        for json in [b"{}".to_vec(), b"not json".to_vec(), String::from_utf8(tiny_json()).unwrap().replace("[SEP]", "[S]").into_bytes()] {
            assert!(matches!(Tokenizer::from_json(&json, truncation), Err(RankerError::Tokenizer(_))));
        }
        assert!(Tokenizer::from_json(&tiny_json(), Truncation { pieces: 10, system: 8 }).is_err());
    }
}
