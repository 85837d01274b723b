"""Run a checkpoint's model in transformers, the reference for artifacts and other programs.

One layer at a time is in memory, and all texts go through it before the next one is read, so a model of any size can be
run in float32. The operations are those of the whole model, and so are the bits.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from llama_npu2 import UserError
from stages.kernels import KV_FORMATS
from stages.kernels.grouped import in_bytes
from stages.model import families
from stages.model.checkpoint import Checkpoint
from stages.model.config import Config
from stages.model.decoder import EMBEDDING, FINAL_NORM, HEAD, Attention
from stages.model.families.place import Location, whole
from stages.model.importers import PLAIN
from stages.weights.formats import formats

Values = Callable[[str], np.ndarray]
"""A function that returns a tensor's values, by its name."""

Inputs = Callable[[str], int]
"""A function that says how products take their other operand, by the name of their weight: how many values of a row
share a scale when they are rounded to 8 bits; `WHOLE_ROW`, or 0 where they are not rounded."""

WHOLE_ROW = 1 << 31


def not_rounded(weight: str) -> int:
    """Return 0, as `Inputs`."""
    return 0


def load_transformers(checkpoint: Path, dtype: str) -> Any:
    """Return the whole model of a checkpoint, with quantised weights as their values.

    Raises UserError without the verify extra.
    """
    opened, chosen = Checkpoint.open(checkpoint), getattr(_packages()[0], dtype)
    architecture, config = _described(opened)
    if checkpoint.is_dir() and {tensor.format for tensor in opened.held.values()} <= set(PLAIN):
        return architecture.from_pretrained(checkpoint, dtype=chosen).eval()
    found = _stored(families.locations(opened.config), opened.tensor)
    weights = {name: _torch(tensor, chosen) for name, tensor in found}
    return architecture.from_pretrained(None, config=config, state_dict=weights, dtype=chosen).eval()


def _packages() -> tuple[Any, Any]:
    """Return torch and transformers. Raises UserError without the verify extra."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        raise UserError("torch and transformers are not installed: pip install -e '.[verify]'")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return torch, transformers


def _described(checkpoint: Checkpoint, **changes: Any) -> tuple[Any, Any]:
    """Return the class of a checkpoint's family, and its configuration without how weights are stored."""
    _, transformers = _packages()
    architecture = getattr(transformers, families.of(checkpoint.config).architectures[0])
    fields = {name: value for name, value in checkpoint.fields.items() if name != "quantization_config"}
    # It writes into what it is given.
    config = architecture.config_class.from_dict(copy.deepcopy(fields | changes))
    scaling = checkpoint.config.decoder.attention.rope.scaling
    if scaling.factors:
        # Transformers chooses by the length of a text, and we by the room of the KV cache.
        config.rope_parameters |= {name: [*scaling.factors] for name in ("short_factor", "long_factor")}
    return architecture, config


def _stored(
    locations: Mapping[str, Sequence[tuple[families.Weight, Location]]], values: Values
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield tensors as checkpoints have them, by name, from the weights that lie in each."""
    # Those of all experts are in one.
    values = lru_cache(maxsize=1)(values)
    for name, pieces in locations.items():
        yield name, whole([(at, values(weight.name)) for weight, at in pieces])


def _torch(values: np.ndarray, dtype: Any) -> Any:
    return _packages()[0].from_numpy(np.ascontiguousarray(values, np.float32)).to(dtype)


def logits(
    checkpoint: Checkpoint,
    values: Values,
    exact: Sequence[Sequence[int]],
    rounded: Sequence[Sequence[int]] = (),
    kv: str = "bf16",
    inputs: Inputs = not_rounded,
) -> Iterator[np.ndarray]:
    """Yield the logits f32 `[len(ids), vocab]` of every position of each text.

    Args:
        values: The weights; each is asked for once.
        exact: Texts that are run in float32, whose logits come first.
        rounded: Texts that are run in bf16.
        kv: K and V are rounded as in a cache of this format; with bf16 they are not rounded.
        inputs: how products round what they multiply.

    Raises UserError without the verify extra.
    """
    torch, _ = _packages()
    config = checkpoint.config
    embedding = values(families.tensor(config, EMBEDDING))
    running = _embedded(config, embedding, exact, rounded)
    head = embedding if config.tied else None
    del embedding
    *_, norm = _through_layers(checkpoint, values, running, kv, inputs)
    _run(norm, {"weight": values(families.tensor(config, FINAL_NORM))}, running, norm)
    head = values(families.tensor(config, HEAD)) if head is None else head
    for dtype, states in running.items():
        wide, group = _torch(head, dtype) if states else None, inputs(families.tensor(config, HEAD))
        for state in states:
            yield (
                torch.nn.functional.linear(_in_bytes(state[0], group), wide).float().numpy()
                * config.decoder.logits_scale
            )


def layer_outputs(
    checkpoint: Checkpoint,
    values: Values,
    exact: Sequence[Sequence[int]],
    rounded: Sequence[Sequence[int]] = (),
    kv: str = "bf16",
) -> Iterator[list[np.ndarray]]:
    """Yield the outputs f32 `[len(ids), emb]` of each layer in turn, as our residual stream has them.

    Each item is a list of those of all texts. Arguments and the order of texts are those of `logits`. Raises UserError
    without the verify extra.
    """
    config = checkpoint.config
    running = _embedded(config, values(families.tensor(config, EMBEDDING)), exact, rounded)
    for _ in _through_layers(checkpoint, values, running, kv):
        scale = config.decoder.residual_scale
        yield [state[0].float().numpy() / scale for states in running.values() for state in states]


def _embedded(
    config: Config, embedding: np.ndarray, exact: Sequence[Sequence[int]], rounded: Sequence[Sequence[int]]
) -> Any:
    """Return rows of the embedding as they enter the first layer, `[1, tokens, emb]` for each text, by dtype."""
    torch, _ = _packages()
    texts, scale = {torch.float32: exact, torch.bfloat16: rounded}, config.decoder.embed_scale
    return {dtype: [_torch(embedding[None, ids], dtype) * scale for ids in chosen] for dtype, chosen in texts.items()}


def _through_layers(
    checkpoint: Checkpoint, values: Values, running: dict[Any, list[Any]], kv: str, inputs: Inputs = not_rounded
) -> Iterator[Callable[[Any], Any]]:
    """Run texts from their embeddings to the input of the last norm, a layer for each item; each item is that norm."""
    tensors: dict[int | None, dict[str, list[tuple[families.Weight, Location]]]] = {}
    for name, pieces in families.locations(checkpoint.config).items():
        tensors.setdefault(pieces[0][0].layer, {})[name] = pieces
    models: dict[str, tuple[Any, Any]] = {}

    def forward(state: Any, model: Any, layer: int) -> Any:
        mixer = checkpoint.config.decoder.layers[layer].mixer
        cache = rounding_cache(kv) if isinstance(mixer, Attention) else None
        return model(inputs_embeds=state, use_cache=cache is not None, **cache_argument(model, cache))[0]

    kinds = _kinds(checkpoint)
    for layer in tqdm(range(len(kinds)), desc="transformers, layer by layer", disable=None, leave=False):
        kind = repr(kinds[layer])
        if kind not in models:
            models[kind] = _one_layer(checkpoint, kinds[layer])
        model, norm = models[kind]
        weights = {name.partition(f".{layer}.")[2]: tensor for name, tensor in _stored(tensors[layer], values)}
        run = partial(forward, model=model.base_model, layer=layer)
        groups = {
            name.partition(f".{layer}.")[2].removesuffix(".weight"): inputs(pieces[0][0].name)
            for name, pieces in tensors[layer].items()
            if len(pieces[0][0].shape) > 1
        }
        with _rounding_inputs(model.base_model.layers[0], groups):
            _run(model.base_model.layers[0], weights, running, run, partial(_as_in_memory, model))
        yield norm


@contextmanager
def _rounding_inputs(layer: Any, groups: Mapping[str, int]) -> Iterator[None]:
    """Let products of a layer round their inputs: by module, how many values of a row share a scale."""
    modules = dict(layer.named_modules())
    rounding = {name: group for name, group in groups.items() if group}
    if other := [name for name in rounding if not isinstance(modules.get(name), _packages()[0].nn.Linear)]:
        raise UserError(f"{other[0]} is no matrix of one product in transformers: choose activations=bf16")
    hooks = [
        modules[name].register_forward_pre_hook(lambda _, args, group=group: (_in_bytes(args[0], group), *args[1:]))
        for name, group in rounding.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _in_bytes(rows: Any, group: int) -> Any:
    """Return rows `[..., cols]` rounded to 8 bits as our products round them, with a scale for each group of values."""
    if not group:
        return rows
    rounded = in_bytes(rows.float().numpy(), min(group, rows.shape[-1]))
    return _packages()[0].from_numpy(np.ascontiguousarray(rounded)).to(rows.dtype)


def _kinds(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Return for each layer the fields of a model that has only this one (`Family.of_layers`, `Family.alone`)."""
    _, config = _described(checkpoint)
    family, count = families.of(checkpoint.config), checkpoint.config.layers
    lists = [(getattr(config, field, None) or [None] * count)[:count] for field in family.of_layers]
    fields = [
        {f: [value] for f, value in zip(family.of_layers, kind, strict=True) if value is not None}
        for kind in zip(*lists, strict=True)
    ]
    return [
        own | dict(family.alone(layer)) for own, layer in zip(fields, checkpoint.config.decoder.layers, strict=True)
    ]


def rounding_cache(kv: str) -> Any:
    """Return an empty cache of transformers that rounds K and V as a cache of `kv=` does; None for bf16."""
    if kv == "bf16":
        return None
    torch, _ = _packages()
    from transformers import DynamicCache

    form = formats()[KV_FORMATS[kv]]

    def rounded(states: Any) -> Any:
        stored = form.quantise(states.float().numpy())
        return torch.from_numpy(form.dequantise(stored, states.shape[-1])).to(states.dtype)

    class Rounding(DynamicCache):
        def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            return super().update(rounded(key_states), rounded(value_states), layer_idx, *args, **kwargs)

    return Rounding()


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Return the argument by which this version of transformers takes a cache."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def _one_layer(checkpoint: Checkpoint, fields: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a model of one layer with such fields and a vocabulary of one token, and its last norm, which it lacks."""
    changes = {**dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")), **fields}
    architecture, config = _described(checkpoint, num_hidden_layers=1, vocab_size=1, **changes)
    if checkpoint.config.decoder.experts:
        # Other ways to compute them take no odd sizes.
        config._experts_implementation = "eager"
    model = architecture(config).eval()
    last = families.tensor(checkpoint.config, FINAL_NORM).split(".")[-2]
    norm = getattr(model.base_model, last)
    setattr(model.base_model, last, _packages()[0].nn.Identity())
    return model, norm


def _as_in_memory(model: Any, weights: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tensors of a layer in a checkpoint as `model`, which has only this layer, names and stacks them."""
    inside = model.base_model.layers[0].state_dict()
    if set(weights) == set(inside):
        return weights
    prefix = f"{model.base_model_prefix}.layers.0."
    loaded, information = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict={prefix + name: tensor for name, tensor in weights.items()},
        dtype=next(iter(weights.values())).dtype,
        output_loading_info=True,
    )
    if unknown := [name for name in information["missing_keys"] if name.startswith(prefix)] + [
        *information["unexpected_keys"]
    ]:
        raise RuntimeError(f"transformers does not load {', '.join(sorted(unknown))}")
    found: Mapping[str, Any] = loaded.base_model.layers[0].state_dict()
    return found


def _run(
    module: Any,
    weights: Mapping[str, np.ndarray],
    running: dict[Any, list[Any]],
    forward: Callable[[Any], Any],
    as_in_memory: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> None:
    """Load a module's weights in each dtype that runs through it, and run `forward` on its states.

    `Module.to` would round the frequencies of the rotation too. `as_in_memory` makes the module's tensors of weights.
    """
    for dtype, states in running.items():
        if states:
            converted = {name: _torch(values, dtype) for name, values in weights.items()}
            module.load_state_dict(as_in_memory(converted), assign=True)
            with _packages()[0].no_grad():
                running[dtype] = [forward(state) for state in states]
