"""The command doctor: every fault with its remedy."""

import json
import re
import socket
import subprocess
from pathlib import Path

import pytest

from rpel.cli import main


def rpel(*arguments: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    output = capsys.readouterr()
    assert left.value.code == code, output.out + output.err
    return output.out


def test_good_machine_passes_and_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(rpel("doctor", "--json", capsys=capsys))
    assert all(set(row) == {"check", "ok", "detail", "remedy"} for row in rows)
    names = {row["check"] for row in rows}
    assert names >= {
        "python", "packages", "threads", "vector units", "kernels", "kernel cache", "data sets",
        "disk", "memory", "clock",
    }  # fmt: skip
    assert "all is well" in rpel("doctor", capsys=capsys)


def test_doctor_fault_comes_with_a_remedy_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small disk takes the right to mount")
    try:
        monkeypatch.chdir(tmp_path)
        text = rpel("doctor", capsys=capsys, code=1)
    finally:
        monkeypatch.undo()
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
    assert re.search(r"WRONG  disk: 1\.0\d MB free here\n       make room", text)
    assert "1 problem found" in text


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """A member's own files, as rpel peer init writes them."""
    with pytest.raises(SystemExit) as left:
        main(["peer", "init", "--id", "a", "--url", "https://127.0.0.1:7443", "--dir", str(tmp_path)])
    assert left.value.code == 0
    return tmp_path / "peer.toml"


def test_key_that_others_can_read_and_a_port_in_use_are_problems(
    peer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (peer.parent / "peer.key").chmod(0o644)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f'listen = "127.0.0.1:{taken.getsockname()[1]}"'
        peer.write_text(re.sub(r"^listen = .*$", listen, peer.read_text(), flags=re.MULTILINE))
        text = rpel("doctor", "--config", str(peer), capsys=capsys, code=1)
    assert re.search(r"WRONG  key: .* is readable by others\n       chmod 600", text)
    assert re.search(r"WRONG  port: .* Address already in use\n       stop what uses it", text)
