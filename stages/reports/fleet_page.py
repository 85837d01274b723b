"""The page of `doit fleet`: a row for each entry of a catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llama_npu2.cli.table import amount
from stages.engine.durations import clock
from stages.reports.pages import Page, facts, note, table

_TITLES = (
    *("artifact", "state", ">size", ">KL divergence", ">perplexity", ">built in", ">first token", ">next token"),
    *("measured on", "vouched for by", "pushed to"),
)


def page(name: str, rows: Sequence[Mapping[str, Any]]) -> Page:
    """Return the page of a catalogue of this name."""
    missing = [row for row in rows if row["why"]]
    lead = f"{len(missing)} of {len(rows)} entries are not done." if missing else f"All {len(rows)} entries are done."
    shown = Page(f"doit fleet {name}", lead)
    done = {
        "built": sum(row["manifest"] is not None for row in rows),
        "verified": sum(row["verified"] is True for row in rows),
        "pushed": sum(row["pushed"] is not None for row in rows),
        "measured": sum(row["measured"] is not None for row in rows),
    }
    shown.add("Entries", facts(done), table(_TITLES, map(list, map(_cells, rows)), "Entries of the catalogue"), _NOTE)
    if missing:
        shown.add(
            "What is missing", table(["artifact", "why"], [[r["artifact"], r["why"]] for r in missing], "Missing")
        )
    return shown


_NOTE = note(
    "The KL divergence and the perplexity are those of doit verify, against the checkpoint. A build's time is that of "
    "its steps, wherever they ran. The times of tokens are of a short reply on a machine that had other work, too."
)


def _cells(row: Mapping[str, Any]) -> Iterator[object]:
    measured = row["measured"] or {}
    yield row["artifact"]
    yield _state(row)
    yield "" if row["bytes"] is None else amount(row["bytes"])
    yield _figure(row["divergence"])
    yield _figure(row["perplexity"])
    yield "" if row["seconds"] is None else clock(row["seconds"])
    yield from (f"{1000 * measured[name]:.1f} ms" if name in measured else "" for name in ("ttft", "tpot"))
    yield measured.get("where", "")
    yield row["signer"] or ""
    yield row["pushed"] or ""


def _state(row: Mapping[str, Any]) -> str:
    if row["manifest"] is None:
        return "missing"
    return {True: "verified", False: "wrong", None: "built"}[row["verified"]]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
