//! `tidemill usage`: reads the coordinators' usage logs, whether the coordinators are running or not, and adds them up; or asks the
//! coordinators what was spent of which budget.

use crate::{keys::At, operators::TokenArgs};
use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::{Path, PathBuf},
};
use tidemill_tenancy::{
    journal, money,
    usage::{
        Event,
        report::{Dimension, Report, day},
    },
};

#[derive(Debug, clap::Args)]
pub struct UsageArgs {
    /// A coordinator's --data, or that of `tidemill up`, which has several inside
    #[arg(long, value_name = "DIR", required_unless_present = "spend")]
    data: Vec<PathBuf>,
    /// Show what was spent today and this month (UTC), beside the budgets, as the coordinators at --url know it
    #[arg(long, conflicts_with_all = ["data", "by", "since", "until", "format"])]
    spend: bool,
    /// The coordinators' --admin addresses, for --spend: sums are over all of them
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9100")]
    url: Vec<String>,
    /// Print what --spend shows as JSON
    #[arg(long, requires = "spend")]
    json: bool,
    /// Keys to add up by: some of tenant, user, key, model, class, outcome, day
    #[arg(long, value_name = "WHAT,…", value_delimiter = ',', default_value = "tenant,model,day")]
    by: Vec<Dimension>,
    /// Only events of this tenant
    #[arg(long)]
    tenant: Option<String>,
    /// Only events from this day (UTC) on, such as 2026-11-24
    #[arg(long, value_name = "DAY")]
    since: Option<String>,
    /// Only events up to this day
    #[arg(long, value_name = "DAY")]
    until: Option<String>,
    /// Form of the output: table, csv, json (the sums), or events (each event, as a line of JSON)
    #[arg(long, default_value = "table", value_parser = ["table", "csv", "json", "events"])]
    format: String,
    #[command(flatten)]
    token: TokenArgs,
}

pub async fn usage(args: &UsageArgs) -> anyhow::Result<()> {
    if args.spend {
        return spend(args).await;
    }
    let mut report = Report::new(args.by.clone());
    // Each event is written once, but a directory may be given twice.
    let mut seen = HashSet::new();
    for data in &args.data {
        let logs = logs(data)?;
        if logs.is_empty() {
            bail!("{} has no usage log: it is written by a coordinator with --data", data.display());
        }
        for dir in logs {
            journal::read(&dir, 0, |_, event: Event| {
                if args.wants(&event) && seen.insert(event.id.clone()) {
                    match args.format.as_str() {
                        "events" => println!("{}", serde_json::to_string(&event).expect("an event is made of texts and numbers")),
                        _ => report.add(&event),
                    }
                }
                true
            })?;
        }
    }
    match args.format.as_str() {
        "csv" => print!("{}", report.csv()),
        "json" => println!("{:#}", report.json()),
        "table" => print!("{}", report.table()),
        _ => {}
    }
    Ok(())
}

/// Shows what was spent, added up over the coordinators.
async fn spend(args: &UsageArgs) -> anyhow::Result<()> {
    let mut rows: BTreeMap<(String, String), Value> = BTreeMap::new();
    let mut resets = Value::Null;
    for url in &args.url {
        let mut answer = At::of(url, args.json, &args.token).call(reqwest::Method::GET, "/admin/spend", None).await?;
        let reported = [&answer["tenants"], &answer["keys"]].into_iter().filter_map(Value::as_array).flatten();
        for row in reported.filter(|row| args.tenant.as_ref().is_none_or(|tenant| row["tenant"] == **tenant)) {
            let name = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
            let sum = rows.entry((name("tenant"), name("key"))).or_insert_with(|| without_sums(row));
            for period in ["day", "month"] {
                let micros = [&sum[period], &row[period]].map(|of| of["spent_micros"].as_u64().unwrap_or(0)).iter().sum::<u64>();
                sum[period]["spent_micros"] = micros.into();
                sum[period]["spent"] = money::written(micros).into();
            }
        }
        resets = answer["resets"].take();
    }
    let rows: Vec<Value> = rows.into_values().collect();
    if args.json {
        println!("{:#}", json!({"rows": rows, "resets": resets}));
        return Ok(());
    }
    let flat = rows.iter().map(|row| {
        let of = |period: &str| {
            let budget = &row[period];
            let soft = budget["soft"].as_str().map_or(String::new(), |soft| format!(" (soft {soft})"));
            format!("{} of {}{soft}", budget["spent"].as_str().unwrap_or("0"), budget["hard"].as_str().unwrap_or("none"))
        };
        json!({"tenant": row["tenant"], "key": row["key"], "today": of("day"), "this month": of("month")})
    });
    crate::keys::table(&["tenant", "key", "today", "this month"], &flat.collect());
    let reset = |period: &str| resets[period].as_str().unwrap_or_default().to_owned();
    println!("the day ends at {}, the month at {}", reset("day"), reset("month"));
    Ok(())
}

/// A row in which nothing was spent yet.
fn without_sums(row: &Value) -> Value {
    let mut row = row.clone();
    for period in ["day", "month"] {
        row[period]["spent_micros"] = 0.into();
    }
    row
}

impl UsageArgs {
    fn wants(&self, event: &Event) -> bool {
        let day = day(event.at_ms);
        self.tenant.as_ref().is_none_or(|tenant| *tenant == event.tenant)
            && self.since.as_ref().is_none_or(|since| day >= *since)
            && self.until.as_ref().is_none_or(|until| day <= *until)
    }
}

/// The directories of the usage logs of a coordinator's data directory, or of the coordinators' directories in it.
fn logs(data: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut dirs = vec![data.join("usage")];
    if !dirs[0].is_dir() {
        let failed = || format!("cannot read {}", data.display());
        let listed = fs::read_dir(data).with_context(failed)?.map(|entry| Ok(entry?.path().join("usage")));
        dirs = listed.collect::<std::io::Result<_>>().with_context(failed)?;
        dirs.retain(|dir| dir.is_dir());
        dirs.sort();
    }
    let mut logs = Vec::new();
    for dir in dirs {
        if !journal::files::<Event>(&dir)?.is_empty() {
            logs.push(dir);
        }
    }
    Ok(logs)
}
