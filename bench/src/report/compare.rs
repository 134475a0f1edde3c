//! Changes between two records beyond noise. A figure has changed if the 95 % intervals of both do not overlap: for a percentile by order
//! statistics (the ranks of a binomial), for a rate as a Poisson count, for a share by Wilson, for a search its own interval. If a record
//! has no information on its noise, only the difference is shown.

use super::{Named, figures::summaries};
use crate::{
    goodput::search::{Estimate, wilson},
    load::summary::Summary,
};
use anyhow::ensure;
use serde_json::Value;
use std::fmt::Write;

/// A figure and its interval.
#[derive(Clone, Debug)]
struct Figure {
    name: String,
    value: f64,
    interval: Option<(f64, f64)>,
    /// Whether more is better.
    more: Option<bool>,
}

const Z: f64 = 1.96;

pub fn text(before: &Named, after: &Named) -> anyhow::Result<String> {
    let (b, a) = (&before.record, &after.record);
    ensure!(b.subcommand == a.subcommand, "{} is of `{}`, {} of `{}`", before.name, b.subcommand, after.name, a.subcommand);
    let mut text = format!(
        "{} ({}, {}) → {} ({}, {})\n",
        before.name,
        b.commit.as_deref().unwrap_or("?"),
        b.time,
        after.name,
        a.commit.as_deref().unwrap_or("?"),
        a.time
    );
    if b.machine != a.machine {
        text += "the machines differ: a change may be theirs\n";
    }
    if b.result["settings"] != a.result["settings"] {
        text += "the settings differ: a change may be theirs\n";
    }
    let (b, a) = (figures(before)?, figures(after)?);
    let mut changed = 0;
    writeln!(text, "{:<44} {:>12} {:>12} {:>9}", "", "before", "after", "change").expect("a string takes everything");
    for before in &b {
        let Some(after) = a.iter().find(|after| after.name == before.name) else { continue };
        let verdict = verdict(before, after);
        changed += usize::from(verdict == "better" || verdict == "worse" || verdict == "changed");
        let change = if before.value == 0.0 { "–".into() } else { format!("{:+.1} %", 100.0 * (after.value / before.value - 1.0)) };
        writeln!(
            text,
            "{:<44} {:>12} {:>12} {change:>9}  {verdict}",
            before.name,
            crate::plan::short(before.value),
            crate::plan::short(after.value)
        )
        .expect("a string takes everything");
    }
    writeln!(text, "{changed} of {} figures changed beyond noise", b.len()).expect("a string takes everything");
    Ok(text)
}

fn verdict(before: &Figure, after: &Figure) -> &'static str {
    let (Some(b), Some(a)) = (before.interval, after.interval) else { return "noise unknown" };
    let (rises, falls) = (a.0 > b.1, a.1 < b.0);
    match (rises || falls, before.more) {
        (false, _) => "within noise",
        (true, None) => "changed",
        (true, Some(more)) if more == rises => "better",
        (true, Some(_)) => "worse",
    }
}

fn figures(named: &Named) -> anyhow::Result<Vec<Figure>> {
    let result = &named.record.result;
    if let Some(comparisons) = result["comparisons"].as_array() {
        return searches(comparisons);
    }
    if result.get("ttft_ms").is_some() || result.get("kinds").is_some() {
        let of = |(name, summary): (String, Summary)| {
            // The files' own names differ; those of kinds do not.
            let kind = name.strip_prefix(&named.name).unwrap_or_default().trim_start_matches(": ").to_owned();
            let prefix = if kind.is_empty() { kind } else { format!("{kind}, ") };
            load(&prefix, &summary)
        };
        return Ok(summaries(&named.name, result)?.into_iter().flat_map(of).collect());
    }
    let mut all = Vec::new();
    numbers("", result, &mut all);
    Ok(all)
}

fn load(prefix: &str, summary: &Summary) -> Vec<Figure> {
    let mut all = Vec::new();
    let mut add = |name: &str, value: f64, interval: (f64, f64), more: bool| {
        all.push(Figure { name: format!("{prefix}{name}"), value, interval: Some(interval), more: Some(more) });
    };
    let rate = |count: u64| {
        let half = Z * (count as f64).sqrt();
        let per_s = |count: f64| count / summary.duration_s.max(1e-9);
        (per_s(count as f64 - half), per_s(count as f64 + half))
    };
    add("requests/s", summary.requests_per_s, rate(summary.completed), true);
    if let Some(goodput) = &summary.goodput {
        let good = (goodput.ratio * summary.requests as f64).round() as u64;
        add("share of good requests", goodput.ratio, wilson(good, summary.requests), true);
    }
    add(
        "share of failed requests",
        summary.errors as f64 / summary.requests.max(1) as f64,
        wilson(summary.errors, summary.requests),
        false,
    );
    for (key, what, percentiles) in [
        ("ttft_ms", "TTFT", &summary.ttft_ms),
        ("tpot_ms", "TPOT", &summary.tpot_ms),
        ("itl_ms", "ITL", &summary.itl_ms),
        ("e2e_ms", "E2E", &summary.e2e_ms),
    ] {
        let (Some(percentiles), Some(points)) = (percentiles, summary.distributions.get(key)) else { continue };
        for (share, name, value) in [(0.5, "p50", percentiles.p50), (0.9, "p90", percentiles.p90), (0.99, "p99", percentiles.p99)] {
            // Gaps of one answer are not independent, so the number of answers counts.
            let half = Z * (share * (1.0 - share) / summary.completed.max(1) as f64).sqrt();
            let at = |share: f64| points.iter().find(|point| point.1 >= share - 1e-9).or(points.last()).map_or(value, |point| point.0);
            add(&format!("{what} {name} ms"), value, (at(share - half).min(value), at((share + half).min(1.0)).max(value)), false);
        }
    }
    all
}

fn searches(comparisons: &[Value]) -> anyhow::Result<Vec<Figure>> {
    let mut all = Vec::new();
    for comparison in comparisons {
        for server in comparison["servers"].as_array().into_iter().flatten() {
            let name = format!("{}, {}", comparison["title"].as_str().unwrap_or_default(), server["name"].as_str().unwrap_or_default());
            if let Some(Estimate { mean, low, high }) = serde_json::from_value(server["goodput"].clone())? {
                all.push(Figure { name, value: mean, interval: Some((low, high)), more: Some(true) });
            }
        }
    }
    Ok(all)
}

/// Collects every number, by its path. Rows of lists are identified by their name, if they have one.
fn numbers(path: &str, value: &Value, all: &mut Vec<Figure>) {
    let at = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    match value {
        Value::Number(number) => {
            all.extend(number.as_f64().map(|value| Figure { name: path.to_owned(), value, interval: None, more: None }));
        }
        Value::Object(fields) => fields.iter().filter(|(key, _)| *key != "settings").for_each(|(key, value)| numbers(&at(key), value, all)),
        Value::Array(values) => values.iter().enumerate().for_each(|(n, value)| {
            let name = ["name", "policy", "grammar", "variant"].iter().find_map(|key| value[*key].as_str());
            numbers(&at(name.unwrap_or(&n.to_string())), value, all);
        }),
        _ => {}
    }
}
