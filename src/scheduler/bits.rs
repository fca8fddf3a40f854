//! A set of indices, one bit each: two such sets are compared 64 indices at a time.

/// Indices, the smallest first.
#[derive(Debug, Default)]
pub(super) struct Bits(Vec<u64>);

impl Bits {
    /// Puts an index in or takes it out.
    pub fn set(&mut self, index: usize, is_in: bool) {
        let (word, bit) = (index / 64, 1 << (index % 64));
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        if is_in {
            self.0[word] |= bit;
        } else {
            self.0[word] &= !bit;
        }
    }

    pub fn has(&self, index: usize) -> bool {
        self.word(index / 64) >> (index % 64) & 1 == 1
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// The first index from `from` on that is in this set, and in the other or not.
    pub fn first(&self, from: usize, other: &Bits, is_in_other: bool) -> Option<usize> {
        let mut mask = u64::MAX << (from % 64);
        for word in from / 64..self.0.len() {
            let others = if is_in_other { other.word(word) } else { !other.word(word) };
            let found = self.0[word] & others & mask;
            if found != 0 {
                return Some(word * 64 + found.trailing_zeros() as usize);
            }
            mask = u64::MAX;
        }
        None
    }

    /// All in this set, and in the other or not.
    pub fn iter(&self, other: &Bits, is_in_other: bool) -> impl Iterator<Item = usize> {
        std::iter::successors(self.first(0, other, is_in_other), move |&index| self.first(index + 1, other, is_in_other))
    }

    fn word(&self, word: usize) -> u64 {
        self.0.get(word).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_is_in_both_and_what_is_in_one_alone() {
        let bits = |indices: &[usize]| {
            let mut bits = Bits::default();
            indices.iter().for_each(|&index| bits.set(index, true));
            bits
        };
        let (mut some, others) = (bits(&[0, 3, 63, 64, 200]), bits(&[3, 64, 65]));
        assert_eq!(some.iter(&others, true).collect::<Vec<_>>(), [3, 64]);
        assert_eq!(some.iter(&others, false).collect::<Vec<_>>(), [0, 63, 200]);
        assert_eq!(others.iter(&some, false).collect::<Vec<_>>(), [65]);
        assert_eq!((some.first(4, &others, true), some.first(65, &others, true)), (Some(64), None));
        some.set(64, false);
        some.set(1000, false);
        assert!(some.has(63) && !some.has(64) && !some.has(5000));
        some.clear();
        assert!(!some.has(63));
    }
}
