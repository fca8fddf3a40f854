//! The fleet against the simulated engine, which speaks vLLM's API and metrics: found out, its load followed, ejected when its health check turns, readmitted.
#![cfg(feature = "gateway")]

use std::sync::Arc;
use std::time::Duration;

use headway::config::BackendSettings;
use headway::engine::Profile;
use headway::engine::server::{Server, ServerConfig};
use headway::fleet::{self, Backend, EngineKind, Listener, Siblings};
use headway::scheduler::{BackendId, BackendState, Load, Slots, Standing};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;

enum News {
    State(BackendState),
    Load(Load),
}

struct Ear(mpsc::UnboundedSender<News>);

impl Listener for Ear {
    fn backend_changed(&self, _: BackendId, state: BackendState) {
        _ = self.0.send(News::State(state));
    }

    fn load_reported(&self, _: BackendId, load: Load) {
        _ = self.0.send(News::Load(load));
    }
}

/// A backend of a pool, with its news.
struct Watched {
    backend: Arc<Backend>,
    news: mpsc::UnboundedReceiver<News>,
    _guard: fleet::WatchGuard,
}

impl Watched {
    fn new(id: u32, server: &Server, siblings: &Siblings) -> Watched {
        let settings = BackendSettings::new(server.url().parse().expect("a URL"));
        let backend = Arc::new(Backend::new(BackendId(id), settings, siblings));
        let (sender, news) = mpsc::unbounded_channel();
        Watched { _guard: fleet::watch(Arc::clone(&backend), Ear(sender)), backend, news }
    }

    async fn until<T>(&mut self, what: &str, wanted: impl Fn(News) -> Option<T>) -> T {
        let found = timeout(Duration::from_secs(20), async {
            loop {
                if let Some(found) = wanted(self.news.recv().await.expect("the watch goes on")) {
                    return found;
                }
            }
        });
        found.await.unwrap_or_else(|_| panic!("{what}: not within 20 s; {:?}", self.backend.view()))
    }

    async fn until_standing(&mut self, standing: Standing) -> BackendState {
        self.until(&format!("{standing:?}"), |news| match news {
            News::State(state) if state.standing == standing => Some(state),
            News::State(_) | News::Load(_) => None,
        })
        .await
    }
}

/// A POST whose connection stays open until it is dropped.
async fn post(server: &Server, path: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.address()).await.expect("it listens");
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(format!("{head}{body}").as_bytes()).await.expect("it reads");
    stream
}

/// Sets what goes wrong, and waits until it is in force.
async fn faults(server: &Server, faults: &str) {
    let mut head = [0; 12];
    post(server, "/sim/faults", faults).await.read_exact(&mut head).await.expect("it answers");
    assert_eq!(&head, b"HTTP/1.1 200");
}

#[tokio::test]
async fn it_is_a_vllm_whose_load_is_followed() {
    let profile = Profile { max_num_seqs: 2, ..Profile::small() };
    let (context, kv_tokens) = (profile.context(), u64::from(profile.kv_blocks) * 16);
    let server = Server::start(ServerConfig { profile, ..ServerConfig::default() }).await.expect("a free port");
    let mut watched = Watched::new(0, &server, &Siblings::default());
    let state = watched.until_standing(Standing::Healthy).await;
    assert_eq!((watched.backend.engine(), watched.backend.models().as_slice()), (Some(EngineKind::Vllm), &["sim".to_owned()][..]));
    assert!(state.prefix_cache);
    assert_eq!((state.slots, state.kv_tokens, state.context_tokens), (Slots::Auto { initial: 8, max: 1024 }, Some(kv_tokens), Some(context)));

    let mut running = Vec::new();
    for _ in 0..5 {
        running.push(post(&server, "/v1/completions", r#"{"model":"sim","prompt":"a","max_tokens":1000,"ignore_eos":true,"stream":true}"#).await);
    }
    let used = watched.until("two run, three wait", |news| match news {
        News::Load(Load { running: Some(2), waiting: Some(3), kv_used }) => Some(kv_used),
        News::Load(_) | News::State(_) => None,
    });
    assert!(used.await.is_some_and(|used| used > 0.0 && used < 1.0));
    drop(running);
    watched
        .until("nothing runs after the clients left", |news| {
            matches!(news, News::Load(Load { running: Some(0), waiting: Some(0), .. })).then_some(())
        })
        .await;
}

#[tokio::test]
async fn a_sick_one_is_ejected_while_a_sibling_serves_and_the_last_one_never_is() {
    let siblings = Siblings::default();
    let (first, second) = (Server::start(ServerConfig::default()).await, Server::start(ServerConfig::default()).await);
    let (first, second) = (first.expect("a free port"), second.expect("a free port"));
    let (mut one, mut two) = (Watched::new(1, &first, &siblings), Watched::new(2, &second, &siblings));
    one.until_standing(Standing::Healthy).await;
    two.until_standing(Standing::Healthy).await;

    faults(&first, r#"{"health":500}"#).await;
    // A failed request asks for a probe at once, and suspicion for more of them.
    one.backend.observe(fleet::Observation::Transport);
    one.until_standing(Standing::Ejected).await;
    for _ in 0..100 {
        two.backend.observe(fleet::Observation::ServerError);
    }
    assert_eq!(two.backend.view().standing, Standing::Healthy, "it is the last one");

    faults(&first, "{}").await;
    one.until_standing(Standing::Probing).await;
    one.backend.observe(fleet::Observation::Answered);
    one.until_standing(Standing::Healthy).await;
    for _ in 0..100 {
        two.backend.observe(fleet::Observation::ServerError);
    }
    two.until_standing(Standing::Ejected).await;
}
