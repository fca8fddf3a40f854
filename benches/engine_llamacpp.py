"""The engine model beside a real llama.cpp server: its timing fitted to measured steps, then what it predicts beside what comes.

    cargo build --release
    HEADWAY=target/release/headway target/venv/bin/python benches/engine_llamacpp.py [--seconds 300] [--load 0.8] [--policies fcfs,headway,...]

1. Steps: some streams decode at once, or one prompt is computed alone, and the times between tokens are fitted by what `src/engine/profile.rs` has: a base, and so much for each
   sequence, each prompt token and each token in the KV cache.
2. A workload, open loop, sent to the server itself and, for each policy, through the gateway; and the same requests by `headway simulate` with that timing.

Everything runs on this machine: the server on one thread, the client and the gateway beside it. All times are by a clock that stands still while the server's thread is ready and has
no core (the kernel counts that: /proc/PID/task/TID/schedstat), because other programs run there too. How much of the time that was is printed with every run.
"""

import argparse
import asyncio
import json
import math
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/clients"))
from processes import BINARY, Gateway, LlamaCpp, pool  # noqa: E402
from toy_gguf import WORDS  # noqa: E402

SLOTS, CONTEXT = 8, 2048


def prompt(tokens, rng):
    """That many tokens: each word with a space before it is one. No two begin alike, so that nothing is found in a cache."""
    return "".join(" " + rng.choice(WORDS) for _ in range(tokens))


class Clock:
    """Seconds in which the thread that computes had a core or nothing to do."""

    def __init__(self, pid):
        threads = list(pathlib.Path(f"/proc/{pid}/task").iterdir())
        self.file = max(threads, key=lambda thread: self.counts(thread)[0]) / "schedstat"
        self.mark()

    @staticmethod
    def counts(thread):
        return [int(count) for count in (thread / "schedstat").read_text().split()]

    def starved(self):
        return int(self.file.read_text().split()[1]) / 1e9

    def now(self):
        return time.perf_counter() - self.starved()

    async def sleep_until(self, at):
        while (left := at - self.now()) > 0:
            await asyncio.sleep(left)

    def mark(self):
        self.began = time.perf_counter(), self.starved()

    def share(self):
        """Of the time since the mark, how much it stood still."""
        return (self.starved() - self.began[1]) / (time.perf_counter() - self.began[0])


async def ask(clock, url, tokens, output, rng, came=None):
    """When a request was sent and when each of its tokens came; `came` has them as they come."""
    host, port = url.removeprefix("http://").split(":")
    body = {"model": "toy", "prompt": prompt(tokens, rng), "max_tokens": output, "stream": True, "cache_prompt": False}
    body = json.dumps(body).encode()
    sent = clock.now()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    status = await reader.readline()
    assert b" 200 " in status, status
    came = [] if came is None else came
    while line := await reader.readline():
        if line.startswith(b"data: {") and b'"text":""' not in line:
            came.append(clock.now())
    writer.close()
    assert len(came) == output, f"{len(came)} tokens of {output}"
    return sent, came


# Steps.


async def decoding(clock, url, streams, tokens, output, rng):
    """One row for each step in which all streams decode: sequences, prompt tokens, KV tokens, seconds."""
    answers = await asyncio.gather(*(ask(clock, url, tokens, output, rng) for _ in range(streams)))
    begin, end = max(came[0] for _, came in answers), min(came[-1] for _, came in answers)
    steps = [at for at in answers[0][1] if begin < at <= end]
    # In pieces, so that the growth of the cache shows.
    rows, piece = [], 16
    done = output - len(steps)
    for start in range(0, len(steps) - piece, piece):
        kv = streams * (tokens + done + start + piece / 2)
        rows.append((streams, 0, kv, (steps[start + piece] - steps[start]) / piece))
    return rows


async def prefilling(clock, url, tokens, rng):
    sent, came = await ask(clock, url, tokens, 1, rng)
    return [(1, tokens, tokens, came[0] - sent)]


async def mixing(clock, url, streams, tokens, rng):
    """One row for each step in which a prompt is computed beside streams that decode: the long one of those that its computation may be in."""
    came = [[] for _ in range(streams)]
    decoding = [asyncio.create_task(ask(clock, url, tokens, 220, rng, times)) for times in came]
    while not all(came):
        await asyncio.sleep(0.05)
    prompts = []
    for size in (32, 64, 128, 256, 512):
        await clock.sleep_until(clock.now() + 0.25)
        sent, first = await ask(clock, url, size, 1, rng)
        prompts.append((size, sent, first[0]))
    await asyncio.gather(*decoding)
    times = came[0]
    rows = []
    for size, sent, first in prompts:
        steps = [(b - a, index) for index, (a, b) in enumerate(zip(times, times[1:])) if a <= first and b >= sent]
        if steps and min(stream[-1] for stream in came) > first:
            seconds, index = max(steps)
            rows.append((streams + 1, size, streams * (tokens + index + 1) + size, seconds))
    return rows


async def measure(clock, url, rounds, rng):
    rows = []
    for _ in range(rounds):
        # Interleaved: what disturbs the machine for a while disturbs all of them.
        for streams in (1, 2, 3, 4, 6, SLOTS):
            for tokens in (16, 500):
                rows += await decoding(clock, url, streams, tokens, 80, rng)
        for tokens in (8, 32, 64, 128, 256, 512, 700):
            for _ in range(2):
                rows += await prefilling(clock, url, tokens, rng)
        for streams in (2, SLOTS - 1):
            for tokens in (16, 300):
                rows += await mixing(clock, url, streams, tokens, rng)
    return rows


def columns(rows):
    """What each coefficient is multiplied with, over the step's time: what is fitted should give 1."""
    rows = np.array(rows, dtype=float)
    return np.column_stack([np.ones(len(rows)), rows[:, 0], rows[:, 1], rows[:, 2]]) / rows[:, 3:4]


def show(rows, timing, starved):
    """Prints the fit, and measured and fitted milliseconds of some kinds of steps."""
    print(f"{len(rows)} steps, {100 * starved:.0f} % of the time without a core")
    print("base {:.3e} s, per_sequence {:.3e}, per_prefill_token {:.3e}, per_kv_token {:.3e}".format(*timing))
    errors = np.abs(columns(rows) @ timing - 1)
    print(f"off by {100 * np.median(errors):.1f} % in the median, {100 * np.quantile(errors, 0.9):.1f} % at the 90th percentile")
    kinds = {}
    for sequences, prefill, kv, seconds in rows:
        name = f"prompt of {prefill}" + (f" beside {sequences - 1}" if sequences > 1 else "") if prefill else f"{sequences} decode, {'long' if kv > 250 * sequences else 'short'}"
        kinds.setdefault(name, []).append((seconds, timing @ [1, sequences, prefill, kv]))
    for name, steps in kinds.items():
        measured, fitted = (1e3 * statistics.median(step[column] for step in steps) for column in (0, 1))
        print(f"  {name:24} {measured:8.2f} ms, fitted {fitted:8.2f}")
    sys.stdout.flush()


def fit(rows):
    """base, per_sequence, per_prefill_token, per_kv_token, none negative, by least squares of relative errors."""
    x = columns(rows)
    used = [0, 1, 2, 3]
    while True:
        found = np.zeros(4)
        weight = np.ones(len(rows))
        for _ in range(20):
            # Steps that something else disturbed are too long: they count by their distance, not by its square.
            found[used] = np.linalg.lstsq(x[:, used] * weight[:, None], weight, rcond=None)[0]
            weight = 1 / np.sqrt(np.maximum(np.abs(x @ found - 1), 0.02))
        if (found >= 0).all():
            return found
        used.remove(min(used, key=lambda column: found[column]))
        found[:] = 0


# Workloads.


def lengths(count, rng):
    def draw(median, sigma, longest):
        return max(1, min(longest, round(median * math.exp(rng.gauss(0, sigma)))))

    return [(max(4, draw(120, 0.8, 700)), draw(40, 1.0, 600)) for _ in range(count)]


def simulate(folder, timing, jobs, policies, **workload):
    """Figures by policy, and each request's TTFT and TTLT."""
    folder = pathlib.Path(folder)
    rows = [f"{at},{tokens},{output + 1},{output}" for at, tokens, output in jobs]
    (folder / "trace.csv").write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,max_tokens", *rows]) + "\n")
    base, sequence, prefill, kv = (float(value) for value in timing)
    engine = {
        "engine": "small",
        "sequences": SLOTS,
        "slots": "auto",
        "context": CONTEXT,
        "kv_tokens": SLOTS * CONTEXT,
        "timing": {"base": base, "per_sequence": sequence, "per_prefill_token": prefill, "per_kv_token": kv},
    }
    scenario = {"workload": {"trace": "trace.csv", "scores": "none", **workload}, "fleet": [engine], "policies": policies}
    (folder / "scenario.yaml").write_text(json.dumps(scenario))
    command = [BINARY, "simulate", folder / "scenario.yaml", "--json", folder / "out.json", "--answers", folder / "answers.csv"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    report = json.loads((folder / "out.json").read_text())
    times = {}
    for row in (folder / "answers.csv").read_text().splitlines()[1:]:
        policy, _, _, ttft, ttlt, _ = row.split(",")
        times.setdefault(policy, []).append((float(ttft), float(ttlt)))
    return report, times


async def play(clock, url, jobs, rng):
    """Sends the workload; TTFT and TTLT of each."""
    start = clock.now() + 0.5

    async def one(at, tokens, output):
        await clock.sleep_until(start + at)
        _, came = await ask(clock, url, tokens, output, rng)
        return came[0] - start - at, came[-1] - start - at

    return await asyncio.gather(*(one(*job) for job in jobs))


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values), math.ceil(share * len(values))) - 1]


def summary(values):
    return [statistics.fmean(values)] + [percentile(values, share) for share in (0.5, 0.9, 0.99)]


def compare(name, real, predicted, starved):
    """Prints the figures of both, and how far apart they are."""
    for column, what in enumerate(("TTFT", "TTLT")):
        measured, model = [times[column] for times in real], [times[column] for times in predicted]
        pairs = [abs(b / a - 1) for a, b in zip(measured, model)]
        a, b = summary(measured), summary(model)
        cells = " ".join(f"{x:7.3f} {y:7.3f} {100 * (y / x - 1):+5.0f}%" for x, y in zip(a, b))
        print(f"{name:12} {what} {cells}   {100 * percentile(pairs, 0.5):4.0f}% {100 * percentile(pairs, 0.99):5.0f}%   {100 * starved:4.0f}%", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=300, help="length of each run of the workload")
    parser.add_argument("--load", type=float, default=0.8, help="share of what the fitted engine can do")
    parser.add_argument("--policies", default="fcfs,headway,uniboost", help="run through the gateway as well; empty for none")
    parser.add_argument("--rounds", type=int, default=3, help="how often each kind of step is measured")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        server = LlamaCpp(folder, slots=SLOTS, context=CONTEXT, hidden=options.hidden, layers=options.layers)
        try:
            # The first steps are slow, and show which thread computes.
            for _ in range(3):
                asyncio.run(prefilling(Clock(server.child.pid), server.url, 256, rng))
            clock = Clock(server.child.pid)
            rows = asyncio.run(measure(clock, server.url, options.rounds, rng))
            timing = fit(rows)
            show(rows, timing, clock.share())
            jobs = [(0.0, *pair) for pair in lengths(4000, rng)]
            report, _ = simulate(folder, timing, jobs, ["fcfs"], load=1.0)
            rate = options.load * report["capacity_requests_per_second"]
            at, timed = 0.0, []
            for _, tokens, output in jobs:
                at += rng.expovariate(rate)
                if at > options.seconds:
                    break
                timed.append((at, tokens, output))
            policies = [policy for policy in options.policies.split(",") if policy]
            print(f"{len(timed)} requests in {options.seconds:.0f} s, {rate:.2f} a second, load {options.load}", flush=True)
            played = {}
            for policy in ["round-robin", *policies]:
                gateway = None
                if policy != "round-robin":
                    gateway = Gateway(folder, [pool("toy", server, name="toy")], policy=policy, name=policy)
                    gateway.healthy(1, "toy")
                try:
                    clock.mark()
                    real = asyncio.run(play(clock, gateway.url if gateway else server.url, timed, random.Random(options.seed)))
                finally:
                    if gateway:
                        gateway.kill()
                played[policy] = real, clock.share()
                # Between runs, so that the fit has seen the machine as they have.
                clock.mark()
                rows += asyncio.run(measure(clock, server.url, options.rounds, rng))
            timing = fit(rows)
            show(rows, timing, clock.share())
            _, predicted = simulate(folder, timing, timed, list(played))
            print(f"{'':17} {'mean':>22} {'p50':>22} {'p90':>22} {'p99':>22}   each request: median, p99   without a core")
            for policy, (real, starved) in played.items():
                compare("direct" if policy == "round-robin" else policy, real, predicted[policy], starved)
        finally:
            server.kill()


if __name__ == "__main__":
    assert BINARY.exists(), f"{BINARY} is not built: cargo build --release, and HEADWAY=target/release/headway"
    # Ends what it has started, however it ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
