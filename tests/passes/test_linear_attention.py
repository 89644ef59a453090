"""linear-attention: products of features in the place of the softmax."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.nn import functional as F

import aero_compile
from aero_compile.errors import RecipeError, UnsupportedGraphError
from benchmarks.lib import zoo
from tests.support.attention_references import agrees, by_features, goes_everywhere, replaces_some_layers
from tests.support.budgets import by_default
from tests.support.tiny_models import captured

HUGGING_FACE = ("gpt2-eager", "llama-eager", "gpt_neox-eager", "opt-eager")
REFERENCES = {
    "linear-attention{features=elu}": by_features(lambda x: F.elu(x) + 1),
    "linear-attention{features=relu}": by_features(F.relu),
    "linear-attention{features=square}": by_features(lambda x: x * x),
}


@pytest.mark.parametrize("recipe", REFERENCES)
@pytest.mark.parametrize("name", by_default(HUGGING_FACE, "gpt2-eager"))
def test_what_is_computed(name: str, recipe: str) -> None:
    agrees(name, recipe, REFERENCES[recipe])


@pytest.mark.parametrize("recipe", by_default(REFERENCES, "linear-attention{features=elu}"))
def test_a_transformed_model_goes_everywhere(recipe: str, tmp_path: Path) -> None:
    goes_everywhere(recipe, tmp_path)


def test_some_layers() -> None:
    replaces_some_layers("linear-attention")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("linear-attention{features=cos}", "features must be one of elu, relu, square"),
        ("linear-attention{eps=-1.0}", "eps must be at least 0"),
    ],
)
def test_wrong_options(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        aero_compile.transform(captured("gpt2-eager"), text)


def test_other_features_are_named() -> None:
    with pytest.raises(UnsupportedGraphError, match="other features already, by linear-attention"):
        aero_compile.transform(captured("gpt2-eager"), "linear-attention,linear-attention{features=relu}")


@pytest.mark.parametrize("kind", by_default(["bloom", "mpt"], "bloom"))
def test_a_bias_of_positions_is_refused(kind: str) -> None:
    model = aero_compile.transform(zoo.hugging_face(kind, "eager"), "baseline")
    with pytest.raises(UnsupportedGraphError, match="a bias of positions added to the scores"):
        aero_compile.transform(model, "linear-attention")
