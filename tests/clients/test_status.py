"""The status contract, line by line, and bad input: a clear answer each, and nothing leaked."""

import contextlib
import json
import socket

import httpx
import pytest
from processes import PATIENCE, free_port, metric, pool, wait_for
from scripted import answer_normally, completion, gate
from wire import CHAT, Call, chat, error, post

MIB = 1 << 20


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", None),
        (b"{", None),
        (b"not json", None),
        (b'{"model":"sim","messages":[}', None),
        (b"\xff\xfe{}", None),
        (b"[]", None),
        (b'{"messages":[{"role":"user","content":"hi"}]}', "model"),
        (b'{"model":7,"messages":[{"role":"user","content":"hi"}]}', "model"),
        (b'{"model":"sim"}', "messages"),
        (b'{"model":"sim","messages":"hi"}', "messages"),
        (b'{"model":"sim","messages":[{"role":"user","content":"hi"}],"stream":"yes"}', "stream"),
        (b'{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":"many"}', "max_tokens"),
    ],
)
def test_400_says_which_field(gateway, body, field):
    response = post(gateway, body)
    assert response.status_code == 400, response.text
    said = error(response)
    assert said["code"]
    assert response.headers["x-headway-reason"]
    if field:
        assert said["param"] == field
        assert field in said["message"]


@pytest.mark.parametrize("brackets", [b"[" * 10_000, b'{"a":' * 10_000, b'{"model":"sim","messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}"])
def test_10_000_brackets(gateway, brackets):
    assert post(gateway, brackets).status_code == 400


def test_404_names_what_is_near(gateway):
    response = post(gateway, chat(model="gpt4o"))
    assert response.status_code == 404
    assert "gpt-4o" in error(response)["message"]
    assert post(gateway, chat(), path="/nowhere").status_code == 404


def test_a_body_at_the_limit_and_one_byte_more(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend))

    def of(size):
        empty = len(json.dumps(chat("")))
        return json.dumps(chat("x" * (size - empty))).encode()

    def pieces(body):
        return (body[at : at + 65_536] for at in range(0, len(body), 65_536))

    whole, more = of(30 * MIB), of(30 * MIB + 1)
    assert len(whole) == 30 * MIB
    for content in (whole, pieces(whole)):
        assert httpx.post(gateway.url + CHAT, content=content, timeout=60).status_code == 200
    assert [len(exchange.body) for exchange in backend.exchanges] == [30 * MIB, 30 * MIB]

    for content in (more, pieces(more)):
        # The refusal may come while the client still sends; whether it can read it then is TCP's choice.
        with contextlib.suppress(httpx.WriteError, httpx.ReadError):
            response = httpx.post(gateway.url + CHAT, content=content, timeout=60)
            assert response.status_code == 413
            assert error(response)["code"]
    assert len(backend.exchanges) == 2


def raw(gateway, data, until=b"\r\n\r\n"):
    """Sends bytes and returns what comes back, up to `until` or the end."""
    host, port = gateway.listen.split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(data)
        seen = b""
        while until not in seen and (piece := connection.recv(65_536)):
            seen += piece
        return seen


def test_413_before_the_body_is_sent(gateway):
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {30 * MIB + 1}\r\n\r\n"
    assert raw(gateway, head.encode()).startswith(b"HTTP/1.1 413")


def test_431_for_a_head_over_the_limit(launch):
    gateway = launch.gateway(pool("sim", launch.backend()), edge={"max_head": "16KiB"})
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-much: {'y' * 40_000}\r\ncontent-length: 0\r\n\r\n"
    assert raw(gateway, head.encode()).startswith(b"HTTP/1.1 431")


def test_a_body_that_never_ends(launch):
    gateway = launch.gateway(pool("sim", launch.backend()), edge={"body_timeout": "1s"})
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{{"
    assert raw(gateway, head.encode()).split()[1] in (b"400", b"408")


def test_a_head_that_never_ends(launch):
    gateway = launch.gateway(pool("sim", launch.backend()), edge={"head_timeout": "1s"})
    answer = raw(gateway, f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n".encode())
    assert answer == b"" or answer.split()[1] == b"408"


def test_429_when_the_queue_is_full(launch):
    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1}, limits={"queue_requests": 1})).healthy(1)
    first = Call(gateway, chat())
    backend.exchange(0)
    second = Call(gateway, chat())
    gateway.wait_waiting(1)
    refused = post(gateway, chat())
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-headway-reason"] == "queue_full"
    assert error(refused)["code"] == "queue_full"
    backend.exchange(0).released.set()
    backend.exchange(1).released.set()
    assert first.result().status_code == second.result().status_code == 200


def test_429_when_the_queued_bytes_are_full(launch):
    backend = launch.backend(gate)
    pools = pool("sim", {"url": backend.url, "slots": 1}, limits={"queue_bytes": "2MiB"})
    gateway = launch.gateway(pools, edge={"max_body": "2MiB"}).healthy(1)
    first = Call(gateway, chat())
    backend.exchange(0)
    second = Call(gateway, chat("x" * (3 * MIB // 2)))
    gateway.wait_waiting(1)
    refused = post(gateway, chat("x" * MIB))
    assert refused.status_code == 429
    assert refused.headers["x-headway-reason"] == "queue_bytes"
    backend.exchange(0).released.set()
    backend.exchange(1).released.set()
    assert first.result().status_code == second.result().status_code == 200


def test_429_when_it_waited_too_long(launch):
    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1}, timeouts={"queue": "500ms"})).healthy(1)
    first = Call(gateway, chat())
    backend.exchange(0)
    refused = post(gateway, chat())
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-headway-reason"] == "queue_timeout"
    backend.exchange(0).released.set()
    assert first.result().status_code == 200


def test_503_without_a_healthy_backend(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend)).healthy(1)
    backend.stop()
    gateway.healthy(0)
    refused = post(gateway, chat())
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-headway-reason"] == "no_healthy_backend"
    # Models are still listed, and the process is alive.
    assert [model["id"] for model in httpx.get(gateway.url + "/v1/models").json()["data"]] == ["sim"]
    head = httpx.head(gateway.url + "/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    assert httpx.get(gateway.admin + "/healthz").status_code == 200


def test_a_dead_backend_delays_nobody(launch):
    alive = launch.backend()
    dead = {"url": f"http://127.0.0.1:{free_port()}"}
    gateway = launch.gateway(pool("sim", dead, alive))
    gateway.healthy(1)
    for _ in range(20):
        assert post(gateway, chat(), timeout=5).status_code == 200


def breaks(how):
    return {
        "closes": lambda exchange: exchange.close(),
        "resets": lambda exchange: exchange.reset(),
        "garbage": lambda exchange: (exchange.raw(b"\x00\x01\x02 this is no HTTP\r\n\r\n"), exchange.close()),
        "half a head": lambda exchange: (exchange.raw(b"HTTP/1.1 200 OK\r\ncontent-ty"), exchange.close()),
    }[how]


HOWS = ["closes", "resets", "garbage", "half a head"]


@pytest.mark.parametrize("how", HOWS)
def test_502_when_the_backend_breaks_before_the_first_byte(launch, how):
    gateway = launch.gateway(pool("sim", launch.backend(breaks(how)), retries=0)).healthy(1)
    response = post(gateway, chat())
    assert response.status_code == 502
    assert error(response)["code"]
    assert response.headers["x-headway-reason"]


@pytest.mark.parametrize("how", HOWS)
def test_another_backend_answers_for_the_broken_one(launch, how):
    broken, sound = launch.backend(breaks(how)), launch.backend()
    gateway = launch.gateway(pool("sim", broken, sound, retries=2)).healthy(2)
    for _ in range(8):
        assert post(gateway, chat()).status_code == 200
    assert len(sound.exchanges) == 8


def test_a_connection_that_died_while_idle_is_not_the_clients_problem(launch):
    def answer_once(exchange):
        exchange.reply(body=completion())
        exchange.close()  # without saying `connection: close`

    gateway = launch.gateway(pool("sim", launch.backend(answer_once), retries=0)).healthy(1)
    for _ in range(10):
        assert post(gateway, chat()).status_code == 200


@pytest.mark.parametrize(
    ("name", "limit"),
    [("first_byte", {"first_byte": "500ms"}), ("total", {"total": "700ms"})],
)
def test_504_says_which_wait_was_over(launch, name, limit):
    backend = launch.backend(lambda exchange: exchange.wait_left())
    gateway = launch.gateway(pool("sim", backend, timeouts=limit, retries=0)).healthy(1)
    response = post(gateway, chat())
    assert response.status_code == 504
    assert name in response.headers["x-headway-reason"]
    assert "ms" in error(response)["message"] or "s" in error(response)["message"]
    assert backend.exchange().left.wait(PATIENCE), "the backend was told"


def stream_events(gateway, **more):
    with httpx.stream("POST", gateway.url + CHAT, json=chat(stream=True, **more), timeout=30) as response:
        assert response.status_code == 200
        return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]


def stalls(exchange):
    exchange.start_stream()
    exchange.word("first")
    exchange.wait_left()


def dies(exchange):
    exchange.start_stream()
    exchange.word("first")
    exchange.reset()


def ends_short(exchange):
    exchange.start_stream()
    exchange.word("first")
    exchange.close()


@pytest.mark.parametrize(
    ("answer", "limits", "said"),
    [
        (stalls, {"inter_chunk": "500ms"}, "inter_chunk"),
        (stalls, {"total": "700ms"}, "total"),
        (dies, {}, ""),
        (ends_short, {}, ""),
    ],
    ids=["stalls", "too long", "reset", "closed"],
)
def test_after_the_first_byte_a_stream_ends_with_an_error_event(launch, answer, limits, said):
    backend = launch.backend(answer)
    gateway = launch.gateway(pool("sim", backend, timeouts=limits, retries=2)).healthy(1)
    first, *_, last = stream_events(gateway)
    assert json.loads(first)["choices"][0]["delta"]["content"] == "first"
    failure = json.loads(last)["error"]
    assert said in failure["code"]
    assert len(backend.exchanges) == 1, "nothing is sent twice after the first byte"


def test_half_a_body_that_is_no_stream_is_no_whole_answer(launch):
    def half(exchange):
        exchange.raw(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{\"half")
        exchange.close()

    gateway = launch.gateway(pool("sim", launch.backend(half), retries=0)).healthy(1)
    try:
        response = post(gateway, chat())
    except httpx.RemoteProtocolError:
        return  # the client sees that the body is not whole
    assert response.status_code == 502


def test_pushback_is_no_fault(launch):
    full = launch.backend(lambda exchange: exchange.reply(429, {"error": {"message": "full"}}, {"retry-after": "1"}))
    free = launch.backend()
    gateway = launch.gateway(pool("sim", full, free, retries=2)).healthy(2)
    for _ in range(10):
        assert post(gateway, chat()).status_code == 200
    gateway.healthy(2)


def test_failures_eject_and_probing_readmits(launch):
    def broken(exchange):
        exchange.reply(500, {"error": {"message": "cuda"}})

    sick, sound = launch.backend(broken), launch.backend()
    gateway = launch.gateway(pool("sim", sick, sound, retries=2)).healthy(2)
    wait_for(lambda: post(gateway, chat()).status_code and not gateway_has_healthy(gateway, 2), "the sick one is ejected")
    sick.answer = answer_normally
    wait_for(lambda: post(gateway, chat()).status_code and gateway_has_healthy(gateway, 2), "the recovered one is back", within=60)


def gateway_has_healthy(gateway, count):
    return sum(backend["standing"] == "healthy" for backend in gateway.pool()["backends"]) == count


def test_endpoints_of_the_operators_are_not_on_the_clients_port(gateway):
    for path in ("/admin/pools", "/metrics"):
        assert httpx.get(gateway.url + path).status_code == 404


def test_a_clients_own_timeout_ends_the_wait_and_the_stream(launch):
    def endless(exchange):
        exchange.start_stream()
        exchange.word("one")
        exchange.wait_left()

    backend = launch.backend(endless)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1})).healthy(1)
    running = Call(gateway, chat(stream=True), headers={"x-request-timeout": "2"})
    backend.exchange(0)
    waiting = post(gateway, chat(), headers={"x-request-timeout": "0.5"})
    assert (waiting.status_code, error(waiting)["code"]) == (504, "total_timeout")
    assert '"code":"total_timeout"' in running.result().text.replace(" ", "")
    wait_for(backend.exchange(0).left.is_set, "the backend is told")
    wrong = post(gateway, chat(), headers={"x-request-timeout": "soon"})
    assert (wrong.status_code, error(wrong)["code"]) == (400, "invalid_header")


def test_what_passes_as_it_is_ends_as_what_it_was(launch):
    def answer(exchange):
        status = exchange.json.get("seed", 200)
        exchange.reply(status=status, body={"data": [], "padding": "x" * exchange.json.get("padding", 0)})

    backend = launch.backend(answer)
    gateway = launch.gateway(pool("sim", backend, retries=0)).healthy(1)
    assert post(gateway, chat(seed=400)).status_code == 400
    assert post(gateway, {"model": "sim", "input": "x"}, path="/v1/embeddings").status_code == 200
    assert len(post(gateway, {"model": "sim", "input": "x", "padding": 3 * MIB}, path="/v1/embeddings").content) > 3 * MIB
    with httpx.Client(http1=False, http2=True) as client:
        client.post(gateway.url + "/v1/embeddings", json={"model": "sim", "input": "x"}).raise_for_status()
    gateway.wait_idle()
    for outcome, count in (("backend_refused", 1), ("ok", 3)):
        assert metric(gateway.admin, f'headway_requests_total{{pool="chat",model="sim",outcome="{outcome}"}}') == count
    assert 'reason="client_left"' not in gateway.output()


def test_the_log_can_be_read_by_machines(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend), arguments=["--log", "json"]).healthy(1)
    post(gateway, chat(stream=True), headers={"x-request-id": "mine"})
    gateway.until(lambda: '"mine"' in gateway.output(), "the line is written")
    lines = [json.loads(line) for line in gateway.output().splitlines() if line.startswith("{")]
    [line] = [line for line in lines if line["target"] == "access"]
    assert (line["id"], line["status"], line["reason"], line["model"]) == ("mine", 200, "ok", "sim")
    assert line["total_ms"] >= line["ttft_ms"] >= 0
    assert {"timestamp", "level", "backend", "queue_ms", "output_tokens", "predicted_tokens", "boost_ms", "retries"} <= line.keys()
