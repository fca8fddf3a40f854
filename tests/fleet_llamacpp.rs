//! The fleet against a real llama.cpp server: who it is, its slots, its metrics, its death and its return.
//! `tests/run` installs the server into target/venv and runs this; by hand: `cargo test --test fleet_llamacpp -- --ignored`.
#![cfg(feature = "gateway")]

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use headway::config::BackendSettings;
use headway::fleet::{self, Backend, EngineKind, Listener, Siblings};
use headway::scheduler::{BackendId, BackendState, Load, Slots, Standing};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// A server process, ended with the value.
struct Server(Child);

impl Server {
    /// Returns when it listens.
    fn start(model: &Path, port: u16, slots: u32) -> Server {
        let mut child = python()
            .arg("tests/clients/llamacpp_server.py")
            .arg(model)
            .args([port.to_string(), slots.to_string(), "2048".into()])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("target/venv holds a Python with xllamacpp");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout is piped")).read_line(&mut line).expect("the server says where it listens");
        assert!(line.starts_with("listening"), "the server said {line:?}");
        Server(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

fn python() -> Command {
    Command::new("target/venv/bin/python")
}

fn toy_model(dir: &Path) -> PathBuf {
    let path = dir.join("toy.gguf");
    let made = python().arg("tests/clients/toy_gguf.py").arg(&path).args(["256", "4"]).status().expect("target/venv holds a Python with gguf");
    assert!(made.success());
    path
}

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

/// Waits for news that fit.
async fn until(news: &mut mpsc::UnboundedReceiver<News>, what: &str, fits: impl Fn(&News) -> bool) -> News {
    let mut last = String::new();
    let found = timeout(Duration::from_secs(60), async {
        loop {
            let item = news.recv().await.expect("the watch goes on");
            if fits(&item) {
                return item;
            }
            last = match &item {
                News::State(state) => format!("{state:?}"),
                News::Load(load) => format!("{load:?}"),
            };
        }
    });
    match found.await {
        Ok(item) => item,
        Err(_) => panic!("{what}: not within 60 s; last was {last}"),
    }
}

/// Keeps one request in the server at all times: a completion of `tokens` tokens, and when it ended another one. Ends with its task.
async fn keep_asking(port: u16, tokens: u32) {
    let body = format!(r#"{{"model":"toy","prompt":"a b c","max_tokens":{tokens},"stream":true}}"#);
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    loop {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.expect("the server listens");
        stream.write_all((head.clone() + &body).as_bytes()).await.expect("the server reads");
        tokio::io::copy(&mut stream, &mut tokio::io::sink()).await.expect("the server answers");
    }
}

#[tokio::test]
#[ignore = "needs target/venv, which tests/run makes"]
async fn a_llama_cpp_server_is_understood() {
    let dir = tempfile::tempdir().expect("a folder for the model");
    let model = toy_model(dir.path());
    let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port").port();
    let settings = BackendSettings::new(format!("http://127.0.0.1:{port}").parse().expect("a URL"));
    let backend = Arc::new(Backend::new(BackendId(1), settings, &Siblings::default()));
    let (sender, mut news) = mpsc::unbounded_channel();
    // Nothing listens yet: the watch starts all the same, and finds it later.
    let _watch = fleet::watch(Arc::clone(&backend), Ear(sender));
    until(&mut news, "ejected while nobody listens", |news| matches!(news, News::State(state) if state.standing == Standing::Ejected)).await;

    let server = Server::start(&model, port, 4);
    let healthy = |news: &News| matches!(news, News::State(state) if state.standing == Standing::Healthy);
    let News::State(state) = until(&mut news, "healthy", healthy).await else { unreachable!("the predicate takes states only") };
    assert_eq!(backend.engine(), Some(EngineKind::LlamaCpp));
    assert_eq!(*backend.models(), ["toy"]);
    assert_eq!((state.slots, state.context_tokens), (Slots::Auto { initial: 4, max: 6 }, Some(2048)));

    // However fast the machine and however late a look, there is something to see.
    let mut running = JoinSet::new();
    for _ in 0..7 {
        running.spawn(keep_asking(port, 2000));
    }
    let full = Load { running: Some(4), waiting: Some(3), kv_used: None };
    until(&mut news, "four run and three wait", |news| matches!(news, News::Load(load) if *load == full)).await;
    assert!(running.try_join_next().is_none(), "every client still asks");
    drop(running);
    let empty = Load { running: Some(0), waiting: Some(0), kv_used: None };
    until(&mut news, "nothing runs after the clients left", |news| matches!(news, News::Load(load) if *load == empty)).await;

    drop(server);
    until(&mut news, "ejected when it died", |news| matches!(news, News::State(state) if state.standing == Standing::Ejected)).await;
    until(&mut news, "its numbers are unknown", |news| matches!(news, News::Load(load) if *load == Load::default())).await;
    let _server = Server::start(&model, port, 2);
    let News::State(state) = until(&mut news, "healthy again", healthy).await else { unreachable!("the predicate takes states only") };
    assert_eq!(state.slots, Slots::Auto { initial: 2, max: 4 }, "found out again");
}
