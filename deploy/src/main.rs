//! `tidemill`: a whole cluster on one machine, a chat, a view of a cluster, its registry, certificates, safety's classifier.

use clap::{Parser, Subcommand};
use tidemill_deploy::{certs, chat, cluster, registry, safety, up};
use tidemill_net::process::Failed;

/// Disaggregated prefill/decode serving for large language models
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a whole cluster on this machine, one process per role instance, until Ctrl-C
    Up(Box<up::UpArgs>),
    /// Chat with a running cluster in the terminal
    Chat(chat::ChatArgs),
    /// Watch a running cluster in the terminal: models, members, tiers and decisions
    Cluster(cluster::ClusterArgs),
    /// Read and change what the coordinators agree on, such as models' aliases
    Registry(registry::RegistryArgs),
    /// Train and judge the classifier of the safety checks
    #[command(subcommand)]
    Safety(safety::SafetyCommand),
    /// Make a cluster CA, and certificates for its processes; again, to renew them
    Certs(certs::CertsArgs),
}

#[tokio::main]
async fn main() -> Result<(), Failed> {
    match Cli::parse().command {
        Command::Up(args) => up::up(*args).await?,
        Command::Chat(args) => chat::chat(args).await?,
        Command::Cluster(args) => cluster::cluster(args).await?,
        Command::Registry(args) => registry::registry(args).await?,
        Command::Safety(command) => safety::safety(command)?,
        Command::Certs(args) => certs::certs(&args)?,
    }
    Ok(())
}
