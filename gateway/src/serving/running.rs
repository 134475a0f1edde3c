//! Responses that are being streamed: they can be looked at and cancelled by their ids.

use crate::store::Owner;
use parking_lot::Mutex;
use serde_json::Value;
use std::{collections::HashMap, sync::Arc};
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub struct RunningResponses(Mutex<HashMap<(Owner, String), Streaming>>);

#[derive(Debug)]
struct Streaming {
    /// The response as at its beginning.
    response: Value,
    cancel: Arc<Notify>,
}

/// A response's place here, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    all: Arc<RunningResponses>,
    id: (Owner, String),
    cancel: Arc<Notify>,
}

impl RunningResponses {
    pub(crate) fn enter(self: &Arc<Self>, owner: &Owner, id: &str, response: Value) -> Place {
        let cancel = Arc::new(Notify::new());
        let id = (owner.clone(), id.to_owned());
        self.0.lock().insert(id.clone(), Streaming { response, cancel: Arc::clone(&cancel) });
        Place { all: Arc::clone(self), id, cancel }
    }

    pub(crate) fn get(&self, owner: &Owner, id: &str) -> Option<Value> {
        self.0.lock().get(&(owner.clone(), id.to_owned())).map(|streaming| streaming.response.clone())
    }

    /// Cancels a response. Returns it as it will be; its stream has the rest.
    pub(crate) fn cancel(&self, owner: &Owner, id: &str) -> Option<Value> {
        let all = self.0.lock();
        let streaming = all.get(&(owner.clone(), id.to_owned()))?;
        streaming.cancel.notify_one();
        let mut response = streaming.response.clone();
        response["status"] = "cancelled".into();
        Some(response)
    }
}

impl Place {
    /// A notification that a client wants the response to end.
    pub(crate) fn cancelled(&self) -> Arc<Notify> {
        Arc::clone(&self.cancel)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all.0.lock().remove(&self.id);
    }
}
