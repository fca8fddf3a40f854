#!/usr/bin/env python3
"""Headway beside what people would use instead: CPU time of the proxy per request, throughput and added time to the first and last byte.

    python3 benches/compare/run.py                      everything: about 20 minutes on two cores
    python3 benches/compare/run.py --peers nginx headway --cases json-1k sse-64
    python3 benches/compare/run.py --scale              only Headway, from 1 to 200 backends, 50 pools, 10,000 tenants, 20,000 idle connections

Needs Linux, rustc, python3 with venv, nginx, and a release build of Headway (or HEADWAY=path); the other peers are installed from PyPI into
target/compare at first use (COMPARE_CACHE names another folder). Writes results.json, results.md and results.svg there, or the same of `scale`.

The mock upstream and the load generator (wire.rs) share one core, the proxy has another. In each repeat every peer has its turn at a case, so that a slow
minute of the machine meets all of them. Every answer must have status 200 and as many bytes as the peer's first answer, which is checked in full.
"""

import argparse
import hashlib
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import peers
import report

HERE = Path(__file__).resolve().parent
# What the mock streams, the last piece last.
PIECES = [" word", " long", " more", " some"]


@dataclass
class Case:
    """One workload. `rate` 0 is a closed loop of `connections`; otherwise so many arrivals a second at random moments over at most that many."""

    name: str
    what: str
    body: int
    connections: int
    chunks: int = 0
    gap_us: int = 0
    rate: float = 0
    seconds: float = 2

    def request(self, model="mock"):
        start = f"mock={self.chunks}-{self.gap_us} "
        content = {"model": model, "messages": [{"role": "user", "content": start}], "stream": self.chunks > 0, "max_tokens": 256}
        room = self.body - len(json.dumps(content, separators=(",", ":")))
        content["messages"][0]["content"] += ("word " * (room // 5 + 1))[:room].strip().ljust(room, ".")
        return json.dumps(content, separators=(",", ":")).encode()


CASES = [
    Case("json-1k-c1", "1 KB JSON, 1 connection", 1 << 10, 1),
    Case("json-1k", "1 KB JSON, 64 connections", 1 << 10, 64),
    Case("json-1k-c512", "1 KB JSON, 512 connections", 1 << 10, 512),
    Case("json-64k", "64 KB JSON, 64 connections", 64 << 10, 64),
    Case("json-64k-c512", "64 KB JSON, 512 connections", 64 << 10, 512),
    Case("json-1m", "1 MB JSON, 16 connections", 1 << 20, 16),
    Case("sse-64-c1", "stream of 64 chunks without gaps, 1 connection", 1 << 10, 1, chunks=64),
    Case("sse-64", "stream of 64 chunks without gaps, 64 connections", 1 << 10, 64, chunks=64),
    Case("sse-64-c512", "stream of 64 chunks without gaps, 512 connections", 1 << 10, 512, chunks=64),
    Case("sse-256", "stream of 256 chunks without gaps, 64 connections", 1 << 10, 64, chunks=256),
    Case("paced-64", "stream of 64 chunks 10 ms apart, 64 connections", 1 << 10, 64, chunks=64, gap_us=10_000),
    Case("open-json", "1 KB JSON, 300 requests/s", 1 << 10, 256, rate=300, seconds=4),
    Case("open-sse", "stream of 64 chunks without gaps, 300 requests/s", 1 << 10, 256, chunks=64, rate=300, seconds=4),
]


class Wire:
    """The built load generator and mock."""

    def __init__(self, directory, core):
        self.directory, self.core = Path(directory), core
        self.program = build_wire()

    def spawn(self, *arguments, **options):
        pin = None if self.core is None else lambda: os.sched_setaffinity(0, {self.core})
        return subprocess.Popen([self.program, *map(str, arguments)], preexec_fn=pin, **options)

    def mock(self):
        address = f"127.0.0.1:{peers.free_port()}"
        return self.spawn("mock", address), address

    def load(self, address, bodies, connections, seconds, rate=0, expect=0, show=0, keys=None):
        options = ["connections", connections, "seconds", seconds, "rate", rate, "expect", expect, "show", show]
        for body in bodies:
            options += ["body", self.file(body)]
        if keys:
            options += ["keys", keys]
        output = self.spawn("load", address, *options, stdout=subprocess.PIPE, text=True).communicate()[0]
        return json.loads(output)

    def file(self, body):
        path = self.directory / hashlib.sha256(body).hexdigest()[:16]
        if not path.exists():
            path.write_bytes(body)
        return path


def build_wire():
    source, program = HERE / "wire.rs", peers.CACHE / "wire"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        peers.CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run(["rustc", "-O", "--edition", "2024", source, "-o", program], check=True)
    return program


def check(case, body):
    """Why the answer is not what the mock sent; None if it is."""
    if not case.chunks:
        content = json.loads(body)["choices"][0]["message"]["content"]
        return None if content == "lorem ipsum " * 60 else f"content of {len(content)} characters"
    events = [line[6:] for line in body.split("\n") if line.startswith("data: ")]
    expected = [PIECES[-left % 4] for left in range(case.chunks, 0, -1)]
    pieces = [choice["delta"].get("content") or "" for event in events if event != "[DONE]" for choice in json.loads(event)["choices"]]
    if "".join(pieces) != "".join(expected):
        return f"{sum(map(bool, pieces))} of {case.chunks} pieces"
    return None if events[-1] == "[DONE]" else "no [DONE] at the end"


def busy_seconds():
    """CPU seconds that all cores spent on anything."""
    fields = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9]))
    return (sum(fields) - fields[3] - fields[4]) / peers.TICK


def settle(peer, seconds=60):
    """Waits while a peer still works on what its last clients have given up."""
    deadline = time.monotonic() + seconds
    while peer and time.monotonic() < deadline:
        cpu = peers.Cpu(peer.processes())
        time.sleep(0.2)
        if cpu.seconds() < 0.02:
            return


def measure(wire, mock, peer, address, case, expect, bodies=None, keys=None):
    """One run of a case; None for `peer` is no proxy at all."""
    bodies = bodies or [case.request()]
    wire.load(address, bodies, case.connections, 0.2 if case.rate == 0 else 0.5, case.rate, keys=keys)
    pids = peer.processes() if peer else []
    cpu, all_before = peers.Cpu(pids), busy_seconds()
    ends = peers.Cpu([mock.pid])
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = wire.load(address, bodies, case.connections, case.seconds, case.rate, expect, keys=keys)
    used, mock_used, all_used = cpu.seconds(), ends.seconds(), busy_seconds() - all_before
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    load_used = after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
    served = result["ok"] + sum(result["failed"].values())
    result.pop("body", None)
    return {
        "case": case.name,
        **result,
        "rps": result["ok"] / result["seconds"],
        "cpu_us": used / served * 1e6 if served else 0,
        "cpu_share": used / result["seconds"],
        # Cores that programs outside this comparison kept busy meanwhile.
        "foreign": max(0.0, (all_used - used - mock_used - load_used) / result["seconds"]),
        "rss_mib": peers.rss_mib(pids),
    }


def compare(options, wire, directory, core):
    cases = [case for case in CASES if not options.cases or case.name in options.cases]
    mock, upstream = wire.mock()
    running, missing, results, rss = {}, {}, [], {}
    try:
        time.sleep(0.3)
        for name in options.peers:
            if name == "direct":
                continue
            try:
                running[name] = peers.PEERS[name]([f"http://{upstream}"], "mock", directory, core).wait(CASES[1].request())
                rss[name] = {"idle": peers.rss_mib(running[name].processes())}
                print(f"{name} {running[name].version()} answers, {rss[name]['idle']:.0f} MiB", flush=True)
            except peers.Missing as error:
                missing[name] = str(error)
                print(f"{name} is left out: {error}", flush=True)
        everyone = [("direct", None, upstream)] + [(name, peer, peer.address) for name, peer in running.items()]
        for case in cases:
            expect = {}
            for name, peer, address in everyone:
                settle(peer)
                first = wire.load(address, [case.request()], 1, 0.001, show=1)
                wrong = f"{first['failed']}" if first["failed"] else check(case, first["body"])
                if wrong:
                    print(f"{case.name}: {name} answers wrongly: {wrong}", flush=True)
                    results.append({"case": case.name, "peer": name, "wrong": wrong})
                else:
                    expect[name] = first["bytes"] // first["ok"]
            for repeat in range(options.repeats):
                for name, peer, address in everyone:
                    if name not in expect:
                        continue
                    result = measure(wire, mock, peer, address, case, expect[name])
                    result |= {"peer": name, "repeat": repeat}
                    results.append(result)
                    print(
                        f"{case.name:14} {name:12} {result['cpu_us']:9.1f} us/request {result['rps']:9.0f}/s  first p50 {result['first_us']['p50']:7} p99 {result['first_us']['p99']:7} us"
                        f"  others {result['foreign']:.2f} cores  failed {result['failed'] or 0}",
                        flush=True,
                    )
            # What is measured so far outlives an interruption.
            (options.out / "partial.json").write_text(json.dumps({"results": results, "rss": rss}))
        for name, peer in running.items():
            rss[name]["peak"] = peers.rss_mib(peer.processes(), peak=True)
        about = {name: {"version": peer.version(), "settings": peer.settings} for name, peer in running.items()}
    finally:
        for peer in running.values():
            peer.stop()
        mock.kill()
        mock.wait()
    return {"cases": [asdict(case) for case in cases], "results": results, "rss": rss, "peers": about, "missing": missing}


# --- Headway alone ---


class Variant(peers.Headway):
    """Headway with another configuration. Backends are paths of the one mock."""

    pools, backends, tenants, ranker = 1, 1, 0, None

    def __init__(self, upstream, directory, core, **change):
        for name, value in change.items():
            setattr(self, name, value)
        super().__init__([f"http://{upstream}"], "mock", directory, core)

    def config(self):
        # Idle connections have sent nothing, and are to stay for as long as the run takes.
        lines = [f"listen: 127.0.0.1:{self.port}", f"admin: 127.0.0.1:{self.admin}", "threads: 1", "edge: { head_timeout: 1h }"]
        if self.ranker:
            lines.append(f"ranker: {{ weights: {self.ranker}, deadline: 10s, threads: 1 }}")
        if self.tenants:
            tenants = "\n".join(f"  - {{ name: t{at}, keys: [{hashlib.sha256(key(at).encode()).hexdigest()}], limits: {{ concurrent_requests: 1000 }} }}" for at in range(self.tenants))
            self.write("keys.yaml", f"tenants:\n{tenants}\n")
            lines.append("keys: { file: keys.yaml }")
        lines.append("pools:")
        for pool in range(self.pools):
            lines += [f"  - name: p{pool}", f"    models: [m{pool}]", "    backends:"]
            lines += [f'      - {{ url: "{self.upstreams[0]}/{pool}-{at}", engine: openai, slots: {self.slots} }}' for at in range(self.backends)]
        return "\n".join(lines) + "\n"


def key(tenant):
    return f"hw-{tenant:05}-" + hashlib.sha256(str(tenant).encode()).hexdigest()


def scale(options, wire, directory, core):
    """CPU per request and memory of Headway by what its configuration holds, every variant interleaved with the plain one."""
    case = Case("json-1k", "1 KB JSON, 64 connections", 1 << 10, 64, seconds=options.seconds or 2)
    keys = Path(directory) / "keys"
    variants = [
        ("plain: 1 backend, 1 pool, no keys", {}),
        ("10 backends", {"backends": 10}),
        ("50 backends", {"backends": 50}),
        ("200 backends", {"backends": 200, "slots": 256}),
        ("10 pools", {"pools": 10}),
        ("50 pools", {"pools": 50}),
        ("1 tenant", {"tenants": 1}),
        ("100 tenants", {"tenants": 100}),
        ("10,000 tenants", {"tenants": 10_000}),
        (f"{options.idle:,} idle connections", {"idle": options.idle}),
        ("16 slots: 48 of 64 requests wait", {"slots": 16}),
    ]
    weights = peers.ROOT / "models" / "pars"
    if (weights / "card.json").exists():
        variants.append(("ranker, the score comes from its cache", {"ranker": weights}))
    mock, upstream = wire.mock()
    results, running, started = [], [], []
    try:
        time.sleep(0.3)
        for at, (name, change) in enumerate(variants):
            idle = change.pop("idle", 0)
            peer = Variant(upstream, Path(directory) / f"v{at}", core, **change)
            started.append(peer)
            bodies = [case.request(f"m{pool}") for pool in range(change.get("pools", 1))]
            file = None
            if change.get("tenants"):
                file = keys.with_suffix(f".{change['tenants']}")
                file.write_text("".join(key(tenant) + "\n" for tenant in range(change["tenants"])))
                wait_ready(peer)
            else:
                peer.wait(bodies[0])
            rss = peers.rss_mib(peer.processes())
            holder = wire.spawn("idle", peer.address, idle, stdin=subprocess.PIPE, stdout=subprocess.PIPE) if idle else None
            running.append((name, peer, bodies, file, rss, holder))
            if holder and holder.stdout.readline().strip() != str(idle).encode():
                raise SystemExit(f"{idle} connections could not be opened")
        for repeat in range(options.repeats):
            for name, peer, bodies, file, rss, _ in running:
                result = measure(wire, mock, peer, peer.address, case, 0, bodies, file)
                results.append(result | {"peer": name, "repeat": repeat, "rss_idle": rss})
                print(f"{name:40} {result['cpu_us']:7.1f} us/request  {rss:6.1f} MiB idle, {result['rss_mib']:6.1f} after  failed {result['failed'] or 0}", flush=True)
    finally:
        for _, _, _, _, _, holder in running:
            if holder:
                holder.stdin.close()
                holder.wait()
        for peer in started:
            peer.stop()
        mock.kill()
        mock.wait()
    return results


def wait_ready(peer):
    """Until it listens: without a key it would not answer."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", peer.port), 1):
                return
        except OSError:
            time.sleep(0.1)
    raise peers.Missing(f"{peer.name} does not listen")


def raise_files(wanted):
    """Open files that this process and what it starts may have: `wanted`, or what is allowed to those who are not root."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, hard),) * 2)
    except ValueError:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def machine():
    model = next((line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=["direct", *peers.PEERS], choices=["direct", *peers.PEERS])
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], metavar="CASE", help=", ".join(case.name for case in CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, help="of each measurement; 2, and 4 with open loops")
    parser.add_argument("--scale", action="store_true", help="only Headway, by the size of its configuration")
    parser.add_argument("--out", type=Path, default=peers.CACHE)
    options = parser.parse_args()
    if options.seconds:
        for case in CASES:
            case.seconds = options.seconds
    # Headway holds the idle connections and twice the 64 of the load besides.
    options.idle = min(20_000, raise_files(65_536) - 1_000)
    cores = sorted(os.sched_getaffinity(0))
    near, far = (cores[0], cores[1]) if len(cores) > 1 else (None, None)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="compare-") as directory:
        wire = Wire(directory, near)
        if options.scale:
            found = {"machine": machine(), "scale": scale(options, wire, directory, far)}
            name, text = "scale", report.scale(found)
            (options.out / "scale.svg").write_text(report.scale_svg(found))
        else:
            found = {"machine": machine(), **compare(options, wire, directory, far)}
            name, text = "results", report.markdown(found)
            (options.out / "results.svg").write_text(report.svg(found))
    (options.out / f"{name}.json").write_text(json.dumps(found, indent=1))
    (options.out / f"{name}.md").write_text(text)
    print("\n" + text)
    failed = {result["peer"] for result in found.get("results", found.get("scale", [])) if result.get("failed") or result.get("wrong")}
    if failed:
        print(f"not every answer was right: {', '.join(sorted(failed))}; see the column `failed`", file=sys.stderr)


if __name__ == "__main__":
    main()
