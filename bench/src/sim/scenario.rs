//! Scenario files: one simulation's settings, and the ones to vary.
//!
//! Besides the simulator's own sections, a file may have
//! - `[[variant]]`: a `name`, and keys to `set`: one curve of a figure
//! - `[axis]`: a `key` and its `values`: the figure's x-axis
//! - `[search]`: for each of these, the highest `key` at which enough requests are good
//! - `[[reference]]`: figures to print beside ours, and their sources

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use tidemill_sim::settings::Settings;
use toml::{Table, Value};

#[derive(Clone, Debug)]
pub struct Scenario {
    pub head: Head,
    /// The settings of the simulation itself.
    base: Table,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Head {
    pub title: String,
    /// The description, for the report.
    pub about: String,
    /// The number of runs of each cell, with different seeds.
    pub seeds: Option<u64>,
    pub variant: Vec<Variant>,
    pub axis: Option<Axis>,
    pub search: Option<Search>,
    pub reference: Vec<Reference>,
    /// Whether to time the coordinator's decisions.
    pub time_decisions: bool,
    /// Whether to plot the load over time.
    pub plot_load: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    pub name: String,
    #[serde(default)]
    pub set: Table,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    pub key: String,
    pub values: Vec<Value>,
    /// The axis's label on the plot.
    #[serde(default)]
    pub label: Option<String>,
    /// Other keys that follow: each is set to the value times its factor.
    #[serde(default)]
    pub follow: Vec<Follow>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Follow {
    pub key: String,
    pub times: f64,
}

/// The highest value at which at least `ratio` of the requests meet both limits of their class.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Search {
    pub key: String,
    pub low: f64,
    pub high: f64,
    #[serde(default = "nine_tenths")]
    pub ratio: f64,
    /// The number of bisections, each of which halves the logarithm of the remaining range.
    #[serde(default = "six")]
    pub steps: u32,
    /// Whether `low` and `high` are for one instance.
    #[serde(default)]
    pub per_instance: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    pub variant: String,
    /// The name of a figure, such as `ttft_mean_s`.
    pub what: String,
    pub value: f64,
    pub source: String,
}

/// One cell: a variant at a place of the axis.
#[derive(Clone, Debug)]
pub struct Cell {
    pub variant: String,
    /// The value of the axis as text.
    pub at: Option<String>,
    /// The value as a number, if it is one.
    pub x: Option<f64>,
    table: Table,
}

fn nine_tenths() -> f64 {
    0.9
}

fn six() -> u32 {
    6
}

impl Scenario {
    /// Parses a file. `sets`: `key=value`, which override the file.
    pub fn parse(text: &str, sets: &[String]) -> anyhow::Result<Self> {
        let mut base: Table = toml::from_str(text)?;
        for set in sets {
            let (key, value) = set.split_once('=').with_context(|| format!("`--set {set}`: write key=value"))?;
            put(&mut base, key.trim(), literal(value.trim()))?;
        }
        let mut head = Table::new();
        for key in ["title", "about", "seeds", "variant", "axis", "search", "reference", "time_decisions", "plot_load"] {
            head.extend(base.remove_entry(key));
        }
        let head: Head = head.try_into()?;
        let scenario = Self { head, base };
        // Errors in varied settings should be found before hours of simulation.
        for cell in scenario.cells()? {
            cell.settings(None)?;
        }
        Ok(scenario)
    }

    pub fn cells(&self) -> anyhow::Result<Vec<Cell>> {
        let alone = [Variant { name: String::new(), set: Table::new() }];
        let variants = if self.head.variant.is_empty() { &alone[..] } else { &self.head.variant };
        let mut cells = Vec::new();
        let places: Vec<Option<&Value>> = self.head.axis.as_ref().map_or(vec![None], |axis| axis.values.iter().map(Some).collect());
        ensure!(!places.is_empty(), "`axis.values` is empty");
        for place in places {
            for variant in variants {
                let mut table = self.base.clone();
                if let (Some(axis), Some(value)) = (&self.head.axis, place) {
                    put(&mut table, &axis.key, value.clone())?;
                    for follow in &axis.follow {
                        let value = number(value).with_context(|| format!("`axis.values`: `{}` follows numbers only", follow.key))?;
                        put(&mut table, &follow.key, like(value * follow.times))?;
                    }
                }
                for (key, value) in &variant.set {
                    put(&mut table, key, value.clone())?;
                }
                let at = place.map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned));
                cells.push(Cell { variant: variant.name.clone(), at, x: place.and_then(number), table });
            }
        }
        Ok(cells)
    }
}

impl Cell {
    /// The cell's settings, with one more number set.
    pub fn settings(&self, set: Option<(&str, f64)>) -> anyhow::Result<Settings> {
        let mut table = self.table.clone();
        if let Some((key, value)) = set {
            put(&mut table, key, like(value))?;
        }
        Ok(table.try_into()?)
    }

    pub fn name(&self) -> String {
        match (&self.at, self.variant.is_empty()) {
            (Some(at), true) => at.clone(),
            (Some(at), false) => format!("{} at {at}", self.variant),
            (None, _) => self.variant.clone(),
        }
    }
}

/// Sets `a.b.c`. A key may name a table in a list by its number.
fn put(table: &mut Table, key: &str, value: Value) -> anyhow::Result<()> {
    let Some((first, rest)) = key.split_once('.') else {
        table.insert(key.to_owned(), value);
        return Ok(());
    };
    match table.entry(first).or_insert_with(|| Value::Table(Table::new())) {
        Value::Table(inner) => put(inner, rest, value),
        Value::Array(list) => {
            let (number, rest) = rest.split_once('.').with_context(|| format!("`{first}` is a list: write {first}.0.key"))?;
            let at = number.parse().ok().and_then(|number: usize| list.get_mut(number));
            let Some(Value::Table(inner)) = at else { bail!("`{first}` has no table {number}") };
            put(inner, rest, value)
        }
        _ => bail!("`{first}` is no table"),
    }
}

/// A value in TOML's notation; anything else is text.
fn literal(text: &str) -> Value {
    let parsed: Result<Table, _> = toml::from_str(&format!("value = {text}"));
    parsed.ok().and_then(|mut table| table.remove("value")).unwrap_or_else(|| Value::String(text.to_owned()))
}

fn number(value: &Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|n| n as f64))
}

/// A whole number stays an integer, as counts are integers.
fn like(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { Value::Integer(value as i64) } else { Value::Float(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        title = "x"
        model = "llama-3.1-8b"
        [cluster]
        instances = 4
        [workload]
        streams = [{ rate = 1.0, input = [1, 2], output = [1, 2] }]
        [[variant]]
        name = "a"
        [[variant]]
        name = "b"
        set = { "policy.name" = "random", "workload.streams.0.rate" = 3 }
        [axis]
        key = "cluster.instances"
        values = [2, 8]
        follow = [{ key = "workload.rate", times = 0.5 }]
    "#;

    #[test]
    fn cells_are_variants_at_places_of_the_axis() {
        let scenario = Scenario::parse(TEXT, &["policy.queue_max=7".into()]).unwrap();
        let cells: Vec<_> = scenario.cells().unwrap().into_iter().map(|cell| (cell.name(), cell.settings(None).unwrap())).collect();
        let seen: Vec<_> = cells
            .iter()
            .map(|(name, s)| (name.as_str(), s.cluster.instances, s.policy.name.as_str(), s.workload.rate, s.workload.streams[0].rate))
            .collect();
        assert_eq!(
            seen,
            [
                ("a at 2", 2, "goodput", 1.0, 1.0),
                ("b at 2", 2, "random", 1.0, 3.0),
                ("a at 8", 8, "goodput", 4.0, 1.0),
                ("b at 8", 8, "random", 4.0, 3.0)
            ]
        );
        assert!(cells.iter().all(|(_, settings)| settings.policy.queue_max == 7));
    }

    #[test]
    fn wrong_keys_are_named_before_anything_runs() {
        for (set, key) in [("cluster.instance=3", "instance"), ("cluster.instances.x=1", "no table"), ("policy", "key=value")] {
            let error = format!("{:#}", Scenario::parse(TEXT, &[set.into()]).unwrap_err());
            assert!(error.contains(key), "{error}");
        }
    }
}
