//! `headway top`: what the operators' page shows, in a terminal. It reads the same events; piped, it prints one look and ends.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use headway::config;
use http_body_util::{BodyExt, Empty};
use hyper::Request;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::serve;

/// How long the gateway may take to show anything: it looks every second.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two tries to reach a gateway that was there.
const AGAIN: Duration = Duration::from_secs(2);

/// What `headway top` takes.
#[derive(clap::Args)]
pub struct Args {
    /// The gateway's address for operators
    #[arg(long, value_name = "ADDRESS", value_parser = config::address, default_value = "127.0.0.1:9090")]
    admin: SocketAddr,
    /// Only this pool
    #[arg(long)]
    pool: Option<String>,
    /// One look, also in a terminal
    #[arg(long)]
    once: bool,
}

/// Shows a running gateway until Ctrl-C, or once.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let once = args.once || !std::io::stdout().is_terminal();
    serve::runtime()?.block_on(async {
        if once {
            return show(args, true, &mut false).await;
        }
        // Another screen, without a cursor: what was there comes back.
        print!("\x1b[?1049h\x1b[?25l");
        let ended = tokio::select! {
            ended = follow(args) => ended,
            interrupted = tokio::signal::ctrl_c() => interrupted.context("waiting for Ctrl-C"),
        };
        print!("\x1b[?25h\x1b[?1049l");
        std::io::stdout().flush().context("writing")?;
        ended
    })
}

/// Shows it, and waits for it where it has gone.
async fn follow(args: &Args) -> anyhow::Result<()> {
    let mut seen = false;
    loop {
        match show(args, false, &mut seen).await {
            Ok(()) => {}
            // It was never there: the address is wrong.
            Err(error) if !seen && !error.is::<Gone>() => return Err(error),
            Err(_) => {}
        }
        print!("\x1b[H\x1b[7m no connection to {}, trying again \x1b[0m\x1b[K", args.admin);
        std::io::stdout().flush().context("writing")?;
        tokio::time::sleep(AGAIN).await;
    }
}

/// The events have ended after some were shown.
#[derive(Debug, thiserror::Error)]
#[error("the gateway ended the events")]
struct Gone;

/// Shows one look, or each until the events end.
async fn show(args: &Args, once: bool, seen: &mut bool) -> anyhow::Result<()> {
    let unreachable = || format!("no gateway can be reached at {}; name its address for operators with --admin", args.admin);
    let stream = TcpStream::connect(args.admin).await.with_context(unreachable)?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.with_context(unreachable)?;
    tokio::spawn(connection);
    let request = Request::get("/admin/events").header("host", args.admin.to_string()).body(Empty::<Bytes>::new()).context("building a request")?;
    let response = sender.send_request(request).await.with_context(unreachable)?;
    if !response.status().is_success() {
        bail!("{} answers {} to GET /admin/events; is it a gateway's address for operators?", args.admin, response.status());
    }
    let (mut body, mut text) = (response.into_body(), Vec::new());
    loop {
        let frame = timeout(PATIENCE, body.frame()).await.context("the gateway shows nothing")?;
        let Some(frame) = frame else { return Err(Gone.into()) };
        text.extend_from_slice(frame.map_err(|_| Gone)?.data_ref().map_or(&[][..], |data| data));
        while let Some(end) = text.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = text.drain(..end + 2).collect();
            let Some(data) = event.strip_prefix(b"event: now\ndata: ") else { continue };
            let now: Value = serde_json::from_slice(data).context("reading an event")?;
            let colour = std::io::stdout().is_terminal();
            let drawn = drawing(&now, args.pool.as_deref(), columns(), colour)?;
            if once {
                print!("{drawn}");
                return Ok(());
            }
            *seen = true;
            print!("\x1b[H{}\x1b[J", drawn.replace('\n', "\x1b[K\n"));
            std::io::stdout().flush().context("writing")?;
        }
    }
}

/// How wide the terminal is; a pipe takes everything.
fn columns() -> usize {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCGWINSZ writes a winsize, which this is, and nothing else.
    let told = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size) };
    if told == 0 && size.ws_col > 0 { size.ws_col.into() } else { usize::MAX }
}

/// The whole picture of one look, lines of at most `columns`.
fn drawing(now: &Value, only: Option<&str>, columns: usize, colour: bool) -> anyhow::Result<String> {
    let pools = now["pools"].as_array().map_or(&[][..], Vec::as_slice);
    let shown: Vec<&Value> = pools.iter().filter(|pool| only.is_none_or(|name| pool["name"] == name)).collect();
    if let (Some(name), true) = (only, shown.is_empty()) {
        let names: Vec<&str> = pools.iter().filter_map(|pool| pool["name"].as_str()).collect();
        bail!("there is no pool {name:?}; there are: {}", names.join(", "));
    }
    let paint = Paint { colour, columns };
    let mut out = String::new();
    let mut head = format!("headway {}", text(&now["version"]));
    if now["draining"] == true {
        head.push_str("   stopping");
    }
    if !now["config"]["error"].is_null() {
        head.push_str("   the last configuration was refused");
    }
    paint.line(&mut out, &head, "1");
    for pool in shown {
        paint.line(&mut out, "", "");
        draw_pool(&mut out, pool, &paint);
    }
    let failures = now["failures"].as_array().map_or(&[][..], Vec::as_slice);
    if !failures.is_empty() {
        paint.line(&mut out, "", "");
        paint.line(&mut out, "TIMES  FAILED                  STATUS  LATEST      POOL, MODEL, BACKEND", "2");
        for each in failures.iter().take(8) {
            let place = ["pool", "model", "backend"].into_iter().map(|name| &each[name]);
            let place: Vec<String> = place.filter(|value| value.as_str().is_some_and(|value| !value.is_empty())).map(text).collect();
            let line = format!(
                "{:>5}  {:<22}  {:>6}  {:>7} ago {}",
                text(&each["times"]),
                text(&each["reason"]),
                text(&each["status"]),
                span(each["seconds_ago"].as_f64()),
                place.join(", ")
            );
            paint.line(&mut out, &line, "");
        }
    }
    Ok(out)
}

fn draw_pool(out: &mut String, pool: &Value, paint: &Paint) {
    let name = text(&pool["name"]);
    if pool["mode"].is_null() {
        return paint.line(out, &format!("{name}   does not answer"), "31");
    }
    let overload = pool["mode"] == "overload";
    let order = if overload { format!("OVERLOAD ({} by work alone)", text(&pool["policy"])) } else { text(&pool["policy"]) };
    let (gamma, within) = (pool["gamma_per_second"].as_f64().unwrap_or(0.0), span(pool["max_overtake_seconds"].as_f64()));
    paint.line(out, &format!("{name}   {order}   gamma {gamma:.2e}/s   overtakes by {within} at most"), if overload { "1;31" } else { "1" });
    let (recent, pair) = (&pool["recent"], |what: &Value| format!("{} p99 {}", span(what["p50"].as_f64()), span(what["p99"].as_f64())));
    let line = format!(
        "{} wait, {} aged   {} in flight   first token {}   last token {}   {:.1}/s answered, {:.1}/s failed   started in {}",
        text(&pool["waiting"]),
        text(&pool["aged"]),
        text(&pool["in_flight"]),
        pair(&recent["ttft"]),
        pair(&recent["ttlt"]),
        recent["answered_per_second"].as_f64().unwrap_or(0.0),
        recent["failed_per_second"].as_f64().unwrap_or(0.0),
        span(pool["backlog_seconds"].as_f64()),
    );
    paint.line(out, &line, "");
    let tau = |model: &Value| model["tau"].as_f64().map_or("unknown".to_owned(), |tau| format!("{tau:.2}"));
    for model in pool["models"].as_array().into_iter().flatten() {
        let trusted = if model["trusted"] == true { "trusted" } else { "not trusted" };
        let line =
            format!("scores of {}: tau {}, {trusted}, {:.0} answers", text(&model["model"]), tau(model), model["samples"].as_f64().unwrap_or(0.0));
        paint.line(out, &line, "2");
    }
    paint.line(out, "BACKEND                   STANDING    SLOTS    KV  INSIDE  WAITING", "2");
    let backends = || pool["backends"].as_array().into_iter().flatten();
    let tokens = |request: &Value| request[1].as_f64().unwrap_or(0.0);
    let most = backends().flat_map(|backend| backend["queue"].as_array().into_iter().flatten()).map(tokens).fold(64.0, f64::max);
    for backend in backends() {
        let unknown = |value: &Value| if value.is_null() { "?".to_owned() } else { text(value) };
        let kv = backend["engine_kv_used"].as_f64().map_or("?".to_owned(), |used| format!("{:.0}%", used * 100.0));
        let url = text(&backend["url"]);
        let start = format!(
            "{:<24}  {:<9}  {:>6}  {:>4}  {:>6}  {:>7}  ",
            url.split_once("://").map_or(url.as_str(), |(_, address)| address),
            text(&backend["standing"]),
            format!("{}/{}", text(&backend["in_flight"]), text(&backend["window"])),
            kv,
            unknown(&backend["engine_waiting"]),
            text(&backend["waiting"]),
        );
        let queue = backend["queue"].as_array().map_or(&[][..], Vec::as_slice);
        let room = paint.columns.saturating_sub(start.chars().count());
        let _ = out.write_str(&paint.painted(&cut(&start, paint.columns), if backend["standing"] == "healthy" { "" } else { "31" }));
        for request in queue.iter().take(room) {
            let step = (tokens(request).max(4.0) / 4.0).ln() / (most / 4.0).ln() * 7.0;
            let bar = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][(step.round() as usize).min(7)];
            out.push_str(&paint.painted(&bar.to_string(), if request[3] == 1 { "33" } else { "34" }));
        }
        out.push('\n');
    }
}

/// How lines get on the screen.
struct Paint {
    colour: bool,
    columns: usize,
}

impl Paint {
    /// In the rendition of an ANSI code, where there are colours.
    fn painted(&self, text: &str, code: &str) -> String {
        if self.colour && !code.is_empty() { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn line(&self, out: &mut String, line: &str, code: &str) {
        out.push_str(&self.painted(&cut(line, self.columns), code));
        out.push('\n');
    }
}

fn cut(line: &str, columns: usize) -> String {
    line.chars().take(columns).collect()
}

/// A value as people read it. Ids and names are others' choice: what could steer a terminal is left out.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.chars().filter(|letter| !letter.is_control()).collect(),
        Value::Null => "-".to_owned(),
        other => other.to_string(),
    }
}

fn span(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".to_owned(),
        Some(seconds) if seconds < 0.1 => format!("{:.0} ms", seconds * 1e3),
        Some(seconds) if seconds < 10.0 => format!("{seconds:.2} s"),
        Some(seconds) if seconds < 100.0 => format!("{seconds:.1} s"),
        Some(seconds) if seconds < 5400.0 => format!("{:.0} min", seconds / 60.0),
        Some(seconds) => format!("{:.1} h", seconds / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn now() -> Value {
        let queue = json!([["a", 8, 1.5, 0], ["b", 900, 130.0, 1]]);
        let backend = json!({ "url": "http://10.0.0.1:8000", "standing": "healthy", "in_flight": 3, "window": 4, "engine_kv_used": 0.251, "engine_waiting": null, "waiting": 2, "queue": queue });
        let recent = json!({ "ttft": { "p50": 0.05, "p99": 2.5 }, "ttlt": null, "answered_per_second": 3.21, "failed_per_second": 0.0 });
        let models = json!([{ "model": "m", "tau": 0.5, "trusted": true, "samples": 700.4 }]);
        let pool = json!({ "name": "chat", "policy": "headway", "mode": "overload", "gamma_per_second": 0.012, "max_overtake_seconds": 200.0, "waiting": 2, "aged": 1,
            "in_flight": 3, "backlog_seconds": 12.0, "recent": recent, "models": models, "backends": [backend] });
        let failure = json!({ "times": 4, "reason": "queue_\u{1b}[2Jfull", "status": 429, "seconds_ago": 75.0, "pool": "chat", "model": "m\u{1b}]52;", "backend": null });
        json!({ "version": "1.2.3", "draining": false, "config": { "error": null }, "pools": [pool, { "name": "quiet" }], "failures": [failure] })
    }

    #[test]
    fn one_look_has_all_of_it() {
        let drawn = drawing(&now(), None, 160, false).unwrap();
        for part in [
            "chat   OVERLOAD (headway by work alone)   gamma 1.20e-2/s   overtakes by 3 min at most",
            "2 wait, 1 aged   3 in flight   first token 50 ms p99 2.50 s   last token - p99 -   3.2/s answered, 0.0/s failed   started in 12.0 s",
            "scores of m: tau 0.50, trusted, 700 answers",
            "10.0.0.1:8000             healthy       3/4   25%       ?        2  ▂█",
            "quiet   does not answer",
            "    4  queue_[2Jfull              429   75.0 s ago chat, m]52;",
        ] {
            assert!(drawn.contains(part), "{part} is not in\n{drawn}");
        }
        assert!(!drawn.contains('\x1b'), "no colour was asked for, and nobody else steers the terminal");
    }

    #[test]
    fn a_narrow_terminal_is_not_overrun() {
        let drawn = drawing(&now(), Some("chat"), 40, false).unwrap();
        assert!(drawn.lines().all(|line| line.chars().count() <= 40), "{drawn}");
        assert!(drawing(&now(), None, 160, true).unwrap().contains("\x1b[33m█\x1b[0m"), "aged ones have a colour");
        let error = drawing(&now(), Some("none"), 80, false).unwrap_err().to_string();
        assert!(error.contains("there are: chat, quiet"), "{error}");
    }
}
