"""A conversation by a chat template: the same text as the template's, and the ids of what was said stay."""

from __future__ import annotations

from typing import Any

import pytest

from aero_compile.decoding.dialog import Dialog, rendered
from aero_compile.errors import InputError
from aero_compile.training.tokenizer import END_OF_TEXT, train_tokenizer
from tests.support.made_once import made_once

PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
ENDED = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|endoftext|>{% endfor %}assistant: "
TRIMMED = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}assistant: "


@made_once
def trained() -> Any:
    return train_tokenizer(["user: what is it\nassistant: a ball\n" * 3, "the ball is red and round\n" * 3], 300, False)


def tokenizer(template: str | None) -> Any:
    found = trained()
    found.chat_template = template
    return found


def text(ids: list[int]) -> str:
    return str(trained().backend_tokenizer.decode(ids, skip_special_tokens=False))


def encoded(said: str) -> list[int]:
    return list(trained().backend_tokenizer.encode(said, add_special_tokens=False).ids)


@pytest.mark.parametrize("template", [PLAIN, ENDED])
def test_what_was_said_keeps_its_ids(template: str) -> None:
    """The answer comes letter by letter, as no tokenizer would cut it."""
    dialog = Dialog(tokenizer(template))
    first = dialog.ask("what is it")
    assert first == encoded(rendered(tokenizer(template), [{"role": "user", "content": "what is it"}]))
    answer = [each for letter in "the ball" for each in encoded(letter)]
    assert answer != encoded("the ball")
    dialog.answer("the ball", answer)
    second = dialog.ask("is it red")
    assert second[: len(first) + len(answer)] == [*first, *answer]
    said = [("user", "what is it"), ("assistant", "the ball"), ("user", "is it red")]
    assert text(second) == rendered(tokenizer(template), [{"role": role, "content": each} for role, each in said])
    ends = encoded(END_OF_TEXT)
    assert (second[len(first) + len(answer)] == ends[0]) == (template == ENDED)
    dialog.answer("a", encoded("a"))
    assert dialog.ask("b")[: len(second)] == second


def test_what_a_template_writes_in_another_way_is_encoded_anew() -> None:
    dialog = Dialog(tokenizer(TRIMMED))
    dialog.ask("what is it")
    dialog.answer(" a ball ", encoded(" a ball "))
    said = [("user", "what is it"), ("assistant", "a ball"), ("user", "red")]
    assert dialog.ask("red") == encoded("".join(f"{role}: {each}\n" for role, each in said) + "assistant: ")


def test_an_answer_in_part_is_known_by_its_text_alone() -> None:
    dialog = Dialog(tokenizer(PLAIN))
    dialog.ask("what is it")
    dialog.answer_in_part("a b")
    assert text(dialog.ask("red")) == "user: what is it\nassistant: a b\nuser: red\nassistant: "


def test_messages_that_a_template_refuses_are_not_taken() -> None:
    dialog = Dialog(tokenizer("{% if messages | length > 2 %}{{ raise_exception('enough') }}{% endif %}" + PLAIN))
    dialog.ask("a")
    dialog.answer("b", encoded("b"))
    for _ in range(2):
        with pytest.raises(InputError, match="refuses these messages: enough"):
            dialog.ask("c")


def test_without_a_template_there_is_no_conversation() -> None:
    with pytest.raises(InputError, match="no chat template"):
        Dialog(tokenizer(None)).ask("a")
