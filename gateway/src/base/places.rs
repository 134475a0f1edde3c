//! Shares that are waited for, instead of being refused.

use super::shares::{Party, Pool, Share, Shares};
use std::{pin::pin, sync::Arc};
use tokio::sync::Notify;

/// Places for one thing at a time each.
#[derive(Clone, Debug)]
pub struct Places {
    pool: Pool,
    /// Notifies those that wait when a place is given back.
    given: Arc<Notify>,
}

/// A place, until it is dropped.
#[derive(Debug)]
pub struct Place {
    share: Option<Share>,
    given: Arc<Notify>,
}

impl Places {
    pub fn new(shares: Shares<Party>) -> Self {
        Self { pool: Pool::new(shares), given: Arc::default() }
    }

    /// Takes a place as soon as the rules allow it, in no order. The caller bounds the number of those that wait.
    pub async fn wait_for(&self, party: Party) -> Place {
        loop {
            let mut given = pin!(self.given.notified());
            // From here on, what is given back is not missed.
            given.as_mut().enable();
            if let Ok(share) = self.pool.take(party.clone(), 1) {
                return Place { share: Some(share), given: Arc::clone(&self.given) };
            }
            given.await;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // It is given back before others look for it.
        drop(self.share.take());
        self.given.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn those_that_wait_get_what_is_given_back() {
        let places = Places::new(Shares::new(4, 3));
        let tenant = |name: &str| Party::Tenant { name: name.into(), shed: 0 };
        let flood = [places.wait_for(tenant("flood")).await, places.wait_for(tenant("flood")).await];
        let more = tokio::spawn({
            let (places, flood) = (places.clone(), tenant("flood"));
            async move { drop(places.wait_for(flood).await) }
        });
        let quiet = places.wait_for(tenant("quiet")).await;
        tokio::task::yield_now().await;
        assert!(!more.is_finished(), "it holds as much as was left");
        drop(flood);
        more.await.unwrap();
        drop(quiet);
        assert_eq!(places.pool.used(), 0);
    }
}
