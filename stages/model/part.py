"""A part of a model: its arguments (slots), its kernel launches, and which slot each kernel argument is bound to.

Glue, MLIR, plans, packing and the manifest are derived from parts. Shapes and scalars are names of dimensions
(`Config.dimensions`, or the run-time values `seq` and `pos`), resolved by whoever needs numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llama_npu2.artifact.dtypes import nbytes
from llama_npu2.artifact.plan import WHOLE, View
from llama_npu2.frozen import frozen
from stages.kernels import HOST_SET, Kernel, kernels
from stages.weights.formats import formats

KV, HISTORY = "kv", "history"
"""What caches keep: keys and values, or rows by position that a convolution looks back at."""

Dim = str | int
Shape = tuple[Dim, ...]

KV_ROW: Shape = ("kv_pair_dim",)
"""The shape of a position in a KV cache in rows: K and V of all heads."""

UNPACK, UNPACK_JOINED = "unpack", "unpack_joined"
"""How a part's weights lie that the host unpacks for a prompt: each in a buffer of its own, or joined with others."""


def resolved(shape: Iterable[Dim | float], dimensions: Mapping[str, float]) -> tuple[int, ...]:
    """Return a shape in numbers."""
    return tuple(int(dimensions[dim] if isinstance(dim, str) else dim) for dim in shape)


class PartKey(NamedTuple):
    """Names a part of a model. As text, which names programs and C functions, `o_ffn__w_down__int8`."""

    name: str
    """The name of what it computes."""
    variant: str = ""
    """What tells it from the same part of other layers."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Slots whose format differs from the policy's, each with its format."""
    unpacks: str = ""
    """`UNPACK` or `UNPACK_JOINED` for the part that unpacks this one's weights for a prompt."""

    def __str__(self) -> str:
        formats = (f"__{slot}__{name}" for slot, name in self.overrides)
        return "".join([self.kind, f"__{self.variant}" if self.variant else "", *formats])

    @property
    def kind(self) -> str:
        """The name without what differs from layer to layer."""
        return f"{self.unpacks}_{self.name}" if self.unpacks else self.name


@frozen
class Slot:
    """One argument of a program."""

    name: str
    shape: Shape
    role: str
    """input | output | weight | table | scratch"""
    format: str = "bf16"
    buffer: str = ""
    """The name of the buffer that is bound to it. `{layer}` stands for the part's layer, `{turn}` and `{next}` for the
    parity of this layer and the next (two activations take turns, so that no launch reads and writes one), `{rope}`
    for the end of the name of the layer's tables."""
    view: View = WHOLE
    """The rows of that buffer that the part sees: a view of `llama_npu2.artifact.plan`."""
    keeps: str = ""
    """What the buffer, a cache, keeps from call to call: `KV` or the `HISTORY` of a convolution. Nothing for others."""
    joins: tuple[str, ...] = ()
    """The slots of weights whose rows it holds one after the other."""


@frozen
class Joined:
    """Weights that one product multiplies with."""

    slot: Slot
    parts: Mapping[str, Dim]
    """Each weight's slot with its first row; with `paired` with its number in the pair."""
    paired: bool = False
    """Whether panels of two weights take turns."""

    def unpack(self, part: Slot, shared: bool) -> tuple[str, dict[str, Dim]]:
        """Return the kernel that takes one of the weights out, and its scalars that say where that lies.

        Args:
            shared: it is among those that the cores of a launch share (`shared_weights`).
        """
        rows, cols = part.shape
        sizes: dict[str, Dim] = {"out_cols": rows, "cols": cols}
        if self.paired:
            return "unpack_shared_pairs" if shared else "unpack_paired", {**sizes, "which": self.parts[part.name]}
        if shared:
            return "unpack_shared", sizes
        return "unpack", {**sizes, "first": self.parts[part.name], "rows": self.slot.shape[0]}


@frozen
class Launch:
    """One kernel call."""

    kernel: Kernel
    args: dict[str, str]
    """Slot by kernel argument."""
    scalars: dict[str, Dim | float]
    """Value or name of a dimension by kernel parameter."""

    def numbers(self, dimensions: Mapping[str, Any]) -> dict[str, Any]:
        """Return the scalars as numbers."""
        return {name: dimensions[value] if isinstance(value, str) else value for name, value in self.scalars.items()}

    def reads(self) -> set[str]:
        return {self.args[a.name] for a in self.kernel.args if not a.written}

    def writes(self) -> set[str]:
        return {self.args[a.name] for a in self.kernel.args if a.written}


@frozen
class Part:
    """Launches in order, over slots."""

    key: PartKey
    slots: tuple[Slot, ...]
    launches: tuple[Launch, ...]

    @property
    def name(self) -> str:
        return str(self.key)

    def slot(self, name: str) -> Slot:
        return next(slot for slot in self.slots if slot.name == name)

    def layout_of(self, slot: str, kernel_set: str) -> str:
        """Return the layout in which this part's kernels of `kernel_set` take a slot. TypeError if they differ."""
        layouts = {
            arg.layout(kernel_set)
            for launch in self.launches
            for arg in launch.kernel.args
            if launch.args[arg.name] == slot
        }
        if len(layouts) != 1:
            raise TypeError(f"{self.name}: slot {slot} is taken in layouts {sorted(layouts)}")
        return layouts.pop()

    def host_bytes(self, slot: Slot, dimensions: Mapping[str, float]) -> int:
        """Return the bytes of a slot in memory in the layout of the host's kernels."""
        form, layout = formats()[slot.format], self.layout_of(slot.name, HOST_SET)
        return nbytes(form.dtype, form.packed_shape(resolved(slot.shape, dimensions), layout))


@dataclass
class PartBuilder:
    """Collects slots and launches. A launch that does not fit its kernel's signature is a TypeError at once."""

    slots: list[Slot] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    def slot(self, name: str, shape: Shape, role: str, **fields: Any) -> str:
        """Add a slot, whose buffer has its name unless `fields`, others of `Slot`, say otherwise. Return the name."""
        self.slots.append(Slot(name, shape, role, **{"buffer": name, **fields}))
        return name

    def launch(self, name: str, args: dict[str, str], **scalars: Dim | float) -> None:
        """Add a launch of the kernel `name`."""
        kernel = kernels()[name]
        if set(args) != {a.name for a in kernel.args} or set(scalars) != {p.name for p in kernel.params}:
            raise TypeError(f"launch of {name}: expected {kernel.args} {kernel.params}, got {args} {scalars}")
        slot_formats = {slot.name: slot.format for slot in self.slots}
        for arg in kernel.args:
            if slot_formats[args[arg.name]] != arg.format:
                raise TypeError(f"launch of {name}: {arg.name} is {arg.format}, slot {args[arg.name]} is not")
        self.launches.append(Launch(kernel, args, scalars))

    def build_keyed(self, key: PartKey) -> Part:
        return Part(key, tuple(self.slots), tuple(self.launches))
