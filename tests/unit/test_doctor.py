"""rpel doctor says what is wrong with a machine and how to repair it."""

import importlib.metadata
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rpel import data, doctor
from rpel.certificates import create
from rpel.doctor import Check, examine
from rpel.models import model, parameter_count
from rpel.spec import load, presets
from support.commands import rpel


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {one.check: one for one in checks}


def test_check_that_cannot_be_made_is_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no such machine")

    monkeypatch.setattr(doctor, "free_memory", broken)
    checks = by_name(examine())
    assert (checks["memory"].ok, "no such machine" in checks["memory"].detail) == (False, True)
    assert checks["disk"].ok


def test_kernel_cache_that_cannot_be_written_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RPEL_CACHE", str(tmp_path / "file"))
    (check,) = doctor._cache()
    assert not check.ok
    assert "RPEL_CACHE" in check.remedy


def test_memory_is_compared_with_what_a_preset_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda: 4 * 10**9)
    assert by_name(examine("mnist-30"))["memory"].ok
    large = by_name(examine("scale-1m"))["memory"]
    assert not large.ok
    assert "scale-1m needs about" in large.detail


PARAMETERS = {
    "cifar10-100": 1_310_922, "cifar10-20": 1_310_922, "femnist-30": 2_368_318, "femnist-writers": 160_510,
    "heart-4": 46, "mnist-100": 176_050, "mnist-30": 176_050, "quickstart": 176_050,
    "resnet18-cifar10": 11_173_962, "reviews-16": 263_266, "scale-100k": 650, "scale-1m": 650,
    "shakespeare": 818_241,
}  # fmt: skip


@pytest.mark.parametrize("name", presets())
def test_memory_of_every_preset_is_estimated_from_its_parameters(name: str) -> None:
    (check,) = doctor._memory(name)
    assert f"{name} needs about" in check.detail
    assert f"(d = {PARAMETERS[name]:,})" in check.detail


@pytest.mark.parametrize("name", presets())
def test_parameters_of_every_preset_are_those_of_its_run(name: str, shared_data: Path) -> None:
    spec = load(name)
    dataset = data.load(spec.dataset, str(shared_data))
    network = model(spec.model, dataset.shape, dataset.classes)
    assert parameter_count(network) == PARAMETERS[name]


def test_data_folder_or_data_set_that_cannot_be_had_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RPEL_CACHE", str(tmp_path))
    monkeypatch.delenv("RPEL_DATA", raising=False)
    assert "does not exist" in by_name(examine(data_dir=str(tmp_path / "nowhere")))["data sets"].detail
    checks = by_name(examine("femnist-30", data_dir=str(tmp_path)))
    assert not checks["data"].ok, "nobody offers FEMNIST for download"
    assert "femnist/train/*.json" in checks["data"].remedy
    assert "data" not in by_name(examine("mnist-30", data_dir=str(tmp_path))), (
        "MNIST is downloaded when first used"
    )
    images = tmp_path / "MNIST" / "raw"
    images.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (images / f"{name}-ubyte").write_bytes(b"damaged")
    assert not by_name(examine(data_dir=str(tmp_path)))["data set mnist"].ok
    assert "WRONG  data set mnist" in rpel("doctor", "--data-dir", str(tmp_path), capsys=capsys, code=1).out


def test_package_that_is_too_old_or_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda name: ["numpy>=99", "no-such-package>=1", "scipy>=1.0"]
    )
    (check,) = doctor._packages()
    assert not check.ok
    assert re.fullmatch(r"numpy \S+ is older than 99; no-such-package is missing", check.detail)


@pytest.fixture
def peer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A member's own files, as rpel peer init writes them."""
    where = ("--url", "https://127.0.0.1:7443", "--dir", str(tmp_path))
    rpel("peer", "init", "--id", "a", *where, capsys=capsys)
    return tmp_path / "peer.toml"


def test_peers_good_files_pass_and_what_is_missing_is_named(
    peer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = by_name(examine(config=peer))
    assert all(checks[name].ok for name in ("peer.toml", "certificate", "key", "port"))
    assert not checks["members"].ok, "there is no members.toml yet"
    assert "rpel network new" in checks["members"].remedy
    sizes = ["--peers", "4", "--byzantine", "1", "--rounds", "5"]
    rpel("network", "new", *sizes, "--out", str(tmp_path), capsys=capsys)
    checks = by_name(examine(config=peer))
    assert not checks["members"].ok, "and this peer is not in it"
    missing = by_name(examine(config=tmp_path / "nowhere.toml"))["peer"]
    assert (missing.ok, "nowhere.toml" in missing.detail, missing.remedy) == (
        False,
        True,
        "rpel peer init writes one",
    )


def test_certificate_that_ends_soon_or_has_ended_is_a_problem(peer: Path) -> None:
    now = datetime.now(UTC)
    for days, words in (
        (10, "valid for 10 more days"),
        (-3, f"expired on {now - timedelta(days=3):%Y-%m-%d}"),
    ):
        begun = now - timedelta(days=100 - days)
        (peer.parent / "peer.crt").write_text(create("a", days=100, now=begun + timedelta(hours=1))[1])
        checks = by_name(examine(config=peer))["certificate"]
        assert not checks.ok
        assert words in checks.detail
        assert "all members need its entry" in checks.remedy
