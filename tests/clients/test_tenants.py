"""Keys, tenants and their limits, with the SDKs that clients use."""

import json
import subprocess
import threading

import anthropic
import httpx
import openai
import pytest
from processes import BINARY, PATIENCE, metric, pool
from scripted import completion, gate
from wire import Call, chat, error, post


def new_key():
    """A key and its hash, as `headway key new` prints them."""
    lines = subprocess.run([BINARY, "key", "new"], check=True, capture_output=True, text=True).stdout.splitlines()
    (_, key, *_), (_, sha256, *_) = (line.split() for line in lines)
    return key, sha256


def bearer(key):
    return {"authorization": f"Bearer {key}"}


class Tenants:
    """A keys file, and the key of each tenant in it."""

    def __init__(self, folder, **tenants):
        self.file, self.keys, self.entries = folder / "keys.yaml", {}, {}
        for name, settings in tenants.items():
            self.keys[name], sha256 = new_key()
            self.entries[name] = {"name": name, "keys": [sha256], **settings}
        self.write()

    def write(self):
        self.file.write_text(json.dumps({"tenants": list(self.entries.values())}))

    @property
    def section(self):
        return {"file": str(self.file)}


def test_only_known_keys_are_served(launch):
    tenants = Tenants(launch.folder, search={}, ads={"models": ["sim"]})
    backend = launch.backend(models=("sim", "big"))
    gateway = launch.gateway(pool(["sim", "big"], backend), keys=tenants.section).healthy(1)

    missing = post(gateway, chat())
    assert (missing.status_code, error(missing)["code"]) == (401, "missing_api_key")
    unknown = post(gateway, chat(), headers=bearer("hw-nobody"))
    assert (unknown.status_code, error(unknown)["code"]) == (401, "invalid_api_key")
    assert httpx.get(gateway.url + "/v1/models", timeout=PATIENCE).status_code == 401
    assert not backend.exchanges

    client = openai.OpenAI(base_url=gateway.url + "/v1", api_key=tenants.keys["search"], max_retries=0)
    assert client.chat.completions.create(model="big", messages=[{"role": "user", "content": "hi"}]).choices[0].message.content
    assert backend.exchange(0).headers.get("authorization") is None, "a client's key stays here"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="hw-wrong").models.list()
    assert {model.id for model in client.models.list()} == {"sim", "big"}

    ads = client.with_options(api_key=tenants.keys["ads"])
    assert [model.id for model in ads.models.list()] == ["sim"]
    with pytest.raises(openai.PermissionDeniedError) as refused:
        ads.chat.completions.create(model="big", messages=[{"role": "user", "content": "hi"}])
    assert refused.value.code == "model_forbidden"

    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=gateway.url, api_key="hw-wrong", max_retries=0).messages.create(
            model="sim", max_tokens=5, messages=[{"role": "user", "content": "hi"}]
        )
    assert metric(gateway.admin, 'headway_tenant_requests_total{tenant="search",outcome="ok"}') >= 1
    assert tenants.keys["search"] not in gateway.output()
    assert 'tenant="search"' in gateway.output()


def test_an_address_that_tries_keys_is_slowed_down_and_known_keys_from_it_never(launch):
    tenants = Tenants(launch.folder, search={})
    section = {**tenants.section, "unknown_per_minute": 1}
    gateway = launch.gateway(pool("sim", launch.backend()), keys=section).healthy(1)
    first, *others = [post(gateway, chat(), headers=bearer(f"hw-guess-{n}")) for n in range(5)]
    assert (first.status_code, error(first)["code"]) == (401, "invalid_api_key")
    # No header makes the address another one.
    others.append(post(gateway, chat(), headers={**bearer("hw-guess"), "x-forwarded-for": "203.0.113.7", "forwarded": "for=203.0.113.7"}))
    for refused in others:
        assert (refused.status_code, error(refused)["code"]) == (429, "rate_limit_unknown_keys")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert post(gateway, chat(), headers=bearer(tenants.keys["search"])).status_code == 200
    assert metric(gateway.admin, 'headway_requests_total{pool="other",model="other",outcome="rate_limit_unknown_keys"}') == 5


def test_requests_per_minute(launch):
    tenants = Tenants(launch.folder, slow={"limits": {"requests_per_minute": 2}}, other={})
    gateway = launch.gateway(pool("sim", launch.backend()), keys=tenants.section).healthy(1)
    first = post(gateway, chat(), headers=bearer(tenants.keys["slow"]))
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    post(gateway, chat(), headers=bearer(tenants.keys["slow"]))
    refused = post(gateway, chat(), headers=bearer(tenants.keys["slow"]))
    assert (refused.status_code, error(refused)["code"]) == (429, "rate_limit_requests")
    assert 25 <= int(refused.headers["retry-after"]) <= 30, "one of two comes back in half a minute"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert post(gateway, chat(), headers=bearer(tenants.keys["other"])).status_code == 200

    # A reload that changes nothing of it forgets nothing of it.
    gateway.write(edge={"max_head": "32KiB"})
    assert gateway.reload().status_code == 200
    assert post(gateway, chat(), headers=bearer(tenants.keys["slow"])).status_code == 429
    tenants.entries["slow"]["limits"] = {"requests_per_minute": 1000}
    tenants.write()
    assert gateway.reload().status_code == 200
    assert post(gateway, chat(), headers=bearer(tenants.keys["slow"])).status_code == 200


def test_tokens_are_settled_by_what_the_answer_took(launch):
    tenants = Tenants(launch.folder, tenant={"limits": {"output_tokens_per_minute": 1000}})
    backend = launch.backend(lambda exchange: exchange.reply(body=completion(tokens=exchange.json["seed"])))
    gateway = launch.gateway(pool("sim", backend), keys=tenants.section).healthy(1)

    def ask(tokens, **more):
        return post(gateway, chat(seed=tokens, **more), headers=bearer(tenants.keys["tenant"]))

    def left(response):
        return int(response.headers["x-ratelimit-remaining-tokens"])

    assert left(ask(10, max_tokens=500)) <= 1000 - 256, "what is likely is reserved while it runs"
    assert 720 <= left(ask(900)) <= 760, "of the first, ten were used, and of this one what is usual is reserved"
    refused = ask(1, max_tokens=600)
    assert (refused.status_code, error(refused)["code"]) == (429, "rate_limit_output_tokens")
    # 910 tokens were used: what is reserved next is what the client allows, or about 290, and comes back at 1000 a minute.
    assert 1 <= int(refused.headers["retry-after"]) <= 15
    assert ask(1, max_tokens=20).status_code == 200, "a smaller one fits"


def test_what_no_backend_worked_on_costs_no_tokens(launch):
    tenants = Tenants(launch.folder, tenant={"limits": {"input_tokens_per_minute": 100000, "output_tokens_per_minute": 100000}})
    backend = launch.backend(lambda exchange: exchange.reply(status=exchange.json["seed"], body={"error": {"message": "no"}}))
    gateway = launch.gateway(pool("sim", backend, retries=0), keys=tenants.section).healthy(1)
    for status in (400, 429, 503):
        assert post(gateway, chat("x" * 4000, seed=status), headers=bearer(tenants.keys["tenant"])).status_code == status
    [shown] = httpx.get(gateway.admin + "/admin/tenants", timeout=PATIENCE).json()["tenants"]
    assert shown["held"] == 0
    assert [shown["limits"][what]["left"] for what in ("input_tokens", "output_tokens")] == [100000, 100000], shown


def test_a_backend_that_miscounts_locks_nobody_out(launch):
    tenants = Tenants(launch.folder, tenant={"limits": {"output_tokens_per_minute": 6000}})
    backend = launch.backend(lambda exchange: exchange.reply(body=completion(tokens=10**9)))
    gateway = launch.gateway(pool("sim", backend), keys=tenants.section).healthy(1)
    post(gateway, chat(max_tokens=100), headers=bearer(tenants.keys["tenant"]))
    again = post(gateway, chat(max_tokens=100), headers=bearer(tenants.keys["tenant"]))
    assert again.status_code == 200


def test_embeddings_are_not_held_up_by_what_they_do_not_use(launch):
    tenants = Tenants(launch.folder, tenant={"limits": {"output_tokens_per_minute": 10}})
    backend = launch.backend(lambda exchange: exchange.reply(body=completion(tokens=500)))
    gateway = launch.gateway(pool("sim", backend), keys=tenants.section).healthy(1)
    key = bearer(tenants.keys["tenant"])
    assert post(gateway, chat(), headers=key).status_code == 200
    assert post(gateway, chat(), headers=key).status_code == 429
    assert post(gateway, {"model": "sim", "input": "x"}, path="/v1/embeddings", headers=key).status_code == 200


def test_an_empty_section_does_not_open_the_gateway(launch):
    tenants = Tenants(launch.folder, search={})
    gateway = launch.gateway(pool("sim", launch.backend()), keys=tenants.section).healthy(1)
    gateway.write_text(gateway.file.read_text().replace(json.dumps(tenants.section, indent=1).replace("\n", "\n "), "null"))
    answer = gateway.reload()
    assert (answer.status_code, answer.json()["error"]["problems"][0]["field"]) == (422, "keys")
    assert post(gateway, chat()).status_code == 401
    assert post(gateway, chat()).headers["www-authenticate"] == "Bearer"
    # Without the section, said in the log.
    del gateway.settings["keys"]
    gateway.write()
    assert gateway.reload().status_code == 200
    assert "keys are configured no more" in gateway.output()


def test_an_answer_that_its_client_left_costs_what_came(launch):
    tenants = Tenants(launch.folder, tenant={"limits": {"output_tokens_per_minute": 10000}})

    def five_words(exchange):
        exchange.start_stream()
        for word in "one two three four five".split():
            exchange.word(word)
        exchange.wait_left()

    gateway = launch.gateway(pool("sim", launch.backend(five_words)), keys=tenants.section).healthy(1)
    with httpx.stream("POST", gateway.url + "/v1/chat/completions", json=chat(stream=True), headers=bearer(tenants.keys["tenant"])) as response:
        lines = (line for line in response.iter_lines() if "five" in line)
        assert next(lines)
    gateway.wait_in_flight(0)

    def left():
        [shown] = httpx.get(gateway.admin + "/admin/tenants", timeout=PATIENCE).json()["tenants"]
        return shown["limits"]["output_tokens"]["left"]

    gateway.until(lambda: left() >= 9995, lambda: f"five tokens were used: {left()}")
    assert metric(gateway.admin, 'headway_tenant_output_tokens_total{tenant="tenant"}') == 5


def test_as_many_at_once_as_allowed_and_no_place_is_lost(launch):
    tenants = Tenants(launch.folder, tenant={"limits": {"concurrent_requests": 2}})
    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1}), keys=tenants.section).healthy(1)
    key = bearer(tenants.keys["tenant"])
    running = Call(gateway, chat(), headers=key)
    backend.exchange(0)
    left = threading.Event()

    def leave():
        with pytest.raises(httpx.ReadTimeout):
            post(gateway, chat(), timeout=1, headers=key)
        left.set()

    threading.Thread(target=leave).start()
    gateway.wait_waiting(1)
    refused = post(gateway, chat(), headers=key)
    assert (refused.status_code, error(refused)["code"]) == (429, "concurrent_requests")
    assert left.wait(PATIENCE)
    gateway.wait_waiting(0)
    queued = Call(gateway, chat(), headers=key)
    gateway.wait_waiting(1)
    backend.exchange(0).released.set()
    assert running.result().status_code == 200
    backend.exchange(1).released.set()
    assert queued.result().status_code == 200


FLOOD = 30


def flooded(launch, keys, **edge):
    """A backend of one slot that is held, and a flood behind it. Shares decide at once: by default they would let a flood of answers this short be a thousand tokens ahead."""
    policy = launch.folder / "shares.yaml"
    policy.write_text("order: headway\ngamma: { target: mean }\ntenant_lead: 0s\n")
    backend = launch.backend(gate)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1}, **edge), keys=keys.section, policy=str(policy)).healthy(1)
    calls = [Call(gateway, chat("hold"), headers=bearer(keys.keys["flood"]))]
    backend.exchange(0)
    calls += [Call(gateway, chat(f"flood {number}"), headers=bearer(keys.keys["flood"])) for number in range(FLOOD)]
    gateway.wait_waiting(FLOOD)
    return backend, gateway, calls


def starts(backend, count):
    """What each of the next requests that reach the backend says, one after another."""
    prompts = []
    for index in range(count):
        exchange = backend.exchange(index)
        prompts.append(exchange.json["messages"][-1]["content"])
        exchange.released.set()
    return prompts


def test_a_flood_of_one_tenant_is_not_the_wait_of_another(launch):
    tenants = Tenants(launch.folder, flood={}, single={})
    backend, gateway, calls = flooded(launch, tenants)
    calls.append(Call(gateway, chat("single"), headers=bearer(tenants.keys["single"])))
    gateway.wait_waiting(FLOOD + 1)
    order = starts(backend, FLOOD + 2)
    assert order.index("single") <= 2, order
    assert {call.result().status_code for call in calls} == {200}


def test_priority_by_header_and_by_tier_within_what_the_key_allows(launch):
    tenants = Tenants(launch.folder, flood={}, humble={"max_priority": "normal"})
    backend, gateway, calls = flooded(launch, tenants)
    flood = bearer(tenants.keys["flood"])
    calls.append(Call(gateway, chat("low", service_tier="flex"), headers=flood))
    gateway.wait_waiting(FLOOD + 1)
    calls.append(Call(gateway, chat("normal"), headers=flood))
    gateway.wait_waiting(FLOOD + 2)
    calls.append(Call(gateway, chat("tier", service_tier="priority"), headers=flood))
    gateway.wait_waiting(FLOOD + 3)
    calls.append(Call(gateway, chat("high"), headers={**flood, "x-headway-priority": "high"}))
    gateway.wait_waiting(FLOOD + 4)
    refused = post(gateway, chat(), headers={**flood, "x-headway-priority": "urgent"})
    assert (refused.status_code, error(refused)["code"]) == (400, "invalid_header")
    order = starts(backend, FLOOD + 5)
    assert order[1:3] == ["tier", "high"] and order[-1] == "low", order
    assert order.index("normal") == FLOOD + 3, order
    assert {call.result().status_code for call in calls} == {200}

    bound = [Call(gateway, chat("hold"), headers=bearer(tenants.keys["humble"]))]
    backend.exchange(FLOOD + 5)
    for name, headers in ("first", {}), ("second", {"x-headway-priority": "high"}):
        bound.append(Call(gateway, chat(name), headers={**bearer(tenants.keys["humble"]), **headers}))
        gateway.wait_waiting(len(bound) - 1)
    for index, name in enumerate(["hold", "first", "second"]):
        exchange = backend.exchange(FLOOD + 5 + index)
        assert exchange.json["messages"][-1]["content"] == name, "the key bounds what its requests may ask for"
        exchange.released.set()
    assert {call.result().status_code for call in bound} == {200}


def test_no_longer_in_the_queue_than_its_first_token_may_take(launch):
    tenants = Tenants(launch.folder, flood={})
    backend, gateway, calls = flooded(launch, tenants)
    headers = bearer(tenants.keys["flood"])
    refused = post(gateway, chat("hurry"), headers={**headers, "x-slo-ttft-ms": "200"})
    assert (refused.status_code, error(refused)["code"]) == (429, "queue_timeout")
    assert int(refused.headers["retry-after"]) >= 1
    wrong = post(gateway, chat(), headers={**headers, "x-slo-ttft-ms": "soon"})
    assert (wrong.status_code, error(wrong)["code"]) == (400, "invalid_header")
    assert "hurry" not in starts(backend, FLOOD + 1)
    assert {call.result().status_code for call in calls} == {200}


def test_one_tenant_leaves_room_in_the_queue_for_others(launch):
    tenants = Tenants(launch.folder, flood={}, single={})
    backend, gateway, calls = flooded(launch, tenants, limits={"queue_requests": FLOOD + 3})
    refused = post(gateway, chat(), headers=bearer(tenants.keys["flood"]))
    assert (refused.status_code, error(refused)["code"]) == (429, "queue_share")
    calls += [Call(gateway, chat(), headers=bearer(tenants.keys["single"])) for _ in range(3)]
    gateway.wait_waiting(FLOOD + 3)
    starts(backend, FLOOD + 4)
    assert {call.result().status_code for call in calls} == {200}


def test_a_mistake_in_the_keys_file_keeps_the_last_good_one(launch):
    tenants = Tenants(launch.folder, search={})
    gateway = launch.gateway(pool("sim", launch.backend()), keys=tenants.section).healthy(1)
    good = tenants.keys["search"]
    secret = "hw-put-into-the-file-by-mistake"
    tenants.file.write_text(f"tenants:\n  - name: search\n    models: [simm]\n    keys: [{secret}]\n")
    answer = gateway.reload()
    assert answer.status_code == 422
    problems = {problem["field"]: problem for problem in answer.json()["error"]["problems"]}
    assert problems["tenants[0].keys[0]"]["line"] == 4
    assert "headway key new" in problems["tenants[0].keys[0]"]["hint"]
    assert "did you mean sim?" in problems["tenants[0].models[0]"]["hint"]
    assert secret not in answer.text
    assert secret not in gateway.output()
    assert post(gateway, chat(), headers=bearer(good)).status_code == 200


def reasons(calls):
    return [call.response.headers["x-headway-reason"] for call in calls if call.response is not None and call.response.status_code == 429]


@pytest.mark.parametrize("whose", ["key", "tenant", "model"])
def test_so_much_of_one_owner_may_wait_and_every_place_comes_back(launch, whose):
    limits = {"queue_requests": 2}
    tenants = Tenants(launch.folder, one={"limits": limits} if whose == "tenant" else {}, other={})
    if whose == "key":
        tenants.entries["one"]["keys"] = [{"sha256": tenants.entries["one"]["keys"][0], "limits": limits}]
        tenants.write()
    backend = launch.backend(gate)
    models = [{"name": "sim", "limits": limits}] if whose == "model" else ["sim"]
    chat_pool = {**pool([*models, "big"], backend), "limits": {"queue_requests": 100}}
    chat_pool["backends"][0]["slots"] = 1
    gateway = launch.gateway(chat_pool, keys=tenants.section).healthy(1)
    key = bearer(tenants.keys["one"])

    def full():
        """One runs, two wait, and the next is told."""
        start = len(backend.exchanges)
        running = Call(gateway, chat(), headers=key)
        backend.exchange(start)
        waiting = [Call(gateway, chat(), headers=key) for _ in range(2)]
        gateway.wait_waiting(2)
        refused = post(gateway, chat(), headers=key)
        assert (refused.status_code, error(refused)["code"]) == (429, f"{whose}_queue_requests")
        assert int(refused.headers["retry-after"]) >= 1
        return running, waiting

    running, waiting = full()
    elsewhere = chat(model="big" if whose == "model" else "sim")
    another = Call(gateway, elsewhere, headers=bearer(tenants.keys["other"]))
    gateway.wait_waiting(3)
    backend.answer = lambda exchange: exchange.reply(body=completion())
    backend.release_all()
    assert [call.result().status_code for call in [running, *waiting, another]] == [200] * 4

    # Places of those who leave while they wait, and of those who wait too long, come back as well.
    backend.answer = gate
    running, waiting = full()
    gone = [Call(gateway, chat(), headers={**key, "x-request-timeout": "0.2"}) for _ in range(3)]
    for call in gone:
        call.join(30)
    assert reasons(gone) == [f"{whose}_queue_requests"] * 3, "they never waited"
    backend.answer = lambda exchange: exchange.reply(body=completion())
    backend.release_all()
    assert [call.result().status_code for call in [running, *waiting]] == [200] * 3
    backend.answer = gate
    start = len(backend.exchanges)
    running = Call(gateway, chat(), headers=key)
    backend.exchange(start)
    for _ in range(3):
        late = [Call(gateway, chat(), headers={**key, "x-request-timeout": "0.2"}) for _ in range(2)]
        # What the queue has learnt may tell one at once that its time is too short.
        assert {call.result().headers["x-headway-reason"] for call in late} <= {"total_timeout", "shed"}
        left = [Call(gateway, chat(), headers=key, timeout=0.5) for _ in range(2)]
        for call in left:
            call.join(30)
        assert all(isinstance(call.failure, httpx.TimeoutException) for call in left)
        gateway.wait_waiting(0)
    waiting = [Call(gateway, chat(), headers=key) for _ in range(2)]
    gateway.wait_waiting(2)
    backend.release_all()
    backend.exchange(start + 1).released.set()
    backend.exchange(start + 2).released.set()
    assert [call.result().status_code for call in [running, *waiting]] == [200] * 3


@pytest.mark.parametrize("limits", [{"queue_requests": 1}, {"concurrent_requests": 2}], ids=lambda limits: next(iter(limits)))
def test_who_comes_back_when_it_was_told_to_is_let_in(launch, limits):
    tenants = Tenants(launch.folder, one={"limits": limits})

    def slow(exchange):
        exchange.released.wait(1.6)
        exchange.reply(body=completion())

    backend = launch.backend(slow)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1}), keys=tenants.section).healthy(1)
    key = bearer(tenants.keys["one"])
    calls = [Call(gateway, chat(), headers=key)]
    backend.exchange(0)
    calls.append(Call(gateway, chat(), headers=key))
    gateway.wait_waiting(1)
    # How long a place takes to come free is known once one has.
    backend.exchange(1)
    calls[0].join(PATIENCE)
    calls.append(Call(gateway, chat(), headers=key))
    gateway.wait_waiting(1)

    answers = []
    with httpx.Client(event_hooks={"response": [answers.append]}) as recorded:
        # Waits as long as `Retry-After` says, once.
        client = openai.OpenAI(base_url=gateway.url + "/v1", api_key=tenants.keys["one"], max_retries=1, http_client=recorded)
        assert client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "hi"}]).choices[0].message.content
    refused, taken = answers
    assert (refused.status_code, taken.status_code) == (429, 200)
    assert refused.headers["x-headway-reason"] in ("tenant_queue_requests", "concurrent_requests")
    assert int(refused.headers["retry-after"]) > 1
    assert {call.result().status_code for call in calls} == {200}


def test_bytes_that_may_wait(launch):
    tenants = Tenants(launch.folder, one={"limits": {"queue_bytes": "4KiB"}})
    backend = launch.backend(gate)
    chat_pool = pool("sim", backend)
    chat_pool["backends"][0]["slots"] = 1
    gateway = launch.gateway(chat_pool, keys=tenants.section).healthy(1)
    key = bearer(tenants.keys["one"])
    running = Call(gateway, chat(), headers=key)
    backend.exchange(0)
    waiting = Call(gateway, chat("x" * 8000), headers=key)
    gateway.wait_waiting(1)
    refused = post(gateway, chat(), headers=key)
    assert (refused.status_code, error(refused)["code"]) == (429, "tenant_queue_bytes")
    shown = httpx.get(gateway.admin + "/admin/tenants", timeout=PATIENCE).json()["tenants"][0]["queue"]
    assert shown["requests"] == 1 and shown["bytes"] > 8000 and (shown["most_requests"], shown["most_bytes"]) == (None, 4096)
    backend.exchange(0).released.set()
    backend.exchange(1).released.set()
    assert (running.result().status_code, waiting.result().status_code) == (200, 200)
    shown = httpx.get(gateway.admin + "/admin/tenants", timeout=PATIENCE).json()["tenants"][0]["queue"]
    assert (shown["requests"], shown["bytes"]) == (0, 0)
