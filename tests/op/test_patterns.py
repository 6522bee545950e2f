"""Shape patterns: what each item of the language accepts, refuses and says."""

import pytest
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from opkit.errors import DefinitionError, DtypeError, ShapeError
from opkit.op.examples import values
from opkit.op.schema import patterns


def check(*pairs: tuple[object, Tensor]) -> patterns.SizeBinding:
    binding = patterns.SizeBinding("t::op")
    for i, (annotation, tensor) in enumerate(pairs):
        binding.check(f"the argument a{i}", tensor, patterns.parse(annotation))
    return binding


def test_names_bind_across_arguments() -> None:
    binding = check((Float[Tensor, "b n"], torch.zeros(2, 3)), (Float[Tensor, "n m"], torch.zeros(3, 4)))
    assert binding.sizes == {"b": 2, "n": 3, "m": 4}


def test_a_contradiction_names_operator_argument_shape_pattern_and_sizes() -> None:
    with pytest.raises(ShapeError) as caught:
        check((Float[Tensor, "b n"], torch.zeros(2, 3)), (Float[Tensor, "n"], torch.zeros(5)))
    message = str(caught.value)
    for part in ("t::op", "argument a1", "(5,)", "[n]", "n is 5", "3", "argument a0"):
        assert part in message


def test_any_number_of_leading_sizes() -> None:
    for shape in ((4,), (2, 4), (2, 3, 4)):
        assert check((Float[Tensor, "*batch d"], torch.zeros(shape))).sizes == {"batch": shape[:-1], "d": 4}


def test_leading_sizes_must_agree() -> None:
    with pytest.raises(ShapeError, match=r"batch is \(3,\) here but \(2,\)"):
        check((Float[Tensor, "*batch d"], torch.zeros(2, 4)), (Float[Tensor, "*batch"], torch.zeros(3)))


def test_a_middle_of_any_length() -> None:
    assert check((Float[Tensor, "a *rest b"], torch.zeros(1, 2, 3, 4))).sizes == {"a": 1, "rest": (2, 3), "b": 4}


def test_items() -> None:
    for annotation, good, bad in (
        (Float[Tensor, "3"], (3,), (4,)),
        (Float[Tensor, "_ n"], (9, 2), (2,)),
        (Float[Tensor, ""], (), (1,)),
        (Float[Tensor, "... n"], (1, 2, 3), ()),
        (Float[Tensor, "n n"], (2, 2), (2, 3)),
        (Float[Tensor, "n n+1"], (2, 3), (2, 2)),
        (Float[Tensor, "n 2*n-1"], (3, 5), (3, 6)),
        (Float[Tensor, "n #n"], (3, 1), (3, 2)),
        (Float[Tensor, "n=4 n"], (4, 2), (3, 2)),
    ):
        check((annotation, torch.zeros(good)))
        with pytest.raises(ShapeError):
            pytest.fail(f"{annotation} takes {bad}: {check((annotation, torch.zeros(bad)))}")


def test_dtypes() -> None:
    check(
        (Float[Tensor, "n"], torch.zeros(2, dtype=torch.bfloat16)),
        (Int[Tensor, "n"], torch.zeros(2, dtype=torch.int32)),
    )
    check(
        (Shaped[Tensor, "n"], torch.zeros(2, dtype=torch.bool)), (Bool[Tensor, "n"], torch.zeros(2, dtype=torch.bool))
    )
    with pytest.raises(DtypeError, match=r"a0 has dtype torch.int64"):
        check((Float[Tensor, "n"], torch.zeros(2, dtype=torch.int64)))


def test_unreadable_patterns() -> None:
    with pytest.raises(DefinitionError, match="more than one item"):
        patterns.parse(type("Fake", (), {"dim_str": "*a *b", "dtypes": (), "array_type": Tensor}))
    with pytest.raises(DefinitionError, match="cannot be read"):
        patterns.parse(type("Fake", (), {"dim_str": "a+*", "dtypes": (), "array_type": Tensor}))


def test_example_shapes_fit_and_share_names() -> None:
    sizes: dict[str, object] = {}
    annotations = (Float[Tensor, "*batch d"], Float[Tensor, "d 2*d"], Int[Tensor, "*batch"])
    shapes = [values.example_shape(patterns.parse(a), sizes, values.EXAMPLE_SIZES[0]) for a in annotations]
    assert shapes == [(2, 3), (3, 6), (2,)]
