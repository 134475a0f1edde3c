//! `tidemill-bench replay` as a program, on a small generated trace: 300 requests of conversations that share three system prompts.
//! LRU's expected hits come from a separate simulation.

use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Output, Stdio},
};

/// (capacity, blocks found, tokens found)
const LRU_FOUND: [(&str, f64, f64); 3] = [("50", 1434.0, 734_208.0), ("150", 1964.0, 1_005_568.0), ("unlimited", 2079.0, 1_064_448.0)];
/// The blocks of all prompts.
const BLOCKS: f64 = 3160.0;
/// The tokens of all prompts.
const TOKENS: f64 = 1_540_679.0;

fn replay(trace: &Path, capacity: &str, policy: &str, json: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidemill-bench"))
        .args(["replay", "--cache-only", "--capacity", capacity, "--policy", policy, "--trace"])
        .arg(trace)
        .arg("--json")
        .arg(json)
        .output()
        .unwrap()
}

fn report(capacity: &str, policy: &str) -> Value {
    let json = tempfile::NamedTempFile::new().unwrap();
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/conversations.jsonl");
    let output = replay(&trace, capacity, policy, json.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let record: Value = serde_json::from_slice(&fs::read(json.path()).unwrap()).unwrap();
    record["result"].clone()
}

fn rates(report: &Value) -> (f64, f64) {
    (report["block_hit_rate"].as_f64().unwrap(), report["prefix_token_hit_rate"].as_f64().unwrap())
}

#[test]
fn lru_finds_what_a_separate_simulation_found() {
    for (capacity, blocks, tokens) in LRU_FOUND {
        let (block_rate, token_rate) = rates(&report(capacity, "lru"));
        // JSON readers may round the last digit.
        let same = |rate: f64, expected: f64| (rate - expected).abs() < 1e-12;
        assert!(same(block_rate, blocks / BLOCKS) && same(token_rate, tokens / TOKENS), "{capacity}: {block_rate}, {token_rate}");
    }
}

#[test]
fn all_policies_are_compared_and_none_beats_the_optimum() {
    let report = report("150", "all");
    assert_eq!((&report["settings"]["capacity"], &report["settings"]["policy"]), (&Value::from(150), &Value::from("all")));
    let runs = report["runs"].as_array().unwrap();
    let names: Vec<&str> = runs.iter().map(|run| run["policy"].as_str().unwrap()).collect();
    assert_eq!(names, ["lru", "lfu", "s3fifo", "hit-density", "optimum"]);
    let (best, _) = rates(runs.last().unwrap());
    assert!(runs.iter().all(|run| rates(run).0 <= best), "{report:#}");
}

/// A small conversation: two turns share a prefix, at a hundredth of its length.
#[test]
fn a_trace_goes_to_a_live_server_at_its_times() {
    let directory = tempfile::tempdir().unwrap();
    let (trace, json) = (directory.path().join("trace.jsonl"), directory.path().join("live.json"));
    let line = |at: u64, input: u64, blocks: &str| {
        format!("{{\"timestamp\": {at}, \"input_length\": {input}, \"output_length\": 300, \"hash_ids\": [{blocks}]}}\n")
    };
    fs::write(&trace, [line(7000, 1000, "1, 2"), line(7000, 600, "9, 8"), line(9000, 1500, "1, 2, 3")].concat()).unwrap();
    let mut stub = Command::new(env!("CARGO_BIN_EXE_tidemill-bench"))
        .args(["stub", "--ttft-ms", "20", "--gap-ms", "2"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(stub.stdout.take().unwrap()).read_line(&mut said).unwrap();
    let url = said.trim().strip_prefix("ready ").unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_tidemill-bench"))
        .args(["replay", "--url", url, "--time-scale", "2", "--length-scale", "0.01", "--slo-ttft-ms", "60000", "--trace"])
        .arg(&trace)
        .arg("--json")
        .arg(&json)
        .output()
        .unwrap();
    stub.kill().unwrap();
    stub.wait().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let record: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    let result = &record["result"];
    // 10, 6 and 15 tokens; 3 tokens out each; the last request is due after a second.
    assert_eq!((&result["completed"], &result["prompt_tokens"], &result["output_tokens"]), (&3.into(), &31.into(), &9.into()), "{result}");
    assert!(result["duration_s"].as_f64().unwrap() >= 1.0 && result["goodput"]["ratio"] == 1.0, "{result}");
    assert!((result["cacheable"].as_f64().unwrap() - 1000.0 / 3100.0).abs() < 0.01, "{result}");
    let known: Vec<_> = result["by_cacheable"].as_array().unwrap().iter().map(|group| (&group["name"], &group["completed"])).collect();
    assert_eq!(known, [(&"0 to 25 % known".into(), &2.into()), (&"50 to 75 % known".into(), &1.into())]);
}

#[test]
fn a_bad_line_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace.jsonl");
    fs::write(&trace, "{\"input_length\": 5, \"hash_ids\": [1]}\n{\"input_length\": 5}\n").unwrap();
    let output = replay(&trace, "10", "lru", &directory.path().join("json"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("line 2") && error.contains("hash_ids"), "{error}");
}
