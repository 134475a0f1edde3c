//! An executor without a model: everything around one, with results that are a hash of the token ids.
//!
//! K and V of a position are a hash of all tokens up to it, chained from the position before *as it stands in its block*. The next token
//! follows from the last position. So a block that was lost, mixed up or changed in transit changes the answer, as with a real model, at
//! the cost of a few nanoseconds per token. Steps can take as much time as those of a real device.

use crate::{
    config::ModelConfig,
    error::ModelError,
    executor::{BlockBytes, Executor, ExecutorError},
    sampler::SamplerScratch,
    step::take_logits,
};
use std::{path::Path, thread, time::Duration};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype, KvShape, LayoutFingerprint, Token},
    step::{Segment, SegmentResult, Wanted},
};

/// The version in the fingerprint, which changes whenever the same tokens would give different bytes or a different answer.
const VERSION: u32 = 1;
/// Bytes of a position for each dimension: K and V of one bf16 number. One head has all dimensions.
const POSITION_BYTES_PER_DIM: usize = 2 * 2;
/// The logit of the next token. All others are between 0 and 1, so that no other is drawn at any sensible temperature.
const CERTAIN: f32 = 1e4;

/// The size of blocks and the duration of steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EchoOptions {
    /// Bytes of a KV block, rounded up to a possible size.
    pub block_bytes: usize,
    pub step: StepTime,
}

/// The duration of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    /// Time of any step.
    pub base: Duration,
    /// Additional time per prompt token.
    pub prompt_token: Duration,
    /// Additional time per sequence that decodes.
    pub row: Duration,
}

impl StepTime {
    fn of(&self, segments: &[Segment<'_>]) -> Duration {
        let rows = segments.iter().filter(|segment| segment.tokens.len() == 1 && matches!(segment.wanted, Wanted::Token(_))).count();
        let tokens: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
        self.base + self.row * rows as u32 + self.prompt_token * (tokens - rows) as u32
    }
}

/// The description of a model and its KV blocks, without weights.
pub struct EchoExecutor {
    config: ModelConfig,
    shape: KvShape,
    step: StepTime,
    memory: Vec<u8>,
    logits: Vec<f32>,
    scratch: SamplerScratch,
}

impl EchoExecutor {
    /// Reads `config.json` of a model directory. The weights are not needed.
    pub fn load(dir: &Path, options: &EchoOptions) -> Result<Self, ModelError> {
        let config = ModelConfig::load(dir)?;
        let head_dim = options.block_bytes.div_ceil(BLOCK_TOKENS * POSITION_BYTES_PER_DIM).next_multiple_of(2).max(2);
        let shape = KvShape { layers: 1, kv_heads: 1, head_dim, dtype: KvDtype::Bf16, latent: None };
        Ok(Self { config, shape, step: options.step, memory: Vec::new(), logits: Vec::new(), scratch: SamplerScratch::new() })
    }

    /// Sets the number of KV blocks.
    #[must_use]
    pub fn with_blocks(mut self, blocks: usize) -> Self {
        self.memory = vec![0; blocks * self.shape.block_bytes()];
        self
    }

    fn block(&self, block: u32) -> &[u8] {
        let bytes = self.shape.block_bytes();
        &self.memory[block as usize * bytes..][..bytes]
    }

    fn block_mut(&mut self, block: u32) -> &mut [u8] {
        let bytes = self.shape.block_bytes();
        &mut self.memory[block as usize * bytes..][..bytes]
    }

    /// The hash at a position.
    fn state(&self, blocks: &[u32], position: usize) -> u64 {
        let bytes = self.shape.block_bytes() / BLOCK_TOKENS;
        let at = &self.block(blocks[position / BLOCK_TOKENS])[position % BLOCK_TOKENS * bytes..][..bytes];
        let words = || (0..).zip(at.chunks_exact(8).map(|word| u64::from_le_bytes(*word.first_chunk().expect("eight bytes"))));
        let state = words().next().map_or(0, |(_, word)| word);
        // All bytes count, as a changed byte might go unnoticed otherwise.
        state ^ words().fold(0, |changed, (i, word)| mix_changed(changed) ^ word ^ state_word(state, i))
    }

    fn set_state(&mut self, blocks: &[u32], position: usize, state: u64) {
        let bytes = self.shape.block_bytes() / BLOCK_TOKENS;
        let at = &mut self.block_mut(blocks[position / BLOCK_TOKENS])[position % BLOCK_TOKENS * bytes..][..bytes];
        for (i, word) in (0..).zip(at.chunks_exact_mut(8)) {
            word.copy_from_slice(&state_word(state, i).to_le_bytes());
        }
    }
}

impl Executor for EchoExecutor {
    fn device_name(&self) -> &str {
        "echo"
    }

    fn vocab(&self) -> usize {
        self.config.vocab()
    }

    fn context_tokens(&self) -> usize {
        self.config.context_tokens()
    }

    fn verifies_drafts(&self) -> bool {
        true
    }

    fn kv_shape(&self) -> KvShape {
        self.shape
    }

    fn layout(&self) -> LayoutFingerprint {
        let mut hasher = blake3::Hasher::new_derive_key("tidemill echo v1");
        for n in [VERSION, self.config.vocab() as u32] {
            hasher.update(&n.to_le_bytes());
        }
        LayoutFingerprint::new(hasher.finalize().as_bytes(), &self.shape)
    }

    fn step(&mut self, segments: &[Segment<'_>]) -> Result<Vec<SegmentResult>, ExecutorError> {
        let took = self.step.of(segments);
        if !took.is_zero() {
            thread::sleep(took);
        }
        Ok(segments.iter().map(|segment| self.compute(segment)).collect())
    }

    fn write_block(&mut self, block: u32, fill: &mut dyn FnMut(&mut [u8]) -> bool) -> Result<bool, ExecutorError> {
        Ok(fill(self.block_mut(block)))
    }

    fn read_blocks(&mut self, blocks: &[u32]) -> Result<BlockBytes, ExecutorError> {
        Ok(BlockBytes::Ready(blocks.iter().map(|&block| self.block(block).to_vec()).collect()))
    }
}

impl EchoExecutor {
    fn compute(&mut self, segment: &Segment<'_>) -> SegmentResult {
        let mut result = SegmentResult::default();
        let mut state = segment.start.checked_sub(1).map_or(0, |before| self.state(segment.blocks, before));
        let first_row = segment.tokens.len() - segment.logit_rows();
        for (i, &token) in segment.tokens.iter().enumerate() {
            state = mix(state ^ mix(u64::from(token) + 1));
            self.set_state(segment.blocks, segment.start + i, state);
            if i >= first_row {
                self.conclude(segment, i - first_row, state, &mut result);
            }
        }
        result
    }

    /// Fills in the result for row `i` of those with logits.
    fn conclude(&mut self, segment: &Segment<'_>, i: usize, state: u64, result: &mut SegmentResult) {
        let next = self.next_token(state);
        match segment.wanted {
            Wanted::Token(draw) if draw.is_plain() => result.drawn.push((next, None)),
            _ => {
                let mut logits = std::mem::take(&mut self.logits);
                logits.clear();
                logits.extend((0..self.config.vocab() as u64).map(|token| (mix(state ^ token) >> 40) as f32 / (1 << 24) as f32));
                logits[next as usize] = CERTAIN;
                take_logits(segment, i, &mut logits, &mut self.scratch, result);
                self.logits = logits;
            }
        }
    }

    /// The token after a position. It is never an end-of-sequence token, so that answers are as long as allowed.
    fn next_token(&self, state: u64) -> Token {
        let (vocab, eos) = (self.config.vocab() as u64, self.config.eos());
        let tokens = (0..=eos.len() as u64).map(|i| ((mix(state) + i) % vocab) as Token);
        tokens.clone().find(|token| !eos.contains(token)).unwrap_or_default()
    }
}

/// Word `i` of a position with this state.
fn state_word(state: u64, i: u64) -> u64 {
    if i == 0 { state } else { mix(state ^ i) }
}

/// Mixes a change, so that two changes do not cancel out.
fn mix_changed(changed: u64) -> u64 {
    if changed == 0 { 0 } else { mix(changed) }
}

/// The finalizer of SplitMix64.
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::{
        sampling::Sampling,
        step::{Draw, History, StateBlocks},
    };

    fn echo(block_bytes: usize) -> EchoExecutor {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama3");
        EchoExecutor::load(&dir, &EchoOptions { block_bytes, step: StepTime::default() }).unwrap().with_blocks(8)
    }

    /// The token after `tokens[start..]`, computed in blocks `table`.
    fn next(echo: &mut EchoExecutor, tokens: &[Token], start: usize, table: &[u32], sampling: &Sampling) -> Token {
        let history = History::new(tokens);
        let wanted = Wanted::Token(Draw { sampling, history: &history, index: 0, banned: &[], allowed: None });
        let segment = Segment { tokens: &tokens[start..], start, blocks: table, state: StateBlocks::default(), wanted };
        echo.step(&[segment]).unwrap()[0].drawn[0].0
    }

    fn tokens() -> Vec<Token> {
        (0..40).map(|i| i * 7 % 100).collect()
    }

    #[test]
    fn an_answer_depends_on_every_token_and_not_on_how_it_is_cut() {
        let (mut echo, tokens, greedy) = (echo(1000), tokens(), Sampling { temperature: 0.0, ..Sampling::default() });
        assert_eq!(echo.kv_shape().block_bytes(), 1024);
        let whole = next(&mut echo, &tokens, 0, &[0, 1, 2], &greedy);
        for cut in [1, 16, 39] {
            next(&mut echo, &tokens[..cut], 0, &[3, 4, 5], &greedy);
            assert_eq!(next(&mut echo, &tokens, cut, &[3, 4, 5], &greedy), whole, "cut at {cut}");
        }
        let mut other = tokens.clone();
        other[0] += 1;
        assert_ne!(next(&mut echo, &other, 0, &[0, 1, 2], &greedy), whole);
    }

    #[test]
    fn bytes_that_travel_are_as_good_as_computed_and_changed_ones_show() {
        let (mut near, mut far, tokens, greedy) = (echo(256), echo(256), tokens(), Sampling { temperature: 0.0, ..Sampling::default() });
        let whole = next(&mut near, &tokens, 0, &[0, 1, 2], &greedy);
        let BlockBytes::Ready(blocks) = near.read_blocks(&[0, 1]).unwrap() else { panic!("they are here") };
        for (to, bytes) in [(5, &blocks[0]), (6, &blocks[1])] {
            assert!(
                far.write_block(to, &mut |memory| {
                    memory.copy_from_slice(bytes);
                    true
                })
                .unwrap()
            );
        }
        assert_eq!(next(&mut far, &tokens, 32, &[5, 6, 7], &greedy), whole);
        for byte in 0..16 {
            // The next position's hash follows from the bytes of the last one.
            far.block_mut(6)[256 - 1 - byte] ^= 1;
            assert_ne!(next(&mut far, &tokens, 32, &[5, 6, 7], &greedy), whole, "byte {byte} from the end");
            far.block_mut(6)[256 - 1 - byte] ^= 1;
        }
    }

    #[test]
    fn a_draw_through_the_sampler_is_the_same_token() {
        let (mut echo, tokens) = (echo(256), tokens());
        let plain = next(&mut echo, &tokens, 0, &[0, 1, 2], &Sampling::default());
        let reported = Sampling { logprobs: Some(3), seed: 5, ..Sampling::default() };
        assert_eq!(next(&mut echo, &tokens, 0, &[0, 1, 2], &reported), plain);
        let banned = Sampling { logit_bias: vec![(plain, -1e6)], ..Sampling::default() };
        assert_ne!(next(&mut echo, &tokens, 0, &[0, 1, 2], &banned), plain);
        assert!(!echo.config.eos().contains(&plain));
    }
}
