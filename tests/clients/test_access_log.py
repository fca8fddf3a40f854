"""The access log in a file: what it says, what it never says, and whose hands it may be in."""

import json
import os

from processes import pool
from scripted import completion
from test_tenants import Tenants, bearer
from wire import chat, post


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_it_says_how_a_request_went_and_nothing_that_was_said_in_it(launch):
    file = launch.folder / "access.jsonl"
    tenants = Tenants(launch.folder, search={})
    backend = launch.backend(lambda exchange: exchange.reply(body=completion(text="ANSWERED")))
    gateway = launch.gateway(pool("sim", backend), keys=tenants.section, access_log={"file": str(file)}, arguments=["--log", "json"]).healthy(1)
    key = tenants.keys["search"]
    assert post(gateway, chat("ASKED"), path="/v1/chat/completions?key=QUERIED", headers={**bearer(key), "x-request-id": "one"}).status_code == 200
    assert post(gateway, chat("ASKED"), path="/v1/" + "x" * 10_000, headers=bearer(key)).status_code == 200
    assert post(gateway, chat("ASKED"), headers=bearer("hw-a-wrong-key")).status_code == 401
    gateway.until(lambda: len(lines(file)) == 3, "each has its line")
    first, odd, refused = lines(file)
    expected = {"id": "one", "tenant": "search", "model": "sim", "pool": "chat", "path": "/v1/chat/completions", "status": 200, "reason": "ok", "target": "access"}
    assert expected.items() <= first.items()
    assert {"timestamp", "queue_ms", "total_ms", "predicted_tokens", "output_tokens", "backend"} <= first.keys()
    assert (len(odd["path"]), odd["status"], refused["status"]) == (256, 200, 401)
    assert oct(file.stat().st_mode)[-3:] == "600"
    for place in (file.read_text(), gateway.output()):
        for secret in ("ASKED", "ANSWERED", "QUERIED", key, "hw-a-wrong-key"):
            assert secret not in place, secret
    assert '"target":"access"' not in gateway.output(), "it has one place"


def test_logrotate_may_move_it_or_empty_it(launch):
    file = launch.folder / "access.jsonl"
    gateway = launch.gateway(pool("sim", launch.backend(lambda exchange: exchange.reply(body=completion()))), access_log={"file": str(file)}).healthy(1)

    def ask(name):
        assert post(gateway, chat(), headers={"x-request-id": name}).status_code == 200

    def written(place, *names):
        gateway.until(lambda: place.exists() and [line["id"] for line in lines(place)] == list(names), f"{names} are in {place}")

    ask("a")
    written(file, "a")
    # create, with the signal that logrotate's examples send.
    moved = file.with_suffix(".1")
    file.rename(moved)
    gateway.hangup()
    ask("b")
    written(file, "b")
    written(moved, "a")
    # copytruncate
    os.truncate(file, 0)
    ask("c")
    written(file, "c")


def test_a_reload_moves_it(launch):
    before, after = launch.folder / "before.jsonl", launch.folder / "after.jsonl"
    gateway = launch.gateway(pool("sim", launch.backend(lambda exchange: exchange.reply(body=completion()))), access_log={"file": str(before)}).healthy(1)
    assert post(gateway, chat(), headers={"x-request-id": "before"}).status_code == 200
    gateway.write(access_log={"file": str(after), "keep": 2})
    gateway.until(after.exists, "it is there")
    assert post(gateway, chat(), headers={"x-request-id": "after"}).status_code == 200
    gateway.until(lambda: after.read_text(), "its line is written")
    assert [[line["id"] for line in lines(file)] for file in (before, after)] == [["before"], ["after"]]
