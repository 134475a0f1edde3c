//! What was checked and measured: JSON for programs, tables for people.

use serde::Serialize;
use std::fmt::Write;
use tidemill_kernels::cuda::device::Properties;

#[derive(Serialize)]
pub struct Report {
    device: String,
    arch: String,
    multiprocessors: usize,
    memory_bytes: usize,
    /// Replays the random inputs.
    seed: u64,
    pub checks: Vec<Check>,
    pub limits: Vec<Measured>,
    pub speeds: Vec<Speed>,
    /// What was left out, and why.
    pub skipped: Vec<String>,
}

/// One operation against its reference.
#[derive(Serialize)]
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

#[derive(Serialize)]
pub struct Measured {
    pub what: &'static str,
    pub value: f64,
    pub unit: &'static str,
}

/// One operation's speed.
#[derive(Serialize)]
pub struct Speed {
    pub op: &'static str,
    pub case: String,
    /// Median.
    pub ms: f64,
    pub rate: f64,
    pub unit: &'static str,
    /// Of the limit that binds it, measured in this run.
    pub of_limit: f64,
}

impl Report {
    pub fn new(properties: &Properties, seed: u64) -> Self {
        let Properties { name, arch, multiprocessors, memory_bytes, .. } = properties.clone();
        Self {
            device: name,
            arch: arch.to_string(),
            multiprocessors,
            memory_bytes,
            seed,
            checks: Vec::new(),
            limits: Vec::new(),
            speeds: Vec::new(),
            skipped: Vec::new(),
        }
    }

    /// Compares numbers that a kernel computed with what they should be.
    pub fn check(&mut self, op: &'static str, case: String, out: &[f64], reference: &[f64], limit: f64) {
        assert_eq!(out.len(), reference.len(), "{op} {case}: as many numbers as the reference");
        let norm = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>().sqrt();
        let difference = norm(&mut out.iter().zip(reference).map(|(a, b)| a - b));
        let error = difference / norm(&mut reference.iter().copied()).max(f64::MIN_POSITIVE);
        self.checks.push(Check { op, case, error, limit });
    }

    /// Compares element by element; `limit` is the share that may differ.
    pub fn check_same<T: PartialEq>(&mut self, op: &'static str, case: String, out: &[T], reference: &[T], limit: f64) {
        assert_eq!(out.len(), reference.len(), "{op} {case}: as many elements as the reference");
        let different = out.iter().zip(reference).filter(|(a, b)| a != b).count();
        self.checks.push(Check { op, case, error: different as f64 / out.len().max(1) as f64, limit });
    }

    /// For people: failed checks one by one, the others by operation.
    pub fn table(&self) -> String {
        let mut text = format!("{} ({}), seed {}\n\n", self.device, self.arch, self.seed);
        let _ = writeln!(text, "| operation | checks | failed | largest error | its limit |\n|---|---:|---:|---:|---:|");
        let mut ops: Vec<&str> = self.checks.iter().map(|check| check.op).collect();
        ops.dedup();
        for op in ops {
            let of_op: Vec<&Check> = self.checks.iter().filter(|check| check.op == op).collect();
            let failed = of_op.iter().filter(|check| !check.passes()).count();
            let worst = of_op.iter().max_by(|a, b| (a.error / a.limit.max(1e-30)).total_cmp(&(b.error / b.limit.max(1e-30)))).expect("one");
            let _ = writeln!(text, "| {op} | {} | {failed} | {:.1e} | {:.1e} |", of_op.len(), worst.error, worst.limit);
        }
        for check in self.checks.iter().filter(|check| !check.passes()) {
            let _ = writeln!(text, "\nFAILED {} {}: error {:.3e}, limit {:.1e}", check.op, check.case, check.error, check.limit);
        }
        if !self.limits.is_empty() {
            let _ = writeln!(text, "\n| limit of the device | |\n|---|---:|");
        }
        for Measured { what, value, unit } in &self.limits {
            let _ = writeln!(text, "| {what} | {value:.1} {unit} |");
        }
        if !self.speeds.is_empty() {
            let _ = writeln!(text, "\n| operation | case | ms | rate | of its limit |\n|---|---|---:|---:|---:|");
        }
        for Speed { op, case, ms, rate, unit, of_limit } in &self.speeds {
            let _ = writeln!(text, "| {op} | {case} | {ms:.4} | {rate:.1} {unit} | {:.0}% |", 100.0 * of_limit);
        }
        for what in &self.skipped {
            let _ = writeln!(text, "\nskipped: {what}");
        }
        text
    }

    /// An error if any check failed.
    pub fn verdict(&self) -> anyhow::Result<()> {
        let failed = self.checks.iter().filter(|check| !check.passes()).count();
        anyhow::ensure!(failed == 0, "{failed} of {} checks failed", self.checks.len());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_kernels::cuda::compile::Arch;

    fn report() -> Report {
        let properties = Properties {
            name: "a device".into(),
            arch: Arch::SM_90A,
            multiprocessors: 132,
            l2_bytes: 0,
            shared_bytes_max: 0,
            memory_bytes: 0,
        };
        Report::new(&properties, 1)
    }

    #[test]
    fn what_was_not_written_or_is_wrong_fails() {
        let mut report = report();
        report.check("op", "right".into(), &[1.0, 2.0], &[1.0, 2.001], 1e-2);
        report.check_same("op", "same".into(), &[1, 2], &[1, 2], 0.0);
        assert!(report.verdict().is_ok());
        report.check("op", "unwritten".into(), &[1.0, f64::NAN], &[1.0, 2.0], 1e-2);
        report.check("op", "wrong".into(), &[1.0, 3.0], &[1.0, 2.0], 1e-2);
        report.check_same("op", "other".into(), &[1, 3], &[1, 2], 0.0);
        assert!(report.verdict().unwrap_err().to_string().contains("3 of 5"));
        let table = report.table();
        assert!(table.contains("FAILED op unwritten") && table.contains("FAILED op wrong") && !table.contains("FAILED op right"));
    }
}
