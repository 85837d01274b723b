"""The models of a server by name."""

from __future__ import annotations

from collections.abc import Iterator

from llama_npu2.errors import suggestion
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.model import Model


class Models:
    """The models that requests can name."""

    def __init__(self, *models: Model) -> None:
        self._models = {model.name: model for model in models}

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def named(self, name: str) -> Model:
        """Return a model. Raises RequestError if there is none of that name."""
        if name not in self._models:
            message = f"there is no model {name}: {suggestion(name[:100], list(self._models))}"
            raise RequestError(404, message, "model", "model_not_found")
        return self._models[name]
