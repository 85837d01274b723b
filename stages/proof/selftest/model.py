"""The rungs of a model: its programs alone, a layer, a prompt and tokens.

They are compared with the kernels' references in numpy, with the weights of the artifact directory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llama_npu2.artifact.dtypes import DTYPES
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import DECODE, PREFILL, Phase, PlannedCall
from llama_npu2.engine.llama import Llama
from llama_npu2.engine.memory import Memory
from stages.model import reference
from stages.model.config import Config
from stages.model.grouping import Program
from stages.model.part import HISTORY, Slot
from stages.proof.selftest import bounds
from stages.proof.selftest.raw import as_failure
from stages.proof.selftest.trial import DISPATCHES, Verdict, dispatch, in_the_norm, judge_in_the_norm, written
from stages.targets.npu2 import KERNEL_SET
from stages.weights.formats import formats

PROMPT = "The capital of France is"
TOKENS = 4
"""Tokens generated after the prompt."""


@dataclass(frozen=True)
class Moment:
    """A call of a phase, with the values of its slots (arguments). Rows are those of a prompt, not of its bucket."""

    phase: Phase
    index: int
    call: PlannedCall
    seq: int
    pos: int
    before: reference.Values
    """Values of slots before the call."""
    after: reference.Values
    """The values that they must have after it."""
    launches: int
    """Launches of the phase up to the end of the call, those on the host included."""


@dataclass(frozen=True)
class Expected:
    """The results of the references."""

    ids: Sequence[int]
    """The prompt's tokens."""
    moments: Sequence[Moment]
    """Calls of the prompt and of its first token."""
    logits: Sequence[np.ndarray]
    """Those of the prompt and of each token."""
    launches: int
    """Launches of a token, those on the host included."""


def expect(
    manifest: Manifest, config: Config, programs: Sequence[Program], phase: Phase, ids: Sequence[int]
) -> Expected:
    """Run a prompt, in a phase whose bucket holds it, and tokens by the references."""
    count = {program.name: sum(len(part.launches) for part in program.parts) for program in programs}
    model = reference.Model(
        manifest.plans, programs, config.dimensions(), lambda *of: _tensor(manifest, *of), len(ids) + TOKENS
    )
    slots = {program.name: program.slots for program in programs}
    moments: list[Moment] = []

    def run(name: Phase, tokens: Sequence[int], keep: bool) -> np.ndarray:
        calls, pos = iter(enumerate(manifest.plans[name])), model.position
        launches = 0

        def watch(call: PlannedCall, before: reference.Values, after: reference.Values) -> None:
            nonlocal launches
            index, _ = next(calls)
            launches += count[call.program]
            if keep:
                ends = {s.name: pos + len(tokens) for s in slots[call.program] if s.keeps}
                ends |= {s.name: ends[s.name] + config.decoder.taps - 1 for s in _histories(slots[call.program])}
                old, new = (
                    {n: (a[: ends[n]] if n in ends else a).copy() for n, a in values.items()}
                    for values in (before, after)
                )
                moments.append(Moment(name, index, call, len(tokens), pos, old, new, launches))

        return model.run(name, tokens, watch).copy()

    logits = [run(phase, ids, keep=True)]
    for step in range(TOKENS):
        logits.append(run(DECODE, [int(np.argmax(logits[-1]))], keep=step == 0))
    launches = sum(count[call.program] for call in manifest.plans[DECODE])
    return Expected(ids, moments, logits, launches)


def _histories(slots: Iterable[Slot]) -> list[Slot]:
    """Return the slots of histories, which a program sees from its first position on, and extends."""
    return [slot for slot in slots if slot.keeps == HISTORY]


def _tensor(manifest: Manifest, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a weight or table of an artifact directory, f32."""
    spec = manifest.buffers[name]
    path = manifest.directory / spec["file"]
    packed = np.memmap(path, np.uint8, "r", spec["offset"], (manifest.nbytes(name),)).view(DTYPES[spec["dtype"]])
    return formats()[spec["format"]].unpack(packed.reshape(spec["shape"]), spec["layout"], shape)


def _stored(program: Program, slot: str, values: np.ndarray) -> np.ndarray:
    """Return values as they lie in memory, if a program's slot has a format of several values per element."""
    for part, wired in zip(program.parts, program.wiring, strict=True):
        for own in part.slots:
            form = formats()[own.format]
            if wired[own.name] == slot and form.values > 1:
                return form.pack(values, part.layout_of(own.name, KERNEL_SET))
    return values


class Model:
    """A model's artifacts, loaded on the device."""

    def __init__(
        self, manifest: Manifest, config: Config, programs: Sequence[Program], bfp16: bool, threads: int
    ) -> None:
        self.manifest, self._bfp16 = manifest, bfp16
        self._programs = {program.name: program for program in programs}
        with as_failure():
            self.llm = Llama(manifest, threads)
            ids = self.llm.encode(PROMPT, raw=True)[: min(self.llm.buckets)]
        self.expected = expect(manifest, config, programs, PREFILL._replace(rows=min(self.llm.buckets)), ids)

    def close(self) -> None:
        """Close the device."""
        self.llm.close()

    def programs(self) -> Iterator[str]:
        """Yield the device programs that a prompt and a token call, in order."""
        yield from dict.fromkeys(m.call.program for m in self.expected.moments if self._on_device(m))

    def _on_device(self, moment: Moment) -> bool:
        return not self.manifest.programs[moment.call.program]["host"]

    def try_program(self, name: str) -> tuple[Verdict, float]:
        """Run a program's first call three times; return the verdict and the least seconds. Raises Failure."""
        moment = next(m for m in self.expected.moments if m.call.program == name)
        call = self.llm.calls[moment.phase][moment.index]
        inputs: dict[str, Any] = {}
        pairs = list(zip(call.slots, call.bindings, strict=True))
        for slot, binding in pairs:
            if slot["role"] in ("weight", "table"):
                inputs[slot["name"]] = binding
            elif slot["role"] == "input":
                inputs[slot["name"]] = _stored(self._programs[name], slot["name"], moment.before[slot["name"]])
        histories = {slot.name for slot in _histories(self._programs[name].slots)}
        inputs |= {slot: moment.before[slot][moment.pos :] for slot in histories}
        read = {id(b.buffer): s["name"] for s, b in pairs if s["role"] == "input"}
        parts = {s["name"]: read[id(b.buffer)] for s, b in pairs if s["role"] == "output" and id(b.buffer) in read}
        times, results = [], []
        for _ in range(DISPATCHES):
            started = time.perf_counter()
            with as_failure():
                results += dispatch(self.llm.device, call.program, call.slots, inputs, 1, moment.seq, moment.pos, parts)
            times.append(time.perf_counter() - started)
        launches = sum(len(part.launches) for part in self._programs[name].parts)
        want = {s: moment.after[s][moment.pos if s in histories else 0 :] for s in written(call.slots)}
        return judge_in_the_norm(results, want, bounds.relative(launches, self._bfp16)), min(times)

    def try_layer(self) -> Verdict:
        """Run the calls of the first layer, of a prompt and then of a token. Raises Failure."""
        for phase in dict.fromkeys(moment.phase for moment in self.expected.moments):
            verdict = self._first_layer([m for m in self.expected.moments if m.phase == phase])
            if verdict.cause:
                return Verdict(verdict.cause, f"{phase}: {verdict.detail}")
        return verdict

    def _first_layer(self, moments: Sequence[Moment]) -> Verdict:
        chosen = [m for m in moments if (m.call.layer or 0) == 0 and self._before_layers_end(m, moments)]
        last = [m for m in chosen if self._on_device(m)][-1]
        memory, bound = self.llm.unaliased
        calls = bound[last.phase][: last.index + 1]
        tokens = [int(np.argmax(self.expected.logits[0]))] if last.pos else list(self.expected.ids)
        with as_failure():
            submission = self.llm.device.prepare(calls)
            memory.array("tokens")[: last.seq] = tokens
            outputs = self._outputs(last, memory)
            submission.run(last.seq, last.pos)
        results = {name: array.copy() for name, array in outputs.items()}
        want = {name: last.after[name] for name in results}
        return judge_in_the_norm([results], want, bounds.relative(last.launches, self._bfp16))

    def _before_layers_end(self, moment: Moment, moments: Sequence[Moment]) -> bool:
        later = [m.index for m in moments if (m.call.layer or 0) > 0]
        return not later or moment.index < later[0]

    def _outputs(self, moment: Moment, memory: Memory) -> dict[str, np.ndarray]:
        """Return the host's view of what a call writes."""
        slots = self.manifest.programs[moment.call.program]["slots"]
        bound = dict(zip((slot["name"] for slot in slots), moment.call.names, strict=True))
        return {name: memory.array(bound[name]) for name in written(slots)}

    def try_prompt(self) -> tuple[Verdict, float]:
        """Run the prompt; return the verdict on its logits, and the seconds."""
        self.llm.reset()
        started = time.perf_counter()
        with as_failure():
            logits = self.llm.prefill(self.expected.ids)
        seconds = time.perf_counter() - started
        launches = max(m.launches for m in self.expected.moments if m.pos == 0)
        return self._same(logits, 0, launches), seconds

    def try_tokens(self) -> tuple[Verdict, float]:
        """Run the tokens after the prompt; return the verdict on their logits, and the least seconds of one."""
        verdict, times = Verdict("", ""), []
        for step in range(TOKENS):
            token = int(np.argmax(self.expected.logits[step]))
            started = time.perf_counter()
            with as_failure():
                logits = self.llm.decode(token)
            times.append(time.perf_counter() - started)
            verdict = self._same(logits, step + 1, self.expected.launches)
            if verdict.cause:
                return Verdict(verdict.cause, f"token {step + 1}: {verdict.detail}"), min(times)
        return verdict, min(times)

    def _same(self, logits: np.ndarray, step: int, launches: int) -> Verdict:
        """Check that logits are near enough, and that the same token is chosen unless two are nearer than the error."""
        want = self.expected.logits[step]
        verdict = in_the_norm(logits, want, bounds.relative(launches, self._bfp16))
        if verdict.cause:
            return verdict
        first, second = np.sort(want)[-1], np.sort(want)[-2]
        chosen, right = int(np.argmax(logits)), int(np.argmax(want))
        if chosen != right and first - second > 2 * np.abs(logits - want).max():
            return Verdict("wrong", f"chooses {chosen} for {right}")
        return verdict
