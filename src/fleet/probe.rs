//! The task that asks a backend how it is: at once at the start, then as often as its health says, and whenever a request ran into trouble.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::backend::Backend;
use super::engines::identify;
use super::health::Probe;
use super::http::{Http, HttpError};

/// How long a health check may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long finding out what runs there may delay the news that it is well.
const INTRODUCTION: Duration = Duration::from_secs(4);
/// How often models and capacity are looked at again while all is well: adapters are loaded, models pulled.
const REFRESH: Duration = Duration::from_secs(30);
/// How often is looked whether the next probe has come nearer, and for signs of life.
const LOOK: Duration = Duration::from_secs(1);
/// Between two probes, however many are asked for.
const AT_MOST_EVERY: Duration = Duration::from_millis(50);

/// Runs until it is aborted.
pub(super) async fn run(backend: Arc<Backend>) {
    let mut http = Http::new(&backend.settings().url);
    let mut jitter = Jitter::new();
    let mut identified_at: Option<Instant> = None;
    loop {
        let (mut since, stretch) = (Instant::now(), jitter.around(Duration::from_secs(1)).as_secs_f64());
        loop {
            // What happens to its siblings, and signs of life that do not come, may bring the time nearer.
            let left = backend.next_probe().mul_f64(stretch).saturating_sub(since.elapsed());
            let is_wanted = tokio::select! {
                () = sleep(left.min(LOOK)) => left <= LOOK,
                () = backend.probe_wanted() => {
                    sleep(AT_MOST_EVERY).await;
                    true
                }
            };
            if backend.look() {
                // A probe says nothing of what has just been ejected as wedged.
                since = Instant::now();
            } else if is_wanted {
                break;
            }
        }
        let settings = backend.newest_settings();
        http.set_key(settings.api_key.as_ref());
        let path = backend.engine().map_or("/health", |engine| engine.health_path());
        let (probe, error) = judge(http.get(path, PATIENCE).await.map(|answer| answer.status));
        let new = backend.wants_identity();
        if probe == Probe::Ready && (new || identified_at.is_none_or(|at| at.elapsed() > REFRESH)) {
            // Who it is comes before that it is well: the first requests already find its window and its limits.
            let known = if new { settings.engine } else { backend.engine() };
            if let Ok(Ok(identity)) = timeout(INTRODUCTION, identify(&mut http, known)).await {
                backend.identified(identity, !new);
                identified_at = Some(Instant::now());
            }
        }
        backend.probed(probe, error);
    }
}

/// What an answer, or none, says of a backend. A status below 500 is an answer: not every backend has the path, or lets everybody see it.
fn judge(answer: Result<http::StatusCode, HttpError>) -> (Probe, Option<String>) {
    match answer {
        Ok(http::StatusCode::SERVICE_UNAVAILABLE) => (Probe::Loading, Some("the health check answers 503: loading, or not able to serve".into())),
        Ok(status) if status.is_server_error() => (Probe::Doubtful, Some(format!("the health check answers {status}"))),
        Ok(_) => (Probe::Ready, None),
        Err(error @ (HttpError::Connect(_) | HttpError::Broken(_))) => (Probe::Dead, Some(error.to_string())),
        Err(error @ (HttpError::Slow(_) | HttpError::TooLarge | HttpError::Invalid(_))) => (Probe::Doubtful, Some(error.to_string())),
    }
}

/// Keeps probes of many gateways and backends from falling into step. Not for secrets: xorshift64 (Marsaglia, 2003).
pub(super) struct Jitter(u64);

impl Jitter {
    pub(super) fn new() -> Self {
        // The standard library's hash keys are the one source of chance that needs no crate. Zero is xorshift's fixed point.
        Jitter(RandomState::new().hash_one(0) | 1)
    }

    /// `span`, a fifth shorter to a fifth longer.
    pub(super) fn around(&mut self, span: Duration) -> Duration {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        span.mul_f64(0.8 + 0.4 * (self.0 as f64 / u64::MAX as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::StatusCode;

    #[test]
    fn statuses() {
        for (status, probe) in [
            (StatusCode::OK, Probe::Ready),
            (StatusCode::NOT_FOUND, Probe::Ready),
            (StatusCode::UNAUTHORIZED, Probe::Ready),
            (StatusCode::TOO_MANY_REQUESTS, Probe::Ready),
            (StatusCode::SERVICE_UNAVAILABLE, Probe::Loading),
            (StatusCode::INTERNAL_SERVER_ERROR, Probe::Doubtful),
        ] {
            assert_eq!(judge(Ok(status)).0, probe, "{status}");
        }
        assert_eq!(judge(Err(HttpError::Slow(PATIENCE))).0, Probe::Doubtful);
        assert_eq!(judge(Err(HttpError::Connect(std::io::ErrorKind::ConnectionRefused.into()))).0, Probe::Dead);
    }

    #[test]
    fn jitter_stays_within_a_fifth() {
        let mut jitter = Jitter::new();
        let span = Duration::from_secs(10);
        let all: Vec<Duration> = (0..1000).map(|_| jitter.around(span)).collect();
        assert!(all.iter().all(|wait| (Duration::from_secs(8)..=Duration::from_secs(12)).contains(wait)));
        assert!(all.iter().max() > all.iter().min());
    }
}
