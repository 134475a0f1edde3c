//! Prefetching weights while a tile is computed.

use crate::cpu::simd::Simd;

pub(crate) const CACHE_LINE: usize = 64;

/// Weights to prefetch, a little with each line of the panel.
#[derive(Clone, Copy)]
pub(crate) struct WeightPrefetch {
    next: *const u8,
    /// Bytes per line of the panel.
    step: usize,
}

impl WeightPrefetch {
    /// Prefetches for one more line, which has one or two cache lines. Three or more tiles take longer to compute than memory takes, so the
    /// first-level cache can receive the weights.
    #[inline(always)]
    pub(crate) fn issue<S: Simd>(&mut self, simd: S) {
        if self.step >= CACHE_LINE {
            simd.prefetch(self.next);
            if self.step > CACHE_LINE {
                simd.prefetch(self.next.wrapping_add(self.step / 2));
            }
        } else if self.step > 0 {
            simd.prefetch_near(self.next);
        }
        self.next = self.next.wrapping_add(self.step);
    }

    /// Prefetching for a panel that streams through once: the weights a little further on.
    #[inline(always)]
    pub(crate) fn within<P>(panel: &[P]) -> Self {
        Self { next: panel.as_ptr().cast::<u8>().wrapping_add(STREAM_AHEAD_BYTES), step: size_of::<P>() }
    }

    /// No prefetching, for a panel in the cache, like everything read with it.
    pub(crate) const NONE: Self = Self { next: std::ptr::null(), step: 0 };

    /// Prefetching for a panel of `len` lines that stays in the cache for several tiles: tile `nth` prefetches its share of the next panel.
    #[inline(always)]
    pub(crate) fn share_of<P>(next: *const P, len: usize, nth: usize, tiles: usize) -> Self {
        let start = len * size_of::<P>() * nth / tiles;
        Self { next: next.cast::<u8>().wrapping_add(start), step: size_of::<P>() / tiles }
    }
}

/// The distance of prefetching. Measured: 2 KiB are too little for memory with 100 ns latency, and 16 KiB are no better.
pub(crate) const STREAM_AHEAD_BYTES: usize = 8192;
