"""The NVSHMEM transport of torchkv, found through the entry-point group ``torchkv.backends``."""

from torchkv_nvshmem.transport import NVSHMEMTransport

__all__ = ["NVSHMEMTransport"]
