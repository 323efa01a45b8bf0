"""The package that others install: complete, and working where there is no repository."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import rpel
from rpel.spec import presets
from support.paths import ROOT
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def built(kind: str, source: Path, out: Path) -> Path:
    """A wheel or sdist of a source tree, made by the build backend that pyproject.toml names."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(out)],
        cwd=source,
        capture_output=True,
        text=True,
        check=True,
    )
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution of a clean copy: building leaves files behind,
    which are not to land in this tree."""
    clean = tmp_path_factory.mktemp("clean") / "rpel"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "site", "demo")
    shutil.copytree(ROOT, clean, ignore=ignored)
    shutil.rmtree(clean / "runs", ignore_errors=True)
    return built("sdist", clean, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution: so that one is complete."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    return built("wheel", next(unpacked.iterdir()), tmp_path_factory.mktemp("wheel"))


def test_source_distribution_has_the_files_its_commands_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    here = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    tracked = {
        name for name in here.stdout.splitlines() if not name.startswith(".") and (ROOT / name).exists()
    }
    assert tracked - names == set()
    assert names >= {"Makefile", "constraints.txt", "pyproject.toml", "docs/index.md", "tests/conftest.py"}
    assert not [
        name for name in names if "__pycache__" in name or name.startswith((".venv", "site/", "runs/"))
    ]


def test_wheel_has_every_module_and_every_file_that_modules_read(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    source = ROOT / "src"
    ours = {
        path for path in (source / "rpel").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert {str(path.relative_to(source)) for path in ours} <= names
    assert {f"rpel/presets/{name}.toml" for name in presets()} <= names
    assert all(name.startswith(("rpel/", f"rpel-{rpel.__version__}.dist-info/")) for name in names)


def test_package_metadata_names_version_licence_and_dependencies(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"rpel-{rpel.__version__}.dist-info/METADATA").decode()
        scripts = archive.read(f"rpel-{rpel.__version__}.dist-info/entry_points.txt").decode()
    actual = HeaderParser().parsestr(text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert actual["Version"] == rpel.__version__
    assert re.search(
        rf"^version: {re.escape(rpel.__version__)}$", (ROOT / "CITATION.cff").read_text("utf-8"), re.M
    )
    assert rpel.__version__ in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert actual["License-Expression"] == project["license"]
    assert set(actual.get_all("Provides-Extra") or []) == set(project["optional-dependencies"])
    assert len([need for need in actual.get_all("Requires-Dist") or [] if "extra" not in need]) == len(
        project["dependencies"]
    )
    assert actual.get_all("Project-URL")
    assert "rpel = rpel.cli:main" in scripts


SMOKE = """
import sys, rpel
assert "site-packages" in rpel.__file__, rpel.__file__
plan = rpel.plan(nodes=50, byzantine=5, rounds=100)
result = rpel.simulate(nodes=10, byzantine=2, rounds=5, attack="foe", model="linear", out="runs")
assert len(result.history) == 5 and result.certificate["held"], result
print(plan.pull, rpel.load(result.path).accuracy_worst == result.accuracy_worst)
"""


RENDER = """
import sys
from readme_renderer import markdown
print(markdown.render(sys.stdin.read()))
"""


@pytest.mark.full
def test_wheel_and_sdist_are_fit_for_an_index_and_their_description_renders(
    sdist: Path, wheel: Path, tmp_path: Path
) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    alone = {**os.environ, "PYTHONPATH": ""}
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "twine==7.0.0", "readme_renderer[md]"], check=True, env=alone
    )
    checked = subprocess.run(
        [python, "-m", "twine", "check", "--strict", str(sdist), str(wheel)],
        capture_output=True,
        text=True,
        env=alone,
    )
    assert (checked.returncode, checked.stdout.count("PASSED")) == (0, 2), checked.stdout + checked.stderr
    with zipfile.ZipFile(wheel) as archive:
        described = archive.read(f"rpel-{rpel.__version__}.dist-info/METADATA").decode().partition("\n\n")[2]
    page = subprocess.run(
        [python, "-c", RENDER], input=described, capture_output=True, text=True, env=alone, check=True
    ).stdout
    text = (ROOT / "README.md").read_text("utf-8")
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert len(re.findall(r"<h[123]", page)) == len(re.findall(r"^#{1,3} ", prose, re.M))
    assert page.count("<img") == text.count("![")
    assert page.count("<table") == len(re.findall(r"^\|-", prose, re.M))
    assert page.count("<pre") == text.count("```") // 2


@pytest.mark.full
def test_wheel_works_in_an_empty_environment_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    position, bin_ = tmp_path / "elsewhere", tmp_path / "venv" / "bin"
    position.mkdir()
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "RPEL", "VIRTUAL"))
    }
    clean |= {"PATH": f"{bin_}:/usr/bin:/bin", "HOME": str(tmp_path), "RPEL_CACHE": str(tmp_path / "cache")}
    pip = [str(bin_ / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "-c", str(ROOT / "constraints.txt"), str(wheel)],
        check=True,
        env={**os.environ, "PYTHONPATH": ""},
    )

    def run(*command: str) -> str:
        done = subprocess.run(
            [str(bin_ / command[0]), *command[1:]],
            cwd=position,
            env=clean,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("python", "-c", SMOKE).split()[-1] == "True"
    assert (
        json.loads(run("rpel", "plan", "--nodes", "50", "--byzantine", "5", "--rounds", "100", "--json"))[
            "pull"
        ]
        > 0
    )
    assert "within the plan" in run(
        "rpel", "run", "quickstart", "--rounds", "3", "--model", "linear", "--attack", "foe"
    )
    assert all(line["ok"] for line in json.loads(run("rpel", "doctor", "--json")))
    assert run("rpel", "report", "runs", "-o", "report.html")
    assert run("rpel", "--version").split() == ["rpel", rpel.__version__]
