"""`slots: auto`: the engine's slots stay full while requests wait, its own queue stays short, and no throughput is lost to waiting outside.

Full slots are what keeps the throughput, so that is what is asserted; the throughput itself is printed (`-s`), since on a busy machine it says who else
had the cores.
"""

import random
import threading
import time

import httpx
import pytest
from processes import pool
from wire import CHAT, chat

SLOTS = 4
ENOUGH = 20  # looks
ROUNDS = 6

NAMES = {"engine": ("num_requests_running", "num_requests_waiting"), "llama": ("requests_processing", "requests_deferred")}


def run_all(url, model, lengths):
    """Sends everything at once and waits for all answers. Returns the seconds until only those were left that no longer fill the slots."""
    failures, ends = [], []

    def one(index, tokens):
        body = chat(f"{index} tell me about the house", model=model, max_tokens=tokens, sim_output_tokens=tokens)
        response = httpx.post(url + CHAT, json=body, timeout=120)
        if response.status_code != 200:
            failures.append(response.text)
        ends.append(time.monotonic() - start)

    threads = [threading.Thread(target=one, args=one_of) for one_of in enumerate(lengths)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:3]
    return sorted(ends)[-SLOTS]


class Watch(threading.Thread):
    """Looks at the engine's own numbers for as long as requests wait: with fewer than it has room for, an idle slot is no fault."""

    def __init__(self, look, waiting):
        super().__init__(daemon=True)
        self.look, self.waiting, self.looks, self.done = look, waiting, [], threading.Event()
        self.start()

    def run(self):
        while not self.done.is_set():
            before = self.waiting()
            seen = self.look()
            if before > 0 and self.waiting() > 0:
                self.looks.append(seen)
            time.sleep(0.02)

    def stop(self):
        self.done.set()
        self.join()
        return self.looks


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["engine", "llama"])
def test_the_window_keeps_the_engine_full_and_its_queue_short(launch, kind, record_property):
    if kind == "engine":
        backend, count, tokens = launch.engine(slots=SLOTS, speed=4), 60, 240
    else:
        backend, count, tokens = launch.llama(slots=SLOTS, context=1024, hidden=128, layers=4), 80, 150
    gateway = launch.gateway(pool(backend.model, backend), policy="fcfs").healthy(1)
    look = lambda: tuple(backend.metric(name) for name in NAMES[kind])  # noqa: E731
    # Of equal lengths all would end at once, again and again, which is not what engines see.
    chance = random.Random(1)
    lengths = [chance.randint(tokens // 4, tokens * 7 // 4) for _ in range(count)]
    looks, at_once, through = [], 0.0, 0.0
    # A busy engine answers looks only between its batches: how many fit into one round depends on the machine.
    for _ in range(ROUNDS):
        # Looked at in both cases, so that the looks cost both the same.
        watch = Watch(look, gateway.waiting)
        at_once += run_all(backend.url, backend.model, lengths)
        watch.stop()
        run_all(gateway.url, backend.model, lengths[: count // 3])  # the window finds its size again
        watch = Watch(look, gateway.waiting)
        through += run_all(gateway.url, backend.model, lengths)
        looks += watch.stop()
        if len(looks) >= ENOUGH:
            break
    idle = sum(running < SLOTS for running, _ in looks) / len(looks)
    queued = max(queued for _, queued in looks)
    figures = f"{kind}: idle {idle:.1%} of {len(looks)} looks, at most {queued:g} queued in the engine, throughput {at_once / through:.1%}"
    record_property("figures", figures)
    print(figures)
    assert len(looks) >= ENOUGH, figures
    assert queued <= 2, figures
    assert idle <= 0.10, figures
