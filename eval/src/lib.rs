//! Whether a model's answers are good: golden cases, what is checked in an answer, a model as judge, and what follows from the scores. A
//! core: no clock, no I/O.
//!
//! - [`case`]: golden cases, and their files; [`golden`]: those that come with Tidemill
//! - [`check`]: what an answer must be like
//! - [`judge`]: what a model that judges is asked, and what its answer's probabilities say
//! - [`gate`]: whether a run is good enough
//! - [`elo`]: ratings from comparisons in pairs

pub mod case;
pub mod check;
pub mod elo;
pub mod gate;
pub mod golden;
pub mod judge;
