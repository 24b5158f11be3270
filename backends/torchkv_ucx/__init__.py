"""The UCX transport of torchkv, found through the entry-point group ``torchkv.backends``."""

from torchkv_ucx.transport import UCXTransport

__all__ = ["UCXTransport"]
