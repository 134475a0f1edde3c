//! `tidemill usage`: reads the coordinators' usage logs, whether the coordinators are running or not, and adds them up.

use anyhow::{Context, bail};
use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};
use tidemill_tenancy::{
    segment,
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
    let mut segments = Vec::new();
    for data in &args.data {
        let before = segments.len();
        find(data, &mut segments)?;
        if segments.len() == before {
            bail!("{} has no usage log: it is written by a coordinator with --data", data.display());
        }
    }
    let mut report = Report::new(args.by.clone());
    // Each event is written once, but a directory may be given twice.
    let mut seen = HashSet::new();
    for path in segments {
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let segment = segment::read::<Event>(&bytes).with_context(|| path.display().to_string())?;
        for event in segment.entries {
            if args.wants(&event) && seen.insert(event.id.clone()) {
                match args.format.as_str() {
                    "events" => println!("{}", serde_json::to_string(&event)?),
                    _ => report.add(&event),
                }
            }
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

/// Appends the log segments, in order, of a coordinator's data directory or of the coordinators' directories in it.
fn find(data: &Path, segments: &mut Vec<PathBuf>) -> anyhow::Result<()> {
    let listed = |dir: &Path| -> anyhow::Result<Vec<PathBuf>> {
        let failed = || format!("cannot read {}", dir.display());
        let mut paths = fs::read_dir(dir)
            .with_context(failed)?
            .map(|entry| Ok(entry?.path()))
            .collect::<std::io::Result<Vec<_>>>()
            .with_context(failed)?;
        paths.sort();
        Ok(paths)
    };
    let is_segment =
        |path: &PathBuf| path.file_name().and_then(|name| name.to_str()).is_some_and(|name| segment::number::<Event>(name).is_some());
    let usage = |dir: &Path| dir.join("usage");
    let coordinators: Vec<_> = if usage(data).is_dir() { vec![data.to_owned()] } else { listed(data)? };
    for dir in coordinators.iter().map(|dir| usage(dir)).filter(|dir| dir.is_dir()) {
        segments.extend(listed(&dir)?.into_iter().filter(is_segment));
    }
    Ok(())
}
