//! Bodies on their way in, and every client's share of the resources they take: bytes, places, threads.

use super::Gateway;
use crate::{
    base::{
        line::{LARGE_BYTES, Stage},
        shares::{Party, Share},
    },
    requests::{body::Whole, computing, error::ApiError, parse},
    tenants::Caller,
};
use axum::body::Body;
use serde::de::DeserializeOwned;
use std::{sync::Arc, time::Duration};
use tokio::sync::OwnedSemaphorePermit;

/// The maximum size of stored items that are loaded for, or being sent to, one client.
pub(super) const ANSWER_BYTES_MAX: u64 = 64 << 20;

impl Gateway {
    /// The party whose share a request counts to: its tenant, or its address while no key is needed.
    pub fn party(&self) -> Party {
        self.caller.as_ref().map_or(Party::Server, |caller| caller.party())
    }

    /// The time within which a request's body must arrive, and the longest silence in an upload.
    pub fn body_timeout(&self) -> Duration {
        self.shared.settings.requests.body_timeout
    }

    pub async fn read(&self, body: Body) -> Result<Whole, ApiError> {
        self.check_draining()?;
        let whole = self.shared.bodies.read(self.party(), body).await?;
        // A small body takes little memory, whatever it contains.
        if whole.len() <= LARGE_BYTES {
            return Ok(whole);
        }
        self.compute_body(0, move || whole.counted()).await
    }

    /// Reads a body as `T`.
    pub async fn read_json<T: DeserializeOwned + Send + 'static>(&self, body: Body) -> Result<T, ApiError> {
        let body = self.read(body).await?;
        self.compute_body(body.weight(), move || parse::json(&body)).await
    }

    /// Works on a request off the event loop, which only moves bytes: a schema may take a second, however short the request is. `bytes` is
    /// the size of the work's input.
    pub async fn compute_body<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.shared.computing.run(self.party(), Stage::First, bytes, work).await
    }

    /// Continues a request whose earlier work is done. Its results are held in memory meanwhile, so it goes before requests that have not
    /// started. `bytes` is the size of the input that was not counted before.
    pub async fn compute_on<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.shared.computing.run(self.party(), Stage::Later, bytes, work).await
    }

    /// Works on a small input, or one that was counted before, off the event loop.
    pub async fn compute<T: Send + 'static>(&self, work: impl FnOnce() -> Result<T, ApiError> + Send + 'static) -> Result<T, ApiError> {
        self.compute_body(0, work).await
    }

    /// Takes a place for a request from its tenant's share, or its address's while no key is needed.
    pub fn admit_request(&self, caller: &Caller) -> Result<Share, ApiError> {
        self.shared.requests.take(caller.party(), 1).map_err(|refused| computing::refusal("requests", refused))
    }

    /// Takes a place for a file that is uploaded.
    pub fn admit_upload(&self) -> Result<Share, ApiError> {
        self.shared.uploads.take(self.party(), 1).map_err(|refused| computing::refusal("uploads", refused))
    }

    /// Takes room for stored items that are sent to a client.
    pub fn admit_answer(&self, bytes: usize) -> Result<Share, ApiError> {
        // An answer that exceeds a share is still sent, by itself.
        let amount = (bytes as u64).min(ANSWER_BYTES_MAX);
        self.shared.answers.take(self.party(), amount).map_err(|refused| computing::refusal("answers", refused))
    }

    /// Takes the permit to write a backup; `None` if one is being written.
    pub fn only_backup(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.shared.backup).try_acquire_owned().ok()
    }

    /// Takes a permit to watch the cluster; `None` if the maximum number of viewers is reached.
    pub fn admit_viewer(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.shared.viewers).try_acquire_owned().ok()
    }
}
