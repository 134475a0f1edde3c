//! `tidemill usage`: reads the coordinators' usage logs, whether the coordinators are running or not, and adds them up.

use anyhow::{Context, bail};
use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};
use tidemill_tenancy::{
    journal,
    usage::{
        Event,
        report::{Dimension, Report, day},
    },
};

#[derive(Debug, clap::Args)]
pub struct UsageArgs {
    /// A coordinator's --data, or that of `tidemill up`, which has several inside
    #[arg(long, value_name = "DIR", required = true)]
    data: Vec<PathBuf>,
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
}

pub fn usage(args: &UsageArgs) -> anyhow::Result<()> {
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
