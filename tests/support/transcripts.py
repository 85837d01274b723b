"""Which requests a client sends and which fields they have: noted by a server, kept, and compared with what was kept.

    LLAMA_NPU2_KEEP_TRANSCRIPTS=1 pytest -m clients

writes what a new version of a client sends in place of what was kept.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.serving import Server

NOTING = """
import json, sys
from llama_npu2.serve import listen
guarded = listen.guarded
def noted(*given):
    app = guarded(*given)
    async def note(scope, receive, send):
        content, status = bytearray(), []
        async def received():
            message = await receive()
            content.extend(message.get("body", b""))
            return message
        async def sent(message):
            status.append(message.get("status"))
            await send(message)
        await app(scope, received, sent)
        if scope["type"] == "http" and status:
            what = f"{scope['method']} {scope['path']} {status[0]}"
            print("noted " + json.dumps([what, content.decode()]), file=sys.stderr, flush=True)
    return note
listen.guarded = noted
"""
"""Makes a server note each request and its body."""

_KEPT = Path(__file__).parents[1] / "runtime/transcripts"
_FREE = (".parameters", ".input_schema", ".schema", "metadata", ".content[].input")
"""Ends of paths to values that are a tool's or a program's own."""
_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}


def _fields(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict) and not path.endswith(_FREE):
        for name, item in value.items():
            yield from _fields(item, f"{path}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from _fields(item, f"{path}[]")
        if not value:
            yield f"{path[1:]}: empty"
    else:
        yield f"{path[1:]}: {_TYPES.get(type(value), 'object')}"


def transcript(server: Server) -> dict[str, list[str]]:
    """Return the requests that a server noted, each with the fields of all their bodies and the types of these."""
    found: dict[str, set[str]] = defaultdict(set)
    for line in server.lines:
        if line.startswith("noted "):
            what, content = json.loads(line.removeprefix("noted "))
            found[what] |= {*_fields(json.loads(content), "")} if content else set()
    return {what: sorted(fields) for what, fields in sorted(found.items())}


def check_transcript(server: Server, client: str) -> None:
    """Check that a client sent what it sent when its transcript was kept."""
    found, path = transcript(server), _KEPT / f"{client}.json"
    if os.environ.get("LLAMA_NPU2_KEEP_TRANSCRIPTS"):
        path.write_text(json.dumps(found, indent=1) + "\n")
    kept = json.loads(path.read_text())
    now, before = ({(what, field) for what in each for field in ["", *each[what]]} for each in (found, kept))
    assert now == before, f"{client} sends {sorted(now - before)}, and no more {sorted(before - now)}"
