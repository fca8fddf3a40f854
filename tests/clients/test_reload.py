"""The configuration changes while requests run: nothing is dropped, and a mistake changes nothing."""

import itertools
import json
import threading

import httpx
from processes import PATIENCE, pool, wait_for
from scripted import gate
from wire import Call, chat, error, post


def names(gateway):
    return [model["id"] for model in httpx.get(gateway.url + "/v1/models", timeout=PATIENCE).json()["data"]]


def configuration(gateway):
    return httpx.get(gateway.admin + "/admin/config", timeout=PATIENCE).json()



def test_a_changed_file_is_taken_over(launch):
    backend = launch.backend(models=("sim", "two"))
    gateway = launch.gateway(pool("sim", backend))
    gateway.write(pools=[pool(["sim", {"name": "new-name", "upstream": "sim"}], backend)])
    wait_for(lambda: "new-name" in names(gateway), "the file is read again")
    assert post(gateway, chat(model="new-name")).status_code == 200


def test_post_and_sighup(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend))
    gateway.write(pools=[pool(["sim", {"name": "by-post", "upstream": "sim"}], backend)])
    answer = gateway.reload()
    assert answer.status_code == 200, answer.text
    assert "by-post" in names(gateway)
    gateway.write(pools=[pool(["sim", {"name": "by-signal", "upstream": "sim"}], backend)])
    gateway.hangup()
    wait_for(lambda: "by-signal" in names(gateway), "SIGHUP is obeyed")
    assert gateway.alive


def test_a_mistake_changes_nothing_and_is_shown_with_its_place(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend))
    good = gateway.file.read_text()
    mistake = (
        f"listen: {gateway.listen}\nadmin: {gateway.admin_address}\npools:\n  - name: chat\n    models: [sim]\n    retires: 3\n"
        f"    backends: [{{ url: '{backend.url}' }}]\n"
    )
    gateway.write_text(mistake)
    shown = wait_for(lambda: configuration(gateway)["error"], "the mistake is noticed")
    problem = shown["problems"][0]
    assert problem["file"].endswith(gateway.file.name)
    assert problem["line"] == 6
    assert "retires" in problem["field"] + problem["message"]
    assert "retries" in problem["hint"]
    assert gateway.reload().status_code == 422
    assert "retires" in gateway.output()
    assert post(gateway, chat()).status_code == 200
    gateway.write_text(good)
    wait_for(lambda: configuration(gateway)["error"] is None, "the good one is back")


def test_what_queues_and_runs_survives_a_reload(launch):
    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1})).healthy(1)
    running = Call(gateway, chat())
    backend.exchange(0)
    queued = Call(gateway, chat())
    gateway.wait_waiting(1)
    other = launch.backend()
    gateway.write(pools=[pool("sim", {"url": backend.url, "slots": 1}), pool("more", other, name="more")])
    assert gateway.reload().status_code == 200
    assert gateway.waiting() == 1
    assert gateway.in_flight() == 1
    backend.exchange(0).released.set()
    assert running.result().status_code == 200
    backend.exchange(1).released.set()
    assert queued.result().status_code == 200


def test_a_backend_that_leaves_finishes_what_it_has(launch):
    old, new = launch.backend(gate), launch.backend()
    gateway = launch.gateway(pool("sim", {"url": old.url, "slots": 1})).healthy(1)
    running = Call(gateway, chat())
    old.exchange(0)
    queued = Call(gateway, chat())
    gateway.wait_waiting(1)
    gateway.write(pools=[pool("sim", new)])
    assert gateway.reload().status_code == 200
    assert queued.result().status_code == 200
    assert len(new.exchanges) == 1
    old.exchange(0).released.set()
    assert running.result().status_code == 200
    assert [backend["url"] for backend in gateway.pool()["backends"]] == [new.url]


def test_twenty_reloads_drop_no_request(launch):
    engine = launch.engine(slots=8, speed=50)
    gateway = launch.gateway(pool("sim", engine)).healthy(1)
    done, bad, stop = [], [], threading.Event()

    def client():
        with httpx.Client(timeout=30) as http:
            while not stop.is_set():
                try:
                    response = http.post(gateway.url + "/v1/chat/completions", json=chat(max_tokens=5))
                    (done if response.status_code == 200 else bad).append(response.status_code)
                except httpx.HTTPError as failure:
                    bad.append(repr(failure))

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    for index, policy in zip(range(20), itertools.cycle(["headway", "fcfs", "pars", "uniboost"])):
        gateway.write(policy=policy, pools=[pool(["sim", f"name-{index}"], engine)])
        assert gateway.reload().status_code == 200
    wait_for(lambda: len(done) > 100, lambda: f"{len(done)} done, {bad[:3]}")
    stop.set()
    for thread in clients:
        thread.join(30)
    assert bad == []


def test_what_cannot_change_while_running_is_refused(launch):
    gateway = launch.gateway(pool("sim", launch.backend()))
    before = gateway.settings["listen"]
    gateway.write(listen="127.0.0.1:1")
    assert gateway.reload().status_code == 409
    assert "listen" in json.dumps(configuration(gateway)["error"])
    assert post(gateway, chat()).status_code == 200
    gateway.write(listen=before)
    assert gateway.reload().status_code == 200


def test_an_operator_drains_one_backend(launch):
    one, two = launch.backend(), launch.backend()
    gateway = launch.gateway(pool("sim", one, two)).healthy(2)
    identity = next(backend["id"] for backend in gateway.pool()["backends"] if backend["url"] == one.url)
    httpx.post(f"{gateway.admin}/admin/backends/chat/{identity}/drain", timeout=PATIENCE).raise_for_status()
    gateway.healthy(1)
    for _ in range(6):
        assert post(gateway, chat()).status_code == 200
    assert (len(one.exchanges), len(two.exchanges)) == (0, 6)
    httpx.post(f"{gateway.admin}/admin/backends/chat/{identity}/undrain", timeout=PATIENCE).raise_for_status()
    gateway.healthy(2)


def test_a_foreign_page_cannot_reload(launch):
    gateway = launch.gateway(pool("sim", launch.backend()))
    refused = httpx.post(gateway.admin + "/admin/reload", headers={"origin": "http://elsewhere.example"}, timeout=PATIENCE)
    assert refused.status_code == 403
    assert "code" in refused.json()["error"]
    assert error(post(gateway, chat(model="nope")))["code"]
