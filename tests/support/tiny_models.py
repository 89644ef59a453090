"""Small decoders of every supported family, in float64, with weights large enough that each part shows.

Default initializations are no use here: with weights of 0.02 a model without LayerNorm computes almost nothing,
and with gains of exactly 1 and biases of 0 a lost gain or bias goes unnoticed. `randomize` draws everything.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aero_compile
from aero_compile import TransformedModel
from benchmarks.lib.zoo import randomize as randomize

VOCAB, WIDTH, HEADS, LAYERS, POSITIONS, HIDDEN = 61, 32, 4, 2, 48, 56
DROPOUT = 0.1

M = TypeVar("M", bound=nn.Module)


def tokens(batch: int = 2, length: int = 13, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    """Random token ids `[batch, length]`."""
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


# -- Hugging Face ----------------------------------------------------------------------------------------------


def hugging_face(kind: str, attention: str = "eager", **options: Any) -> nn.Module:
    """A tiny model of transformers; `options` override fields of its config."""
    import transformers

    shared = {
        "vocab_size": VOCAB,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attention_dropout": DROPOUT,
    }
    modern = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": HIDDEN,
        "max_position_embeddings": POSITIONS,
    }
    families: dict[str, tuple[str, str, dict[str, Any]]] = {
        "gpt2": (
            "GPT2Config",
            "GPT2LMHeadModel",
            {
                "n_embd": WIDTH,
                "n_layer": LAYERS,
                "n_head": HEADS,
                "n_positions": POSITIONS,
                "n_inner": HIDDEN,
            },
        ),
        "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", modern | {"hidden_dropout": DROPOUT}),
        "opt": (
            "OPTConfig",
            "OPTForCausalLM",
            {k: v for k, v in modern.items() if k != "intermediate_size"}
            | {"ffn_dim": HIDDEN, "word_embed_proj_dim": WIDTH, "dropout": DROPOUT, "pad_token_id": 1},
        ),
        "llama": ("LlamaConfig", "LlamaForCausalLM", modern | {"num_key_value_heads": HEADS // 2}),
    }
    config_class, model_class, own = families[kind]
    config = getattr(transformers, config_class)(**(shared | own | options), attn_implementation=attention)
    model: nn.Module = getattr(transformers, model_class)(config)
    return randomize(model)


# -- nanoGPT ---------------------------------------------------------------------------------------------------


class NanoNorm(nn.Module):
    """LayerNorm with an optional bias."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class NanoAttention(nn.Module):
    """Fused qkv; `flash` uses torch's attention, otherwise a masked softmax is written out."""

    def __init__(self, width: int, heads: int, positions: int, flash: bool, bias: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.attn_dropout, self.resid_dropout = nn.Dropout(DROPOUT), nn.Dropout(DROPOUT)
        self.heads, self.flash = heads, flash
        if not flash:
            mask = torch.tril(torch.ones(positions, positions)).view(1, 1, positions, positions)
            self.register_buffer("bias", mask)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        if self.flash:
            p = self.attn_dropout.p if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        else:
            mask = self.bias
            assert isinstance(mask, Tensor)
            scores = self.scale_scores((q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1))))
            scores = scores.masked_fill(mask[:, :, :length, :length] == 0, float("-inf"))
            y = self.attn_dropout(F.softmax(scores, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(batch, length, width)
        out: Tensor = self.resid_dropout(self.c_proj(y))
        return out

    def scale_scores(self, scores: Tensor) -> Tensor:
        """Hook for the eager reference of the softmax temperature."""
        return scores


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int, positions: int, flash: bool, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = NanoNorm(width, bias), NanoNorm(width, bias)
        self.attn = NanoAttention(width, heads, positions, flash, bias)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 4 * width, bias=bias))
        self.mlp.add_module("act", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(4 * width, width, bias=bias))
        self.mlp.add_module("dropout", nn.Dropout(DROPOUT))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class NanoGPT(nn.Module):
    """nanoGPT: tied weights; `(logits, loss)`; without targets only the last position's logits."""

    def __init__(
        self,
        flash: bool = False,
        *,
        bias: bool = True,
        vocab: int = VOCAB,
        width: int = WIDTH,
        heads: int = HEADS,
        layers: int = LAYERS,
        positions: int = POSITIONS,
    ) -> None:
        super().__init__()
        self.positions = positions
        blocks = nn.ModuleList(NanoBlock(width, heads, positions, flash, bias) for _ in range(layers))
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab, width),
                "wpe": nn.Embedding(positions, width),
                "drop": nn.Dropout(DROPOUT),
                "h": blocks,
                "ln_f": NanoNorm(width, bias),
            }
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        assert idx.size(1) <= self.positions
        parts = self.transformer
        position = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = parts["drop"](parts["wte"](idx) + parts["wpe"](position))
        for block in parts["h"]:  # type: ignore[attr-defined]
            x = block(x)
        x = parts["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


# -- minGPT, and the model of a well-known lecture -------------------------------------------------------------


class MinGPT(nn.Module):
    """minGPT: a learned position parameter, gelu by tanh written out, always `(logits, loss or None)`."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCAB, WIDTH)
        self.pos_emb = nn.Parameter(torch.zeros(1, POSITIONS, WIDTH))
        self.blocks = nn.ModuleList(MinBlock() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tok_emb(idx) + self.pos_emb[:, : idx.size(1)]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1), ignore_index=-1)


class MinBlock(nn.Module):
    """Separate key, query and value layers; mask of ones in a buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj, self.fc, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
        )
        self.register_buffer("mask", torch.tril(torch.ones(POSITIONS, POSITIONS))[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.ln1(x)
        q, k, v = (
            layer(y).view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // HEADS)
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, -1e10)
        a = F.dropout(F.softmax(scores, -1), DROPOUT, self.training)
        x = x + self.proj((a @ v).transpose(1, 2).reshape(batch, length, width))
        z = self.fc(self.ln2(x))
        z = 0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * torch.pow(z, 3.0))))
        out: Tensor = x + self.out(z)
        return out


class LectureHead(nn.Module):
    """One head of attention as its own module."""

    tril: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(POSITIONS, POSITIONS)))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        k, q = self.key(x), self.query(x)
        weights = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        weights = F.softmax(weights.masked_fill(self.tril[:length, :length] == 0, float("-inf")), dim=-1)
        out: Tensor = self.dropout(weights) @ self.value(x)
        return out


class LectureBlock(nn.Module):
    """The heads side by side in a list, concatenated; a ReLU feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(LectureHead() for _ in range(HEADS))
        self.proj, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(DROPOUT)
        self.ffwd = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(DROPOUT)
        )
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln1(x)
        x = x + self.dropout(self.proj(torch.cat([head(y) for head in self.heads], dim=-1)))
        out: Tensor = x + self.ffwd(self.ln2(x))
        return out


class LectureGPT(nn.Module):
    """Heads in a Python list, and logits flattened to `[B·T, V]` when targets are given."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding_table = nn.Embedding(VOCAB, WIDTH)
        self.position_embedding_table = nn.Embedding(POSITIONS, WIDTH)
        self.blocks = nn.Sequential(*(LectureBlock() for _ in range(LAYERS)))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        position = self.position_embedding_table(torch.arange(idx.shape[1], device=idx.device))
        logits = self.lm_head(self.ln_f(self.blocks(self.token_embedding_table(idx) + position)))
        if targets is None:
            return logits, None
        batch, length, width = logits.shape
        logits = logits.view(batch * length, width)
        return logits, F.cross_entropy(logits, targets.view(batch * length))


# -- without modules, and torch's own layers -------------------------------------------------------------------


class FunctionalDecoder(nn.Module):
    """No submodule at all: indexing, einsum, and softmax, LayerNorm and GELU written as arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"wq": (WIDTH, WIDTH), "wk": (WIDTH, WIDTH), "wv": (WIDTH, WIDTH), "wo": (WIDTH, WIDTH)}
        shapes |= {"w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}
        self.wte, self.wpe = (
            nn.Parameter(torch.zeros(VOCAB, WIDTH)),
            nn.Parameter(torch.zeros(POSITIONS, WIDTH)),
        )
        self.layers = nn.ParameterList()
        for _ in range(LAYERS):
            matrices = {name: nn.Parameter(torch.zeros(*shape)) for name, shape in shapes.items()}
            vectors = {"g1": torch.ones(WIDTH), "g2": torch.ones(WIDTH), "b1": torch.zeros(HIDDEN)}
            self.layers.append(nn.ParameterDict(matrices | {k: nn.Parameter(v) for k, v in vectors.items()}))

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.wte[ids] + self.wpe[:length]
        for p in self.layers:
            y = written_layer_norm(x, p["g1"])
            q, k, v = ((y @ p[name]).reshape(-1, length, HEADS, WIDTH // HEADS) for name in ("wq", "wk", "wv"))
            scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(WIDTH // HEADS)
            scores = scores + torch.full((length, length), float("-inf"), device=ids.device).triu(1)
            e = torch.exp(scores - scores.amax(-1, keepdim=True))
            mixed = torch.einsum("bhij,bjhd->bihd", e / e.sum(-1, keepdim=True), v)
            x = x + mixed.reshape(-1, length, WIDTH) @ p["wo"]
            z = written_layer_norm(x, p["g2"]) @ p["w1"] + p["b1"]
            x = x + 0.5 * z * (1 + torch.erf(z / math.sqrt(2))) @ p["w2"]
        return x @ self.wte.T


def written_layer_norm(x: Tensor, gain: Tensor) -> Tensor:
    """LayerNorm as arithmetic."""
    centered = x - x.mean(-1, keepdim=True)
    return centered / torch.sqrt((centered**2).mean(-1, keepdim=True) + 1e-5) * gain


class EncoderStack(nn.Module):
    """torch's nn.TransformerEncoder with a causal mask, pre- or post-norm."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, HIDDEN, DROPOUT, "gelu", batch_first=True, norm_first=norm_first
        )
        self.embedding, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        x = self.embedding(ids) + self.position(torch.arange(length, device=ids.device))
        out: Tensor = self.head(self.encoder(x, mask=mask, is_causal=True))
        return out


# -- by name, made once ----------------------------------------------------------------------------------------

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    **{
        f"{kind}-{attention}": functools.partial(hugging_face, kind, attention)
        for kind in ("gpt2", "gpt_neox", "opt", "llama")
        for attention in ("eager", "sdpa")
    },
    "gpt_neox-sequential": functools.partial(hugging_face, "gpt_neox", use_parallel_residual=False),
    "nanogpt": lambda: randomize(NanoGPT()),
    "nanogpt-flash": lambda: randomize(NanoGPT(flash=True, bias=False)),
    "mingpt": lambda: randomize(MinGPT()),
    "lecture": lambda: randomize(LectureGPT()),
    "functional": lambda: randomize(FunctionalDecoder()),
    "encoder-pre": lambda: randomize(EncoderStack(norm_first=True)),
    "encoder-post": lambda: randomize(EncoderStack(norm_first=False)),
}
"""All families: name → function that makes a fresh model."""

EVERY = tuple(FAMILIES)

UNLIKE = ("gpt2-eager", "llama-sdpa", "nanogpt", "lecture", "functional", "encoder-post")
"""Six that share the least: layers, heads, norms, positions and outputs are written another way in each."""


@functools.cache
def source(name: str) -> nn.Module:
    """The model of a family, in evaluation mode; shared, so it must not be changed."""
    return FAMILIES[name]().eval()


@functools.cache
def captured(name: str) -> TransformedModel:
    """Its baseline TransformedModel; shared, so it must not be changed (transform copies it)."""
    return aero_compile.transform(source(name), "baseline")


@functools.cache
def _transformed(name: str, recipe: str) -> TransformedModel:
    return aero_compile.transform(captured(name), recipe, calibration=tokens())


def transformed(name: str, recipe: str) -> TransformedModel:
    """A family's model after a recipe, for the caller alone."""
    return copy.deepcopy(_transformed(name, recipe))


def logits_of(result: Any) -> Tensor:
    """The logits in whatever a model returned."""
    found = result if isinstance(result, Tensor) else getattr(result, "logits", None)
    if found is None:
        found = result[0]
    assert isinstance(found, Tensor)
    return found


def all_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits `[B, T, V]` of every position: models that return fewer are called with targets."""
    found = logits_of(model(ids))
    return found if found.shape[:2] == ids.shape else logits_of(model(ids, ids))
