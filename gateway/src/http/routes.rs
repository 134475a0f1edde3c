//! Routes of the clients' port and of the operators' port.

use super::{
    access, admin, appeals, backup, batches, chat::Chat, classify, completions::Completions, console, conversations, cors, doors,
    elsewhere, embeddings, erasure, export, feedback, files, gate, leftover, memories, messages, models, moderations, openapi, operator,
    records, replay, rerank, responses, rollouts, score, serve, sign_in, tokenize, unbroken, watch,
};
use crate::{requests::error::ApiError, serving::gateway::Gateway};
use axum::{
    Router,
    extract::DefaultBodyLimit,
    http::{Method, StatusCode, Uri},
    middleware::{from_fn, from_fn_with_state},
    routing::{delete, get, post, put},
};
use std::sync::Arc;

/// The routes of the clients' port. With `operators_too`, they include the operators', if these have no port of their own; while no key is
/// needed, they need none.
pub fn front_door(gateway: Arc<Gateway>, operators_too: bool) -> Router {
    let by_id = responses_by_id().route_layer(from_fn_with_state(Arc::clone(&gateway), replay::layer));
    let counted = counted().merge(by_id).route_layer(from_fn_with_state(Arc::clone(&gateway), access::count));
    let routes = of_models()
        .route_layer(from_fn_with_state(Arc::clone(&gateway), elsewhere::layer))
        .route_layer(from_fn_with_state(Arc::clone(&gateway), access::admit))
        .route_layer(from_fn_with_state(Arc::clone(&gateway), replay::layer))
        .route_layer(from_fn_with_state(Arc::clone(&gateway), access::charge))
        .merge(keyed())
        .merge(counted)
        .route_layer(from_fn_with_state(Arc::clone(&gateway), access::authenticate));
    let routes = everywhere().merge(free()).merge(no_sign_in()).merge(routes);
    openapi::prepare();
    let operators = || operators().route_layer(from_fn_with_state(Arc::clone(&gateway), operator::while_open));
    let routes = if operators_too { routes.merge(operators()) } else { routes };
    let cors = cors::layer(gateway.cors());
    let routes = finish(routes, Arc::clone(&gateway)).layer(from_fn_with_state(gateway, doors::clients));
    let routes = around(routes);
    // Outermost: pages can read errors then, and browsers send preflights without a key.
    match cors {
        Some(cors) => routes.layer(cors),
        None => routes,
    }
}

/// The routes that need no key, besides those that both ports have.
fn free() -> Router<Arc<Gateway>> {
    Router::new().route("/openapi.json", get(openapi::of_clients))
}

/// The routes that need a key, and take no quota.
fn keyed() -> Router<Arc<Gateway>> {
    Router::new()
        // A client whose quota is used up may still cancel its responses, and list what exists.
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        // A client that waits for a batch polls often, and the batch needs the quota.
        .route("/v1/batches/{id}", get(batches::retrieve))
        .route("/v1/batches/{id}/cancel", post(batches::cancel))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
}

/// The counted routes by which a stream resumes, too.
fn responses_by_id() -> Router<Arc<Gateway>> {
    Router::new().route("/v1/responses/{id}", get(responses::retrieve).delete(responses::delete))
}

/// The routes that need no model. Their requests still count in a tenant's quota.
fn counted() -> Router<Arc<Gateway>> {
    Router::new()
        .route("/v1/responses/{id}/input_items", get(responses::input_items))
        .route("/v1/chat/completions/{id}", get(replay::by_id))
        .route("/v1/completions/{id}", get(replay::by_id))
        .route("/v1/messages/{id}", get(replay::by_id))
        .route("/v1/batches", post(batches::create).get(batches::list))
        .route("/v1/conversations", get(conversations::list).post(conversations::create))
        .route("/v1/conversations/export", get(conversations::export::export_all))
        .route("/v1/conversations/{id}", get(conversations::retrieve).post(conversations::update).delete(conversations::delete))
        .route("/v1/conversations/{id}/branch", post(conversations::branch))
        .route("/v1/conversations/{id}/export", get(conversations::export::export))
        .route("/v1/conversations/{id}/items", get(conversations::items).post(conversations::add))
        .route("/v1/conversations/{id}/items/{item}", get(conversations::item).delete(conversations::remove))
        .route("/v1/memories", get(memories::list).post(memories::create).delete(memories::delete_all))
        .route("/v1/memories/{id}", get(memories::retrieve).delete(memories::delete))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        // The upload itself enforces its limit.
        .route("/v1/files", post(files::create).layer(DefaultBodyLimit::disable()).get(files::list))
        .route("/v1/files/{id}", get(files::retrieve).delete(files::delete))
        .route("/v1/files/{id}/content", get(files::content))
        .route("/v1/moderations", post(moderations::create))
        .route("/v1/appeals", post(appeals::create))
        .route("/v1/feedback", post(feedback::create))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/tokenizer_info", get(tokenize::info))
}

/// The generating routes, which take quota, for the requests of batches.
pub fn generating(gateway: &Arc<Gateway>) -> Router<Arc<Gateway>> {
    of_models()
        .route_layer(from_fn_with_state(Arc::clone(gateway), access::admit))
        .route_layer(from_fn_with_state(Arc::clone(gateway), access::charge))
}

fn of_models() -> Router<Arc<Gateway>> {
    Router::new()
        .route("/v1/chat/completions", post(serve::serve::<Chat>))
        .route("/v1/completions", post(serve::serve::<Completions>))
        .route("/v1/responses", post(responses::create))
        .route("/v1/messages", post(messages::create))
        .route("/v1/embeddings", post(embeddings::create))
        .route("/v1/rerank", post(rerank::create))
        .route("/v2/rerank", post(rerank::create_second))
        .route("/rerank", post(rerank::create))
        .route("/v1/score", post(score::create))
        .route("/score", post(score::create))
        .route("/v1/classify", post(classify::create))
}

/// The operators' routes. Where operators sign in, each needs a role; else reaching the port is enough.
pub fn admin(gateway: Arc<Gateway>) -> Router {
    let routes = everywhere().merge(operators()).merge(administration());
    let routes = match gateway.operators() {
        Some(_) => routes.merge(signing_in()).route_layer(from_fn_with_state(Arc::clone(&gateway), gate::layer)),
        None => routes.merge(no_sign_in()),
    };
    around(finish(routes, Arc::clone(&gateway)).layer(from_fn_with_state(gateway, doors::operators)))
}

fn administration() -> Router<Arc<Gateway>> {
    Router::new()
        .route("/openapi.json", get(openapi::of_operators))
        .route("/ready/generate", get(operator::generates))
        .route("/reset_prefix_cache", post(operator::reset_prefix_cache))
        .route("/admin/keys", get(admin::list_keys).post(admin::create_key))
        .route("/admin/keys/{id}", delete(admin::revoke_key))
        .route("/admin/feedback", get(feedback::list))
        .route("/admin/appeals", get(appeals::list))
        .route("/admin/appeals/{id}", post(appeals::decide))
        .route("/admin/spend", get(admin::spend))
        .route("/admin/export", get(export::export))
        .route("/admin/backup", get(backup::backup))
        .route("/admin/erasures", get(erasure::list).post(erasure::erase))
        .route("/admin/tenants", get(admin::list_tenants))
        .route("/admin/tenants/{id}", put(admin::put_tenant))
        .route("/registry", get(records::list))
        .route("/registry/{kind}/{*key}", get(records::get).put(records::put).delete(records::delete))
        .route("/rollouts", get(rollouts::list).post(rollouts::start))
        .route("/rollouts/{action}", post(rollouts::act))
        .route("/coordinators/{name}", delete(records::remove_coordinator))
}

/// Operators with a browser.
fn signing_in() -> Router<Arc<Gateway>> {
    Router::new()
        .route("/console/sign-in", get(sign_in::begin))
        .route("/console/callback", get(sign_in::callback))
        .route("/console/sign-out", post(sign_in::end))
        .route("/console/who", get(sign_in::who))
}

/// The console's answer where operators do not sign in, so that the page asks for nothing that is not there.
fn no_sign_in() -> Router<Arc<Gateway>> {
    Router::new().route("/console/who", get(sign_in::no_sign_in))
}

/// Probes, and the console, which shows the data of the port that serves it.
fn everywhere() -> Router<Arc<Gateway>> {
    Router::new()
        // Some clients check whether their base URL exists.
        .route("/", get(|| async { "Tidemill" }))
        .route("/health", get(|| async { StatusCode::OK }))
        .route("/ready", get(operator::ready))
        .route("/console", get(console::page))
        .route("/console/", get(console::page_with_slash))
        .route("/console/{asset}", get(console::asset))
}

fn operators() -> Router<Arc<Gateway>> {
    Router::new()
        .route("/metrics", get(operator::metrics))
        .route("/cluster", get(operator::cluster))
        .route("/cluster/events", get(watch::events))
}

fn finish(routes: Router<Arc<Gateway>>, gateway: Arc<Gateway>) -> Router {
    routes
        .fallback(|method: Method, uri: Uri| async move { ApiError::no_route(method.as_str(), uri.path()) })
        .method_not_allowed_fallback(|method: Method, uri: Uri| async move { ApiError::method_not_allowed(method.as_str(), uri.path()) })
        .with_state(gateway)
}

/// Adds the layers that every answer of a port passes, errors included.
fn around(routes: Router) -> Router {
    routes.layer(from_fn(unbroken::layer)).layer(from_fn(leftover::layer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::{
        prices::{Price, TABLE},
        roles,
    };
    use std::collections::BTreeSet;

    /// The methods and paths of a router, which shows them only in its `Debug` form: for each route's number what it allows, then for each
    /// number its path.
    fn routes(router: &Router<Arc<Gateway>>) -> BTreeSet<(String, String)> {
        let shown = format!("{router:?}");
        let (endpoints, paths) = shown.split_once("paths: {").expect("axum shows a router's paths");
        let number = |text: &str| text.split("RouteId(").last().and_then(|text| text.split(')').next()?.parse::<usize>().ok());
        let allowed = |of: usize| {
            let endpoint = endpoints.split(&format!("RouteId({of}): ")).nth(1).expect("each route has an endpoint");
            let methods =
                endpoint.split("allow_header: ").nth(1).and_then(|text| text.split('"').nth(1)).expect("axum shows what is allowed");
            methods.split(',').map(str::to_owned).collect::<Vec<_>>()
        };
        // The end of the map: a path's own braces are within its quotes.
        let paths = paths.split("\"}").next().expect("a text has a first part").split('"').collect::<Vec<_>>();
        let named = paths.chunks_exact(2).filter(|pair| pair[1].starts_with('/')).filter_map(|pair| Some((number(pair[0])?, pair[1])));
        let all = named.flat_map(|(of, path)| allowed(of).into_iter().map(move |method| (method, path.to_owned())));
        all.filter(|(method, _)| method != "HEAD").collect()
    }

    #[test]
    fn every_route_of_the_operators_port_has_a_row_in_the_table_of_roles_and_the_table_no_other() {
        let all = everywhere().merge(operators()).merge(administration()).merge(signing_in());
        let found = routes(&all);
        assert!(found.len() > 30, "{found:?}");
        assert_eq!(found, roles::tests::routes());
        let another = all.route("/console/new", post(admin::create_key));
        assert!(routes(&another).contains(&("POST".into(), "/console/new".into())), "the test sees what is new");
    }

    #[test]
    fn every_route_of_the_clients_port_has_its_price_in_the_table_and_the_table_no_other() {
        for (price, group) in [
            (Price::Nothing, everywhere().merge(free()).merge(no_sign_in())),
            (Price::Key, keyed()),
            (Price::Request, counted().merge(responses_by_id())),
            (Price::Tokens, of_models()),
        ] {
            let rows = TABLE.iter().filter(|row| row.price == price);
            assert!(rows.clone().all(|row| row.why.is_empty() == matches!(price, Price::Request | Price::Tokens)), "{price:?}");
            let rows: BTreeSet<_> = rows.map(|row| (row.method.to_owned(), row.path.to_owned())).collect();
            assert_eq!(routes(&group), rows, "{price:?}");
        }
        // A route that a function adds outside these groups would be in neither.
        let (code, _) = include_str!("routes.rs").split_once("#[cfg(test)]").expect("this module is in it");
        let groups = [
            everywhere(),
            free(),
            no_sign_in(),
            keyed(),
            counted(),
            responses_by_id(),
            of_models(),
            operators(),
            administration(),
            signing_in(),
        ];
        let paths = groups.map(|group| routes(&group).into_iter().map(|(_, path)| path).collect::<BTreeSet<_>>().len());
        let added = code.split(".route").skip(1).filter(|rest| rest.starts_with('(')).count();
        assert_eq!(added, paths.iter().sum::<usize>());
        // Every port's answers pass the same layers.
        let ports: Vec<_> = code.split("\npub fn ").skip(1).filter_map(|rest| rest.split("\n}\n").next()).collect();
        let ports: Vec<_> = ports.into_iter().filter(|port| port.contains("-> Router {")).collect();
        assert!(ports.len() == 2 && ports.iter().all(|port| port.contains("around(")), "{ports:?}");
    }
}
