"""A backend dies while it streams, and another one goes on: what it is asked, and what the client sees."""

import json
import socket
import threading

import httpx
import openai
import pytest
from processes import PATIENCE, pool
from scripted import ScriptedBackend, gate
from wire import CHAT, Call, chat, post

COMPLETIONS = "/v1/completions"


def delta(content, name, *, model="sim", **more):
    choice = {"index": 0, "delta": {"content": content} if isinstance(content, str) else content, "finish_reason": None, **more}
    return {"id": name, "object": "chat.completion.chunk", "created": len(name), "model": model, "choices": [choice]}


def sse(event):
    return f"data: {json.dumps(event, ensure_ascii=False)}\n\n"


def role(name):
    return delta({"role": "assistant", "content": ""}, name)


class Speaker:
    """Says `words` under a name of its own, then dies in its own way (`die`), or ends its answer as it should."""

    def __init__(self, name, words, die=None, *, prompt=10):
        self.name, self.words, self.die, self.prompt = name, words, die, prompt

    def __call__(self, exchange):
        exchange.start_stream()
        exchange.chunk(sse(role(self.name)))
        for word in self.words:
            exchange.chunk(sse(delta(word, self.name)))
        if self.die:
            return self.die(exchange)
        exchange.chunk(sse(delta({}, self.name, finish_reason="stop")))
        if (exchange.json.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": self.prompt, "completion_tokens": len(self.words), "total_tokens": self.prompt + len(self.words)}
            exchange.chunk(sse({**delta("", self.name), "choices": [], "usage": usage}))
        exchange.end_stream()


def close(exchange):
    """In the middle of its answer, and without taking back what it has said, as a reset may."""
    exchange.close()


class Pair:
    """A gateway in front of backends of which each takes the part that is next, whichever it is asked first."""

    def __init__(self, launch, *parts, backends=None, engine="vllm", sections=None, **settings):
        self.parts, self.asked = list(parts), []
        self.backends = [launch.backend(self.answer) for _ in range(backends or max(2, len(parts)))]
        entries = [{"url": backend.url, "engine": engine} for backend in self.backends]
        chat_pool = pool("sim", *entries, **{"resume": True, **settings})
        self.gateway = launch.gateway(chat_pool, arguments=["--log", "json"], **(sections or {})).healthy(len(entries))

    def answer(self, exchange):
        self.asked.append(exchange)
        self.parts[len(self.asked) - 1](exchange)

    def sdk(self):
        return openai.OpenAI(base_url=self.gateway.url + "/v1", api_key="x", max_retries=0, timeout=30)

    def resumes(self):
        page = httpx.get(self.gateway.admin + "/metrics", timeout=PATIENCE).text
        lines = [line for line in page.splitlines() if line.startswith("headway_resumes_total{")]
        return {line.split('outcome="')[1].split('"')[0]: int(line.split()[-1]) for line in lines}

    def line(self):
        """The access log's last line."""
        return [json.loads(line) for line in self.gateway.output().splitlines() if '"target":"access"' in line][-1]


def events(answer):
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def content(events):
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event.get("choices"))


def test_the_client_sees_one_answer(launch):
    pair = Pair(launch, Speaker("one", ["the", " house"], close), Speaker("second", [" is", " new"], prompt=12))
    messages = [{"role": "user", "content": 'what is "new"?'}]
    settings = {"model": "sim", "messages": messages, "max_tokens": 9, "temperature": 0, "stream": True}
    with pair.sdk().chat.completions.create(**settings, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "the house is new"
    assert {chunk.id for chunk in chunks} == {"one"}
    assert {chunk.created for chunk in chunks} == {3}
    assert {chunk.model for chunk in chunks} == {"sim"}
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices].count("assistant") == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 4, 14)

    first, second = (exchange.json for exchange in pair.asked)
    assert pair.asked[0].headers["host"] != pair.asked[1].headers["host"]
    assert second["messages"] == [*messages, {"role": "assistant", "content": "the house"}]
    assert (second["continue_final_message"], second["add_generation_prompt"], second["max_tokens"]) == (True, False, 7)
    added = {"continue_final_message", "add_generation_prompt"}
    assert {key: value for key, value in second.items() if key not in added | {"messages", "max_tokens"}} == {
        key: value for key, value in first.items() if key not in {"messages", "max_tokens"}
    }
    # The SDK leaves at the last event, before the request is over.
    pair.gateway.until(lambda: pair.resumes() == {"resumed": 1}, "the resume is counted")
    line = pair.line()
    assert (line["reason"], line["status"], line["resumed"], line["retries"], line["output_tokens"], line["prompt_tokens"]) == ("ok", 200, 1, 0, 4, 10)


def test_usage_that_was_not_asked_for_stays_hidden(launch):
    pair = Pair(launch, Speaker("one", ["a"], close), Speaker("second", ["b"], prompt=11))
    answer = post(pair.gateway, chat(stream=True))
    assert content(events(answer)) == "ab"
    assert all(event.get("usage") is None for event in events(answer))
    assert answer.text.rstrip().endswith("data: [DONE]")
    assert (pair.line()["prompt_tokens"], pair.line()["output_tokens"]) == (10, 2)


def test_a_death_within_an_event_or_a_character_costs_that_event(launch):
    event = sse(delta("é", "one")).encode()
    accent = event.index("é".encode())
    for cut in (1, 6, accent + 1, len(event) - 3, len(event) - 2, len(event) - 1):

        def die(exchange, cut=cut):
            exchange.chunk(event[:cut])
            exchange.close()

        # An event whose line is whole has been said.
        said = cut >= len(event) - 1
        pair = Pair(launch, Speaker("one", ["caf"], die), Speaker("second", [" noir"] if said else ["é", " noir"]))
        answer = post(pair.gateway, chat(stream=True))
        assert content(events(answer)) == "café noir", cut
        assert pair.asked[1].json["messages"][-1]["content"] == ("café" if said else "caf"), cut


def test_before_the_first_word_the_request_is_sent_as_it_was(launch):
    def head_only(exchange):
        exchange.start_stream()
        exchange.close()

    # Any engine can do that.
    for first in (head_only, Speaker("one", [], close), Speaker("one", ["\n", "\n"], close)):
        pair = Pair(launch, first, Speaker("second", ["\n\n", "word"]), engine="openai")
        answer = post(pair.gateway, chat(stream=True, max_tokens=5))
        assert content(events(answer)).strip() == "word"
        assert content(events(answer)).count("\n") == 2
        assert [event["choices"][0]["delta"].get("role") for event in events(answer)].count("assistant") == 1
        assert pair.asked[1].body == pair.asked[0].body
        assert pair.resumes() == {"resumed": 1}


def test_whitespace_that_a_template_strips_does_not_come_twice(launch):
    pair = Pair(launch, Speaker("one", ["one", "\n", "\n"], close), Speaker("second", ["\n\n", "two"]))
    answer = post(pair.gateway, chat(stream=True, max_tokens=9))
    assert content(events(answer)) == "one\n\ntwo"
    assert pair.asked[1].json["messages"][-1]["content"] == "one"
    assert pair.asked[1].json["max_tokens"] == 8


def text_event(text, name, finish=None):
    return {"id": name, "object": "text_completion", "created": 1, "model": "sim", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def test_a_completion_goes_on_behind_its_prompt(launch):
    def first(exchange):
        exchange.start_stream()
        exchange.chunk(sse(text_event(' upon "a', "one")))
        exchange.close()

    def second(exchange):
        exchange.start_stream()
        exchange.chunk(sse(text_event(' time"', "second", "stop")))
        exchange.end_stream()

    pair = Pair(launch, first, second, engine="tgi")
    with pair.sdk().completions.create(model="sim", prompt="once", max_tokens=4, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == ' upon "a time"'
    assert {chunk.id for chunk in chunks} == {"one"}
    assert (pair.asked[1].json["prompt"], pair.asked[1].json["max_tokens"]) == ('once upon "a', 3)


def test_it_may_die_as_often_as_there_are_retries(launch):
    parts = [Speaker("one", ["a"], close), Speaker("second", ["b"], close), Speaker("third", ["c"])]
    pair = Pair(launch, *parts)
    answer = post(pair.gateway, chat(stream=True, max_tokens=9))
    assert content(events(answer)) == "abc"
    assert {event["id"] for event in events(answer)} == {"one"}
    assert pair.asked[2].json["messages"][-1]["content"] == "ab"
    assert len({exchange.headers["host"] for exchange in pair.asked}) == 3, "never a backend twice"
    assert pair.line()["resumed"] == 2

    pair = Pair(launch, *parts, retries=1)
    answer = post(pair.gateway, chat(stream=True))
    assert events(answer)[-1]["error"]["code"] == "backend_broke"
    assert content(events(answer)) == "ab"
    assert pair.resumes() == {"resumed": 1, "budget": 1}
    assert (pair.line()["reason"], pair.line()["not_resumed"], pair.line()["output_tokens"]) == ("backend_broke", "budget", 2)


def test_a_retry_before_the_first_byte_counts(launch):
    pair = Pair(launch, close, Speaker("one", ["a"], close), Speaker("second", ["b"]), retries=1)
    assert events(post(pair.gateway, chat(stream=True)))[-1]["error"]["code"] == "backend_broke"
    assert (len(pair.asked), pair.line()["retries"], pair.resumes()) == (2, 1, {"budget": 1})


def test_silence_is_a_death(launch):
    pair = Pair(launch, Speaker("one", ["a"], gate), Speaker("second", ["b"]), timeouts={"inter_chunk": "1s"})
    assert content(events(post(pair.gateway, chat(stream=True)))) == "ab"
    assert pair.resumes() == {"resumed": 1}


def test_a_trickle_is_cut_and_a_slow_reader_is_not(launch):
    trickling = threading.Event()

    def trickle(exchange):
        while not exchange.left.is_set():
            exchange.chunk(sse(delta(".", "one")))
            trickling.wait(0.02)

    floor = {"slow_stream": {"tokens_per_second": 1000, "over": "1s"}}
    pair = Pair(launch, Speaker("one", ["a"], trickle), Speaker("second", ["b"]), **floor)
    text = content(events(post(pair.gateway, chat(stream=True))))
    assert (text.strip("."), text.replace(".", "")) == (text, "ab")
    assert pair.resumes() == {"resumed": 1}

    pair = Pair(launch, Speaker("one", ["a"], trickle), resume=False, **floor)
    answer = post(pair.gateway, chat(stream=True))
    assert events(answer)[-1]["error"]["code"] == "slow_stream"
    assert "slower than 1000 tokens a second" in events(answer)[-1]["error"]["message"]

    # More than fits the sockets between, at once: nothing of it is waited for.
    def flood(exchange):
        exchange.start_stream()
        for _ in range(1500):
            exchange.chunk(sse(delta("x" * 20_000, "one")))
        exchange.end_stream()

    pair = Pair(launch, flood, resume=False, slow_stream={"tokens_per_second": 100, "over": "500ms"})
    with httpx.stream("POST", pair.gateway.url + CHAT, json=chat(stream=True), timeout=30) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        trickling.wait(1.2)
        *_, last = pieces
    assert last.endswith(b"data: [DONE]\n\n")


TOOL = [{"type": "function", "function": {"name": "f"}}]
CALL = {"tool_calls": [{"index": 0, "id": "t", "function": {"name": "f", "arguments": "{"}}]}


@pytest.mark.parametrize(
    ("request_fields", "word"),
    [
        ({"tools": TOOL}, "a"),
        ({"n": 2}, "a"),
        ({"logprobs": True}, "a"),
        ({"response_format": {"type": "json_object"}}, "a"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "a"),
        ({"max_tokens": 1}, "a"),
        ({}, CALL),
        ({}, {"reasoning_content": "hm"}),
        ({}, "<think>"),
        ({}, "x" * (257 << 10)),
    ],
)
def test_what_has_no_second_half_ends_with_the_error_event(launch, request_fields, word):
    pair = Pair(launch, Speaker("one", [word], close))
    answer = post(pair.gateway, {**chat(stream=True), **request_fields})
    assert events(answer)[-1]["error"]["code"] == "backend_broke"
    assert len(pair.asked) == 1
    assert pair.resumes() == {"unfit": 1}


def test_it_is_asked_for(launch):
    pair = Pair(launch, Speaker("one", ["a"], close), resume=False)
    assert events(post(pair.gateway, chat(stream=True)))[-1]["error"]["code"] == "backend_broke"
    assert (len(pair.asked), pair.resumes()) == (1, {})


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_other_dialects_end_with_their_error_event(launch, path):
    def die(exchange):
        exchange.start_stream()
        exchange.chunk('event: x\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"Hi"}}\n\n')
        exchange.close()

    pair = Pair(launch, die)
    body = {"model": "sim", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "input": "x"}
    assert "event: error\ndata: {" in post(pair.gateway, body, path=path).text
    assert len(pair.asked) == 1


def test_who_cannot_go_on_is_not_asked(launch):
    pair = Pair(launch, Speaker("one", ["a"], close), engine="openai")
    assert events(post(pair.gateway, chat(stream=True)))[-1]["error"]["code"] == "backend_broke"
    assert (len(pair.asked), pair.resumes()) == (1, {"no_backend": 1})


def test_a_refusal_is_not_the_clients_to_see(launch):
    def refuse(exchange):
        exchange.reply(400, {"error": {"message": "no prefill here"}})

    pair = Pair(launch, Speaker("one", ["a"], close), refuse)
    answer = post(pair.gateway, chat(stream=True))
    assert answer.status_code == 200
    assert events(answer)[-1]["error"]["code"] == "backend_broke"
    assert "no prefill here" not in answer.text
    assert (pair.resumes(), pair.line()["status"]) == ({"refused": 1}, 200)


def test_a_full_backend_is_passed_over(launch):
    pair = Pair(launch, Speaker("one", ["a"], close), lambda exchange: exchange.reply(503, {}), Speaker("third", ["b"]))
    assert content(events(post(pair.gateway, chat(stream=True)))) == "ab"
    assert pair.resumes() == {"resumed": 1}


def test_an_answer_that_lacks_only_its_end_gets_it(launch):
    def finish_and_die(exchange):
        exchange.chunk(sse(delta({}, "one", finish_reason="stop")))
        exchange.close()

    pair = Pair(launch, Speaker("one", ["a"], finish_and_die))
    answer = post(pair.gateway, chat(stream=True))
    assert answer.text.endswith("data: [DONE]\n\n")
    assert content(events(answer)) == "a"
    assert (len(pair.asked), pair.line()["reason"]) == (1, "ok")
    # A count that was asked for has gone with the backend.
    pair = Pair(launch, Speaker("one", ["a"], finish_and_die))
    answer = post(pair.gateway, chat(stream=True, stream_options={"include_usage": True}))
    assert events(answer)[-1]["error"]["code"] == "backend_broke"


def test_one_of_several_answers_that_has_ended_is_not_the_end(launch):
    def one_of_two(exchange):
        exchange.chunk(sse(delta({}, "one", finish_reason="stop")))
        exchange.close()

    pair = Pair(launch, Speaker("one", ["a"], one_of_two))
    answer = post(pair.gateway, chat(stream=True, n=2))
    assert events(answer)[-1]["error"]["code"] == "backend_broke"
    assert "[DONE]" not in answer.text
    assert pair.resumes() == {"unfit": 1}


def test_an_error_that_the_client_was_told_of_is_the_end(launch):
    def fail(exchange):
        exchange.chunk('data: {"error": {"message": "out of memory", "code": 500}}\n\n')
        exchange.close()

    pair = Pair(launch, Speaker("one", ["a"], fail), Speaker("second", ["b"]))
    answer = post(pair.gateway, chat(stream=True))
    assert "out of memory" in answer.text and "[DONE]" not in answer.text
    assert (len(pair.asked), pair.resumes()) == (1, {"unfit": 1})


@pytest.mark.parametrize("resume", [True, False])
def test_what_breaks_behind_the_last_event_is_no_failure(launch, resume):
    def all_said(exchange):
        exchange.chunk(sse(delta({}, "one", finish_reason="stop")))
        exchange.chunk("data: [DONE]\n\n")
        exchange.close()

    pair = Pair(launch, Speaker("one", ["a"], all_said), resume=resume)
    answer = post(pair.gateway, chat(stream=True))
    assert answer.text.endswith("data: [DONE]\n\n") and "error" not in answer.text
    assert (len(pair.asked), pair.line()["reason"], pair.resumes()) == (1, "ok", {})


def test_a_client_that_leaves_meanwhile_frees_its_place(launch):
    pair = Pair(launch, Speaker("one", ["a"], close), gate)
    with httpx.stream("POST", pair.gateway.url + CHAT, json=chat(stream=True), timeout=30) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        pair.gateway.until(lambda: len(pair.asked) == 2, "the second backend is asked")
    assert pair.asked[1].wait_left()
    pair.gateway.wait_idle()
    pair.gateway.until(lambda: pair.line()["reason"] == "client_left", lambda: pair.line())
    assert pair.line()["output_tokens"] == 1


class Busy:
    """Two backends of one slot: one streams what is called `stream`, and dies when it is released; the other one runs what is called `running`."""

    def __init__(self, launch):
        self.order = []
        self.backends = [launch.backend(self.answer) for _ in range(2)]
        entries = [{"url": backend.url, "engine": "vllm", "slots": 1} for backend in self.backends]
        self.gateway = launch.gateway(pool("sim", *entries, resume=True)).healthy(2)

    def answer(self, exchange):
        messages = exchange.json["messages"]
        self.order.append(messages[0]["content"])
        if messages[0]["content"] != "stream":
            gate(exchange)
        elif len(messages) == 1:
            Speaker("one", ["a"], lambda exchange: (exchange.wait_released(), exchange.close()))(exchange)
        else:
            Speaker("second", ["b"])(exchange)

    def until(self, *order):
        self.gateway.until(lambda: self.order == list(order), lambda: self.order)

    def exchange(self, name):
        return next(exchange for backend in self.backends for exchange in backend.exchanges if exchange.json["messages"][0]["content"] == name)

    def die(self):
        """The one that streams, for good."""
        streams = self.exchange("stream")
        listener = next(backend for backend in self.backends if streams in backend.exchanges).listener
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        streams.released.set()


def test_a_client_that_leaves_while_the_rest_waits_frees_its_place(launch):
    busy = Busy(launch)
    with httpx.stream("POST", busy.gateway.url + CHAT, json=chat("stream", stream=True), timeout=30) as answer:
        pieces = answer.iter_bytes()
        next(pieces)
        running = Call(busy.gateway, chat("running"))
        busy.until("stream", "running")
        busy.die()
        busy.gateway.wait_waiting(1)
    busy.gateway.wait_waiting(0)
    busy.exchange("running").released.set()
    assert running.result().status_code == 200


def test_the_rest_keeps_its_place_in_the_queue(launch):
    """Its arrival is the first one: under fcfs it goes before whoever came while it streamed."""
    busy = Busy(launch)
    stream = Call(busy.gateway, chat("stream", stream=True))
    busy.until("stream")
    running = Call(busy.gateway, chat("running"))
    busy.until("stream", "running")
    waiting = Call(busy.gateway, chat("waiting"))
    busy.gateway.wait_waiting(1)
    busy.die()
    busy.gateway.wait_waiting(2)
    busy.exchange("running").released.set()
    assert content(events(stream.result())) == "ab"
    busy.until("stream", "running", "stream", "waiting")
    busy.exchange("waiting").released.set()
    assert running.result().status_code == waiting.result().status_code == 200


def test_a_place_where_nothing_can_go_on_is_a_mistake(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend))
    gateway.write(pools=[pool("sim", backend, resume=True, retries=0)])
    [problem] = gateway.reload().json()["error"]["problems"]
    assert problem["field"] == "pools[0].resume"


def test_a_real_engine_goes_on_where_a_killed_one_stopped(launch):
    """Greedy, on a model whose tokens are whole words, so that a text has one tokenization wherever it is cut: the halves make the undisturbed answer."""
    engines = [launch.llama(hidden=256, layers=4, context=2048) for _ in range(2)]
    gateway = launch.gateway(pool("toy", *engines, resume=True)).healthy(2)
    settings = {"model": "toy", "temperature": 0, "max_tokens": 300, "stream": True, "stream_options": {"include_usage": True}}
    settings["messages"] = [{"role": "user", "content": "say something new about the house"}]
    with openai.OpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0, timeout=60) as sdk:

        def answer(kill_after=None):
            words, chunks = [], []
            with sdk.chat.completions.create(**settings) as stream:
                backend = stream.response.headers["x-headway-backend"]
                for chunk in stream:
                    chunks.append(chunk)
                    words += [choice.delta.content for choice in chunk.choices if choice.delta.content]
                    if len(words) == kill_after:
                        next(engine for engine in engines if engine.url.endswith(backend)).child.kill()
            return words, chunks

        whole, chunks = answer()
        usage = chunks[-1].usage
        assert (len(whole), usage.completion_tokens) == (300, 300)
        assert len(set(whole)) > 20, "it says more than a loop of a few words"
        # Whatever the engine has in its cache: what was asked before does not change what it says.
        assert answer()[0] == whole
        resumed, chunks = answer(kill_after=40)
    assert "".join(resumed) == "".join(whole)
    assert sum(engine.alive for engine in engines) == 1
    assert [chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens] == [usage.prompt_tokens, 300]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices].count("assistant") == 1
    counted = 'headway_resumes_total{pool="chat",outcome="resumed"} 1'
    gateway.until(lambda: counted in httpx.get(gateway.admin + "/metrics", timeout=PATIENCE).text, "the resume is counted")
