"""`GET /metrics`: counts and times for Prometheus, in its text format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from llama_npu2.engine.batch.sequence import Counts
from llama_npu2.serve.model import Model, Times

_VERSION = "text/plain; version=0.0.4; charset=utf-8"

_COUNTS: dict[str, tuple[str, Callable[[Model], int]]] = {
    "prompt_tokens_total": ("Tokens of prompts that were processed.", lambda model: model.counters.prompt_tokens),
    "cached_tokens_total": ("Tokens of prompts that the cache held.", lambda model: model.counters.cached_tokens),
    "generated_tokens_total": ("Tokens that were generated.", lambda model: model.counters.generated_tokens),
    "replies_total": ("Replies that have ended.", lambda model: model.counters.replies),
    "put_off_total": ("Requests that were told to come again.", lambda model: model.counters.put_off),
    "replies_under_way": ("Replies that are under way.", lambda model: model.under_way),
    "replies_most": ("Replies that may be under way.", lambda model: model.most_replies),
    "loads_total": ("How often the model was loaded.", lambda model: model.loads),
    "loaded": ("1 while the model is loaded, else 0.", lambda model: int(model.usable)),
}
_TIMES: dict[str, tuple[str, Callable[[Model], Times]]] = {
    "first_token_seconds": ("Time to the first token of a reply.", lambda model: model.counters.first),
    "each_token_seconds": ("Time of each token of a reply after the first.", lambda model: model.counters.each),
}


def _of_engine(name: str, model: Model) -> int:
    count: int = getattr(model.counts, name)
    return count


_ENGINE = {
    f"engine_{each.name}_total": (each.metadata["of"], partial(_of_engine, each.name)) for each in fields(Counts)
}


def _lines(models: list[Model]) -> Iterator[str]:
    for short, (sentence, count) in (_COUNTS | _ENGINE).items():
        name = f"llama_npu2_{short}"
        yield f"# HELP {name} {sentence}"
        yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
        for model in models:
            yield f"{name}{{{_label(model)}}} {count(model)}"
    for short, (sentence, times) in _TIMES.items():
        name = f"llama_npu2_{short}"
        yield f"# HELP {name} {sentence}"
        yield f"# TYPE {name} histogram"
        for model in models:
            found, label = times(model), _label(model)
            for bound, within in (*found.within.items(), ("+Inf", found.count)):
                yield f'{name}_bucket{{{label},le="{bound}"}} {within}'
            yield f"{name}_sum{{{label}}} {found.sum:.6f}"
            yield f"{name}_count{{{label}}} {found.count}"


def _label(model: Model) -> str:
    return f"model={json.dumps(model.name)}"


async def metrics(request: Request) -> Response:
    """Return counts and times for Prometheus."""
    return PlainTextResponse("".join(f"{line}\n" for line in _lines([*request.app.models])), media_type=_VERSION)


ROUTES = [Route("/metrics", metrics, methods=["GET"])]
