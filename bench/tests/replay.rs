//! `tidemill-bench replay` as a program, on a small generated trace: 300 requests of conversations that share three system prompts.
//! LRU's expected hits come from a separate simulation.

use serde_json::Value;
use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

/// (capacity, blocks found, tokens found)
const LRU_FOUND: [(&str, f64, f64); 3] = [("50", 1434.0, 734_208.0), ("150", 1964.0, 1_005_568.0), ("unlimited", 2079.0, 1_064_448.0)];
/// Of all prompts.
const BLOCKS: f64 = 3160.0;
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
    serde_json::from_slice(&fs::read(json.path()).unwrap()).unwrap()
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

#[test]
fn a_bad_line_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace.jsonl");
    fs::write(&trace, "{\"input_length\": 5, \"hash_ids\": [1]}\n{\"input_length\": 5}\n").unwrap();
    let output = replay(&trace, "10", "lru", &directory.path().join("json"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("line 2") && error.contains("hash_ids"), "{error}");
}
