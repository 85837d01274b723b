"""`doit quality`: how much a model loses by each format of its weights, against its checkpoint, over a text.

Only formats are compared: their values in float32, ours and those of files that llama.cpp makes
(`stages.proof.comparison.divergence`).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from llama_npu2.artifact.storage import Directory
from llama_npu2.cli.table import Table
from llama_npu2.text.tokenizer import Tokenizer
from stages.graph import Build
from stages.model.checkpoint import Checkpoint
from stages.model.policy import matrix_formats, parse_policy
from stages.proof.comparison import transformers_model
from stages.proof.comparison.divergence import ALL_WINDOWS, TEXT, WINDOWS, Quality, measure, read_text, windows
from stages.proof.comparison.rounded import of_peers, ours

_WIDTHS = {"weights": 24, ">bits": 5, "mean KL divergence": 32}
_WIDTHS |= dict.fromkeys((">99.9th percentile", ">same best token", ">perplexity"), 0)
TABLE = Table(_WIDTHS.items(), markdown=True)
LEGEND = (
    "bits: of a matrix's weight on average, scales included. int4 keeps the embedding and the LM head in int6\n"
    "(weights=int4,vocab=int4 does not). Divergence is in nats, with its 95 % interval."
)


def run(build: Build) -> None:
    """Print a table, or JSON, of the formats that weights= names, or of all; with peers=llama.cpp of its files too."""
    options, source = build.options, Checkpoint.open(build.source.fetch()).within(build.context)
    tokenizer = Tokenizer.open(Directory(build.directory))
    ids = tokenizer.encode(read_text(Path(options.text) if options.text else TEXT), special_tokens=True)
    parts = windows(ids, ALL_WINDOWS if options.full else WINDOWS, source.config.max_seq)
    chosen = [options.weights] if options.weights else [name for name in matrix_formats() if name != "bf16"]
    policies = [parse_policy(text, activations=options.activations) for text in chosen]
    # List all of them first, so that what is missing is refused at once.
    compared = [*ours(build, source, policies), *of_peers(build, policies)]
    exact, results = list(transformers_model.logits(source, source.tensor, parts)), []
    if not options.json:
        print(f"against the checkpoint in float32, {sum(map(len, parts))} tokens\n{TABLE.header()}", flush=True)
        print(_row("the checkpoint", "", measure(exact, exact, parts)), flush=True)
    for rounded in compared:
        lost = measure(transformers_model.logits(source, rounded.values, parts, inputs=rounded.inputs), exact, parts)
        results.append({"weights": rounded.name, "bits": rounded.bits} | asdict(lost))
        if not options.json:
            print(_row(rounded.name, f"{rounded.bits:.2f}", lost), flush=True)
    print(json.dumps(results) if options.json else f"\n{LEGEND}")


def _row(name: str, bits: str, lost: Quality) -> str:
    low, high = lost.interval
    mean = f"{lost.divergence:.6f} ({low:.6f} to {high:.6f})"
    return TABLE.row(name, bits, mean, f"{lost.tail:.4f}", f"{lost.same:.2%}", f"{lost.perplexity:.3f}")
