//! The client compared with the truth: `tidemill-bench load` and `tidemill-bench stub` as two processes. The stub records the time of each
//! sent token, so no assertion depends on the machine's load: the delays of both programs' timers are allowed for.

use serde_json::Value;
use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

struct Stub {
    process: Child,
    url: String,
    dir: tempfile::TempDir,
}

fn bench() -> Command {
    Command::new(env!("CARGO_BIN_EXE_tidemill-bench"))
}

impl Stub {
    fn start(flags: &[&str]) -> Stub {
        let dir = tempfile::tempdir().unwrap();
        let mut command = bench();
        command.arg("stub").args(flags).arg("--json").arg(dir.path().join("stub.json"));
        let mut process = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("ready ").expect("the stub says where it is").to_owned();
        Stub { process, url, dir }
    }

    fn load(&self, flags: &[&str]) -> Value {
        let json = self.dir.path().join("load.json");
        let output = bench().args(["load", "--url", &self.url, "--json"]).arg(&json).args(flags).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        result(&json)
    }

    /// Ends the stub, and returns its record.
    fn truth(mut self) -> Value {
        let pid = nix::unistd::Pid::from_raw(self.process.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        while self.process.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the stub does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
        result(&self.dir.path().join("stub.json"))["truth"].clone()
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        // It has usually ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn result(path: &std::path::Path) -> Value {
    let record: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert_eq!(record["schema"], "tidemill-bench/1");
    record["result"].clone()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// The largest relative difference between the two records, beyond `grace_ms`.
fn difference(seen: &Value, truth: &Value, grace_ms: f64) -> f64 {
    let pairs = ["ttft_ms", "e2e_ms"].into_iter().flat_map(|what| ["mean", "p50", "p90", "p99"].map(|p| (&seen[what][p], &truth[what][p])));
    let beyond = |(seen, truth): (&Value, &Value)| ((number(seen) - number(truth)).abs() - grace_ms).max(0.0) / number(truth);
    pairs.map(beyond).fold(0.0, f64::max)
}

#[test]
fn percentiles_are_the_servers_within_a_hundredth() {
    let stub = Stub::start(&["--ttft-ms", "lognormal/150/0.6/2000", "--gap-ms", "5-35"]);
    let seen = stub.load(&["--rate", "50", "--requests", "150", "--output-len", "20", "--input-len", "8", "--seed", "3"]);
    let truth = stub.truth();
    assert_eq!((&seen["completed"], &truth["requests"]), (&150.into(), &150.into()));
    let late = number(&seen["client"]["delay_ms"]["max"]) + number(&truth["delay_ms"]["max"]) + number(&seen["send_lag_ms"]["max"]);
    // The set-up of a connection is the client's share of the first requests' time.
    assert!(difference(&seen, &truth, late + 5.0) <= 0.01, "{seen}\n{truth}");
    // The client never sees a token before it is sent.
    for p in ["p50", "p90", "p99"] {
        assert!(number(&seen["ttft_ms"][p]) >= 0.998 * number(&truth["ttft_ms"][p]), "{seen}\n{truth}");
    }
}

/// Sends requests every 20 ms; the server sends nothing from 1 s to 2.5 s. Requests that were due meanwhile have waited for the rest of the
/// stall.
#[test]
fn a_stall_shows_in_the_ttft_of_all_who_were_due_meanwhile() {
    let flags = ["--ttft-ms", "10", "--gap-ms", "1", "--stall-at-s", "1", "--stall-s", "1.5"];
    let request = ["--output-len", "2", "--input-len", "8"];
    let open = Stub::start(&flags);
    let open = open.load(&[&["--rate", "50", "--arrivals", "constant", "--requests", "200"], &request[..]].concat());
    let (p50, p75, p90) = (number(&open["ttft_ms"]["p50"]), quantile(&open, 0.75), number(&open["ttft_ms"]["p90"]));
    // 75 of 200 requests were due in the stall: the others depend on the machine, but these waited evenly up to 1.5 s.
    assert!(p75 >= 450.0 && p90 >= 1050.0, "{p50} {p75} {p90}");
    // This holds even if the client itself may send only one request at a time.
    let busy = Stub::start(&flags);
    let one = ["--rate", "50", "--arrivals", "constant", "--requests", "200", "--concurrency-max", "1"];
    let busy = busy.load(&[&one, &request[..]].concat());
    assert!(number(&busy["ttft_ms"]["p90"]) >= 1050.0, "{busy}");
    // A closed loop sends one request meanwhile, and reports one slow answer: this is coordinated omission. Its total time counts, as the
    // stall may also begin between its tokens.
    let closed = Stub::start(&flags);
    let closed = closed.load(&[&["--users", "1", "--requests", "200"], &request[..]].concat());
    let slow = closed["distributions"]["e2e_ms"].as_array().unwrap().iter().filter(|point| number(&point[0]) >= 1000.0).count();
    assert_eq!(slow, 1, "{closed}");
}

/// A quantile of the TTFTs, from the plotted distribution.
fn quantile(seen: &Value, share: f64) -> f64 {
    let points = seen["distributions"]["ttft_ms"].as_array().unwrap();
    number(&points.iter().find(|point| number(&point[1]) >= share).unwrap()[0])
}

/// Run with `cargo test --release -p tidemill-bench --test commands truth:: -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement: it wants a machine to itself"]
fn at_500_and_1000_streams_at_a_time() {
    for streams in [500, 1000] {
        let stub = Stub::start(&["--ttft-ms", "lognormal/400/0.6/3000", "--gap-ms", "50-150"]);
        // An answer takes 10.5 s, so this many run at a time after that.
        let (rate, requests) = ((f64::from(streams) / 10.5).to_string(), (3 * streams).to_string());
        let flags = ["--rate", &rate, "--requests", &requests, "--output-len", "101", "--input-len", "32", "--warmup-s", "0"];
        let seen = stub.load(&flags);
        let truth = stub.truth();
        println!(
            "{streams} streams: at most {} at a time, off by {:.2} %, client {:.2} cores, timers' p99 {:.1} ms (server {:.1} ms), {}",
            truth["running_max"],
            100.0 * difference(&seen, &truth, 0.0),
            number(&seen["client"]["cores"]),
            number(&seen["client"]["delay_ms"]["p99"]),
            number(&truth["delay_ms"]["p99"]),
            seen["client"]["bottleneck"],
        );
    }
}
