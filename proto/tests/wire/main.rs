//! Frames as they travel, and the releases that understand each other.

mod frames;
mod versions;
