"""The command line of the demo, checked before anything is started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from disagg import models

PROMPT_FILE = Path(__file__).parent.parent / "data" / "tide_mill.txt"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 and a reason if it makes no sense."""
    parser = argparse.ArgumentParser(
        description="Prefill on P ranks, decode on D ranks, compare with a single process.",
        usage="torchrun --standalone --nproc-per-node P+D %(prog)s --prefill P --decode D [options]",
    )
    add = parser.add_argument
    add("--model", choices=models.MODELS, default="llama")
    add("--prefill", type=int, default=1, metavar="P", help="ranks that prefill (default 1)")
    add("--decode", type=int, default=1, metavar="D", help="ranks that decode (default 1)")
    add("--prompt", help="the prompt itself")
    add("--prompt-file", type=Path, help=f"read the prompt from a file (default {PROMPT_FILE.name})")
    add("--prompt-tokens", type=int, help="cut the prompt after so many tokens; a token is a byte")
    add("--new-tokens", type=int, default=24, help="tokens to generate (default 24)")
    add("--page-size", type=int, default=16, help="tokens per page (default 16)")
    add("--decode-page-size", type=int, help="tokens per page on the decode side (default: the same)")
    add("--order", choices=("NHD", "HND"), default="NHD", help="page order on the decode side (default NHD)")
    add("--layers", type=int, default=4, help="layers of the model (default 4)")
    add("--hidden", type=int, default=128, help="width of the model, a multiple of 64 (default 128)")
    add("--seed", type=int, default=0, help="seed of the weights and of the page ids")
    add("--transport", default="auto", help="auto, ucx, nvshmem, ... (default auto)")
    add("--path", choices=("auto", "runs", "slices", "staged", "direct"), default="auto", help="how bytes travel")
    add("--corrupt", action="store_true", help="flip one received page and expect that to be noticed")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU a rank, or shared (default cpu)")
    args = parser.parse_args(argv)
    args.decode_page_size = args.decode_page_size or args.page_size
    problem = _problem_with(args)
    if problem:
        parser.error(problem)
    return args


def _problem_with(args: argparse.Namespace) -> str | None:
    for name in ("prefill", "decode", "prompt_tokens", "page_size", "decode_page_size", "layers", "hidden"):
        value = getattr(args, name)
        if value is not None and value < 1:
            return f"--{name.replace('_', '-')} must be at least 1, not {value}"
    if "WORLD_SIZE" not in os.environ:
        ranks = args.prefill + args.decode
        return f"start this program with torchrun: torchrun --standalone --nproc-per-node {ranks} ..."
    world = int(os.environ["WORLD_SIZE"])
    if args.prefill + args.decode != world:
        return f"--prefill {args.prefill} and --decode {args.decode} do not add up to the {world} ranks started"
    for name in ("prefill", "decode"):
        if 8 % getattr(args, name):
            return f"--{name} {getattr(args, name)} does not divide the model's 8 attention heads"
    if args.hidden % 64:
        return f"--hidden must be a multiple of 64, not {args.hidden}"
    if args.new_tokens < 2:
        return f"--new-tokens must be at least 2, not {args.new_tokens}: prefill gives the first, decode the rest"
    if args.prompt is not None and args.prompt_file is not None:
        return "--prompt and --prompt-file exclude each other"
    if args.prompt_file is not None and not args.prompt_file.is_file():
        return f"--prompt-file {args.prompt_file}: no such file"
    if args.device == "cuda" and not torch.cuda.is_available():
        return "--device cuda: PyTorch finds no GPU here; use --device cpu"
    return None


def read_prompt(args: argparse.Namespace, device: torch.device) -> torch.Tensor:
    """Token ids of the prompt, [1, tokens], int64."""
    text = args.prompt.encode() if args.prompt is not None else (args.prompt_file or PROMPT_FILE).read_bytes()
    return models.encode(text, device=device)[:, : args.prompt_tokens]
