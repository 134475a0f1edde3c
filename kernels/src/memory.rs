//! Large zeroed memory that starts on a cache line, in huge pages where the system has them to give.

/// `len` zeros (`T` is `u8`, `u32` or `f32`). Pages of it cost nothing until they are touched.
#[derive(Default)]
pub(crate) struct Memory<T> {
    /// The numbers start at `start`: the allocator hands out large zeroed memory as fresh, untouched pages only for alignments
    /// of its own, hence the slack in front.
    all: Vec<T>,
    start: usize,
    len: usize,
}

const CACHE_LINE: usize = 64;
/// Of x86-64, and of aarch64 with 4 KiB pages.
const HUGE_PAGE: usize = 2 << 20;

impl<T: Copy + Default> Memory<T> {
    pub(crate) fn new(len: usize) -> Self {
        let alignment = if len * size_of::<T>() >= HUGE_PAGE { HUGE_PAGE } else { CACHE_LINE };
        let all = vec![T::default(); len + alignment / size_of::<T>()];
        let address = all.as_ptr().addr();
        let start = (address.next_multiple_of(alignment) - address) / size_of::<T>();
        let memory = Self { all, start, len };
        #[cfg(target_os = "linux")]
        memory.advise_huge_pages();
        memory
    }

    /// Reading weights and KV from memory is bound by address translation with small pages. Advice only: without it
    /// everything works, more slowly.
    #[cfg(target_os = "linux")]
    fn advise_huge_pages(&self) {
        use nix::sys::mman::{MmapAdvise, madvise};
        let whole_pages = size_of_val(self.as_slice()) / HUGE_PAGE * HUGE_PAGE;
        if let (Some(first), true) = (std::ptr::NonNull::new(self.as_slice().as_ptr().cast_mut()), whole_pages > 0) {
            // SAFETY: the range is within our own allocation, starts on a page, and this advice changes no content.
            let _ = unsafe { madvise(first.cast(), whole_pages, MmapAdvise::MADV_HUGEPAGE) };
        }
    }

    #[inline(always)]
    pub(crate) fn as_slice(&self) -> &[T] {
        &self.all[self.start..self.start + self.len]
    }

    #[inline(always)]
    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.all[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_zero_aligned_and_writable_to_the_end() {
        for len in [0, 1, 100, HUGE_PAGE - 1, HUGE_PAGE, 3 * HUGE_PAGE + 5] {
            let mut memory = Memory::<u8>::new(len);
            assert!(memory.as_slice().as_ptr().addr().is_multiple_of(CACHE_LINE));
            assert!(memory.as_slice().len() == len && memory.as_slice().iter().all(|b| *b == 0));
            memory.as_mut_slice().fill(7);
            assert!(memory.as_slice().iter().all(|b| *b == 7));
        }
    }
}
