//! The two ends of the comparison: a mock upstream and a load generator, each one thread around epoll, so that neither is what is measured.
//!
//! `rustc -O --edition 2024 wire.rs` builds it; run.py does. Only the standard library and five calls of Linux's C library.
//!
//! ```text
//! wire mock ADDRESS                   answers by the marker in a request's body, see `Script`
//! wire load ADDRESS OPTION VALUE ...  one measurement, printed as one line of JSON; see `Load::parse`
//! wire idle ADDRESS COUNT             opens that many connections, prints how many are open, holds them until its input ends
//! ```

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["mock", address] => mock(address.parse()?),
        ["load", address, options @ ..] => load(&Load::parse(address.parse()?, options)?),
        ["idle", address, count] => idle(address.parse()?, count.parse()?),
        _ => Err("usage: wire mock ADDRESS | wire load ADDRESS OPTION VALUE ... | wire idle ADDRESS COUNT".into()),
    }
}

// --- epoll ---

/// The kernel's `struct epoll_event`, which is packed on x86-64 alone.
#[derive(Clone, Copy)]
#[cfg_attr(target_arch = "x86_64", repr(C, packed))]
#[cfg_attr(not(target_arch = "x86_64"), repr(C))]
struct Event {
    flags: u32,
    token: u64,
}

/// The kernel's `struct timespec` on 64-bit machines.
#[repr(C)]
struct Timespec {
    seconds: i64,
    nanos: i64,
}

unsafe extern "C" {
    fn epoll_create1(flags: i32) -> RawFd;
    fn listen(file: RawFd, backlog: i32) -> i32;
    fn epoll_ctl(epoll: RawFd, operation: i32, file: RawFd, event: *mut Event) -> i32;
    fn epoll_pwait2(epoll: RawFd, events: *mut Event, capacity: i32, timeout: *const Timespec, mask: *const u8) -> i32;
    fn prctl(option: i32, argument: u64) -> i32;
}

const READ: u32 = 1;
const WRITE: u32 = 4;
const EDGE: u32 = 1 << 31;
const ADD: i32 = 1;
const SET_TIMERSLACK: i32 = 29;

struct Poll {
    file: OwnedFd,
    events: Vec<Event>,
}

impl Poll {
    fn new() -> io::Result<Self> {
        // SAFETY: the call takes no pointer; a result below 0 is an error, otherwise a file that is ours alone.
        let file = unsafe { epoll_create1(0) };
        if file < 0 {
            return Err(io::Error::last_os_error());
        }
        // Timers late by up to 50 us, the default, would show in every figure.
        // SAFETY: this option takes a number.
        unsafe { prctl(SET_TIMERSLACK, 1) };
        // SAFETY: just made.
        Ok(Self { file: unsafe { OwnedFd::from_raw_fd(file) }, events: vec![Event { flags: 0, token: 0 }; 1024] })
    }

    fn add(&self, file: &impl AsRawFd, token: usize, flags: u32) -> io::Result<()> {
        let mut event = Event { flags, token: token as u64 };
        // SAFETY: the event outlives the call.
        if unsafe { epoll_ctl(self.file.as_raw_fd(), ADD, file.as_raw_fd(), &raw mut event) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }

    /// Tokens of files that are ready, at most at `until`.
    fn wait(&mut self, until: Option<Instant>) -> io::Result<impl Iterator<Item = usize> + '_> {
        let timeout = until.map(|until| {
            let left = until.saturating_duration_since(Instant::now());
            Timespec { seconds: left.as_secs() as i64, nanos: i64::from(left.subsec_nanos()) }
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the vector has as many initialised elements as are told, and the timeout outlives the call.
        let count = unsafe { epoll_pwait2(self.file.as_raw_fd(), self.events.as_mut_ptr(), self.events.len() as i32, timeout, std::ptr::null()) };
        let count = match usize::try_from(count) {
            Ok(count) => count,
            Err(_) if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => 0,
            Err(_) => return Err(io::Error::last_os_error()),
        };
        Ok(self.events[..count].iter().map(|event| event.token as usize))
    }
}

// --- HTTP/1.1 ---

/// What is known of a message that comes in, and how much of its body is still to come.
#[derive(Default)]
struct Message {
    /// The request line or status line with the headers; empty until it is whole.
    head: String,
    body: Body,
    /// Bytes of the body itself, without what frames it.
    length: usize,
    done: bool,
}

#[derive(Default)]
enum Body {
    #[default]
    Unknown,
    Length(usize),
    /// Bytes left of the present chunk with its line end; 0 before its size.
    Chunk(usize),
    /// After the last chunk.
    Trailer,
}

impl Message {
    /// Takes what it can from the front of `input` and tells how much; hands what belongs to the body to `body`.
    fn take(&mut self, input: &[u8], mut body: impl FnMut(&[u8])) -> Result<usize, &'static str> {
        let mut at = 0;
        while !self.done {
            let rest = &input[at..];
            match &mut self.body {
                Body::Unknown => {
                    let Some(end) = find(rest, b"\r\n\r\n") else { break };
                    self.head = String::from_utf8_lossy(&rest[..end + 2]).to_ascii_lowercase();
                    at += end + 4;
                    self.body = if header(&self.head, "transfer-encoding").is_some_and(|value| value.ends_with("chunked")) {
                        Body::Chunk(0)
                    } else if let Some(length) = header(&self.head, "content-length") {
                        Body::Length(length.parse().map_err(|_| "content-length is no number")?)
                    } else if self.head.starts_with("http/") {
                        return Err("an answer without a length");
                    } else {
                        Body::Length(0)
                    };
                    self.done = matches!(self.body, Body::Length(0));
                }
                Body::Length(left) => {
                    let count = rest.len().min(*left);
                    if count == 0 {
                        break;
                    }
                    body(&rest[..count]);
                    self.length += count;
                    *left -= count;
                    at += count;
                    self.done = *left == 0;
                }
                Body::Chunk(0) => {
                    let Some(end) = rest.iter().take(32).position(|&byte| byte == b'\n') else {
                        if rest.len() >= 32 {
                            return Err("no size of a chunk where one must be");
                        }
                        break;
                    };
                    let size = std::str::from_utf8(&rest[..end]).ok().and_then(|line| usize::from_str_radix(line.trim().split(';').next()?, 16).ok());
                    at += end + 1;
                    self.body = match size.ok_or("the size of a chunk is no number")? {
                        0 => Body::Trailer,
                        size => Body::Chunk(size + 2),
                    };
                }
                Body::Chunk(left) => {
                    let count = rest.len().min(*left);
                    if count == 0 {
                        break;
                    }
                    // The last two bytes are the line end.
                    let data = count.min(left.saturating_sub(2));
                    body(&rest[..data]);
                    self.length += data;
                    *left -= count;
                    at += count;
                }
                Body::Trailer => {
                    let Some(end) = rest.iter().position(|&byte| byte == b'\n') else { break };
                    at += end + 1;
                    self.done = end <= 1;
                }
            }
        }
        Ok(at)
    }
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.split("\r\n").skip(1).find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// Writes what the socket takes of `output` from `written` on; both are reset when all of it is out.
fn flush(stream: &mut TcpStream, output: &mut Vec<u8>, written: &mut usize) -> io::Result<()> {
    while *written < output.len() {
        match stream.write(&output[*written..]) {
            Ok(count) => *written += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    output.clear();
    *written = 0;
    Ok(())
}

// --- the mock ---

/// What a request asks for. `mock=CHUNKS-GAP` in its body (run.py begins the message with it) is an event stream of so many chunks, so many
/// microseconds apart; with a gap of 0 all of them go out in as few writes as the socket takes. 0 chunks are one JSON object, and so is a body without it.
struct Script {
    chunks: usize,
    gap: Duration,
}

impl Script {
    fn of(body: &[u8]) -> Option<Self> {
        const MARKER: &[u8] = b"mock=";
        let at = find(body, MARKER)?;
        let value = body[at + MARKER.len()..].iter().copied().take_while(|byte| byte.is_ascii_digit() || *byte == b'-').collect();
        let value = String::from_utf8(value).ok()?;
        let (chunks, gap) = value.split_once('-')?;
        Some(Self { chunks: chunks.parse().ok()?, gap: Duration::from_micros(gap.parse().ok()?) })
    }
}

struct Upstream {
    stream: TcpStream,
    input: Vec<u8>,
    body: Vec<u8>,
    message: Message,
    output: Vec<u8>,
    written: usize,
    /// Chunks of a paced stream that are still to come.
    left: usize,
    gap: Duration,
}

/// What is to come of a connection.
enum Turn {
    Drained,
    /// The socket may have more.
    More,
    /// The first chunk is due then.
    Paced(Instant),
}

/// The parts of answers, framed.
struct Answers {
    json: Vec<u8>,
    models: Vec<u8>,
    /// The head of a stream and its first event, which names the role alone, as engines send it.
    stream: Vec<u8>,
    /// One word each, of the same length; LiteLLM takes a hundred equal ones for a loop of the model.
    chunks: [Vec<u8>; 4],
    last: Vec<u8>,
}

impl Answers {
    fn new() -> Self {
        let content = "lorem ipsum ".repeat(60);
        let json = format!(
            r#"{{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"mock","choices":[{{"index":0,"message":{{"role":"assistant","content":"{content}"}},"finish_reason":"stop"}}],"usage":{{"prompt_tokens":10,"completion_tokens":120,"total_tokens":130}}}}"#
        );
        let event = |delta: &str, end: &str| {
            format!(
                r#"data: {{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"mock","choices":[{{"index":0,"delta":{delta},"finish_reason":{end}}}]}}"#
            ) + "\n\n"
        };
        let framed = |text: String| format!("{:x}\r\n{text}\r\n", text.len());
        let whole =
            |json: &str| format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{json}", json.len()).into_bytes();
        Self {
            json: whole(&json),
            models: whole(r#"{"object":"list","data":[{"id":"mock","object":"model","created":1,"owned_by":"mock","max_model_len":1000000}]}"#),
            stream: (String::from("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                + &framed(event(r#"{"role":"assistant","content":""}"#, "null")))
                .into_bytes(),
            chunks: [" some", " more", " long", " word"].map(|word| framed(event(&format!(r#"{{"content":"{word}"}}"#), "null")).into_bytes()),
            last: (framed(event("{}", r#""stop""#) + "data: [DONE]\n\n") + "0\r\n\r\n").into_bytes(),
        }
    }
}

fn mock(address: SocketAddr) -> Result<(), Error> {
    const LISTENER: usize = usize::MAX;
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    // Of the 128 that the standard library lets wait, a burst would leave some over, which come back after a second.
    // SAFETY: the call takes no pointer, and the file is the listener's.
    if unsafe { listen(listener.as_raw_fd(), 4096) } < 0 {
        return Err(io::Error::last_os_error().into());
    }
    let mut poll = Poll::new()?;
    poll.add(&listener, LISTENER, READ)?;
    let answers = Answers::new();
    let mut connections: Vec<Option<Upstream>> = Vec::new();
    let mut free: Vec<usize> = Vec::new();
    // When which connection's next chunk is due. An entry outlives its connection and may give the place's next owner a chunk early: only after a failure, which is counted.
    let mut timers: BinaryHeap<Reverse<(Instant, usize)>> = BinaryHeap::new();
    let mut ready: Vec<usize> = Vec::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        let until = if ready.is_empty() { timers.peek().map(|Reverse((due, _))| *due) } else { Some(Instant::now()) };
        ready.extend(poll.wait(until)?);
        for token in std::mem::take(&mut ready) {
            if token == LISTENER {
                while let Ok((stream, _)) = listener.accept() {
                    stream.set_nonblocking(true)?;
                    stream.set_nodelay(true)?;
                    let place = free.pop().unwrap_or_else(|| {
                        connections.push(None);
                        connections.len() - 1
                    });
                    poll.add(&stream, place, READ | WRITE | EDGE)?;
                    connections[place] = Some(Upstream {
                        stream,
                        input: Vec::new(),
                        body: Vec::new(),
                        message: Message::default(),
                        output: Vec::new(),
                        written: 0,
                        left: 0,
                        gap: Duration::ZERO,
                    });
                }
                continue;
            }
            let Some(upstream) = &mut connections[token] else { continue };
            match upstream.serve(&answers, &mut buffer) {
                Ok(Turn::Drained) => {}
                Ok(Turn::More) => ready.push(token),
                Ok(Turn::Paced(due)) => timers.push(Reverse((due, token))),
                Err(_) => {
                    connections[token] = None;
                    free.push(token);
                }
            }
        }
        let now = Instant::now();
        while let Some(&Reverse((due, token))) = timers.peek().filter(|Reverse((due, _))| *due <= now) {
            timers.pop();
            let Some(upstream) = connections[token].as_mut().filter(|upstream| upstream.left > 0) else { continue };
            upstream.left -= 1;
            upstream.output.extend_from_slice(&answers.chunks[upstream.left % answers.chunks.len()]);
            if upstream.left > 0 {
                timers.push(Reverse((due + upstream.gap, token)));
            } else {
                upstream.output.extend_from_slice(&answers.last);
            }
            if flush(&mut upstream.stream, &mut upstream.output, &mut upstream.written).is_err() {
                connections[token] = None;
                free.push(token);
            }
        }
    }
}

impl Upstream {
    /// Reads and answers until the socket has no more, it is another's turn, or the answer is a paced one.
    fn serve(&mut self, answers: &Answers, buffer: &mut [u8]) -> io::Result<Turn> {
        flush(&mut self.stream, &mut self.output, &mut self.written)?;
        for _ in 0..4 {
            let count = match self.stream.read(buffer) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Turn::Drained),
                Err(error) => return Err(error),
            };
            self.input.extend_from_slice(&buffer[..count]);
            loop {
                let body = &mut self.body;
                let taken = self.message.take(&self.input, |data| body.extend_from_slice(data)).map_err(io::Error::other)?;
                self.input.drain(..taken);
                if !self.message.done {
                    break;
                }
                let message = std::mem::take(&mut self.message);
                if message.head.starts_with("get ") {
                    self.output.extend_from_slice(&answers.models);
                } else if let Some(script) = Script::of(&self.body).filter(|script| script.chunks > 0) {
                    self.output.extend_from_slice(&answers.stream);
                    if script.gap.is_zero() {
                        for left in (0..script.chunks).rev() {
                            self.output.extend_from_slice(&answers.chunks[left % answers.chunks.len()]);
                        }
                        self.output.extend_from_slice(&answers.last);
                    } else {
                        (self.left, self.gap) = (script.chunks, script.gap);
                        self.body.clear();
                        flush(&mut self.stream, &mut self.output, &mut self.written)?;
                        // Nothing more comes before the answer's end: none of the peers pipelines.
                        return Ok(Turn::Paced(Instant::now() + script.gap));
                    }
                } else {
                    self.output.extend_from_slice(&answers.json);
                }
                self.body.clear();
                flush(&mut self.stream, &mut self.output, &mut self.written)?;
            }
        }
        Ok(Turn::More)
    }
}

// --- the load ---

struct Load {
    address: SocketAddr,
    /// At most so many connections at once.
    connections: usize,
    /// New requests start for so long; what runs then is waited for.
    duration: Duration,
    /// Arrivals a second at random moments (a Poisson process), whatever the answers do; 0: each connection asks again as soon as it has its answer.
    rate: f64,
    /// In place of `rate`: when which arrival is due, after the start; the load ends with the last.
    schedule: Vec<Duration>,
    /// Whole requests, asked in turn.
    requests: Vec<Vec<u8>>,
    /// What every answer's body must have, unless 0.
    expect: usize,
    /// Whether the body of the first answer is printed as well.
    show: bool,
    /// Whether every answer's times are printed, in the order of arrivals, with the end of its body.
    each: bool,
}

impl Load {
    /// `connections N`, `seconds S`, `rate R`, `body FILE` (as often as wanted), `keys FILE` (one a line, in turn), `expect BYTES`, `show 1`,
    /// `schedule FILE` (seconds, one a line), `each 1`, `path PATH`.
    fn parse(address: SocketAddr, options: &[&str]) -> Result<Self, Error> {
        let mut load = Self {
            address,
            connections: 1,
            duration: Duration::from_secs(1),
            rate: 0.0,
            schedule: Vec::new(),
            requests: Vec::new(),
            expect: 0,
            show: false,
            each: false,
        };
        let mut bodies = Vec::new();
        let mut path = "/v1/chat/completions";
        let mut keys = vec![String::new()];
        for option in options.chunks(2) {
            let &[name, value] = option else { return Err(format!("{} needs a value", option[0]).into()) };
            match name {
                "connections" => load.connections = value.parse()?,
                "seconds" => load.duration = Duration::from_secs_f64(value.parse()?),
                "rate" => load.rate = value.parse()?,
                "path" => path = value,
                "body" => bodies.push(std::fs::read(value)?),
                "keys" => keys = std::fs::read_to_string(value)?.lines().map(|key| format!("authorization: Bearer {key}\r\n")).collect(),
                "expect" => load.expect = value.parse()?,
                "show" => load.show = value == "1",
                "each" => load.each = value == "1",
                "schedule" => {
                    let times = std::fs::read_to_string(value)?.lines().map(|line| Ok(Duration::from_secs_f64(line.parse()?))).collect::<Result<
                        Vec<_>,
                        Error,
                    >>(
                    )?;
                    load.duration = times.last().copied().unwrap_or_default() + Duration::from_nanos(1);
                    load.schedule = times;
                }
                _ => return Err(format!("no option is called {name}").into()),
            }
        }
        if bodies.is_empty() {
            return Err("body FILE is missing".into());
        }
        for at in 0..keys.len().max(bodies.len()) {
            let (body, key) = (&bodies[at % bodies.len()], &keys[at % keys.len()]);
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\naccept: */*\r\n{key}content-length: {}\r\n\r\n",
                body.len()
            );
            load.requests.push([head.as_bytes(), body].concat());
        }
        Ok(load)
    }

    /// When requests are due; none in a closed loop.
    fn arrivals(&self, start: Instant) -> VecDeque<Instant> {
        if !self.schedule.is_empty() {
            return self.schedule.iter().map(|offset| start + *offset).collect();
        }
        let mut arrivals = VecDeque::new();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let mut at = start;
        while self.rate > 0.0 && at < start + self.duration {
            arrivals.push_back(at);
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let uniform = ((random >> 11) as f64 + 1.0) / (1_u64 << 53) as f64;
            at += Duration::from_secs_f64(-uniform.ln() / self.rate);
        }
        arrivals
    }
}

/// How much of the end of a body is kept where it is wanted: an event stream's usage is in it.
const TAIL: usize = 1024;

struct Client {
    stream: TcpStream,
    /// Which of the arrivals it works on.
    number: usize,
    written: usize,
    input: Vec<u8>,
    message: Message,
    /// The end of the body, if it is wanted.
    tail: Vec<u8>,
    /// When the request it works on was due; none while it is idle.
    due: Option<Instant>,
    /// From then to the first byte of the body.
    first: Option<Duration>,
}

/// How far a client's request is.
enum Progress {
    Waits,
    Answered,
    /// Answered, and the other side closes the connection, as it may.
    Closes,
}

/// What came of the requests.
#[derive(Default)]
struct Outcome {
    /// Number of the arrival, the two times, the end of the body.
    each: Vec<(usize, u32, u32, Vec<u8>)>,
    first_us: Vec<u32>,
    last_us: Vec<u32>,
    bytes: usize,
    failed: BTreeMap<String, usize>,
    shown: Option<Vec<u8>>,
}

impl Outcome {
    fn fail(&mut self, why: impl Into<String>) {
        *self.failed.entry(why.into()).or_default() += 1;
    }
}

fn load(load: &Load) -> Result<(), Error> {
    const PATIENCE: Duration = Duration::from_secs(30);
    let mut poll = Poll::new()?;
    let mut clients: Vec<Option<Client>> = Vec::new();
    let mut idle: Vec<usize> = Vec::new();
    // What is due and not sent yet, with its number.
    let mut backlog: VecDeque<(Instant, usize)> = VecDeque::new();
    let mut outcome = Outcome::default();
    let mut shown = load.show.then(Vec::new);
    let mut next = 0;
    let mut running = 0_usize;
    let mut ready: Vec<usize> = Vec::new();
    let mut buffer = vec![0; 256 << 10];
    let start = Instant::now();
    let end = start + load.duration;
    let mut arrivals = load.arrivals(start);
    let closed = arrivals.is_empty();
    if closed {
        backlog.extend((0..load.connections).map(|number| (start, number)));
        next = load.connections;
    }
    loop {
        let now = Instant::now();
        while let Some(arrival) = arrivals.pop_front_if(|arrival| *arrival <= now) {
            backlog.push_back((arrival, next));
            next += 1;
        }
        while !backlog.is_empty() {
            let place = match idle.pop() {
                Some(place) => place,
                None if running >= load.connections => break,
                None => {
                    let place = clients.iter().position(Option::is_none).unwrap_or_else(|| {
                        clients.push(None);
                        clients.len() - 1
                    });
                    let stream = TcpStream::connect(load.address)?;
                    stream.set_nonblocking(true)?;
                    stream.set_nodelay(true)?;
                    poll.add(&stream, place, READ | WRITE | EDGE)?;
                    clients[place] = Some(Client {
                        stream,
                        number: 0,
                        written: 0,
                        input: Vec::new(),
                        message: Message::default(),
                        tail: Vec::new(),
                        due: None,
                        first: None,
                    });
                    place
                }
            };
            let Some(client) = &mut clients[place] else { continue };
            let Some((due, number)) = backlog.pop_front() else { break };
            // A closed loop has no schedule: its requests are due when they are sent.
            client.due = Some(if closed { Instant::now() } else { due });
            (client.number, client.written, client.first, client.message) = (number, 0, None, Message::default());
            client.tail.clear();
            running += 1;
            ready.push(place);
        }
        let now = Instant::now();
        if running == 0 && backlog.is_empty() && now >= end {
            break;
        }
        if now > end + PATIENCE {
            for _ in 0..running + backlog.len() {
                outcome.fail("no answer 30 s after the end");
            }
            break;
        }
        // Asked in every turn, also with requests at hand, so that no connection starves another.
        let wake = if !ready.is_empty() {
            now
        } else if let Some(&arrival) = arrivals.front() {
            arrival
        } else if now < end {
            end
        } else {
            now + Duration::from_secs(1)
        };
        ready.extend(poll.wait(Some(wake))?);
        for place in std::mem::take(&mut ready) {
            let Some(client) = &mut clients[place] else { continue };
            let busy = client.due.is_some();
            match client.advance(load, &mut buffer, &mut outcome, &mut shown) {
                Ok(Progress::Waits) => {}
                Ok(progress) => {
                    running -= 1;
                    match progress {
                        Progress::Closes => clients[place] = None,
                        _ => idle.push(place),
                    }
                    if closed && now < end {
                        backlog.push_back((now, next));
                        next += 1;
                    }
                }
                Err(error) => {
                    clients[place] = None;
                    idle.retain(|&other| other != place);
                    if busy {
                        outcome.fail(error);
                        running -= 1;
                        if closed && now < end {
                            backlog.push_back((now, next));
                            next += 1;
                        }
                    }
                }
            }
        }
    }
    println!("{}", outcome.json(start.elapsed()));
    Ok(())
}

impl Client {
    /// Writes and reads what the socket takes and has.
    fn advance(&mut self, load: &Load, buffer: &mut [u8], outcome: &mut Outcome, shown: &mut Option<Vec<u8>>) -> Result<Progress, String> {
        let request = &load.requests[self.number % load.requests.len()];
        while self.due.is_some() && self.written < request.len() {
            match self.stream.write(&request[self.written..]) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(format!("write: {}", error.kind())),
            }
        }
        loop {
            let count = match self.stream.read(buffer) {
                Ok(0) => return Err("closed before the end of the answer".into()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Progress::Waits),
                Err(error) => return Err(format!("read: {}", error.kind())),
            };
            let Some(due) = self.due else { return Err("bytes without a request".into()) };
            self.input.extend_from_slice(&buffer[..count]);
            let tail = &mut self.tail;
            let taken = self.message.take(&self.input, |data| {
                if let Some(shown) = shown.as_mut() {
                    shown.extend_from_slice(data);
                }
                if load.each {
                    tail.drain(..(tail.len() + data.len()).saturating_sub(TAIL).min(tail.len()));
                    tail.extend_from_slice(&data[data.len().saturating_sub(TAIL)..]);
                }
            })?;
            self.input.drain(..taken);
            if self.message.length > 0 && self.first.is_none() {
                self.first = Some(due.elapsed());
            }
            if !self.message.done {
                continue;
            }
            let last = due.elapsed();
            self.due = None;
            if let Some(body) = shown.take() {
                outcome.shown = Some(body);
            }
            let status = self.message.head.get(9..12).unwrap_or("?");
            if status != "200" {
                outcome.fail(format!("status {status}"));
            } else if load.expect > 0 && self.message.length != load.expect {
                outcome.fail(format!("{} bytes where {} belong", self.message.length, load.expect));
            } else {
                let (first, last) = (micros(self.first.unwrap_or(last)), micros(last));
                outcome.first_us.push(first);
                outcome.last_us.push(last);
                if load.each {
                    outcome.each.push((self.number, first, last, std::mem::take(&mut self.tail)));
                }
            }
            outcome.bytes += self.message.length;
            let closes = header(&self.message.head, "connection") == Some("close");
            return Ok(if closes { Progress::Closes } else { Progress::Answered });
        }
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}

impl Outcome {
    fn json(mut self, elapsed: Duration) -> String {
        let mut text = format!(r#"{{"ok":{},"seconds":{:.6},"bytes":{}"#, self.last_us.len(), elapsed.as_secs_f64(), self.bytes);
        for (name, values) in [("first_us", &mut self.first_us), ("last_us", &mut self.last_us)] {
            values.sort_unstable();
            let at = |share: f64| values.get((values.len() as f64 * share) as usize).copied().unwrap_or(0);
            let mean = values.iter().fold(0.0, |sum, &value| sum + f64::from(value)) / values.len().max(1) as f64;
            let _ = write!(text, r#","{name}":{{"mean":{mean:.1},"p50":{},"p99":{}}}"#, at(0.5), at(0.99));
        }
        let failed: Vec<String> = self.failed.iter().map(|(why, count)| format!("{}:{count}", quoted(why.as_bytes()))).collect();
        let _ = write!(text, r#","failed":{{{}}}"#, failed.join(","));
        if !self.each.is_empty() {
            let each: Vec<String> =
                self.each.iter().map(|(number, first, last, tail)| format!("[{number},{first},{last},{}]", quoted(tail))).collect();
            let _ = write!(text, r#","each":[{}]"#, each.join(","));
        }
        if let Some(body) = &self.shown {
            let _ = write!(text, r#","body":{}"#, quoted(body));
        }
        text + "}"
    }
}

fn quoted(bytes: &[u8]) -> String {
    let mut text = String::from('"');
    for character in String::from_utf8_lossy(bytes).chars() {
        match character {
            '"' | '\\' => text.extend(['\\', character]),
            control if u32::from(control) < 32 => {
                let _ = write!(text, "\\u{:04x}", u32::from(control));
            }
            other => text.push(other),
        }
    }
    text + "\""
}

// --- idle connections ---

fn idle(address: SocketAddr, count: usize) -> Result<(), Error> {
    let connections = (0..count).map(|_| TcpStream::connect(address)).collect::<io::Result<Vec<_>>>()?;
    println!("{}", connections.len());
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
