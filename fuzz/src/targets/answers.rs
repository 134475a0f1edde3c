//! Servers that answer whatever is asked: the answers of another region, and of an identity provider.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    time::timeout,
};

/// The time that the server leaves a client after its answer, and at most for its request.
const PATIENCE: Duration = Duration::from_secs(5);
const HEAD_BYTES_MAX: usize = 64 << 10;

/// A server on this machine whose answers are bytes, each after one request of a connection, which ends it.
pub(super) struct Server {
    pub(super) url: String,
    /// The answers by path; a path without one is closed at once.
    answers: Arc<Mutex<HashMap<String, Vec<u8>>>>,
}

impl Server {
    pub(super) fn start(runtime: &Runtime) -> anyhow::Result<Self> {
        let listener = runtime.block_on(TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))))?;
        let server = Self { url: format!("http://{}", listener.local_addr()?), answers: Arc::default() };
        let answers = Arc::clone(&server.answers);
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let answers = Arc::clone(&answers);
                tokio::spawn(timeout(2 * PATIENCE, answer(stream, answers)));
            }
        });
        Ok(server)
    }

    pub(super) fn set(&self, path: &str, answer: Vec<u8>) {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned(), answer);
    }
}

async fn answer(mut stream: TcpStream, answers: Arc<Mutex<HashMap<String, Vec<u8>>>>) {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") && head.len() < HEAD_BYTES_MAX {
        if !matches!(stream.read_buf(&mut head).await, Ok(1..)) {
            return;
        }
    }
    let path = String::from_utf8_lossy(&head).split_whitespace().nth(1).unwrap_or_default().to_owned();
    let answer = answers.lock().unwrap_or_else(PoisonError::into_inner).get(&path).cloned();
    let _ = stream.write_all(&answer.unwrap_or_default()).await;
    let _ = stream.shutdown().await;
    // Closed with unread bytes, a connection takes its answer with it.
    let _ = timeout(PATIENCE, async { while matches!(stream.read(&mut [0; 4096]).await, Ok(1..)) {} }).await;
}

/// A whole answer with this body.
pub(super) fn whole(status: &str, kind: &str, body: &[u8]) -> Vec<u8> {
    let head = format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
    [head.as_bytes(), body].concat()
}
