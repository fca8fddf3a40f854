"""`headway top`, piped: one look at a running gateway."""

import subprocess

from processes import BINARY, PATIENCE, free_port, pool
from scripted import gate
from wire import Call, chat


def top(*arguments):
    return subprocess.run([BINARY, "top", *arguments], capture_output=True, text=True, timeout=PATIENCE)


def test_one_look_is_printed(launch):
    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1})).healthy(1)
    calls = [Call(gateway, chat())]
    backend.exchange(0)
    calls.append(Call(gateway, chat()))
    gateway.wait_waiting(1)
    shown = top("--admin", gateway.admin_address)
    assert shown.returncode == 0 and "\x1b" not in shown.stdout, shown
    [line] = [line for line in shown.stdout.splitlines() if line.startswith(backend.url.removeprefix("http://"))]
    assert line.split()[1:3] == ["healthy", "1/1"] and line.split()[5] == "1", line
    assert "1 wait, 0 aged   1 in flight" in shown.stdout
    for index, call in enumerate(calls):
        backend.exchange(index).released.set()
        assert call.result().status_code == 200


def test_what_it_cannot_show_is_said(launch):
    gateway = launch.gateway(pool("sim", launch.backend())).healthy(1)
    wrong = top("--admin", gateway.admin_address, "--pool", "none")
    assert wrong.returncode == 1 and "there are: chat" in wrong.stderr
    clients = top("--admin", gateway.listen)
    assert clients.returncode == 1 and "is it a gateway's address for operators?" in clients.stderr, clients
    nobody = top("--admin", f"127.0.0.1:{free_port()}")
    assert nobody.returncode == 1 and "--admin" in nobody.stderr
