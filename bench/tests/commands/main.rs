//! The subcommands of `tidemill-bench`, run as a user runs them.

mod abuse;
mod chaos;
mod contamination;
mod goodput;
mod kernels;
mod load;
mod model;
mod replay;
mod truth;
