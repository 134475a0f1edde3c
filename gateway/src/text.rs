//! Everything that handles text. The cluster only sees token ids.
//!
//! - [`config`]: a model directory's settings
//! - [`tokenizer`]: text to ids; one id to its bytes
//! - [`detokenizer`]: ids to text, one at a time, never broken UTF-8
//! - [`stop`]: stop strings in a stream of text
//! - [`infill`]: the text around a gap to a prompt
//! - [`template`]: chat messages to text, as Hugging Face renders them
//! - [`marks`]: the protection of the template's own marks against contents that imitate them
//! - [`tool`]: a function that a model may call; [`error`]: errors of a model directory
//! - [`output`]: a model's output split into [`events`]: [`reasoning`] before the answer, calls of [`tools`] in it, or both in channels
//!   ([`harmony`]); [`thought_reader`]: thoughts read from tokens, under a limit

pub mod config;
pub mod detokenizer;
pub mod error;
pub mod events;
pub mod harmony;
pub mod infill;
mod marker;
pub mod marks;
pub mod output;
pub mod reasoning;
pub mod sewn;
pub mod stop;
pub mod template;
pub mod thought_reader;
pub mod tokenizer;
pub mod tool;
pub mod tools;

use config::ModelConfig;
use error::ModelError;
use infill::Infill;
use marks::Marks;
use std::{
    path::Path,
    sync::{Arc, OnceLock},
};
use template::{ChatTemplate, Confinement, TemplateError};
use thought_reader::LimitedThoughts;
use tidemill_proto::{
    files::{TOKENIZER_BYTES_MAX, read_at_most},
    message::{ModelIdentity, ModelKind},
};
use tokenizer::Tokenizer;

/// The default limit on calls in an answer that must consist of calls.
pub const FORCED_CALLS_MAX: u32 = 8;

/// The parts of a model that concern text.
#[derive(Debug)]
pub struct TextModel {
    pub config: ModelConfig,
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template; a base model has none.
    pub template: Option<ChatTemplate>,
    /// The marks to protect; `None` if clients' text may become special tokens.
    pub marks: Option<Marks>,
    /// The limit on calls in an answer that must consist of calls: a weak model makes one after another.
    pub forced_calls_max: u32,
    /// The marks around a gap; `None` if the model was trained on none.
    pub infill: Option<Infill>,
    /// Made when it is first needed.
    limited_thoughts: OnceLock<Option<LimitedThoughts>>,
}

impl TextModel {
    /// Loads a model, whose template is compiled and rendered in this process.
    pub fn load(dir: &Path) -> Result<Self, ModelError> {
        Self::load_with(dir, ChatTemplate::new)
    }

    /// Loads a model, whose template is compiled and rendered in a process with limits.
    pub fn load_within(dir: &Path, process: &Arc<dyn Confinement>) -> Result<Self, ModelError> {
        Self::load_with(dir, |source, config| ChatTemplate::within(source, config, Arc::clone(process)))
    }

    fn load_with(
        dir: &Path,
        compile: impl FnOnce(String, &ModelConfig) -> Result<ChatTemplate, TemplateError>,
    ) -> Result<Self, ModelError> {
        let mut config = ModelConfig::load(dir)?;
        let path = dir.join("tokenizer.json");
        let bytes = read_at_most(&path, TOKENIZER_BYTES_MAX).map_err(|source| ModelError::File { path: path.clone(), source })?;
        config.identity.tokenizer_digest = Some(ModelIdentity::digest(&bytes));
        let tokenizer = Tokenizer::parse(&path, &bytes)?;
        let tokenizer = Arc::new(if config.identity.kind == ModelKind::Decoder { tokenizer } else { tokenizer.with_plain_texts() });
        let template = config.chat_template.clone().map(|source| compile(source, &config)).transpose();
        let template = template.map_err(|e| ModelError::Invalid { path: dir.join("chat_template"), reason: e.to_string() })?;
        Ok(Self::new(config, tokenizer, template))
    }

    pub fn new(config: ModelConfig, tokenizer: Arc<Tokenizer>, template: Option<ChatTemplate>) -> Self {
        let marks = Some(Marks::new(&tokenizer, template.as_ref()));
        let infill = Infill::of(&tokenizer);
        Self { config, tokenizer, template, marks, forced_calls_max: FORCED_CALLS_MAX, infill, limited_thoughts: OnceLock::new() }
    }

    pub fn with_forced_calls_max(self, forced_calls_max: u32) -> Self {
        Self { forced_calls_max, ..self }
    }

    /// For trusted clients: marks in their text are marks.
    pub fn with_clients_marks(self) -> Self {
        Self { marks: None, ..self }
    }

    /// The means to limit thoughts; `None` if the model has none, or none that can be limited. Takes a while the first time.
    pub fn limited_thoughts(&self) -> Option<&LimitedThoughts> {
        let make = || LimitedThoughts::new(self.template.as_ref()?, &self.tokenizer);
        self.limited_thoughts.get_or_init(make).as_ref()
    }

    /// Ids that end a sequence unless the client says otherwise.
    pub fn eos_tokens(&self) -> Vec<u32> {
        let mut ids = self.config.eos_ids.clone();
        ids.extend(self.config.eos_token.as_deref().and_then(|token| self.tokenizer.id_of(token)));
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}
