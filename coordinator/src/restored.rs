//! Records that came with a backup, made again in a registry that is new.

use serde::Deserialize;
use serde_json::Value;
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tidemill_gateway::{
    base::registry::{ChangeError, Registry},
    serving::gateway::Gateway,
};

/// The pause before records are tried again, while no change can be confirmed.
const RETRY_EVERY: Duration = Duration::from_secs(2);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Restored {
    kind: String,
    key: String,
    value: Value,
}

/// Makes the records in the file `path` that there are not, and removes the file. Ends at once if there is none.
pub(crate) async fn bring_back(gateway: Arc<Gateway>, path: PathBuf) {
    let records = match read(&path) {
        Ok(Some(records)) => records,
        Ok(None) => return,
        Err(error) => {
            tracing::error!(path = %path.display(), %error, "the records of a backup cannot be read: restore it again, or make them again");
            return;
        }
    };
    let mut made = 0;
    for record in records {
        made += u64::from(make(gateway.registry(), record).await);
    }
    match fs::remove_file(&path) {
        Ok(()) => tracing::info!(made, "the records of a backup are there again"),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "the records of a backup are there again, and their file cannot be removed")
        }
    }
}

fn read(path: &Path) -> io::Result<Option<Vec<Restored>>> {
    match fs::read(path) {
        Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Makes a record, unless there is one of its name. Returns whether it was made.
async fn make(registry: &dyn Registry, Restored { kind, key, value }: Restored) -> bool {
    loop {
        match registry.put(kind.clone(), key.clone(), value.clone(), Some(0)).await {
            Ok(_) => return true,
            Err(ChangeError::Conflict(_)) => return false,
            // A single coordinator confirms within moments of its start; several need a majority, which may take its time.
            Err(ChangeError::NotNow(_)) => tokio::time::sleep(RETRY_EVERY).await,
            Err(error) => {
                tracing::warn!(kind, key, %error, "a record of a backup was refused");
                return false;
            }
        }
    }
}
