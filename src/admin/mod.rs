//! What operators see and may do, on an address of its own: a page, health, metrics, the state of pools and configuration, reload, drain.
//!
//! It holds handles and asks them; nothing here is on the path of a request. Nobody is authenticated: the address must not be reachable by others, and
//! pages in an operator's browser are turned away.

mod counterfactual;
mod explain;
mod feed;
mod likeness;
mod metrics;
mod page;
mod replay;
#[cfg(test)]
mod tests;
mod view;
mod whatif;

use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::body::Bytes;
use axum::extract::{Path as PathOf, Request, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE, HOST, ORIGIN, RETRY_AFTER};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tokio::net::TcpSocket;
use tokio::sync::Semaphore;

use crate::config::{ReloadError, Reloader};
use crate::gateway::Gateway;
use crate::ranker::RankerError;
use crate::scheduler::{BackendId, RankerVersion};
use feed::Feed;
use whatif::WhatIfError;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;

/// Why the admin address is not served.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    #[error("the admin address {address}: {source}")]
    Bind { address: SocketAddr, source: std::io::Error },
    #[error("handling SIGHUP: {0}")]
    Signal(#[source] std::io::Error),
}

/// What handlers share.
#[derive(Clone)]
struct Admin {
    gateway: Arc<Gateway>,
    reloader: Reloader,
    feed: Feed,
    /// One what-if at a time.
    whatif: Arc<Semaphore>,
    /// One explanation at a time: it walks through everything that waits.
    explain: Arc<Semaphore>,
    /// The first look at the backends is over. Never becomes false again.
    started: Arc<AtomicBool>,
}

/// Serves the admin address and reloads `file` from now on, until the runtime ends. Returns the address, whose port the system may have chosen.
/// `takes_over`: a process that is on its way out still serves the address.
///
/// # Errors
/// The address is taken, or SIGHUP cannot be handled.
pub async fn start(gateway: Arc<Gateway>, file: Option<&Path>, takes_over: bool) -> Result<SocketAddr, AdminError> {
    let snapshot = Arc::clone(&gateway.live().snapshot);
    let address = snapshot.admin;
    let listener = listen(address, takes_over).map_err(|source| AdminError::Bind { address, source })?;
    let bound = listener.local_addr().map_err(|source| AdminError::Bind { address, source })?;
    let apply = {
        let gateway = Arc::clone(&gateway);
        move |snapshot| {
            let gateway = Arc::clone(&gateway);
            async move { gateway.apply(snapshot).await }
        }
    };
    let reloader = Reloader::start(file.map(Path::to_owned), &snapshot, apply).map_err(AdminError::Signal)?;
    let feed = Feed::start(&gateway, reloader.clone());
    let router =
        router(Admin { gateway, reloader, feed, whatif: Arc::new(Semaphore::new(1)), explain: Arc::new(Semaphore::new(1)), started: Arc::default() });
    tracing::info!("operators: http://{bound}");
    tokio::spawn(async move {
        // It serves until the runtime ends; accept errors are retried inside.
        _ = axum::serve(listener, router).await;
    });
    Ok(bound)
}

/// Two processes can listen at once, so that a new one can take over from one that drains; by mistake they do not.
fn listen(address: SocketAddr, takes_over: bool) -> std::io::Result<tokio::net::TcpListener> {
    let bind = |shared| -> std::io::Result<TcpSocket> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        socket.set_reuseport(shared)?;
        socket.bind(address)?;
        Ok(socket)
    };
    if !takes_over {
        // Refused while anybody else has the address; the socket that stays must be a shared one from its beginning.
        drop(bind(false)?);
    }
    bind(true)?.listen(BACKLOG)
}

fn router(admin: Admin) -> Router {
    Router::new()
        .route("/", get(page::answer))
        .route("/admin", get(index))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(show_metrics))
        .route("/admin/openapi.json", get(openapi))
        .route("/admin/events", get(events))
        .route("/admin/explain/{request}", get(explain_request))
        .route("/admin/whatif", post(what_if))
        .route("/admin/pools", get(pools))
        .route("/admin/tenants", get(tenants))
        .route("/admin/config", get(configuration))
        .route("/admin/reload", post(reload))
        .route("/admin/ranker", get(ranker))
        .route("/admin/ranker/reload", post(reload_ranker))
        .route("/admin/ranker/rollback", post(rollback_ranker))
        .route("/admin/backends/{pool}/{id}/drain", post(|admin, place| drain(admin, place, true)))
        .route("/admin/backends/{pool}/{id}/undrain", post(|admin, place| drain(admin, place, false)))
        .layer(from_fn(not_from_pages))
        .with_state(admin)
}

/// The document of everything that is served here, in OpenAPI 3.1.
const OPENAPI: &str = include_str!("openapi.json");

async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

/// What the document has, a line each.
async fn index() -> String {
    // A test parses what is built in.
    let document: Value = serde_json::from_str(OPENAPI).unwrap_or_default();
    let mut lines = String::from("headway\n\n");
    for (path, methods) in document["paths"].as_object().into_iter().flatten() {
        for (method, operation) in methods.as_object().into_iter().flatten() {
            let summary = operation["summary"].as_str().unwrap_or_default();
            lines.push_str(&format!("{:<4} {path:<38} {summary}\n", method.to_uppercase()));
        }
    }
    lines
}

/// What probes and scrapers ask for, by whatever name they know this address.
const OPEN: [&str; 3] = ["/healthz", "/readyz", "/metrics"];

/// A page of another site can make an operator's browser send a POST here. Browsers say so in `origin`; tools do not send it. And a page can have a name of its own
/// that it makes point here, so that this address looks like its own: whoever comes by a name that others can own is not let in.
async fn not_from_pages(request: Request, next: Next) -> Response {
    if !OPEN.contains(&request.uri().path()) && !is_local_name(request.headers()) {
        let hint = "ask by address or by a name without dots; a proxy in front has to send such a Host";
        return failure(StatusCode::FORBIDDEN, "foreign_host", hint.into());
    }
    if request.method() != Method::GET && foreign(request.headers()) {
        return failure(StatusCode::FORBIDDEN, "foreign_origin", "pages of other sites may not change anything here".into());
    }
    next.run(request).await
}

fn foreign(headers: &HeaderMap) -> bool {
    let bytes = |name| headers.get(name).map(HeaderValue::as_bytes);
    // Behind a proxy with TLS a page's origin is https.
    let address = |origin: &HeaderValue| {
        let origin = origin.as_bytes();
        origin.strip_prefix(b"http://").or_else(|| origin.strip_prefix(b"https://")).map(<[u8]>::to_vec)
    };
    headers.get(ORIGIN).is_some_and(|origin| address(origin).as_deref() != Some(bytes(HOST).unwrap_or_default()))
}

/// Whether the name asked for is one that no other site can have: an address, or a name without dots. Browsers always send it.
fn is_local_name(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(HOST) else { return true };
    let Ok(host) = host.to_str() else { return false };
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.parse::<IpAddr>().is_ok() || !name.contains('.') || name.ends_with(".localhost")
}

/// Ready: not on the way out, and every pool has had one look at a backend. Backends that are down do not count: the gateway answers for them.
async fn ready(State(admin): State<Admin>) -> Response {
    if admin.gateway.draining() {
        return failure(StatusCode::SERVICE_UNAVAILABLE, "draining", "the gateway is stopping".into());
    }
    if !admin.started.load(Ordering::Relaxed) {
        let looked = admin.gateway.live().pools.iter().all(|pool| pool.targets().iter().any(|target| target.backend.known()));
        if !looked {
            return failure(StatusCode::SERVICE_UNAVAILABLE, "starting", "no backend has been looked at yet".into());
        }
        admin.started.store(true, Ordering::Relaxed);
    }
    "ready\n".into_response()
}

async fn show_metrics(State(admin): State<Admin>) -> Response {
    match metrics::page(&admin.gateway, &admin.reloader.status()).await {
        Ok(page) => ([(CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], page).into_response(),
        // Only a formatter of a label could fail, and none does.
        Err(error) => failure(StatusCode::INTERNAL_SERVER_ERROR, "metrics", error.to_string()),
    }
}

async fn events(State(admin): State<Admin>) -> Response {
    match admin.feed.view() {
        Some(body) => ([(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-store")], body).into_response(),
        None => failure(StatusCode::SERVICE_UNAVAILABLE, "too_many_viewers", "as many look on already as may; close a page".into()),
    }
}

async fn explain_request(State(admin): State<Admin>, PathOf(request): PathOf<String>) -> Response {
    let Ok(_turn) = admin.explain.try_acquire() else {
        let response = failure(StatusCode::SERVICE_UNAVAILABLE, "busy", "another request is being explained; ask again in a second".into());
        return ([(RETRY_AFTER, "1")], response).into_response();
    };
    match explain::explain(&admin.gateway, &request).await {
        Some(explanation) => Json(explanation).into_response(),
        None => {
            let message =
                format!("no request {request:?} waits, runs or has ended lately; its id is in the answer's x-request-id and in the access log");
            failure(StatusCode::NOT_FOUND, "unknown_request", message)
        }
    }
}

async fn what_if(State(admin): State<Admin>, body: Bytes) -> Response {
    match whatif::answer(&admin.gateway, &admin.whatif, &body).await {
        Ok(compared) => Json(compared).into_response(),
        Err(error) => {
            let (status, code) = match &error {
                WhatIfError::Body(_) | WhatIfError::Minutes | WhatIfError::Policies => (StatusCode::BAD_REQUEST, "bad_question"),
                WhatIfError::Policy(_) => (StatusCode::NOT_FOUND, "unknown_policy"),
                WhatIfError::Pool { .. } => (StatusCode::NOT_FOUND, "unknown_pool"),
                WhatIfError::Request(_) => (StatusCode::NOT_FOUND, "unknown_request"),
                WhatIfError::Few { .. } | WhatIfError::NoBackend | WhatIfError::Blind { .. } => (StatusCode::CONFLICT, "too_little_is_known"),
                WhatIfError::Busy => (StatusCode::CONFLICT, "busy"),
                WhatIfError::Slow(_) => (StatusCode::GATEWAY_TIMEOUT, "too_slow"),
                WhatIfError::Simulation(_) => (StatusCode::INTERNAL_SERVER_ERROR, "simulation"),
            };
            failure(status, code, error.to_string())
        }
    }
}

async fn pools(State(admin): State<Admin>) -> Response {
    Json(json!({ "pools": view::pools(&admin.gateway).await })).into_response()
}

async fn tenants(State(admin): State<Admin>) -> Response {
    Json(json!({ "tenants": view::tenants(&admin.gateway.live()) })).into_response()
}

async fn configuration(State(admin): State<Admin>) -> Response {
    Json(view::configuration(&admin.gateway, &admin.reloader.status())).into_response()
}

async fn reload(State(admin): State<Admin>) -> Response {
    let result = admin.reloader.reload().await;
    let status = match &result {
        Ok(()) => StatusCode::OK,
        Err(ReloadError::Invalid(_)) => StatusCode::UNPROCESSABLE_ENTITY,
        Err(ReloadError::NoFile | ReloadError::Refused(_)) => StatusCode::CONFLICT,
        Err(ReloadError::Stopping) => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, Json(view::configuration(&admin.gateway, &admin.reloader.status()))).into_response()
}

async fn ranker(State(admin): State<Admin>) -> Response {
    Json(view::ranker(&admin.gateway.live())).into_response()
}

async fn reload_ranker(State(admin): State<Admin>) -> Response {
    ranker_after(&admin, admin.gateway.reload_ranker().await)
}

async fn rollback_ranker(State(admin): State<Admin>) -> Response {
    ranker_after(&admin, admin.gateway.rollback_ranker().await)
}

/// What serves now, or why the attempt to change it failed.
fn ranker_after(admin: &Admin, result: Result<RankerVersion, RankerError>) -> Response {
    match result {
        Ok(_) => Json(view::ranker(&admin.gateway.live())).into_response(),
        Err(error @ (RankerError::Off | RankerError::NoPrevious)) => failure(StatusCode::CONFLICT, "ranker", error.to_string()),
        Err(error) => failure(StatusCode::UNPROCESSABLE_ENTITY, "ranker", format!("{error}; the weights that ran before go on")),
    }
}

async fn drain(State(admin): State<Admin>, PathOf((pool, id)): PathOf<(String, u32)>, drained: bool) -> Response {
    let live = admin.gateway.live();
    let Some(index) = live.snapshot.pools.iter().position(|settings| settings.name == pool) else {
        let names: Vec<&str> = live.snapshot.pools.iter().map(|pool| pool.name.as_str()).collect();
        return failure(StatusCode::NOT_FOUND, "unknown_pool", format!("there is no pool {pool:?}; there are: {}", names.join(", ")));
    };
    let Some(target) = live.pools[index].target(BackendId(id)) else {
        return failure(StatusCode::NOT_FOUND, "unknown_backend", format!("the pool {pool:?} has no backend {id}; GET /admin/pools lists them"));
    };
    target.backend.set_drained(drained);
    Json(view::backend(&target.backend.view())).into_response()
}

fn failure(status: StatusCode, code: &str, message: String) -> Response {
    (status, Json(json!({ "error": { "code": code, "message": message } }))).into_response()
}
