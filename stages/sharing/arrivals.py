"""Files of an artifact directory that come from a remote: received all at once, then put where steps leave theirs."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from stages.engine.places import INCOMING, MANIFEST
from stages.engine.project import Project
from stages.sharing.records import Blob, is_here
from stages.sharing.store import Store


class Arrivals:
    """Files by label, on this machine once this is made. Those that the artifact directory has are not received; what
    a process that was stopped had received under the same `name` is not received again. Raises UserError."""

    def __init__(self, store: Store, project: Project, files: Mapping[str, Blob], name: str) -> None:
        self._directory, self._tree, self._incoming = project.directory, project.tree, INCOMING / name
        self._absent = {label: blob for label, blob in files.items() if not is_here(project, label, blob)}
        if self._absent and (manifest := MANIFEST.as_posix()) in files:
            # It goes when the first other file comes.
            self._absent[manifest] = files[manifest]
        self._uses = Counter(self._absent.values())
        self._received = store.receive(self._uses, self._tree, self._incoming)

    @property
    def nbytes(self) -> int:
        """That were received."""
        return sum(blob.size for blob in self._uses)

    def place(self, labels: Iterable[str], work: Path) -> None:
        """Put these of the files below `work`, the artifact directory or a directory in it.

        Those that the artifact directory has already become a second name of it. A link that lies where a file goes is
        replaced, not followed.
        """
        inside = work.relative_to(self._directory)
        for label in labels:
            blob = self._absent.get(label)
            if blob is None:
                if inside.parts:
                    self._tree.link(label, inside / label)
                continue
            self._uses[blob] -= 1
            received = self._received[blob]
            if self._uses[blob]:
                received = received.with_suffix(".copy")
                shutil.copyfile(self._received[blob], received)
            self._tree.take(received, inside / label)

    def done(self) -> None:
        """All is placed."""
        self._tree.remove(self._incoming)
