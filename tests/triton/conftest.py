"""Matrix products of Triton's interpreter with one order of summation.

The interpreter multiplies with NumPy, and NumPy with the machine's BLAS. There the order of a row's
sums may depend on the row's place in a tile and on the processor, unlike on tensor cores. Tests
that compare bits therefore replace that product; tests with a tolerance keep it.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("triton")

from triton.runtime import interpreter

Array = npt.NDArray[np.float32]


def multiply_in_order(a: Array, b: Array, dtype: npt.DTypeLike) -> Array:
    """Return a [m, k] times b [k, n], the terms of every sum added by rising k.

    Each step is elementwise, so an element depends on its own row and column alone, whatever the
    processor.
    """
    total: Array = np.zeros((a.shape[0], b.shape[1]), dtype=dtype)
    for inner in range(a.shape[1]):
        total += a[:, inner, None] * b[None, inner]
    return total


class OrderedNumpy:
    """NumPy as the interpreter sees it, with `multiply_in_order` as its matmul."""

    num_products = 0

    def matmul(self, a: Array, b: Array, dtype: npt.DTypeLike) -> Array:
        """Multiply in order."""
        self.num_products += 1
        return multiply_in_order(a, b, dtype)

    def __getattr__(self, name: str) -> object:
        return getattr(np, name)


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the interpreter sum products in one order, so that bits can be compared everywhere."""
    numpy = OrderedNumpy()
    monkeypatch.setattr(interpreter, "np", numpy)
    yield
    assert numpy.num_products, "the interpreter multiplies by something else than np.matmul"
