"""The rungs of a model: its programs alone, a layer, a prompt and tokens.

They are compared with the kernels' references in numpy, with the weights of the artifact directory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llama_npu2.artifact.dtypes import DTYPES
from llama_npu2.artifact.manifest import Manifest
from llama_npu2.artifact.plan import DECODE, FROM_POSITION, PREFILL, SEQUENCES, Phase, PlannedCall, Positions, sizes
from llama_npu2.artifact.plan import TOKENS as SEVERAL_TOKENS
from llama_npu2.engine.chunks import decode_phase
from llama_npu2.engine.llama import Llama
from llama_npu2.engine.memory import Memory
from llama_npu2.engine.step import Run
from llama_npu2.frozen import frozen
from stages.model import reference
from stages.model.config import Config
from stages.model.grouping import Program
from stages.model.part import HISTORY, KV, Slot
from stages.proof.selftest import bounds
from stages.proof.selftest.raw import as_failure
from stages.proof.selftest.trial import DISPATCHES, Verdict, dispatch, in_the_norm, judge_in_the_norm, written
from stages.targets.npu2 import KERNEL_SET
from stages.weights.formats import formats

SEVERAL = {SEVERAL_TOKENS: "token", SEQUENCES: "sequence"}
"""The kinds of phases that take several rows, and what a row is of."""

PROMPT = "The capital of France is"
TOKENS = 4
"""Tokens generated after the prompt."""


@frozen
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


@frozen
class Row:
    """A token after others, processed alone."""

    ids: Sequence[int]
    """The tokens before it."""
    token: int
    moments: Sequence[Moment]
    """Its calls."""
    logits: np.ndarray
    """Those after it."""


@frozen
class Expected:
    """The results of the references."""

    ids: Sequence[int]
    """The prompt's tokens."""
    moments: Sequence[Moment]
    """Calls of the prompt and of its first token."""
    logits: Sequence[np.ndarray]
    """Those of the prompt and of each token."""
    several: Mapping[Phase, Sequence[Row]]
    """The rows that phases of several tokens, or sequences, take: each with the bits that it has alone."""

    @property
    def launches(self) -> int:
        """Launches of a token, those on the host included."""
        return self.moments[-1].launches


def expect(
    manifest: Manifest, config: Config, programs: Sequence[Program], phase: Phase, ids: Sequence[int]
) -> Expected:
    """Run a prompt, in a phase whose bucket holds it, and tokens by the references."""
    first: dict[tuple[str, int], Phase] = {}
    for several in sorted(each for each in manifest.plans if each.kind in SEVERAL):
        if several.context >= len(ids) + several.rows:
            first.setdefault((several.kind, several.rows), several)
    tokens = max([TOKENS, *(each.rows for each in first.values() if each.kind == SEVERAL_TOKENS)])

    def text(tokens: Sequence[int], more: int) -> _Text:
        return _Text(manifest, config, programs, phase, tokens, more)

    prompt = text(ids, tokens)
    logits = prompt.logits
    rows = [prompt.next() for _ in range(tokens)]
    most = max((each.rows for each in first.values() if each.kind == SEQUENCES), default=0)
    others = (text(_another(ids, number), 1).next() for number in range(1, most))
    sequences = [rows[0], *others]
    of_kind = {SEVERAL_TOKENS: rows, SEQUENCES: sequences}
    return Expected(
        ids,
        [*prompt.moments, *rows[0].moments],
        [logits, *(row.logits for row in rows)],
        {each: of_kind[each.kind][: each.rows] for each in first.values()},
    )


def _another(ids: Sequence[int], number: int) -> Sequence[int]:
    """Return another text of the tokens of one, which is shorter: its positions are others, too."""
    turned = [*ids[number % len(ids) :], *ids[: number % len(ids)]]
    return turned[: max(len(ids) - number, 1)]


class _Text:
    """A text that the references process."""

    def __init__(
        self,
        manifest: Manifest,
        config: Config,
        programs: Sequence[Program],
        phase: Phase,
        ids: Sequence[int],
        more: int,
    ) -> None:
        """Process a prompt; `more`: how many tokens may follow."""
        self._plans, self._taps = manifest.plans, config.decoder.taps
        self._windows = sizes(manifest.plans, DECODE.kind)
        self._programs = {program.name: program for program in programs}
        self._model = reference.Model(
            manifest.plans, programs, config.dimensions(), lambda *of: _tensor(manifest, *of), len(ids) + more
        )
        self._ids = list(ids)
        self.logits, self.moments = self._run(phase, ids)

    def next(self) -> Row:
        """Process the most likely token."""
        before, token = [*self._ids], int(np.argmax(self.logits))
        self._ids.append(token)
        self.logits, moments = self._run(decode_phase(self._windows, len(before)), [token])
        return Row(before, token, moments, self.logits)

    def _run(self, phase: Phase, tokens: Sequence[int]) -> tuple[np.ndarray, list[Moment]]:
        pos, moments, launches = self._model.position, list[Moment](), 0

        def watch(call: PlannedCall, before: reference.Values, after: reference.Values) -> None:
            nonlocal launches
            program = self._programs[call.program]
            launches += _launches(program)
            ends = {slot.name: pos + len(tokens) for slot in program.slots if slot.keeps}
            ends |= {slot.name: ends[slot.name] + self._taps - 1 for slot in _histories(program.slots)}
            old, new = (
                {n: (a[: ends[n]] if n in ends else a).copy() for n, a in values.items()} for values in (before, after)
            )
            moments.append(Moment(phase, len(moments), call, len(tokens), pos, old, new, launches))

        return self._model.run(phase, tokens, watch).copy(), moments


def _launches(program: Program) -> int:
    return sum(len(part.launches) for part in program.parts)


def _histories(slots: Iterable[Slot]) -> list[Slot]:
    """Return the slots of histories, which a program sees from its first position on, and extends."""
    return [slot for slot in slots if slot.keeps == HISTORY]


def _tensor(manifest: Manifest, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a weight or table of an artifact directory: f32, or as it is stored where kernels take it so."""
    spec = manifest.buffers[name]
    path, form = manifest.directory / spec["file"], formats()[spec["format"]]
    packed = np.memmap(path, np.uint8, "r", spec["offset"], (manifest.nbytes(name),)).view(DTYPES[spec["dtype"]])
    packed = packed.reshape(spec["shape"])
    if form.cut:
        return form.layout(spec["layout"]).unpack(packed, form.stored_shape(shape))
    return form.unpack(packed, spec["layout"], shape)


def _stored(program: Program, slot: str, values: np.ndarray) -> np.ndarray:
    """Return values as they lie in memory, if a program's slot has a format of several values per element."""
    for part, wired in zip(program.parts, program.wiring, strict=True):
        for own in part.slots:
            form = formats()[own.format]
            if wired[own.name] == slot and form.values > 1:
                return form.pack(values, part.layout_of(own.name, KERNEL_SET))
    return values


def _positions(phase: Phase, rows: Sequence[Row]) -> Positions:
    """Return the position of the first row, or that of each where they are of several sequences."""
    return [len(row.ids) for row in rows] if phase.kind == SEQUENCES else len(rows[0].ids)


def _rows(made: np.ndarray, want: Sequence[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a result's rows with their names, or the whole if it has one; of a row as much as is wanted."""
    for (name, right), row in zip(want, made.reshape(len(want), -1), strict=True):
        yield name, row[: right.size]


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
        yield from dict.fromkeys(m.call.program for m in self.expected.moments if self._on_device(m.call))

    def programs_of(self, phase: Phase) -> Iterator[str]:
        """Yield the device programs that a phase of several rows calls, in order."""
        yield from dict.fromkeys(call.program for call in self.manifest.plans[phase] if self._on_device(call))

    def _on_device(self, call: PlannedCall) -> bool:
        return not self.manifest.programs[call.program]["host"]

    def try_program(self, name: str) -> tuple[Verdict, float]:
        """Run a program's first call three times; return the verdict and the least seconds. Raises Failure."""
        moment = next(m for m in self.expected.moments if m.call.program == name)
        slots = {slot.name: slot for slot in self._programs[name].slots}
        inputs, want = dict(moment.before), dict(moment.after)
        for slot in _histories(slots.values()):
            inputs[slot.name], want[slot.name] = (values[slot.name][moment.pos :] for values in (inputs, want))
        appended = [s for s, of in zip(slots, moment.call.buffers, strict=True) if of.view == FROM_POSITION]
        for appended_to in (slot for slot in appended if slots[slot].keeps == KV):
            want[appended_to] = want[appended_to][moment.pos :]
        return self._try(moment.phase, moment.index, inputs, {s: [(s, values)] for s, values in want.items()}, moment)

    def try_program_of(self, phase: Phase, name: str) -> tuple[Verdict, float]:
        """Do the same with a program of several rows, each of which must be what it is alone."""
        plan, rows = self.manifest.plans[phase], self.expected.several[phase]
        index = next(number for number, call in enumerate(plan) if call.program == name)
        inputs: dict[str, Any] = {}
        want: dict[str, list[tuple[str, np.ndarray]]] = {}
        which = SEVERAL[phase.kind]
        for slot, reference_ in zip(self._programs[name].slots, plan[index].buffers, strict=True):
            number = reference_.view.sequence
            own = slot.name.removesuffix(str(number)) if number else slot.name
            moments = [row.moments[index] for row in rows]
            if own not in moments[0].after:
                continue
            before, after = [m.before[own] for m in moments], [m.after[own] for m in moments]
            first, pos = moments[number], moments[number].pos
            if slot.keeps == HISTORY:
                inputs[slot.name], want[slot.name] = before[0][pos:], [(own, after[-1][pos:])]
            elif slot.keeps:
                inputs[slot.name] = first.before[own][:pos]
                each = [number] if phase.kind == SEQUENCES else range(len(rows))
                want[slot.name] = [(f"{own} of {which} {at + 1}", after[at][moments[at].pos]) for at in each]
            else:
                inputs[slot.name] = np.stack(before)
                want[slot.name] = [(f"{own} of {which} {at + 1}", values) for at, values in enumerate(after)]
        return self._try(phase, index, inputs, want, rows)

    def _try(
        self,
        phase: Phase,
        index: int,
        values: Mapping[str, np.ndarray],
        want: Mapping[str, Sequence[tuple[str, np.ndarray]]],
        of: Moment | Sequence[Row],
    ) -> tuple[Verdict, float]:
        """Run a call three times.

        Args:
            values: of its inputs.
            want: by result, the names and values of its rows, or of the whole.
            of: what is called.
        """
        planned, call = self.manifest.plans[phase][index], self.llm.calls[phase][index]
        program = self._programs[planned.program]
        seq, pos = (of.seq, of.pos) if isinstance(of, Moment) else (len(of), _positions(phase, of))
        inputs: dict[str, Any] = {}
        pairs = list(zip(call.slots, call.bindings, strict=True))
        for slot, binding in pairs:
            if slot["role"] in ("weight", "table"):
                inputs[slot["name"]] = binding
            elif slot["role"] == "input" or slot["name"] in {history.name for history in _histories(program.slots)}:
                inputs[slot["name"]] = _stored(program, slot["name"], values[slot["name"]])
        # Sequences have a buffer each here.
        views = [bound.view._replace(rows=0) for bound in planned.buffers]
        places = {slot["name"]: (id(b.buffer), view.sequence) for (slot, b), view in zip(pairs, views, strict=True)}
        read = {places[slot["name"]]: slot["name"] for slot in call.slots if slot["role"] == "input"}
        parts = {
            slot["name"]: (read[places[slot["name"]]], view)
            for slot, view in zip(call.slots, views, strict=True)
            if slot["role"] == "output" and places[slot["name"]] in read
        }
        times, results = [], []
        for _ in range(DISPATCHES):
            started = time.perf_counter()
            with as_failure():
                (made,) = dispatch(self.llm.device, call.program, call.slots, inputs, 1, seq, pos, parts)
            times.append(time.perf_counter() - started)
            results.append({row: got for slot in want if slot in made for row, got in _rows(made[slot], want[slot])})
        wanted = {row: right for slot in written(call.slots) for row, right in want[slot]}
        return judge_in_the_norm(results, wanted, bounds.relative(_launches(program), self._bfp16)), min(times)

    def try_layer(self) -> Verdict:
        """Run the calls of the first layer, of a prompt and then of a token. Raises Failure."""
        for phase in dict.fromkeys(moment.phase for moment in self.expected.moments):
            if phase.kind == DECODE.kind:
                self._fill_layers()
            verdict = self._first_layer([m for m in self.expected.moments if m.phase == phase])
            if verdict.cause:
                return Verdict(verdict.cause, f"{phase}: {verdict.detail}")
        return verdict

    def _first_layer(self, moments: Sequence[Moment]) -> Verdict:
        chosen = [m for m in moments if (m.call.layer or 0) == 0 and self._before_layers_end(m, moments)]
        last = [m for m in chosen if self._on_device(m.call)][-1]
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

    def _fill_layers(self) -> None:
        """Process the prompt in two layers: a token's program may end with the attention of the second one."""
        memory, bound = self.llm.unaliased
        phase, ids = self.expected.moments[0].phase, self.expected.ids
        plan = self.manifest.plans[phase]
        calls = [call for call, planned in zip(bound[phase], plan, strict=True) if (planned.layer or 0) < 2]
        first_after = next((at for at, planned in enumerate(plan) if (planned.layer or 0) >= 2), len(plan))
        with as_failure():
            submission = self.llm.device.prepare(calls[:first_after])
            memory.array("tokens")[: len(ids)] = ids
            submission.run(len(ids), 0)

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

    def try_several(self, phase: Phase) -> tuple[Verdict, float]:
        """Run a phase of several rows; return the verdict on the logits of each, and the seconds."""
        rows, turns, which = self.expected.several[phase], self.llm.turns, SEVERAL[phase.kind]
        with as_failure():
            runs, alone = [], []
            for number, row in enumerate(rows if phase.kind == SEQUENCES else rows[:1]):
                table = [number]
                for chunk in turns.recipe.chunks.cheapest(0, len(row.ids)):
                    tokens = row.ids[chunk.start : chunk.end]
                    turns.step([Run(tokens, chunk.start, table, phase=chunk.phase)])
                own = [row] if phase.kind == SEQUENCES else rows
                for each in own:
                    at = len(each.ids)
                    run = Run([each.token], at, table, phase=decode_phase(self.llm.windows, at))
                    alone.append(turns.step([run])[0].copy())
                runs.append(Run([each.token for each in own], len(row.ids), table, len(own), phase=phase))
            started = time.perf_counter()
            logits = turns.step(runs)
            seconds = time.perf_counter() - started
        for number, (row, found, same) in enumerate(zip(rows, logits, alone, strict=True), 1):
            verdict = in_the_norm(found, row.logits, bounds.relative(self.expected.launches, self._bfp16))
            if not verdict.cause and found.tobytes() != same.tobytes():
                differ = int((found != same).sum())
                verdict = Verdict("other bits", f"{differ} of {found.size} logits are not those of the token alone")
            if verdict.cause:
                return Verdict(verdict.cause, f"{which} {number}: {verdict.detail}"), seconds
        return verdict, seconds

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
