"""A conversation as a tokenizer's chat template writes it, and the ids of what was said already kept as they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aero_compile.errors import InputError


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """The text of `messages`, each with its `role` and `content`, up to where the answer begins.

    Raises:
        InputError: the tokenizer has no chat template, or its template refuses the messages.
    """
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise InputError("this model's tokenizer has no chat template")
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
    except (TemplateError, TypeError, ValueError) as error:
        raise InputError(f"the chat template refuses these messages: {error}") from error


class Dialog:
    """Messages and answers in turn.

    Of a new message only what the template writes behind the last answer is encoded: the ids in front stay, so that a
    session holds them already. Where the template writes earlier messages in another way than before, all is encoded.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._messages: list[dict[str, str]] = []
        self._text, self._ids = "", list[int]()

    def ask(self, message: str) -> list[int]:
        """The ids to go on from, with one more message of the user's.

        Raises:
            InputError: as of `rendered`.
        """
        asked = [*self._messages, {"role": "user", "content": message}]
        text = rendered(self._tokenizer, asked)
        before = self._ids if text.startswith(self._text) else []
        rest = text[len(self._text) :] if before else text
        encoded = self._tokenizer.backend_tokenizer.encode(rest, add_special_tokens=False).ids
        self._messages, self._text, self._ids = asked, text, [*before, *encoded]
        return list(self._ids)

    def answer(self, text: str, ids: Sequence[int]) -> None:
        """Take the model's answer: its text, and all ids of it but one that ends it."""
        self._messages.append({"role": "assistant", "content": text})
        self._text, self._ids = self._text + text, [*self._ids, *ids]

    def answer_in_part(self, text: str) -> None:
        """Take an answer that was cut at a stop string, in the middle of its ids."""
        self._messages.append({"role": "assistant", "content": text})
        self._text, self._ids = "", []
