"""Pools that take over when no backend of a request's own pool can serve it."""

import json

from processes import free_port, metric, pool
from scripted import gate
from wire import Call, chat, error, post


def dead():
    return {"url": f"http://127.0.0.1:{free_port()}"}


def test_another_pool_takes_over_when_no_backend_can(launch):
    small = launch.backend(models=("small",))
    pools = [pool("large", dead(), fallback=["none", "small"]), pool("none", dead(), name="none"), pool("small", small, name="small")]
    gateway = launch.gateway(*pools).healthy(1, "small")
    answer = post(gateway, chat(model="large"))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "large", "the name that was asked for"
    assert small.exchange(0).json["model"] == "small", "the name that the backend knows"
    assert metric(gateway.admin, 'headway_fallbacks_total{pool="chat",to="small"}') == 1

    # A stream too, and its words are whole.
    text = post(gateway, chat(model="large", stream=True)).text
    assert "hello" in text
    assert text.rstrip().endswith("data: [DONE]")


def test_a_backend_that_breaks_before_its_first_byte_is_a_reason(launch):
    broken = launch.backend(lambda exchange: exchange.reset(), models=("large",))
    small = launch.backend(models=("small",))
    gateway = launch.gateway(pool("large", broken, fallback=["small"]), pool("small", small, name="small")).healthy(1).healthy(1, "small")
    assert post(gateway, chat(model="large")).status_code == 200
    assert len(broken.exchanges) == 1
    assert len(small.exchanges) == 1


def test_a_pool_that_takes_any_model_serves_one_that_it_has(launch):
    any_model = launch.backend(models=("other",))
    pools = [pool("large", dead(), fallback=["any"]), {"name": "any", "backends": [{"url": any_model.url}]}]
    rows = launch.folder / "rows.jsonl"
    gateway = launch.gateway(*pools, training_log={"file": str(rows)}).healthy(1, "any")
    assert post(gateway, chat(model="large")).status_code == 200
    assert any_model.exchange(0).json["model"] == "other"
    gateway.until(lambda: rows.read_text(), "its length is noted")
    assert json.loads(rows.read_text())["lens"] == {"other": 1}, "for the model that answered"


def test_only_the_same_model_embeds_for_another_pool(launch):
    small, same = launch.backend(models=("small",)), launch.backend(models=("inner",))
    pools = [pool("large", dead(), fallback=["small"]), pool("small", small, name="small")]
    gateway = launch.gateway(*pools).healthy(1, "small")
    body = {"model": "large", "input": "x"}
    assert post(gateway, body, path="/v1/embeddings").status_code in (502, 503)
    assert not small.exchanges
    # A pool that takes any model, and has this one.
    gateway.write(pools=[pool("inner", dead(), fallback=["any"]), {"name": "any", "backends": [{"url": same.url}]}])
    assert gateway.reload().status_code == 200
    gateway.healthy(1, "any")
    assert post(gateway, {"model": "inner", "input": "x"}, path="/v1/embeddings").status_code == 200


def test_an_attempt_that_took_long_was_no_wait_in_the_queue(launch):
    def slow_and_broken(exchange):
        exchange.released.wait(1.2)  # longer than anybody may wait in the queue
        exchange.reset()

    large, small = launch.backend(slow_and_broken, models=("large",)), launch.backend(models=("small",))
    pools = [pool("large", large, fallback=["small"]), pool("small", small, name="small")]
    gateway = launch.gateway(*pools, timeouts={"queue": "1s"}).healthy(1).healthy(1, "small")
    answer = post(gateway, chat(model="large"))
    assert answer.status_code == 200, answer.text


def test_a_full_queue_and_a_refusal_are_none(launch):
    large = launch.backend(gate, models=("large",))
    small = launch.backend(models=("small",))
    chat_pool = pool("large", {"url": large.url, "slots": 1}, fallback=["small"], limits={"queue_requests": 1})
    gateway = launch.gateway(chat_pool, pool("small", small, name="small")).healthy(1).healthy(1, "small")
    running, queued = Call(gateway, chat(model="large")), None
    large.exchange(0)
    queued = Call(gateway, chat(model="large"))
    gateway.wait_waiting(1)
    refused = post(gateway, chat(model="large"))
    assert (refused.status_code, error(refused)["code"]) == (429, "queue_full")
    for index, call in enumerate((running, queued)):
        large.exchange(index).released.set()
        assert call.result().status_code == 200
    assert not small.exchanges


def test_what_is_said_when_nobody_can_is_of_the_last_pool(launch):
    gateway = launch.gateway(pool("large", dead(), fallback=["small"]), pool("small", dead(), name="small"))
    answer = post(gateway, chat(model="large"))
    assert answer.status_code in (502, 503)
    assert error(answer)["code"] in ("no_healthy_backend", "connect_failed", "no_other_backend")


def test_names_of_no_pool_are_mistakes(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend))
    for fallback, hint in ((["smal"], "did you mean small?"), (["chat"], "other pools: small"), (["small", "small"], "keep one")):
        gateway.write(pools=[pool("sim", backend, fallback=fallback), pool("small", dead(), name="small")])
        answer = gateway.reload()
        assert answer.status_code == 422
        [problem] = answer.json()["error"]["problems"]
        assert problem["field"].startswith("pools[0].fallback[")
        assert hint in problem["hint"], problem
    assert post(gateway, chat()).status_code == 200
