//! A small HTTP client for probes and metrics: one connection, one request at a time, bounded in time and size.

use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, HOST, HeaderValue, USER_AGENT};
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty, LengthLimitError, Limited};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::config::{BackendUrl, Secret};

/// The largest answer that is read. A metrics page with many adapters has a few hundred kilobytes.
const MAX_ANSWER: usize = 8 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum HttpError {
    #[error("cannot connect: {0}")]
    Connect(#[source] std::io::Error),
    #[error("the connection broke: {0}")]
    Broken(#[source] hyper::Error),
    #[error("no answer within {0:?}")]
    Slow(Duration),
    #[error("the answer is larger than {MAX_ANSWER} bytes")]
    TooLarge,
    #[error("{0}")]
    Invalid(#[from] http::Error),
}

/// An answer, whole.
#[derive(Debug)]
pub(super) struct Answer {
    pub status: StatusCode,
    pub body: Bytes,
}

impl Answer {
    /// The body of a 200, as text; bytes that are not UTF-8 are replaced.
    pub(super) fn text(&self) -> Option<std::borrow::Cow<'_, str>> {
        (self.status == StatusCode::OK).then(|| String::from_utf8_lossy(&self.body))
    }

    /// The body of a 200, as JSON.
    pub(super) fn json(&self) -> Option<serde_json::Value> {
        (self.status == StatusCode::OK).then(|| serde_json::from_slice(&self.body).ok()).flatten()
    }
}

/// A connection and the task that drives it, which ends with it.
struct Connection {
    requests: SendRequest<Empty<Bytes>>,
    driver: JoinHandle<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Asks one backend.
pub(super) struct Http {
    url: BackendUrl,
    authorization: Option<HeaderValue>,
    /// Kept between requests as long as the backend keeps it.
    connection: Option<Connection>,
}

impl Http {
    pub(super) fn new(url: &BackendUrl) -> Self {
        Http { url: url.clone(), authorization: None, connection: None }
    }

    /// Sends this key from now on.
    pub(super) fn set_key(&mut self, key: Option<&Secret>) {
        // A key that no header can carry does not pass the configuration's check.
        self.authorization = key.and_then(|key| HeaderValue::try_from(format!("Bearer {}", key.expose())).ok());
        if let Some(value) = &mut self.authorization {
            value.set_sensitive(true);
        }
    }

    /// GETs `path` under the backend's prefix. Connecting, waiting and reading together take at most `within`; a cancelled or failed request closes
    /// the connection.
    pub(super) async fn get(&mut self, path: &str, within: Duration) -> Result<Answer, HttpError> {
        let kept = self.connection.take().filter(|connection| !connection.requests.is_closed());
        let attempt = async {
            if let Some(connection) = kept {
                match self.ask(connection, path).await {
                    // The backend may have closed it just now (uvicorn does after 5 s): a fresh one decides.
                    Err(HttpError::Broken(_)) => {}
                    other => return other,
                }
            }
            let connection = self.connect().await?;
            self.ask(connection, path).await
        };
        match timeout(within, attempt).await {
            Ok(Ok((answer, connection))) => {
                self.connection = Some(connection);
                Ok(answer)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(HttpError::Slow(within)),
        }
    }

    async fn connect(&self) -> Result<Connection, HttpError> {
        // Brackets belong to the URL, not to the address.
        let host = self.url.host.trim_start_matches('[').trim_end_matches(']');
        let stream = TcpStream::connect((host, self.url.port)).await.map_err(HttpError::Connect)?;
        let (requests, driver) = handshake(TokioIo::new(stream)).await.map_err(HttpError::Broken)?;
        // How the connection ended shows in the request that it served.
        let driver = tokio::spawn(async move { _ = driver.await });
        Ok(Connection { requests, driver })
    }

    async fn ask(&self, mut connection: Connection, path: &str) -> Result<(Answer, Connection), HttpError> {
        let mut request = Request::get(format!("{}{path}", self.url.prefix))
            .header(HOST, self.url.authority())
            .header(USER_AGENT, concat!("headway/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, "*/*");
        if let Some(value) = &self.authorization {
            request = request.header(AUTHORIZATION, value);
        }
        connection.requests.ready().await.map_err(HttpError::Broken)?;
        let response = connection.requests.send_request(request.body(Empty::new())?).await.map_err(HttpError::Broken)?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await.map_err(|error| {
            if error.is::<LengthLimitError>() {
                return HttpError::TooLarge;
            }
            // The limiter passes on nothing but its own error and hyper's.
            error.downcast().map_or(HttpError::TooLarge, |error| HttpError::Broken(*error))
        })?;
        Ok((Answer { status, body: body.to_bytes() }, connection))
    }
}
