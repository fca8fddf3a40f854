"""Streams that wait long for their answers get comments meanwhile."""

import json
import re

import httpx
import openai
import pytest
from processes import pool
from scripted import answer_normally, gate
from wire import CHAT, Call, chat, post

EDGE = {"keepalive": "50ms"}


class Waits:
    """A stream that waits behind another request, until its first comment has come."""

    def __init__(self, launch, body=None, **settings):
        self.backend = launch.backend(gate)
        entry = {"url": self.backend.url, "slots": 1}
        self.gateway = launch.gateway(pool("sim", entry, **settings), edge=EDGE, arguments=["--log", "json"]).healthy(1)
        self.first = Call(self.gateway, chat())
        self.backend.exchange()
        self.context = httpx.stream("POST", self.gateway.url + CHAT, json=body or chat(stream=True), timeout=30)
        self.answer = self.context.__enter__()
        self.lines = self.answer.iter_lines()
        comment = next(self.lines)
        assert re.fullmatch(r": queued position=1 eta=\d+s", comment), comment

    def rest(self):
        lines = [line for line in self.lines if line and not line.startswith(":")]
        self.context.__exit__(None, None, None)
        return lines

    def release(self):
        self.backend.answer = answer_normally
        self.backend.exchange().released.set()
        assert self.first.result().status_code == 200

    def line(self):
        lines = [json.loads(line) for line in self.gateway.output().splitlines() if '"target":"access"' in line]
        return lines[-1]


def test_a_stream_that_waits_gets_comments_and_then_its_answer(launch):
    waits = Waits(launch)
    assert waits.answer.status_code == 200
    assert waits.answer.headers["content-type"] == "text/event-stream"
    assert waits.answer.headers["x-request-id"]
    assert next(waits.lines) == ""
    assert next(waits.lines).startswith(": queued position=1 eta="), "and again"
    waits.release()
    rest = waits.rest()
    assert json.loads(rest[0].removeprefix("data: "))["choices"][0]["delta"]["content"] == "hello"
    assert rest[-1] == "data: [DONE]"
    assert (waits.line()["status"], waits.line()["reason"]) == (200, "ok")


def test_the_sdk_does_not_notice(launch):
    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", backend), edge=EDGE).healthy(1)
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0, timeout=30) as sdk:
        # The call returns with the head, which the gate holds back: it is the gateway's own.
        stream = sdk.chat.completions.create(model="sim", messages=[{"role": "user", "content": "x"}], stream=True)
        backend.exchange().released.set()
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello"


def test_what_goes_wrong_is_an_event(launch):
    waits = Waits(launch, timeouts={"queue": "300ms"})
    [event] = waits.rest()
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "queue_timeout"
    assert (waits.line()["status"], waits.line()["reason"]) == (200, "queue_timeout")
    waits.release()


@pytest.mark.parametrize("status", [400, 500, 503])
def test_a_refusal_of_the_backend_is_an_event_in_its_words(launch, status):
    waits = Waits(launch, retries=0)
    waits.backend.answer = lambda exchange: exchange.reply(status, b'{"error":\n{"message": "its own words", "code": 7}}')
    waits.backend.exchange().released.set()
    [event] = waits.rest()
    assert json.loads(event.removeprefix("data: ")) == {"error": {"message": "its own words", "code": 7}}
    assert waits.first.result().status_code == 200


@pytest.mark.parametrize("size, code", [(1000, None), (3 << 20, "backend_broke")])
def test_an_answer_that_is_no_stream_is_an_event_whole_or_not_at_all(launch, size, code):
    waits = Waits(launch, retries=0)
    waits.backend.answer = lambda exchange: exchange.reply(200, json.dumps({"answer": "x" * size}).encode())
    waits.backend.exchange().released.set()
    [event] = waits.rest()
    document = json.loads(event.removeprefix("data: "))
    assert document.get("error", {}).get("code") == code
    assert document.get("answer", "x" * size) == "x" * size
    assert waits.line()["reason"] == (code or "ok")
    assert waits.first.result().status_code == 200


def test_whoever_waits_knows_its_place_and_then_that_it_is_worked_on(launch):
    waits = Waits(launch)
    with httpx.stream("POST", waits.gateway.url + CHAT, json=chat(stream=True), timeout=30) as last:
        lines = last.iter_lines()
        assert next(lines).startswith(": queued position=2 eta=")
        waits.release()
        waits.rest()
        assert "data: [DONE]" in list(lines)
    gateway = launch.gateway(pool("sim", launch.backend(gate)), edge=EDGE).healthy(1)
    with httpx.stream("POST", gateway.url + CHAT, json=chat(stream=True), timeout=30) as released:
        assert next(released.iter_lines()).startswith(": waiting "), "for its first token"


def test_only_streams_are_answered_early(launch):
    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", backend), edge=EDGE).healthy(1)
    call = Call(gateway, chat())
    refused = post(gateway, chat(model="nobody's", stream=True))
    assert refused.status_code == 404
    backend.exchange().released.set()
    assert call.result().json()["choices"][0]["message"]["content"] == "hello"


def test_a_client_that_leaves_frees_its_place(launch):
    waits = Waits(launch)
    waits.gateway.wait_waiting(1)
    waits.context.__exit__(None, None, None)
    waits.gateway.wait_waiting(0)
    waits.release()
