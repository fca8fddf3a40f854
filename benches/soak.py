#!/usr/bin/env python3
"""Many streams at once, and long mixed load with everything going wrong, against one gateway. Needs nothing but Python and a built `headway`.

    benches/soak.py                                  5,000 streams at once, then 60 s of mixed load
    benches/soak.py --streams 0 --seconds 600        ten minutes of mixed load alone
    benches/soak.py --headway target/debug/headway   another binary than target/release/headway

The gateway and three backends run as processes of their own on loopback. Of the mixed load a fifth of the clients leave at a random moment, a backend is
killed and started again every few seconds, and the configuration is reloaded. The verdict, and the exit code, is that of these promises:

  endings   every request has one line in the access log, and it says what its client saw; no stream is cut without a word
  held      waiting, in flight and queued bytes are zero in the end, everywhere
  memory    resident memory grows by less than a tenth over the run, by a line through all samples after the first fifth
"""

import argparse
import asyncio
import collections
import contextlib
import json
import pathlib
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORD = json.dumps({"id": "c", "object": "chat.completion.chunk", "model": "sim", "choices": [{"index": 0, "delta": {"content": "word "}}]})
LAST = json.dumps({"id": "c", "model": "sim", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 5, "completion_tokens": 5}})
WHOLE = json.dumps({"id": "c", "model": "sim", "choices": [{"index": 0, "message": {"content": "words"}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 5, "completion_tokens": 5}}).encode()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def chunk(text):
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def document(body, status="200 OK"):
    return f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


# The backend: as many words as the request says, so many milliseconds apart.


async def serve_backend(reader, writer):
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = next((int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
            body = await reader.readexactly(length)
            if head.startswith("get /v1/models"):
                writer.write(document(b'{"object":"list","data":[{"id":"sim","owned_by":"soak"}]}'))
            elif head.startswith("get "):
                writer.write(document(b"{}", "200 OK" if head.startswith("get /health") else "404 Not Found"))
            else:
                asked = json.loads(body)
                words, apart = asked["words"], asked["apart_ms"] / 1000
                if asked.get("stream"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                    for _ in range(words):
                        writer.write(chunk(WORD))
                        await writer.drain()
                        await asyncio.sleep(apart)
                    writer.write(chunk(LAST) + chunk("[DONE]") + b"0\r\n\r\n")
                else:
                    await asyncio.sleep(words * apart)
                    writer.write(document(WHOLE))
            await writer.drain()
    writer.close()


async def backend(port):
    server = await asyncio.start_server(serve_backend, "127.0.0.1", port, backlog=8192)
    await server.serve_forever()


class Backend:
    def __init__(self):
        self.port = free_port()
        self.start()

    def start(self):
        self.child = subprocess.Popen([sys.executable, __file__, "--backend", str(self.port)])

    def kill(self):
        self.child.kill()
        self.child.wait()


class Gateway:
    def __init__(self, binary, folder, backends, slots):
        self.folder, self.backends, self.slots, self.reloads = folder, backends, slots, 0
        self.port, self.admin = free_port(), free_port()
        self.config, self.log = folder / "gateway.yaml", folder / "gateway.log"
        self.write()
        with open(self.log, "wb") as log:
            self.child = subprocess.Popen([binary, "serve", "--config", self.config, "--log", "json"], stdout=log, stderr=subprocess.STDOUT)
        self.until(lambda: all(backend["standing"] == "healthy" for backend in self.pool()["backends"]), "the backends are healthy", 60)

    def write(self, retries=2):
        backends = [{"url": f"http://127.0.0.1:{backend.port}", "slots": self.slots} for backend in self.backends]
        pool = {"name": "soak", "models": ["sim"], "backends": backends, "retries": retries, "retry_budget": 1000, "resume": retries % 2 == 0}
        self.config.write_text(json.dumps({"listen": f"127.0.0.1:{self.port}", "admin": f"127.0.0.1:{self.admin}", "pools": [pool]}))

    def get(self, path, method="GET"):
        with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{self.admin}{path}", method=method), timeout=30) as answer:
            return json.load(answer)

    def pool(self):
        with contextlib.suppress(OSError):
            return self.get("/admin/pools")["pools"][0]
        return {"backends": [{"standing": "unknown"}]}

    def held(self):
        pool = self.pool()
        counts = {what: pool.get(what) for what in ("waiting", "waiting_bytes", "in_flight")}
        return {what: count for what, count in counts.items() if count != 0}

    def until(self, condition, what, within):
        deadline = time.monotonic() + within
        while not condition():
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"not within {within} s: {what}\n{self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def resident(self):
        """Resident memory in MiB."""
        return int(pathlib.Path(f"/proc/{self.child.pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    def lines(self):
        """The access log: what it says of each request."""
        said = collections.defaultdict(list)
        with open(self.log, errors="replace") as log:
            for line in log:
                with contextlib.suppress(ValueError):
                    entry = json.loads(line)
                    if entry.get("target") == "access":
                        fields = entry.get("fields", entry)
                        said[fields["id"]].append((int(fields["status"]), fields["reason"]))
        return said


class Client:
    """Sends requests and writes down how each ended, as its client saw it."""

    def __init__(self, gateway):
        self.gateway, self.endings, self.now, self.peak = gateway, {}, 0, 0

    async def ask(self, name, words, apart_ms, stream=True, leave_after=None):
        try:
            self.endings[name] = "left"
            async with asyncio.timeout(leave_after):
                self.endings[name] = await self.exchange(name, {"words": words, "apart_ms": apart_ms, "stream": stream})
        except TimeoutError:
            pass

    async def exchange(self, name, more):
        body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": "x" * random.randint(1, 400)}], **more}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        try:
            writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-id: {name}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status, streams = int(head.split()[1]), "text/event-stream" in head.lower()
            if not streams:
                await reader.read()
                return f"status {status}"
            self.now += 1
            self.peak = max(self.peak, self.now)
            try:
                tail = b""
                while part := await reader.read(65536):
                    tail = (tail + part)[-2000:]
            finally:
                self.now -= 1
            if b'"error"' in tail:
                return "error event"
            return "whole" if tail.endswith(b"0\r\n\r\n") and b"data: [DONE]" in tail else "cut"
        except (ConnectionError, asyncio.IncompleteReadError) as broken:
            return f"broken: {type(broken).__name__}"
        finally:
            writer.close()

    def judge(self):
        """Every ending against the access log."""
        said, wrong = self.gateway.lines(), collections.Counter()
        for name, ending in self.endings.items():
            lines = said.get(name, [])
            if len(lines) != 1:
                # A client that leaves before its head is read was never there.
                if not (ending == "left" and not lines):
                    wrong[f"{len(lines)} lines for one that ended with {ending!r}"] += 1
                continue
            status, reason = lines[0]
            agree = {
                "whole": reason == "ok",
                "status 200": reason == "ok",
                "error event": reason != "ok",
                "left": True,
            }.get(ending, ending == f"status {status}")
            if not agree:
                wrong[f"client saw {ending!r}, log says {status} {reason}"] += 1
        return wrong


def slope(samples):
    """Least squares: units per second, of (second, value)."""
    times, values = zip(*samples)
    at, mean = statistics.fmean(times), statistics.fmean(values)
    spread = sum((second - at) ** 2 for second in times)
    return sum((second - at) * (value - mean) for second, value in samples) / spread if spread else 0.0


class Verdict:
    def __init__(self):
        self.failed = False

    def say(self, good, text):
        self.failed |= not good
        print(("ok    " if good else "FAIL  ") + text, flush=True)


def settle(gateway, client, verdict, what):
    deadline = time.monotonic() + 60
    while gateway.held() and time.monotonic() < deadline:
        time.sleep(0.2)
    held, wrong = gateway.held(), client.judge()
    endings = collections.Counter(client.endings.values())
    told = ", ".join(f"{count} {ending}" for ending, count in endings.most_common())
    verdict.say(not wrong, f"{what}: {len(client.endings)} requests: {told}" + "".join(f"\n        {count} x {text}" for text, count in wrong.most_common(8)))
    verdict.say(not held, f"{what}: held in the end: {held or 'nothing'}")


async def many(gateway, streams, seconds, verdict):
    client, before = Client(gateway), gateway.resident()
    apart = 4000
    words = max(2, int(seconds * 1000 / apart))
    tasks = []
    for number in range(streams):
        tasks.append(asyncio.create_task(client.ask(f"many-{number}", words, apart)))
        if number % 50 == 49:
            await asyncio.sleep(0.05)
    peak = before
    while not all(task.done() for task in tasks):
        peak = max(peak, gateway.resident())
        await asyncio.sleep(0.5)
    await asyncio.gather(*tasks)
    verdict.say(client.peak >= streams * 0.99, f"streams: {client.peak} at once of {streams}")
    cost = (peak - before) * 1024 / max(streams, 1)
    verdict.say(cost < 100, f"streams: resident memory {before:.0f} MiB before, {peak:.0f} MiB at most: {cost:.1f} KiB a stream")
    settle(gateway, client, verdict, "streams")


async def mixed(gateway, seconds, workers, verdict):
    client, began, samples, chance = Client(gateway), time.monotonic(), [], random.Random(7)
    counts = collections.Counter()

    def over():
        return time.monotonic() - began > seconds

    async def worker(index):
        number = 0
        while not over():
            number += 1
            leaves = chance.uniform(0, 1.0) if chance.random() < 0.2 else None
            await client.ask(f"mixed-{index}-{number}", chance.randint(1, 30), chance.choice([0, 5, 20, 60]), chance.random() < 0.8, leaves)
            await asyncio.sleep(chance.uniform(0, 0.1))

    async def kills():
        while not over():
            await asyncio.sleep(chance.uniform(3, 8))
            victim = chance.choice(gateway.backends)
            victim.kill()
            counts["kills"] += 1
            await asyncio.sleep(chance.uniform(0.5, 2))
            victim.start()

    async def reloads():
        while not over():
            await asyncio.sleep(chance.uniform(1, 5))
            gateway.write(retries=1 + counts["reloads"] % 3)
            if counts["reloads"] % 2:
                gateway.child.send_signal(signal.SIGHUP)
            else:
                await asyncio.to_thread(gateway.get, "/admin/reload", "POST")
            counts["reloads"] += 1

    async def memory():
        while not over():
            samples.append((time.monotonic() - began, gateway.resident()))
            await asyncio.sleep(1)

    await asyncio.gather(kills(), reloads(), memory(), *(worker(index) for index in range(workers)))
    print(f"      mixed: {seconds} s, {workers} clients, {counts['kills']} backends killed, {counts['reloads']} reloads", flush=True)
    settle(gateway, client, verdict, "mixed")
    late = [sample for sample in samples if sample[0] > seconds / 5]
    per_minute, mean = slope(late) * 60, statistics.fmean(value for _, value in late)
    grows = per_minute / 60 * seconds * 0.8 / mean
    # A minute is too short to tell growth from warming up.
    verdict.say(grows < 0.1 or seconds < 300, f"mixed: resident memory {mean:.1f} MiB, slope {per_minute:+.2f} MiB a minute, {grows:+.1%} over the run")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--headway", default=ROOT / "target/release/headway", type=pathlib.Path)
    arguments.add_argument("--streams", default=5000, type=int, help="streams at once; 0 for none")
    arguments.add_argument("--held", default=60, type=int, help="seconds that each of them lasts")
    arguments.add_argument("--seconds", default=60, type=int, help="of mixed load; 0 for none")
    arguments.add_argument("--clients", default=100, type=int, help="of the mixed load")
    arguments.add_argument("--backend", type=int, help=argparse.SUPPRESS)
    asked = arguments.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 1 << 20, hard))
    if asked.backend:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(backend(asked.backend))
        return 0
    if not asked.headway.exists():
        raise SystemExit(f"{asked.headway} is not built: cargo build --release, or name another with --headway")
    verdict, backends, gateway = Verdict(), [Backend() for _ in range(3)], None
    with tempfile.TemporaryDirectory(prefix="headway-soak-") as folder:
        try:
            gateway = Gateway(asked.headway, pathlib.Path(folder), backends, max(64, asked.streams // 2))
            if asked.streams:
                asyncio.run(many(gateway, asked.streams, asked.held, verdict))
            if asked.seconds:
                asyncio.run(mixed(gateway, asked.seconds, asked.clients, verdict))
            verdict.say(gateway.child.poll() is None, "the gateway lives")
        finally:
            for child in [gateway and gateway.child, *(backend.child for backend in backends)]:
                if child:
                    child.kill()
                    child.wait()
    print("verdict:", "FAIL" if verdict.failed else "ok")
    return int(verdict.failed)


if __name__ == "__main__":
    sys.exit(main())
