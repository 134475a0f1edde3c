pub mod likeness;
pub const THRESHOLD: f32 = 0.8;
