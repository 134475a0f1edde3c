//! Prefill: prompts in chunks, and everything else that is not one token drawing the next.

use super::{
    inputs::Inputs,
    layers::Layers,
    rank::{Attend, Batch},
    sampling::{LogitRow, Sampling},
};
use cudarc::driver::CudaView;
use std::ops::Range;
use tidemill_kernels::cuda::{
    CudaError, Device, DeviceKv,
    attention::{Tile, prefill_tiles},
};
use tidemill_proto::block::BLOCK_TOKENS;
use tidemill_proto::step::{Segment, SegmentResult};

pub(super) struct Prefill {
    rows_max: usize,
    /// By device.
    places: Vec<Place>,
}

/// A batch's inputs on a device.
struct Place {
    /// Tokens, positions, sequences, block tables and wanted rows.
    numbers: Inputs<u32>,
    tiles: Inputs<Tile>,
}

/// A batch's inputs, as ranges of the numbers.
#[derive(Default)]
struct BatchInputs {
    numbers: Vec<u32>,
    tiles: Vec<Tile>,
    rows: usize,
    table_stride: usize,
    tables: Range<usize>,
    wanted: Vec<LogitRow>,
}

impl BatchInputs {
    fn new(head_dim: usize, segments: &[Segment<'_>], batch: &[usize]) -> Self {
        let of_batch = || batch.iter().map(|&number| (number, &segments[number]));
        let tokens = of_batch().flat_map(|(_, s)| s.tokens.iter().copied());
        let positions = of_batch().flat_map(|(_, s)| (s.start..s.start + s.tokens.len()).map(|position| position as u32));
        let sequences = of_batch().enumerate().flat_map(|(i, (_, s))| s.tokens.iter().map(move |_| i as u32));
        let mut numbers: Vec<u32> = tokens.chain(positions).chain(sequences).collect();
        let rows = numbers.len() / 3;

        let blocks = |s: &Segment<'_>| (s.start + s.tokens.len()).div_ceil(BLOCK_TOKENS);
        let table_stride = of_batch().map(|(_, s)| blocks(s)).max().unwrap_or(1);
        let tables = numbers.len()..numbers.len() + batch.len() * table_stride;
        for (i, (_, s)) in of_batch().enumerate() {
            numbers.extend(&s.blocks[..blocks(s)]);
            numbers.resize(tables.start + (i + 1) * table_stride, 0);
        }

        let (mut spans, mut wanted, mut first) = (Vec::new(), Vec::new(), 0);
        for (i, (number, s)) in of_batch().enumerate() {
            let (len, position) = (s.tokens.len() as u32, s.start as u32);
            spans.push(Tile { sequence: i as u32, row: first, position, rows: len });
            first += len;
            for index in 0..s.logit_rows() {
                numbers.push(first - (s.logit_rows() - index) as u32);
                wanted.push(LogitRow { segment: number, index });
            }
        }
        Self { numbers, tiles: prefill_tiles(head_dim, &spans), rows, table_stride, tables, wanted }
    }
}

impl Prefill {
    /// Creates the buffers for batches of up to `rows_max` tokens.
    pub(super) fn new(devices: &[Device], rows_max: usize) -> Result<Self, CudaError> {
        let place = |device| Ok(Place { numbers: Inputs::new(device, 8 * rows_max)?, tiles: Inputs::new(device, rows_max)? });
        Ok(Self { rows_max, places: devices.iter().map(place).collect::<Result<_, CudaError>>()? })
    }

    /// Computes the segments that `batch` names.
    #[expect(clippy::too_many_arguments, reason = "each is another thing")]
    pub(super) fn step(
        &mut self,
        devices: &[Device],
        layers: &mut Layers,
        kv: &mut [DeviceKv],
        sampling: &mut Sampling,
        segments: &[Segment<'_>],
        batch: &[usize],
        results: &mut [SegmentResult],
    ) -> Result<(), CudaError> {
        let BatchInputs { numbers, tiles, rows, table_stride, tables, wanted } = BatchInputs::new(layers.shape.head_dim, segments, batch);
        assert!(rows <= self.rows_max, "{rows} tokens are more than the {} of a step", self.rows_max);
        for (place, device) in self.places.iter_mut().zip(devices) {
            place.numbers.send(device, &numbers)?;
            place.tiles.send(device, &tiles)?;
        }
        let batches = self.places.iter().map(|Place { numbers, tiles: on_device }| Batch {
            tokens: numbers.device.slice(..rows),
            positions: numbers.device.slice(rows..2 * rows),
            sequences: numbers.device.slice(2 * rows..3 * rows),
            tables: numbers.device.slice(tables.clone()),
            table_stride,
            attend: Attend::Prefill { tiles: on_device.device.slice(..tiles.len()) },
        });
        layers.run(&mut batches.collect::<Vec<_>>(), kv, wanted.is_empty())?;
        let mut first = tables.end;
        for wanted in wanted.chunks(sampling.rows_max()) {
            let count = wanted.len();
            let on_devices: Vec<CudaView<'_, u32>> =
                self.places.iter().map(|place| place.numbers.device.slice(first..first + count)).collect();
            layers.logits(rows, &on_devices, &mut sampling.logits)?;
            sampling.request(layers, segments, wanted, count)?;
            sampling.draw(layers, count)?;
            sampling.redraw(layers, &devices[0], segments, wanted)?;
            sampling.collect(layers, segments, wanted, results)?;
            first += count;
        }
        layers.synchronize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::step::{StateBlocks, Wanted};

    #[test]
    fn a_batch_is_told_row_by_row() {
        let blocks: Vec<u32> = (50..60).collect();
        let segment =
            |tokens: &'static [u32], start, wanted| Segment { tokens, start, blocks: &blocks, state: StateBlocks::default(), wanted };
        let scores = Wanted::Scores { targets: &[], top: 0, token: None };
        let segments = [segment(&[7; 3], 15, Wanted::Nothing), segment(&[8], 0, Wanted::Nothing), segment(&[9, 10], 40, scores)];
        let inputs = BatchInputs::new(128, &segments, &[0, 2]);
        assert_eq!((inputs.rows, inputs.table_stride, inputs.tables.clone()), (5, 3, 15..21));
        assert_eq!(inputs.numbers[..5], [7, 7, 7, 9, 10]);
        assert_eq!(inputs.numbers[5..10], [15, 16, 17, 40, 41]);
        assert_eq!(inputs.numbers[10..15], [0, 0, 0, 1, 1]);
        assert_eq!(inputs.numbers[inputs.tables], [50, 51, 0, 50, 51, 52]);
        assert_eq!(inputs.numbers[21..], [3, 4], "both rows of the second segment");
        assert_eq!(inputs.wanted.iter().map(|row| (row.segment, row.index)).collect::<Vec<_>>(), [(2, 0), (2, 1)]);
        assert_eq!(inputs.tiles.iter().map(|tile| tile.rows).sum::<u32>(), 5);
    }
}
