"""Which format each weight is stored in: `weights=int4`, or with exceptions, `weights=int4,w_down=int8,vocab=bf16`,
those of some layers as in `w_down.0.1=bf16`; and the KV cache: `kv=int8`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from llama_npu2.errors import UserError
from stages.engine.names import suggestion
from stages.kernels import KV_FORMATS
from stages.model import families
from stages.model.checkpoint import Checkpoint
from stages.model.config import Config
from stages.model.importers import PLAIN
from stages.weights.formats import formats

VOCAB = "vocab"
"""What the embedding and the LM head are called together, which are one tensor where they are tied."""

EMBEDDING = "w_embed"
"""The slot of the embedding, which can be an exception from `VOCAB` where they are not."""

_VOCAB_FORMATS = {"int4": "int6"}
"""The format of the vocabulary matrices where it is not that of the other weights. They are what reacts most to
rounding: with 4 bits for them too, the divergence of the demo model doubles (BENCHMARKS.md)."""


_LONGEST_EXACT = 1024
"""Of heads whose products of 15 and 8 bits a sum of 32 bits holds."""


@dataclass(frozen=True)
class Policy:
    """`matrices`: the format of every weight of a product that `exceptions` (a slot, `vocab`, or a slot in one layer as
    in `w_down.0` -> format) does not name. Vectors, those of norms, stay as they are. `text`: as `weights=` says it.
    `kv`: of the KV cache, as `kv=` says it. `matmul`: what the NPU multiplies a prompt's rows with, as `matmul=` says
    it: bf16, or bfp16, which the host makes of weights in every format."""

    matrices: str = "bf16"
    exceptions: Mapping[str, str] = field(default_factory=dict, hash=False)
    kv: str = "bf16"
    matmul: str = "bf16"

    @property
    def text(self) -> str:
        everywhere = {slot: name for slot, name in self.exceptions.items() if "." not in slot}
        layers: dict[tuple[str, str], list[str]] = {}
        for slot, layer in sorted(self._in_layers(), key=lambda pair: int(pair[1])):
            layers.setdefault((slot, self.exceptions[f"{slot}.{layer}"]), []).append(layer)
        in_layers = [f"{'.'.join([slot, *which])}={name}" for (slot, name), which in sorted(layers.items())]
        return ",".join([self.matrices, *(f"{slot}={name}" for slot, name in sorted(everywhere.items())), *in_layers])

    @property
    def suffix(self) -> str:
        """Of a directory that is built by it: nothing where all is bf16."""
        weights = "" if self.text == BF16.text else "-" + self.text.replace(",", "_").replace("=", "-")
        return weights + ("" if self.kv == BF16.kv else f"-kv-{self.kv}")

    @property
    def cache(self) -> str:
        """The format of the KV cache."""
        return KV_FORMATS[self.kv]

    @property
    def formats(self) -> tuple[str, ...]:
        """All it names, sorted."""
        return tuple(sorted({self.matrices, self.vocab, *self.exceptions.values()}))

    @property
    def vocab(self) -> str:
        return self.exceptions.get(VOCAB, _VOCAB_FORMATS.get(self.matrices, self.matrices))

    @property
    def usual_matmul(self) -> str:
        """How the NPU multiplies a prompt's rows if nobody says: in block floating point where weights have lost far
        more than that takes, exactly where they have not (BENCHMARKS.md)."""
        return "bfp16" if self.matrices == "int4" else "bf16"

    @property
    def layers(self) -> int:
        """So many must a model have at least."""
        return max((int(layer) + 1 for _, layer in self._in_layers()), default=0)

    def _in_layers(self) -> list[tuple[str, str]]:
        """Slot and layer of the exceptions of one layer."""
        return [(slot, layer) for slot, dot, layer in (name.partition(".") for name in self.exceptions) if dot]

    def of(self, slot: str, shape: tuple[str | int, ...], given: str) -> str:
        """The format of a weight's slot whose part gives it the format `given`, in layers that are no exception."""
        if len(shape) != 2 or given != "bf16":
            return given
        return self.exceptions.get(slot, self.vocab if shape[0] == VOCAB else self.matrices)

    def of_layer(self, layer: int) -> dict[str, str]:
        """Format by slot, where it is an exception of that layer."""
        return {slot: self.exceptions[f"{slot}.{at}"] for slot, at in self._in_layers() if int(at) == layer}

    def check(self, config: Config) -> None:
        """Raises UserError where it names what a model does not have."""
        if self.layers > config.layers:
            raise UserError(
                f"weights={self.text}: the model has no layer {self.layers - 1}, {config.layers - 1} is its last"
            )
        if config.tied and EMBEDDING in self.exceptions:
            raise UserError(f"weights={self.text}: {EMBEDDING} is the LM head of this model, too: say {VOCAB}=")
        if self.kv != BF16.kv and config.head_dim > _LONGEST_EXACT:
            raise UserError(
                f"kv={self.kv}: heads of {config.head_dim} are too long for exact sums, {_LONGEST_EXACT} is the most: "
                "leave it out"
            )


BF16 = Policy()


def parse_policy(text: str, kv: str = "bf16", matmul: str = "bf16") -> Policy:
    """What `weights=` says, bf16 where that is nothing, `kv=` and `matmul=`. Raises UserError."""
    matrices, *rest = text.split(",") if text else ("bf16",)
    _known("weights", matrices, matrix_formats())
    exceptions: dict[str, str] = {}
    for part in rest:
        slot, _, name = part.partition("=")
        named, *layers = slot.split(".")
        _known(f"weights={text}", named, _slots())
        if layers and not (named in _layer_slots() and all(map(_is_layer, layers))):
            raise UserError(f"weights={text}: {slot}: weights of layers are named as in w_down.0.1")
        _known(f"weights={text}", name, matrix_formats())
        exceptions |= {f"{named}.{int(layer)}": name for layer in layers} or {named: name}
    return Policy(matrices, exceptions, kv, matmul)


def _is_layer(text: str) -> bool:
    """No model has a thousand."""
    return bool(re.fullmatch("[0-9]{1,3}", text))


def held_policy(checkpoint: Checkpoint, usable: Callable[[str], bool]) -> Policy:
    """What a checkpoint holds, where that is a format of quantised values and `usable`; bf16 for the others."""
    family, layers = families.of(checkpoint.config), range(checkpoint.config.layers)

    def held(tensor: str) -> str:
        found = checkpoint.stored_format(tensor)
        return found if found not in PLAIN and usable(found) else "bf16"

    by_layer = {slot: [held(name.format(layer=layer)) for layer in layers] for slot, name in family.matrices.items()}
    usual = {slot: _most(found) for slot, found in by_layer.items()}
    most = _most(usual.values())
    exceptions = {slot: found for slot, found in usual.items() if found != most}
    for slot, found in by_layer.items():
        exceptions |= {f"{slot}.{layer}": each for layer, each in enumerate(found) if each != usual[slot]}
    exceptions[VOCAB] = held(family.head(checkpoint.config))
    if (embedding := held(family.embedding)) != exceptions[VOCAB]:
        exceptions[EMBEDDING] = embedding
    return Policy(most, exceptions)


def _most(found: Iterable[str]) -> str:
    return Counter(found).most_common(1)[0][0]


def matrix_formats() -> list[str]:
    """bf16, and what has panels besides it."""
    return sorted(f.name for f in formats().values() if "panels" in f.layouts)


def _slots() -> list[str]:
    return sorted({VOCAB, EMBEDDING, *_layer_slots()})


def _layer_slots() -> set[str]:
    return {slot for family in families.families().values() for slot in family.matrices}


def _known(where: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise UserError(f"{where}: {name or 'nothing'} is unknown: {suggestion(name, known)}")
