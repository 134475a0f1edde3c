//! Attention over paged K and V: many rows of a sequence (prefill), or one row each of many (decode). A row's bits
//! depend neither on the batch around it nor on how its prompt was cut; but the two kernels round differently.

use super::{
    CudaError,
    compile::Scoring,
    device::{Bf16, Device},
    kernels::Kernels,
    kv::PagedLayer,
    launch::{Shape, launch, optional, soft_cap_factor},
    prefill_kernel::tile_rows,
};
use cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut, DeviceRepr, ValidAsZeroBits};

/// Queries and the parameters of their attention.
pub struct Queries<'a> {
    /// Row `r` begins at `r * stride`, `[heads, head_dim]`: in rows of queries alone, or of queries, keys and values.
    pub q: &'a CudaView<'a, Bf16>,
    pub stride: usize,
    pub heads: usize,
    /// The factor of scores: see [`scale`], for the head size before padding.
    pub scale: f32,
    /// A row at position `p` attends to positions `0..=p`, or to the last `window` of them.
    pub window: Option<usize>,
    /// Scaled scores become `cap tanh(score / cap)`.
    pub cap: Option<f32>,
    /// The logit of each query head that joins the softmax's sum, times log2(e).
    pub sinks: Option<&'a CudaView<'a, f32>>,
}

impl<'a> Queries<'a> {
    /// Queries of `heads` heads of `head_dim` numbers that attend to all positions before them.
    pub fn plain(q: &'a CudaView<'a, Bf16>, stride: usize, heads: usize, head_dim: usize) -> Self {
        Self { q, stride, heads, scale: scale(head_dim), window: None, cap: None, sinks: None }
    }
}

impl Queries<'_> {
    fn scoring(&self) -> Scoring {
        match (self.cap, self.sinks) {
            (None, None) => Scoring::Plain,
            (Some(_), None) => Scoring::Capped,
            (None, Some(_)) => Scoring::Sinks,
            (Some(_), Some(_)) => panic!("there are no kernels for a cap beside sinks"),
        }
    }

    /// The cap, for exponentials that are powers of 2.
    fn cap_log2(&self) -> f32 {
        self.cap.map_or(0.0, |cap| std::f32::consts::LOG2_E * cap)
    }

    /// The window in the kernels' encoding.
    fn window(&self) -> usize {
        assert!(self.window != Some(0), "a window holds at least the row itself");
        self.window.map_or(ALL_POSITIONS, |window| window.min(ALL_POSITIONS))
    }

    /// The scale, for exponentials that are powers of 2; with a cap, for the argument of tanh.
    fn scale_log2(&self) -> f32 {
        self.scale * self.cap.map_or(std::f32::consts::LOG2_E, soft_cap_factor)
    }

    fn assert_shape(&self, out: usize, rows: usize, paged: &PagedLayer<'_>, kernels: &Kernels) {
        assert_eq!(paged.heads, kernels.heads, "kernels and memory have the same heads");
        assert_eq!(self.scoring(), kernels.scoring, "kernels for this scoring");
        assert!(self.sinks.is_none_or(|sinks| sinks.len() == self.heads), "a sink for each head");
        let width = self.heads * paged.heads.dim;
        assert!(self.heads > 0 && self.heads.is_multiple_of(paged.kv_heads), "query heads in equal groups");
        assert!(self.stride >= width && self.stride.is_multiple_of(8), "rows of queries begin at multiples of 16 bytes");
        assert!(rows == 0 || self.q.len() >= (rows - 1) * self.stride + width, "q has {rows} rows");
        assert!(out >= rows * width, "out is [rows, heads, head_dim]");
    }
}

const ALL_POSITIONS: usize = 1 << 31;

/// The scale of scores for heads of `head_dim` numbers.
pub fn scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}

// --- Prefill.

/// A query tile: rows at consecutive positions of one sequence that [`Kernels::attention_prefill`] computes together.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tile {
    /// The row of the block tables.
    pub sequence: u32,
    /// The first row in `q` and `out`.
    pub row: u32,
    /// The position of the first row.
    pub position: u32,
    pub rows: u32,
}

// SAFETY: four u32 in C's order, as the kernel declares them; any bits are valid.
unsafe impl DeviceRepr for Tile {}
// SAFETY: zeros are numbers.
unsafe impl ValidAsZeroBits for Tile {}

/// Cuts spans of rows, each given as a tile of any size, into tiles of the kernel's size. Those that attend to the most positions come
/// first, so that the device ends on small ones.
pub fn prefill_tiles(head_dim: usize, spans: &[Tile]) -> Vec<Tile> {
    let size = tile_rows(head_dim) as u32;
    let mut tiles: Vec<Tile> = spans
        .iter()
        .flat_map(|span| {
            (0..span.rows).step_by(size as usize).map(move |first| Tile {
                sequence: span.sequence,
                row: span.row + first,
                position: span.position + first,
                rows: size.min(span.rows - first),
            })
        })
        .collect();
    tiles.sort_by_key(|tile| std::cmp::Reverse(tile.position + tile.rows));
    tiles
}

// --- Decode.

/// Positions in a short part of a row (split-KV), as in `attention_decode.cu`: rows that see up to `LONG_FROM` positions have short parts.
const SHORT_PART: usize = 256;
const LONG_PART: usize = 512;
const LONG_FROM: usize = 16_384;

/// The most parts of a row that sees up to `positions` positions, the first of which may be anywhere in its part.
fn parts(positions: usize) -> usize {
    let long = if positions > LONG_FROM { positions.div_ceil(LONG_PART) } else { 0 };
    // A shorter row may have more parts.
    positions.min(LONG_FROM).div_ceil(SHORT_PART).max(long) + 1
}

/// The number of thread blocks that decode attention launches for each that the device can run at once, if a batch may have as many parts.
/// More blocks balance the load better at the end; but a batch has fewer parts than it may have, and the surplus blocks are started in
/// vain.
const DECODE_WAVES: usize = 8;
/// Blocks that a multiprocessor runs at once.
const DECODE_RESIDENT: usize = 3;

/// Partial results of decode attention, until they are combined.
pub struct DecodeScratch {
    rows_max: usize,
    heads: usize,
    parts_max: usize,
    out: CudaSlice<f32>,
    state: CudaSlice<f32>,
}

impl DecodeScratch {
    /// Allocates scratch for up to `rows_max` rows of up to `positions_max` positions.
    pub fn new(device: &Device, rows_max: usize, heads: usize, head_dim: usize, positions_max: usize) -> Result<Self, CudaError> {
        let parts_max = parts(positions_max);
        let states = rows_max * heads * parts_max;
        Ok(Self { rows_max, heads, parts_max, out: device.alloc(states * head_dim)?, state: device.alloc(2 * states)? })
    }
}

impl Kernels {
    /// `out = softmax(scale q Kᵀ) V`, with the queries' cap and sinks if they have any, for rows whose K and V, and those of all earlier
    /// positions, are written. `tiles` come from [`prefill_tiles`]. q and out have `rows` rows; out: `[rows, heads, head_dim]`.
    pub fn attention_prefill(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, Bf16>,
        queries: &Queries<'_>,
        paged: &PagedLayer<'_>,
        tiles: &CudaView<'_, Tile>,
        rows: usize,
    ) -> Result<(), CudaError> {
        queries.assert_shape(out.len(), rows, paged, self);
        let shape = Shape { shared_bytes: self.prefill.shared_bytes, ..Shape::new((queries.heads, tiles.len(), 1), self.prefill.threads) };
        let args = [
            out.into(),
            queries.q.into(),
            queries.stride.into(),
            (&paged.memory.as_view()).into(),
            paged.tables.into(),
            paged.table_stride.into(),
            tiles.into(),
            queries.heads.into(),
            paged.kv_heads.into(),
            queries.window().into(),
            queries.scale_log2().into(),
            queries.cap_log2().into(),
            optional(queries.sinks),
        ];
        // SAFETY: shapes asserted. The caller's contract: tiles lie within `rows` and the tables, and tables name
        // blocks of the memory.
        unsafe { launch(stream, &self.attention_prefill, shape, &args) }
    }

    /// Attention for one row each of `positions.len()` sequences, row `r` with table `r`. A row at [`NO_POSITION`](super::NO_POSITION) gets
    /// zeros. `positions_max`: an upper bound on the positions that a row sees; a loose one costs a little time.
    #[expect(clippy::too_many_arguments, reason = "each is another thing")]
    pub fn attention_decode(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, Bf16>,
        queries: &Queries<'_>,
        paged: &PagedLayer<'_>,
        positions: &CudaView<'_, u32>,
        positions_max: usize,
        scratch: &mut DecodeScratch,
    ) -> Result<(), CudaError> {
        let rows = positions.len();
        queries.assert_shape(out.len(), rows, paged, self);
        let parts_max = parts(positions_max.min(queries.window()));
        assert!(rows <= scratch.rows_max && queries.heads == scratch.heads && parts_max <= scratch.parts_max, "scratch for this batch");
        let heads_at_once = (queries.heads / paged.kv_heads).div_ceil(DECODE_HEADS) * paged.kv_heads;
        let places = (rows * parts_max).min((DECODE_WAVES * DECODE_RESIDENT * self.multiprocessors).div_ceil(heads_at_once));
        let args = [
            (&mut *out).into(),
            (&mut scratch.out).into(),
            (&mut scratch.state).into(),
            queries.q.into(),
            queries.stride.into(),
            (&paged.memory.as_view()).into(),
            paged.tables.into(),
            paged.table_stride.into(),
            positions.into(),
            rows.into(),
            queries.heads.into(),
            paged.kv_heads.into(),
            queries.window().into(),
            queries.scale_log2().into(),
            scratch.parts_max.into(),
            queries.cap_log2().into(),
            optional(queries.sinks),
        ];
        let combine = [
            out.into(),
            (&scratch.out).into(),
            (&scratch.state).into(),
            positions.into(),
            queries.heads.into(),
            queries.window().into(),
            scratch.parts_max.into(),
            optional(queries.sinks),
        ];
        // SAFETY: shapes asserted; positions are below `positions_max` and their tables cover them, by the caller's
        // contract. The second kernel follows the first on one stream.
        unsafe {
            launch(stream, &self.attention_decode, Shape::new((places, heads_at_once, 1), THREADS), &args)?;
            launch(stream, &self.attention_combine, Shape::new((queries.heads, rows, 1), THREADS), &combine)
        }
    }
}

/// Threads of a block in decode's kernels.
const THREADS: usize = 128;
/// Query heads per block of threads.
const DECODE_HEADS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_their_spans_once_and_begin_with_the_longest() {
        let spans = [Tile { sequence: 0, row: 0, position: 5, rows: 300 }, Tile { sequence: 3, row: 300, position: 4000, rows: 1 }];
        let tiles = prefill_tiles(128, &spans);
        let mut rows: Vec<(u32, u32, u32)> =
            tiles.iter().flat_map(|t| (0..t.rows).map(move |i| (t.row + i, t.sequence, t.position + i))).collect();
        rows.sort_unstable();
        let expected: Vec<_> = (0..300).map(|i| (i, 0, 5 + i)).chain([(300, 3, 4000)]).collect();
        assert_eq!(rows, expected);
        assert!(tiles.iter().all(|tile| tile.rows <= 128));
        assert!(tiles.is_sorted_by_key(|tile| std::cmp::Reverse(tile.position + tile.rows)));
    }

    #[test]
    fn there_is_room_for_the_parts_of_every_row() {
        // Counts the parts as `Row` in attention_decode.cu does.
        let of_row = |position: usize, window: usize| {
            let end = position + 1;
            let first = end.saturating_sub(window);
            let part = if end > LONG_FROM { LONG_PART } else { SHORT_PART };
            end.div_ceil(part) - first / part
        };
        for position in 0..40_000 {
            assert!(of_row(position, usize::MAX) <= parts(position + 1));
            for window in [1, 100, 4096, 16_384, 16_385, 20_000] {
                assert!(of_row(position, window) <= parts(window), "{position} {window}");
            }
        }
    }
}
