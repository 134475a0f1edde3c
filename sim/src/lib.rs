//! A cluster in virtual time. The deciding parts are the production ones: `Cluster`, the schedulers of prefill and decode workers, the
//! directories of pool nodes, and their messages. Only parts that are not our code in production are modelled: devices, links, clients.
//!
//! No clock, thread, socket, file or entropy: the same settings and seed give the same events.
//!
//! - [`settings`]: the settings of a simulation
//! - [`workload`]: clients: arrivals, prompts, tokens
//! - [`hardware`]: devices: the time of a step; [`shape`]: the models that they compute
//! - [`flows`]: links: bytes that share them
//! - [`world`]: the whole cluster; [`world::World::run`] runs a simulation
//! - [`faults`]: a second driver of the same world, with fault injection
//! - [`outcome`]: the outcome of each request, and the load over time
//! - [`queue`], [`random`]: events by time, and seeded draws

pub mod faults;
pub mod flows;
pub mod hardware;
pub mod outcome;
pub mod queue;
pub mod random;
pub mod settings;
pub mod shape;
pub mod workload;
pub mod world;
