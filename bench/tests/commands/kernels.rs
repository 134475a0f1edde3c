//! `tidemill-bench kernels` on a small scale: every row is present and correct, and a missing GPU gives a clear error.

use clap::Parser;
use serde_json::Value;
use std::{fs, process::Command};
use tidemill_bench::kernels::{KernelsArgs, NO_DEVICE, run};
use tidemill_kernels::cuda::Device;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    kernels: KernelsArgs,
}

fn rows(flags: &[&str]) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let json = dir.path().join("rows.json");
    let fixed = ["kernels", "--device", "cpu", "--quick", "--threads", "2", "--json", json.to_str().unwrap()];
    run(&Cli::parse_from(fixed.iter().chain(flags)).kernels).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    serde_json::from_value(record["result"].clone()).unwrap()
}

#[test]
fn every_kernel_and_phase_is_measured_against_a_limit() {
    let rows = rows(&[]);
    for row in &rows {
        assert!(row["measured"].as_f64().unwrap() > 0.0, "{row}");
        let ceiling = row["name"].as_str().unwrap().starts_with("ceiling");
        assert_eq!(row["limit"].is_null(), ceiling, "{row}");
        if let Some(limit) = row["limit"].as_f64() {
            let fraction = row["fraction"].as_f64().unwrap();
            assert!((fraction * limit / row["measured"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{row}");
        }
    }
    for name in [
        "ceiling",
        "matmul bf16",
        "matmul int8",
        "matmul int4",
        "attention prefill",
        "attention decode",
        "norm",
        "rope",
        "sampling",
        "prefill",
        "decode",
    ] {
        assert!(rows.iter().any(|row| row["name"].as_str().unwrap().starts_with(name)), "no row for {name}");
    }
}

#[test]
fn only_what_is_asked_for_runs_after_the_ceilings() {
    let rows = rows(&["--only", "norm 135m"]);
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 9);
    assert!(names[..8].iter().all(|name| name.starts_with("ceiling")) && names[8] == "norm");
}

#[test]
fn a_gpu_that_is_asked_for_and_not_there_is_told_apart_from_a_failure() {
    if Device::count() > 0 {
        return;
    }
    let output = Command::new(env!("CARGO_BIN_EXE_tidemill-bench")).args(["kernels", "--device", "cuda", "--quick"]).output().unwrap();
    assert_eq!(output.status.code(), Some(NO_DEVICE));
    assert!(output.stdout.is_empty());
    assert!(String::from_utf8_lossy(&output.stderr).contains("run on the CPU"), "{output:?}");
}
