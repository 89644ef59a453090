"""Boolean functions of opened and shared bits: every value of every digit and join, by truth table."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from aero_compile.runtime.online.masked_functions import MOST, parity
from aero_compile.runtime.online.sign_layout import WIDEST, SignLayout, digit_monomials, digit_selectors
from tests.support.sign_masks import monomial_bits

LAYOUTS = [SignLayout(bits, 1, is_lean) for bits in (13, 26, 32, 42, 46) for is_lean in (False, True)]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_digits_are_compared_for_all_values(count: int) -> None:
    values = np.arange(2**count)
    monomials = monomial_bits(digit_monomials(count), [(values >> bit & 1).astype(np.uint32) for bit in range(count)])
    less, equal = digit_selectors(count)
    for opened in values:
        np.testing.assert_array_equal(parity(monomials & less[opened]), opened < values)
        np.testing.assert_array_equal(parity(monomials & equal[opened]), opened == values)


def test_joins_are_right_for_all_opened_bits_and_masks() -> None:
    for join in {join for layout in LAYOUTS for joins in layout.rounds for join in joins}:
        count = join.monomials.variables
        assert len(join.monomials.terms) <= MOST
        masks = np.array(list(product([0, 1], repeat=count)), np.uint32).T
        monomials = monomial_bits(join.monomials, list(masks))
        opened = np.random.default_rng(count).integers(2**count, size=30)
        for value in opened:
            bits = [(value >> at & 1) ^ masks[at] for at in range(count)]
            equal = dict(zip(join.compared, bits, strict=False))
            lower = dict(zip(join.lower, bits[len(join.compared) :], strict=True))
            expected = np.zeros(masks.shape[1], np.uint32)
            for digit, is_less in lower.items():
                term = is_less
                for above in join.digits[digit - join.digits[0] + 1 :]:
                    term = term & equal[above]
                expected ^= term
            found = parity(monomials & join.monomials.selectors(join.less_terms)[value])
            np.testing.assert_array_equal(found, expected)
            if join.equal:
                found = parity(monomials & join.monomials.selectors(join.equal_terms)[value])
                np.testing.assert_array_equal(found, np.bitwise_and.reduce([equal[digit] for digit in join.digits]))


def test_rounds_end_in_one_digit() -> None:
    for layout in (SignLayout(bits, 3, is_lean) for bits in range(8, WIDEST + 1) for is_lean in (False, True)):
        digits = [bit for digit in layout.digits for bit in digit]
        assert digits == list(range(layout.bits - 1))
        count = len(layout.digits)
        for joins in layout.rounds:
            assert [digit for join in joins for digit in join.digits] == list(range(count))
            count = len(joins)
        assert count == 1
        assert SignLayout.named(layout.name) == layout


def test_a_lean_layout_has_fewer_ands_and_more_rounds() -> None:
    for bits in (28, 32, 46):
        quick, lean = SignLayout(bits), SignLayout(bits, 1, True)
        assert lean.gates < 0.75 * quick.gates
        assert len(lean.rounds) > len(quick.rounds)
