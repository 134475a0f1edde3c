//! Each thread's buffer for intermediate sums, kept from task to task.

use crate::cpu::gemm::panel::PANEL;
use std::cell::RefCell;

thread_local! {
    static SUMS: RefCell<Vec<[f32; PANEL]>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with `len` rows of sums, whose contents are left over from earlier use.
pub(crate) fn with_sums<R>(len: usize, work: impl FnOnce(&mut [[f32; PANEL]]) -> R) -> R {
    SUMS.with_borrow_mut(|sums| {
        if sums.len() < len {
            sums.resize(len, [0.0; PANEL]);
        }
        work(&mut sums[..len])
    })
}
