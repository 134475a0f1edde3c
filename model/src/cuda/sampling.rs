//! From logits on the device to tokens. Rows with a bias, penalties, bans or a grammar's mask are edited and redrawn on the device. The
//! host does what the device's sampler cannot (log-probabilities), for the rows that need it, with the CPU's code.
//!
//! The device keeps no state per sequence: each step sends the penalties of every token that occurred. A step names no sequences, only
//! rows: these change places, sequences are preempted and continue elsewhere, and a wrong guess takes its tokens back. A history on the
//! device would have to follow all of that, to save 16 bytes per token that occurred, which the host collects while the layers run.

use super::{inputs::Inputs, layers::Layers, shape::DeviceShape};
use crate::{penalties::penalized, sampler::SamplerScratch, step::take_logits};
use cudarc::driver::CudaSlice;
use tidemill_kernels::cuda::{
    CudaError, Device,
    host::HostBuffer,
    sampling::{LogitEdit, LogitEntry, LogitPenalty, SampleRequest},
};
use tidemill_proto::{
    block::Token,
    step::{Allowed, Draw, Mask, Segment, SegmentResult, Wanted},
};

/// Logits of some rows, and the tokens drawn from them.
pub(super) struct Sampling {
    vocab: usize,
    /// `[rows_max, vocab]`
    pub(super) logits: CudaSlice<f32>,
    requests: CudaSlice<SampleRequest>,
    tokens: CudaSlice<u32>,
    host_requests: HostBuffer<SampleRequest>,
    host_tokens: HostBuffer<u32>,
    host_row: HostBuffer<f32>,
    scratch: SamplerScratch,
    biases: Inputs<LogitEntry>,
    penalties: Inputs<LogitPenalty>,
    bans: Inputs<LogitEntry>,
    masks: Inputs<u32>,
    masked_rows: Inputs<u32>,
}

/// Row `index` of the logits that segment `segment` needs.
#[derive(Clone, Copy)]
pub(super) struct LogitRow {
    pub(super) segment: usize,
    pub(super) index: usize,
}

/// The request of padding, and of rows whose token the host draws.
const GREEDY: SampleRequest = SampleRequest { seed: 0, index: 0, temperature: 0.0, top_p: 1.0, min_p: 0.0, top_k: 0 };

/// The initial room for edits of single logits; it grows.
const ENTRIES: usize = 1024;

impl Sampling {
    pub(super) fn new(device: &Device, shape: DeviceShape, rows_max: usize) -> Result<Self, CudaError> {
        Ok(Self {
            vocab: shape.vocab,
            logits: device.alloc(rows_max * shape.vocab)?,
            requests: device.alloc(rows_max)?,
            tokens: device.alloc(rows_max)?,
            host_requests: HostBuffer::new(device, rows_max)?,
            host_tokens: HostBuffer::new(device, rows_max)?,
            host_row: HostBuffer::new(device, shape.vocab)?,
            scratch: SamplerScratch::new(),
            biases: Inputs::new(device, ENTRIES)?,
            penalties: Inputs::new(device, ENTRIES)?,
            bans: Inputs::new(device, ENTRIES)?,
            masks: Inputs::new(device, rows_max * shape.vocab.div_ceil(32))?,
            masked_rows: Inputs::new(device, rows_max)?,
        })
    }

    pub(super) fn rows_max(&self) -> usize {
        self.tokens.len()
    }

    /// Sends the sampling parameters of `rows`, padded to `filled_up_to` rows.
    pub(super) fn request(
        &mut self,
        layers: &Layers,
        segments: &[Segment<'_>],
        rows: &[LogitRow],
        filled_up_to: usize,
    ) -> Result<(), CudaError> {
        let requests = self.host_requests.numbers()?;
        requests[..filled_up_to].fill(GREEDY);
        for (row, request) in rows.iter().zip(requests) {
            if let Some(Draw { sampling, index, .. }) = device_draw(&segments[row.segment]) {
                let (temperature, top_p, min_p, top_k) = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k);
                *request = SampleRequest { seed: sampling.seed, index, temperature, top_p, min_p, top_k };
            }
        }
        self.host_requests.send(layers.stream(), &mut self.requests.slice_mut(..filled_up_to))
    }

    /// Launches the drawing of `count` tokens, after their logits and requests.
    pub(super) fn draw(&mut self, layers: &Layers, count: usize) -> Result<(), CudaError> {
        let (logits, requests) = (self.logits.slice(..count * self.vocab), self.requests.slice(..count));
        layers.kernels().sample(layers.stream(), &mut self.tokens.slice_mut(..count), &logits, &requests, self.vocab)
    }

    /// Edits the logits of rows that need it, and launches the drawing of all rows again. Waits for the masks of grammars, which are
    /// computed meanwhile.
    pub(super) fn redraw(
        &mut self,
        layers: &Layers,
        device: &Device,
        segments: &[Segment<'_>],
        rows: &[LogitRow],
    ) -> Result<(), CudaError> {
        let words = self.vocab.div_ceil(32);
        let (mut biases, mut penalties, mut bans) = (Vec::new(), Vec::new(), Vec::new());
        let (mut masks, mut masked_rows) = (Vec::new(), Vec::new());
        for (row, LogitRow { segment, .. }) in (0u32..).zip(rows) {
            let Some(draw) = device_draw(&segments[*segment]) else { continue };
            // Without its mask, no token is drawn: `collect` asks again, and gets the same reason.
            let Ok(mask) = draw.allowed.map(Allowed::wait).transpose() else { continue };
            biases.extend(draw.sampling.logit_bias.iter().map(|&(token, value)| LogitEntry { row, token, value }));
            if draw.sampling.penalizes() {
                let repetition = draw.sampling.repetition_penalty;
                let penalty = |(token, subtracted)| LogitPenalty { row, token, repetition, subtracted };
                penalties.extend(penalized(draw.history, draw.sampling).map(penalty));
            }
            if !bans_all(draw.banned, mask) {
                bans.extend(draw.banned.iter().map(|&token| LogitEntry { row, token, value: 0.0 }));
            }
            if let Some(mask) = mask {
                let end = masks.len() + words;
                masks.extend(mask.words().iter().take(words));
                // A mask does not restrict the tokens beyond its end.
                masks.resize(end, u32::MAX);
                masked_rows.push(row);
            }
        }
        if biases.is_empty() && penalties.is_empty() && bans.is_empty() && masked_rows.is_empty() {
            return Ok(());
        }
        let (kernels, stream, vocab) = (layers.kernels(), layers.stream(), self.vocab);
        let mut logits = self.logits.slice_mut(..rows.len() * vocab);
        if !biases.is_empty() {
            self.biases.send(device, &biases)?;
            kernels.edit_logits(stream, LogitEdit::Add, &mut logits, &self.biases.device.slice(..biases.len()), vocab)?;
        }
        if !penalties.is_empty() {
            self.penalties.send(device, &penalties)?;
            kernels.penalize(stream, &mut logits, &self.penalties.device.slice(..penalties.len()), vocab)?;
        }
        if !bans.is_empty() {
            self.bans.send(device, &bans)?;
            kernels.edit_logits(stream, LogitEdit::Ban, &mut logits, &self.bans.device.slice(..bans.len()), vocab)?;
        }
        if !masked_rows.is_empty() {
            self.masks.send(device, &masks)?;
            self.masked_rows.send(device, &masked_rows)?;
            let (masks, rows) = (self.masks.device.slice(..masks.len()), self.masked_rows.device.slice(..masked_rows.len()));
            kernels.mask_logits(stream, &mut logits, &masks, &rows, vocab)?;
        }
        self.draw(layers, rows.len())
    }

    /// Waits for the tokens and takes in each row: `results` has one entry per segment.
    pub(super) fn collect(
        &mut self,
        layers: &Layers,
        segments: &[Segment<'_>],
        rows: &[LogitRow],
        results: &mut [SegmentResult],
    ) -> Result<(), CudaError> {
        layers.watch()?;
        self.host_tokens.receive(layers.stream(), &self.tokens.slice(..rows.len()))?;
        for (i, row) in rows.iter().enumerate() {
            let (segment, result) = (&segments[row.segment], &mut results[row.segment]);
            if let Some(draw) = device_draw(segment) {
                let mut token = self.host_tokens.numbers()?[i];
                if token as usize >= self.vocab {
                    return Err(CudaError::Nonsense { what: format!("token {token} of {} that there are", self.vocab) });
                }
                match draw.allowed.map(Allowed::wait).transpose() {
                    Err(reason) => {
                        result.withhold(reason);
                        continue;
                    }
                    // All allowed tokens are impossible for the model, so the first one is taken, as on the CPU.
                    Ok(Some(mask)) if !mask.allows(token) => {
                        let is_banned = |token: &Token| draw.banned.contains(token);
                        token = mask.tokens().find(|token| !is_banned(token)).or(mask.tokens().next()).unwrap_or(0);
                    }
                    Ok(_) => {}
                }
                result.drawn.push((token, None));
            } else {
                let logits = self.logits.slice(i * self.vocab..(i + 1) * self.vocab);
                self.host_row.receive(layers.stream(), &logits)?;
                take_logits(segment, row.index, self.host_row.numbers()?, &mut self.scratch, result);
            }
        }
        Ok(())
    }
}

/// The draw that the device makes for a segment.
fn device_draw<'a>(segment: &Segment<'a>) -> Option<Draw<'a>> {
    match segment.wanted {
        Wanted::Token(draw) if draw.sampling.logprobs.is_none() && is_single(&draw.sampling.logit_bias) => Some(draw),
        _ => None,
    }
}

/// Whether each token has at most one bias: the entries of one launch are added in no particular order.
fn is_single(biases: &[(Token, f32)]) -> bool {
    biases.iter().enumerate().all(|(i, (token, _))| biases[..i].iter().all(|(other, _)| other != token))
}

/// Whether all allowed tokens are banned, in which case the grammar takes precedence over the ban.
fn bans_all(banned: &[Token], mask: Option<&Mask>) -> bool {
    mask.is_some_and(|mask| mask.tokens().all(|token| banned.contains(&token)))
}
