//! Protection from requests that web pages cause. Layers around whole ports, so that no route is without them: always on the operators'
//! port, and on the clients' port while no key is needed.
//!
//! A browser on a machine that reaches a port sends any request that a page makes it send. It states the page's origin with every request
//! that changes state, and asks before it sends JSON. A page whose own name resolves to this machine's address has the same origin; but
//! then the browser sends that name as the host. A browser also says that another site caused a request which has no origin, such as a
//! picture's or a link's: only the console's pages are led to from elsewhere.
//!
//! Both ports refuse a request of HTTP/1.1 that names no host: a proxy in between may take its beginning for another request's end.

use crate::{
    base::origins::Origins,
    metrics,
    requests::{error::ApiError, parse},
    serving::gateway::Gateway,
};
use axum::{
    body::HttpBody,
    extract::{Request, State},
    http::{HeaderMap, Method, Version, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::{net::IpAddr, sync::Arc};

/// The route that takes forms rather than JSON. It is protected by the checks of origin and host.
const FORMS: &str = "/v1/files";
/// The header in which browsers say what caused a request: `same-origin`, `same-site`, `cross-site`, or `none` for the user.
const FETCH_SITE: &str = "sec-fetch-site";

/// Layer around the operators' port.
pub async fn operators(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    // Requests that change something must declare JSON, even without a body.
    let wants_json = matches!(*request.method(), Method::POST | Method::PUT | Method::PATCH) || has_body(&request);
    match check_named(&request).and_then(|()| check(gateway.hosts(), &Origins::None, &request, wants_json)) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Layer around the clients' port. While a key is needed, it lets web pages pass: they have none.
pub async fn clients(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    let checked = check_named(&request).and_then(|()| {
        let wants_json = has_body(&request) && !(request.uri().path() == FORMS && *request.method() == Method::POST);
        if gateway.tenants().is_open() { check(gateway.hosts(), gateway.cors(), &request, wants_json) } else { Ok(()) }
    });
    match checked {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn check_named(request: &Request) -> Result<(), ApiError> {
    if request.version() == Version::HTTP_11 && !request.headers().contains_key(header::HOST) {
        return Err(ApiError::malformed("a request of HTTP/1.1 must have one `Host` header"));
    }
    Ok(())
}

fn has_body(request: &Request) -> bool {
    !request.body().is_end_stream()
}

fn check(hosts: &[String], cors: &Origins, request: &Request, wants_json: bool) -> Result<(), ApiError> {
    let headers = request.headers();
    check_host(hosts, headers).inspect_err(|_| metrics::count_wrong_door("host"))?;
    check_origin(hosts, cors, headers).inspect_err(|_| metrics::count_wrong_door("origin"))?;
    check_site(cors, request).inspect_err(|_| metrics::count_wrong_door("site"))?;
    if wants_json {
        let missing = || ApiError::not_json("");
        let is_json = if headers.contains_key(header::CONTENT_TYPE) { parse::check_content_type(headers) } else { Err(missing()) };
        is_json.inspect_err(|_| metrics::count_wrong_door("content_type"))?;
    }
    Ok(())
}

fn check_host(hosts: &[String], headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(host) = headers.get(header::HOST) else { return Ok(()) };
    if host.to_str().is_ok_and(|host| is_here(hosts, host)) {
        return Ok(());
    }
    let message = "This port is asked for by a name that it may not have: use an address, such as http://127.0.0.1:9100, or `localhost`, or \
                   add the name to this coordinator's `hosts`.";
    Err(ApiError::wrong_door(message))
}

/// Refuses pages of a different origin, unless an operator has allowed it. `null`, which sandboxed pages and local files send, is a
/// different origin.
fn check_origin(hosts: &[String], cors: &Origins, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let of = origin.to_str().ok().and_then(|origin| origin.split_once("://")).map(|(_, authority)| authority);
    let own = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    if of.is_some_and(|of| own == Some(of) || names(hosts, name_of(of))) || cors.allow(origin) {
        return Ok(());
    }
    Err(ApiError::wrong_door("This request comes from a web page of another origin, and such pages may not use this port."))
}

/// Refuses what a browser fetches because of a page of another site, unless an operator has allowed its origin.
fn check_site(cors: &Origins, request: &Request) -> Result<(), ApiError> {
    let headers = request.headers();
    let is_foreign = headers.get(FETCH_SITE).is_some_and(|site| site != "same-origin" && site != "none");
    let is_page = request.method() == Method::GET && matches!(request.uri().path().split('/').nth(1), Some("" | "console"));
    if !is_foreign || is_page || headers.get(header::ORIGIN).is_some_and(|origin| cors.allow(origin)) {
        return Ok(());
    }
    Err(ApiError::wrong_door("A web page of another site has caused this request, and such pages may not use this port."))
}

fn is_here(hosts: &[String], authority: &str) -> bool {
    let name = name_of(authority);
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok() || names(hosts, name)
}

fn names(hosts: &[String], name: &str) -> bool {
    hosts.iter().any(|host| host.eq_ignore_ascii_case(name))
}

/// Returns the host of an authority, without its port.
fn name_of(authority: &str) -> &str {
    let name = authority.rsplit_once(':').filter(|(_, port)| port.bytes().all(|digit| digit.is_ascii_digit()));
    let name = name.map_or(authority, |(name, _)| name);
    name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::{body::Body, http::HeaderName};

    fn asked(headers: &[(HeaderName, &str)]) -> Result<(), u16> {
        let mut request = Request::builder().method(Method::POST).uri("/rollouts");
        for (name, value) in headers {
            request = request.header(name, *value);
        }
        let hosts = ["tidemill.internal".to_owned()];
        check(&hosts, &Origins::None, &request.body(Body::from("{}")).unwrap(), true).map_err(|error| error.status().as_u16())
    }

    #[test]
    fn only_addresses_and_names_that_were_given_are_hosts() {
        let json = (header::CONTENT_TYPE, "application/json");
        for good in ["127.0.0.1:9100", "localhost", "localhost:1", "LocalHost", "[::1]:9100", "10.0.0.1", "tidemill.internal:80"] {
            assert_eq!(asked(&[json.clone(), (header::HOST, good)]), Ok(()), "{good}");
        }
        for wrong in ["evil.example", "evil.example:9100", "127.0.0.1.evil.example:80", "", "tidemill.internal.evil.example"] {
            assert_eq!(asked(&[json.clone(), (header::HOST, wrong)]), Err(403), "{wrong}");
        }
    }

    #[test]
    fn a_page_of_another_origin_is_refused_and_its_own_page_is_not() {
        let with =
            |origin| asked(&[(header::CONTENT_TYPE, "application/json"), (header::HOST, "127.0.0.1:9100"), (header::ORIGIN, origin)]);
        assert_eq!(with("http://127.0.0.1:9100"), Ok(()));
        assert_eq!(with("https://tidemill.internal"), Ok(()));
        for other in ["http://evil.example", "null", "http://127.0.0.1:9101", "http://127.0.0.1:9100.evil.example", ""] {
            assert_eq!(with(other), Err(403), "{other}");
        }
    }

    #[test]
    fn another_sites_page_gets_the_console_and_nothing_else() {
        let get = |path: &str, site: &str| {
            let request = Request::get(path).header(header::HOST, "127.0.0.1:9100").header(FETCH_SITE, site).body(Body::empty()).unwrap();
            check(&[], &Origins::None, &request, false).map_err(|error| error.status().as_u16())
        };
        for path in ["/admin/backup", "/admin/export?tenant=a", "/metrics", "/consoles", "/v1/conversations/export"] {
            assert_eq!((get(path, "same-origin"), get(path, "none")), (Ok(()), Ok(())), "{path}");
            assert_eq!((get(path, "cross-site"), get(path, "same-site"), get(path, "")), (Err(403), Err(403), Err(403)), "{path}");
        }
        for page in ["/", "/console", "/console/callback?code=x"] {
            assert_eq!(get(page, "cross-site"), Ok(()), "{page}");
        }
    }

    #[test]
    fn a_request_names_its_host() {
        let of = |version| Request::get("/").version(version).body(Body::empty()).unwrap();
        assert!(check_named(&of(Version::HTTP_11)).is_err() && check_named(&of(Version::HTTP_10)).is_ok());
    }

    #[test]
    fn a_body_says_that_it_is_json() {
        assert_eq!(asked(&[]), Err(415));
        assert_eq!(asked(&[(header::CONTENT_TYPE, "text/plain")]), Err(415));
        assert_eq!(asked(&[(header::CONTENT_TYPE, "application/json; charset=utf-8")]), Ok(()));
    }
}
