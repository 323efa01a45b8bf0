"""peer.toml: paths relative to the file, misspelt keys refused, and no key that seeds the draws."""

from pathlib import Path

import pytest
import tomli_w

from rpel.peer.config.settings import Config, listen_address


def written(folder: Path, **keys: object) -> Path:
    path = folder / "peer.toml"
    path.write_text(tomli_w.dumps({"id": "clinic-3", **keys}))
    return path


def test_paths_are_relative_to_the_file_wherever_the_peer_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    written(home, members="../shared/members.toml", key="/etc/rpel.key", data="scans", log="log/rounds.jsonl")
    monkeypatch.chdir(tmp_path)
    found = Config.load("home/peer.toml")
    assert found.members == home / "../shared/members.toml"
    assert found.next_members == home / "../shared/members.next.toml"
    assert found.key == Path("/etc/rpel.key")
    assert found.certificate == home / "peer.crt"
    assert found.state_dir == home / "state"
    assert found.data == home / "scans"
    assert found.log == home / "log/rounds.jsonl"


def test_peer_config_needs_only_the_id(tmp_path: Path) -> None:
    found = Config.load(written(tmp_path))
    assert (found.id, found.task, found.data, found.log) == (
        "clinic-3",
        "mnist-sample",
        None,
        None,
    )
    assert (found.listen, found.metrics_listen) == ("127.0.0.1:7443", "127.0.0.1:9464")
    (tmp_path / "peer.toml").write_text("")
    with pytest.raises(ValueError, match=r"peer\.toml.*'id'"):
        Config.load(tmp_path / "peer.toml")


def test_saved_peer_config_is_loaded_unchanged(tmp_path: Path) -> None:
    first = Config.load(
        written(tmp_path, task="clinic.training:task", data="scans", next_members="later.toml")
    )
    (tmp_path / "sub").mkdir()
    first.save(tmp_path / "sub" / "peer.toml")
    again = Config.load(tmp_path / "sub" / "peer.toml")
    assert again.key.resolve() == first.key.resolve()
    assert again.next_members.resolve() == first.next_members.resolve()
    assert (again.id, again.task, again.listen) == (first.id, first.task, first.listen)
    assert again.log is None


@pytest.mark.parametrize("key", ["seed", "coins", "random_state", "rng", "Seed", "entropy", "draw_seed"])
def test_peer_config_cannot_fix_the_sampler(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="operating system"):
        Config.load(written(tmp_path, **{key: 7}))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lisen": "127.0.0.1:1"}, "unknown key 'lisen': the nearest is 'listen'"),
        ({"listen": "7443"}, "write host:port"),
        ({"listen": "127.0.0.1:70000"}, "write host:port"),
        ({"metrics_listen": "::1:9464"}, "write host:port"),
        ({"listen": 7443}, "listen 7443 is not valid: it takes text"),
        ({"task": "minst"}, "the nearest is 'mnist'"),
        ({"task": "module:"}, "module:task"),
        ({"id": "a b"}, "such as 'a-b'"),
        ({"members": ["members.toml"]}, "it takes text"),
    ],
)
def test_bad_peer_config_names_file_and_value(tmp_path: Path, keys: dict[str, object], words: str) -> None:
    path = written(tmp_path, **keys)
    with pytest.raises(ValueError) as caught:
        Config.load(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", ":7443", "host", "host:", "host:x", "host:-1", "host:٣", "::1:7443"])
def test_address_is_host_and_port(text: str) -> None:
    with pytest.raises(ValueError, match=r"^address '.*host:port"):
        listen_address(text)
