"""docs/bring_your_own.md, "Train my own task with real peers": run as it stands there,
it exports what was trained."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rpel
from rpel.peer.learn.learner import seed_of
from support.namespaces import possible
from support.paths import ROOT
from support.waiting import pace

SECTION = "## Train my own task with real peers"


def cells() -> list[str]:
    """The blocks of the section that the site executes, in order."""
    section = (
        (ROOT / "docs" / "bring_your_own.md").read_text("utf-8").partition(SECTION)[2].partition("\n## ")[0]
    )
    return re.findall(r"^```\{code-cell\}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def stretched(cell: str) -> str:
    """The same times on a free machine, longer ones beside other work: real peers miss rounds there."""
    return re.sub(
        r"(--period |--epoch \+)(\d+)", lambda found: f"{found[1]}{int(found[2]) * pace():.0f}", cell
    )


def execute(cell: str, names: dict[str, Any]) -> None:
    """A cell as a notebook would run it; commands in a network of their own, where all ports are free."""
    if cell.startswith("%%writefile "):
        first, _, text = cell.partition("\n")
        Path(first.split()[1]).write_text(text, "utf-8")
    elif cell.startswith("%%bash\n"):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        script = "set -e; ip link set lo up\n" + cell.removeprefix("%%bash\n")
        done = subprocess.run(
            ["unshare", "--net", "bash", "-c", script],
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        exec(compile(cell, "bring_your_own.md", "exec"), names)


@pytest.mark.full
@pytest.mark.skipif(bool(WHY := possible()), reason=WHY)
def test_model_exported_by_the_howto_has_the_accuracy_peers_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "clinic", raising=False)
    names: dict[str, Any] = {"torch": torch, "rpel": rpel}
    for cell in cells():
        execute(stretched(cell), names)
    seed = seed_of(tomllib.loads(Path("members.toml").read_text("utf-8"))["run"])
    for index in range(4):
        module = names["module"]()
        module.load_state_dict(load_file(f"clinic-{index + 1}/state/model.safetensors"), strict=True)
        dataset = names["task"](index=index, nodes=4, seed=seed).dataset
        with torch.no_grad():
            right = module(torch.from_numpy(dataset.test_x)).argmax(dim=1).numpy() == dataset.test_y
        said = float(
            re.findall(r"accuracy (\d\.\d+)", Path(f"clinic-{index + 1}.log").read_text("utf-8"))[-1]
        )
        assert right.mean() == pytest.approx(said, abs=1e-4)
        assert said > 0.7
