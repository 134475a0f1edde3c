//! Asking memory for weights ahead of their use.

use crate::cpu::simd::Simd;

pub(crate) const CACHE_LINE: usize = 64;

/// Weights to ask memory for while a tile is computed.
#[derive(Clone, Copy)]
pub(crate) struct WeightPrefetch {
    next: *const u8,
    /// Bytes further for each line of the panel.
    step: usize,
}

impl WeightPrefetch {
    /// For one more line, of one cache line or two. Where three tiles or more have their shares, memory is not waited for.
    #[inline(always)]
    pub(crate) fn ask<S: Simd>(&mut self, simd: S) {
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

    /// For a panel that streams through once: what comes a little later.
    #[inline(always)]
    pub(crate) fn within<P>(panel: &[P]) -> Self {
        Self { next: panel.as_ptr().cast::<u8>().wrapping_add(STREAM_AHEAD_BYTES), step: size_of::<P>() }
    }

    /// For a panel that is in the cache, as what is read with it.
    pub(crate) const NONE: Self = Self { next: std::ptr::null(), step: 0 };

    /// For a panel of `len` lines that stays in the cache for several tiles: tile `nth` of them asks for its share of the next.
    #[inline(always)]
    pub(crate) fn share_of<P>(next: *const P, len: usize, nth: usize, tiles: usize) -> Self {
        let start = len * size_of::<P>() * nth / tiles;
        Self { next: next.cast::<u8>().wrapping_add(start), step: size_of::<P>() / tiles }
    }
}

/// Measured: 2 KiB are too little for a memory that answers after 100 ns, and 16 KiB no better.
pub(crate) const STREAM_AHEAD_BYTES: usize = 8192;
