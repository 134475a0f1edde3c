//! The CUDA operations against references: f64 arithmetic on the host, or the same operation another way.
//!
//! Every operation gets fresh random inputs, and outputs full of NaN.

pub mod attention;
pub mod blocks;
pub mod models;
pub mod products;
pub mod rows;
pub mod sampling;

use super::{
    super::{CheckKind, KernelsArgs, report::Row},
    gpu::Gpu,
};
use std::fmt::Write;

/// What was checked.
pub struct Checks {
    /// Replays the random inputs.
    pub seed: u64,
    pub results: Vec<Check>,
    /// What this device cannot do, and so was not checked.
    pub left_out: Vec<String>,
    /// What is good to know, and no check.
    pub notes: Vec<String>,
}

/// One operation against its reference.
pub struct Check {
    pub op: &'static str,
    pub case: String,
    /// ‖out - reference‖ / ‖reference‖; what was not written is NaN, and so is this then. For exact comparisons, the share of
    /// elements that differ.
    pub error: f64,
    pub limit: f64,
}

impl Check {
    pub fn passes(&self) -> bool {
        // Not so for NaN.
        self.error <= self.limit
    }
}

impl Checks {
    /// Runs those that are wanted; whole models if there is a folder of them.
    pub fn of(gpu: &mut Gpu, args: &KernelsArgs) -> anyhow::Result<Self> {
        let wants = |kind| args.checks_only.is_none_or(|only| only == kind);
        let mut checks = Self::new(gpu.seed);
        if wants(CheckKind::Ops) {
            rows::all(gpu, &mut checks)?;
            products::all(gpu, &mut checks)?;
            attention::all(gpu, &mut checks)?;
            sampling::all(gpu, &mut checks)?;
            blocks::all(gpu, &mut checks)?;
        }
        if let Some(folder) = args.checkpoints.as_ref().filter(|_| wants(CheckKind::Models)) {
            models::all(folder, &args.cache, &mut checks)?;
        }
        Ok(checks)
    }

    fn new(seed: u64) -> Self {
        Self { seed, results: Vec::new(), left_out: Vec::new(), notes: Vec::new() }
    }

    /// Compares numbers that a kernel computed with what they should be.
    pub fn near(&mut self, op: &'static str, case: String, out: &[f64], reference: &[f64], limit: f64) {
        assert_eq!(out.len(), reference.len(), "{op} {case}: as many numbers as the reference");
        let norm = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>().sqrt();
        let difference = norm(&mut out.iter().zip(reference).map(|(a, b)| a - b));
        let error = difference / norm(&mut reference.iter().copied()).max(f64::MIN_POSITIVE);
        self.results.push(Check { op, case, error, limit });
    }

    /// Compares element by element; `limit` is the share that may differ.
    pub fn same<T: PartialEq>(&mut self, op: &'static str, case: String, out: &[T], reference: &[T], limit: f64) {
        assert_eq!(out.len(), reference.len(), "{op} {case}: as many elements as the reference");
        let different = out.iter().zip(reference).filter(|(a, b)| a != b).count();
        self.results.push(Check { op, case, error: different as f64 / out.len().max(1) as f64, limit });
    }

    /// Keeps what should be zero, or little more.
    pub fn near_zero(&mut self, op: &'static str, case: String, error: f64, limit: f64) {
        self.results.push(Check { op, case, error, limit });
    }

    /// For programs. What is to be exact has no fraction.
    pub fn rows(&self) -> impl Iterator<Item = Row> {
        self.results
            .iter()
            .map(|Check { op, case, error, limit }| Row::new(&format!("check {op}"), case.clone(), *error, *limit, "relative error"))
    }

    /// For people: failed checks one by one, the others by operation.
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
            let _ = writeln!(text, "\nFAILED {} {}: error {:.3e}, limit {:.1e}", check.op, check.case, check.error, check.limit);
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

    /// An error if any check failed.
    pub fn verdict(&self) -> anyhow::Result<()> {
        let failed = self.results.iter().filter(|check| !check.passes()).count();
        anyhow::ensure!(failed == 0, "{failed} of {} checks failed", self.results.len());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
