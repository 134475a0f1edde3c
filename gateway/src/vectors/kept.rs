//! Vectors of tenants' texts, kept so that a text is not read again for each question that it is compared with.
//!
//! Bounded in bytes, which tenants [share](crate::base::room): the least recently used vector goes first, and a flood of texts displaces only
//! its own tenant's. A vector that was not used for a while goes, too: a deleted text's says something about it. A core: it has no clock.

use super::vector::Vector;
use crate::base::room::Shares;
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    time::Duration,
};

/// A digest that names a tenant.
pub type Tenant = [u8; 32];

/// A digest of a text, and of the encoder that reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TextKey([u8; 16]);

impl TextKey {
    pub fn new(encoder: &str, text: &str) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(encoder.len() as u64).to_le_bytes()).update(encoder.as_bytes()).update(text.as_bytes());
        Self(*hasher.finalize().as_bytes().first_chunk().expect("a digest has 32 bytes"))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The maximum size of all vectors together.
    pub bytes: u64,
    /// The time after its last use for which a vector is kept.
    pub keep: Duration,
}

#[derive(Debug)]
pub struct KeptVectors {
    limits: Limits,
    kept: HashMap<(Tenant, TextKey), Kept>,
    /// Kept texts, by tenant and last use.
    order: BTreeMap<(Tenant, u64), TextKey>,
    uses: u64,
    bytes: Shares<Tenant>,
}

#[derive(Debug)]
struct Kept {
    vector: Arc<Vector>,
    used: u64,
    used_at: Duration,
}

/// The approximate size of a kept vector besides its numbers.
const ENTRY_BYTES: u64 = 256;

impl KeptVectors {
    pub fn new(limits: Limits) -> Self {
        Self { limits, kept: HashMap::new(), order: BTreeMap::new(), uses: 0, bytes: Shares::default() }
    }

    /// Returns a text's vector, if it is kept.
    pub fn get(&mut self, tenant: Tenant, text: TextKey, now: Duration) -> Option<Arc<Vector>> {
        let kept = self.kept.get_mut(&(tenant, text))?;
        self.uses += 1;
        self.order.remove(&(tenant, kept.used));
        self.order.insert((tenant, self.uses), text);
        (kept.used, kept.used_at) = (self.uses, now);
        Some(Arc::clone(&kept.vector))
    }

    pub fn has(&self, tenant: Tenant, text: TextKey) -> bool {
        self.kept.contains_key(&(tenant, text))
    }

    /// Keeps a vector, unless it is larger than its tenant's share.
    pub fn put(&mut self, tenant: Tenant, text: TextKey, vector: Arc<Vector>, now: Duration) {
        let bytes = size(&vector);
        if bytes > self.limits.bytes {
            return;
        }
        if let Some(earlier) = self.kept.get(&(tenant, text)).map(|kept| kept.used) {
            self.remove((tenant, earlier));
        }
        while self.bytes.total() + bytes > self.limits.bytes {
            let losers = self.bytes.losers(self.limits.bytes, &tenant, bytes);
            let Some(oldest) = losers.iter().find_map(|loser| self.oldest(*loser)) else { return };
            self.remove(oldest);
        }
        self.uses += 1;
        self.bytes.add(&tenant, bytes);
        self.order.insert((tenant, self.uses), text);
        self.kept.insert((tenant, text), Kept { vector, used: self.uses, used_at: now });
    }

    /// Drops what was not used for too long.
    pub fn expire(&mut self, now: Duration) {
        let is_old = |kept: &Kept| now.saturating_sub(kept.used_at) > self.limits.keep;
        let old: Vec<_> = self.kept.iter().filter(|(_, kept)| is_old(kept)).map(|((tenant, _), kept)| (*tenant, kept.used)).collect();
        old.into_iter().for_each(|place| self.remove(place));
    }

    /// Drops all vectors of a tenant. Returns their number.
    pub fn forget(&mut self, tenant: Tenant) -> u64 {
        let held = self.held(tenant);
        while let Some(oldest) = self.oldest(tenant) {
            self.remove(oldest);
        }
        held
    }

    /// The number of a tenant's vectors.
    pub fn held(&self, tenant: Tenant) -> u64 {
        self.order.range((tenant, 0)..=(tenant, u64::MAX)).count() as u64
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.total()
    }

    /// The number of vectors.
    pub fn texts(&self) -> usize {
        self.kept.len()
    }

    fn oldest(&self, tenant: Tenant) -> Option<(Tenant, u64)> {
        self.order.range((tenant, 0)..=(tenant, u64::MAX)).next().map(|(place, _)| *place)
    }

    fn remove(&mut self, (tenant, used): (Tenant, u64)) {
        let text = self.order.remove(&(tenant, used)).expect("what is kept is in order");
        let kept = self.kept.remove(&(tenant, text)).expect("what is in order is kept");
        self.bytes.take(&tenant, size(&kept.vector));
    }

    #[cfg(test)]
    fn check_integrity(&self) {
        assert_eq!(self.kept.len(), self.order.len());
        assert!(self.order.iter().all(|((tenant, used), text)| self.kept[&(*tenant, *text)].used == *used));
        assert_eq!(self.bytes.total(), self.kept.values().map(|kept| size(&kept.vector)).sum::<u64>());
        assert!(self.bytes.total() <= self.limits.bytes);
    }
}

fn size(vector: &Vector) -> u64 {
    ENTRY_BYTES + vector.bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ME: Tenant = [1; 32];
    const THEM: Tenant = [2; 32];

    fn vector() -> Arc<Vector> {
        Arc::new(Vector::new(&[1.0; 44]).unwrap())
    }

    /// Room for ten vectors.
    fn ten() -> KeptVectors {
        KeptVectors::new(Limits { bytes: 3000, keep: Duration::from_secs(60) })
    }

    fn key(text: &str) -> TextKey {
        TextKey::new("encoder", text)
    }

    #[test]
    fn a_text_is_found_for_its_tenant_and_its_encoder_alone() {
        let mut kept = ten();
        kept.put(ME, key("a"), vector(), Duration::ZERO);
        assert!(kept.get(ME, key("a"), Duration::ZERO).is_some());
        assert!(kept.get(THEM, key("a"), Duration::ZERO).is_none());
        assert!(kept.get(ME, TextKey::new("encode", "ra"), Duration::ZERO).is_none(), "names and texts do not run together");
        assert_eq!((kept.forget(ME), kept.texts(), kept.bytes()), (1, 0, 0));
    }

    #[test]
    fn a_flood_displaces_only_itself() {
        let mut kept = ten();
        for n in 0..4 {
            kept.put(ME, key(&n.to_string()), vector(), Duration::ZERO);
        }
        for n in 0..100 {
            kept.put(THEM, key(&n.to_string()), vector(), Duration::ZERO);
            kept.check_integrity();
        }
        assert_eq!((kept.held(ME), kept.held(THEM)), (4, 6));
        assert!(kept.has(THEM, key("99")) && !kept.has(THEM, key("0")), "its oldest went");
    }

    #[test]
    fn what_is_not_used_goes() {
        let mut kept = ten();
        let at = Duration::from_secs;
        kept.put(ME, key("used"), vector(), at(0));
        kept.put(ME, key("unused"), vector(), at(0));
        kept.get(ME, key("used"), at(50));
        kept.expire(at(60));
        assert_eq!(kept.texts(), 2);
        kept.expire(at(61));
        assert!(kept.has(ME, key("used")) && !kept.has(ME, key("unused")));
        kept.check_integrity();
    }

    proptest! {
        #[test]
        fn sums_are_right_after_every_step(steps in prop::collection::vec((0u8..4, 0u8..3, 0u8..20), 0..200)) {
            let mut kept = ten();
            for (now, (what, tenant, text)) in steps.into_iter().enumerate() {
                let (tenant, text, now) = ([tenant; 32], key(&text.to_string()), Duration::from_secs(now as u64));
                match what {
                    0 => drop(kept.get(tenant, text, now)),
                    1 => kept.expire(now),
                    2 if text == key("0") => assert!(kept.forget(tenant) <= 10),
                    _ => kept.put(tenant, text, vector(), now),
                }
                kept.check_integrity();
            }
        }
    }
}
