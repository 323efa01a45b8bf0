"""What a deployment installs: a lock file with hashes, and a software bill of materials (CycloneDX).

    python tools/deployment.py lock > deploy/requirements.lock
    python tools/deployment.py sbom > rpel.cdx.json

The first downloads each package once to compute its hash; the second reads the lock and the installed
packages. Both list what rpel needs to run, with all that this needs, and neither what only tests or documents
need.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "deploy" / "requirements.lock"
HEADER = """\
# What rpel needs to run, exactly, with the hashes of the published files for CPython {python}, Linux x86_64:
#
#   python3 -m venv /opt/rpel
#   /opt/rpel/bin/pip install --no-deps --require-hashes -r deploy/requirements.lock
#   /opt/rpel/bin/pip install --no-deps .
#
# torch is the one line to decide yourself. The hash below is that of the published wheel of {torch},
# which wants its maker's GPU libraries beside it; they are not listed here. The CPU build of the same
# version, with which this project is tested, is another file with another hash and wants nothing more. To
# deploy it, put the hash of the wheel that you have inspected in the place of this one and give pip its
# folder (--find-links).
# For the same reason `make` does not use this file: constraints.txt pins versions, not hashes.
# Made by tools/deployment.py; other platforms and versions of Python make their own.
"""
_PINNED = re.compile(r"^([\w.-]+)==(\S+) --hash=sha256:([0-9a-f]{64})$")


def needed() -> dict[str, Distribution]:
    """All distributions that rpel needs to run, by canonical name, without rpel itself."""
    distributions: dict[str, Distribution] = {}
    waiting = own_dependencies()
    while waiting:
        name = waiting.pop()
        if name not in distributions:
            distributions[name] = distribution(name)
            waiting += dependencies(distributions[name].requires or [])
    return dict(sorted(distributions.items()))


def own_dependencies() -> list[str]:
    """What pyproject.toml says, not what was installed some time ago."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dependencies(project["dependencies"])


def dependencies(texts: Iterable[str]) -> list[str]:
    """The canonical names of requirements that count here, extras left out."""
    wanted = [Requirement(text) for text in texts]
    return sorted(
        canonicalize_name(one.name)
        for one in wanted
        if one.marker is None or one.marker.evaluate({"extra": ""})
    )


def _version(distribution: Distribution) -> str:
    return distribution.version.partition("+")[0]  # a local build is published under the number alone


# --- the lock -----------------------------------------------------------------------------------------------


def lock() -> str:
    """The lock file, with the hash of the file that pip would install for each package."""
    pins = [f"{name}=={_version(package)}" for name, package in needed().items()]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_FIND_LINKS")}
    environment["PIP_CONFIG_FILE"] = os.devnull  # the published files, not what this machine has beside them
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", str(report)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *pins], env=environment, check=True)
        installed = json.loads(report.read_text())["install"]
    lines = sorted(
        f"{canonicalize_name(one['metadata']['name'])}=={one['metadata']['version']} "
        f"--hash=sha256:{one['download_info']['archive_info']['hashes']['sha256']}"
        for one in installed
    )
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return HEADER.format(python=python, torch=_version(distribution("torch"))) + "\n".join(lines) + "\n"


def locked() -> dict[str, tuple[str, str]]:
    """(version, SHA-256) of each package in the lock file."""
    lines = (_PINNED.match(line) for line in LOCK.read_text().splitlines())
    return {line[1]: (line[2], line[3]) for line in lines if line is not None}


# --- the bill of materials ----------------------------------------------------------------------------------


def sbom() -> dict[str, Any]:
    """CycloneDX 1.6: every component with version, licence and hash, and what depends on what."""
    parts, root, own = needed(), distribution("rpel"), own_dependencies()
    links = {name: dependencies(package.requires or []) for name, package in parts.items()}
    bill: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": _component("rpel", root) | {"type": "application"}},
        "components": [_component(name, package) for name, package in parts.items()],
        "dependencies": [
            {
                "ref": _purl(name, package),
                "dependsOn": [_purl(one, parts[one]) for one in links.get(name, own)],
            }
            for name, package in {"rpel": root, **parts}.items()
        ],
    }
    content = json.dumps(bill, sort_keys=True)
    return {"serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}", **bill}


def _purl(name: str, distribution: Distribution) -> str:
    return f"pkg:pypi/{name}@{_version(distribution)}"


def _component(name: str, distribution: Distribution) -> dict[str, Any]:
    purl = _purl(name, distribution)
    part: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": _version(distribution),
        "purl": purl,
    }
    if distribution.metadata["Summary"]:
        part["description"] = distribution.metadata["Summary"]
    if licence := _licence(distribution):
        part["licenses"] = [licence]
    version, digest = locked().get(name, ("", ""))
    if version == part["version"]:
        part["hashes"] = [{"alg": "SHA-256", "content": digest}]
    return part


def _licence(distribution: Distribution) -> dict[str, Any] | None:
    """What the package says of its licence: an SPDX expression, a classifier, or a short text."""
    if expression := distribution.metadata["License-Expression"]:
        return {"expression": expression}
    for text in distribution.metadata.get_all("Classifier") or []:
        if text.startswith("License :: ") and text != "License :: OSI Approved":
            return {"license": {"name": text.rpartition(" :: ")[2]}}
    text = (distribution.metadata["License"] or "").strip()
    return {"license": {"name": text.splitlines()[0][:80]}} if text else None


if __name__ == "__main__":
    if sys.argv[1:] == ["lock"]:
        print(lock(), end="")
    elif sys.argv[1:] == ["sbom"]:
        print(json.dumps(sbom(), indent=2, ensure_ascii=False))
    else:
        sys.exit(__doc__)
