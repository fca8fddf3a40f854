"""The order as a client sees it: with the engine full and long requests queued, a short one sent last starts next under headway and last under fcfs."""

import threading
import time

import httpx
import pytest
from processes import pool, wait_for
from wire import CHAT, chat

LONG_ONES = 20
# Tokens of the requests that hold the slots: more than are produced before everybody has joined.
HELD = 8000
ESSAY = "write an essay about the house and the world in every detail " * 8


def order_of_start(gateway, model, slots, tokens):
    """Fills the engine, queues the long ones, sends the short one last, lets the engine go, and returns the names in the order of their first event."""
    started, lock, threads = [], threading.Lock(), []
    go = [threading.Event() for _ in range(slots)]

    def hold(index):
        # Runs until everybody has joined the queue; leaving then frees the slot.
        body = chat(f"{index} {ESSAY}", model=model, max_tokens=HELD, sim_output_tokens=HELD, stream=True)
        with httpx.stream("POST", gateway.url + CHAT, json=body, timeout=120) as response:
            for _ in response.iter_raw():
                if go[index].is_set():
                    return
        assert go[index].is_set(), "the held request ended before everybody had joined the queue"

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

    def send(target, *arguments):
        threads.append(threading.Thread(target=target, args=arguments))
        threads[-1].start()

    def queue(name, prompt, limit):
        send(run, name, chat(prompt, model=model, max_tokens=limit, sim_output_tokens=limit, stream=True))

    for index in range(slots):
        send(hold, index)
        gateway.wait_in_flight(index + 1)
    for index in range(LONG_ONES):
        queue(f"long {index}", f"{index} {ESSAY}", tokens)
    gateway.wait_waiting(LONG_ONES)
    queue("short", "say hi", 2)
    gateway.wait_waiting(LONG_ONES + 1)
    # One slot first: whoever gets it is first, however late the threads here hear of it.
    go[0].set()
    wait_for(lambda: started, "somebody starts")
    for event in go[1:]:
        event.set()
    for thread in threads:
        thread.join(120)
    assert len(started) == LONG_ONES + 1
    return [name for _, name in sorted(started)]


@pytest.mark.parametrize("policy", ["headway", "fcfs"])
@pytest.mark.parametrize("kind", ["engine", "llama"])
def test_a_short_request_sent_last(launch, kind, policy):
    slots = 2
    if kind == "engine":
        backend, tokens = launch.engine(slots=slots, speed=4), 300
    else:
        backend, tokens = launch.llama(slots=slots, context=2 * 10_000, hidden=128, layers=4), 300
    gateway = launch.gateway(pool(backend.model, {"url": backend.url, "slots": slots}), policy=policy).healthy(1)
    order = order_of_start(gateway, backend.model, slots, tokens)
    if policy == "headway":
        assert order.index("short") < slots, order
    else:
        # Slots free up together, so the very last two may swap.
        assert order.index("short") >= len(order) - slots, order
