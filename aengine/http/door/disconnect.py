"""Cancels a request's handler when its client disconnects, from the end of its body to the end of the answer.

An ASGI server tells of a disconnect only through `receive()`: `send()` to a client that left just succeeds, and a
handler is not cancelled. So one task per request waits there, whether its prompt is being tokenized, stands in a
queue or is being answered.
"""

from __future__ import annotations

import anyio
from anyio.abc import TaskGroup
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_KEY = "aengine.client"  # in the ASGI scope


class DisconnectMiddleware:
    """Cancels the application, whose answer then goes nowhere; a request whose body is never read is not watched."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            client = scope[_KEY] = _Client(receive, send, tasks)
            try:
                await self._app(scope, client.receive, client.send)
            except Exception as error:  # noqa: BLE001 - raised below, as it is instead of in a group
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure


def client_disconnected(scope: Scope) -> bool:
    """Whether the handler is cancelled because its client disconnected."""
    client: _Client = scope[_KEY]
    return client.left


class _Client:
    def __init__(self, receive: Receive, send: Send, tasks: TaskGroup) -> None:
        self._receive = receive
        self._send = send
        self._tasks = tasks
        self._body_ended = False
        self._answered = False  # the last message is on its way: there is nothing left to cancel
        self.left = False

    async def receive(self) -> Message:
        if self._body_ended:
            await anyio.sleep_forever()  # what would come next cancels
        message = await self._receive()
        if not message.get("more_body", False):
            self._body_ended = True
            if message["type"] == "http.request":
                self._tasks.start_soon(self._watch)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._answered = True
        await self._send(message)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True
        if not self._answered:
            self._tasks.cancel_scope.cancel()
