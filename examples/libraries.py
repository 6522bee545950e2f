"""Operators from installed libraries: the gamma function of libm, and a matrix product of OpenBLAS.

python examples/libraries.py
"""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

import opkit

SGEMM = (
    "void scipy_cblas_sgemm64_(int order, int transa, int transb, int64_t m, int64_t n, int64_t k, float alpha, "
    "const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc)"
)
ROW_MAJOR, AS_IT_IS = 101, 111
BIND = {
    "order": ROW_MAJOR, "transa": AS_IT_IS, "transb": AS_IT_IS, "alpha": 1.0, "beta": 0.0,
    "lda": "k", "ldb": "n", "ldc": "n", "c": "out",
}  # fmt: skip


def gamma() -> None:
    """A function of numbers needs nothing but its declaration."""
    tgamma = opkit.from_library("examples::tgamma", "m", "double tgamma(double x)", variants=["float tgammaf(float x)"])
    whole = torch.arange(1, 6, dtype=torch.float64)
    torch.testing.assert_close(tgamma(whole), torch.tensor([1, 1, 2, 6, 24], dtype=torch.float64))
    torch.testing.assert_close(torch.vmap(tgamma)(whole.float()), tgamma(whole).float())


def matmul(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    """What the library computes, in torch: gradients and all other rules are derived from it."""
    return a @ b


def product(library: Path) -> None:
    """A function of pointers needs a reference and the values of its parameters."""
    sgemm = opkit.from_library("examples::sgemm", library, SGEMM, reference=matmul, bind=BIND)
    a, b = torch.randn(65, 33, requires_grad=True), torch.randn(33, 17)
    assert sgemm.select(a, b).kernel == "scipy_cblas_sgemm64_"
    torch.testing.assert_close(sgemm(a, b), a @ b)
    (grad,) = torch.autograd.grad(sgemm(a, b).sum(), a)
    torch.testing.assert_close(grad, b.sum(1).expand(65, 33))


def main() -> None:
    """Make both; numpy's wheels bring the OpenBLAS."""
    gamma()
    for library in (Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_*.so"):
        product(library)


if __name__ == "__main__":
    main()
