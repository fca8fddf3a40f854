"""Writes tests/ranker_reference.json: scores of models/pars computed by PyTorch and transformers.

    pip install torch transformers safetensors
    python tests/ranker_reference.py

The prompts are read from the file as it is; only the numbers are renewed.
"""

import json
import pathlib

import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

root = pathlib.Path(__file__).parent
model_dir = root.parent / "models" / "pars"
reference = root / "ranker_reference.json"

card = json.loads((model_dir / "card.json").read_text())
limit = card["truncation"]["pieces"]
tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(model_dir / "tokenizer.json"))
weights = {name: tensor.float() for name, tensor in load_file(model_dir / "model.safetensors").items()}
config = BertConfig.from_json_file(model_dir / "config.json")
encoder = BertModel(config, add_pooling_layer=False).eval()
missing, unexpected = encoder.load_state_dict(
    {name.removeprefix("bert."): tensor for name, tensor in weights.items() if name.startswith("bert.")}, strict=False
)
assert not missing and not unexpected, (missing, unexpected)


def pieces(text):
    ids = tokenizer(text, add_special_tokens=False, truncation=False, padding=False)["input_ids"]
    room = limit - 2
    if len(ids) > room:
        tail = room // 3
        ids = ids[: room - tail] + ids[len(ids) - tail :]
    return [101, *ids, 102]


rows = json.loads(reference.read_text()) if reference.exists() else []
with torch.no_grad():
    for row in rows:
        row["pieces"] = pieces(row["prompt"])
        first = encoder(torch.tensor([row["pieces"]])).last_hidden_state[:, 0]
        row["score"] = float(first @ weights["head.weight"].T + weights["head.bias"])
reference.write_text(json.dumps(rows, ensure_ascii=True, indent=0) + "\n")
