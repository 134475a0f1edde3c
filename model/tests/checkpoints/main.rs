//! Whole checkpoints, as made by `../fixtures/make.py`.

mod bf16;
mod corrupt;
mod drafts;
mod encoders;
mod exact;
mod fixtures;
mod fp8;
mod gguf;
mod int4;
mod int8;
mod latent;
mod multimodal;
mod mxfp4;
mod ranks;
mod recurrent;
mod reference;
mod stages;
mod trained;
