"""matplotlib, where it is installed (the extra `plots`)."""

from pathlib import Path
from typing import Any

from specinfer_jax.errors import ConfigError


def pyplot() -> Any:
    """`matplotlib.pyplot`, drawing into files.

    Raises:
      ConfigError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install matplotlib") from None
    matplotlib.use("agg")
    from matplotlib import pyplot as module

    return module


def save_figure(figure: Any, path: Path) -> None:
    """As a PNG, and out of memory."""
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot().close(figure)
