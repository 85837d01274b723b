"""What a request is answered with that cannot be done."""

from __future__ import annotations

from collections.abc import Mapping

from llama_npu2.errors import UserError
from llama_npu2.options import OptionError


class RequestError(Exception):
    """A request that is refused. Each API puts it into its own form."""

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Args: `field` is the path of the field that is wrong, `code` a word for programs to recognise."""
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code
        self.headers = dict(headers or {})

    @classmethod
    def of(cls, error: UserError, field: str | None = None) -> RequestError:
        """Return the refusal of something that a request asked for and that the model cannot do."""
        return cls(400, str(error), error.name if isinstance(error, OptionError) else field)


class TooLongError(RequestError):
    """A prompt that leaves no room for a reply."""

    def __init__(self, tokens: int | None, most: int, remedy: str, field: str) -> None:
        """Set it up.

        Args:
            tokens: of the prompt; None if it has so much text that these were not counted.
            most: what the context has room for, in tokens.
            remedy: what to do.
            field: the path of the field that has the prompt.
        """
        count = "more" if tokens is None else tokens
        message = f"the prompt has {count} tokens, the context is {most}: {remedy}"
        super().__init__(400, message, field, "context_length_exceeded")
        self.tokens, self.most, self.remedy = tokens, most, remedy


def engine_failed() -> RequestError:
    """Return the refusal of what an engine that has failed cannot do. The next request gets another engine."""
    return RequestError(503, "the engine has failed: the server's log says how, come again")


def server_failed() -> RequestError:
    """Return the refusal of a request that met an error of this program."""
    return RequestError(500, "the server has failed: its log says how")


class GoneError(Exception):
    """The client has closed the connection: nobody waits for an answer."""
