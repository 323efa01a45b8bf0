"""The lock file and the bill of materials name what rpel needs to run: all of it,
and as constraints.txt pins it."""

import importlib.util
import shlex
from types import ModuleType

import pytest
import typer
from packaging.utils import canonicalize_name

from rpel.cli import app
from support.paths import ROOT


@pytest.fixture(scope="module")
def deployment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("deployment", ROOT / "tools" / "deployment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_requirements_lock_has_every_dependency_at_its_pinned_version(deployment: ModuleType) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pinned.items()}
    locked = deployment.locked()
    assert {"torch", "numpy", "cryptography", "pydantic-core"} <= set(locked)
    assert set(locked) == set(deployment.needed())
    assert {name: version for name, (version, _) in locked.items()} == {name: pinned[name] for name in locked}
    assert "pytest" not in locked


def test_sbom_names_component_licence_hash_and_dependencies(
    deployment: ModuleType,
) -> None:
    bill = deployment.sbom()
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    parts = {part["name"]: part for part in bill["components"]}
    assert set(parts) == set(deployment.needed())
    assert all(part["purl"] == f"pkg:pypi/{name}@{part['version']}" for name, part in parts.items())
    assert all(len(part["hashes"][0]["content"]) == 64 for part in parts.values())
    assert parts["numpy"]["licenses"]
    refs = {bill["metadata"]["component"]["bom-ref"], *(part["bom-ref"] for part in parts.values())}
    assert {link["ref"] for link in bill["dependencies"]} == refs
    own = next(link for link in bill["dependencies"] if link["ref"].startswith("pkg:pypi/rpel@"))
    assert parts["torch"]["bom-ref"] in own["dependsOn"]
    assert deployment.sbom() == bill


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
