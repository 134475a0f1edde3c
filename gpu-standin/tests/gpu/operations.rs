//! Every operation against f64 references, at odd sizes and all head ratios.

use crate::standin::{Standin, cache};
use tidemill_kernels::cuda::checks::{self, Checks, Extent, TestGpu};

#[test]
fn every_operation_matches_its_reference_on_a_simulated_h100() {
    print!("{}", Standin::new("arch=90").passes("operations::all_operations"));
}

#[test]
fn every_operation_matches_its_reference_on_a_simulated_a100() {
    print!("{}", Standin::new("arch=80,seed=2").passes("operations::all_operations"));
}

/// The operations of [`all_operations`] that layers of experts add, which take seconds.
#[test]
fn layers_of_experts_match_their_reference() {
    print!("{}", Standin::new("arch=90,seed=3").passes("operations::experts"));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn experts() {
    let mut gpu = TestGpu::open(&cache(), 31).unwrap();
    let mut checks = Checks::new(gpu.seed);
    checks::experts::all(&mut gpu, &mut checks, Extent::All).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn all_operations() {
    let mut gpu = TestGpu::open(&cache(), 28).unwrap();
    let mut checks = Checks::new(gpu.seed);
    checks::operations(&mut gpu, &mut checks).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
}
