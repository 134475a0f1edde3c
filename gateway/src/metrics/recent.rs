//! The last choices that ended: a bounded ring, numbered, so that a viewer can ask for new ones.

use crate::metrics::usage::TidemillUsage;
use parking_lot::Mutex;
use serde::Serialize;
use std::{collections::VecDeque, sync::Arc, time::Instant};

/// The number of choices kept: a viewer that falls further behind misses some.
const KEPT_MAX: usize = 64;

/// A choice that ended normally.
#[derive(Debug, Serialize)]
pub struct FinishedRequest {
    #[serde(skip)]
    pub at: Instant,
    pub prompt_tokens: u64,
    pub completion_tokens: u32,
    pub ttft_ms: f64,
    /// `None` if there was only one token.
    pub tpot_ms: Option<f64>,
    /// The scheduler's prediction; `None` if the choice never had a place.
    pub ttft_predicted_ms: Option<f64>,
    pub path: TidemillUsage,
}

#[derive(Debug, Default)]
pub struct Recent(Mutex<Ring>);

#[derive(Debug, Default)]
struct Ring {
    kept: VecDeque<Arc<FinishedRequest>>,
    /// The number of the next choice.
    next: u64,
}

impl Recent {
    pub fn push(&self, request: FinishedRequest) {
        let mut ring = self.0.lock();
        if ring.kept.len() == KEPT_MAX {
            ring.kept.pop_front();
        }
        ring.kept.push_back(Arc::new(request));
        ring.next += 1;
    }

    /// Returns the choices with number `from` and later that are still kept, oldest first, and the number to ask from next time.
    pub fn since(&self, from: u64) -> (Vec<Arc<FinishedRequest>>, u64) {
        let ring = self.0.lock();
        let new = usize::try_from(ring.next.saturating_sub(from)).unwrap_or(usize::MAX).min(ring.kept.len());
        (ring.kept.iter().skip(ring.kept.len() - new).cloned().collect(), ring.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(prompt_tokens: u64) -> FinishedRequest {
        FinishedRequest {
            at: Instant::now(),
            prompt_tokens,
            completion_tokens: 1,
            ttft_ms: 1.0,
            tpot_ms: None,
            ttft_predicted_ms: None,
            path: TidemillUsage::default(),
        }
    }

    fn prompts(requests: &[Arc<FinishedRequest>]) -> Vec<u64> {
        requests.iter().map(|request| request.prompt_tokens).collect()
    }

    #[test]
    fn each_is_told_once_and_old_ones_are_forgotten() {
        let recent = Recent::default();
        assert_eq!(recent.since(0).1, 0);
        (1..=3).for_each(|n| recent.push(request(n)));
        let (all, next) = recent.since(0);
        assert_eq!((prompts(&all), next), (vec![1, 2, 3], 3));
        assert!(recent.since(next).0.is_empty());
        recent.push(request(4));
        assert_eq!(prompts(&recent.since(next).0), [4]);

        (5..=1000).for_each(|n| recent.push(request(n)));
        let (all, next) = recent.since(4);
        assert_eq!((all.len(), all[0].prompt_tokens, next), (KEPT_MAX, 1001 - KEPT_MAX as u64, 1000));
        assert!(recent.since(u64::MAX).0.is_empty());
    }
}
