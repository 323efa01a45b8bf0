"""list, ls, compare and resume of a whole folder: what lies on disk, told in a table or as JSON."""

import io
import json

import pytest
from rich.console import Console

from rpel import cli
from rpel.cli.terminal import RunDisplay, print_pairs
from rpel.simulation.loop import Tick
from rpel.spec import presets
from support.commands import rpel


def test_fast_help_equals_the_help_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    helps = []
    for made in (cli._listed(), cli._whole()):
        made(["--help"], prog_name="rpel", standalone_mode=False)
        helps.append(capsys.readouterr().out)
    assert helps[0] == helps[1]
    assert "reproduce" in helps[0]


@pytest.mark.parametrize("name", ["quickstart", "a-name-that-is-much-too-long-for-a-line-of-eighty"])
def test_progress_line_of_80_columns_shows_name_round_bar_time_worst_and_hostile(name: str) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    shown = RunDisplay(screen)
    shown.tick(Tick(name, 0, 1234, 2000, 0.9, 0.8765, 17, 18, seen_round=1200))
    with screen.capture() as captured:
        screen.print(shown.bars.get_renderable())
    (line,) = captured.get().splitlines()
    assert len(line.rstrip()) <= 80
    assert line.startswith(name[:10])
    for words in ("round 1234/2000", "━━━", "--:--", "worst 0.876", "hostile 17 of 18"):
        assert words in line


def test_lists_break_between_words_on_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    print_pairs(
        [("rule", "One sentence that is longer than sixty columns, with a-name-in-it and more words.")]
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert "a-name-in-it" in " ".join(lines)
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("kind", "some"),
    [
        ("rules", {"mean", "nnm", "krum", "cs_plus"}),
        ("attacks", {"alie", "foe", "label_flip", "strongest"}),
        ("methods", {"rpel", "gts", "el-local"}),
        ("datasets", {"mnist-sample", "femnist"}),
        ("presets", set(presets())),
    ],
)
def test_list_gives_every_name_one_line(
    kind: str, some: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = json.loads(rpel("list", kind, "--json", capsys=capsys)[0])
    assert some <= {row["name"] for row in rows}
    assert all(set(row) == {"name", "about"} and row["about"] for row in rows)
    assert len(rpel("list", kind, capsys=capsys)[0].splitlines()) == len(rows)
