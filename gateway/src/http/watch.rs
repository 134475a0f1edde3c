//! `/cluster/events`: the contents of `/cluster`, twice a second, and each choice that ended, as server-sent events.
//!
//! - `recent`: an array of the last choices that ended, once, at the start
//! - `request`: a choice that has ended since
//! - `snapshot`: the cluster, and the share of choices that met the objectives
//!
//! The number of viewers is bounded, and no events queue for them, since an event is made when its connection has room.

use crate::{
    metrics::recent::FinishedRequest,
    requests::error::ApiError,
    serving::gateway::{Gateway, VIEWERS_MAX},
};
use axum::{
    extract::State,
    response::{IntoResponse, Response, Sse, sse::Event},
};
use futures_util::stream;
use serde::Serialize;
use std::{collections::VecDeque, convert::Infallible, sync::Arc, time::Duration};
use tidemill_cluster::ClusterView;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Interval, MissedTickBehavior, interval},
};

const SNAPSHOT_EVERY: Duration = Duration::from_millis(500);

#[derive(Serialize)]
struct Snapshot {
    cluster: ClusterView,
    goodput: Option<f64>,
}

/// An event with its age, since the reader's clock may differ from ours.
#[derive(Serialize)]
struct Aged<'a> {
    age_ms: u128,
    #[serde(flatten)]
    request: &'a FinishedRequest,
}

struct Watch {
    gateway: Arc<Gateway>,
    ticks: Interval,
    /// The number of the first request that this viewer has not seen.
    next: u64,
    ready: VecDeque<Event>,
    _viewer: OwnedSemaphorePermit,
}

pub async fn events(State(gateway): State<Arc<Gateway>>) -> Result<Response, ApiError> {
    let viewer = gateway.admit_viewer().ok_or_else(|| ApiError::too_many_viewers(VIEWERS_MAX))?;
    let (recent, next) = gateway.recent().since(0);
    let recent: Vec<_> = recent.iter().map(|request| aged(request)).collect();
    let mut ticks = interval(SNAPSHOT_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let watch = Watch { gateway, ticks, next, ready: VecDeque::from([event("recent", &recent)]), _viewer: viewer };
    let events = stream::unfold(watch, |mut watch| async move {
        let event = watch.next().await?;
        Some((Ok::<_, Infallible>(event), watch))
    });
    Ok(Sse::new(events).into_response())
}

impl Watch {
    /// Returns the next event, or `None` when the coordinator drains: a viewer must not hold up its end.
    async fn next(&mut self) -> Option<Event> {
        if self.ready.is_empty() {
            self.ticks.tick().await;
            self.gateway.check_draining().ok()?;
            self.fill();
        }
        self.ready.pop_front()
    }

    fn fill(&mut self) {
        let (requests, next) = self.gateway.recent().since(self.next);
        self.next = next;
        self.ready.extend(requests.iter().map(|request| event("request", &aged(request))));
        // Decisions are left to clients of `/cluster`: twice a second they would make up most of this stream.
        let cluster = ClusterView { decisions: Vec::new(), ..self.gateway.view() };
        let snapshot = Snapshot { cluster, goodput: self.gateway.goodput() };
        self.ready.push_back(event("snapshot", &snapshot));
    }
}

fn aged(request: &FinishedRequest) -> Aged<'_> {
    Aged { age_ms: request.at.elapsed().as_millis(), request }
}

fn event(name: &str, data: &impl Serialize) -> Event {
    Event::default().event(name).data(serde_json::to_string(data).expect("its maps have string keys"))
}
