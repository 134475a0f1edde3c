//! The one owner of everything that a request stores: conversations, responses, memories, files, batches, replays, opinions.

/// A tenant, or one of its users. Sees nothing of any other owner, not even of its own tenant's.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner(pub String);

impl Owner {
    /// A tenant's user, or the tenant itself where its key or token names no user. Where the door is open, all clients are one owner.
    pub fn of(tenant: Option<&str>, user: Option<&str>) -> Self {
        // No tenant's name has a slash.
        Self(tenant.into_iter().chain(user).collect::<Vec<_>>().join("/"))
    }

    pub fn tenant(&self) -> &str {
        tenant_of(&self.0)
    }
}

/// The tenant in an owner's name: users share what it may have.
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
}
