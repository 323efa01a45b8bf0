"""rpel doctor says what is wrong with a machine and how to mend it; rpel bench measures ratios."""

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from rpel.cli import main
from rpel.experiments.bench import Measurement, fastest
from rpel.operations import doctor
from rpel.operations.doctor import Check, examine


def rpel(*arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    found = capsys.readouterr()
    assert left.value.code == code, found.out + found.err
    return found.out


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {one.check: one for one in checks}


def test_a_good_machine_passes_and_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(rpel("doctor", "--json", capsys=capsys))
    assert all(set(row) == {"check", "ok", "detail", "remedy"} for row in rows)
    names = {row["check"] for row in rows}
    assert names >= {
        "python", "packages", "threads", "vector units", "kernels", "kernel cache", "data sets", "disk", "memory",
        "clock",
    }  # fmt: skip
    assert "all is well" in rpel("doctor", capsys=capsys)


def test_what_is_wrong_comes_with_a_remedy_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    text = rpel("doctor", capsys=capsys, code=1)
    assert "WRONG  disk: 0 B free here\n       make room" in text
    assert "1 problem found" in text


def test_a_check_that_cannot_be_made_is_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no such machine")

    monkeypatch.setattr(doctor, "_available", broken)
    found = by_name(examine())
    assert (found["memory"].ok, "no such machine" in found["memory"].detail) == (False, True)
    assert found["disk"].ok


def test_a_kernel_cache_that_cannot_be_written_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RPEL_CACHE", str(tmp_path / "file"))
    (check,) = doctor._cache()
    assert not check.ok
    assert "RPEL_CACHE" in check.remedy


def test_memory_is_compared_with_what_a_preset_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_available", lambda: 4 * 10**9)
    assert by_name(examine("mnist-30"))["memory"].ok
    large = by_name(examine("scale-1m"))["memory"]
    assert not large.ok
    assert "scale-1m needs about" in large.detail


def test_a_peers_files_certificate_and_port_are_looked_at(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as left:
        main(["peer", "init", "--id", "a", "--url", "https://127.0.0.1:7443", "--dir", str(tmp_path)])
    assert left.value.code == 0
    config = tmp_path / "peer.toml"
    found = by_name(examine(config=config))
    assert found["certificate"].ok
    assert found["key"].ok
    assert not found["members"].ok, "there is no members.toml yet"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (port,) = doctor._port(f"127.0.0.1:{taken.getsockname()[1]}")
    assert not port.ok
    assert "choose another listen" in port.remedy


def test_a_measurement_is_a_ratio() -> None:
    one = Measurement("ours", 0.5, "theirs", 2.0)
    assert (one.ratio, one.to_dict()["ratio"]) == (4.0, 4.0)
    calls: list[int] = []
    assert fastest(lambda: calls.append(1), 4) >= 0
    assert len(calls) == 4
