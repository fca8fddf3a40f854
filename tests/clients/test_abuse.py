"""Clients that mean harm: slow ones, floods of HTTP/2 frames, streams that are opened to be reset. Each is bounded, and nobody else notices."""

import json
import socket
import struct
import threading
import time

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import httpx
import pytest
from processes import PATIENCE, metric, pool
from wire import CHAT, Call, chat, post

FEW = {"edge": {"head_timeout": "1s", "body_timeout": "1s"}}
BODY = json.dumps(chat("plain", stream=True)).encode()
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9


def connect(gateway):
    client = socket.create_connection(gateway.listen.split(":"), timeout=PATIENCE)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def frame(kind, payload=b"", flags=0, stream=0):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def send_all(client, data):
    """False if the gateway has closed the connection."""
    try:
        client.sendall(data)
    except OSError:
        return False
    return True


def until_closed(client, within=PATIENCE):
    """What still comes; fails if the gateway does not close."""
    client.settimeout(within)
    came = b""
    try:
        while part := client.recv(65536):
            came += part
    except ConnectionError:
        pass
    return came


class H2:
    """A client that speaks HTTP/2 correctly, as far as the test lets it."""

    def __init__(self, gateway, **settings):
        self.socket = connect(gateway)
        self.state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.state.local_settings.update({getattr(h2.settings.SettingCodes, name): value for name, value in settings.items()})
        self.state.initiate_connection()
        self.flush()
        self.seen = []

    def flush(self):
        return send_all(self.socket, self.state.data_to_send())

    def request(self, body=BODY, end=True, length=None):
        stream = self.state.get_next_available_stream_id()
        headers = [(":method", "POST"), (":path", CHAT), (":scheme", "http"), (":authority", "x"), ("content-type", "application/json")]
        headers += [("content-length", str(length))] if length is not None else []
        self.state.send_headers(stream, headers)
        if body:
            self.state.send_data(stream, body, end_stream=end)
        self.flush()
        return stream

    def until(self, wanted, within=PATIENCE):
        """Reads until an event is `wanted`; None if the connection ends first."""
        deadline = time.monotonic() + within
        while True:
            for event in self.seen:
                if wanted(event):
                    return event
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self.socket.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self.seen += self.state.receive_data(data)
            self.flush()


def ended(stream):
    return lambda event: isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset)) and event.stream_id == stream


def status(client, stream):
    event = client.until(lambda event: isinstance(event, h2.events.ResponseReceived) and event.stream_id == stream)
    return int(dict(event.headers)[b":status"])


def resident(gateway):
    return metric(gateway.admin, "headway_resident_memory_bytes") / 2**20


def test_many_slow_heads_hold_nobody_up_and_end(launch):
    gateway = launch.gateway(pool("sim", launch.backend()), **FEW).healthy(1)
    slow = [connect(gateway) for _ in range(200)]
    for client in slow:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-a: ")
    stop = threading.Event()

    def drip():
        while not stop.wait(0.1):
            for client in slow:
                send_all(client, b"a")

    dripping = threading.Thread(target=drip, daemon=True)
    dripping.start()
    assert all(post(gateway, chat(), timeout=PATIENCE).status_code == 200 for _ in range(5))
    for client in slow:
        until_closed(client)
    stop.set()
    dripping.join()


@pytest.mark.parametrize("protocol", ["h1", "h2"])
def test_a_slow_body_is_told_and_ends(launch, protocol):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend), **FEW).healthy(1)
    stop = threading.Event()
    if protocol == "h1":
        client = connect(gateway)
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n".encode())

        def drip():
            while not stop.wait(0.05) and send_all(client, b" "):
                pass
    else:
        client = H2(gateway)
        stream = client.request(body=b" ", end=False)

        def drip():
            while not stop.wait(0.05) and send_all(client.socket, frame(DATA, b" ", stream=stream)):
                pass

    dripping = threading.Thread(target=drip, daemon=True)
    dripping.start()
    if protocol == "h1":
        client.settimeout(PATIENCE)
        answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer, answer
    else:
        assert status(client, stream) == 408
    stop.set()
    dripping.join()
    assert not backend.exchanges


def test_streams_that_are_opened_to_be_reset(launch):
    """Rapid reset (CVE-2023-44487): the connection ends, the backend is spared, and nothing is held."""
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend)).healthy(1)
    client = H2(gateway)
    opened = 0
    for _ in range(5000):
        try:
            stream = client.request()
            client.state.reset_stream(stream)
        except h2.exceptions.ProtocolError:
            break
        opened += 1
        if not client.flush():
            break
    client.socket.close()
    assert post(gateway, chat(), timeout=PATIENCE).status_code == 200
    gateway.wait_idle()
    assert len(backend.exchanges) <= opened // 2 + 1, "most never got there"


def test_more_streams_than_allowed_are_refused_and_the_others_answered(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend)).healthy(1)
    client = H2(gateway)
    client.until(lambda event: isinstance(event, h2.events.RemoteSettingsChanged))
    assert client.state.remote_settings.max_concurrent_streams == 256
    client.state.remote_settings[h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS] = 1000
    client.state.remote_settings.acknowledge()
    streams = [client.request(body=None) for _ in range(300)]
    outcomes = {}
    for stream in streams[256:]:
        event = client.until(lambda event, stream=stream: isinstance(event, h2.events.StreamReset) and event.stream_id == stream)
        outcomes[stream] = event.error_code
    assert set(outcomes.values()) == {h2.errors.ErrorCodes.REFUSED_STREAM}
    for stream in streams[:256]:
        client.state.send_data(stream, b"{}", end_stream=True)
        client.flush()
        assert status(client, stream) == 400
    assert not backend.exchanges


def test_a_head_that_never_ends_in_h2(launch):
    """A flood of CONTINUATION frames (CVE-2024-27316)."""
    gateway = launch.gateway(pool("sim", launch.backend())).healthy(1)
    before = resident(gateway)
    client = connect(gateway)
    client.sendall(PREFACE + frame(SETTINGS) + frame(HEADERS, b"\x82", stream=1))
    # A literal header that is new, of 4 KiB: 200 MiB of them.
    piece = frame(CONTINUATION, b"\x00\x03x-a\x7f\x81\x1f" + b"b" * 4096, stream=1)
    sent = 0
    while sent < 50_000 and send_all(client, piece):
        sent += 1
    assert sent < 50_000, "the connection ended"
    client.close()
    assert post(gateway, chat(), timeout=PATIENCE).status_code == 200
    assert resident(gateway) < before + 64


@pytest.mark.parametrize("kind", ["ping", "settings", "empty data", "window", "reset"])
def test_floods_of_small_frames_cost_no_memory_and_hold_nobody_up(launch, kind):
    """CVE-2019-9512, -9515, -9518 and their like: from a client that reads nothing of what it causes."""
    gateway = launch.gateway(pool("sim", launch.backend()), edge={"body_timeout": "2s"}).healthy(1)
    before = resident(gateway)
    client = H2(gateway)
    stream = client.request(body=b" ", end=False)
    one = {
        "ping": frame(PING, b"12345678"),
        "settings": frame(SETTINGS),
        "empty data": frame(DATA, stream=stream),
        "window": frame(8, struct.pack(">I", 1)),
        "reset": frame(RST_STREAM, struct.pack(">I", 8), stream=stream),
    }[kind]
    alive, stop = [True], threading.Event()

    def flood():
        # 300,000 frames, as fast as they are taken.
        for _ in range(300):
            alive[0] = not stop.is_set() and send_all(client.socket, one * 1000)
            if not alive[0]:
                return

    client.socket.settimeout(10)
    flooding = threading.Thread(target=flood, daemon=True)
    flooding.start()
    assert all(post(gateway, chat(), timeout=PATIENCE).status_code == 200 for _ in range(10))
    flooding.join(15)
    stop.set()
    assert resident(gateway) < before + 64
    client.socket.close()
    flooding.join()
