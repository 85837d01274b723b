"""How the array divides a step of a few tokens: each row of cores has tokens of its own, and all see each weight.

A weight is read once for all tokens, since the cores of a column receive the same bytes. A core computes for a token
just what it computes where there is one, in the same order, so that its bits are those of the token alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from llama_npu2.frozen import frozen
from stages.air import limits
from stages.engine.lazy import np
from stages.kernels import Kernel, Param, Sizes, Tiling


@frozen
class Tokens:
    """The tokens of a step, and how they are divided."""

    count: int
    each: int = 1
    """Tokens of a core in a launch."""
    launches: int = 1
    """Launches that have tokens of their own."""

    @property
    def together(self) -> int:
        """Tokens of a launch."""
        return self.count // self.launches

    @property
    def herd_rows(self) -> int:
        """Rows of cores that have tokens of their own."""
        return self.together // self.each

    @property
    def macros(self) -> dict[str, int]:
        """Return what tile functions are compiled with where a core has several tokens."""
        return {"TOKENS": self.each} if self.each > 1 else {}

    def shape(self, *width: int) -> tuple[int, ...]:
        """Return the shape of an activation of so many elements a token."""
        return (self.count, *width) if self.count > 1 else width

    @property
    def text(self) -> str:
        """What descriptions of launches say of several tokens."""
        return f", {self.count} tokens" if self.count > 1 else ""


ONE = Tokens(1)


@frozen
class Sequences:
    """Which of the sequences that have a row each a launch computes for."""

    count: int
    """Sequences with a row."""
    first: int
    """The number of the launch's first, from 0."""
    together: int
    """Sequences of the launch."""

    @property
    def text(self) -> str:
        """What descriptions of launches say of several sequences."""
        return f", sequences {self.first} to {self.first + self.together - 1} of {self.count}"


def of_sequence(name: str, sequence: int) -> str:
    """Return the name of what one of several sequences has of its own; that of the first has no number.

    No underscore comes before the number, since xDSL would drop both from names of arguments.
    """
    return f"{name}{sequence}" if sequence else name


COUNTS = (2, 4, 8)
"""Numbers of tokens that programs can take at once."""


def in_rows(count: int) -> Iterator[Tokens]:
    """Yield how tokens are divided among the rows of cores, the fewest launches first: each reads all weights."""
    for launches in limits.divisors(count)[::-1]:
        together = count // launches
        yield Tokens(count, together // limits.divisors(together, 1, limits.ROWS)[0], launches)


PREFIX = "batched_"
"""What the names of kernels of several tokens begin with, after the format."""

ACTIVATIONS = ("x", "residual", "out")
"""Arguments of products of which each token has its own row."""


def batched(kernel: Kernel, tiling: Callable[[Sizes, Tokens], Tiling] | None = None) -> Kernel:
    """Return the array's kernel that computes for each of several tokens what `kernel` computes for one.

    Its activations have the tokens as their first dimension, whose number is the parameter `rows`.

    Args:
        kernel: a product, or a feed-forward network, of one token.
        tiling: divides a launch for some tokens. Raises UserError if that is impossible. None for a template.
    """

    def reference(*tensors: np.ndarray, **scalars: Any) -> np.ndarray:
        names = [arg.name for arg in kernel.args if not arg.written]
        scalars = {name: value for name, value in scalars.items() if name != "rows"}

        def of(token: int) -> np.ndarray:
            given = (t[token] if name in ACTIVATIONS else t for name, t in zip(names, tensors, strict=False))
            computed: np.ndarray = kernel.reference(*given, **scalars)
            return computed

        return np.stack([of(token) for token in range(len(tensors[names.index("x")]))])

    padded = {"aie2p": "padded_columns"}
    args = tuple(replace(arg, layouts=padded) if arg.written and arg.layouts else arg for arg in kernel.args)
    return replace(
        kernel,
        args=args,
        operation=f"{PREFIX}{kernel.operation}",
        params=(Param("rows"), *kernel.params),
        reference=reference,
        host=False,
        tiling=tiling and (lambda sizes: tiling(sizes, Tokens(sizes["rows"]))),
        program=kernel.program if tiling else None,
    )
