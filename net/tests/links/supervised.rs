//! A supervised process reports that its event loop is running, and ends with its supervisor even if the loop has stalled.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use tidemill_net::supervised::{BEAT, orphaned};

/// The last line of the process before its loop stalls.
const STILL: &str = "still";

#[test]
#[ignore = "the next test runs it, in a process of its own"]
fn a_loop_that_stands_still() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        tokio::spawn(async {
            tokio::time::sleep(Duration::from_millis(1500)).await;
            println!("{STILL}");
            thread::sleep(Duration::from_secs(3600));
        });
        orphaned().await;
    });
}

#[test]
fn a_process_ends_with_its_supervisor_although_its_loop_stands_still() {
    let me = std::env::current_exe().unwrap();
    let mut command = Command::new(me);
    command.args(["--ignored", "--exact", "--nocapture", "supervised::a_loop_that_stands_still"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(said.any(|line| line.is_ok_and(|line| line.ends_with(BEAT))), "it turns at first");
    assert!(said.any(|line| line.is_ok_and(|line| line == STILL)));
    drop(child.stdin.take());
    let patience = Instant::now() + Duration::from_secs(60);
    let ended = loop {
        match child.try_wait().unwrap() {
            Some(status) => break Some(status),
            None if Instant::now() > patience => break None,
            None => thread::sleep(Duration::from_millis(100)),
        }
    };
    if ended.is_none() {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(ended.is_some_and(|status| !status.success()), "{ended:?}");
}
