"""The base classes of requests that generate and requests that pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from aengine.scheduling.sequence import Sequence as TokenSequence
from aengine.scheduling.sequence import Update
from aengine.types import FinishReason


class Request(ABC):
    """A request from its arrival to its end. It may have several sequences: choices, or prompts to pool."""

    __slots__ = ()

    id: str
    ended: bool

    @property
    @abstractmethod
    def sequences(self) -> Sequence[TokenSequence]:
        """The sequences that exist so far."""

    @abstractmethod
    def begin(self) -> None:
        """Note that the first sequence enters the running batch."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """End the request with an error. Does nothing once it has ended."""

    @abstractmethod
    def abort(self) -> None:
        """End the request before it is complete."""


class Owner:
    """The owner of one sequence of a request. It receives the sequence's updates.

    This is not an abstract class, because `isinstance` runs for each token and is slower for abstract classes.
    """

    __slots__ = ()

    request: Request
    finish_reason: FinishReason | None

    def deliver(self, update: Update) -> int:
        """Pass what a step brought to the request's consumer.

        Returns the number of output tokens at which the sequence ends if a stop string matched, else 0.

        Raises `NonFiniteLogitsError` if the model produced NaN or infinity.
        """
        raise NotImplementedError
