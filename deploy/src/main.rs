//! `tidemill`: a whole cluster on one machine, a chat, a view of a cluster, its registry, tenants and their usage, backups, certificates,
//! safety's classifier.

use clap::{Parser, Subcommand};
use std::process::ExitCode;
use tidemill_deploy::{
    appeals, audit, autoscale, backup, certs, chat, cluster, doctor, erase, eval, feedback, gguf, keys, registry, rollout, safety, up,
    usage,
};
use tidemill_net::process::{self, Failed};

/// Disaggregated prefill/decode serving for large language models
#[derive(Debug, Parser)]
#[command(name = "tidemill", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a whole cluster on this machine, one process per role instance, until Ctrl-C
    Up(Box<up::UpArgs>),
    /// Run a command of yours for each number of workers that the coordinators want
    Autoscale(autoscale::AutoscaleArgs),
    /// Chat with a running cluster in the terminal
    Chat(chat::ChatArgs),
    /// Watch a running cluster in the terminal: models, members, tiers and decisions
    Cluster(cluster::ClusterArgs),
    /// Check this machine, and with a URL a cluster, and say what to do
    Doctor(doctor::DoctorArgs),
    /// Read and change what the coordinators agree on, such as models' aliases
    Registry(registry::RegistryArgs),
    /// Move users from one model to another, step by step, and back when the new one is worse
    #[command(subcommand)]
    Rollout(rollout::RolloutCommand),
    /// Make, show and revoke API keys
    #[command(subcommand)]
    Keys(keys::KeysCommand),
    /// Show and change tenants: their tiers and limits
    #[command(subcommand)]
    Tenants(keys::TenantsCommand),
    /// Add up what was used, by tenant, model and day, or show what was spent of the budgets
    Usage(usage::UsageArgs),
    /// Write a tenant's or a user's data to stdout, as JSON lines
    Export(erase::ExportArgs),
    /// Erase a tenant's or a user's data, and show what is left
    Erase(erase::EraseArgs),
    /// Write a backup of what a running coordinator keeps
    Backup(backup::BackupArgs),
    /// Restore a backup to an empty data directory
    Restore(backup::RestoreArgs),
    /// Train and judge the classifier of the safety checks
    #[command(subcommand)]
    Safety(safety::SafetyCommand),
    /// Check and show the log of what was blocked
    #[command(subcommand)]
    Audit(audit::AuditCommand),
    /// Show and decide appeals against what was blocked
    #[command(subcommand)]
    Appeals(appeals::AppealsCommand),
    /// Show users' opinions of answers, and make golden cases of them
    #[command(subcommand)]
    Feedback(feedback::FeedbackCommand),
    /// Ask models golden cases, and compare them
    #[command(subcommand)]
    Eval(Box<eval::EvalCommand>),
    /// Turn a GGUF file into a model directory, for role programs; `tidemill up` reads GGUF files itself
    Unpack(gguf::UnpackArgs),
    /// Make a cluster CA, and certificates for its processes; run again, it renews them
    Certs(certs::CertsArgs),
}

impl Command {
    /// Whether the command does nothing but ask and print.
    fn only_prints(&self) -> bool {
        !matches!(
            self,
            Self::Up(_) | Self::Autoscale(_) | Self::Chat(_) | Self::Cluster(_) | Self::Rollout(_) | Self::Eval(_) | Self::Unpack(_)
        )
    }
}

#[tokio::main]
async fn main() -> Result<ExitCode, Failed> {
    process::keep_files_private();
    let command = Cli::parse().command;
    if command.only_prints() {
        process::end_with_the_reader();
    }
    match command {
        Command::Up(args) => up::up(*args).await?,
        Command::Autoscale(args) => autoscale::autoscale(args).await?,
        Command::Chat(args) => chat::chat(args).await?,
        Command::Cluster(args) => cluster::cluster(args).await?,
        Command::Doctor(args) => return Ok(doctor::doctor(args).await?),
        Command::Registry(args) => registry::registry(args).await?,
        Command::Rollout(command) => rollout::rollout(command).await?,
        Command::Keys(command) => keys::keys(command).await?,
        Command::Tenants(command) => keys::tenants(command).await?,
        Command::Usage(args) => usage::usage(&args).await?,
        Command::Export(args) => erase::export(args).await?,
        Command::Erase(args) => erase::erase(args).await?,
        Command::Backup(args) => backup::backup(args).await?,
        Command::Restore(args) => backup::restore(&args)?,
        Command::Safety(command) => safety::safety(command)?,
        Command::Audit(command) => audit::audit(command)?,
        Command::Appeals(command) => appeals::appeals(command).await?,
        Command::Feedback(command) => feedback::feedback(command).await?,
        Command::Eval(command) => eval::eval(*command).await?,
        Command::Unpack(args) => gguf::unpack(&args)?,
        Command::Certs(args) => certs::certs(&args)?,
    }
    Ok(ExitCode::SUCCESS)
}
