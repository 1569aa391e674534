"""The HTTP client with the API of `aengine.Engine`."""

from aengine.client.client import Client

__all__ = ["Client"]
