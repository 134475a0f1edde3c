//! Tenants and keys as they are stored. A [`Change`] replaces the whole record with the same id, so that changes may be applied twice, and
//! the last one counts. Records are not deleted: a revoked key stays, with its owner.

use crate::{key::Digest, limits::Overrides};
use serde::{Deserialize, Serialize};
use std::fmt::Display;

const NAME_BYTES_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    /// The tenant's name: see [`check_name`].
    pub id: String,
    pub tier: String,
    #[serde(default, skip_serializing_if = "Overrides::is_empty")]
    pub limits: Overrides,
    /// Whether it has opted in to answers of similar questions.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub semantic_cache: bool,
    /// The time of creation, in Unix seconds, as all times here.
    pub created: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// The prefix of its secret.
    pub id: String,
    pub digest: Digest,
    pub tenant: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// A name for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Limits of this key alone, in addition to the tenant's.
    #[serde(default, skip_serializing_if = "Overrides::is_empty")]
    pub limits: Overrides,
    pub created: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<u64>,
}

impl Key {
    pub fn is_valid(&self, now: u64) -> bool {
        self.revoked.is_none() && self.expires.is_none_or(|expires| now < expires)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Change {
    Tenant(Tenant),
    Key(Key),
}

/// Checks a name. Tenants, users and keys are named in lists, logs, and as owners of stored data: names are short, and have no white space.
pub fn check_name(what: &str, name: &str) -> Result<(), String> {
    let good =
        (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.@:|".contains(&byte));
    let wrong = |reason: &dyn Display| format!("the name of a {what} is 1 to {NAME_BYTES_MAX} letters, digits, or `-_.@:|`: {reason}");
    if good { Ok(()) } else { Err(wrong(&format!("`{}` is not", name.escape_debug()))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_plain() {
        for good in ["acme", "auth0|6f", "a@b.c", "A-1_2"] {
            assert_eq!(check_name("tenant", good), Ok(()), "{good}");
        }
        for wrong in ["", "a b", "é", "a/b", &"x".repeat(65), "a\nb"] {
            assert!(check_name("tenant", wrong).is_err(), "{wrong}");
        }
    }
}
