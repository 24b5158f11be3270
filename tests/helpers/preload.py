"""Imported by the server that test processes are forked from: they inherit the machine code that this makes.

Otherwise each of them would load it from disk, or compile it where there is none yet, as in a clean clone. Nothing
here loads UCX, starts a thread or touches a GPU.
"""

from __future__ import annotations

import gc

import torchkv
from torchkv.host import jit
from torchkv.prefix import tree

for name in torchkv.__all__:
    getattr(torchkv, name)  # imports every module that registers compiled functions
jit.warm_up()
tree.warm_up()
# They need not look through it when they collect garbage, nor copy the memory that this would touch.
gc.freeze()
