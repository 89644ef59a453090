"""What a generation would cost: the sum of its programs, each as in a bill of its own."""

from __future__ import annotations

import pytest

import aero_compile
from aero_compile.errors import InputError
from aero_compile.runtime.costs.model import estimate_generation
from tests.support.tiny_generation import PROMPT, small_captured, small_compiled

pytest.importorskip("spu")


def test_a_generation_is_the_sum_of_its_programs() -> None:
    programs = small_compiled("cheetah").programs
    found = {count: estimate_generation(programs, len(PROMPT), count, warm="setup") for count in (1, 2, 3)}
    token = found[3].token
    assert token is not None
    assert token.bytes == found[1].token.bytes > 0  # type: ignore[union-attr]
    assert token.messages == found[1].token.messages  # type: ignore[union-attr]
    assert found[3].messages - found[2].messages == token.messages
    assert found[3].bytes - found[2].bytes == pytest.approx(token.bytes, abs=2)
    assert 0 < found[1].bytes - token.bytes < found[3].bytes - found[1].bytes  # the prompt, cheaper than two tokens
    for each in (found[3], token):
        assert sum(row["bytes"] for row in each.per_op) == pytest.approx(each.bytes, abs=50)
        assert sum(row["messages"] for row in each.per_op) == each.messages
    text = str(found[3])
    assert "1x4 tokens and 3 new ones" in text
    assert "a token: " in text


@pytest.mark.slow
def test_the_bill_is_the_estimate() -> None:
    """Within a hundredth, prompt and tokens; the messages to the last one."""
    made = aero_compile.private_generate(small_captured(), PROMPT, 3)
    found = aero_compile.estimate(small_captured(), len(PROMPT), new_tokens=3, warm="setup")
    assert found.token is not None
    assert found.bytes == pytest.approx(made.total.bytes, rel=0.01)
    assert found.messages == made.total.messages
    assert found.token.bytes == pytest.approx(made.tokens[-1].cost.bytes, rel=0.01)
    assert found.token.messages == made.tokens[-1].cost.messages


@pytest.mark.parametrize("options", [{"batch": 2}, {"new_tokens": 0}, {"new_tokens": True}])
def test_what_cannot_be_generated_has_no_estimate(options: dict[str, object]) -> None:
    with pytest.raises(InputError):
        aero_compile.estimate(small_captured(), 4, **{"new_tokens": 2, **options})  # type: ignore[arg-type]
