//! Tenants that are served in some regions only: their requests are answered, and their data is stored, nowhere else.

use std::collections::BTreeMap;

/// The regions of each pinned tenant, as seen from one of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pins {
    /// The region that this cluster is.
    pub here: String,
    pub regions: BTreeMap<String, Vec<String>>,
}

impl Pins {
    /// The regions in which a tenant is served; `None` if it is served in all.
    pub fn of(&self, tenant: Option<&str>) -> Option<&[String]> {
        self.regions.get(tenant?).map(Vec::as_slice)
    }

    pub fn allow(&self, tenant: Option<&str>, region: &str) -> bool {
        self.of(tenant).is_none_or(|regions| regions.iter().any(|allowed| allowed == region))
    }

    pub fn allow_here(&self, tenant: &str) -> bool {
        self.allow(Some(tenant), &self.here)
    }
}
