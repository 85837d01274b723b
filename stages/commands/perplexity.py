"""`doit perplexity`: how well an artifact directory, as it runs, predicts a text.

`recipe=transformers` and `recipe=llama.cpp` choose windows as those programs do: see
`stages.proof.comparison.perplexity`. `window=` is their length, `stride=` the distance between them.
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from llama_npu2 import load
from stages.graph import Build
from stages.proof.comparison import divergence
from stages.proof.comparison.perplexity import begin, measure, side_by_side, strided


def run(build: Build) -> None:
    """Print the perplexity of a text. Raises UserError."""
    options = build.options
    text = Path(options.text) if options.text else divergence.TEXT
    with closing(load(build.directory, options.threads, options.second_copy)) as llm:
        window = min(options.window, llm.context_length)
        ids = llm.encode(divergence.read_text(text), raw=True)
        if options.recipe == "llama.cpp":
            stride, windows = window, side_by_side(ids, window, begin(llm))
        else:
            stride = options.stride or window // 2
            windows = strided(ids, window, stride)
        result = measure(llm, list(windows))
    if options.json:
        about = {"artifact": build.artifact, "text": text.name, "recipe": options.recipe, "window": window}
        print(json.dumps(about | {"stride": stride} | asdict(result) | {"rate": result.rate}), flush=True)
    else:
        print(f"{text.name}, windows of {window}, {stride} apart, as {options.recipe}: {result}", flush=True)
