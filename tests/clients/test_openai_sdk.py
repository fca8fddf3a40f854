"""The unmodified OpenAI SDK for Python, on the simulated engine and on llama.cpp."""

import asyncio
import json
import time

import httpx
import openai
import pytest
from processes import pool
from scripted import answer_normally, completion

QUESTION = [{"role": "user", "content": "say something new about the house"}]
# A red pixel.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}


def client(gateway, **options):
    return openai.OpenAI(base_url=gateway.url + "/v1", **{"api_key": "sk-anything", "max_retries": 0, "timeout": 30, **options})


@pytest.fixture
def sdk(gateway):
    with client(gateway) as sdk:
        yield sdk


def test_models_of_all_pools_are_listed(sdk):
    assert {"sim", "gpt-4o", "toy"} <= {model.id for model in sdk.models.list()}


def test_an_answer(sdk, model):
    answer = sdk.chat.completions.create(model=model, messages=QUESTION, max_tokens=20)
    assert answer.model == model
    assert answer.choices[0].message.content.strip()
    assert answer.usage.completion_tokens > 0


def test_an_alias_answers_under_the_name_that_was_asked(sdk):
    assert sdk.chat.completions.create(model="gpt-4o", messages=QUESTION, max_tokens=5).model == "gpt-4o"
    with sdk.chat.completions.create(model="gpt-4o", messages=QUESTION, max_tokens=5, stream=True) as stream:
        assert {chunk.model for chunk in stream} == {"gpt-4o"}


def test_a_stream_is_the_same_answer_in_pieces(sdk):
    settings = {"model": "sim", "messages": QUESTION, "max_tokens": 30, "extra_body": {"sim_output_tokens": 30}}
    whole = sdk.chat.completions.create(**settings).choices[0].message.content
    with sdk.chat.completions.create(**settings, stream=True) as stream:
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == whole
    assert len(whole.split()) == 30


def test_a_stream_arrives_while_it_is_made(launch):
    """Not buffered: the first piece is there long before the backend sends the last."""

    def answer(exchange):
        exchange.start_stream()
        exchange.word("first")
        exchange.wait_released()
        exchange.word("last")
        exchange.end_stream()

    backend = launch.backend(answer)
    gateway = launch.gateway(pool("sim", backend))
    with client(gateway).chat.completions.create(model="sim", messages=QUESTION, stream=True) as stream:
        pieces = iter(stream)
        assert next(pieces).choices[0].delta.content == "first"
        backend.exchange().released.set()
        assert next(pieces).choices[0].delta.content == "last"
        assert list(pieces) == []


def test_usage_is_shown_to_those_who_asked_and_only_to_them(sdk, model):
    settings = {"model": model, "messages": QUESTION, "max_tokens": 8, "stream": True}
    with sdk.chat.completions.create(**settings) as stream:
        silent = list(stream)
    assert all(chunk.choices and chunk.usage is None for chunk in silent)
    with sdk.chat.completions.create(**settings, stream_options={"include_usage": True}) as stream:
        *_, last = list(stream)
    assert last.choices == []
    assert last.usage.completion_tokens == 8
    with sdk.chat.completions.create(**settings, stream_options={"include_usage": False}) as stream:
        assert all(chunk.choices and chunk.usage is None for chunk in stream)


def test_many_at_once_with_the_async_client(gateway, model):
    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0, timeout=60) as sdk:

            async def one(index):
                settings = {"model": model, "messages": [{"role": "user", "content": f"count to {index}"}], "max_tokens": 5 + index % 7}
                if index % 2:
                    return (await sdk.chat.completions.create(**settings)).usage.completion_tokens
                stream = await sdk.chat.completions.create(**settings, stream=True)
                return len([chunk async for chunk in stream if chunk.choices and chunk.choices[0].delta.content])

            return await asyncio.gather(*(one(index) for index in range(40)))

    assert all(tokens > 0 for tokens in asyncio.run(all_of_them()))


def test_tools(sdk):
    call = {"model": "sim", "messages": QUESTION, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 100}
    message = sdk.chat.completions.create(**call).choices[0].message
    used = message.tool_calls[0]
    assert used.function.name == "weather"
    assert json.loads(used.function.arguments)["city"] in ("Rome", "Oslo")

    with sdk.chat.completions.create(**call, stream=True) as stream:
        deltas = [chunk.choices[0].delta.tool_calls[0] for chunk in stream if chunk.choices[0].delta.tool_calls]
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == json.loads(used.function.arguments)

    # The next turn: an assistant message without content, and the tool's result.
    turns = [*QUESTION, message.to_dict() | {"content": None}, {"role": "tool", "tool_call_id": used.id, "content": "sunny"}]
    assert sdk.chat.completions.create(model="sim", messages=turns, tools=[WEATHER], max_tokens=10).choices[0].message.content


def test_images_in_the_content(sdk):
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    content = [{"type": "text", "text": "what is this?"}, image]
    answer = sdk.chat.completions.create(model="sim", messages=[{"role": "user", "content": content}], max_tokens=10)
    assert answer.usage.prompt_tokens > 256

    # The toy has no eyes: llama.cpp says so, and its words reach the client.
    with pytest.raises(openai.APIStatusError, match="image input is not supported"):
        sdk.chat.completions.create(model="toy", messages=[{"role": "user", "content": content}], max_tokens=10)


def test_completions(sdk, model):
    assert sdk.completions.create(model=model, prompt="once upon", max_tokens=6).usage.completion_tokens == 6
    with sdk.completions.create(model=model, prompt="once upon", max_tokens=6, stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream).strip()


def test_responses(sdk, model):
    answer = sdk.responses.create(model=model, input="once upon", max_output_tokens=6)
    assert answer.output_text.strip()
    assert answer.usage.output_tokens > 0
    with sdk.responses.create(model=model, input="once upon", max_output_tokens=6, stream=True) as stream:
        kinds = [event.type for event in stream]
    assert "response.output_text.delta" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_embeddings(sdk):
    answer = sdk.embeddings.create(model="sim", input=["one", "two"])
    assert len(answer.data) == 2
    assert answer.data[0].embedding != answer.data[1].embedding


def test_what_the_gateway_did_is_in_the_headers(sdk):
    raw = sdk.chat.completions.with_raw_response.create(model="sim", messages=QUESTION, max_tokens=5, extra_headers={"x-request-id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.headers["x-headway-policy"] == "headway"
    assert raw.headers["x-headway-backend"].startswith("127.0.0.1:")
    assert float(raw.headers["x-headway-queue-ms"]) >= 0
    minted = [sdk.chat.completions.with_raw_response.create(model="sim", messages=QUESTION, max_tokens=1).headers["x-request-id"] for _ in range(2)]
    assert len(set(minted)) == 2


def test_credentials_stay_here_and_the_backend_gets_its_own(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", {"url": backend.url, "api_key": "sk-of-the-backend"}))
    headers = {"api-key": "secret-2", "x-api-key": "secret-3", "x-kept": "yes"}
    client(gateway, api_key="sk-of-the-client").chat.completions.create(model="sim", messages=QUESTION, extra_headers=headers)
    seen = backend.exchange().headers
    assert seen["authorization"] == "Bearer sk-of-the-backend"
    assert seen["x-kept"] == "yes"
    assert not {"api-key", "x-api-key"} & seen.keys()
    for secret in ("sk-of-the-client", "sk-of-the-backend", "secret-2", "secret-3"):
        assert secret not in gateway.output()
        assert secret not in httpx.get(gateway.admin + "/admin/pools").text


def test_a_body_that_needs_no_change_reaches_the_backend_byte_for_byte(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool(["sim", {"name": "alias", "upstream": "sim"}], backend))
    body = b'{ "zeta":1.0,  "messages" : [{"role":"user","content":"h\\u00e9 \xf0\x9f\x98\x80"}],"model": "%s","unknown":{"a":[1e2,null]}, "n":1}'
    for name in (b"sim", b"alias"):
        answer = httpx.post(gateway.url + "/v1/chat/completions", content=body % name)
        assert answer.status_code == 200
    same, spliced = backend.exchange(0).body, backend.exchange(1).body
    assert same == body % b"sim"
    assert spliced == body % b"sim"


def test_errors_become_the_exceptions_of_the_sdk(sdk):
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.chat.completions.create(model="gpt-4oo", messages=QUESTION)
    assert "gpt-4o" in unknown.value.message
    assert unknown.value.code
    assert unknown.value.response.headers["x-headway-reason"]

    with pytest.raises(openai.BadRequestError, match="messages"):
        sdk.chat.completions.create(model="sim", messages="hello")
    with pytest.raises(openai.BadRequestError, match="maximum context length"):  # the engine's own words
        sdk.chat.completions.create(model="sim", messages=QUESTION, max_tokens=10_000_000)


@pytest.mark.parametrize(
    ("status", "exception"),
    [
        (400, openai.BadRequestError),
        (401, openai.AuthenticationError),
        (403, openai.PermissionDeniedError),
        (404, openai.NotFoundError),
        (409, openai.ConflictError),
        (422, openai.UnprocessableEntityError),
        (500, openai.InternalServerError),
    ],
)
def test_the_backends_own_errors_pass_with_their_bodies(launch, status, exception):
    backend = launch.backend(lambda exchange: exchange.reply(status, {"error": {"message": "its own words", "type": "t", "code": "c7"}}))
    gateway = launch.gateway(pool("sim", backend))
    with pytest.raises(exception) as raised:
        client(gateway).chat.completions.create(model="sim", messages=QUESTION)
    assert raised.value.status_code == status
    assert raised.value.body == {"message": "its own words", "type": "t", "code": "c7"}
    if status < 500:
        gateway.healthy(1)
    # A 4xx never counts against a backend: it is asked again, however often.
    if status == 422:
        for _ in range(10):
            with pytest.raises(exception):
                client(gateway).chat.completions.create(model="sim", messages=QUESTION)
        gateway.healthy(1)


@pytest.mark.parametrize("status", [429, 503])
def test_the_sdk_retries_what_the_backend_pushed_back(launch, status):
    """With its only backend full, the client is told so and comes back by itself."""

    def answer(exchange):
        if len(backend.exchanges) == 1:
            exchange.reply(status, {"error": {"message": "full"}}, {"retry-after": "1"})
        else:
            answer_normally(exchange)

    backend = launch.backend(answer)
    gateway = launch.gateway(pool("sim", backend, retries=0))
    answer = client(gateway, max_retries=4).chat.completions.create(model="sim", messages=QUESTION)
    assert answer.choices[0].message.content == "hello"
    gateway.healthy(1)


def test_the_sdk_waits_as_long_as_a_full_queue_asks(launch):
    def gate_first(exchange):
        exchange.wait_released()
        exchange.reply(body=completion())

    backend = launch.backend(gate_first)
    gateway = launch.gateway(pool("sim", {"url": backend.url, "slots": 1}, limits={"queue_requests": 1}))
    sent, asked_to_wait = [], []
    hooks = {
        "request": [lambda request: sent.append(time.monotonic())],
        "response": [lambda response: asked_to_wait.append((response.status_code, response.headers.get("retry-after")))],
    }

    async def fill():
        async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0, timeout=60) as sdk:
            first = asyncio.create_task(sdk.chat.completions.create(model="sim", messages=QUESTION))
            await asyncio.to_thread(gateway.wait_in_flight, 1)
            second = asyncio.create_task(sdk.chat.completions.create(model="sim", messages=QUESTION))
            await asyncio.to_thread(gateway.wait_waiting, 1)
            with httpx.Client(event_hooks=hooks) as http:
                patient = client(gateway, max_retries=3, http_client=http)
                third = asyncio.create_task(asyncio.to_thread(patient.chat.completions.create, model="sim", messages=QUESTION))
                while not asked_to_wait:
                    await asyncio.sleep(0.01)
                backend.exchange(0).released.set()
                backend.answer = answer_normally
                (await asyncio.to_thread(backend.exchange, 1)).released.set()
                await asyncio.gather(first, second, third)

    asyncio.run(fill())
    status, seconds = asked_to_wait[0]
    assert status == 429
    assert int(seconds) >= 1
    assert sent[1] - sent[0] >= int(seconds) * 0.9
    assert asked_to_wait[-1][0] == 200
