//! What proxying costs: CPU time of the proxy process per request and per streamed chunk, Headway beside nginx, on the same mock upstream in one run.
//!
//! Both work with one thread. `cargo bench --bench proxy_overhead` (needs `nginx` on the path; without it only Headway is measured; HEADWAY names another build to measure). The mock and the load run in this process,
//! the proxies are child processes; their CPU time is read from /proc, so the load generator's share of the machine does not count.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const CONNECTIONS: usize = 64;
const REPEATS: usize = 3;
const CHUNKS: usize = 64;

/// A workload: the request each connection repeats, and how many answers to collect.
struct Case {
    name: &'static str,
    request: Vec<u8>,
    requests: usize,
    chunks: usize,
}

fn main() -> io::Result<()> {
    // `cargo test` runs benches too, with this flag, to see that they start.
    if std::env::args().any(|argument| argument == "--test") {
        return Ok(());
    }
    let upstream = mock()?;
    let directory = tempfile::tempdir()?;
    let mut proxies = vec![headway(upstream, directory.path(), 1024)?];
    match nginx(upstream, directory.path()) {
        Ok(proxy) => proxies.insert(0, proxy),
        Err(error) => eprintln!("nginx is left out: {error}"),
    }
    let cases = [
        Case { name: "1 KB JSON", request: request(1 << 10, "json"), requests: 20_000, chunks: 1 },
        Case { name: "64 KB JSON", request: request(64 << 10, "json"), requests: 6_000, chunks: 1 },
        Case { name: "SSE, 64 chunks at once", request: request(1 << 10, "burst"), requests: 4_000, chunks: CHUNKS },
        Case { name: "SSE, 64 chunks, 5 ms apart", request: request(1 << 10, "paced"), requests: 1_000, chunks: CHUNKS },
    ];
    println!("| case | proxy | CPU us/request (min..max of {REPEATS}) | CPU us/chunk | requests/s | RSS MiB |");
    println!("|---|---|---|---|---|---|");
    for case in &cases {
        let mut measured: Vec<Vec<(f64, f64)>> = vec![Vec::new(); proxies.len()];
        // Interleaved, so that a slow minute of the machine meets every proxy.
        for _ in 0..REPEATS {
            for (proxy, results) in proxies.iter().zip(&mut measured) {
                results.push(measure(proxy, case)?);
            }
        }
        let baseline = median(measured[0].iter().map(|result| result.0));
        for (proxy, results) in proxies.iter().zip(&measured) {
            let cpu = median(results.iter().map(|result| result.0));
            let low = results.iter().map(|result| result.0).fold(f64::MAX, f64::min);
            let high = results.iter().map(|result| result.0).fold(0.0, f64::max);
            let rate = median(results.iter().map(|result| result.1));
            println!(
                "| {} | {} | {cpu:.1} ({low:.1}..{high:.1}), {:.2} x | {:.2} | {rate:.0} | {:.1} |",
                case.name,
                proxy.name,
                cpu / baseline,
                cpu / case.chunks as f64,
                rss_mib(&proxy.processes())
            );
        }
    }
    drop(proxies);
    queued_memory(&headway(upstream, directory.path(), 1)?)
}

/// Resident memory of the proxy while requests of 1 KB wait in its queue, each on a connection of its own.
fn queued_memory(proxy: &Proxy) -> io::Result<()> {
    println!("\n| requests that wait | RSS MiB |\n|---|---|");
    let request = request(1 << 10, "hold");
    let mut waiting = Vec::new();
    for wanted in [0, 1_000, 10_000] {
        while waiting.len() < wanted {
            let mut stream = TcpStream::connect(proxy.address)?;
            stream.write_all(&request)?;
            waiting.push(stream);
        }
        // Settled once it has stopped growing.
        let mut rss = rss_mib(&proxy.processes());
        loop {
            thread::sleep(Duration::from_millis(500));
            let now = rss_mib(&proxy.processes());
            if now <= rss {
                break;
            }
            rss = now;
        }
        println!("| {wanted} | {rss:.1} |");
    }
    Ok(())
}

/// A proxy under test; killed on drop.
struct Proxy {
    name: &'static str,
    address: SocketAddr,
    child: Child,
}

impl Proxy {
    /// The process and its children (nginx works in a child).
    fn processes(&self) -> Vec<u32> {
        let root = self.child.id();
        let children = fs::read_to_string(format!("/proc/{root}/task/{root}/children")).unwrap_or_default();
        std::iter::once(root).chain(children.split_whitespace().filter_map(|pid| pid.parse().ok())).collect()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        for pid in self.processes().into_iter().rev() {
            let _ = Command::new("kill").arg(pid.to_string()).stderr(Stdio::null()).status();
        }
        let _ = self.child.wait();
    }
}

fn headway(upstream: SocketAddr, directory: &Path, slots: u32) -> io::Result<Proxy> {
    let (address, admin) = (free_address()?, free_address()?);
    let config = directory.join("headway.yaml");
    fs::write(
        &config,
        format!(
            "listen: {address}\nadmin: {admin}\nthreads: 1\npools:\n  - name: mock\n    models: [mock]\n    backends:\n      - {{ url: \"http://{upstream}\", engine: openai, slots: {slots} }}\n"
        ),
    )?;
    let program = std::env::var_os("HEADWAY").unwrap_or_else(|| env!("CARGO_BIN_EXE_headway").into());
    let child =
        // Like nginx here, without an access log.
        Command::new(program).env("RUST_LOG", "warn").arg("serve").arg("--config").arg(&config).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    ready(Proxy { name: "headway", address, child })
}

fn nginx(upstream: SocketAddr, directory: &Path) -> io::Result<Proxy> {
    let address = free_address()?;
    let config: PathBuf = directory.join("nginx.conf");
    fs::write(
        &config,
        format!(
            "daemon off; worker_processes 1; pid {0}/nginx.pid; error_log {0}/error.log;
            events {{ worker_connections 4096; }}
            http {{
                access_log off; client_max_body_size 64m; client_body_buffer_size 1m; keepalive_requests 1000000;
                client_body_temp_path {0}/body; proxy_temp_path {0}/proxy; fastcgi_temp_path {0}/f; uwsgi_temp_path {0}/u; scgi_temp_path {0}/s;
                upstream mock {{ server {upstream}; keepalive 128; keepalive_requests 1000000; }}
                server {{ listen {address}; location / {{ proxy_pass http://mock; proxy_http_version 1.1; proxy_set_header Connection \"\"; proxy_buffering off; }} }}
            }}",
            directory.display()
        ),
    )?;
    let child = Command::new("nginx").arg("-p").arg(directory).arg("-c").arg(&config).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    ready(Proxy { name: "nginx", address, child })
}

/// Waits until the proxy answers a request.
fn ready(mut proxy: Proxy) -> io::Result<Proxy> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let request = request(100, "json");
    while Instant::now() < deadline {
        if let Some(status) = proxy.child.try_wait()? {
            return Err(io::Error::other(format!("{} ended at start: {status}", proxy.name)));
        }
        if let Ok(mut stream) = TcpStream::connect(proxy.address) {
            stream.set_read_timeout(Some(Duration::from_secs(2)))?;
            if stream.write_all(&request).is_ok() && matches!(answer(&mut stream, &mut Vec::new()), Ok(200)) {
                return Ok(proxy);
            }
        }
        thread::sleep(Duration::from_millis(50));
    }
    Err(io::Error::other(format!("{} did not answer within 20 s", proxy.name)))
}

/// CPU microseconds of the proxy per request, and requests per second.
fn measure(proxy: &Proxy, case: &Case) -> io::Result<(f64, f64)> {
    let left = Arc::new(AtomicUsize::new(case.requests));
    let cpu = cpu_us(&proxy.processes());
    let start = Instant::now();
    let workers: Vec<_> = (0..CONNECTIONS)
        .map(|_| {
            let (left, address, request) = (Arc::clone(&left), proxy.address, case.request.clone());
            thread::spawn(move || -> io::Result<()> {
                let mut stream = TcpStream::connect(address)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(Duration::from_secs(30)))?;
                let mut buffer = Vec::new();
                while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
                    stream.write_all(&request)?;
                    let status = answer(&mut stream, &mut buffer)?;
                    if status != 200 {
                        return Err(io::Error::other(format!("status {status}: {}", String::from_utf8_lossy(&buffer))));
                    }
                }
                Ok(())
            })
        })
        .collect();
    for worker in workers {
        worker.join().map_err(|_| io::Error::other("a load thread panicked"))??;
    }
    let seconds = start.elapsed().as_secs_f64();
    Ok(((cpu_us(&proxy.processes()) - cpu) / case.requests as f64, case.requests as f64 / seconds))
}

fn request(body: usize, kind: &str) -> Vec<u8> {
    let head = format!(r#"{{"model":"mock","stream":{},"messages":[{{"role":"user","content":""#, kind != "json");
    let tail = r#""}]}"#;
    let filler = "word ".repeat(body / 5 + 1);
    let body = format!("{head}{}{tail}", &filler[..body.saturating_sub(head.len() + tail.len())]);
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: mock\r\ncontent-type: application/json\r\nx-mock: {kind}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Reads one whole answer and returns its status.
fn answer(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> io::Result<u16> {
    buffer.clear();
    let mut chunk = [0; 16 << 10];
    loop {
        let read = stream.read(&mut chunk)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        buffer.extend_from_slice(&chunk[..read]);
        let Some(end) = find(buffer, b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&buffer[..end]).to_ascii_lowercase();
        let whole = match head.split("content-length: ").nth(1).and_then(|rest| rest.split("\r\n").next()?.trim().parse::<usize>().ok()) {
            Some(length) => buffer.len() >= end + 4 + length,
            None => buffer.ends_with(b"0\r\n\r\n"),
        };
        if whole {
            return head.get(9..12).and_then(|status| status.parse().ok()).ok_or_else(|| io::Error::other("no status"));
        }
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// An upstream that answers by the `x-mock` header: one JSON object, an event stream at once or paced, or never.
fn mock() -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // A proxy that closes its connection ends the thread with an error: nothing to report.
            thread::spawn(move || drop(serve(stream)));
        }
    });
    Ok(address)
}

fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let content = "lorem ipsum ".repeat(60);
    let json = format!(
        r#"{{"id":"1","object":"chat.completion","created":1,"model":"mock","choices":[{{"index":0,"message":{{"role":"assistant","content":"{content}"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":10,"completion_tokens":120,"total_tokens":130}}}}"#
    );
    let json = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{json}", json.len());
    let event = "data: {\"id\":\"1\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"finish_reason\":null}]}\n\n";
    let event = format!("{:x}\r\n{event}\r\n", event.len());
    let last = "data: [DONE]\n\n";
    let last = format!("{:x}\r\n{last}\r\n0\r\n\r\n", last.len());
    let mut buffer = Vec::new();
    let mut chunk = vec![0; 128 << 10];
    loop {
        let head = loop {
            if let Some(end) = find(&buffer, b"\r\n\r\n") {
                break String::from_utf8_lossy(&buffer[..end + 4]).to_ascii_lowercase();
            }
            let read = stream.read(&mut chunk)?;
            if read == 0 {
                return Ok(());
            }
            buffer.extend_from_slice(&chunk[..read]);
        };
        let field = |name: &str| head.split(name).nth(1).and_then(|rest| rest.split("\r\n").next()).map(|value| value.trim().to_owned());
        let whole = head.len() + field("content-length:").and_then(|length| length.parse::<usize>().ok()).unwrap_or(0);
        while buffer.len() < whole {
            let read = stream.read(&mut chunk)?;
            if read == 0 {
                return Ok(());
            }
            buffer.extend_from_slice(&chunk[..read]);
        }
        buffer.drain(..whole);
        match field("x-mock:").as_deref() {
            Some(kind @ ("burst" | "paced")) => {
                stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")?;
                for _ in 0..CHUNKS {
                    stream.write_all(event.as_bytes())?;
                    if kind == "paced" {
                        thread::sleep(Duration::from_millis(5));
                    }
                }
                stream.write_all(last.as_bytes())?;
            }
            // Never answered: the slot is held until the proxy closes the connection.
            Some("hold") => while stream.read(&mut chunk)? > 0 {},
            _ => stream.write_all(json.as_bytes())?,
        }
    }
}

fn free_address() -> io::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")?.local_addr()
}

/// Microseconds that all threads of the processes have run.
fn cpu_us(processes: &[u32]) -> f64 {
    let threads = processes.iter().filter_map(|pid| fs::read_dir(format!("/proc/{pid}/task")).ok()).flatten().flatten();
    let nanos = threads.filter_map(|thread| fs::read_to_string(thread.path().join("schedstat")).ok()?.split(' ').next()?.parse::<f64>().ok());
    nanos.sum::<f64>() / 1e3
}

fn rss_mib(processes: &[u32]) -> f64 {
    let pages = processes.iter().filter_map(|pid| fs::read_to_string(format!("/proc/{pid}/statm")).ok()?.split(' ').nth(1)?.parse::<f64>().ok());
    pages.sum::<f64>() * 4096.0 / f64::from(1 << 20)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
