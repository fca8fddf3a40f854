//! Keys: 256 random bits each. Only their SHA-256 is kept: with that much chance in a key, a slow hash would protect nothing more.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::digest::{SHA256, digest};
use ring::rand::{SecureRandom, SystemRandom};

/// What every key begins with, so that one in the wrong place can be recognised.
const PREFIX: &str = "hw-";

/// The SHA-256 of a key.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// Of what a client shows.
    pub fn of(key: &[u8]) -> KeyHash {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, key).as_ref());
        KeyHash(hash)
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Enough to tell keys apart.
impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyHash({:02x}{:02x}..)", self.0[0], self.0[1])
    }
}

/// A text is no SHA-256.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected 64 hexadecimal digits")]
pub struct NotAHash;

impl FromStr for KeyHash {
    type Err = NotAHash;

    fn from_str(text: &str) -> Result<KeyHash, NotAHash> {
        let digits: Vec<u8> = text.chars().map(|digit| digit.to_digit(16).map(|digit| digit as u8)).collect::<Option<_>>().ok_or(NotAHash)?;
        let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
        if digits.len() != 64 {
            return Err(NotAHash);
        }
        bytes.try_into().map(KeyHash).map_err(|_| NotAHash)
    }
}

/// A key that was just made: the only time that it is seen.
pub struct NewKey(String);

/// The system has no chance to give.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the system gives no random numbers")]
pub struct NoChance;

impl NewKey {
    /// Makes one.
    ///
    /// # Errors
    /// There is no source of random numbers.
    pub fn random() -> Result<NewKey, NoChance> {
        let mut bits = [0; 32];
        SystemRandom::new().fill(&mut bits).map_err(|_| NoChance)?;
        Ok(NewKey(format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bits))))
    }

    /// What its owner is to be told.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    pub fn hash(&self) -> KeyHash {
        KeyHash::of(self.0.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_is_written_and_read() {
        // The example of FIPS 180-2.
        let hash = KeyHash::of(b"abc");
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!((hash.to_string().as_str(), text.parse()), (text, Ok(hash)));
        assert_eq!(text.to_uppercase().parse(), Ok(hash));
        for wrong in ["", "ba78", &text[1..], &format!("{text}0"), &text.replace('f', "g")] {
            assert_eq!(wrong.parse::<KeyHash>(), Err(NotAHash), "{wrong}");
        }
        assert_eq!(format!("{hash:?}"), "KeyHash(ba78..)");
    }

    #[test]
    fn keys_are_long_and_never_the_same() {
        let (one, other) = (NewKey::random().unwrap(), NewKey::random().unwrap());
        assert!(one.reveal().starts_with(PREFIX) && one.reveal().len() == 3 + 43, "{}", one.reveal());
        assert_ne!(one.reveal(), other.reveal());
        assert_eq!(one.hash(), KeyHash::of(one.reveal().as_bytes()));
    }
}
