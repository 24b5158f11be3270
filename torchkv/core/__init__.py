"""The resident loop: the part of a request's path that runs in compiled code, without the GIL.

`torchkv.core.loop` is that code and its state. `core` hands requests to it and reads its events; `runner` has its
memory and its thread, `peers` its mailboxes and lanes, `news` the callers that wait for it. `posting` and
`steering` are what these call, compiled; `device` is a GPU as the loop uses it.
"""
