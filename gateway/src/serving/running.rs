//! Responses that are being streamed, which can be retrieved and cancelled by their ids.

use crate::store::Owner;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use std::{collections::HashMap, sync::Arc};
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub struct RunningResponses(Mutex<HashMap<(Owner, String), Streaming>>);

/// The constant fields of a response, as JSON text. They repeat the request's tools: as a tree these would take many times the memory, for
/// as long as the answer is made.
#[derive(Clone, Debug)]
pub(crate) struct Fixed(Arc<str>);

impl Fixed {
    pub(crate) fn new(fields: Map<String, Value>) -> Self {
        let mut text = Value::Object(fields).to_string();
        text.pop();
        Self(text.into())
    }

    /// Writes a response with its remaining fields.
    pub(crate) fn with(&self, others: &Map<String, Value>) -> String {
        let others = serde_json::to_string(others).expect("it is JSON");
        format!("{},{}", self.0, &others[1..])
    }
}

#[derive(Debug)]
struct Streaming {
    fixed: Fixed,
    cancel: Arc<Notify>,
}

/// A running response's entry in [`RunningResponses`]. Dropping it removes the entry.
#[derive(Debug)]
pub(crate) struct Place {
    all: Arc<RunningResponses>,
    id: (Owner, String),
    cancel: Arc<Notify>,
}

impl RunningResponses {
    pub(crate) fn enter(self: &Arc<Self>, owner: &Owner, id: &str, fixed: Fixed) -> Place {
        let cancel = Arc::new(Notify::new());
        let id = (owner.clone(), id.to_owned());
        self.0.lock().insert(id.clone(), Streaming { fixed, cancel: Arc::clone(&cancel) });
        Place { all: Arc::clone(self), id, cancel }
    }

    pub(crate) fn get(&self, owner: &Owner, id: &str) -> Option<Fixed> {
        self.0.lock().get(&(owner.clone(), id.to_owned())).map(|streaming| streaming.fixed.clone())
    }

    /// Cancels a response. Its stream still sends the rest of it.
    pub(crate) fn cancel(&self, owner: &Owner, id: &str) -> Option<Fixed> {
        let all = self.0.lock();
        let streaming = all.get(&(owner.clone(), id.to_owned()))?;
        streaming.cancel.notify_one();
        Some(streaming.fixed.clone())
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
