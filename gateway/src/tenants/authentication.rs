//! The ways to authenticate: keys, and an identity provider's signed tokens. A further way (such as client certificates) is a variant of
//! [`Credential`], a field of [`Authentication`], and its branches in this file.

use crate::{
    base::shares::{Party, Pool, Shares},
    batch::life::Sender,
    metrics,
    requests::error::ApiError,
};
use parking_lot::RwLock;
use tidemill_tenancy::{
    directory::{Directory, Principal},
    jwt::{Invalid, Verifier, looks_like_one},
    key::Secret,
    limits::Overrides,
};

/// A credential, recognized by its form.
#[derive(Debug)]
enum Credential<'a> {
    Key(Secret),
    Token(&'a str),
}

impl<'a> Credential<'a> {
    fn parse(sent: &'a str) -> Option<Self> {
        let key = Secret::parse(sent).map(Self::Key);
        key.or_else(|| looks_like_one(sent).then_some(Self::Token(sent)))
    }
}

/// The maximum number of requests that wait for a provider's new keys.
const WAITING_MAX: u64 = 256;

/// The records and keys for verifying credentials. Times are in Unix seconds.
#[derive(Debug)]
pub(super) struct Authentication {
    pub(super) directory: RwLock<Directory>,
    jwt: Option<Verifier>,
    /// Places of requests that wait for a provider's new keys: anybody can name one that is unknown.
    waiting: Pool,
}

impl Authentication {
    pub(super) fn new(directory: Directory, jwt: Option<Verifier>) -> Self {
        Self { directory: RwLock::new(directory), jwt, waiting: Pool::new(Shares::quarters(WAITING_MAX, 0)) }
    }

    /// Whether a credential exists or existed, of any kind.
    pub(super) fn is_in_use(&self) -> bool {
        self.jwt.is_some() || self.directory.read().has_keys()
    }

    /// Returns the owner of a credential that this party has sent.
    pub(super) async fn verify(&self, now: u64, party: Party, sent: &str) -> Result<Principal, ApiError> {
        match Credential::parse(sent).ok_or_else(ApiError::wrong_key)? {
            Credential::Key(secret) => self.directory.read().authenticate(now, &secret).ok_or_else(ApiError::wrong_key),
            Credential::Token(token) => self.verify_token(now, party, token).await,
        }
    }

    async fn verify_token(&self, now: u64, party: Party, token: &str) -> Result<Principal, ApiError> {
        let jwt = self.jwt.as_ref().ok_or_else(ApiError::wrong_key)?;
        let mut verified = jwt.verify(now, token);
        if let (Err(Invalid::Key), Ok(_place)) = (&verified, self.waiting.take(party, 1))
            && let Some(arrived) = jwt.new_keys()
        {
            arrived.await;
            verified = jwt.verify(now, token);
        }
        let principal = verified.map_err(|invalid| ApiError::wrong_token(&invalid.to_string()))?;
        Ok(self.with_limits(principal))
    }

    /// Gives a principal the limits that its tenant has here.
    pub(super) fn with_limits(&self, principal: Principal) -> Principal {
        Principal { tenant_limits: self.limits_of(&principal.tenant), ..principal }
    }

    /// Returns the principal of a batch's sender, in its current state. The error is the reason why its credential is no longer valid.
    pub(super) fn verify_again(&self, now: u64, tenant: &str, sender: &Sender) -> Result<Principal, String> {
        if let Some(key) = &sender.key {
            return self.directory.read().principal(now, key).ok_or_else(|| format!("its key `{key}` was revoked, or has expired"));
        }
        let jwt = self.jwt.as_ref().ok_or("it was made with an identity provider's token, and by now there is no provider")?;
        if !jwt.allows_background(now, sender.until) {
            return Err("its token expired too long ago".into());
        }
        Ok(Principal {
            tenant: tenant.into(),
            tier: sender.tier.as_deref().unwrap_or_default().into(),
            user: sender.user.as_deref().map(Into::into),
            key: None,
            tenant_limits: self.limits_of(tenant),
            key_limits: Default::default(),
            until: sender.until,
        })
    }

    fn limits_of(&self, tenant: &str) -> Overrides {
        self.directory.read().tenant(tenant).map_or_else(Default::default, |tenant| tenant.limits)
    }

    /// Reloads the keys for verifying tokens, if they have changed. Blocks: not for the event loop.
    pub(super) fn refresh(&self) {
        match self.jwt.as_ref().map_or(Ok(false), Verifier::refresh) {
            Ok(true) => tracing::info!("the identity provider's keys were reloaded"),
            Ok(false) => {}
            Err(error) => tracing::warn!(%error, "could not reload the identity provider's keys; keeping the previous ones"),
        }
    }

    /// Updates the metrics of fetched keys.
    pub(super) fn show(&self) {
        if let Some(jwt) = &self.jwt {
            metrics::show_jwks(jwt.fetches());
        }
    }
}
