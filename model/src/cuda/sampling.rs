//! From logits on the device to tokens. The host does what the device's sampler does not (penalties, bias, bans,
//! log-probabilities), for the rows that need it, with the CPU's code.

use super::{layers::Layers, shape::DeviceShape};
use crate::{sampler::SamplerScratch, step::take_logits};
use cudarc::driver::CudaSlice;
use tidemill_kernels::cuda::{CudaError, Device, host::HostBuffer, sampling::SampleRequest};
use tidemill_proto::step::{Draw, Segment, SegmentResult, Wanted};

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
}

/// Row `index` of the logits that segment `segment` needs.
#[derive(Clone, Copy)]
pub(super) struct LogitRow {
    pub(super) segment: usize,
    pub(super) index: usize,
}

/// For padding, and for rows whose token the host draws.
const GREEDY: SampleRequest = SampleRequest { seed: 0, index: 0, temperature: 0.0, top_p: 1.0, min_p: 0.0, top_k: 0 };

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
            if let Some(Draw { sampling, index, .. }) = plain_draw(&segments[row.segment]) {
                let (temperature, top_p, min_p, top_k) = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k);
                *request = SampleRequest { seed: sampling.seed, index, temperature, top_p, min_p, top_k };
            }
        }
        self.host_requests.send(&layers.stream, &mut self.requests.slice_mut(..filled_up_to))
    }

    /// Launches the drawing of `count` tokens, after their logits and requests.
    pub(super) fn draw(&mut self, layers: &Layers, count: usize) -> Result<(), CudaError> {
        let (logits, requests) = (self.logits.slice(..count * self.vocab), self.requests.slice(..count));
        layers.kernels.sample(&layers.stream, &mut self.tokens.slice_mut(..count), &logits, &requests, self.vocab)
    }

    /// Waits for the tokens and takes in each row: `results` has one entry per segment.
    pub(super) fn collect(
        &mut self,
        layers: &Layers,
        segments: &[Segment<'_>],
        rows: &[LogitRow],
        results: &mut [SegmentResult],
    ) -> Result<(), CudaError> {
        self.host_tokens.receive(&layers.stream, &self.tokens.slice(..rows.len()))?;
        for (i, row) in rows.iter().enumerate() {
            let (segment, result) = (&segments[row.segment], &mut results[row.segment]);
            if plain_draw(segment).is_some() {
                let token = self.host_tokens.numbers()?[i];
                if token as usize >= self.vocab {
                    return Err(CudaError::Nonsense { what: format!("token {token} of {} that there are", self.vocab) });
                }
                result.drawn = Some((token, None));
            } else {
                let logits = self.logits.slice(i * self.vocab..(i + 1) * self.vocab);
                self.host_row.receive(&layers.stream, &logits)?;
                take_logits(segment, row.index, self.host_row.numbers()?, &mut self.scratch, result);
            }
        }
        Ok(())
    }
}

/// The draw that the device makes for a segment.
fn plain_draw<'a>(segment: &Segment<'a>) -> Option<Draw<'a>> {
    match segment.wanted {
        Wanted::Token(draw) if draw.is_plain() => Some(draw),
        _ => None,
    }
}
