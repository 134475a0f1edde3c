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

#[test]
fn every_checkpoint_matches_its_reference() {
    print!("{}", Standin::new("arch=90").passes("models::checkpoints"));
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
    let folder = TempDir::new().unwrap();
    let fixtures = repository().join("model/tests/fixtures").canonicalize().unwrap();
    for entry in fs::read_dir(&fixtures).unwrap().map(|entry| entry.unwrap().file_name()) {
        if entry.to_string_lossy().starts_with("fp8-") {
            symlink(fixtures.join(&entry), folder.path().join(&entry)).unwrap();
        }
    }
    let mut checks = Checks::new(0);
    tidemill_model::cuda::checks::models(folder.path(), &cache(), &mut checks).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
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
    let folder = TempDir::new().unwrap();
    let fixtures = repository().join("model/tests/fixtures").canonicalize().unwrap();
    for family in ["mixtral", "qwen2-moe", "qwen3-moe"] {
        symlink(fixtures.join(family), folder.path().join(family)).unwrap();
    }
    let mut checks = Checks::new(0);
    tidemill_model::cuda::checks::models(folder.path(), &cache(), &mut checks).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn checkpoints() {
    let mut checks = Checks::new(0);
    tidemill_model::cuda::checks::models(&repository().join("model/tests/fixtures"), &cache(), &mut checks).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
}
