//! The admin address over real sockets, in front of a gateway whose only backend is not there.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::*;
use crate::config;
use crate::ranker::weights::tests::tiny_directory;

/// A gateway made from a file, and its admin address.
struct Setup {
    _dir: tempfile::TempDir,
    file: PathBuf,
    gateway: Arc<Gateway>,
    address: SocketAddr,
}

/// Port 9 is the discard service, which nobody runs.
const FILE: &str = "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\npools: [{ name: chat, models: [m], backends: [{ url: 'http://127.0.0.1:9' }] }]\n";

async fn setup() -> Setup {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("headway.yaml");
    fs::write(&file, FILE).unwrap();
    let gateway = Gateway::start(config::load(&file).unwrap()).await.unwrap();
    let address = start(Arc::clone(&gateway), Some(&file), false).await.unwrap();
    Setup { _dir: dir, file, gateway, address }
}

impl Setup {
    async fn ask(&self, method: &str, path: &str, headers: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{headers}\r\n", self.address);
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), body.to_owned())
    }

    async fn get(&self, path: &str) -> (u16, String) {
        self.ask("GET", path, "").await
    }

    async fn json(&self, method: &str, path: &str) -> (u16, Value) {
        let (status, body) = self.ask(method, path, "").await;
        (status, serde_json::from_str(&body).unwrap())
    }

    /// Asks until the answer fits.
    async fn until(&self, path: &str, fits: impl Fn(u16, &str) -> bool) -> String {
        let found = timeout(Duration::from_secs(10), async {
            loop {
                let (status, body) = self.get(path).await;
                if fits(status, &body) {
                    return body;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        found.await.unwrap()
    }
}

#[tokio::test]
async fn alive_then_ready_then_draining() {
    let setup = setup().await;
    assert_eq!(setup.get("/healthz").await, (200, "ok\n".into()));
    setup.until("/readyz", |status, _| status == 200).await;
    setup.gateway.start_drain();
    let (status, body) = setup.json("GET", "/readyz").await;
    assert_eq!((status, body["error"]["code"].as_str()), (503, Some("draining")));
    assert_eq!(setup.get("/healthz").await.0, 200, "a gateway that drains is alive");
}

#[tokio::test]
async fn pools_show_their_backends() {
    let setup = setup().await;
    let body = setup.until("/admin/pools", |_, body| body.contains("\"standing\":\"ejected\"")).await;
    let body: Value = serde_json::from_str(&body).unwrap();
    let pool = &body["pools"][0];
    assert_eq!((pool["name"].as_str(), pool["policy"].as_str(), pool["mode"].as_str()), (Some("chat"), Some("headway"), Some("normal")));
    assert_eq!(
        (pool["waiting"].as_u64(), pool["in_flight"].as_u64(), pool["counters"]["rejected"]["queue_full"].as_u64()),
        (Some(0), Some(0), Some(0))
    );
    let backend = &pool["backends"][0];
    assert_eq!((backend["url"].as_str(), backend["engine"].as_str(), backend["in_flight"].as_u64()), (Some("http://127.0.0.1:9"), None, Some(0)));
    assert!(backend["error"].as_str().unwrap().contains("cannot connect"), "{backend}");
}

#[tokio::test]
async fn a_backend_is_drained_and_put_back() {
    let setup = setup().await;
    let (status, body) = setup.json("POST", "/admin/backends/chat/0/drain").await;
    assert_eq!((status, body["standing"].as_str(), body["drained"].as_bool()), (200, Some("draining"), Some(true)));
    let (status, body) = setup.json("POST", "/admin/backends/chat/0/undrain").await;
    assert_eq!((status, body["drained"].as_bool()), (200, Some(false)));
    assert_eq!(setup.json("POST", "/admin/backends/chat/7/drain").await.0, 404);
    let (status, body) = setup.json("POST", "/admin/backends/chta/0/drain").await;
    assert_eq!(status, 404);
    assert!(body["error"]["message"].as_str().unwrap().contains("there are: chat"));
    assert_eq!(setup.get("/admin/backends/chat/0/drain").await.0, 405);
}

#[tokio::test]
async fn the_page_may_load_nothing_from_elsewhere() {
    let setup = setup().await;
    let mut stream = TcpStream::connect(setup.address).await.unwrap();
    stream.write_all(format!("GET / HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n\r\n", setup.address).as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("content-type: text/html; charset=utf-8") && body.starts_with("<!doctype html>"), "{head}");
    let policy = head.lines().find_map(|line| line.strip_prefix("content-security-policy: ")).unwrap();
    assert!(policy.starts_with("default-src 'none'; script-src 'sha256-") && !policy.contains("unsafe"), "{policy}");
}

/// The server-sent events of one viewer.
struct Viewer {
    stream: TcpStream,
    read: String,
}

impl Viewer {
    async fn new(setup: &Setup) -> Viewer {
        let mut stream = TcpStream::connect(setup.address).await.unwrap();
        // HTTP/1.0 knows no chunks.
        stream.write_all(b"GET /admin/events HTTP/1.0\r\n\r\n").await.unwrap();
        Viewer { stream, read: String::new() }
    }

    /// The name and data of the next event.
    async fn next(&mut self) -> (String, Value) {
        loop {
            if let Some((event, rest)) = self.read.split_once("\n\n") {
                let parts = event.split_once("event: ").and_then(|(_, event)| event.split_once("\ndata: "));
                let parsed = parts.map(|(name, data)| (name.to_owned(), serde_json::from_str(data).unwrap()));
                self.read = rest.to_owned();
                match parsed {
                    Some(event) => return event,
                    None => continue,
                }
            }
            let mut bytes = [0; 4096];
            let count = timeout(Duration::from_secs(10), self.stream.read(&mut bytes)).await.unwrap().unwrap();
            assert!(count > 0, "the stream has ended: {}", self.read);
            self.read.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
        }
    }
}

#[tokio::test]
async fn viewers_share_one_look_and_are_limited() {
    let setup = setup().await;
    let (mut first, mut second) = (Viewer::new(&setup).await, Viewer::new(&setup).await);
    let mut looks = Vec::new();
    for viewer in [&mut first, &mut second] {
        let (name, points) = viewer.next().await;
        assert_eq!((name.as_str(), points[0]["pools"]["chat"]["waiting"].as_u64()), ("history", Some(0)));
        let (name, now) = viewer.next().await;
        let pool = &now["pools"][0];
        assert_eq!((name.as_str(), pool["name"].as_str(), &pool["backends"][0]["queue"]), ("now", Some("chat"), &Value::Array(Vec::new())));
        looks.push(now);
    }
    assert!(second.next().await.1["at"].as_u64() >= looks[0]["at"].as_u64(), "and it goes on");

    let mut viewers = vec![first, second];
    let full = loop {
        let mut viewer = Viewer::new(&setup).await;
        let mut head = [0; 12];
        viewer.stream.read_exact(&mut head).await.unwrap();
        match &head[9..] {
            b"200" => viewers.push(viewer),
            refused => break std::str::from_utf8(refused).unwrap().to_owned(),
        }
    };
    assert_eq!((full.as_str(), viewers.len()), ("503", 128));
    drop(viewers);
    // Whoever has left makes room, once the next look finds it gone.
    timeout(Duration::from_secs(10), async {
        loop {
            let mut viewer = Viewer::new(&setup).await;
            let mut head = [0; 12];
            viewer.stream.read_exact(&mut head).await.unwrap();
            if &head[9..] == b"200" {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_reload_is_taken_over_or_explained() {
    let setup = setup().await;
    let (_, before) = setup.json("GET", "/admin/config").await;
    fs::write(&setup.file, FILE.replace("[m]", "[m, n]")).unwrap();
    let (status, after) = setup.json("POST", "/admin/reload").await;
    assert_eq!((status, &after["error"]), (200, &Value::Null));
    assert_ne!(before["version"], after["version"]);
    assert!(setup.gateway.live().snapshot.models.contains_key("n"));

    fs::write(&setup.file, format!("{FILE}polcy: fcfs\n")).unwrap();
    let (status, failed) = setup.json("POST", "/admin/reload").await;
    assert_eq!((status, &failed["version"]), (422, &after["version"]));
    let problem = &failed["error"]["problems"][0];
    assert_eq!((problem["line"].as_u64(), problem["field"].as_str()), (Some(4), Some("polcy")));
    assert!(problem["hint"].as_str().unwrap().starts_with("did you mean policy?"));
    assert!(setup.gateway.live().snapshot.models.contains_key("n"), "the running configuration stays");

    fs::write(&setup.file, FILE.replace("listen: 127.0.0.1:0", "listen: 127.0.0.1:1")).unwrap();
    let (status, refused) = setup.json("POST", "/admin/reload").await;
    assert_eq!(status, 409);
    assert!(refused["error"]["message"].as_str().unwrap().contains("listen"), "{refused}");
}

#[tokio::test]
async fn pages_of_other_sites_change_nothing() {
    let setup = setup().await;
    let foreign = "origin: http://evil.example\r\n";
    assert_eq!(setup.ask("POST", "/admin/reload", foreign).await.0, 403);
    assert_eq!(setup.ask("POST", "/admin/backends/chat/0/drain", "origin: null\r\n").await.0, 403);
    assert_eq!(setup.ask("POST", "/admin/reload", &format!("origin: http://{}\r\n", setup.address)).await.0, 200);
    assert_eq!(setup.ask("GET", "/admin/pools", foreign).await.0, 200);
    assert_eq!(setup.ask("POST", "/admin/reload", &format!("origin: https://{}\r\n", setup.address)).await.0, 200, "behind TLS");
}

/// A name with dots may be anybody's, who makes it point here.
#[test]
fn only_names_that_no_other_site_can_have_are_let_in() {
    let host = |host: &'static str| HeaderMap::from_iter([(HOST, HeaderValue::from_static(host))]);
    assert!(super::is_local_name(&HeaderMap::new()));
    for ours in ["127.0.0.1:9090", "127.0.0.1", "[::1]:9090", "[::1]", "localhost:9090", "localhost", "gpu-7:9090", "page.localhost:9090"] {
        assert!(super::is_local_name(&host(ours)), "{ours}");
    }
    for others in ["evil.example:9090", "evil.example", "127.0.0.1.evil.example:9090", "[::1.evil.example", "localhost.evil.example"] {
        assert!(!super::is_local_name(&host(others)), "{others}");
    }
}

#[tokio::test]
async fn the_metrics_page_is_whole_and_well_formed() {
    let setup = setup().await;
    let page = setup.until("/metrics", |_, body| body.contains("standing=\"ejected\"} 1")).await;
    for line in [
        "headway_waiting{pool=\"chat\"} 0",
        "headway_waiting_bytes{pool=\"chat\"} 0",
        "headway_overload{pool=\"chat\"} 0",
        "headway_queue_rejected_total{pool=\"chat\",reason=\"shed\"} 0",
        "headway_backend_in_flight{pool=\"chat\",backend=\"http://127.0.0.1:9\"} 0",
        "headway_config_reloads_total{result=\"failed\"} 0",
    ] {
        assert!(page.lines().any(|have| have == line), "{line} is not in\n{page}");
    }
    assert!(!page.contains("headway_engine_waiting{"), "what is unknown is absent");
    assert!(page.ends_with("# EOF\n"));
    let names: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    let unique: BTreeSet<&str> = names.iter().copied().collect();
    assert_eq!(names.len(), unique.len(), "a metric is described twice");
}

#[tokio::test]
async fn an_address_that_is_not_ours_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("headway.yaml");
    // An address of documentation (RFC 5737), which no machine has.
    fs::write(&file, FILE.replace("admin: 127.0.0.1:0", "admin: 192.0.2.1:1")).unwrap();
    let gateway = Gateway::start(config::load(&file).unwrap()).await.unwrap();
    let error = start(gateway, Some(&file), false).await.unwrap_err();
    assert!(error.to_string().contains("192.0.2.1:1"), "{error}");
}

#[tokio::test]
async fn the_rankers_weights_are_shown_reloaded_and_taken_back() {
    let (setup, weights) = (setup().await, tiny_directory(1));
    assert_eq!(setup.json("POST", "/admin/ranker/reload").await.0, 409);
    fs::write(&setup.file, format!("{FILE}ranker: {{ weights: {} }}\n", weights.path().display())).unwrap();
    assert_eq!(setup.json("POST", "/admin/reload").await.0, 200);
    let (status, first) = setup.json("GET", "/admin/ranker").await;
    assert_eq!((status, first["version"].as_str().unwrap().len()), (200, 8));
    assert_eq!(setup.json("POST", "/admin/ranker/rollback").await.0, 409, "there is nothing before it");

    let other = tiny_directory(2);
    for file in ["model.safetensors", "card.json"] {
        fs::copy(other.path().join(file), weights.path().join(file)).unwrap();
    }
    let (status, second) = setup.json("POST", "/admin/ranker/reload").await;
    assert_eq!((status, &second["previous"]), (200, &first["version"]));
    let (status, back) = setup.json("POST", "/admin/ranker/rollback").await;
    assert_eq!((status, &back["version"]), (200, &first["version"]));

    fs::write(weights.path().join("model.safetensors"), "damaged").unwrap();
    let (status, refused) = setup.json("POST", "/admin/ranker/reload").await;
    assert_eq!(status, 422);
    assert!(refused["error"]["message"].as_str().unwrap().contains("model.safetensors"), "{refused}");
    assert_eq!(setup.json("GET", "/admin/ranker").await.1["version"], first["version"]);
}

#[tokio::test]
async fn two_gateways_share_an_address_only_when_one_takes_over() {
    let first = setup().await;
    let taken = FILE.replace("admin: 127.0.0.1:0", &format!("admin: {}", first.address));
    fs::write(&first.file, taken).unwrap();
    let gateway = Gateway::start(config::load(&first.file).unwrap()).await.unwrap();
    let error = start(Arc::clone(&gateway), None, false).await.unwrap_err();
    assert!(error.to_string().contains(&first.address.to_string()), "{error}");
    assert_eq!(start(gateway, None, true).await.unwrap(), first.address);
}

#[tokio::test]
async fn the_document_has_every_route_and_no_other() {
    let setup = setup().await;
    let (status, document) = setup.json("GET", "/admin/openapi.json").await;
    assert_eq!((status, document["openapi"].as_str()), (200, Some("3.1.0")));
    let documented: BTreeSet<&str> = document["paths"].as_object().unwrap().keys().map(String::as_str).collect();
    let source = include_str!("mod.rs");
    let served: BTreeSet<&str> = source.split(".route(\"").skip(1).filter_map(|call| Some(call.split_once('"')?.0)).collect();
    assert_eq!(served, documented, "served (left) and documented (right)");
    let (_, index) = setup.get("/admin").await;
    for (path, methods) in document["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            let line = format!("{:<4} {path} ", method.to_uppercase());
            assert!(index.contains(&line), "{line} is not in\n{index}");
        }
    }
    // What is referred to is there.
    let text = document.to_string();
    for name in text.split("#/components/schemas/").skip(1).filter_map(|rest| rest.split('"').next()) {
        assert!(document["components"]["schemas"][name].is_object(), "{name}");
    }
}
