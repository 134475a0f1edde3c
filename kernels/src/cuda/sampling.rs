//! From logits to tokens, on the device: soft cap, bias, penalties, bans and masks, then one draw per row.

use super::{
    CudaError,
    kernels::Kernels,
    launch::{Arg, Shape, launch, soft_cap_factor},
};
use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, ValidAsZeroBits};

/// The sampling of one row's token: the fields of the protocol's `Sampling`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SampleRequest {
    pub seed: u64,
    /// The index of the draw in its sequence.
    pub index: u64,
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
    pub top_k: u32,
}

/// The penalties on the logit of a token that occurred.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LogitPenalty {
    pub row: u32,
    /// Skipped if outside the vocabulary.
    pub token: u32,
    /// The divisor of a logit above 0, and the factor of others; 1 changes nothing.
    pub repetition: f32,
    /// The number that is subtracted afterwards.
    pub subtracted: f32,
}

/// One logit and a value for it.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct LogitEntry {
    pub row: u32,
    /// Skipped if outside the vocabulary.
    pub token: u32,
    pub value: f32,
}

// SAFETY: plain numbers in C's order, as penalties.cu and sample.cu declare them; any bits are valid.
unsafe impl DeviceRepr for SampleRequest {}
// SAFETY: zeros are numbers.
unsafe impl ValidAsZeroBits for SampleRequest {}
// SAFETY: as above.
unsafe impl DeviceRepr for LogitPenalty {}
// SAFETY: zeros are numbers.
unsafe impl ValidAsZeroBits for LogitPenalty {}
// SAFETY: as above.
unsafe impl DeviceRepr for LogitEntry {}
// SAFETY: zeros are numbers.
unsafe impl ValidAsZeroBits for LogitEntry {}

/// The largest vocabulary that the kernel's histogram holds.
const VOCAB_MAX: usize = 1 << 18;
const THREADS: usize = 256;
const SAMPLE_THREADS: usize = 1024;

/// The operation of [`Kernels::edit_logits`] on each logit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogitEdit {
    /// Adds the entry's value.
    Add,
    /// Makes the token impossible, regardless of the value.
    Ban,
}

impl Kernels {
    /// `cap tanh(logit / cap)` of every logit.
    pub fn cap_logits(&self, stream: &CudaStream, logits: &mut CudaViewMut<'_, f32>, cap: f32) -> Result<(), CudaError> {
        let count = logits.len();
        let args = [logits.into(), Arg::U64(count as u64), soft_cap_factor(cap).into(), cap.into()];
        // SAFETY: the kernel stays below `count`.
        unsafe { launch(stream, &self.cap_logits, Shape::new((count.div_ceil(THREADS), 1, 1), THREADS), &args) }
    }

    /// Edits single logits of `[rows, vocab]`. No (row, token) may occur twice; entries' rows are rows of the logits.
    pub fn edit_logits(
        &self,
        stream: &CudaStream,
        edit: LogitEdit,
        logits: &mut CudaViewMut<'_, f32>,
        entries: &CudaView<'_, LogitEntry>,
        vocab: usize,
    ) -> Result<(), CudaError> {
        let kernel = match edit {
            LogitEdit::Add => &self.add_to_logits,
            LogitEdit::Ban => &self.ban,
        };
        let args = [logits.into(), entries.into(), entries.len().into(), vocab.into()];
        // SAFETY: the kernel checks tokens; rows are the caller's contract.
        unsafe { launch(stream, kernel, Shape::new((entries.len().div_ceil(THREADS), 1, 1), THREADS), &args) }
    }

    /// Makes the tokens impossible that masks leave out: one mask for each of `rows`, which are different rows of the logits. logits: `[..,
    /// vocab]`, masks: `[rows, ceil(vocab / 32)]`, a bit per allowed token, the lowest first.
    pub fn mask_logits(
        &self,
        stream: &CudaStream,
        logits: &mut CudaViewMut<'_, f32>,
        masks: &CudaView<'_, u32>,
        rows: &CudaView<'_, u32>,
        vocab: usize,
    ) -> Result<(), CudaError> {
        assert_eq!(masks.len(), rows.len() * vocab.div_ceil(32), "masks are [rows, ceil(vocab / 32)]");
        assert!(logits.len().is_multiple_of(vocab) && rows.len() <= logits.len() / vocab, "logits are [.., vocab]");
        let args = [logits.into(), masks.into(), rows.into(), vocab.into()];
        // SAFETY: shapes asserted; rows are rows of the logits, by the caller's contract.
        unsafe { launch(stream, &self.mask_logits, Shape::new((vocab.div_ceil(THREADS), rows.len(), 1), THREADS), &args) }
    }

    /// Penalizes single logits, `[rows, vocab]`, to the bits that the CPU computes. No (row, token) may occur twice;
    /// penalties' rows are rows of the logits.
    pub fn penalize(
        &self,
        stream: &CudaStream,
        logits: &mut CudaViewMut<'_, f32>,
        penalties: &CudaView<'_, LogitPenalty>,
        vocab: usize,
    ) -> Result<(), CudaError> {
        let args = [logits.into(), penalties.into(), penalties.len().into(), vocab.into()];
        // SAFETY: the kernel checks tokens; rows are the caller's contract.
        unsafe { launch(stream, &self.penalize, Shape::new((penalties.len().div_ceil(THREADS), 1, 1), THREADS), &args) }
    }

    /// Draws a token from each row. logits: `[rows, vocab]`; tokens and requests: `[rows]`.
    pub fn sample(
        &self,
        stream: &CudaStream,
        tokens: &mut CudaViewMut<'_, u32>,
        logits: &CudaView<'_, f32>,
        requests: &CudaView<'_, SampleRequest>,
        vocab: usize,
    ) -> Result<(), CudaError> {
        let rows = requests.len();
        assert!((1..=VOCAB_MAX).contains(&vocab), "a vocabulary of up to {VOCAB_MAX}");
        assert!(logits.len() == rows * vocab && tokens.len() == rows, "logits are [rows, vocab]");
        let args = [tokens.into(), logits.into(), requests.into(), vocab.into()];
        // SAFETY: shapes asserted.
        unsafe { launch(stream, &self.sample, Shape::new((rows, 1, 1), SAMPLE_THREADS), &args) }
    }
}
