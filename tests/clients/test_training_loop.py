"""The loop an operator runs: serve, note the lengths of answers, train on them, measure, try beside the old one, and let the new ranker serve. The walk of docs/ranker.md."""

import json
import shutil
import subprocess

import httpx
from processes import BINARY, PATIENCE, ROOT, metric, pool
from scripted import completion
from wire import chat, post

TOPICS = "lighthouses tides glass bread rivers clocks bees paper salt kites bridges wool maps ice lamps copper seeds dust harbours ropes".split()
ASKED = 6  # times per topic and kind, each time in other words


def prompts():
    """Prompts whose answers here are as nobody would guess: the essay is short, the plain question long."""
    for topic in TOPICS:
        for number in range(ASKED):
            yield f"Write a long and detailed essay about {topic}, part {number}.", 5 + number % 3
            yield f"Are {topic} useful? Answer yes or no. Question {number}.", 700 + 10 * number


def run(*arguments):
    return subprocess.run([BINARY, *map(str, arguments)], check=True, capture_output=True, text=True, timeout=600).stdout


def score(gateway, prompt):
    return float(post(gateway, chat(prompt)).headers["x-headway-score"])


def shown(gateway):
    return httpx.get(gateway.admin + "/admin/ranker", timeout=PATIENCE).json()


def test_from_answers_to_a_ranker_that_serves(launch):
    lengths = dict(prompts())

    def answer(exchange):
        asked = exchange.json["messages"][-1]["content"]
        exchange.reply(body=completion(tokens=lengths.get(asked, 1)))

    serving, rows = launch.folder / "ranker", launch.folder / "rows.jsonl"
    shutil.copytree(ROOT / "models/pars", serving)
    ranker = {"weights": str(serving), "deadline": "60s"}
    gateway = launch.gateway(pool("sim", launch.backend(answer)), ranker=ranker, training_log={"file": str(rows)}).healthy(1)
    first = shown(gateway)["version"]
    essay, question = "Write a long and detailed essay about windmills.", "Are windmills useful? Answer yes or no."
    assert score(gateway, essay) > score(gateway, question), "the shipped ranker knows nothing of these answers"

    def ask_all():
        with httpx.Client(timeout=60) as client:
            for prompt in lengths:
                client.post(gateway.url + "/v1/chat/completions", json=chat(prompt)).raise_for_status()

    ask_all()
    gateway.until(lambda: metric(gateway.admin, 'headway_training_rows_total{result="written"}') == len(lengths) + 2, "every answer is noted")
    noted = [json.loads(row) for row in rows.read_text().splitlines()]
    assert {row["prompt"]: row["lens"] for row in noted if row["prompt"] in lengths} == {text: {"sim": tokens} for text, tokens in lengths.items()}
    assert rows.stat().st_mode & 0o777 == 0o600, "prompts are nobody else's"

    mine = launch.folder / "mine"
    learning = ["--layers", 1, "--pieces", 16, "--epochs", 2, "--batch", 32, "--rate", "1e-3"]
    run("train", "--data", rows, "--base", serving, "--out", mine, *learning)
    lines = json.loads(run("evaluate", "--data", rows, "--model", mine, "--json"))
    of_sim = next(line for line in lines if line["model"] == "sim")
    assert of_sim["tau"] > 0.4, of_sim

    # Beside the one that serves, it shows on live traffic that it is better.
    gateway.write(ranker={**ranker, "shadow": str(mine)})
    assert gateway.reload().status_code == 200
    ask_all()
    gateway.until(lambda: [of["answers"] for of in shown(gateway)["shadow"]["models"]] == [len(lengths)], "all are compared")
    [compared] = shown(gateway)["shadow"]["models"]
    assert compared["tau_serving"] < 0 < 0.4 < compared["tau_shadow"], compared
    assert metric(gateway.admin, "headway_ranker_shadow_tau") in (compared["tau_serving"], compared["tau_shadow"])
    assert score(gateway, essay) > score(gateway, question), "a shadow is not obeyed"

    # The card last: its change is what the gateway looks for.
    for name in ("config.json", "tokenizer.json", "model.safetensors", "card.json"):
        shutil.copyfile(mine / name, serving / name)
    gateway.until(lambda: shown(gateway)["version"] != first, "the new ranker serves")
    assert score(gateway, question) > score(gateway, essay), "it has learnt what answers are like here"


def test_only_answers_that_ended_by_themselves_are_noted(launch):
    def answer(exchange):
        asked = exchange.json["messages"][-1]["content"]
        if asked == "cut":
            body = completion(tokens=3)
            body["choices"][0]["finish_reason"] = "length"
            exchange.reply(body=body)
        elif asked == "refused":
            exchange.reply(status=400, body={"error": {"message": "no"}})
        elif asked == "streamed":
            exchange.start_stream()
            for word in ("a", "b", "c"):
                exchange.word(word)
            exchange.chunk('data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n')
            exchange.end_stream()
        elif asked == "broken":
            exchange.start_stream()
            exchange.word("a")
            exchange.reset()
        else:
            exchange.reply(body=completion(tokens=4))

    rows = launch.folder / "rows.jsonl"
    gateway = launch.gateway(pool({"name": "mine", "upstream": "sim"}, launch.backend(answer)), training_log={"file": str(rows)}).healthy(1)
    bodies = [chat(asked, model="mine") for asked in ("cut", "refused", "short")]
    bodies += [chat(asked, model="mine", stream=True) for asked in ("streamed", "broken")]
    bodies += [chat("several", model="mine", n=2)]
    for body in bodies:
        post(gateway, body)
    gateway.until(lambda: metric(gateway.admin, 'headway_training_rows_total{result="written"}') == 2, "the two are noted")

    # Without the section nothing more is noted, and the file stays.
    del gateway.settings["training_log"]
    gateway.write()
    assert gateway.reload().status_code == 200
    post(gateway, chat("unnoted", model="mine"))
    noted = [json.loads(row) for row in rows.read_text().splitlines()]
    assert noted == [
        {"lens": {"sim": 4}, "prompt": "short", "source": "chat"},
        {"lens": {"sim": 3}, "prompt": "streamed", "source": "chat"},
    ]


def test_a_log_that_cannot_be_kept_is_refused_with_its_place(launch):
    gateway = launch.gateway(pool("sim", launch.backend()))
    gateway.write(training_log={"file": "not/there/rows.jsonl"})
    answer = gateway.reload()
    assert answer.status_code == 422
    [problem] = answer.json()["error"]["problems"]
    assert problem["field"] == "training_log.file"
    assert "not/there is not there" in problem["message"]
    gateway.write(training_log={"file": gateway.file.name})
    assert "belongs to the configuration" in gateway.reload().text
    assert post(gateway, chat()).status_code == 200
