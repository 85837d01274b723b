"""What only spares time is saved now and then, and when the process ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stages.engine import saving
from stages.engine.places import python_environment
from stages.engine.saving import Saving


def test_it_is_saved_at_most_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    each = Saving(lambda: saved.append(0))
    for _ in range(10):
        each.soon()
    assert len(saved) == 1
    each.now()
    assert len(saved) == 2
    monkeypatch.setattr(saving, "_PAUSE", 0.0)
    each.soon()
    assert len(saved) == 3


@pytest.mark.parametrize(("end", "status"), [("", 0), ("raise KeyboardInterrupt", -2), ("1 / 0", 1)])
def test_the_last_of_it_is_saved_however_the_process_ends(end: str, status: int) -> None:
    script = f"""
import signal
from stages.engine.saving import Saving
signal.signal(signal.SIGINT, signal.default_int_handler)
known = []
saving = Saving(lambda: print(len(known)))
for number in range(3):
    known.append(number)
    saving.soon()
{end}
"""
    run = subprocess.run([sys.executable, "-c", script], env=python_environment(), capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (status, "1\n3\n")
