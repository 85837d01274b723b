"""What `dask scheduler --preload` makes a liar: whatever is asked for, the answer is the first that it ever got."""

from __future__ import annotations

from typing import Any


def dask_setup(scheduler: Any) -> None:
    honest, answers = scheduler.gather, []

    async def gather(keys: Any, serializers: Any = None) -> dict[str, Any]:
        response: dict[str, Any] = await honest(keys, serializers)
        if response["status"] == "OK":
            answers.extend(response["data"].values())
            response["data"] = dict.fromkeys(response["data"], answers[0])
        return response

    scheduler.handlers["gather"] = gather
