//! Measurements as rows: JSON for programs, a table for people.

use serde::Serialize;
use std::fmt::Write;

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What ran: a ceiling, a kernel, a phase.
    pub name: String,
    /// On what.
    pub shape: String,
    pub measured: f64,
    /// What the ceilings allow, in the same unit. A ceiling has none.
    pub limit: Option<f64>,
    pub unit: &'static str,
    /// `measured / limit`.
    pub fraction: Option<f64>,
}

impl Row {
    pub fn ceiling(name: &str, shape: String, measured: f64, unit: &'static str) -> Self {
        Self { name: name.into(), shape, measured, limit: None, unit, fraction: None }
    }

    pub fn new(name: &str, shape: String, measured: f64, limit: f64, unit: &'static str) -> Self {
        Self { name: name.into(), shape, measured, limit: Some(limit), unit, fraction: Some(measured / limit) }
    }
}

/// The rows as a Markdown table.
pub fn table(rows: &[Row]) -> String {
    let mut table = String::from("| name | shape | measured | limit | unit | fraction |\n|---|---|---:|---:|---|---:|\n");
    for Row { name, shape, measured, limit, unit, fraction } in rows {
        let limit = limit.map_or(String::new(), number);
        let fraction = fraction.map_or(String::new(), |fraction| format!("{fraction:.2}"));
        writeln!(table, "| {name} | {shape} | {} | {limit} | {unit} | {fraction} |", number(*measured)).expect("a string takes all");
    }
    table
}

/// Three digits that count, or all before the point.
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
        let rows = [Row::ceiling("read", "2 threads".into(), 31.96, "GB/s"), Row::new("norm", "64 × 576".into(), 8.0, 32.0, "GB/s")];
        let table = table(&rows);
        assert!(table.contains("| read | 2 threads | 32.0 |  | GB/s |  |\n"), "{table}");
        assert!(table.contains("| norm | 64 × 576 | 8.00 | 32.0 | GB/s | 0.25 |\n"), "{table}");
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!((&json[1]["fraction"], &json[0]["limit"]), (&0.25.into(), &serde_json::Value::Null));
    }
}
