#!/usr/bin/env python3
"""Instructions that Headway executes per request, counted by valgrind: the same on a busy machine, so that a slow-down of 5 % shows.

    python3 benches/compare/instructions.py             counts, compares with instructions.json, fails above 5 %; about a minute
    python3 benches/compare/instructions.py --store     makes what is counted the new baseline

Needs valgrind and what run.py needs of Headway. The whole program runs under callgrind, one connection asks, counting starts after it is warm. Instructions
of the kernel are not in it, nor is waiting. The baseline holds for one compiler on one kind of processor: store it anew with either.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import peers
import run

BASELINE = Path(__file__).with_suffix(".json")
LIMIT = 1.05
REPEATS = 3
CASES = [
    ("1 KB JSON: parse, queue, release, answer", "json-1k", 1024, 1),
    ("64 KB JSON", "json-64k", 1024, 1),
    ("stream of 64 chunks", "sse-64", 1024, 1),
    ("1 KB JSON of which 3 of 4 wait for the one slot", "json-1k", 1, 4),
]


class Counted(peers.Headway):
    """Headway under callgrind."""

    def command(self):
        command, environment = super().command()
        return ["valgrind", "--tool=callgrind", f"--callgrind-out-file={self.directory}/counts", *command], environment

    def control(self, action):
        subprocess.run(["callgrind_control", action, str(self.process.pid)], check=True, capture_output=True)

    def counted(self):
        """Instructions since the last call or `--zero`, taken out of the newest dump."""
        self.control("--dump")
        newest = max(self.directory.glob("counts.*"), key=lambda path: path.stat().st_mtime_ns)
        return next(int(line.split()[1]) for line in newest.read_text().splitlines() if line.startswith("totals:"))


def count(wire, upstream, case, slots, connections, directory):
    peer = type("Variant", (Counted,), {"slots": slots})([f"http://{upstream}"], "mock", directory)
    try:
        peer.wait(case.request())
        wire.load(peer.address, [case.request()], connections, 1)
        per_request = []
        for _ in range(REPEATS):
            peer.control("--zero")
            result = wire.load(peer.address, [case.request()], connections, 3)
            if result["failed"]:
                raise SystemExit(f"{case.name}: {result['failed']}")
            per_request.append(peer.counted() / result["ok"])
            time.sleep(0.1)
        # What disturbs (probes, timers while the machine is busy) only ever adds.
        return min(per_request), max(per_request)
    finally:
        peer.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", action="store_true", help="make this the baseline")
    options = parser.parse_args()
    if not shutil.which("valgrind"):
        raise SystemExit("valgrind is missing: apt-get install valgrind")
    cases = {case.name: case for case in run.CASES}
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {"instructions": {}}
    found, slower = {}, []
    print("| Headway, instructions a request | | spread of 3 | baseline | ratio |\n|---|---|---|---|---|")
    for what, name, slots, connections in CASES:
        with tempfile.TemporaryDirectory(prefix="compare-counts-") as directory:
            wire = run.Wire(directory, None)
            mock, upstream = wire.mock()
            try:
                time.sleep(0.3)
                least, most = count(wire, upstream, cases[name], slots, connections, directory)
            finally:
                mock.kill()
                mock.wait()
        found[what] = round(least)
        before = baseline["instructions"].get(what)
        ratio = least / before if before else None
        if ratio and ratio > LIMIT:
            slower.append(what)
        print(f"| {what} | {least:,.0f} | {most / least - 1:.1%} | {before or 0:,} | {f'{ratio:.3f}' if ratio else '-'} |", flush=True)
    if options.store:
        rust = subprocess.run(["rustc", "--version"], capture_output=True, text=True).stdout.strip()
        BASELINE.write_text(json.dumps({"rust": rust, "cpu": run.machine()["cpu"], "instructions": found}, indent=1) + "\n")
    elif slower:
        sys.exit(f"more than {LIMIT - 1:.0%} above the baseline of {baseline.get('rust')} on {baseline.get('cpu')}: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
