//! Crashes, clients that leave, and a clean end, as operators and clients see them.

use crate::support::{Answer, Case, Cluster, complete, crash, pause, terminate};
use serde_json::{Value, json};
use std::time::Duration;
use tidemill_net::cores::Cores;

/// A case that runs long enough to be hit by a crash: `prompt` tokens, different for each `salt`, and an answer of `answer` tokens.
fn long_case(salt: u32, prompt: u32, answer: u32) -> Case {
    Case { prompt: (0..prompt).map(|i| 3 + (salt + i * 7 + i / 5) % 500).collect(), seed: Some(11), max_tokens: answer }
}

fn running(cluster: &Value) -> u64 {
    cluster["sequences_running"].as_u64().expect("a number")
}

/// The process id of a busy member with this role.
fn busy(cluster: &Value, role: &str) -> Option<u32> {
    let members = cluster["members"].as_array().expect("members");
    let busy = members.iter().find(|m| m["role"] == role && m["assigned"].as_u64() > Some(0))?;
    busy["pid"].as_u64().map(|pid| pid as u32)
}

/// Crashes the process of `role` while it serves `case`; the answer must not change.
async fn survives(cluster: &Cluster, role: &str, case: &Case, reference: &Answer) -> Answer {
    let crashing = async {
        loop {
            let now = cluster.cluster().await;
            // A pool node does not belong to a particular request: take the first.
            let first = cluster.pids(role).await[0];
            if let Some(pid) = if role == "kvpool" { (running(&now) > 0).then_some(first) } else { busy(&now, role) } {
                crash(pid);
                return pid;
            }
        }
    };
    let crashing = tokio::time::timeout(Duration::from_secs(30), crashing);
    let (answer, pid) = tokio::join!(complete(cluster, case), crashing);
    let pid = pid.unwrap_or_else(|_| panic!("no {role} was seen at work"));
    assert_eq!(answer.tokens, reference.tokens, "{role} crashed");
    let gone = |c: &Value| c["members"].as_array().is_some_and(|members| members.iter().all(|m| m["pid"] != pid));
    cluster.until("the crash being noticed", gone).await;
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_any_worker_does_not_show_in_the_answer() {
    // Each crash affects a request without cached blocks. A long prompt keeps a prefill worker busy for long enough.
    let cases = [
        ("decode", long_case(0, 400, 3000)),
        ("decode", long_case(1, 400, 3000)),
        ("prefill", long_case(2, 3900, 100)),
        ("prefill", long_case(3, 3900, 100)),
        ("kvpool", long_case(4, 400, 3000)),
        ("kvpool", long_case(5, 400, 3000)),
    ];
    all_survive(&[], &cases).await;
}

/// Crashes with the echo engine, whose steps take a while.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_does_not_show_in_an_echo_either() {
    let cases = [("decode", long_case(0, 400, 500)), ("prefill", long_case(2, 3900, 50)), ("kvpool", long_case(4, 400, 500))];
    all_survive(&["--engine", "echo", "--step-ms", "2", "--prompt-token-ms", "0.2"], &cases).await;
}

async fn all_survive(flags: &[&str], cases: &[(&str, Case)]) {
    let mut references = Vec::new();
    let alone = Cluster::start(&[&["--prefill", "0", "--kvpool", "0"], flags].concat());
    for (_, case) in cases {
        references.push(complete(&alone, case).await);
    }
    alone.stop();

    let cluster = Cluster::start(&[&["--prefill", "2", "--decode", "3", "--kvpool", "2", "--local-tail-tokens", "0"], flags].concat());
    for ((role, case), reference) in cases.iter().zip(&references) {
        let answer = survives(&cluster, role, case, reference).await;
        let rescued = answer.usage["tidemill"]["rescues"].as_u64() > Some(0);
        assert!(*role != "decode" || rescued, "the worker that served it crashed: {}", answer.usage);
    }
    let last = complete(&cluster, &cases[0].1).await;
    assert_eq!(last.tokens, references[0].tokens, "one decode worker is left, and serves");
    // Some processes crashed, so `stop` does not apply.
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_everything() {
    let cluster = Cluster::start(&[]);
    let mut body = long_case(0, 400, 3000).body();
    body.as_object_mut().expect("an object").extend([("stream".to_owned(), json!(true))]);
    let client = reqwest::Client::new();
    let mut response = client.post(format!("{}/completions", cluster.url)).json(&body).send().await.expect("answers");
    assert!(response.chunk().await.expect("a chunk").is_some());
    cluster.until("a running sequence", |c| running(c) == 1).await;
    drop(response);
    cluster.until("nothing running", |c| running(c) == 0 && c["requests"] == 0).await;
    let device_free = |c: &Value| {
        let members = c["members"].as_array().expect("members");
        let idle = |m: &Value| ["hbm", "dram", "nvme"].iter().all(|tier| m["report"]["blocks"][tier]["used"] == 0);
        members.iter().all(|m| idle(m) && m["report"]["running"] == 0)
    };
    cluster.until("all blocks given back", device_free).await;
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_told_to_end_hands_over_and_ends() {
    let case = long_case(0, 400, 3000);
    let alone = Cluster::start(&["--prefill", "0", "--kvpool", "0"]);
    let reference = complete(&alone, &case).await;
    alone.stop();
    let cluster = Cluster::start(&["--decode", "2"]);
    let ending = async {
        let mut pid = None;
        while pid.is_none() {
            pid = busy(&cluster.cluster().await, "decode");
        }
        let pid = pid.expect("found");
        terminate(pid);
        let gone = |c: &Value| c["members"].as_array().is_some_and(|members| members.iter().all(|m| m["pid"] != pid));
        cluster.until("the worker's leave", gone).await;
        pid
    };
    let (answer, pid) = tokio::join!(complete(&cluster, &case), ending);
    assert_eq!(answer.tokens, reference.tokens);
    // `tidemill up` reaps it; a process that hangs would stay.
    for _ in 0..100 {
        if !std::path::Path::new(&format!("/proc/{pid}")).exists() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "process {pid} hangs");
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_behind() {
    let shm = || std::fs::read_dir("/dev/shm").map(|d| d.count()).unwrap_or(0);
    let before = shm();
    let cluster = Cluster::start(&[]);
    let mut pids = Vec::new();
    for role in ["prefill", "decode", "kvpool"] {
        pids.extend(cluster.pids(role).await);
    }
    complete(&cluster, &Case { prompt: vec![5; 100], seed: None, max_tokens: 4 }).await;
    assert_eq!(pids.len(), 3);
    cluster.stop();
    for pid in pids {
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists(), "process {pid} is still there");
    }
    assert_eq!(shm(), before, "shared memory is left");
}

/// The process id of the child that `tidemill up` started from this program.
fn child_of(up: u32, program: &str) -> Option<u32> {
    let of = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let parent: u32 = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
        let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
        (parent == up && command.split('\0').next()?.ends_with(program)).then_some(pid)
    };
    std::fs::read_dir("/proc").expect("Linux").filter_map(|entry| of(entry.ok()?.file_name().to_str()?.parse().ok()?)).next()
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_crashes_is_started_again() {
    let cluster = Cluster::start(&["--restarts", "3"]);
    let case = long_case(9, 200, 40);
    let reference = complete(&cluster, &case).await;
    for role in ["decode", "prefill", "kvpool"] {
        let pid = cluster.pids(role).await[0];
        crash(pid);
        let again = |c: &Value| {
            let members = c["members"].as_array().expect("members");
            members.iter().any(|m| m["role"] == role && m["pid"] != pid) && members.iter().all(|m| m["pid"] != pid)
        };
        cluster.until("another process in its place", again).await;
        assert_eq!(complete(&cluster, &case).await.tokens, reference.tokens, "after the crash of {role}");
    }

    // Clients and workers find a restarted coordinator at its old address.
    let pid = child_of(cluster.up_pid(), "tidemill-coordinator").expect("a coordinator");
    crash(pid);
    let back = async {
        let again = || child_of(cluster.up_pid(), "tidemill-coordinator").is_some_and(|other| other != pid);
        while !again() || !reqwest::get(cluster.url.replace("/v1", "/ready")).await.is_ok_and(|answer| answer.status().is_success()) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        cluster.until("all workers", |c| c["members"].as_array().is_some_and(|members| members.len() == 3)).await;
    };
    tokio::time::timeout(Duration::from_secs(60), back).await.expect("the coordinator is back");
    assert_eq!(complete(&cluster, &case).await.tokens, reference.tokens, "after the crash of the coordinator");
    cluster.stop();
}

#[test]
fn a_model_that_cannot_be_served_is_named() {
    let dir = tempfile::tempdir().expect("a directory");
    tidemill_deploy::demo_model::unpack(dir.path()).expect("written");
    let config = dir.path().join("config.json");
    let text = std::fs::read_to_string(&config).expect("text");
    std::fs::write(&config, text.replace("LlamaForCausalLM", "MambaForCausalLM")).expect("written");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_tidemill"))
        .args(["up", "--http", "127.0.0.1:0", "--device", "cpu", "--model"])
        .arg(dir.path())
        .output()
        .expect("tidemill starts");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && output.stdout.is_empty(), "{stderr}");
    assert!(stderr.contains("MambaForCausalLM"), "{stderr}");
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn with_cores_split_each_worker_stays_on_its_own() {
    let all = Cores::of_process().expect("this process has cores");
    let Some(parts) = all.split(2).filter(|parts| parts.len() == 2) else { return println!("one core cannot be split") };
    let cluster = Cluster::start(&["--cores", "split"]);
    for (role, expected) in ["prefill", "decode"].into_iter().zip(&parts) {
        let each = expected.split(expected.len()).expect("as many parts as cores");
        for pid in cluster.pids(role).await {
            for thread in std::fs::read_dir(format!("/proc/{pid}/task")).expect("a running process") {
                let status = std::fs::read_to_string(thread.expect("a thread").path().join("status")).expect("a running thread");
                let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).expect("Linux tells");
                let list = list.trim().parse::<Cores>().expect("a list");
                // Compute threads have one core each.
                assert!(list == *expected || each.contains(&list), "a thread of {role} is on {list} instead of {expected}");
            }
        }
    }
    cluster.stop();

    let workers = (all.len() + 1).to_string();
    let up = std::process::Command::new(env!("CARGO_BIN_EXE_tidemill"))
        .args(["up", "--cores", "split", "--prefill", "0", "--decode", &workers])
        .output();
    let up = up.expect("tidemill starts");
    let error = String::from_utf8_lossy(&up.stderr);
    assert!(!up.status.success() && error.contains("--cores split needs a core for each"), "{error}");
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_whose_loop_stands_still_is_killed_and_started_again() {
    let cluster = Cluster::start(&["--restarts", "3"]);
    let pid = child_of(cluster.up_pid(), "tidemill-coordinator").expect("a coordinator");
    // A heartbeat is sent for each second in which the event loop turns, and twenty delays are measured.
    let turns = async || cluster.metric("tidemill_event_loop_delay_seconds_count", &["front_door".to_owned()]).await;
    let turned = async {
        while turns().await < 60.0 {
            tokio::time::sleep(Duration::from_millis(50)).await
        }
    };
    tokio::time::timeout(Duration::from_secs(60), turned).await.expect("the event loop turns");
    pause(pid);
    let back = async {
        let again = || child_of(cluster.up_pid(), "tidemill-coordinator").is_some_and(|other| other != pid);
        while !again() || !reqwest::get(cluster.url.replace("/v1", "/ready")).await.is_ok_and(|answer| answer.status().is_success()) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), back).await.expect("another coordinator is in its place");
    complete(&cluster, &Case { prompt: vec![5; 100], seed: None, max_tokens: 4 }).await;
    cluster.stop();
}
