//! The task that reads an engine's own numbers. What is too old is unknown, never zero.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use tokio::time::sleep;

use super::backend::Backend;
use super::engines::EngineKind;
use super::http::{Http, HttpError};
use super::probe::Jitter;
use super::prometheus::Page;
use crate::scheduler::{Load, Standing};

/// Between two readings while there is traffic. An engine's own waiting queue changes in one iteration, some tens of milliseconds.
const BUSY_INTERVAL: Duration = Duration::from_millis(250);
/// Between two readings otherwise.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);
/// Traffic is a request within this span, or anything running in the engine.
const BUSY_SPAN: Duration = Duration::from_secs(2);
/// Between two tries of a page that is not there: metrics are off, and may be switched on by a restart.
const ABSENT_INTERVAL: Duration = Duration::from_secs(30);
/// How long one reading may take.
const PATIENCE: Duration = Duration::from_secs(1);
/// Numbers older than this are unknown.
const TOO_OLD: Duration = Duration::from_secs(2);

/// How long to wait for the next reading. `absent` is the family that had no page when last asked.
fn interval(engine: Option<EngineKind>, absent: Option<EngineKind>, busy: bool) -> Duration {
    match engine {
        Some(_) if absent == engine => ABSENT_INTERVAL,
        Some(kind) if kind.metrics_path().is_some() && busy => BUSY_INTERVAL,
        _ => IDLE_INTERVAL,
    }
}

/// Runs until it is aborted.
pub(super) async fn run(backend: Arc<Backend>) {
    let mut http = Http::new(&backend.settings().url);
    let mut jitter = Jitter::new();
    let mut absent: Option<EngineKind> = None;
    loop {
        sleep(jitter.around(interval(backend.engine(), absent, backend.busy(BUSY_SPAN)))).await;
        // It may have been found out, or become another, meanwhile.
        let Some((engine, path)) = backend.engine().and_then(|engine| Some((engine, engine.metrics_path()?))) else { continue };
        if backend.view().standing == Standing::Ejected {
            // The probes look after it; what was known of its load no longer holds.
            backend.load_read(Load::default());
            continue;
        }
        absent = None;
        http.set_key(backend.newest_settings().api_key.as_ref());
        match http.get(path, PATIENCE).await {
            Ok(answer) if answer.status == StatusCode::OK => {
                let text = String::from_utf8_lossy(&answer.body);
                backend.load_read(engine.load(Page::new(&text)));
            }
            // 404, 501 and the like: metrics are not switched on.
            Ok(answer) if answer.status.is_client_error() || answer.status == StatusCode::NOT_IMPLEMENTED => {
                absent = Some(engine);
                backend.load_read(Load::default());
            }
            Ok(answer) => backend.load_failed(format!("the metrics page answers {}", answer.status), false, TOO_OLD),
            Err(error) => {
                let broken = matches!(error, HttpError::Connect(_) | HttpError::Broken(_));
                backend.load_failed(format!("the metrics page: {error}"), broken, TOO_OLD);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn often_under_traffic_and_seldom_where_there_is_no_page() {
        let (vllm, llamacpp) = (Some(EngineKind::Vllm), Some(EngineKind::LlamaCpp));
        assert_eq!(interval(vllm, None, true), BUSY_INTERVAL);
        assert_eq!(interval(vllm, None, false), IDLE_INTERVAL);
        assert_eq!(interval(llamacpp, llamacpp, true), ABSENT_INTERVAL);
        assert_eq!(interval(vllm, llamacpp, true), BUSY_INTERVAL, "it became another engine");
        assert_eq!(interval(None, None, true), IDLE_INTERVAL);
    }
}
