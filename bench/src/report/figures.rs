//! The tables and plots of records. Loads are shown in common tables and plots; searches have a table and a curve each; for anything else,
//! its rows are a table.

use super::Named;
use crate::{
    goodput::search::{Estimate, wilson},
    load::{percentiles::Percentiles, summary::Summary},
    plan::short,
    sim::plot::{Axis, Line, Plot, Scale},
};
use anyhow::Context;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

#[derive(Default)]
pub struct Figures {
    pub tables: Vec<Table>,
    pub plots: Vec<Plot>,
}

pub struct Table {
    pub title: String,
    pub head: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

/// The most curves of a plot that can be distinguished.
const CURVES_MAX: usize = 8;
/// The most columns that fit a page.
const COLUMNS_MAX: usize = 14;

impl Figures {
    pub fn of(records: &[Named]) -> anyhow::Result<Figures> {
        let mut figures = Figures::default();
        let mut loads = Vec::new();
        for Named { name, record } in records {
            let is_load = record.subcommand == "load" || (record.subcommand == "replay" && record.result.get("ttft_ms").is_some());
            if is_load {
                loads.extend(summaries(name, &record.result)?);
            } else if let Some(comparisons) = record.result["comparisons"].as_array() {
                comparisons.iter().try_for_each(|comparison| figures.search(comparison))?;
            } else {
                figures.rows(name, &record.result);
            }
        }
        if !loads.is_empty() {
            figures.loads(&loads);
        }
        Ok(figures)
    }

    fn loads(&mut self, loads: &[(String, Summary)]) {
        let head = [
            "",
            "requests/s",
            "tokens/s",
            "good %",
            "failed",
            "cached %",
            "TTFT p50 ms",
            "p90",
            "p99",
            "TPOT p50 ms",
            "p90",
            "p99",
            "E2E p50 ms",
            "p99",
        ];
        let row = |(name, summary): &(String, Summary)| {
            let mut row = vec![
                name.clone(),
                format!("{:.2}", summary.requests_per_s),
                format!("{:.0}", summary.output_tokens_per_s),
                summary.goodput.as_ref().map_or("–".into(), |goodput| format!("{:.1}", 100.0 * goodput.ratio)),
                summary.errors.to_string(),
                format!("{:.1}", 100.0 * summary.cached_tokens as f64 / summary.prompt_tokens.max(1) as f64),
            ];
            row.extend(cells(summary.ttft_ms.as_ref(), &[|p| p.p50, |p| p.p90, |p| p.p99]));
            row.extend(cells(summary.tpot_ms.as_ref(), &[|p| p.p50, |p| p.p90, |p| p.p99]));
            row.extend(cells(summary.e2e_ms.as_ref(), &[|p| p.p50, |p| p.p99]));
            row
        };
        self.table("Load", &head, loads.iter().map(row).collect());
        for (key, what) in [("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "Gaps between tokens"), ("e2e_ms", "End to end")] {
            self.distribution(what, loads.iter().take(CURVES_MAX).map(|(name, summary)| (name.as_str(), summary, key)));
        }
        let mut over_time = |title: &str, label: &str, of: fn(&crate::load::summary::Interval) -> Option<f64>| {
            let line = |(name, summary): &(String, Summary)| Line {
                name: name.clone(),
                points: summary.timeline.iter().filter_map(|interval| Some((interval.s, of(interval)?))).collect(),
                ..Line::default()
            };
            let (x, y) = (axis("seconds", Scale::Linear), axis(label, Scale::Linear));
            self.plots.push(Plot { title: title.into(), x, y, lines: loads.iter().take(CURVES_MAX).map(line).collect() });
        };
        over_time("Output over time", "tokens per second", |interval| Some(interval.output_tokens_per_s));
        over_time("TTFT over time, by when requests were due", "ms, median", |interval| interval.ttft_ms_p50);
        for (name, summary) in loads {
            for (groups, what) in [(&summary.by_cached, "cached"), (&summary.by_turn, "turns")] {
                let rows = groups.iter().map(|group| {
                    let mut row = vec![group.name.clone(), group.completed.to_string()];
                    row.extend(cells(group.ttft_ms.as_ref(), &[|p| p.p50, |p| p.p90, |p| p.p99]));
                    row
                });
                if !groups.is_empty() {
                    self.table(&format!("{name}: TTFT, {what}"), &["", "requests", "p50 ms", "p90", "p99"], rows.collect());
                }
            }
        }
    }

    /// One comparison of `goodput`.
    fn search(&mut self, comparison: &Value) -> anyhow::Result<()> {
        let title = comparison["title"].as_str().filter(|title| !title.is_empty()).unwrap_or("Goodput").to_owned();
        let servers = comparison["servers"].as_array().context("a comparison without servers")?;
        let ratio = comparison["settings"]["ratio"].as_f64().unwrap_or(0.9);
        let (mut rows, mut curves, mut bests) = (Vec::new(), Vec::new(), Vec::new());
        for server in servers {
            let name = server["name"].as_str().unwrap_or_default().to_owned();
            let goodput: Option<Estimate> = serde_json::from_value(server["goodput"].clone())?;
            let points = server["points"].as_array().context("a server without points")?;
            let number = |point: &Value, key: &str| point[key].as_f64().unwrap_or(f64::NAN);
            let mut curve: Vec<&Value> = points.iter().collect();
            curve.sort_by(|a, b| number(a, "rate").total_cmp(&number(b, "rate")));
            curves.push(pooled(name.clone(), &curve));
            let best = curve.iter().rev().find(|point| number(point, "ratio") >= ratio);
            let best: Option<Summary> = best.map(|point| serde_json::from_value(point["summary"].clone())).transpose()?;
            let mut row = vec![name.clone()];
            row.push(goodput.map_or("–".into(), |goodput| format!("{:.2}", goodput.mean)));
            row.push(goodput.map_or("–".into(), |goodput| format!("{:.2} to {:.2}", goodput.low, goodput.high)));
            row.push(server["capacity"].as_f64().map_or("–".into(), |capacity| format!("{capacity:.2}")));
            let of = |of: fn(&Summary) -> &Option<Percentiles>| best.as_ref().and_then(|summary| of(summary).as_ref());
            row.extend(cells(of(|summary| &summary.ttft_ms), &[|p| p.p50, |p| p.p90, |p| p.p99]));
            row.extend(cells(of(|summary| &summary.tpot_ms), &[|p| p.p50, |p| p.p90, |p| p.p99]));
            row.push(
                best.as_ref()
                    .map_or("–".into(), |best| format!("{:.0}", 100.0 * best.cached_tokens as f64 / best.prompt_tokens.max(1) as f64)),
            );
            rows.push(row);
            bests.extend(best.map(|best| (name, best)));
        }
        let head = ["", "requests/s", "95 %", "capacity (TBT)", "TTFT p50 ms", "p90", "p99", "TPOT p50 ms", "p90", "p99", "cached %"];
        self.table(&title, &head, rows);
        let y = Axis { label: "share of requests within both limits".into(), scale: Scale::Linear, range: Some((0.0, 1.0)) };
        self.plots.push(Plot { title: title.clone(), x: axis("requests per second", Scale::Linear), y, lines: curves });
        for (key, what) in [("ttft_ms", "TTFT"), ("tpot_ms", "TPOT")] {
            let of = bests.iter().map(|(name, summary)| (name.as_str(), summary, key));
            self.distribution(&format!("{title}: {what} at the highest good rate"), of);
        }
        Ok(())
    }

    fn distribution<'a>(&mut self, title: &str, of: impl Iterator<Item = (&'a str, &'a Summary, &'a str)>) {
        let line = |(name, summary, key): (&str, &'a Summary, &str)| {
            let points = summary.distributions.get(key)?.clone();
            (!points.is_empty()).then(|| Line { name: name.into(), points, ..Line::default() })
        };
        let lines: Vec<Line> = of.filter_map(line).collect();
        if !lines.is_empty() {
            let y = Axis { label: "share of answers".into(), scale: Scale::Linear, range: Some((0.0, 1.0)) };
            self.plots.push(Plot { title: title.into(), x: axis("ms", Scale::Log), y, lines });
        }
    }

    /// Shows any list of objects as a table of their plain fields, and other plain fields as a table of their own.
    fn rows(&mut self, name: &str, result: &Value) {
        match result {
            Value::Array(rows) => {
                let objects: Vec<Map<String, Value>> = rows.iter().map(plain).filter(|row| !row.is_empty()).collect();
                let mut head: Vec<String> = Vec::new();
                for key in objects.iter().flat_map(Map::keys) {
                    if !head.contains(key) && head.len() < COLUMNS_MAX {
                        head.push(key.clone());
                    }
                }
                let cells = |object: &Map<String, Value>| head.iter().map(|key| object.get(key).map_or(String::new(), written)).collect();
                let rows = objects.iter().map(cells).collect();
                if !head.is_empty() {
                    self.tables.push(Table { title: name.to_owned(), head, rows });
                }
            }
            Value::Object(fields) => {
                let own = plain(result);
                if !own.is_empty() {
                    let rows = own.iter().map(|(key, value)| vec![key.clone(), written(value)]).collect();
                    self.table(name, &["", ""], rows);
                }
                for (key, value) in fields.iter().filter(|(key, _)| *key != "settings") {
                    if value.is_array() || key == "fleet" || key == "summary" {
                        self.rows(&format!("{name}: {key}"), value);
                    }
                }
            }
            _ => {}
        }
    }

    fn table(&mut self, title: &str, head: &[&str], rows: Vec<Vec<String>>) {
        self.tables.push(Table { title: title.to_owned(), head: head.iter().map(|cell| (*cell).to_owned()).collect(), rows });
    }
}

/// The share of good requests by rate; for a rate that was tried several times, of all its requests. `points` are in order of their rates.
fn pooled(name: String, points: &[&Value]) -> Line {
    let mut line = Line { name, dots: true, ..Line::default() };
    for same in points.chunk_by(|a, b| a["rate"] == b["rate"]) {
        let count = |point: &&Value| point["summary"]["requests"].as_u64().unwrap_or(0);
        let good = |point: &&Value| (point["ratio"].as_f64().unwrap_or(0.0) * count(point) as f64).round() as u64;
        let (all, good) = (same.iter().map(count).sum::<u64>(), same.iter().map(good).sum::<u64>());
        let (Some(rate), (low, high)) = (same[0]["rate"].as_f64(), wilson(good, all)) else { continue };
        line.points.push((rate, good as f64 / all.max(1) as f64));
        line.intervals.push((rate, low, high));
    }
    line
}

/// The summaries in a load's result: one, or one of each kind.
pub fn summaries(name: &str, result: &Value) -> anyhow::Result<Vec<(String, Summary)>> {
    let read = |value: &Value| serde_json::from_value(value.clone()).with_context(|| format!("{name} is not a load's result"));
    let Some(kinds) = result.get("kinds") else { return Ok(vec![(name.to_owned(), read(result)?)]) };
    let kinds: BTreeMap<String, Value> = serde_json::from_value(kinds.clone())?;
    kinds.iter().map(|(kind, value)| Ok((format!("{name}: {kind}"), read(value)?))).collect()
}

/// The fields that are neither lists nor objects; for objects with percentiles, the median.
fn plain(value: &Value) -> Map<String, Value> {
    let mut plain = Map::new();
    for (key, value) in value.as_object().into_iter().flatten() {
        match value {
            Value::Object(inner) if inner.contains_key("p50") => {
                plain.insert(format!("{key} p50"), inner["p50"].clone());
            }
            Value::Object(inner) if key == "summary" => plain.extend(self::plain(&Value::Object(inner.clone()))),
            Value::Object(_) | Value::Array(_) | Value::Null => {}
            value => {
                plain.insert(key.clone(), value.clone());
            }
        }
    }
    plain
}

fn written(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.as_f64().map_or_else(|| number.to_string(), short),
        value => value.to_string(),
    }
}

fn cells(percentiles: Option<&Percentiles>, of: &[fn(&Percentiles) -> f64]) -> Vec<String> {
    let digits = |value: f64| if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") };
    of.iter().map(|of| percentiles.map_or("–".into(), |percentiles| digits(of(percentiles)))).collect()
}

fn axis(label: &str, scale: Scale) -> Axis {
    Axis { label: label.into(), scale, range: None }
}
