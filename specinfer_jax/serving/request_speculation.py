"""How one request is speculated on. Free of jax."""

import dataclasses
from collections.abc import Sequence

from specinfer_jax.errors import SpeculationError


@dataclasses.dataclass(frozen=True)
class RequestSpeculation:
    """How one request is speculated on; it changes the speed, never the answer.

    It can only leave out what the engine has: speculators, nodes, children of an SSM's tree.
    """

    enabled: bool = True
    """False is incremental decoding."""
    max_nodes: int | None = None
    """Most speculated nodes of a tree, at least 1; None: as many as the engine's trees have."""
    ssms: Sequence[str] | None = None
    """Names of the speculators that take part; None: all that the engine has."""
    tree: str | None = None
    """Tree of an SSM, written as in `Speculation.tree`; of it counts what the engine's own trees have, too. None: all
    of those."""

    def __post_init__(self) -> None:
        if self.max_nodes is not None and (
            isinstance(self.max_nodes, bool) or not isinstance(self.max_nodes, int) or self.max_nodes < 1
        ):
            raise SpeculationError(f"max_nodes must be a whole number of at least 1, got {self.max_nodes!r}")
        if isinstance(self.ssms, str):
            raise SpeculationError(f"ssms must be a list of names, got {self.ssms!r}")
        if self.ssms is not None:
            object.__setattr__(self, "ssms", tuple(self.ssms))
            if not self.ssms:
                raise SpeculationError("ssms must name at least one speculator; enabled=False leaves all of them out")
