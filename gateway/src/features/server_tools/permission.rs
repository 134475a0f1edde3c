//! Permission to use a tool: it may cost an operator money, or reach data.

use tidemill_tenancy::tier::Tier;

/// The callers that may use a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Permission {
    Everyone,
    /// All tenants but those of the tier that is shed first, whose keys cost nothing.
    Paying,
    /// The tenants of these tiers, and these tenants.
    Of {
        tiers: Vec<String>,
        tenants: Vec<String>,
    },
}

/// The client that names a tool; without a tier if no key is needed, or if it is an operator.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asker<'a> {
    pub tenant: Option<&'a str>,
    pub tier: Option<&'a Tier>,
}

impl Permission {
    /// The permission that settings describe; by default that of those who pay.
    pub fn of(tiers: Option<Vec<String>>, tenants: Option<Vec<String>>) -> Self {
        match (tiers, tenants) {
            (None, None) => Self::Paying,
            (tiers, tenants) => Self::Of { tiers: tiers.unwrap_or_default(), tenants: tenants.unwrap_or_default() },
        }
    }

    pub fn allows(&self, asker: &Asker<'_>) -> bool {
        let Some(tier) = asker.tier else { return true };
        match self {
            Self::Everyone => true,
            Self::Paying => !tier.is_shed_first(),
            Self::Of { tiers, tenants } => {
                tiers.contains(&tier.name) || asker.tenant.is_some_and(|tenant| tenants.iter().any(|allowed| allowed == tenant))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_tenancy::tier::Tiers;

    #[test]
    fn tiers_and_tenants_that_are_named_may_and_those_that_pay_by_default() {
        let tiers = Tiers::default();
        let may = |permission: &Permission| {
            ["free", "paid", "premium"]
                .map(|tier| permission.allows(&Asker { tenant: Some("acme"), tier: tiers.get(tier).map(|tier| &**tier) }))
        };
        let list = |name: &str| Some(vec![name.to_owned()]);
        assert_eq!(may(&Permission::Everyone), [true; 3]);
        assert_eq!(may(&Permission::of(None, None)), [false, true, true]);
        assert_eq!(may(&Permission::of(list("free"), None)), [true, false, false]);
        assert_eq!(may(&Permission::of(list("premium"), list("acme"))), [true; 3]);
        assert_eq!(may(&Permission::of(None, list("other"))), [false; 3]);
        assert!(Permission::of(None, list("other")).allows(&Asker::default()), "no key is needed");
    }
}
