//! The assignment of outputs to panels of packed weights.

use crate::{
    cpu::{gemm::panel::PANEL, simd::LANES},
    matrix::Matrix,
};
use std::ops::Range;

/// A linear layer as stored in a file: `[outputs, inputs]`, and biases `[outputs]` or none.
pub(crate) type Linear<'a> = (Matrix<'a>, Option<&'a [f32]>);

/// A layer's outputs and inputs, and its biases `[outputs]` or none.
pub(crate) type Shape<'a> = ((usize, usize), Option<&'a [f32]>);

/// The columns of all panels. A panel has 32 consecutive outputs; of gated weights, 16 gates and then the 16 numbers
/// they multiply, for 16 outputs. The last panel is filled up with zeros.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    pub(crate) inputs: usize,
    pub(crate) outputs: usize,
    pub(crate) is_gated: bool,
}

impl Columns {
    /// The columns of one layer, or of a gate and the layer that it multiplies.
    pub(crate) fn of(layers: &[Linear<'_>]) -> Self {
        let shapes: Vec<_> = layers.iter().map(|(weight, bias)| ((weight.rows(), weight.cols()), *bias)).collect();
        Self::of_shapes(&shapes)
    }

    pub(crate) fn of_shapes(layers: &[Shape<'_>]) -> Self {
        let (outputs, inputs) = layers[0].0;
        assert!(outputs > 0 && inputs > 0, "empty weights");
        assert!(layers.iter().all(|layer| layer.0 == (outputs, inputs)), "gate and up have one shape");
        assert!(layers.iter().all(|(_, bias)| bias.is_none_or(|bias| bias.len() == outputs)), "bias is [outputs]");
        Self { inputs, outputs, is_gated: layers.len() > 1 }
    }

    /// Outputs per panel.
    #[inline(always)]
    fn width(&self) -> usize {
        if self.is_gated { LANES } else { PANEL }
    }

    pub(crate) fn panels(&self) -> usize {
        self.outputs.div_ceil(self.width())
    }

    /// The layer and the output in a column; `None` beyond the last output.
    pub(crate) fn source(&self, panel: usize, column: usize) -> Option<(usize, usize)> {
        let output = panel * self.width() + column % self.width();
        (output < self.outputs).then_some((column / self.width(), output))
    }

    /// The outputs of a panel.
    #[inline(always)]
    pub(crate) fn outputs_of(&self, panel: usize) -> Range<usize> {
        panel * self.width()..((panel + 1) * self.width()).min(self.outputs)
    }

    /// The outputs of one vector of a panel's columns. Both vectors of a gated panel have the same outputs.
    #[inline(always)]
    pub(crate) fn outputs_of_vector(&self, panel: usize, vector: usize) -> Range<usize> {
        let first = if self.is_gated { panel } else { panel * PANEL / LANES + vector } * LANES;
        first.min(self.outputs)..(first + LANES).min(self.outputs)
    }

    /// The biases of each panel's columns; zeros for layers without biases.
    pub(crate) fn biases(&self, layers: &[Linear<'_>]) -> Vec<[f32; PANEL]> {
        self.biases_of(&layers.iter().map(|(_, bias)| *bias).collect::<Vec<_>>())
    }

    pub(crate) fn biases_of(&self, layers: &[Option<&[f32]>]) -> Vec<[f32; PANEL]> {
        let bias = |(layer, output): (usize, usize)| layers[layer].map_or(0.0, |bias| bias[output]);
        (0..self.panels()).map(|panel| std::array::from_fn(|column| self.source(panel, column).map_or(0.0, bias))).collect()
    }
}
