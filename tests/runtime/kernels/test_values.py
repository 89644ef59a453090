"""Values at one party: the same words, whichever way they came and wherever they are wanted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aero_compile.runtime.kernels.kernel import Result
from aero_compile.runtime.kernels.values import Values
from aero_compile.runtime.spu_config import runtime_config

spu = pytest.importorskip("spu")


def values() -> tuple[Values, Any]:
    """Of the only party of a runtime of one."""
    config = runtime_config("semi2k", 64, 18)
    config.protocol, config.enable_pphlo_profile = spu.parse_protocol_kind("REF2K"), False
    desc = spu.link.Desc()
    desc.add_party("alone", "alone")
    runtime, io = spu.Runtime(spu.link.create_mem(desc, 0), config), spu.Io(1, config)
    return Values(spu, io, runtime, 0), runtime


def test_an_input_is_words_and_a_share() -> None:
    found, runtime = values()
    found.put_input("w", np.array([1.5, -2.0], np.float32), 0)
    with pytest.raises(Exception, match="w"):
        runtime.get_var("w")  # nothing needs it in SPU so far
    np.testing.assert_array_equal(found.words("w").astype(np.int64), [1.5 * 2**18, -2 * 2**18])
    assert found.share("w").meta == runtime.get_var("w").meta


def test_a_value_by_its_words_is_handed_over_once_and_dropped_everywhere() -> None:
    found, runtime = values()
    words = np.array([3, 2**64 - 1], np.uint64)
    found.put("x", Result((2,)), words)
    np.testing.assert_array_equal(found.words("x"), words)
    found.hand_over(["x", "x"])
    runtime.get_var("x")
    found.put("x", Result((2,)), words + np.uint64(1))  # what SPU had of it is gone
    np.testing.assert_array_equal(found.words("x"), words + np.uint64(1))
    found.hand_over(["x"])
    found.drop(["x", "unknown"])
    with pytest.raises(Exception, match="x"):
        runtime.get_var("x")


def test_a_name_is_given_to_another_value() -> None:
    found, _ = values()
    for name, number in (("old", 1), ("new", 2)):
        found.put(name, Result((1,)), np.array([number], np.uint64))
    found.rename("new", "old")
    np.testing.assert_array_equal(found.words("old"), [2])
    found.hand_over(["old"])
    found.rename("old", "last")
    np.testing.assert_array_equal(found.words("last"), [2])


def test_what_both_know_has_no_share_of_its_own() -> None:
    found, _ = values()
    found.put_public("p", np.array([0.25], np.float32))
    public = found.public("p")
    assert public is not None
    np.testing.assert_array_equal(public, [0.25])
    assert found.public("unknown") is None
    found.hand_over(["p"])
