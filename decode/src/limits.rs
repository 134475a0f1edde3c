//! Bounds of one worker, and the jobs that they rule out.

use tidemill_proto::{
    block::BLOCK_TOKENS,
    frame::FRAME_BYTES_MAX,
    message::{DecodeJob, Embeds},
    thought::ThoughtLimit,
};

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most sequences that hold device blocks at once.
    pub sequences_max: usize,
    /// The most sequences that wait for room; one more is returned to its coordinator.
    pub waiting_max: usize,
    /// The most tokens of one step.
    pub step_tokens: usize,
    /// The longest sequence that the model allows.
    pub context_tokens: usize,
    /// The number of tokens in the model's vocabulary.
    pub vocab: usize,
    /// Whether the model reads a text as a whole, in one step, and generates nothing.
    pub reads_whole: bool,
}

impl Limits {
    /// The longest sequence that a worker with this many device blocks can hold.
    pub(crate) fn longest(&self, device_blocks: usize) -> usize {
        self.context_tokens.min(device_blocks * BLOCK_TOKENS)
    }

    /// The reason why a job can never run here; `None` if it can.
    pub(crate) fn unfit(&self, job: &DecodeJob, thought: Option<&ThoughtLimit>, device_blocks: usize) -> Option<String> {
        let (len, prompt) = (job.tokens.len(), job.prompt_tokens as usize);
        if prompt == 0 || prompt > len {
            return Some(format!("job has {len} tokens and calls {prompt} of them its prompt"));
        }
        if let Some(token) = job.tokens.iter().find(|&&token| token as usize >= self.vocab) {
            return Some(format!("token {token} is not in the model's vocabulary of {}", self.vocab));
        }
        if thought.is_some_and(|limit| !limit.is_sound()) {
            return Some("the limit on its thought is a table with states that do not exist".into());
        }
        // A sequence's scores are one message; a token's logprob takes 5 bytes at most, one of the likeliest 10.
        let scores_bytes = job.prompt_logprobs.map_or(0, |top| prompt.saturating_mul(16 + 10 * top as usize));
        if scores_bytes > FRAME_BYTES_MAX {
            return Some(format!(
                "log-probabilities of {prompt} prompt tokens take about {scores_bytes} bytes, {FRAME_BYTES_MAX} is the most"
            ));
        }
        if let Some(fault) = job.sampling.fault().or_else(|| job.urgency.fault()) {
            return Some(fault);
        }
        let longest = self.longest(device_blocks);
        if let Some(Embeds { second_text }) = job.embeds {
            if second_text as usize > len {
                return Some(format!("the second text begins at {second_text}, after the {len} tokens of both"));
            }
            let longest = if self.reads_whole { longest.min(self.step_tokens) } else { longest };
            return (len > longest).then(|| format!("{len} tokens are more than the {longest} that this worker embeds"));
        }
        if self.reads_whole {
            return Some("this model is an encoder: it computes embeddings alone".into());
        }
        (len >= longest).then(|| {
            format!(
                "{len} tokens leave no room to generate: this worker's limit is {longest} (model context {}, device memory {device_blocks} blocks of {BLOCK_TOKENS})",
                self.context_tokens
            )
        })
    }
}
