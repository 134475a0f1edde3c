//! Prints the document of a port's routes: the clients', or with the argument `operators` the operators'.

use tidemill_gateway::http::openapi;

fn main() {
    let document = match std::env::args().nth(1).as_deref() {
        Some("operators") => openapi::operators_document(),
        _ => openapi::clients_document(),
    };
    println!("{document:#}");
}
