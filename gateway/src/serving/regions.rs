//! Regions: clusters at several sites, each with workers, a pool and stores of its own. What is computed or stored in a region stays there.
//! A request that needs nothing stored may be relayed, as a whole, to the front door of another region: when it would wait too long here,
//! and only to regions that its tenant may be in.

use crate::{
    base::{
        pins::Pins,
        shares::{Pool, Share, Shares},
        stamp::unix_seconds,
    },
    metrics,
    requests::error::ApiError,
    tenants::Caller,
};
use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::Response,
};
use futures_util::stream;
use parking_lot::Mutex;
use reqwest::{Certificate, Client};
use serde_json::{Map, Value};
use std::{
    io,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_tenancy::{
    assertion::Secret,
    directory::Principal,
    web::{Target, TargetError},
};
use tokio::time;

/// The header that names the region which relayed a request. Such a request is not relayed again.
pub const RELAYED_FROM: &str = "x-tidemill-relayed-from";
/// The header that asserts to the other region whose request it is, if keys are needed.
const RELAYED_AS: &str = "x-tidemill-relayed-as";
/// The endpoints whose requests other regions may answer.
pub const PATHS: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"];
/// The header of an answer that names its region.
pub const REGION: &str = "x-tidemill-region";

/// The deadline for connecting to another region: a handshake takes two round trips, around the world as well.
const CONNECT_MAX: Duration = Duration::from_secs(3);
/// The rest of a region that could not be reached, after which one request tries it again.
const REST: Duration = Duration::from_secs(5);
/// The time after which a region that acknowledges nothing counts as gone; a silent connection is probed as often.
const UNHEARD_MAX: Duration = Duration::from_secs(5);
const PROBED_EVERY: Duration = Duration::from_secs(1);
const PROBES_MAX: u32 = 3;
/// The longest time until a stream begins, and the longest silence of an answer that has begun: a stream that waits for tokens has a
/// comment every few seconds.
const SILENCE_MAX: Duration = Duration::from_secs(20);
/// While a whole answer is computed nothing comes, and its region is asked for a sign of life instead. One that owes two is given up.
const SIGN_EVERY: Duration = Duration::from_secs(5);
const SIGNS_MISSED: u32 = 2;
/// The time by which the answering region's own limit for a request should come first.
const MARGIN: Duration = Duration::from_secs(5);
/// The maximum number of requests that other regions answer at a time.
const RELAYED_MAX: u64 = 1024;

/// The headers of a request that go to another region, besides those of Anthropic's API. The client's credential stays here.
const SENT: [HeaderName; 4] =
    [header::CONTENT_TYPE, header::ACCEPT, HeaderName::from_static("traceparent"), HeaderName::from_static("tracestate")];
/// The headers of an answer that come back, besides those of its limits and of Tidemill.
const RETURNED: [HeaderName; 4] = [header::CONTENT_TYPE, header::CONTENT_LENGTH, header::CACHE_CONTROL, header::RETRY_AFTER];

#[derive(Clone, Debug, PartialEq)]
pub struct RegionSettings {
    /// The name of this region, and the tenants that are served in some regions only.
    pub pins: Arc<Pins>,
    /// The predicted wait from which a request is relayed; `None` for the limit of its class.
    pub wait_ms: Option<f64>,
    /// The header in which requests say their region, if rules depend on one.
    pub region_header: Option<HeaderName>,
    /// The other regions, nearest first.
    pub others: Vec<OtherRegion>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherRegion {
    pub name: String,
    /// The URL of its front door, without a path.
    pub door: Target,
    /// The file with the secret that the two regions share; without one, only requests that need no key are relayed.
    pub secret: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    #[error("region `{region}`: {source}")]
    Target { region: String, source: TargetError },
    #[error("region `{region}`: cannot read {path}: {source}")]
    Ca { region: String, path: PathBuf, source: io::Error },
    #[error("region `{region}`: cannot read the secret in {path}: {source}")]
    Secret { region: String, path: PathBuf, source: io::Error },
    #[error("region `{region}`: its client cannot be made: {source}")]
    Client { region: String, source: reqwest::Error },
}

/// This region and the ways to the others.
#[derive(Debug)]
pub struct Regions {
    settings: RegionSettings,
    ways: Vec<Way>,
    places: Pool,
}

/// The way to another region.
#[derive(Debug)]
struct Way {
    region: String,
    url: String,
    /// The client for answers that come at once, and the one for streams, which are never silent for long.
    whole: Client,
    streaming: Client,
    secret: Option<Secret>,
    /// The time until which the region is left alone.
    rests_until: Mutex<Option<Instant>>,
}

/// The reason why an answer did not come.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("{}", chain(.0))]
    Request(reqwest::Error),
    #[error("nothing came for {} s", .0.as_secs())]
    Silent(Duration),
}

/// A request to relay.
#[derive(Clone, Debug)]
pub struct Relayed<'a> {
    pub caller: &'a Caller,
    pub path: &'a str,
    pub headers: &'a HeaderMap,
    pub body: Bytes,
    pub streams: bool,
}

impl Regions {
    /// Creates the clients for the other regions. `answer_max` is the longest time of a request.
    pub fn new(settings: RegionSettings, answer_max: Duration) -> Result<Self, RegionError> {
        let ways = settings.others.iter().map(|other| Way::new(other, answer_max)).collect::<Result<_, _>>()?;
        Ok(Self { settings, ways, places: Pool::new(Shares::quarters(RELAYED_MAX, 0)) })
    }

    pub fn name(&self) -> &str {
        &self.settings.pins.here
    }

    /// The predicted wait from which a request is relayed; `None` for the limit of its class.
    pub fn wait_ms(&self) -> Option<f64> {
        self.settings.wait_ms
    }

    /// Whether there is another region to ask for a tenant's request at the moment.
    pub fn has_way(&self, caller: &Caller) -> bool {
        let now = Instant::now();
        self.ways_of(caller).any(|way| way.rests_until.lock().is_none_or(|until| until <= now))
    }

    fn ways_of(&self, caller: &Caller) -> impl Iterator<Item = &Way> {
        let (pins, tenant) = (&self.settings.pins, caller.tenant());
        self.ways.iter().filter(move |way| (tenant.is_none() || way.secret.is_some()) && pins.allow(tenant, &way.region))
    }

    /// The sender of a request that another region relays, by its assertion; `None` if it has none. An assertion is good for what may be
    /// relayed, and nothing else.
    pub fn relayed_sender(&self, path: &str, headers: &HeaderMap) -> Option<Result<Principal, ApiError>> {
        let assertion = headers.get(RELAYED_AS).filter(|_| PATHS.contains(&path))?;
        let verified = || {
            let from = headers.get(RELAYED_FROM).and_then(|from| from.to_str().ok()).ok_or("it does not say from which region it comes")?;
            let way = self.ways.iter().find(|way| way.region == from).ok_or("it comes from a region that is not known here")?;
            let secret = way.secret.as_ref().ok_or("no secret is shared with the region that it comes from")?;
            secret.verify(from, self.name(), assertion.to_str().unwrap_or_default())
        };
        Some(verified().map_err(|reason| ApiError::wrong_token(&reason)))
    }

    /// Relays a request to the first region that takes it. `None` if none does: a refusal there is no refusal here. An error means that a
    /// region has taken it, and that its answer did not come; to ask another one would compute it twice.
    pub async fn relay(&self, request: Relayed<'_>) -> Option<Result<Response, ApiError>> {
        let place = self.places.take(request.caller.party(), 1).ok()?;
        for way in self.ways_of(request.caller).filter(|way| way.may_be_tried()) {
            match self.send(way, &request).await {
                Ok(answer) if answer.status().is_success() && is_ours(&answer) => {
                    way.rests_until.lock().take();
                    metrics::count_relayed(&way.region, "answered");
                    return Some(Ok(way.answer(answer, place)));
                }
                // It did not begin to compute: it has no time, or not this model, or does not know the key.
                Ok(answer) if answer.status().is_client_error() || answer.status() == StatusCode::SERVICE_UNAVAILABLE => {
                    way.rests_until.lock().take();
                    metrics::count_relayed(&way.region, "refused");
                    tracing::debug!(region = way.region, status = %answer.status(), "relaying a request failed: it was refused");
                }
                Ok(answer) => {
                    metrics::count_relayed(&way.region, "failed");
                    tracing::warn!(region = way.region, status = %answer.status(), "relaying a request failed");
                    return Some(Err(ApiError::lost_elsewhere(&way.region)));
                }
                Err(error) => {
                    metrics::count_relayed(&way.region, "failed");
                    let was_sent = !matches!(&error, Lost::Request(error) if error.is_connect());
                    tracing::warn!(region = way.region, %error, "relaying a request failed");
                    way.rest(REST);
                    if was_sent {
                        return Some(Err(ApiError::lost_elsewhere(&way.region)));
                    }
                }
            }
        }
        None
    }

    /// Sends a request, and waits for the beginning of its answer.
    async fn send(&self, way: &Way, request: &Relayed<'_>) -> Result<reqwest::Response, Lost> {
        let is_sent = |name: &HeaderName| {
            SENT.contains(name) || name.as_str().starts_with("anthropic-") || self.settings.region_header.as_ref() == Some(name)
        };
        let mut headers = picked(request.headers, is_sent);
        if let (Some((principal, _)), Some(secret)) = (&request.caller.principal, &way.secret) {
            let assertion = secret.assert(self.name(), &way.region, unix_seconds(), principal);
            let mut assertion = HeaderValue::try_from(assertion).expect("a token is ASCII");
            assertion.set_sensitive(true);
            headers.insert(RELAYED_AS, assertion);
        }
        if let Ok(from) = HeaderValue::from_str(self.name()) {
            headers.insert(RELAYED_FROM, from);
        }
        let client = if request.streams { &way.streaming } else { &way.whole };
        let sent = client.post(format!("{}{}", way.url, request.path)).headers(headers).body(request.body.clone()).send();
        let silence = async {
            if request.streams {
                time::sleep(SILENCE_MAX).await;
                SILENCE_MAX
            } else {
                way.falls_silent().await
            }
        };
        tokio::select! {
            answer = sent => answer.map_err(|error| Lost::Request(error.without_url())),
            silence = silence => Err(Lost::Silent(silence)),
        }
    }
}

impl Way {
    fn new(other: &OtherRegion, answer_max: Duration) -> Result<Self, RegionError> {
        let region = || other.name.clone();
        other.door.check().map_err(|source| RegionError::Target { region: region(), source })?;
        let ca = other.door.ca.as_ref().map(|path| {
            let pem = std::fs::read(path).map_err(|source| RegionError::Ca { region: region(), path: path.clone(), source })?;
            Certificate::from_pem_bundle(&pem).map_err(|source| RegionError::Client { region: region(), source })
        });
        let ca = ca.transpose()?;
        let secret = other
            .secret
            .as_ref()
            .map(|path| Secret::read(path).map_err(|source| RegionError::Secret { region: region(), path: path.clone(), source }));
        let secret = secret.transpose()?;
        let client = |silence_max| {
            let client = Client::builder()
                // Settings come from files and flags, not from the environment.
                .no_proxy()
                .redirect(reqwest::redirect::Policy::none())
                .https_only(other.door.url.starts_with("https:"))
                .connect_timeout(CONNECT_MAX)
                .tcp_user_timeout(UNHEARD_MAX)
                .tcp_keepalive(UNHEARD_MAX)
                .tcp_keepalive_interval(PROBED_EVERY)
                .tcp_keepalive_retries(PROBES_MAX)
                .read_timeout(silence_max)
                .timeout(answer_max + MARGIN);
            let client = if let Some(ca) = &ca { client.tls_certs_only(ca.clone()) } else { client };
            client.build().map_err(|source| RegionError::Client { region: region(), source })
        };
        let (whole, streaming) = (client(answer_max + MARGIN)?, client(SILENCE_MAX)?);
        let url = other.door.url.trim_end_matches('/').to_owned();
        Ok(Self { region: region(), url, whole, streaming, secret, rests_until: Mutex::default() })
    }

    /// Whether a request may try this way. The first one after a rest is alone in that for as long as connecting may take, so that others do
    /// not wait for a region that is still gone.
    fn may_be_tried(&self) -> bool {
        let mut rests_until = self.rests_until.lock();
        match *rests_until {
            Some(until) if until > Instant::now() => false,
            Some(_) => {
                *rests_until = Some(Instant::now() + CONNECT_MAX);
                true
            }
            None => true,
        }
    }

    /// Waits until the region gives no sign of life any more. Returns how long it gave none.
    async fn falls_silent(&self) -> Duration {
        let mut missed = 0;
        while missed < SIGNS_MISSED {
            if missed == 0 {
                time::sleep(SIGN_EVERY).await;
            }
            let sign = time::timeout(SIGN_EVERY, self.streaming.get(format!("{}/health", self.url)).send()).await;
            missed = if matches!(sign, Ok(Ok(answer)) if answer.status().is_success()) { 0 } else { missed + 1 };
        }
        SIGN_EVERY * SIGNS_MISSED
    }

    fn rest(&self, rest: Duration) {
        *self.rests_until.lock() = Some(Instant::now() + rest);
    }

    /// The answer for the client, which holds its place until it has been sent.
    fn answer(&self, answer: reqwest::Response, place: Share) -> Response {
        let is_returned =
            |name: &HeaderName| RETURNED.contains(name) || ["x-tidemill-", "x-ratelimit-"].iter().any(|own| name.as_str().starts_with(own));
        let (status, mut headers) = (answer.status(), picked(answer.headers(), is_returned));
        if let Ok(region) = HeaderValue::from_str(&self.region) {
            headers.insert(REGION, region);
        }
        // A whole answer has begun: the rest of it is there, too.
        let bytes = stream::try_unfold((answer, place), |(mut answer, place)| async {
            let chunk = time::timeout(SILENCE_MAX, answer.chunk()).await.map_err(|_| Lost::Silent(SILENCE_MAX))?;
            Ok::<_, Lost>(chunk.map_err(|error| Lost::Request(error.without_url()))?.map(|chunk| (chunk, (answer, place))))
        });
        let mut response = Response::new(Body::from_stream(bytes));
        *response.status_mut() = status;
        *response.headers_mut() = headers;
        response
    }
}

/// Whether a request refers to something that is stored in this region, or asks for its answer to be stored.
pub fn needs_the_store(path: &str, body: &Map<String, Value>) -> bool {
    let names = |field: &str| body.get(field).is_some_and(|value| !value.is_null());
    let stores = body.get("store").map_or(path == "/v1/responses", |store| *store != Value::Bool(false));
    stores || names("conversation") || names("previous_response_id") || body.get("memory") == Some(&Value::Bool(true))
}

/// Whether an answer is of a kind that this API gives: browsers would run others as this region's pages.
fn is_ours(answer: &reqwest::Response) -> bool {
    let kind = answer.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).and_then(|kind| kind.split(';').next());
    kind.is_some_and(|kind| ["application/json", "text/event-stream"].contains(&kind.trim()))
}

fn picked(headers: &HeaderMap, wanted: impl Fn(&HeaderName) -> bool) -> HeaderMap {
    headers.iter().filter(|(name, _)| wanted(name)).map(|(name, value)| (name.clone(), value.clone())).collect()
}

/// An error with its causes: what failed is the last of them.
fn chain(error: &dyn std::error::Error) -> String {
    std::iter::successors(error.source(), |error| error.source()).fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
