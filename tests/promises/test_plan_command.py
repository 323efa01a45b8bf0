"""The command line as a stranger meets it: what it prints, one sentence for bad input,
and its exit status."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support import commands
from support.commands import loads_none_of
from support.waiting import PATIENCE

PLAN_KEYS = {
    "nodes", "byzantine", "rounds", "pull", "b_hat", "fraction", "probability", "confidence", "feasible",
    "best_below_half", "messages_per_round", "messages_all_to_all", "bytes_per_round", "kappa",
    "alpha", "lambda", "theorem_applies", "alternatives", "wire", "bytes_per_message", "shortest_period",
    "pull_noptlog",
}  # fmt: skip


class Found(NamedTuple):
    stdout: str
    stderr: str


Rpel = Callable[..., Found]


@pytest.fixture
def rpel(capsys: pytest.CaptureFixture[str]) -> Rpel:
    """The command in this process, where a start costs nothing."""

    def call(*arguments: str, **code: Any) -> Found:
        return Found(*commands.rpel(*arguments, capsys=capsys, **code))

    return call


def test_command_in_a_process_prints_and_exits_with_the_same_status() -> None:
    def command(*arguments: str) -> tuple[int, str, str]:
        words = [sys.executable, "-m", "rpel", *arguments]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE)
        return done.returncode, done.stdout, done.stderr

    status, out, err = command("--version")
    assert (status, out.startswith("rpel "), err) == (0, True, "")
    status, out, err = command("plan", "--nodes", "abc", "--byzantine", "1", "--rounds", "1")
    assert (status, out, err.count("\n")) == (2, "", 1)


def test_plan_as_json_has_the_promised_keys(rpel: Rpel) -> None:
    content = json.loads(
        rpel("plan", "--nodes", "100", "--byzantine", "10", "--rounds", "200", "--json").stdout
    )
    assert content.keys() >= PLAN_KEYS
    assert (content["pull"], content["b_hat"]) == (16, 8)
    assert content["alternatives"][0].keys() == {
        "pull",
        "b_hat",
        "fraction",
        "probability",
        "kappa",
    }
    assert content["bytes_per_round"] is None


def test_plan_prints_answer_probability_and_neighbouring_choices(rpel: Rpel) -> None:
    text = rpel(
        "plan", "--nodes", "100", "--byzantine", "10", "--rounds", "200", "--parameters", "176050"
    ).stdout
    for part in (
        "s = 16",
        "b_hat = 8",
        "99.8894 %",
        "1,600 a round",
        "9,900",
        "1.13 GB",
        "default",
        "does not apply",
    ):
        assert part in text
    (taken,) = [line for line in text.splitlines() if line.startswith("a run takes")]
    assert taken.split()[3:5] == ["26", "9"]


def test_infeasible_pull_is_answered_with_a_warning(rpel: Rpel) -> None:
    done = rpel("plan", "--nodes", "100", "--byzantine", "10", "--rounds", "200", "--pull", "15")
    assert "warning" in done.stderr
    assert "97.3938 %" in done.stderr
    assert "b_hat = 8" in done.stdout


def test_plan_plot_writes_a_figure(rpel: Rpel, tmp_path: Path) -> None:
    path = tmp_path / "new" / "plan.svg"
    base = ("plan", "--nodes", "1000", "--byzantine", "100", "--rounds", "200")
    rpel(*base, "--plot", str(path))
    first = path.read_text()
    assert "<svg" in first
    assert len(first) > 5_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "abc", "--byzantine", "1", "--rounds", "1"], ["--nodes", "abc", "100"]),
        (["--nodes", "100", "--byzantine", "50", "--rounds", "1"], ["50", "at most 49"]),
        (["--nodes", "100", "--byzantine", "10"], ["--rounds"]),
        (["--nodes", "100", "--byzantine", "10", "--rounds", "9", "--puls", "3"], ["--puls", "--pull"]),
        (["--nodes", "100", "--byzantine", "10", "--rounds", "9", "--confidence", "high"], ["high", "0.99"]),
        (["--nodes", "100", "--byzantine", "10", "--rounds", "9", "--confidence", "2"], ["confidence 2.0"]),
        (["--nodes", "100", "--byzantine", "10", "--rounds", "9", "--pull", "100"], ["pull 100", "99"]),
        (["--nodes", "100", "--byzantine", "10", "--rounds", "9", "--plot", "a.movie"], ["movie", "svg"]),
        (
            ["--nodes", "100", "--byzantine", "10", "--rounds", "9", "--plot", "picture"],
            ["'picture'", ".svg"],
        ),
    ],
)
def test_bad_plan_options_exit_with_2_and_name_the_value(
    rpel: Rpel, arguments: list[str], words: list[str]
) -> None:
    done = rpel("plan", *arguments, code=2)
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert all(word in done.stderr for word in words), done.stderr


def test_unknown_command_names_the_nearest(rpel: Rpel) -> None:
    assert "plan" in rpel("pln", code=2).stderr


def test_plan_does_not_import_torch() -> None:
    loads_none_of({"torch", "matplotlib"}, *["plan", "--nodes", "9", "--byzantine", "1", "--rounds", "5"])
