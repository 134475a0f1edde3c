//! Half a minute of faults and a rolling restart, on real processes. Starts the programs that lie beside the bench.

use std::process::Command;

#[test]
fn no_answer_shows_the_faults_and_nothing_is_left_behind() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let json = dir.path().join("chaos.json");
    let output = Command::new(env!("CARGO_BIN_EXE_tidemill-bench"))
        .args(["chaos", "--minutes", "0.5", "--every-s", "2", "--seed", "7", "--json"])
        .arg(&json)
        .output()
        .expect("the bench starts");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    let result: serde_json::Value = serde_json::from_slice(&std::fs::read(json).expect("written")).expect("JSON");
    assert!(result["result"]["faults"].as_array().is_some_and(|kinds| kinds.len() > 1), "some faults, and a restart: {said}");
}
