//! Names of attributes. Those of `gen_ai` are from OpenTelemetry's semantic conventions for generative AI, which are still in development,
//! those of `http`, `url` and `error` from its stable ones; those of `tidemill` are specific to this project.

pub const METHOD: &str = "http.request.method";
pub const STATUS: &str = "http.response.status_code";
pub const PATH: &str = "url.path";
pub const ERROR: &str = "error.type";

pub const OPERATION: &str = "gen_ai.operation.name";
pub const PROVIDER: &str = "gen_ai.provider.name";
pub const REQUEST_MODEL: &str = "gen_ai.request.model";
pub const INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
pub const OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";

pub const REQUEST_ID: &str = "tidemill.request_id";
pub const TENANT: &str = "tidemill.tenant";
pub const REGION: &str = "tidemill.region";
pub const CLASS: &str = "tidemill.class";
pub const LIMITS_KEPT: &str = "tidemill.limits_kept";
pub const CACHED_TOKENS: &str = "tidemill.cached_tokens";
pub const CHOICE: &str = "tidemill.choice";
pub const WORKER: &str = "tidemill.worker";
pub const PREEMPTIONS: &str = "tidemill.preemptions";
pub const RESCUES: &str = "tidemill.rescues";
pub const TOKENS_DRAFTED: &str = "tidemill.tokens_drafted";
pub const TOKENS_ACCEPTED: &str = "tidemill.tokens_accepted";
pub const TTFT_PREDICTED_MS: &str = "tidemill.ttft_predicted_ms";
pub const TOKENS_HBM: &str = "tidemill.tokens.hbm";
pub const TOKENS_DRAM: &str = "tidemill.tokens.dram";
pub const TOKENS_NVME: &str = "tidemill.tokens.nvme";
pub const TOKENS_OBJECT: &str = "tidemill.tokens.object";
pub const TOKENS_REMOTE: &str = "tidemill.tokens.remote";
pub const SPANS_LEFT_OUT: &str = "tidemill.spans_left_out";

/// The kind of a requested answer: the values of [`OPERATION`]. The conventions define the first three, and allow others where none of
/// theirs fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Chat,
    TextCompletion,
    Embeddings,
    Rerank,
    Classify,
}

impl Operation {
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::TextCompletion => "text_completion",
            Self::Embeddings => "embeddings",
            Self::Rerank => "rerank",
            Self::Classify => "classify",
        }
    }
}
