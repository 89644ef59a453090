"""Random decoders: configurations drawn from choices, and one eager module that spells any of them.

The module is written apart from the compiler and knows no graph. It also is the reference of the passes: what a pass
must compute is another configuration with the same weights (`reference`), or the learned scales set on the module.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    """One decoder. `groups` are the heads of keys and values; the other words are explained where they are used."""

    layers: int = 1
    heads: int = 2
    groups: int = 2
    head_width: int = 4
    width: int = 8
    hidden: int = 12
    vocab: int = 19
    context: int = 14
    block: str = "sequential"
    order: str = "attention-first"
    norm: str = "layer_norm"
    placement: str = "pre"
    final_norm: bool = True
    qk_norm: bool = False
    activation: str = "gelu"
    gate: str = "none"
    bias: bool = True
    linear: str = "linear"
    tied: bool = False
    dropout: float = 0.0
    positions: str = "learned"
    qkv: str = "separate"
    attention: str = "matmul"
    sharing: str = "repeat"
    mask: str = "buffer"
    scaling: str = "scores"
    output: str = "tensor"
    gains: bool = False
    value_width: int = 0
    softcap: bool = False
    window: int = 0
    norm_of_embeddings: bool = False
    inner_norm: bool = False
    shared: bool = False
    labels: bool = False
    eps: float | None = None
    padding: bool = False
    seed: int = 0

    @property
    def d_v(self) -> int:
        """Width of one head's values: that of its keys unless said otherwise."""
        return self.value_width or self.head_width

    @property
    def limit(self) -> int | None:
        """Longest sequence, or None."""
        limited = self.positions.startswith("learned") or self.positions in ("sinusoidal", "rotary-table")
        written = self.attention != "sdpa-causal"
        return self.context if limited or (written and self.mask == "buffer" and not self.window) else None

    def norms(self) -> list[tuple[int | None, int]]:
        """(layer, width) of every norm: by construction, for the census."""
        if self.norm == "none":
            return []
        found: list[tuple[int | None, int]] = [(0, self.width)] * self.norm_of_embeddings
        for layer in range(self.layers):
            blocks = 1 if self.block == "parallel-one-norm" else 2
            around = {"pre": blocks, "post": 2 if self.block == "sequential" else 1, "sandwich": blocks + 2}
            found += [(layer, self.width)] * around[self.placement]
            found += [(layer, self.head_width)] * ((self.heads + self.groups) * self.qk_norm)
            found += [(layer, self.hidden)] * self.inner_norm
        return found + [(None, self.width)] * self.final_norm


ACTIVATIONS: dict[str, tuple[str | None, Any]] = {
    # how it is written: (what it is counted as, function)
    "gelu": ("gelu", F.gelu),
    "gelu-tanh": ("gelu", functools.partial(F.gelu, approximate="tanh")),
    "gelu-written": (
        "gelu",
        lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3)))),
    ),
    "gelu-erf": ("gelu", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "quick-gelu": ("quick_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
    "relu": ("relu", F.relu),
    "relu-clamp": ("relu", lambda x: x.clamp(min=0)),
    "leaky-relu": ("leaky_relu", functools.partial(F.leaky_relu, negative_slope=0.2)),
    "silu": ("silu", F.silu),
    "silu-written": ("silu", lambda x: x * torch.sigmoid(x)),
    "relu-squared": ("relu_squared", lambda x: F.relu(x).square()),
    "relu-pow": ("relu_squared", lambda x: torch.relu(x) ** 2),
    "sigmoid": ("sigmoid", torch.sigmoid),
    "none": (None, lambda x: x),
}


class Linear(nn.Module):
    """y = x·Wᵀ + b, `weight` [out, in], in one of many spellings."""

    def __init__(self, inputs: int, outputs: int, bias: bool, spelling: str) -> None:
        super().__init__()
        self.spelling = spelling
        shape = (inputs, outputs) if spelling in ("conv1d", "transposed") else (outputs, inputs)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        if spelling == "low-rank":
            self.up, self.down = nn.Parameter(torch.empty(outputs, 2)), nn.Parameter(torch.empty(2, inputs))

    def forward(self, x: Tensor) -> Tensor:
        if self.spelling == "low-rank":  # an adapter, added to the weight
            return F.linear(x, self.weight + 0.7 * (self.up @ self.down), self.bias)
        if self.spelling == "linear":
            return F.linear(x, self.weight, self.bias)
        if self.spelling == "convolution":
            return F.conv1d(x.transpose(1, 2), self.weight.unsqueeze(-1), self.bias).transpose(1, 2)
        if self.spelling == "conv1d" and self.bias is not None:  # Hugging Face's GPT-2
            flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
            return flat.view(*x.shape[:-1], self.weight.shape[1])
        if self.spelling in ("conv1d", "transposed"):
            y = x @ self.weight
        elif self.spelling == "einsum":
            y = torch.einsum("btd,ed->bte", x, self.weight)
        else:
            y = torch.matmul(x, self.weight.T)
        return y if self.bias is None else y + self.bias


class Norm(nn.Module):
    """A norm over the last dimension, as torch's op or as arithmetic."""

    def __init__(self, spelling: str, width: int, bias: bool, eps: float | None = None) -> None:
        super().__init__()
        self.spelling, self.width = spelling, width
        self.eps = (1e-5 if spelling.startswith("layer") else 1e-6) if eps is None else eps
        if spelling not in ("none", "layer_norm_plain"):
            self.weight = nn.Parameter(torch.zeros(width) if spelling == "rms_offset" else torch.ones(width))
        has_bias = bias and spelling in ("layer_norm", "layer_norm_written")
        self.bias = nn.Parameter(torch.zeros(width)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.spelling == "none":
            return x
        if self.spelling == "layer_norm":
            return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)
        if self.spelling == "layer_norm_plain":
            return F.layer_norm(x, (self.width,), eps=self.eps)
        if self.spelling == "rms_norm":
            return F.rms_norm(x, (self.width,), self.weight, self.eps)
        if self.spelling == "layer_norm_written":
            centered = x - x.mean(-1, keepdim=True)
            y = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
            return y if self.bias is None else y + self.bias
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.spelling == "rms_offset":  # Gemma
            return scaled * (1.0 + self.weight)
        return self.weight * scaled


class Attention(nn.Module):
    """Causal self-attention. Set `temperature` [H, T_max] or `seen` (a list that takes probabilities) from outside."""

    visible: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = c = config
        self.temperature: Tensor | None = None
        self.seen: list[Tensor] | None = None
        make = functools.partial(Linear, bias=c.bias, spelling=c.linear)
        own, keys, values = c.heads * c.head_width, c.groups * c.head_width, c.groups * c.d_v
        if c.qkv == "separate":
            self.q, self.k, self.v = make(c.width, own), make(c.width, keys), make(c.width, values)
        elif c.qkv == "keys-values":
            self.q, self.kv = make(c.width, own), make(c.width, keys + values)
        else:
            self.qkv = make(c.width, own + keys + values)
        self.out = make(c.heads * c.d_v, c.width)
        norm = c.norm if c.qk_norm else "none"
        self.q_norm, self.k_norm = Norm(norm, c.head_width, c.bias, c.eps), Norm(norm, c.head_width, c.bias, c.eps)
        self.drop = nn.Dropout(c.dropout)
        if c.mask == "buffer" and not c.window:
            self.register_buffer("visible", torch.tril(torch.ones(c.context, c.context)), persistent=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, H, d], k [B, T, G, d], v [B, T, G, d_v]."""
        c = self.config
        batch, length, _ = x.shape
        own, keys, values, d = c.heads * c.head_width, c.groups * c.head_width, c.groups * c.d_v, c.head_width
        if c.qkv == "separate":
            q, k, v = self.q(x), self.k(x), self.v(x)
        elif c.qkv == "keys-values":
            q, (k, v) = self.q(x), self.kv(x).split([keys, values], dim=-1)
        elif c.qkv == "thirds":
            q, k, v = self.qkv(x).split([own, keys, values], dim=-1)
        elif c.qkv == "slices":
            fused = self.qkv(x)
            q, k, v = fused[..., :own], fused[..., own : own + keys], fused[..., own + keys :]
        elif c.qkv == "unbound":  # [B, T, 3, H, d]
            q, k, v = self.qkv(x).reshape(batch, length, 3, c.heads, d).unbind(2)
        else:  # by group: its queries, its key, its value
            parts = self.qkv(x).view(batch, length, c.groups, c.heads // c.groups + 2, d)
            q, k, v = parts[..., :-2, :], parts[..., -2, :], parts[..., -1, :]
        q = q.reshape(batch, length, c.heads, d)
        k, v = k.reshape(batch, length, c.groups, d), v.reshape(batch, length, c.groups, c.d_v)
        return q, k, v

    def hidden(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        """Which keys a query must not see, True = hidden: [T, T], or [B, T, T] with a mask of what is no padding.

        Padding sees itself, so that every query sees something.
        """
        if keep is not None:
            others = ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
            return self.hidden(x) | ((keep == 0)[:, None, :] & others)
        length = x.shape[1]
        if self.config.window:
            i = torch.arange(length, device=x.device)
            return (i[None, :] > i[:, None]) | (i[None, :] <= i[:, None] - self.config.window)
        if self.config.mask == "buffer":
            return self.visible[:length, :length] == 0
        if self.config.mask == "compared":
            i = torch.arange(length, device=x.device)
            return i[None, :] > i[:, None]
        return torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)

    def fitting(self, hidden: Tensor, scores: Tensor) -> Tensor:
        """`hidden` in a shape that goes with that of scores."""
        if hidden.dim() == 2:
            return hidden
        if self.config.attention == "folded":
            return hidden.repeat_interleave(self.config.heads, 0)
        return hidden[(slice(None), *(None,) * (scores.dim() - 3))]

    def bias(self, x: Tensor) -> Tensor | None:
        """ALiBi, [H, T, T]."""
        if self.config.positions != "alibi":
            return None
        i = torch.arange(x.shape[1], device=x.device)
        slopes = torch.tensor([2.0 ** -(h + 1) for h in range(self.config.heads)], dtype=x.dtype, device=x.device)
        return -slopes[:, None, None] * (i[:, None] - i[None, :]).abs()

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        c = self.config
        q, k, v = self.project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if c.positions.startswith("rotary"):
            q, k = rotate(q, c), rotate(k, c)
        if self.temperature is not None or self.seen is not None:
            mixed = self.plain(x, q, k, v, keep)
        elif c.attention.startswith("sdpa"):
            mixed = self.fused(x, q, k, v, keep)
        elif c.attention == "list":
            mixed = self.one_by_one(x, q, k, v, keep)
        else:
            mixed = self.written(x, q, k, v, keep)
        out: Tensor = self.out(mixed.reshape(*x.shape[:2], c.heads * c.d_v))
        return out

    def scale(self) -> float:
        return 0.3 if self.config.scaling == "own" else self.config.head_width**-0.5

    def capped(self, scores: Tensor) -> Tensor:
        """Gemma 2's soft cap."""
        return 5.0 * torch.tanh(scores / 5.0) if self.config.softcap else scores

    def plain(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """The reference: [B, T, H, d]."""
        repeats = self.config.heads // self.config.groups
        k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * self.scale()
        if self.temperature is not None:
            scores = scores / self.temperature[:, : x.shape[1], None]
        scores = self.capped(scores)
        bias = self.bias(x)
        scores = scores if bias is None else scores + bias
        hidden = self.hidden(x, keep)
        hidden = hidden if keep is None else hidden[:, None]
        a = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)
        if self.seen is not None:
            self.seen.append(a)
        return torch.einsum("bhij,bjhd->bihd", a, v)

    def repeated(self, y: Tensor) -> Tensor:
        """Keys or values for every head: [B, T, G, d] → [B, H, T, d]."""
        c = self.config
        y = y.transpose(1, 2)
        repeats = c.heads // c.groups
        if repeats == 1:
            return y
        if c.sharing == "expand":
            batch, groups, length, d = y.shape
            return y[:, :, None].expand(batch, groups, repeats, length, d).reshape(batch, c.heads, length, d)
        return y.repeat_interleave(repeats, dim=1)

    def fused(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        c = self.config
        options: dict[str, Any] = {"dropout_p": c.dropout if self.training else 0.0}
        if c.scaling == "own":
            options["scale"] = self.scale()
        if c.attention == "sdpa-causal":
            options["is_causal"] = True
        else:
            bias, hidden = self.bias(x), self.hidden(x, keep)
            hidden = hidden if keep is None else hidden[:, None]
            if bias is not None or c.attention == "sdpa-float":
                start = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device) if bias is None else bias
                options["attn_mask"] = start.masked_fill(hidden, float("-inf"))
            else:
                options["attn_mask"] = ~hidden
        if c.sharing == "native" and c.groups < c.heads:
            options["enable_gqa"] = True
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        else:
            k, v = self.repeated(k), self.repeated(v)
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, **options).transpose(1, 2)

    def one_by_one(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """Heads in a Python list."""
        c = self.config
        mixed = []
        bias = self.bias(x)
        for head in range(c.heads):
            group = head // (c.heads // c.groups)
            scores = q[:, :, head] @ k[:, :, group].transpose(-2, -1) * self.scale()
            scores = self.capped(scores)
            scores = scores if bias is None else scores + bias[head]
            a = self.drop(F.softmax(scores.masked_fill(self.hidden(x, keep), float("-inf")), dim=-1))
            mixed.append(a @ v[:, :, group])
        return torch.cat(mixed, dim=-1)

    def written(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """[B, T, H, d] from [B, T, H, d], by products that are written out."""
        c = self.config
        batch, length, _ = x.shape
        if c.scaling == "queries":
            q = q * self.scale()
        grouped = c.sharing == "grouped" and c.groups < c.heads and c.attention == "matmul" and c.positions != "alibi"
        if grouped:  # [B, G, H/G, T, d] · [B, G, 1, d, T]
            q = q.transpose(1, 2).reshape(batch, c.groups, c.heads // c.groups, length, c.head_width)
            k, v = k.transpose(1, 2).unsqueeze(2), v.transpose(1, 2).unsqueeze(2)
            scores = q @ k.transpose(-2, -1)
        elif c.attention == "einsum":
            q, k, v = q.transpose(1, 2), self.repeated(k), self.repeated(v)
            scores = torch.einsum("bhid,bhjd->bhij", q, k)
        elif c.attention == "folded":  # heads in the batch
            q, k, v = (
                y.reshape(batch * c.heads, length, -1) for y in (q.transpose(1, 2), self.repeated(k), self.repeated(v))
            )
            scores = torch.bmm(q, k.transpose(1, 2))
        else:
            q, k, v = q.transpose(1, 2), self.repeated(k), self.repeated(v)
            scores = torch.matmul(q, k.transpose(-1, -2))
        if c.scaling == "divided":
            scores = scores / math.sqrt(c.head_width)
        elif c.scaling != "queries":
            scores = scores * self.scale()
        scores, hidden = self.capped(scores), self.fitting(self.hidden(x, keep), scores)
        bias = self.bias(x)
        if bias is not None:
            bias = bias.repeat(batch, 1, 1) if c.attention == "folded" else bias
            scores = scores + bias
        if c.mask == "added":
            scores = scores + torch.zeros_like(scores).masked_fill(hidden, torch.finfo(scores.dtype).min)
        elif c.mask == "chosen":
            scores = torch.where(hidden, torch.full((), -1e9, dtype=scores.dtype, device=x.device), scores)
        else:
            scores = scores.masked_fill(hidden, float("-inf"))
        a = self.drop(F.softmax(scores, dim=-1))
        mixed = torch.einsum("bhij,bhjd->bhid", a, v) if c.attention == "einsum" else a @ v
        return mixed.reshape(batch, c.heads, length, c.d_v).transpose(1, 2)


def rotate(y: Tensor, c: Config) -> Tensor:
    """Rotary positions on [B, T, heads, d]: pairs are halves, or neighbours; the first half of d or all of it."""
    length = y.shape[1]
    width = 2 * (c.head_width // 4) if c.positions == "rotary-partial" else c.head_width
    frequencies = 100.0 ** (-torch.arange(0, width, 2, device=y.device, dtype=y.dtype) / width)
    angles = torch.arange(length, device=y.device, dtype=y.dtype)[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    y, rest = y[..., :width], y[..., width:]
    if c.positions == "rotary-pairs":
        even, odd = y[..., ::2], y[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    one, two = y.chunk(2, dim=-1)
    turned = torch.cat((one * cos - two * sin, two * cos + one * sin), -1)
    return torch.cat((turned, rest), -1) if c.positions == "rotary-partial" else turned


class FeedForward(nn.Module):
    """Plain or gated, the gate from a layer of its own or the first half of one."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = c = config
        make = functools.partial(Linear, bias=c.bias, spelling=c.linear)
        self.up, self.down = make(c.width, c.hidden * (2 if c.gate in ("fused", "glu") else 1)), make(c.hidden, c.width)
        if c.gate == "separate":
            self.gate = make(c.width, c.hidden)
        self.inner = Norm(c.norm if c.inner_norm else "none", c.hidden, c.bias, c.eps)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[self.config.activation][1]
        if self.config.gate == "none":
            y = activation(self.up(x))
        elif self.config.gate == "separate":
            y = activation(self.gate(x)) * self.up(x)
        elif self.config.gate == "glu":
            y = F.glu(self.up(x), dim=-1)
        else:
            gate, y = self.up(x).chunk(2, dim=-1)
            y = activation(gate) * y
        out: Tensor = self.drop(self.down(self.inner(y)))
        return out


class Block(nn.Module):
    """One layer. `alpha` and `beta` are ScaledFFN's, for reference."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = c = config
        self.alpha: Tensor | float = 1.0
        self.beta: Tensor | float = 1.0
        self.attention, self.feed_forward = Attention(c), FeedForward(c)
        first = {"pre": c.norm, "sandwich": c.norm, "post": "none"}[c.placement]
        behind = c.norm if c.placement == "sandwich" else "none"
        after = c.norm if c.placement == "post" else "none"
        once = c.block == "parallel-one-norm"
        parallel = c.block != "sequential"
        self.norm_a, self.norm_f = (Norm(n, c.width, c.bias, c.eps) for n in (first, "none" if once else first))
        self.behind_a, self.behind_f = (Norm(behind, c.width, c.bias, c.eps) for _ in range(2))
        self.after_a, self.after_f = (Norm(n, c.width, c.bias, c.eps) for n in ("none" if parallel else after, after))
        self.drop = nn.Dropout(c.dropout)
        if c.gains:  # LayerScale
            self.gain_a, self.gain_f = nn.Parameter(torch.ones(c.width)), nn.Parameter(torch.ones(c.width))

    def attend(self, y: Tensor, keep: Tensor | None = None) -> Tensor:
        y = self.behind_a(self.drop(self.attention(y, keep)))
        return y * self.gain_a if self.config.gains else y

    def feed(self, y: Tensor) -> Tensor:
        y = self.behind_f(self.feed_forward(y))
        return self.gain_f * y if self.config.gains else y

    def forward(self, x: Tensor, keep: Tensor | None = None) -> Tensor:
        c = self.config
        if c.block != "sequential":
            y = self.norm_a(x)
            a, f = self.attend(y, keep), self.feed(y if c.block == "parallel-one-norm" else self.norm_f(x))
            out: Tensor = self.after_f(self.joined(x, a, f))
            return out
        if c.order == "feed-forward-first":
            x = self.after_f(self.mixed(x, self.feed(self.norm_f(x))))
            x = self.after_a(x + self.attend(self.norm_a(x), keep))
        else:
            x = self.after_a(x + self.attend(self.norm_a(x), keep))
            x = self.after_f(self.mixed(x, self.feed(self.norm_f(x))))
        return x

    def scaled(self) -> bool:
        return isinstance(self.alpha, Tensor) or isinstance(self.beta, Tensor)

    def mixed(self, x: Tensor, f: Tensor) -> Tensor:
        return self.beta * x + f / self.alpha if self.scaled() else x + f

    def joined(self, x: Tensor, a: Tensor, f: Tensor) -> Tensor:
        if self.scaled():
            return self.beta * (x + a) + f / self.alpha
        if self.config.order == "branches-first":  # Falcon, GPT-J
            return (a + f) + x
        if self.config.order == "feed-forward-first":
            return (x + f) + a
        return x + a + f


class Decoder(nn.Module):
    """Token ids [B, T] → logits [B, T, V], alone, in a tuple or in a dict."""

    table: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.made_from = c = config
        self.embed = nn.Embedding(c.vocab, c.width)
        if c.positions == "learned":
            self.position = nn.Embedding(c.context, c.width)
        elif c.positions == "learned-sliced":
            self.position_table = nn.Parameter(torch.zeros(c.context, c.width))
        elif c.positions == "sinusoidal":
            angle = torch.arange(c.context)[:, None] / 10 ** (torch.arange(c.width) / c.width)
            self.register_buffer("table", torch.where(torch.arange(c.width) % 2 == 0, angle.sin(), angle.cos()))
        self.first = Norm(c.norm if c.norm_of_embeddings else "none", c.width, c.bias, c.eps)
        self.drop = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList([Block(c)] * c.layers if c.shared else [Block(c) for _ in range(c.layers)])
        self.final = Norm(c.norm if c.final_norm else "none", c.width, c.bias, c.eps)
        self.head = nn.Linear(c.width, c.vocab, bias=c.bias and not c.tied)
        if c.tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        return self.run(ids)

    def run(self, ids: Tensor, keep: Tensor | None = None) -> Any:
        c = self.made_from
        x = self.embed(ids)
        if c.positions == "learned":
            x = x + self.position(torch.arange(ids.shape[1], device=ids.device))
        elif c.positions == "learned-sliced":
            x = x + self.position_table[: ids.shape[1]]
        elif c.positions == "sinusoidal":
            x = x + self.table[: ids.shape[1]]
        x = self.drop(self.first(x))
        for block in self.blocks:
            x = block(x, keep)
        logits = self.head(self.final(x))
        if c.output == "tuple":
            return logits, x
        if c.output == "dict":
            return {"hidden": x, "logits": logits}
        return logits


class DecoderWithLoss(Decoder):
    """Also takes targets, and adds the loss to what it returns then."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        result = self.run(ids)
        if targets is None:
            return result
        loss = F.cross_entropy(logits_of(result).flatten(0, 1), targets.flatten())
        if isinstance(result, dict):
            return result | {"loss": loss}
        return (*result, loss) if isinstance(result, tuple) else (result, loss)


class DecoderWithPadding(Decoder):
    """Also takes a mask of what is no padding, [B, T]."""

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.run(ids, attention_mask)


def build(config: Config) -> Decoder:
    """The decoder of a configuration, in float64 and evaluation mode, with every parameter drawn."""
    kind = DecoderWithPadding if config.padding else DecoderWithLoss if config.labels else Decoder
    model = kind(config).double()
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() >= 2:
                parameter.copy_(noise / math.sqrt(max(parameter.shape)))
            else:
                parameter.add_(0.2 * noise)
    return model.eval()


def reference(model: Decoder, **changes: Any) -> Decoder:
    """The same weights in another configuration; parameters that it does not have are left out."""
    twin = Decoder(dataclasses.replace(model.made_from, **changes)).double()
    missing = twin.load_state_dict(model.state_dict(), strict=False).missing_keys
    assert not missing
    return twin.eval()


def rows_of(block: Block) -> dict[str, tuple[Linear, Tensor]]:
    """For each part of a block's weights, the layer that holds it and its rows there."""
    c, a, f = block.config, block.attention, block.feed_forward
    own, keys, values = c.heads * c.head_width, c.groups * c.head_width, c.groups * c.d_v
    q, k, v = torch.split(torch.arange(own + keys + values), [own, keys, values])
    if c.qkv == "separate":
        found = {"q": (a.q, q), "k": (a.k, torch.arange(keys)), "v": (a.v, torch.arange(values))}
    elif c.qkv == "keys-values":
        found = {"q": (a.q, q), "k": (a.kv, k - own), "v": (a.kv, v - own)}
    elif c.qkv == "by-group":
        rows = torch.arange(own + keys + values).view(c.groups, -1, c.head_width)
        q, k, v = rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()
        found = {"q": (a.qkv, q), "k": (a.qkv, k), "v": (a.qkv, v)}
    else:
        found = {"q": (a.qkv, q), "k": (a.qkv, k), "v": (a.qkv, v)}
    hidden = torch.arange(c.hidden)
    found |= {"o": (a.out, torch.arange(c.width)), "ffn_out": (f.down, torch.arange(c.width))}
    found["ffn_in"] = (f.up, hidden + c.hidden if c.gate == "fused" else hidden)
    if c.gate != "none":
        found["ffn_gate"] = (f.up if c.gate == "fused" else f.gate, hidden)
    return found


def logits_of(result: Any) -> Tensor:
    """The logits in whatever a decoder or its transform returned."""
    if isinstance(result, dict):
        result = result["logits"]
    found = result[0] if isinstance(result, tuple) else result
    assert isinstance(found, Tensor)
    return found


class Choices(Protocol):
    """Where random choices come from: hypothesis, or a seed."""

    def one(self, *choices: Any) -> Any:
        """One of `choices`."""

    def between(self, low: int, high: int) -> int:
        """A whole number, both ends included."""


def any_config(choices: Choices, max_layers: int = 3) -> Config:
    """Any decoder that makes sense, small."""
    one, between = choices.one, choices.between
    groups = between(1, 3)
    heads = groups * between(1, 3 if groups < 3 else 1)
    positions = one(
        "learned", "learned-sliced", "rotary", "rotary-pairs", "rotary-partial", "alibi", "none", "sinusoidal"
    )
    head_width = between(2, 6)
    if positions.startswith("rotary"):
        head_width = one(4, 6)
    block = one("sequential", "sequential", "parallel-one-norm", "parallel-two-norms")
    norm = one("layer_norm", "layer_norm_plain", "layer_norm_written", "rms_norm", "rms_written", "rms_offset", "none")
    attentions = ["sdpa-causal", "sdpa-bool", "sdpa-float", "matmul", "matmul", "einsum", "list", "folded"]
    if positions == "alibi":
        attentions.remove("sdpa-causal")
    attention = one(*attentions)
    value_width = one(0, 0, between(1, 7))
    layouts = ["separate", "keys-values", "thirds", "slices"] + ["by-group"] * (not value_width)
    layouts += ["unbound"] * (groups == heads and not value_width)
    masks = ["buffer", "compared", "computed"] + ["added", "chosen"] * (attention in ("matmul", "einsum", "folded"))
    scalings = ["scores", "own"] + ["queries", "divided"] * (attention in ("matmul", "einsum", "folded"))
    orders = ["attention-first", "feed-forward-first"] + ["branches-first"] * (block != "sequential")
    return Config(
        layers=between(1, max_layers),
        heads=heads,
        groups=groups,
        head_width=head_width,
        width=one(heads * head_width, between(4, 24)),
        hidden=between(3, 24),
        vocab=between(5, 30),
        context=between(4, 20),
        block=block,
        order=one(*orders),
        norm=norm,
        placement=one("pre", "pre", "post", "sandwich"),
        final_norm=one(False, True),
        qk_norm=one(False, True),
        activation=one(*ACTIVATIONS),
        gate=one("none", "none", "separate", "fused"),
        bias=one(False, True),
        linear=one("linear", "linear", "matmul", "transposed", "conv1d", "einsum", "convolution"),
        tied=one(False, True),
        dropout=one(0.0, 0.1, 0.25),
        positions=positions,
        qkv=one(*layouts),
        attention=attention,
        sharing=one("repeat", "expand", "native" if attention.startswith("sdpa") else "grouped"),
        mask=one(*masks),
        scaling=one(*scalings),
        output=one("tensor", "tuple", "dict"),
        gains=one(False, True),
        value_width=value_width,
        softcap=one(False, False, True) and not attention.startswith("sdpa"),
        window=0 if attention == "sdpa-causal" else one(0, 0, between(1, 5)),
        norm_of_embeddings=one(False, False, True),
        inner_norm=one(False, False, True),
        shared=one(False, False, False, True),
        labels=one(False, False, True),
        seed=between(0, 3),
    )
