//! The results: measurements as rows, and a GPU's checks. JSON for programs, tables for people.

use super::limits::{Ceilings, Work};
use serde::Serialize;
use std::fmt::Write;
use tidemill_kernels::cuda::checks::{Check, Checks};

/// The results of one run.
pub struct Report {
    /// The device's name.
    pub device: String,
    pub rows: Vec<Row>,
    /// Rows that this machine cannot have, with the reasons.
    pub left_out: Vec<String>,
    /// The checks of a GPU's operations. The CPU's operations have tests beside their code.
    pub checks: Option<Checks>,
}

impl Report {
    pub fn text(&self) -> String {
        let mut text = format!("{}\n\n{}", self.device, table(&self.rows));
        for row in &self.left_out {
            text += &format!("\nleft out: {row}\n");
        }
        if let Some(checks) = &self.checks {
            text += &format!("\n{}", checks.table());
        }
        text
    }

    /// All measurements and checks as rows.
    pub fn rows(&self) -> Vec<Row> {
        self.rows.iter().cloned().chain(self.checks.iter().flat_map(|checks| checks.results.iter().map(Row::of_check))).collect()
    }

    /// Returns an error if any check failed.
    pub fn verdict(&self) -> anyhow::Result<()> {
        Ok(self.checks.as_ref().map_or(Ok(()), Checks::verdict)?)
    }
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The name of a ceiling, a kernel or a phase.
    pub name: String,
    /// The operands' sizes.
    pub shape: String,
    pub measured: f64,
    /// The limit by the ceilings, in the same unit. Ceilings have none, nor do phases of a checkpoint whose work is not counted.
    pub limit: Option<f64>,
    pub unit: &'static str,
    /// `measured / limit`.
    pub fraction: Option<f64>,
}

impl Row {
    pub fn without_limit(name: &str, shape: String, measured: f64, unit: &'static str) -> Self {
        Self { name: name.into(), shape, measured, limit: None, unit, fraction: None }
    }

    pub fn new(name: &str, shape: String, measured: f64, limit: f64, unit: &'static str) -> Self {
        Self { name: name.into(), shape, measured, limit: Some(limit), unit, fraction: Some(measured / limit) }
    }

    /// A check's error beside its limit. If the limit is 0, there is no fraction; if the case could not be run, no error.
    pub fn of_check(check: &Check) -> Self {
        let Check { op, case, error, limit, failure } = check;
        let case = failure.as_ref().map_or_else(|| case.clone(), |failure| format!("{case}: {failure}"));
        Self::new(&format!("check {op}"), case, *error, *limit, "relative error")
    }

    /// The row of `work` done in `seconds`, in the unit of the resource that bounds it.
    pub fn of_work(name: &str, shape: String, seconds: f64, work: &Work, ceilings: &Ceilings) -> Self {
        let (amount, unit) = match () {
            () if ceilings.is_memory_bound(work) => (work.bytes, "GB/s"),
            () if work.int8_ops > 0.0 => (work.int8_ops + work.bf16_flops + work.f32_flops, "GOP/s"),
            () => (work.bf16_flops + work.f32_flops, "GFLOP/s"),
        };
        Self::new(name, shape, amount / 1e9 / seconds, amount / 1e9 / ceilings.seconds(work), unit)
    }
}

/// The rows as a Markdown table that is also aligned in a terminal, with a bar per fraction.
pub fn table(rows: &[Row]) -> String {
    let head = ["name", "shape", "measured", "limit", "unit", "fraction", ""].map(String::from);
    let rows = rows.iter().map(|Row { name, shape, measured, limit, unit, fraction }| {
        let limit = limit.map_or(String::new(), number);
        let of_limit = fraction.map_or(String::new(), |fraction| format!("{fraction:.2}"));
        [name.clone(), shape.clone(), number(*measured), limit, unit.to_string(), of_limit, fraction.map_or(String::new(), bar)]
    });
    let cells: Vec<_> = [head].into_iter().chain(rows).collect();
    let widths: [usize; 7] = std::array::from_fn(|column| cells.iter().map(|row| row[column].chars().count()).max().unwrap_or(0));
    let mut table = String::new();
    for (i, row) in cells.iter().enumerate() {
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let cell = if IS_NUMBER[column] { format!("| {cell:>width$} ") } else { format!("| {cell:<width$} ") };
            table += &cell;
        }
        table += "|\n";
        if i == 0 {
            for (width, is_number) in widths.iter().zip(IS_NUMBER) {
                write!(table, "|{:-<width$}{}", "", if is_number { "-:" } else { "--" }).expect("a string takes all");
            }
            table += "|\n";
        }
    }
    table
}

/// Whether each column of [`table`] is right-aligned.
const IS_NUMBER: [bool; 7] = [false, false, true, true, false, true, false];

/// A bar of ten characters filled to `fraction`, in eighths; an arrow beyond the limit.
fn bar(fraction: f64) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (fraction * 80.0).round().clamp(0.0, 80.0) as usize;
    let bar = "█".repeat(eighths / 8) + EIGHTHS[eighths % 8];
    if fraction >= 1.05 { bar + "▶" } else { bar }
}

/// The number with three significant digits, or all digits before the point.
fn number(x: f64) -> String {
    match x {
        x if x >= 100.0 => format!("{x:.0}"),
        x if x >= 10.0 => format!("{x:.1}"),
        x => format!("{x:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_how_close_it_is_and_a_ceiling_only_what_it_is() {
        let rows = [Row::without_limit("read", "2 threads".into(), 31.96, "GB/s"), Row::new("norm", "64 × 576".into(), 8.0, 32.0, "GB/s")];
        let table = table(&rows);
        let expected = "\
| name | shape     | measured | limit | unit | fraction |     |
|------|-----------|---------:|------:|------|---------:|-----|
| read | 2 threads |     32.0 |       | GB/s |          |     |
| norm | 64 × 576  |     8.00 |  32.0 | GB/s |     0.25 | ██▌ |
";
        assert_eq!(table, expected);
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!((&json[1]["fraction"], &json[0]["limit"]), (&0.25.into(), &serde_json::Value::Null));
    }
}
