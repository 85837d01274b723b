"""Files of an artifact directory that come from a remote: first all are received, then they are put into place."""

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
    """Files by label that were received from a remote."""

    def __init__(self, store: Store, project: Project, files: Mapping[str, Blob], name: str) -> None:
        """Receive the files that the artifact directory does not have. Raises UserError.

        Args:
            store: the remote's content.
            project: the artifact directory.
            files: the files by label.
            name: the folder for received files. What a stopped process received under this name is not received again.
        """
        self._directory, self._tree, self._incoming = project.directory, project.tree, INCOMING / name
        self._absent = {label: blob for label, blob in files.items() if not is_here(project, label, blob)}
        if self._absent and (manifest := MANIFEST.as_posix()) in files:
            # It is removed when the first other file is put into place.
            self._absent[manifest] = files[manifest]
        self._uses = Counter(self._absent.values())
        self._received = store.receive(self._uses, self._tree, self._incoming)

    @property
    def nbytes(self) -> int:
        """The bytes that were received."""
        return sum(blob.size for blob in self._uses)

    def place(self, labels: Iterable[str], work: Path) -> None:
        """Put these of the files below `work`, the artifact directory or a directory in it.

        Files that the artifact directory has already get a second name there. A link that lies where a file goes is
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
        """Remove the folder for received files, once all are in place."""
        self._tree.remove(self._incoming)
