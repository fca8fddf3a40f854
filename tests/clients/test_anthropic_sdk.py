"""The unmodified Anthropic SDK for Python on /v1/messages."""

import anthropic
import pytest
from processes import pool

QUESTION = [{"role": "user", "content": "say something new about the house"}]


def client(gateway, **options):
    return anthropic.Anthropic(base_url=gateway.url, api_key="sk-ant-anything", **{"max_retries": 0, "timeout": 30, **options})


@pytest.fixture
def sdk(gateway):
    with client(gateway) as sdk:
        yield sdk


def test_an_answer(sdk, model):
    answer = sdk.messages.create(model=model, max_tokens=12, messages=QUESTION)
    assert answer.model == model
    assert answer.content[0].text.strip()
    assert answer.usage.output_tokens > 0


def test_a_stream(sdk, model):
    with sdk.messages.stream(model=model, max_tokens=12, messages=QUESTION, system="be brief") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text.strip()
    assert final.content[0].text == text
    assert final.model == model
    assert final.usage.output_tokens > 0


def test_an_alias(sdk):
    with sdk.messages.stream(model="gpt-4o", max_tokens=5, messages=QUESTION) as stream:
        assert stream.get_final_message().model == "gpt-4o"


def test_tools_and_images(sdk):
    weather = {"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
    answer = sdk.messages.create(model="sim", max_tokens=100, messages=QUESTION, tools=[weather], tool_choice={"type": "any"})
    used = next(block for block in answer.content if block.type == "tool_use")
    assert used.name == "weather"
    assert "city" in used.input

    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
    turns = [
        {"role": "user", "content": [image, {"type": "text", "text": "what is this?"}]},
        {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
        {"role": "user", "content": [result]},
    ]
    assert sdk.messages.create(model="sim", max_tokens=10, messages=turns, tools=[weather]).content


def test_errors_have_the_shape_of_this_api(sdk):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        sdk.messages.create(model="gpt-4oo", max_tokens=5, messages=QUESTION)
    assert unknown.value.body["type"] == "error"
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert "gpt-4o" in unknown.value.body["error"]["message"]

    with pytest.raises(anthropic.NotFoundError) as uncounted:
        sdk.messages.count_tokens(model="gpt-4oo", messages=QUESTION)
    assert uncounted.value.body["error"]["type"] == "not_found_error"

    with pytest.raises(anthropic.BadRequestError) as bad:
        sdk.messages.create(model="sim", max_tokens=5, messages="hello")
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    assert "messages" in bad.value.body["error"]["message"]


def test_without_a_healthy_backend_it_is_overloaded_and_says_when_to_return(launch):
    backend = launch.backend()
    gateway = launch.gateway(pool("sim", backend)).healthy(1)
    backend.stop()
    gateway.healthy(0)
    with pytest.raises(anthropic.APIStatusError) as raised:
        client(gateway).messages.create(model="sim", max_tokens=5, messages=QUESTION)
    assert raised.value.status_code == 503
    assert raised.value.body["type"] == "error"
    assert int(raised.value.response.headers["retry-after"]) >= 1


def test_a_backend_that_dies_in_the_stream_ends_it_with_an_error(launch):
    def answer(exchange):
        exchange.start_stream()
        start = (
            'event: message_start\ndata: {"type":"message_start","message":{"id":"m","type":"message","role":"assistant","content":[],'
            '"model":"sim","stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":1,"output_tokens":0}}}\n\n'
        )
        exchange.chunk(start)
        exchange.reset()

    gateway = launch.gateway(pool("sim", launch.backend(answer)))
    seen = []
    with pytest.raises(anthropic.APIStatusError) as raised, client(gateway).messages.create(
        model="sim", max_tokens=5, messages=QUESTION, stream=True
    ) as stream:
        for event in stream:
            seen.append(event.type)
    assert seen == ["message_start"]
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["type"] == "api_error"
