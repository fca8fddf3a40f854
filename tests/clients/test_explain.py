"""Why one request waits or went as it did, and what other policies would have made of the last minutes."""

import threading

import httpx
from processes import PATIENCE, pool
from scripted import gate
from wire import Call, chat, post


def explain(gateway, name):
    response = httpx.get(f"{gateway.admin}/admin/explain/{name}", timeout=PATIENCE)
    assert response.status_code == 200, response.text
    return response.json()


def what_if(gateway, **question):
    return httpx.post(gateway.admin + "/admin/whatif", json=question, timeout=120)


def test_a_request_is_explained_from_its_queue_to_its_end(launch):
    backend = launch.backend(gate)
    # By prompt length, since nothing is scored here: the third is so much shorter than the second that it goes first.
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1}), policy="uniboost").healthy(1)
    calls = []
    for name, words in (("first", 1), ("second", 20000), ("third", 1)):
        calls.append(Call(gateway, chat("word " * words), headers={"x-request-id": name}))
        backend.exchange(0)
        gateway.wait_waiting(len(calls) - 1)

    second = explain(gateway, "second")
    assert (second["state"], second["position"], second["pool"], second["model"]) == ("waits", 2, "chat", "sim")
    assert second["overtaken_by"]["count"] == 1
    [third] = second["overtaken_by"]["examples"]
    assert third["id"] == "third" and third["arrived_later_seconds"] > 0 and third["work_seconds"] < second["predicted"]["work_seconds"]
    assert explain(gateway, "third")["overtakes"]["examples"][0]["id"] == "second"
    first = explain(gateway, "first")
    assert (first["state"], first["output_tokens"]) == ("runs", 0)
    assert [wait["name"] for wait in first["timeouts"]] == ["queue", "first_byte", "total"]

    for index in range(3):
        backend.exchange(index).released.set()
    for call in calls:
        assert call.result().status_code == 200
    second = explain(gateway, "second")
    assert (second["state"], second["status"], second["reason"], second["released_by"]) == ("ended", 200, "ok", "key")
    assert (second["overtaken_by"]["count"], second["overtaken_by"]["examples"][0]["id"]) == (1, "third")
    assert explain(gateway, "third")["overtook"]["examples"][0]["id"] == "second"
    assert second["waited_seconds"] > 0 and not any(wait["fired"] for wait in second["timeouts"])
    assert any("arrived later" in sentence for sentence in second["story"])

    unknown = httpx.get(gateway.admin + "/admin/explain/nobody", timeout=PATIENCE)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_request")


def test_the_timeout_that_fired_is_named(launch):
    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", backend, timeouts={"first_byte": "200ms"}, retries=0)).healthy(1)
    assert post(gateway, chat(), headers={"x-request-id": "late"}).status_code == 504
    late = explain(gateway, "late")
    assert [wait["name"] for wait in late["timeouts"] if wait["fired"]] == ["first_byte"]
    assert late["reason"] == "first_byte_timeout"


def test_the_last_requests_run_again_under_other_policies(launch):
    engine = launch.engine(slots=2, speed=20.0)
    gateway = launch.gateway(pool("sim", {"url": engine.url, "slots": 2})).healthy(1)
    few = what_if(gateway)
    assert (few.status_code, few.json()["error"]["code"]) == (409, "too_little_is_known")

    def ask(number):
        post(gateway, chat(f"number {number}", stream=True, max_tokens=10 + 40 * (number % 2)), headers={"x-request-id": f"n{number}"})

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    told = what_if(gateway, minutes=5, policies=["fcfs", "headway", "least-loaded"], request="n7").json()
    assert (told["requests"], told["counted"], told["lengths_assumed"], told["own_policy"]) == (60, 48, 0, "fcfs")
    assert [each["policy"] for each in told["policies"]] == ["fcfs", "headway", "least-loaded"]
    assert [each["own"] for each in told["policies"]] == [True, False, False]
    assert (told["running"], told["waiting"], told["measured"]["unfinished"]) == (0, 0, 0)
    for each in (told["measured"], *told["policies"]):
        assert each["unanswered"] == 0 and 0 < each["ttft"]["p50"] <= each["ttlt"]["p99"] and each["ttlt"]["count"] == 48, each
    assert told["request"]["id"] == "n7" and [each["policy"] for each in told["request"]["policies"]] == ["fcfs", "headway", "least-loaded"]
    assert told["engines"][0]["slots"] == 2

    for wrong, code in (
        ({"minutes": 0}, 400),
        ({"policies": []}, 400),
        ({"policies": ["/etc/passwd"]}, 404),
        ({"minuets": 5}, 400),
        ({"pool": "nowhere"}, 404),
        ({"request": "nobody"}, 404),
    ):
        refused = what_if(gateway, **wrong)
        assert refused.status_code == code and refused.json()["error"]["message"], (wrong, refused.text)
    foreign = httpx.post(gateway.admin + "/admin/whatif", json={}, headers={"origin": "http://elsewhere.example"}, timeout=PATIENCE)
    assert foreign.status_code == 403
