//! From logits to tokens, on the device: bias, penalties, bans and masks, then one draw per row.

use super::{
    CudaError,
    kernels::Kernels,
    launch::{Shape, launch},
};
use cudarc::driver::{CudaStream, CudaView, CudaViewMut, DeviceRepr, ValidAsZeroBits};

/// How to draw one row's token: the fields of the protocol's `Sampling`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SampleRequest {
    pub seed: u64,
    /// Number of the draw in its sequence.
    pub index: u64,
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
    pub top_k: u32,
}

/// A row's history and its penalties. (1, 0, 0) changes nothing.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RowPenalties {
    /// Row of `occurred`.
    pub history: u32,
    pub repetition: f32,
    pub frequency: f32,
    pub presence: f32,
}

/// One logit.
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
unsafe impl DeviceRepr for RowPenalties {}
// SAFETY: as above.
unsafe impl DeviceRepr for LogitEntry {}
// SAFETY: zeros are numbers.
unsafe impl ValidAsZeroBits for LogitEntry {}

/// The largest vocabulary that the kernel's histogram holds.
const VOCAB_MAX: usize = 1 << 18;
const THREADS: usize = 256;
const SAMPLE_THREADS: usize = 1024;

/// What [`Kernels::edit_logits`] does to each logit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogitEdit {
    /// Adds the entry's value.
    Add,
    /// Makes the token impossible, whatever the value.
    Ban,
}

impl Kernels {
    /// Edits single logits, `[rows, vocab]`. No (row, token) may occur twice; entries' rows are rows of the logits.
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

    /// Makes the tokens impossible that masks leave out: one mask for each of `rows`, which are different rows of the
    /// logits. logits: `[.., vocab]`, masks: `[rows, ceil(vocab / 32)]`, a bit per token that may come, the lowest first.
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

    /// Presence, frequency and repetition penalties. logits: `[rows, vocab]`, penalties: `[rows]`, occurred:
    /// `[histories, vocab]`.
    pub fn penalize(
        &self,
        stream: &CudaStream,
        logits: &mut CudaViewMut<'_, f32>,
        penalties: &CudaView<'_, RowPenalties>,
        occurred: &CudaView<'_, u32>,
        vocab: usize,
    ) -> Result<(), CudaError> {
        let rows = penalties.len();
        assert!(logits.len() == rows * vocab && occurred.len().is_multiple_of(vocab), "logits are [rows, vocab]");
        let args = [logits.into(), penalties.into(), occurred.into(), vocab.into()];
        // SAFETY: shapes asserted; histories are the caller's contract.
        unsafe { launch(stream, &self.penalize, Shape::new((vocab.div_ceil(THREADS), rows, 1), THREADS), &args) }
    }

    /// Starts row `history` of `occurred`, `[histories, vocab]`, from a sequence's prompt.
    pub fn begin_history(
        &self,
        stream: &CudaStream,
        occurred: &mut CudaViewMut<'_, u32>,
        history: usize,
        prompt: &CudaView<'_, u32>,
        vocab: usize,
    ) -> Result<(), CudaError> {
        assert!((history + 1) * vocab <= occurred.len(), "occurred is [histories, vocab]");
        let args = [occurred.into(), history.into(), prompt.into(), prompt.len().into(), vocab.into()];
        // SAFETY: shapes asserted; the kernel checks tokens.
        unsafe { launch(stream, &self.begin_history, Shape::new((1, 1, 1), SAMPLE_THREADS), &args) }
    }

    /// Counts the tokens just drawn, except in rows at [`NO_POSITION`](super::NO_POSITION). All but `occurred`,
    /// `[histories, vocab]`, are `[rows]`.
    pub fn extend_history(
        &self,
        stream: &CudaStream,
        occurred: &mut CudaViewMut<'_, u32>,
        penalties: &CudaView<'_, RowPenalties>,
        tokens: &CudaView<'_, u32>,
        positions: &CudaView<'_, u32>,
        vocab: usize,
    ) -> Result<(), CudaError> {
        let rows = tokens.len();
        assert!(penalties.len() == rows && positions.len() == rows, "one of each for every row");
        let args = [occurred.into(), penalties.into(), tokens.into(), positions.into(), rows.into(), vocab.into()];
        // SAFETY: shapes asserted; histories, and tokens below the vocabulary, are the caller's contract.
        unsafe { launch(stream, &self.extend_history, Shape::new((rows.div_ceil(THREADS), 1, 1), THREADS), &args) }
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
