"""The files under deploy/ are complete, and agree with the commands and constraints of the project."""

import re
import shlex
import tomllib

import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rpel.cli import app
from support.paths import ROOT


def test_requirements_lock_has_every_dependency_at_its_pinned_version_with_hashes() -> None:
    pins = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    pinned = {canonicalize_name(name): version for name, version in pins}
    text = (ROOT / "deploy" / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==(\S+) \\\n    --hash", text, re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = {canonicalize_name(Requirement(need).name) for need in project["dependencies"]}
    assert direct | {"pydantic-core", "llvmlite"} <= set(locked)
    assert len(locked) == len(re.findall("^[a-z]", text, re.M))
    assert locked == {name: pinned[name] for name in locked}
    assert "pytest" not in locked


def test_systemd_unit_is_bounded_and_does_not_restart_permanent_errors() -> None:
    lines = (ROOT / "deploy" / "rpel-peer.service").read_text().splitlines()
    pairs = [line.split("=", 1) for line in lines if "=" in line and not line.startswith("#")]
    unit = {key: value for key, value in pairs}  # noqa: C416 (of keys given twice the last counts)
    for key in (
        "MemoryMax",
        "TasksMax",
        "IPAddressDeny",
        "IPAddressAllow",
        "StartLimitBurst",
        "StartLimitIntervalSec",
    ):
        assert unit[key], key
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("on-failure", "2 3")
    _, group, command, *arguments = shlex.split(unit["ExecStart"])
    function = typer.main.get_command(app).commands[group].commands[command]  # type: ignore[attr-defined]
    assert str(function.make_context(command, arguments).params["config"]) == "/etc/rpel/peer.toml"
