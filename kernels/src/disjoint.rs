//! One output that several tasks write, each its own parts of it.

use std::{marker::PhantomData, ops::Range};

/// A mutable slice of which tasks on other threads take parts that do not overlap.
pub(crate) struct Disjoint<'a> {
    start: *mut f32,
    len: usize,
    slice: PhantomData<&'a mut [f32]>,
}

// SAFETY: the only access is `part`, whose caller promises that no number is reachable from two threads.
unsafe impl Sync for Disjoint<'_> {}
// SAFETY: as above.
unsafe impl Send for Disjoint<'_> {}

impl<'a> Disjoint<'a> {
    pub(crate) fn new(slice: &'a mut [f32]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// # Safety
    /// No other part that is alive may overlap `range`.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that parts do not overlap")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the slice, which `'a` keeps borrowed; not aliased, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
