"""A sequence of tokens with its table of blocks, and the cache that finds blocks for it."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from llama_npu2.engine.batch.pool import BlockPool
from llama_npu2.engine.batch.prefix_tree import PrefixTree
from llama_npu2.engine.chunks import Cut
from llama_npu2.engine.step import Steps


class Growing(Protocol):
    """What a sequence's logits go to: a reply that grows by each of them, or a text of which something is computed."""

    ids: list[int]
    """All tokens, of the prompt and those that were chosen."""

    @property
    def replies(self) -> bool:
        """Whether each row that is taken makes a next token, so that tokens may be drafted."""

    @property
    def hidden(self) -> bool:
        """Whether `take` wants the last norm's output instead of logits: once, of the last token."""

    @property
    def wanted_from(self) -> int:
        """Which token comes first of those after which `take` wants a row: a reply's last one."""

    @property
    def finished(self) -> bool:
        """Whether no more rows are wanted."""

    def take(self, row: np.ndarray) -> None:
        """Take float32 logits `[vocab]`, or the last norm's output `[hidden size]`, which are valid during the call.

        A reply appends the token that follows.
        """

    def start(self, processed: int) -> None:
        """Note, before the prompt's last row, how many tokens of it were processed: blocks held the others."""

    def end(self, error: Exception | None) -> None:
        """Note that no more rows come, because of an error or because it is finished."""


@dataclass(eq=False)
class Held:
    """Tokens, and the blocks that hold K and V of the first `done` of them."""

    ids: list[int]
    """All tokens. Others append to the list."""
    done: int = field(default=0, kw_only=True)
    table: list[int] = field(default_factory=list, kw_only=True)
    namespace: str = field(default="", kw_only=True)
    """The namespace of the prefix tree in which its blocks are shared."""

    @property
    def pending(self) -> int:
        """Tokens that are not processed: one between two tokens of a reply, more for a prompt."""
        return len(self.ids) - self.done

    @property
    def wanted_from(self) -> int:
        """Which token comes first of those after which a row is wanted, so that they are processed in any case."""
        return len(self.ids) - 1

    @property
    def settled(self) -> int:
        """Tokens that are processed and will not be computed anew."""
        return self.done

    def keys(self, end: int) -> Tokens[int]:
        """Return what the tree knows the first `end` tokens by."""
        return self.ids[:end]

    def resumed(self, matched: int) -> int:
        """Return how many tokens are done once blocks hold the first `matched` ones."""
        return matched


@dataclass(eq=False)
class Sequence(Held):
    """A text that grows by what its logits go to."""

    growing: Growing
    order: int
    """Which of all sequences, by arrival. The latest one is swapped out first."""
    processed: int = 0
    """Tokens that were processed; again counts again."""
    cut: Cut | None = None
    """The chunks that it is processed in, where programs have fixed shapes."""

    def __post_init__(self) -> None:
        self.prompt = len(self.ids)
        """Number of tokens of the prompt."""

    @property
    def wanted_from(self) -> int:
        return self.growing.wanted_from

    @property
    def settled(self) -> int:
        return self.cut.settled(self.done) if self.cut else self.done

    def keys(self, end: int) -> Tokens[int]:
        return self.cut.keys(self.ids[:end]) if self.cut else super().keys(end)

    def resumed(self, matched: int) -> int:
        return self.cut.resumed(matched) if self.cut else matched


def _count(of: str) -> int:
    """Return a field that counts from 0, with the sentence that says what."""
    counted: int = field(default=0, metadata={"of": of})
    return counted


@dataclass
class Counts:
    """How often something happened. The sentences of the fields stand in `/metrics`, too."""

    swaps: int = _count("Sequences that gave up their blocks for others.")
    shared: int = _count("Blocks that a sequence took from the prefix tree instead of processing tokens.")
    copies: int = _count("Blocks that were copied because two held them and one was to write.")
    evicted: int = _count("Blocks that the prefix tree forgot for others.")
    drafted: int = _count("Tokens that were drafted.")
    rejected: int = _count("Drafted tokens that were not chosen.")
    joined: int = _count("Steps with tokens of several sequences, where sequences take turns otherwise.")
    joined_tokens: int = _count("Tokens in joined steps, one of each sequence that took part.")
    steps: int = _count("Steps that were run.")


class Cache:
    """The blocks of a KV cache: those of sequences, those that the prefix tree remembers, and free ones."""

    def __init__(self, steps: Steps, positions: int, least: int = 8) -> None:
        """Args: `positions` in a block; `least` as for `PrefixTree`."""
        self.steps, self.positions = steps, positions
        self.pool = BlockPool(steps.blocks)
        self.tree = PrefixTree(self.pool, positions, least)
        self.counts = Counts()

    def reuse(self, sequence: Held) -> None:
        """Take blocks that hold more of a sequence's tokens than are done, before those after which rows are wanted."""
        table, matched = self.tree.match(sequence.keys(sequence.wanted_from), sequence.namespace)
        done = sequence.resumed(matched)
        if done <= sequence.done:
            self.drop(table)
            return
        self.drop(sequence.table)
        sequence.table, sequence.done = table, done
        self._shorten(sequence)
        self.counts.shared += len(sequence.table)

    def rewind(self, sequence: Held, done: int) -> None:
        """Forget that tokens from `done` on are processed."""
        sequence.done = done
        self._shorten(sequence)

    def _shorten(self, sequence: Held) -> None:
        """Give up the blocks after those that hold what is done."""
        blocks = self.blocks_of(sequence.done)
        self.drop(sequence.table[blocks:])
        del sequence.table[blocks:]

    def own_last(self, sequence: Held) -> None:
        """See to it that the block of the next position, if it is partly filled, may be written.

        Without room for a copy the tree forgets the block. If others hold it, too, its tokens are processed again.
        """
        at, table = sequence.done // self.positions, sequence.table
        if not sequence.done % self.positions or self.pool.holders(table[at]) == 1:
            return
        if (block := self.take()) is None:
            if self.pool.holders(table[at]) == 2 and self.tree.forget(table[at]):
                return
            self.rewind(sequence, sequence.resumed(at * self.positions))
            return
        self.steps.copy_blocks([(table[at], block)])
        self.counts.copies += 1
        self.pool.release(table[at])
        table[at] = block

    def reach(self, sequence: Held, rows: int) -> bool:
        """Extend a sequence's table to the next `rows` positions. False if there are no blocks for all of them."""
        while len(sequence.table) < self.blocks_of(sequence.done + rows):
            if (block := self.take()) is None:
                return False
            sequence.table.append(block)
        return True

    def remember(self, sequence: Held, partly: bool = False) -> None:
        """Put a sequence's full blocks into the tree; `partly`: the last one even if it is not full."""
        end = sequence.settled if partly else sequence.settled - sequence.settled % self.positions
        self.tree.insert(sequence.keys(end), sequence.table, sequence.namespace)

    def give_up(self, sequence: Held, remember: bool = True) -> None:
        """Take a sequence's blocks from it. What they hold stays in the tree until others need the room."""
        if remember:
            self.remember(sequence, partly=True)
        self.drop(sequence.table)
        sequence.table, sequence.done = [], 0

    def held(self, sequence: Held) -> list[int]:
        """Return the blocks that `reuse` would take."""
        return self.tree.held(sequence.keys(sequence.wanted_from), sequence.namespace)

    def room(self, apart_from: Tokens[int] = ()) -> int:
        """Return how many blocks are free or can be made free, apart from some."""
        return self.pool.free + self.tree.spare(apart_from)

    def blocks_of(self, tokens: int) -> int:
        """Return how many blocks so many tokens take."""
        return -(-tokens // self.positions)

    def take(self) -> int | None:
        """Return a block that may be written; None if all are held and the tree can forget none."""
        if not self.pool.free:
            self.counts.evicted += self.tree.evict()
        return self.pool.take()

    def drop(self, table: Tokens[int]) -> None:
        """Give up blocks."""
        for block in table:
            self.pool.release(block)
