"""The demo: real processes, real models, small sizes. Once as a user runs it, with torchrun."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from torchrun import DEADLINE, EXAMPLES, run_with_torchrun

pytest.importorskip("transformers", reason="the demo's models come from transformers (extra 'demo')")

DEMO = EXAMPLES / "disaggregated_generate.py"
SMALL = ("--prompt-tokens", "200", "--new-tokens", "8", "--layers", "2")


def run_with_forks(ranks: int, arguments: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """Exit codes by rank, and lines of all output. From a process that imports transformers, once for all of them."""
    sys.path.insert(0, str(DEMO.parent))
    import disaggregated_generate as demo

    # transformers imports a model's code when it first makes one: here, and not in every rank.
    config = demo.models.make_config(arguments[arguments.index("--model") + 1], layers=1, hidden=64)
    demo.models.build(config, seed=0, device=torch.device("cpu"))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(store.port), WORLD_SIZE=str(ranks))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torchrun's word for: rank 0 need not make the store
    sys.argv = [str(DEMO), *arguments]
    with tempfile.TemporaryFile() as output:
        children = [_fork(demo.main, rank, output.fileno()) for rank in range(ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        output.seek(0)
        return codes, output.read().decode().splitlines()


def _fork(main: Callable[[], int], rank: int, output: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        code = main()
    except BaseException:  # noqa: BLE001 - whatever it was, this process must not return into its parent's program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@pytest.fixture(scope="module")
def parent() -> Iterator[Ranks]:
    """A process from which ranks of the demo are forked."""
    ranks = Ranks(1, world=False)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (3, ("--model", "llama", "--prefill", "2", "--decode-page-size", "64", "--order", "HND")),
        (3, ("--model", "deepseek_v3", "--decode", "2")),
    ],
    ids=["llama-2to1-pages-16to64-HND", "deepseek_v3-1to2"],
)
def test_tokens_and_logits_equal_those_of_one_process(ranks: int, arguments: tuple[str, ...], parent: Ranks) -> None:
    ((codes, lines),) = parent.run(run_with_forks, ranks, (*arguments, *SMALL), deadline=DEADLINE)
    assert codes == [0] * ranks, "\n".join(lines)
    verdicts = [line for line in lines if line.startswith(("PASS ", "FAIL "))]
    assert len(verdicts) == 1, "\n".join(lines)
    assert verdicts[0].startswith("PASS ")
    assert "tokens equal, logits equal" in verdicts[0]


def test_same_maths_gives_the_same_bits_and_a_flipped_page_is_noticed() -> None:
    code, lines = run_with_torchrun(DEMO, 2, "--model", "qwen3", "--corrupt", *SMALL)
    assert code == 0, "\n".join(lines)
    assert lines[-1].startswith("PASS "), lines[-1]
    assert "the flipped page was noticed" in lines[-1]
    assert any("largest difference 0.0e+00, allowed 0.0e+00" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--prefill", "2"], "--prefill 2 and --decode 1 do not add up to the 2 ranks started"),
        (["--page-size", "0"], "--page-size must be at least 1, not 0"),
        (["--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file exclude each other"),
        (["--prompt-file", "missing.txt"], "--prompt-file missing.txt: no such file"),
        (["--device", "cuda"], "PyTorch finds no GPU here"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused_with_a_reason(
    arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(DEMO.parent))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    from disagg.command_line import parse_args

    assert parse_args([]).decode_page_size == 16
    with pytest.raises(SystemExit) as exit_:
        parse_args(arguments)
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("error", [0.002, float("nan")])
def test_the_judge_sees_one_wrong_logit_and_one_wrong_token(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEMO.parent))
    from disagg.generation import Generation, compare

    logits = torch.randn(7, 20)
    reference = Generation(list(range(8)), logits)
    same = compare(Generation(list(range(8)), logits + 0.0005), reference, allowed=0.001)
    assert same.tokens_equal
    assert same.logits_equal

    off = logits.clone()
    off[3, 4] += error
    assert not compare(Generation(list(range(8)), off), reference, allowed=0.001).logits_equal
    assert not compare(Generation([*range(7), 99], logits), reference, allowed=0.001).tokens_equal
