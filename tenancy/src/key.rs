//! API keys. A client holds a [`Secret`]; the server stores its prefix, which names it, and a digest, which verifies it.
//!
//! A secret is 256 random bits, so a plain digest is enough: there is nothing to guess that a slow hash would protect.

use serde::{Deserialize, Serialize};
use std::fmt;
use subtle::ConstantTimeEq;

const START: &str = "tm_";
/// The length of a secret's random part, in hexadecimal digits.
const RANDOM_DIGITS: usize = 64;
/// The number of digits that are not secret: they name the key in lists, logs and records. 208 secret bits are left.
const PREFIX_DIGITS: usize = 12;

/// An API key as a client sends it. Shown once, when the key is made, and never formatted.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Makes a secret from `random` bytes of the system's generator.
    pub fn new(random: [u8; 32]) -> Self {
        Self(START.chars().chain(random.iter().flat_map(|byte| hex(*byte))).collect())
    }

    /// Parses an API key. Returns `None` for any other text.
    pub fn parse(sent: &str) -> Option<Self> {
        let digits = sent.strip_prefix(START)?;
        let is_hex = digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        (digits.len() == RANDOM_DIGITS && is_hex).then(|| Self(sent.to_owned()))
    }

    /// The key's id.
    pub fn prefix(&self) -> &str {
        &self.0[..START.len() + PREFIX_DIGITS]
    }

    pub fn digest(&self) -> Digest {
        Digest(blake3::derive_key("tidemill api key v1", self.0.as_bytes()))
    }

    /// The secret itself, for the one answer that gives the key to its owner.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({}…)", self.prefix())
    }
}

fn hex(byte: u8) -> [char; 2] {
    [byte >> 4, byte & 15].map(|digit| char::from_digit(digit.into(), 16).expect("below 16"))
}

/// The digest of a secret. Compared in constant time.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 32]);

impl PartialEq for Digest {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Digest {}

/// The digest is not shown either: a reader of logs should not get a value to compare guesses with.
impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Digest(…)")
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.0.iter().flat_map(|byte| hex(*byte)).collect()
    }
}

impl TryFrom<String> for Digest {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let byte = |at: usize| text.get(2 * at..2 * at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        let mut bytes = [0; 32];
        for (at, place) in bytes.iter_mut().enumerate() {
            *place = byte(at).ok_or("a digest has 64 hexadecimal digits")?;
        }
        if text.len() == 64 { Ok(Self(bytes)) } else { Err("a digest has 64 hexadecimal digits") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_as_it_was_made() {
        let secret = Secret::new([0xa5; 32]);
        assert_eq!(secret.reveal(), format!("tm_{}", "a5".repeat(32)));
        assert_eq!(Secret::parse(secret.reveal()), Some(secret.clone()));
        assert_eq!(secret.prefix(), "tm_a5a5a5a5a5a5");
        for other in ["", "tm_", "sk-1", &secret.reveal()[1..], &format!("{}0", secret.reveal()), &secret.reveal().to_uppercase()] {
            assert_eq!(Secret::parse(other), None, "{other}");
        }
        assert_eq!(Secret::parse(&format!("tm_{}é", "a".repeat(62))), None);
    }

    #[test]
    fn a_digest_tells_keys_apart_and_survives_being_kept() {
        let digest = Secret::new([1; 32]).digest();
        assert_ne!(digest, Secret::new([2; 32]).digest());
        let kept = serde_json::to_string(&digest).unwrap();
        assert_eq!(serde_json::from_str::<Digest>(&kept).unwrap(), digest);
        for wrong in ["\"\"", "\"zz\"", "\"é\"", &kept.replace('"', "\"0").replace("\"0\"", "\"")] {
            assert!(serde_json::from_str::<Digest>(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn nothing_that_is_formatted_shows_a_secret() {
        let secret = Secret::new([0x5a; 32]);
        let shown = format!("{secret:?} {:?}", secret.digest());
        assert!(!shown.contains(&"5a".repeat(7)), "{shown}");
    }
}
