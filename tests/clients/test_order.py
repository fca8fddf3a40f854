"""The order as a client sees it: with the engine full and long requests queued, a short one sent last starts next under headway and last under fcfs."""

import threading
import time

import httpx
import pytest
from processes import pool
from wire import CHAT, chat

LONG_ONES = 20


def order_of_start(gateway, model, slots, tokens):
    """Fills the engine, queues the long ones, sends the short one last, and returns the names in the order of their first event."""
    started, lock, threads = [], threading.Lock(), []

    def run(name, body):
        with httpx.stream("POST", gateway.url + CHAT, json=body, timeout=120) as response:
            assert response.status_code == 200, response.read()
            lines = response.iter_lines()
            for line in lines:
                if line.startswith("data:"):
                    with lock:
                        started.append((time.monotonic(), name))
                    break
            for _ in lines:
                pass

    def send(name, prompt, limit):
        body = chat(prompt, model=model, max_tokens=limit, sim_output_tokens=limit, stream=True)
        threads.append(threading.Thread(target=run, args=(name, body)))
        threads[-1].start()

    essay = "write an essay about the house and the world in every detail " * 8
    for index in range(slots):
        send(f"running {index}", f"{index} {essay}", tokens * 3)
        gateway.wait_in_flight(index + 1)
    for index in range(LONG_ONES):
        send(f"long {index}", f"{index} {essay}", tokens)
        gateway.wait_waiting(index + 1)
    send("short", "say hi", 2)
    gateway.wait_waiting(LONG_ONES + 1)
    for thread in threads:
        thread.join(120)
    assert len(started) == slots + LONG_ONES + 1
    return [name for _, name in sorted(started)]


@pytest.mark.parametrize("policy", ["headway", "fcfs"])
@pytest.mark.parametrize("kind", ["engine", "llama"])
def test_a_short_request_sent_last(launch, kind, policy):
    slots = 2
    if kind == "engine":
        backend, tokens = launch.engine(slots=slots, speed=4), 300
    else:
        backend, tokens = launch.llama(slots=slots, context=2048, hidden=128, layers=4), 300
    gateway = launch.gateway(pool(backend.model, {"url": backend.url, "slots": slots}), policy=policy).healthy(1)
    order = order_of_start(gateway, backend.model, slots, tokens)
    if policy == "headway":
        assert order.index("short") == slots, order
    else:
        # Slots free up together, so the very last two may swap.
        assert order.index("short") >= len(order) - slots, order
