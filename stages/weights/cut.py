"""How group-wise quantised matrices are cut for the array: into panels of outputs, and panels into chunks of groups.

Sizes follow from the memories that chunks and panels pass through, and so from the matrix alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llama_npu2.frozen import frozen
from stages.air import limits
from stages.engine.lazy import np
from stages.weights.constants import GROUP, LANES
from stages.weights.format import Shape
from stages.weights.grouped import Grouped

PANEL_BYTES = limits.L2_BYTES // 4 - 2048
"""The most bytes of a panel of `LANES` outputs: two rows of a column's cores have one each, and the next two come to L2
while these are read. Longer rows have panels of half as many outputs."""

LONGEST_BYTES = limits.L2_BYTES // 3 - 8192
"""The most bytes of a panel where the panels are shared by one row of cores in all columns; of an odd number of panels,
L2 holds three."""

NORMED = 4096
"""Inputs up to which there is room for the weight of their norm, however few outputs a product has."""

PADDED_ROWS = limits.COLUMNS * limits.ROWS * LANES
"""The rows of a padded vocabulary are a multiple of this: a panel for every core."""

SHARES = limits.COLUMNS
"""Cores that compute a feed-forward network, each with a share of it."""

PARTS = 4
"""Parts in which the sums of a feed-forward network go from core to core, so that a core adds to one while the next
core adds to the one before."""

CHUNK_COST = 512
"""Cost of a chunk besides its bytes, its call and its scales: the bytes that come in the meantime."""


@frozen
class Cut:
    """How a matrix is cut: `panels` of `lanes` outputs each, a panel into `chunks` of `chunk_groups` groups each.

    The last groups of a panel may be padding, with scales of 0.
    """

    grouped: Grouped
    """The geometry of its format."""
    groups: int
    """Groups of a row, without padding."""
    panels: int
    lanes: int
    chunks: int
    chunk_groups: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of a chunk's factors, of its scales and of its numbers, without padding."""
        return (
            self.lanes * self.grouped.header,
            self.lanes * self.chunk_groups * self.grouped.scales,
            self.lanes * self.chunk_groups * GROUP * self.grouped.numbers.bits // 8,
        )

    @property
    def starts(self) -> list[int]:
        """Bytes from a chunk's begin to each of the three, aligned for vectors, and to its end."""
        return [0, *np.cumsum([limits.aligned(size) for size in self.sizes]).tolist()]

    @property
    def chunk_bytes(self) -> int:
        return self.starts[-1]

    @property
    def panel_bytes(self) -> int:
        return self.chunks * self.chunk_bytes

    @property
    def shape(self) -> Shape:
        """Shape of the packed matrix, i8."""
        return self.panels, self.panel_bytes

    @property
    def inputs(self) -> int:
        """Inputs of a row, with padding."""
        return self.chunks * self.chunk_groups * GROUP

    def fits_l1(self, companion: bool = True) -> bool:
        """Return whether a core can hold two chunks, the inputs, its sums, two values per group of inputs, and outputs.

        Args:
            companion: Whether there must also be room for all of a core's outputs, instead of one panel's, and for what
                may come with the inputs: a residual of as many values as there are outputs, or, for up to `NORMED`
                inputs, the weight of their norm.
        """
        rows = self.panels * self.lanes
        extra = (self.inputs if self.inputs <= NORMED else min(self.inputs, rows)) if companion else 0
        outputs = 4 * -(-rows // (limits.COLUMNS * limits.ROWS)) if companion else 4 * self.lanes
        sums = 12 * self.lanes + 8 * (self.inputs // GROUP + 1)
        return limits.fits_l1(2 * self.chunk_bytes, 2 * self.inputs, 2 * extra, sums, outputs)

    def fits_l2(self, together: int) -> bool:
        """Return whether L2 can hold its panels, if each core takes `together` at a time."""
        most = PANEL_BYTES if self.panels % limits.COLUMNS else LONGEST_BYTES
        return together * self.panel_bytes <= most


def padded_rows(rows: int, step: int = PADDED_ROWS) -> int:
    """Round rows up to a multiple of `step`; those of a vocabulary so that they fill the array."""
    return -(-rows // step) * step


def cut_matrix(grouped: Grouped, rows: int, groups: int, together: int = 1) -> Cut:
    """Cut a matrix into wide panels if L2 can hold these, else into narrow ones; into few chunks, an even number.

    UserError if rows are not whole panels or a row is too long.

    Args:
        together: Panels that a core takes at a time, each of another matrix.
    """
    what = f"a matrix of {rows} rows of {groups} groups"
    limits.require_multiple(what, "rows", rows, LANES // 2)
    cuts = limits.require_any(what, limits.IN_L1, _cuts(grouped, rows, groups))
    return next((cut for cut in cuts if cut.fits_l2(together)), cuts[-1])


def _cuts(grouped: Grouped, rows: int, groups: int) -> Iterator[Cut]:
    """Yield the cut into wide panels, then the one into narrow panels, if there are such.

    Each has the fewest chunks that fit L1, or up to twice as many if that needs no padding.
    """
    for lanes in (LANES, LANES // 2):
        counts = range(2, max(groups, 2) + 2, 2) if rows % lanes == 0 else ()
        cuts = [Cut(grouped, groups, rows // lanes, lanes, count, -(-groups // count)) for count in counts]
        fitting = [cut for cut in cuts if cut.fits_l1()] or [cut for cut in cuts if cut.fits_l1(companion=False)]
        unpadded = [cut for cut in fitting if cut.groups % cut.chunks == 0 and cut.chunks <= 2 * fitting[0].chunks]
        yield from (unpadded or fitting)[:1]


@frozen
class FeedForward:
    """How the matrices of a feed-forward network are cut, which the cores of one row of the array compute together.

    Each core has an equal share of the inner width, zeros after its end: rows of gate and up, and columns of down. All
    chunks have one size, because one loop of a core takes them all.
    """

    pairs: Cut
    """How gate is cut, and up."""
    shares: Cut
    """How a share of down's columns is cut. The number of its panels is even."""

    @property
    def inner(self) -> int:
        """Inner width of a share."""
        return self.pairs.panels * self.pairs.lanes // SHARES

    @property
    def chunks(self) -> tuple[int, int]:
        """Chunks that a core takes per launch: of gate and up, of which panels alternate, and then of down."""
        return 2 * self.pairs.panels // SHARES * self.pairs.chunks, self.shares.panels * self.shares.chunks

    @property
    def l1_bytes(self) -> int:
        """Bytes that a core holds.

        They are two chunks; its inputs, whose memory has the outputs at the end, and the normed inputs; sums of all
        outputs, and a part of another core's; its share of the activation; sums of two panels; two values per group of
        inputs; and padding for alignment.
        """
        outputs = self.shares.panels * self.shares.lanes
        groups = max(self.pairs.inputs, self.shares.inputs) // GROUP + 1
        rows = 2 * (max(self.pairs.inputs, outputs) + self.pairs.inputs + self.shares.inputs)
        sums = 4 * (outputs + outputs // PARTS)
        return 2 * self.pairs.chunk_bytes + rows + sums + 8 * (self.pairs.lanes + groups) + 2 * limits.ALIGNMENT_BYTES

    def divides(self, cols: int, inner: int) -> bool:
        """Return whether shares of so many columns, and panels of so many outputs, need no padding."""
        return (self.inner * SHARES, self.shares.panels * self.shares.lanes) == (inner, cols)

    def has_room(self, elements: int) -> bool:
        """Return whether a core also has room for so many bf16."""
        return limits.fits_l1(self.l1_bytes, limits.aligned(2 * elements))


def cut_feed_forward(grouped: Grouped, groups: int, inner_groups: int) -> FeedForward:
    """Cut a feed-forward network into the chunks that take the least time, their padding included.

    UserError if a core cannot hold what it needs.

    Args:
        groups: Groups of the hidden size.
        inner_groups: Groups of the inner width.
    """
    # Both dimensions have as many panels as groups, because GROUP = LANES.
    share_groups = -(-inner_groups // SHARES)
    down_panels = -(-groups // 2) * 2

    def cut(chunk_groups: int) -> FeedForward:
        pairs = Cut(grouped, groups, SHARES * share_groups, LANES, -(-groups // chunk_groups), chunk_groups)
        chunks = -(-share_groups // chunk_groups)
        return FeedForward(pairs, replace(pairs, groups=share_groups, panels=down_panels, chunks=chunks))

    networks = (cut(chunk_groups) for chunk_groups in range(min(groups, LANES), 0, -1))
    fitting = limits.require_any(
        f"a feed-forward network of {groups} groups",
        limits.IN_L1,
        (network for network in networks if limits.fits_l1(network.l1_bytes)),
    )
    return min(fitting, key=lambda network: sum(network.chunks) * (network.pairs.chunk_bytes + CHUNK_COST))
