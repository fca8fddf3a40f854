"""The programs under test as processes: the gateway, the simulated engine, a real llama.cpp server. Each ends only what it started."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import httpx

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
BINARY = pathlib.Path(os.environ.get("HEADWAY", ROOT / "target/debug/headway"))

# How long anything may take that should take no time: two busy cores run tests, engines and gateways at once.
PATIENCE = 20.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition, what, within=PATIENCE):
    """Polls until `condition()` is true, and returns what it returned. `what` may be a function that describes the state it ended in."""
    deadline = time.monotonic() + within
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within:g} s: {what() if callable(what) else what}")
        time.sleep(0.01)


class Process:
    """A child process with its output in a file."""

    def __init__(self, command, log):
        self.log = pathlib.Path(log)
        self.name = self.log.stem
        with open(self.log, "ab") as output:
            self.child = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def alive(self):
        return self.child.poll() is None

    def signal(self, number):
        self.child.send_signal(number)

    def wait(self, within=PATIENCE):
        return self.child.wait(within)

    def kill(self):
        """Ends the process, whatever state it is in."""
        if self.alive:
            self.child.terminate()
            try:
                self.child.wait(3)
            except subprocess.TimeoutExpired:
                self.child.kill()
        self.child.wait()

    def output(self):
        return self.log.read_text(errors="replace")

    def until(self, condition, what, within=PATIENCE):
        def alive_and_true():
            assert self.alive, f"{self.name} ended with {self.child.returncode}:\n{self.output()[-4000:]}"
            return condition()

        return wait_for(alive_and_true, lambda: f"{what}; its log:\n{self.output()[-4000:]}", within)


def answers(url, **options):
    """Whether a GET is answered with 200."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=2, **options).status_code == 200
    return False


class Engine(Process):
    """`headway engine`: continuous batching in real time, with everything it saw at /sim/state."""

    def __init__(self, folder, *, model="sim", slots=4, speed=10.0, profile="medium", seed=0, name="engine"):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.model = model
        command = [BINARY, "engine", "--listen", f"127.0.0.1:{port}", "--model", model, "--slots", slots, "--speed", speed]
        super().__init__([*command, "--profile", profile, "--seed", seed], pathlib.Path(folder) / f"{name}.log")
        self.until(lambda: answers(self.url + "/health"), "the engine answers")

    def state(self):
        return httpx.get(self.url + "/sim/state", timeout=PATIENCE).json()

    def metric(self, name):
        return metric(self.url, f"vllm:{name}")

    def faults(self, **faults):
        httpx.post(self.url + "/sim/faults", json=faults, timeout=PATIENCE).raise_for_status()

    def reset(self):
        httpx.post(self.url + "/sim/reset", timeout=PATIENCE).raise_for_status()


def metric(url, name):
    """The value of a metric, whatever its labels."""
    for line in httpx.get(url + "/metrics", timeout=PATIENCE).text.splitlines():
        if line.startswith((name + " ", name + "{")):
            return float(line.split()[-1])
    raise AssertionError(f"{url} has no metric {name}")


class LlamaCpp(Process):
    """A real llama.cpp server with a toy model: `hidden` and `layers` decide how slow it is."""

    model = "toy"

    def __init__(self, folder, *, slots=2, context=4096, hidden=64, layers=2, name="llamacpp"):
        folder = pathlib.Path(folder)
        model = folder / f"toy-{hidden}-{layers}.gguf"
        if not model.exists():
            subprocess.run([sys.executable, HERE / "toy_gguf.py", model, str(hidden), str(layers)], check=True)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__([sys.executable, HERE / "llamacpp_server.py", model, port, slots, context], folder / f"{name}.log")
        self.until(lambda: answers(self.url + "/health"), "llama.cpp answers")

    def metric(self, name):
        return metric(self.url, f"llamacpp:{name}")


class Gateway(Process):
    """`headway serve` with a configuration file of its own.

    `pools` and the other sections are what the file says; JSON is YAML. A pool may be short: `pool("sim", engine)`.
    """

    def __init__(self, folder, pools, *, policy="fcfs", name="gateway", scheme="http", ready=True, arguments=(), **sections):
        self.folder = pathlib.Path(folder)
        self.file = self.folder / f"{name}.yaml"
        self.listen, self.admin_address = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.url, self.admin = f"{scheme}://{self.listen}", f"http://{self.admin_address}"
        self.settings = {"listen": self.listen, "admin": self.admin_address, "policy": policy, **sections, "pools": pools}
        self.write()
        super().__init__([BINARY, "serve", "--config", self.file, *arguments], self.folder / f"{name}.log")
        if ready:
            self.until(lambda: answers(self.admin + "/readyz"), "the gateway is ready")

    def write(self, **changes):
        """Writes the configuration with changes, as an editor would: a new file renamed over the old one."""
        self.settings |= changes
        self.write_text(json.dumps(self.settings, indent=1))

    def write_text(self, text):
        new = self.file.with_suffix(".new")
        new.write_text(text)
        new.rename(self.file)

    def pools(self):
        """What the admin endpoint shows, by name of the pool."""
        return {pool["name"]: pool for pool in httpx.get(self.admin + "/admin/pools", timeout=PATIENCE).json()["pools"]}

    def pool(self, name="chat"):
        return self.pools()[name]

    def waiting(self, name="chat"):
        return self.pool(name)["waiting"]

    def in_flight(self, name="chat"):
        return self.pool(name)["in_flight"]

    def wait_waiting(self, count, name="chat", within=PATIENCE):
        self.until(lambda: self.waiting(name) == count, lambda: f"{count} wait: {self.pool(name)}", within)

    def wait_in_flight(self, count, name="chat", within=PATIENCE):
        self.until(lambda: self.in_flight(name) == count, lambda: f"{count} in flight: {self.pool(name)}", within)

    def healthy(self, count, name="chat"):
        def enough():
            return sum(backend["standing"] == "healthy" for backend in self.pool(name)["backends"]) == count

        self.until(enough, lambda: f"{count} healthy: {self.pool(name)}")
        return self

    def held(self):
        """What is still held anywhere: nothing, when no request is there."""
        kept = {}
        for name, pool in self.pools().items():
            for what in ("waiting", "waiting_bytes", "in_flight"):
                kept[f"{name}.{what}"] = pool[what]
            for backend in pool["backends"]:
                for what in ("waiting", "in_flight"):
                    kept[f"{name}.{backend['url']}.{what}"] = backend[what]
        return {what: count for what, count in kept.items() if count != 0}

    def wait_idle(self, within=PATIENCE):
        """Every slot, queue place and queued byte has been given back."""
        self.until(lambda: not self.held(), lambda: f"nothing held: {self.held()}", within)

    def reload(self):
        return httpx.post(self.admin + "/admin/reload", timeout=PATIENCE)

    def hangup(self):
        self.signal(signal.SIGHUP)


def pool(models, *backends, name="chat", **settings):
    """A pool of the configuration. A backend is a process with a `url`, or the mapping as the file has it."""
    models = [models] if isinstance(models, (str, dict)) else models
    entries = [backend if isinstance(backend, dict) else {"url": backend.url} for backend in backends]
    return {"name": name, "models": models, "backends": entries, **settings}
