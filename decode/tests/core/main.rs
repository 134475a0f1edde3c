//! The scheduler's decisions, by events and times.

mod scheduler;
mod speculation;
mod steps;
