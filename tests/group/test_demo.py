"""The demos: real processes, real models, small sizes. Once as a user runs it, with torchrun."""

from __future__ import annotations

import faulthandler
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import torchkv
from tests.helpers.harness import Ranks
from tests.helpers.torchrun import DEADLINE, EXAMPLES, run_with_torchrun

pytest.importorskip("transformers", reason="the demo's models come from transformers (extra 'demo')")

DEMO = EXAMPLES / "disaggregated_generate.py"
SMALL = ("--prompt-tokens", "200", "--new-tokens", "8", "--layers", "2")
# What each model keeps, one kind of tensor after the other, and so what must be noticed to be corrupt.
FAMILIES = {
    "falcon_h1": ("k (page, layer 2)", "v (page, layer 2)", "ssm (layer 2)", "conv (last column, layer 2)"),
    "jamba": ("k (page, layer 3)", "v (page, layer 3)", "ssm (layer 2)", "conv (last column, layer 2)"),
    "qwen3_next": ("k (page, layer 3)", "v (page, layer 3)", "ssm (layer 1)", "conv (last column, layer 1)"),
    "gpt_oss": (
        *("k (page, layer 3)", "k (page in the window, layer 2)"),
        *("v (page, layer 3)", "v (page in the window, layer 2)"),
    ),
    "deepseek_v32": ("latent (page, layer 2)", "index_k (page, layer 2)"),
}


def generate_with_forks(ranks: int, arguments: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """Runs the main demo; see `run_with_forks`."""
    import disaggregated_generate as demo

    # transformers imports a model's code when it first makes one: here, and not in every rank.
    config = demo.models.make_config(arguments[arguments.index("--model") + 1], layers=1, hidden=64)
    demo.models.build(config, seed=0, device=torch.device("cpu"))
    return run_with_forks(demo.main, ranks, arguments)


def families_with_forks(models: tuple[str, ...], blind: bool) -> tuple[list[int], list[str]]:
    """Runs the demo of model families; see `run_with_forks`. blind: with controls that corrupt nothing."""
    import model_families as demo

    for model in models:
        demo.models.build(demo.families.make(model).config, seed=0, device=torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        if blind:
            nothing = demo.controls.ControlChannel("nothing", torch.zeros(1))
            patch.setattr(demo.controls, "controls", lambda *_: [nothing])
        return run_with_forks(demo.main, 2, ("--model", *models))


def run_with_forks(main: Callable[[], int], ranks: int, arguments: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """Exit codes by rank, and lines of all output. From a process that imports transformers, once for all of them."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(store.port), WORLD_SIZE=str(ranks))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torchrun's word for: rank 0 need not make the store
    sys.argv = ["demo", *arguments]
    with tempfile.TemporaryFile() as output:
        children = [_fork(main, rank, output.fileno()) for rank in range(ranks)]
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
        faulthandler.dump_traceback_later(DEADLINE - 15, exit=True)  # a rank that hangs says where
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
    ((codes, lines),) = parent.run(generate_with_forks, ranks, (*arguments, *SMALL), deadline=DEADLINE)
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
    assert any("ms if all are waited for first" in line for line in lines)


def test_every_family_of_models_gives_the_bits_of_one_process_and_each_kind_of_tensor_matters(parent: Ranks) -> None:
    ((codes, lines),) = parent.run(families_with_forks, tuple(FAMILIES), False, deadline=DEADLINE)
    assert codes == [0, 0], "\n".join(lines)
    verdicts = [line for line in lines if line.startswith(("PASS ", "FAIL "))]
    assert [re.sub(r"\d{4,} bytes received, ", "", verdict) for verdict in verdicts] == [
        f"PASS {model}: logits equal, bit by bit; corruption of {', '.join(kinds)} noticed"
        for model, kinds in FAMILIES.items()
    ]


def test_corruption_that_changes_no_logit_fails_the_demo(parent: Ranks) -> None:
    ((codes, lines),) = parent.run(families_with_forks, ("gpt_oss",), True, deadline=DEADLINE)
    assert codes == [1, 1], "\n".join(lines)
    verdicts = [line for line in lines if line.startswith(("PASS ", "FAIL "))]
    (verdict,) = verdicts
    assert verdict.startswith("FAIL gpt_oss: ")
    assert verdict.endswith("logits equal, bit by bit; corruption of nothing NOT noticed")


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
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    from disagg.command_line import parse_args

    assert parse_args([]).decode_page_size == 16
    with pytest.raises(SystemExit) as exit_:
        parse_args(arguments)
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("error", [0.002, float("nan")])
def test_the_judge_sees_one_wrong_logit_and_one_wrong_token(error: float) -> None:
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


def test_a_layer_that_is_still_arriving_is_awaited_before_anything_of_it_is_touched() -> None:
    from disagg.paged_cache import paged_cache

    layout = torchkv.KVLayout.gqa(num_layers=2, num_kv_heads=1, head_dim=4, page_size=4, dtype=torch.float32)
    kv_cache = torchkv.KVCache.empty(layout, 3, device="cpu")
    prompt, token = torch.randn(1, 1, 6, 4), torch.randn(1, 1, 1, 4)
    awaited = []

    def arrive(layer: int) -> None:
        awaited.append(layer)
        for tensor in (kv_cache.k[layer], kv_cache.v[layer]):
            tensor[[2, 0]] = torch.nn.functional.pad(prompt[0, 0], (0, 0, 0, 2), value=float("nan")).view(2, 4, 1, 4)

    cache = paged_cache(kv_cache, torch.tensor([2, 0]), length=6, before_layer=arrive)
    for layer in (0, 1):
        keys, values = cache.update(token, -token, layer)
        assert torch.equal(keys, torch.cat([prompt, token], dim=2))
        assert torch.equal(values, torch.cat([prompt, -token], dim=2))
    assert awaited == [0, 1]


def test_a_first_token_other_than_the_one_sealed_is_refused() -> None:
    from disagg.early_start import confirm

    received = SimpleNamespace(wait=lambda: True, aux=(7).to_bytes(4, "little"))
    confirm(received, 7)
    with pytest.raises(RuntimeError, match="announced as 8, but the request was sealed with 7"):
        confirm(received, 8)


@pytest.mark.parametrize(
    ("name", "layer", "index", "value", "stray"),
    [
        ("k", 0, 1, float("nan"), ["k of layer 0"]),  # of the request's pages 4, 1, 5, 0, one has not come
        ("k", 0, 3, 1.0, ["k of layer 0"]),  # a page of nobody
        ("k", 1, 1, 1.0, []),  # before the window, but it may begin there
        ("k", 1, 4, 1.0, ["k of layer 1"]),  # long before it
        ("k", 1, 5, float("nan"), ["k of layer 1"]),
        ("ssm", 0, 2, float("nan"), ["ssm of layer 0"]),
        ("ssm", 0, 1, 1.0, ["ssm of layer 0"]),
    ],
)
def test_pages_and_slots_that_were_written_for_nobody_or_not_at_all_are_seen(
    name: str, layer: int, index: int, value: float, stray: list[str]
) -> None:
    from disagg.controls import poison, strays

    layout = torchkv.KVLayout(
        [torchkv.Component("k", 1, 4, torch.float32)],
        num_layers=2,
        page_size=4,
        states=[torchkv.State("ssm", (2, 2), torch.float32, layers=[0])],
        windows={1: 6},
    )
    kv_cache = torchkv.KVCache.empty(layout, 6, device="cpu", num_slots=3)
    poison(kv_cache)
    pages = torch.tensor([4, 1, 5, 0])  # of 15 tokens; those behind them see layer 1 from token 10 on, in page 5
    kv_cache.k[0][pages] = 1.0
    kv_cache.k[1][[5, 0]] = 1.0
    kv_cache.state("ssm")[0][2] = 1.0
    assert strays(kv_cache, pages, slot=2, tokens=15) == []
    (kv_cache.k if name == "k" else kv_cache.state(name))[layer][index] = value
    assert strays(kv_cache, pages, slot=2, tokens=15) == stray
