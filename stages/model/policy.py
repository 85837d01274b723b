"""Which format each weight is stored in: `weights=int4`, or with exceptions, `weights=int4,w_down=int8,vocab=bf16`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llama_npu2.errors import UserError
from stages.engine.names import suggestion
from stages.model import families
from stages.model.checkpoint import Checkpoint
from stages.model.importers import PLAIN
from stages.weights.formats import formats

VOCAB = "vocab"
"""What the embedding and the LM head are called together, which are one tensor where they are tied."""

_VOCAB_FORMATS = {"int4": "int6"}
"""The format of the vocabulary matrices where it is not that of the other weights. They are what reacts most to
rounding: with 4 bits for them too, the divergence of the demo model doubles (BENCHMARKS.md)."""


@dataclass(frozen=True)
class Policy:
    """`matrices`: the format of every weight of a product that `exceptions` (slot or `vocab` -> format) does not name.
    Vectors, those of norms, stay as they are. `text`: as `weights=` says it."""

    matrices: str = "bf16"
    exceptions: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def text(self) -> str:
        return ",".join([self.matrices, *(f"{slot}={name}" for slot, name in sorted(self.exceptions.items()))])

    @property
    def suffix(self) -> str:
        """Of a directory that is built by it: nothing where all is bf16."""
        return "" if self == Policy() else "-" + self.text.replace(",", "_").replace("=", "-")

    @property
    def formats(self) -> tuple[str, ...]:
        """All it names, sorted."""
        return tuple(sorted({self.matrices, self.vocab, *self.exceptions.values()}))

    @property
    def vocab(self) -> str:
        return self.exceptions.get(VOCAB, _VOCAB_FORMATS.get(self.matrices, self.matrices))

    def of(self, slot: str, shape: tuple[str | int, ...], given: str) -> str:
        """The format of a weight's slot whose part gives it the format `given`."""
        if len(shape) != 2 or given != "bf16":
            return given
        return self.vocab if shape[0] == VOCAB else self.exceptions.get(slot, self.matrices)


BF16 = Policy()


def parse_policy(text: str) -> Policy:
    """What `weights=` says, bf16 where that is nothing. Raises UserError."""
    matrices, *rest = text.split(",") if text else ("bf16",)
    _known("weights", matrices, _matrix_formats())
    exceptions = {}
    for part in rest:
        slot, _, name = part.partition("=")
        _known(f"weights={text}", slot, _slots())
        _known(f"weights={text}", name, _matrix_formats())
        exceptions[slot] = name
    return Policy(matrices, exceptions)


def held_policy(checkpoint: Checkpoint, usable: Callable[[str], bool]) -> Policy:
    """What a checkpoint holds, where all layers hold a weight in one format that is `usable`; bf16 for the others."""
    family = families.of(checkpoint.config)
    layers = range(checkpoint.config.layers)
    tensors = {slot: [name.format(layer=layer) for layer in layers] for slot, name in family.matrices.items()}
    tensors[VOCAB] = [family.embedding, family.head(checkpoint.config)]
    found = {}
    for slot, names in tensors.items():
        held = {checkpoint.stored_format(name) for name in names}
        kept = held.pop() if len(held) == 1 else "bf16"
        found[slot] = kept if kept not in PLAIN and usable(kept) else "bf16"
    most = Counter(found.values()).most_common(1)[0][0]
    return Policy(most, {slot: name for slot, name in found.items() if slot == VOCAB or name != most})


def _matrix_formats() -> list[str]:
    """bf16, and what has panels besides it."""
    return sorted(f.name for f in formats().values() if "panels" in f.layouts)


def _slots() -> list[str]:
    matrices = {slot for family in families.families().values() for slot in family.matrices}
    return sorted({VOCAB, *matrices})


def _known(where: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise UserError(f"{where}: {name or 'nothing'} is unknown: {suggestion(name, known)}")
