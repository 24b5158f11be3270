"""``python -m torchkv.doctor``: checks what works on this machine and what does not, and says what to do about it.

Exit code 0: everything works; 1: something is slower or less capable than it could be; 2: transfers would fail.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version

import torch

from torchkv.bench.cases import CASES, Case
from torchkv.bench.pair import run_case
from torchkv.cuda import ipc
from torchkv.cuda.driver import num_queues
from torchkv.cuda.side_streams import enough_queues
from torchkv.errors import KVError, TransportUnavailable
from torchkv.host.network import job_interface
from torchkv.host.processes import this_process, watch_process
from torchkv.host.shared_memory import allocate, open_segment, share
from torchkv.options import PREFIX, Options, warn_about_unknown_variables
from torchkv.transport.interface import load_transport, transport_names

__all__ = ["Finding", "examine", "main"]

LEVELS = ("ok", "warn", "FAIL")
_TELL = "report it with the output of `python -m torchkv.doctor --json`"
PAYLOAD = 16 << 20  # bytes of each test transfer
PACKAGES = (
    *("torchkv", "ucxx-cu13", "libucx-cu13", "ucxx-cu12", "libucx-cu12", "ucx-py-cu12", "ucx-py-cu13"),
    *("numba", "pyzmq", "msgspec"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. level: one of `LEVELS`. fix: what to do about it; empty only if it is ok."""

    level: str
    subject: str
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.fix, f"{self.subject}: a problem without its fix"


def examine(*, transfers: bool = True) -> Iterator[Finding]:
    """Runs all checks, quick ones first. transfers: also moves bytes between two processes."""
    yield _versions()
    yield from _settings()
    yield from _gpus()
    yield from _transports()
    yield _attempt("host memory", _shared_memory, "let processes of one user open /proc/PID/fd of each other")
    yield _attempt("liveness", _pidfd, "use Linux 5.3 or later, and a sandbox that allows pidfd_open")
    yield _attempt("listening", _listening, "set TORCHKV_INTERFACE to an address or interface of this host")
    if transfers:
        for case in CASES:
            if case.name.startswith(("pages 64", "slices")):
                yield _transfer(case)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m torchkv.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--quick", action="store_true", help="start no second process and move no bytes")
    args = parser.parse_args()
    findings = []
    for finding in examine(transfers=not args.quick):
        findings.append(finding)
        if not args.json:
            fix = f"; fix: {finding.fix}" if finding.fix else ""
            sys.stdout.write(f"[{finding.level:4}] {finding.subject:24} {finding.text}{fix}\n")
            sys.stdout.flush()
    if args.json:
        json.dump([asdict(finding) for finding in findings], sys.stdout, indent=1)
        sys.stdout.write("\n")
    return max(LEVELS.index(finding.level) for finding in findings)


def _versions() -> Finding:
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            note = " (ignored: UCXX is its successor)" if package.startswith("ucx-py") else ""
            found.append(f"{package} {version(package)}{note}")
    return Finding("ok", "versions", " | ".join(found))


def _settings() -> Iterator[Finding]:
    try:
        options = Options()
    except KVError as error:
        yield Finding("FAIL", "settings", str(error), "correct or unset that variable")
        return
    changed = [f.name for f in fields(Options) if PREFIX + f.name.upper() in os.environ]
    shown = ", ".join(f"{name}={getattr(options, name)!r} (environment)" for name in changed) or "all defaults"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_about_unknown_variables()
    level, fix = ("warn", "rename or unset what is not read") if caught else ("ok", "")
    yield Finding(level, "settings", "; ".join([shown, *(str(w.message) for w in caught)]), fix)
    if not enough_queues():
        text = f"{num_queues()}: streams that wait block others, and may keep transfers from ending"
        yield Finding("warn", "CUDA_DEVICE_MAX_CONNECTIONS", text, "unset it, or set it to 32")
    if os.environ.get("TORCH_LOGS") == "":
        yield Finding("warn", "TORCH_LOGS", "set but empty, which makes some torch releases fail at import", "unset it")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("ok", "GPUs", "PyTorch sees none: caches lie in host memory")
        return
    try:
        gpus = ipc.gpu_facts()
    except KVError as error:
        yield Finding("FAIL", "GPUs", str(error), "install cuda-bindings for the CUDA of this PyTorch, and its driver")
        return
    for gpu in gpus:
        apart = [i for i, reached in enumerate(gpu.peers) if not reached]
        links = (
            f"no peer access to {', '.join(f'cuda:{i}' for i in apart)}: transfers there are staged" if apart else ""
        )
        text = f"{gpu.name}, {gpu.total_nbytes / 2**30:.0f} GiB, {gpu.uuid}; {links or 'peer access to all others'}"
        fix = "place ranks that talk to each other on GPUs with peer access, or take staging" if apart else ""
        yield Finding("warn" if apart else "ok", f"cuda:{gpu.index}", text, fix)
    yield _attempt("device memory", _shared_device_memory, "give the container the host's IPC and PID namespaces")
    yield _attempt(
        "PyTorch's allocator", _allocator, "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF, or use KVCache.empty"
    )
    if "ucx" in transport_names():
        yield _attempt(
            "UCX on GPUs", _device_lane, "install a UCX with CUDA, and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
        )


def _shared_device_memory() -> str:
    ipc.share(ipc.allocate(1 << 20, torch.device("cuda", 0)))
    return "CUDA IPC exports KVCache.empty's memory: kernels of other processes on this host can store into it"


def _allocator() -> str:
    ipc.check_shareable(torch.empty(1 << 20, dtype=torch.uint8, device="cuda:0"))
    return "tensors of PyTorch's own allocator can be shared too (expandable segments are off)"


def _device_lane() -> str:
    transport = load_transport("ucx")()
    try:
        region = transport.register(transport.allocate(1 << 20, torch.device("cuda", 0)))
        reason = getattr(region, "no_put", "")  # an attribute of regions of this transport only
    finally:
        transport.close()
    if reason:
        raise TransportUnavailable(reason)
    return "UCX has a lane for device memory, for peers that kernels cannot store to"


def _transports() -> Iterator[Finding]:
    names = transport_names()
    if "ucx" not in names:
        yield Finding("FAIL", "transport ucx", "its entry point is missing", "reinstall torchkv: pip install torchkv")
    for name in names:
        try:
            cls = load_transport(name)
            reason = cls.available()
        except KVError as error:
            reason = str(error)
        if reason is None:
            devices = ", ".join(sorted(cls.capabilities.devices))
            yield Finding("ok", f"transport {name}", f"works on {devices} memory")
        else:
            fix = "pip install --force-reinstall torchkv" if name == "ucx" else f"nothing, unless you need {name}"
            yield Finding("FAIL" if name == "ucx" else "warn", f"transport {name}", reason, fix)


def _shared_memory() -> str:
    tensor = allocate(1 << 20)
    descriptor = share(tensor)
    assert descriptor is not None, "fresh host memory is always shareable"
    segment = open_segment(descriptor)
    try:
        tensor.fill_(7)
    finally:
        segment.close()
    return "memfd segments can be mapped by other processes of this user: same-host transfers are plain stores"


def _pidfd() -> str:
    fd = watch_process(this_process())
    if fd is None:
        raise KVError("pidfd_open does not work: a dead peer is noticed by its heartbeats only, and never proved dead")
    os.close(fd)
    return "pidfds work: the death of a peer on this host is noticed at once, and proved"


def _listening() -> str:
    name, address = job_interface()
    return f"control channel and UCX bind {address} ({name}) only; TORCHKV_INTERFACE changes it"


def _attempt(subject: str, check: Callable[[], str], fix: str) -> Finding:
    """Runs ``check``, which returns what works, or raises an error that says what does not. fix: in that case."""
    try:
        return Finding("ok", subject, check())
    except (KVError, OSError) as error:
        return Finding("warn", subject, str(error), fix)


def _transfer(case: Case) -> Finding:
    name = f"{case.name} [{case.tls}]" if case.tls else case.name
    try:
        result = run_case(case, nbytes=PAYLOAD, repeats=3)
    except KVError as error:
        return Finding("FAIL", name, str(error).strip().splitlines()[-1], f"{_TELL}, or try another Options.transport")
    if result.wrong:
        return Finding("FAIL", name, f"{result.wrong} wrong bytes over {result.lane}", f"{_TELL}; do not use this lane")
    return Finding("ok", name, f"{result.gbps:.2f} GB/s over {result.lane}, path {result.path}, every byte right")


if __name__ == "__main__":
    sys.exit(main())
