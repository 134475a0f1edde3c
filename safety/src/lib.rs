//! What may be asked and answered: a cascade of checks over text, cheap ones first. A core: no clock, no I/O.
//!
//! ```text
//!   text ──► normal form ──► patterns (exact, score 1) ──► classifier (hashed n-grams) ──► Finding, if any
//!                                                                └──► not sure: a model of the cluster ──► Finding, if any
//! ```
//!
//! - [`category`]: kinds of harm, and from which score on each counts
//! - [`normal`]: the form of a text that checks read: case, accents, look-alikes and invisible characters do not matter in it
//! - [`patterns`]: lists of words and regular expressions; they also know where a match may still begin
//! - [`classifier`]: a linear classifier over hashed n-grams, and how it is trained
//! - [`corpus`]: examples to train it with
//! - [`guard`]: all of it over a whole text
//! - [`judge`]: what a model is asked about, and what its first word means; [`faults`]: what happens when it cannot be asked
//! - [`disclaimers`]: what is said after an answer about medicine, law and the like
//! - [`pii`]: what identifies a person, found, taken out, put back
//! - [`appeals`]: what was blocked, and the queue of those who disagree
//! - [`stream`]: the cascade over an answer while it comes: what is part of a violation is never released, and what a model must see
//!   first waits for it (`passages`)

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
