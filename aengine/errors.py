"""Every error that aengine raises on purpose, in one tree.

AengineError
├── ConfigError              a knob has a value that cannot work (also a ValueError)
├── CheckpointError          config.json, weights or tokenizer cannot be used
│   ├── UnsupportedModelError    an architecture or feature this engine does not know
│   ├── WeightsError             a tensor is missing, unexpected, misshapen, or its file is damaged
│   ├── HubError                 a Hugging Face id could not be resolved to a folder
│   └── AdapterError             an adapter's files cannot be used, or not with this model
├── InvalidRequestError      a request that can never be served in this form (also a ValueError)
│   └── ContextLengthError       prompt + max_tokens does not fit into the context or the KV pool
├── ModelNotFoundError       the request names a model that this server does not serve
├── QueueFullError           more requests are waiting than the bound allows; retry later
├── EngineNotReadyError      the weights are still loading, or the engine is asleep
├── EngineClosedError        the engine was closed while the request was waiting or running
│   └── RequestAbortedError      this request alone was aborted by its id
├── EngineFailedError        the request's step failed, or the whole engine did
│   ├── NonFiniteLogitsError     the model produced NaN or infinity for this request alone
│   └── DeviceLostError          the device refuses all further work; only a new process helps
└── ServerError              a client's server cannot be reached, or answers in an unknown way
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class AengineError(Exception):
    """Base of all errors that aengine raises on purpose."""


class ConfigError(AengineError, ValueError):
    """A knob's value cannot work. The message names the knob and the remedy."""


class CheckpointError(AengineError):
    """A checkpoint's files cannot be used. The message names the file and the defect."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint asks for an architecture or feature that this engine does not know."""


class WeightsError(CheckpointError):
    """A parameter is missing, unexpected or misshapen, or a weights file is damaged."""


class HubError(CheckpointError):
    """A Hugging Face id could not be resolved to a local folder."""


class AdapterError(CheckpointError):
    """An adapter cannot be applied exactly, or its files are damaged. The message names the field and the remedy."""


class InvalidRequestError(AengineError, ValueError):
    """A request that can never be served in this form. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """Prompt plus requested tokens do not fit into the context or into the KV pool."""


class ModelNotFoundError(AengineError):
    """The request names a model that is not served here."""


class QueueFullError(AengineError):
    """The waiting queue is at its bound. `retry_after` is a hint in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineNotReadyError(AengineError):
    """The engine is still loading, or asleep."""


class EngineClosedError(AengineError):
    """The engine was closed while the request was waiting or running."""


class RequestAbortedError(EngineClosedError):
    """The request was aborted by its id. Other requests continue."""


class EngineFailedError(AengineError):
    """The request's step failed, or the whole engine did."""


class NonFiniteLogitsError(EngineFailedError):
    """The model produced NaN or infinity for this request. Other requests continue."""


class DeviceLostError(EngineFailedError):
    """The device is in a permanent error state. The engine has ended, and its process should end too."""


class ServerError(AengineError):
    """The server cannot be reached, or answers in an unknown way. `status` and `code` are those of its answer."""

    def __init__(self, message: str, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@contextmanager
def renamed_param(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the parameters in `InvalidRequestError`s within the context. names: our name -> the caller's name."""
    try:
        yield
    except InvalidRequestError as error:
        name, message = names.get(error.param or "", error.param), str(error)
        if name is None or name == error.param:
            raise
        if isinstance(error, ContextLengthError):  # clients match the beginning of its message
            raise ContextLengthError(re.sub(rf"\b{error.param}\b", name, message), name) from None
        message = message.removeprefix(f"{error.param}: ")
        without_name = message.removeprefix(f"{error.param} ")
        raise type(error)(f"{name}: {message}" if without_name == message else f"{name} {without_name}", name) from None
