//! Links between processes, what supervises them, and models fetched from a hub.

mod connections;
#[cfg(feature = "hub")]
mod model_dir;
mod roles;
mod supervised;
