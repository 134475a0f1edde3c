//! Chat and completions: a body is read and parsed, its prompts run, and the answer is sent as choices. Each adds its [`Endpoint`].

use super::{
    access::Client,
    endpoint::{Call, Endpoint},
    protocol::{self, Begun, Ending, Protocol},
    stored::{Named, Stored},
    written,
};
use crate::{
    base::stamp::unix_seconds,
    requests::{
        body::Kept,
        error::ApiError,
        fields,
        options::Options,
        parse::{self, JsonBody},
        structured,
    },
    serving::{
        answer::Delta,
        gateway::{Gateway, route::RouteRequest, start::Start},
        rounds::rounded::{Rounded, Spent},
    },
};
use axum::{
    Json,
    body::Body,
    http::{HeaderMap, HeaderValue},
    response::{IntoResponse, Response, sse::Event},
};
use serde::Serialize;
use std::{sync::Arc, time::Instant};
use tidemill_proto::tokens::Tokens;

/// The maximum number of entries (tokens and likely alternatives) of an answer that is serialized on the event loop. The answer is our own,
/// so its size tells its cost: this many take some tens of microseconds.
const WRITTEN_HERE_MAX: usize = 1024;

pub async fn serve<E: Endpoint>(Client(gateway): Client, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    protocol::respond(start::<E>(&gateway, &headers, body)).await
}

/// An answer in OpenAI's older form: chunks of its choices, and `[DONE]` at the end.
struct Choices<E> {
    gateway: Arc<Gateway>,
    endpoint: E,
    call: Call,
    /// The sums of each choice's increments, for an answer that is sent whole.
    gained: Vec<Delta>,
}

impl<E: Endpoint> Choices<E> {
    async fn hear(&mut self, delta: &Delta, spent: &Spent) {
        if let Some(turn) = self.endpoint.turn() {
            turn.hear(delta, &spent.total).await;
        }
    }
}

impl<E: Endpoint> Protocol for Choices<E> {
    fn opening(&mut self) -> Vec<Event> {
        let Self { endpoint, call, .. } = self;
        (0..call.choices()).filter_map(|index| endpoint.opening(call, index)).map(|chunk| event(&chunk)).collect()
    }

    async fn take(&mut self, delta: Delta, spent: &Spent) {
        self.hear(&delta, spent).await;
        self.gained[delta.index as usize].append(delta);
    }

    async fn whole(self, spent: Spent) -> Result<Response, ApiError> {
        let Self { gateway, mut endpoint, call, gained } = self;
        let entries: usize = gained.iter().map(|choice| choice.piece.tokens.len()).sum::<usize>() + prompt_tokens(&call);
        if entries * (1 + call.options.sampling.logprobs.unwrap_or(0) as usize) <= WRITTEN_HERE_MAX {
            return Ok(Json(endpoint.whole(&call, gained, spent.total)).into_response());
        }
        written::write(&gateway, 0, move || Ok(endpoint.whole(&call, gained, spent.total))).await
    }

    async fn events(&mut self, delta: Delta, spent: &Spent) -> Vec<Event> {
        self.hear(&delta, spent).await;
        let usage = self.call.options.continuous_usage.then(|| spent.total.clone());
        vec![event(&self.endpoint.chunk(&self.call, delta, usage))]
    }

    async fn closing(&mut self, ending: Ending, spent: &Spent) -> Vec<Event> {
        let last = match ending {
            Ending::Failed(error) => Some(event(&error.body())),
            Ending::Complete if self.call.options.include_usage => Some(event(&self.endpoint.closing(&self.call, spent.total.clone()))),
            Ending::Complete | Ending::Cancelled => None,
        };
        last.into_iter().chain([Event::default().data("[DONE]")]).collect()
    }

    fn not_stored(&mut self) -> Option<HeaderValue> {
        let visible = |reason: &str| reason.chars().map(|c| if c == ' ' || c.is_ascii_graphic() { c } else { '?' }).collect::<String>();
        self.endpoint.turn()?.not_stored().and_then(|reason| HeaderValue::from_str(&visible(reason)).ok())
    }
}

fn event(chunk: &impl Serialize) -> Event {
    Event::default().data(serde_json::to_string(chunk).expect("chunks have string keys"))
}

/// Counts the prompt tokens that the answer shows.
fn prompt_tokens(call: &Call) -> usize {
    let shows = call.options.return_token_ids || call.options.sampling.logprobs.is_some();
    if shows { call.prompts.iter().map(|prompt| prompt.len()).sum() } else { 0 }
}

async fn start<E: Endpoint>(gateway: &Arc<Gateway>, headers: &HeaderMap, body: Body) -> Result<Begun<Choices<E>>, ApiError> {
    let arrived = Instant::now();
    parse::check_content_type(headers)?;
    let (gateway, body) = gateway.weighed(gateway.read(body).await?).await?;
    let worker = Arc::clone(&gateway);
    // Most bodies name no stored data, and are handled at once.
    let looked_at = gateway.compute_body(body.weight(), move || {
        let parsed = JsonBody::parse(&body)?;
        let asked = worker.asked(parsed.fields());
        let mut named = if E::CONVERSES { parsed.read()? } else { Named::default() };
        named.ask(parsed.fields());
        Ok(match named.is_any() {
            true => (Err((named, Kept::new(body, parsed, true))), asked),
            false => (Ok(understand::<E>(&worker, arrived, parsed, Stored::default())?), asked),
        })
    });
    let (understood, asked) = looked_at.await?;
    let (gateway, mut endpoint, mut options, prompts) = match understood {
        Ok(understood) => understood,
        Err((named, kept)) => {
            let stored = Stored::look_up(&gateway, named).await?;
            let worker = Arc::clone(&gateway);
            let bytes = kept.weight() + stored.bytes();
            gateway
                .compute_on(bytes, move || kept.with(JsonBody::parse, |parsed| understand::<E>(&worker, arrived, parsed, stored)))
                .await?
        }
    };
    let id = format!("{}-{:032x}", E::ID_PREFIX, rand::random::<u128>());
    let prompt_logprobs = options.sampling.logprobs.filter(|_| endpoint.scores_prompt());
    let wanted = Start {
        param: E::PROMPT,
        operation: E::OPERATION,
        id: &id,
        max_tokens_default: E::max_tokens_default,
        prompt_logprobs,
        question: asked,
    };
    let answer = gateway.start(&prompts, &mut options, wanted).await?;
    let call = Call {
        id,
        created: unix_seconds(),
        model: gateway.model_name().to_owned(),
        options,
        prompts,
        tokenizer: Arc::clone(&gateway.text().tokenizer),
    };
    let answer = Rounded::new(&gateway, answer, endpoint.rounds());
    let streams = call.options.stream;
    let gained = (0..call.choices()).map(|index| Delta { index, ..Delta::default() }).collect();
    Ok(Begun { answer, protocol: Choices { gateway, endpoint, call, gained }, streams })
}

/// The gateway of the model that is asked for, the endpoint, its options, and its prompts.
type Understood<E> = (Arc<Gateway>, E, Options, Vec<Tokens>);

fn understand<E: Endpoint>(gateway: &Gateway, arrived: Instant, body: JsonBody, stored: Stored) -> Result<Understood<E>, ApiError> {
    let mut request = fields::generating(E::DOOR, &body)?;
    let gateway = gateway.route(RouteRequest {
        path: Some(E::PATH),
        model: request.model.as_deref().or_else(|| stored.before.as_ref()?.model()),
        service_tier: request.service_tier.as_deref(),
        body: body.fields(),
    })?;
    let body: E::Body = body.into()?;
    let asked = {
        let mut hearing = gateway.hearing();
        structured::grammar(&mut request, &mut |schema, terms| hearing.schema(schema, terms))?
    };
    let mut options = gateway.options(arrived, request)?;
    if let Some(asked) = asked {
        options.constrain(asked, gateway.text());
    }
    let (endpoint, prompts) = E::understand(&gateway, body, stored, &mut options)?;
    gateway.check_constraint(&mut options)?;
    Ok((gateway, endpoint, options, prompts.into_iter().map(Tokens::from).collect()))
}
