"""ONNX decoders written node by node, in many spellings, without any exporter: one layer, no weights to speak of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCAB, WIDTH, HEADS, HIDDEN, POSITIONS = 19, 12, 3, 20, 32
EACH = WIDTH // HEADS


class Decoder:
    """A model under construction; methods add nodes and return the name of their result."""

    def __init__(self, opset: int = 20, dtype: Any = np.float32) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.opset, self.dtype = opset, dtype
        self.random = np.random.default_rng(0)
        self.inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])]

    def op(self, kind: str, *inputs: str, domain: str = "", outputs: int = 1, **attributes: Any) -> str:
        """Add a node; returns its first output."""
        names = [f"v{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, domain=domain, **attributes))
        return names[0]

    def ms(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Add a node of onnxruntime's own operators."""
        return self.op(kind, *inputs, domain="com.microsoft", outputs=outputs, **attributes)

    def tensor(self, values: Any, dtype: Any = None) -> str:
        """Add an initializer."""
        name = f"w{len(self.weights)}"
        array = np.asarray(values, self.dtype if dtype is None else dtype)
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def weight(self, *shape: int) -> str:
        return self.tensor(self.random.normal(size=shape) / 4)

    def ints(self, *values: int) -> str:
        return self.tensor(np.array(values), np.int64)

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        return self.op("Add", self.op("MatMul", x, self.weight(inputs, outputs)), self.weight(outputs))

    def embedded(self) -> str:
        """Tokens and positions, `[B, T, d]`."""
        length = self.op("Shape", "input_ids", start=1, end=2)
        scalar = self.op("Squeeze", length)
        places = self.op("Range", self.tensor(0, np.int64), scalar, self.tensor(1, np.int64))
        tokens = self.op("Gather", self.weight(VOCAB, WIDTH), "input_ids")
        return self.op("Add", tokens, self.op("Gather", self.weight(POSITIONS, WIDTH), places))

    def heads(self, x: str, heads: int = HEADS) -> str:
        opened = self.op("Reshape", x, self.ints(0, 0, heads, EACH))
        return self.op("Transpose", opened, perm=[0, 2, 1, 3])

    def joined(self, x: str) -> str:
        return self.op("Reshape", self.op("Transpose", x, perm=[0, 2, 1, 3]), self.ints(0, 0, WIDTH))

    def causal(self, causal: bool = True) -> str:
        """An additive mask `[1, 1, T, T]`."""
        length = self.op("Shape", "input_ids", start=1, end=2)
        shape = self.op("Concat", length, length, axis=0)
        fill = numpy_helper.from_array(np.array([-1e4 if causal else 0.0], self.dtype))
        full = self.op("ConstantOfShape", shape, value=fill)
        return self.op("Unsqueeze", self.op("Trilu", full, self.tensor(1, np.int64), upper=1), self.ints(0, 1))

    def attention(self, x: str, causal: bool = True) -> str:
        """Attention from separate nodes."""
        q, k, v = (self.heads(self.linear(x, WIDTH, WIDTH)) for _ in range(3))
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Div", scores, self.tensor(EACH**0.5))
        weights = self.op("Softmax", self.op("Add", scores, self.causal(causal)), axis=-1)
        return self.linear(self.joined(self.op("MatMul", weights, v)), WIDTH, WIDTH)

    def norm(self, x: str) -> str:
        return self.op("LayerNormalization", x, self.weight(WIDTH), self.weight(WIDTH))

    def model(self, logits: str, outputs: Sequence[str] = ()) -> onnx.ModelProto:
        """The finished model."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        made = [helper.make_tensor_value_info(name, kind, None) for name in (logits, *outputs)]
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, made, self.weights)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def decoder(
    attention: Any = None, norm: Any = None, activation: Any = None, *, opset: int = 20, dtype: Any = np.float32
) -> onnx.ModelProto:
    """A pre-norm decoder of one layer and a final norm; its three kinds of parts may be given as functions."""
    made = Decoder(opset, dtype)
    norm = norm or Decoder.norm
    x = made.embedded()
    x = made.op("Add", x, (attention or Decoder.attention)(made, norm(made, x)))
    hidden = made.linear(norm(made, x), WIDTH, HIDDEN)
    hidden = (activation or (lambda m, h: m.op("Gelu", h)))(made, hidden)
    x = made.op("Add", x, made.linear(hidden, HIDDEN, WIDTH))
    return made.model(made.op("MatMul", norm(made, x), made.weight(WIDTH, VOCAB)))


def saved(model: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    """Write the model."""
    path = folder / name
    onnx.save(model, path)
    return path
