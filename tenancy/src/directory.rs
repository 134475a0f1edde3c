//! All tenants and keys, in memory, to look up a key's owner without waiting. Fed by changes from the keeper.

use crate::{
    key::Secret,
    limits::Overrides,
    records::{Change, Key, Tenant},
};
use std::{collections::BTreeMap, sync::Arc};

/// An authenticated caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    pub tenant: Arc<str>,
    pub tier: Arc<str>,
    pub user: Option<Arc<str>>,
    /// The key's id; `None` if the caller has a signed token.
    pub key: Option<Arc<str>>,
    /// Limits that replace those of the tier.
    pub tenant_limits: Overrides,
    /// Limits of the key alone.
    pub key_limits: Overrides,
    /// The expiry of the signed token, in Unix seconds. Keys are looked up again instead.
    pub until: Option<u64>,
}

#[derive(Debug, Default)]
pub struct Directory {
    tenants: BTreeMap<String, Tenant>,
    keys: BTreeMap<String, Key>,
}

impl Directory {
    /// Applies a change, which may have been applied before.
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Tenant(tenant) => {
                self.tenants.insert(tenant.id.clone(), tenant);
            }
            Change::Key(key) => {
                self.keys.insert(key.id.clone(), key);
            }
        }
    }

    /// Authenticates a key. Returns `None` if there is no such key, or it is no longer valid, without telling which.
    pub fn authenticate(&self, now: u64, secret: &Secret) -> Option<Principal> {
        let key = self.keys.get(secret.prefix())?;
        let proven = key.digest == secret.digest();
        if proven { self.principal(now, &key.id) } else { None }
    }

    /// The owner of a key, without a proof: for work that was requested with it earlier.
    pub fn principal(&self, now: u64, key: &str) -> Option<Principal> {
        let key = self.keys.get(key).filter(|key| key.is_valid(now))?;
        let tenant = self.tenants.get(&key.tenant)?;
        Some(Principal {
            tenant: tenant.id.as_str().into(),
            tier: tenant.tier.as_str().into(),
            user: key.user.as_deref().map(Arc::from),
            key: Some(key.id.as_str().into()),
            tenant_limits: tenant.limits,
            key_limits: key.limits,
            until: None,
        })
    }

    /// Whether there ever was a key: revoking the last one does not open the gateway again.
    pub fn has_keys(&self) -> bool {
        !self.keys.is_empty()
    }

    pub fn tenant(&self, id: &str) -> Option<&Tenant> {
        self.tenants.get(id)
    }

    pub fn key(&self, id: &str) -> Option<&Key> {
        self.keys.get(id)
    }

    pub fn tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.tenants.values()
    }

    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.keys.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_opens_for_its_tenant_until_it_is_revoked_or_expires() {
        let secret = Secret::new([7; 32]);
        let tenant = Tenant {
            id: "acme".into(),
            tier: "paid".into(),
            limits: Overrides::default(),
            semantic_cache: false,
            erased: 0,
            erasures: Vec::new(),
            created: 1,
        };
        let key = Key {
            id: secret.prefix().into(),
            digest: secret.digest(),
            tenant: "acme".into(),
            user: Some("ann".into()),
            name: None,
            limits: Overrides::default(),
            created: 1,
            expires: Some(100),
            revoked: None,
        };
        let mut directory = Directory::default();
        assert!(!directory.has_keys());
        directory.apply(Change::Key(key.clone()));
        assert_eq!(directory.authenticate(2, &secret), None, "its tenant is not known here");
        directory.apply(Change::Tenant(tenant));
        let principal = directory.authenticate(99, &secret).unwrap();
        assert_eq!((&*principal.tenant, &*principal.tier, principal.user.as_deref()), ("acme", "paid", Some("ann")));
        assert_eq!(directory.authenticate(100, &secret), None);

        let mut same_prefix = [7; 32];
        same_prefix[31] = 8;
        assert_eq!(Secret::new(same_prefix).prefix(), secret.prefix());
        assert_eq!(directory.authenticate(2, &Secret::new(same_prefix)), None);

        directory.apply(Change::Key(Key { revoked: Some(3), ..key }));
        assert_eq!(directory.authenticate(2, &secret), None);
        assert!(directory.has_keys());
    }
}
