//! Erasure at a real gateway: all of a user, nothing of others, also while it writes and over a restart.

use super::support::{self, Cluster, Script, Worker};
use serde_json::{Value, json};
use std::{
    fs,
    path::Path,
    process::{Child, Command},
    time::Duration,
};
use tidemill_coordinator::settings::{audit::AuditFlags, feedback::FeedbackFlags};

struct Door {
    cluster: Cluster,
    client: reqwest::Client,
    worker: Worker,
}

impl Door {
    async fn open(data: &Path) -> Self {
        let cluster = Cluster::start(|flags| {
            flags.admin = Some(([127, 0, 0, 1], 0).into());
            flags.data = Some(data.to_owned());
            flags.feedback = Some(FeedbackFlags::default());
            flags.audit = Some(AuditFlags { days: 30, bytes_max: None });
            flags.response_cache_bytes_max = Some("1MiB".into());
        })
        .await;
        let worker = cluster.join("decode", support::decode(), Script::reply(&[10, 11, 12])).await;
        Self { cluster, client: reqwest::Client::new(), worker }
    }

    async fn admin(&self, path: &str, body: Value) -> (u16, Value) {
        let response = self.client.post(format!("{}{path}", self.cluster.admin.as_ref().unwrap())).json(&body).send().await.unwrap();
        (response.status().as_u16(), response.json().await.unwrap())
    }

    async fn key(&self, tenant: &str, user: Option<&str>) -> String {
        let (status, made) = self.admin("/admin/keys", json!({"tenant": tenant, "tier": "premium", "user": user})).await;
        assert_eq!(status, 200, "{made}");
        made["key"].as_str().unwrap().to_owned()
    }

    async fn post(&self, key: &str, path: &str, body: Value) -> Value {
        let request = self.client.post(format!("{}{path}", self.cluster.url)).bearer_auth(key).header("idempotency-key", path);
        let response = request.json(&body).send().await.unwrap();
        let status = response.status();
        let answer = response.json().await.unwrap();
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    async fn status(&self, key: &str, path: &str) -> u16 {
        self.client.get(format!("{}{path}", self.cluster.url)).bearer_auth(key).send().await.unwrap().status().as_u16()
    }

    /// Lets a user leave something of each kind. Returns the paths by which it is found.
    async fn leave_all(&self, key: &str) -> Vec<String> {
        let response = self.post(key, "/v1/responses", json!({"model": "tiny", "input": "hi", "temperature": 0})).await;
        let response = response["id"].as_str().unwrap().to_owned();
        let conversation = self.post(key, "/v1/conversations", json!({"items": [{"role": "user", "content": "hi"}]})).await;
        self.post(key, "/v1/feedback", json!({"response_id": response, "rating": "up"})).await;
        let form = "--b\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\ncontent-disposition: form-data; \
                    name=\"file\"; filename=\"a.jsonl\"\r\n\r\n{}\r\n--b--\r\n";
        let upload = self.client.post(format!("{}/v1/files", self.cluster.url)).bearer_auth(key);
        let file: Value =
            upload.header("content-type", "multipart/form-data; boundary=b").body(form).send().await.unwrap().json().await.unwrap();
        let id = |object: &Value| object["id"].as_str().unwrap_or_else(|| panic!("{object}")).to_owned();
        vec![format!("/v1/responses/{response}"), format!("/v1/conversations/{}", id(&conversation)), format!("/v1/files/{}", id(&file))]
    }

    async fn export(&self, query: &str) -> Vec<Value> {
        let url = format!("{}/admin/export?{query}", self.cluster.admin.as_ref().unwrap());
        let text = self.client.get(url).send().await.unwrap().text().await.unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
    }

    async fn erase(&self, tenant: &str, user: Option<&str>, check: bool) -> Value {
        let (status, report) = self.admin("/admin/erasures", json!({"tenant": tenant, "user": user, "check": check})).await;
        assert_eq!(status, 200, "{report}");
        report
    }
}

#[tokio::test]
async fn all_of_a_user_goes_and_nothing_of_others() {
    let data = tempfile::tempdir().unwrap();
    let door = Door::open(data.path()).await;
    let (ann, bob) = (door.key("acme", Some("ann")).await, door.key("acme", Some("bob")).await);
    let namesake = door.key("other", Some("ann")).await;
    let mut paths = Vec::new();
    for key in [&ann, &bob, &namesake] {
        paths.push(door.leave_all(key).await);
    }
    let lines = door.export("tenant=acme&user=ann").await;
    let count = |lines: &[Value], kind: &str| lines.iter().filter(|line| line["kind"] == kind).count();
    for kind in ["export", "response", "conversation", "file", "file_part", "opinion", "usage", "end"] {
        assert_eq!(count(&lines, kind), 1, "{kind}: {lines:?}");
    }
    assert_eq!((count(&lines, "items"), &lines.last().unwrap()["lines"]), (2, &json!(lines.len() - 1)));
    let of_tenant = door.export("tenant=acme").await;
    assert_eq!((count(&of_tenant, "response"), count(&of_tenant, "opinion"), count(&of_tenant, "usage")), (2, 2, 2));
    let before = door.erase("acme", Some("ann"), true).await;
    let report = door.erase("acme", Some("ann"), false).await;
    for (kind, least) in [("responses", 1), ("conversations", 1), ("files", 1), ("opinions", 1), ("usage_events", 1)] {
        assert_eq!((&before["left"][kind], &report["erased"][kind]), (&json!(least), &json!(least)), "{kind}: {report}");
    }
    assert!(report["erased"]["replays"].as_u64() > Some(0) && report["erased"]["cached_answers"].as_u64() > Some(0), "{report}");
    assert_eq!((&report["total_left"], &report["audited"]), (&json!(0), &json!(true)), "{report}");
    assert_eq!(door.erase("acme", Some("ann"), true).await["total_left"], 0);
    assert_eq!(door.erase("acme", Some("ann"), false).await["erased"]["responses"], 0, "a second time finds nothing");
    for (key, paths, status) in [(&ann, &paths[0], 404), (&bob, &paths[1], 200), (&namesake, &paths[2], 200)] {
        for path in paths {
            assert_eq!(door.status(key, path).await, status, "{path}");
        }
    }
    for (tenant, user) in [("acme", "bob"), ("other", "ann")] {
        let left = door.erase(tenant, Some(user), true).await;
        assert_eq!((&left["left"]["responses"], &left["left"]["files"], &left["left"]["opinions"]), (&json!(1), &json!(1), &json!(1)));
    }
    let (status, wrong) = door.admin("/admin/erasures", json!({"tenant": "acme/ann"})).await;
    assert_eq!((status, &wrong["error"]["param"]), (400, &json!("tenant")));
    // The whole tenant is its users, too.
    let report = door.erase("acme", None, false).await;
    assert_eq!((&report["erased"]["responses"], &report["total_left"]), (&json!(1), &json!(0)), "{report}");
    assert_eq!(door.status(&namesake, &paths[2][0]).await, 200);
    door.cluster.stop().await;
}

#[tokio::test]
async fn blocks_and_cached_answers_of_before_are_not_found_again() {
    let data = tempfile::tempdir().unwrap();
    let mut door = Door::open(data.path()).await;
    let (ann, other) = (door.key("acme", Some("ann")).await, door.key("other", None).await);
    let body = json!({"model": "tiny", "prompt": (0..40).collect::<Vec<u32>>(), "max_tokens": 3, "temperature": 0});
    let salt = async |key: &str, door: &mut Door| {
        while door.worker.messages.try_recv().is_ok() {}
        let sent = door.client.post(format!("{}/v1/completions", door.cluster.url)).bearer_auth(key).json(&body).send().await.unwrap();
        assert_eq!(sent.status(), 200);
        sent.text().await.unwrap();
        let mut jobs = std::iter::from_fn(|| door.worker.messages.try_recv().ok());
        jobs.find_map(|message| if let tidemill_proto::message::ToWorker::Decode(job) = message { Some(job.salt.clone()) } else { None })
    };
    let first = salt(&ann, &mut door).await.expect("it is computed");
    assert_eq!(salt(&ann, &mut door).await, None, "the cache answers");
    salt(&other, &mut door).await.expect("it is computed");
    door.erase("acme", Some("ann"), false).await;
    let again = salt(&ann, &mut door).await.expect("it is computed anew");
    assert!(again != first && !again.is_empty(), "and no block of before has its name");
    assert_eq!(salt(&other, &mut door).await, None, "the other tenant's cache is as it was");
    door.cluster.stop().await;
}

#[tokio::test]
async fn an_erasure_goes_on_over_a_restart_and_takes_what_is_written_meanwhile() {
    let data = tempfile::tempdir().unwrap();
    let door = Door::open(data.path()).await;
    let ann = door.key("acme", Some("ann")).await;
    door.erase("acme", Some("ann"), false).await;
    // As a request would write that ran when the order was given.
    let conversation = door.post(&ann, "/v1/conversations", json!({"items": [{"role": "user", "content": "hi"}]})).await;
    let path = format!("/v1/conversations/{}", conversation["id"].as_str().unwrap());
    door.cluster.stop().await;
    let door = Door::open(data.path()).await;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while door.status(&ann, &path).await != 404 {
        assert!(tokio::time::Instant::now() < deadline, "it is still there");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let listed = door.client.get(format!("{}/admin/erasures", door.cluster.admin.as_ref().unwrap())).send().await.unwrap();
    let listed: Value = listed.json().await.unwrap();
    assert_eq!((&listed["erasures"][0]["tenant"], &listed["erasures"][0]["user"]), (&json!("acme"), &json!("ann")), "{listed}");
    door.cluster.stop().await;
}

/// The directory of the coordinator below, and the file in it that says where it listens.
const DATA: &str = "TIDEMILL_TEST_DATA";
const LISTENS: &str = "listens.json";

/// A part of the next test: the coordinator that it kills, in a process of its own.
#[tokio::test]
#[ignore = "a part of another test"]
async fn a_coordinator_that_is_killed() {
    let Some(data) = std::env::var_os(DATA) else { return };
    let data = Path::new(&data);
    let door = Door::open(data).await;
    let listens = json!([door.cluster.url, door.cluster.admin]);
    fs::write(data.join("listens.part"), listens.to_string()).unwrap();
    fs::rename(data.join("listens.part"), data.join(LISTENS)).unwrap();
    tokio::time::sleep(Duration::from_secs(300)).await;
}

struct Killed(Child);

impl Drop for Killed {
    /// SIGKILL.
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Killed {
    /// Starts a coordinator. Returns its front door and its operators' port.
    async fn start(data: &Path) -> (Self, [String; 2]) {
        let _ = fs::remove_file(data.join(LISTENS));
        let program = std::env::current_exe().unwrap();
        let child = Command::new(program).args(["--ignored", "--exact", "erasure::a_coordinator_that_is_killed"]).env(DATA, data).spawn();
        let killed = Self(child.unwrap());
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        loop {
            match fs::read(data.join(LISTENS)) {
                Ok(listens) => return (killed, serde_json::from_slice(&listens).unwrap()),
                Err(_) => assert!(tokio::time::Instant::now() < deadline, "it does not start"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test]
async fn an_erasure_whose_coordinator_is_killed_goes_on_until_nothing_is_left() {
    const CONVERSATIONS: usize = 600;
    for after_ms in [5, 40, 120] {
        let data = tempfile::tempdir().unwrap();
        let (killed, [url, admin]) = Killed::start(data.path()).await;
        let client = reqwest::Client::new();
        let key = json!({"tenant": "acme", "tier": "premium", "user": "ann"});
        let made: Value = client.post(format!("{admin}/admin/keys")).json(&key).send().await.unwrap().json().await.unwrap();
        let key = made["key"].as_str().unwrap_or_else(|| panic!("{made}"));
        let conversation = json!({"items": [{"role": "user", "content": "something to be forgotten"}]});
        let mut making = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let ask = client.post(format!("{url}/v1/conversations")).bearer_auth(key).json(&conversation);
            making.spawn(async move {
                for _ in 0..CONVERSATIONS / 8 {
                    assert_eq!(ask.try_clone().unwrap().send().await.unwrap().status(), 200);
                }
            });
        }
        making.join_all().await;
        let order = json!({"tenant": "acme", "user": "ann"});
        let erase = tokio::spawn(client.post(format!("{admin}/admin/erasures")).json(&order).send());
        // The order is on disk before anything is removed.
        loop {
            let listed: Value = client.get(format!("{admin}/admin/erasures")).send().await.unwrap().json().await.unwrap();
            if listed["erasures"] != json!([]) {
                break;
            }
        }
        tokio::time::sleep(Duration::from_millis(after_ms)).await;
        drop(killed);
        let ended = erase.await.unwrap().is_ok_and(|answer| answer.status() == 200);
        let door = Door::open(data.path()).await;
        let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
        loop {
            let left = door.erase("acme", Some("ann"), true).await;
            println!("killed {after_ms} ms after the order, {} its end: {left}", if ended { "after" } else { "before" });
            if left["total_left"] == 0 {
                break;
            }
            assert!(tokio::time::Instant::now() < deadline, "something is left: {left}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        door.cluster.stop().await;
    }
}
