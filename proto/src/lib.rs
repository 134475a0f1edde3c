//! The wire: types and encodings that all roles of a Tidemill cluster agree on. No clock, socket, thread or flag.
//!
//! - [`ids`]: requests, sequences, epochs
//! - [`block`]: the 16-token block, its chained [`BlockKey`](block::BlockKey), the layout that its bytes commit to
//! - [`tokens`]: lists of token ids that share memory
//! - [`sampling`]: the settings by which a client's tokens are drawn; [`grammar`]: the grammar that their text must follow; [`thought`]:
//!   the limit on their thought
//! - [`urgency`]: how urgent a request is
//! - [`step`]: the input and output of one step of a model
//! - [`message`]: messages between coordinator and workers
//! - [`pool`]: messages between a KV pool node and its clients; [`stage`]: those between the stages of a worker
//! - [`frame`]: messages to bytes and back, bounded and versioned
//! - [`files`]: bounded reading of a model's files

pub mod block;
pub mod files;
pub mod frame;
pub mod grammar;
pub mod ids;
pub mod message;
pub mod pool;
pub mod sampling;
pub mod stage;
pub mod step;
pub mod thought;
pub mod tokens;
pub mod urgency;
