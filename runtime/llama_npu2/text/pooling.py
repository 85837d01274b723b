"""How a model makes embeddings of hidden states: what sentence-transformers wrote next to its checkpoint."""

from __future__ import annotations

from llama_npu2.artifact.storage import Storage
from llama_npu2.errors import UserError
from llama_npu2.schema import load_json

EMBEDDING = "tokenizer/embedding.json"
"""The file that says it: `pooling`, `normalised` and `others`. Other models have none."""
LAST_TOKEN = "lasttoken"
"""The pooling of the models that are run: the hidden state of the last token."""


def embeds(storage: Storage) -> bool:
    """Return whether a model is made for embeddings, and so writes no text."""
    return storage.find(EMBEDDING) is not None


def check_pooling(storage: Storage) -> bool:
    """Return whether embeddings have length 1. Raises UserError if the model makes none, or in another way."""
    file = storage.find(EMBEDDING)
    try:
        said = load_json(file.read_bytes()) if file else None
    except (OSError, ValueError):
        said = None
    if not isinstance(said, dict):
        raise UserError(f"{storage.path}: this is no embedding model: its checkpoint has no modules.json")
    if said.get("pooling") != [LAST_TOKEN] or said.get("others"):
        raise UserError(f"{storage.path}: embeddings by {said} are not supported: only by {LAST_TOKEN}")
    return bool(said.get("normalised"))
