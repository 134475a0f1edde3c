//! Retention at a real gateway: an old file goes at the next start.

use super::support::Cluster;
use serde_json::{Value, json};
use std::{fs, path::Path, time::Duration};
use tidemill_coordinator::settings::retention::RetentionFlags;

async fn open(data: &Path) -> Cluster {
    Cluster::start(|flags| {
        flags.data = Some(data.to_owned());
        flags.retention = Some(RetentionFlags { files_days: Some(1), ..RetentionFlags::default() });
    })
    .await
}

async fn upload(cluster: &Cluster) -> String {
    let form = "--b\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--b\r\ncontent-disposition: form-data; \
                name=\"file\"; filename=\"a.jsonl\"\r\n\r\n{}\r\n--b--\r\n";
    let upload = reqwest::Client::new().post(format!("{}/v1/files", cluster.url));
    let sent = upload.header("content-type", "multipart/form-data; boundary=b").body(form).send().await.unwrap();
    let file: Value = sent.json().await.unwrap();
    file["id"].as_str().unwrap_or_else(|| panic!("{file}")).to_owned()
}

#[tokio::test]
async fn a_file_of_yesterday_goes_and_todays_stays() {
    let data = tempfile::tempdir().unwrap();
    let cluster = open(data.path()).await;
    let (old, new) = (upload(&cluster).await, upload(&cluster).await);
    cluster.stop().await;
    let files = data.path().join("batches/files");
    let path = files.join(format!("{old}.json"));
    let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    record["created_ms"] = json!(record["created_ms"].as_u64().unwrap() - 25 * 3600 * 1000);
    fs::write(&path, record.to_string()).unwrap();

    let cluster = open(data.path()).await;
    let status = async |id: &str| cluster.get(&format!("/v1/files/{id}")).await.status().as_u16();
    assert_eq!([status(&old).await, status(&new).await], [404, 200]);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while path.exists() || files.join(format!("{old}.content")).exists() {
        assert!(tokio::time::Instant::now() < deadline, "it is still there");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let metrics = cluster.get("/metrics").await.text().await.unwrap();
    assert!(metrics.contains("tidemill_expired_total{kind=\"files\"} "), "{metrics}");
    assert_eq!(status(&new).await, 200);
    cluster.stop().await;
}
