//! Requests that another region answers, because they would wait too long here. A layer inside the replay of answers. Its sender must have
//! quota left, which is taken where the answer is computed.

use super::{
    access::{refusal, speaks_anthropic},
    replay,
};
use crate::{
    metrics,
    requests::{
        error::ApiError,
        parse::{self, JsonBody},
    },
    serving::{
        gateway::{Gateway, route::RouteRequest},
        regions::{PATHS, REGION, RELAYED_FROM, Regions, Relayed, needs_the_store},
    },
    tenants::Caller,
    traces::names,
};
use axum::{
    body::Body,
    extract::{Request, State},
    http::HeaderValue,
    middleware::Next,
    response::Response,
};
use serde_json::Value;
use std::sync::Arc;

/// The way of a request.
enum Way {
    Here(Request),
    Answered(Response),
}

/// Layer around the generating endpoints.
pub(super) async fn layer(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let Some(regions) = gateway.regions() else { return next.run(request).await };
    let messages = speaks_anthropic(&request);
    let way = match PATHS.into_iter().find(|path| *path == request.uri().path()) {
        Some(path) if gateway.some_wait_too_long(regions.wait_ms()) => way(&gateway, regions, path, request).await,
        _ => Ok(Way::Here(request)),
    };
    let response = match way {
        Ok(Way::Answered(response)) => return response,
        Ok(Way::Here(request)) => next.run(request).await,
        Err(error) => {
            metrics::count_request(error.outcome());
            refusal(error, messages)
        }
    };
    named(response, regions)
}

/// Relays a request if it should be answered elsewhere and is. A request that was relayed to here is refused instead: it can still be
/// answered where it came from.
async fn way(gateway: &Arc<Gateway>, regions: &Arc<Regions>, path: &'static str, request: Request) -> Result<Way, ApiError> {
    let caller = request.extensions().get::<Arc<Caller>>().cloned();
    let caller = caller.ok_or_else(|| ApiError::internal("the sender was not authenticated: please report this as a bug"))?;
    let was_relayed = request.headers().contains_key(RELAYED_FROM);
    let stays = request.headers().contains_key(replay::KEY) || parse::check_content_type(request.headers()).is_err();
    if stays || !(was_relayed || regions.has_way(&caller)) {
        return Ok(Way::Here(request));
    }
    let sender = gateway.for_caller(Arc::clone(&caller));
    let (parts, body) = request.into_parts();
    let body = sender.read(body).await?;
    let (worker, limit_ms) = (Arc::clone(&sender), regions.wait_ms());
    let looked_at = sender.compute_body(body.weight(), move || {
        // A body that cannot be read is its endpoint's to refuse.
        let wish = JsonBody::parse(&body).ok().and_then(|parsed| {
            let text = |field: &str| parsed.fields().get(field).and_then(|value| value.as_str());
            let asked = RouteRequest { path: None, model: text("model"), service_tier: text("service_tier"), body: parsed.fields() };
            let reason = (!needs_the_store(path, parsed.fields())).then(|| worker.waits_too_long(&asked, limit_ms)).flatten()?;
            Some((reason, parsed.fields().get("stream") == Some(&Value::Bool(true))))
        });
        Ok((body, wish))
    });
    let (body, wish) = looked_at.await?;
    if let Some((reason, streams)) = wish {
        if was_relayed {
            return Err(ApiError::busy_region(regions.name(), &reason));
        }
        let relayed = Relayed { caller: &caller, path, headers: &parts.headers, body: body.bytes(), streams };
        if let Some(answered) = regions.relay(relayed).await {
            let response = answered?;
            if let (Some(trace), Some(region)) = (&caller.trace, response.headers().get(REGION).and_then(|name| name.to_str().ok())) {
                trace.set(names::REGION, region);
            }
            return Ok(Way::Answered(response));
        }
    }
    Ok(Way::Here(Request::from_parts(parts, Body::from(body.into_bytes()))))
}

/// Names this region in an answer.
fn named(mut response: Response, regions: &Regions) -> Response {
    if let Ok(name) = HeaderValue::from_str(regions.name()) {
        response.headers_mut().insert(REGION, name);
    }
    response
}
