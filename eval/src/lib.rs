//! Evaluation of a model's answers: golden cases, checks of an answer, a model as judge, and conclusions from the scores. A core: no clock,
//! no I/O.
//!
//! - [`case`]: golden cases, and their files; [`golden`]: those that come with Tidemill
//! - [`check`]: the checks of an answer; [`schema`]: that of JSON Schema
//! - [`judge`]: the requests to a judge, and the probabilities in its answer
//! - [`gate`]: the decision whether a run is good enough
//! - [`elo`]: ratings from comparisons in pairs

pub mod case;
pub mod check;
pub mod elo;
pub mod gate;
pub mod golden;
pub mod judge;
pub mod schema;
