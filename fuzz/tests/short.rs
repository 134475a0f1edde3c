//! The short form of all targets: a few hundred fixed cases of each, none of which finds anything.

use std::process::Command;

#[test]
fn fixed_cases_of_all_targets_find_nothing() {
    let output = Command::new(env!("CARGO_BIN_EXE_tidemill-fuzz")).arg("--short").output().unwrap();
    let (said, found) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{found}\n{said}");
    for line in said.lines().filter(|line| line.contains(" findings, ")) {
        let cases = line.split_whitespace().nth(1).and_then(|cases| cases.parse::<u64>().ok());
        assert!(cases.is_some_and(|cases| cases >= 100), "{line}");
    }
}
