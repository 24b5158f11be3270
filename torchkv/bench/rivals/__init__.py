"""``python -m torchkv.bench rivals``: torchkv beside NIXL, Mooncake, gloo, NCCL and plain copies, in one run.

`side` says what a rival is; `ours`, `nixl`, `mooncake`, `messages` and `copies` are the rivals, `catalogue` lists them.
`round_robin` lets them take turns, `intervals` and `results` say what that has shown, `table` prints it.
"""
