//! A real cluster for a test: `tidemill up` as a user starts it, accessed over HTTP.

#![allow(dead_code, unreachable_pub, reason = "each test file includes this module and uses its part")]

use serde_json::{Value, json};
use std::{
    collections::HashMap,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

pub struct Cluster {
    child: Option<Child>,
    pub url: String,
    http: reqwest::Client,
}

/// A tiny checkpoint with random weights: any wrong bit of KV soon changes a token.
pub const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/llama3");
pub const MODEL_NAME: &str = "tiny";

impl Cluster {
    /// Starts a cluster and waits for its ready line.
    pub fn start(flags: &[&str]) -> Self {
        Self::start_with(&[(MODEL_NAME, MODEL)], flags)
    }

    /// Starts a cluster of other models, given as names and directories.
    pub fn start_with(models: &[(&str, &str)], flags: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_tidemill"))
            // Exactness is promised on the CPU. Tests that crash a process expect it to stay gone.
            .args(["up", "--http", "127.0.0.1:0", "--log", "warn", "--device", "cpu", "--restarts", "0"])
            // Tests wait for reports.
            .args(["--heartbeat-ms", "100"])
            .args(models.iter().flat_map(|(name, dir)| ["--model", dir, "--served-model-name", name]))
            .args(flags)
            .stdout(Stdio::piped())
            .spawn()
            .expect("tidemill starts");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("stdout is text");
        let url = line.trim().strip_prefix("ready ").unwrap_or_else(|| panic!("`tidemill up {flags:?}` printed `{line}`")).to_owned();
        let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(120)).build().expect("a client");
        Self { child: Some(child), url, http }
    }

    /// Ends the cluster as an operator does, and checks that it ended without errors.
    pub fn stop(mut self) {
        let mut child = self.child.take().expect("running");
        let pid = nix::unistd::Pid::from_raw(child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("our own child");
        let status = child.wait().expect("our own child");
        assert!(status.success(), "tidemill up ended with {status}");
    }

    /// The `tidemill up` process.
    pub fn up_pid(&self) -> u32 {
        self.child.as_ref().expect("running").id()
    }

    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.post_for_text(path, body).await;
        (status, serde_json::from_str(&text).expect("a JSON body"))
    }

    /// The same, of an answer that is no JSON, such as a whole stream of events.
    pub async fn post_for_text(&self, path: &str, body: &Value) -> (u16, String) {
        let response = self.http.post(format!("{}{path}", self.url)).json(body).send().await.expect("the front door answers");
        let status = response.status().as_u16();
        (status, response.text().await.expect("a whole body"))
    }

    /// Sends GET to a path beside `/v1`, and returns the body.
    pub async fn get(&self, path: &str) -> String {
        let url = self.url.replace("/v1", path);
        self.http.get(url).send().await.expect("the front door answers").text().await.expect("text")
    }

    /// Process ids of the members with this role.
    pub async fn pids(&self, role: &str) -> Vec<u32> {
        let members = self.cluster().await["members"].as_array().expect("members").clone();
        members.iter().filter(|m| m["role"] == role).map(|m| m["pid"].as_u64().expect("a pid") as u32).collect()
    }

    /// Waits until `/cluster` satisfies `wanted`, or fails with what it shows.
    pub async fn until(&self, what: &str, wanted: impl Fn(&Value) -> bool) {
        let began = Instant::now();
        while began.elapsed() < UNTIL_MAX {
            if wanted(&self.cluster().await) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
        panic!("{what} did not come about: {:#}", self.cluster().await);
    }

    /// Process id of the member with this name.
    pub async fn pid(&self, name: &str) -> u32 {
        member(&self.cluster().await, name)["pid"].as_u64().expect("a pid") as u32
    }

    /// Waits until a process is no longer a member.
    pub async fn gone(&self, pid: u32) {
        self.until("the process being gone", |c| c["members"].as_array().expect("members").iter().all(|m| m["pid"] != pid)).await;
    }

    /// Waits until no worker holds, awaits or writes a block in any tier.
    pub async fn at_rest(&self) {
        let unused = |m: &Value| ["hbm", "dram", "nvme"].iter().all(|tier| m["report"]["blocks"][tier]["used"] == 0);
        let at_rest = |c: &Value| c["requests"] == 0 && c["members"].as_array().expect("members").iter().all(unused);
        self.until("all blocks given back", at_rest).await;
    }

    pub async fn cluster(&self) -> Value {
        serde_json::from_str(&self.get("/cluster").await).expect("JSON")
    }

    /// The sum of a metric over the lines that contain all of `labels`.
    pub async fn metric(&self, name: &str, labels: &[String]) -> f64 {
        let text = self.get("/metrics").await;
        let lines = text.lines().filter(|l| l.starts_with(name) && labels.iter().all(|label| l.contains(label.as_str())));
        lines.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Waits until each member has reported twice more: the second report was made after this call.
    pub async fn reported(&self) {
        let before = self.cluster().await;
        let known: HashMap<_, _> = members(&before).iter().map(|member| (epoch(member), reports(member))).collect();
        let twice = |member: &Value| reports(member) >= known.get(epoch(member)).unwrap_or(&0) + 2;
        self.until("two reports of each member", |c| members(c).iter().all(twice)).await;
    }

    /// Waits until all blocks are published: between a report and the next one no member moves blocks or learns of any. What waits to be
    /// published is in no report, but it is put without a pause.
    pub async fn published(&self) {
        let moved = |c: &Value| -> Vec<_> {
            members(c)
                .iter()
                .map(|m| (m["epoch"].clone(), m["indexed_blocks"].clone(), m["report"]["counters"]["transfer"].clone()))
                .collect()
        };
        let began = Instant::now();
        loop {
            let before = moved(&self.cluster().await);
            self.reported().await;
            let after = self.cluster().await;
            if after["requests"] == 0 && moved(&after) == before {
                return;
            }
            assert!(began.elapsed() < UNTIL_MAX, "blocks are published for ever: {after:#}");
        }
    }

    /// The sum of a metric as of now, when the workers have reported their counters.
    pub async fn settled_metric(&self, name: &str, labels: &[String]) -> f64 {
        self.reported().await;
        self.metric(name, labels).await
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The time that only a broken cluster needs.
const UNTIL_MAX: Duration = Duration::from_secs(30);

fn members(cluster: &Value) -> &[Value] {
    cluster["members"].as_array().expect("members")
}

fn epoch(member: &Value) -> &str {
    member["epoch"].as_str().expect("an epoch")
}

/// The number of reports that a member has sent.
fn reports(member: &Value) -> u64 {
    member["reports"].as_u64().expect("a number")
}

/// The member of a cluster with this name.
pub fn member(cluster: &Value, name: &str) -> Value {
    let members = cluster["members"].as_array().expect("members");
    members.iter().find(|member| member["name"] == name).unwrap_or_else(|| panic!("no {name} in {cluster:#}")).clone()
}

/// One request whose answer must not depend on how it was served.
#[derive(Clone, Debug)]
pub struct Case {
    pub prompt: Vec<u32>,
    pub seed: Option<u64>,
    pub max_tokens: u32,
}

impl Case {
    /// The request's body: greedy without a seed, and sampled with a mix of settings with one.
    pub fn body(&self) -> Value {
        let mut body = json!({
            "model": MODEL_NAME, "prompt": self.prompt, "max_tokens": self.max_tokens,
            "ignore_eos": true, "return_token_ids": true, "temperature": 0.0,
        });
        if let Some(seed) = self.seed {
            let sampling = json!({ "seed": seed, "temperature": 1.0, "top_p": 0.95, "top_k": 50, "frequency_penalty": 0.3, "repetition_penalty": 1.1 });
            body.as_object_mut().expect("an object").extend(sampling.as_object().expect("an object").clone());
        }
        body
    }
}

/// The result of one request.
#[derive(Clone, Debug)]
pub struct Answer {
    pub tokens: Vec<u32>,
    pub usage: Value,
}

impl Answer {
    /// Prompt tokens from one source of `usage.tidemill`.
    pub fn source(&self, name: &str) -> u64 {
        self.usage["tidemill"]["tokens"][name].as_u64().unwrap_or_else(|| panic!("no source {name} in {}", self.usage))
    }

    pub fn cached(&self) -> u64 {
        self.usage["prompt_tokens_details"]["cached_tokens"].as_u64().expect("cached_tokens")
    }
}

/// Ends one process of a cluster at once, as a crash does.
pub fn crash(pid: u32) {
    signal(pid, nix::sys::signal::Signal::SIGKILL);
}

/// Asks one process of a cluster to end.
pub fn terminate(pid: u32) {
    signal(pid, nix::sys::signal::Signal::SIGTERM);
}

/// Suspends one process of a cluster, as an overloaded machine would.
pub fn pause(pid: u32) {
    signal(pid, nix::sys::signal::Signal::SIGSTOP);
}

pub fn resume(pid: u32) {
    signal(pid, nix::sys::signal::Signal::SIGCONT);
}

fn signal(pid: u32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), signal).expect("a process of our own cluster");
}

pub async fn complete(cluster: &Cluster, case: &Case) -> Answer {
    let (status, body) = cluster.post("/completions", &case.body()).await;
    assert_eq!(status, 200, "{body}");
    let ids = body["choices"][0]["token_ids"].as_array().unwrap_or_else(|| panic!("no token_ids in {body}"));
    let tokens = ids.iter().map(|t| t.as_u64().expect("an id") as u32).collect();
    Answer { tokens, usage: body["usage"].clone() }
}

/// Runs all cases, `at_once` at a time. The answers are in the order of the cases.
pub async fn complete_all(cluster: &Cluster, cases: &[Case], at_once: usize) -> Vec<Answer> {
    use futures_util::StreamExt;
    futures_util::stream::iter(cases).map(|case| complete(cluster, case)).buffered(at_once).collect().await
}

pub fn assert_same(reference: &[Answer], answers: &[Answer], cases: &[Case], how: &str) {
    for ((expected, got), case) in reference.iter().zip(answers).zip(cases) {
        assert_eq!(expected.tokens, got.tokens, "{how}: prompt of {} tokens, seed {:?}, {}", case.prompt.len(), case.seed, got.usage);
    }
}

/// Prompt tokens of the full blocks before the last token: those that a prefill worker computes or a cache can hold.
pub fn reusable(case: &Case) -> u64 {
    ((case.prompt.len() - 1) / 16 * 16) as u64
}

/// The answers of a decode worker alone, without prefill workers and pool nodes.
pub async fn reference(cases: &[Case]) -> Vec<Answer> {
    reference_with(&[], cases).await
}

/// The answers of a decode worker alone, with flags that change the model's outputs.
pub async fn reference_with(flags: &[&str], cases: &[Case]) -> Vec<Answer> {
    let cluster = Cluster::start(&[&["--prefill", "0", "--kvpool", "0"], flags].concat());
    let answers = complete_all(&cluster, cases, 1).await;
    for (answer, case) in answers.iter().zip(cases) {
        assert_eq!(answer.tokens.len(), case.max_tokens as usize);
        assert_eq!(answer.source("local"), case.prompt.len() as u64, "nothing but this worker computed: {}", answer.usage);
    }
    cluster.stop();
    answers
}

/// A memory so small that a worker must read its blocks again.
pub const SHORT_OF_MEMORY: &[&str] = &["--kv-memory", "1MiB", "--threads", "1"];

/// Cases with more blocks than a worker's device memory holds; every second one is seeded.
pub fn mixed_cases(seed: u64) -> Vec<Case> {
    let mut numbers = Numbers(seed);
    let lengths = [17, 100, 200, 320, 513, 640, 777, 900, 1024, 1200];
    let case = |(i, length): (usize, usize)| Case {
        prompt: (0..length).map(|_| 3 + (numbers.next() % 500) as u32).collect(),
        seed: (i % 2 == 1).then(|| numbers.next() >> 12),
        max_tokens: 24,
    };
    lengths.into_iter().enumerate().map(case).collect()
}

/// Sends every full block of a prompt to a prefill worker: by default, the scheduler keeps short prompts local.
pub const DISAGGREGATED: &[&str] = &["--local-tail-tokens", "0"];

/// Pseudo-random numbers that are the same in every run (SplitMix64, Steele et al. 2014).
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
