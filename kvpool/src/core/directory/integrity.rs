//! The check that a directory's books balance.

use super::{Directory, DramUsage, Due, Published, Rank, Reserved, Slot, State, tiers::NODE};
use std::collections::{BTreeSet, HashMap, HashSet};
use tidemill_proto::pool::SlotRef;

impl Directory {
    /// Panics if the books do not balance. For tests, after every step; takes time proportional to the slots.
    pub fn check_integrity(&self) {
        let (mut usage, mut clean) = (DramUsage::default(), 0);
        let free: HashSet<u32> = self.free.iter().copied().collect();
        assert_eq!(free.len(), self.free.len(), "a slot is free twice");
        let mut leases: HashMap<SlotRef, u32> = HashMap::new();
        for (client, id, lease) in self.leases.iter() {
            assert_eq!(self.timers.get(lease.timer), Some(&Due::Lease(client, id)), "a lease has no deadline");
            lease.blocks.iter().for_each(|&(at, _)| *leases.entry(at).or_default() += 1);
        }
        for (slot, Slot { generation, state }) in (0u32..).zip(&self.slots) {
            let listed = free.contains(&slot);
            let candidate = self.policy.is_candidate(slot);
            match state {
                State::Absent => assert!(!listed && !candidate, "slot {slot} is not there"),
                State::Free => {
                    assert!(listed && !candidate, "slot {slot} is free");
                    usage.free += 1;
                }
                State::Reserved(Reserved { key, writer, timer, .. }) => {
                    assert!(!listed && !candidate, "slot {slot} is reserved");
                    assert_eq!(self.by_key.get(key), Some(&slot), "the key of reserved slot {slot} leads elsewhere");
                    assert!(self.reserved[writer].contains(&slot), "slot {slot} is not listed under its writer");
                    assert_eq!(self.timers.get(*timer), Some(&Due::Reservation(slot)), "the reservation of {slot} has no deadline");
                    usage.reserved += 1;
                }
                State::Published(published) => {
                    let at = SlotRef { slot, generation: *generation };
                    assert!(!listed, "slot {slot} is published");
                    assert_eq!(self.by_key.get(&published.key), Some(&slot), "the key of published slot {slot} leads elsewhere");
                    assert!(!self.waits.is_awaited(&published.key), "someone waits for what is there");
                    assert_eq!(published.leases, leases.get(&at).copied().unwrap_or(0), "leases of slot {slot} are miscounted");
                    match published.rank {
                        Rank::Policy => assert_eq!(candidate, published.leases == 0, "slot {slot} may leave exactly if nobody leases it"),
                        Rank::Leaving => assert!(!candidate && published.leases == 0, "slot {slot} is leaving"),
                        Rank::Clean(number) => {
                            assert!(!candidate && published.leases == 0, "slot {slot} is clean");
                            assert_eq!(self.clean.get(&number), Some(&slot), "slot {slot} is not listed as clean");
                            assert!(self.on_disk(&published.key).is_some(), "slot {slot} is clean, and the disk has no copy");
                            clean += 1;
                        }
                    }
                    *(if published.leases == 0 { &mut usage.cached } else { &mut usage.leased }) += 1;
                }
                State::Quarantined => {
                    assert!(!listed && !candidate, "slot {slot} is quarantined");
                    usage.quarantined += 1;
                }
            }
        }
        assert_eq!(usage, self.usage, "slots are miscounted");
        self.check_present(&leases);
        self.shares.check_integrity((0..).zip(&self.slots).filter_map(|(slot, Slot { state, .. })| match *state {
            State::Reserved(Reserved { lineage, used, .. }) => Some((lineage.tenant, slot, used, false)),
            State::Published(Published { lineage, used, leases, .. }) => Some((lineage.tenant, slot, used, leases == 0)),
            State::Absent | State::Free | State::Quarantined => None,
        }));
        assert_eq!(clean, self.clean.len(), "a slot is listed as clean and is not");
        if let Some(disk) = &self.disk {
            disk.check_integrity(|at, key| self.published_at(at).is_some_and(|published| published.key == *key));
            let loading = self.reserved.get(&NODE).map_or(0, BTreeSet::len);
            assert_eq!(disk.loading(), loading, "a block that is being read has no slot, or no reader");
        }
        if let Some(catalog) = self.catalog() {
            catalog.check_integrity();
        }
        assert_eq!(self.by_key.len(), usage.reserved + usage.cached + usage.leased, "a key leads nowhere");
        assert_eq!(usage.reserved, self.reserved.values().map(BTreeSet::len).sum::<usize>(), "a writer lists what it did not reserve");
        self.leases.check_integrity();
        self.waits.check_integrity();
        for (client, call, get) in self.waits.iter() {
            assert_eq!(self.timers.get(get.timer), Some(&Due::Get(client, call)), "a get has no deadline");
        }
        let unfenced: Vec<u32> = self.unfenced.values().flatten().copied().collect();
        assert!(self.unfenced.values().all(|slots| !slots.is_empty()), "a client is being fenced for nothing");
        assert!(unfenced.iter().all(|&slot| matches!(self.slots[slot as usize].state, State::Quarantined)), "a fence is late");
        let timers = usage.reserved + usage.quarantined - unfenced.len() + self.leases.iter().count() + self.waits.iter().count();
        assert_eq!(self.timers.iter().count(), timers, "a timer is left over");
        let quarantined = self.timers.iter().filter(|due| matches!(due, Due::Quarantine(_))).count();
        assert_eq!(quarantined + unfenced.len(), usage.quarantined, "a quarantined slot waits for nothing");
    }
}
