"""The HTTP layer: it reads requests, submits them to an engine and encodes the answers. It does not import torch."""

from aengine.http.engine_like import EngineLike, StreamLike
from aengine.http.hypercorn.in_flight import InFlight
from aengine.http.routes import http_app
from aengine.http.state import ServerState

__all__ = ["EngineLike", "InFlight", "ServerState", "StreamLike", "http_app"]
