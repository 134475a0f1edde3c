//! Conversations with secret words on real processes: memory for three, a disk for all, and a pool node that is killed and restarted in
//! between. Starts the programs that lie beside the bench.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

/// `tidemill up`. Its processes end with it.
struct Up {
    child: Child,
    url: String,
    log: PathBuf,
}

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/llama3");

impl Up {
    fn start(dir: &Path) -> Self {
        let program = Path::new(env!("CARGO_BIN_EXE_tidemill-bench")).with_file_name("tidemill");
        let log = dir.join("log");
        let mut child = Command::new(program)
            .args(["up", "--http", "127.0.0.1:0", "--device", "cpu", "--threads", "1", "--log", "error", "--model", MODEL])
            .args(["--kv-memory", "1MiB", "--pool-memory", "768KiB", "--pool-nvme", "64MiB", "--local-tail-tokens", "0"])
            .arg("--data")
            .arg(dir.join("data"))
            .stdout(Stdio::piped())
            .stderr(File::create(&log).expect("a file of our own"))
            .spawn()
            .expect("the whole workspace is built");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("text");
        let url = line.trim().strip_prefix("ready ").unwrap_or_else(|| panic!("`tidemill up` said `{line}`")).to_owned();
        Self { child, url, log }
    }

    /// A command that kills the pool node, and returns when another one is there.
    fn kill_pool(&self) -> String {
        let node = format!("pgrep -P {} tidemill-kvpool", self.child.id());
        format!("old=$({node}) && kill -KILL $old && while [ \"$({node} || echo $old)\" = \"$old\" ]; do sleep 0.1; done")
    }

    /// A command that has every process ended by SIGTERM in its turn, and returns when all are there again.
    fn restart_all(&self) -> String {
        let (pid, log) = (self.child.id(), self.log.display());
        format!("kill -HUP {pid} && until grep -q 'every process was restarted' '{log}'; do sleep 0.1; done")
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

#[test]
fn no_conversation_is_answered_from_another_whatever_happens_to_the_pool() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let up = Up::start(dir.path());
    let json = dir.path().join("contamination.json");
    let output = Command::new(env!("CARGO_BIN_EXE_tidemill-bench"))
        .args(["contamination", "--url", &up.url, "--conversations", "12", "--tokens", "600", "--short", "24", "--seed", "5"])
        .args(["--output-len", "12", "--timeout-s", "120", "--restart", &up.kill_pool(), "--restart", &up.restart_all(), "--json"])
        .arg(&json)
        .output()
        .expect("the bench starts");
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    let record: serde_json::Value = serde_json::from_slice(&std::fs::read(json).expect("written")).expect("JSON");
    let passes = record["result"]["passes"].as_array().expect("passes");
    assert_eq!(passes.len(), 4, "{said}");
    assert!(passes.iter().all(|pass| pass["requests"] == 36), "{said}");
    assert_eq!(record["result"]["doubts"], serde_json::json!([]), "{said}");
}
