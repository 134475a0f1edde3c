//! Shares of a fixed amount: bytes in flight, connections, places. A party may hold at most a fixed part, and never more than is left for
//! all others. So no party takes everything, and many parties together leave some for the next one. Tenants of the tiers that are shed
//! first hold at most half together, and those of all tiers that may be shed at most three quarters, however many keys they have.

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    hash::Hash,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
};

/// The default number of parts of which a party may hold one.
const PARTS: u64 = 4;

/// The party that a share counts towards.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Party {
    Tenant {
        name: Arc<str>,
        /// The order in which its tier is shed: 1 first, then 2, and 0 never.
        shed: u8,
    },
    /// A client's address, if no key is needed or none is known yet.
    Address(IpAddr),
    /// This server itself and its operators.
    Server,
}

/// A holder of shares, as far as the rules tell holders apart.
pub trait Holder: Clone + Eq + Hash {
    /// The order in which its tier is shed: 1 first, then 2, and 0 never.
    fn shed(&self) -> u8 {
        0
    }
}

impl Holder for Party {
    fn shed(&self) -> u8 {
        match self {
            Self::Tenant { shed, .. } => *shed,
            Self::Address(_) | Self::Server => 0,
        }
    }
}

impl Party {
    /// The party of an address. For IPv6, which assigns whole networks, a network of 64 bits is one party.
    pub fn of_address(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
            address => address,
        })
    }
}

/// The reason why an amount is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The party already holds its share.
    Own,
    /// Others hold everything, while the party itself holds nothing.
    Total,
}

impl Refused {
    pub fn name(self) -> &'static str {
        match self {
            Self::Own => "own",
            Self::Total => "total",
        }
    }
}

/// A fixed amount, and how much of it each party holds.
#[derive(Debug)]
pub struct Shares<P> {
    total: u64,
    /// The most that one party may hold. If it equals the total, there are no shares.
    most: u64,
    used: u64,
    /// The part of `used` that holders have whose tier may be shed, and the part of that which those have that are shed first.
    used_by_shed: u64,
    used_by_first: u64,
    held: HashMap<P, u64>,
}

impl<P: Holder> Shares<P> {
    pub fn new(total: u64, most: u64) -> Self {
        Self { total, most: most.min(total), used: 0, used_by_shed: 0, used_by_first: 0, held: HashMap::new() }
    }

    /// Allows each party a quarter, or `least` if that is more.
    pub fn quarters(total: u64, least: u64) -> Self {
        Self::new(total, (total / PARTS).max(least))
    }

    pub fn take(&mut self, party: &P, amount: u64) -> Result<(), Refused> {
        let (held, left) = (self.held.get(party).copied().unwrap_or(0), self.total - self.used);
        let may_hold = if self.most == self.total { held + left } else { self.most.min(left) };
        if held.saturating_add(amount) > may_hold || amount > self.left_to_tier(party.shed()) {
            return Err(if held == 0 && amount <= self.most { Refused::Total } else { Refused::Own });
        }
        if amount > 0 {
            *self.held.entry(party.clone()).or_default() += amount;
            self.change(party, |used| *used += amount);
        }
        Ok(())
    }

    /// The amount that the tier of a holder may still take, together with those that are shed before it. One holder's most is always
    /// within it.
    fn left_to_tier(&self, shed: u8) -> u64 {
        let left = |part: u64, used: u64| part.max(self.most).saturating_sub(used);
        let all = left(self.total - self.total / PARTS, self.used_by_shed);
        match shed {
            0 => u64::MAX,
            1 => all.min(left(self.total / 2, self.used_by_first)),
            _ => all,
        }
    }

    /// Changes all sums that a holder's amount is part of.
    fn change(&mut self, party: &P, change: impl Fn(&mut u64)) {
        change(&mut self.used);
        if party.shed() > 0 {
            change(&mut self.used_by_shed);
        }
        if party.shed() == 1 {
            change(&mut self.used_by_first);
        }
    }

    /// Takes an amount back from a party.
    pub fn give(&mut self, party: &P, amount: u64) {
        let Some(held) = self.held.get_mut(party) else { return };
        let amount = amount.min(*held);
        *held -= amount;
        if *held == 0 {
            self.held.remove(party);
        }
        self.change(party, |used| *used -= amount);
    }

    pub fn used(&self) -> u64 {
        self.used
    }

    /// Panics if the sums are wrong. Tests call it after every step.
    #[cfg(test)]
    fn check_integrity(&self) {
        let sum = |of: fn(u8) -> bool| self.held.iter().filter(|(party, _)| of(party.shed())).map(|(_, held)| held).sum::<u64>();
        assert_eq!((self.used, self.used_by_shed, self.used_by_first), (sum(|_| true), sum(|shed| shed > 0), sum(|shed| shed == 1)));
        assert!(self.used <= self.total && self.held.values().all(|&held| 0 < held && held <= self.most));
    }
}

/// Shares that several threads take from.
#[derive(Clone, Debug)]
pub struct Pool(Arc<Mutex<Shares<Party>>>);

impl Pool {
    pub fn new(shares: Shares<Party>) -> Self {
        Self(Arc::new(Mutex::new(shares)))
    }

    /// Takes an amount, until the returned share is dropped.
    pub fn take(&self, party: Party, amount: u64) -> Result<Share, Refused> {
        self.0.lock().take(&party, amount)?;
        Ok(Share { pool: self.clone(), party, amount })
    }

    /// The amount that all parties together hold.
    pub fn used(&self) -> u64 {
        self.0.lock().used()
    }
}

/// An amount that a party holds until it is dropped.
#[derive(Debug)]
pub struct Share {
    pool: Pool,
    party: Party,
    amount: u64,
}

impl Share {
    pub fn amount(&self) -> u64 {
        self.amount
    }

    /// Raises the amount to at least this.
    pub fn grow_to(&mut self, amount: u64) -> Result<(), Refused> {
        if let Some(more) = amount.checked_sub(self.amount).filter(|more| *more > 0) {
            self.pool.0.lock().take(&self.party, more)?;
            self.amount = amount;
        }
        Ok(())
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.pool.0.lock().give(&self.party, self.amount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl Holder for &str {}

    /// A holder's number and its tier.
    impl Holder for (u32, u8) {
        fn shed(&self) -> u8 {
            self.1
        }
    }

    #[test]
    fn a_thousand_keys_of_a_tier_leave_room_for_those_that_pay() {
        let mut shares = Shares::quarters(100, 0);
        let mut flood = |shed| (0..1000).map(|key| u64::from(shares.take(&(key, shed), 1).is_ok())).sum::<u64>();
        assert_eq!((flood(1), flood(2), flood(0)), (50, 25, 25));
        assert_eq!(shares.take(&(7, 1), 1), Err(Refused::Own));
        assert_eq!(shares.take(&(1001, 1), 1), Err(Refused::Total));
        shares.give(&(7, 1), 1);
        assert_eq!(shares.take(&(1001, 1), 1), Ok(()));
        shares.check_integrity();
        let mut body = Shares::quarters(8, 8);
        assert_eq!(body.take(&(0, 1), 8), Ok(()), "the largest that one may hold");
    }

    #[test]
    fn nobody_takes_more_than_a_part_and_nobody_takes_the_last() {
        let mut shares = Shares::quarters(100, 0);
        assert_eq!(shares.take(&"flood", 25), Ok(()));
        assert_eq!(shares.take(&"flood", 1), Err(Refused::Own), "a quarter is the most");
        assert_eq!(shares.take(&"b", 25), Ok(()));
        assert_eq!(shares.take(&"c", 25), Ok(()));
        assert_eq!(shares.take(&"d", 25), Ok(()), "a quarter is left, and nobody else wants it");
        assert_eq!(shares.take(&"e", 1), Err(Refused::Total));
        shares.give(&"flood", 20);
        assert_eq!(shares.take(&"e", 10), Ok(()));
        assert_eq!(shares.take(&"e", 1), Err(Refused::Own), "it holds as much as is left");
        shares.check_integrity();
    }

    #[test]
    fn an_amount_above_the_most_is_refused_to_the_party_that_asks() {
        let mut shares = Shares::quarters(100, 40);
        assert_eq!(shares.take(&"a", 41), Err(Refused::Own));
        assert_eq!(shares.take(&"a", 40), Ok(()));
    }

    #[test]
    fn a_party_that_may_hold_everything_does() {
        let mut shares = Shares::quarters(2, 64);
        assert_eq!((shares.take(&"proxy", 1), shares.take(&"proxy", 1)), (Ok(()), Ok(())));
        assert_eq!((shares.take(&"proxy", 1), shares.take(&"other", 1)), (Err(Refused::Own), Err(Refused::Total)));
    }

    #[test]
    fn a_share_ends_with_its_holder_and_grows_with_what_it_is_for() {
        let pool = Pool::new(Shares::quarters(100, 0));
        let mut share = pool.take(Party::Server, 5).unwrap();
        share.grow_to(20).unwrap();
        share.grow_to(10).unwrap();
        assert_eq!((pool.used(), share.grow_to(26)), (20, Err(Refused::Own)));
        let others: Vec<_> = ["a", "b", "c"].map(|name| pool.take(Party::Tenant { name: name.into(), shed: 0 }, 25).unwrap()).into();
        assert_eq!(share.grow_to(20), Ok(()), "less is left than it holds, and it wants no more");
        drop(others);
        drop(share);
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn a_network_of_ipv6_is_one_party() {
        let party = |address: &str| Party::of_address(address.parse().unwrap());
        assert_eq!(party("2001:db8:1:2:3::4"), party("2001:db8:1:2:ffff::1"));
        assert_ne!(party("2001:db8:1:2::1"), party("2001:db8:1:3::1"));
        assert_eq!(party("::ffff:10.0.0.1"), party("10.0.0.1"));
        assert_ne!(party("10.0.0.1"), party("10.0.0.2"));
    }

    proptest! {
        #[test]
        fn the_books_balance_and_a_newcomer_finds_something(steps in prop::collection::vec((0..8_u32, 1..40_u64, any::<bool>()), 1..200)) {
            let mut shares = Shares::quarters(1000, 0);
            for (number, amount, gives) in steps {
                let party = (number, (number % 3) as u8);
                if gives {
                    shares.give(&party, amount);
                } else {
                    let _ = shares.take(&party, amount);
                }
                shares.check_integrity();
                if shares.used() < 1000 {
                    prop_assert_eq!(shares.take(&(255, 0), 1), Ok(()));
                    shares.give(&(255, 0), 1);
                }
            }
        }
    }
}
