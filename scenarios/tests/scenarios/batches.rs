//! Batches whose coordinator dies: real processes, killed.

use crate::support::{Script, Worker, decode, fixture, program};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};
use tidemill_net::identity;
use tokio::time::{sleep, timeout};

const SOON: Duration = Duration::from_secs(30);

/// A coordinator, killed when it is dropped.
struct Process {
    child: Child,
    url: String,
    quic: SocketAddr,
}

impl Process {
    fn start(pki: &Path, data: &Path) -> Self {
        let mut child = Command::new(program())
            .args(["--http", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--served-model-name", "tiny", "--log", "warn", "--model"])
            .arg(fixture("llama3"))
            .args(["--pki".as_ref(), pki.as_os_str(), "--data".as_ref(), data.as_os_str()])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let after = |mark: &str| line.split(' ').find_map(|word| word.trim().strip_prefix(mark)).unwrap_or_else(|| panic!("{line}"));
        let (url, quic) = (format!("http://{}", after("http://")), after("quic://").parse().unwrap());
        Self { child, url, quic }
    }

    async fn ask(&self, request: reqwest::RequestBuilder) -> Value {
        let response = timeout(SOON, request.send()).await.unwrap().unwrap();
        let status = response.status();
        let text = response.text().await.unwrap();
        assert!(status.is_success(), "{status}: {text}");
        serde_json::from_str(&text).unwrap_or(Value::String(text))
    }

    async fn get(&self, path: &str) -> Value {
        self.ask(reqwest::Client::new().get(format!("{}{path}", self.url))).await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Starts a batch of two completion requests.
async fn begin(coordinator: &Process) -> String {
    let line = |id: &str| json!({"custom_id": id, "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": id}});
    let form = format!(
        "--b\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\ncontent-disposition: form-data; name=\"file\"; \
         filename=\"a.jsonl\"\r\n\r\n{}\n{}\n\r\n--b--\r\n",
        line("guilty"),
        line("innocent")
    );
    let client = reqwest::Client::new();
    let upload = client.post(format!("{}/v1/files", coordinator.url)).header("content-type", "multipart/form-data; boundary=b").body(form);
    let file = coordinator.ask(upload).await;
    let wanted = json!({"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"});
    let batch = coordinator.ask(client.post(format!("{}/v1/batches", coordinator.url)).json(&wanted)).await;
    batch["id"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_ran_at_two_deaths_is_failed_and_those_beside_it_are_answered() {
    let (pki, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    identity::create(pki.path()).unwrap();
    let stalls = || Script { stall_after: 0, ..Script::reply(&[40, 41]) };

    let coordinator = Process::start(pki.path(), data.path());
    let mut worker = Worker::join(pki.path(), coordinator.quic, "decode-0", decode(), stalls()).await;
    let batch = begin(&coordinator).await;
    worker.decode_job().await;
    worker.decode_job().await;
    drop(coordinator);
    worker.kill().await;

    // Both are suspects now, and run one after the other.
    let coordinator = Process::start(pki.path(), data.path());
    let mut worker = Worker::join(pki.path(), coordinator.quic, "decode-0", decode(), stalls()).await;
    worker.decode_job().await;
    assert!(timeout(Duration::from_millis(500), worker.decode_job()).await.is_err(), "one suspect runs at a time");
    drop(coordinator);
    worker.kill().await;

    let coordinator = Process::start(pki.path(), data.path());
    let worker = Worker::join(pki.path(), coordinator.quic, "decode-0", decode(), Script::reply(&[40, 41])).await;
    let ended = timeout(SOON, async {
        loop {
            let batch = coordinator.get(&format!("/v1/batches/{batch}")).await;
            if batch["status"] == "completed" {
                break batch;
            }
            sleep(Duration::from_millis(50)).await;
        }
    });
    let batch = ended.await.unwrap();
    assert_eq!((&batch["request_counts"]["completed"], &batch["request_counts"]["failed"]), (&json!(1), &json!(1)), "{batch}");
    let content = async |id: &Value| coordinator.get(&format!("/v1/files/{}/content", id.as_str().unwrap())).await;
    let failed = content(&batch["error_file_id"]).await;
    assert_eq!(failed["error"]["code"], "server_died", "{failed}");
    let answered = content(&batch["output_file_id"]).await;
    assert_eq!(answered["response"]["status_code"], 200, "{answered}");
    assert_ne!(failed["custom_id"], answered["custom_id"]);
    worker.kill().await;
}
