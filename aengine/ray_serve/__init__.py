"""Replicas of the engine on Ray Serve: `serve run aengine.ray_serve:app`, or `build(...)` in a Serve config.

A request passes Ray's HTTP proxy, the ingress (it reads the body and hashes the prompt's beginning) and one engine,
which answers it with the very application that a single server runs. Ray places engines, starts those that died anew,
drains and scales them; which of them gets a request is this package's own choice (`routing`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: dict[str, str]) -> Application:
    """The application for `serve run aengine.ray_serve:app model=... replicas=2 gpus=1`; each knob is an argument."""
    return build(**args)


def build(**knobs: Any) -> Application:
    """A Serve application of some engines behind one ingress.

    The knobs are those of an engine, of a server and of `ReplicasConfig`. Raises `ConfigError` that names the knob, or
    that Ray is missing.
    """
    from aengine.errors import ConfigError

    try:
        from aengine.ray_serve.deploy import application
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("replicas need Ray Serve: pip install '.[ray]' in aengine's folder") from None
    return application(knobs)
