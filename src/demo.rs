//! The embedded default: three simulated backends of different speed, the gateway in front, one bursty workload replayed under fcfs and under headway.
//!
//! Everything but the backends is the real thing: the listener, the ranker, the queues, and a client that streams over loopback sockets.

use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use headway::admin;
use headway::config::{self, BackendUrl, Pool, Snapshot};
use headway::engine::Profile;
use headway::engine::server::{Lengths, Server, ServerConfig};
use headway::gateway::Gateway;
use headway::proxy::Proxy;
use headway::proxy::server::{self, Options, Stop};
use headway::scheduler::Standing;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::serve;

/// One prompt of the workload and how long its answer is.
#[derive(Clone, Debug, Deserialize)]
struct Sample {
    /// What the client sends.
    pub prompt: String,
    /// Tokens of the answer, as one real model gave it.
    pub output_tokens: u32,
}

/// The prompts that ship with the binary; NOTICE names their sources.
fn samples() -> Vec<Sample> {
    include_str!("../examples/demo_prompts.jsonl")
        .lines()
        .map(|line| serde_json::from_str(line).expect("a test parses every line of the file that is built in"))
        .collect()
}

/// One request of the workload.
#[derive(Clone, Debug, PartialEq)]
struct Planned {
    /// When to send it, after the start of the run.
    pub at: Duration,
    /// Index into the samples.
    pub sample: usize,
}

/// `count` requests over about `span`, in bursts: with probability 0.6 a request follows the one before it at once, else after an exponential gap.
fn bursty(count: usize, span: Duration, samples: usize, seed: u64) -> Vec<Planned> {
    const TOGETHER: f64 = 0.6;
    let mut random = SplitMix64(seed);
    let gap_mean = span.as_secs_f64() / count as f64 / (1.0 - TOGETHER);
    let mut at = 0.0;
    (0..count)
        .map(|_| {
            if random.unit() >= TOGETHER {
                at -= gap_mean * (1.0 - random.unit()).ln();
            }
            Planned { at: Duration::from_secs_f64(at), sample: (random.next() % samples as u64) as usize }
        })
        .collect()
}

/// Steele, Lea and Flood's generator (OOPSLA 2014): enough to draw a workload by seed.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// What the client saw of one request.
#[derive(Clone, Copy, Debug)]
struct Seen {
    /// From sending to the first token.
    pub ttft: Duration,
    /// From sending to the last token.
    pub ttlt: Duration,
    /// Time in the gateway's queue, as its header says.
    pub queued: Duration,
}

/// Sends the plan to the gateway as it falls due and waits for every answer. `progress` is told (sent, answered, planned) twice a second.
async fn replay(
    gateway: SocketAddr,
    model: &'static str,
    samples: Arc<Vec<Sample>>,
    plan: &[Planned],
    mut progress: impl FnMut(usize, usize, usize),
) -> anyhow::Result<Vec<Seen>> {
    let start = Instant::now();
    let answered = Arc::new(AtomicUsize::new(0));
    let mut running = JoinSet::new();
    let mut ticker = tokio::time::interval(Duration::from_millis(500));
    let mut seen = Vec::with_capacity(plan.len());
    let mut next = 0;
    while next < plan.len() || !running.is_empty() {
        let due = plan.get(next).map(|planned| start + planned.at);
        tokio::select! {
            () = async { tokio::time::sleep_until(due.unwrap_or(start)).await }, if due.is_some() => {
                let (samples, answered, index) = (Arc::clone(&samples), Arc::clone(&answered), plan[next].sample);
                running.spawn(async move {
                    let seen = ask(gateway, model, &samples[index].prompt).await;
                    answered.fetch_add(1, Ordering::Relaxed);
                    seen
                });
                next += 1;
            }
            Some(result) = running.join_next() => seen.push(result.context("a request of the load panicked")??),
            _ = ticker.tick() => progress(next, answered.load(Ordering::Relaxed), plan.len()),
        }
    }
    progress(next, answered.load(Ordering::Relaxed), plan.len());
    Ok(seen)
}

/// One streamed chat completion, as a client sees it.
async fn ask(gateway: SocketAddr, model: &str, prompt: &str) -> anyhow::Result<Seen> {
    let body = serde_json::json!({ "model": model, "stream": true, "messages": [{ "role": "user", "content": prompt }] });
    let request = Request::post("/v1/chat/completions")
        .header("host", gateway.to_string())
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body.to_string())))
        .context("building a request")?;
    let start = Instant::now();
    let stream = TcpStream::connect(gateway).await.context("connecting to the gateway")?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // Ends by itself with the answer: `connection: close` is not needed, the sender is dropped.
    let driver = tokio::spawn(connection);
    let response = sender.send_request(request).await?;
    let status = response.status();
    let queued = response.headers().get("x-headway-queue-ms").and_then(|value| value.to_str().ok()?.parse::<f64>().ok()).unwrap_or(0.0);
    let mut body = response.into_body();
    let mut first = None;
    let mut tail = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        // The first event only names the role; the first token is the first content.
        if first.is_none() && find(&data, b"\"content\":\"").is_some_and(|at| data.get(at + 11) != Some(&b'"')) {
            first = Some(start.elapsed());
        }
        tail.extend_from_slice(&data);
        let excess = tail.len().saturating_sub(512);
        tail.drain(..excess);
    }
    drop(sender);
    driver.await.context("the connection's task")??;
    if !status.is_success() || find(&tail, b"[DONE]").is_none() {
        bail!("a request of the load failed: {status}: {}", String::from_utf8_lossy(&tail));
    }
    let ttlt = start.elapsed();
    Ok(Seen { ttft: first.unwrap_or(ttlt), ttlt, queued: Duration::from_secs_f64(queued / 1e3) })
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// Mean and percentiles of one quantity, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Summary {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile, nearest rank.
    pub p90: f64,
    /// 99th percentile, nearest rank.
    pub p99: f64,
}

impl Summary {
    /// Of at least one value.
    fn of(values: impl Iterator<Item = Duration>) -> Option<Summary> {
        let mut seconds: Vec<f64> = values.map(|value| value.as_secs_f64()).collect();
        seconds.sort_by(f64::total_cmp);
        let rank = |share: f64| seconds[((share * seconds.len() as f64).ceil() as usize).clamp(1, seconds.len()) - 1];
        let mean = seconds.iter().sum::<f64>() / seconds.len() as f64;
        (!seconds.is_empty()).then(|| Summary { mean, p50: rank(0.5), p90: rank(0.9), p99: rank(0.99) })
    }

    fn values(&self) -> [f64; 4] {
        [self.mean, self.p50, self.p90, self.p99]
    }
}

/// What `headway demo` takes.
#[derive(clap::Args)]
pub struct Args {
    /// Where clients connect
    #[arg(long, value_name = "ADDRESS", value_parser = config::address, default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    /// Where operators connect
    #[arg(long, value_name = "ADDRESS", value_parser = config::address, default_value = "127.0.0.1:9090")]
    admin: SocketAddr,
    /// A ranker's directory; by default models/pars, where that is found
    #[arg(long, value_name = "DIRECTORY")]
    ranker: Option<PathBuf>,
    /// Requests in each run
    #[arg(long, default_value_t = 460)]
    requests: usize,
    /// Seconds over which they arrive
    #[arg(long, default_value_t = 15)]
    seconds: u64,
    /// Draws the workload
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// End after the table instead of serving on
    #[arg(long)]
    once: bool,
}

/// The model that the simulated backends serve.
const MODEL: &str = "demo";
/// Seconds of the simulated engines in one real second.
const SPEED: f64 = 2.0;
/// Longer answers are left out, so that the last of them does not keep everybody waiting for a minute.
const LONGEST: u32 = 1200;
/// Answers of the warm-up are no longer than this.
const WARM_UP: u32 = 150;

/// The three backends: an engine profile and its slots.
fn fleet() -> [(&'static str, Profile); 3] {
    let with_slots = |profile: Profile, slots| Profile { max_num_seqs: slots, ..profile };
    [("large", with_slots(Profile::large(), 12)), ("medium", with_slots(Profile::medium(), 12)), ("small", with_slots(Profile::small(), 12))]
}

/// Runs the demo.
pub fn run(args: &Args) -> anyhow::Result<()> {
    if args.requests == 0 {
        bail!("--requests must be at least 1");
    }
    serve::log_to_stderr("warn", serve::LogFormat::Text);
    let runtime = serve::runtime()?;
    let samples: Arc<Vec<Sample>> = Arc::new(samples().into_iter().filter(|sample| sample.output_tokens <= LONGEST).collect());
    let mut lengths = Lengths::default();
    for sample in samples.iter() {
        lengths.insert(&sample.prompt, sample.output_tokens);
    }
    let mut engines = Vec::new();
    for (_, profile) in fleet() {
        let config = ServerConfig { models: vec![MODEL.to_owned()], profile, speed: SPEED, lengths: lengths.clone(), ..ServerConfig::default() };
        engines.push(runtime.block_on(Server::start(config))?);
    }
    let urls = engines.iter().map(|engine| engine.url().parse()).collect::<Result<Vec<BackendUrl>, _>>()?;
    let snapshot = serve::without_file(&urls, args.listen, args.admin, "fcfs", args.ranker.clone())?;
    let listener = server::Server::bind(snapshot.listen, None, Options { threads: 1, ..Options::default() })?;
    let address = listener.address();
    let gateway = runtime.block_on(Gateway::start(snapshot))?;
    runtime.block_on(admin::start(Arc::clone(&gateway), None, false))?;
    let (stop, stopped) = watch::channel(false);
    let edge = {
        let gateway = Arc::clone(&gateway);
        std::thread::spawn(move || listener.run(Arc::new(Proxy::new(gateway)), Stop::Told(stopped)))
    };
    let table = runtime.block_on(compare(args, address, &gateway, samples))?;
    println!("\n{table}");
    if !args.once {
        let prompt = r#"{"model":"demo","stream":true,"messages":[{"role":"user","content":"What is 2+2?"}]}"#;
        println!("The gateway serves on, under headway, until Ctrl-C. A client can be pointed at http://{address}/v1 (model `{MODEL}`, any key):\n");
        println!("  curl -N http://{address}/v1/chat/completions -H 'content-type: application/json' -d '{prompt}'\n");
        runtime.block_on(tokio::signal::ctrl_c()).context("waiting for Ctrl-C")?;
    }
    // A receiver that is gone has stopped already.
    let _ = stop.send(true);
    edge.join().map_err(|_| anyhow!("the listener's thread panicked"))??;
    Ok(())
}

/// The same workload under both policies, and what came of it.
async fn compare(args: &Args, address: SocketAddr, gateway: &Gateway, samples: Arc<Vec<Sample>>) -> anyhow::Result<String> {
    let plan = bursty(args.requests, Duration::from_secs(args.seconds), samples.len(), args.seed);
    let tokens: u64 = plan.iter().map(|planned| u64::from(samples[planned.sample].output_tokens)).sum();
    println!("Three simulated backends (large, medium, small GPU; 12 slots each; twice as fast as real ones), the gateway at http://{address},");
    println!("and one bursty workload, replayed twice: {} requests, {tokens} tokens, arriving over {} s.\n", plan.len(), args.seconds);
    healthy(gateway, fleet().len()).await?;
    let warm_up = warm_up(&samples, args.seconds, args.seed);
    replay(address, MODEL, Arc::clone(&samples), &warm_up, |sent, answered, planned| show_progress("warm-up", sent, answered, planned)).await?;
    println!();
    let mut runs = Vec::new();
    for policy in ["fcfs", "headway"] {
        let mut snapshot = Snapshot::clone(&gateway.live().snapshot);
        let policy_of_run = Arc::new(config::policy(policy)?);
        snapshot.pools = snapshot.pools.iter().map(|pool| Arc::new(Pool { policy: Arc::clone(&policy_of_run), ..Pool::clone(pool) })).collect();
        snapshot.policy = policy_of_run;
        gateway.apply(snapshot).await?;
        let seen =
            replay(address, MODEL, Arc::clone(&samples), &plan, |sent, answered, planned| show_progress(policy, sent, answered, planned)).await?;
        println!();
        runs.push((policy, seen));
    }
    Ok(table(&runs))
}

/// Short answers for a quarter of the time, so that no run has to find out how much the backends can hold.
fn warm_up(samples: &[Sample], seconds: u64, seed: u64) -> Vec<Planned> {
    let short: Vec<usize> = (0..samples.len()).filter(|index| samples[*index].output_tokens <= WARM_UP).collect();
    let mut plan = bursty(3 * short.len() / 2, Duration::from_secs(seconds) / 4, short.len(), seed + 1);
    for planned in &mut plan {
        planned.sample = short[planned.sample];
    }
    plan
}

/// Waits until the first probes have found every backend.
async fn healthy(gateway: &Gateway, backends: usize) -> anyhow::Result<()> {
    let live = gateway.live();
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let view = live.pools[0].dispatcher.view().await.context("the pool has ended")?;
        if view.backends.iter().filter(|backend| backend.standing == Standing::Healthy).count() == backends {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("the simulated backends were not found within 10 s");
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn show_progress(policy: &str, sent: usize, answered: usize, planned: usize) {
    if std::io::stdout().is_terminal() {
        print!("\r{policy:>8}: {sent} of {planned} sent, {answered} answered ");
        // A terminal that does not take it shows the next line.
        let _ = std::io::stdout().flush();
    } else if answered == planned {
        print!("{policy:>8}: {answered} of {planned} answered");
    }
}

/// What a block of the table shows: its name, and where it is found.
type Column = (&'static str, fn(&Seen) -> Duration);

/// Both runs side by side, in seconds, with the ratio of the second to the first.
fn table(runs: &[(&str, Vec<Seen>)]) -> String {
    let columns: [Column; 3] =
        [("TTLT (to the last token)", |seen| seen.ttlt), ("TTFT (to the first token)", |seen| seen.ttft), ("wait in the queue", |seen| seen.queued)];
    let mut text = format!("{:<26} {:<9} {:>8} {:>8} {:>8} {:>8}\n", "seconds", "policy", "mean", "p50", "p90", "p99");
    for (name, column) in columns {
        let summaries: Vec<(&str, Summary)> =
            runs.iter().filter_map(|(policy, seen)| Some((*policy, Summary::of(seen.iter().map(column))?))).collect();
        for (policy, summary) in &summaries {
            text += &row(name, policy, summary.values().map(|value| format!("{value:.2}")));
        }
        if let [(_, before), (_, after)] = summaries[..] {
            let ratios = std::array::from_fn(|index| format!("{:.2} x", after.values()[index] / before.values()[index].max(1e-3)));
            text += &row("", "ratio", ratios);
        }
    }
    text
}

fn row(name: &str, policy: &str, cells: [String; 4]) -> String {
    let [mean, p50, p90, p99] = cells;
    format!("{name:<26} {policy:<9} {mean:>8} {p50:>8} {p90:>8} {p99:>8}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shipped_prompts_parse_and_differ_in_length() {
        let samples = samples();
        let shortest = samples.iter().map(|sample| sample.output_tokens).min().unwrap();
        let longest = samples.iter().map(|sample| sample.output_tokens).max().unwrap();
        assert!(samples.len() >= 300 && longest >= 50 * shortest, "{} prompts, {shortest} to {longest} tokens", samples.len());
    }

    #[test]
    fn a_seed_decides_the_workload_and_its_span() {
        let plan = bursty(2000, Duration::from_secs(100), 50, 3);
        assert_eq!(plan, bursty(2000, Duration::from_secs(100), 50, 3));
        assert_ne!(plan, bursty(2000, Duration::from_secs(100), 50, 4));
        assert!(plan.is_sorted_by_key(|planned| planned.at) && plan.iter().all(|planned| planned.sample < 50));
        let span = plan[1999].at.as_secs_f64();
        assert!((80.0..120.0).contains(&span), "{span} s");
    }

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let summary = Summary::of((1..=100).map(Duration::from_secs)).unwrap();
        assert_eq!(summary, Summary { mean: 50.5, p50: 50.0, p90: 90.0, p99: 99.0 });
        assert_eq!(Summary::of(std::iter::empty()), None);
    }
}
