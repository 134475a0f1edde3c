//! A cluster whose workers run on the stand-in: disaggregated against decode alone, blocks copied by devices and by the
//! host, damaged blocks, preemption, a crash, memory that is used up, a device that fails in the middle of a step.

use crate::standin::{Standin, kept, repository, told};
use std::{path::PathBuf, process::Command};

/// The programs that Cargo has built beside this one.
fn programs() -> PathBuf {
    let folder = std::env::current_exe().expect("a program").parent().expect("deps").join("..");
    assert!(folder.join("tidemill-decode").exists(), "the programs are built first: make programs");
    folder
}

/// Runs `bench/gpu_cluster.py`, which compares answers token by token, and returns its report. `flags` are the cluster's.
fn compared(standin: &Standin, way: &str, flags: &[&str]) -> serde_json::Value {
    let out = standin.path().join("cluster.json");
    let mut command = Command::new("python3");
    command.arg(repository().join("bench/gpu_cluster.py")).arg("--bin").arg(programs());
    command.arg("--model").arg(repository().join("model/tests/fixtures/llama3")).args(["--way", way, "--json"]).arg(&out);
    command.args(["--", "--kv-memory", "8MiB", "--step-tokens", "128", "--sequences-max", "8", "--threads", "1"]).args(flags);
    standin.prepare(&mut command);
    // Workers keep compiled kernels in the user's cache.
    command.env("HOME", kept("home"));
    let output = command.output().expect("python3");
    let text = told(&output);
    assert!(output.status.success(), "{way}:\n{text}");
    let report = serde_json::from_slice(&std::fs::read(&out).expect("a report")).expect("JSON");
    println!("{report:#}");
    report
}

/// Bytes of blocks that workers fetched: those copied by their devices, and by the host.
fn fetched(report: &serde_json::Value, way: &str) -> (f64, f64) {
    let of = |by: &str| report["notes"][way][format!("fetched_by_{by}")].as_f64().expect("it is reported");
    (of("device"), of("host"))
}

#[test]
fn a_disaggregated_cluster_answers_as_decode_alone_does() {
    let report = compared(&Standin::new("memory=512"), "disaggregated", &[]);
    let (by_device, by_host) = fetched(&report, "disaggregated");
    assert!(by_device > by_host, "devices copy from the pool's memory, once it is pinned: {report:#}");
}

/// Prefill on two devices, decode on one.
#[test]
fn so_does_one_whose_prefill_is_on_two_devices() {
    let report = compared(&Standin::new("memory=512,devices=2"), "disaggregated", &["--tensor-parallel", "prefill=2,decode=1"]);
    let (by_device, by_host) = fetched(&report, "disaggregated");
    assert!(by_device > by_host, "devices copy from the pool's memory, once it is pinned: {report:#}");
}

/// If memory cannot be pinned, the host copies.
#[test]
fn without_pinned_memory_the_same_answers_take_the_long_way() {
    let report = compared(&Standin::new("memory=512,pinned=0"), "disaggregated", &[]);
    let (by_device, by_host) = fetched(&report, "disaggregated");
    assert!(by_device == 0.0 && by_host > 0.0, "{report:#}");
}

#[test]
fn blocks_that_changed_in_the_pools_memory_are_not_used() {
    let report = compared(&Standin::new("memory=512"), "damaged", &[]);
    let notes = &report["notes"]["damaged"];
    assert!(notes["fetched_before"].as_f64() > Some(0.0) && notes["corrupt"].as_f64() > Some(0.0), "{report:#}");
}

#[test]
fn so_does_one_with_k_and_v_in_8_bits() {
    compared(&Standin::new("memory=512"), "disaggregated", &["--kv-dtype", "int8"]);
}

#[test]
fn preempted_sequences_go_on_where_they_were() {
    let report = compared(&Standin::new("memory=512"), "preempted", &[]);
    assert!(report["notes"]["preempted"]["preemptions"].as_f64() > Some(0.0), "{report:#}");
}

#[test]
fn a_crash_of_workers_does_not_show_in_the_answers() {
    let report = compared(&Standin::new("memory=512"), "crashed", &[]);
    assert!(report["notes"]["crashed"]["rescues"].as_f64() > Some(0.0), "{report:#}");
}

/// One launch of one worker fails in the middle of a step: the worker ends, and its sequences continue elsewhere.
#[test]
fn a_device_that_fails_ends_its_worker_only() {
    let marker = tempfile::TempDir::new().expect("a folder");
    let file = marker.path().join("failed");
    let standin = Standin::new(&format!("memory=512,fail_launch=2500,fail_once={}", file.display()));
    let report = compared(&standin, "failing", &[]);
    assert!(file.exists(), "a launch failed: {report:#}");
}

/// If the model does not fit, the worker's error says so, with a remedy.
#[test]
fn a_device_without_room_is_a_clear_error() {
    let standin = Standin::new("memory=1");
    let mut command = Command::new(programs().join("tidemill-bench"));
    command.args(["kernels", "--device", "cuda", "--checks-only", "models", "--checkpoints"]);
    command.arg(repository().join("model/tests/fixtures")).arg("--cache").arg(standin.cache());
    standin.prepare(&mut command);
    let output = command.output().expect("it starts");
    let text = told(&output);
    assert!(!output.status.success() && text.contains("the device's memory is used up"), "{text}");
}
