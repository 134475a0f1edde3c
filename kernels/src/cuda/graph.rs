//! A step's launches, recorded once as a CUDA graph and replayed with one call: at small batches the device would
//! otherwise wait for the host.

use super::{CudaError, gemm::product_rows};
use cudarc::driver::{CudaGraph, CudaStream, sys};
use std::{collections::BTreeMap, sync::Arc};

/// Graphs of one step for batches of different shapes. Padding rows fill a batch up to the next shape.
pub struct StepGraphs {
    stream: Arc<CudaStream>,
    /// The graphs by shape: rows, and the power of two that bounds the positions.
    graphs: BTreeMap<StepShape, CudaGraph>,
}

/// The shape of a recorded batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct StepShape {
    pub rows: usize,
    /// Upper bound on the positions that a row sees.
    pub positions: usize,
}

impl StepShape {
    /// The smallest shape that holds such a batch.
    pub fn holding(rows: usize, positions: usize) -> Self {
        Self { rows: product_rows(rows), positions: positions.max(POSITIONS_MIN).next_power_of_two() }
    }
}

/// The smallest bound on positions: with fewer, attention has few parts anyway.
const POSITIONS_MIN: usize = 1024;

impl StepGraphs {
    /// Creates graphs that are recorded and replayed on `stream`.
    pub fn new(stream: Arc<CudaStream>) -> Self {
        Self { stream, graphs: BTreeMap::new() }
    }

    pub fn is_recorded(&self, shape: StepShape) -> bool {
        self.graphs.contains_key(&shape)
    }

    /// Records the launches of `step` without running them. All memory that the step names must be allocated and every kernel loaded
    /// beforehand, as a capture allows neither. The memory must outlive the graphs.
    pub fn record<E: From<CudaError>>(&mut self, shape: StepShape, step: impl FnOnce(&Arc<CudaStream>) -> Result<(), E>) -> Result<(), E> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(CudaError::from)?;
        let outcome = step(&self.stream);
        // The capture must end, even if the step failed.
        let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags(0)).map_err(CudaError::from);
        outcome?;
        let graph = graph?.expect("a stream that captures has a graph");
        graph.upload().map_err(CudaError::from)?;
        self.graphs.insert(shape, graph);
        Ok(())
    }

    /// Launches the recorded step.
    ///
    /// # Panics
    /// If none was recorded for this shape.
    pub fn launch(&self, shape: StepShape) -> Result<(), CudaError> {
        Ok(self.graphs[&shape].launch()?)
    }
}

// SAFETY: any thread may use graphs, one at a time; the engine's thread owns this and launches them in order.
unsafe impl Send for StepGraphs {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_hold_their_batch_and_waste_little() {
        let mut shapes = Vec::new();
        for rows in 1..=256 {
            let shape = StepShape::holding(rows, 1);
            assert!(shape.rows >= rows && shape.rows < 2 * rows);
            assert!(rows <= 8 || shape.rows <= rows + rows.div_ceil(2).max(7));
            shapes.push(shape);
        }
        shapes.dedup();
        assert_eq!(shapes.len(), 4 + 7 + 6);
        assert_eq!(StepShape::holding(3, 4097), StepShape { rows: 4, positions: 8192 });
    }
}
