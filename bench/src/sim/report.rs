//! All cells' figures: a table for people, JSON for programs.

use super::{
    scenario::Head,
    summary::{Summary, WorkersUsed},
    timing::DecisionCost,
};
use crate::load::percentiles::Percentiles;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;
use tidemill_sim::{settings::Settings, world::Run};

#[derive(Debug)]
pub struct Report {
    pub head: Head,
    pub rows: Vec<Row>,
    pub wall_s: f64,
}

/// The results of one cell.
#[derive(Debug)]
pub struct Row {
    pub variant: String,
    pub at: Option<String>,
    pub x: Option<f64>,
    pub settings: Settings,
    pub summary: Summary,
    pub found: Option<Found>,
    pub decisions: Option<DecisionCost>,
    /// The first seed's run.
    pub run: Run,
}

/// The result of a search.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    pub key: String,
    /// The highest value that was good enough; 0 if none was.
    pub value: f64,
    /// The lowest value that was not.
    pub next: f64,
}

impl Report {
    pub fn text(&self) -> String {
        let mut text = format!("{}\n", self.head.title);
        let columns = self.columns();
        let cells: Vec<Vec<String>> = [columns.iter().map(|column| column.name.to_owned()).collect()]
            .into_iter()
            .chain(self.rows.iter().map(|row| row.cells(&columns)))
            .collect();
        let width = |column: usize| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns.len()).map(width).collect();
        for row in &cells {
            let padded = row.iter().zip(&widths).enumerate().map(|(n, (cell, &width))| match n {
                0 | 1 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            });
            writeln!(text, "{}", padded.collect::<Vec<_>>().join("  ").trim_end()).expect("a string takes everything");
        }
        for (name, value, reference) in self.references() {
            let ours = value.map_or("–".into(), |value| format!("{value:.2}"));
            writeln!(text, "{name}: {ours}; {}: {}", reference.source, reference.value).expect("a string takes everything");
        }
        let events: u64 = self.rows.iter().map(|row| row.summary.events).sum();
        write!(text, "{} cells, {:.1} M events in the reported runs, {:.0} s", self.rows.len(), events as f64 / 1e6, self.wall_s)
            .expect("a string takes everything");
        text
    }

    pub fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .rows
            .iter()
            .map(|row| {
                json!({
                    "variant": row.variant,
                    "at": row.at,
                    "summary": row.summary,
                    "found": row.found,
                    "decisions": row.decisions,
                    "settings": row.settings,
                    "load": row.run.load,
                })
            })
            .collect();
        json!({ "scenario": self.head, "rows": rows, "wall_s": self.wall_s })
    }

    /// Figures of other sources beside ours: the name, ours, theirs.
    pub fn references(&self) -> Vec<(String, Option<f64>, &super::scenario::Reference)> {
        let ours = |reference: &super::scenario::Reference| {
            let row = self.rows.iter().find(|row| row.variant == reference.variant)?;
            row.figure(&reference.what)
        };
        self.head
            .reference
            .iter()
            .map(|reference| (format!("{}, {}", reference.variant, reference.what), ours(reference), reference))
            .collect()
    }

    /// The table's columns: those with any information.
    pub fn columns(&self) -> Vec<Column> {
        let any = |has: fn(&Row) -> bool| self.rows.iter().any(has);
        let all: [(bool, &'static str, Figure); 24] = [
            (true, "variant", |row| row.variant.clone()),
            (any(|row| row.at.is_some()), "at", |row| row.at.clone().unwrap_or_default()),
            (any(|row| row.found.is_some()), "found", |row| {
                row.found.as_ref().map_or(String::new(), |found| format!("{:.3}", found.value))
            }),
            (true, "requests/s", |row| format!("{:.2}", row.summary.requests_per_s)),
            (true, "good %", |row| format!("{:.1}", 100.0 * row.summary.goodput_ratio)),
            (true, "TTFT mean s", |row| seconds(row.summary.ttft_ms.as_ref(), |p| p.mean)),
            (true, "p50", |row| seconds(row.summary.ttft_ms.as_ref(), |p| p.p50)),
            (true, "p90", |row| seconds(row.summary.ttft_ms.as_ref(), |p| p.p90)),
            (true, "p99", |row| seconds(row.summary.ttft_ms.as_ref(), |p| p.p99)),
            (true, "TPOT ms p50", |row| milliseconds(row.summary.tpot_ms.as_ref(), |p| p.p50)),
            (true, "p90", |row| milliseconds(row.summary.tpot_ms.as_ref(), |p| p.p90)),
            (true, "p99", |row| milliseconds(row.summary.tpot_ms.as_ref(), |p| p.p99)),
            (true, "cached %", |row| format!("{:.1}", 100.0 * row.summary.cached_share)),
            (any(|row| row.summary.prefill_share > 0.0), "local %", |row| format!("{:.1}", 100.0 * row.summary.local_share)),
            (any(|row| row.summary.rejected > 0), "rejected %", |row| percent(row.summary.rejected, row.summary.requests)),
            (any(|row| row.summary.failed > 0), "failed %", |row| percent(row.summary.failed, row.summary.requests)),
            (any(Row::is_autoscaled), "worker hours", |row| format!("{:.1}", row.summary.workers.hours())),
            (any(Row::is_autoscaled), "at most", |row| format!("{}+{}", row.summary.workers.prefill_max, row.summary.workers.decode_max)),
            (any(Row::is_autoscaled), "up, down, flaps", |row| {
                let WorkersUsed { ups, downs, flaps, .. } = row.summary.workers;
                format!("{ups}, {downs}, {flaps}")
            }),
            (true, "error p50 %", |row| row.summary.prediction_error_p50.map_or(String::new(), |error| format!("{:.0}", 100.0 * error))),
            (any(|row| row.decisions.is_some()), "decision µs p50", |row| {
                row.decisions.as_ref().map_or(String::new(), |cost| format!("{:.1}", cost.submit_us_p50))
            }),
            (any(|row| row.decisions.is_some()), "p99", |row| {
                row.decisions.as_ref().map_or(String::new(), |cost| format!("{:.1}", cost.submit_us_p99))
            }),
            (any(|row| row.decisions.is_some()), "KB", |row| {
                row.decisions.as_ref().map_or(String::new(), |cost| format!("{:.1}", cost.submit_bytes_p50 as f64 / 1e3))
            }),
            (true, "events/s", |row| format!("{:.0}", row.summary.events_per_s)),
        ];
        all.into_iter().filter(|(wanted, ..)| *wanted).map(|(_, name, cell)| Column { name, cell }).collect()
    }
}

/// The text of a column in a row.
pub type Figure = fn(&Row) -> String;

pub struct Column {
    pub name: &'static str,
    pub cell: Figure,
}

impl Row {
    pub fn cells(&self, columns: &[Column]) -> Vec<String> {
        columns.iter().map(|column| (column.cell)(self)).collect()
    }

    fn is_autoscaled(&self) -> bool {
        self.settings.cluster.autoscale.is_some()
    }

    /// A figure by the name that references use.
    pub fn figure(&self, what: &str) -> Option<f64> {
        let ttft = self.summary.ttft_ms.as_ref();
        match what {
            "ttft_mean_s" => ttft.map(|p| p.mean / 1e3),
            "ttft_p50_s" => ttft.map(|p| p.p50 / 1e3),
            "ttft_p90_s" => ttft.map(|p| p.p90 / 1e3),
            "goodput_ratio" => Some(self.summary.goodput_ratio),
            "found" => self.found.as_ref().map(|found| found.value),
            _ => None,
        }
    }

    pub fn name(&self) -> String {
        match &self.at {
            Some(at) if self.variant.is_empty() => at.clone(),
            Some(at) => format!("{} at {at}", self.variant),
            None => self.variant.clone(),
        }
    }
}

fn seconds(percentiles: Option<&Percentiles>, of: fn(&Percentiles) -> f64) -> String {
    percentiles.map_or("–".into(), |p| format!("{:.2}", of(p) / 1e3))
}

fn milliseconds(percentiles: Option<&Percentiles>, of: fn(&Percentiles) -> f64) -> String {
    percentiles.map_or("–".into(), |p| format!("{:.1}", of(p)))
}

fn percent(part: usize, whole: usize) -> String {
    format!("{:.1}", 100.0 * part as f64 / whole.max(1) as f64)
}
