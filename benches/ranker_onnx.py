"""ONNX Runtime beside the ranker in `cargo bench --bench ranker`: the same weights, fp32, one thread.

Writes the graph that ONNX Runtime's own transformer optimizer makes of a BERT (embeddings with layer norm, attention, bias with GELU, and residual with
layer norm are one node each) and, like the ranker, computes of the last layer only the row of [CLS] after attention. Then answers lines of standard input,
`{"prompts": [[ids, ...], ...], "repeat": 3}` with all prompts of one length, by `{"seconds": ..., "scores": [...]}`: CPU seconds of this process for one
run, the mean of the repeats.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def tensors(path):
    """The tensors of a safetensors file in f32."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    kinds = {"F16": np.float16, "F32": np.float32}

    def read(entry):
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        return np.frombuffer(data[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"]).astype(np.float32)

    return {name: read(entry) for name, entry in header.items()}


def graph(directory):
    config = json.loads((directory / "config.json").read_text())
    weights = tensors(directory / "model.safetensors")
    nodes, constants = [], []

    def constant(name, value):
        constants.append(numpy_helper.from_array(np.asarray(value, order="C"), name))
        return name

    def node(kind, inputs, outputs, domain="com.microsoft", **attributes):
        nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def weight(name):
        return constant(name, weights[name])

    def turned(name):
        return constant(name, weights[name].T)

    epsilon = config["layer_norm_eps"]
    embeddings = "bert.embeddings"
    tables = [weight(f"{embeddings}.{table}_embeddings.weight") for table in ["word", "position", "token_type"]]
    norm = [weight(f"{embeddings}.LayerNorm.{part}") for part in ["weight", "bias"]]
    x = node("EmbedLayerNormalization", ["ids", "segments", *tables, *norm], ["embedded", ""], epsilon=epsilon)
    first = constant("first", np.array(0, np.int64))
    for index in range(config["num_hidden_layers"]):
        layer = f"bert.encoder.layer.{index}"
        parts = [f"{layer}.attention.self.{part}" for part in ["query", "key", "value"]]
        packed = constant(f"{layer}.qkv.weight", np.concatenate([weights[f"{part}.weight"].T for part in parts], axis=1))
        bias = constant(f"{layer}.qkv.bias", np.concatenate([weights[f"{part}.bias"] for part in parts]))
        seen = node("Attention", [x, packed, bias], [f"{layer}.seen"], num_heads=config["num_attention_heads"])
        if index + 1 == config["num_hidden_layers"]:
            seen = node("Gather", [seen, first], [f"{layer}.seen.first"], domain="", axis=1)
            x = node("Gather", [x, first], [f"{layer}.x.first"], domain="", axis=1)

        def output(name, value, residual):
            y = node("MatMul", [value, turned(f"{name}.dense.weight")], [f"{name}.product"], domain="")
            norm = [weight(f"{name}.LayerNorm.{part}") for part in ["weight", "bias"]]
            return node("SkipLayerNormalization", [y, residual, *norm, weight(f"{name}.dense.bias")], [f"{name}.out"], epsilon=epsilon)

        mixed = output(f"{layer}.attention.output", seen, x)
        wide = node("MatMul", [mixed, turned(f"{layer}.intermediate.dense.weight")], [f"{layer}.wide"], domain="")
        active = node("BiasGelu", [wide, weight(f"{layer}.intermediate.dense.bias")], [f"{layer}.active"])
        x = output(f"{layer}.output", active, mixed)
    node("Gemm", [x, weight("head.weight"), weight("head.bias")], ["scores"], domain="", transB=1)
    ids, segments = (helper.make_tensor_value_info(name, TensorProto.INT32, ["batch", "length"]) for name in ["ids", "segments"])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 1])
    body = helper.make_graph(nodes, "ranker", [ids, segments], [scores], constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(body, opset_imports=opsets, ir_version=9)


def main():
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    model = graph(Path(sys.argv[1])).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    print(json.dumps({"version": onnxruntime.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = np.array(request["prompts"], np.int32)
        inputs = {"ids": ids, "segments": np.zeros_like(ids)}
        begin = time.process_time()
        for _ in range(request["repeat"]):
            (scores,) = session.run(["scores"], inputs)
        seconds = (time.process_time() - begin) / request["repeat"]
        print(json.dumps({"seconds": seconds, "scores": scores[:, 0].tolist()}), flush=True)


if __name__ == "__main__":
    main()
