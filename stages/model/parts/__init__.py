"""What a model computes, in parts: slots, launches, and which slot each kernel argument is bound to.

A part is said once, in the module of its family; `PARTS` there are in the table. Signatures, glue, MLIR, plans, syncs
and the manifest are derived from it. Shapes and scalars are names of dimensions (`Config.dimensions`, or the run-time
values `seq` and `pos`), resolved by whoever needs numbers.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llama_npu2.dtypes import nbytes
from stages.kernels import HOST_SET, Kernel, format_kernel, kernels
from stages.kernels.unpacking import unpack_kernel
from stages.model.policy import BF16, Policy
from stages.weights.formats import formats

RUNTIME_SCALARS = ("seq", "pos")

Dim = str | int
Shape = tuple[Dim, ...]


def resolved(shape: Iterable[Dim | float], dimensions: Mapping[str, float]) -> tuple[int, ...]:
    """A shape in numbers."""
    return tuple(int(dimensions[dim] if isinstance(dim, str) else dim) for dim in shape)


@dataclass(frozen=True)
class Slot:
    """One argument of a program. `role`: input | output | weight | table | scratch.

    `buffer` names what is bound to it, `{layer}` being the part's layer, `{turn}` and `{next}` the parity of this layer
    and the next (two activations take turns, so that no launch reads and writes one), `{head}` the tensor of the LM
    head. `keeps`: the buffer outlives a call (a cache). `joins`:
    slots of weights, of which it is several, one behind the other.
    """

    name: str
    shape: Shape
    role: str
    format: str = "bf16"
    buffer: str = ""
    keeps: bool = False
    joins: tuple[str, ...] = ()


@dataclass(frozen=True)
class Joined:
    """Weights that one product multiplies with. `parts`: slot -> its first row, or with `paired`, where panels of two
    take turns, which of the two it is."""

    slot: Slot
    parts: Mapping[str, Dim]
    paired: bool = False

    def unpack(self, part: Slot, shared: bool) -> tuple[str, dict[str, Dim]]:
        """The kernel that takes one of them out, and its scalars that say where it lies. `shared`: among those that the
        cores of a launch share (`shared_weights`)."""
        rows, cols = part.shape
        sizes: dict[str, Dim] = {"out_cols": rows, "cols": cols}
        if self.paired:
            return "unpack_shared_pairs" if shared else "unpack_paired", {**sizes, "which": self.parts[part.name]}
        if shared:
            return "unpack_shared", sizes
        return "unpack", {**sizes, "first": self.parts[part.name], "rows": self.slot.shape[0]}


@dataclass(frozen=True)
class Launch:
    """One kernel call: `args` maps kernel argument -> slot, `scalars` kernel parameter -> value or dimension name."""

    kernel: Kernel
    args: dict[str, str]
    scalars: dict[str, Dim | float]

    def reads(self) -> set[str]:
        return {self.args[a.name] for a in self.kernel.args if not a.written}

    def writes(self) -> set[str]:
        return {self.args[a.name] for a in self.kernel.args if a.written}


@dataclass(frozen=True)
class Part:
    """Launches in order, over slots."""

    name: str
    slots: tuple[Slot, ...]
    launches: tuple[Launch, ...]

    def slot(self, name: str) -> Slot:
        return next(s for s in self.slots if s.name == name)

    def layout_of(self, slot: str, kernel_set: str) -> str:
        """The layout in which this part's kernels take a slot, where they are those of `kernel_set`."""
        found = {
            arg.layout(kernel_set)
            for launch in self.launches
            for arg in launch.kernel.args
            if launch.args[arg.name] == slot
        }
        if len(found) != 1:
            raise TypeError(f"{self.name}: slot {slot} is taken in layouts {sorted(found)}")
        return found.pop()

    def host_bytes(self, slot: Slot, dimensions: Mapping[str, float]) -> int:
        """Of a slot as it lies in memory, where this part's kernels are the host's."""
        form, layout = formats()[slot.format], self.layout_of(slot.name, HOST_SET)
        return nbytes(form.dtype, form.packed_shape(resolved(slot.shape, dimensions), layout))


@dataclass
class PartBuilder:
    """Collects slots and launches; a launch that does not fit its kernel's signature is a TypeError at once."""

    slots: list[Slot] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    def slot(self, name: str, shape: Shape, role: str, **more: Any) -> str:
        """Returns the name. `more`: the other fields of `Slot`."""
        self.slots.append(Slot(name, shape, role, **{"buffer": name, **more}))
        return name

    def launch(self, name: str, args: dict[str, str], **scalars: Dim | float) -> None:
        kernel = kernels()[name]
        if set(args) != {a.name for a in kernel.args} or set(scalars) != {p.name for p in kernel.params}:
            raise TypeError(f"launch of {name}: expected {kernel.args} {kernel.params}, got {args} {scalars}")
        known = {s.name: s for s in self.slots}
        for arg in kernel.args:
            if known[args[arg.name]].format != arg.format:
                raise TypeError(f"launch of {name}: {arg.name} is {arg.format}, slot {args[arg.name]} is not")
        self.launches.append(Launch(kernel, args, scalars))

    def build(self, name: str) -> Part:
        return Part(name, tuple(self.slots), tuple(self.launches))


def _family(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")


def joined_weights(family: str) -> tuple[Joined, ...]:
    """Weights that parts of a family may have as one slot."""
    found: tuple[Joined, ...] = getattr(_family(family), "JOINED", ())
    return found


def shared_weights(family: str, policy: Policy) -> tuple[str, ...]:
    """Slots of a feed-forward network's weights, where a token's parts have it as one launch: its cores share the inner
    width, for which all have to be stored alike, in a format whose layouts can be cut so."""
    slots: tuple[str, ...] = getattr(_family(family), "SHARED", ())
    found = {policy.of(slot, ("rows", "cols"), "bf16") for slot in slots}
    return slots if len(found) == 1 and formats()[found.pop()].feed_forward else ()


UNPACK, UNPACK_JOINED = "unpack_", "unpack_joined_"
"""In front of a part's name: what makes those of its weights that are stored otherwise what a prompt is multiplied
with (`Policy.matmul`), stored each by itself or joined."""

UNPACKED = "unpacked."
"""In front of the buffers that it makes. Layers share them."""


@functools.cache
def part(family: str, name: str, policy: Policy = BF16) -> Part:
    """A part of a family (by its `model_type`), its weights and caches in the formats of a policy, or where the name
    goes on with pairs of them, `__<slot>__<format>`, of those. KeyError if there is none of that name."""
    base, *pairs = name.removeprefix(UNPACK_JOINED).removeprefix(UNPACK).split("__")
    others = dict(zip(pairs[::2], pairs[1::2], strict=True))
    chosen = replace(policy, exceptions={**policy.exceptions, **others})
    if name.startswith(UNPACK):
        stored = _stored_slots(_family(family).PARTS[base](), chosen)
        joined = joined_weights(family) if name.startswith(UNPACK_JOINED) else ()
        shared = shared_weights(family, chosen) if joined else ()
        return _unpacking(name, stored, _multiplied(family, base, chosen), joined, shared, chosen)
    fused = getattr(_family(family), "FUSED", {}) if shared_weights(family, chosen) else {}
    made = fused.get(base, _family(family).PARTS[base])()
    return made if chosen == BF16 else replace(_stored(made, chosen), name=name)


def layer_part(family: str, name: str, layer: int, policy: Policy = BF16) -> Part:
    """The same of a layer, whose weights may be in other formats than those of others."""
    usual, others = part(family, name, policy), policy.of_layer(layer)
    pairs = [f"__{slot.name}__{others[slot.name]}" for slot in usual.slots if slot.name in others]
    return part(family, name + "".join(pairs), policy)


def unpacked(family: str, name: str, policy: Policy, how: str) -> tuple[Part | None, Part]:
    """A part whose products take what `policy.matmul` says whatever its weights are stored in, and in front of it the
    one that unpacks them, None where there is nothing to unpack. What is unpacked lies in buffers that layers share.
    `how`: `UNPACK` or `UNPACK_JOINED`."""
    wanted, products = part(family, how + name, policy), _multiplied(family, name, policy)
    made = {slot.name: slot.buffer for slot in wanted.slots if slot.role == "output"}

    def bound(slot: Slot) -> Slot:
        buffer = made.get(_made(slot.name, policy))
        return replace(slot, role="input", buffer=buffer, joins=()) if buffer else slot

    return (wanted if made else None), replace(products, slots=tuple(map(bound, products.slots)))


def _multiplied(family: str, name: str, policy: Policy) -> Part:
    """A part with the weights of a prompt's products in the format that they take. Those that its family has paired are
    one, where both are unpacked."""
    module = _family(family)
    made, paired = module.PARTS[name](), getattr(module, "PAIRED", {}).get(name)
    if paired and _joins_of(paired()) <= {slot.name for slot in _unpacks(_stored_slots(made, policy), policy)}:
        made = paired()
    return made if policy.matmul == BF16.matmul else _stored(made, Policy(policy.matmul))


def _joins_of(made: Part) -> set[str]:
    return {name for slot in made.slots for name in slot.joins}


def _unpacks(stored: Iterable[Slot], policy: Policy) -> Iterator[Slot]:
    """Of a part's slots, as they are stored, those of weights that its products take otherwise."""
    return (slot for slot in stored if slot.role == "weight" and len(slot.shape) == 2 and slot.format != policy.matmul)


def _unpacking(
    name: str,
    stored: Iterable[Slot],
    products: Part,
    joined: Iterable[Joined],
    shared: Container[str],
    policy: Policy,
) -> Part:
    b = PartBuilder()
    wholes = {part: each for each in joined for part in each.parts}
    targets = {weight: slot for slot in products.slots for weight in slot.joins or (slot.name,)}
    for slot in _unpacks(stored, policy):
        whole, target = wholes.get(slot.name, Joined(slot, {slot.name: 0})), targets[slot.name]
        weight = replace(whole.slot, format=slot.format)
        buffer = f"{UNPACKED}{target.name}"
        out = replace(target, name=_made(target.name, policy), role="output", buffer=buffer, joins=())
        b.slots += [each for each in (weight, out) if each not in b.slots]
        kernel, scalars = whole.unpack(slot, slot.name in shared)
        place = {"to": (target.joins or (slot.name,)).index(slot.name), "apart": max(len(target.joins), 1)}
        args = {"weight": weight.name, "out": out.name}
        b.launch(format_kernel(unpack_kernel(kernel, policy.matmul), slot.format), args, **scalars, **place)
    return b.build(name)


def _made(name: str, policy: Policy) -> str:
    """What an unpacking part calls what it makes for a slot."""
    return f"{name}_{policy.matmul}"


def joins(family: str, policy: Policy) -> bool:
    """Whether all that can be joined is stored alike, in a format that the array takes as it is stored."""
    found = [{policy.of(part, each.slot.shape, "bf16") for part in each.parts} for each in joined_weights(family)]
    alike = all(len(names) == 1 and formats()[next(iter(names))].cut for names in found)
    return bool(found) and not policy.layers and alike


def _format(slot: Slot, policy: Policy) -> str:
    """That a policy gives a slot of a part of bf16 weights and caches."""
    if slot.keeps:
        return policy.cache
    if slot.role != "weight":
        return slot.format
    (name,) = {policy.of(part, slot.shape, slot.format) for part in slot.joins or (slot.name,)}
    return name


def _stored_slots(part: Part, policy: Policy) -> tuple[Slot, ...]:
    return tuple(replace(slot, format=_format(slot, policy)) for slot in part.slots)


def _stored(part: Part, policy: Policy) -> Part:
    """A part of bf16 weights and caches with others in other formats, and the kernels of those."""
    slots = _stored_slots(part, policy)
    known = {slot.name: slot for slot in slots}

    def stored(launch: Launch) -> Launch:
        bound = [(arg, known[launch.args[arg.name]]) for arg in launch.kernel.args]
        matrices = {slot.format for arg, slot in bound if arg.matrix}
        (name,) = matrices or {slot.format for _, slot in bound if slot.keeps} or {"bf16"}
        return replace(launch, kernel=kernels()[format_kernel(launch.kernel.name, name)])

    return replace(part, slots=slots, launches=tuple(map(stored, part.launches)))
