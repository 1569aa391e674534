"""The client: `aengine.Engine`'s way of asking, over HTTP."""

from aengine.client.client import Client

__all__ = ["Client"]
