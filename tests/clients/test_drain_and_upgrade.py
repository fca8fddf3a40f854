"""The process ends and is replaced without breaking what it has begun."""

import signal
import socket
import subprocess
import threading
import time

import httpx
import pytest
from processes import BINARY, PATIENCE, Process, answers, free_port, pool, wait_for
from scripted import gate
from wire import CHAT, Call, chat


def words_until_released(exchange):
    exchange.start_stream()
    exchange.word("first")
    exchange.wait_released()
    exchange.word("last")
    exchange.end_stream()


class Stream(threading.Thread):
    """An open stream in the background."""

    def __init__(self, gateway):
        super().__init__(daemon=True)
        self.gateway, self.text, self.failure, self.began = gateway, "", None, threading.Event()
        self.start()

    def run(self):
        try:
            with httpx.stream("POST", self.gateway.url + CHAT, json=chat(stream=True), timeout=60) as response:
                for piece in response.iter_text():
                    self.text += piece
                    self.began.set()
        except httpx.HTTPError as failure:
            self.failure = failure
        finally:
            self.began.set()

    def whole(self):
        self.join(PATIENCE)
        assert not self.is_alive()
        assert self.failure is None
        assert '"last"' in self.text
        assert self.text.rstrip().endswith("data: [DONE]")


def test_sigterm_lets_an_open_stream_finish(launch):
    backend = launch.backend(words_until_released)
    gateway = launch.gateway(pool("sim", backend)).healthy(1)
    stream = Stream(gateway)
    assert stream.began.wait(PATIENCE)
    gateway.signal(signal.SIGTERM)
    wait_for(lambda: not answers(gateway.admin + "/readyz"), "not ready any more")
    assert gateway.alive
    backend.exchange().released.set()
    stream.whole()
    assert gateway.wait() == 0


def test_sigterm_lets_queued_requests_finish(launch):
    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1})).healthy(1)
    first = Call(gateway, chat())
    backend.exchange(0)
    second = Call(gateway, chat())
    gateway.wait_waiting(1)
    gateway.signal(signal.SIGTERM)
    wait_for(lambda: not answers(gateway.admin + "/readyz"), "not ready any more")
    backend.exchange(0).released.set()
    backend.exchange(1).released.set()
    assert first.result().status_code == second.result().status_code == 200
    assert gateway.wait() == 0


def test_the_drain_has_an_end(launch):
    backend = launch.backend(words_until_released)
    gateway = launch.gateway(pool("sim", backend), edge={"drain": "1s"}).healthy(1)
    stream = Stream(gateway)
    assert stream.began.wait(PATIENCE)
    gateway.signal(signal.SIGTERM)
    gateway.wait()
    backend.exchange().released.set()


def test_an_idle_gateway_ends_at_once(launch):
    gateway = launch.gateway(pool("sim", launch.backend())).healthy(1)
    start = time.monotonic()
    gateway.signal(signal.SIGTERM)
    assert gateway.wait() == 0
    assert time.monotonic() - start < 5


@pytest.mark.slow
def test_an_upgrade_refuses_nobody(launch):
    """A client at 300 requests/s over fresh connections, and a stream that is open across the change of process."""
    backend = launch.backend(words_until_released)
    engine = launch.engine(slots=64, speed=200, model="fast")
    sock = launch.folder / "upgrade.sock"
    pools = [pool("sim", backend), pool("fast", engine, name="fast")]
    old = launch.gateway(*pools, arguments=["--upgrade-sock", sock]).healthy(1).healthy(1, "fast")
    stream = Stream(old)
    assert stream.began.wait(PATIENCE)

    rate, seconds = 300, 8
    statuses, lock = [], threading.Lock()
    begin = time.monotonic()
    host, port = old.listen.split(":")
    body = b'{"model":"fast","messages":[{"role":"user","content":"hi"}],"max_tokens":1}'
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    def client(first, step):
        for index in range(first, rate * seconds, step):
            time.sleep(max(0.0, begin + index / rate - time.monotonic()))
            try:
                with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
                    connection.sendall(head + body)
                    seen = b""
                    while piece := connection.recv(65_536):
                        seen += piece
                status = seen.split(b" ", 2)[1].decode() if seen else "closed"
            except OSError as failure:
                status = repr(failure)
            with lock:
                statuses.append(status)

    clients = [threading.Thread(target=client, args=(first, 8)) for first in range(8)]
    for thread in clients:
        thread.start()
    wait_for(lambda: len(statuses) > rate, lambda: f"the first second: {len(statuses)}")
    # pingora's order: the new process waits at the socket file, then the old one hands over on SIGQUIT.
    new = launch.add(Process([BINARY, "serve", "--config", old.file, "--upgrade", "--upgrade-sock", sock], launch.folder / "new.log"))
    new.until(lambda: sock.exists(), "the new process waits for the sockets")
    old.signal(signal.SIGQUIT)
    for thread in clients:
        thread.join(60)
    assert {status: statuses.count(status) for status in set(statuses)} == {"200": rate * seconds}
    assert old.alive, "the stream is still open"
    backend.exchange().released.set()
    stream.whole()
    assert old.wait() == 0
    assert new.alive
    assert httpx.get(old.admin + "/readyz", timeout=PATIENCE).status_code == 200


def test_serve_without_a_file(launch):
    engine = launch.engine()
    listen, admin = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    command = [BINARY, "serve", "--backend", engine.url, "--listen", listen, "--admin", admin, "--policy", "fcfs"]
    process = launch.add(Process(command, launch.folder / "bare.log"))
    process.until(lambda: answers(f"http://{admin}/readyz"), "ready")
    process.until(lambda: f"http://{listen}" in process.output(), "it says where it listens")
    response = httpx.post(f"http://{listen}{CHAT}", json=chat(max_tokens=3), timeout=30)
    assert response.status_code == 200
    assert response.headers["x-headway-policy"] == "fcfs"


def test_check_names_a_mistake_and_where(tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("listen: 127.0.0.1:0\npools:\n  - name: a\n    models: [m]\n    backends: [{ url: 'ftp://x' }]\n")
    done = subprocess.run([BINARY, "check", file], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    assert done.returncode == 1
    assert "bad.yaml:5" in done.stderr
    assert "url" in done.stderr
