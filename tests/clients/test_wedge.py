"""Backends that answer their health check and nothing else."""

import signal

import httpx
import pytest
from processes import PATIENCE, metric, pool, wait_for
from scripted import answer_normally
from wire import Call, chat, post


def hangs(exchange):
    """Takes the request and says nothing until it is released."""
    exchange.wait_released(60)
    answer_normally(exchange)


def head_only(exchange):
    """As an engine whose HTTP side lives on: the head of a stream and comments, and no token."""
    exchange.start_stream()
    while not exchange.released.wait(0.05):
        exchange.chunk(": ping\n\n")
    exchange.word("late")
    exchange.end_stream()


def backends(gateway):
    return {backend["url"]: backend for backend in gateway.pool()["backends"]}


def stream(gateway, **more):
    return Call(gateway, chat(stream=True, **more))


def two(launch, wedged, **settings):
    """A gateway before a backend that answers and one that will wedge, which gets its first request only when the other is busy."""
    sound = launch.backend()
    wedging = launch.backend(wedged)
    entries = [{"url": sound.url, "slots": 1}, {"url": wedging.url, "slots": 4}]
    gateway = launch.gateway(pool("sim", *entries, wedged_after="1s", **settings)).healthy(2)
    return gateway, sound, wedging


@pytest.mark.parametrize("how", [hangs, head_only])
def test_a_wedged_backend_is_ejected_and_comes_back_with_its_first_sign(launch, how):
    gateway, sound, wedging = two(launch, how)
    # One streamed request on it is enough; whichever backend a request is placed on, some get there.
    calls = [stream(gateway) for _ in range(6)]
    wedging.exchange(0)
    gateway.until(lambda: backends(gateway)[wedging.url]["wedged"], lambda: f"wedged: {gateway.pool()}")
    gateway.until(lambda: backends(gateway)[wedging.url]["standing"] == "ejected", lambda: f"ejected: {gateway.pool()}")
    assert "no sign of life" in backends(gateway)[wedging.url]["error"]
    assert metric(gateway.admin, f'headway_backend_wedged{{pool="chat",backend="{wedging.url}"}}') == 1
    if how is hangs:
        # Nothing had begun to be answered: all of it went to the other one.
        for call in calls:
            assert call.result().status_code == 200 and "hello" in call.response.text
    assert post(gateway, chat()).status_code == 200
    # It is tried again, one request at a time, though its health check was well all along; the first sign is enough.
    wedging.answer = answer_normally
    wedging.release_all()

    def well():
        assert post(gateway, chat(stream=True)).status_code == 200
        return backends(gateway)[wedging.url]["standing"] == "healthy"

    gateway.until(well, lambda: f"healthy again: {gateway.pool()}", within=60)
    assert not backends(gateway)[wedging.url]["wedged"]
    for call in calls:
        assert call.result().status_code == 200


def test_the_last_backend_stays_and_says_that_it_is_wedged(launch):
    wedging = launch.backend(hangs)
    gateway = launch.gateway(pool("sim", wedging, wedged_after="1s")).healthy(1)
    call = stream(gateway)
    wedging.exchange(0)
    gateway.until(lambda: backends(gateway)[wedging.url]["wedged"], lambda: f"wedged: {gateway.pool()}")
    assert backends(gateway)[wedging.url]["standing"] == "healthy"
    wedging.release_all()
    assert call.result().status_code == 200
    gateway.until(lambda: not backends(gateway)[wedging.url]["wedged"], lambda: f"no longer wedged: {gateway.pool()}")


def test_one_slow_request_is_no_wedge_while_another_progresses(launch):
    """Streams that trickle side by side with one that gets nothing: also when the latter is given up."""
    slow = []

    def mixed(exchange):
        if exchange.json["messages"][0]["content"] == "slow":
            slow.append(exchange)
            return hangs(exchange)
        exchange.start_stream()
        while not exchange.released.wait(0.05):
            exchange.word("token")
        exchange.end_stream()

    backend, other = launch.backend(mixed), launch.backend(mixed)
    timeouts = {"first_byte": "1500ms"}
    gateway = launch.gateway(pool("sim", backend, other, wedged_after="500ms", timeouts=timeouts, retries=0)).healthy(2)
    running = [stream(gateway) for _ in range(4)]
    for server in (backend, other):
        server.exchange(0)
    for _ in range(2):
        late = [Call(gateway, chat("slow", stream=streamed)) for streamed in (True, False, True, False)]
        assert {call.result().headers["x-headway-reason"] for call in late} == {"first_byte_timeout"}
    assert {state["standing"] for state in backends(gateway).values()} == {"healthy"}, gateway.pool()
    assert "wedged" not in gateway.output().split("pools")[-1]
    for server in (backend, other):
        server.release_all()
    assert all(call.result().status_code == 200 for call in running)


def test_answers_in_one_piece_are_judged_by_their_timeouts(launch):
    gateway, sound, wedging = two(launch, hangs, timeouts={"first_byte": "700ms"}, retries=2)
    calls = []

    def ejected():
        calls.append(post(gateway, chat()).status_code)
        return backends(gateway)[wedging.url]["standing"] == "ejected"

    gateway.until(ejected, lambda: f"ejected: {gateway.pool()}", within=60)
    assert set(calls) == {200}, "each went on to the other one"
    wedging.release_all()


@pytest.mark.slow
def test_a_stopped_engine_is_left_alone_and_comes_back(launch):
    """A real engine process that is stopped in the middle of its answers: its kernel goes on accepting connections."""
    engines = [launch.engine(speed=20) for _ in range(2)]
    gateway = launch.gateway(pool("sim", *engines, wedged_after="1s")).healthy(2)
    engines[0].signal(signal.SIGSTOP)
    try:
        calls = [stream(gateway, max_tokens=20) for _ in range(8)]
        gateway.until(lambda: backends(gateway)[engines[0].url]["standing"] == "ejected", lambda: f"ejected: {gateway.pool()}")
        assert post(gateway, chat(max_tokens=5)).status_code == 200
    finally:
        engines[0].signal(signal.SIGCONT)
    assert all(call.result().status_code == 200 for call in calls)

    def well():
        post(gateway, chat(stream=True, max_tokens=5))
        return backends(gateway)[engines[0].url]["standing"] == "healthy"

    gateway.until(well, lambda: f"healthy again: {gateway.pool()}", within=60)
    wait_for(lambda: httpx.get(engines[0].url + "/health", timeout=PATIENCE).status_code == 200, "it answers")
