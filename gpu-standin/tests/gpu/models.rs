//! Sampling against the CPU's, and tiny checkpoints' greedy tokens against references, handed over from one executor to
//! another.

use crate::standin::{Standin, cache, repository};
use std::{fs, os::unix::fs::symlink};
use tempfile::TempDir;
use tidemill_kernels::cuda::checks::{Checks, Extent, TestGpu};

#[test]
fn sampling_matches_the_cpus() {
    print!("{}", Standin::new("arch=90").passes("models::sampling"));
}

/// Every checkpoint is checked by this test or by the next: one thread takes longer for all of them than another for the rest of this file.
#[test]
fn odd_checkpoints_match_their_references() {
    print!("{}", Standin::new("arch=90").passes("models::odd_checkpoints"));
}

#[test]
fn even_checkpoints_match_their_references() {
    print!("{}", Standin::new("arch=90").passes("models::even_checkpoints"));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn sampling() {
    let mut gpu = TestGpu::open(&cache(), 29).unwrap();
    let mut checks = Checks::new(gpu.seed);
    tidemill_model::cuda::checks::sampling(&mut gpu, &mut checks, Extent::All).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
}

#[test]
fn weights_in_fp8_stay_so_only_where_the_device_multiplies_them() {
    let in_fp8 = |options: &str| {
        let told = Standin::new(options).passes("models::checkpoints_in_fp8");
        ["fp8-blocks", "fp8-channel", "fp8-fbgemm", "fp8-tensor"].map(|form| told.contains(&format!("{form}: products in FP8")))
    };
    assert_eq!(in_fp8("arch=90"), [false, true, true, true]);
    assert_eq!(in_fp8("arch=80"), [false; 4]);
    assert_eq!(in_fp8("cublaslt=120805"), [false; 4], "a library that does not know a scale for each row");
    assert_eq!(in_fp8("refuse=rows"), [false; 4], "one that has no algorithm for it");
    assert_eq!(in_fp8("refuse=rows+bias"), [false, true, true, true], "one that adds no bias to it");
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn checkpoints_in_fp8() {
    check(|_, name| name.starts_with("fp8-"));
}

#[test]
fn layers_of_experts_run_on_the_device() {
    let told = Standin::new("arch=80,seed=3").passes("models::checkpoints_of_experts");
    print!("{told}");
    assert!(!told.contains("not checked"), "{told}");
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn checkpoints_of_experts() {
    check(|_, name| ["mixtral", "qwen2-moe", "qwen3-moe"].contains(&name));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn odd_checkpoints() {
    check(|i, _| i % 2 == 1);
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn even_checkpoints() {
    check(|i, _| i % 2 == 0);
}

/// Checks those of the tiny checkpoints whose number in the order of names, and whose name, `wanted` takes.
fn check(wanted: impl Fn(usize, &str) -> bool) {
    let folder = TempDir::new().unwrap();
    let fixtures = repository().join("model/tests/fixtures").canonicalize().unwrap();
    let mut names: Vec<String> = fs::read_dir(&fixtures).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    for (_, name) in names.iter().enumerate().filter(|(i, name)| wanted(*i, name)) {
        symlink(fixtures.join(name), folder.path().join(name)).unwrap();
    }
    let mut checks = Checks::new(0);
    tidemill_model::cuda::checks::models(folder.path(), &cache(), &mut checks).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
}
