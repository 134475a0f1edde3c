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
    /// The number of erasures so far. Each makes the tenant's salt another one, so that nothing is found that was computed before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub erased: u64,
    /// The latest erasures, which every coordinator carries out on the data that it keeps itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub erasures: Vec<Erasure>,
    /// The time of creation, in Unix seconds, as all times here.
    pub created: u64,
}

/// An order to erase the data of a tenant, or of one of its users.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Erasure {
    pub id: String,
    /// `None` for the whole tenant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    pub at: u64,
    /// The coordinator that was told, which erases what all of them share.
    pub by: String,
}

/// The number of erasures that a record keeps.
pub const ERASURES_MAX: usize = 256;
/// The age from which an erasure is not kept: a coordinator that was away for longer must not come back with its old data.
pub const ERASURE_KEPT_S: u64 = 90 * 24 * 3600;

impl Tenant {
    /// Adds an order to erase. Refused if the record has no room for it.
    pub fn order_erasure(&mut self, erasure: Erasure) -> Result<(), String> {
        self.erasures.retain(|earlier| earlier.at.saturating_add(ERASURE_KEPT_S) > erasure.at);
        if self.erasures.len() >= ERASURES_MAX {
            return Err(format!(
                "tenant `{}` had {ERASURES_MAX} erasures within {} days, and a record has room for no more: erase the whole tenant, or wait",
                self.id,
                ERASURE_KEPT_S / 86_400
            ));
        }
        if erasure.user.is_none() {
            // It includes all earlier ones, also where these were not carried out yet.
            self.erasures.clear();
        }
        self.erased += 1;
        self.erasures.push(erasure);
        Ok(())
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
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
    fn erasures_are_kept_for_a_while_and_are_bounded() {
        let mut tenant = Tenant {
            id: "acme".into(),
            tier: "free".into(),
            limits: Overrides::default(),
            semantic_cache: false,
            erased: 0,
            erasures: Vec::new(),
            created: 1,
        };
        let plain = serde_json::to_string(&tenant).unwrap();
        assert!(!plain.contains("eras") && serde_json::from_str::<Tenant>(&plain).unwrap() == tenant, "{plain}");
        let of = |user: Option<&str>, at| Erasure { id: format!("e{at}"), user: user.map(str::to_owned), at, by: "c".into() };
        for at in 0..ERASURES_MAX as u64 {
            tenant.order_erasure(of(Some("ann"), at)).unwrap();
        }
        assert!(tenant.order_erasure(of(Some("ann"), 300)).unwrap_err().contains("no more"));
        tenant.order_erasure(of(Some("ann"), ERASURE_KEPT_S + 10)).unwrap();
        assert_eq!((tenant.erasures.len(), tenant.erased), (ERASURES_MAX - 10, 257));
        tenant.erasures.truncate(3);
        tenant.order_erasure(of(None, ERASURE_KEPT_S)).unwrap();
        assert_eq!((tenant.erasures.len(), tenant.erased), (1, 258));
        assert_eq!(serde_json::from_str::<Tenant>(&serde_json::to_string(&tenant).unwrap()).unwrap(), tenant);
    }

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
