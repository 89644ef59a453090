"""Which values are public, the server's, or live."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aero_compile.errors import LoweringError
from aero_compile.runtime.lowering.partition import Domain, partition
from aero_compile.runtime.lowering.to_jax import lower
from tests.support.runtime_graphs import TokenRows, aten


def _domains(model: TokenRows) -> dict[str, Domain]:
    part = partition(model, model.logits_graph(), model.ids)
    return {node.name: domain for node, domain in part.domains.items()}


def test_parameters_belong_to_the_server_and_shapes_are_public() -> None:
    def body(x: object, m: TokenRows) -> object:
        rows = aten.sym_size.int(x, 0)
        positions = aten.arange.default(rows)
        doubled = aten.mul.Scalar(m.w, 2.0)
        return aten.add.Tensor(aten.mul.Tensor(x, doubled), aten.unsqueeze.default(positions, 1))

    found = _domains(TokenRows(torch.randn(4, 3), body, {"w": torch.randn(3)}))
    assert found["w"] is found["mul_scalar"] is Domain.SERVER
    assert found["sym_size_int"] is found["arange_default"] is Domain.PUBLIC
    assert found["mul_tensor"] is found["add_tensor"] is Domain.LIVE


@pytest.mark.parametrize(
    ("buffer", "persistent", "domain"),
    [
        (torch.ones(3, dtype=torch.bool), True, Domain.PUBLIC),
        (torch.arange(3), True, Domain.PUBLIC),
        (torch.tensor([0.0, 1.0, 1.0]), True, Domain.PUBLIC),
        (torch.tensor([0.0, -torch.inf, -1e9]), True, Domain.PUBLIC),
        (torch.tensor([1.0]), True, Domain.PUBLIC),  # a number that every model has
        (torch.ones(3), True, Domain.SERVER),  # a statistic that happens to be 1 hides nothing
        (torch.tensor([0.1, 0.7, 1.0]), False, Domain.SERVER),
        (torch.tensor([0.1, 0.7, 1.0]), True, Domain.SERVER),
        (torch.tensor([3, -7, 5], dtype=torch.int8), False, Domain.SERVER),
        (torch.tensor([[1, 0, 1], [0, 0, 1], [0, 1, 0], [1, 1, 0]]).bool(), False, Domain.SERVER),
    ],
)
def test_buffers(buffer: torch.Tensor, persistent: bool, domain: Domain) -> None:
    model = TokenRows(torch.randn(4, 3), lambda x, m: aten.mul.Tensor(x, m.table_of_something))
    model.register_buffer("table_of_something", buffer, persistent=persistent)
    assert _domains(model)["table_of_something"] is domain


def test_a_tensor_attribute_is_the_servers_too() -> None:
    model = TokenRows(torch.randn(4, 3), lambda x, m: aten.mul.Tensor(x, m.gains))
    model.gains = torch.tensor([0.1, 0.7, 1.1])
    assert _domains(model)["gains"] is Domain.SERVER


def test_what_a_shape_is_filled_with_may_be_the_servers() -> None:
    def body(x: object, m: TokenRows) -> object:
        return aten.add.Tensor(x, aten.full_like.default(x, aten._local_scalar_dense.default(m.w)))

    model = TokenRows(torch.randn(4, 3), body, {"w": torch.randn(1)})
    assert _domains(model)["full_like_default"] is Domain.SERVER
    part = partition(model, model.logits_graph(), model.ids)
    assert lower(part).weights["w:full_like_default"].shape == (4, 3)


def test_a_number_made_of_weights_is_no_literal_of_the_program() -> None:
    def body(x: object, m: TokenRows) -> object:
        return aten.mul.Tensor(x, aten._local_scalar_dense.default(m.w))

    model = TokenRows(torch.randn(4, 3), body, {"w": torch.randn(1)})
    with pytest.raises(LoweringError, match="would be public"):
        lower(partition(model, model.logits_graph(), model.ids))


@pytest.mark.parametrize("op", ["where", "index"])
def test_what_the_server_alone_knows_cannot_choose_among_hidden_values(op: str) -> None:
    def body(x: object, m: TokenRows) -> object:
        return aten.where.self(m.rows, x, m.other) if op == "where" else aten.index.Tensor(x, [m.rows])

    rows = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 1, 0], [1, 1, 0]]).bool()
    rows = rows if op == "where" else torch.tensor([2, 0, 3])
    model = TokenRows(torch.randn(4, 3), body, {"other": torch.randn(1)}, {"rows": rows})
    with pytest.raises(LoweringError, match="rows, a mask or index that the server alone knows"):
        lower(partition(model, model.logits_graph(), model.ids))


def test_values_like_a_live_one_are_public_when_only_its_shape_is_used() -> None:
    found = _domains(TokenRows(torch.randn(4, 3), lambda x, m: aten.add.Tensor(x, aten.ones_like.default(x))))
    assert found["ones_like_default"] is Domain.PUBLIC


def test_no_module_but_dropout_is_called_on_live_values() -> None:
    model = TokenRows(torch.randn(4, 3), lambda x, m: m.squash(m.drop(x)))
    model.drop, model.squash = torch.nn.Dropout(0.5), torch.nn.Tanh()
    with pytest.raises(LoweringError, match="squash on hidden values"):
        partition(model, model.logits_graph(), model.ids)
    model.squash = torch.nn.Dropout(0.5)
    part = partition(model.train(), model.logits_graph(), model.ids)
    assert part.is_live(part.output)


def test_live_values_are_not_kept() -> None:
    model = TokenRows(torch.randn(4, 3), lambda x, m: aten.relu.default(x))
    part = partition(model, model.logits_graph(), model.ids)
    live = [node for node, domain in part.domains.items() if domain is Domain.LIVE]
    assert live
    assert not set(live) & set(part.known)


def test_partition_does_not_depend_on_the_tokens() -> None:
    def body(x: object, m: TokenRows) -> object:
        return aten.linear.default(x, m.w)

    model = TokenRows(torch.randn(4, 3), body, {"w": torch.randn(2, 3)})
    one, other = (partition(model, model.logits_graph(), ids) for ids in (model.ids, model.ids.flip(1)))
    assert [one.domains[n].value for n in one.graph.nodes] == [other.domains[n].value for n in other.graph.nodes]
    for a, b in zip(one.known.values(), other.known.values(), strict=True):
        np.testing.assert_array_equal(np.asarray(a.detach()), np.asarray(b.detach()))


def test_a_graph_with_other_inputs_or_a_constant_output_is_refused() -> None:
    class Extra(TokenRows):
        def forward(self, input_ids: object, past: object = None) -> object:
            return aten.add.Tensor(aten.embedding.default(self.table, input_ids), past)

    model = Extra(torch.randn(4, 3), lambda x, m: x)
    with pytest.raises(LoweringError, match="past"):
        partition(model, model.logits_graph(), model.ids)
    constant = TokenRows(torch.randn(4, 3), lambda x, m: aten.neg.default(m.table))
    with pytest.raises(LoweringError, match="do not depend on the tokens"):
        partition(constant, constant.logits_graph(), constant.ids)
