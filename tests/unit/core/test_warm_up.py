"""What callers call is compiled when a rank registers, and not by the first verb that needs it."""

from __future__ import annotations

import subprocess
import sys

_LEFT = """
import torchkv
from torchkv.core import core, posting, steering, thread
from torchkv.host import page_id_check
from torchkv.host.jit import warm_up

inner = {"seals_expected"}  # which compiled code alone calls
warm_up()
for module in (posting, steering, thread, page_id_check):
    for name in module.__all__:
        function = getattr(module, name)
        if hasattr(function, "signatures") and not function.signatures and name not in inner:
            print(f"{module.__name__}.{name}")
"""


def test_whatever_callers_call_is_compiled_at_register() -> None:
    done = subprocess.run([sys.executable, "-c", _LEFT], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() == []
