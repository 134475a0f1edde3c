//! A body is read and understood, its prompts run, and the answer goes out, at once or as a stream: the same for every
//! [`Endpoint`].

use super::{
    access::Client,
    conversations::turn::Turn,
    endpoint::{Call, Endpoint},
    sse,
    stored::{Named, Stored},
    written,
};
use crate::{
    base::stamp::unix_seconds,
    metrics,
    requests::{
        error::ApiError,
        generate::GenerateRequest,
        options::Options,
        parse::{self, JsonBody},
        structured,
    },
    serving::{
        answer::Waiting,
        backend::SimilarTo,
        gateway::{Gateway, Start, route::Asking},
        rounds::rounded::Rounded,
    },
};
use axum::{
    Json,
    body::Body,
    http::{HeaderMap, HeaderValue},
    response::{IntoResponse, Response},
};
use std::{sync::Arc, time::Instant};
use tidemill_proto::tokens::Tokens;

/// The most entries (tokens and likely alternatives) of an answer that is written on the event loop. The answer is our own, and its size
/// says what it costs: this many take some tens of microseconds.
const WRITTEN_HERE_MAX: usize = 1024;

pub async fn serve<E: Endpoint>(Client(gateway): Client, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    // A request that runs is counted by its answer.
    let started = start::<E>(&gateway, &headers, body).await.inspect_err(|error| metrics::count_request(error.outcome()));
    let (mut answer, call, mut endpoint) = started?;
    if call.options.stream {
        answer.running().settle().await?;
        let waited = answer.running().waited();
        let not_stored = endpoint.turn().and_then(tell_not_stored);
        let similar = answer.running().similar_to().map(tell_similar);
        return Ok(tell(sse::respond(answer, call, endpoint), waited, not_stored, similar));
    }
    let choices = answer.whole().await?;
    let waited = answer.running().waited();
    let not_stored = match endpoint.turn() {
        Some(turn) => {
            for choice in &choices {
                turn.hear(choice, &answer.usage()).await;
            }
            tell_not_stored(turn)
        }
        None => None,
    };
    let similar = answer.running().similar_to().map(tell_similar);
    let usage = answer.usage();
    let entries: usize = choices.iter().map(|choice| choice.piece.tokens.len()).sum::<usize>() + prompt_tokens(&call);
    let whole = if entries * (1 + call.options.sampling.logprobs.unwrap_or(0) as usize) <= WRITTEN_HERE_MAX {
        Json(endpoint.whole(&call, choices, usage)).into_response()
    } else {
        written::write(&gateway, 0, move || Ok(endpoint.whole(&call, choices, usage))).await?
    };
    Ok(tell(whole, waited, not_stored, similar))
}

/// Counts the prompt tokens that the answer shows.
fn prompt_tokens(call: &Call) -> usize {
    let shows = call.options.return_token_ids || call.options.sampling.logprobs.is_some();
    if shows { call.prompts.iter().map(|prompt| prompt.len()).sum() } else { 0 }
}

/// Why a turn is not stored, as a header.
fn tell_not_stored(turn: &mut Turn) -> Option<HeaderValue> {
    let visible = |reason: &str| reason.chars().map(|c| if c == ' ' || c.is_ascii_graphic() { c } else { '?' }).collect::<String>();
    turn.not_stored().and_then(|reason| HeaderValue::from_str(&visible(reason)).ok())
}

/// Whose answer it is, as a header: a stream need not tell of usage.
fn tell_similar(similar: &SimilarTo) -> HeaderValue {
    let told = format!("semantic; similarity={:.3}; response={}", similar.similarity, similar.response);
    HeaderValue::from_str(&told).expect("ids are plain")
}

/// Headers of an answer whose turn is not stored, of one that is another question's, and of one that had to wait: its first place in the
/// queue, and the estimate that was made then.
fn tell(mut response: Response, waited: Option<Waiting>, not_stored: Option<HeaderValue>, similar: Option<HeaderValue>) -> Response {
    if let Some(similar) = similar {
        response.headers_mut().insert("x-tidemill-response-cache", similar);
    }
    if let Some(reason) = not_stored {
        response.headers_mut().insert("x-tidemill-not-stored", reason);
    }
    if let Some(Waiting { position, estimate_ms }) = waited {
        response.headers_mut().insert("x-queue-position", HeaderValue::from(position));
        if let Some(ms) = estimate_ms {
            response.headers_mut().insert("x-queue-estimate-ms", HeaderValue::from(ms));
        }
    }
    response
}

async fn start<E: Endpoint>(gateway: &Arc<Gateway>, headers: &HeaderMap, body: Body) -> Result<(Rounded, Call, E), ApiError> {
    let arrived = Instant::now();
    parse::check_content_type(headers)?;
    let body = gateway.read(body).await?;
    let worker = Arc::clone(gateway);
    // Most bodies name nothing that is stored, and are understood at once.
    let looked_at = gateway.compute_body(body.len(), move || {
        let parsed = JsonBody::parse(&body)?;
        let asked = worker.asked(parsed.fields());
        let named = if E::CONVERSES { parsed.read()? } else { Named::default() };
        Ok(match named.is_any() {
            true => (Err((named, body, parsed)), asked),
            false => (Ok(understand::<E>(&worker, arrived, parsed, Stored::default())?), asked),
        })
    });
    let (understood, asked) = looked_at.await?;
    let (gateway, mut endpoint, mut options, prompts) = match understood {
        Ok(understood) => understood,
        Err((named, body, parsed)) => {
            let stored = Stored::look_up(gateway, named).await?;
            let worker = Arc::clone(gateway);
            let bytes = body.len() + stored.bytes();
            let understand = move || {
                // Its bytes count until it is understood.
                let _counted = body;
                understand::<E>(&worker, arrived, parsed, stored)
            };
            gateway.compute_body(bytes, understand).await?
        }
    };
    let id = format!("{}-{:032x}", E::ID_PREFIX, rand::random::<u128>());
    let prompt_logprobs = options.sampling.logprobs.filter(|_| endpoint.scores_prompt());
    let wanted = Start { param: E::PROMPT, id: &id, max_tokens_default: E::max_tokens_default, prompt_logprobs, question: asked };
    let answer = gateway.start(&prompts, &mut options, wanted).await?;
    let call = Call {
        id,
        created: unix_seconds(),
        model: gateway.model_name().to_owned(),
        options,
        prompts,
        tokenizer: Arc::clone(&gateway.text().tokenizer),
    };
    Ok((Rounded::new(&gateway, answer, endpoint.rounds()), call, endpoint))
}

/// The gateway of the model that is asked for, and what is asked of it.
type Understood<E> = (Arc<Gateway>, E, Options, Vec<Tokens>);

fn understand<E: Endpoint>(gateway: &Gateway, arrived: Instant, body: JsonBody, stored: Stored) -> Result<Understood<E>, ApiError> {
    let mut request: GenerateRequest = body.read()?;
    let gateway = gateway.route(Asking {
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
