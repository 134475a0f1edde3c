//! Sampling against the CPU's, and tiny checkpoints' greedy tokens against references, handed over from one executor to
//! another.

use crate::standin::{Standin, cache, repository};
use tidemill_kernels::cuda::checks::{Checks, TestGpu};

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
    tidemill_model::cuda::checks::sampling(&mut gpu, &mut checks).unwrap();
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
