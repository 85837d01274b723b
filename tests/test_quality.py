"""What formats of weights lose, theirs and ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_npu2.errors import UserError
from stages.commands import quality
from stages.commands.options import parse_options
from stages.graph import Build
from tests.conftest import needs_llama_cpp

pytestmark = pytest.mark.verify
pytest.importorskip("torch", reason="needs the verify extra: pip install -e '.[verify]'")
pytest.importorskip("transformers", reason="needs the verify extra: pip install -e '.[verify]'")


@needs_llama_cpp
def test_formats_are_measured_beside_those_of_llama_cpp(
    demo: Path, artifacts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Q8_0 has the values of int8, to the last bit; fewer bits lose more; a table and JSON say the same."""
    del demo
    (tmp_path / "text").write_text("The capital of France is Paris. " * 8)
    given = {"artifacts": str(artifacts), "text": str(tmp_path / "text"), "peers": "llama.cpp"}
    quality.run(Build(parse_options(given | {"json": "1"})))
    found = {each.pop("weights"): each for each in json.loads(capsys.readouterr().out)}
    assert found["int8"] == found["llama.cpp Q8_0"] and found["int8"]["bits"] == 8.5
    ours = [found[name] for name in ("int8", "int6", "int4")]
    assert sorted(ours, key=lambda each: -each["bits"]) == sorted(ours, key=lambda each: each["divergence"]) == ours
    assert 4.5 < found["llama.cpp Q4_0"]["bits"] < found["llama.cpp Q4_K_M"]["bits"] < 5.5
    quality.run(Build(parse_options(given)))
    lines = capsys.readouterr().out.splitlines()[3:]
    rows = {name: f"{each['divergence']:.6f}" for name, each in found.items()}
    assert {line.split("|")[1].strip(): line.split("|")[3].split()[0] for line in lines} == rows


def test_peers_without_formats_are_refused(demo: Path, artifacts: Path) -> None:
    del demo
    wanted = Build(parse_options({"artifacts": str(artifacts), "peers": "transformers"}))
    with pytest.raises(UserError, match="peers=transformers: it has no formats of its own: leave it out"):
        next(quality._peers(wanted, []))
