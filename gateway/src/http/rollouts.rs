//! `/rollouts`: users move from one model to another. Only on the operators' port, at any coordinator: each request becomes a record that
//! all coordinators follow.

use super::{admin, parameters::Path, records::refused};
use crate::{
    base::stamp::unix,
    requests::{error::ApiError, parse},
    rollout::{
        KIND,
        record::{Golden, NewRollout, Rollout, State as Stage, Wrong},
        running::Status,
        votes::Voter,
    },
    serving::gateway::Gateway,
};
use axum::{Json, body::Body, extract::State};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    from: String,
    /// The scores, for the action `golden`.
    #[serde(default)]
    golden: Option<Golden>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Votes {
    model: String,
    #[serde(default)]
    up: u64,
    #[serde(default)]
    down: u64,
}

/// `GET /rollouts`.
pub async fn list(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    let rollouts: Vec<Status> = gateway.rollouts().status();
    Json(json!({"rollouts": rollouts}))
}

/// `POST /rollouts`.
pub async fn start(State(gateway): State<Arc<Gateway>>, body: Body) -> Result<Json<Value>, ApiError> {
    let wanted: NewRollout = admin::read(body).await?;
    let records = gateway.registry().records(Some(KIND), None);
    let others: Vec<(Rollout, u64)> =
        records.into_iter().filter_map(|record| Some((serde_json::from_value(record.value).ok()?, record.revision))).collect();
    let models = |rollout: &Rollout| [rollout.from.clone(), rollout.to.clone()];
    for model in [&wanted.from, &wanted.to] {
        if gateway.select(Some(model))?.model_name() != model {
            return Err(ApiError::invalid("from", format!("`{model}` is an alias: name the model itself")));
        }
    }
    let moves = |rollout: &Rollout| matches!(rollout.state, Stage::Running | Stage::Paused | Stage::Done);
    let meets = |rollout: &Rollout| models(rollout).iter().any(|model| *model == wanted.from || *model == wanted.to);
    if let Some((other, _)) = others.iter().find(|(rollout, _)| moves(rollout) && meets(rollout)) {
        let message = format!(
            "the rollout from `{}` to `{}` is {}, and a model can be in one at a time: `tidemill rollout abort` or `forget` it first",
            other.from,
            other.to,
            other.state.name()
        );
        return Err(ApiError::conflict(message));
    }
    // A rollout that has ended makes room.
    let expected = others.iter().find(|(rollout, _)| rollout.from == wanted.from).map_or(0, |(_, revision)| *revision);
    let id = format!("{:016x}", rand::random::<u64>());
    put(&gateway, Rollout::start(wanted, id, unix()).map_err(wrong)?, expected).await
}

/// `POST /rollouts/{action}`: `pause`, `resume`, `abort`, `golden`, `forget`, `votes`.
pub async fn act(State(gateway): State<Arc<Gateway>>, Path(action): Path<String>, body: Body) -> Result<Json<Value>, ApiError> {
    let body = gateway.read(body).await?;
    if action == "votes" {
        let Votes { model, up, down } = parse::json(&body)?;
        return match gateway.rollouts().vote(&model, Voter::Operator, up, down) {
            true => Ok(Json(json!({"counted": up.saturating_add(down)}))),
            false => Err(ApiError::not_found("model", format!("`{model}` is in no rollout that runs"))),
        };
    }
    let Named { from, golden } = parse::json(&body)?;
    let record = gateway.registry().records(Some(KIND), Some(&from)).pop();
    let record = record.ok_or_else(|| ApiError::not_found("from", format!("there is no rollout from `{from}`")))?;
    let rollout: Rollout = serde_json::from_value(record.value)
        .map_err(|error| ApiError::internal(format!("the record of this rollout cannot be read: {error}")))?;
    let now = unix();
    let next = match action.as_str() {
        "pause" => rollout.paused(now),
        "resume" => rollout.resumed(now),
        "abort" => rollout.aborted(now),
        "golden" => {
            let golden = golden.ok_or_else(|| ApiError::invalid("golden", "`golden` is missing: scores `from` and `to`"))?;
            rollout.scored(now, golden)
        }
        "forget" if rollout.state.is_open() => Err(Wrong::State(rollout.state.name(), "abort it first")),
        "forget" => {
            gateway.registry().delete(KIND.to_owned(), from, Some(record.revision)).await.map_err(refused)?;
            return Ok(Json(json!({"forgotten": true})));
        }
        other => {
            let message = format!("`{other}` is nothing to do with a rollout: it must be pause, resume, abort, golden, votes or forget");
            return Err(ApiError::not_found("action", message));
        }
    };
    put(&gateway, next.map_err(wrong)?, record.revision).await
}

async fn put(gateway: &Gateway, rollout: Rollout, expected: u64) -> Result<Json<Value>, ApiError> {
    gateway.registry().put(KIND.to_owned(), rollout.from.clone(), json!(rollout), Some(expected)).await.map_err(refused)?;
    tracing::info!(from = rollout.from, to = rollout.to, rollout.why, "a rollout was changed");
    Ok(Json(json!(rollout)))
}

fn wrong(wrong: Wrong) -> ApiError {
    let message = wrong.to_string();
    match wrong {
        Wrong::Field(field, _) => ApiError::invalid(field, message),
        Wrong::Gate => ApiError::invalid("golden", message),
        Wrong::State(..) => ApiError::conflict(message),
    }
}
