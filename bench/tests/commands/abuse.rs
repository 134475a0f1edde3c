//! Every attack for a second, on real processes. Starts the programs that lie beside the bench.

use std::process::Command;

#[test]
fn no_attack_ends_a_process_takes_what_is_anothers_or_gets_what_it_should_not() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let json = dir.path().join("abuse.json");
    // With a quota, a flood would be a trickle: the test is about the code behind the quota.
    let output = Command::new(env!("CARGO_BIN_EXE_tidemill-bench"))
        .args(["abuse", "--short", "--unmetered", "--json"])
        .arg(&json)
        .output()
        .expect("the bench starts");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    let result: serde_json::Value = serde_json::from_slice(&std::fs::read(json).expect("written")).expect("JSON");
    assert!(result["result"]["attacks"].as_array().is_some_and(|attacks| attacks.len() >= 30), "{said}");
}
