//! The model that a request is routed to: by the operator's rules, the running rollouts, and predicted waiting times. Without rules and
//! rollouts it is the one that the request names, and its body is not examined.

use super::{Gateway, ServedModel};
use crate::{
    metrics::{self, usage::RouteUsage},
    requests::error::ApiError,
    rollout::{routed::Routed, running::Live, seen::Side, shadow::Mirror},
    routing::{By, Overflow, Requester, Router, text::BodyText},
};
use serde_json::{Map, Value};
use std::sync::Arc;
use tidemill_cluster::class::ClassId;

/// The approximate number of a prompt's bytes per token.
const TOKEN_BYTES: u64 = 4;

/// The parts of a request on which its route depends.
#[derive(Clone, Copy, Debug)]
pub struct RouteRequest<'a> {
    /// The endpoint's path; `None` if the request concerns an answer, and gets none.
    pub path: Option<&'static str>,
    pub model: Option<&'a str>,
    pub service_tier: Option<&'a str>,
    pub body: &'a Map<String, Value>,
}

impl Gateway {
    /// Binds the handle to the model that is to answer.
    pub fn route(&self, asked: RouteRequest<'_>) -> Result<Arc<Self>, ApiError> {
        let shared = &self.shared;
        if self.is_shadow() || (self.router().is_none() && shared.rollouts.is_empty()) {
            return self.select(asked.model);
        }
        let said = BodyText::of(asked.body);
        let user = self.sticky_user(&said);
        let (mut model, mut by, mut why, overflow) = match self.router().and_then(|router| self.by_rules(router, &asked, &said, &user)) {
            Some(choice) => choice,
            None => (Arc::clone(&self.select(asked.model)?.model), "asked", "asked".to_owned(), None),
        };
        let mut seat = None;
        let mut mirror = None;
        if by != "pin" {
            let first = self.in_rollout(&model, &user);
            let goes_over = overflow.and_then(|overflow| {
                let taken = first.as_ref().filter(|(.., side)| *side == Side::To).map_or(&model, |(to, ..)| to);
                let (other, reason) = self.overflows(taken, &overflow, &asked, &said)?;
                Some((self.in_rollout(&other, &user), other, reason))
            });
            let mut moved = first;
            if let Some((other_moved, other, reason)) = goes_over {
                (model, by, moved) = (other, "overflow", other_moved);
                why = format!("{why}; overflow: {reason}");
            }
            if let Some((to, live, side)) = moved {
                if side == Side::To {
                    why = format!("{why}; rollout from {} at {} %", live.record.from, live.record.share() * 100.0);
                    by = "rollout";
                    model = to;
                }
                let looked_at = asked.path.filter(|_| self.caller.as_ref().is_some_and(|caller| !caller.in_background));
                if let Some(path) = looked_at {
                    seat = live.seat(side);
                    mirror = (side == Side::From).then(|| Mirror::of(&shared.rollouts, &live, path, asked.body)).flatten();
                }
            }
        }
        let told = RouteUsage { asked: asked.model.map(str::to_owned), model: model.name.clone(), why };
        let routed = Arc::new(Routed::new(told, seat, mirror));
        if asked.path.is_some() {
            metrics::count_routed(&model.name, by);
        }
        if let Some(caller) = &self.caller {
            caller.note_routed(&routed);
        }
        Ok(Arc::new(Self { model, routed: Some(routed), ..self.clone() }))
    }

    fn by_rules(
        &self,
        router: &Router,
        asked: &RouteRequest<'_>,
        said: &BodyText<'_>,
        user: &str,
    ) -> Option<(Arc<ServedModel>, &'static str, String, Option<Overflow>)> {
        let aliases = self.aliases();
        let caller = self.caller.as_deref();
        let in_metadata = || said.content().metadata.get(router.region_metadata.as_deref()?)?.as_str();
        let asker = Requester {
            asked: asked.model,
            resolved: asked.model.map(|name| aliases.get(name).map_or(name, String::as_str)),
            tenant: caller.and_then(|caller| caller.tenant()),
            tier: caller.and_then(|caller| caller.tier()).map(|tier| tier.name.as_str()),
            region: caller.and_then(|caller| caller.region.as_deref()).or_else(in_metadata),
            user,
            meaning: self.meaning,
        };
        let choice = router.route(&asker, said)?;
        let by = match choice.by {
            By::Pin => "pin",
            By::Rule => "rule",
            By::Auto => "auto",
        };
        Some((self.served(choice.model)?, by, choice.why, choice.overflow.cloned()))
    }

    pub(super) fn router(&self) -> Option<&Router> {
        self.shared.settings.requests.router.as_ref()
    }

    pub(crate) fn served(&self, name: &str) -> Option<Arc<ServedModel>> {
        self.shared.models.iter().find(|model| model.name == name).cloned()
    }

    /// The rollout that moves users of this model, and the side that this user is on.
    fn in_rollout(&self, model: &ServedModel, user: &str) -> Option<(Arc<ServedModel>, Arc<Live>, Side)> {
        let live = self.shared.rollouts.of(&model.name)?;
        let to = self.served(&live.record.to)?;
        let side = live.side(user);
        Some((to, live, side))
    }

    /// The second model and the reason, if the first would take too long and the second would not take longer.
    fn overflows(
        &self,
        first: &ServedModel,
        overflow: &Overflow,
        asked: &RouteRequest<'_>,
        said: &BodyText<'_>,
    ) -> Option<(Arc<ServedModel>, String)> {
        let class = self.class_of(asked.service_tier);
        let tokens = u32::try_from(said.content().bytes / TOKEN_BYTES).unwrap_or(u32::MAX).max(1);
        let limit_ms = overflow.ttft_ms.or(self.classes().get(class).ttft_ms);
        let first_ms = first.backend.forecast(tokens, class).ttft_ms;
        let reason = too_long(first, first_ms, limit_ms)?;
        let second = self.served(&overflow.model)?;
        let second_ms = second.backend.forecast(tokens, class).ttft_ms?;
        first_ms.is_none_or(|first_ms| second_ms < first_ms).then_some((second, reason))
    }

    fn class_of(&self, tier: Option<&str>) -> ClassId {
        let tier = self.service_tier(tier).or(tier);
        self.classes().by_tier(tier).unwrap_or_default()
    }

    /// The reason why a request should be answered in another region: the model that would answer it here has no worker, or the request
    /// would wait for more than `limit_ms`, or than the limit of its class. A class without a limit has time, and a long prompt is no
    /// reason: it takes as long elsewhere.
    pub fn waits_too_long(&self, asked: &RouteRequest<'_>, limit_ms: Option<f64>) -> Option<String> {
        let said = BodyText::of(asked.body);
        let user = self.sticky_user(&said);
        let (mut model, by, overflow) = match self.router().and_then(|router| self.by_rules(router, asked, &said, &user)) {
            Some((model, by, _, overflow)) => (model, by, overflow),
            None => (Arc::clone(&self.select(asked.model).ok()?.model), "asked", None),
        };
        if by != "pin"
            && let Some((to, _, Side::To)) = self.in_rollout(&model, &user)
        {
            model = to;
        }
        let reason = self.wait_over(&model, self.class_of(asked.service_tier), limit_ms)?;
        let answered_by_second = overflow.is_some_and(|overflow| self.overflows(&model, &overflow, asked, &said).is_some());
        (!answered_by_second).then_some(reason)
    }

    /// Whether there is a request, of some model and class, that [`waits_too_long`](Self::waits_too_long).
    pub fn some_wait_too_long(&self, limit_ms: Option<f64>) -> bool {
        let classes = || self.classes().iter().map(|(class, _)| class);
        self.shared.models.iter().any(|model| classes().any(|class| self.wait_over(model, class, limit_ms).is_some()))
    }

    fn wait_over(&self, model: &ServedModel, class: ClassId, limit_ms: Option<f64>) -> Option<String> {
        let limit_ms = self.classes().get(class).ttft_ms.map(|of_class| limit_ms.unwrap_or(of_class));
        too_long(model, model.backend.forecast(1, class).ttft_ms, limit_ms)
    }

    /// A name that is the same for all requests of one user, as far as users can be told apart; an unknown user's is random.
    fn sticky_user(&self, said: &BodyText<'_>) -> String {
        let caller = self.caller.as_deref();
        let tenant = caller.and_then(|caller| caller.tenant());
        let (own, named) = (caller.and_then(|caller| caller.user()), said.content().user.as_deref());
        match (tenant, own.or(named)) {
            (_, Some(_)) => [tenant, own, named].map(Option::unwrap_or_default).join("\n"),
            (Some(tenant), None) => [Some(tenant), caller.and_then(|caller| caller.key())].map(Option::unwrap_or_default).join("\n\n\n"),
            (None, None) => format!("{:032x}", rand::random::<u128>()),
        }
    }

    /// Whether background requests should avoid this model.
    pub fn has_much_to_do(&self, model: &str) -> bool {
        let Some(model) = self.served(model) else { return true };
        let forecast = model.backend.forecast(1, ClassId::default());
        self.tenants().is_shedding() || forecast.waiting > 0 || forecast.ttft_ms.is_none_or(f64::is_infinite)
    }

    /// Unbinds the handle from its caller.
    pub fn for_nobody(&self) -> Self {
        Self { caller: None, routed: None, ..self.clone() }
    }

    /// Whether a repeated request, here or at a different coordinator, is routed to the same model.
    pub fn routes_repeatably(&self) -> bool {
        self.shared.rollouts.is_empty() && self.router().is_none_or(Router::is_repeatable)
    }

    /// The header that names a request's region, if rules depend on one.
    pub fn region_header(&self) -> Option<&str> {
        self.router()?.region_header.as_deref()
    }

    /// Names defined by the rules, each with the models that may answer.
    pub fn routed_names(&self) -> Vec<(String, Vec<Self>)> {
        let Some(router) = self.router() else { return Vec::new() };
        let aliases = self.aliases();
        let names = router.names(|name| self.served(name).is_some() || aliases.contains_key(name));
        let turned = |model| Self { model, ..self.clone() };
        names
            .into_iter()
            .map(|(name, of)| (name.to_owned(), of.into_iter().filter_map(|model| self.served(model)).map(turned).collect()))
            .collect()
    }
}

/// The reason why a model is too slow: it cannot serve, or takes longer than a limit.
fn too_long(model: &ServedModel, ms: Option<f64>, limit_ms: Option<f64>) -> Option<String> {
    match (ms, limit_ms) {
        (None, _) => Some(format!("{} cannot serve now", model.name)),
        (Some(ms), Some(limit)) if ms > limit => Some(format!("{} would take {ms:.0} of {limit:.0} ms", model.name)),
        _ => None,
    }
}
