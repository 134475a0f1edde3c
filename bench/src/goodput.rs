//! `tidemill-bench goodput`: the highest request rate at which enough requests keep their limits, of one server or of several side by
//! side.
//!
//! Each repetition is a bisection of its own with prompts and arrivals of its own, so the spread of their results is the interval. Servers
//! take turns at every step and get the same prompts, and the same arrivals but for their rate: a temporary disturbance of the machine
//! affects all of them.

pub mod search;
pub mod server;

use crate::{
    load::{
        self, Amount, Traffic,
        arrivals::{self, Rate},
        drive::Sample,
        overhead::Overhead,
        summary::Summary,
    },
    record,
};
use anyhow::{Context, ensure};
use clap::Parser;
use search::{Bisection, Estimate, Found, wilson};
use serde::{Deserialize, Serialize};
use server::{Server, ServerSettings};
use std::{fs, path::PathBuf, time::Duration};

/// Find the highest request rate at which enough requests keep both limits, with a confidence interval.
///
/// Measures one server (--url), or several from scenario files, which take turns. --slo-ttft-ms and --slo-tpot-ms are the limits; with
/// --slo-tbt-ms there is a second figure, Mooncake's effective request capacity.
#[derive(Clone, Debug, clap::Args)]
pub struct GoodputArgs {
    /// Files with a `title`, `[[server]]`s, and `[flags]`: the flags below.
    pub scenarios: Vec<PathBuf>,
    /// Replaces `$NAME` in scenario files. A server that needs a name that is not set is left out, if its `needs` says so.
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub sets: Vec<String>,
    /// A running server's URL, up to and including /v1.
    #[arg(long, conflicts_with = "scenarios", required_unless_present = "scenarios")]
    pub url: Option<String>,
    #[command(flatten)]
    pub settings: Settings,
    /// Write all figures to this file, too.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// The keys of scenario files under `[flags]`.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct Settings {
    #[command(flatten)]
    #[serde(flatten)]
    pub traffic: Traffic,
    /// Share of the requests that must keep their limits.
    #[arg(long, default_value_t = 0.9, value_parser = arrivals::share)]
    pub ratio: f64,
    /// Lowest rate of the search (of a mixed workload: of all kinds together)
    #[arg(long, default_value_t = 0.25, value_parser = arrivals::positive)]
    pub low: f64,
    /// Highest rate of the search.
    #[arg(long, default_value_t = 16.0, value_parser = arrivals::positive)]
    pub high: f64,
    /// Rates tried in each repetition. Each halves the remaining range of the rate's logarithm.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=20))]
    pub steps: u32,
    /// Searches with different prompts and arrivals.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=50))]
    pub repeats: u32,
    /// Seconds for which requests arrive at each rate.
    #[arg(long, default_value_t = 30.0, value_parser = arrivals::positive)]
    pub seconds: f64,
    /// Fewest requests at each rate; at low rates, they arrive for longer than --seconds.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests_min: u32,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Threads of this program.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub threads: u32,
}

/// The contents of a scenario file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Scenario {
    title: String,
    #[serde(default)]
    about: String,
    server: Vec<ServerSettings>,
    #[serde(default)]
    flags: toml::Table,
}

/// The results of one scenario.
#[derive(Debug, Serialize)]
pub struct Comparison {
    pub title: String,
    pub about: String,
    pub settings: Settings,
    pub servers: Vec<ServerResult>,
}

#[derive(Debug, Serialize)]
pub struct ServerResult {
    pub name: String,
    pub server: ServerSettings,
    pub model: String,
    /// The goodput in requests per second.
    pub goodput: Option<Estimate>,
    pub found: Vec<Found>,
    /// With a limit of TBT, the highest rate tried at which enough requests kept TTFT and TBT, and no lower one failed.
    pub capacity: Option<f64>,
    pub points: Vec<Point>,
}

/// The result of one rate, tried once.
#[derive(Debug, Serialize)]
pub struct Point {
    pub repeat: u32,
    pub rate: f64,
    /// The share of requests that kept TTFT and TPOT, with its 95 % interval.
    pub ratio: f64,
    pub ratio_low: f64,
    pub ratio_high: f64,
    /// The share of requests that kept TTFT and TBT.
    pub ratio_tbt: Option<f64>,
    pub summary: Summary,
    pub client: Overhead,
}

pub async fn run(args: GoodputArgs) -> anyhow::Result<()> {
    let mut scenarios = Vec::new();
    for path in &args.scenarios {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        scenarios.push(read(&text, &args.sets).with_context(|| path.display().to_string())?);
    }
    if let Some(url) = &args.url {
        let server = ServerSettings { name: "server".into(), url: Some(url.clone()), ..ServerSettings::default() };
        scenarios.push((String::new(), String::new(), vec![server], args.settings.clone()));
    }
    let mut comparisons = Vec::new();
    for (title, about, servers, settings) in scenarios {
        let comparison = compare(title, about, &servers, settings).await?;
        println!("{comparison}");
        comparisons.push(comparison);
        // The results so far are written even if a later scenario fails.
        record::write(args.json.as_ref(), "goodput", &serde_json::json!({"comparisons": comparisons}))?;
    }
    Ok(())
}

/// The title, description, servers and flags of a scenario file.
fn read(text: &str, sets: &[String]) -> anyhow::Result<(String, String, Vec<ServerSettings>, Settings)> {
    #[derive(Parser)]
    #[command(no_binary_name = true)]
    struct Flags {
        #[command(flatten)]
        settings: Settings,
    }
    let mut scenario: Scenario = toml::from_str(text)?;
    let mut variables = Vec::new();
    for set in sets {
        variables.push(set.split_once('=').with_context(|| format!("`--set {set}`: write NAME=VALUE"))?);
    }
    scenario.server.retain(|server| server.needs.as_ref().is_none_or(|needed| variables.iter().any(|(name, _)| name == needed)));
    for server in &mut scenario.server {
        server.command.iter_mut().try_for_each(|word| fill(word, &variables))?;
        server.url.iter_mut().try_for_each(|word| fill(word, &variables))?;
    }
    let mut words = Vec::new();
    for (key, value) in scenario.flags {
        let mut flag = |value: &toml::Value| {
            let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            words.push(if *value == toml::Value::Boolean(true) { format!("--{key}") } else { format!("--{key}={text}") });
        };
        match &value {
            toml::Value::Array(values) => values.iter().for_each(flag),
            value => flag(value),
        }
    }
    words.iter_mut().try_for_each(|word| fill(word, &variables))?;
    let flags = Flags::try_parse_from(words).map_err(|error| anyhow::anyhow!("[flags]: {}", error.render()))?;
    Ok((scenario.title, scenario.about, scenario.server, flags.settings))
}

/// Replaces `$NAME` by the variable's value.
fn fill(word: &mut String, variables: &[(&str, &str)]) -> anyhow::Result<()> {
    for (name, value) in variables {
        *word = word.replace(&format!("${name}"), value);
    }
    ensure!(!word.contains('$'), "`{word}`: say what it is, with --set NAME=VALUE");
    Ok(())
}

async fn compare(title: String, about: String, servers: &[ServerSettings], mut settings: Settings) -> anyhow::Result<Comparison> {
    settings.traffic.check()?;
    let slo = settings.traffic.slo();
    ensure!(slo.ttft.is_some() && slo.tpot.is_some(), "goodput needs both limits: --slo-ttft-ms and --slo-tpot-ms");
    ensure!(settings.low < settings.high, "--low must be below --high");
    ensure!(!servers.is_empty(), "there is no [[server]]");
    let mut running = Vec::new();
    for server in servers {
        eprintln!("{}: starting", server.name);
        running.push(server.start(&settings.traffic, settings.seed).await?);
    }
    let compared = take_turns(&running, &settings).await;
    for server in running {
        server.stop().await;
    }
    Ok(Comparison { title, about, settings, servers: compared? })
}

async fn take_turns(servers: &[Server], settings: &Settings) -> anyhow::Result<Vec<ServerResult>> {
    for server in servers {
        // This fills caches, opens connections and lets the server learn about itself.
        try_rate(server, settings, settings.low, u64::MAX).await?;
    }
    let mut results: Vec<ServerResult> = servers.iter().map(ServerResult::new).collect();
    for repeat in 0..settings.repeats {
        let mut searches = vec![Bisection::new(settings.low, settings.high); servers.len()];
        for step in 0..settings.steps {
            // No two steps share a prompt, which a server may cache.
            let number = u64::from(repeat * settings.steps + step);
            for ((server, search), result) in servers.iter().zip(&mut searches).zip(&mut results) {
                let point = try_rate(server, settings, search.next(), number).await?;
                eprintln!("{}, search {}: {:.3}/s: {:.1} % good", server.name, repeat + 1, point.rate, 100.0 * point.ratio);
                search.tried(point.ratio >= settings.ratio);
                result.points.push(Point { repeat, ..point });
            }
        }
        searches.iter().zip(&mut results).for_each(|(search, result)| result.found.push(search.found()));
    }
    results.iter_mut().for_each(|result| result.conclude(settings));
    Ok(results)
}

/// Sends the requests of `number` at this rate.
async fn try_rate(server: &Server, settings: &Settings, rate: f64, number: u64) -> anyhow::Result<Point> {
    let seconds = settings.seconds.max(f64::from(settings.requests_min) / rate);
    let seed = settings.seed.wrapping_mul(1_000_003).wrapping_add(number.wrapping_mul(64)) >> 1;
    let kinds = &settings.traffic.kind;
    let amount = if kinds.is_empty() {
        Amount::Rate { rate: Rate::PerSecond(rate), requests: (rate * seconds).round().max(1.0) as u32 }
    } else {
        Amount::Kinds { times: rate / kinds.iter().map(|kind| kind.rate).sum::<f64>(), seconds }
    };
    let slo = settings.traffic.slo();
    let streams = settings.traffic.streams(&server.target, amount, seed)?;
    let measured = load::measure(streams, slo, settings.threads).await?;
    let took = measured.samples.iter().map(|(_, took)| *took).max().unwrap_or_default();
    let samples: Vec<Sample> = measured.samples.into_iter().flat_map(|(samples, _)| samples).collect();
    let warmup = Duration::from_secs_f64(settings.traffic.warmup_s);
    let mut summary = Summary::new(&samples, took, warmup, slo);
    summary.timeline.clear();
    let ratio = summary.goodput.as_ref().map_or(0.0, |goodput| goodput.ratio);
    let (ratio_low, ratio_high) = wilson((ratio * summary.requests as f64).round() as u64, summary.requests);
    let ratio_tbt = summary.capacity.as_ref().map(|capacity| capacity.ratio);
    Ok(Point { repeat: 0, rate, ratio, ratio_low, ratio_high, ratio_tbt, summary, client: measured.overhead })
}

impl ServerResult {
    fn new(server: &Server) -> Self {
        Self {
            name: server.name.clone(),
            server: server.settings.clone(),
            model: server.target.model().to_owned(),
            goodput: None,
            found: Vec::new(),
            capacity: None,
            points: Vec::new(),
        }
    }

    fn conclude(&mut self, settings: &Settings) {
        self.goodput = Estimate::of(&self.found);
        if settings.traffic.slo_tbt_ms.is_some() {
            let failed = |point: &&Point| point.ratio_tbt.is_some_and(|ratio| ratio < settings.ratio);
            let lowest_failed = self.points.iter().filter(failed).map(|point| point.rate).fold(f64::INFINITY, f64::min);
            let passed = self.points.iter().map(|point| point.rate).filter(|rate| *rate < lowest_failed);
            self.capacity = passed.reduce(f64::max);
        }
        // Distributions are plotted for one rate, and would fill the file for all.
        let best = self.best(settings.ratio).map(|point| point.rate);
        self.points.iter_mut().filter(|point| Some(point.rate) != best).for_each(|point| point.summary.distributions.clear());
    }

    /// The highest rate that was good enough.
    fn best(&self, ratio: f64) -> Option<&Point> {
        self.points.iter().filter(|point| point.ratio >= ratio).max_by(|a, b| a.rate.total_cmp(&b.rate))
    }
}

impl std::fmt::Display for Comparison {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Settings { traffic, ratio, repeats, .. } = &self.settings;
        if !self.title.is_empty() {
            writeln!(f, "{}\n", self.title)?;
        }
        let limit = |ms: Option<u64>| ms.map_or("–".into(), |ms| ms.to_string());
        writeln!(
            f,
            "highest rate at which {:.0} % of requests keep TTFT {} ms and TPOT {} ms; mean and 95 % interval of {repeats} searches",
            100.0 * ratio,
            limit(traffic.slo_ttft_ms),
            limit(traffic.slo_tpot_ms)
        )?;
        let width = self.servers.iter().map(|server| server.name.len()).max().unwrap_or(0).max(6);
        writeln!(
            f,
            "{:<width$} {:>10} {:>19} {:>10}   at the highest good rate: TTFT p50/p90/p99, TPOT p50/p90/p99, cached",
            "", "requests/s", "interval", "capacity"
        )?;
        for server in &self.servers {
            let Some(Estimate { mean, low, high }) = server.goodput else { continue };
            let interval = format!("{low:.3} to {high:.3}");
            let capacity = server.capacity.map_or("–".into(), |capacity| format!("{capacity:.3}"));
            write!(f, "{:<width$} {mean:>10.3} {interval:>19} {capacity:>10}   ", server.name)?;
            match server.best(*ratio) {
                None => writeln!(f, "no rate was good enough")?,
                Some(Point { rate, summary, .. }) => {
                    let row = |percentiles: &Option<load::percentiles::Percentiles>| {
                        percentiles.as_ref().map_or("–".into(), |p| format!("{:.0}/{:.0}/{:.0}", p.p50, p.p90, p.p99))
                    };
                    let cached = 100.0 * summary.cached_tokens as f64 / summary.prompt_tokens.max(1) as f64;
                    writeln!(f, "{rate:.3}/s: {} ms, {} ms, {cached:.0} %", row(&summary.ttft_ms), row(&summary.tpot_ms))?;
                }
            }
            let ends = |end: fn(&Found) -> Option<f64>| server.found.iter().any(|found| end(found).is_none());
            if ends(|found| found.passed) {
                writeln!(f, "{:<width$} a search found no rate that was good enough: lower --low", "")?;
            }
            if ends(|found| found.failed) {
                writeln!(f, "{:<width$} a search found no rate that was too high: raise --high", "")?;
            }
            if let Some(bottleneck) = server.points.iter().find_map(|point| point.client.bottleneck.as_ref()) {
                writeln!(f, "{:<width$} warning: the client was a bottleneck at times: {bottleneck}", "")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
        title = "two"
        [[server]]
        name = "a"
        url = "http://127.0.0.1:1/v1"
        [[server]]
        name = "b"
        command = ["$PROGRAM", "{addr}"]
        cores = [0]
        [[server]]
        name = "c"
        needs = "OTHER"
        command = ["$OTHER"]
        [flags]
        slo-ttft-ms = 1000
        slo-tpot-ms = 50
        chat = true
        ratio = 0.95
        kind = ["chats:1:64:16", "documents:0.1:1000-2000:16"]
    "#;

    #[test]
    fn a_scenarios_flags_are_the_command_lines() {
        let (title, _, servers, settings) = read(TEXT, &["PROGRAM=x".into()]).unwrap();
        assert_eq!(servers[1].command, ["x", "{addr}"]);
        assert!(read(TEXT, &[]).unwrap_err().to_string().contains("--set"), "$PROGRAM is not said");
        assert_eq!((title.as_str(), servers.len(), servers[1].cores.as_slice()), ("two", 2, &[0][..]));
        assert!(settings.traffic.request.chat && settings.ratio == 0.95);
        assert_eq!((settings.traffic.kind.len(), settings.traffic.slo_ttft_ms), (2, Some(1000)));
        for (wrong, complaint) in [("[flags]\nslo-ttft = 3", "slo-ttft"), ("[flags]\nratio = 3", "share"), ("servers = 3", "servers")] {
            let text = format!("title = \"x\"\nserver = []\n{wrong}");
            let error = format!("{:#}", read(&text, &[]).unwrap_err());
            assert!(error.contains(complaint), "{error}");
        }
    }
}
