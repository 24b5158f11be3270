"""`examples/README.md`: every example is listed, and its command, as it stands there, passes and shows a number."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.helpers.torchrun import EXAMPLES, run_command

PAGE = (EXAMPLES / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| \[(\w+\.py)\]\(\1\) \| [^|]+ \| `([^`|]+)` \|$", re.MULTILINE)
COMMANDS: dict[str, str] = dict(ROW.findall(PAGE))
LAST_LINES: dict[str, str] = dict(re.findall(r"^(\w+\.py): (PASS .*)$", PAGE, re.MULTILINE))

LAUNCHERS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
VERDICT = re.compile(r"(PASS|FAIL) .*\d")


def run(command: str, folder: Path) -> tuple[int, list[str]]:
    """Exit code and lines of all output. In an empty folder, with a secret of its own; every process is killed late."""
    launcher, *arguments = shlex.split(command)
    arguments = [str(EXAMPLES.parent / each) if each.startswith("examples/") else each for each in arguments]
    environment = {"XDG_CONFIG_HOME": str(folder / "config")}
    return run_command([*LAUNCHERS[launcher], *arguments], command, folder=folder, environment=environment)


def verdicts(lines: list[str]) -> list[str]:
    return [line for line in lines if VERDICT.match(line)]


def judge(code: int, lines: list[str]) -> str:
    """The last verdict of an example that passed. Raises ``AssertionError``."""
    assert code == 0, "\n".join(lines)
    found = verdicts(lines)
    assert found, "no PASS with a number:\n" + "\n".join(lines)
    assert all(line.startswith("PASS ") for line in found), "\n".join(found)
    return found[-1]


def test_every_example_is_listed_with_one_command() -> None:
    assert sorted(COMMANDS) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    for name, command in COMMANDS.items():
        assert f" examples/{name}" in command
    assert set(LAST_LINES) == set(COMMANDS)


def test_every_folder_is_named() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= set(re.findall(r"^\| (?:\[|`)(\w+)", PAGE, re.MULTILINE)), folders


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_its_command_passes_and_shows_a_number(name: str, tmp_path: Path) -> None:
    if "transformers" in (EXAMPLES / name).read_text(encoding="utf-8"):
        pytest.importorskip("transformers", reason="the example's model comes from transformers (extra 'demo')")
    last = judge(*run(COMMANDS[name], tmp_path))
    assert re.sub(r"\d+", "N", last) == re.sub(r"\d+", "N", LAST_LINES[name])


@pytest.mark.parametrize(
    "program",
    [
        "raise RuntimeError('no verdict')",
        "print('PASS without a figure')",
        "print('PASS 1 of 2')\nprint('FAIL 2 of 2')",
        "print('PASS 1')\nraise SystemExit(1)",
    ],
)
def test_an_example_that_fails_is_seen(program: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(program)
    with pytest.raises(AssertionError):
        judge(*run("python broken.py", tmp_path))
