#!/usr/bin/env python3
"""What the order is worth on a real engine: one workload through each gateway to the same pair of llama.cpp servers, time to the first and last token.

    python3 benches/compare/engine.py                   about 12 minutes on two cores
    python3 benches/compare/engine.py --vllm http://127.0.0.1:8001 http://127.0.0.1:8002 --model NAME --eos ID
                                                        the same through vLLM servers that run already, which end an answer with token ID

Needs what run.py needs, and the Python packages of tests/clients/requirements.txt (xllamacpp, gguf), which are installed into target/venv if they are
not there. Writes engine.json and engine.md into target/compare.

The servers run a llama model with random weights, so what they say has nothing to do with the prompt. The prompts are those of examples/demo_prompts.jsonl,
and each answer is as long as the real model's was (a part of it, `--scale`): `n_predict` tells llama.cpp, `max_tokens` is the same large number in every
request, so that no gateway is told. vLLM is told by `min_tokens` and a `logit_bias` for the token that ends an answer. Arrivals come in bursts, the same moments for all. The first third of the requests is not counted: caches fill, and
Headway, which starts knowing nothing of answer lengths, learns them as it would in its first minutes.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import peers
import run

CLIENTS = peers.ROOT / "tests" / "clients"
VENV = peers.ROOT / "target" / "venv"
PROMPTS = peers.ROOT / "examples" / "demo_prompts.jsonl"
MODEL = "toy"


def serve(model, port, slots, context):
    """One llama.cpp server, until SIGTERM; runs in the virtual environment."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {MODEL}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = slots * context
    params.endpoint_metrics = True
    params.endpoint_slots = True
    params.warmup = False
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    # A thread serves one connection, also an idle one that a gateway keeps; with as few as are usual, kept connections would block new ones.
    params.n_threads_http = 512
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


class Throttle:
    """Holds processes to a share of one core each, by a control group (version 1 or 2; needs root). Engines normally have machines of their own: held so,
    they neither take time from the gateway nor lose theirs to whatever else runs here."""

    def __init__(self, share):
        self.groups, self.share = [], share

    def hold(self, pid):
        period = 20_000
        quota = int(period * self.share)
        first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
        if (first / "cpu.shares").exists():
            root, limits = first, {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota, "cpu.shares": 8192}
        else:
            root, limits = second, {"cpu.max": f"{quota} {period}", "cpu.weight": 800}
        group = root / f"compare-engine-{pid}"
        group.mkdir()
        self.groups.append(group)
        for name, value in limits.items():
            (group / name).write_text(str(value))
        (group / "cgroup.procs").write_text(str(pid))

    def end(self):
        """After the processes have ended."""
        for group in self.groups:
            group.rmdir()


class Fcfs(peers.Headway):
    """Headway in the order of arrival: what its window and its choice of the backend bring alone."""

    name = "headway-fcfs"
    settings = "`policy: fcfs`, else the same"
    extra = "policy: fcfs\n"

    def config(self):
        backends = "\n".join(f'      - {{ url: "{url}" }}' for url in self.upstreams)
        return f"listen: 127.0.0.1:{self.port}\nadmin: 127.0.0.1:{self.admin}\n{self.extra}pools:\n  - name: engines\n    models: [{self.model}]\n    backends:\n{backends}\n"


class Scored(Fcfs):
    name = "headway"
    settings = "defaults: slots found out, policy `headway`; the shipped ranker on one thread, at most 500 ms for a score since the engines need the same two cores"
    extra = f"ranker: {{ weights: {peers.ROOT / 'models' / 'pars'}, threads: 1, deadline: 500ms }}\n"


GATEWAYS = {"nginx": peers.Nginx, "envoy": peers.Envoy, "smg": peers.Smg, "vllm-router": peers.VllmRouter, "headway-fcfs": Fcfs, "headway": Scored}


def python():
    """The virtual environment with the engine, made if it is missing."""
    program = VENV / "bin" / "python"
    if not program.exists():
        subprocess.run(["python3", "-m", "venv", VENV], check=True)
    if subprocess.run([program, "-c", "import xllamacpp, gguf"], capture_output=True).returncode:
        subprocess.run([program, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", CLIENTS / "requirements.txt"], check=True)
    return program


def llama_cpp(tokens):
    # With `cache_prompt` an engine would be faster each time it sees a prompt again, so that whoever has the later turn wins.
    return {"max_tokens": 4096, "n_predict": tokens, "cache_prompt": False}


def vllm(eos):
    # The end token counts too. vLLM's own cache of prompts is to be off: `--no-enable-prefix-caching`.
    return lambda tokens: {"max_tokens": 3000, "min_tokens": tokens - 1, "logit_bias": {str(eos): 100}}


def body(model, prompt, length):
    content = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(content | length).encode()


def workload(count, scale, model, length_of):
    """Requests and lengths, the same ones in every call."""
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    chosen = random.Random(1).sample(rows, min(count, len(rows)))
    lengths = [max(2, round(row["output_tokens"] * scale)) for row in chosen]
    return [body(model, row["prompt"], length_of(length)) for row, length in zip(chosen, lengths)], lengths


def bursts(count, rate):
    """Moments of arrival in seconds: 4 s three times as dense as the 8 s after them, `rate` a second on the whole."""
    random_ = random.Random(2)
    moments, at = [], 0.0
    for _ in range(count):
        dense = at % 12 < 4
        at += random_.expovariate(rate * (1.8 if dense else 0.6))
        moments.append(at)
    return moments


def tokens_of(tail):
    """The count of tokens that the engine reports at the end of a stream."""
    for line in reversed(tail.split("\n")):
        if line.startswith("data: {") and '"usage"' in line:
            usage = json.loads(line[6:]).get("usage")
            if usage:
                return usage["completion_tokens"]
    return None


def one(wire, gateway, urls, model, hello, bodies, lengths, schedule, directory):
    peer = gateway(urls, model, directory)
    try:
        peer.wait(hello)
        options = [*load_options(wire, bodies, len(bodies)), "schedule", schedule, "each", 1]
        cpu, busy, start = peers.Cpu(peer.processes()), run.busy_seconds(), time.monotonic()
        result = json.loads(wire.spawn("load", peer.address, *options, stdout=subprocess.PIPE, text=True).communicate()[0])
        failed = sum(result["failed"].values())
        wrong = sum(tokens_of(tail) != lengths[number] for number, _, _, tail in result["each"])
        skip = len(bodies) // 3
        counted = [row for row in result["each"] if row[0] >= skip]
        return {
            "ttft": [row[1] / 1e6 for row in counted], "ttlt": [row[2] / 1e6 for row in counted],
            "failed": failed, "wrong_length": wrong, "seconds": result["seconds"], "cpu": cpu.seconds(), "cores": (run.busy_seconds() - busy) / (time.monotonic() - start), "why": result["failed"],
        }  # fmt: skip
    finally:
        peer.stop()


def summary(values):
    values = sorted(values)
    at = lambda share: values[min(len(values) - 1, int(len(values) * share))]
    return {"mean": statistics.fmean(values), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


def markdown(found):
    text = [f"{found['machine']['cpu']}, {found['machine']['cores']} cores; {found['what']}", ""]
    for which, title in (("ttft", "to the first token"), ("ttlt", "to the last token")):
        text += [f"| {title}, s | mean (min..max of repeats) | to nginx | p50 | p90 | p99 | failed | wrong length | cores busy in all |", "|---|---|---|---|---|---|---|---|---|"]
        base = None
        for name, runs in found["runs"].items():
            each = [summary(run_[which]) for run_ in runs if run_[which]]
            if not each:
                text.append(f"| {name} | no answers | | | | | {sum(run_['failed'] for run_ in runs)} | | |")
                continue
            middle = {key: statistics.median(row[key] for row in each) for key in each[0]}
            means = [row["mean"] for row in each]
            base = base or middle["mean"]
            text.append(
                f"| {name} | {middle['mean']:.2f} ({min(means):.2f}..{max(means):.2f}) | {middle['mean'] / base:.2f} x | {middle['p50']:.2f} | {middle['p90']:.2f} | {middle['p99']:.2f}"
                f" | {sum(run_['failed'] for run_ in runs)} | {sum(run_['wrong_length'] for run_ in runs)} | {statistics.median(run_['cores'] for run_ in runs):.2f} |"
            )
        text.append("")
    return "\n".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", nargs="+", default=list(GATEWAYS), choices=list(GATEWAYS))
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--scale", type=float, default=0.4, help="of the real answers' lengths")
    parser.add_argument("--share", type=float, default=0.3, help="of a core that each server may use")
    parser.add_argument("--load", type=float, default=0.9, help="of what the two servers can do, as measured at the start")
    parser.add_argument("--rate", type=float, help="requests a second, instead of --load")
    parser.add_argument("--slots", type=int, default=4, help="of each server")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--vllm", nargs="+", metavar="URL", help="servers that run already, instead of two of llama.cpp")
    parser.add_argument("--model", default=MODEL, help="that they serve")
    parser.add_argument("--eos", type=int, help="the token that ends their answers")
    parser.add_argument("--out", type=Path, default=peers.CACHE)
    options = parser.parse_args()
    if options.vllm and options.eos is None:
        parser.error("--vllm needs --eos, the id of the token that ends an answer")
    options.out.mkdir(parents=True, exist_ok=True)
    length_of = vllm(options.eos) if options.vllm else llama_cpp
    hello = body(options.model, "hello", length_of(2))
    bodies, lengths = workload(options.requests, options.scale, options.model, length_of)
    runs, about, missing = {name: [] for name in options.gateways}, {}, {}
    servers, throttle = [], Throttle(options.share)
    with tempfile.TemporaryDirectory(prefix="compare-engine-") as directory:
        wire = run.Wire(directory, None)
        try:
            urls = options.vllm or start(servers, options, Path(directory) / "model.gguf")
            for url in urls:
                wait_healthy(url)
            held = "as they run" if options.vllm else hold(throttle, servers)
            rate = options.rate
            if not rate:
                # One after the other would flatter two servers that share cores with the gateway and the load.
                both = [wire.spawn("load", url.removeprefix("http://"), *load_options(wire, bodies, options.slots), "seconds", 12, stdout=subprocess.PIPE, text=True) for url in urls]
                done = [json.loads(process.communicate()[0]) for process in both]
                most = sum(result["ok"] / result["seconds"] for result in done)
                rate = most * options.load
                print(f"the servers complete {most:.2f} requests/s; {rate:.2f} arrive", flush=True)
            schedule = Path(directory) / "schedule"
            moments = bursts(len(bodies), rate)
            schedule.write_text("".join(f"{moment:.6f}\n" for moment in moments))
            for repeat in range(options.repeats):
                # Another order in each repeat: whatever comes and goes on the machine does not always meet the same ones.
                turn = repeat % len(options.gateways)
                for name in options.gateways[turn:] + options.gateways[:turn]:
                    if name in missing:
                        continue
                    gateway = GATEWAYS[name]
                    try:
                        result = one(wire, gateway, urls, options.model, hello, bodies, lengths, schedule, directory)
                    except peers.Missing as error:
                        missing[name] = str(error)
                        print(f"{name} is left out: {error}", flush=True)
                        continue
                    about[name] = gateway.settings
                    runs[name].append(result)
                    if result["ttft"]:
                        first, last = summary(result["ttft"]), summary(result["ttlt"])
                        print(
                            f"{name:12} first token mean {first['mean']:6.2f} p50 {first['p50']:6.2f} p99 {first['p99']:6.2f}  last token mean {last['mean']:6.2f} p50 {last['p50']:6.2f} p99 {last['p99']:6.2f}"
                            f"  {result['seconds']:.0f} s, CPU {result['cpu']:.2f} s, all cores {result['cores']:.2f} busy, failed {result['why'] or 0}, wrong length {result['wrong_length']}",
                            flush=True,
                        )
                    else:
                        print(f"{name}: no answers: {result['why']}", flush=True)
        finally:
            for server in servers:
                server.terminate()
                server.wait()
            throttle.end()
    engines = f"{len(urls)} vLLM servers" if options.vllm else f"two llama.cpp servers, model of {options.layers} layers and width {options.hidden}"
    what = (
        f"{engines}, {options.slots} slots each, {held}; {len(bodies)} requests at {rate:.2f}/s over {moments[-1]:.0f} s,"
        f" answers of {statistics.fmean(lengths):.0f} tokens on average, {max(lengths)} at most; the last {len(bodies) - len(bodies) // 3} counted; {options.repeats} interleaved repeats, medians."
    )
    found = {"machine": run.machine(), "what": what, "settings": about, "missing": missing, "runs": runs}
    (options.out / "engine.json").write_text(json.dumps(found))
    text = markdown(found)
    (options.out / "engine.md").write_text(text)
    print("\n" + text)


def start(servers, options, model):
    """Starts two llama.cpp servers; their addresses."""
    subprocess.run([python(), CLIENTS / "toy_gguf.py", model, str(options.hidden), str(options.layers)], check=True, stdout=subprocess.DEVNULL)
    ports = [peers.free_port() for _ in range(2)]
    for port in ports:
        command = [python(), __file__, "serve", model, port, options.slots, 4096]
        servers.append(subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    return [f"http://127.0.0.1:{port}" for port in ports]


def hold(throttle, servers):
    """What the engines may use, in words."""
    try:
        for server in servers:
            throttle.hold(server.pid)
    except OSError as error:
        print(f"the engines are not held to {throttle.share} of a core: {error}", flush=True)
        return "one thread each, not held back"
    return f"held to {throttle.share} of a core each"


def load_options(wire, bodies, connections):
    options = ["connections", connections]
    for request in bodies:
        options += ["body", wire.file(request)]
    return options


def wait_healthy(url, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the server at {url} does not become healthy")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], *map(int, sys.argv[3:6]))
    else:
        main()
