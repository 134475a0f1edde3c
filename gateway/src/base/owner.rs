//! The owner of all data that a request stores: conversations, responses, memories, files, batches, replays, feedback.

/// A tenant, or one of its users. An owner sees no data of any other owner, not even of its own tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(pub String);

impl Owner {
    /// The owner for a tenant's user, or for the tenant itself if its key or token names no user. If no key is needed, all clients are one
    /// owner.
    pub fn of(tenant: Option<&str>, user: Option<&str>) -> Self {
        // No tenant's name contains a slash.
        Self(tenant.into_iter().chain(user).collect::<Vec<_>>().join("/"))
    }

    pub fn tenant(&self) -> &str {
        tenant_of(&self.0)
    }
}

/// The owners whose data is erased: a tenant with all its users, or one user of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whose {
    pub tenant: String,
    pub user: Option<String>,
}

impl Whose {
    pub fn covers(&self, owner: &str) -> bool {
        match self.user {
            Some(_) => owner == self.name(),
            None => tenant_of(owner) == self.tenant,
        }
    }

    /// The name of the user as an owner, or of the tenant.
    pub fn name(&self) -> String {
        Owner::of(Some(&self.tenant), self.user.as_deref()).0
    }
}

/// Whether data is removed, or only counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Erasing {
    Count,
    Remove,
}

/// The tenant in an owner's name: users share its limits.
pub fn tenant_of(owner: &str) -> &str {
    owner.split_once('/').map_or(owner, |(tenant, _)| tenant)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_a_user_or_a_whole_tenant() {
        let names = [(None, None, "", ""), (Some("acme"), None, "acme", "acme"), (Some("acme"), Some("ann"), "acme/ann", "acme")];
        for (tenant, user, name, of) in names {
            let owner = Owner::of(tenant, user);
            assert_eq!((owner.0.as_str(), owner.tenant()), (name, of));
        }
        assert_eq!(tenant_of("acme/a/b"), "acme");
    }

    #[test]
    fn a_user_of_the_same_name_is_another_one() {
        let whose = |tenant: &str, user: Option<&str>| Whose { tenant: tenant.into(), user: user.map(str::to_owned) };
        let covered =
            |whose: Whose| ["acme", "acme/ann", "acme/ann/x", "acme/annie", "acme2", "acme2/ann", ""].map(|owner| whose.covers(owner));
        assert_eq!(covered(whose("acme", Some("ann"))), [false, true, false, false, false, false, false]);
        assert_eq!(covered(whose("acme", None)), [true, true, true, true, false, false, false]);
    }
}
