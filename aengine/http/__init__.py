"""The HTTP layer: parses and validates requests, submits them to an engine, encodes the answers. It knows no torch."""

from aengine.http.engine_like import EngineLike, StreamLike
from aengine.http.hypercorn.in_flight import InFlight
from aengine.http.routes import http_app
from aengine.http.state import ServerState

__all__ = ["EngineLike", "InFlight", "ServerState", "StreamLike", "http_app"]
