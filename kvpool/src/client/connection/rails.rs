//! Opens a connection's rails, and reopens those that were lost.

use super::{ANSWER_MAX, Inner};
use crate::transport::rdma::client::Rails;
use std::{
    sync::{Arc, Weak},
    time::Duration,
};
use tidemill_proto::pool::{FromPool, ToPool};
use tokio::{
    sync::oneshot,
    task::spawn_blocking,
    time::{sleep, timeout},
};

/// The longest time for which a new connection waits for its rails; until they are open, blocks go another way. A node needs longer only to
/// register its arena for its first client.
const OPEN_MAX: Duration = Duration::from_secs(3);
/// The interval at which a lost rail is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Keeps rails open as long as the connection lasts. Returns when all have been tried once.
pub(super) async fn keep_open(inner: &Arc<Inner>, rails: Arc<Rails>) {
    let (tried, first) = oneshot::channel();
    tokio::spawn(retry(Arc::downgrade(inner), rails, tried));
    let _ = timeout(OPEN_MAX, first).await;
}

async fn retry(inner: Weak<Inner>, rails: Arc<Rails>, tried: oneshot::Sender<()>) {
    let mut tried = Some(tried);
    while let Some(inner) = inner.upgrade().filter(|inner| inner.calls.is_open()) {
        if rails.is_incomplete() {
            open(&inner, &rails).await;
        }
        drop(inner);
        // The waiting task may be gone.
        let _ = tried.take().map(|tried| tried.send(()));
        sleep(RETRY).await;
    }
}

/// Opens a rail for each device that has none. Those that fail are tried again later.
async fn open(inner: &Inner, rails: &Arc<Rails>) -> Option<()> {
    let beginning = Arc::clone(rails);
    let opening = spawn_blocking(move || beginning.begin()).await.ok()?;
    let ends = opening.ends();
    if ends.is_empty() {
        return None;
    }
    let count = ends.len();
    let mut call = inner.begin(1).ok()?;
    inner.send(ToPool::OpenRails { call: call.id(), ends }).await.ok()?;
    let reply = timeout(ANSWER_MAX, call.replies.recv()).await.ok()??;
    let opened = match reply {
        FromPool::RailsOpened { rails, .. } if rails.len() == count => rails,
        _ => {
            // This ends the connection: rails do not outlive it.
            let _ = inner.nonsense();
            return Some(());
        }
    };
    let finishing = Arc::clone(rails);
    spawn_blocking(move || finishing.finish(opening, opened)).await.ok()
}
