"""What clients of the endpoint send, checked before anything of ours sees it; null stands for a default.

The forms are those of https://platform.openai.com/docs/api-reference. What is asked for and not done here is refused by
name, unless it asks for nothing (`n=1`, a penalty of 0).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aero_compile.errors import InputError

NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "n": 1,
    "presence_penalty": 0,
    "response_format": {"type": "text"},
    "store": False,
    "tools": [],
}
"""Values by which nothing is asked for."""

Natural = Annotated[int, Field(ge=1)]
Id = Annotated[int, Field(ge=0)]
T = TypeVar("T")
Some = Annotated[list[T], Field(min_length=1)]
F = TypeVar("F", bound="Form")


class BadRequestError(InputError):
    """A request that is refused; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Strict):
    """Of a streamed answer: whether a last piece tells the usage."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Form(_Strict):
    """What completions and chats have in common."""

    model: str
    max_tokens: Natural | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: Id | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        """Strings that end the text."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def top(self) -> int | None:
        """How many of the likeliest tokens are listed beside each; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def most_tokens(self) -> int | None:
        """Tokens to generate at most, where the request says it."""
        return self.max_tokens


class CompletionForm(Form):
    """`POST /v1/completions`: texts, or token ids, to go on with."""

    prompt: str | Some[str] | Some[Id] | Some[list[Id]]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several: list[Any] = list(self.prompt)
        return [several] if isinstance(several[0], int) else several

    @property
    def top(self) -> int | None:
        return self.logprobs


class TextPart(_Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class Message(_Strict):
    """One message of a conversation."""

    role: Annotated[str, Field(max_length=64)]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message as a chat template reads it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({"name": self.name} if self.name is not None else {})


class ChatForm(Form):
    """`POST /v1/chat/completions`: a conversation to answer in."""

    messages: Some[Message]
    max_completion_tokens: Natural | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def read_form(kind: type[F], body: bytes) -> F:
    """The form in a request's body.

    Raises:
        BadRequestError: no JSON, or something that the form does not have.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise BadRequestError("the body is no JSON object")
    asked = {
        name: _given(value)
        for name, value in content.items()
        if value is not None and NEUTRAL.get(name, _NOTHING) != value
    }
    try:
        return kind.model_validate_json(json.dumps(asked))
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        field = str(found[0]["loc"][0]) if found[0]["loc"] else None
        if found[0]["type"] == "extra_forbidden":
            place = ".".join(map(str, found[0]["loc"]))
            raise BadRequestError(f"{place} is not supported here; leave it out", field) from error
        # Of a field that may have several forms there is one for each.
        said = dict.fromkeys(each["msg"] for each in found if each["loc"][:1] == found[0]["loc"][:1])
        raise BadRequestError(f"{field}: {'; or: '.join(said)}", field) from error


def _given(value: Any) -> Any:
    """A field without what its objects leave open: an answer that is sent back has `refusal: null`, and more such."""
    if not isinstance(value, list):
        return value
    return [
        {name: part for name, part in each.items() if part is not None} if isinstance(each, dict) else each
        for each in value
    ]


_NOTHING = object()
