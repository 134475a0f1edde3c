//! Three coordinators as real processes: agreed records survive the loss of any one, and requests never wait for agreement.

use crate::support::{self, Cluster, crash, member, pause, resume};
use reqwest::Client;
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    fs,
    net::{TcpListener, UdpSocket},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    time::{Duration, Instant},
};
use tidemill_net::identity::Identity;

const COORDINATORS: usize = 3;

struct Three {
    cluster: Cluster,
    http: u16,
    admin: u16,
    data: tempfile::TempDir,
    client: Client,
}

/// The first of `count` consecutive free ports, which no other test of this process gets.
fn ports(count: u16) -> u16 {
    static TAKEN: AtomicU16 = AtomicU16::new(0);
    let free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok() && UdpSocket::bind(("127.0.0.1", port)).is_ok();
    let start = 20_000 + (std::process::id() % 20_000) as u16 + TAKEN.fetch_add(1000, Ordering::Relaxed);
    (start..60_000).find(|first| (*first..first + count).all(free)).expect("ports are free")
}

impl Three {
    fn start(flags: &[&str]) -> Self {
        Self::start_some(COORDINATORS, flags)
    }

    fn start_some(count: usize, flags: &[&str]) -> Self {
        Self::start_models(&[(support::MODEL_NAME, support::MODEL)], count, flags)
    }

    fn start_models(models: &[(&str, &str)], count: usize, flags: &[&str]) -> Self {
        let first = ports(2 * COORDINATORS as u16);
        let data = tempfile::tempdir().expect("a directory");
        let (http, admin) = (format!("127.0.0.1:{first}"), format!("127.0.0.1:{}", first + COORDINATORS as u16));
        let count = count.to_string();
        let own = ["--coordinator", &count, "--http", &http, "--admin", &admin, "--restarts", "100", "--engine", "echo", "--data"];
        let cluster = Cluster::start_with(models, &[&own[..], &[data.path().to_str().expect("text")], flags].concat());
        let client = Client::builder().no_proxy().timeout(Duration::from_secs(20)).build().expect("a client");
        Self { cluster, http: first, admin: first + COORDINATORS as u16, data, client }
    }

    async fn view(&self, n: usize) -> Value {
        let url = format!("http://127.0.0.1:{}/cluster", self.admin + n as u16);
        self.client.get(url).send().await.expect("it answers").json().await.expect("JSON")
    }

    /// The process id of a decode worker of this model, as a coordinator reports it.
    async fn cluster_member(&self, n: usize, model: &str) -> u32 {
        let cluster = self.view(n).await;
        let mut members = cluster["members"].as_array().expect("members").iter();
        let member = members.find(|member| member["model"] == model && member["role"] == "decode").expect("it has a worker");
        member["pid"].as_u64().expect("a pid") as u32
    }

    /// The process id of the `n`th coordinator, unless it is down.
    fn pid(&self, n: usize) -> Option<u32> {
        let up = self.cluster.up_pid();
        let name = format!("coordinator-{n}");
        let processes = fs::read_dir("/proc").expect("Linux").flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.into_iter().find(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
            let lives = fields.first().is_some_and(|state| *state != "Z") && fields.get(1).is_some_and(|parent| *parent == up.to_string());
            let args = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let mut args = args.split(|byte| *byte == 0);
            lives && args.any(|arg| arg == b"--name") && args.next() == Some(name.as_bytes())
        })
    }

    async fn registry(&self, n: usize) -> Option<Value> {
        let response = self.client.get(format!("http://127.0.0.1:{}/cluster", self.admin + n as u16)).send().await.ok()?;
        response.json::<Value>().await.ok().map(|mut cluster| cluster["registry"].take())
    }

    async fn leader(&self) -> Option<usize> {
        for n in 0..COORDINATORS {
            if self.registry(n).await.is_some_and(|registry| registry["part"] == "leader") {
                return Some(n);
            }
        }
        None
    }

    /// Waits until all coordinators are up, vote, know a leader, and have every worker.
    async fn whole(&self) {
        self.whole_with(support::MODEL_NAME).await;
    }

    async fn whole_with(&self, model: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let mut whole = true;
            for n in 0..COORDINATORS {
                let registry = self.registry(n).await.unwrap_or_default();
                let voters = registry["voters"].as_array().map_or(0, Vec::len);
                let learners = registry["learners"].as_array().map_or(1, Vec::len);
                whole &= voters == COORDINATORS && learners == 0 && registry["leader"].is_string() && registry["part"] != "learner";
                whole &= matches!(self.complete(n, model).await, Some(200));
            }
            if whole {
                return;
            }
            assert!(Instant::now() < deadline, "the group is not whole: {:#?}", self.registry(0).await);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Waits until every coordinator has this member, or until none has it.
    async fn until_members(&self, name: &str, present: bool) {
        let is_there = |cluster: &Value| cluster["members"].as_array().expect("members").iter().any(|member| member["name"] == name);
        self.until_all(&format!("{name} present: {present}"), |cluster| is_there(cluster) == present).await;
    }

    async fn until_all(&self, what: &str, wanted: impl Fn(&Value) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        for n in 0..COORDINATORS {
            loop {
                let cluster = self.view(n).await;
                if wanted(&cluster) {
                    break;
                }
                assert!(Instant::now() < deadline, "{what}, at coordinator-{n}: {cluster:#}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }

    async fn delete(&self, n: usize, kind: &str, key: &str) -> Option<u16> {
        let url = format!("http://127.0.0.1:{}/registry/{kind}/{key}", self.admin + n as u16);
        self.client.delete(url).send().await.ok().map(|response| response.status().as_u16())
    }

    /// Changes a record. Returns the status, or `None` without an answer.
    async fn put(&self, n: usize, kind: &str, key: &str, value: &str) -> Option<u16> {
        let url = format!("http://127.0.0.1:{}/registry/{kind}/{key}", self.admin + n as u16);
        self.client.put(url).json(&json!({ "value": value })).send().await.ok().map(|response| response.status().as_u16())
    }

    async fn get(&self, n: usize, kind: &str, key: &str) -> Option<Value> {
        let url = format!("http://127.0.0.1:{}/registry/{kind}/{key}", self.admin + n as u16);
        let response = self.client.get(url).send().await.ok().filter(|response| response.status().is_success())?;
        response.json::<Value>().await.ok().map(|mut record| record["value"].take())
    }

    async fn complete(&self, n: usize, model: &str) -> Option<u16> {
        self.complete_as(n, model, None).await
    }

    async fn complete_as(&self, n: usize, model: &str, key: Option<&str>) -> Option<u16> {
        let url = format!("http://127.0.0.1:{}/v1/completions", self.http + n as u16);
        let body = json!({ "model": model, "prompt": [5, 6, 7, 8], "max_tokens": 8, "ignore_eos": true });
        let request = self.client.post(url).json(&body);
        let request = key.into_iter().fold(request, |request, key| request.bearer_auth(key));
        let response = request.send().await.ok()?;
        let status = response.status().as_u16();
        response.bytes().await.ok().map(|_| status)
    }

    /// Lists the models with a key, which counts as no request for an answer.
    async fn models_as(&self, n: usize, key: &str) -> Option<u16> {
        let url = format!("http://127.0.0.1:{}/v1/models", self.http + n as u16);
        Some(self.client.get(url).bearer_auth(key).send().await.ok()?.status().as_u16())
    }

    /// The times of consecutive requests at a coordinator, in milliseconds.
    async fn times(&self, n: usize, count: usize) -> Vec<f64> {
        let mut times = Vec::new();
        for _ in 0..count {
            let began = Instant::now();
            assert_eq!(self.complete(n, support::MODEL_NAME).await, Some(200));
            times.push(began.elapsed().as_secs_f64() * 1e3);
        }
        times.sort_by(f64::total_cmp);
        times
    }

    /// Kills the leader and changes a record at another coordinator until the change is acknowledged. Returns the time that this took, and
    /// the keys of all changes that were acknowledged.
    async fn lose_leader(&self, round: usize) -> (Duration, Vec<String>) {
        let mut acknowledged = Vec::new();
        let leader = loop {
            match self.leader().await {
                Some(leader) => break leader,
                None => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        };
        let other = (leader + 1) % COORDINATORS;
        for n in 0..5 {
            let key = format!("before-{round}-{n}");
            if self.put(other, "test", &key, &key).await == Some(200) {
                acknowledged.push(key);
            }
        }
        crash(self.pid(leader).expect("it leads"));
        let lost = Instant::now();
        let mut tried = 0;
        loop {
            let key = format!("after-{round}-{tried}");
            if self.put(other, "test", &key, &key).await == Some(200) {
                acknowledged.push(key);
                return (lost.elapsed(), acknowledged);
            }
            tried += 1;
            assert!(lost.elapsed() < Duration::from_secs(60), "no leader after {tried} attempts: {:#?}", self.registry(other).await);
        }
    }

    async fn check_all(&self, acknowledged: &[String]) {
        for n in 0..COORDINATORS {
            for key in acknowledged {
                let found = self.get(n, "test", key).await;
                assert_eq!(found.as_ref().and_then(Value::as_str), Some(&**key), "coordinator-{n} lost {key}");
            }
        }
    }

    /// Waits until every coordinator answers a request with this key with this status.
    async fn until_opens(&self, key: Option<&str>, status: u16) {
        let deadline = Instant::now() + Duration::from_secs(20);
        for n in 0..COORDINATORS {
            while self.complete_as(n, support::MODEL_NAME, key).await != Some(status) {
                assert!(Instant::now() < deadline, "coordinator-{n} does not answer {key:?} with {status}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }

    fn forget_disk(&self, n: usize) {
        let dir = self.data.path().join(format!("coordinator-{n}"));
        for file in ["registry.sqlite", "registry.sqlite-wal", "registry.sqlite-shm"] {
            let path: &Path = &dir.join(file);
            let _ = fs::remove_file(path);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_acknowledged_survives_leaders_a_lost_disk_and_a_restart_and_a_minority_serves() {
    let three = Three::start(&[]);
    three.whole().await;

    // An alias is valid at all coordinators, wherever it was created.
    assert_eq!(three.complete(1, "nickname").await, Some(404));
    assert_eq!(three.put(0, "alias", "nickname", "no-such-model").await, Some(400));
    assert_eq!(three.put(0, "alias", "nickname", support::MODEL_NAME).await, Some(200));
    for n in 0..COORDINATORS {
        let began = Instant::now();
        while three.complete(n, "nickname").await != Some(200) {
            assert!(began.elapsed() < Duration::from_secs(20), "coordinator-{n} does not know the alias");
        }
    }

    // So is the record of a worker that computes wrongly.
    let epoch = member(&three.view(0).await, "prefill-0")["epoch"].as_str().expect("an epoch").to_owned();
    assert_eq!(three.put(0, "unhealthy", "worker 0", support::MODEL_NAME).await, Some(400));
    assert_eq!(three.put(0, "unhealthy", &epoch, support::MODEL_NAME).await, Some(200));
    let unhealthy = |cluster: &Value| member(cluster, "prefill-0")["unhealthy"] == true;
    three.until_all("unhealthy", unhealthy).await;

    let mut acknowledged = Vec::new();
    for round in 0..2 {
        acknowledged.extend(three.lose_leader(round).await.1);
        three.whole().await;
    }
    three.until_all("still unhealthy", unhealthy).await;
    three.check_all(&acknowledged).await;

    // A coordinator that lost its disk recovers from a snapshot.
    let leader = three.leader().await.expect("the group is whole");
    let wiped = (leader + 1) % COORDINATORS;
    let lost = three.pid(wiped).expect("it runs");
    crash(lost);
    three.forget_disk(wiped);
    let began = Instant::now();
    while three.pid(wiped).is_none_or(|pid| pid == lost) {
        assert!(began.elapsed() < Duration::from_secs(60), "coordinator-{wiped} is not started again");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    three.whole().await;
    three.check_all(&acknowledged).await;

    // A worker whose certificate is revoked is not a member anywhere, until the revocation is withdrawn.
    let pki = three.data.path().join("pki/prefill/prefill-0");
    let serial = Identity::load(&pki).expect("a certificate").name().serial.clone();
    assert_eq!(three.put(wiped, "denied", &serial, "a test").await, Some(200));
    three.until_members("prefill-0", false).await;
    assert_eq!(three.delete(leader, "denied", &serial).await, Some(200));
    three.until_members("prefill-0", true).await;

    // A minority serves requests, and confirms no changes.
    let others = [(wiped + 1) % COORDINATORS, (wiped + 2) % COORDINATORS];
    let paused = others.map(|n| three.pid(n).expect("it runs"));
    paused.into_iter().for_each(pause);
    assert_eq!(three.complete(wiped, "nickname").await, Some(200));
    assert_eq!(three.put(wiped, "test", "lonely", "x").await, Some(503));
    assert_eq!(three.complete(wiped, "nickname").await, Some(200));
    paused.into_iter().for_each(resume);
    three.whole().await;
    keys_count_everywhere(&three).await;
    three.cluster.stop();
}

/// A key created at one coordinator is accepted by all, and from then on all refuse requests without a key, even while one restarts.
async fn keys_count_everywhere(three: &Three) {
    let admin = |n: usize, path: &str| format!("http://127.0.0.1:{}{path}", three.admin + n as u16);
    let wanted = json!({ "tenant": "acme", "tier": "premium" });
    let made: Value =
        three.client.post(admin(0, "/admin/keys")).json(&wanted).send().await.expect("it answers").json().await.expect("JSON");
    let (key, id) = (made["key"].as_str().expect("it is shown once"), made["id"].as_str().expect("an id"));
    three.until_opens(Some(key), 200).await;
    three.until_opens(None, 401).await;

    crash(three.pid(1).expect("it runs"));
    let died = Instant::now();
    while three.complete_as(1, support::MODEL_NAME, Some(key)).await != Some(200) {
        let stranger = three.complete(1, support::MODEL_NAME).await;
        assert!(matches!(stranger, None | Some(401 | 503)), "the door stood open: {stranger:?}");
        assert!(died.elapsed() < Duration::from_secs(60), "it does not come back");
    }

    // Keys are visible and changeable only through the API for keys.
    let records = three.client.get(admin(2, "/registry")).send().await.expect("it answers").text().await.expect("text");
    assert!(!records.contains(id) && !records.contains("acme"), "{records}");
    assert_eq!(three.delete(2, "key", id).await, Some(400));
    assert_eq!(three.put(2, "tenant", "acme", "x").await, Some(400));
    let revoked = three.client.delete(admin(2, &format!("/admin/keys/{id}"))).send().await.expect("it answers");
    assert_eq!(revoked.status(), 200);
    three.until_opens(Some(key), 401).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rollout_goes_on_when_its_leader_is_lost_and_back_when_its_candidate_is() {
    let three =
        Three::start_models(&[("old", support::MODEL), ("new", support::MODEL)], COORDINATORS, &["--prefill", "0", "--kvpool", "0"]);
    three.whole_with("old").await;
    let command = |args: &[&str]| {
        let url = format!("http://127.0.0.1:{}", three.admin);
        let output = Command::new(env!("CARGO_BIN_EXE_tidemill")).arg("rollout").args(args).args(["--url", &url]).output();
        let output = output.expect("tidemill starts");
        (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let rollout = async |n: usize| {
        let url = format!("http://127.0.0.1:{}/rollouts", three.admin + n as u16);
        let listed = three.client.get(url).send().await.ok()?.json::<Value>().await.ok();
        listed.map(|mut listed| listed["rollouts"][0].take()).filter(|rollout| !rollout.is_null())
    };
    let ask = async |n: usize, user: usize| {
        let url = format!("http://127.0.0.1:{}/v1/completions", three.http + n as u16);
        let body = json!({"model": "old", "prompt": [5, 6, 7, 8], "max_tokens": 4, "ignore_eos": true, "user": format!("user-{user}")});
        let response = three.client.post(url).json(&body).send().await.ok().filter(|response| response.status() == 200)?;
        response.json::<Value>().await.ok().and_then(|answer| answer["model"].as_str().map(str::to_owned))
    };
    let start = ["start", "--from", "old", "--to", "new", "--requests-min", "10", "--latency-ratio", "1000", "--goodput-under", "1"];
    let (refused, words) = command(&start);
    assert!(!refused && words.contains("--no-gate"), "{words}");
    let steps = ["--steps", "20,50,100", "--step-seconds", "4", "--golden-from", "0.91", "--golden-to", "0.90", "--window-s", "20"];
    let (started, words) = command(&[&start[..], &steps[..]].concat());
    assert!(started && words.contains("started at 20 %"), "{words}");

    // Users send requests to all coordinators in turn. Meanwhile the leader is lost: users of the new model stay there. Coordinators learn
    // of a step at different times, and one that was down when it is back, so each is checked separately.
    let mut there = vec![BTreeSet::new(); COORDINATORS];
    let mut shares = BTreeSet::new();
    let mut lost: Option<(usize, Instant)> = None;
    let deadline = Instant::now() + Duration::from_secs(120);
    for round in 0.. {
        assert!(Instant::now() < deadline, "{:#?}", rollout(0).await);
        let Some(state) = rollout(round % COORDINATORS).await else { continue };
        shares.insert(state["steps"][state["step"].as_u64().expect("a step") as usize].to_string());
        for user in 0..30 {
            let n = (round + user) % COORDINATORS;
            let was_lost = lost.is_some_and(|(leader, _)| leader == n);
            match ask(n, user).await.as_deref() {
                Some("new") => drop(there[n].insert(user)),
                Some(_) => assert!(was_lost || !there[n].contains(&user), "user {user} went back at coordinator-{n}: {state:#}"),
                None => assert!(was_lost, "user {user} got no answer at coordinator-{n}"),
            }
        }
        match (state["state"].as_str(), lost) {
            (Some("done"), _) => break,
            (Some("running"), None) if state["step"] == 1 => {
                let leader = three.leader().await.expect("the group is whole");
                crash(three.pid(leader).expect("it leads"));
                lost = Some((leader, Instant::now()));
            }
            (Some("running"), _) => {}
            other => panic!("{other:?}: {state:#}"),
        }
    }
    assert_eq!((shares.len(), lost.is_some()), (3, true), "{shares:?}");
    three.whole_with("old").await;
    for n in 0..COORDINATORS {
        for user in 0..30 {
            assert_eq!(ask(n, user).await.as_deref(), Some("new"), "user {user} at coordinator-{n}");
        }
    }

    // The candidate's only worker hangs: the rollout reverts automatically, at all coordinators.
    assert!(command(&["abort", "--from", "old"]).0);
    let steps = ["--steps", "50,100", "--step-seconds", "600", "--no-gate", "--overdue-s", "2"];
    let (started, words) = command(&[&start[..], &steps[..]].concat());
    assert!(started, "{words}");
    for user in 0..30 {
        ask(user % COORDINATORS, user).await;
    }
    let worker = three.cluster_member(0, "new").await;
    pause(worker);
    let began = Instant::now();
    let (client, http) = (&three.client, three.http);
    let asking = (0..30).map(|user| async move {
        let url = format!("http://127.0.0.1:{}/v1/completions", http + (user % COORDINATORS) as u16);
        let body = json!({"model": "old", "prompt": [5, 6, 7, 8], "max_tokens": 4, "user": format!("user-{user}")});
        drop(client.post(url).json(&body).timeout(Duration::from_secs(15)).send().await);
    });
    let back = async {
        loop {
            let mut all = true;
            for n in 0..COORDINATORS {
                all &= rollout(n).await.is_some_and(|rollout| rollout["state"] == "rolled_back");
            }
            if all {
                return began.elapsed();
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{:#?}", rollout(0).await);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let (_, took) = tokio::join!(futures_util::future::join_all(asking), back);
    println!("rolled back at all coordinators {took:?} after the candidate's worker was stopped");
    for user in 0..30 {
        assert_eq!(ask(user % COORDINATORS, user).await.as_deref(), Some("old"));
    }
    resume(worker);
    let (_, words) = command(&["status"]);
    assert!(words.contains("rolled back") && words.contains("requests failed"), "{words}");
    three.cluster.stop();
}

/// A Redis server on a socket, which `make setup-test` installs.
struct QuotaServer {
    dir: tempfile::TempDir,
    process: Option<Child>,
}

impl QuotaServer {
    fn start() -> Self {
        let mut server = Self { dir: tempfile::tempdir().expect("a directory"), process: None };
        server.go_on();
        server
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("r.sock")
    }

    /// Starts the server, for the first time or again.
    fn go_on(&mut self) {
        let args = ["--port", "0", "--unixsocket", "r.sock", "--save", "", "--appendonly", "yes", "--appendfsync", "always"];
        let mut command = Command::new("redis-server");
        let process = command.current_dir(self.dir.path()).args(args).stdout(Stdio::null()).spawn();
        self.process = Some(process.expect("redis-server runs: `make setup-test` installs it"));
        let deadline = Instant::now() + Duration::from_secs(30);
        while UnixStream::connect(self.socket()).is_err() {
            assert!(Instant::now() < deadline, "the server does not begin");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().expect("our own child");
            process.wait().expect("our own child");
        }
        let _ = fs::remove_file(self.socket());
    }
}

impl Drop for QuotaServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Requests of one key at all coordinators at once: the limit is exact while the quota server decides, and each coordinator's share while it
/// is gone. What was let pass meanwhile counts when it is back. A slow answer of a busy machine is waited for.
#[tokio::test(flavor = "multi_thread")]
async fn coordinators_share_each_limit_exactly_until_their_quota_server_dies_and_again_when_it_is_back() {
    const LIMIT: usize = 30;
    let mut server = QuotaServer::start();
    let config = server.dir.path().join("coordinator.toml");
    let url = format!("redis+unix://{}", server.socket().display());
    fs::write(&config, format!("[tier.free]\nrequests_per_minute = {LIMIT}\n[quota_server]\nurls = ['{url}']\nwait_ms = 1000\n"))
        .expect("written");
    let three = Three::start(&["--prefill", "0", "--kvpool", "0", "--coordinator-config", config.to_str().expect("text")]);
    three.whole().await;
    let key_of = async |tenant: &str| {
        let url = format!("http://127.0.0.1:{}/admin/keys", three.admin);
        let wanted = json!({ "tenant": tenant, "tier": "free" });
        let made: Value = three.client.post(url).json(&wanted).send().await.expect("it answers").json().await.expect("JSON");
        made["key"].as_str().expect("it is shown once").to_owned()
    };
    let keys = [key_of("acme").await, key_of("globex").await];
    let is_used = async |wanted: &str| {
        let deadline = Instant::now() + Duration::from_secs(30);
        for n in 0..COORDINATORS {
            let url = format!("http://127.0.0.1:{}/metrics", three.admin + n as u16);
            let line = format!("tidemill_quota_server_used {wanted}");
            while !three.client.get(&url).send().await.expect("it answers").text().await.expect("text").lines().any(|found| found == line) {
                assert!(Instant::now() < deadline, "coordinator-{n}: not {line}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    };
    // Keys that were made at one coordinator are known to the others a moment later. Until then their doors are open.
    three.until_opens(None, 401).await;
    for key in &keys {
        for n in 0..COORDINATORS {
            while three.models_as(n, key).await != Some(200) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
    let ask_all = async |key: &str| {
        let asked = (0..2 * LIMIT).map(|nth| three.complete_as(nth % COORDINATORS, support::MODEL_NAME, Some(key)));
        let mut passed = [0; COORDINATORS];
        for (nth, status) in futures_util::future::join_all(asked).await.into_iter().enumerate() {
            assert!(matches!(status, Some(200 | 429)), "{status:?}");
            passed[nth % COORDINATORS] += usize::from(status == Some(200));
        }
        passed
    };
    is_used("1").await;
    let passed = ask_all(&keys[0]).await;
    assert_eq!(passed.iter().sum::<usize>(), LIMIT, "{passed:?}");

    server.kill();
    let passed = ask_all(&keys[1]).await;
    assert_eq!(passed, [LIMIT / COORDINATORS; COORDINATORS], "each lets its share pass");
    is_used("0").await;

    server.go_on();
    is_used("1").await;
    assert_eq!(ask_all(&keys[1]).await, [0; COORDINATORS], "what was let pass meanwhile counts");
    three.cluster.stop();
}

/// Not a test but a measurement: `cargo test --release -p tidemill-deploy --test clusters coordinators:: -- --ignored --nocapture`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes and asserts no times"]
async fn measure_twenty_lost_leaders_and_requests_with_and_without_a_majority() {
    let three = Three::start(&["--prefill", "0"]);
    three.whole().await;
    let (mut elections, mut acknowledged) = (Vec::new(), Vec::new());
    for round in 0..20 {
        let (took, keys) = three.lose_leader(round).await;
        elections.push(took.as_secs_f64());
        acknowledged.extend(keys);
        three.whole().await;
    }
    three.check_all(&acknowledged).await;
    elections.sort_by(f64::total_cmp);
    let last = elections.len() - 1;
    println!(
        "{} leaders killed, {} changes acknowledged, none lost; from the kill to the next acknowledged change: p50 {:.2} s, max {:.2} s",
        elections.len(),
        acknowledged.len(),
        elections[last / 2],
        elections[last],
    );

    let at = 0;
    let others = [1, 2].map(|n| three.pid(n).expect("it runs"));
    for round in 0..3 {
        let show = |what: &str, times: &[f64]| {
            let quantile = |q: f64| times[((times.len() - 1) as f64 * q) as usize];
            println!("round {round}, {what}: p50 {:.2} ms, p99 {:.2} ms", quantile(0.5), quantile(0.99));
        };
        show("three coordinators, registry idle", &three.times(at, 400).await);
        let changing = async {
            let mut n = 0;
            loop {
                three.put(1, "test", "busy", "x").await;
                n += 1;
                if n % 2 == 0 {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        };
        let times = tokio::select! {
            times = three.times(at, 400) => times,
            () = changing => unreachable!("it changes for ever"),
        };
        show("while records change all the time", &times);
        others.into_iter().for_each(pause);
        tokio::time::sleep(Duration::from_secs(2)).await;
        show("two of three paused", &three.times(at, 400).await);
        others.into_iter().for_each(resume);
        three.whole().await;
    }
    three.cluster.stop();
}

/// Not a test but a measurement, see above: eight clients, spread over one, two or three coordinators, and four decode workers whose steps
/// take longer with each sequence. If the sequences are placed evenly, each worker has two.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute and asserts no times"]
async fn measure_how_evenly_several_coordinators_place() {
    const CLIENTS: usize = 8;
    for count in [1, 2, 3] {
        let costs = ["--step-ms", "5", "--row-ms", "10", "--prompt-token-ms", "0.1"];
        let three = Three::start_some(count, &[&["--prefill", "0", "--kvpool", "0", "--decode", "4"], &costs[..]].concat());
        for n in 0..count {
            // The first coordinator is ready before the others.
            while three.complete(n, support::MODEL_NAME).await != Some(200) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        let until = Instant::now() + Duration::from_secs(15);
        let client = |n: usize| {
            let three = &three;
            async move {
                let mut times = Vec::new();
                while Instant::now() < until {
                    times.extend(three.times(n % count, 1).await);
                }
                times
            }
        };
        let looks = async {
            let mut spread = Vec::new();
            while Instant::now() < until {
                tokio::time::sleep(Duration::from_millis(500)).await;
                let url = format!("http://127.0.0.1:{}/cluster", three.admin);
                let cluster: Value = three.client.get(url).send().await.expect("it answers").json().await.expect("JSON");
                let members = cluster["members"].as_array().expect("members");
                let running: Vec<u64> = members.iter().filter_map(|member| member["report"]["running"].as_u64()).collect();
                spread.push(running.iter().max().unwrap_or(&0) - running.iter().min().unwrap_or(&0));
            }
            spread
        };
        let (times, spread) = tokio::join!(futures_util::future::join_all((0..CLIENTS).map(client)), looks);
        let mut times: Vec<f64> = times.into_iter().flatten().collect();
        times.sort_by(f64::total_cmp);
        println!(
            "{count} coordinators: {} requests, p50 {:.0} ms, p99 {:.0} ms; busiest worker less idlest, mean {:.2} sequences, worst {}",
            times.len(),
            times[times.len() / 2],
            times[times.len() * 99 / 100],
            spread.iter().sum::<u64>() as f64 / spread.len() as f64,
            spread.iter().max().unwrap_or(&0),
        );
        three.cluster.stop();
    }
}
