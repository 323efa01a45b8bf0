"""A url that `peer init` accepts is one that the other members can ask."""

from pathlib import Path

import pytest

from support.commands import rpel


@pytest.mark.parametrize("host", ["clinic-3.example", "192.0.2.7", "[2001:db8::7]"])
def test_url_in_ascii_is_written_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    url = f"https://{host}:7443"
    out, _ = rpel("peer", "init", "--id", "clinic-3", "--url", url, "--dir", str(tmp_path), capsys=capsys)
    assert f'url = "{url}"' in out


def test_url_beyond_ascii_is_refused_with_its_ascii_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "https://klinik-münchen.example:7443"
    folder = ("--dir", str(tmp_path / "clinic"))
    _, err = rpel("peer", "init", "--id", "clinic-3", "--url", url, *folder, capsys=capsys, code=2)
    assert "https://xn--klinik-mnchen-3ob.example:7443" in err
    assert not (tmp_path / "clinic" / "peer.key").exists()
