//! Large zeroed memory, aligned to cache lines, in huge pages where the system has any.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    marker::PhantomData,
    ptr::NonNull,
    slice,
    sync::{Arc, Mutex, PoisonError},
};

/// `len` zeros. `T` is `u8`, `u32`, `f32` or an array of these, with nothing to drop. Pages cost nothing until they are
/// touched.
pub(crate) struct Memory<T> {
    start: NonNull<T>,
    len: usize,
    /// Keeps the allocation alive.
    _region: Option<Arc<Region>>,
    numbers: PhantomData<T>,
}

const CACHE_LINE: usize = 64;
/// The size of a huge page on x86-64, and on aarch64 with 4 KiB pages.
const HUGE_PAGE: usize = 2 << 20;

impl<T: Copy + Default> Memory<T> {
    pub(crate) fn new(len: usize) -> Self {
        Self::first_of(Arc::new(Region::new(len * size_of::<T>())), 0, len)
    }

    /// Takes `len` zeros from byte `at` of a region. No other memory may have these bytes.
    fn first_of(region: Arc<Region>, at: usize, len: usize) -> Self {
        assert!(
            align_of::<T>() <= CACHE_LINE && at.is_multiple_of(CACHE_LINE) && at + len * size_of::<T>() <= region.len,
            "within the region"
        );
        // SAFETY: within the allocation.
        let start = unsafe { region.start.add(at) }.cast();
        Self { start, len, _region: Some(region), numbers: PhantomData }
    }
}

impl<T> Memory<T> {
    #[inline(always)]
    pub(crate) fn as_slice(&self) -> &[T] {
        // SAFETY: initialized with zeros, which are valid for all these types; the allocation lives as long as this;
        // and only a borrow of this writes to it, as no other memory has these bytes.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    #[inline(always)]
    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Default for Memory<T> {
    fn default() -> Self {
        Self { start: NonNull::dangling(), len: 0, _region: None, numbers: PhantomData }
    }
}

// SAFETY: it owns its numbers, as a `Vec` does.
unsafe impl<T: Send> Send for Memory<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Memory<T> {}

/// Hands out long-lived memory, such as weights, from regions of many huge pages: a small model's matrix would fill no
/// huge page of its own, and reading through 4 KiB pages takes up to 1.4 times as long. Untouched pages cost nothing.
#[derive(Default)]
pub(crate) struct Arena {
    /// The region being handed out, and the number of its bytes in use.
    current: Mutex<Option<(Arc<Region>, usize)>>,
}

const REGION_BYTES: usize = 64 << 20;

impl Arena {
    pub(crate) fn memory(&self, len: usize) -> Memory<u8> {
        if len > REGION_BYTES / 4 {
            return Memory::new(len);
        }
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let (region, used) = match current.take() {
            Some((region, used)) if used + len <= region.len => (region, used),
            _ => (Arc::new(Region::new(REGION_BYTES)), 0),
        };
        *current = Some((region.clone(), (used + len).next_multiple_of(CACHE_LINE)));
        Memory::first_of(region, used, len)
    }
}

/// An allocation of zeros.
struct Region {
    /// Aligned to a huge page if it holds one, else to a cache line.
    start: NonNull<u8>,
    len: usize,
    allocation: (NonNull<u8>, Layout),
}

impl Region {
    fn new(len: usize) -> Self {
        let alignment = if len >= HUGE_PAGE { HUGE_PAGE } else { CACHE_LINE };
        // The allocator returns fresh, untouched pages only for its own alignments, hence the slack in front.
        let layout = Layout::array::<u128>((len + alignment).div_ceil(size_of::<u128>())).expect("less than the address space");
        // SAFETY: not of size zero.
        let allocated = NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap_or_else(|| handle_alloc_error(layout));
        // SAFETY: within the allocation, which has the slack.
        let start = unsafe { allocated.add(allocated.as_ptr().align_offset(alignment)) };
        let region = Self { start, len, allocation: (allocated, layout) };
        #[cfg(target_os = "linux")]
        region.advise_huge_pages();
        region
    }

    /// Advises the system to use huge pages: with small ones, address translation bounds reading weights and KV. Without them, everything
    /// works, more slowly.
    #[cfg(target_os = "linux")]
    fn advise_huge_pages(&self) {
        use nix::sys::mman::{MmapAdvise, madvise};
        let whole_pages = self.len / HUGE_PAGE * HUGE_PAGE;
        if whole_pages > 0 {
            // SAFETY: the range is within our own allocation and starts on a page; this advice changes no content.
            let _ = unsafe { madvise(self.start.cast(), whole_pages, MmapAdvise::MADV_HUGEPAGE) };
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let (allocated, layout) = self.allocation;
        // SAFETY: allocated with this layout, and nothing refers to it any more.
        unsafe { dealloc(allocated.as_ptr(), layout) };
    }
}

// SAFETY: it owns its allocation and gives access to it only through `Memory`.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_is_zero_aligned_and_writable(memory: &mut Memory<u8>, len: usize) {
        assert!(memory.as_slice().as_ptr().addr().is_multiple_of(CACHE_LINE));
        assert!(memory.as_slice().len() == len && memory.as_slice().iter().all(|b| *b == 0));
        memory.as_mut_slice().fill(7);
        assert!(memory.as_slice().iter().all(|b| *b == 7));
    }

    #[test]
    fn is_zero_aligned_and_writable_to_the_end() {
        for len in [0, 1, 100, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5] {
            assert_is_zero_aligned_and_writable(&mut Memory::new(len), len);
        }
    }

    #[test]
    fn pieces_of_regions_do_not_overlap_and_outlive_the_arena() {
        let arena = Arena::default();
        let lens = [0, 1, 100, 3 * HUGE_PAGE + 5, REGION_BYTES / 4, REGION_BYTES / 4 + 1];
        let mut pieces: Vec<_> = (0..5).flat_map(|_| lens.map(|len| arena.memory(len))).collect();
        drop(arena);
        for (memory, len) in pieces.iter_mut().zip(lens.into_iter().cycle()) {
            assert_is_zero_aligned_and_writable(memory, len);
        }
        let small = |memory: &&Memory<u8>| memory.len <= REGION_BYTES / 4;
        assert!(pieces.iter().filter(small).all(|memory| memory._region.as_ref().is_some_and(|region| region.len == REGION_BYTES)));
    }
}
