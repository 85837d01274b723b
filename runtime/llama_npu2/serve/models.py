"""The models of a server by name: which of them are loaded, and for how long."""

from __future__ import annotations

import asyncio
import math
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llama_npu2.artifact.manifest import Manifest
from llama_npu2.engine.llama import Llama
from llama_npu2.errors import UserError, suggestion
from llama_npu2.frozen import frozen
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.model import Loaded, Model

_LATEST = ":latest"
"""The tag that clients of Ollama add to names without one."""


@frozen
class Keeping:
    """How models are loaded and kept."""

    open: Callable[[Path], Llama]
    """Loads a model. Raises UserError."""
    memory: float = math.inf
    """The most bytes that models take which are loaded at the same time."""
    keep_alive: float = math.inf
    """Seconds that a model stays loaded without requests."""
    most_replies: int = 64
    """As for `Model`."""
    kv_memory: int = 0
    """As for `Model`."""


class Models:
    """The models that requests can name. One at a time is loaded or unloaded, in a thread of its own."""

    def __init__(self, manifests: Sequence[Manifest], keeping: Keeping) -> None:
        """Raises UserError if one of them cannot be used. None is loaded."""
        self._keeping = keeping
        self._models = {
            name: Model(name, manifest, self, keeping.most_replies, keeping.kv_memory)
            for name, manifest in zip(distinct_names(manifests), manifests, strict=True)
        }
        self._lock = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, "llama-npu2 load")
        self._loading: dict[str, asyncio.Task[RequestError | None]] = {}
        self._idle_timers: dict[str, asyncio.TimerHandle] = {}
        self._unloading: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def named(self, name: str) -> Model:
        """Return a model. Raises RequestError if there is none of that name."""
        found = self._models.get(name) or self._models.get(name.removesuffix(_LATEST))
        if not found:
            message = f"there is no model {name}: {suggestion(name[:100], list(self._models))}"
            raise RequestError(404, message, "model", "model_not_found")
        return found

    def expires_in(self, model: Model) -> float:
        """Return in how many seconds a loaded model is unloaded if no request comes."""
        if not model.holds and (timer := self._idle_timers.get(model.name)):
            return max(timer.when() - asyncio.get_running_loop().time(), 0.0)
        return self._keep_alive_of(model)

    def _keep_alive_of(self, model: Model) -> float:
        return self._keeping.keep_alive if model.keep_alive is None else model.keep_alive

    def use(self, model: Model, llm: Llama) -> None:
        """Take a model that is loaded already. Raises UserError if it does not fit."""
        if model.memory > self._keeping.memory:
            raise UserError(f"{self._takes(model)}: give more memory=, or serve a smaller model first")
        model.loaded, model.loads = Loaded.of(llm), 1
        self.start_idle_timer(model)

    def _takes(self, model: Model) -> str:
        return f"{model.name} takes {_mib(model.memory)} of memory, models have {_mib(self._keeping.memory)}"

    def expire(self, model: Model) -> None:
        """Unload a model as soon as no request holds it."""
        model.keep_alive = 0.0
        if not model.holds:
            self.start_idle_timer(model)

    async def load(self, model: Model) -> None:
        """Load a model, once for all requests that wait for it. Raises RequestError."""
        if model.name not in self._loading:
            self._loading[model.name] = asyncio.ensure_future(self._load(model))
        # A request that goes away does not end what others wait for.
        if error := await asyncio.shield(self._loading[model.name]):
            raise RequestError(error.status, error.message, code=error.code, headers=error.headers)

    async def _load(self, model: Model) -> RequestError | None:
        try:
            async with self._lock:
                if model.holds and not model.usable:  # its requests may have gone away while others were loaded
                    await self._close(model)
                    await self._make_room(model)
                    model.loaded = await self._in_thread(lambda: self._opened(model))
                    model.loads += 1
                    model.failed = False
        except RequestError as error:
            return error
        except Exception as error:
            model.failed = True
            if isinstance(error, UserError):
                print(f"{model.name} cannot be loaded: {error}", file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
            return RequestError(503, f"{model.name} cannot be loaded: the server's log says why", code="not_loaded")
        finally:
            del self._loading[model.name]
            if not model.holds:
                self.start_idle_timer(model)
        return None

    def _opened(self, model: Model) -> Loaded:
        llm = self._keeping.open(model.manifest.directory)
        try:
            if llm.manifest.content != model.manifest.content:
                raise UserError(f"{model.manifest.directory} has changed since the server started: restart it")
            return Loaded.of(llm)
        except BaseException:
            llm.close()
            raise

    async def _make_room(self, model: Model) -> None:
        """Unload models without requests, the one first that was asked for longest ago. Raises RequestError."""
        most = self._keeping.memory
        busy = sum(each.memory for each in self if each.loaded and each.holds)
        if busy + model.memory > most:
            if model.memory > most:
                raise RequestError(503, f"{self._takes(model)}: start the server with more", code="out_of_memory")
            message = f"{self._takes(model)}, and {_mib(busy)} of it have requests: come again soon"
            raise RequestError(503, message, code="out_of_memory", headers={"retry-after": "5"})
        while sum(each.memory for each in self if each.loaded) + model.memory > most:
            idle = [each for each in self if each.loaded and not each.holds]
            if not idle:  # requests for one came while another was unloaded
                return await self._make_room(model)
            await self._close(min(idle, key=lambda each: each.used))
        return None

    async def _close(self, model: Model) -> None:
        """Unload a model, if it is loaded."""
        if timer := self._idle_timers.pop(model.name, None):
            timer.cancel()
        if parts := model.given_up():
            await self._in_thread(parts.llm.close)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def start_idle_timer(self, model: Model) -> None:
        """Unload a model that no request holds, once it was kept for long enough."""
        loop = asyncio.get_running_loop()
        model.used = loop.time()
        if timer := self._idle_timers.pop(model.name, None):
            timer.cancel()
        if model.loaded and (seconds := self._keep_alive_of(model)) < math.inf:
            self._idle_timers[model.name] = loop.call_later(seconds, self._expire, model)

    def _expire(self, model: Model) -> None:
        del self._idle_timers[model.name]
        self._start(self._unloaded(model))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _unloaded(self, model: Model) -> None:
        async with self._lock:
            if not model.holds and model.name not in self._idle_timers:
                await self._close(model)

    async def __aenter__(self) -> Models:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Unload all models."""
        async with self._lock:
            for model in self:
                await self._close(model)
                model.close()
        self._thread.shutdown()


def distinct_names(manifests: Sequence[Manifest]) -> list[str]:
    """Return a name for each model. Raises UserError if two are the same.

    The first of several with the same name has that name. The others have a tag besides: the end of the directory's
    path, as much of it as tells them apart.
    """
    groups: dict[str, list[Path]] = {}
    for manifest in manifests:
        groups.setdefault(manifest.model["name"], []).append(manifest.directory.resolve())
    names = []
    for manifest in manifests:
        name, place = str(manifest.model["name"]), manifest.directory.resolve()
        group = groups[name]
        if group.count(place) > 1:
            raise UserError(f"{manifest.directory} is given twice: leave it out once")
        depths = range(1, len(place.parts) + 1)
        depth = next(depth for depth in depths if len({each.parts[-depth:] for each in group}) == len(group))
        names.append(name if place == group[0] else f"{name}:{'/'.join(place.parts[-depth:])}")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two models have the name {twice}: leave one out")
    return names


def _mib(count: float) -> str:
    return f"{count / 2**20:.0f} MiB"
