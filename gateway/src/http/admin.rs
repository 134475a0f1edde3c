//! Tenants and keys, for operators: on a port of their own, never on the clients'. A secret is shown once, in the answer that creates its
//! key.

use super::parameters::Path;
use crate::{
    base::owner::Whose,
    requests::{error::ApiError, parse},
    serving::gateway::Gateway,
    tenants::Tenants,
};
use axum::{Json, body::Body, extract::State};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use std::sync::Arc;
use tidemill_tenancy::{
    keeper::KeepError,
    key::Secret,
    limits::Overrides,
    money,
    records::{Change, Key, Tenant, check_name},
};

/// The maximum size of a body.
const BODY_BYTES_MAX: usize = 64 << 10;
/// The longest name of a user: an identity provider's may be anything.
const USER_BYTES_MAX: usize = 1024;

type Answered = Result<Json<Value>, ApiError>;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NewKey {
    tenant: String,
    /// The tier of a new tenant.
    #[serde(default)]
    tier: Option<String>,
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    name: Option<String>,
    /// Limits of this key alone.
    #[serde(default)]
    limits: Overrides,
    #[serde(default)]
    expires_in_s: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TenantFields {
    #[serde(default)]
    tier: Option<String>,
    /// Limits that replace the tier's: given ones replace earlier ones.
    #[serde(default)]
    limits: Overrides,
    /// Whether earlier limits of the tenant's own are dropped.
    #[serde(default)]
    reset_limits: bool,
    /// Whether the tenant's requests may be answered from the semantic cache.
    #[serde(default)]
    semantic_cache: Option<bool>,
}

/// `POST /admin/keys`. Creates the tenant as well if it is new.
pub async fn create_key(State(gateway): State<Arc<Gateway>>, body: Body) -> Answered {
    let wanted: NewKey = read(body).await?;
    let made = change(&gateway, move |tenants| {
        for (what, name) in [("tenant", Some(&wanted.tenant)), ("user", wanted.user.as_ref()), ("key", wanted.name.as_ref())] {
            name.map_or(Ok(()), |name| check_name(what, name)).map_err(|problem| ApiError::invalid(what, problem))?;
        }
        wanted.limits.check().map_err(|problem| ApiError::invalid("limits", problem))?;
        let now = crate::base::stamp::unix_seconds();
        match (tenants.tenant(&wanted.tenant), wanted.tier) {
            (Some(tenant), Some(tier)) if tier != tenant.tier => {
                let message = format!(
                    "tenant `{}` has tier `{}`: change it first (`tidemill tenants set {0} --tier {tier}`), or leave the tier out",
                    tenant.id, tenant.tier
                );
                return Err(ApiError::invalid("tier", message));
            }
            (Some(_), _) => {}
            (None, Some(tier)) => {
                check_tier(tenants, &tier)?;
                let tenant = Tenant {
                    id: wanted.tenant.clone(),
                    tier,
                    limits: Overrides::default(),
                    semantic_cache: false,
                    erased: 0,
                    erasures: Vec::new(),
                    created: now,
                };
                tenants.change(Change::Tenant(tenant)).map_err(not_kept)?;
            }
            (None, None) => {
                let message = format!("tenant `{}` is new: say its tier, one of {}", wanted.tenant, tenants.tiers().names());
                return Err(ApiError::invalid("tier", message));
            }
        }
        // Two prefixes of 48 bits are hardly ever equal; an existing key is never overwritten.
        let secret = std::iter::repeat_with(|| Secret::new(rand::random())).find(|secret| tenants.key(secret.prefix()).is_none());
        let secret = secret.expect("there is an end to the keys that are kept");
        let key = Key {
            id: secret.prefix().to_owned(),
            digest: secret.digest(),
            tenant: wanted.tenant,
            user: wanted.user,
            name: wanted.name,
            limits: wanted.limits,
            created: now,
            expires: wanted.expires_in_s.map(|seconds| now.saturating_add(seconds)),
            revoked: None,
        };
        let mut shown = shown(&key);
        shown["key"] = secret.reveal().into();
        tenants.change(Change::Key(key)).map_err(not_kept)?;
        Ok(shown)
    });
    let made = made.await?;
    tracing::info!(key = made["id"].as_str(), tenant = made["tenant"].as_str(), "a key was made");
    Ok(made)
}

/// `GET /admin/keys`.
pub async fn list_keys(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    let mut keys = gateway.tenants().all_keys();
    keys.sort_by(|a, b| (&a.tenant, a.created, &a.id).cmp(&(&b.tenant, b.created, &b.id)));
    Json(json!({"keys": keys.iter().map(shown).collect::<Vec<_>>()}))
}

/// `DELETE /admin/keys/{id}`. The key stays in the list, but is no longer accepted.
pub async fn revoke_key(State(gateway): State<Arc<Gateway>>, Path(id): Path<String>) -> Answered {
    let revoked = change(&gateway, move |tenants| {
        let missing = || ApiError::not_found("id", "there is no key with this id: `tidemill keys list` shows those that there are");
        let key = tenants.key(&id).ok_or_else(missing)?;
        let key = Key { revoked: key.revoked.or_else(|| Some(crate::base::stamp::unix_seconds())), ..key };
        let shown = shown(&key);
        tenants.change(Change::Key(key)).map_err(not_kept)?;
        Ok(shown)
    });
    let revoked = revoked.await?;
    tracing::info!(key = revoked["id"].as_str(), tenant = revoked["tenant"].as_str(), "a key was revoked");
    Ok(revoked)
}

/// `GET /admin/tenants`, with the available tiers.
pub async fn list_tenants(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    let tiers = gateway.tenants().tiers().iter().map(|tier| {
        let limits = tier.limits;
        json!({
            "name": tier.name, "class": tier.class, "classes": tier.classes, "shed": tier.shed,
            "requests_per_minute": limits.requests_per_minute, "tokens_per_minute": limits.tokens_per_minute,
            "tokens_per_day": limits.tokens_per_day, "concurrent": limits.concurrent,
            "budget_day": limits.budgets.day.hard.map(money::written), "budget_month": limits.budgets.month.hard.map(money::written),
        })
    });
    Json(json!({"tenants": gateway.tenants().all_tenants(), "tiers": tiers.collect::<Vec<_>>()}))
}

/// `GET /admin/spend`: what was spent by requests to this coordinator, beside the budgets.
pub async fn spend(State(gateway): State<Arc<Gateway>>) -> Json<Value> {
    let tenants = Arc::clone(gateway.tenants());
    Json(tokio::task::spawn_blocking(move || tenants.spend_report()).await.unwrap_or_default())
}

/// `PUT /admin/tenants/{id}`: creates a tenant, or changes its tier or limits.
pub async fn put_tenant(State(gateway): State<Arc<Gateway>>, Path(id): Path<String>, body: Body) -> Answered {
    let wanted: TenantFields = read(body).await?;
    change(&gateway, move |tenants| {
        check_name("tenant", &id).map_err(|problem| ApiError::invalid("id", problem))?;
        let earlier = tenants.tenant(&id);
        let tier = wanted.tier.or_else(|| earlier.as_ref().map(|tenant| tenant.tier.clone()));
        let missing = || ApiError::invalid("tier", format!("tenant `{id}` is new: say its tier, one of {}", tenants.tiers().names()));
        let tier = tier.ok_or_else(missing)?;
        check_tier(tenants, &tier)?;
        let opted_in = earlier.as_ref().is_some_and(|tenant| tenant.semantic_cache);
        let (erased, erasures) = earlier.as_ref().map_or((0, Vec::new()), |it| (it.erased, it.erasures.clone()));
        let (limits, created) = earlier.map_or((Overrides::default(), crate::base::stamp::unix_seconds()), |it| (it.limits, it.created));
        let limits = if wanted.reset_limits { wanted.limits } else { wanted.limits.or(limits) };
        limits.check().map_err(|problem| ApiError::invalid("limits", problem))?;
        let semantic_cache = wanted.semantic_cache.unwrap_or(opted_in);
        let tenant = Tenant { id, tier, limits, semantic_cache, erased, erasures, created };
        let shown = json!(tenant);
        tenants.change(Change::Tenant(tenant)).map_err(not_kept)?;
        Ok(shown)
    })
    .await
}

/// Runs on a blocking thread: records are synced to a disk, or agreed on by several coordinators.
pub(super) async fn change(gateway: &Arc<Gateway>, work: impl FnOnce(&Tenants) -> Result<Value, ApiError> + Send + 'static) -> Answered {
    let worker = Arc::clone(gateway);
    // Clients' work must not hold up an operator.
    let changed = tokio::task::spawn_blocking(move || {
        let tenants = worker.tenants();
        // Changes that a different coordinator has just made count.
        tenants.refresh_records();
        tenants.check_known()?;
        work(tenants)
    });
    changed.await.unwrap_or_else(|_| Err(ApiError::internal("the change was not made: please report this as a bug"))).map(Json)
}

/// Reads an operator's body. Its content type was checked at the [door](super::doors).
pub(super) async fn read<T: DeserializeOwned>(body: Body) -> Result<T, ApiError> {
    parse::json(&parse::read(body, BODY_BYTES_MAX).await?)
}

/// The user that an operator names, or without one the whole tenant.
pub(super) fn whose(tenant: String, user: Option<String>) -> Result<Whose, ApiError> {
    let is_name = |name: &str| !name.is_empty() && name.len() <= USER_BYTES_MAX;
    if !is_name(&tenant) || tenant.contains('/') {
        return Err(ApiError::invalid("tenant", "`tenant` is the name of a tenant, as `tidemill tenants list` shows it"));
    }
    if user.as_deref().is_some_and(|user| !is_name(user)) {
        let message = format!("`user` is a name of 1 to {USER_BYTES_MAX} bytes; leave it out for the whole tenant");
        return Err(ApiError::invalid("user", message));
    }
    Ok(Whose { tenant, user })
}

fn check_tier(tenants: &Tenants, tier: &str) -> Result<(), ApiError> {
    match tenants.tiers().get(tier) {
        Some(_) => Ok(()),
        None => Err(ApiError::invalid("tier", format!("`{tier}` is not a tier: it must be one of {}", tenants.tiers().names()))),
    }
}

/// Writes a key without its digest.
fn shown(key: &Key) -> Value {
    let mut shown = json!(key);
    if let Value::Object(fields) = &mut shown {
        fields.remove("digest");
    }
    shown
}

pub(super) fn not_kept(error: KeepError) -> ApiError {
    tracing::error!(%error, "could not save a change of tenants or keys");
    match error {
        KeepError::NotNow(_) => ApiError::not_now(error.to_string()),
        KeepError::Refused(_) => ApiError::conflict(error.to_string()),
        _ => ApiError::internal(error.to_string()),
    }
}
