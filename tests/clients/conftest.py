"""Fixtures: programs that live for the whole run or for one test, and the check after every test that the gateway holds nothing any more."""

import pytest
from processes import BINARY, Engine, Gateway, LlamaCpp, pool
from scripted import ScriptedBackend


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes seconds by its nature; `tests/run quick` leaves it out")
    assert BINARY.exists(), f"{BINARY} is not built: cargo build --bin headway"


RUNNING = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.failed:
        for process in RUNNING:
            report.sections.append((f"log of {process.name}", process.output()[-6000:]))


def started(process):
    RUNNING.append(process)
    return process


def ended(process):
    process.kill()
    RUNNING.remove(process)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="session")
def engine(run_folder):
    """A simulated engine that many tests share."""
    process = started(Engine(run_folder))
    yield process
    ended(process)


@pytest.fixture(scope="session")
def llama(run_folder):
    """A real llama.cpp server that many tests share."""
    process = started(LlamaCpp(run_folder))
    yield process
    ended(process)


@pytest.fixture(scope="session")
def gateway(run_folder, engine, llama):
    """A gateway in front of both; `sim` is the simulated model, `toy` llama.cpp's, `gpt-4o` an alias of `sim`."""
    pools = [pool(["sim", {"name": "gpt-4o", "upstream": "sim"}], engine), pool("toy", llama, name="toy")]
    process = started(Gateway(run_folder, pools, policy="headway"))
    process.healthy(1).healthy(1, "toy")
    yield process
    ended(process)


@pytest.fixture(params=["sim", "toy"])
def model(request):
    """The same test on the simulated engine and on llama.cpp."""
    return request.param


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    """After every test the shared gateway holds no slot, no queue place and no byte."""
    yield
    for process in RUNNING:
        if isinstance(process, Gateway) and process.alive:
            process.wait_idle()


class Launcher:
    """Starts programs for one test. What it started is checked for leaks and ended with the test."""

    def __init__(self, folder):
        self.folder, self.processes, self.backends = folder, [], []

    def add(self, process):
        self.processes.append(started(process))
        return process

    def name(self, kind):
        return f"{kind}{len(self.processes)}"

    def engine(self, **options):
        return self.add(Engine(self.folder, name=self.name("engine"), **options))

    def llama(self, **options):
        return self.add(LlamaCpp(self.folder, name=self.name("llamacpp"), **options))

    def gateway(self, *pools, **options):
        return self.add(Gateway(self.folder, list(pools), name=self.name("gateway"), **options))

    def backend(self, *arguments, **options):
        backend = ScriptedBackend(*arguments, **options)
        self.backends.append(backend)
        return backend

    def finish(self):
        for backend in self.backends:
            backend.release_all()
        try:
            for process in self.processes:
                if isinstance(process, Gateway) and process.alive:
                    process.wait_idle()
        finally:
            for process in reversed(self.processes):
                ended(process)
            for backend in self.backends:
                backend.stop()
        for backend in self.backends:
            assert not backend.failures, backend.failures


@pytest.fixture
def launch(tmp_path):
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.finish()
