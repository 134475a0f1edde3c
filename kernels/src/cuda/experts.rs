//! Layers of experts: routing, the rows in the order of their experts, grouped products, and their weighted sum. The host knows nothing
//! about the routing: all launches depend on the number of rows alone, so that graphs can hold them.
//!
//! A row's bits depend neither on the rows beside it nor on their number.

use super::{
    CudaError,
    compile::{self, Heads, Source},
    device::{Bf16, Device, function},
    launch::{Shape, launch, optional},
};
use cudarc::driver::{CudaFunction, CudaSlice, CudaStream, CudaView, CudaViewMut};

/// The most experts of a layer.
pub const EXPERTS_MAX: usize = 1024;
/// The most experts per row, and the most groups of experts.
pub const CHOSEN_MAX: usize = 32;

/// The sizes of a layer of experts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ExpertSizes {
    pub experts: usize,
    /// The number of experts per row.
    pub chosen: usize,
    /// The width of the rows, a multiple of 8.
    pub hidden: usize,
    /// The width of an expert, a multiple of 8.
    pub inner: usize,
    /// The number of devices, each of which computes an equal part of the experts' widths and of their outputs: of `inner` and of `hidden`.
    pub ranks: usize,
    /// Outputs of the router: one per expert, and one more if a shared expert has a gate.
    pub router_outputs: usize,
}

impl ExpertSizes {
    fn assert_supported(&self) {
        let Self { experts, chosen, hidden, inner, ranks, router_outputs } = *self;
        assert!(
            (1..=EXPERTS_MAX).contains(&experts) && (1..=CHOSEN_MAX.min(experts)).contains(&chosen),
            "experts that kernels choose from"
        );
        assert!([hidden, inner].into_iter().all(|width| width > 0 && width.is_multiple_of(8 * ranks)), "parts of a multiple of 8");
        assert!(router_outputs == experts || router_outputs == experts + 1, "an output for each expert, and one for a gate");
    }

    /// The device's part of `inner`.
    fn own_inner(&self) -> usize {
        self.inner / self.ranks
    }

    /// The device's part of the outputs.
    fn own_hidden(&self) -> usize {
        self.hidden / self.ranks
    }
}

/// The numbers by which experts are chosen and weighted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ExpertScores {
    Softmax = 0,
    Sigmoid = 1,
    /// Chosen by their logits, weighted by the softmax of the chosen ones.
    ChosenSoftmax = 2,
}

/// The rule by which rows choose experts.
#[derive(Clone, Copy, Debug)]
pub struct RoutingRule {
    pub scores: ExpertScores,
    /// The number of groups, and of those that a row's experts come from.
    pub groups: Option<(usize, usize)>,
    /// Whether the weights of a row are scaled to sum to 1.
    pub is_normalized: bool,
    pub factor: f32,
}

/// The input of a layer of experts: the residual stream, whose norm in f32 the router multiplies, and the same in bf16.
pub struct ExpertInput<'a> {
    /// `[rows, hidden]`
    pub residual: &'a CudaView<'a, f32>,
    /// `[hidden]`
    pub norm: &'a CudaView<'a, f32>,
    pub epsilon: f32,
    /// `[rows, hidden]`
    pub normed: &'a CudaView<'a, Bf16>,
    /// `[rows]`; rows at [`NO_POSITION`](super::NO_POSITION) get no experts, and a sum of zeros.
    pub positions: &'a CudaView<'a, u32>,
}

/// The weights of a layer of experts, of which a device has its parts of `inner` and `hidden` where these are outputs.
pub struct ExpertWeights<'a> {
    /// `[router_outputs, hidden]`
    pub router: &'a CudaView<'a, f32>,
    /// Added to scores for the choice alone, `[experts]`.
    pub correction: Option<&'a CudaView<'a, f32>>,
    /// `[experts, 2 inner, hidden]`, outputs of the gate alternating with those that they gate.
    pub gate_up: &'a CudaView<'a, Bf16>,
    /// `[experts, 2 inner]`, likewise.
    pub gate_up_bias: Option<&'a CudaView<'a, Bf16>>,
    /// `[experts, hidden, inner]`
    pub down: &'a CudaView<'a, Bf16>,
    /// `[experts, hidden]`
    pub down_bias: Option<&'a CudaView<'a, Bf16>>,
}

/// The function between the two products of an expert.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ExpertActivation {
    /// `gate * sigmoid(gate) * up`
    Silu,
    /// `gate * sigmoid(alpha gate) * (up + 1)`, the gate at most `limit`, and up within `limit` of zero.
    Clamped { alpha: f32, limit: f32 },
}

/// Intermediate results of a layer of experts, in memory that all layers share.
pub struct ExpertScratch {
    rows_max: usize,
    sizes: ExpertSizes,
    /// `[rows, router_outputs]`
    logits: CudaSlice<f32>,
    /// `[rows, chosen]`, ascending.
    experts: CudaSlice<u32>,
    weights: CudaSlice<f32>,
    /// The place of each entry of `experts` in the order of experts.
    slots: CudaSlice<u32>,
    /// The first slot of each expert, and the end of the last.
    offsets: CudaSlice<u32>,
    rows_by_slot: CudaSlice<u32>,
    /// `[slots, inner]`, the device's part.
    own_activated: CudaSlice<Bf16>,
    /// `[slots, inner]`, gathered; `None` if the device's part is all.
    activated: Option<CudaSlice<Bf16>>,
    /// `[slots, hidden]`, the device's part.
    outputs: CudaSlice<Bf16>,
}

impl ExpertScratch {
    /// Allocates scratch for up to `rows_max` rows.
    pub fn new(device: &Device, sizes: ExpertSizes, rows_max: usize) -> Result<Self, CudaError> {
        sizes.assert_supported();
        let entries = rows_max * sizes.chosen;
        Ok(Self {
            rows_max,
            sizes,
            logits: device.alloc(rows_max * sizes.router_outputs)?,
            experts: device.alloc(entries)?,
            weights: device.alloc(entries)?,
            slots: device.alloc(entries)?,
            offsets: device.alloc(sizes.experts + 1)?,
            rows_by_slot: device.alloc(entries)?,
            own_activated: device.alloc(entries * sizes.own_inner())?,
            activated: (sizes.ranks > 1).then(|| device.alloc(entries * sizes.inner)).transpose()?,
            outputs: device.alloc(entries * sizes.own_hidden())?,
        })
    }

    /// The device's part of the activated numbers, which [`gate_up`](ExpertKernels::gate_up) computed, and the place for those of all devices for
    /// `rows` rows: `[slots, inner]`.
    pub fn activated(&mut self, rows: usize) -> (&CudaSlice<Bf16>, Option<CudaViewMut<'_, Bf16>>) {
        let numbers = rows * self.sizes.chosen * self.sizes.inner;
        (&self.own_activated, self.activated.as_mut().map(|all| all.slice_mut(..numbers)))
    }

    /// Entries of a row.
    pub fn chosen(&self) -> usize {
        self.sizes.chosen
    }

    /// The router's logits for the rows of the last layer, `[rows, router_outputs]`, their experts, `[rows, chosen]`, and the weights
    /// of these: for checks and measurements.
    pub fn choices(&self) -> (&CudaSlice<f32>, &CudaSlice<u32>, &CudaSlice<f32>) {
        (&self.logits, &self.experts, &self.weights)
    }
}

/// A form of the grouped products, as `experts_multiply.cu` defines it.
struct Form {
    gate_up: CudaFunction,
    down: CudaFunction,
    rows: usize,
    columns: usize,
    threads: usize,
    shared_bytes: usize,
}

/// The forms: the names of their kernels, and their rows and columns per tile, threads and stages.
const FORMS: [(&str, &str, [usize; 4]); 3] = [
    ("experts_gate_up_of_few", "experts_down_of_few", [16, 64, 128, 6]),
    ("experts_gate_up_of_some", "experts_down_of_some", [64, 64, 128, 4]),
    ("experts_gate_up_of_many", "experts_down_of_many", [128, 128, 256, 3]),
];
/// Numbers of a row in one stage, as in `experts_multiply.cu`.
const STEP: usize = 64;
/// Rows per expert on average from which tiles are large.
const MANY_EACH: usize = 64;

impl Form {
    /// The grid for `outputs` columns of the entries of `rows` rows, with the largest possible number of tiles.
    fn shape(&self, sizes: &ExpertSizes, rows: usize, outputs: usize) -> Shape {
        let tiles = tiles_max(rows * sizes.chosen, sizes.experts, self.rows);
        let grid = (outputs.div_ceil(self.columns), tiles, 1);
        Shape { shared_bytes: self.shared_bytes, ..Shape::new(grid, self.threads) }
    }
}

/// The most tiles of `entries` entries, each of up to `height` entries of one expert.
fn tiles_max(entries: usize, experts: usize, height: usize) -> usize {
    let with_entries = entries.min(experts);
    (entries + with_entries * (height - 1)) / height
}

/// The kernels for layers of experts, which only models with such layers load.
pub struct ExpertKernels {
    router_of_few: CudaFunction,
    router_of_many: CudaFunction,
    route: CudaFunction,
    sort: CudaFunction,
    combine: CudaFunction,
    forms: [Form; 3],
}

impl ExpertKernels {
    /// Compiles the kernels that the cache does not hold.
    pub fn load(device: &Device) -> Result<Self, CudaError> {
        // The sources here do not depend on the heads.
        let module = |source: &Source| device.module(source, Heads::bf16(16));
        let (rest, products) = (module(&compile::EXPERTS)?, module(&compile::EXPERTS_MULTIPLY)?);
        let form = |(gate_up, down, [rows, columns, threads, stages]): (&str, &str, [usize; 4])| {
            let shared_bytes = stages * (rows + columns) * STEP * size_of::<Bf16>();
            let (gate_up, down) = (function(&products, gate_up, shared_bytes)?, function(&products, down, shared_bytes)?);
            Ok::<_, CudaError>(Form { gate_up, down, rows, columns, threads, shared_bytes })
        };
        let [few, some, many] = FORMS;
        Ok(Self {
            router_of_few: function(&rest, "router_logits_of_few", 0)?,
            router_of_many: function(&rest, "router_logits_of_many", 0)?,
            route: function(&rest, "experts_route", 0)?,
            sort: function(&rest, "experts_sort", 0)?,
            combine: function(&rest, "experts_combine", 0)?,
            forms: [form(few)?, form(some)?, form(many)?],
        })
    }

    /// Sets `out` to the experts' weighted outputs for the rows: [`choose`](Self::choose), [`multiply`](Self::multiply),
    /// [`combine`](Self::combine).
    #[expect(clippy::too_many_arguments, reason = "each is another thing")]
    pub fn apply(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, Bf16>,
        input: &ExpertInput<'_>,
        rule: &RoutingRule,
        weights: &ExpertWeights<'_>,
        activation: ExpertActivation,
        shared: Option<&CudaView<'_, Bf16>>,
        scratch: &mut ExpertScratch,
    ) -> Result<(), CudaError> {
        let rows = input.positions.len();
        self.choose(stream, input, rule, weights, scratch)?;
        self.multiply(stream, input.normed, rows, weights, activation, scratch)?;
        self.combine(stream, out, rows, shared, scratch)
    }

    /// Routes the rows, and sorts them by expert.
    pub fn choose(
        &self,
        stream: &CudaStream,
        input: &ExpertInput<'_>,
        rule: &RoutingRule,
        weights: &ExpertWeights<'_>,
        scratch: &mut ExpertScratch,
    ) -> Result<(), CudaError> {
        let (sizes, rows) = (scratch.sizes, input.positions.len());
        let ExpertSizes { experts, chosen, hidden, router_outputs, .. } = sizes;
        assert!(rows <= scratch.rows_max, "scratch for {rows} rows");
        assert!(input.residual.len() == rows * hidden && input.norm.len() == hidden, "residual is [rows, hidden], norm [hidden]");
        assert_eq!(weights.router.len(), router_outputs * hidden, "router is [outputs, hidden]");
        assert!(weights.correction.is_none_or(|correction| correction.len() == experts), "correction is [experts]");
        let (groups, groups_chosen) = rule.groups.unwrap_or((1, 1));
        assert!((1..=CHOSEN_MAX).contains(&groups) && (1..=groups).contains(&groups_chosen), "groups that kernels choose from");
        assert!(experts.is_multiple_of(groups) && experts / groups * groups_chosen >= chosen, "groups with enough experts");

        let few = rows <= ROUTER_FEW;
        let (router, [across, down], threads) =
            if few { (&self.router_of_few, [4, 4], 128) } else { (&self.router_of_many, [32, 16], 256) };
        let shape = Shape::new((router_outputs.div_ceil(across), rows.div_ceil(down), 1), threads);
        let args = [
            (&mut scratch.logits).into(),
            input.residual.into(),
            input.norm.into(),
            weights.router.into(),
            rows.into(),
            hidden.into(),
            router_outputs.into(),
            input.epsilon.into(),
        ];
        // SAFETY: shapes asserted.
        unsafe { launch(stream, router, shape, &args) }?;
        let args = [
            (&mut scratch.experts).into(),
            (&mut scratch.weights).into(),
            (&scratch.logits).into(),
            optional(weights.correction),
            input.positions.into(),
            rows.into(),
            router_outputs.into(),
            experts.into(),
            chosen.into(),
            (rule.scores as usize).into(),
            groups.into(),
            groups_chosen.into(),
            usize::from(rule.is_normalized).into(),
            rule.factor.into(),
        ];
        // SAFETY: shapes and the kernel's limits asserted; the logits come from the launch before.
        unsafe { launch(stream, &self.route, Shape::new((rows.div_ceil(ROUTE_WARPS), 1, 1), ROUTE_WARPS * 32), &args) }?;
        let entries = rows * chosen;
        let args = [
            (&mut scratch.offsets).into(),
            (&mut scratch.rows_by_slot).into(),
            (&mut scratch.slots).into(),
            (&scratch.experts).into(),
            entries.into(),
            chosen.into(),
        ];
        let threads = if entries <= SORT_FEW { 128 } else { 1024 };
        let grid = if rows == 0 { 0 } else { experts };
        // SAFETY: the entries come from the launch before; there is room for a slot each.
        unsafe { launch(stream, &self.sort, Shape::new((grid, 1, 1), threads), &args) }
    }

    /// Multiplies the rows that were [`chosen`](Self::choose), by expert, on one device: [`gate_up`](Self::gate_up) and [`down`](Self::down).
    pub fn multiply(
        &self,
        stream: &CudaStream,
        normed: &CudaView<'_, Bf16>,
        rows: usize,
        weights: &ExpertWeights<'_>,
        activation: ExpertActivation,
        scratch: &mut ExpertScratch,
    ) -> Result<(), CudaError> {
        self.gate_up(stream, normed, rows, weights, activation, scratch)?;
        self.down(stream, rows, weights, scratch)
    }

    /// Computes the device's part of the experts' activated numbers, for the rows that were [`chosen`](Self::choose).
    pub fn gate_up(
        &self,
        stream: &CudaStream,
        normed: &CudaView<'_, Bf16>,
        rows: usize,
        weights: &ExpertWeights<'_>,
        activation: ExpertActivation,
        scratch: &mut ExpertScratch,
    ) -> Result<(), CudaError> {
        let (ExpertSizes { experts, hidden, .. }, inner) = (scratch.sizes, scratch.sizes.own_inner());
        assert!(rows <= scratch.rows_max && normed.len() == rows * hidden, "normed is [rows, hidden]");
        assert_eq!(weights.gate_up.len(), experts * 2 * inner * hidden, "gate_up is [experts, 2 inner, hidden]");
        assert!(weights.gate_up_bias.is_none_or(|bias| bias.len() == experts * 2 * inner), "its bias is [experts, 2 inner]");
        let form = &self.forms[form_of(rows, &scratch.sizes)];
        let (alpha, limit) = match activation {
            ExpertActivation::Silu => (1.0, 0.0),
            ExpertActivation::Clamped { alpha, limit } => (alpha, limit),
        };
        let args = [
            (&mut scratch.own_activated).into(),
            normed.into(),
            weights.gate_up.into(),
            optional(weights.gate_up_bias),
            (&scratch.offsets).into(),
            (&scratch.rows_by_slot).into(),
            experts.into(),
            hidden.into(),
            (2 * inner).into(),
            alpha.into(),
            limit.into(),
        ];
        // SAFETY: shapes asserted; offsets and rows are those of `choose`, by the caller's contract, and lie within the scratch.
        unsafe { launch(stream, &form.gate_up, form.shape(&scratch.sizes, rows, 2 * inner), &args) }
    }

    /// Computes the device's part of the experts' outputs, from all activated numbers.
    pub fn down(
        &self,
        stream: &CudaStream,
        rows: usize,
        weights: &ExpertWeights<'_>,
        scratch: &mut ExpertScratch,
    ) -> Result<(), CudaError> {
        let (ExpertSizes { experts, inner, .. }, hidden) = (scratch.sizes, scratch.sizes.own_hidden());
        assert!(rows <= scratch.rows_max, "scratch for {rows} rows");
        assert_eq!(weights.down.len(), experts * hidden * inner, "down is [experts, hidden, inner]");
        assert!(weights.down_bias.is_none_or(|bias| bias.len() == experts * hidden), "its bias is [experts, hidden]");
        let form = &self.forms[form_of(rows, &scratch.sizes)];
        let args = [
            (&mut scratch.outputs).into(),
            scratch.activated.as_ref().unwrap_or(&scratch.own_activated).into(),
            weights.down.into(),
            optional(weights.down_bias),
            (&scratch.offsets).into(),
            experts.into(),
            inner.into(),
            hidden.into(),
        ];
        // SAFETY: as in `gate_up`.
        unsafe { launch(stream, &form.down, form.shape(&scratch.sizes, rows, hidden), &args) }
    }

    /// Sets `out[row]` to the weighted sum of the products and of `shared`, the shared expert's outputs for all rows; both `[rows,
    /// hidden]`, of which the device has its part. Rows without experts become zeros.
    pub fn combine(
        &self,
        stream: &CudaStream,
        out: &mut CudaViewMut<'_, Bf16>,
        rows: usize,
        shared: Option<&CudaView<'_, Bf16>>,
        scratch: &ExpertScratch,
    ) -> Result<(), CudaError> {
        let (ExpertSizes { experts, chosen, router_outputs, .. }, hidden) = (scratch.sizes, scratch.sizes.own_hidden());
        assert!(rows <= scratch.rows_max && out.len() == rows * hidden, "out is [rows, hidden]");
        assert!(shared.is_none_or(|shared| shared.len() == rows * hidden), "shared is [rows, hidden]");
        let args = [
            out.into(),
            (&scratch.outputs).into(),
            (&scratch.experts).into(),
            (&scratch.weights).into(),
            (&scratch.slots).into(),
            optional(shared),
            (&scratch.logits).into(),
            hidden.into(),
            chosen.into(),
            router_outputs.into(),
            usize::from(router_outputs > experts).into(),
        ];
        let shape = Shape::new(((hidden / 8).div_ceil(COMBINE_THREADS), rows, 1), COMBINE_THREADS);
        // SAFETY: shapes asserted; slots are those of `choose`, by the caller's contract.
        unsafe { launch(stream, &self.combine, shape, &args) }
    }
}

/// The number of rows up to which the router's products have small blocks.
const ROUTER_FEW: usize = 64;
/// Rows per block of the routing kernel.
const ROUTE_WARPS: usize = 4;
/// The number of entries up to which sorting blocks are small.
const SORT_FEW: usize = 1024;
const COMBINE_THREADS: usize = 256;

/// The form of products for this many rows.
fn form_of(rows: usize, sizes: &ExpertSizes) -> usize {
    let [(.., [few, ..]), ..] = FORMS;
    if rows <= few {
        0
    } else if rows * sizes.chosen < MANY_EACH * sizes.experts {
        1
    } else {
        2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_tiles_as_any_routing_needs() {
        for (rows_of_experts, height) in
            [(vec![8], 16), (vec![1; 8], 16), (vec![17, 1, 1, 0], 16), (vec![65, 63, 0, 129], 64), (vec![0; 3], 128)]
        {
            let entries: usize = rows_of_experts.iter().sum();
            let tiles: usize = rows_of_experts.iter().map(|rows: &usize| rows.div_ceil(height)).sum();
            assert!(tiles <= tiles_max(entries, rows_of_experts.len(), height), "{rows_of_experts:?}");
        }
        assert_eq!([tiles_max(8, 128, 16), tiles_max(512, 128, 64), tiles_max(65_536, 128, 128)], [8, 134, 639]);
    }

    #[test]
    fn tiles_grow_with_the_rows_of_an_expert() {
        let sizes = |experts, chosen| ExpertSizes { experts, chosen, hidden: 8, inner: 8, ranks: 1, router_outputs: experts };
        let forms = |sizes, rows: &[usize]| rows.iter().map(|&rows| form_of(rows, &sizes)).collect::<Vec<_>>();
        assert_eq!(forms(sizes(128, 8), &[1, 16, 17, 64, 1023, 1024, 8192]), [0, 0, 1, 1, 1, 2, 2]);
        assert_eq!(forms(sizes(8, 2), &[16, 255, 256]), [0, 1, 2]);
    }
}
