//! Results as they come: a line each on standard output, and a line of JSON each in a file. A run that is cut short, by a crash or a time
//! limit, has reported everything that it found.

use super::report::Row;
use anyhow::Context;
use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::Path,
};
use tidemill_kernels::cuda::checks::Check;

/// The destination of results as they come.
pub struct Journal {
    speaks: bool,
    file: Option<File>,
}

impl Journal {
    /// A journal that writes nothing, for runs whose table at the end is enough.
    pub fn silent() -> Self {
        Self { speaks: false, file: None }
    }

    /// A journal that prints each result, and appends it to the file at `path` if there is one.
    pub fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let open = |path: &Path| {
            OpenOptions::new().create(true).append(true).open(path).with_context(|| format!("cannot append to {}", path.display()))
        };
        Ok(Self { speaks: true, file: path.map(open).transpose()? })
    }

    pub fn row(&mut self, row: &Row) {
        let of_limit = row.fraction.map_or(String::new(), |fraction| format!(" ({fraction:.3} of the limit)"));
        self.say(&format!("row {} {}: {:.4} {}{of_limit}", row.name, row.shape, row.measured, row.unit), row);
    }

    pub fn check(&mut self, check: &Check) {
        self.say(&check.to_string(), &Row::of_check(check));
    }

    fn say(&mut self, line: &str, row: &Row) {
        if self.speaks {
            println!("{line}");
        }
        if let Some(file) = &mut self.file {
            let json = serde_json::to_string(row).expect("a row is plain data");
            // Each line is one write, so the file has whole lines when the process dies.
            if let Err(error) = file.write_all(format!("{json}\n").as_bytes()) {
                eprintln!("appending a result to the file of JSON lines failed: {error}");
            }
        }
    }
}
