//! A real coordinator over real HTTP and QUIC, with scripted workers that speak the real protocol.

mod agents;
mod batches;
mod bodies;
mod budgets;
mod clients;
mod console;
mod erasure;
mod failures;
mod front_door;
mod grammars;
mod hostile;
mod listening;
mod messages;
mod models;
mod owners;
mod regions;
mod replay;
mod responses;
mod retention;
mod rollouts;
mod routes;
mod shares;
mod sign_in;
mod templates;
mod tenants;
mod thinking;
mod tools;
mod walk;

use tidemill_scenarios as support;
