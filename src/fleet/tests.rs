//! The watch against small HTTP servers that behave like engines, or misbehave.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::config::{BackendSettings, Secret};
use crate::scheduler::{BackendId, BackendState, Load, Slots, Standing};

/// An HTTP server that answers from a table of paths, which a test may change while it runs. 404 for all others.
struct Fake {
    url: String,
    answers: Arc<Mutex<HashMap<String, (u16, String)>>>,
    /// The authorization sent with each request.
    seen: Arc<Mutex<Vec<Option<String>>>>,
    server: JoinHandle<()>,
}

impl Fake {
    async fn start(answers: &[(&str, u16, &str)]) -> Fake {
        Fake::on("127.0.0.1:0", answers).await
    }

    async fn on(address: &str, answers: &[(&str, u16, &str)]) -> Fake {
        let listener = TcpListener::bind(address).await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let answers: HashMap<_, _> = answers.iter().map(|(path, status, body)| ((*path).to_owned(), (*status, (*body).to_owned()))).collect();
        let (answers, seen) = (Arc::new(Mutex::new(answers)), Arc::new(Mutex::new(Vec::new())));
        let (table, log) = (Arc::clone(&answers), Arc::clone(&seen));
        let server = tokio::spawn(async move {
            // Dropped with the task: ending the server also ends its connections.
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (table, log) = (Arc::clone(&table), Arc::clone(&log));
                let service = service_fn(move |request: Request<hyper::body::Incoming>| {
                    let authorization = request.headers().get("authorization").map(|value| value.to_str().unwrap().to_owned());
                    log.lock().unwrap().push(authorization);
                    let (status, body) = table.lock().unwrap().get(request.uri().path()).cloned().unwrap_or((404, "no".into()));
                    let response = Response::builder().status(status).body(Full::new(Bytes::from(body))).unwrap();
                    async move { Ok::<_, Infallible>(response) }
                });
                connections.spawn(async move { _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await });
            }
        });
        Fake { url, answers, seen, server }
    }

    fn set(&self, path: &str, status: u16, body: &str) {
        self.answers.lock().unwrap().insert(path.into(), (status, body.into()));
    }

    async fn stop(self) -> String {
        self.server.abort();
        _ = self.server.await;
        self.url
    }
}

/// News as they arrive.
enum News {
    Changed(BackendState),
    Load(Load),
}

impl Listener for mpsc::UnboundedSender<News> {
    fn backend_changed(&self, _: BackendId, state: BackendState) {
        _ = self.send(News::Changed(state));
    }

    fn load_reported(&self, _: BackendId, load: Load) {
        _ = self.send(News::Load(load));
    }
}

struct Watched {
    backend: Arc<Backend>,
    news: mpsc::UnboundedReceiver<News>,
    _guard: WatchGuard,
}

impl Watched {
    fn new(settings: BackendSettings, siblings: &Siblings) -> Watched {
        let backend = Arc::new(Backend::new(BackendId(0), settings, siblings));
        let (sender, news) = mpsc::unbounded_channel();
        let guard = watch(Arc::clone(&backend), sender);
        Watched { backend, news, _guard: guard }
    }

    /// The first state that fits, within ten seconds.
    async fn until(&mut self, fits: impl Fn(&BackendState) -> bool) -> BackendState {
        let found = timeout(Duration::from_secs(10), async {
            loop {
                if let News::Changed(state) = self.news.recv().await.unwrap()
                    && fits(&state)
                {
                    return state;
                }
            }
        });
        found.await.unwrap_or_else(|_| panic!("not in time; last seen {:?}", self.backend.view()))
    }

    async fn until_standing(&mut self, standing: Standing) -> BackendState {
        self.until(|state| state.standing == standing).await
    }

    async fn until_load(&mut self, wanted: Load) {
        let found = timeout(Duration::from_secs(10), async {
            loop {
                if let News::Load(load) = self.news.recv().await.unwrap()
                    && load == wanted
                {
                    return;
                }
            }
        });
        found.await.unwrap_or_else(|_| panic!("not in time; last seen {:?}", self.backend.view()));
    }
}

fn settings(url: &str) -> BackendSettings {
    BackendSettings::new(url.parse().unwrap())
}

const MODELS_VLLM: &str =
    r#"{"object":"list","data":[{"id":"llama","owned_by":"vllm","max_model_len":4096},{"id":"lora","owned_by":"vllm","max_model_len":4096}]}"#;
const METRICS_VLLM: &str = "vllm:num_requests_running{engine=\"0\"} 3\nvllm:num_requests_waiting{engine=\"0\"} 1\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.5\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\"} 1\n";
const VLLM: [(&str, u16, &str); 3] = [("/health", 200, ""), ("/v1/models", 200, MODELS_VLLM), ("/metrics", 200, METRICS_VLLM)];

#[tokio::test]
async fn a_vllm_is_found_out_before_it_gets_its_first_full_window() {
    let fake = Fake::start(&VLLM).await;
    let mut watched = Watched::new(BackendSettings { api_key: Some(Secret::new("sk-1".into())), ..settings(&fake.url) }, &Siblings::default());
    let first = watched.until(|_| true).await;
    assert_eq!(first.standing, Standing::Probing, "nothing is refused at the start");
    let state = watched.until_standing(Standing::Healthy).await;
    assert_eq!((state.kv_tokens, state.context_tokens), (Some(1600), Some(4096)));
    assert_eq!(state.slots, Slots::Auto { initial: 8, max: 1024 });
    assert_eq!(watched.backend.engine(), Some(EngineKind::Vllm));
    assert_eq!(*watched.backend.models(), ["llama", "lora"]);
    watched.until_load(Load { running: Some(3), waiting: Some(1), kv_used: Some(0.5) }).await;
    assert!(fake.seen.lock().unwrap().iter().all(|authorization| authorization.as_deref() == Some("Bearer sk-1")));
}

#[tokio::test]
async fn every_family_is_recognised() {
    let list = |owner: &str| format!(r#"{{"data":[{{"id":"m","owned_by":"{owner}","max_model_len":1000}}]}}"#);
    let (sglang, llamacpp, library, other) = (list("sglang"), list("llamacpp"), list("library"), list("somebody"));
    let props = r#"{"default_generation_settings":{"n_ctx":512},"total_slots":4}"#;
    let info = r#"{"model_id":"m","max_concurrent_requests":128,"max_batch_total_tokens":32000,"max_total_tokens":4096}"#;
    let states = r#"{"internal_states":[{"effective_max_running_requests_per_dp":48}]}"#;
    type Answers<'a> = Vec<(&'a str, u16, &'a str)>;
    let cases: [(Answers, EngineKind, Slots, Option<u32>); 10] = [
        (vec![("/v1/models", 200, &sglang), ("/get_server_info", 200, states)], EngineKind::Sglang, Slots::Auto { initial: 48, max: 50 }, Some(1000)),
        (vec![("/v1/models", 200, &llamacpp), ("/props", 200, props)], EngineKind::LlamaCpp, Slots::Auto { initial: 4, max: 6 }, Some(512)),
        (vec![("/v1/models", 200, &other), ("/props", 200, props)], EngineKind::LlamaCpp, Slots::Auto { initial: 4, max: 6 }, Some(512)),
        (vec![("/v1/models", 200, &library)], EngineKind::Ollama, Slots::Auto { initial: 1, max: 8 }, None),
        (vec![("/", 200, "Ollama is running")], EngineKind::Ollama, Slots::Auto { initial: 1, max: 8 }, None),
        (vec![("/v1/models", 200, &other), ("/info", 200, info)], EngineKind::Tgi, Slots::Auto { initial: 8, max: 1024 }, Some(4096)),
        (vec![("/metrics", 200, "tgi_queue_size 0\n")], EngineKind::Tgi, Slots::Auto { initial: 8, max: 1024 }, None),
        (vec![("/metrics", 200, METRICS_VLLM)], EngineKind::Vllm, Slots::Auto { initial: 8, max: 1024 }, None),
        (vec![("/version", 200, r#"{"version":"0.11"}"#)], EngineKind::Vllm, Slots::Auto { initial: 8, max: 1024 }, None),
        (vec![("/v1/models", 200, &other)], EngineKind::OpenAi, Slots::Auto { initial: 8, max: 1024 }, None),
    ];
    for (answers, kind, slots, context) in cases {
        let fake = Fake::start(&answers).await;
        let mut watched = Watched::new(settings(&fake.url), &Siblings::default());
        let state = watched.until_standing(Standing::Healthy).await;
        assert_eq!((watched.backend.engine(), state.slots, state.context_tokens), (Some(kind), slots, context), "{answers:?}");
    }
}

#[tokio::test]
async fn what_is_configured_wins_over_what_is_found_out() {
    let fake = Fake::start(&VLLM).await;
    let configured = BackendSettings {
        engine: Some(EngineKind::OpenAi),
        slots: Some(Slots::Fixed(3)),
        kv_tokens: Some(77),
        prefix_cache: Some(false),
        ..settings(&fake.url)
    };
    let mut watched = Watched::new(configured, &Siblings::default());
    let state = watched.until_standing(Standing::Healthy).await;
    assert_eq!((watched.backend.engine(), state.slots, state.kv_tokens), (Some(EngineKind::OpenAi), Slots::Fixed(3), Some(77)));
    assert!(!state.prefix_cache);
}

#[tokio::test]
async fn loading_is_waited_for() {
    let fake = Fake::start(&[("/health", 503, r#"{"error":{"message":"Loading model","code":503}}"#)]).await;
    let mut watched = Watched::new(settings(&fake.url), &Siblings::default());
    watched.until_standing(Standing::Ejected).await;
    fake.set("/health", 200, "");
    fake.set("/v1/models", 200, r#"{"data":[{"id":"m","owned_by":"llamacpp"}]}"#);
    watched.until_standing(Standing::Healthy).await;
    assert_eq!(watched.backend.engine(), Some(EngineKind::LlamaCpp));
}

#[tokio::test]
async fn a_backend_that_dies_is_ejected_and_comes_back_as_what_it_is_now() {
    let fake = Fake::start(&VLLM).await;
    let mut watched = Watched::new(settings(&fake.url), &Siblings::default());
    watched.until_standing(Standing::Healthy).await;
    let url = fake.stop().await;
    watched.backend.observe(Observation::Transport);
    watched.until_standing(Standing::Ejected).await;
    let models = r#"{"data":[{"id":"other","owned_by":"sglang"}]}"#;
    let _back = Fake::on(url.strip_prefix("http://").unwrap(), &[("/health", 200, ""), ("/v1/models", 200, models)]).await;
    watched.until_standing(Standing::Probing).await;
    watched.until_standing(Standing::Healthy).await;
    assert_eq!((watched.backend.engine(), watched.backend.models().as_slice()), (Some(EngineKind::Sglang), &["other".to_owned()][..]));
}

#[tokio::test]
async fn the_metrics_page_notices_a_death_without_any_request() {
    let fake = Fake::start(&VLLM).await;
    let mut watched = Watched::new(settings(&fake.url), &Siblings::default());
    watched.until_load(Load { running: Some(3), waiting: Some(1), kv_used: Some(0.5) }).await;
    fake.stop().await;
    // Well before the next regular probe, which is five seconds away.
    timeout(Duration::from_secs(3), watched.until_standing(Standing::Ejected)).await.unwrap();
}

#[tokio::test]
async fn numbers_that_are_too_old_become_unknown() {
    let fake = Fake::start(&VLLM).await;
    let mut watched = Watched::new(settings(&fake.url), &Siblings::default());
    watched.until_load(Load { running: Some(3), waiting: Some(1), kv_used: Some(0.5) }).await;
    fake.set("/metrics", 500, "");
    watched.until_load(Load::default()).await;
    assert_eq!(watched.backend.view().load, Load::default());
    fake.set("/metrics", 200, "vllm:num_requests_running 9\n");
    watched.until_load(Load { running: Some(9), waiting: None, kv_used: None }).await;
}

#[tokio::test]
async fn a_hanging_backend_is_ejected_and_delays_nobody() {
    let hanging = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", hanging.local_addr().unwrap());
    let fake = Fake::start(&VLLM).await;
    let siblings = Siblings::default();
    let mut bad = Watched::new(settings(&url), &siblings);
    let mut good = Watched::new(settings(&fake.url), &siblings);
    timeout(Duration::from_secs(1), good.until_standing(Standing::Healthy)).await.unwrap();
    bad.until_standing(Standing::Ejected).await;
    assert!(bad.backend.view().error.unwrap().contains("no answer within"));
}

#[tokio::test]
async fn garbage_and_endless_answers_are_bounded() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                use tokio::io::{AsyncReadExt, AsyncWriteExt};
                _ = stream.read(&mut [0; 1024]).await;
                _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n").await;
                while stream.write_all(&[b'x'; 65536]).await.is_ok() {}
            });
        }
    });
    let mut http = super::http::Http::new(&url.parse().unwrap());
    let error = http.get("/metrics", Duration::from_secs(10)).await.unwrap_err();
    assert!(matches!(error, super::http::HttpError::TooLarge), "{error}");
}

#[tokio::test]
async fn operators_drain_and_undrain() {
    let fake = Fake::start(&VLLM).await;
    let mut watched = Watched::new(settings(&fake.url), &Siblings::default());
    watched.until_standing(Standing::Healthy).await;
    watched.backend.set_drained(true);
    watched.until_standing(Standing::Draining).await;
    watched.backend.observe(Observation::Answered);
    assert!(watched.backend.view().drained);
    watched.backend.set_drained(false);
    watched.until_standing(Standing::Healthy).await;
}

#[tokio::test]
async fn other_settings_keep_the_standing() {
    let fake = Fake::start(&VLLM).await;
    let mut watched = Watched::new(settings(&fake.url), &Siblings::default());
    watched.until_standing(Standing::Healthy).await;
    let changed = watched.backend.reconfigured(BackendSettings { slots: Some(Slots::Fixed(2)), ..settings(&fake.url) });
    let state = watched.until(|state| state.slots == Slots::Fixed(2)).await;
    assert_eq!((state.standing, changed.engine(), changed.id()), (Standing::Healthy, Some(EngineKind::Vllm), BackendId(0)));
    let keyed = watched.backend.reconfigured(BackendSettings { api_key: Some(Secret::new("sk-2".into())), ..settings(&fake.url) });
    timeout(Duration::from_secs(10), async {
        while fake.seen.lock().unwrap().last().is_none_or(|authorization| authorization.as_deref() != Some("Bearer sk-2")) {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
    assert!(keyed.known());
    // A request that began under the old settings reports to the same backend.
    watched.backend.observe(Observation::Answered);
    assert_eq!(changed.view().standing, Standing::Healthy);
}

#[tokio::test]
async fn after_leaving_nothing_more_is_told() {
    let fake = Fake::start(&VLLM).await;
    let mut watched = Watched::new(settings(&fake.url), &Siblings::default());
    watched.until_standing(Standing::Healthy).await;
    watched.backend.leave();
    watched.until_standing(Standing::Gone).await;
    watched.backend.observe(Observation::Transport);
    watched.backend.set_drained(true);
    // The listener is dropped with the last news: nobody is left to hear more.
    assert!(timeout(Duration::from_secs(5), watched.news.recv()).await.unwrap().is_none());
}

#[tokio::test]
async fn dropping_the_guard_ends_the_questions() {
    let fake = Fake::start(&VLLM).await;
    let mut watched = Watched::new(settings(&fake.url), &Siblings::default());
    watched.until_standing(Standing::Healthy).await;
    let Watched { backend, news, _guard } = watched;
    drop((_guard, news));
    // The tasks held the only other handles.
    timeout(Duration::from_secs(5), async {
        while Arc::strong_count(&backend) > 1 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .unwrap();
}
