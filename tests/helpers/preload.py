"""Imported by the server that test processes are forked from: they inherit the machine code that this makes.

Otherwise each of them would load it from disk, or compile it where there is none yet, as in a clean clone. Nothing
here loads UCX, starts a thread or touches a GPU.
"""

from __future__ import annotations

import gc

from torchkv import prefixindex, registration

for module in (*registration.COMPILED, prefixindex):
    module.warm_up()
# They need not look through it when they collect garbage, nor copy the memory that this would touch.
gc.freeze()
