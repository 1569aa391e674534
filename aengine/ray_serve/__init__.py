"""Replicas of the engine on Ray Serve: `serve run aengine.ray_serve:app`, or `build(...)` in a Serve config.

A request passes Ray's HTTP proxy and the ingress, which reads the body and hashes the prompt's prefixes. One engine
answers it with the application that a single server runs. Ray places engines, restarts, drains and scales them. This
package chooses the engine for each request (`routing`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, str]) -> Application:
    """Return the application for `serve run aengine.ray_serve:app model=... replicas=2`. Each knob is an argument."""
    return build(**args)


def build(**knobs: Any) -> Application:
    """Return a Serve application: engines behind an ingress.

    The knobs are those of `EngineConfig`, `ServerConfig` and `ReplicasConfig`. Raises `ConfigError`, which names the
    knob, or says that Ray is missing.
    """
    from aengine.errors import ConfigError

    try:
        from aengine.ray_serve.deploy import application
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("replicas need Ray Serve: pip install '.[ray]' in aengine's folder") from None
    return application(knobs)
