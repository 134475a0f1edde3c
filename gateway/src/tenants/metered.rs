//! A request that holds its quota, until it is settled: once, by the first cause of its end. Dropping it settles it as well (its client
//! left).

use super::{Caller, Tenants};
use crate::{
    metrics::{RequestOutcome, usage::Usage},
    requests::error::ApiError,
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_tenancy::{
    limiter::Held,
    quota::Use,
    usage::{Event, Source},
};

/// The quota that a request needs.
#[derive(Clone, Copy, Debug)]
pub struct QuotaRequest<'a> {
    /// The time at which the request arrived, from which its duration counts.
    pub arrived: Instant,
    pub model: &'a str,
    pub class: &'a str,
    pub prompt_tokens: u64,
    /// The maximum number of tokens of all choices together.
    pub answer_tokens: u64,
}

impl Tenants {
    /// Reserves a request's maximum use. If no key is needed, there is no quota, and usage is still recorded.
    pub async fn reserve(self: &Arc<Self>, caller: &Caller, wanted: QuotaRequest<'_>) -> Result<Metered, ApiError> {
        if caller.is_shadow() {
            return Ok(Metered::free(Arc::clone(self)));
        }
        let held = match &caller.principal {
            None => None,
            Some((principal, tier)) => {
                let scopes = self.scopes(principal, tier, Some(wanted.model));
                let most = Use {
                    tokens: wanted.prompt_tokens + wanted.answer_tokens,
                    cost_micros: self.prices.most_micros(wanted.model, wanted.prompt_tokens, wanted.answer_tokens),
                };
                Some(self.hold(caller, principal, &scopes, most).await?)
            }
        };
        Ok(Metered::new(Arc::clone(self), caller, held, wanted))
    }
}

#[derive(Debug)]
pub struct Metered {
    tenants: Arc<Tenants>,
    held: Option<Held>,
    began: Instant,
    prompt_tokens: u64,
    /// The event, filled in as far as known; `None` once it is settled.
    event: Option<Event>,
}

impl Metered {
    pub(super) fn new(tenants: Arc<Tenants>, caller: &Caller, held: Option<Held>, wanted: QuotaRequest<'_>) -> Self {
        let QuotaRequest { arrived, model, class, prompt_tokens, answer_tokens: _ } = wanted;
        let principal = caller.principal.as_ref().map(|(principal, _)| principal);
        let event = Event {
            id: caller.id.clone(),
            at_ms: tenants.now().as_millis() as u64,
            tenant: caller.tenant().unwrap_or_default().to_owned(),
            user: principal.and_then(|principal| principal.user.as_deref()).map(str::to_owned),
            key: principal.and_then(|principal| principal.key.as_deref()).map(str::to_owned),
            model: model.to_owned(),
            class: class.to_owned(),
            ..Event::default()
        };
        Self { tenants, held, began: arrived, prompt_tokens, event: Some(event) }
    }

    /// A request that no tenant pays for.
    pub(super) fn free(tenants: Arc<Tenants>) -> Self {
        Self { tenants, held: None, began: Instant::now(), prompt_tokens: 0, event: None }
    }

    /// Cancels the reservation: the cluster did not accept the request.
    pub fn cancel(&mut self) {
        self.event = None;
        if let Some(held) = self.held.take() {
            self.tenants.limiter.cancel(held);
        }
    }

    /// Notes the time to first token of a choice with a limit for it.
    pub fn observe_ttft(&self, now: Instant, ttft: Duration) {
        self.tenants.ttfts.push(now, ttft);
    }

    pub fn is_settled(&self) -> bool {
        self.event.is_none()
    }

    /// Gives back the unused part, and hands the event to the log. The returned future waits until it is written: an answer that is sent
    /// after that is counted, even if this process crashes. A second call does nothing.
    pub fn settle(&mut self, outcome: RequestOutcome, usage: &Usage, ttft: Option<Duration>) -> impl Future<Output = ()> + Send + use<> {
        let unused = matches!(outcome, RequestOutcome::Rejected) && usage.completion_tokens == 0;
        if unused {
            self.cancel();
        }
        let written = self.event.take().map(|event| {
            let event = self.complete(event, outcome, usage, ttft);
            if let Some(held) = self.held.take() {
                self.tenants.limiter.settle(held, event.used());
            }
            self.tenants.meter.as_ref().map(|meter| meter.write(event))
        });
        async move {
            if let Some(written) = written.flatten() {
                written.await;
            }
        }
    }

    fn complete(&self, event: Event, outcome: RequestOutcome, usage: &Usage, ttft: Option<Duration>) -> Event {
        let ms = |time: Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        let path = usage.tidemill.as_ref();
        let event = Event {
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.prompt_tokens_details.cached_tokens,
            output_tokens: usage.completion_tokens,
            reasoning_tokens: usage.completion_tokens_details.reasoning_tokens,
            source: path.map_or_else(Source::default, |path| Source {
                hbm: path.tokens.hbm,
                dram: path.tokens.dram,
                nvme: path.tokens.nvme,
                object: path.tokens.object,
                remote: path.tokens.remote,
                prefill: path.tokens.prefill,
                local: path.tokens.local,
            }),
            queue_ms: path.map_or(0.0, |path| (path.queue_ms * 1e3).round() / 1e3),
            ttft_ms: ttft.map(ms),
            total_ms: ms(self.began.elapsed()),
            outcome: outcome.name().to_owned(),
            ..event
        };
        Event { cost_micros: self.tenants.prices.cost_micros(&event), ..event }
    }
}

impl Drop for Metered {
    fn drop(&mut self) {
        if !self.is_settled() {
            let usage = Usage { prompt_tokens: self.prompt_tokens, ..Usage::default() };
            drop(self.settle(RequestOutcome::Cancelled, &usage, None));
        }
    }
}
