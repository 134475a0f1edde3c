//! A batch through the layers on the devices: K and V into the paged memories, logits of the requested rows.
//!
//! Each device computes whole outputs: the rows of every matrix are shared out, and the rows of a batch are not. So a product sums in the
//! same order on any number of devices, and its results are gathered, never added: four gathers in a layer. After one phase of a layer all
//! streams meet; then each device reads the others' columns. Two gathers in a row use different memory, so one meeting for each is enough:
//! a device that writes its columns again has met all others since they read them.

use super::{
    rank::{Batch, Buffers, Rank, Spread},
    shape::DeviceShape,
};
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, CudaView};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use tidemill_kernels::cuda::{
    Bf16, CudaError, DeviceKv, Kernels,
    peers::{Part, Peers},
};

pub(super) struct Layers {
    pub(super) shape: DeviceShape,
    pub(super) ranks: Vec<Rank>,
    peers: Peers,
}

impl Layers {
    pub(super) fn new(shape: DeviceShape, ranks: Vec<Rank>, peers: Peers) -> Self {
        Self { shape, ranks, peers }
    }

    fn first(&self) -> &Rank {
        self.ranks.first().expect("at least one device")
    }

    /// The stream of the first device, which draws tokens.
    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.first().stream
    }

    /// The kernels of the first device.
    pub(super) fn kernels(&self) -> &Kernels {
        &self.first().kernels
    }

    /// Whether some weights are in FP8.
    pub(super) fn has_fp8(&self) -> bool {
        self.first().has_fp8()
    }

    /// Makes each device's stream wait for its event.
    pub(super) fn wait(&self, events: &[Arc<CudaEvent>]) -> Result<(), CudaError> {
        self.ranks.iter().zip(events).try_for_each(|(rank, event)| Ok(rank.stream.wait(event)?))
    }

    /// Records an event on each device's stream.
    pub(super) fn record_events(&self) -> Result<Vec<CudaEvent>, CudaError> {
        self.ranks.iter().map(|rank| Ok(rank.stream.record_event(None)?)).collect()
    }

    /// Launches `step` on the first device's stream, which then stands for all: after all that their streams have to do, and before all
    /// that follows.
    pub(super) fn as_one(&self, step: impl FnOnce() -> Result<(), CudaError>) -> Result<(), CudaError> {
        self.peers.join()?;
        step()?;
        self.peers.fork()
    }

    /// Waits for all devices' streams.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        self.watch()?;
        self.ranks.iter().try_for_each(|rank| Ok(rank.stream.synchronize()?))
    }

    /// Waits until several devices have done all that their streams have to do, or one has failed: a wait for one that waits for the failed one
    /// might never end. A single device needs no watch, as its failure ends any wait for it.
    pub(super) fn watch(&self) -> Result<(), CudaError> {
        if self.ranks.len() == 1 {
            return Ok(());
        }
        let (begun, mut pending) = (Instant::now(), self.record_events()?);
        loop {
            let mut still = Vec::with_capacity(pending.len());
            for event in pending {
                event.context().bind_to_thread()?;
                if !event.try_is_complete()? {
                    still.push(event);
                }
            }
            if still.is_empty() {
                return Ok(());
            }
            pending = still;
            if begun.elapsed() > STEP_MAX {
                return Err(CudaError::Stuck { what: "a step", seconds: STEP_MAX.as_secs() });
            }
            thread::sleep(ASK_AGAIN);
        }
    }

    /// Launches the batch, of which each device has the numbers, through all layers. With `kv_only`, only K and V are wanted, so the last
    /// layer stops there. All streams begin after the first one, which ends after all others.
    pub(super) fn run(&mut self, batches: &mut [Batch<'_>], kv: &mut [DeviceKv], kv_only: bool) -> Result<(), CudaError> {
        let rows = batches[0].tokens.len();
        let DeviceShape { hidden, layers, .. } = self.shape;
        self.ranks[0].embed(&batches[0].tokens)?;
        self.peers.fork()?;
        self.share_residual(rows)?;
        for index in 0..layers {
            let ends = kv_only && index + 1 == layers;
            for ((rank, batch), kv) in self.ranks.iter_mut().zip(&mut *batches).zip(&mut *kv) {
                rank.attend(index, batch, kv, ends)?;
            }
            if ends {
                break;
            }
            self.peers.meet()?;
            self.gather(rows, self.shape.q(), |buffers| &mut buffers.attended)?;
            self.ranks.iter_mut().try_for_each(|rank| rank.project(index, rows))?;
            self.peers.meet()?;
            self.gather(rows, hidden, |buffers| &mut buffers.delta)?;
            self.ranks.iter_mut().zip(&*batches).try_for_each(|(rank, batch)| rank.widen(index, batch))?;
            self.peers.meet()?;
            if let Some(inner) = self.first().inner(index) {
                self.gather(rows, inner, |buffers| &mut buffers.activated)?;
            }
            if self.first().has_experts(index) {
                self.gather_experts(rows)?;
            }
            self.ranks.iter_mut().try_for_each(|rank| rank.narrow(index, rows))?;
            self.peers.meet()?;
            self.gather(rows, hidden, |buffers| buffers.beside.as_mut().unwrap_or(&mut buffers.delta))?;
        }
        self.peers.join()
    }

    /// Copies the residual stream of the first device to the others.
    fn share_residual(&mut self, rows: usize) -> Result<(), CudaError> {
        let numbers = rows * self.shape.hidden;
        let (first, others) = self.ranks.split_first_mut().expect("at least one device");
        let whole = [Part::from(&first.buffers.residual)];
        for Rank { stream, kernels, buffers, .. } in others {
            // SAFETY: the streams have forked after it was written, and it changes after the first meeting.
            unsafe { kernels.gather(stream, &mut buffers.residual.slice_mut(..numbers), &whole, rows, UNIT) }?;
        }
        Ok(())
    }

    /// Gathers the columns of all devices on each of them, where the streams have just met.
    fn gather(&mut self, rows: usize, width: usize, of: impl Fn(&mut Buffers) -> &mut Spread<Bf16>) -> Result<(), CudaError> {
        let parts: Vec<Part> = self.ranks.iter_mut().map(|rank| Part::from(&of(&mut rank.buffers).own)).collect();
        for Rank { stream, kernels, buffers, .. } in &mut self.ranks {
            let Some(all) = &mut of(buffers).all else { continue };
            // SAFETY: the parts were written before the streams met, and change after they have met again.
            unsafe { kernels.gather(stream, &mut all.slice_mut(..rows * width), &parts, rows, UNIT) }?;
        }
        Ok(())
    }

    /// Gathers the activated numbers of experts likewise.
    fn gather_experts(&mut self, rows: usize) -> Result<(), CudaError> {
        let mut parts = Vec::with_capacity(self.ranks.len());
        for rank in &mut self.ranks {
            parts.push(Part::from(rank.experts.as_mut().expect("there are layers of experts").activated(rows).0));
        }
        for Rank { stream, kernels, experts, .. } in &mut self.ranks {
            let experts = experts.as_mut().expect("there are layers of experts");
            let entries = rows * experts.chosen();
            let (_, Some(mut all)) = experts.activated(rows) else { continue };
            // SAFETY: as in `gather`.
            unsafe { kernels.gather(stream, &mut all, &parts, entries, UNIT) }?;
        }
        Ok(())
    }

    /// Warms the products of batches of up to `rows_max` rows, and of `logits`, `[logit_rows_max, vocab]`.
    pub(super) fn warm(&mut self, rows_max: usize, logit_rows_max: usize, logits: &mut CudaSlice<f32>) -> Result<(), CudaError> {
        for rank in &mut self.ranks {
            rank.warm_products(rows_max)?;
            rank.warm_logits(logit_rows_max, logits)?;
        }
        Ok(())
    }

    /// Saves the choices for the next process on such devices.
    pub(super) fn keep_choices(&mut self) {
        self.ranks.iter_mut().for_each(Rank::keep_choices);
    }

    /// Computes the logits of the `wanted` rows of the batch that was just [`run`](Self::run), `[wanted, vocab]`, on the first device; each
    /// device has their numbers. Further rows of `logits` are overwritten. Each row may be wanted once.
    pub(super) fn logits(&mut self, rows: usize, wanted: &[CudaView<'_, u32>], logits: &mut CudaSlice<f32>) -> Result<(), CudaError> {
        // The first device has read the others' earlier logits then.
        self.peers.fork()?;
        for (rank, wanted) in self.ranks.iter_mut().zip(wanted) {
            rank.logits(rows, wanted, logits)?;
        }
        self.peers.join()?;
        if self.ranks.len() == 1 {
            return Ok(());
        }
        let parts: Vec<Part> = self.ranks.iter().filter_map(|rank| rank.buffers.logits.as_ref().map(Part::from)).collect();
        let (Rank { stream, kernels, .. }, count) = (self.first(), wanted[0].len());
        // SAFETY: the first stream comes after all others, which write logits again when they have forked from it.
        unsafe { kernels.gather(stream, &mut logits.slice_mut(..count * self.shape.vocab), &parts, count, UNIT) }
    }
}

/// The deadline of what several devices do together, of which a step takes seconds at most.
const STEP_MAX: Duration = Duration::from_secs(60);
/// The interval at which the host polls devices.
const ASK_AGAIN: Duration = Duration::from_micros(20);

/// Parts have a multiple of as many columns, so that those of bf16 numbers begin at multiples of 16 bytes.
pub(super) const UNIT: usize = 8;
