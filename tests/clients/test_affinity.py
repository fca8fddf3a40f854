"""What came before a request: a conversation goes on where its beginning is cached, and a session that has had much waits for those that have not."""

from processes import pool
from scripted import answer_normally, completion, gate
from wire import Call, chat, post

RULES = "You are a careful assistant, and you answer in as few words as you can. " * 40


def conversation(turns, last=None):
    """A chat body of so many questions with answers between them."""
    messages = [{"role": "system", "content": RULES}]
    for turn in range(1, turns):
        messages += [{"role": "user", "content": f"question {turn} " * 60}, {"role": "assistant", "content": f"answer {turn} " * 60}]
    return {"model": "sim", "max_tokens": 5, "messages": [*messages, {"role": "user", "content": (last or f"question {turns} ") * 60}]}


def goes_to(gateway, body):
    response = post(gateway, body)
    assert response.status_code == 200, response.text
    return response.headers["x-headway-backend"]


def home_of(gateway, backends, turns):
    """Where a conversation of so many turns went, all of it."""
    homes = {goes_to(gateway, conversation(turn)) for turn in range(1, turns + 1)}
    assert len(homes) == 1, homes
    return next(backend for backend in backends if backend.url.endswith(*homes))


def last_words(exchange):
    return exchange.json["messages"][-1]["content"]


def test_turns_find_what_was_said_before_in_the_cache(launch):
    engines = [launch.engine() for _ in range(3)]
    gateway = launch.gateway(pool("sim", *engines), policy="headway").healthy(3)
    home = home_of(gateway, engines, turns=8)
    assert [engine.metric("prompt_tokens_total") > 0 for engine in engines] == [engine is home for engine in engines]
    assert home.metric("prefix_cache_hits_total") > 0.7 * home.metric("prefix_cache_queries_total")


def test_a_turn_does_not_wait_for_its_cache(launch):
    backends = [launch.backend(lambda exchange: (gate if "hold" in last_words(exchange) else answer_normally)(exchange)) for _ in range(2)]
    gateway = launch.gateway(pool("sim", *({"url": backend.url, "slots": 1} for backend in backends)), policy="headway").healthy(2)
    home = home_of(gateway, backends, turns=6)
    held = Call(gateway, conversation(7, "hold on "))
    assert "hold" in last_words(home.exchange(6)), "it goes on where it was"
    assert not home.url.endswith(goes_to(gateway, conversation(7)))
    home.release_all()
    assert held.result().status_code == 200


def test_a_session_that_has_had_much_waits_for_those_that_have_not(launch):
    def long_or_held(exchange):
        return exchange.reply(body=completion(tokens=3000)) if "essay" in last_words(exchange) else gate(exchange)

    backend = launch.backend(long_or_held)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1}), policy="headway").healthy(1)
    agent = {"x-session-id": "agent"}
    assert post(gateway, chat("an essay"), headers=agent).status_code == 200
    calls = [Call(gateway, chat("held"))]
    backend.exchange(1)
    for text, headers, more in [
        ("by its header", agent, {}),
        ("by its key", {}, {"prompt_cache_key": "agent"}),
        ("of another", {"x-session-id": "person"}, {}),
        ("of none", {}, {"user": "agent"}),
    ]:
        calls.append(Call(gateway, chat(text, max_tokens=50, **more), headers=headers))
        gateway.wait_waiting(len(calls) - 1)
    order = []
    for index in range(1, 1 + len(calls)):
        order.append(last_words(backend.exchange(index)))
        backend.exchange(index).released.set()
    assert [call.result().status_code for call in calls] == [200] * len(calls)
    assert order == ["held", "of another", "of none", "by its header", "by its key"]
