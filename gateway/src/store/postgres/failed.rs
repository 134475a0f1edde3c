//! Failures of the store's transactions.

use crate::store::StoreError;

/// The failure of a transaction, and whether it may be retried.
pub(super) enum Failed {
    Store(StoreError),
    Server(tokio_postgres::Error),
    /// The data was deleted by a concurrent transaction.
    Overtaken,
}

pub(super) type Outcome<T> = Result<T, Failed>;

pub(super) fn missing(id: &str) -> Failed {
    Failed::Store(StoreError::NotFound(id.to_owned()))
}

/// Checks an id: the server refuses text with a NUL, so no stored id has one.
pub(super) fn speakable(id: &str) -> Outcome<&str> {
    if id.contains('\0') { Err(missing(id)) } else { Ok(id) }
}

impl From<tokio_postgres::Error> for Failed {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Server(error)
    }
}
