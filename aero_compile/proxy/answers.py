"""The endpoint's answers, in the form of https://platform.openai.com/docs/api-reference, as plain data."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from aero_compile.proxy.writer import Ending, Name, Piece, Written
from aero_compile.runtime.generation.bill import Cost


def usage(prompt_tokens: int, endings: Sequence[Ending]) -> dict[str, Any]:
    """Tokens, guesses that were right, and in `cost` what it took: bytes of both directions, messages, seconds.

    `bytes_per_token`: of a generated token on average, the prompt not counted. `offline`: what was prepared for these
    texts before they were asked for, in none of the others. `rows_left`: tokens for which products are prepared by the
    batch and not used.
    """
    texts = [ending.made for ending in endings]
    cost = sum((text.total for text in texts), Cost())
    offline = sum((text.offline for text in texts), Cost())
    made = sum(len(text.tokens) for text in texts)
    right, guessed = sum(text.right for text in texts), sum(text.guessed for text in texts)
    behind = cost.bytes - sum(text.prefill.bytes for text in texts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "completion_tokens_details": {
            "accepted_prediction_tokens": right,
            "rejected_prediction_tokens": guessed - right,
        },
        "cost": {
            **_cost(cost),
            "bytes_per_token": round(behind / max(1, made)),
            "accepted_share": round(right / max(1, guessed), 4),
            "offline": _cost(offline),
            "rows_left": texts[-1].rows_left if texts else 0,
        },
    }


def _cost(cost: Cost) -> dict[str, Any]:
    return {"bytes": cost.bytes, "messages": cost.messages, "seconds": round(cost.seconds, 3)}


class Completion:
    """Answers to `/v1/completions`."""

    kind, prefix = "text_completion", "cmpl"
    whole = kind

    def __init__(self, model: str) -> None:
        self._shared = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def answer(self, texts: Sequence[tuple[list[Piece], Ending]], used: dict[str, Any]) -> dict[str, Any]:
        """All texts at once."""
        choices = [
            self._whole_choice(pieces) | {"index": index, "finish_reason": ending.reason}
            for index, (pieces, ending) in enumerate(texts)
        ]
        return self._shared | {"object": self.whole, "choices": choices, "usage": used}

    def begin(self, index: int) -> list[dict[str, Any]]:
        """What is streamed before a text."""
        return []

    def piece(self, index: int, piece: Piece, before: int) -> dict[str, Any]:
        """A piece of a text that has `before` characters so far."""
        return self._chunk([self._choice(piece, before) | {"index": index, "finish_reason": None}])

    def end(self, index: int, ending: Ending) -> dict[str, Any]:
        """What is streamed behind a text."""
        return self._chunk([self._choice(Piece(""), 0) | {"index": index, "finish_reason": ending.reason}])

    def last(self, used: dict[str, Any]) -> dict[str, Any]:
        """What is streamed behind all texts, where usage is asked for."""
        return self._chunk([]) | {"usage": used}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._shared | {"object": self.kind, "choices": choices}

    def _choice(self, piece: Piece, before: int) -> dict[str, Any]:
        return {"text": piece.text, "logprobs": _columns([(before, piece.token)]) if piece.token else None}

    def _whole_choice(self, pieces: list[Piece]) -> dict[str, Any]:
        rows, before = [], 0
        for piece in pieces:
            if piece.token is not None:
                rows.append((before, piece.token))
            before += len(piece.text)
        return {"text": _text(pieces), "logprobs": _columns(rows) if rows else None}


class Chat(Completion):
    """Answers to `/v1/chat/completions`."""

    kind, prefix = "chat.completion.chunk", "chatcmpl"
    whole = "chat.completion"

    def begin(self, index: int) -> list[dict[str, Any]]:
        choice = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return [self._chunk([choice | {"index": index, "finish_reason": None}])]

    def _choice(self, piece: Piece, before: int) -> dict[str, Any]:
        content = {"content": [_row(piece.token)]} if piece.token else None
        return {"delta": {"content": piece.text} if piece.text else {}, "logprobs": content}

    def _whole_choice(self, pieces: list[Piece]) -> dict[str, Any]:
        message = {"role": "assistant", "content": _text(pieces), "refusal": None}
        rows = [_row(piece.token) for piece in pieces if piece.token]
        return {"message": message, "logprobs": {"content": rows, "refusal": None} if rows else None}


def models(name: str) -> dict[str, Any]:
    """The list of models, which has one."""
    return {"object": "list", "data": [model(name)]}


def model(name: str) -> dict[str, Any]:
    """The one model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "aero_compile"}


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _columns(rows: list[tuple[int, Written]]) -> dict[str, Any]:
    """Log-probabilities of a completion: lists by column, with places in the text."""
    return {
        "tokens": [token.name.text for _, token in rows],
        "token_logprobs": [token.log_probability for _, token in rows],
        "top_logprobs": [{name.text: value for name, value in token.top} for _, token in rows],
        "text_offset": [before for before, _ in rows],
    }


def _row(token: Written) -> dict[str, Any]:
    """Log-probabilities of a token of a chat."""
    top = [_named(name, value) for name, value in token.top]
    return _named(token.name, token.log_probability) | {"top_logprobs": top}


def _named(name: Name, value: float) -> dict[str, Any]:
    return {"token": name.text, "logprob": value, "bytes": list(name.text.encode()) if name.is_text else None}
