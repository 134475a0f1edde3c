//! Decode: one token of each of many sequences. The step is recorded as a graph for every shape of batch, and then replayed.

use super::{
    layers::Layers,
    rank::{Attend, Batch},
    sampling::{LogitRow, Sampling},
    shape::DeviceShape,
};
use cudarc::driver::{CudaSlice, CudaStream, CudaView};
use tidemill_kernels::cuda::{
    CudaError, Device, DeviceKv, NO_POSITION,
    attention::DecodeScratch,
    graph::{StepGraphs, StepShape},
    host::HostBuffer,
};
use tidemill_proto::block::BLOCK_TOKENS;
use tidemill_proto::step::{Segment, SegmentResult};

pub(super) struct Decode {
    /// By device.
    places: Vec<Place>,
    graphs: StepGraphs,
    rows_max: usize,
    positions_max: usize,
}

/// The inputs of a step on a device, and scratch for its attention.
struct Place {
    inputs: Inputs,
    scratch: DecodeScratch,
}

impl Place {
    fn batch(&mut self, shape: StepShape) -> Batch<'_> {
        let Self { inputs, scratch } = self;
        let rows = shape.rows;
        Batch {
            tokens: inputs.device.slice(..rows),
            positions: inputs.device.slice(rows..2 * rows),
            sequences: inputs.numbers.slice(..rows),
            tables: inputs.device.slice(2 * rows..Inputs::len(shape)),
            table_stride: table_stride(shape),
            attend: Attend::Decode { scratch, positions_max: shape.positions },
        }
    }
}

/// The inputs of a step, at addresses that depend only on its shape: tokens, positions, block tables.
struct Inputs {
    host: HostBuffer<u32>,
    device: CudaSlice<u32>,
    /// The numbers 0, 1, 2, …: row `i` has table `i`.
    numbers: CudaSlice<u32>,
}

impl Inputs {
    fn len(shape: StepShape) -> usize {
        shape.rows * (2 + table_stride(shape))
    }

    /// Sends a batch, padded with rows that do nothing.
    fn send(&mut self, stream: &CudaStream, shape: StepShape, segments: &[&Segment<'_>]) -> Result<(), CudaError> {
        let (rows, stride) = (shape.rows, table_stride(shape));
        let all = &mut self.host.numbers()?[..Self::len(shape)];
        let (tokens, rest) = all.split_at_mut(rows);
        let (positions, tables) = rest.split_at_mut(rows);
        tokens.fill(0);
        positions.fill(NO_POSITION);
        for (i, segment) in segments.iter().enumerate() {
            tokens[i] = segment.tokens[0];
            positions[i] = segment.start as u32;
            // The table may have blocks for later positions.
            let blocks = &segment.blocks[..segment.start / BLOCK_TOKENS + 1];
            tables[i * stride..][..blocks.len()].copy_from_slice(blocks);
        }
        self.host.send(stream, &mut self.device.slice_mut(..Self::len(shape)))
    }
}

fn table_stride(shape: StepShape) -> usize {
    shape.positions / BLOCK_TOKENS
}

impl Decode {
    /// Creates the buffers for up to `sequences_max` sequences of up to `context_tokens`; `own` is a device's part of the model.
    pub(super) fn new(
        devices: &[Device],
        layers: &Layers,
        own: DeviceShape,
        sequences_max: usize,
        context_tokens: usize,
    ) -> Result<Self, CudaError> {
        let largest = StepShape::holding(sequences_max, context_tokens);
        let (rows_max, positions_max) = (largest.rows, largest.positions);
        let place = |device| {
            let inputs = Inputs {
                host: HostBuffer::new(device, Inputs::len(largest))?,
                device: device.alloc(Inputs::len(largest))?,
                numbers: device.upload(&(0..rows_max as u32).collect::<Vec<_>>())?,
            };
            Ok(Place { inputs, scratch: DecodeScratch::new(device, rows_max, own.heads, own.head_dim, positions_max)? })
        };
        let places = devices.iter().map(place).collect::<Result<_, CudaError>>()?;
        Ok(Self { places, graphs: StepGraphs::new(layers.stream().clone()), rows_max, positions_max })
    }

    /// The number of rows of the largest batch.
    pub(super) fn rows_max(&self) -> usize {
        self.rows_max
    }

    /// Records the steps of all shapes. First runs an empty batch for each number of rows: products choose their algorithms then, which is
    /// not possible during a recording.
    pub(super) fn record(&mut self, layers: &mut Layers, kv: &mut [DeviceKv], sampling: &mut Sampling) -> Result<(), CudaError> {
        let mut shapes: Vec<StepShape> = (1..=self.rows_max).map(|rows| StepShape::holding(rows, 1)).collect();
        shapes.dedup();
        for mut shape in shapes {
            self.send(layers, shape, &[])?;
            sampling.request(layers, &[], &[], shape.rows)?;
            let Self { places, graphs, positions_max, .. } = self;
            run(places, layers, kv, sampling, shape)?;
            layers.synchronize()?;
            while shape.positions <= *positions_max {
                graphs.record(shape, |_| run(places, layers, kv, sampling, shape))?;
                shape.positions *= 2;
            }
        }
        Ok(())
    }

    /// Sends a batch to all devices.
    fn send(&mut self, layers: &Layers, shape: StepShape, segments: &[&Segment<'_>]) -> Result<(), CudaError> {
        let mut places = self.places.iter_mut().zip(&layers.ranks);
        places.try_for_each(|(place, rank)| place.inputs.send(&rank.stream, shape, segments))
    }

    /// Draws a token for each row's segment, which has one token.
    pub(super) fn step(
        &mut self,
        device: &Device,
        layers: &Layers,
        sampling: &mut Sampling,
        segments: &[Segment<'_>],
        rows: &[LogitRow],
        results: &mut [SegmentResult],
    ) -> Result<(), CudaError> {
        let of_rows: Vec<&Segment<'_>> = rows.iter().map(|row| &segments[row.segment]).collect();
        let positions = of_rows.iter().map(|segment| segment.start + 1).max().unwrap_or(0);
        let shape = StepShape::holding(rows.len(), positions);
        self.send(layers, shape, &of_rows)?;
        sampling.request(layers, segments, rows, shape.rows)?;
        layers.as_one(|| self.graphs.launch(shape))?;
        sampling.redraw(layers, device, segments, rows)?;
        sampling.collect(layers, segments, rows, results)
    }
}

/// Launches a step on the streams.
fn run(places: &mut [Place], layers: &mut Layers, kv: &mut [DeviceKv], sampling: &mut Sampling, shape: StepShape) -> Result<(), CudaError> {
    let rows = shape.rows;
    layers.run(&mut places.iter_mut().map(|place| place.batch(shape)).collect::<Vec<_>>(), kv, false)?;
    let all: Vec<CudaView<'_, u32>> = places.iter().map(|place| place.inputs.numbers.slice(..rows)).collect();
    layers.logits(rows, &all, &mut sampling.logits)?;
    sampling.draw(layers, rows)
}
