"""What the operator of a server chooses. Free of jax."""

import dataclasses

from specinfer_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Names, keys and limits of one server."""

    model_names: tuple[str, ...] = ()
    """Names that requests may call the model by, the first in answers; empty: the engine's own."""
    api_keys: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    """Any of these opens the server; empty: it is open to all."""
    max_tokens: int | None = None
    """Most tokens of an answer, whatever a request asks for; None: as many as the context has room for."""
    max_body_bytes: int = 8 * 2**20
    """A larger body is refused with 413."""
    body_timeout: float = 60.0
    """Seconds in which a request's body must have come in."""
    request_timeout: float | None = 600.0
    """Seconds after which a request is given up with 408; None: never."""
    drain_timeout: float = 120.0
    """Seconds that accepted requests have to end once the server is told to."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages whose scripts may call the server, "*" for all."""
    log_prompts: bool = False
    """Write what users ask into the log."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_body_bytes", "body_timeout", "request_timeout", "drain_timeout"):
            value = getattr(self, name)
            if value is not None and not (value > 0 or (value == 0 and name == "drain_timeout")):
                raise ConfigError(f"{name} must be above 0, got {value!r}")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("an API key must consist of visible ASCII characters, at least one")
        for name in self.model_names:
            if not name:
                raise ConfigError("a model name must have at least one character")
