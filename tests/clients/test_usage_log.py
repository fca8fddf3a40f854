"""What requests used, in a file: whose line is there when, and what a killed gateway leaves."""

import json
import pathlib
import threading

import httpx
import pytest
from processes import PATIENCE, metric, pool
from scripted import completion, gate
from test_resume import Pair, Speaker, close
from test_tenants import Tenants, bearer
from wire import CHAT, chat, post


def written(file):
    """The lines by request."""
    return {line["id"]: line for line in map(json.loads, pathlib.Path(file).read_text().splitlines())}


def named(name):
    return {"x-request-id": name}


def test_a_line_says_who_used_how_much_of_what(launch):
    file = launch.folder / "usage.jsonl"
    tenants = Tenants(launch.folder, search={})
    backend = launch.backend(Speaker("one", ["a", "b", "c"], prompt=7))
    models = [{"name": "gpt-4o", "upstream": "sim"}, "sim"]
    gateway = launch.gateway(pool(models, backend), keys=tenants.section, usage_log={"file": str(file)}).healthy(1)
    headers = {**bearer(tenants.keys["search"]), **named("streamed")}
    answer = post(gateway, chat(model="gpt-4o", stream=True), headers=headers)
    assert "usage" not in answer.text, "the client has not asked for it"
    line = written(file)["streamed"]
    assert line.pop("time").endswith("Z")
    assert line == {
        "id": "streamed",
        "tenant": "search",
        "model": "gpt-4o",
        "upstream_model": "sim",
        "pool": "chat",
        "path": "/v1/chat/completions",
        "reason": "ok",
        "prompt_tokens": 7,
        "output_tokens": 3,
        "counted": True,
        "resumed": 0,
    }

    backend.answer = lambda exchange: exchange.reply(body=completion(tokens=5))
    post(gateway, chat(), headers=headers | named("whole"))
    assert (written(file)["whole"]["prompt_tokens"], written(file)["whole"]["output_tokens"]) == (1, 5)

    # Nothing was used by what no backend worked on.
    backend.answer = lambda exchange: exchange.reply(400, {"error": {"message": "no"}})
    post(gateway, chat(), headers=headers | named("refused by the backend"))
    post(gateway, chat(), headers=named("without a key"))
    httpx.get(gateway.url + "/v1/models", headers=headers | named("models"))
    gateway.wait_idle()
    assert written(file).keys() == {"streamed", "whole"}
    assert file.stat().st_mode & 0o777 == 0o600
    assert metric(gateway.admin, 'headway_usage_lines_total{result="written"}') == 2


def test_answers_that_break_off_or_are_left_have_theirs(launch):
    file = launch.folder / "usage.jsonl"
    backend = launch.backend(Speaker("one", ["a", "b"], gate))
    gateway = launch.gateway(pool("sim", backend), usage_log={"file": str(file)}).healthy(1)
    with httpx.stream("POST", gateway.url + CHAT, json=chat(stream=True), headers=named("left"), timeout=30) as answer:
        lines = answer.iter_lines()
        while '"b"' not in next(lines):
            pass
    gateway.until(lambda: "left" in written(file), "its line is written")
    backend.answer = Speaker("one", ["a", "b", "c"], close)
    post(gateway, chat(stream=True), headers=named("broken"))
    gateway.until(lambda: "broken" in written(file), "its line is written")
    story = {name: [line[key] for key in ("reason", "output_tokens", "counted")] for name, line in written(file).items()}
    assert story == {"left": ["client_left", 2, False], "broken": ["backend_broke", 3, False]}
    backend.release_all()


def test_an_answer_of_two_backends_has_one_line(launch):
    file = launch.folder / "usage.jsonl"
    pair = Pair(launch, Speaker("one", ["a"], close), Speaker("second", ["b", "c"], prompt=11), sections={"usage_log": {"file": str(file)}})
    post(pair.gateway, chat(stream=True), headers=named("resumed"))
    line = written(file)["resumed"]
    assert [line[key] for key in ("reason", "prompt_tokens", "output_tokens", "counted", "resumed")] == ["ok", 10, 3, True, 1]
    assert len(file.read_text().splitlines()) == 1


def test_the_line_is_there_before_the_last_byte(launch, engine):
    file = launch.folder / "usage.jsonl"
    gateway = launch.gateway(pool("sim", engine), usage_log={"file": str(file)}).healthy(1)
    embeddings = {"model": "sim", "input": "x"}
    with httpx.Client(timeout=60) as client:
        for number in range(60):
            path, body = [(CHAT, chat(max_tokens=5)), (CHAT, chat(max_tokens=5, stream=True)), ("/v1/embeddings", embeddings)][number % 3]
            client.post(gateway.url + path, json=body, headers=named(str(number))).raise_for_status()
            assert file.read_text().split('"id":"')[-1].startswith(f'{number}"')
    assert len(written(file)) == 60


def test_a_file_that_is_lost_costs_lines_and_no_answers(launch):
    backend = launch.backend()
    file = launch.folder / "usage.jsonl"
    gateway = launch.gateway(pool("sim", backend), usage_log={"file": str(file)}).healthy(1)
    file.unlink()
    file.mkdir()
    assert post(gateway, chat()).status_code == 200
    assert metric(gateway.admin, 'headway_usage_lines_total{result="lost"}') == 1
    assert "lines are lost" in gateway.output()
    # A place that can be written again is taken up, by itself or by a reload.
    file.rmdir()
    post(gateway, chat(), headers=named("again"))
    assert written(file).keys() == {"again"}
    other = launch.folder / "other.jsonl"
    gateway.write(usage_log={"file": str(other)})
    assert gateway.reload().status_code == 200
    post(gateway, chat(), headers=named("elsewhere"))
    assert (written(file).keys(), written(other).keys()) == ({"again"}, {"elsewhere"})


def test_a_file_of_somebody_elses_is_a_mistake(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend), training_log={"file": str(launch.folder / "rows.jsonl")})
    for file, said in (("rows.jsonl", "is another log already"), ("not/there", "is not there"), (gateway.file.name, "belongs to the configuration")):
        gateway.write(usage_log={"file": str(launch.folder / file)})
        [problem] = gateway.reload().json()["error"]["problems"]
        assert problem["field"] == "usage_log.file"
        assert said in problem["message"], problem


@pytest.mark.parametrize("scheme", ["streams", "answers"])
def test_a_killed_gateway_has_written_what_clients_have_seen_complete(launch, engine, scheme):
    """SIGKILL while many answers end: each that a client has whole is in the file, with the tokens that the client was told."""
    file = launch.folder / "usage.jsonl"
    gateway = launch.gateway(pool("sim", engine), usage_log={"file": str(file), "max_size": "1MiB"}).healthy(1)
    seen, enough = {}, threading.Event()

    def ask(worker):
        with httpx.Client(timeout=PATIENCE) as client:
            number = 0
            while True:
                name, number = f"{worker}-{number}", number + 1
                body = chat(stream=scheme == "streams", max_tokens=1 + number % 3)
                if scheme == "streams":
                    body["stream_options"] = {"include_usage": True}
                try:
                    if scheme == "streams":
                        with client.stream("POST", gateway.url + CHAT, json=body, headers=named(name)) as answer:
                            usage = None
                            for line in answer.iter_lines():
                                if line.startswith("data: {"):
                                    usage = json.loads(line[6:]).get("usage") or usage
                                if line == "data: [DONE]":
                                    seen[name] = usage
                    else:
                        seen[name] = client.post(gateway.url + CHAT, json=body, headers=named(name)).json()["usage"]
                except (httpx.HTTPError, json.JSONDecodeError):
                    return
                if len(seen) > 150:
                    enough.set()

    workers = [threading.Thread(target=ask, args=(worker,), daemon=True) for worker in range(12)]
    for worker in workers:
        worker.start()
    assert enough.wait(60)
    gateway.child.kill()
    gateway.wait()
    for worker in workers:
        worker.join(PATIENCE)
        assert not worker.is_alive()
    # The last line may be one that nobody has seen the end of.
    whole = [line for line in file.read_text().split("\n") if line.endswith("}")]
    lines = {line["id"]: line for line in map(json.loads, whole)}
    assert len(lines) == len(whole), "one line each"
    assert seen.keys() <= lines.keys(), seen.keys() - lines.keys()
    for name, usage in seen.items():
        assert (lines[name]["prompt_tokens"], lines[name]["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert lines[name]["counted"]
