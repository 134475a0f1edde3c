//! Every operation against f64 references, at odd sizes and all head ratios.

use crate::standin::{Standin, cache};
use tidemill_kernels::cuda::{
    CudaError,
    checks::{self, Checks, Extent, TestGpu},
};

macro_rules! operations {
    ($($operation:ident)+) => {
        mod operations_match_their_references_on_a_simulated_h100 {
            $(
                #[test]
                fn $operation() {
                    super::matches("arch=90", concat!("operations::", stringify!($operation)));
                }
            )+
        }

        mod operations_match_their_references_on_a_simulated_a100 {
            $(
                #[test]
                fn $operation() {
                    super::matches("arch=80,seed=2", concat!("operations::", stringify!($operation)));
                }
            )+
        }
    };
}

// All of `checks::operations`.
operations! { rows products attention experts blocks }

fn matches(options: &str, operation: &str) {
    print!("{}", Standin::new(options).passes(operation));
}

fn judge(run: impl FnOnce(&mut TestGpu, &mut Checks) -> Result<(), CudaError>) {
    let mut gpu = TestGpu::open(&cache(), 28).unwrap();
    let mut checks = Checks::new(gpu.seed);
    run(&mut gpu, &mut checks).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn rows() {
    judge(|gpu, checks| checks::rows::all(gpu, checks, Extent::All));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn products() {
    judge(|gpu, checks| checks::products::all(gpu, checks, Extent::All));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn attention() {
    judge(|gpu, checks| checks::attention::all(gpu, checks, Extent::All));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn experts() {
    judge(|gpu, checks| checks::experts::all(gpu, checks, Extent::All));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn blocks() {
    judge(checks::blocks::all);
}
