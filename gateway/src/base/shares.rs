//! Shares of a fixed amount: bytes in flight, connections, places. A party may hold at most a fixed part, and never more than is left for
//! all others. So no party takes everything, and many parties together leave some for the next one.

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
    Tenant(Arc<str>),
    /// A client's address, if no key is needed or none is known yet.
    Address(IpAddr),
    /// This server itself and its operators.
    Server,
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
    held: HashMap<P, u64>,
}

impl<P: Clone + Eq + Hash> Shares<P> {
    pub fn new(total: u64, most: u64) -> Self {
        Self { total, most: most.min(total), used: 0, held: HashMap::new() }
    }

    /// Allows each party a quarter, or `least` if that is more.
    pub fn quarters(total: u64, least: u64) -> Self {
        Self::new(total, (total / PARTS).max(least))
    }

    pub fn take(&mut self, party: &P, amount: u64) -> Result<(), Refused> {
        let (held, left) = (self.held.get(party).copied().unwrap_or(0), self.total - self.used);
        let may_hold = if self.most == self.total { held + left } else { self.most.min(left) };
        if held.saturating_add(amount) > may_hold {
            return Err(if held == 0 && amount <= self.most { Refused::Total } else { Refused::Own });
        }
        if amount > 0 {
            *self.held.entry(party.clone()).or_default() += amount;
            self.used += amount;
        }
        Ok(())
    }

    /// Takes an amount back from a party.
    pub fn give(&mut self, party: &P, amount: u64) {
        let Some(held) = self.held.get_mut(party) else { return };
        let amount = amount.min(*held);
        *held -= amount;
        self.used -= amount;
        if *held == 0 {
            self.held.remove(party);
        }
    }

    pub fn used(&self) -> u64 {
        self.used
    }

    /// Panics if the sums are wrong. Tests call it after every step.
    #[cfg(test)]
    fn check_integrity(&self) {
        assert_eq!(self.used, self.held.values().sum::<u64>());
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
        if let Some(more) = amount.checked_sub(self.amount) {
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
        fn the_books_balance_and_a_newcomer_finds_something(steps in prop::collection::vec((0..8_u8, 1..40_u64, any::<bool>()), 1..200)) {
            let mut shares = Shares::quarters(1000, 0);
            for (party, amount, gives) in steps {
                if gives {
                    shares.give(&party, amount);
                } else {
                    let _ = shares.take(&party, amount);
                }
                shares.check_integrity();
                if shares.used() < 1000 {
                    prop_assert_eq!(shares.take(&255, 1), Ok(()));
                    shares.give(&255, 1);
                }
            }
        }
    }
}
