"""`doit gc`: what nobody needs any more. Without `keep=` it only shows it.

`keep=` is an age (`12h`, `14d`, `2w`), a size (`500M`, `5G`: of the newest), or a number (the newest of each kind).
`calibration=1` counts the leftovers of calibration in, which a build would compute again; `dry_run=1` removes nothing.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from doit.exceptions import TaskFailed

from llama_npu2.cli.table import Table, amount
from llama_npu2.errors import UserError
from llama_npu2.frozen import frozen
from stages.engine.housekeeping import Unneeded, is_recent, remove, unneeded
from stages.engine.tree import Linked
from stages.graph import Build

DEFAULT = "14d"
"""As git's garbage collection keeps what nothing refers to."""

_AGES = {"h": 3600, "d": 86400, "w": 604800}
_SIZES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@frozen
class Keep:
    """Decides which unneeded items stay."""

    number: int
    unit: str
    """`h`, `d`, `w`: items that are no older stay. `K`, `M`, `G`, `T`: the newest stay, up to this size
    together. Empty: this many stay, the newest of each kind."""

    @classmethod
    def parse(cls, text: str) -> Keep:
        """Raises UserError."""
        match = re.fullmatch(r"([0-9]{1,9})([hdwKMGT]?)", text)
        if not match:
            raise UserError(f"keep={text}: must be an age (12h, 14d, 2w), a size (500M, 5G) or a number")
        return cls(int(match[1]), match[2])

    def removed(self, items: Iterable[Unneeded], now: float) -> Iterator[Unneeded]:
        """Those that do not stay, the newest first."""
        together, seen = 0, Counter[str]()
        for item in sorted(items, key=lambda item: -item.used):
            together, seen[item.kind] = together + item.nbytes, seen[item.kind] + 1
            if self.unit in _AGES:
                stays = now - item.used < self.number * _AGES[self.unit]
            elif self.unit:
                stays = together <= self.number * _SIZES[self.unit]
            else:
                stays = seen[item.kind] <= self.number
            if not stays:
                yield item


def run(build: Build) -> TaskFailed | None:
    """Raises UserError."""
    options, now = build.options, time.time()
    found = unneeded(build.artifacts, options.calibration)
    # What may be in use at this moment is no candidate.
    items = [item for item in found if not is_recent(item)]
    recent = [item for item in found if is_recent(item)]
    dry = options.dry_run or not options.keep
    chosen = sorted(Keep.parse(options.keep or "0").removed(items, now), key=lambda item: -item.used)
    done, failed = [], []
    for item in chosen:
        try:
            removed = not dry and remove(build.artifacts, item, options.calibration)
            outcome = "would go" if dry else "removed" if removed else "in use"
        except (OSError, Linked) as error:
            outcome = f"cannot be removed: {error.strerror if isinstance(error, OSError) else error}"
            failed.append(item)
        done.append((item, outcome))
    if options.json:
        print(json.dumps([_described(build, item, outcome) for item, outcome in done]))
    else:
        _print(build, done, now)
        if recent:
            nbytes = amount(sum(item.nbytes for item in recent))
            print(f"{len(recent)} more ({nbytes}) are less than an hour old and may be in use")
        if dry and chosen:
            print(f"nothing was removed: {_offers(items, options.keep, now)}")
    return TaskFailed(f"{len(failed)} of them cannot be removed") if failed else None


def _offers(items: Sequence[Unneeded], keep: str, now: float) -> str:
    """Return what to type to remove how much."""
    sizes = {text: sum(item.nbytes for item in Keep.parse(text).removed(items, now)) for text in (keep or "0", DEFAULT)}
    return ", ".join(f"doit gc keep={text} removes {amount(size)}" for text, size in sizes.items() if size)


def _described(build: Build, item: Unneeded, outcome: str) -> dict:
    paths = [path.relative_to(build.artifacts).as_posix() for path in item.paths]
    return {"kind": item.kind, "paths": paths, "bytes": item.nbytes, "used": item.used, "outcome": outcome}


def _print(build: Build, done: Iterable[tuple[Unneeded, str]], now: float) -> None:
    columns = [("", 8), (">size", 8), (">last used", 10), ("what", 14)]
    table, total = Table([*columns, ("where", 0)]), Counter[str]()
    for item, outcome in done:
        total[outcome] += item.nbytes
        where, more = item.paths[0].relative_to(build.artifacts).as_posix(), len(item.paths) - 1
        age = f"{(now - item.used) / 86400:.1f} days"
        print(table.row(outcome, amount(item.nbytes), age, item.kind, f"{where} and {more} more" if more else where))
    sums = (f"{outcome}: {amount(nbytes)}" for outcome, nbytes in total.items())
    print("; ".join(sums) or "there is nothing to remove")
