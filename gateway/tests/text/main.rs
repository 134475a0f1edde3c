//! Templates, tokenizers and formats of tools, beside references.

mod forced;
mod published_templates;
mod text_fixtures;
mod text_stays_text;
mod thought_limits;
mod tool_grammars;
mod tool_schemas;
