//! Measurements as rows: JSON for programs, a table for people.

use super::clocks::Spent;
use serde::Serialize;
use std::fmt::Write;

/// A rate in bytes per second, and its cost.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rate {
    pub gb_per_s: f64,
    /// CPU seconds of both sides, user and system, per GB.
    pub cpu_s_per_gb: f64,
}

impl Rate {
    pub fn new(spent: Spent, bytes: usize) -> Self {
        Self { gb_per_s: spent.gb_per_s(bytes), cpu_s_per_gb: spent.cpu_s_per_gb(bytes) }
    }

    /// The fastest rate: other load can only have slowed it down.
    pub fn best(rates: &[Rate]) -> Self {
        *rates.iter().max_by(|a, b| a.gb_per_s.total_cmp(&b.gb_per_s)).expect("something was measured")
    }
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// `put`, `get`, or a reference: `memcpy`, `tcp`, `disk write`, `disk read`, `ib_write_bw`, `ib_read_bw`.
    pub op: &'static str,
    /// The bytes of a block, or of the span that `memcpy` runs over.
    pub bytes: usize,
    /// Blocks per call.
    pub batch: usize,
    pub transport: Option<&'static str>,
    pub tier: Option<&'static str>,
    /// QUIC: the final payload of datagrams, as path MTU discovery found it within the configured limit.
    pub datagram_bytes: Option<u16>,
    /// `memcpy` and the disk: the number of concurrent threads.
    pub threads: Option<usize>,
    #[serde(flatten)]
    pub rate: Rate,
    /// The rate of the first pass, which uses untouched memory.
    pub first_gb_per_s: Option<f64>,
    /// `gb_per_s` relative to that of this row's reference: the raw disk at the same block size for NVMe, else copying large spans with one
    /// thread for shared memory, TCP for QUIC.
    pub of_reference: Option<f64>,
}

impl Row {
    /// A row of a reference; other measurements set their own fields.
    pub fn new(rate: Rate) -> Self {
        Self {
            op: "",
            bytes: 0,
            batch: 1,
            transport: None,
            tier: None,
            datagram_bytes: None,
            threads: None,
            rate,
            first_gb_per_s: None,
            of_reference: None,
        }
    }
}

/// Compares each row with its reference among the rows.
pub fn compare(rows: &mut [Row]) {
    let memcpy = rows.iter().filter(|row| row.op == "memcpy" && row.threads == Some(1)).max_by_key(|row| row.bytes);
    let memcpy = memcpy.map(|row| row.rate.gb_per_s);
    let tcp = rows.iter().find(|row| row.op == "tcp").map(|row| row.rate.gb_per_s);
    let disk: Vec<_> = rows.iter().filter(|row| row.op.starts_with("disk")).map(|row| (row.op, row.bytes, row.rate.gb_per_s)).collect();
    let disk = |op, bytes| disk.iter().find(|row| (row.0, row.1) == (op, bytes)).map(|row| row.2);
    let verbs: Vec<_> = rows.iter().filter(|row| row.op.starts_with("ib_")).map(|row| (row.op, row.bytes, row.rate.gb_per_s)).collect();
    let perftest = |op, bytes| verbs.iter().filter(|row| (row.0, row.1) == (op, bytes)).map(|row| row.2).reduce(f64::max);
    for row in rows {
        let reference = match (row.tier, row.transport, row.op) {
            (Some("nvme"), Some(_), "put") => disk("disk write", row.bytes),
            (Some("nvme"), Some(_), _) => disk("disk read", row.bytes),
            (_, Some("shm"), _) => memcpy,
            (_, Some("quic"), _) => tcp,
            (_, Some("rdma"), "put") => perftest("ib_write_bw", row.bytes),
            (_, Some("rdma"), "get") => perftest("ib_read_bw", row.bytes),
            _ => None,
        };
        row.of_reference = reference.map(|reference| row.rate.gb_per_s / reference);
    }
}

/// The rows as a Markdown table.
pub fn table(rows: &[Row]) -> String {
    let mut table = String::from(
        "| op | transport | tier | block | batch | GB/s | CPU s/GB | of reference | first pass GB/s |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let transport = match (row.transport, row.datagram_bytes, row.threads) {
            (Some(transport), Some(bytes), _) => format!("{transport}, {bytes} B datagrams"),
            (Some(transport), None, _) => transport.into(),
            (None, _, Some(threads)) => format!("{threads} thread{}", if threads == 1 { "" } else { "s" }),
            (None, ..) => String::new(),
        };
        let ratio = row.of_reference.map_or(String::new(), |ratio| format!("{ratio:.2}"));
        let first = row.first_gb_per_s.map_or(String::new(), |rate| format!("{rate:.2}"));
        let (tier, Rate { gb_per_s, cpu_s_per_gb }) = (row.tier.unwrap_or_default(), row.rate);
        let cpu_s_per_gb = if cpu_s_per_gb.is_nan() { String::new() } else { format!("{cpu_s_per_gb:.2}") };
        let size = size(row.bytes);
        writeln!(
            table,
            "| {} | {transport} | {tier} | {size} | {} | {gb_per_s:.2} | {cpu_s_per_gb} | {ratio} | {first} |",
            row.op, row.batch
        )
        .expect("a string takes all");
    }
    table
}

fn size(bytes: usize) -> String {
    if bytes >= 1 << 20 { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(op: &'static str, transport: Option<&'static str>, bytes: usize, threads: Option<usize>, gb_per_s: f64) -> Row {
        Row { op, transport, bytes, threads, ..Row::new(Rate { gb_per_s, cpu_s_per_gb: 0.5 }) }
    }

    #[test]
    fn rows_are_compared_with_the_right_reference() {
        let mut rows = [
            row("memcpy", None, 2 << 20, Some(1), 20.0),
            row("memcpy", None, 512 << 20, Some(1), 8.0),
            row("memcpy", None, 512 << 20, Some(2), 16.0),
            row("tcp", Some("tcp"), 2 << 20, None, 2.0),
            row("put", Some("shm"), 2 << 20, None, 6.0),
            row("get", Some("quic"), 4 << 10, None, 3.0),
            row("disk write", None, 4 << 10, Some(8), 5.0),
            row("disk read", None, 4 << 10, Some(8), 4.0),
            Row { tier: Some("nvme"), ..row("get", Some("shm"), 4 << 10, None, 3.0) },
        ];
        compare(&mut rows);
        assert_eq!(rows.each_ref().map(|row| row.of_reference), [None, None, None, None, Some(0.75), Some(1.5), None, None, Some(0.75)]);
        let table = table(&rows);
        assert!(table.contains("| put | shm |  | 2 MiB | 1 | 6.00 | 0.50 | 0.75 |  |\n"), "{table}");
        assert!(table.contains("| memcpy | 2 threads |  | 512 MiB |"), "{table}");
    }

    #[test]
    fn the_rate_lies_flat_in_the_row() {
        let json = serde_json::to_value(row("put", Some("shm"), 4096, None, 6.0)).unwrap();
        assert_eq!((&json["gb_per_s"], &json["cpu_s_per_gb"], &json["bytes"]), (&6.0.into(), &0.5.into(), &4096.into()));
    }
}
