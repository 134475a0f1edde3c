//! Tenants at the gateway: authentication, quotas and usage. The cores of `tidemill-tenancy` behind locks that are held briefly.
//!
//! - `authentication`: the ways to authenticate
//! - `budgets`: what answers and operators are told of budgets; [`crossings`]: soft ones that are used up
//! - [`erasures`]: orders to erase, and what of usage remains
//! - [`metered`]: a request that holds its quota, until it is settled; `ttft`: the measurements for shedding

mod authentication;
mod budgets;
pub mod crossings;
pub mod erasures;
pub mod metered;
mod ttft;

use crate::{
    base::{owner::Owner, pins::Pins, shares::Party, stamp::unix},
    batch::life::Sender,
    features::grammars::Spent,
    metrics,
    requests::error::ApiError,
    rollout::{routed::Routed, shadow::Tap},
    traces::Trace,
};
use authentication::Authentication;
use crossings::Crossings;
use parking_lot::Mutex;
use std::{
    net::IpAddr,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU8, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tidemill_tenancy::{
    calendar::Period,
    directory::{Directory, Principal},
    journal::{self, Journal, JournalError},
    jwt::Verifier,
    keeper::{KeepError, Keeper},
    ledger::Ledger,
    limiter::{self, Held, Limiter},
    limits::{Limits, Share},
    quota::{Kind, Quota, Refusal, Scope, Standing, Use},
    records::{Change, Key, Tenant},
    shared::{self, SharedQuota},
    shedding::{Load, Shedding, Step, Watermarks},
    sink::{
        CursorError, Journaled, Sink,
        http::{self, Http},
    },
    tier::{Tier, Tiers},
    usage::{Event, price::Prices},
    web::TargetError,
};
use ttft::RecentTtfts;

/// The period of the usage log from which quotas are restored: no window is longer.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);
/// The longest wait for the quota server at the end of this process. What it is not told, it settles in full.
const FLUSHED_WITHIN: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct TenantSettings {
    pub keeper: Arc<dyn Keeper>,
    pub jwt: Option<Verifier>,
    pub tiers: Tiers,
    /// This coordinator's part of every limit, while no server decides.
    pub share: Share,
    /// The server on which all coordinators share the limits, if there is one.
    pub quota_server: Option<shared::Settings>,
    pub prices: Prices,
    /// Whether a key is needed even before one exists.
    pub closed: bool,
    /// Tenants that are served in some regions only, if this cluster is one of several.
    pub pins: Option<Arc<Pins>>,
    /// The limits for load shedding, if it is on.
    pub shedding: Option<Watermarks>,
    /// The usage log; `None` if usage is not recorded.
    pub meter: Option<MeterSettings>,
    /// The time after which an unsettled request counts as lost.
    pub request_timeout: Duration,
}

#[derive(Clone, Debug)]
pub struct MeterSettings {
    pub dir: std::path::PathBuf,
    pub log: journal::Settings,
    /// The collector of events; `None` if they are only logged.
    pub sink: Option<http::Settings>,
}

#[derive(Debug)]
pub struct Tenants {
    keeper: Arc<dyn Keeper>,
    authentication: Authentication,
    /// Whether the directory of tenants and keys is complete.
    known: AtomicBool,
    tiers: Tiers,
    prices: Prices,
    closed: bool,
    pins: Option<Arc<Pins>>,
    limiter: Limiter,
    /// The clock's start, since the Unix epoch. The clock never jumps.
    began: (Duration, Instant),
    meter: Option<Journal<Event>>,
    /// The directory of the usage log.
    meter_dir: Option<PathBuf>,
    /// The money that was spent this month, as far as the log has it.
    ledger: Option<Mutex<Ledger>>,
    crossings: Crossings,
    sink: Option<Sink>,
    shedding: Option<Mutex<Shedding>>,
    shed: AtomicU8,
    ttfts: RecentTtfts,
    request_timeout: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum TenantsError {
    #[error(transparent)]
    Keep(#[from] KeepError),
    #[error(transparent)]
    Meter(#[from] JournalError),
    #[error("usage events cannot be sent: {0}")]
    SinkTarget(#[from] TargetError),
    #[error(transparent)]
    SinkCursor(#[from] CursorError),
}

/// The sender of one HTTP request.
#[derive(Debug)]
pub struct Caller {
    /// The request's id, in its answer's `x-request-id` and in the usage log.
    pub id: String,
    /// The tenant and its tier; `None` if no key is needed.
    pub principal: Option<(Principal, Arc<Tier>)>,
    /// Whether the request is in the background: it is answered when there is room that no other request needs.
    pub in_background: bool,
    /// The address that the request's connection comes from.
    pub address: Option<IpAddr>,
    /// The region that the request names, if rules depend on one.
    pub region: Option<String>,
    /// The route, if the model was chosen by one.
    routed: OnceLock<Arc<Routed>>,
    /// The observer of a shadow's answer.
    shadow: Option<Mutex<Option<Tap>>>,
    /// The state of the quota, once the request holds it or was refused.
    standing: OnceLock<Standing>,
    /// The request's trace, if traces are recorded. All rounds of an answer share it.
    pub trace: Option<Arc<Trace>>,
    /// CPU time spent on the grammars of all rounds of the answer.
    pub(crate) grammars_spent: Arc<Spent>,
}

impl Caller {
    pub fn new(principal: Option<(Principal, Arc<Tier>)>) -> Self {
        Self {
            id: format!("req_{:032x}", rand::random::<u128>()),
            principal,
            in_background: false,
            address: None,
            region: None,
            routed: OnceLock::new(),
            shadow: None,
            standing: OnceLock::new(),
            trace: None,
            grammars_spent: Arc::default(),
        }
    }

    pub fn at_address(self, address: Option<IpAddr>) -> Self {
        Self { address, ..self }
    }

    pub fn in_trace(self, trace: Option<Arc<Trace>>) -> Self {
        Self { trace, ..self }
    }

    pub fn from_region(self, region: Option<String>) -> Self {
        Self { region, ..self }
    }

    /// The caller of a shadow: it uses no quota and is not billed.
    pub fn of_shadow(of: &Self, tap: Tap) -> Self {
        let own = Self::new(of.principal.clone()).at_address(of.address);
        Self { in_background: true, shadow: Some(Mutex::new(Some(tap))), ..own }
    }

    /// The caller of a further round of the same answer, which is billed separately.
    pub fn in_round(&self, round: u32) -> Self {
        let own = Self::new(self.principal.clone()).at_address(self.address);
        let grammars_spent = Arc::clone(&self.grammars_spent);
        let (id, trace) = (format!("{}-{round}", self.id), self.trace.clone());
        Self { id, in_background: self.in_background, region: self.region.clone(), trace, grammars_spent, ..own }
    }

    pub fn is_shadow(&self) -> bool {
        self.shadow.is_some()
    }

    pub(crate) fn take_tap(&self) -> Option<Tap> {
        self.shadow.as_ref()?.lock().take()
    }

    pub(crate) fn note_routed(&self, routed: &Arc<Routed>) {
        let _ = self.routed.set(Arc::clone(routed));
    }

    pub(crate) fn routed(&self) -> Option<&Arc<Routed>> {
        self.routed.get()
    }

    pub fn standing(&self) -> Option<&Standing> {
        self.standing.get()
    }

    /// The tenant; `None` if no key is needed.
    pub fn tenant(&self) -> Option<&str> {
        self.principal.as_ref().map(|(principal, _)| &*principal.tenant)
    }

    /// The party whose share its requests count towards: the tenant, or the address while no key is needed.
    pub fn party(&self) -> Party {
        match &self.principal {
            Some((principal, tier)) => Party::Tenant { name: Arc::clone(&principal.tenant), shed: tier.shed },
            None => party_of(self.address),
        }
    }

    /// The user; `None` if the key or token is for a whole tenant.
    pub fn user(&self) -> Option<&str> {
        self.principal.as_ref().and_then(|(principal, _)| principal.user.as_deref())
    }

    /// The owner of all data that the request stores.
    pub fn owner(&self) -> Owner {
        Owner::of(self.tenant(), self.user())
    }

    /// The id of the key that was used.
    pub fn key(&self) -> Option<&str> {
        self.principal.as_ref().and_then(|(principal, _)| principal.key.as_deref())
    }

    pub fn tier(&self) -> Option<&Arc<Tier>> {
        self.principal.as_ref().map(|(_, tier)| tier)
    }

    pub fn sender(&self) -> Sender {
        let Some((principal, tier)) = &self.principal else { return Sender::default() };
        Sender {
            tenant: Some(principal.tenant.as_ref().to_owned()),
            tier: Some(tier.name.clone()),
            user: principal.user.as_deref().map(str::to_owned),
            key: principal.key.as_deref().map(str::to_owned),
            until: principal.until,
        }
    }
}

/// The party of a sender without a tenant: its address.
fn party_of(address: Option<IpAddr>) -> Party {
    address.map_or(Party::Server, Party::of_address)
}

impl Tenants {
    /// Loads all tenants and keys, and the usage so far. With a quota server it must be called in a runtime.
    pub fn open(settings: TenantSettings) -> Result<Self, TenantsError> {
        let mut directory = Directory::default();
        let known = settings.keeper.is_complete();
        settings.keeper.load()?.into_iter().for_each(|change| directory.apply(change));
        let mut quota = Quota::default();
        let since = SystemTime::now().checked_sub(REMEMBERED).unwrap_or(UNIX_EPOCH);
        let restore = |event: Event| {
            if !event.tenant.is_empty() {
                // Money is restored from sums: a month has too many events.
                quota.restore(
                    Duration::from_millis(event.at_ms),
                    &charged(&event, known.then_some(&directory), &settings.tiers),
                    Use { cost_micros: 0, ..event.used() },
                );
            }
        };
        let meter_dir = settings.meter.as_ref().map(|meter| meter.dir.clone());
        let (meter, ledger, sink) = match settings.meter {
            None => (None, None, None),
            Some(MeterSettings { dir, log, sink }) => {
                let meter = Journal::open(&dir, log, since, restore)?;
                let ledger = Ledger::open(&dir, unix())?;
                let of_models = |scope: &Scope| match scope {
                    Scope::Model(_, model) => settings.tiers.iter().any(|tier| tier.models.contains_key(&**model)),
                    _ => true,
                };
                for (scope, spent) in ledger.spend().scopes(unix()).into_iter().filter(|(scope, _)| of_models(scope)) {
                    quota.restore_spend(unix(), scope, spent);
                }
                let sink = match sink {
                    Some(sink) => {
                        let events = Journaled::<Event>::new(&dir, &sink.source);
                        Some(Sink::start("usage", dir.join("sink.json"), events, Http::new(sink)?)?)
                    }
                    None => None,
                };
                (Some(meter), Some(Mutex::new(ledger)), sink)
            }
        };
        Ok(Self {
            keeper: settings.keeper,
            authentication: Authentication::new(directory, settings.jwt),
            known: known.into(),
            tiers: settings.tiers,
            prices: settings.prices,
            closed: settings.closed,
            pins: settings.pins,
            limiter: Limiter::new(settings.share, quota, settings.quota_server.map(|server| SharedQuota::start(server, rand::random()))),
            began: (unix(), Instant::now()),
            meter,
            meter_dir,
            ledger,
            crossings: Crossings::default(),
            sink,
            shedding: settings.shedding.map(|watermarks| Mutex::new(Shedding::new(watermarks))),
            shed: AtomicU8::new(0),
            ttfts: RecentTtfts::default(),
            request_timeout: settings.request_timeout,
        })
    }

    /// Whether no key is needed: none was ever made, no identity provider is configured, and the settings do not require one.
    pub fn is_open(&self) -> bool {
        !self.closed && self.are_known() && !self.has_keys()
    }

    /// Whether all tenants and keys are known. One of several coordinators must first learn those of the others.
    pub fn are_known(&self) -> bool {
        self.known.load(Ordering::Acquire)
    }

    pub fn check_known(&self) -> Result<(), ApiError> {
        let message = "This coordinator does not know yet which keys there are: it has to hear from a majority of the coordinators first.";
        if self.are_known() { Ok(()) } else { Err(ApiError::not_now(message)) }
    }

    /// Whether a credential exists or existed.
    pub fn has_keys(&self) -> bool {
        self.authentication.is_in_use()
    }

    /// Returns the owner of a credential that came from this address; `None` if no key is needed.
    pub async fn identify(&self, address: Option<IpAddr>, credential: Option<&str>) -> Result<Option<(Principal, Arc<Tier>)>, ApiError> {
        self.check_known()?;
        if self.is_open() {
            return Ok(None);
        }
        let credential = credential.ok_or_else(ApiError::no_key)?;
        let principal = self.authentication.verify(self.now().as_secs(), party_of(address), credential).await?;
        self.with_tier(principal).map(Some)
    }

    /// Returns the sender of a request that another region vouches for; `None` if no key is needed. The tenant may have no key here.
    pub fn identify_relayed(&self, principal: Principal) -> Result<Option<(Principal, Arc<Tier>)>, ApiError> {
        self.check_known()?;
        if self.is_open() {
            return Ok(None);
        }
        self.with_tier(self.authentication.with_limits(principal)).map(Some)
    }

    fn with_tier(&self, principal: Principal) -> Result<(Principal, Arc<Tier>), ApiError> {
        if let Some(pins) = self.pins.as_ref().filter(|pins| !pins.allow_here(&principal.tenant)) {
            return Err(ApiError::wrong_region(&pins.here, pins.of(Some(&principal.tenant)).unwrap_or_default()));
        }
        match self.tiers.get(&principal.tier).cloned() {
            Some(tier) => Ok((principal, tier)),
            None => Err(ApiError::no_such_tier(&principal.tier, &self.tiers.names())),
        }
    }

    /// Returns the sender of a batch as the caller of one of its requests, in its current state, since keys are revoked and tenants change
    /// tiers. The error is the reason why it has lost access.
    pub fn caller_of_batch(&self, sender: &Sender) -> Result<Caller, String> {
        let principal = match &sender.tenant {
            None if self.is_open() => None,
            None => return Err("it was made without a key, and by now keys are needed".into()),
            Some(tenant) => Some(self.authentication.verify_again(self.now().as_secs(), tenant, sender)?),
        };
        let principal = principal.map(|principal| self.with_tier(principal)).transpose().map_err(|error| error.message().to_owned())?;
        Ok(Caller { in_background: true, ..Caller::new(principal) })
    }

    /// Refuses a request that could not pass with any content, before it costs anything.
    pub fn peek(&self, caller: &Caller) -> Result<(), ApiError> {
        let Some((principal, tier)) = caller.principal.as_ref().filter(|_| !caller.is_shadow()) else { return Ok(()) };
        let step = self.shed.load(Ordering::Relaxed);
        if (1..=step).contains(&tier.shed) {
            metrics::count_shed(&tier.name);
            return Err(ApiError::shed(&tier.name, Shedding::wait(step, tier.shed)));
        }
        let scopes = self.scopes(principal, tier, None);
        self.limiter.peek(self.now(), &scopes).map_err(|refused| {
            let (refusal, standing) = *refused;
            let _ = caller.standing.set(standing);
            self.refused(caller, refusal)
        })
    }

    /// Takes the quota of a request that needs no model. It counts as one request, and as running until the result is dropped.
    pub async fn count(self: &Arc<Self>, caller: &Caller) -> Result<Counted, ApiError> {
        let held = match &caller.principal {
            Some((principal, tier)) if !caller.is_shadow() => {
                Some(self.hold(caller, principal, &self.scopes(principal, tier, None), Use::default()).await?)
            }
            _ => None,
        };
        Ok(Counted { tenants: Arc::clone(self), held })
    }

    /// Takes the quota of a request in all of these scopes.
    async fn hold(&self, caller: &Caller, principal: &Principal, scopes: &[(Scope, Limits)], most: Use) -> Result<Held, ApiError> {
        let asked = Instant::now();
        let request = limiter::Request { tenant: &principal.tenant, scopes, most, now: self.now(), lasts: self.request_timeout * 2 };
        let (held, standing) = self.limiter.reserve(request).await;
        if self.limiter.has_server() {
            metrics::observe_quota_server(asked.elapsed());
        }
        if held.is_ok() && most.cost_micros > 0 {
            self.crossings.note(self.now(), &principal.tenant, &standing.warnings);
        }
        let _ = caller.standing.set(standing);
        held.map_err(|refusal| self.refused(caller, refusal))
    }

    /// Limits the answer of a client that leaves the length open: by the tier, and by what its limits could ever allow. `room` is the
    /// number of tokens that fit after the prompt.
    pub fn answer_tokens(&self, caller: &Caller, model: &str, room: u32, prompt_tokens: u64, choices: u64) -> u32 {
        let Some((principal, tier)) = &caller.principal else { return room };
        let limits = self.scopes(principal, tier, Some(model)).into_iter().map(|(_, limits)| self.limiter.applied(limits));
        let least = limits.flat_map(|limits| {
            let paid = |period| self.prices.answer_tokens(model, prompt_tokens, limits.budgets.of(period).hard?);
            let counted = |limit: Option<u64>| limit.map(|limit| limit.saturating_sub(prompt_tokens));
            [counted(limits.tokens_per_minute), counted(limits.tokens_per_day), paid(Period::Day), paid(Period::Month)]
        });
        let Some(least) = least.flatten().min() else { return room };
        let each = least / choices.max(1);
        room.min(tier.answer_tokens).min(u32::try_from(each).unwrap_or(u32::MAX)).max(1)
    }

    fn refused(&self, caller: &Caller, refusal: Refusal) -> ApiError {
        let tenant = caller.tenant().unwrap_or_default();
        metrics::count_quota_refusal(match refusal.kind() {
            Kind::Requests => "requests",
            Kind::Tokens => "tokens",
            Kind::TokensPerDay => "tokens-per-day",
            Kind::Concurrent => "concurrent",
            Kind::Spend(Period::Day) => "budget-day",
            Kind::Spend(Period::Month) => "budget-month",
        });
        ApiError::over_quota(tenant, refusal, self.now())
    }

    fn scopes(&self, principal: &Principal, tier: &Tier, model: Option<&str>) -> Vec<(Scope, Limits)> {
        let tenant = || Arc::clone(&principal.tenant);
        let of_model = model.and_then(|model| Some((Scope::Model(tenant(), model.into()), *tier.models.get(model)?)));
        let of_key = principal.key.as_ref().map(|key| (Scope::Key(Arc::clone(key)), principal.key_limits.over(Limits::default())));
        let all = [Some((Scope::Tenant(tenant()), tier.limits(&principal.tenant_limits))), of_key, of_model];
        // A request that costs money counts for a tenant and a key before they have a budget: one that is set later is for the whole month.
        let is_priced = model.is_some_and(|model| self.prices.0.contains_key(model));
        all.into_iter().flatten().filter(|(_, limits)| is_priced || *limits != Limits::default()).collect()
    }

    pub fn tiers(&self) -> &Tiers {
        &self.tiers
    }

    /// Makes a change that outlives this process. May block: not for the event loop.
    pub fn change(&self, change: Change) -> Result<(), KeepError> {
        self.keeper.apply(&change)?;
        self.authentication.directory.write().apply(change);
        Ok(())
    }

    pub fn tenant(&self, id: &str) -> Option<Tenant> {
        self.authentication.directory.read().tenant(id).cloned()
    }

    pub fn key(&self, id: &str) -> Option<Key> {
        self.authentication.directory.read().key(id).cloned()
    }

    pub fn all_tenants(&self) -> Vec<Tenant> {
        self.authentication.directory.read().tenants().cloned().collect()
    }

    pub fn all_keys(&self) -> Vec<Key> {
        self.authentication.directory.read().keys().cloned().collect()
    }

    /// Loads other processes' changes of tenants and keys. Blocks: not for the event loop.
    pub fn refresh_records(&self) {
        let changed = self.keeper.changed().and_then(|changed| if changed { self.keeper.load().map(Some) } else { Ok(None) });
        match changed {
            Ok(Some(changes)) => {
                let mut directory = self.authentication.directory.write();
                changes.into_iter().for_each(|change| directory.apply(change));
                self.known.store(self.keeper.is_complete(), Ordering::Release);
            }
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "could not reload tenants and keys; keeping the previous ones"),
        }
    }

    /// Loads other processes' changes. Blocks: not for the event loop.
    pub fn refresh(&self) {
        self.refresh_records();
        self.authentication.refresh();
    }

    /// Reclaims the quota of lost requests, and reports lost usage records. To be called periodically.
    pub fn sweep(&self) {
        self.limiter.sweep(self.now());
        self.crossings.sweep(self.now());
        if let Some(counts) = self.limiter.shared_counts() {
            metrics::show_quota_server(&counts);
        }
        let (lost, failing) = self.meter.as_ref().map_or((0, false), |meter| (meter.lost(), meter.is_failing()));
        metrics::show_usage_log(lost, failing);
        self.authentication.show();
        if let Some(sink) = &self.sink {
            metrics::show_usage_sink(&sink.counts());
        }
    }

    /// Waits, for a moment, until the quota server knows how all requests have ended. To be called when they have.
    pub async fn flush(&self) {
        self.limiter.flush(FLUSHED_WITHIN).await;
    }

    /// Updates load shedding. `kv_used` is the share of decode workers' blocks in use. To be called several times a second.
    pub fn observe_load(&self, kv_used: Option<f64>) {
        let Some(shedding) = &self.shedding else { return };
        let load = Load { kv_used, ttft_p95: self.ttfts.p95(Instant::now()) };
        let step: Step = shedding.lock().observe(self.now(), load);
        if self.shed.swap(step, Ordering::Relaxed) != step {
            tracing::warn!(step, ?load, "load shedding level changed");
        }
        metrics::show_shedding(step);
    }

    /// Whether load is being shed.
    pub fn is_shedding(&self) -> bool {
        self.shed.load(Ordering::Relaxed) > 0
    }

    /// Whether load is observed.
    pub fn sheds(&self) -> bool {
        self.shedding.is_some() && !self.is_open()
    }

    /// Soft budgets that were crossed, and are not in the audit log yet.
    pub fn crossings(&self) -> &Crossings {
        &self.crossings
    }

    pub(crate) fn now(&self) -> Duration {
        self.began.0 + self.began.1.elapsed()
    }
}

/// The quota of a request that counts, but uses no tokens.
#[derive(Debug)]
pub struct Counted {
    tenants: Arc<Tenants>,
    held: Option<Held>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            self.tenants.limiter.settle(held, Use::default());
        }
    }
}

/// Lists the scopes that an event was charged to. Their limits do not matter here. Without a directory, any key may have limits of its own.
fn charged(event: &Event, directory: Option<&Directory>, tiers: &Tiers) -> Vec<(Scope, Limits)> {
    let tenant: Arc<str> = event.tenant.as_str().into();
    let limited = |id: &&str| directory.is_none_or(|directory| directory.key(id).is_some_and(|key| !key.limits.is_empty()));
    let key = event.key.as_deref().filter(limited);
    let model = tiers.iter().any(|tier| tier.models.contains_key(&event.model));
    let scopes = [
        Some(Scope::Tenant(Arc::clone(&tenant))),
        key.map(|key| Scope::Key(key.into())),
        model.then(|| Scope::Model(tenant, event.model.as_str().into())),
    ];
    scopes.into_iter().flatten().map(|scope| (scope, Limits::default())).collect()
}
