//! The end of a product whose result is quantized again: it is set, added, or activated and gated.

use crate::cpu::{
    activation::Activation,
    gemm::{Output, packing::Columns, panel::PANEL_LINES},
    simd::Simd,
    threads::disjoint::Disjoint,
};
use std::ops::Range;

/// Activations that keep the numbers which they are quantized from.
pub(super) trait Exact {
    fn exact(&mut self) -> &mut Vec<f32>;
}

/// A product's output, which several tasks write.
pub(super) struct Epilogue<'a> {
    /// `[rows, outputs]`
    y: Disjoint<'a, f32>,
    columns: &'a Columns,
    store: Store,
}

#[derive(Clone, Copy)]
enum Store {
    Set,
    Add,
    Activated(Activation),
}

/// The outputs of each line of a panel.
pub(super) type PanelOutputs = [Range<usize>; PANEL_LINES];

impl<'a> Epilogue<'a> {
    pub(super) fn new<A: Exact>(rows: usize, columns: &'a Columns, output: &'a mut Output<'_, A>) -> Self {
        let len = rows * columns.outputs;
        let (y, store) = match output {
            Output::Set(y) => (&mut **y, Store::Set),
            Output::Add(y) => (&mut **y, Store::Add),
            Output::ActivatedNumbers(activation, y) => (&mut **y, Store::Activated(*activation)),
            Output::Activated(activation, y) => {
                y.exact().resize(len, 0.0);
                (&mut y.exact()[..], Store::Activated(*activation))
            }
        };
        assert!(!columns.is_gated || matches!(store, Store::Activated(_)), "gated weights are for activations");
        assert_eq!(y.len(), len, "y is [rows, outputs]");
        Self { y: Disjoint::new(y), columns, store }
    }

    #[inline(always)]
    pub(super) fn outputs(&self, panel: usize) -> PanelOutputs {
        let mut outputs = [const { 0..0 }; PANEL_LINES];
        for (line, outputs) in outputs.iter_mut().enumerate() {
            *outputs = self.columns.outputs_of_vector(panel, line);
        }
        outputs
    }

    /// Prefetches a panel's outputs of `rows`, so that they have arrived when the sums are ready.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(&self, simd: S, panel: usize, rows: Range<usize>) {
        for line in 0..if self.columns.is_gated { 1 } else { PANEL_LINES } {
            let first = self.columns.outputs_of_vector(panel, line).start;
            for row in rows.clone() {
                simd.prefetch_to_write(self.y.address(row * self.columns.outputs + first));
            }
        }
    }

    /// Stores a row's numbers of one panel, whose outputs are `outputs`.
    #[inline(always)]
    pub(super) fn put<S: Simd>(&self, simd: S, row: usize, outputs: &PanelOutputs, mut y: [S::V; PANEL_LINES]) {
        if let Store::Activated(activation) = self.store {
            if self.columns.is_gated {
                return self.store(simd, row, &outputs[0], activation.gate(simd, y[0], y[1]));
            }
            y = [activation.apply(simd, y[0]), activation.apply(simd, y[1])];
        }
        for (outputs, y) in outputs.iter().zip(y) {
            self.store(simd, row, outputs, y);
        }
    }

    /// Stores numbers of one row.
    #[inline(always)]
    fn store<S: Simd>(&self, simd: S, row: usize, outputs: &Range<usize>, v: S::V) {
        let start = row * self.columns.outputs;
        // SAFETY: tasks have disjoint outputs, and within a task this is the only part alive.
        let y = unsafe { self.y.part(start + outputs.start..start + outputs.end) };
        simd.store_part(v, y, matches!(self.store, Store::Add));
    }
}
