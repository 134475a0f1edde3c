//! `tidemill registry`: reads and changes the records that the coordinators agree on, at a coordinator's operators' port.

use crate::operators::TokenArgs;
use anyhow::{Context, bail};
use reqwest::{Method, RequestBuilder, Url};
use serde::Deserialize;
use serde_json::{Value, json};
use std::time::Duration;

/// Read and change what the coordinators agree on.
#[derive(Clone, Debug, clap::Args)]
pub struct RegistryArgs {
    /// URL of any coordinator's operators' port (its --admin)
    #[arg(long, default_value = "http://127.0.0.1:9100", global = true)]
    pub url: String,
    #[command(flatten)]
    token: TokenArgs,
    #[command(subcommand)]
    pub command: RegistryCommand,
}

#[derive(Clone, Debug, clap::Subcommand)]
pub enum RegistryCommand {
    /// Show all records, or those of one kind
    List { kind: Option<String> },
    /// Show one record's value
    Get { kind: String, key: String },
    /// Set a record, such as `put alias gpt-5 tidemill-demo`; a value that is not JSON is a text
    Put {
        kind: String,
        key: String,
        value: String,
        /// Revision that the record must have; 0: there must be none
        #[arg(long)]
        expected: Option<u64>,
    },
    /// Delete a record
    Delete {
        kind: String,
        key: String,
        /// Revision that the record must have
        #[arg(long)]
        expected: Option<u64>,
    },
    /// Remove a coordinator that will not come back from the group; at the leader, which `tidemill cluster` names
    RemoveCoordinator { name: String },
}

#[derive(Debug, Deserialize)]
struct Record {
    kind: String,
    key: String,
    value: Value,
    revision: u64,
}

/// The time limit for an answer: a coordinator waits up to 5 s for a majority.
const ANSWER: Duration = Duration::from_secs(10);

pub async fn registry(args: RegistryArgs) -> anyhow::Result<()> {
    let base = Url::parse(&args.url).with_context(|| format!("`{}` is not a URL such as http://127.0.0.1:9100", args.url))?;
    let client = args.token.client()?.timeout(ANSWER).build()?;
    let path = |parts: &[&str]| {
        let mut url = base.clone();
        match url.path_segments_mut() {
            Ok(mut segments) => drop(segments.pop_if_empty().extend(parts)),
            Err(()) => bail!("`{base}` is not a URL such as http://127.0.0.1:9100"),
        }
        Ok(url)
    };
    let expecting = |url: Url, expected: &Option<u64>| {
        let mut url = url;
        if let Some(revision) = expected {
            url.query_pairs_mut().append_pair("expected", &revision.to_string());
        }
        url
    };
    match &args.command {
        RegistryCommand::List { kind } => {
            let mut url = path(&["registry"])?;
            if let Some(kind) = kind {
                url.query_pairs_mut().append_pair("kind", kind);
            }
            let records = ask(client.get(url)).await?["records"].take();
            for Record { kind, key, value, revision } in serde_json::from_value::<Vec<Record>>(records)? {
                println!("{kind}\t{key}\t{value}\t{revision}");
            }
        }
        RegistryCommand::Get { kind, key } => println!("{}", ask(client.get(path(&["registry", kind, key])?)).await?["value"]),
        RegistryCommand::Put { kind, key, value, expected } => {
            let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value.as_str()));
            let body = json!({ "value": value, "expected": expected });
            let answer = ask(client.put(path(&["registry", kind, key])?).json(&body)).await?;
            println!("revision {}", answer["revision"]);
        }
        RegistryCommand::Delete { kind, key, expected } => {
            let url = expecting(path(&["registry", kind, key])?, expected);
            ask(client.request(Method::DELETE, url)).await?;
        }
        RegistryCommand::RemoveCoordinator { name } => drop(ask(client.delete(path(&["coordinators", name])?)).await?),
    }
    Ok(())
}

async fn ask(request: RequestBuilder) -> anyhow::Result<Value> {
    let response = request.send().await.context("no answer: is a coordinator's --admin port there?")?;
    let status = response.status();
    let body: Value = response.json().await.with_context(|| format!("the answer ({status}) is not what a coordinator says"))?;
    if !status.is_success() {
        let said = body["error"]["message"].as_str().unwrap_or("no reason given");
        bail!("{said} ({status})");
    }
    Ok(body)
}
