//! The number of slots of a tier that each tenant has.

use crate::core::eviction::Use;
use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
};
use tidemill_proto::block::Tenant;

/// Slots of a tier by tenant. While there are others, a tenant that has its full share gets a slot only in exchange for its own least
/// recently used one, so it evicts no other tenant's blocks.
#[derive(Debug)]
pub(super) struct Shares {
    percent: u8,
    /// The most slots that one tenant may have.
    max: usize,
    /// The tenants' slots, or `None` if one tenant may have all of them.
    tenants: Option<HashMap<Tenant, Share>>,
}

#[derive(Debug, Default)]
struct Share {
    slots: usize,
    /// The tenant's candidates for leaving: (operation, place in its chain, slot).
    idle: BTreeSet<(u64, Reverse<u32>, u32)>,
}

impl Shares {
    pub(super) fn new(slots: usize, percent: u8) -> Self {
        let mut shares = Self { percent, max: 0, tenants: (percent < 100).then(HashMap::new) };
        shares.set_slots(slots);
        shares
    }

    /// Changes the number of the tier's slots. A tenant that has more than its share then keeps it, and gets no more.
    pub(super) fn set_slots(&mut self, slots: usize) {
        self.max = (slots * usize::from(self.percent) / 100).max(1);
    }

    /// Whether the tenant's next slot must be one of its own. A tenant that is alone may have all of them: the next one that comes takes its
    /// share from there.
    pub(super) fn is_full(&self, tenant: Tenant) -> bool {
        let is_alone = || self.tenants.as_ref().is_none_or(|tenants| tenants.keys().all(|other| *other == tenant));
        self.slots(tenant) >= self.max && !is_alone()
    }

    /// The tenant's slots; 0 if they are not counted.
    pub(super) fn slots(&self, tenant: Tenant) -> usize {
        self.tenants.as_ref().and_then(|tenants| tenants.get(&tenant)).map_or(0, |share| share.slots)
    }

    pub(super) fn gain(&mut self, tenant: Tenant) {
        if let Some(tenants) = &mut self.tenants {
            tenants.entry(tenant).or_default().slots += 1;
        }
    }

    pub(super) fn lose(&mut self, tenant: Tenant) {
        let Some(tenants) = &mut self.tenants else { return };
        let share = tenants.get_mut(&tenant).expect("what is lost was gained");
        share.slots -= 1;
        if share.slots == 0 {
            tenants.remove(&tenant);
        }
    }

    /// Sets whether the slot's block may leave. Idempotent.
    pub(super) fn set_idle(&mut self, tenant: Tenant, slot: u32, used: Use, idle: bool) {
        let Some(share) = self.tenants.as_mut().and_then(|tenants| tenants.get_mut(&tenant)) else { return };
        let rank = (used.at, Reverse(used.place), slot);
        if idle {
            share.idle.insert(rank);
        } else {
            share.idle.remove(&rank);
        }
    }

    /// The tenant's slot that should leave first.
    pub(super) fn oldest(&self, tenant: Tenant) -> Option<u32> {
        let share = self.tenants.as_ref()?.get(&tenant)?;
        share.idle.first().map(|&(.., slot)| slot)
    }

    /// Panics unless these are the tenants' slots, with the same ones free to leave.
    pub(super) fn check_integrity(&self, slots: impl Iterator<Item = (Tenant, u32, Use, bool)>) {
        let Some(tenants) = &self.tenants else { return };
        let mut expected: HashMap<Tenant, Share> = HashMap::new();
        for (tenant, slot, used, idle) in slots {
            let share = expected.entry(tenant).or_default();
            share.slots += 1;
            if idle {
                share.idle.insert((used.at, Reverse(used.place), slot));
            }
        }
        assert_eq!(expected.len(), tenants.len(), "a tenant is listed without a slot");
        for (tenant, share) in expected {
            assert_eq!((tenants[&tenant].slots, &tenants[&tenant].idle), (share.slots, &share.idle), "slots of {tenant:?}");
        }
    }
}
