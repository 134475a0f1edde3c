//! The wire: what all roles of a Tidemill cluster agree on. No clock, socket, thread or flag.
//!
//! - [`ids`]: requests, sequences, epochs
//! - [`block`]: the 16-token block, its chained [`BlockKey`](block::BlockKey), the layout that its bytes commit to
//! - [`tokens`]: lists of token ids that share memory
//! - [`sampling`]: how a client wants its tokens drawn; [`grammar`]: what their text must follow
//! - [`urgency`]: how urgent a request is
//! - [`step`]: what a worker's scheduler asks of a model in one step
//! - [`message`]: what coordinator and workers tell each other
//! - [`pool`]: what a KV pool node and its clients tell each other
//! - [`frame`]: messages to bytes and back, bounded and versioned

pub mod block;
pub mod frame;
pub mod grammar;
pub mod ids;
pub mod message;
pub mod pool;
pub mod sampling;
pub mod step;
pub mod tokens;
pub mod urgency;
