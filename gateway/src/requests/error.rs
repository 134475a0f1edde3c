//! The failure of a request, as OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`.

use crate::{
    base::shares::Refused,
    generation::piece::Unchecked,
    metrics::{self, RequestOutcome},
};
use axum::http::StatusCode;
use serde_json::{Value, json};
use std::time::Duration;
use tidemill_cluster::{Failure, Rejection};
use tidemill_safety::category::Finding;
use tidemill_tenancy::{
    calendar, money,
    quota::{Kind, Refusal, ScopeKind},
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    status: StatusCode,
    message: String,
    /// The field of the request that is at fault.
    param: Option<String>,
    code: Option<&'static str>,
    /// The id for an appeal against a block.
    appeal_id: Option<Box<str>>,
    retry_after_s: Option<u64>,
    /// Like [`retry_after_s`](Self::retry_after_s), for clients that read the finer header.
    retry_after_ms: Option<u64>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, appeal_id: None, retry_after_s: None, retry_after_ms: None }
    }

    /// Sets the code by which clients tell errors apart.
    pub(crate) fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// Sets the number of seconds after which the request may be retried.
    pub(crate) fn retry_after(self, seconds: u64) -> Self {
        Self { retry_after_s: Some(seconds), ..self }
    }

    /// Refuses a request with an invalid field.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// Refuses a request with a field for a feature that Tidemill lacks.
    pub fn unsupported(param: &str) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::invalid(param, format!("`{param}` is not supported yet")) }
    }

    /// Refuses a request with a field of another server's API. `instead` completes the sentence.
    pub(super) fn foreign(param: &str, instead: &str) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::invalid(param, format!("`{param}` is not supported: {instead}")) }
    }

    pub fn no_images(param: &str) -> Self {
        Self::invalid(param, "image input is not supported by this model")
    }

    /// Refuses a request whose answer is forbidden.
    pub fn content_filter(param: &str, Finding { category, stage, score }: Finding, appeal_id: Option<String>) -> Self {
        let message = format!(
            "`{param}` was refused by this server's content policy: {category} (found by {}, score {score:.2} of 1). Please rephrase it.",
            stage.name()
        );
        Self { code: Some("content_filter"), appeal_id: appeal_id.map(Into::into), ..Self::invalid(param, message) }
    }

    /// Refuses a request that could not be checked, though it may be harmful.
    pub fn unchecked(param: &str, reason: &str) -> Self {
        let message = format!("The safety check of `{param}` could not be made: {reason}. Please try again later.");
        Self {
            param: Some(param.into()),
            code: Some(Unchecked::CODE),
            retry_after_s: Some(5),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
        }
    }

    /// Refuses a request whose body is invalid as a whole.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub fn model_not_found(model: &str, served: &str) -> Self {
        let message = format!("The model `{model}` does not exist; this cluster serves {served}.");
        Self { param: Some("model".into()), code: Some("model_not_found"), ..Self::new(StatusCode::NOT_FOUND, message) }
    }

    pub fn context_length(param: &str, context: u32, prompt: u64, completion: u64) -> Self {
        let room = u64::from(context).saturating_sub(prompt);
        let advice = match room {
            0 => "Please reduce the length of the prompt.".to_owned(),
            room => format!("After this prompt, a completion may have at most {room} tokens."),
        };
        let message = format!(
            "This model's maximum context length is {context} tokens. However, you requested {} tokens ({prompt} in the prompt, \
             {completion} in the completion). {advice}",
            prompt.saturating_add(completion)
        );
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    pub fn too_large(limit: usize) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, format!("The request body is larger than the limit of {limit} bytes."))
    }

    pub fn too_many_values(limit: usize) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, format!("The request body holds more than the limit of {limit} JSON values."))
    }

    pub fn too_slow(limit: Duration) -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, format!("The request body did not arrive within {} s.", limit.as_secs()))
    }

    pub fn not_json(content_type: &str) -> Self {
        let message = format!("The content type is `{content_type}`: a request body must be `application/json`.");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
    }

    /// Refuses a request that names an object which is not stored here.
    pub fn not_found(param: &str, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), code: Some("not_found"), ..Self::new(StatusCode::NOT_FOUND, message) }
    }

    pub fn no_data_directory() -> Self {
        let message = "This coordinator keeps no files, and so runs no batches: it was started without a data directory (--data DIR).";
        Self { code: Some("files_not_kept"), ..Self::new(StatusCode::NOT_IMPLEMENTED, message) }
    }

    pub fn no_memories() -> Self {
        let message = "This server remembers nothing of users between conversations: its operator has not switched it on ([memory]).";
        Self { code: Some("memory_off"), ..Self::new(StatusCode::NOT_IMPLEMENTED, message) }
    }

    pub fn no_room_to_remember(message: impl Into<String>) -> Self {
        Self { code: Some("no_room_for_facts"), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    /// Refuses an `Idempotency-Key` that was used with a different body.
    pub fn other_body(message: impl Into<String>) -> Self {
        Self { code: Some("idempotency_key_reused"), ..Self::new(StatusCode::UNPROCESSABLE_ENTITY, message) }
    }

    /// Refuses to resume a stream whose rest is not recorded and cannot be computed again.
    pub fn not_resumable(message: impl Into<String>) -> Self {
        Self { code: Some("stream_not_kept"), ..Self::new(StatusCode::CONFLICT, message) }
    }

    /// Models of which no token came; `failed` names each with the reason.
    pub fn not_generating(failed: &str) -> Self {
        let message = format!("These models computed no token: {failed}.");
        Self { code: Some("not_generating"), retry_after_s: Some(1), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, message)
    }

    /// Refuses a request while no majority of the coordinators answers.
    pub fn not_now(message: impl Into<String>) -> Self {
        Self { code: Some("no_majority"), retry_after_s: Some(1), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    /// Refuses a request for a tool whose MCP server has not answered since this process started.
    pub fn no_tools_yet(message: impl Into<String>) -> Self {
        let new = Self::new(StatusCode::SERVICE_UNAVAILABLE, message);
        Self { param: Some("server_tools".into()), code: Some("tools_not_ready"), retry_after_s: Some(5), ..new }
    }

    /// Refuses a request whose constraint could not be checked now.
    pub fn grammar_unjudged(param: &str, reason: &str) -> Self {
        let message = format!("`{param}` could not be checked at the moment: {reason}. Please try again.");
        Self { param: Some(param.into()), retry_after_s: Some(1), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    /// Refuses messages that could not be rendered now.
    pub fn not_rendered(reason: &str) -> Self {
        let message = format!("The model's chat template could not be rendered at the moment: {reason}. Please try again.");
        Self { retry_after_s: Some(1), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    pub fn no_room_to_replay() -> Self {
        let message = "There is no room to keep this stream's events at the moment, so that it cannot go on after `Last-Event-ID`.";
        Self { retry_after_s: Some(5), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    pub fn method_not_allowed(method: &str, path: &str) -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, format!("Method {method} is not allowed for {path}."))
    }

    pub fn draining() -> Self {
        Self { retry_after_s: Some(5), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "This coordinator is shutting down.") }
    }

    pub fn too_many_viewers(limit: usize) -> Self {
        let message = format!("{limit} viewers watch this cluster, and there may be no more: /cluster shows the same on request.");
        Self { retry_after_s: Some(30), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    fn unauthorized(message: impl Into<String>) -> Self {
        Self { code: Some("invalid_api_key"), ..Self::new(StatusCode::UNAUTHORIZED, message) }
    }

    pub fn no_key() -> Self {
        Self::unauthorized("You didn't provide an API key: send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`.")
    }

    /// Refuses a key, without naming it: it may be a secret for a different service.
    pub fn wrong_key() -> Self {
        Self::unauthorized("Incorrect API key provided: it does not exist here, has expired, or was revoked.")
    }

    pub fn wrong_token(problem: &str) -> Self {
        Self::unauthorized(format!("The token is not accepted: {problem}."))
    }

    pub fn no_such_tier(tier: &str, tiers: &str) -> Self {
        let message = format!("Your tier is `{tier}`, and this server has only {tiers}: please tell whoever gave you your key.");
        Self { code: Some("unknown_tier"), ..Self::new(StatusCode::FORBIDDEN, message) }
    }

    /// Refuses a request of a tenant that has used up a limit, or that asks for more than it. `now` is the time since the Unix epoch.
    pub fn over_quota(tenant: &str, refusal: Refusal, now: Duration) -> Self {
        let of = |kind| match kind {
            Kind::Requests => "requests per minute",
            Kind::Tokens => "tokens per minute",
            Kind::TokensPerDay => "tokens per day",
            Kind::Concurrent => "requests at a time",
            Kind::Spend(period) => period.name(),
        };
        let whose = |scope| match scope {
            ScopeKind::Tenant => format!("of `{tenant}`"),
            ScopeKind::Key => format!("of this key of `{tenant}`"),
            ScopeKind::Model => format!("of `{tenant}` for this model"),
        };
        match refusal {
            Refusal::Wait { scope, kind: Kind::Spend(period), limit, used, needed, retry } => {
                let [limit, used, needed] = [limit, used, needed].map(money::written);
                let message = format!(
                    "You exceeded your current quota: the budget {} for this {} is {limit}, {used} is spent or reserved by running requests, \
                     and this request may cost {needed}. The budget begins anew at {}.",
                    whose(scope),
                    period.name(),
                    calendar::written(now + retry)
                );
                let ms = (retry.as_nanos().div_ceil(1_000_000) as u64).max(1);
                Self { code: Some(Self::OVER_BUDGET), ..Self::overloaded(message, ms) }
            }
            Refusal::Never { scope, kind: Kind::Spend(period), limit: 0, .. } => {
                let message = format!(
                    "You exceeded your current quota: the budget {} for a {} is 0, and this model has a price.",
                    whose(scope),
                    period.name()
                );
                Self { code: Some(Self::OVER_BUDGET), ..Self::new(StatusCode::TOO_MANY_REQUESTS, message) }
            }
            Refusal::Never { scope, kind: Kind::Spend(period), limit, needed } => {
                let [limit, needed] = [limit, needed].map(money::written);
                let message = format!(
                    "Request too large for the budget {} for a {}: the budget is {limit}, and this request may cost {needed} (the prompt and \
                     the longest possible answer). It can never be served: shorten the prompt, or lower the answer's `max_tokens` or `n`.",
                    whose(scope),
                    period.name()
                );
                Self { code: Some("request_too_large"), ..Self::malformed(message) }
            }
            Refusal::Wait { kind, limit, used, needed, retry, .. } => {
                let ms = (retry.as_nanos().div_ceil(1_000_000) as u64).max(1);
                let message = format!(
                    "Rate limit reached for `{tenant}` on {}: limit {limit}, used {used}, requested {needed}. Please try again in {}s.",
                    of(kind),
                    ms as f64 / 1e3
                );
                Self::overloaded(message, ms)
            }
            Refusal::Never { kind, limit, needed, .. } => {
                let message = format!(
                    "Request too large for `{tenant}` on {}: limit {limit}, requested {needed} (the prompt and the longest possible \
                     answer). It can never be served: shorten the prompt, or lower the answer's `max_tokens` or `n`.",
                    of(kind)
                );
                Self { code: Some("request_too_large"), ..Self::malformed(message) }
            }
        }
    }

    /// Refuses a client that has its share of a resource, or that finds none left.
    pub fn over_share(resource: &str, refused: Refused) -> Self {
        let what = match resource {
            "bodies" => "bytes of request bodies on their way",
            "answers" => "bytes of stored items being sent",
            "stored" => "bytes of stored items being read",
            "uploads" => "files being sent",
            "requests" => "requests at a time",
            _ => "requests being read",
        };
        match refused {
            Refused::Own => {
                let message = format!("You have as many {what} as one client may have here. Please try again when some have ended.");
                Self { code: Some("too_much_at_once"), ..Self::overloaded(message, 1000) }
            }
            Refused::Total => {
                let message = format!("This server has as many {what} as it can hold. Please try again in a moment.");
                let new = Self::new(StatusCode::SERVICE_UNAVAILABLE, message);
                Self { retry_after_s: Some(1), retry_after_ms: Some(1000), code: Some("overloaded"), ..new }
            }
        }
    }

    /// Refuses an upload that is too slow to keep its place.
    pub fn too_slow_for(bytes_per_s: u64) -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, format!("The file came more slowly than {bytes_per_s} bytes/s."))
    }

    /// Refuses a request that a web page may have made a browser send.
    pub fn wrong_door(message: impl Into<String>) -> Self {
        Self { code: Some("wrong_origin"), ..Self::new(StatusCode::FORBIDDEN, message) }
    }

    /// Refuses a request of a tenant that must not be answered, and whose data must not be stored, in this region.
    pub fn wrong_region(here: &str, regions: &[String]) -> Self {
        let regions = regions.iter().map(|region| format!("`{region}`")).collect::<Vec<_>>().join(" or ");
        let message = format!("This is region `{here}`, and your requests are answered in {regions} only: send them there.");
        Self { code: Some("wrong_region"), ..Self::new(StatusCode::FORBIDDEN, message) }
    }

    /// Reports that a request was sent to another region, whose answer did not come.
    pub fn lost_elsewhere(region: &str) -> Self {
        let message = format!("This request was sent to region `{region}`, and its answer did not come: please repeat it.");
        Self { code: Some("region_failed"), retry_after_s: Some(1), ..Self::new(StatusCode::BAD_GATEWAY, message) }
    }

    /// Refuses a request that another region relayed to here.
    pub fn busy_region(here: &str, reason: &str) -> Self {
        let message = format!("Region `{here}` has no time for requests of other regions: {reason}.");
        Self { code: Some("region_busy"), retry_after_s: Some(1), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
    }

    /// Refuses a tier's request while load is shed.
    pub fn shed(tier: &str, wait: Duration) -> Self {
        let message = format!(
            "There is too much to do at the moment, and requests of tier `{tier}` are turned away. Please try again in {}s.",
            wait.as_secs()
        );
        Self {
            retry_after_s: Some(wait.as_secs()),
            retry_after_ms: Some(wait.as_millis() as u64),
            code: Some("overloaded"),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
        }
    }

    /// Refuses a request because of overload.
    fn overloaded(message: String, retry_after_ms: u64) -> Self {
        Self {
            retry_after_s: Some(retry_after_ms.div_ceil(1000)),
            retry_after_ms: Some(retry_after_ms),
            code: Some("rate_limit_exceeded"),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, message)
        }
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The code by which clients know that only money or time helps.
    pub const OVER_BUDGET: &str = "insufficient_quota";

    /// Whether a repeat within the next minutes is useless.
    pub fn is_over_budget(&self) -> bool {
        self.code == Some(Self::OVER_BUDGET)
    }

    pub fn appeal_id(&self) -> Option<&str> {
        self.appeal_id.as_deref()
    }

    pub fn message(&self) -> &str {
        &self.message
    }

    pub fn retry_after_s(&self) -> Option<u64> {
        self.retry_after_s
    }

    pub fn retry_after_ms(&self) -> Option<u64> {
        self.retry_after_ms
    }

    pub fn status(&self) -> StatusCode {
        self.status
    }

    pub fn outcome(&self) -> RequestOutcome {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => RequestOutcome::Rejected,
            status if status.is_client_error() => RequestOutcome::Invalid,
            _ => RequestOutcome::Failed,
        }
    }

    /// Writes the error object, for a body or for an event within a stream.
    pub fn body(&self) -> Value {
        let kind = match self.status {
            _ if self.is_over_budget() => Self::OVER_BUDGET,
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        };
        let mut error = json!({"message": self.message, "type": kind, "param": self.param, "code": self.code});
        if let Some(id) = &self.appeal_id {
            error["appeal_id"] = (**id).into();
        }
        json!({"error": error})
    }
}

impl From<Rejection> for ApiError {
    fn from(rejection: Rejection) -> Self {
        let message = rejection.to_string();
        match rejection {
            Rejection::NoWorker | Rejection::NoThoughtLimits => {
                Self { retry_after_s: Some(1), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
            }
            Rejection::Full { retry_after_ms } => {
                metrics::count_share_refusal("queue", Refused::Total);
                Self::overloaded(message, retry_after_ms)
            }
            Rejection::Late { retry_after_ms } => Self::overloaded(message, retry_after_ms),
            Rejection::TooManyChoices { .. } => Self::invalid("n", message),
            Rejection::TooLong { .. } => Self { code: Some("context_length_exceeded"), ..Self::malformed(message) },
        }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        let message = failure.to_string();
        match failure {
            Failure::QueueTimeout(_) | Failure::TooLong { .. } => {
                Self { retry_after_s: Some(5), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) }
            }
            Failure::Late { retry_after_ms } => Self::overloaded(message, retry_after_ms),
            Failure::Displaced { retry_after_ms } => {
                metrics::count_share_refusal("queue", Refused::Own);
                Self::overloaded(message, retry_after_ms)
            }
            Failure::Losses(_) => Self { retry_after_s: Some(1), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, message) },
            Failure::Timeout(_) => Self::new(StatusCode::GATEWAY_TIMEOUT, message),
            Failure::Worker(_) => Self::internal(message),
        }
    }
}
