"""Scores become tokens: what is predicted for a prompt comes to be what answers to such prompts are, for each model by itself."""

import itertools
import random
import re

import httpx
from processes import ROOT, pool
from scripted import completion
from wire import chat

# Four prompts that the shipped ranker tells apart, and the mean length of their answers by the smaller model.
PROMPTS = {
    "What is the capital of Portugal? One word only.": 20,
    "Translate to German: The ferry leaves at nine.": 60,
    "Explain step by step how a four-stroke engine works, with an analogy for each stroke.": 300,
    "Write a detailed essay of at least two thousand words about the history of lighthouses.": 900,
}
SCALES = {"small": 1.0, "large": 4.0}
COMPLETIONS = 500  # of each model


def test_predictions_converge_to_what_each_model_answers(launch):
    lengths, looks = random.Random(7), itertools.count()

    def answer(exchange):
        asked = exchange.json["messages"][-1]["content"]
        mean = PROMPTS[asked] * SCALES[exchange.json["model"]]
        exchange.reply(body=completion(model=exchange.json["model"], tokens=round(mean * lengths.uniform(0.7, 1.3))))

    ranker = {"weights": str(ROOT / "models/pars"), "deadline": "60s"}
    backend = launch.backend(answer, models=tuple(SCALES))
    gateway = launch.gateway(pool(list(SCALES), backend), policy="headway", ranker=ranker).healthy(1)

    def ask(client, prompt, model, request_id):
        body = chat(prompt, model=model)
        client.post(gateway.url + "/v1/chat/completions", json=body, headers={"x-request-id": request_id}).raise_for_status()

    def predicted(request_id):
        return int(re.search(rf'id="{request_id}".*? predicted_tokens=(\d+)', gateway.output()).group(1))

    def misses():
        """By which factor each prediction is off."""
        found = {}
        with httpx.Client(timeout=60) as client:
            for prompt, mean in PROMPTS.items():
                for model, scale in SCALES.items():
                    request_id = f"look-{next(looks)}"
                    ask(client, prompt, model, request_id)
                    gateway.until(lambda: f'id="{request_id}"' in gateway.output(), "its line is written")
                    found[model, prompt] = predicted(request_id) / (mean * scale)
        return found

    before = misses()
    assert any(abs(factor - 1) > 0.15 for factor in before.values()), before
    with httpx.Client(timeout=60) as client:
        for _ in range(COMPLETIONS // len(PROMPTS)):
            for prompt in PROMPTS:
                for model in SCALES:
                    ask(client, prompt, model, "more")

    # The fit is renewed every few seconds.
    def converged():
        return all(abs(factor - 1) <= 0.15 for factor in misses().values())

    gateway.until(converged, lambda: f"predictions within 15 %: {misses()}")

    # How good they were on average, from when the models were not told apart yet.
    text = httpx.get(gateway.admin + "/metrics").text
    series = re.findall(r'headway_calibration_(error|drift_ratio)\{pool="chat",model="(\w+)"\} (\S+)', text)
    measured = {(kind, model): float(value) for kind, model, value in series}
    assert measured["drift_ratio", "small"] < 1 < measured["drift_ratio", "large"], measured
    assert all(0.1 < measured["error", model] < 1.5 for model in SCALES), measured
