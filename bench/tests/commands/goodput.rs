//! `tidemill-bench goodput` and `report` as programs: two servers with a known limit, started, compared in turns, and stopped.

use serde_json::Value;
use std::{fs, net::TcpStream, process::Command};

/// A server with one slot that answers a request in 90 ms serves 11 per second; one with four slots 44.
const SCENARIO: &str = r#"
title = "One slot and four"
[[server]]
name = "one"
command = ["tidemill-bench", "stub", "--http", "{addr}", "--slots", "1", "--ttft-ms", "50", "--gap-ms", "10"]
[[server]]
name = "four"
command = ["tidemill-bench", "stub", "--http", "{addr}", "--slots", "4", "--ttft-ms", "50", "--gap-ms", "10"]
cores = [0]
[[server]]
name = "absent"
needs = "ABSENT"
command = ["$ABSENT"]
[flags]
arrivals = "constant"
slo-ttft-ms = 400
slo-tpot-ms = 1000
slo-tbt-ms = 1000
input-len = "8"
output-len = "5"
low = 4
high = 64
steps = 2
repeats = 2
seconds = 3
"#;

#[test]
fn a_server_with_more_slots_takes_more_and_both_are_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("scenario.toml"), SCENARIO).unwrap();
    let bench = || Command::new(env!("CARGO_BIN_EXE_tidemill-bench"));
    let output = bench().arg("goodput").arg(path("scenario.toml")).arg("--json").arg(path("out.json")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let record: Value = serde_json::from_slice(&fs::read(path("out.json")).unwrap()).unwrap();
    let comparison = &record["result"]["comparisons"][0];
    let servers = comparison["servers"].as_array().unwrap();
    assert_eq!(servers.iter().map(|server| server["name"].as_str().unwrap()).collect::<Vec<_>>(), ["one", "four"]);
    let mean = |place: usize| servers[place]["goodput"]["mean"].as_f64().unwrap();
    // At 16 per second, a queue with one slot grows by five a second, regardless of the machine; four slots have room.
    assert!(mean(0) < 16.0 && mean(1) >= mean(0), "{comparison:#}");
    for server in servers {
        let points = server["points"].as_array().unwrap();
        assert_eq!((points.len(), server["found"].as_array().unwrap().len()), (4, 2));
        assert!(
            points.iter().all(|point| point["ratio_low"].as_f64() <= point["ratio"].as_f64() && point["ratio_tbt"].is_number()),
            "{points:?}"
        );
    }

    let page = bench().arg("report").arg(path("out.json")).arg("--html").arg(path("page.html")).output().unwrap();
    assert!(page.status.success(), "{}", String::from_utf8_lossy(&page.stderr));
    assert!(fs::read_to_string(path("page.html")).unwrap().contains("One slot and four"));
    let same = bench().args(["report", "--compare"]).args([path("out.json"), path("out.json")]).output().unwrap();
    assert!(String::from_utf8_lossy(&same.stdout).contains("0 of 2 figures changed"), "{same:?}");
}

#[test]
fn a_server_that_never_comes_is_named_and_what_was_started_is_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let scenario = dir.path().join("scenario.toml");
    // The port is fixed here, so that the test can check whether any process still listens there.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let text = format!(
        "title = \"x\"\n[[server]]\nname = \"good\"\ncommand = [\"tidemill-bench\", \"stub\", \"--http\", \"127.0.0.1:{port}\"]\n\
         ready_s = 2\n[flags]\nslo-ttft-ms = 1\nslo-tpot-ms = 1\n"
    );
    fs::write(&scenario, text).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_tidemill-bench")).arg("goodput").arg(&scenario).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("server `good` is not ready after 2 s"), "{said}");
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "its process has ended");
}
