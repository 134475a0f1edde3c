//! A request from its submission to its end, one stage per file. New, returned and rescued sequences take the same path:
//!
//! ```text
//!   submit ──► queue ──place──► decode worker ──progress──► finish
//!                ▲                    │
//!                └──────rescue────────┘   worker lost, or sent it back
//! ```
//!
//! [`prefill`] is the side branch: the job that computes a prompt's missing blocks, and the sequences that wait for it.

mod finish;
mod forecast;
mod place;
mod prefill;
mod progress;
mod rescue;
mod submit;
mod waiting;

pub use forecast::Forecast;
pub(crate) use waiting::WAITING_TOLD_EVERY;

#[cfg(test)]
pub(crate) use {prefill::HANDOVER_MAX, rescue::LOSSES_MAX};
