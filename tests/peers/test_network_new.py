"""Making a network and joining it, as a stranger does: commands, files, exit statuses."""

import hashlib
import json
import re
import socket
import stat
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tomli_w

from rpel import certificates, models
from rpel.peer.config.membership import Membership
from rpel.peer.config.settings import Config
from rpel.peer.core import wire
from rpel.peer.core.evidence import Proof, Signed, of_member, sign
from rpel.peer.io.proofs import keep
from rpel.peer.learn.learner import seed_of
from rpel.peer.net import tls
from rpel.peer.ops.create import NewNetwork, new, stall_proof
from rpel.peer.ops.join import join, usual_listen
from rpel.peer.state.models import load
from rpel.record import parse_pairs
from support.commands import Printed, rpel

EPOCH = 4e9


def found(folder: Path, nodes: int = 12, byzantine: int = 2, **options: Any) -> NewNetwork:
    return new(stall_proof(nodes, byzantine, rounds=200), epoch=EPOCH, out=folder, **options)


def network_new(
    capsys: pytest.CaptureFixture[str], out: Path, *more: str, peers: int = 12, code: int = 0
) -> Printed:
    """The command for two hostile peers of twelve and 30 rounds, unless more says otherwise."""
    size = ("--peers", str(peers), "--byzantine", "2", "--rounds", "30")
    return rpel("network", "new", *size, "--out", str(out), *more, capsys=capsys, code=code)


# --- network new --------------------------------------------------------------------------------------------


def test_network_new_peer_init_and_add_found_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    size = ("--peers", "4", "--byzantine", "1", "--rounds", "30")
    text = rpel("network", "new", *size, "--epoch", "+3600", "--allow-private", capsys=capsys).out
    assert "rpel peer init" in text
    for i in range(4):
        where = ("--url", f"https://127.0.0.1:{7000 + i}", "--dir", f"p{i}")
        entry = rpel("peer", "init", "--id", f"p{i}", *where, capsys=capsys).out
        with (tmp_path / "members.toml").open("a") as file:
            file.write(entry)
    m = Membership.load(tmp_path / "members.toml")
    assert (m.nodes, m.byzantine, m.pull, m.b_hat, m.rounds) == (4, 1, 3, 1, 30)
    for i in range(4):
        own = Config.load(tmp_path / f"p{i}" / "peer.toml")
        assert own.members.resolve() == tmp_path / "members.toml"
        assert Membership.load(own.members).index(own.id) == i
        tls.server_context(own.certificate, own.key, [member.certificate for member in m.members])


def test_network_new_prints_plan_probability_and_tolerance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ("network", "new", "--peers", "12", "--byzantine", "2", "--rounds", "200")
    text = rpel(*base, "--out", str(tmp_path / "a"), capsys=capsys).out
    for part in (
        "s = 9",
        "b_hat = 2",
        "100 %",
        "2 hostile silent and 2 honest late",
        "4 answers",
        "108 messages",
        "Next:",
    ):
        assert part in text
    facts = json.loads(rpel(*base, "--json", "--out", str(tmp_path / "b"), capsys=capsys).out)
    expected = {"peers": 12, "byzantine": 2, "rounds": 200, "pull": 9, "b_hat": 2, "no_shows": 2}
    assert facts.items() >= (expected | {"parameters": 176_050, "messages_per_round": 108}).items()
    assert 1 <= facts["bytes_per_round"] / (108 * 4 * 176_050) <= 1.01
    assert facts["deadline"] == 0.6 * facts["period"] == 36
    assert facts["epoch"] % 3600 == 0


def test_members_file_and_initial_model_agree(tmp_path: Path) -> None:
    result = found(tmp_path, seed=5)
    m = Membership.load(tmp_path / "members.toml", draft=True)
    assert m == result.membership
    assert m.init_sha256 == hashlib.sha256((tmp_path / "init.safetensors").read_bytes()).hexdigest()
    layout, flat = load(tmp_path / "init.safetensors")
    assert m.model_header_sha256 == layout.sha256
    module = models.model("mnist", seed=5)
    assert dict(zip(layout.names, layout.shapes, strict=True)) == models.shapes(module)
    assert list(layout.names) == list(models.shapes(module))  # the order of the task's vector
    np.testing.assert_array_equal(flat, models.flatten(module).numpy())
    assert m.hyperparameters == {
        "lr": 0.5, "momentum": 0.9, "weight_decay": 1e-4, "batch_size": 25, "model": "mnist",
        "partition": "dirichlet",
    }  # fmt: skip


def test_hyperparameters_given_take_effect_and_others_keep_their_values(tmp_path: Path) -> None:
    given = parse_pairs(["lr=.1,batch_size=10", '{"model": "mlp"}'], "hyperparameters", "lr=0.1")
    for table, lr in ((given, 0.1), (given | {"lr": [[500, 0.5], [1000, 0.1]]}, "steps(500:0.5, 1000:0.1)")):
        result = found(tmp_path / str(lr), hyperparameters=table)
        kept = Membership.load(result.members, draft=True).hyperparameters
        assert (kept["lr"], kept["batch_size"], kept["model"], kept["momentum"]) == (lr, 10, "mlp", 0.9)
        assert result.layout.d == models.parameter_count(models.model("mlp"))


def test_optimiser_rate_by_name_and_outer_step_are_in_the_file_that_all_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = {"optimizer": "adamw(eps=1e-06)", "lr": "cosine(0.01, warmup=5)"}
    local = ["--local-steps", "5", "--hyperparameters", json.dumps(table), "--outer", "nesterov(0.5)"]
    network_new(capsys, tmp_path, *local)
    m = Membership.load(tmp_path / "members.toml", draft=True)
    assert (m.outer, m.outer_lr, m.outer_momentum) == ("nesterov", 0.5, 0.9)
    assert table.items() <= m.hyperparameters.items()


def test_user_task_starts_from_the_user_model_byte_for_byte(tmp_path: Path) -> None:
    model = tmp_path / "mine.safetensors"
    safetensors.numpy.save_file({"w": np.arange(6.0).reshape(2, 3)}, model, metadata={"format": "np"})
    result = found(tmp_path / "net", task="clinic.work:task", model=model, hyperparameters={"depth": 3})
    assert (tmp_path / "net" / "init.safetensors").read_bytes() == model.read_bytes()
    assert result.layout.dtype == np.float64
    assert result.membership.hyperparameters == {"depth": 3}


def test_network_for_user_training_loops_needs_no_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "mine.safetensors"
    safetensors.numpy.save_file({"w": np.arange(6.0).reshape(2, 3)}, model)
    printed = network_new(capsys, tmp_path / "net", "--task", "none", "--model", str(model))
    assert 'your loop, with rpel.Peer("peer.toml")' in printed.out
    assert "--task" not in printed.out
    assert "needs --model" in network_new(capsys, tmp_path / "net", "--task", "none", code=2).err


def test_built_in_task_takes_a_trained_model_in_any_order(tmp_path: Path) -> None:
    module = models.model("mnist", seed=9)
    named = {name: parameter.detach().numpy() for name, parameter in module.named_parameters()}
    safetensors.numpy.save_file(named, tmp_path / "trained.safetensors")
    found(tmp_path / "net", model=tmp_path / "trained.safetensors")
    layout, flat = load(tmp_path / "net" / "init.safetensors")
    assert layout == wire.Layout.of(module.named_parameters())
    np.testing.assert_array_equal(flat, models.flatten(module).numpy())
    with pytest.raises(ValueError, match=r"task 'mnist' \(mlp\)"):
        found(
            tmp_path / "b",
            task="mnist",
            model=tmp_path / "trained.safetensors",
            hyperparameters={"model": "mlp"},
        )


def test_fewer_no_shows_and_a_weak_catch_up_are_said_where_peers_are_few(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = network_new(capsys, tmp_path / "a", "--json", peers=8)
    assert json.loads(printed.out)["no_shows"] == 1
    assert "--no-shows is 1 instead of the usual 2" in printed.err
    assert not json.loads(printed.out)["strong_catch_up"]
    assert "cannot each pull 3 b_hat + 1 + 1 others" in printed.err
    printed = network_new(capsys, tmp_path / "b", "--no-shows", "2", peers=8, code=2)
    assert "no_shows 2 does not fit 8 peers with 2 hostile: the most is 1" in printed.err
    assert not (tmp_path / "b").exists()
    assert "--no-shows" not in network_new(capsys, tmp_path / "c", "--no-shows", "1", peers=8).err
    strong = network_new(capsys, tmp_path / "d", "--json")
    assert json.loads(strong.out)["strong_catch_up"]
    assert strong.err == ""


def test_network_new_overwrites_nothing(tmp_path: Path) -> None:
    found(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"members\.toml"):
        found(tmp_path)
    (tmp_path / "members.toml").unlink()
    with pytest.raises(ValueError, match=r"init\.safetensors"):
        found(tmp_path, seed=1)
    assert (tmp_path / "init.safetensors").read_bytes() == before[tmp_path / "init.safetensors"]
    found(tmp_path)  # the same model may lie there already


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--byzantine", "6"], "at most 5"),
        (["--byzantine", "4"], "at most byzantine 3"),
        (["--peers", "many"], "--peers"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--confidence", "1"], "strictly between 0 and 1"),
        (["--no-shows", "-1"], "no_shows -1"),
        (["--task", "minst"], "'mnist'"),
        (["--task", "my.module:task"], "--model"),
        (["--model", "none.safetensors"], "there is no file none.safetensors"),
        (["--period", "0"], "period 0"),
        (["--deadline", "60"], "59.94"),
        (["--epoch", "tomorrow"], "+600"),
        (["--epoch", "2020-01-01T00:00Z"], "2020-01-01T00:00Z"),
        (["--epoch", "2090-01-01T00:00"], "with its zone"),
        (["--hyperparameters", "lr"], "key=value"),
        (["--hyperparameters", "lrr=1"], "'lr'"),
        (["--hyperparameters", "lr=fast"], "lr"),
        (["--hyperparameters", "{lr"], "JSON"),
        (["--hyperparameters", "optimizer=adamm"], "'adam'"),
        (["--hyperparameters", "optimizer=adam(beta=1)"], "'betas'"),
        (["--outer", "nesterof"], "nesterov"),
        (["--outer", "nesterov(speed=1)"], "it takes lr, momentum"),
        (["--rule", "trimmedmean"], "'trimmed_mean'"),
        (["--rule", "nnm"], "'nnm+trimmed_mean'"),
        (["--puls", "3"], "--puls"),
    ],
)
def test_bad_network_new_options_are_refused_and_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    printed = network_new(capsys, tmp_path / "net", *options, code=2)
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not (tmp_path / "net").exists()


# --- peer init ----------------------------------------------------------------------------------------------


def test_peer_init_writes_the_key_and_prints_the_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = rpel(
        "peer", "init", "--id", "clinic-3", "--url", "https://clinic.example:7443", "--organisation",
        "Clinic", "--members", str(tmp_path / "net" / "members.toml"), "--dir", str(tmp_path / "peer"),
    capsys=capsys)  # fmt: skip
    secret = (tmp_path / "peer" / "peer.key").read_text()
    assert stat.S_IMODE((tmp_path / "peer" / "peer.key").stat().st_mode) == 0o600
    assert secret.splitlines()[1] not in printed.out + printed.err
    (entry,) = tomllib.loads(printed.out)["member"]
    assert (entry["id"], entry["organisation"], entry["url"]) == (
        "clinic-3",
        "Clinic",
        "https://clinic.example:7443",
    )
    assert entry["certificate"] == (tmp_path / "peer" / "peer.crt").read_text()
    assert entry["fingerprint"] == certificates.check_certificate(entry["certificate"]).fingerprint
    assert "is not there yet" in printed.err
    own = Config.load(tmp_path / "peer" / "peer.toml")
    assert own.members.resolve() == tmp_path / "net" / "members.toml"
    assert own.listen == "0.0.0.0:7443"


def test_peer_init_never_overwrites_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("peer", "init", "--id", "a", "--url", "https://h:1", "--dir", str(tmp_path), "--json")
    printed = rpel(*arguments, capsys=capsys)
    facts = json.loads(printed.out)
    assert tomllib.loads(facts["entry"])["member"][0]["fingerprint"] == facts["fingerprint"]
    assert "PRIVATE" not in printed.out + printed.err
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert "peer.key exists already" in rpel(*arguments, code=2, capsys=capsys).err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--id", "a b"], "'a-b'"),
        (["--url", "http://h:1"], "https://h:1"),
        (["--task", "minst"], "'mnist'"),
        (["--listen", "7443"], "host:port"),
        (["--metrics-listen", "9464"], "host:port"),
        (["--days", "0"], "nearest 1"),
    ],
)
def test_bad_peer_init_options_write_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    base = ["peer", "init", "--id", "a", "--url", "https://h:1", "--dir", str(tmp_path / "peer")]
    printed = rpel(*base, *options, code=2, capsys=capsys)
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert not (tmp_path / "peer").exists()


def test_peer_init_refuses_an_existing_member(tmp_path: Path) -> None:
    result = found(tmp_path)
    first = join(id="a", url="https://h:1", members=result.members, folder=tmp_path / "a")
    assert first.notes == ()
    with result.members.open("a") as file:
        file.write(first.member.toml())
    again = join(id="a", url="https://h:1", members=result.members, folder=tmp_path / "rotated")
    assert "rpel network change --replace" in again.notes[0]
    assert again.member.fingerprint != first.member.fingerprint
    with pytest.raises(ValueError, match=r"'https://h:1'.*'a'"):
        join(id="b", url="https://H:1/", members=result.members, folder=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_peers_on_one_machine_get_distinct_metrics_ports(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        taken = held.getsockname()[1]
        homes = [tmp_path / f"p{i}" for i in range(3)]
        for i, home in enumerate(homes):
            join(id=f"p{i}", url=f"https://h:{i + 1}", folder=home)
        found = [Config.load(home / "peer.toml").metrics_listen for home in homes]
    assert len(set(found)) == 3
    assert f"127.0.0.1:{taken}" not in found


def test_key_with_passphrase_needs_its_passphrase_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "passphrase"
    secret.write_text("correct horse\n")
    arguments = ("peer", "init", "--id", "a", "--url", "https://h:1", "--dir", str(tmp_path / "p"))
    printed = rpel(*arguments, "--passphrase-file", str(secret), code=2, capsys=capsys)
    assert "has mode 0644" in printed.err
    secret.chmod(0o600)
    rpel(*arguments, "--passphrase-file", str(secret), capsys=capsys)
    assert "ENCRYPTED" in (tmp_path / "p" / "peer.key").read_text()
    own = Config.load(tmp_path / "p" / "peer.toml")
    assert own.passphrase_file is not None
    pem = own.certificate.read_text()
    tls.server_context(own.certificate, tls.ProtectedKey(own.key, own.passphrase_file), [pem])
    with pytest.raises(ValueError, match=r"passphrase_file.*peer\.toml"):
        tls.server_context(own.certificate, own.key, [pem])
    secret.write_text("wrong\n")
    with pytest.raises(ValueError, match=r"passphrase in .* key"):
        tls.read_key(tls.ProtectedKey(own.key, secret))
    secret.write_text("")
    with pytest.raises(ValueError, match=r"passphrase is empty"):
        tls.read_key(tls.ProtectedKey(own.key, secret))


# --- network add, members -----------------------------------------------------------------------------------


def entry(folder: Path, number: int, **changes: str) -> Path:
    """The file with a new member's entry; changes: other values in it."""
    member = (
        vars(join(id=f"c{number}", url=f"https://h{number}:1", folder=folder / f"c{number}").member) | changes
    )
    path = folder / f"c{number}.toml"
    path.write_text(tomli_w.dumps({"member": [member]}))
    return path


def test_entries_are_added_until_the_network_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = found(tmp_path, nodes=4, byzantine=1)
    paths = [str(entry(tmp_path, number)) for number in range(5)]
    base, members = ("network", "add"), ("--members", str(result.members))
    text = rpel(*base, *paths[:3], *members, capsys=capsys).out
    assert "lacks 1 of 4 members" in text
    told = json.loads(rpel(*base, paths[3], *members, "--json", capsys=capsys).out)
    assert (told["joined"], told["members"], told["missing"], told["changed"]) == (["c3"], 4, 0, {})
    m = Membership.load(result.members)
    assert [member.id for member in m.members] == ["c0", "c1", "c2", "c3"]
    assert m.replace(members=()) == result.membership
    text = rpel("network", "show", members[1], capsys=capsys).out
    assert max(map(len, text.splitlines())) <= 80
    for member in m.members:
        assert member.fingerprint in text.replace(" ", "").replace("\n", "")
    told = json.loads(rpel("network", "show", members[1], "--json", capsys=capsys).out)
    assert [one["fingerprint"] for one in told] == [member.fingerprint for member in m.members]


@pytest.mark.parametrize(
    "changes",
    [
        # a fingerprint of its own, and what follows concealed
        {"organisation": "Clinic\n  0123 4567 89ab\x1b[8m"},
        {"organisation": "\x1b[2A\x1b[2K"},  # over the fingerprint of the member above
        {"organisation": "\u202eclinic\u2028\x9b2J"},
        # on a line of its own where the terminal breaks it
        {"organisation": "Clinic" + 70 * " " + "0123 4567 " * 8},
        {"url": "https://h0\x1bc:1"},
        {"url": f"https://{'0123-4567-' * 8}:1"},
    ],
)
def test_entry_cannot_write_what_looks_like_a_fingerprint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str]
) -> None:
    members = ("--members", str(found(tmp_path, nodes=4, byzantine=1).members))
    added = rpel("network", "add", str(entry(tmp_path, 0, **changes)), *members, capsys=capsys).out
    for text in (added, rpel("network", "show", members[1], capsys=capsys).out):
        who, *fingerprint, last, end = text.split("\n")
        assert (len(fingerprint), end) == (2, "")
        assert all(letter.isprintable() for letter in who + last)
        assert len(who.rstrip()) <= 80


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": "c0"}, "'c0' is a member already"),
        ({"url": "https://H0:1/"}, "members 'c0' and 'c1' have the same url 'https://h0:1'"),
        ({"url": "http://h1:1"}, "write it as https://h1:1"),
        ({"fingerprint": "0" * 64}, "is not that of its certificate"),
        ({"name": "x"}, "unknown key 'name'"),
    ],
)
def test_network_add_names_a_wrong_entry_and_adds_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, str], words: str
) -> None:
    members = found(tmp_path).members
    rpel("network", "add", str(entry(tmp_path, 0)), "--members", str(members), capsys=capsys)
    before = members.read_bytes()
    right, wrong = entry(tmp_path, 2), entry(tmp_path, 1, **changes)
    printed = rpel("network", "add", str(right), str(wrong), "--members", str(members), code=2, capsys=capsys)
    assert words in printed.err
    assert printed.err.count("\n") == 1
    assert members.read_bytes() == before


def test_network_add_refuses_a_file_that_is_no_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = found(tmp_path).members
    for text in ("", "[[", "a = 1", "member = 3", 'id = "a"'):
        (tmp_path / "e.toml").write_text(text)
        printed = rpel(
            "network", "add", str(tmp_path / "e.toml"), "--members", str(members), code=2, capsys=capsys
        )
        assert "is not an entry that `rpel peer init` printed" in printed.err
    assert (
        "there is no file"
        in rpel("network", "add", "none.toml", "--members", str(members), code=2, capsys=capsys).err
    )


@pytest.mark.parametrize(
    ("url", "listen"),
    [
        ("https://localhost:7", "127.0.0.1:7"),
        ("https://[::1]:7", "[::1]:7"),
        ("https://10.1.2.3:7", "0.0.0.0:7"),
        ("https://[2001:db8::1]:7", "[::]:7"),
    ],
)
def test_peer_listens_on_the_port_of_its_url(url: str, listen: str) -> None:
    assert usual_listen(url) == listen


# --- verify -------------------------------------------------------------------------------------------------


def test_proof_is_verified_by_anybody_who_has_the_members_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = found(tmp_path, nodes=4, byzantine=1)
    for number in range(4):
        rpel("network", "add", str(entry(tmp_path, number)), "--members", str(result.members), capsys=capsys)
    m = Membership.load(result.members)
    key = tls.read_key(tmp_path / "c2" / "peer.key")
    pair = [Signed(digest, sign(key, of_member(m, 2), 7, digest)) for digest in (bytes(32), bytes([1] * 32))]
    path = keep(tmp_path / "evidence", Proof(2, m.members[2].fingerprint, 7, *pair), m)
    command = ("network", "verify", str(path), "--members", str(result.members))
    assert (
        "proven: c2 (no organisation named) signed two models of round 7" in rpel(*command, capsys=capsys).out
    )
    told = json.loads(rpel(*command, "--json", capsys=capsys).out)
    assert (told["proven"], told["member"], told["round"]) == (True, "c2", 7)
    path.write_text(path.read_text().replace('"round": 7', '"round": 8'))
    assert rpel(*command, code=1, capsys=capsys).out.startswith("not proven: ")
    assert json.loads(rpel(*command, "--json", code=1, capsys=capsys).out)["proven"] is False
    assert "none.json" in rpel("network", "verify", "none.json", *command[3:], code=2, capsys=capsys).err
    assert "is a folder: give a peer" in rpel("network", "verify", str(tmp_path), code=2, capsys=capsys).err


def test_network_founded_again_under_the_same_name_has_another_run_id(tmp_path: Path) -> None:
    names = [found(tmp_path / str(i), run="ward-7").membership.run for i in range(2)]
    assert len(set(names)) == 2
    assert all(re.fullmatch("ward-7-[0-9a-f]{32}", name) for name in names)
    assert len({seed_of(name) for name in names}) == 1  # and shares its data out alike
