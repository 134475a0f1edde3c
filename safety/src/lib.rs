//! Safety checks of prompts and answers: a cascade over text, cheap checks first. A core: no clock, no I/O.
//!
//! ```text
//!   text ──► normal form ──► patterns (exact, score 1) ──► classifier (hashed n-grams) ──► Finding, if any
//!                                                                └──► not sure: a model of the cluster ──► Finding, if any
//! ```
//!
//! - [`category`]: kinds of harm, and the thresholds of their scores
//! - [`normal`]: the form of a text that checks read: without differences of case, accents, look-alikes and invisible characters
//! - [`patterns`]: lists of words and regular expressions; they also tell where a match may still begin
//! - [`classifier`]: a linear classifier over hashed n-grams, and its training
//! - [`corpus`]: examples to train it with
//! - [`guard`]: all of these over a whole text
//! - [`judge`]: the questions to a moderation model, and the meaning of its first word; [`faults`]: the policy if it fails
//! - [`disclaimers`]: disclaimers appended to answers about medicine, law and similar subjects
//! - [`pii`]: personal data: found, replaced, restored
//! - [`appeals`]: blocked texts, and the queue of appeals against them
//! - [`stream`]: the cascade over an answer as it arrives: no part of a violation is released, and text that a model must check waits for
//!   it (`passages`)

pub mod appeals;
pub mod category;
pub mod classifier;
pub mod corpus;
pub mod disclaimers;
pub mod faults;
pub mod guard;
pub mod judge;
pub mod normal;
mod passages;
pub mod patterns;
pub mod pii;
pub mod stream;
