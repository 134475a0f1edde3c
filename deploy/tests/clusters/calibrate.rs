//! The simulator compared with a live cluster: `tidemill-bench sim --calibrate`.

use crate::support::Cluster;
use serde_json::Value;
use std::{path::Path, process::Output};

const SCENARIO: &str = r#"
    title = "echo"
    model = "smollm-135m"
    [cluster]
    instances = 2
    prefill = 1
    instances_per_host = 2
    device_blocks = 1024
    pool_gib_per_host = 1
    [workload]
    arrivals = "poisson"
    requests = 12
    streams = [{ rate = 20.0, input = [16, 96], output = [4, 8] }]
    [[workload.classes]]
    name = "standard"
    ttft_ms = 2000
    tpot_ms = 100
"#;

async fn calibrate(cluster: &Cluster, dir: &Path, sets: &[&str]) -> Output {
    let scenario = dir.join("echo.toml");
    std::fs::write(&scenario, SCENARIO).unwrap();
    let bench = Path::new(env!("CARGO_BIN_EXE_tidemill")).with_file_name("tidemill-bench");
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let mut command = tokio::process::Command::new(bench);
    command.arg("sim").arg(scenario).args(["--calibrate", &cluster.url, "--json"]).arg(dir.join("out.json")).args(sets);
    command.output().await.expect("the bench is built beside the binary")
}

#[tokio::test(flavor = "multi_thread")]
async fn live_and_simulated_requests_stand_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(&["--engine", "echo", "--step-ms", "3", "--prompt-token-ms", "0.1"]);
    let done = calibrate(&cluster, dir.path(), &[]).await;
    assert!(done.status.success(), "{done:?}");
    let report: Value = serde_json::from_slice(&std::fs::read(dir.path().join("out.json")).unwrap()).unwrap();
    let row = &report["result"]["rows"][0];
    assert_eq!((row["class"].as_str(), row["requests"].as_u64()), (Some("standard"), Some(12)), "{report}");
    assert!(row["decode"]["step_ms"].as_f64() > Some(0.0), "step costs come from the live cluster: {report}");
    for what in ["ttft_ms", "tpot_ms"] {
        assert!(["live", "simulated"].iter().all(|side| row[what][side].as_f64() > Some(0.0)), "{report}");
    }
    assert!(String::from_utf8_lossy(&done.stdout).contains("TTFT ms: live, simulated"), "{done:?}");

    let other = calibrate(&cluster, dir.path(), &["cluster.instances=3", "cluster.prefill=2"]).await;
    let said = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(!other.status.success() && said.contains("1 prefill and 1 decode workers, the scenario 2 and 1"), "{said}");
    cluster.stop();
}
