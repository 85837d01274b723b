"""Replies in a given form: which tokens may come next, by a JSON schema or a grammar (extra `grammar`: llguidance)."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from llama_npu2.errors import UserError, first_line, shortened
from llama_npu2.options import OptionError
from llama_npu2.text.replies import Marks
from llama_npu2.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Result = TypeVar("Result")

_KEPT = 64
"""How many compiled grammars are kept."""
_MOST_NODES = 1 << 15
"""Most keys of objects and items of lists in a schema, which compiles in seconds."""
_MOST_KEYS = 1000
"""Most keys of one object in a schema: properties take time that grows with the square of their number."""
_MOST_STATES = 1 << 15
"""Most remainders of numbers by all `multipleOf` in a schema: 300,007 take 3.6 s, 4,000,037 take 39 s and 1.7 GB."""
_STACK = _MOST_NODES << 13
"""Bytes of stack for compiling a schema: references may lead as deep as it has nodes, and overflow ends the process."""
_OVERRIDES = {"whitespace_pattern": " ?", "lenient": False}
"""JSON comes in one line: a model may write white space for ever. What of a schema is not understood is refused."""
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_BOUNDS = np.where(_BITS, np.inf, -np.inf).astype(np.float32)
"""f32 `[256, 8]`: how large the logits of eight tokens may be, by a byte of a mask."""


class Grammars:
    """Compiles schemas and grammars for a vocabulary. May be used by several threads."""

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int], vocabulary: int) -> None:
        """Prepare the vocabulary, which takes up to a second.

        Args:
            tokenizer: whose tokens they are.
            ends: the tokens that end a reply.
            vocabulary: the number of logits.

        Raises:
            UserError: if llguidance is not installed or cannot use the tokenizer, or replies of this model are not in
                one piece.
        """
        try:
            import llguidance
        except ModuleNotFoundError:
            message = "the package llguidance is not installed: pip install 'llama-npu2[grammar]'"
            raise UserError(message) from None
        marks = Marks(tokenizer)
        if marks.harmony:
            raise UserError("schema= and grammar= are not for models that write in channels (gpt-oss): leave them out")
        try:
            self._vocabulary = llguidance.LLTokenizer(
                tokenizer.inner.to_str(),
                n_vocab=max(vocabulary, tokenizer.inner.get_vocab_size()),
                eos_token=sorted(ends),
            )
        except Exception as error:
            raise UserError(f"the tokenizer cannot be used with schema= or grammar= ({first_line(error)})") from None
        self._library: Any = llguidance
        self._never = np.array([*marks.opens, *marks.closes], np.int64)
        self._before = np.array([*ends, *marks.opens], np.int64)
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._beside = ThreadPoolExecutor(1, "llama-npu2 masks")

    def constraint(self, schema: str, grammar: str) -> Constraint:
        """Return what a new reply has to follow.

        Args:
            schema: a JSON schema; or
            grammar: a grammar in llguidance's dialect of Lark.

        Raises:
            OptionError: if it cannot be followed.
        """
        with self._lock:
            matcher = self._compiled.get((schema, grammar))
            if matcher is None:
                matcher = self._compiled[schema, grammar] = self._matcher(schema, grammar)
            self._compiled.move_to_end((schema, grammar))
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            asked = ("schema", shortened(schema)) if schema else ("grammar", shortened(grammar))
            return Constraint(matcher.deep_copy(), asked, self._never, self._before, self._beside)

    def _matcher(self, schema: str, grammar: str) -> LLMatcher:
        name, text = ("schema", schema) if schema else ("grammar", grammar)
        try:
            if schema:
                # It takes options for an object alone; a schema that is true or false is one of these.
                given = json.loads(schema)
                _check_size(given)
                schema = json.dumps({} if given is True else {"not": {}} if given is False else given)
            matcher, first = _with_stack(lambda: self._compile(schema, grammar))
        except Exception as error:  # of the library, which promises none
            raise OptionError(name, shortened(text), first_line(error)) from None
        if first.is_error() or first.is_stopped():
            raise OptionError(name, shortened(text), f"it cannot be followed ({_reason(first)})")
        return matcher

    def _compile(self, schema: str, grammar: str) -> tuple[LLMatcher, LLMatcher]:
        """Return a matcher, and a copy that has made the first mask: what nothing can fulfil shows there."""
        library = self._library.LLMatcher
        if schema:
            source = library.grammar_from_json_schema(schema, overrides=_OVERRIDES)
        else:
            source = library.grammar_from_lark(grammar)
        limits = self._library.LLParserLimits(verbose_errors=False)
        matcher: LLMatcher = library(self._vocabulary, source, log_level=0, limits=limits)
        first = matcher.deep_copy()
        if not matcher.is_error():
            first.compute_bitmask()
        return matcher, first


def _check_size(schema: Any) -> None:
    """Raises ValueError for a schema that would take too long to compile."""
    nodes, left, states = 0, [schema], 1
    while left:
        node = left.pop()
        if isinstance(node, dict):
            states = math.lcm(states, _states(node.get("multipleOf")))
            if states > _MOST_STATES:
                raise ValueError(
                    f"numbers of multipleOf in it have a common multiple above {_MOST_STATES}: simplify it"
                )
        if isinstance(node, dict) and len(node) > _MOST_KEYS:
            raise ValueError(f"an object in it has {len(node)} keys, at most {_MOST_KEYS} are allowed: simplify it")
        if isinstance(node, dict | list):
            nodes += len(node)
            left += node.values() if isinstance(node, dict) else node
        if nodes > _MOST_NODES:
            raise ValueError(f"it has more than {_MOST_NODES} keys and items: simplify it")


def _states(multiple_of: Any) -> int:
    """Return what of a number decides how many states its multiples take: it without the factors 2 and 5."""
    if type(multiple_of) not in (int, float) or not 0 < multiple_of < math.inf:
        return 1  # the library refuses it, if it is there
    digits = int("".join(map(str, Decimal(str(multiple_of)).as_tuple().digits)))
    for factor in (2, 5):
        while digits % factor == 0:
            digits //= factor
    return digits


def _with_stack(function: Callable[[], Result]) -> Result:
    """Return what a function returns, from a thread with a large stack. It takes memory as far as it is used."""
    with _starting, ThreadPoolExecutor(1, "llama-npu2 grammar") as threads:
        before = threading.stack_size(_STACK)
        try:
            result = threads.submit(function)
        finally:
            threading.stack_size(before)
        return result.result()


_starting = threading.Lock()
"""Held while a schema is compiled: only one such stack is used at a time, and nobody else changes its size."""


def _reason(matcher: LLMatcher) -> str:
    """Return why a matcher has failed. Of errors of several lines, it is the one that says so, or the first one."""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [*said, *lines, "no reason is known"][0][:200]


class Constraint:
    """What one reply has to follow. The mask of the next token is made beside the model's work on it."""

    def __init__(
        self,
        matcher: LLMatcher,
        asked: tuple[str, str],
        never: np.ndarray,
        before: np.ndarray,
        beside: ThreadPoolExecutor,
    ) -> None:
        """Set it up.

        Args:
            matcher: follows the reply.
            asked: the option that it comes from, and the beginning of its value.
            never: tokens that no grammar allows.
            before: tokens that may not come before it begins.
            beside: the thread in which masks are made.
        """
        self._matcher, self._asked, self._beside = matcher, asked, beside
        self._never, self._before = never, before
        self._bounds = beside.submit(self._next_bounds)
        self.complete = False
        """Whether nothing may follow any more."""

    def restrict(self, logits: np.ndarray) -> None:
        """Set float32 logits `[vocab]` of tokens that may not come next to minus infinity. Raises UserError."""
        bounds = self._bounds.result()
        self._check()
        np.minimum(logits, bounds[: len(logits)], out=logits)
        if np.isneginf(logits.max()):
            raise OptionError(*self._asked, "no token of the vocabulary goes on with what it allows: loosen it")

    def restrict_before(self, logits: np.ndarray) -> None:
        """Do the same for a token of what comes before: the reply may not end, nor call a tool."""
        logits[self._before] = -np.inf

    def follow(self, token: int) -> None:
        """Append a token to the reply. Raises UserError."""
        self._bounds.result()  # a matcher takes one call at a time
        self._matcher.consume_token(token)
        self._check()
        self.complete = self._matcher.is_stopped()
        if not self.complete:
            self._bounds = self._beside.submit(self._next_bounds)

    def _next_bounds(self) -> np.ndarray:
        """Return how large logits may be, f32: infinite either way. Where the matcher fails, they say nothing."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bounds = _BOUNDS.take(mask, axis=0).reshape(-1)
        bounds[self._never] = -np.inf
        return bounds

    def _check(self) -> None:
        if self._matcher.is_error():
            raise OptionError(*self._asked, f"it cannot be followed ({_reason(self._matcher)}): simplify it")
