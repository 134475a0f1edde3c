//! `tidemill doctor`: each check on given facts, and the program on this machine and against a coordinator that does not exist.

use serde_json::Value;
use std::{
    fs,
    net::TcpListener,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};
use tidemill_deploy::doctor::{
    checks::{self, Finding, Verdict},
    facts::{self, Bound, Certificate, Disk, Facts, Gpu, Need, Port},
    remote::{self, Cluster},
};
use tidemill_net::identity::issue;

/// A machine without problems.
fn well() -> Facts {
    Facts {
        rmem_max: Some(4 << 20),
        wmem_max: Some(8 << 20),
        open_files: Bound::At(1 << 20),
        locked_memory: Bound::Unlimited,
        clock_synchronized: Some(true),
        certificates: vec![Certificate { path: "/etc/tidemill/pki/node.pem".into(), days_left: Ok(300) }],
        ports: vec![Port { key: "http", protocol: "TCP", address: "10.77.0.1:8000".parse().unwrap(), taken: None }],
        transparent_huge_pages: Some("madvise".into()),
        numa_nodes: 2,
        engines: 1,
        engines_keep_cores: true,
        memory_total: 64 << 30,
        memory_available: 60 << 30,
        memory_wanted: vec![Need { key: "kv_memory", bytes: 32 << 30 }],
        disks: vec![Disk { path: "/var/lib/tidemill".into(), free: 100 << 30, wanted: 0 }],
        version: "1.2.3".into(),
        programs: vec![("tidemill-decode".into(), "1.2.3".into())],
        gpu: Gpu::Driver("580.82.07".into()),
        wants_gpu: true,
    }
}

/// The verdict and text of a check, after a change of the machine.
fn after(change: impl FnOnce(&mut Facts), check: fn(&Facts) -> Vec<Finding>) -> (Verdict, String) {
    let mut facts = well();
    change(&mut facts);
    let found = check(&facts);
    let worst = found.iter().rev().max_by_key(|finding| finding.verdict as u8).expect("the check finds something");
    assert_eq!(worst.verdict == Verdict::Good, worst.todo.is_empty(), "what is not good says what to do: {worst}");
    (worst.verdict, worst.says.clone())
}

#[test]
fn a_machine_on_which_all_is_well_has_good_findings_only() {
    let found = checks::all(&well());
    assert!(found.iter().all(|finding| finding.verdict == Verdict::Good), "{found:?}");
    let mut names: Vec<_> = found.iter().map(|finding| finding.check).collect();
    names.dedup();
    assert_eq!(names.len(), 12, "each check says something: {names:?}");
}

#[test]
fn every_check_sees_what_it_is_for() {
    use Verdict::{Failure, Good, Warning};
    type Change = fn(&mut Facts);
    type Check = fn(&Facts) -> Vec<Finding>;
    let cases: &[(Change, Check, Verdict, &str)] = &[
        (|m| m.rmem_max = Some(212_992), checks::socket_buffers, Warning, "net.core.rmem_max = 212992"),
        (|m| m.wmem_max = None, checks::socket_buffers, Warning, "net.core.wmem_max cannot be read"),
        (|m| m.open_files = Bound::At(1024), checks::open_files, Warning, "up to 1024"),
        (|m| m.open_files = Bound::Unlimited, checks::open_files, Good, "no limit"),
        (|m| m.locked_memory = Bound::At(8 << 20), checks::locked_memory, Warning, "8388608"),
        (|m| (m.locked_memory, m.gpu) = (Bound::At(0), Gpu::None), checks::locked_memory, Good, "no GPU"),
        (|m| m.clock_synchronized = Some(false), checks::clock, Warning, "not synchronized"),
        (|m| m.clock_synchronized = None, checks::clock, Warning, "does not say"),
        (|m| m.certificates[0].days_left = Ok(29), checks::certificates, Warning, "ends in 29 days"),
        (|m| m.certificates[0].days_left = Ok(-3), checks::certificates, Failure, "ended 3 days ago"),
        (|m| m.certificates[0].days_left = Err("no such file".into()), checks::certificates, Failure, "no such file"),
        (|m| m.ports[0].taken = Some("Address already in use".into()), checks::ports, Warning, "TCP 10.77.0.1:8000 cannot be had"),
        (|m| m.transparent_huge_pages = Some("never".into()), checks::huge_pages, Warning, "never"),
        (|m| m.transparent_huge_pages = None, checks::huge_pages, Warning, "no transparent ones"),
        (|m| m.engines_keep_cores = false, checks::numa, Warning, "2 nodes"),
        (|m| (m.numa_nodes, m.engines_keep_cores) = (1, false), checks::numa, Good, "one node"),
        (|m| m.memory_wanted[0].bytes = 65 << 30, checks::memory, Failure, "65.0 GiB wanted (kv_memory 65.0 GiB)"),
        (|m| m.memory_available = 1 << 30, checks::memory, Warning, "1.0 GiB available"),
        (|m| m.disks[0].wanted = 1 << 40, checks::disk, Warning, "1.0 TiB wanted"),
        (|m| m.disks[0].free = 1 << 20, checks::disk, Failure, "1.0 MiB free"),
        (|m| m.programs[0].1 = "1.2.2".into(), checks::versions, Failure, "tidemill-decode is 1.2.2, and this is 1.2.3"),
        (|m| m.gpu = Gpu::None, checks::gpu, Failure, "no NVIDIA GPU"),
        (|m| m.gpu = Gpu::NoDriver, checks::gpu, Warning, "without its driver"),
        (|m| m.gpu = Gpu::Driver("535.1".into()), checks::gpu, Warning, "535.1 is older"),
    ];
    for (change, check, verdict, says) in cases {
        let found = after(change, *check);
        assert!(found.0 == *verdict && found.1.contains(says), "expected {verdict:?} `{says}`, found {found:?}");
    }
}

#[test]
fn limits_and_drivers_are_read_as_the_kernel_writes_them() {
    let limits = "Limit                     Soft Limit           Hard Limit           Units     \n\
                  Max open files            1024                 1048576              files     \n\
                  Max locked memory         unlimited            unlimited            bytes     \n";
    assert_eq!(facts::bound(limits, "Max open files"), Bound::At(1024));
    assert_eq!(facts::bound(limits, "Max locked memory"), Bound::Unlimited);
    assert_eq!(facts::bound("", "Max open files"), Bound::Unknown);
    let driver = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC version: 12.2.0\n";
    assert_eq!(facts::driver(driver).as_deref(), Some("580.82.07"));
    assert_eq!(facts::driver(""), None);
}

#[test]
fn members_that_are_unwell_are_named() {
    let of = |text: &str| remote::members(&serde_json::from_str::<Cluster>(text).unwrap());
    let found = of(r#"{"members": [
        {"name": "d1", "role": "decode", "draining": false, "unhealthy": true, "seconds_since_heartbeat": 0.2},
        {"name": "p1", "role": "prefill", "draining": true, "seconds_since_heartbeat": 4.4}]}"#);
    let says: Vec<_> = found.iter().map(|finding| (finding.verdict, finding.says.as_str())).collect();
    assert_eq!(
        says,
        [
            (Verdict::Failure, "decode d1 computes wrongly"),
            (Verdict::Warning, "prefill p1 drains"),
            (Verdict::Warning, "prefill p1 has been silent for 4 s"),
            (Verdict::Failure, "no decode worker: no request can be answered"),
        ]
    );
    let found = of(r#"{"members": [{"name": "d1", "role": "decode", "draining": false, "seconds_since_heartbeat": 0.2}]}"#);
    assert_eq!((found.len(), found[0].says.as_str()), (1, "1 decode, 0 prefill, 0 kvpool"));
}

#[test]
fn the_program_reads_config_files_and_its_status_says_whether_something_failed() {
    let dir = tempfile::tempdir().unwrap();
    let pki = dir.path().join("pki");
    issue::create(&pki).unwrap();
    let held = TcpListener::bind("127.0.0.1:0").unwrap();
    let (http, data) = (held.local_addr().unwrap(), dir.path().join("data"));
    let coordinator = config(
        dir.path(),
        "coordinator.toml",
        &format!("http = \"{http}\"\nlisten = \"127.0.0.1:0\"\npki = {pki:?}\ndata = {data:?}\nmodel = \"/srv/model\"\n"),
    );
    let output = doctor(&["--json", "--config", &coordinator]);
    let outcome: Value = serde_json::from_slice(&output.stdout).unwrap();
    let says = |check: &str| -> Vec<String> {
        let of_check = outcome["findings"].as_array().unwrap().iter().filter(|finding| finding["check"] == check);
        of_check.map(|finding| format!("{}: {}", finding["verdict"].as_str().unwrap(), finding["says"].as_str().unwrap())).collect()
    };
    assert_eq!(output.status.success(), !outcome["failed"].as_bool().unwrap(), "{outcome:#}");
    assert!(says("ports").iter().any(|says| says.starts_with(&format!("warning: TCP {http} cannot be had"))), "{outcome:#}");
    assert!(says("ports").iter().any(|says| says == "good: UDP 127.0.0.1:0 is free (`listen`)"), "{outcome:#}");
    assert!(says("certificates").iter().any(|says| says.starts_with("good: ") && says.contains("node.pem")), "{outcome:#}");
    assert_eq!(says("disk").len(), 1, "{outcome:#}");

    let huge = config(dir.path(), "kvpool.toml", "[worker]\npki = \"/nowhere\"\n[kvpool]\ndram = \"1000000GiB\"\n");
    let output = doctor(&["--config", &huge]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("FAIL  memory: ") && text.contains("FAIL  certificates: ") && text.contains("\n      → "), "{text}");

    let output = doctor(&["--url", "http://127.0.0.1:1"]);
    assert!(String::from_utf8(output.stdout).unwrap().contains("FAIL  cluster: http://127.0.0.1:1 does not answer"));
    assert_eq!(output.status.code(), Some(1));

    let broken = config(dir.path(), "broken.toml", "[worker]\nbind = \"everywhere\"\n");
    let output = doctor(&["--config", &broken]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("broken.toml") && error.contains("`bind` = everywhere is no address with a port"), "{error}");
}

fn config(dir: &Path, name: &str, text: &str) -> String {
    let path: PathBuf = dir.join(name);
    fs::write(&path, text).unwrap();
    path.into_os_string().into_string().unwrap()
}

#[test]
fn a_reader_that_has_seen_enough_ends_the_program_without_a_message() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidemill"));
    let mut program = command.arg("doctor").stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(program.stdout.take());
    let output = program.wait_with_output().unwrap();
    assert_eq!((output.status.signal(), String::from_utf8_lossy(&output.stderr)), (Some(nix::libc::SIGPIPE), "".into()));
}

fn doctor(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidemill")).arg("doctor").args(arguments).output().unwrap()
}
