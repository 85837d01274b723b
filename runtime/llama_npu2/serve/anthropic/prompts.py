"""What requests to Anthropic's API say, as chat templates take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llama_npu2.serve.conversation import THINKS
from llama_npu2.serve.failures import RequestError
from llama_npu2.serve.tools import Choice, Tools

BILLING = "x-anthropic-billing-header:"
"""What the line begins with by which Claude Code says for billing who asks: it may differ in each request."""

Block = Mapping[str, Any]


def messages_of(
    asked: Mapping[str, Any], keeps_billing_header: bool, joins_results: bool = False
) -> list[dict[str, Any]]:
    """Return the messages of a request's chat template: at most one of the system, then those of the others.

    Messages of one role that follow each other become one. Results of tools come before the text beside them.

    Args:
        asked: the request.
        keeps_billing_header: whether the line that begins with `BILLING` stays where the system's text begins with it.
        joins_results: whether what a user says after a tool's result becomes a part of that. Some templates (Mistral's)
            refuse messages of users that do not follow one of the assistant.

    Raises:
        RequestError: for a result of a call that no message before it has.
    """
    system = [block["text"] for block in _blocks(asked.get("system", []))]
    if system and system[0].startswith(BILLING) and not keeps_billing_header:
        _, _, system[0] = system[0].partition("\n")
        system = system[0 if system[0] else 1 :]
    said = _Said(joins_results)
    for at, message in enumerate(asked["messages"]):
        blocks = _blocks(message["content"])
        if message["role"] == "assistant":
            said.by_assistant(blocks)
        elif message["role"] == "user":
            said.by_user(blocks, f"messages[{at}]")
        elif said.messages:
            said.by_system(blocks)
        else:
            system += [block["text"] for block in blocks]
    return ([{"role": "system", "content": "\n".join(system)}] if system else []) + said.messages


def _blocks(content: str | Sequence[Block]) -> Sequence[Block]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(blocks: Sequence[Block], kind: str = "text") -> str:
    """Return the texts of one kind of block."""
    return "\n".join(block[kind] for block in blocks if block["type"] == kind)


class _Said:
    """What users, tools and the assistant say in turn."""

    def __init__(self, joins_results: bool) -> None:
        self._joins_results = joins_results
        self.messages: list[dict[str, Any]] = []
        self._called: dict[str, str] = {}
        """The names of the tools that were called, by the ids of the calls."""

    def _add(self, role: str, **texts: str) -> dict[str, Any]:
        """Add to the last message if that has the role, else a new one; return it."""
        last = self.messages[-1]["role"] if self.messages else ""
        if last != role and not (self._joins_results and (last, role) == ("tool", "user")):
            self.messages.append({"role": role, "content": ""})
        message = self.messages[-1]
        message |= {name: "\n".join(filter(None, (message.get(name), text))) for name, text in texts.items()}
        return message

    def by_user(self, blocks: Sequence[Block], where: str) -> None:
        """Add what a user says, after results of tools. Raises RequestError."""
        for at, block in enumerate(blocks):
            if block["type"] == "tool_result":
                if (called := self._called.get(block["tool_use_id"])) is None:
                    field = f"{where}.content[{at}].tool_use_id"
                    raise RequestError(400, "no message before has a call with this id", field)
                result = {"role": "tool", "tool_call_id": block["tool_use_id"], "name": called}
                self.messages.append({**result, "content": _result(block)})
        if any(block["type"] == "text" for block in blocks):
            self._add("user", content=_text(blocks))

    def by_system(self, blocks: Sequence[Block]) -> None:
        """Add what the system says in the midst of a conversation.

        Many templates refuse that, and some leave it out. The marks are those that Claude Code explains to models.
        """
        self._add("user", content=f"<system-reminder>\n{_text(blocks)}\n</system-reminder>")

    def by_assistant(self, blocks: Sequence[Block]) -> None:
        """Add what the model said, thought and called."""
        thought = _text(blocks, "thinking")
        message = self._add("assistant", content=_text(blocks), **({"reasoning_content": thought} if thought else {}))
        if calls := [_call(block) for block in blocks if block["type"] == "tool_use"]:
            message.setdefault("tool_calls", []).extend(calls)
            self._called |= {call["id"]: call["function"]["name"] for call in calls}


def _call(block: Block) -> dict[str, Any]:
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: Block) -> str:
    """Return the text of a tool's result. Templates have no mark for errors."""
    said = _text(_blocks(block.get("content") or []))
    return f"Error: {said}" if block.get("is_error") and not said.lower().startswith("error") else said


def tools_of(asked: Mapping[str, Any]) -> Tools:
    """Return the tools of a request. Raises RequestError if `tools` and `tool_choice` do not fit."""
    functions = [*map(_function, asked.get("tools", []))]
    wanted = asked.get("tool_choice", {"type": "auto"})
    if wanted["type"] == "tool":
        return Tools(functions, Choice(True, wanted["name"], "tool_choice.name"))
    # The names are checked of tools that are left out, too.
    several = wanted.get("disable_parallel_tool_use") is False
    found = Tools(functions, Choice(wanted["type"] == "any", several=several))
    return Tools() if wanted["type"] == "none" else found


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(tool["input_schema"])
    if examples := tool.get("input_examples"):
        parameters["examples"] = examples
    described = {"description": tool["description"]} if tool.get("description") else {}
    return {"name": tool["name"], **described, "parameters": parameters}


_EFFORTS = {"xhigh": "high", "max": "high"}
"""What templates know instead of efforts that they do not know."""


def variables_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of chat templates that say how a model is to think."""
    found: dict[str, Any] = {}
    if thinking := asked.get("thinking"):
        found |= dict.fromkeys(THINKS, thinking["type"] != "disabled")
    if effort := asked.get("output_config", {}).get("effort"):
        found["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return found
