//! `tidemill keys` and `tidemill tenants`, at a coordinator's operators' port.

use crate::operators::TokenArgs;
use anyhow::{Context, bail};
use serde_json::{Map, Value, json};
use std::time::Duration;
use tidemill_tenancy::{limits::Limit, money::Amount};

/// The time limit for an answer. A coordinator usually takes milliseconds.
const ANSWER_MAX: Duration = Duration::from_secs(20);

#[derive(Debug, clap::Subcommand)]
pub enum KeysCommand {
    /// Make a key: its secret is printed once, on stdout, and stored nowhere
    Create {
        /// Tenant of the key; a new one is made
        #[arg(long)]
        tenant: String,
        /// Tier of a new tenant: free, paid, premium, or one of the coordinator's file
        #[arg(long)]
        tier: Option<String>,
        /// User of the tenant, in the usage log
        #[arg(long)]
        user: Option<String>,
        /// Name of the key, for people
        #[arg(long)]
        name: Option<String>,
        /// Days after which the key is no longer valid
        #[arg(long, value_name = "DAYS")]
        expires_days: Option<u64>,
        // These apply to this key alone, in addition to its tenant's.
        #[command(flatten)]
        limits: Box<LimitArgs>,
        #[command(flatten)]
        at: At,
    },
    /// Show all keys, without their secrets
    List {
        /// Only keys of this tenant
        #[arg(long)]
        tenant: Option<String>,
        #[command(flatten)]
        at: At,
    },
    /// Revoke a key
    Revoke {
        /// Id of the key, as `list` shows it
        id: String,
        #[command(flatten)]
        at: At,
    },
}

#[derive(Debug, clap::Subcommand)]
pub enum TenantsCommand {
    /// Show all tenants, and the tiers that there are
    List {
        #[command(flatten)]
        at: At,
    },
    /// Make a tenant, or change its tier or its own limits
    Set {
        tenant: String,
        #[arg(long)]
        tier: Option<String>,
        /// Remove the tenant's own limits: the tier's hold
        #[arg(long)]
        reset_limits: bool,
        /// Whether the tenant has opted in to the semantic cache: answers to similar questions, where the coordinators keep them
        #[arg(long, value_name = "BOOL")]
        semantic_cache: Option<bool>,
        #[command(flatten)]
        limits: Box<LimitArgs>,
        #[command(flatten)]
        at: At,
    },
}

#[derive(Debug, clap::Args)]
pub struct At {
    /// A coordinator's --admin address
    #[arg(long, default_value = "http://127.0.0.1:9100")]
    url: String,
    /// Print the coordinator's answer as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    token: TokenArgs,
}

#[derive(Debug, clap::Args)]
pub struct LimitArgs {
    /// Requests a minute: a number, or none
    #[arg(long, value_name = "N")]
    requests_per_minute: Option<Limit>,
    /// Tokens a minute: a number, or none
    #[arg(long, value_name = "N")]
    tokens_per_minute: Option<Limit>,
    /// Tokens a day: a number, or none
    #[arg(long, value_name = "N")]
    tokens_per_day: Option<Limit>,
    /// Requests at a time: a number, or none
    #[arg(long, value_name = "N")]
    concurrent: Option<Limit>,
    /// Money that may be spent in a day (UTC), by the coordinators' prices: a sum such as 12.50, or none
    #[arg(long, value_name = "SUM")]
    budget_day: Option<Amount>,
    /// Money from which answers say that the day's budget runs out: a sum, or none
    #[arg(long, value_name = "SUM")]
    budget_day_soft: Option<Amount>,
    /// Money that may be spent in a month (UTC): a sum, or none
    #[arg(long, value_name = "SUM")]
    budget_month: Option<Amount>,
    /// Money from which answers say that the month's budget runs out: a sum, or none
    #[arg(long, value_name = "SUM")]
    budget_month_soft: Option<Amount>,
}

pub async fn keys(command: KeysCommand) -> anyhow::Result<()> {
    match command {
        KeysCommand::Create { tenant, tier, user, name, expires_days, limits, at } => {
            let expires_in_s = expires_days.map(|days| days.saturating_mul(24 * 3600));
            let body = given([
                ("tenant", json!(tenant)),
                ("tier", json!(tier)),
                ("user", json!(user)),
                ("name", json!(name)),
                ("expires_in_s", json!(expires_in_s)),
                ("limits", limits.value()),
            ]);
            let made = at.call(reqwest::Method::POST, "/admin/keys", Some(body)).await?;
            at.print(&made, |made| {
                eprintln!("key {} of tenant {}: keep it, it is shown this once", text(made, "id"), text(made, "tenant"));
                println!("{}", text(made, "key"));
            });
        }
        KeysCommand::List { tenant, at } => {
            let mut listed = at.call(reqwest::Method::GET, "/admin/keys", None).await?;
            if let (Some(tenant), Some(keys)) = (tenant, listed["keys"].as_array_mut()) {
                keys.retain(|key| key["tenant"] == tenant);
            }
            at.print(&listed, |listed| table(&["id", "tenant", "user", "name", "limits", "expires", "revoked"], &listed["keys"]));
        }
        KeysCommand::Revoke { id, at } => {
            if id.len() > ID_BYTES || !id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
                bail!("a key is named by its id, such as tm_0123456789ab, and not by its secret: `tidemill keys list` shows the ids");
            }
            let revoked = at.call(reqwest::Method::DELETE, &format!("/admin/keys/{id}"), None).await?;
            at.print(&revoked, |revoked| println!("{} of tenant {} opens nothing any more", text(revoked, "id"), text(revoked, "tenant")));
        }
    }
    Ok(())
}

/// The most bytes of a key's id.
const ID_BYTES: usize = 15;

pub async fn tenants(command: TenantsCommand) -> anyhow::Result<()> {
    match command {
        TenantsCommand::List { at } => {
            let listed = at.call(reqwest::Method::GET, "/admin/tenants", None).await?;
            at.print(&listed, |listed| {
                table(&["id", "tier", "limits", "semantic_cache"], &listed["tenants"]);
                println!();
                let limits = ["requests_per_minute", "tokens_per_minute", "tokens_per_day", "concurrent", "budget_day", "budget_month"];
                table(&[&["name", "class"][..], &limits, &["shed"]].concat(), &listed["tiers"]);
            });
        }
        TenantsCommand::Set { tenant, tier, reset_limits, semantic_cache, limits, at } => {
            tidemill_tenancy::records::check_name("tenant", &tenant).map_err(anyhow::Error::msg)?;
            let body = given([
                ("tier", json!(tier)),
                ("limits", limits.value()),
                ("reset_limits", json!(reset_limits)),
                ("semantic_cache", json!(semantic_cache)),
            ]);
            // This is the only character allowed in names that must be escaped in a URL's path.
            let path = format!("/admin/tenants/{}", tenant.replace('|', "%7C"));
            let put = at.call(reqwest::Method::PUT, &path, Some(body)).await?;
            at.print(&put, |put| println!("tenant {} has tier {}", text(put, "id"), text(put, "tier")));
        }
    }
    Ok(())
}

impl LimitArgs {
    fn value(&self) -> Value {
        given([
            ("requests_per_minute", json!(self.requests_per_minute)),
            ("tokens_per_minute", json!(self.tokens_per_minute)),
            ("tokens_per_day", json!(self.tokens_per_day)),
            ("concurrent", json!(self.concurrent)),
            ("budget_day", json!(self.budget_day)),
            ("budget_day_soft", json!(self.budget_day_soft)),
            ("budget_month", json!(self.budget_month)),
            ("budget_month_soft", json!(self.budget_month_soft)),
        ])
    }
}

impl At {
    pub(crate) fn of(url: &str, json: bool, token: &TokenArgs) -> Self {
        Self { url: url.to_owned(), json, token: token.clone() }
    }

    pub(crate) async fn call(&self, method: reqwest::Method, path: &str, body: Option<Value>) -> anyhow::Result<Value> {
        let url = format!("{}{path}", self.url.trim_end_matches('/'));
        // No proxy: keys must reach only the coordinator.
        let client = self.token.client()?.timeout(ANSWER_MAX).build()?;
        let mut request = client.request(method, &url);
        if let Some(body) = body {
            request = request.json(&body);
        }
        let unreachable = || format!("no answer from {}: is this a coordinator's --admin address?", self.url);
        let response = request.send().await.map_err(reqwest::Error::without_url).with_context(unreachable)?;
        let status = response.status();
        let answer: Value = response.json().await.map_err(reqwest::Error::without_url).with_context(unreachable)?;
        if !status.is_success() {
            let message = answer["error"]["message"].as_str().unwrap_or("no reason was given");
            bail!(
                "{message}{}",
                if status == 404 && path == "/admin/keys" { " (this may be a front door, not an --admin address)" } else { "" }
            );
        }
        Ok(answer)
    }

    pub(crate) fn print(&self, answer: &Value, people: impl FnOnce(&Value)) {
        if self.json { println!("{answer:#}") } else { people(answer) }
    }
}

/// An object of the fields that are neither null nor empty.
fn given<const N: usize>(fields: [(&str, Value); N]) -> Value {
    let given = fields.into_iter().filter(|(_, value)| !value.is_null() && value.as_object().is_none_or(|object| !object.is_empty()));
    given.map(|(name, value)| (name.to_owned(), value)).collect::<Map<_, _>>().into()
}

pub(crate) fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object[field].as_str().unwrap_or_default()
}

pub(crate) fn table(columns: &[&str], rows: &Value) {
    let cell = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Object(fields) => fields.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    };
    let row = |row: &Value| columns.iter().map(|column| cell(&row[*column])).collect::<Vec<_>>();
    let header = columns.iter().map(|column| (*column).to_owned()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(header).chain(rows.as_array().into_iter().flatten().map(row)).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
    for line in &lines {
        let cells: Vec<_> = line.iter().enumerate().map(|(column, cell)| format!("{cell:<0$}", width(column))).collect();
        println!("{}", cells.join("  ").trim_end());
    }
}
