"""Operators that fail where their argument is singular: AOTAutograd orders such effects by tokens, results of their own."""

import pytest
import torch

from opkit.compiler.backend import opkit_backend


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def compiled(function):
    return torch.compile(function, backend=opkit_backend, options={"strict": True})


def positive(n):
    x = torch.randn(n, n, dtype=torch.float64)
    return x @ x.mT + n * torch.eye(n, dtype=torch.float64)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.cholesky,
        lambda a: torch.linalg.inv(a).sin() + a,
        lambda a: torch.linalg.lu_factor(a)[0],
        lambda a: torch.linalg.solve(a, a + 1),
    ],
    ids=["cholesky", "inv", "lu_factor", "solve"],
)
def test_gradients(function):
    a = positive(5).requires_grad_()
    found, expected = compiled(function)(a), function(a)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(expected)
    (mine,), (theirs,) = (torch.autograd.grad((y * weight).sum(), a) for y in (found, expected))
    torch.testing.assert_close(mine, theirs)


def raises(function):
    """Whether a function that AOTAutograd traces still checks a matrix: torch 2.11 takes the check for dead code."""
    try:
        torch.compile(function, backend="aot_eager")(torch.zeros(3, 3))
    except torch.linalg.LinAlgError:
        return True
    finally:
        torch._dynamo.reset()
    return False


def test_a_singular_matrix_is_refused():
    if not raises(lambda a: torch.linalg.inv(a) + 1):
        pytest.skip("torch drops the check before any backend sees the graph")
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(lambda a: torch.linalg.inv(a) + 1)(torch.zeros(3, 3))
