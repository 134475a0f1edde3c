//! One output that several tasks write, each its own parts.

use std::{marker::PhantomData, ops::Range};

/// A mutable slice. Tasks on other threads take parts of it that do not overlap.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: the only accesses are `part` and `write`, whose callers promise that no element is reachable from two
// threads.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// # Safety
    /// No other part that is alive may overlap `range`.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that parts do not overlap")]
    #[inline(always)]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the slice, which `'a` keeps borrowed; not aliased, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// The address of element `index`, which may be beyond the end.
    #[inline(always)]
    pub(crate) fn address(&self, index: usize) -> *const T {
        self.start.wrapping_add(index)
    }

    /// # Safety
    /// `index` must be within the slice, and no other thread may use that element at the same time.
    #[inline(always)]
    pub(crate) unsafe fn write(&self, index: usize, value: T) {
        debug_assert!(index < self.len);
        // SAFETY: within the slice and not in use, as the caller promises.
        unsafe { self.start.add(index).write(value) };
    }
}
