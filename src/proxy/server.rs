//! The server: pingora carries the worker threads and hands sockets over, rustls ends TLS, hyper speaks HTTP.
//!
//! pingora's own graceful shutdown sleeps for a fixed time and then cuts what still streams. Here a [`Shutdown`] waits for what is open, at most as long as
//! the configuration says, and only then ends pingora, quickly.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http::header::{CONNECTION, HeaderValue};
use http::{Request, Response, Version};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulConnection;
use pingora::server::configuration::ServerConf;
use pingora::server::{Fds, ListenFds, RunArgs, ShutdownSignal, ShutdownSignalWatch, ShutdownWatch};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, BufReader, ReadBuf};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

pub use super::connection::Uploading;
use super::connection::{Downstream, InProgress, Protocol, STALLED, Vitals};
use crate::config::{Edge, Tls};

/// Streams that one HTTP/2 connection may have open.
const STREAMS: u32 = 256;
/// How often an HTTP/2 client is asked whether it is alive.
const PING: Duration = Duration::from_secs(30);
/// A head that is larger than the limit by less than this factor is read and refused in the API's own words; one that is larger still, by a bare 431.
const OVER: usize = 2;
/// The least hyper takes as a buffer for a head.
const LEAST_HEAD: usize = 8 << 10;
/// How long connections are accepted and kept ones answered after the socket was handed over, each answer with `connection: close`.
const LEAVING: Duration = Duration::from_secs(5);
/// How long a connection that comes during a drain may take to begin, and a stream that is cut to say so.
const LATE: Duration = Duration::from_secs(1);
/// Connections that may wait to be accepted; Linux allows at most `net.core.somaxconn`. One that finds no room is tried again by its client's system after a
/// second, so the 128 of Rust's standard library would make a burst of clients wait that long.
const BACKLOG: i32 = 4096;
/// What is read at once of a TLS connection: rustls alone would read a record of this size, the largest there is, in pieces.
const RECORD: usize = 16 << 10;
/// How long nothing is accepted after the system had no file for another connection.
const NO_FILES: Duration = Duration::from_millis(100);
/// How long the handler may take for its last call.
const LAST: Duration = Duration::from_secs(5);

/// What answers the requests.
pub trait Handler: Send + Sync + 'static {
    /// The body of its answers.
    type Body: Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + Unpin + 'static;

    /// The server begins; connections are carried by `runtime`.
    fn begin(&self, runtime: Handle) -> impl Future<Output = ()> + Send;

    /// Answers one request of a connection that comes `from` there. The future, and then the body, are dropped when the client leaves: at once, after `uploading` is dropped.
    fn handle(self: Arc<Self>, request: Request<Incoming>, from: IpAddr, uploading: Uploading) -> impl Future<Output = Response<Self::Body>> + Send;

    /// The limits that hold now; asked once per connection.
    fn limits(&self) -> Edge;

    /// The process is asked to end: whoever asks whether it is ready shall hear no.
    fn start_drain(&self);

    /// Waits until nothing runs any more, at most `within`.
    fn drained(&self, within: Duration) -> impl Future<Output = ()> + Send;

    /// The time is over: what still runs shall end now, and say so.
    fn cut(&self);

    /// The last call, while the runtime still lives. `handed_over`: another process goes on with the same configuration.
    fn end(&self, handed_over: bool) -> impl Future<Output = ()> + Send;
}

/// Why the server does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("cannot listen on {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("cannot take over the socket for {address} through {}: {reason}", sock.display())]
    TakeOver { address: SocketAddr, sock: PathBuf, reason: String },
    #[error("{}: {reason}", path.display())]
    Certificate { path: PathBuf, reason: String },
}

/// How a server begins and ends, apart from what the configuration says.
#[derive(Debug, Default)]
pub struct Options {
    /// Where sockets are handed over, on SIGQUIT and at the start of a process that takes over.
    pub upgrade_sock: Option<PathBuf>,
    /// Take the socket of a running process over.
    pub upgrade: bool,
    /// Worker threads; 0 is one per core.
    pub threads: usize,
}

/// A bound server that does not run yet.
pub struct Server {
    address: SocketAddr,
    socket: TcpListener,
    tls: Option<TlsAcceptor>,
    options: Options,
}

/// Who ends the server.
pub enum Stop {
    /// SIGTERM and SIGINT drain and end it; SIGQUIT hands its socket over, drains and ends it.
    Signals,
    /// It drains and ends once this is true, or its sender gone.
    Told(watch::Receiver<bool>),
}

impl Server {
    /// Opens the listening socket, or takes it over from a running process, and reads the certificate.
    pub fn bind(listen: SocketAddr, tls: Option<Tls>, options: Options) -> Result<Server, ServerError> {
        let tls = tls.as_ref().map(acceptor).transpose()?;
        let (socket, address) = match (&options.upgrade_sock, options.upgrade) {
            (Some(sock), true) => (take_over(listen, sock)?, listen),
            _ => {
                let listening = || {
                    let listener = TcpListener::bind(listen)?;
                    listener.set_nonblocking(true)?;
                    SockRef::from(&listener).listen(BACKLOG)?;
                    let address = listener.local_addr()?;
                    Ok((listener, address))
                };
                listening().map_err(|source| ServerError::Listen { address: listen, source })?
            }
        };
        Ok(Server { address, socket, tls, options })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until it is stopped and drained. Blocks; must not be called on a tokio runtime.
    pub fn run<H: Handler>(self, handler: Arc<H>, stop: Stop) -> Result<(), ServerError> {
        let name = self.address.to_string();
        let phase = Arc::new(watch::Sender::new(Phase::Serving));
        let app = Arc::new(App { handler: Arc::clone(&handler), tls: self.tls, phase: Arc::clone(&phase) });
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if self.options.threads == 0 { cores } else { self.options.threads };
        let (accepting, accept) = watch::channel(false);
        let sockets = Arc::<Mutex<Option<ListenFds>>>::default();
        let service = Service { app, threads, name, socket: Some(self.socket), accept, sockets: Arc::clone(&sockets) };
        let shutdown = Shutdown { handler, stop, phase, accepting, upgrade_sock: self.options.upgrade_sock, sockets };

        // A thread that nobody could take work from needs no queues for it: its own are cheaper, and fair however many connections are ready at once.
        let conf = ServerConf { threads, work_stealing: threads > 1, ..ServerConf::default() };
        let mut server = pingora::server::Server::new_with_opt_and_conf(None, conf);
        server.bootstrap();
        server.add_service(service);
        server.run(RunArgs { shutdown_signal: Box::new(shutdown) });
        Ok(())
    }
}

/// Where a connection stands in the server's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum Phase {
    /// Business as usual.
    Serving,
    /// Answers say `connection: close`; nobody is cut off.
    Leaving,
    /// Connections end with their last answer, idle ones at once.
    Closing,
    /// What still runs ends now.
    Cutting,
}

/// A service of pingora's with a socket that is already open and an end of its own.
struct Service<H> {
    app: Arc<App<H>>,
    threads: usize,
    /// What the socket is called when it is handed over.
    name: String,
    /// Gone once it is listened on.
    socket: Option<TcpListener>,
    /// True once nothing more is accepted.
    accept: watch::Receiver<bool>,
    sockets: Arc<Mutex<Option<ListenFds>>>,
}

#[async_trait]
impl<H: Handler> pingora::services::Service for Service<H> {
    async fn start_service(&mut self, fds: Option<ListenFds>, _shutdown: ShutdownWatch, _listeners: usize) {
        self.app.handler.begin(Handle::current()).await;
        let Some(socket) = self.socket.take() else { return };
        if let Some(fds) = &fds {
            fds.lock().add(self.name.clone(), socket.as_raw_fd());
            *self.sockets.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(fds));
        }
        accept(&self.app, socket, self.accept.clone()).await;
    }

    fn name(&self) -> &str {
        "edge"
    }

    fn threads(&self) -> Option<usize> {
        Some(self.threads)
    }
}

/// Accepts connections until it is told to `stop`, each of which is served by a task of its own.
async fn accept<H: Handler>(app: &Arc<App<H>>, socket: TcpListener, mut stop: watch::Receiver<bool>) {
    let listener = match tokio::net::TcpListener::from_std(socket) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!(%error, "the socket cannot be listened on"),
    };
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            // A sender that is gone cannot say anything else any more.
            _ = stop.wait_for(|stop| *stop) => return,
        };
        match accepted {
            Ok((stream, from)) => {
                // From here on the server waits for it before it ends.
                let (app, phase) = (Arc::clone(app), app.phase.subscribe());
                tokio::spawn(async move { app.serve(stream, from.ip(), phase).await });
            }
            // It broke before it was accepted: nothing is left of it.
            Err(error) if matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset) => {}
            // Mostly for want of a file, which one of those that are open gives back.
            Err(error) => {
                tracing::error!(%error, "a connection cannot be accepted");
                tokio::time::sleep(NO_FILES).await;
            }
        }
    }
}

/// A connection that has begun.
enum Accepted {
    Plain(TcpStream),
    Tls(Box<TlsStream<BufReader<TcpStream>>>),
}

impl AsyncRead for Accepted {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Accepted::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Accepted::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Accepted::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Accepted::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, pieces: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Accepted::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, pieces),
            Accepted::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, pieces),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Accepted::Plain(stream) => stream.is_write_vectored(),
            Accepted::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Accepted::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Accepted::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Accepted::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Accepted::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

/// Serves each accepted connection.
struct App<H> {
    handler: Arc<H>,
    tls: Option<TlsAcceptor>,
    /// Every connection holds a receiver: when all are gone, the server may end.
    phase: Arc<watch::Sender<Phase>>,
}

impl<H: Handler> App<H> {
    /// The connection after its TLS handshake, where there is TLS; `None` if that failed or took too long.
    async fn secure(&self, stream: TcpStream, patience: Duration) -> Option<Accepted> {
        let Some(tls) = &self.tls else { return Some(Accepted::Plain(stream)) };
        let handshake = tls.accept(BufReader::with_capacity(RECORD, stream));
        match timeout(patience, handshake).await {
            Ok(Ok(stream)) => Some(Accepted::Tls(Box::new(stream))),
            Ok(Err(error)) => {
                tracing::debug!(%error, "a TLS handshake failed");
                None
            }
            Err(_) => None,
        }
    }

    /// Serves one connection from its first byte to its end.
    async fn serve(&self, stream: TcpStream, from: IpAddr, phase: watch::Receiver<Phase>) {
        // A socket that refuses this has lost its client already, which the first read tells.
        _ = stream.set_nodelay(true);
        let vitals = Arc::<Vitals>::default();
        let limits = self.handler.limits();
        let patience = if *phase.borrow() < Phase::Closing { limits.head_timeout } else { limits.head_timeout.min(LATE) };
        let Some(stream) = self.secure(stream, patience).await else { return };
        let Some(downstream) = Downstream::detect(stream, Arc::clone(&vitals), patience, limits.half_close).await else { return };
        let protocol = downstream.protocol();
        let io = TokioIo::new(downstream);
        let (handler, counted, closing) = (Arc::clone(&self.handler), Arc::clone(&vitals), phase.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            let (handler, in_progress, uploading) = (Arc::clone(&handler), counted.begin(), counted.upload());
            let last = *closing.borrow() != Phase::Serving && request.version() <= Version::HTTP_11;
            async move {
                let mut response = handler.handle(request, from, uploading).await;
                if last {
                    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                handed_on(true);
                Ok::<_, Infallible>(response.map(|body| Tracked { body, _in_progress: in_progress }))
            }
        });
        match protocol {
            Protocol::Http1 => {
                let connection = http1::Builder::new()
                    .max_header_size(limits.max_head.saturating_mul(OVER).max(LEAST_HEAD))
                    // Whether the client is still there, the stream itself watches, without a buffer; hyper would set one aside for every request.
                    .half_close(true)
                    .header_read_timeout(None)
                    .timer(TokioTimer::new())
                    .serve_connection(io, service);
                drive(connection, &vitals, phase).await;
            }
            Protocol::Http2 => {
                let connection = http2::Builder::new(Streams)
                    .max_concurrent_streams(STREAMS)
                    .max_header_list_size(u32::try_from(limits.max_head.saturating_mul(OVER)).unwrap_or(u32::MAX))
                    .keep_alive_interval(PING)
                    .timer(TokioTimer::new())
                    .serve_connection(io, service);
                drive(connection, &vitals, phase).await;
            }
        }
    }
}

/// Polls a connection to its end, and asks it to end when it is idle for too long or the server is closing.
async fn drive<C: GracefulConnection>(connection: C, vitals: &Vitals, mut phase: watch::Receiver<Phase>) {
    // One that came while the server was closing gets one answer and ends with it.
    let mut told = *phase.borrow() >= Phase::Closing;
    let mut changes = phase.clone();
    let mut connection = pin!(connection);
    // It is only there to wake this task: it may hear of a change later than the value shows it.
    let mut watching = pin!(async {
        while changes.changed().await.is_ok() {}
        // The sender outlives every connection.
        std::future::pending::<()>().await
    });
    // The first look leaves a waker; later ones are worth their locks only once something has changed, and then at every turn, for the next change.
    let mut look = true;
    std::future::poll_fn(|cx| {
        if look || phase.has_changed().unwrap_or(true) {
            // First: a change behind this point wakes, one before it shows in the value.
            _ = watching.as_mut().poll(cx);
            let now = *phase.borrow_and_update();
            look = now != Phase::Serving;
            // It is the handler that cuts; there the connection only has to look.
            if !told && now >= Phase::Closing {
                told = true;
                connection.as_mut().graceful_shutdown();
            }
        }
        // How a connection ended says nothing that its requests have not said.
        if connection.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        if !told && vitals.is_expired() {
            told = true;
            connection.as_mut().graceful_shutdown();
            return connection.as_mut().poll(cx).map(drop);
        }
        Poll::Pending
    })
    .await;
}

tokio::task_local! {
    /// Since when the client of an HTTP/2 stream has something to take; `None` while it is waited for the backend.
    static HANDED_ON: Cell<Option<Instant>>;
}

/// Whether the client of this stream has something to take, from now on.
fn handed_on(something: bool) {
    // On HTTP/1.1 the connection itself watches what is taken.
    _ = HANDED_ON.try_with(|since| since.set(something.then(Instant::now)));
}

/// Carries the streams of HTTP/2 connections. A stream whose client opens no window is not polled, so that no timeout of its answer could fire, and the slot that
/// it holds would be its client's for as long as it answers pings: here such a stream ends like a connection of HTTP/1.1 whose client takes nothing.
#[derive(Clone, Copy)]
struct Streams;

impl<F: Future<Output: Send + 'static> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        tokio::spawn(HANDED_ON.scope(Cell::new(None), until_stalled(stream)));
    }
}

/// Polls a stream to its end, or until its client has taken nothing for too long.
async fn until_stalled(stream: impl Future) {
    let mut stream = pin!(stream);
    // Its deadline is only ever too early.
    let mut patience: Option<Pin<Box<Sleep>>> = None;
    std::future::poll_fn(|cx| {
        if stream.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        loop {
            let Some(until) = HANDED_ON.with(Cell::get).map(|since| since + STALLED) else { return Poll::Pending };
            let patience = patience.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
            ready!(patience.as_mut().poll(cx));
            if until <= Instant::now() {
                return Poll::Ready(());
            }
            patience.as_mut().reset(until);
        }
    })
    .await;
}

/// A body that counts as a request in progress until it is dropped.
struct Tracked<B> {
    body: B,
    _in_progress: InProgress,
}

impl<B: Body + Unpin> Body for Tracked<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        handed_on(frame.is_ready());
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Ends the server: see [`Stop`].
struct Shutdown<H> {
    handler: Arc<H>,
    stop: Stop,
    phase: Arc<watch::Sender<Phase>>,
    /// True ends the accepting of connections.
    accepting: watch::Sender<bool>,
    upgrade_sock: Option<PathBuf>,
    sockets: Arc<Mutex<Option<ListenFds>>>,
}

#[async_trait]
impl<H: Handler> ShutdownSignalWatch for Shutdown<H> {
    async fn recv(&self) -> ShutdownSignal {
        let mut handed_over = false;
        match &self.stop {
            Stop::Told(told) => {
                // A sender that is gone cannot say anything else any more.
                let _ = told.clone().wait_for(|stop| *stop).await;
                self.drain().await;
            }
            Stop::Signals => match Signals::new() {
                Ok(mut signals) => loop {
                    if signals.hand_over().await {
                        if self.hand_over().await {
                            handed_over = true;
                            tokio::select! { () = self.leave() => {}, () = signals.end() => {} }
                            break;
                        }
                    } else {
                        tracing::info!("draining; a second signal ends it at once");
                        tokio::select! { () = self.drain() => {}, () = signals.end() => {} }
                        break;
                    }
                },
                Err(error) => {
                    tracing::error!(%error, "signals cannot be received: the process can only be killed");
                    std::future::pending().await
                }
            },
        }
        let _ = tokio::time::timeout(LAST, self.handler.end(handed_over)).await;
        ShutdownSignal::FastShutdown
    }
}

impl<H: Handler> Shutdown<H> {
    /// Lets what runs finish, at most as long as the configuration allows. New connections are still answered, with a refusal.
    async fn drain(&self) {
        let within = self.handler.limits().drain;
        self.handler.start_drain();
        self.phase.send_replace(Phase::Closing);
        let finished = async { tokio::join!(self.phase.closed(), self.handler.drained(within)) };
        if tokio::time::timeout(within, finished).await.is_err() {
            tracing::warn!(seconds = within.as_secs(), "not everything finished in time");
            self.handler.cut();
            self.phase.send_replace(Phase::Cutting);
            let _ = tokio::time::timeout(LATE, self.phase.closed()).await;
        }
    }

    /// Gives the listening socket to the process that takes over. False if that failed: nothing has changed then.
    async fn hand_over(&self) -> bool {
        let sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (Some(sock), Some(sockets)) = (self.upgrade_sock.clone(), sockets) else {
            tracing::warn!("a hand-over was asked for, but there is no --upgrade-sock");
            return false;
        };
        // It waits for the other process, and says so in pingora's own log.
        let sent = tokio::task::spawn_blocking(move || sockets.lock().send_to_sock(sock.to_string_lossy().as_ref())).await;
        match sent {
            Ok(Ok(_)) => true,
            Ok(Err(error)) => {
                tracing::error!(%error, "the socket was not handed over; serving on");
                false
            }
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        }
    }

    /// Another process has the listening socket too: finish what is here.
    async fn leave(&self) {
        tracing::info!("the listening socket was handed over; finishing what is open");
        self.phase.send_replace(Phase::Leaving);
        // The other process may still be getting ready: until then connections are accepted here too.
        tokio::time::sleep(LEAVING).await;
        self.accepting.send_replace(true);
        // Whoever was accepted last has not asked yet, and nobody else would answer there: each gets its one answer before the rest is refused.
        self.phase.send_replace(Phase::Closing);
        let _ = tokio::time::timeout(LATE, self.phase.closed()).await;
        self.drain().await;
    }
}

/// The signals that end the server.
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    quit: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> io::Result<Signals> {
        Ok(Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())?, quit: signal(SignalKind::quit())? })
    }

    /// Waits for a signal; whether it asks for a hand-over.
    async fn hand_over(&mut self) -> bool {
        tokio::select! {
            _ = self.terminate.recv() => false,
            _ = self.interrupt.recv() => false,
            _ = self.quit.recv() => true,
        }
    }

    /// Waits for a signal that ends the process.
    async fn end(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Takes the listening socket over from the process that listens now; waits some seconds for it to be offered.
fn take_over(listen: SocketAddr, sock: &Path) -> Result<TcpListener, ServerError> {
    let failed = |reason: String| ServerError::TakeOver { address: listen, sock: sock.to_owned(), reason };
    if !folder_of(sock).is_dir() {
        return Err(failed("its folder does not exist".to_owned()));
    }
    let mut offered = Fds::new();
    offered.get_from_sock(sock.to_string_lossy().as_ref()).map_err(|error| failed(error.to_string()))?;
    let name = listen.to_string();
    let socket = offered.get(&name).copied();
    offered.close_unclaimed(&std::iter::once(name).collect());
    let socket = socket.ok_or_else(|| failed("the running process listens elsewhere".to_owned()))?;
    // SAFETY: the file came with the message just read, and nothing else in this process knows of it: what was not asked for is closed.
    Ok(unsafe { TcpListener::from_raw_fd(socket) })
}

/// The folder that a path is in; a bare name is in the working directory.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Ends TLS with this certificate; offers both protocols.
fn acceptor(tls: &Tls) -> Result<TlsAcceptor, ServerError> {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};

    let certificate = |reason: String| ServerError::Certificate { path: tls.cert.clone(), reason };
    let key = |reason: String| ServerError::Certificate { path: tls.key.clone(), reason };
    let chain: Vec<_> = CertificateDer::pem_file_iter(&tls.cert).and_then(Iterator::collect).map_err(|error| certificate(error.to_string()))?;
    let private = PrivateKeyDer::from_pem_file(&tls.key).map_err(|error| key(error.to_string()))?;
    let mut config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| certificate(error.to_string()))?
        .with_no_client_auth()
        .with_single_cert(chain, private)
        .map_err(|error| certificate(error.to_string()))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use hyper::client::conn::http2 as client;
    use hyper_util::rt::TokioExecutor;
    use tokio::sync::oneshot;

    use super::*;

    /// Always has more, and says when it is dropped.
    struct Endless(Option<oneshot::Sender<()>>);

    impl Body for Endless {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&[b'x'; 1024])))))
        }
    }

    impl Drop for Endless {
        fn drop(&mut self) {
            _ = self.0.take().map(|gone| gone.send(()));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_ends_whose_client_takes_nothing_and_its_neighbour_goes_on() {
        let (near, far) = tokio::io::duplex(64 << 10);
        let vitals = Arc::<Vitals>::default();
        let (first, mut first_gone) = oneshot::channel();
        let (second, mut second_gone) = oneshot::channel();
        let bodies = Mutex::new(vec![Endless(Some(second)), Endless(Some(first))]);
        let service = service_fn(move |_| {
            handed_on(true);
            let body = bodies.lock().unwrap().pop().unwrap();
            let response = Response::new(Tracked { body, _in_progress: vitals.begin() });
            async move { Ok::<_, Infallible>(response) }
        });
        tokio::spawn(http2::Builder::new(Streams).serve_connection(TokioIo::new(near), service));
        let (mut sender, connection) =
            client::Builder::new(TokioExecutor::new()).initial_stream_window_size(4096).handshake(TokioIo::new(far)).await.unwrap();
        tokio::spawn(connection);
        let mut ask = async || sender.send_request(Request::new(String::new())).await.unwrap().into_body();
        let (held, mut read) = (ask().await, ask().await);
        let started = Instant::now();
        while first_gone.try_recv().is_err() {
            // A slow reader: a little every ten seconds.
            read.frame().await.unwrap().unwrap();
            tokio::time::sleep(Duration::from_secs(10)).await;
            assert!(started.elapsed() < 2 * STALLED, "nobody ended it");
        }
        assert!(started.elapsed() >= STALLED);
        assert!(second_gone.try_recv().is_err());
        drop(held);
        read.frame().await.unwrap().unwrap();
    }

    #[test]
    fn a_bare_name_is_in_the_working_directory() {
        for (path, folder) in [("up.sock", "."), ("a/up.sock", "a"), ("/up.sock", "/")] {
            assert_eq!(folder_of(Path::new(path)), Path::new(folder));
        }
    }
}
