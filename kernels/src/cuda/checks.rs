//! The CUDA operations against references: f64 arithmetic on the host, or the same operation computed differently. Every operation gets
//! fresh random inputs, and outputs full of NaN.
//!
//! This crate's tests run them, and so do programs with the feature `checks`: a machine with a GPU may have a driver and no Rust.

pub mod attention;
pub mod blocks;
pub mod experts;
mod gpu;
pub mod products;
pub mod rows;

pub use gpu::{TestGpu, doubles, widened};

use super::CudaError;
use std::fmt::{self, Write};

/// Checks every operation but sampling, whose reference is a sampler that this crate does not have.
pub fn operations(gpu: &mut TestGpu, checks: &mut Checks) -> Result<(), CudaError> {
    rows::all(gpu, checks, Extent::All)?;
    products::all(gpu, checks, Extent::All)?;
    attention::all(gpu, checks, Extent::All)?;
    experts::all(gpu, checks, Extent::All)?;
    blocks::all(gpu, checks)
}

/// The extent of the checks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Extent {
    /// The first of each list, which tells within a second whether a kernel works at all.
    First,
    All,
}

impl Extent {
    /// The cases to check out of `cases`.
    pub fn of<T>(self, cases: &[T]) -> &[T] {
        match self {
            Extent::First => &cases[..1],
            Extent::All => cases,
        }
    }
}

/// The outcome of all checks.
pub struct Checks {
    /// The seed, which reproduces the random inputs.
    pub seed: u64,
    pub results: Vec<Check>,
    /// Checks that this device cannot run, with the reasons.
    pub left_out: Vec<String>,
    /// Findings that are not checks.
    pub notes: Vec<String>,
    /// Called with each check as it ends, so that a later crash loses none.
    told: Box<dyn FnMut(&Check)>,
}

/// The result of one operation against its reference.
pub struct Check {
    pub op: &'static str,
    pub case: String,
    /// ‖out - reference‖ / ‖reference‖; NaN if the kernel left an element unwritten. For exact comparisons, the share
    /// of elements that differ.
    pub error: f64,
    pub limit: f64,
    /// The reason why there is no result to compare; `error` is then NaN.
    pub failure: Option<String>,
}

impl Check {
    pub fn passes(&self) -> bool {
        // This is false for NaN.
        self.error <= self.limit
    }
}

impl fmt::Display for Check {
    /// One line that begins with `FAILED` or `ok`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.passes() { "ok" } else { "FAILED" };
        match &self.failure {
            Some(failure) => write!(f, "{verdict} {} {}: {failure}", self.op, self.case),
            None => write!(f, "{verdict} {} {}: error {:.3e}, limit {:.1e}", self.op, self.case, self.error, self.limit),
        }
    }
}

impl Checks {
    pub fn new(seed: u64) -> Self {
        Self::told_to(seed, |_| {})
    }

    /// Creates checks that call `told` with each check as it ends.
    pub fn told_to(seed: u64, told: impl FnMut(&Check) + 'static) -> Self {
        Self { seed, results: Vec::new(), left_out: Vec::new(), notes: Vec::new(), told: Box::new(told) }
    }

    fn add(&mut self, op: &'static str, case: String, error: f64, limit: f64, failure: Option<String>) {
        let check = Check { op, case, error, limit, failure };
        (self.told)(&check);
        self.results.push(check);
    }

    /// Runs one case. An error fails only that case, and the next one follows, unless the device has become unusable.
    pub fn case(
        &mut self,
        gpu: &mut TestGpu,
        op: &'static str,
        case: String,
        run: impl FnOnce(&mut TestGpu, &mut Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let Err(error) = run(gpu, self) else { return Ok(()) };
        self.failed(op, case, &error);
        if gpu.device.is_usable() { Ok(()) } else { Err(error) }
    }

    /// Records a case that has no result.
    pub fn failed(&mut self, op: &'static str, case: String, why: &dyn std::error::Error) {
        self.add(op, case, f64::NAN, 0.0, Some(why.to_string()));
    }

    /// Compares a kernel's numbers with the reference.
    pub fn near(&mut self, op: &'static str, case: String, out: &[f64], reference: &[f64], limit: f64) {
        assert_eq!(out.len(), reference.len(), "{op} {case}: as many numbers as the reference");
        let norm = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>().sqrt();
        let difference = norm(&mut out.iter().zip(reference).map(|(a, b)| a - b));
        let error = difference / norm(&mut reference.iter().copied()).max(f64::MIN_POSITIVE);
        self.add(op, case, error, limit, None);
    }

    /// Compares element by element; `limit` is the share that may differ.
    pub fn same<T: PartialEq>(&mut self, op: &'static str, case: String, out: &[T], reference: &[T], limit: f64) {
        assert_eq!(out.len(), reference.len(), "{op} {case}: as many elements as the reference");
        let different = out.iter().zip(reference).filter(|(a, b)| a != b).count();
        self.add(op, case, different as f64 / out.len().max(1) as f64, limit, None);
    }

    /// Records an error that should be near zero.
    pub fn near_zero(&mut self, op: &'static str, case: String, error: f64, limit: f64) {
        self.add(op, case, error, limit, None);
    }

    /// A table for people: one row per operation, then each failed check.
    pub fn table(&self) -> String {
        let mut text = String::from("| operation | checks | failed | largest error | its limit |\n|---|---:|---:|---:|---:|\n");
        let mut ops: Vec<&str> = Vec::new();
        for check in &self.results {
            if !ops.contains(&check.op) {
                ops.push(check.op);
            }
        }
        for op in ops {
            let of_op: Vec<&Check> = self.results.iter().filter(|check| check.op == op).collect();
            let failed = of_op.iter().filter(|check| !check.passes()).count();
            let worst = of_op.iter().max_by(|a, b| (a.error / a.limit.max(1e-30)).total_cmp(&(b.error / b.limit.max(1e-30)))).expect("one");
            let _ = writeln!(text, "| {op} | {} | {failed} | {:.1e} | {:.1e} |", of_op.len(), worst.error, worst.limit);
        }
        for check in self.results.iter().filter(|check| !check.passes()) {
            let _ = writeln!(text, "\n{check}");
        }
        for what in &self.left_out {
            let _ = writeln!(text, "\nnot checked: {what}");
        }
        for note in &self.notes {
            let _ = writeln!(text, "\n{note}");
        }
        let _ = writeln!(text, "\nseed of the checks: {}", self.seed);
        text
    }

    /// Returns an error if any check failed.
    pub fn verdict(&self) -> Result<(), ChecksFailed> {
        let failed = self.results.iter().filter(|check| !check.passes()).count();
        if failed == 0 { Ok(()) } else { Err(ChecksFailed { failed, all: self.results.len() }) }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{failed} of {all} checks failed")]
pub struct ChecksFailed {
    pub failed: usize,
    pub all: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_matches_its_reference_on_this_machines_gpu() {
        let Some(mut gpu) = TestGpu::for_test(&std::env::temp_dir().join("tidemill-kernels")) else { return };
        let mut checks = Checks::new(gpu.seed);
        operations(&mut gpu, &mut checks).unwrap();
        assert!(checks.verdict().is_ok(), "{}", checks.table());
    }

    #[test]
    fn what_was_not_written_or_is_wrong_fails() {
        let mut checks = Checks::new(1);
        checks.near("op", "right".into(), &[1.0, 2.0], &[1.0, 2.001], 1e-2);
        checks.same("op", "same".into(), &[1, 2], &[1, 2], 0.0);
        assert!(checks.verdict().is_ok());
        checks.near("op", "unwritten".into(), &[1.0, f64::NAN], &[1.0, 2.0], 1e-2);
        checks.near("op", "wrong".into(), &[1.0, 3.0], &[1.0, 2.0], 1e-2);
        checks.same("op", "other".into(), &[1, 3], &[1, 2], 0.0);
        assert!(checks.verdict().unwrap_err().to_string().contains("3 of 5"));
        let table = checks.table();
        assert!(table.contains("FAILED op unwritten") && table.contains("FAILED op wrong") && !table.contains("FAILED op right"));
    }
}
