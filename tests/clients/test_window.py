"""`slots: auto`: the engine's slots stay full while requests wait, its own queue stays short, and no throughput is lost to waiting outside.

Full slots are what keeps the throughput, so that is what is asserted; the throughput itself is printed (`-s`), since on a busy machine it says who else
had the cores.
"""

import threading
import time

import httpx
import pytest
from processes import pool
from wire import CHAT, chat

SLOTS = 4
ENOUGH = 20  # samples
ROUNDS = 8


def run_all(url, model, count, tokens):
    """Sends everything at once; returns the seconds until the last answer."""
    failures = []

    def one(index):
        body = chat(f"{index} tell me about the house", model=model, max_tokens=tokens, sim_output_tokens=tokens)
        response = httpx.post(url + CHAT, json=body, timeout=120)
        if response.status_code != 200:
            failures.append(response.text)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(count)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[:3]
    return time.monotonic() - start


class Watch(threading.Thread):
    """Samples the engine's own numbers while requests wait at the gateway."""

    def __init__(self, gateway, load):
        super().__init__(daemon=True)
        self.gateway, self.load, self.samples, self.done = gateway, load, [], threading.Event()
        self.start()

    def run(self):
        while not self.done.is_set():
            before = self.gateway.waiting()
            running, queued = self.load()
            # Only while something waited both before and after the look: otherwise an idle slot is no fault.
            if before > 0 and self.gateway.waiting() > 0:
                self.samples.append((running, queued))
            time.sleep(0.02)

    def stop(self):
        self.done.set()
        self.join()
        return self.samples


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["engine", "llama"])
def test_the_window_keeps_the_engine_full_and_its_queue_short(launch, kind, record_property):
    if kind == "engine":
        backend, count, tokens = launch.engine(slots=SLOTS, speed=4), 60, 240
        load = lambda: (backend.state()["running"], backend.state()["waiting"])  # noqa: E731
    else:
        backend, count, tokens = launch.llama(slots=SLOTS, context=1024, hidden=128, layers=4), 60, 150
        load = lambda: (backend.metric("requests_processing"), backend.metric("requests_deferred"))  # noqa: E731
    gateway = launch.gateway(pool(backend.model, backend), policy="fcfs").healthy(1)
    run_all(gateway.url, backend.model, SLOTS * 3, 20)  # the window finds its size
    samples, at_once, through = [], 0.0, 0.0
    # A busy engine answers looks only between its batches: how many fit into one run depends on the machine.
    for _ in range(ROUNDS):
        # Looked at in the same way, so that the looks cost both runs the same.
        watch = Watch(gateway, load)
        at_once += run_all(backend.url, backend.model, count, tokens)
        watch.stop()
        watch = Watch(gateway, load)
        through += run_all(gateway.url, backend.model, count, tokens)
        samples += watch.stop()
        if len(samples) >= ENOUGH:
            break
    idle = sum(running < SLOTS for running, _ in samples) / max(len(samples), 1)
    queued = max((queued for _, queued in samples), default=0)
    figures = f"{kind}: idle {idle:.1%} of {len(samples)} samples, at most {queued:g} queued in the engine, throughput {at_once / through:.1%}"
    record_property("figures", figures)
    print(figures)
    assert len(samples) >= ENOUGH, figures
    assert queued <= 2, figures
    assert idle <= 0.10, figures
