"""Models and servers that tests of several APIs ask. A file that needs others has fixtures of these names itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llama_npu2 import Llama, load
from tests.conftest import build
from tests.support.caller import write_caller
from tests.support.serving import Server, serving

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="module")
def llm(demo: Path) -> Iterator[Llama]:
    with closing(load(demo)) as model:
        yield model


@pytest.fixture(scope="module")
def server(demo: Path) -> Iterator[Server]:
    with serving(demo) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def caller(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifacts of the model that calls tools."""
    write_caller(checkpoint := tmp_path_factory.mktemp("caller") / "caller")
    return build(checkpoint, artifacts)


@pytest.fixture(scope="module")
def calling(caller: Path) -> Iterator[Server]:
    """A server of the model that calls tools."""
    with serving(caller) as running:
        yield running
