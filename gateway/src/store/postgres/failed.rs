//! Why a transaction of the store fails.

use crate::store::StoreError;

/// Why a transaction failed, and whether it may be tried again.
pub(super) enum Failed {
    Store(StoreError),
    Server(tokio_postgres::Error),
    /// Others have deleted meanwhile what was there.
    Overtaken,
}

pub(super) type Outcome<T> = Result<T, Failed>;

pub(super) fn missing(id: &str) -> Failed {
    Failed::Store(StoreError::NotFound(id.to_owned()))
}

/// The server refuses text with a NUL, so no id has one.
pub(super) fn speakable(id: &str) -> Outcome<&str> {
    if id.contains('\0') { Err(missing(id)) } else { Ok(id) }
}

impl From<tokio_postgres::Error> for Failed {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Server(error)
    }
}
