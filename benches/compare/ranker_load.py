#!/usr/bin/env python3
"""What a saturated ranker does to requests that it does not score: added time to the first byte at 300 embeddings a second, with and without as many
new prompts as the ranker's threads can score, on the same cores. The mock and the load wait for a core too: what is added is over `direct` beside the same ranker.

    python3 benches/compare/ranker_load.py            about 2 minutes

Needs what run.py needs of Headway, and the ranker in models/pars. Nothing is pinned: the ranker, the proxy, the mock and the load share the machine.
"""

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import peers
import run

RATE, SECONDS, FLOOD = 300, 6, 32
# More than two cores score in a flood: one that comes again is answered from memory.
PROMPTS = 4_000
WORDS = "why how explain write list prove translate summarise compare short long story about the sea rust prime numbers a poem history of glass".split()


class Ranked(peers.Headway):
    """Two threads for requests, two for the ranker: what a machine of two cores gets by default."""

    def config(self):
        return (
            f"listen: 127.0.0.1:{self.port}\nadmin: 127.0.0.1:{self.admin}\n"
            f"ranker: {{ weights: {peers.ROOT / 'models' / 'pars'}, deadline: 10s, threads: 2 }}\n"
            f"pools:\n  - name: engines\n    models: [{self.model}]\n    backends:\n      - {{ url: \"{self.upstreams[0]}\", engine: openai, slots: 1024 }}\n"
        )


def prompts(seed, count):
    """Prompts of about 128 pieces that no cache has seen."""
    dice = random.Random(seed)
    for at in range(count):
        text = " ".join(dice.choices(WORDS, k=120)) + f" {seed}-{at}"
        yield json.dumps({"model": "mock", "messages": [{"role": "user", "content": text}]}).encode()


def scored(peer):
    """Prompts that the ranker has scored so far."""
    metrics = subprocess.run(["curl", "-sf", f"http://127.0.0.1:{peer.admin}/metrics"], capture_output=True, text=True, check=True).stdout
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith("headway_scores_total{") and 'result="scored"' in line)


def measure(wire, address, path):
    body = json.dumps({"model": "mock", "input": "x" * 900}).encode()
    command = ["load", address, "connections", 64, "seconds", SECONDS, "rate", RATE, "path", path, "body", wire.file(body)]
    result = json.loads(wire.spawn(*command, stdout=subprocess.PIPE, text=True).communicate()[0])
    if result["failed"]:
        raise SystemExit(f"failed: {result['failed']}")
    return result["first_us"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="compare-ranker-") as directory:
        wire = run.Wire(directory, None)
        mock, upstream = wire.mock()
        time.sleep(0.3)
        peer = Ranked([f"http://{upstream}"], "mock", Path(directory))
        try:
            peer.wait(next(prompts(0, 1)))
            for repeat in range(options.repeats):
                direct, idle = measure(wire, upstream, "/v1/embeddings"), measure(wire, peer.address, "/v1/embeddings")
                bodies = [wire.file(body) for body in prompts(repeat + 1, PROMPTS)]
                command = ["load", peer.address, "connections", FLOOD, "seconds", 2 * SECONDS + 3]
                for body in bodies:
                    command += ["body", body]
                before = scored(peer)
                flood = wire.spawn(*command, stdout=subprocess.PIPE, text=True)
                time.sleep(1)
                beside, busy = measure(wire, upstream, "/v1/embeddings"), measure(wire, peer.address, "/v1/embeddings")
                flooded = json.loads(flood.communicate()[0])
                if flooded["ok"] > PROMPTS:
                    raise SystemExit(f"{flooded['ok']} answers: some of the {PROMPTS} prompts were not new")
                rows.append(((direct, idle), (beside, busy)))
                speed = (scored(peer) - before) / flooded["seconds"]
                print(f"repeat {repeat}: ranker idle: direct {direct}, Headway {idle}; busy: direct {beside}, Headway {busy}, {speed:.0f} prompts/s scored", flush=True)
        finally:
            peer.stop()
            mock.kill()
            mock.wait()
    print("\n| added to direct, ms | ranker idle | ranker saturated | ratio |\n|---|---|---|---|")
    for name in ("p50", "p99"):
        added = [[(headway[name] - direct[name]) / 1e3 for direct, headway in pairs] for pairs in zip(*rows)]
        idle, busy = map(statistics.median, added)
        print(f"| {name} | {idle:.2f} | {busy:.2f} | {busy / idle:.1f} x |")


if __name__ == "__main__":
    main()
