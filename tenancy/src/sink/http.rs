//! Events posted to an HTTP endpoint, a group in one request.

use super::{Collector, Message};
use crate::web::{self, Client, RequestError, Target, TargetError};
use serde_json::json;
use std::{io, path::PathBuf};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pub target: Target,
    /// The file of the bearer token, read before each request.
    pub token: Option<PathBuf>,
    /// The name of the sender: several coordinators may send to one endpoint.
    pub source: String,
}

#[derive(Debug)]
pub struct Http {
    client: Client,
    settings: Settings,
}

#[derive(Debug, thiserror::Error)]
enum PostError {
    #[error(transparent)]
    Http(#[from] RequestError),
    #[error("the token cannot be read: {0}")]
    Token(io::Error),
}

impl Http {
    pub fn new(settings: Settings) -> Result<Self, TargetError> {
        Ok(Self { client: settings.target.client()?, settings })
    }

    fn post(&self, body: String) -> Result<(), PostError> {
        let token = self.settings.token.as_deref().map(web::read_token).transpose().map_err(PostError::Token)?;
        Ok(self.client.deliver_json(token.as_deref(), body)?)
    }
}

impl Collector for Http {
    fn send(&mut self, messages: &[Message]) -> Result<(), String> {
        let events = messages.iter().map(|message| message.json.as_str()).collect::<Vec<_>>().join(",");
        let body = format!(r#"{{"source":{},"events":[{events}]}}"#, json!(self.settings.source));
        self.post(body).map_err(|error| error.to_string())
    }

    fn target(&self) -> String {
        self.settings.target.url.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        journal::{self, Journal},
        sink::{Journaled, Sink},
        usage::Event,
        web::tests::{Reply, Server, wait_until},
    };
    use std::{
        net::{SocketAddr, TcpListener},
        path::Path,
        sync::atomic::Ordering,
        time::{Duration, Instant, SystemTime},
    };

    /// A few events fill a file, so that the sink has to move on to the next ones.
    const LOG: journal::Settings = journal::Settings { sync_every: Duration::from_millis(20), segment_bytes: 2000 };

    fn meter(dir: &Path) -> Journal<Event> {
        Journal::open(dir, LOG, SystemTime::UNIX_EPOCH, drop).unwrap()
    }

    async fn write(meter: &Journal<Event>, ids: std::ops::Range<usize>) {
        for id in ids {
            meter.write(Event { id: format!("req_{id}"), tenant: "acme".into(), ..Event::default() }).await;
        }
    }

    fn settings(address: SocketAddr) -> Settings {
        Settings { target: Target { url: format!("http://{address}/"), ca: None }, token: None, source: "coordinator-0".into() }
    }

    fn start(dir: &Path, settings: Settings) -> Result<Sink, String> {
        let http = Http::new(settings).unwrap();
        Sink::start("usage", dir.join("sink.json"), Journaled::<Event>::new(dir, "c0"), http).map_err(|error| error.to_string())
    }

    /// The events' ids in order of arrival.
    fn arrived(server: &Server) -> Vec<String> {
        let asked = server.asked.lock().unwrap();
        let ids = asked.iter().flat_map(|(_, body)| {
            let body: serde_json::Value = serde_json::from_str(body).unwrap();
            assert_eq!(body["source"], "coordinator-0");
            body["events"].as_array().unwrap().iter().map(|event| event["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        });
        ids.collect()
    }

    fn ids(range: std::ops::Range<usize>) -> Vec<String> {
        range.map(|id| format!("req_{id}")).collect()
    }

    /// The endpoint is down, then slow, then up; and the process ends in between.
    #[tokio::test]
    async fn everything_arrives_whatever_the_endpoint_does_and_nobody_waits() {
        let dir = tempfile::tempdir().unwrap();
        let log = meter(dir.path());
        // A port without a listener.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let sink = start(dir.path(), settings(address)).unwrap();
        let began = Instant::now();
        write(&log, 0..40).await;
        assert!(began.elapsed() < Duration::from_secs(20), "the log is written whoever collects it");
        wait_until(|| sink.counts().is_failing);
        // Noticed at the next attempt.
        wait_until(|| sink.counts().behind_bytes > 2000);
        assert_eq!(sink.counts().events, 0);
        // The endpoint is up, but at first too slow.
        let server = Server::at(address, Reply { after: Duration::from_secs(30), ..Reply::ok("") }, None);
        wait_until(|| server.connections.load(Ordering::Relaxed) > 0);
        write(&log, 40..50).await;
        server.set(Reply::status(503));
        drop(sink);
        let sink = start(dir.path(), settings(address)).unwrap();
        wait_until(|| sink.counts().failed > 0);
        server.asked.lock().unwrap().clear();
        server.set(Reply::ok(""));
        write(&log, 50..60).await;
        wait_until(|| sink.counts().behind_bytes == 0 && sink.counts().events >= 60);
        assert!(!sink.counts().is_failing);
        let all = arrived(&server);
        assert_eq!(all[all.len() - 60..], ids(0..60), "all, in order, and after the refusals only once");
    }

    #[tokio::test]
    async fn what_has_arrived_is_not_sent_again_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let server = Server::start(Reply::ok(""), None);
        for (begin, end) in [(0, 20), (20, 30), (30, 30), (30, 31)] {
            let log = meter(dir.path());
            let sink = start(dir.path(), settings(server.address)).unwrap();
            write(&log, begin..end).await;
            wait_until(|| arrived(&server).len() == end);
            // Until the cursor is written.
            wait_until(|| sink.counts().behind_bytes == 0);
        }
        assert_eq!(arrived(&server), ids(0..31));
        std::fs::write(dir.path().join("sink.json"), "{").unwrap();
        let error = start(dir.path(), settings(server.address)).unwrap_err();
        assert!(error.contains("sink.json") && error.contains("remove it"), "{error}");
    }

    #[tokio::test]
    async fn a_token_is_sent_as_it_is_now() {
        let dir = tempfile::tempdir().unwrap();
        let (log, server, path) = (meter(dir.path()), Server::start(Reply::ok(""), None), dir.path().join("token"));
        let _sink = start(dir.path(), Settings { token: Some(path.clone()), ..settings(server.address) }).unwrap();
        let heads = || server.asked.lock().unwrap().iter().map(|(head, _)| head.to_lowercase()).collect::<Vec<_>>();
        for token in ["first", "second"] {
            std::fs::write(&path, format!("{token}\n")).unwrap();
            let before = heads().len();
            write(&log, 0..1).await;
            wait_until(|| heads().len() > before);
            assert!(heads().last().unwrap().contains(&format!("authorization: bearer {token}\r\n")), "{:?}", heads());
        }
    }
}
