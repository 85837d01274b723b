"""Files of an artifact directory that come from a remote: received all at once, then put where steps leave theirs."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from stages.engine.places import INCOMING, MANIFEST
from stages.engine.steps import Project
from stages.sharing.records import Blob, is_here
from stages.sharing.store import Store


class Arrivals:
    """Files by label, on this machine once this is made. Those that the artifact directory has are not received; what
    a process that was stopped had received under the same `name` is not received again. Raises UserError."""

    def __init__(self, store: Store, project: Project, files: Mapping[str, Blob], name: str) -> None:
        self._directory = project.directory
        self._incoming = project.place((INCOMING / name / "file").as_posix()).parent
        self._absent = {label: blob for label, blob in files.items() if not is_here(project, label, blob)}
        if self._absent and (manifest := MANIFEST.as_posix()) in files:
            # It goes when the first other file comes.
            self._absent[manifest] = files[manifest]
        self._uses = Counter(self._absent.values())
        self._received = store.receive(self._uses, self._incoming)

    @property
    def nbytes(self) -> int:
        """That were received."""
        return sum(blob.size for blob in self._uses)

    def place(self, labels: Iterable[str], work: Path) -> None:
        """Put these of the files below `work`; those that the artifact directory has by a link."""
        for label in labels:
            place, blob = work / label, self._absent.get(label)
            place.parent.mkdir(parents=True, exist_ok=True)
            if blob is None:
                if not place.exists():
                    place.hardlink_to(self._directory / label)
            elif self._uses[blob] > 1:
                shutil.copyfile(self._received[blob], place)
            else:
                self._received[blob].replace(place)

    def done(self) -> None:
        """All is placed."""
        shutil.rmtree(self._incoming)
