#!/usr/bin/env python3
"""What a request costs that waits, by how many wait with it: memory of the process and CPU time from its arrival to its answer.

    python3 benches/compare/waiting.py                  100 to 100,000 requests of 8 KB: about 3 minutes, and 3 GiB for the largest
    python3 benches/compare/waiting.py --depths 1000 --body 1024

Needs what run.py needs of Headway, and h2load (`apt-get install nghttp2-client`), whose streams share some connections: with a connection each, sockets would
be most of what is measured. The backend has four slots and stands still until all the others wait, then answers. Writes waiting.json, waiting.md and
waiting.svg into target/compare.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import peers
import report
import run

SLOTS = 4
# A connection may have this many requests open.
STREAMS = 100
# CPU seconds in a twentieth of a second that are no work on requests.
STILL = 0.001
# Rounds of a depth go on until so many requests were counted.
COUNTED = 20_000


class Queueing(peers.Headway):
    slots = SLOTS
    extra = "limits: { queue_requests: 1000000, queue_bytes: 16GiB }\nedge: { max_body_total: 16GiB }\ntimeouts: { queue: 24h, total: 24h }\n"


def waiting(peer):
    metrics = subprocess.run(["curl", "-sf", f"http://127.0.0.1:{peer.admin}/metrics"], capture_output=True, text=True, check=True).stdout
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith("headway_backend_waiting{"))


def until_still(cpu, seconds=120):
    """CPU seconds used once next to nothing more is used: probes and timers go on."""
    before, deadline = -1.0, time.monotonic() + seconds
    while (used := cpu.seconds()) - before > STILL and time.monotonic() < deadline:
        before = used
        time.sleep(0.05)
    return used


def a_round(peer, mock, body, depth, core):
    """CPU seconds of `depth` requests that all wait together, and what the process holds then, in MiB."""
    connections = max(1, depth // STREAMS)
    mock.send_signal(signal.SIGSTOP)
    try:
        cpu = peers.Cpu(peer.processes())
        command = ["h2load", "-n", depth, "-c", connections, "-m", min(STREAMS, depth), "-d", body, "-H", "content-type: application/json"]
        command.append(f"http://{peer.address}/v1/chat/completions")
        pin = None if core is None else lambda: os.sched_setaffinity(0, {core})
        load = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=pin)
        deadline = time.monotonic() + 300
        while True:
            arrived = until_still(cpu)
            if waiting(peer) == depth - SLOTS:
                break
            if time.monotonic() > deadline or load.poll() is not None:
                raise SystemExit(f"{waiting(peer):.0f} of {depth} wait: {load.communicate()[0] if load.poll() is not None else 'h2load still sends'}")
        held = peers.rss_mib(peer.processes())
    finally:
        mock.send_signal(signal.SIGCONT)
    asked = cpu.seconds()
    output = load.communicate()[0]
    # The question above is not a request's cost.
    used = arrived + until_still(cpu) - asked
    answered = int(re.search(r"status codes: (\d+) 2xx", output)[1])
    return used, held, depth - answered


def measure(wire, directory, core, depth, body):
    mock, upstream = wire.mock()
    peer = None
    try:
        time.sleep(0.3)
        peer = Queueing([f"http://{upstream}"], "mock", directory, core).wait(body)
        file = wire.file(body)
        a_round(peer, mock, file, min(depth, 100), wire.core)
        idle = peers.rss_mib(peer.processes())
        rounds = [a_round(peer, mock, file, depth, wire.core) for _ in range(max(1, COUNTED // depth))]
    finally:
        if peer:
            peer.stop()
        mock.kill()
        mock.wait()
    held = max(held for _, held, _ in rounds)
    return {
        "depth": depth,
        "body": len(body),
        "cpu_us": sum(used for used, _, _ in rounds) / (depth * len(rounds)) * 1e6,
        "idle_mib": idle,
        "held_mib": held,
        "kib_each": (held - idle) * 1024 / depth,
        "unanswered": sum(unanswered for _, _, unanswered in rounds),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", nargs="+", type=int, default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--body", type=int, default=8 << 10, help="bytes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=peers.CACHE)
    options = parser.parse_args()
    if not shutil.which("h2load"):
        raise SystemExit("h2load is not there: apt-get install nghttp2-client")
    run.raise_files(65_536)
    cores = sorted(os.sched_getaffinity(0))
    near, far = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    options.out.mkdir(parents=True, exist_ok=True)
    case = run.Case("waiting", "waiting", options.body, 1)
    results = []
    with tempfile.TemporaryDirectory(prefix="compare-waiting-") as directory:
        wire = run.Wire(directory, near)
        for repeat in range(options.repeats):
            for depth in options.depths:
                result = measure(wire, Path(directory), far, depth, case.request())
                results.append(result)
                print(
                    f"{depth:9,} wait: {result['cpu_us']:6.1f} us a request, {result['kib_each']:6.1f} KiB each, {result['held_mib']:8.1f} MiB, unanswered {result['unanswered']}",
                    flush=True,
                )
    of = lambda depth, name: statistics.median(result[name] for result in results if result["depth"] == depth)
    rows = [(depth, of(depth, "cpu_us"), of(depth, "kib_each"), of(depth, "held_mib")) for depth in options.depths]
    text = ["| requests that wait | CPU, us a request | memory, KiB each | resident, MiB |", "|---|---|---|---|"]
    text += [f"| {depth:,} | {cpu:.1f} | {each:.1f} | {held:,.0f} |" for depth, cpu, each, held in rows]
    panels = [
        ("CPU, us a request", [("", [(depth, cpu) for depth, cpu, _, _ in rows])]),
        ("memory beside the body, KiB a request", [("", [(depth, max(0.0, each - options.body / 1024)) for depth, _, each, _ in rows])]),
    ]
    (options.out / "waiting.json").write_text(json.dumps({"machine": run.machine(), "waiting": results}, indent=1))
    (options.out / "waiting.md").write_text("\n".join(text) + "\n")
    (options.out / "waiting.svg").write_text(report.growth("requests of 8 KB that wait" if options.body == 8 << 10 else "requests that wait", panels))
    print("\n" + "\n".join(text))
    unanswered = sum(result["unanswered"] for result in results)
    if unanswered:
        sys.exit(f"{unanswered} requests were not answered")


if __name__ == "__main__":
    main()
