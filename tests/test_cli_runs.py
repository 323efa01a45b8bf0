"""The help that is shown without loading the commands, and `rpel list`."""

import json

import pytest

from rpel import cli
from rpel.spec import presets
from support.commands import rpel


def test_fast_help_equals_the_help_of_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    helps = []
    for made in (cli._listed(), cli._whole()):
        made(["--help"], prog_name="rpel", standalone_mode=False)
        helps.append(capsys.readouterr().out)
    assert helps[0] == helps[1]
    assert "reproduce" in helps[0]


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
