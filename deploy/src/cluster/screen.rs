//! The contents of `/cluster` as tables. Pure: a value in, text out.

use super::table::{Table, bounded};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::{self, Display},
};

/// The part of `/cluster` that is shown. Tables for which the coordinator has no data are left out.
#[derive(Debug, Deserialize)]
pub(super) struct Screen {
    members: Vec<Member>,
    #[serde(default)]
    models: Vec<Model>,
    requests: u64,
    sequences_waiting: u64,
    sequences_running: u64,
    rescues: u64,
    /// The last placements, newest first.
    #[serde(default)]
    decisions: Vec<Decision>,
    registry: Option<Registry>,
}

#[derive(Debug, Deserialize)]
struct Registry {
    coordinator: String,
    part: String,
    leader: Option<String>,
    term: u64,
    voters: Vec<String>,
    applied: u64,
    lag: u64,
    stopped: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Decision {
    age_ms: f64,
    request: String,
    #[serde(default)]
    model: String,
    class: String,
    prompt_tokens: u64,
    read_tokens: u64,
    waited_ms: f64,
    chosen: Considered,
    others: Vec<Considered>,
    ttft_ms: Option<f64>,
    tpot_ms: Option<f64>,
    outcome: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Considered {
    decode: String,
    prefill: Option<String>,
    predicted_ttft_ms: f64,
    predicted_tpot_ms: f64,
    chance: f64,
}

#[derive(Debug, Deserialize)]
struct Model {
    name: String,
    context_tokens: Option<u32>,
    requests: u64,
    sequences_waiting: u64,
    sequences_running: u64,
    rescues: u64,
}

#[derive(Debug, Deserialize)]
struct Member {
    name: String,
    #[serde(default)]
    model: String,
    host: String,
    role: String,
    draining: bool,
    #[serde(default)]
    unhealthy: bool,
    seconds_since_heartbeat: f64,
    assigned: u64,
    #[serde(default)]
    indexed_blocks: Option<u64>,
    #[serde(default)]
    release: Option<String>,
    report: Report,
}

#[derive(Debug, Deserialize)]
struct Report {
    waiting: u64,
    running: u64,
    tokens_queued: u64,
    blocks: Tiers,
    counters: Counters,
}

#[derive(Debug, Default, Deserialize)]
struct Tiers {
    hbm: Blocks,
    dram: Blocks,
    nvme: Blocks,
    object: Blocks,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct Blocks {
    total: u64,
    free: u64,
    cached: u64,
    used: u64,
    bytes_per_block: u64,
}

#[derive(Debug, Deserialize)]
struct Counters {
    tokens: Map<String, Value>,
    tokens_generated: u64,
    preemptions: u64,
}

/// Seconds without a message after which a member has missed a heartbeat.
const SILENT_S: f64 = 2.5;
const DECISIONS: usize = 12;

impl Display for Screen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hosts: BTreeSet<&str> = self.members.iter().map(|member| member.host.as_str()).collect();
        let generated: u64 = self.members.iter().map(|member| member.report.counters.tokens_generated).sum();
        writeln!(
            f,
            "{} on {}   {}: {} running, {} waiting   {}, {} generated",
            counted(self.members.len() as u64, "member"),
            counted(hosts.len() as u64, "host"),
            counted(self.requests, "request"),
            counted(self.sequences_running, "sequence"),
            self.sequences_waiting,
            counted(self.rescues, "rescue"),
            counted(generated, "token"),
        )?;
        let releases = self.releases();
        if releases.len() > 1 {
            let counts: Vec<String> = releases.iter().map(|(release, members)| format!("{release} at {members}")).collect();
            writeln!(f, "releases: {}", counts.join(", "))?;
        }
        if let Some(Registry { coordinator, part, leader, term, voters, applied, lag, stopped }) = &self.registry {
            let led = leader.as_ref().map_or("without a leader".to_owned(), |leader| format!("led by {leader} in term {term}"));
            writeln!(f, "registry {led}; {} vote; {coordinator} ({part}) has applied {applied}, lacks {lag}", voters.join(", "))?;
            stopped.iter().try_for_each(|reason| writeln!(f, "registry stopped: {reason}"))?;
        }
        let parts = [
            ("queues", self.queues()),
            ("members", self.members()),
            ("tiers", self.tiers()),
            ("prompts", self.prompts()),
            ("decisions, the newest first", self.decisions()),
        ];
        for (title, table) in parts.iter().filter(|(_, table)| !table.is_empty()) {
            write!(f, "\n{title}\n{table}")?;
        }
        Ok(())
    }
}

impl Screen {
    /// The number of members that run each release.
    fn releases(&self) -> BTreeMap<String, u64> {
        let mut releases = BTreeMap::new();
        for member in &self.members {
            let release = member.release.as_deref().map_or("an older one".to_owned(), |release| bounded(release.to_owned()));
            *releases.entry(release).or_default() += 1;
        }
        releases
    }

    fn queues(&self) -> Table {
        let mut table = Table::new(["MODEL", "RUNNING", "WAITING", "REQUESTS", "RESCUES", "CONTEXT"]);
        for model in &self.models {
            let context = model.context_tokens.map_or("no decode worker".to_owned(), |tokens| format!("{tokens} tokens"));
            let numbers = [model.sequences_running, model.sequences_waiting, model.requests, model.rescues].map(|n| n.to_string());
            table.push([vec![model.name.clone()], numbers.into(), vec![context]].concat());
        }
        table
    }

    fn members(&self) -> Table {
        let mut table =
            Table::new(["MEMBER", "ROLE", "MODEL", "HOST", "HEALTH", "GIVEN", "RUNS", "WAITS", "PROMPT TOKENS", "MEMORY", "INDEXED"]);
        for member in &self.members {
            let Report { waiting, running, tokens_queued, blocks, .. } = &member.report;
            let health = match member.seconds_since_heartbeat {
                silent if silent > SILENT_S => format!("silent for {silent:.0} s"),
                _ if member.unhealthy => "unhealthy".to_owned(),
                _ if member.draining => "draining".to_owned(),
                _ => "ok".to_owned(),
            };
            let memory = TIERS.map(|tier| (tier, blocks.of(tier))).into_iter().filter(|(_, blocks)| blocks.total > 0);
            let memory: Vec<String> = memory.map(|(tier, blocks)| format!("{tier} {}", blocks.full())).collect();
            let engine = member.role != "kvpool";
            let of_engine = |text: String| if engine { text } else { "-".to_owned() };
            table.push(vec![
                member.name.clone(),
                member.role.clone(),
                member.model.clone(),
                member.host.chars().take(HOST_CHARS).collect(),
                health,
                of_engine(member.assigned.to_string()),
                of_engine(running.to_string()),
                of_engine(waiting.to_string()),
                of_engine(tokens_queued.to_string()),
                memory.join(", "),
                member.indexed_blocks.map_or("-".to_owned(), |blocks| blocks.to_string()),
            ]);
        }
        table
    }

    /// Blocks of each model in each tier: block sizes differ between models.
    fn tiers(&self) -> Table {
        let mut table = Table::new(["TIER", "MODEL", "USED", "CACHED", "FREE", "BLOCKS", "SIZE"]);
        let models: BTreeSet<&str> = self.members.iter().map(|member| member.model.as_str()).collect();
        for tier in TIERS {
            for model in &models {
                let members = self.members.iter().filter(|member| member.model == *model).map(|member| member.report.blocks.of(tier));
                let parts: Vec<Blocks> = members.filter(|blocks| blocks.total > 0).collect();
                // All nodes tell of the same object storage.
                let together = if tier == "object" { u64::max } else { u64::saturating_add };
                let sum = |of: fn(&Blocks) -> u64| parts.iter().map(of).fold(0, together);
                if !parts.is_empty() {
                    let numbers = [sum(|b| b.used), sum(|b| b.cached), sum(|b| b.free), sum(|b| b.total)].map(|n| n.to_string());
                    let bytes = sum(|b| b.total.saturating_mul(b.bytes_per_block));
                    table.push([vec![tier.to_owned(), (*model).to_owned()], numbers.into(), vec![size(bytes)]].concat());
                }
            }
        }
        table
    }

    /// Sources of prompt tokens.
    fn prompts(&self) -> Table {
        let mut table = Table::new(["PROMPT TOKENS FROM", "TOKENS", "SHARE"]);
        let sources = ["hbm", "dram", "nvme", "object", "remote", "prefill", "local"].map(|source| {
            let of = |member: &Member| member.report.counters.tokens.get(source).and_then(Value::as_u64).unwrap_or(0);
            (source, self.members.iter().map(of).fold(0, u64::saturating_add))
        });
        let total = sources.iter().map(|(_, tokens)| tokens).fold(0, |sum: u64, tokens| sum.saturating_add(*tokens));
        for (source, tokens) in sources.into_iter().filter(|(_, tokens)| *tokens > 0) {
            table.push(vec![source.to_owned(), tokens.to_string(), format!("{:.1} %", 100.0 * tokens as f64 / total as f64)]);
        }
        let preemptions: u64 = self.members.iter().map(|member| member.report.counters.preemptions).sum();
        if preemptions > 0 {
            table.push(vec!["preemptions".to_owned(), preemptions.to_string(), String::new()]);
        }
        table
    }

    /// Placement decisions: predictions and outcomes.
    fn decisions(&self) -> Table {
        let mut table = Table::new([
            "AGE",
            "REQUEST",
            "MODEL",
            "CLASS",
            "PROMPT",
            "READ",
            "DECODE",
            "PREFILL",
            "OTHERS",
            "CHANCE",
            "WAITED",
            "TTFT",
            "PREDICTED",
            "TPOT",
            "PREDICTED",
            "OUTCOME",
        ]);
        for decision in self.decisions.iter().take(DECISIONS) {
            let Considered { decode, prefill, predicted_ttft_ms, predicted_tpot_ms, chance } = &decision.chosen;
            let known = |ms: Option<f64>| ms.map_or("-".to_owned(), time);
            table.push(vec![
                time(decision.age_ms),
                decision.request.clone(),
                decision.model.clone(),
                decision.class.clone(),
                decision.prompt_tokens.to_string(),
                decision.read_tokens.to_string(),
                decode.clone(),
                prefill.clone().unwrap_or("-".to_owned()),
                decision.others.len().to_string(),
                format!("{:.0} %", 100.0 * chance),
                time(decision.waited_ms),
                known(decision.ttft_ms),
                // The prediction starts at the decision, and the measured time at the request's arrival.
                time(decision.waited_ms + predicted_ttft_ms),
                known(decision.tpot_ms),
                time(*predicted_tpot_ms),
                decision.outcome.clone().unwrap_or("runs".to_owned()),
            ]);
        }
        table
    }
}

/// Characters of a host's name that are shown: the default name is a long number.
const HOST_CHARS: usize = 12;

const TIERS: [&str; 4] = ["hbm", "dram", "nvme", "object"];

impl Tiers {
    fn of(&self, tier: &str) -> Blocks {
        match tier {
            "hbm" => self.hbm,
            "dram" => self.dram,
            "nvme" => self.nvme,
            _ => self.object,
        }
    }
}

impl Blocks {
    fn full(&self) -> String {
        format!("{:.0} %", 100.0 * self.used.saturating_add(self.cached) as f64 / self.total as f64)
    }
}

fn time(ms: f64) -> String {
    if ms < 10_000.0 { format!("{ms:.0} ms") } else { format!("{:.0} s", ms / 1e3) }
}

fn counted(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let (mut n, mut unit) = (bytes as f64, 0);
    while n >= 1024.0 && unit + 1 < units.len() {
        (n, unit) = (n / 1024.0, unit + 1);
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{n:.1} {}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The answer of a cluster with two models after a few requests; some counters are left out.
    const SAID: &str = include_str!("fixture.json");

    fn shown(change: impl FnOnce(&mut Value)) -> String {
        let mut said = serde_json::from_str(SAID).unwrap();
        change(&mut said);
        serde_json::from_value::<Screen>(said).unwrap().to_string()
    }

    /// The cells of the line that starts with `begins`.
    fn line<'a>(shown: &'a str, begins: &str) -> Vec<&'a str> {
        let line = shown.lines().find(|line| line.starts_with(begins)).unwrap_or_else(|| panic!("no `{begins}` in\n{shown}"));
        line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
    }

    #[test]
    fn a_cluster_is_shown_as_tables() {
        let shown = shown(|_| ());
        assert_eq!(
            shown.lines().next(),
            Some("6 members on 1 host   0 requests: 0 sequences running, 0 waiting   0 rescues, 120 tokens generated")
        );
        assert_eq!(line(&shown, "org/qwen"), ["org/qwen", "0", "0", "0", "0", "2048 tokens"]);
        assert_eq!(line(&shown, "decode-1"), ["decode-1", "decode", "org/qwen", "host-a", "ok", "0", "0", "0", "0", "hbm 1 %", "32"]);
        assert_eq!(line(&shown, "kvpool-0"), ["kvpool-0", "kvpool", "tiny", "host-a", "ok", "-", "-", "-", "-", "dram 0 %", "34"]);
        assert_eq!(line(&shown, "dram"), ["dram", "org/qwen", "0", "32", "21813", "21845", "64.0 MiB"]);
        assert_eq!(line(&shown, "prefill  "), ["prefill", "928", "64.4 %"]);
        assert!(!shown.contains("decisions"), "a cluster that tells of none");
        // Columns are aligned with their heads.
        let starts = |begins: &str, what: &str| shown.lines().find(|line| line.starts_with(begins)).and_then(|line| line.find(what));
        assert_eq!(starts("MEMBER", "ROLE"), starts("kvpool-1", "kvpool  "));
    }

    #[test]
    fn what_is_wrong_is_seen() {
        let shown = shown(|said| {
            said["members"][0]["seconds_since_heartbeat"] = 4.2.into();
            said["members"][1]["draining"] = true.into();
            said["members"][2]["release"] = "9.9.9".into();
            said["members"][1]["name"] = "evil\u{1b}[2J\nname".repeat(9).into();
            said["models"][1]["context_tokens"] = Value::Null;
            said["models"][1]["sequences_waiting"] = 3.into();
        });
        assert_eq!(line(&shown, "decode-0")[4], "silent for 4 s");
        assert_eq!(line(&shown, "releases"), ["releases: 9.9.9 at 1, an older one at 5"]);
        assert_eq!(line(&shown, "org/qwen")[2..], ["3", "0", "0", "no decode worker"]);
        let evil = line(&shown, "evil·[2J·nameevil");
        assert!(evil[0].chars().count() <= 48 && evil[4] == "draining", "{evil:?}");
    }

    #[test]
    fn a_decision_stands_beside_what_came_of_it() {
        let chosen = serde_json::json!({
            "decode": "decode-0", "prefill": null, "predicted_ttft_ms": 12.345, "predicted_tpot_ms": 4.0, "chance": 0.97, "harm": 0.0,
        });
        let shown = shown(|said| {
            said["decisions"] = serde_json::json!([{
                "age_ms": 12_345.0, "request": "1b", "choice": 0, "model": "tiny", "class": "standard", "policy": "goodput",
                "prompt_tokens": 100, "read_tokens": 64, "waited_ms": 2.0, "chosen": chosen, "others": [chosen, chosen],
                "ttft_ms": 15.2, "tpot_ms": null, "tokens": 3, "outcome": null,
            }]);
        });
        let row =
            ["12 s", "1b", "tiny", "standard", "100", "64", "decode-0", "-", "2", "97 %", "2 ms", "15 ms", "14 ms", "-", "4 ms", "runs"];
        assert_eq!(line(&shown, "12 s"), row);
    }
}
