#!/usr/bin/env python3
"""What the order is worth on a real engine: one workload through each gateway to a pair of llama.cpp servers, time to the first and last token.

    python3 benches/compare/engine.py                   about 12 minutes on two cores
    python3 benches/compare/engine.py --vllm http://127.0.0.1:8001 http://127.0.0.1:8002 --gateways headway --model NAME --eos ID
                                                        the same through vLLM servers that run already, two for each gateway, which end an answer with token ID

Needs what run.py needs, and the Python packages of tests/clients/requirements.txt (xllamacpp, gguf), which are installed into target/venv if they are
not there. Writes engine.json and engine.md into target/compare.

The servers run a llama model with random weights, so what they say has nothing to do with the prompt. The prompts are those of examples/demo_prompts.jsonl,
and each answer is as long as the real model's was (a part of it, `--scale`): a grammar tells llama.cpp, `max_tokens` is the same large number in every
request, so that no gateway is told. vLLM is told by `min_tokens` and a `logit_bias` for the token that ends an answer. Arrivals come in bursts.

A server's speed changes from minute to minute on a shared machine, by more than gateways differ. So all gateways work at the same time, each before a pair of
servers of its own, and get the same requests at the same moments; in each round they meet other pairs. The first third of a round is not counted: caches fill,
and Headway, which starts knowing nothing of answer lengths, learns them as it would in its first minutes.
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
# Requests whose mean is one value in a bootstrap: about a burst.
BLOCK = 40
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
    # A grammar of one letter, which is a token of its own, as often as is wanted and then nothing: so the answer ends by itself, as a real one does, and not by a
    # limit. The end is a token too. The model's tokenizer has bytes as its first tokens. With `cache_prompt` an engine would be faster each time it sees a prompt again.
    return {"max_tokens": 4096, "grammar": f'root ::= "a"{{{tokens - 1}}}', "logit_bias": {str(ord("a")): 100}, "cache_prompt": False}


def vllm(eos):
    # The end token counts too. vLLM's own cache of prompts is to be off: `--no-enable-prefix-caching`.
    return lambda tokens: {"max_tokens": 3000, "min_tokens": tokens - 1, "logit_bias": {str(eos): 100}}


def body(model, prompt, length):
    content = {"model": model, "messages": [{"role": "user", "content": prompt}], "stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(content | length).encode()


def workload(number, count, scale, model, length_of):
    """Requests and lengths of a round, the same ones in every call."""
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    chosen = random.Random(number).choices(rows, k=count)
    lengths = [max(2, round(row["output_tokens"] * scale)) for row in chosen]
    return [body(model, row["prompt"], length_of(length)) for row, length in zip(chosen, lengths)], lengths


def bursts(number, count, rate):
    """Moments of arrival in seconds: of every 20 s the first 5 at random, then none; `rate` a second on the whole. What has come then is more than the slots, however
    fast the servers are at the moment, and is done with before the next ones come."""
    random_ = random.Random(1000 + number)
    moments, dense = [], 0.0
    for _ in range(count):
        dense += random_.expovariate(4 * rate)
        moments.append(20 * (dense // 5) + dense % 5)
    return moments


def tokens_of(tail):
    """The count of tokens that the engine reports at the end of a stream."""
    for line in reversed(tail.split("\n")):
        if line.startswith("data: {") and '"usage"' in line:
            usage = json.loads(line[6:]).get("usage")
            if usage:
                return usage["completion_tokens"]
    return None


def together(wire, pairs, missing, servers, model, hello, bodies, lengths, schedule, directory):
    """One round: each gateway before the pair of servers that `pairs` gives it, all at the same time. Seconds of the requests that count, and what the servers
    of each took of the machine for a token."""
    running, results = {}, {}
    try:
        for name, urls in pairs.items():
            try:
                running[name] = GATEWAYS[name](urls, model, directory).wait(hello)
            except peers.Missing as error:
                missing[name] = str(error)
                print(f"{name} is left out: {error}", flush=True)
        options = [*load_options(wire, bodies, len(bodies)), "schedule", schedule, "each", 1]
        busy, start = run.busy_seconds(), time.monotonic()
        used = {name: peers.Cpu(peer.processes()) for name, peer in running.items()}
        engines = {name: peers.Cpu([servers[url].pid for url in pairs[name] if url in servers]) for name in running}
        loads = {name: wire.spawn("load", peer.address, *options, stdout=subprocess.PIPE, text=True) for name, peer in running.items()}
        for name, load in loads.items():
            result = json.loads(load.communicate()[0])
            counted = [row for row in result["each"] if row[0] >= len(bodies) // 3]
            results[name] = {
                "number": [row[0] for row in counted], "ttft": [row[1] / 1e6 for row in counted], "ttlt": [row[2] / 1e6 for row in counted],
                "failed": sum(result["failed"].values()), "why": result["failed"],
                "wrong_length": sum(tokens_of(tail) != lengths[number] for number, _, _, tail in result["each"]), "seconds": result["seconds"],
            }  # fmt: skip
        cores = (run.busy_seconds() - busy) / (time.monotonic() - start)
        for name, result in results.items():
            result |= {"cpu": used[name].seconds(), "engine_us_per_token": engines[name].seconds() * 1e6 / sum(lengths), "cores": cores}
        return results
    finally:
        for peer in running.values():
            peer.stop()


def at(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * share))]


def blocks(runs, which):
    """Means of requests that arrived after one another, `BLOCK` at a time, by round and block."""
    found = {}
    for number, result in enumerate(runs):
        for request, value in zip(result["number"], result[which]):
            found.setdefault((number, request // BLOCK), []).append(value)
    return {block: statistics.fmean(values) for block, values in found.items()}


def to_first(ours, base):
    """The mean over that of the first gateway, and the middle 95 % of a bootstrap over blocks, which are drawn in pairs."""
    pairs = [(ours[block], base[block]) for block in base if block in ours]
    ratio = lambda chosen: sum(mine for mine, _ in chosen) / sum(theirs for _, theirs in chosen)
    random_ = random.Random(3)
    drawn = [ratio(random_.choices(pairs, k=len(pairs))) for _ in range(4000)]
    return ratio(pairs), at(drawn, 0.025), at(drawn, 0.975)


def markdown(found):
    text = [f"{found['machine']['cpu']}, {found['machine']['cores']} cores; {found['what']}", ""]
    first = next(iter(found["runs"]))
    for which, title in (("ttft", "to the first token"), ("ttlt", "to the last token")):
        text += [f"| {title}, s | mean (of each round) | to {first} (95 %) | p50 | p90 | p99 | failed | wrong length |", "|---|---|---|---|---|---|---|---|"]
        base = blocks(found["runs"][first], which)
        for name, runs in found["runs"].items():
            failed, wrong = (sum(result[key] for result in runs) for key in ("failed", "wrong_length"))
            every = [value for result in runs for value in result[which]]
            if not every or not base:
                text.append(f"| {name} | no answers that count | | | | | {failed} | {wrong} |")
                continue
            ratio, low, high = to_first(blocks(runs, which), base)
            rounds = ", ".join(f"{statistics.fmean(result[which] or [float('nan')]):.2f}" for result in runs)
            text.append(
                f"| {name} | {statistics.fmean(every):.2f} ({rounds}) | {ratio:.2f} x ({low:.2f} to {high:.2f}) | {at(every, 0.5):.2f} | {at(every, 0.9):.2f} | {at(every, 0.99):.2f} | {failed} | {wrong} |"
            )
        text.append("")
    return "\n".join(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # Envoy does as nginx does here, and two more servers are less of a core for each.
    parser.add_argument("--gateways", nargs="+", default=[name for name in GATEWAYS if name != "envoy"], choices=list(GATEWAYS))
    parser.add_argument("--requests", type=int, default=400, help="of a round")
    parser.add_argument("--scale", type=float, default=0.4, help="of the real answers' lengths")
    parser.add_argument("--share", type=float, default=0.12, help="of a core that each server may use")
    parser.add_argument("--load", type=float, default=0.6, help="of what two servers can do, as measured at the start")
    parser.add_argument("--rate", type=float, help="requests a second, instead of --load")
    parser.add_argument("--slots", type=int, default=4, help="of each server")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", nargs="+", metavar="URL", help="servers that run already, two for each gateway, instead of llama.cpp")
    parser.add_argument("--model", default=MODEL, help="that they serve")
    parser.add_argument("--eos", type=int, help="the token that ends their answers")
    parser.add_argument("--out", type=Path, default=peers.CACHE)
    options = parser.parse_args()
    names = options.gateways
    if options.vllm and options.eos is None:
        parser.error("--vllm needs --eos, the id of the token that ends an answer")
    if options.vllm and len(options.vllm) != 2 * len(names):
        parser.error(f"--vllm needs two servers for each of {len(names)} gateways, not {len(options.vllm)} in all")
    # So that gateways and servers end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))
    options.out.mkdir(parents=True, exist_ok=True)
    length_of = vllm(options.eos) if options.vllm else llama_cpp
    hello = body(options.model, "hello", length_of(2))
    runs, missing, every_length = {name: [] for name in names}, {}, []
    servers, throttle = {}, Throttle(options.share)
    with tempfile.TemporaryDirectory(prefix="compare-engine-") as directory:
        wire = run.Wire(directory, None)
        try:
            urls = options.vllm or start(servers, 2 * len(names), options, Path(directory) / "model.gguf")
            for url in urls:
                wait_healthy(url)
            held = "as they run" if options.vllm else hold(throttle, servers.values())
            rate = options.rate
            if not rate:
                # One after the other would flatter servers that share cores with each other, the gateways and the load.
                bodies, lengths = workload(0, options.requests, options.scale, options.model, length_of)
                options_of_all = [*load_options(wire, bodies, options.slots), "seconds", 20, "each", 1]
                every = [wire.spawn("load", url.removeprefix("http://"), *options_of_all, stdout=subprocess.PIPE, text=True) for url in urls]
                done = [json.loads(process.communicate()[0]) for process in every]
                # By tokens: the long answers are those that are not complete at the end.
                tokens = sum(lengths[row[0] % len(lengths)] / result["seconds"] for result in done for row in result["each"])
                most = tokens / statistics.fmean(lengths) / len(names)
                rate = most * options.load
                print(f"two servers complete {most:.2f} requests/s; {rate:.2f} arrive at each gateway", flush=True)
            schedule = Path(directory) / "schedule"
            for number in range(options.rounds):
                bodies, lengths = workload(number, options.requests, options.scale, options.model, length_of)
                schedule.write_text("".join(f"{moment:.6f}\n" for moment in bursts(number, len(bodies), rate)))
                every_length += lengths
                turned = names[number % len(names) :] + names[: number % len(names)]
                pairs = {name: urls[2 * place : 2 * place + 2] for place, name in enumerate(turned) if name not in missing}
                for name, result in together(wire, pairs, missing, servers, options.model, hello, bodies, lengths, schedule, directory).items():
                    runs[name].append(result)
                    means = [statistics.fmean(result[which] or [float("nan")]) for which in ("ttft", "ttlt")]
                    engines = f" its engines {result['engine_us_per_token']:.0f} us a token," if servers else ""
                    print(
                        f"round {number} {name:12} mean to the first token {means[0]:6.2f}, to the last {means[1]:6.2f}  {result['seconds']:.0f} s, CPU {result['cpu']:.2f} s,"
                        f" all cores {result['cores']:.2f} busy,{engines} failed {result['why'] or 0}, wrong length {result['wrong_length']}",
                        flush=True,
                    )
        finally:
            for server in servers.values():
                server.terminate()
                server.wait()
            throttle.end()
    engines = "two vLLM servers" if options.vllm else f"two llama.cpp servers, model of {options.layers} layers and width {options.hidden}"
    what = (
        f"each gateway before {engines}, {options.slots} slots each, {held}; {options.rounds} rounds of {options.requests} requests at {rate:.2f}/s, answers of"
        f" {statistics.fmean(every_length):.0f} tokens on average, {max(every_length)} at most; the last two thirds of each round counted, all together."
    )
    settings = {name: GATEWAYS[name].settings for name in names if name not in missing}
    found = {"machine": run.machine(), "what": what, "settings": settings, "missing": missing, "runs": {name: results for name, results in runs.items() if results}}
    (options.out / "engine.json").write_text(json.dumps(found))
    text = markdown(found)
    (options.out / "engine.md").write_text(text)
    print("\n" + text)


def start(servers, count, options, model):
    """Starts llama.cpp servers, by their addresses in `servers`."""
    subprocess.run([python(), CLIENTS / "toy_gguf.py", model, str(options.hidden), str(options.layers)], check=True, stdout=subprocess.DEVNULL)
    for _ in range(count):
        port = peers.free_port()
        command = [python(), __file__, "serve", model, port, options.slots, 4096]
        servers[f"http://127.0.0.1:{port}"] = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return list(servers)


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
