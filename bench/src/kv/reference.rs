//! The best performance of this machine: copying memory, and moving bytes over TCP on loopback.

use super::{
    clocks::{Clocks, Spent},
    report::{Rate, Row},
};
use anyhow::{Context, ensure};
use std::{
    hint::black_box,
    io::{Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    process::{Command, Stdio},
    thread,
};

/// The bytes copied or sent at a time: a block of the other measurements.
const BLOCK: usize = 2 << 20;
/// The bytes of a span, far more than any cache holds.
const SPAN: usize = 512 << 20;

/// Copies one block over and over (from cache to cache), and spans that no cache holds; with one thread and with two.
pub fn memcpy(repetitions: u32, shrink: usize) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (span, copied) in [(BLOCK, 16 << 30), (SPAN / shrink, 4 << 30)] {
        for threads in [1, 2] {
            let mut spans: Vec<_> = (0..threads).map(|n| (vec![n as u8; span], vec![!n as u8; span])).collect();
            let bytes = copied / shrink / threads;
            let rates: Vec<_> = (0..repetitions).map(|_| copy_all(&mut spans, bytes)).collect::<Result<_, _>>()?;
            rows.push(Row { op: "memcpy", bytes: span, threads: Some(threads), ..Row::new(Rate::best(&rates)) });
        }
    }
    Ok(rows)
}

/// Copies `bytes` in each thread between the spans of its own.
fn copy_all(spans: &mut [(Vec<u8>, Vec<u8>)], bytes: usize) -> anyhow::Result<Rate> {
    let total = bytes * spans.len();
    let clocks = Clocks::new(&[])?;
    let started = clocks.now()?;
    thread::scope(|scope| {
        for (to, from) in spans.iter_mut() {
            scope.spawn(move || {
                for at in (0..from.len()).step_by(BLOCK).cycle().take(bytes / BLOCK) {
                    to[at..at + BLOCK].copy_from_slice(black_box(&from[at..at + BLOCK]));
                    black_box(&mut to[at..at + BLOCK]);
                }
            });
        }
    });
    let spent = clocks.now()? - started;
    ensure!(spans.iter().all(|(to, from)| to == from), "memory was not copied");
    Ok(Rate::new(spent, total))
}

/// Streams blocks from one thread to another, which acknowledges them at the end.
pub fn tcp(repetitions: u32, shrink: usize) -> anyhow::Result<Row> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen on loopback")?;
    let addr = listener.local_addr()?;
    let blocks = (4 << 30) / shrink / BLOCK;
    // There are as many different buffers as a batch has blocks.
    let sent: Vec<_> = (0..32u8).map(|n| vec![n; BLOCK]).collect();
    let mut received = vec![vec![0xff; BLOCK]; sent.len()];
    let mut rates = Vec::new();
    for _ in 0..repetitions {
        let mut sender = TcpStream::connect(addr)?;
        sender.set_nodelay(true)?;
        let (mut receiver, _) = listener.accept()?;
        let clocks = Clocks::new(&[])?;
        let started = clocks.now()?;
        let spent = thread::scope(|scope| -> anyhow::Result<Spent> {
            let receiving = scope.spawn(|| {
                (0..blocks).try_for_each(|n| receiver.read_exact(&mut received[n % sent.len()]))?;
                receiver.write_all(&[1])
            });
            (0..blocks).try_for_each(|n| sender.write_all(&sent[n % sent.len()]))?;
            sender.read_exact(&mut [0])?;
            let spent = clocks.now()? - started;
            receiving.join().expect("receiving does not panic")?;
            Ok(spent)
        })?;
        ensure!(sent == received, "TCP changed bytes");
        rates.push(Rate::new(spent, blocks * BLOCK));
    }
    Ok(Row { op: "tcp", bytes: BLOCK, transport: Some("tcp"), ..Row::new(Rate::best(&rates)) })
}

/// The rates of perftest, the usual benchmark of RDMA devices, between two of them: WRITEs and READs of `bytes`.
pub fn perftest(client: &str, node: &str, gid_index: u32, bytes: usize, count: usize) -> anyhow::Result<Vec<Row>> {
    let row = |op| {
        let gb_per_s = perftest_rate(op, client, node, gid_index, bytes, count)?;
        // It polls continuously, so its CPU time has no meaning.
        Ok(Row { op, bytes, transport: Some("verbs"), ..Row::new(Rate { gb_per_s, cpu_s_per_gb: f64::NAN }) })
    };
    ["ib_write_bw", "ib_read_bw"].into_iter().map(row).collect()
}

fn perftest_rate(program: &str, client: &str, node: &str, gid_index: u32, bytes: usize, count: usize) -> anyhow::Result<f64> {
    // The port was free a moment ago.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let start = |device: &str, server: &[&str]| {
        let numbers = [("-x", gid_index as usize), ("-s", bytes), ("-n", count.max(PERFTEST_COUNT_MIN)), ("-p", port.into())];
        let numbers = numbers.into_iter().flat_map(|(flag, number)| [flag.to_owned(), number.to_string()]);
        let mut command = Command::new(program);
        command.args(["-F", "-d", device]).args(numbers).args(server).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().with_context(|| format!("cannot start {program} (Debian: perftest)"))
    };
    let mut server = start(node, &[])?;
    thread::sleep(PERFTEST_START);
    let output = start(client, &["127.0.0.1"])?.wait_with_output()?;
    // The server ends with its client, or has never started.
    let _ = server.kill();
    server.wait()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mib_per_s = perftest_average(&text, bytes);
    let mib_per_s =
        mib_per_s.with_context(|| format!("{program} did not say how fast it was: {}", String::from_utf8_lossy(&output.stderr)))?;
    Ok(mib_per_s * f64::from(1 << 20) / 1e9)
}

/// The average in the line of numbers: bytes, count, peak, average, messages.
fn perftest_average(text: &str, bytes: usize) -> Option<f64> {
    let rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let row = rows.into_iter().find(|row| row.len() >= 4 && row[0].parse() == Ok(bytes))?;
    row[3].parse().ok().filter(|average| *average > 0.0)
}

/// The fewest iterations that perftest accepts.
const PERFTEST_COUNT_MIN: usize = 5;
/// The time until the server listens.
const PERFTEST_START: std::time::Duration = std::time::Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_is_in_the_line_of_numbers() {
        let text = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n 2097152    40     99.1   87.25   0.000044\n---";
        assert_eq!((perftest_average(text, 2 << 20), perftest_average(text, 4096)), (Some(87.25), None));
    }
}
