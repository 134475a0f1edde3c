//! Reports: sums of events by chosen dimensions.

use super::Event;
use serde::Serialize;
use std::{collections::BTreeMap, fmt::Write, str::FromStr};
use time::OffsetDateTime;

/// A dimension by which events are summed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dimension {
    Tenant,
    User,
    Key,
    Model,
    Class,
    Outcome,
    /// The day in UTC.
    Day,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Total {
    pub requests: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    pub reasoning_tokens: u64,
    pub cost_micros: u64,
}

/// Rows by the values of their dimensions.
#[derive(Clone, Debug)]
pub struct Report {
    dimensions: Vec<Dimension>,
    rows: BTreeMap<Vec<String>, Total>,
}

/// The columns after those of the dimensions.
const COLUMNS: [&str; 6] = ["requests", "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "cost"];

impl FromStr for Dimension {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [Self::Tenant, Self::User, Self::Key, Self::Model, Self::Class, Self::Outcome, Self::Day];
        let found = all.into_iter().find(|dimension| dimension.name() == text);
        found.ok_or_else(|| format!("must be one of {}", all.map(Dimension::name).join(", ")))
    }
}

impl Dimension {
    pub fn name(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::User => "user",
            Self::Key => "key",
            Self::Model => "model",
            Self::Class => "class",
            Self::Outcome => "outcome",
            Self::Day => "day",
        }
    }

    fn of(self, event: &Event) -> String {
        match self {
            Self::Tenant => event.tenant.clone(),
            Self::User => event.user.clone().unwrap_or_default(),
            Self::Key => event.key.clone().unwrap_or_default(),
            Self::Model => event.model.clone(),
            Self::Class => event.class.clone(),
            Self::Outcome => event.outcome.clone(),
            Self::Day => day(event.at_ms),
        }
    }
}

impl Report {
    pub fn new(dimensions: Vec<Dimension>) -> Self {
        Self { dimensions, rows: BTreeMap::new() }
    }

    pub fn add(&mut self, event: &Event) {
        let key = self.dimensions.iter().map(|dimension| dimension.of(event)).collect();
        let total = self.rows.entry(key).or_default();
        total.requests += 1;
        total.prompt_tokens += event.prompt_tokens;
        total.cached_tokens += event.cached_tokens;
        total.output_tokens += event.output_tokens;
        total.reasoning_tokens += event.reasoning_tokens;
        total.cost_micros += event.cost_micros;
    }

    /// A table for people: with columns of the necessary width, and a last line with the sum.
    pub fn table(&self) -> String {
        let mut lines: Vec<Vec<String>> = vec![self.header()];
        lines.extend(self.rows.iter().map(|(key, total)| self.line(key, total)));
        if self.rows.len() > 1 {
            let mut sum = Total::default();
            self.rows.values().for_each(|total| sum.add(total));
            let mut key = vec![String::new(); self.dimensions.len()];
            key.iter_mut().take(1).for_each(|first| *first = "total".into());
            lines.push(self.line(&key, &sum));
        }
        let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<_> = (0..lines[0].len()).map(width).collect();
        let mut text = String::new();
        for line in &lines {
            for (column, cell) in line.iter().enumerate() {
                let width = widths[column];
                // Names to the left, numbers to the right.
                let written = match column < self.dimensions.len() {
                    true => write!(text, "{cell:<width$}  "),
                    false => write!(text, "{cell:>width$}  "),
                };
                written.expect("a text takes what is written");
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        text
    }

    /// The rows in the format of RFC 4180.
    pub fn csv(&self) -> String {
        let quote = |cell: &String| match cell.contains([',', '"', '\n', '\r']) {
            true => format!("\"{}\"", cell.replace('"', "\"\"")),
            false => cell.clone(),
        };
        let rows = self.rows.iter().map(|(key, total)| self.line(key, total));
        let lines = std::iter::once(self.header()).chain(rows);
        lines.map(|line| line.iter().map(quote).collect::<Vec<_>>().join(",") + "\r\n").collect()
    }

    /// The rows as a list of objects.
    pub fn json(&self) -> serde_json::Value {
        let row = |(key, total): (&Vec<String>, &Total)| {
            let names = self.dimensions.iter().map(|dimension| dimension.name().to_owned());
            let mut row: serde_json::Map<_, _> = names.zip(key.iter().map(|value| value.as_str().into())).collect();
            if let Ok(serde_json::Value::Object(total)) = serde_json::to_value(total) {
                row.extend(total);
            }
            serde_json::Value::Object(row)
        };
        self.rows.iter().map(row).collect()
    }

    fn header(&self) -> Vec<String> {
        self.dimensions.iter().map(|dimension| dimension.name()).chain(COLUMNS).map(str::to_owned).collect()
    }

    fn line(&self, key: &[String], total: &Total) -> Vec<String> {
        let numbers =
            [total.requests, total.prompt_tokens, total.cached_tokens, total.output_tokens, total.reasoning_tokens].map(|n| n.to_string());
        let cost = format!("{}.{:06}", total.cost_micros / 1_000_000, total.cost_micros % 1_000_000);
        key.iter().cloned().chain(numbers).chain([cost]).collect()
    }
}

impl Total {
    fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.output_tokens += other.output_tokens;
        self.reasoning_tokens += other.reasoning_tokens;
        self.cost_micros += other.cost_micros;
    }
}

/// The date in UTC of Unix milliseconds; empty beyond the year 9999.
pub fn day(at_ms: u64) -> String {
    let at = i64::try_from(at_ms / 1000).ok().and_then(|seconds| OffsetDateTime::from_unix_timestamp(seconds).ok());
    at.map_or(String::new(), |at| at.date().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let event = |tenant: &str, at_ms, cost_micros| Event {
            tenant: tenant.into(),
            model: "m,1".into(),
            at_ms,
            prompt_tokens: 100,
            cached_tokens: 32,
            output_tokens: 7,
            cost_micros,
            ..Event::default()
        };
        let mut report = Report::new(vec![Dimension::Tenant, Dimension::Model]);
        for event in [event("b", 0, 1_500_000), event("a", 1, 2), event("b", 2, 3)] {
            report.add(&event);
        }
        report
    }

    #[test]
    fn a_report_is_a_table_a_csv_and_json() {
        let report = report();
        let table = "tenant  model  requests  prompt_tokens  cached_tokens  output_tokens  reasoning_tokens      cost\n\
                     a       m,1           1            100             32              7                 0  0.000002\n\
                     b       m,1           2            200             64             14                 0  1.500003\n\
                     total                 3            300             96             21                 0  1.500005\n";
        assert_eq!(report.table(), table);
        assert_eq!(report.csv().lines().nth(1), Some("a,\"m,1\",1,100,32,7,0,0.000002"));
        assert_eq!(report.json()[1]["tenant"], "b");
        assert_eq!(report.json()[1]["cost_micros"], 1_500_003);
    }

    #[test]
    fn days_are_those_of_the_calendar() {
        for (seconds, date) in
            [(0, "1970-01-01"), (951_782_400, "2000-02-29"), (1_735_689_599, "2024-12-31"), (1_735_689_600, "2025-01-01")]
        {
            assert_eq!(day(seconds * 1000), date);
        }
    }
}
