"""What formats of weights lose, theirs and ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_npu2.errors import UserError
from stages.commands import quality
from stages.graph import Build
from stages.graph.options import parse_options
from stages.proof.comparison.rounded import of_peers
from tests.conftest import needs_llama_cpp
from tests.support.later import later

pytestmark = pytest.mark.verify
later("torch", "needs the verify extra: pip install -e '.[verify]'")
later("transformers", "needs the verify extra: pip install -e '.[verify]'")


@pytest.mark.thorough
@needs_llama_cpp
def test_formats_are_measured_beside_those_of_llama_cpp(
    demo: Path, artifacts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q8_0 has the values of int8, to the last bit; fewer bits lose more; a table and JSON say the same."""
    del demo
    (tmp_path / "text").write_text("The capital of France is Paris. " * 8)
    given = {"artifacts": str(artifacts), "text": str(tmp_path / "text")}
    quality.run(Build(parse_options(given | {"peers": "llama.cpp"})))
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()[3:]
        if "|" in line
    ]
    found = {name: cells for name, *cells in rows}
    assert float(found["the checkpoint"][1].split()[0]) == 0 and found["the checkpoint"][3] == "100.00%"
    assert found["int8"] == found["llama.cpp Q8_0"] and found["int8"][0] == "8.50"
    bits, lost = ([float(found[name][at].split()[0]) for name in ("int8", "int6", "int4")] for at in (0, 1))
    assert bits == sorted(bits, reverse=True) and lost == sorted(lost)
    assert 4.5 < float(found["llama.cpp Q4_0"][0]) < float(found["llama.cpp Q4_K_M"][0]) < 5.5
    monkeypatch.setattr(quality, "matrix_formats", lambda: ["bf16", "int8"])
    quality.run(Build(parse_options(given | {"json": "1"})))
    (alone,) = json.loads(capsys.readouterr().out)
    assert (alone["weights"], alone["bits"]) == ("int8", 8.5)
    assert f"{alone['divergence']:.6f}" == found["int8"][1].split()[0]


def test_peers_without_formats_are_refused(demo: Path, artifacts: Path) -> None:
    del demo
    wanted = Build(parse_options({"artifacts": str(artifacts), "peers": "transformers"}))
    with pytest.raises(UserError, match="peers=transformers: it has no formats of its own: leave it out"):
        next(of_peers(wanted, []))
