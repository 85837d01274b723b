"""A source that is a repository of the Hugging Face hub."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_npu2.errors import UserError, first_line
from llama_npu2.frozen import frozen
from stages.engine.room import no_room
from stages.model.importers.directory import CONFIG_FILES, INDEX, TOKENIZER_FILES
from stages.model.importers.gguf_parts import part_names, whole_name
from stages.model.sources.source import Listed, Source

_PATTERNS = (*CONFIG_FILES, "model*.safetensors", "gptq_model*.safetensors", INDEX, *TOKENIZER_FILES)


@frozen
class HubSource(Source):
    repo: str
    revision: str

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.repo.replace("/", "--")

    def identity(self) -> Mapping[str, Any]:
        return {"kind": "hub", "repo": self.repo, "revision": self.revision}

    @property
    def pinned(self) -> bool:
        return re.fullmatch(r"[0-9a-f]{40}", self.revision) is not None

    @property
    def anywhere(self) -> bool:
        return self.pinned

    def is_public(self) -> bool:
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(self.repo, revision=self.revision, timeout=10, token=False)
        except Exception:  # any failure means that it cannot be seen without a token
            return False
        return not info.private and not info.gated

    def config_files(self) -> list[Path]:
        directory = self._download(CONFIG_FILES)
        return [path for name in CONFIG_FILES if (path := directory / name).is_file()]

    @property
    def patterns(self) -> Sequence[str]:
        """The files that are downloaded."""
        return _PATTERNS

    def fetch(self) -> Path:
        """Download what is missing into the Hugging Face cache (resumes; token from the usual places)."""
        path = self._download(self.patterns)
        self.check(path)
        return path

    def check(self, path: Path) -> None:
        """Raise UserError where a download does not have what it has to."""
        if not (path / CONFIG_FILES[0]).is_file():
            raise self.other_format()

    def other_format(self) -> UserError:
        """Return the error about a repository that is not in Hugging Face format."""
        return UserError(
            f"model {self.repo} has no {CONFIG_FILES[0]}: model= takes a repository in Hugging Face format, or a GGUF "
            f"file in one, as {self.repo}/NAME.gguf"
        )

    def inventory(self) -> Mapping[str, Listed]:
        from huggingface_hub import HfApi, try_to_load_from_cache
        from huggingface_hub.utils import filter_repo_objects

        with self._explained():
            info = HfApi().model_info(self.repo, revision=self.revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        return {
            name: Listed(sizes[name], isinstance(try_to_load_from_cache(self.repo, name, revision=info.sha), str))
            for name in filter_repo_objects(sizes, allow_patterns=list(self.patterns))
        }

    def _download(self, patterns: Sequence[str]) -> Path:
        from huggingface_hub import snapshot_download

        from stages.engine.bar import Bar

        with self._explained():
            path = snapshot_download(self.repo, revision=self.revision, allow_patterns=list(patterns), tqdm_class=Bar)
        return Path(path)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn what the hub's client raises into UserError."""
        from huggingface_hub import constants, errors

        where = f"model {self.repo} (revision {self.revision})"
        try:
            yield
            return
        except errors.GatedRepoError:
            licence = f"accept its licence at https://huggingface.co/{self.repo}"
            why = f" is gated: {licence}, then run `hf auth login` or set HF_TOKEN"
        except errors.RevisionNotFoundError:
            why = ": no such revision, check revision="
        except errors.RepositoryNotFoundError:
            why = " does not exist or is private: check the name, or run `hf auth login` / set HF_TOKEN"
        except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
            why = " is not in the local cache and the hub cannot be reached: check the network"
        except (errors.HfHubHTTPError, OSError, RuntimeError) as error:
            full = no_room(error, [Path(constants.HF_HUB_CACHE)], elsewhere="set HF_HOME to another place")
            why = f": {full or f'download failed ({first_line(error)}): run the command again to resume'}"
        raise UserError(where + why) from None


@frozen
class HubGguf(HubSource):
    """A GGUF file in a repository of the hub, or the first of its parts."""

    file: str
    """Its path in the repository."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{super().name}--{whole_name(self.file).removesuffix('.gguf').replace('/', '--')}"

    def identity(self) -> Mapping[str, Any]:
        return {**super().identity(), "file": self.file}

    def config_files(self) -> list[Path]:
        return []

    @property
    def patterns(self) -> Sequence[str]:
        directory, _, name = self.file.rpartition("/")
        return [f"{directory}/{part}".lstrip("/") for part in part_names(name)]

    def fetch(self) -> Path:
        return super().fetch() / self.patterns[0]

    def check(self, path: Path) -> None:
        if not (path / self.patterns[0]).is_file():
            raise UserError(f"model {self.repo} (revision {self.revision}) has no file {self.file}: check the name")
