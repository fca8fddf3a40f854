"""A client that leaves, in any phase, cancels its work upstream at once and frees everything it held."""

import json
import socket

import httpx
import pytest
from processes import PATIENCE, pool, wait_for
from scripted import answer_normally
from wire import CHAT, Call, chat


class Client:
    """A raw connection with one request on it, so that leaving is one call."""

    def __init__(self, gateway, body, path=CHAT):
        host, port = gateway.listen.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE)
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)

    def read_some(self):
        """Waits for the first event of the stream."""
        data = b""
        while b"data:" not in data:
            piece = self.socket.recv(4096)
            assert piece, data
            data += piece
        return data

    def leave(self):
        self.socket.close()


def busy_one(launch):
    """A backend with one slot, which a request holds until released."""

    def gate(exchange):
        exchange.wait_released()
        answer_normally(exchange)

    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1})).healthy(1)
    first = Call(gateway, chat())
    backend.exchange(0)
    return gateway, backend, first


@pytest.mark.parametrize("stream", [False, True])
def test_while_queued(launch, stream):
    gateway, backend, first = busy_one(launch)
    leaver = Client(gateway, chat("x" * 5000, stream=stream))
    gateway.wait_waiting(1)
    assert gateway.pool()["waiting_bytes"] > 5000
    leaver.leave()
    gateway.wait_waiting(0)
    assert gateway.pool()["waiting_bytes"] == 0
    backend.exchange(0).released.set()
    assert first.result().status_code == 200
    gateway.wait_idle()
    assert len(backend.exchanges) == 1, "a request whose client had left was sent"


def test_while_connecting(launch):
    """The backend's accept queue is full, so that the connection is neither made nor refused."""
    backend = launch.backend(lambda exchange: (exchange.reply(), exchange.close()))
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 4}, timeouts={"connect": "30s"}, retries=0)).healthy(1)
    # The pool may keep a connection open; the deaf listener takes its place.
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    backend.stop()
    wait_for(lambda: deaf.bind(("127.0.0.1", backend.port)) is None, "the port is free again")
    deaf.listen(0)
    plugs = []
    for _ in range(3):
        plug = socket.socket()
        plug.setblocking(False)
        plug.connect_ex(("127.0.0.1", backend.port))
        plugs.append(plug)
    leaver = Client(gateway, chat())
    gateway.wait_in_flight(1)
    leaver.leave()
    gateway.wait_in_flight(0, within=10)
    for each in (*plugs, deaf):
        each.close()


@pytest.mark.parametrize("stream", [False, True])
def test_before_the_first_byte(launch, stream):
    backend = launch.backend(lambda exchange: exchange.wait_left())
    gateway = launch.gateway(pool("sim", backend)).healthy(1)
    leaver = Client(gateway, chat(stream=stream))
    exchange = backend.exchange()
    leaver.leave()
    assert exchange.left.wait(PATIENCE)
    gateway.wait_idle()
    assert len(backend.exchanges) == 1
    gateway.healthy(1)


def test_while_streaming(launch):
    def answer(exchange):
        exchange.start_stream()
        exchange.word("first")
        exchange.wait_left()

    backend = launch.backend(answer)
    gateway = launch.gateway(pool("sim", backend)).healthy(1)
    leaver = Client(gateway, chat(stream=True))
    leaver.read_some()
    leaver.leave()
    assert backend.exchange().left.wait(PATIENCE)
    gateway.wait_idle()
    gateway.healthy(1)


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_sees_the_abort(launch, stream):
    engine = launch.engine(slots=4, speed=1)
    gateway = launch.gateway(pool("sim", engine)).healthy(1)
    leaver = Client(gateway, chat("a long one", stream=stream, max_tokens=3000, sim_output_tokens=3000))
    wait_for(lambda: engine.state()["running"] == 1, "the engine runs it")
    if stream:
        leaver.read_some()
    leaver.leave()
    state = wait_for(lambda: (state := engine.state())["running"] == 0 and state, engine.state)
    assert state["aborted"] == 1
    assert state["kv_blocks_held"] == 0


def test_llama_cpp_sees_the_abort(launch):
    llama = launch.llama(slots=1, context=8192, hidden=256, layers=4)
    gateway = launch.gateway(pool("toy", llama)).healthy(1)
    leaver = Client(gateway, chat("a long one", model="toy", stream=True, max_tokens=8000))
    leaver.read_some()
    assert llama.metric("requests_processing") == 1
    leaver.leave()
    wait_for(lambda: llama.metric("requests_processing") == 0, "llama.cpp stopped working", within=5)


def test_many_leave_at_once(launch):
    engine = launch.engine(slots=2, speed=1)
    gateway = launch.gateway(pool("sim", {"url": engine.url, "slots": 2})).healthy(1)
    leavers = [Client(gateway, chat(f"{index}", stream=index % 2 == 0, sim_output_tokens=2000, max_tokens=2000)) for index in range(50)]
    gateway.wait_waiting(48)
    for leaver in leavers:
        leaver.leave()
    gateway.wait_idle()
    wait_for(lambda: engine.state()["running"] == 0, engine.state)
    assert httpx.post(gateway.url + CHAT, json=chat(max_tokens=3), timeout=30).status_code == 200


def test_who_leaves_after_the_last_word_has_not_left(launch):
    """Clients close at `[DONE]`; whether the backend has closed its side by then is chance."""

    def never_ends(exchange):
        exchange.start_stream()
        exchange.word("hello")
        exchange.chunk("data: [DONE]\n\n")
        exchange.wait_left()

    gateway = launch.gateway(pool("sim", launch.backend(never_ends))).healthy(1)
    client = Client(gateway, chat(stream=True))
    data = client.read_some()
    while b"[DONE]" not in data:
        data += client.socket.recv(4096)
    client.leave()
    gateway.until(lambda: 'reason="ok"' in gateway.output() or "client_left" in gateway.output(), "its end is told")
    assert "client_left" not in gateway.output()
