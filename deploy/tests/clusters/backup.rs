//! `tidemill backup` beside a coordinator that works, and `tidemill restore`: everything that clients and operators left is there again,
//! and what was ordered to be erased is erased again.

use crate::support::Cluster;
use serde_json::{Value, json};
use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

/// A small model with a chat template.
const MODEL: (&str, &str) = ("prose", concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/prose"));

/// A cluster with keys, on a data directory that outlives it.
struct Door {
    cluster: Cluster,
    client: reqwest::Client,
    admin: String,
    key: String,
}

impl Door {
    fn open(data: &Path, key: &str) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").port();
        let admin = format!("127.0.0.1:{port}");
        let flags = ["--prefill", "0", "--kvpool", "0", "--threads", "1", "--admin", &admin, "--data", data.to_str().expect("text")];
        let client = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(60)).build().expect("a client");
        Self { cluster: Cluster::start_with(&[MODEL], &flags), client, admin: format!("http://{admin}"), key: key.to_owned() }
    }

    async fn of_operator(&self, method: reqwest::Method, path: &str, body: Value) -> Value {
        let response = self.client.request(method, format!("{}{path}", self.admin)).json(&body).send().await.expect("it answers");
        let (status, answer) = (response.status(), response.json().await.expect("JSON"));
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    async fn make_key(&self, user: &str) -> String {
        let made = self.of_operator(reqwest::Method::POST, "/admin/keys", json!({"tenant": "acme", "tier": "premium", "user": user})).await;
        made["key"].as_str().expect("a key").to_owned()
    }

    async fn post(&self, key: &str, path: &str, body: &Value) -> (u16, Value) {
        let response =
            self.client.post(format!("{}{path}", self.cluster.url)).bearer_auth(key).json(body).send().await.expect("it answers");
        (response.status().as_u16(), response.json().await.expect("JSON"))
    }

    async fn get(&self, key: &str, path: &str) -> (u16, String) {
        let response = self.client.get(format!("{}{path}", self.cluster.url)).bearer_auth(key).send().await.expect("it answers");
        (response.status().as_u16(), response.text().await.expect("text"))
    }

    /// A stored answer: its id and its text.
    async fn respond(&self, key: &str, input: &str, after: Option<&str>) -> (String, String) {
        let body = json!({
            "model": "friend", "input": input, "previous_response_id": after, "temperature": 0, "max_output_tokens": 16, "store": true,
        });
        let (status, answer) = self.post(key, "/responses", &body).await;
        assert_eq!(status, 200, "{answer}");
        let text = answer["output"].to_string();
        // Ids of items are drawn.
        let text = text.split('"').filter(|part| !part.starts_with("msg_") && !part.starts_with("rs_")).collect();
        (answer["id"].as_str().expect("an id").to_owned(), text)
    }

    /// Waits until the alias counts, which takes moments.
    async fn until_alias(&self, key: &str) {
        let body = json!({"model": "friend", "input": "hello", "max_output_tokens": 1});
        self.until("the alias", async || self.post(key, "/responses", &body).await.0 == 200).await;
    }

    async fn upload(&self, contents: &str) -> String {
        let form = format!(
            "--b\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\ncontent-disposition: form-data; name=\"file\"; \
             filename=\"a.jsonl\"\r\n\r\n{contents}\r\n--b--\r\n"
        );
        let upload = self.client.post(format!("{}/files", self.cluster.url)).bearer_auth(&self.key);
        let sent = upload.header("content-type", "multipart/form-data; boundary=b").body(form).send().await.expect("it answers");
        let file: Value = sent.json().await.expect("JSON");
        file["id"].as_str().unwrap_or_else(|| panic!("{file}")).to_owned()
    }

    /// Takes a backup while clients store answers, each of which must succeed.
    async fn back_up_under_load(&self, file: &Path) -> u64 {
        let (done, stored) = (AtomicBool::new(false), AtomicU64::new(0));
        let clients = async {
            while !done.load(Ordering::Relaxed) {
                self.respond(&self.key, "go on", None).await;
                stored.fetch_add(1, Ordering::Relaxed);
            }
        };
        let backup = async {
            // Some are on their way.
            while stored.load(Ordering::Relaxed) < 3 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let (file, admin) = (file.to_owned(), self.admin.clone());
            let backup = move || tidemill(&["backup", "--out", file.to_str().expect("text"), "--url", &admin]);
            let output = tokio::task::spawn_blocking(backup).await.expect("no panic");
            done.store(true, Ordering::Relaxed);
            assert!(output.status.success(), "{output:?}");
        };
        tokio::join!(clients, backup);
        stored.into_inner()
    }
}

fn tidemill(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tidemill")).args(args).output().expect("tidemill runs")
}

fn restore(file: &Path, data: &Path) -> Output {
    tidemill(&["restore", file.to_str().expect("text"), "--data", data.to_str().expect("text")])
}

/// The data directory of the only coordinator of a cluster.
fn of_coordinator(data: &Path) -> PathBuf {
    data.join("coordinator-0")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_backup_under_load_has_everything_and_erased_data_does_not_come_back() {
    let dir = tempfile::tempdir().expect("a directory");
    let (first, second, third) = (dir.path().join("first"), dir.path().join("second"), dir.path().join("third"));
    let (early, late) = (dir.path().join("early.tar"), dir.path().join("late.tar"));

    let mut door = Door::open(&first, "");
    door.key = door.make_key("bob").await;
    let ann = door.make_key("ann").await;
    door.of_operator(reqwest::Method::PUT, "/registry/alias/friend", json!({"value": MODEL.0})).await;
    door.until_alias(&door.key).await;
    let (of_ann, _) = door.respond(&ann, "hello, I am ann", None).await;
    let (of_bob, said) = door.respond(&door.key, "hello, I am bob", None).await;
    let (_, then) = door.respond(&door.key, "and then?", Some(&of_bob)).await;
    let uploaded = door.upload("{\"some\": \"lines\"}").await;
    let stored = door.back_up_under_load(&early).await;
    assert!(stored >= 3, "clients went on: {stored}");

    // Ann is erased, and the backup after that knows it.
    let erased = door.of_operator(reqwest::Method::POST, "/admin/erasures", json!({"tenant": "acme", "user": "ann"})).await;
    assert!(erased["erased"].to_string().contains('1'), "{erased}");
    door.back_up_under_load(&late).await;
    let again = tidemill(&["backup", "--out", late.to_str().expect("text"), "--url", &door.admin]);
    assert!(!again.status.success() && String::from_utf8_lossy(&again.stderr).contains("already"), "{again:?}");
    let key = door.key.clone();
    door.cluster.stop();
    assert!(!of_coordinator(&first).join("backup").exists(), "the copies are removed");

    // Wrong archives are refused, and leave nothing.
    let whole = fs::read(&late).expect("a backup");
    let (mut flipped, wrong) = (whole.clone(), dir.path().join("wrong.tar"));
    flipped[whole.len() / 2] ^= 4;
    for (bytes, words) in
        [(&flipped[..], "is not what was written"), (&whole[..whole.len() / 3], "too early"), (&whole[512..], "no backup")]
    {
        fs::write(&wrong, bytes).expect("written");
        let refused = restore(&wrong, &of_coordinator(&second));
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains(words), "{words}: {refused:?}");
        assert_eq!(fs::read_dir(of_coordinator(&second)).expect("made").count(), 0, "{words}");
    }
    let not_empty = restore(&late, &of_coordinator(&first));
    assert!(!not_empty.status.success() && String::from_utf8_lossy(&not_empty.stderr).contains("is not empty"), "{not_empty:?}");

    // The early one: everybody's answers, keys, files and aliases are there, and a conversation goes on as it did.
    let restored = restore(&early, &of_coordinator(&second));
    assert!(restored.status.success(), "{restored:?}");
    let door = Door::open(&second, &key);
    door.until_alias(&key).await;
    for (key, id) in [(&ann, &of_ann), (&key, &of_bob)] {
        assert_eq!(door.get(key, &format!("/responses/{id}")).await.0, 200);
    }
    assert_eq!(door.respond(&key, "hello, I am bob", None).await.1, said);
    assert_eq!(door.respond(&key, "and then?", Some(&of_bob)).await.1, then);
    assert_eq!(door.get(&key, &format!("/files/{uploaded}/content")).await, (200, "{\"some\": \"lines\"}".into()));
    let spent = door.client.get(format!("{}/admin/export?tenant=acme&user=ann", door.admin)).send().await.expect("it answers");
    assert!(spent.text().await.expect("text").contains("\"kind\":\"usage\""), "what ann used is known");
    door.cluster.stop();

    // The late one, with answers of before the order: the order is carried out again.
    let restored = restore(&late, &of_coordinator(&third));
    assert!(restored.status.success(), "{restored:?}");
    let unpacked = dir.path().join("unpacked");
    assert!(restore(&early, &unpacked).status.success());
    fs::copy(unpacked.join("responses.sqlite"), of_coordinator(&third).join("responses.sqlite")).expect("copied");
    let door = Door::open(&third, &key);
    door.until("the order", async || door.get(&ann, &format!("/responses/{of_ann}")).await.0 == 404).await;
    assert_eq!(door.get(&key, &format!("/responses/{of_bob}")).await.0, 200, "bob stays");
    door.cluster.stop();
}

impl Door {
    async fn until(&self, what: &str, holds: impl AsyncFn() -> bool) {
        let began = Instant::now();
        while !holds().await {
            assert!(began.elapsed() < Duration::from_secs(30), "{what} is not there");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}
