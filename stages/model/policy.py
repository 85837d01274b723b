"""The quantisation policy: the format of each weight and of the KV cache.

`weights=int4` names one format for all matrices, `weights=int4,w_down=int8,vocab=bf16` exceptions by slot, and
`w_down.0.1=bf16` exceptions in single layers; `kv=int8` names the format of the KV cache. `activations=int8` says that
products with group-wise weights round what they multiply to 8 bits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import NamedTuple

from llama_npu2.errors import UserError, suggestion
from llama_npu2.frozen import frozen
from stages.kernels import KV_FORMATS
from stages.model import families
from stages.model.checkpoint import Checkpoint
from stages.model.config import Config
from stages.model.decoder import EMBEDDING, HEAD, MATRICES, is_matrix
from stages.model.importers import PLAIN
from stages.weights.formats import formats

VOCAB = "vocab"
"""The name of the embedding and the LM head together, which are one tensor where they are tied."""

_VOCAB_FORMATS = {"int4": "int6"}
"""The format of the vocabulary matrices where it is not that of the other weights. They react most to rounding: with 4
bits for them too, the divergence of the demo model doubles (docs/benchmarks/quality.md)."""


_LONGEST_EXACT = 1024
"""The longest heads whose sum of products of 15 and 8 bits fits in 32 bits."""


class LayerSlot(NamedTuple):
    """A slot of weights in one layer."""

    slot: str
    layer: int


@frozen
class Policy:
    """The formats of a model's weights and KV cache. Vectors, the weights of norms, stay as they are."""

    matrices: str = "bf16"
    """The format of every weight of a product that has no exception."""
    exceptions: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Format by slot, or by `VOCAB`, in all layers."""
    kv: str = "bf16"
    """The KV cache, as `kv=` says it."""
    matmul: str = "bf16"
    """The format in which the NPU multiplies a prompt's rows, as `npu.matmul=` says it: bf16, or bfp16, which the host
    makes of weights in every format."""
    in_layers: Mapping[LayerSlot, str] = field(default_factory=dict, hash=False)
    """Format by slot and layer: exceptions in single layers."""
    activations: str = "bf16"
    """How the host's products with group-wise weights take their other operand, as `activations=` says it."""

    @property
    def text(self) -> str:
        """The policy of weights as `weights=` says it; `parse_policy` reads it."""
        layers: dict[tuple[str, str], list[int]] = {}
        for (slot, layer), name in sorted(self.in_layers.items(), key=lambda item: item[0].layer):
            layers.setdefault((slot, name), []).append(layer)
        everywhere = (f"{slot}={name}" for slot, name in sorted(self.exceptions.items()))
        in_layers = (f"{'.'.join([slot, *map(str, which)])}={name}" for (slot, name), which in sorted(layers.items()))
        return ",".join([self.matrices, *everywhere, *in_layers])

    @property
    def suffix(self) -> str:
        """The end of the name of a directory that is built by it: empty where all is bf16."""
        weights = "" if self.text == BF16.text else "-" + self.text.replace(",", "_").replace("=", "-")
        activations = "" if self.activations == BF16.activations else f"-activations-{self.activations}"
        return weights + activations + ("" if self.kv == BF16.kv else f"-kv-{self.kv}")

    @property
    def recorded(self) -> dict[str, str]:
        """The arguments of `parse_policy` that make this policy."""
        return {"weights": self.text, "kv": self.kv, "matmul": self.matmul, "activations": self.activations}

    @property
    def cache(self) -> str:
        """The format of the KV cache."""
        return KV_FORMATS[self.kv]

    @property
    def formats(self) -> tuple[str, ...]:
        """All formats of weights, sorted."""
        return tuple(sorted({self.matrices, self.vocab, *self.exceptions.values(), *self.in_layers.values()}))

    @property
    def vocab(self) -> str:
        """The format of the vocabulary matrices."""
        return self.exceptions.get(VOCAB, _VOCAB_FORMATS.get(self.matrices, self.matrices))

    @property
    def usual_matmul(self) -> str:
        """Return `matmul` if the user does not choose.

        It is block floating point where weights have lost far more than that costs, else bf16, which is exact
        (docs/benchmarks/quality.md).
        """
        return "bfp16" if self.matrices == "int4" else "bf16"

    @property
    def layers(self) -> int:
        """The fewest layers that a model must have."""
        return max((layer + 1 for _, layer in self.in_layers), default=0)

    def of(self, slot: str, shape: tuple[str | int, ...], given: str) -> str:
        """Return the format of a weight's slot in layers without exceptions, where its part has the format `given`."""
        if not is_matrix(shape) or given != "bf16":
            return given
        return self.exceptions.get(slot, self.vocab if shape[0] == VOCAB else self.matrices)

    def of_layer(self, layer: int) -> dict[str, str]:
        """Return format by slot for the exceptions of one layer."""
        return {slot: name for (slot, at), name in self.in_layers.items() if at == layer}

    def check(self, config: Config) -> None:
        """Raise UserError where it names what a model does not have."""
        if self.layers > config.layers:
            raise UserError(
                f"weights={self.text}: the model has no layer {self.layers - 1}, {config.layers - 1} is its last"
            )
        if config.tied and EMBEDDING in self.exceptions:
            raise UserError(f"weights={self.text}: {EMBEDDING} is the LM head of this model, too: say {VOCAB}=")
        gate, up = ("w_gate_exps", "w_up_exps")
        for layer in (None, *range(self.layers)):
            names = {slot: self.exceptions.get(slot, self.matrices) for slot in (gate, up)}
            names |= {} if layer is None else {s: n for s, n in self.of_layer(layer).items() if s in names}
            if config.decoder.experts and len({*names.values()}) > 1:
                raise UserError(f"weights={self.text}: {gate} and {up} are multiplied together: give both one format")
        if self.kv != BF16.kv and config.head_dim > _LONGEST_EXACT:
            raise UserError(
                f"kv={self.kv}: heads of {config.head_dim} are too long for exact sums, {_LONGEST_EXACT} is the most: "
                "leave it out"
            )


BF16 = Policy()


def parse_policy(weights: str, kv: str = "bf16", matmul: str = "bf16", activations: str = "bf16") -> Policy:
    """Return the policy of `weights=` (bf16 if empty), `kv=`, `npu.matmul=` and `activations=`. Raises UserError."""
    matrices, *rest = weights.split(",") if weights else ("bf16",)
    _check_known("weights", matrices, matrix_formats())
    exceptions: dict[str, str] = {}
    in_layers: dict[LayerSlot, str] = {}
    for exception in rest:
        where, _, name = exception.partition("=")
        slot, *layers = where.split(".")
        _check_known(f"weights={weights}", slot, _slots())
        # No model has a thousand layers.
        if layers and not (slot in MATRICES and all(re.fullmatch("[0-9]{1,3}", layer) for layer in layers)):
            raise UserError(f"weights={weights}: {where}: weights of layers are named as in w_down.0.1")
        _check_known(f"weights={weights}", name, matrix_formats())
        if layers:
            in_layers |= {LayerSlot(slot, int(layer)): name for layer in layers}
        else:
            exceptions[slot] = name
    return Policy(matrices, exceptions, kv, matmul, in_layers, activations)


def held_policy(checkpoint: Checkpoint, usable: Callable[[str], bool]) -> Policy:
    """Return the policy that stores a checkpoint's matrices in the formats that it holds them in.

    Matrices in other formats than quantised ones that are `usable` are bf16.
    """
    config = checkpoint.config

    def held(tensor: str) -> str:
        name = checkpoint.stored_format(tensor)
        return name if name not in PLAIN and usable(name) else "bf16"

    by_layer: dict[str, dict[int, str]] = {}
    for weight in families.weights(config):
        if weight.layer is not None and weight.slot in MATRICES:
            by_layer.setdefault(weight.slot, {})[weight.layer] = held(weight.name)
    usual = {slot: _most(of_slot.values()) for slot, of_slot in by_layer.items()}
    matrices = _most(usual.values())
    exceptions = {slot: name for slot, name in usual.items() if name != matrices}
    in_layers = {
        LayerSlot(slot, layer): name
        for slot, of_slot in by_layer.items()
        for layer, name in of_slot.items()
        if name != usual[slot]
    }
    exceptions[VOCAB] = held(families.tensor(config, HEAD))
    if (embedding := held(families.tensor(config, EMBEDDING))) != exceptions[VOCAB]:
        exceptions[EMBEDDING] = embedding
    return Policy(matrices, exceptions, in_layers=in_layers)


def _most(names: Iterable[str]) -> str:
    return Counter(names).most_common(1)[0][0]


def matrix_formats() -> list[str]:
    """Return the formats that a matrix can have: those with panels, among them bf16."""
    return sorted(form.name for form in formats().values() if "panels" in form.layouts)


def _slots() -> list[str]:
    return sorted({VOCAB, EMBEDDING, *MATRICES})


def _check_known(where: str, name: str, names: list[str]) -> None:
    # Formats differ in a digit, so a near one is no guess: all are listed.
    if name not in names:
        raise UserError(f"{where}: {name or 'nothing'} is unknown: {suggestion(name, names, 0.8)}")
