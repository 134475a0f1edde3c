//! `tidemill erase` and `tidemill export`: a tenant's or a user's data is erased, or written out, at a coordinator's operators' port.

use crate::{keys::At, operators::TokenArgs};
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::{
    io::{self, Write},
    time::Duration,
};

/// The longest silence of a coordinator that exports.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// More than the last line of an export has.
const END_BYTES_MAX: usize = 200;

#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    /// Tenant whose data is written out
    #[arg(long)]
    tenant: String,
    /// User of the tenant, as keys or tokens name it; without one, all of the tenant
    #[arg(long)]
    user: Option<String>,
    /// A coordinator's --admin address: each has files, opinions and usage of its own
    #[arg(long, default_value = "http://127.0.0.1:9100")]
    url: String,
    #[command(flatten)]
    token: TokenArgs,
}

/// Writes JSON lines to stdout. An error if they do not come to their end.
pub async fn export(args: ExportArgs) -> anyhow::Result<()> {
    let client = args.token.client()?.read_timeout(SILENCE_MAX).build()?;
    let mut url = reqwest::Url::parse(&args.url).with_context(|| format!("`{}` is no URL such as http://127.0.0.1:9100", args.url))?;
    url.set_path("/admin/export");
    url.query_pairs_mut().append_pair("tenant", &args.tenant).extend_pairs(args.user.iter().map(|user| ("user", user)));
    let unreachable = || format!("no answer from {}: is this a coordinator's --admin address?", args.url);
    let mut response = client.get(url).send().await.map_err(reqwest::Error::without_url).with_context(unreachable)?;
    if !response.status().is_success() {
        let answer: Value = response.json().await.unwrap_or_default();
        bail!("{}", answer["error"]["message"].as_str().unwrap_or("no reason was given"));
    }
    let (mut end, mut out) = (Vec::new(), io::stdout().lock());
    while let Some(bytes) = response.chunk().await.context("the export broke off: the coordinator's log says why")? {
        out.write_all(&bytes)?;
        end.extend_from_slice(&bytes);
        end.drain(..end.len().saturating_sub(END_BYTES_MAX));
    }
    out.flush()?;
    let last = String::from_utf8_lossy(&end);
    let last = last.lines().next_back().and_then(|line| serde_json::from_str::<Value>(line).ok());
    if last.is_none_or(|line| line["kind"] != "end") {
        bail!("the export is not whole: its last line is missing");
    }
    Ok(())
}

#[derive(Debug, clap::Args)]
pub struct EraseArgs {
    /// Tenant whose data is erased
    #[arg(long)]
    tenant: String,
    /// User of the tenant, as keys or tokens name it; without one, all of the tenant
    #[arg(long)]
    user: Option<String>,
    /// Erase nothing: count what is there
    #[arg(long)]
    check: bool,
    /// The coordinators' --admin addresses: the first is told to erase, and tells the others; all of them are asked what is left
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9100")]
    url: Vec<String>,
    /// Print the coordinators' answers as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    token: TokenArgs,
}

pub async fn erase(args: EraseArgs) -> anyhow::Result<()> {
    let mut answers = Vec::new();
    for (place, url) in args.url.iter().enumerate() {
        let check = args.check || place > 0;
        let mut body = json!({"tenant": args.tenant, "check": check});
        if let Some(user) = &args.user {
            body["user"] = user.as_str().into();
        }
        let mut answer = At::of(url, args.json, &args.token).call(reqwest::Method::POST, "/admin/erasures", Some(body)).await?;
        answer["coordinator"] = url.as_str().into();
        answers.push(answer);
    }
    if args.json {
        println!("{:#}", Value::from(answers.clone()));
    } else {
        answers.iter().for_each(show);
    }
    let left: u64 = answers.iter().filter_map(|answer| answer["total_left"].as_u64()).sum();
    if left > 0 && !args.check {
        bail!("{left} things are left: other coordinators erase theirs within seconds; look again with --check");
    }
    Ok(())
}

fn show(answer: &Value) {
    println!("{}", crate::keys::text(answer, "coordinator"));
    let counts = |what: &str| answer[what].as_object().cloned().unwrap_or_default();
    let (erased, left) = (counts("erased"), counts("left"));
    let rows = left.iter().map(|(kind, left)| json!({"kind": kind, "erased": erased.get(kind), "left": left}));
    crate::keys::table(&["kind", "erased", "left"], &rows.collect());
    if let Some(seconds) = answer["settles_in_s"].as_u64() {
        println!("requests that ran meanwhile may still write: it is repeated for {seconds} s");
    }
}
