"""The simplified blocks of He & Hofmann 2024 as an ordinary eager decoder, from their definitions, without any graph.

    attention:   concat_h (α_h·I + β_h·A_h − γ_h·C)·V_h · W_O,   C_ij = 1/(number of positions i sees), V_h and W_O
                 learned, or the h-th part of the input and the identity
    sequential:  y = attention(norm₁(x)) [+ x],   s·y + b·FFN(norm₂(y))
    parallel:    n = norm₁(x),                    s·attention(n) [+ s·x] + b·FFN(n)

The layers of an existing model are taken as they are (its projections, FFN, norms), so weights are shared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

Function = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x


@dataclass
class Layer:
    """One layer: `query`, `key` give `[B, H, T, d]`, all else maps `[B, T, ·]` to `[B, T, ·]`; gains are `[H]` or 1."""

    heads: int
    query: Function
    key: Function
    value: Function
    projection: Function
    ffn: Function
    norm_attention: Function
    norm_ffn: Function
    identity_gain: Any = 0.0
    attention_gain: Any = 1.0
    centre_gain: Any = 0.0
    branch: Any = 1.0
    skip: Any = 1.0


@dataclass
class Simplified:
    """A whole decoder: embedding of tokens, layers, and what follows them."""

    embed: Function
    layers: list[Layer]
    final_norm: Function
    head: Function
    attention_skip: bool = True
    parallel: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def change(self, **fields: Any) -> Simplified:
        """A copy in which every layer has these fields, and the decoder those that are its own."""
        own = {key: fields.pop(key) for key in list(fields) if key in self.__dataclass_fields__}
        return replace(self, layers=[replace(layer, **fields) for layer in self.layers], **own)

    def __call__(self, ids: Tensor, visible: Tensor | None = None) -> Tensor:
        """Logits `[B, T, V]`; `visible` is boolean `[B, T]`, False for padding."""
        length = ids.shape[1]
        sees = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        if visible is not None:
            sees = sees & visible[:, None, None, :]
        x = self.embed(ids)
        for layer in self.layers:
            x = self.block(layer, x, sees)
        return self.head(self.final_norm(x))

    def block(self, layer: Layer, x: Tensor, sees: Tensor) -> Tensor:
        n = layer.norm_attention(x)
        y = self.attention(layer, n, sees)
        if self.attention_skip:
            y = y + x
        read = n if self.parallel else layer.norm_ffn(y)
        out: Tensor = layer.skip * y + layer.branch * layer.ffn(read)
        return out

    def attention(self, layer: Layer, n: Tensor, sees: Tensor) -> Tensor:
        batch, length, _ = n.shape
        query, key = layer.query(n), layer.key(n)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(~sees, -math.inf).softmax(-1).nan_to_num()
        uniform = sees.to(n.dtype) / sees.sum(-1, keepdim=True).clamp(min=1)
        alpha, beta, gamma = (
            torch.as_tensor(gain, dtype=n.dtype).reshape(-1, 1, 1)
            for gain in (layer.identity_gain, layer.attention_gain, layer.centre_gain)
        )
        shaped = alpha * torch.eye(length, dtype=n.dtype) + beta * weights - gamma * uniform
        values = layer.value(n)
        values = values.reshape(batch, length, layer.heads, -1).transpose(1, 2)
        return layer.projection((shaped @ values).transpose(1, 2).reshape(batch, length, -1))


def with_gains(model: Simplified, trained: nn.Module) -> Simplified:
    """The gains, and the value and output matrices that start as the identity, of a transformed model."""
    state = dict(trained.named_parameters())
    layers = []
    for number, layer in enumerate(model.layers):
        fields: dict[str, Any] = {}
        for leaf in ("identity", "attention", "centre"):
            if f"shaped_attention.{number}.{leaf}" in state:
                fields[f"{leaf}_gain"] = state[f"shaped_attention.{number}.{leaf}"]
        for name, leaf in (("branch", "branch"), ("skip", "skip")):
            if f"ffn_gains.{number}.{leaf}" in state:
                fields[name] = state[f"ffn_gains.{number}.{leaf}"]
        if f"scaled_ffn.{number}.alpha" in state:
            fields["branch"] = 1 / state[f"scaled_ffn.{number}.alpha"]
            fields["skip"] = state[f"scaled_ffn.{number}.beta"]
        for leaf in ("value", "projection"):
            if f"identity_values.{number}.{leaf}" in state:
                matrix = state[f"identity_values.{number}.{leaf}"]
                fields[leaf] = lambda x, matrix=matrix: x @ matrix.T
        layers.append(replace(layer, **fields))
    return replace(model, layers=layers)


# -- existing models -------------------------------------------------------------------------------------------


def of(model: Any) -> Simplified:
    """The layers of a GPT-2, nanoGPT, GPT-NeoX or Llama in evaluation mode."""
    readers = {
        "GPT2LMHeadModel": _gpt2,
        "NanoGPT": _nanogpt,
        "GPTNeoXForCausalLM": _neox,
        "LlamaForCausalLM": _llama,
    }
    return readers[type(model).__name__](model)


def _split(heads: int) -> Function:
    return lambda x: x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _chain(*functions: Function) -> Function:
    """First to last."""

    def chained(x: Tensor) -> Tensor:
        for function in functions:
            x = function(x)
        return x

    return chained


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def _third(fused: Function, number: int) -> Function:
    return lambda x: fused(x).chunk(3, dim=-1)[number]


def _fused_layer(block: Any, heads: int) -> Layer:
    """A layer with GPT-2's names: queries, keys and values are thirds of one projection."""
    split = _split(heads)
    query, key, value = (_third(block.attn.c_attn, number) for number in range(3))
    queries, keys = _chain(query, split), _chain(key, split)
    return Layer(heads, queries, keys, value, block.attn.c_proj, block.mlp, block.ln_1, block.ln_2)


def _gpt2(model: Any) -> Simplified:
    body = model.transformer
    layers = []
    for block in body.h:
        layers.append(_fused_layer(block, block.attn.num_heads))
    return Simplified(
        lambda ids: body.wte(ids) + body.wpe(torch.arange(ids.shape[1])), layers, body.ln_f, model.lm_head
    )


def _nanogpt(model: Any) -> Simplified:
    body = model.transformer
    layers = []
    for block in body["h"]:
        layers.append(_fused_layer(block, block.attn.heads))
    return Simplified(
        lambda ids: body["wte"](ids) + body["wpe"](torch.arange(ids.shape[1])), layers, body["ln_f"], model.lm_head
    )


def _neox(model: Any) -> Simplified:
    body, config = model.gpt_neox, model.config
    heads = config.num_attention_heads
    layers = []
    for block in body.layers:
        query, key, value = (_interleaved(block.attention.query_key_value, heads, number) for number in range(3))
        turned = _rotary(body.rotary_emb.inv_freq)
        layers.append(
            Layer(
                heads,
                _chain(query, turned),
                _chain(key, turned),
                _chain(value, _joined),
                block.attention.dense,
                block.mlp,
                block.input_layernorm,
                block.post_attention_layernorm,
            )
        )
    return Simplified(body.embed_in, layers, body.final_layer_norm, model.get_output_embeddings())


def _interleaved(fused: Function, heads: int, number: int) -> Function:
    """Queries, keys or values `[B, H, T, d]` of a projection whose rows are `[head, (q, k, v), d]`."""
    return lambda x: fused(x).reshape(*x.shape[:2], heads, 3, -1)[:, :, :, number].transpose(1, 2)


def _llama(model: Any) -> Simplified:
    body, config = model.model, model.config
    heads, groups = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads
    turned = _rotary(body.rotary_emb.inv_freq)

    def repeated(x: Tensor) -> Tensor:
        return x.repeat_interleave(groups, dim=1)

    layers = []
    for block in body.layers:
        attention = block.self_attn
        layers.append(
            Layer(
                heads,
                _chain(attention.q_proj, _split(heads), turned),
                _chain(attention.k_proj, _split(heads // groups), turned, repeated),
                _chain(attention.v_proj, _split(heads // groups), repeated, _joined),
                attention.o_proj,
                block.mlp,
                _rms_norm(block.input_layernorm),
                _rms_norm(block.post_attention_layernorm),
            )
        )
    return Simplified(body.embed_tokens, layers, _rms_norm(body.norm), model.lm_head)


def _rms_norm(norm: Any) -> Function:
    """RMSNorm in the precision of its input; that of transformers is in float32."""
    return lambda x: norm.weight * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + norm.variance_epsilon)


def _rotary(frequencies: Tensor) -> Function:
    """Rotary embedding of the first channels `[B, H, T, ·]`; transformers computes the angles in float32."""

    def turned(x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2]).float()[:, None] * frequencies.float()
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        half = frequencies.shape[0]
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    return turned
