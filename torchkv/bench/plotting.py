"""matplotlib, which is needed only for plots."""

from __future__ import annotations

from typing import Any

from torchkv.errors import TransportUnavailable

__all__ = ["pyplot"]


def pyplot() -> Any:
    """``matplotlib.pyplot`` without a display. Raises ``TransportUnavailable`` if matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise TransportUnavailable(f"--plot needs matplotlib: {error}; pip install 'torchkv[bench]'") from error
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "torchkv"  # the same figures make the same file
    from matplotlib import pyplot as found

    return found
