"""rpel.testing holds every rule and attack of the library to its promises,
and finds those that are broken."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpel import testing
from rpel.attacks import about as about_attacks
from rpel.rules.base import Group, Rule
from rpel.rules.registry import about as about_rules
from support.paths import ROOT


class Broken(Rule):
    """A rule that passes non-finite vectors on and promises a κ that it cannot keep."""

    def run(self, group: Group, out: Any = None) -> Any:
        return group.combine(np.full(group.index.shape, 1 / group.m), out)

    def kappa(self, m: int) -> float:
        return 0.1


@pytest.mark.parametrize(
    ("rule", "parameters", "words"),
    [
        (lambda x: x, {}, "kind and dtype"),
        (lambda x: x.mean(axis=0)[:3], {}, "kind and dtype"),
        (lambda x: x[1], {}, "order of the other vectors"),
        (lambda x: x.mean(axis=0) ** 2, {}, "moving all vectors"),
        (lambda x, f: x.mean(axis=0) + (0 if f == 2 else np.inf), {"f": 2}, "non-finite"),
        (Broken("broken", f=1), {}, "kappa"),
    ],
)
def test_broken_rule_is_found_and_the_promise_named(
    rule: Any, parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        testing.check_rule(rule, **parameters)


# --- one's own ----------------------------------------------------------------------------------------------


def test_every_rule_and_attack_has_a_one_line_description() -> None:
    for name, line in [*about_rules(), *about_attacks()]:
        assert 10 < len(line) < 130, (name, line)
        assert line.endswith((").", ".")), (name, line)


# --- in a run -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example package, installed from a copy, without the network."""
    import shutil

    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(ROOT / "examples" / "plugin", folder / "source")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(folder / "site")]
    command = [sys.executable, "-m", "pip", "install", *options, str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    import os

    path = os.pathsep.join([str(folder / "site"), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment
    )


@pytest.mark.integration
def test_example_plugin_passes_its_tests(installed: Path) -> None:
    tests = str(installed / "source" / "tests")
    quietly = ["-q", "-p", "no:cacheprovider", "-c", str(installed / "source" / "pyproject.toml")]
    done = run(installed, "-m", "pytest", *quietly, tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


REACHED = """
import rpel  # alone: its packages are reached from it
rpel.testing.check_rule("median", f=1)
print(rpel.rules.nnm(1).name, rpel.attacks.declare)

import numpy as np
x = np.arange(10.0).reshape(5, 2)
print(rpel.rule("nnm+winsorized_mean", f=1)(x).tolist(), rpel.attack("echo", gain=2.0).forge(x).tolist())
print(dict(rpel.rules.registry.about())["winsorized_mean"])

from rpel.peer.config.settings import check_task
from rpel.peer.core.wire import Layout
from rpel.peer.learn.learner import task_learner
shapes = {"0.weight": (16, 2), "0.bias": (16,), "2.weight": (2, 16), "2.bias": (2,)}
layout = Layout(tuple(shapes), tuple(shapes.values()), np.dtype("float32"))
learner = task_learner(check_task("quadrants"), index=1, nodes=4, run="r",
                       hyperparameters={"lr": 0.5}, local_steps=1, layout=layout)
x = np.full(82, 0.1, np.float32)
out = np.empty_like(x)
learner.load(1, x, fresh=False)
learner.half(out, np.empty_like(out))
print("moved", (out != x).any())
"""


@pytest.mark.integration
def test_installed_plugin_gives_rule_attack_and_task_by_name(
    installed: Path,
) -> None:
    done = run(installed, "-c", REACHED)
    assert done.returncode == 0, done.stderr
    reached, forged, about, moved = done.stdout.splitlines()
    assert reached.startswith("nnm <function declare")
    assert "[8.0, 10.0]" in forged
    assert "winsorized" in about
    assert moved == "moved True"
