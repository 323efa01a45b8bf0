"""Whole peers over real TLS: they train together, survive being stopped,
and show nothing of a round left half-done.

What depends on how fast this machine is right now is not asserted, except that rounds of two seconds suffice
for six numbers.
"""

import json
import logging
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest

from rpel import certificates
from rpel.peer.config.membership import Member, Membership
from rpel.peer.core import wire
from rpel.peer.core.protocol import make_ready, sizes
from rpel.peer.net import tls
from rpel.peer.net.client import RemoteMember
from rpel.peer.node.node import Node, Round, from_os
from rpel.peer.state.memberships import IN_FORCE, MembershipWatcher
from rpel.peer.state.models import initial_body
from rpel.peer.state.store import Store
from rpel.rules import rule
from rpel.types import Outcome
from support.thread_network import LAYOUT, NetworkFiles, QuadraticLearner, Running, ended, found
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

ROUNDS, PERIOD = 4, 1.2


def peers(files: NetworkFiles, **given: object) -> list[Running]:
    nodes = [Node(config, **given) for config in files.configs]  # type: ignore[arg-type]
    return [Running(node, QuadraticLearner(i)) for i, node in enumerate(nodes)]


def lines(files: NetworkFiles, number: int) -> list[dict[str, object]]:
    text = (files.folder / f"peer-{number}" / "rounds.jsonl").read_text()
    return [json.loads(one) for one in text.splitlines()]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """What any machine does once, before the first round of its life."""
    make_ready(rule("nnm+trimmed_mean", f=1), 4, 6, np.float64)


# --- a network without faults -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[NetworkFiles, list[Running], list[str]]]:
    """Five peers after their last round, and what /readyz of the first said: before its life,
    and in each round."""
    files = found(tmp_path_factory.mktemp("whole"), 5, rounds=ROUNDS, period=PERIOD, soon=3.0, byzantine=1)
    running = peers(files)
    said: list[str] = []

    def visit(peer: Running, _: Round) -> bool:
        said.append(page(peer.node, "readyz"))
        return False

    with ended(running):
        for peer in running[1:]:
            peer.start()
        running[0].start(visit)
        yield files, [peer.join() for peer in running], said


def page(node: Node, path: str) -> str:
    host, port = node.pages.address
    try:
        with urlopen(f"http://{host}:{port}/{path}") as reply:
            return str(reply.read().decode())
    except HTTPError as refused:
        return refused.read().decode()


Finished = tuple[NetworkFiles, list[Running], list[str]]


def test_all_rounds_aggregate_and_all_models_agree(finished: Finished) -> None:
    _, running, _ = finished
    for peer in running:
        assert [round.number for round in peer.rounds] == [1, 2, 3, 4]
        assert [round.outcome for round in peer.rounds] == [None, "aggregated", "aggregated", "aggregated"]
        assert peer.rounds[-1] == Round(4, Outcome.AGGREGATED, asked=4, received=4, trim=1)
        assert peer.node.summary()["outcomes"]["aggregated"] == ROUNDS
        assert isinstance(peer.learner, QuadraticLearner)
        assert isinstance(running[0].learner, QuadraticLearner)
        # Everybody pulled everybody, and the learner holds the last round's model.
        np.testing.assert_allclose(peer.learner.x, running[0].learner.x, rtol=1e-12)
        assert abs(peer.learner.x - np.arange(6)).max() < 0.4


def test_log_has_a_line_for_each_round_without_weights(finished: Finished) -> None:
    files, _, _ = finished
    for number in range(5):
        found_lines = lines(files, number)
        assert [one["round"] for one in found_lines] == [1, 2, 3, 4]
        others = {f"peer-{i}": "ok" for i in range(5) if i != number}
        assert all(one["results"] == others for one in found_lines)
    # In the first round all start from zero: the digest is that of the bytes that were served.
    half = 0.5 * (np.arange(6) + 0.1 * 2)
    assert lines(files, 2)[0]["digest"] == wire.digest(LAYOUT, half)


def test_bytes_on_the_wire_are_the_models_that_were_asked_for(finished: Finished) -> None:
    _, running, _ = finished
    for peer in running:
        received = peer.node.metrics.registry.get_sample_value("rpel_bytes_total", {"direction": "received"})
        assert received == ROUNDS * 4 * LAYOUT.size


def test_peer_is_ready_while_it_runs(finished: Finished) -> None:
    _, running, said = finished
    assert said == ["ready\n"] * ROUNDS
    assert running[0].node.summary()["accuracy"] == 1.0


def test_after_the_end_a_new_start_gives_the_last_model_and_no_round(finished: Finished) -> None:
    files, running, _ = finished
    again = Running(Node(files.configs[1]), QuadraticLearner(1))
    last = files.membership.replace(byzantine=0)  # nobody else is there to tell the time
    again.node.service.now = replace(again.node.now, membership=last)
    again.start().join()
    assert again.rounds == []
    assert isinstance(again.learner, QuadraticLearner)
    assert isinstance(running[1].learner, QuadraticLearner)
    assert np.array_equal(again.learner.x, running[1].learner.x)


# --- stopping and going on ----------------------------------------------------------------------------------


def test_leaving_the_loop_publishes_nothing_and_a_restart_goes_on(tmp_path: Path) -> None:
    files = found(tmp_path, 5, rounds=7, period=PERIOD, soon=3.0, byzantine=1)
    running = peers(files)
    with ended(running):
        for peer in running[:4]:
            peer.start()
        first = running[4].start(lambda _, round: round.number == 3).join()
        with Store(files.configs[4].state_dir, LAYOUT) as store:
            memory = store.memory()
        assert memory.last_round < first.rounds[-1].number == 3
        assert 3 not in first.node.service.policy.published
        assert isinstance(first.learner, QuadraticLearner)

        second = Running(Node(files.configs[4]), QuadraticLearner(4)).start()
        running.append(second)
        second.join()
        assert isinstance(second.learner, QuadraticLearner)
        assert second.learner.restored == memory.last_round == first.learner.steps
        assert min(round.number for round in second.rounds) > memory.last_round
        assert second.node.summary()["round"] == 7
        for peer in running[:4]:
            assert peer.join().node.summary()["outcomes"]["aggregated"] == 7
    rounds = [one["round"] for one in lines(files, 4)]
    assert len(rounds) == len(set(rounds))


def test_error_in_the_users_step_publishes_nothing(tmp_path: Path) -> None:
    files = found(tmp_path, 2, rounds=50, period=PERIOD, soon=0.5)
    peer = Running(Node(files.configs[0]), QuadraticLearner(0))

    def fail(_: Running, round: Round) -> bool:
        raise RuntimeError("out of batches")

    with pytest.raises(RuntimeError, match="out of batches"):
        peer.start(fail).join()
    with Store(files.configs[0].state_dir, LAYOUT) as store:
        assert store.memory().last_round == 0
    assert peer.node.service.policy.published == []


def test_stop_ends_a_peer_waiting_for_the_first_round(tmp_path: Path) -> None:
    files = found(tmp_path, 2, rounds=5, period=PERIOD, soon=3600.0)
    peer = Running(Node(files.configs[0]), QuadraticLearner(0)).start()
    peer.entered.wait(PATIENCE)
    peer.node.stop()
    assert peer.join().rounds == []
    assert "stopp" in peer.node.service.unready


def test_answer_that_breaks_the_transport_does_not_end_the_peer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = found(tmp_path, 2, rounds=2, period=0.5, soon=0.5)
    peer = Running(Node(files.configs[0]), QuadraticLearner(0))

    async def broken(*_: object) -> None:
        raise LookupError("never seen before")

    monkeypatch.setattr(RemoteMember, "fetch", broken)
    assert peer.start().join().node.summary()["pulls"]["malformed"] == len(peer.rounds) > 0
    assert "asking peer-1 failed" in caplog.text


def test_request_is_counted_for_its_member_across_a_membership_change(tmp_path: Path) -> None:
    node = Node(found(tmp_path, 3).configs[0])
    before = node.now
    fewer = before.membership.replace(nodes=2, members=before.membership.members[:2])
    node.service.now = replace(before, membership=fewer)
    node.service.served(before, member=2, code=200, sent=8)
    assert b'rpel_serve_total{code="200",peer="peer-2"} 1.0' in node.metrics.text()


# --- descriptors and log lines ------------------------------------------------------------------------------

RESERVING = """
import logging, resource, sys
logging.basicConfig(format="%(message)s")
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from rpel.peer.net.limits import reserve_descriptors
print(reserve_descriptors(members=12), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
# connections of members both ways, mute, waiting, pending, the rest
NEEDED = 2 * 4 * 12 + 256 + 256 + 64 + 256


@pytest.mark.parametrize(
    ("soft", "hard", "may"), [(256, 2000, NEEDED), (1500, 2000, 1500), (256, 600, 600), (600, 600, 600)]
)
def test_peer_raises_the_descriptor_limit_or_says_why_not(soft: int, hard: int, may: int) -> None:
    command = [sys.executable, "-c", RESERVING, str(soft), str(hard)]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    assert made.stdout.split() == [str(min(NEEDED, hard)), str(may)]
    short = f"this process may open 600 files, but 12 members may take {NEEDED}: raise its limit"
    assert (short in made.stderr) == (hard < NEEDED)


def test_peer_recovers_from_exhausted_descriptors(tmp_path: Path) -> None:
    files = found(tmp_path, 3, rounds=4, period=PERIOD, soon=3.0)
    running = peers(files)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    said: dict[int, str] = {}
    running[0].node.progress = lambda report, _, trouble: said.update({report.round: trouble})

    def starve(_: Running, round: Round) -> bool:
        soft = 3 if round.number == 2 else before[0]  # what is open stays open, and nothing else opens
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
        return False

    try:
        with ended(running):
            for peer in running[1:]:
                peer.start()
            running[0].start(starve)
            for peer in running:
                peer.join()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert said[1] == said[4] == ""
    assert said[2] == "the state folder cannot be written: no file descriptors are left"
    assert lines(files, 0)[-1]["outcome"] == "aggregated"


# --- a new membership ---------------------------------------------------------------------------------------


def successor(files: NetworkFiles, from_round: int) -> Membership:
    """Without peer-4, and with a new key for peer-3."""
    secret, pem = certificates.create("peer-3")
    home = files.folder / "peer-3"
    tls.write_key(home / "peer.next.key", secret)
    (home / "peer.next.crt").write_text(pem)
    old = files.membership
    members = [*old.members[:3], Member.of("peer-3", old.members[3].url, pem)]
    return old.replace(members=tuple(members), nodes=4, pull=3, from_round=from_round)


def test_coming_membership_of_another_run_is_refused_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = found(tmp_path, 5, byzantine=1)
    now, news = files.membership, MembershipWatcher(files.configs[0])
    assert news.due(now, 9, 0.0) is None
    now.replace(run="another", from_round=2).save(tmp_path / "members.next.toml")
    with caplog.at_level("WARNING", "rpel"):
        assert news.due(now, 9, 0.0) is None
        assert news.due(now, 10, 0.0) is None
    assert caplog.text.count("is refused and the present one stays: its run is another") == 1


def test_peer_is_warned_in_time_that_a_coming_membership_names_another_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = found(tmp_path, 5, byzantine=1)
    new = successor(files, from_round=7)
    (files.folder / "peer-3" / "peer.next.key").unlink()
    new.save(tmp_path / "members.next.toml")
    news = MembershipWatcher(files.configs[3])
    with caplog.at_level("WARNING", "rpel"):
        assert news.due(files.membership, 6, 0.0) is None
        due = news.due(files.membership, 7, 0.0)
    assert due is not None
    assert due.hash == new.hash
    assert (
        "this peer will have to stop at round 7: the entry of 'peer-3' names the fingerprint" in caplog.text
    )


def test_peer_that_starts_in_a_pause_has_the_membership_that_brought_it(tmp_path: Path) -> None:
    files = found(tmp_path, 5, byzantine=1, soon=-60.0, rounds=1000)
    later = successor(files, from_round=2)
    paused = later.paced(files.membership.timetable.changed(2, later.period, "", pause=1e5))
    paused.save(tmp_path / "members.next.toml")
    node = Node(files.configs[0])
    assert (node.now.membership.hash, node.clock.round(), node.clock.open_round()) == (paused.hash, 1, 2)


def test_peer_that_missed_a_membership_finds_its_rounds_by_the_next(tmp_path: Path) -> None:
    """It was down while round 5 brought a longer period and round 60 another change."""
    files = found(tmp_path, 4, byzantine=1, soon=-1000.0, period=1.0, rounds=100)
    old, config = files.membership, files.configs[0]
    one = old.replace(rounds=200, from_round=5)
    one = one.paced(old.timetable.changed(5, 10 * old.period, ""))
    two = one.replace(from_round=60, confidence=0.98)
    two.save(config.next_members)
    position = one.timetable.start(70)
    for held, due in ((lambda hash: False, None), (lambda hash: hash == two.hash, two)):
        assert MembershipWatcher(config, held).due(old, 2000, position) == due
    assert MembershipWatcher(config, lambda hash: True).due(old, 2000, one.timetable.start(59)) is None
    assert not Node(config).over
    config.state_dir.mkdir()
    two.save(config.state_dir / IN_FORCE)
    assert Node(config).now.membership == two


def test_membership_with_another_beginning_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = found(tmp_path, 4)
    other = files.membership.replace(epoch=files.membership.epoch + 7.0, from_round=2)
    other.save(files.configs[0].next_members)
    assert MembershipWatcher(files.configs[0], lambda hash: True).due(files.membership, 3, 100.0) is None
    assert f"its round 1 begins at {other.epoch:.15g}" in caplog.text


def test_peer_started_with_an_outdated_membership_takes_part_once_it_has_the_file(tmp_path: Path) -> None:
    files = found(tmp_path, 4, rounds=400, period=PERIOD, soon=3.0, byzantine=1)
    configs = [config.replace(next_members=tmp_path / config.id / "next.toml") for config in files.configs]
    later = files.membership.replace(rounds=450, from_round=3)
    for config in configs[:3]:
        later.save(config.next_members)
    running = [Running(Node(config), QuadraticLearner(i)) for i, config in enumerate(configs)]
    refused, took_part = threading.Event(), threading.Event()
    told = logging.Handler()
    told.emit = lambda record: refused.set() if "refuse this peer" in record.getMessage() else None  # type: ignore[method-assign]
    changed = threading.Barrier(4)

    def visit(peer: Running, round: Round) -> bool:
        if round.number == 3:
            changed.wait(PATIENCE)
        return False

    def enter(peer: Running, round: Round) -> bool:
        took_part.set()
        return False

    logging.getLogger("rpel").addHandler(told)
    try:
        with ended(running):
            for peer in running[:3]:
                peer.start(visit)
            changed.wait(PATIENCE)
            running[3].start(enter)
            assert refused.wait(PATIENCE)
            later.save(configs[3].next_members)  # where the log says
            assert took_part.wait(PATIENCE)
    finally:
        logging.getLogger("rpel").removeHandler(told)
    assert running[3].node.now.membership == later


# --- starting -----------------------------------------------------------------------------------------------


def test_peer_without_key_membership_or_initial_model_does_not_start(tmp_path: Path) -> None:
    files = found(tmp_path, 2)
    config = files.configs[0]
    with pytest.raises(ValueError, match=r"'stranger'.*peer-0, peer-1"):
        Node(config.replace(id="stranger"))
    with pytest.raises(ValueError, match=r"no key .*none\.key"):
        Node(config.replace(key=tmp_path / "none.key"))
    with pytest.raises(ValueError, match=r"fingerprint.*peer\.crt"):
        Node(config.replace(certificate=files.configs[1].certificate))
    (tmp_path / "init.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match=r"init\.safetensors.*members\.toml"):
        Node(config)


def test_two_processes_never_share_a_state_folder_and_nothing_stays_open(tmp_path: Path) -> None:
    files = found(tmp_path, 2)
    with Node(files.configs[0]), pytest.raises(ValueError, match="another peer"):
        Node(files.configs[0]).__enter__()
    other = files.configs[0].replace(state_dir=tmp_path / "other")
    with Node(files.configs[0]), pytest.raises(OSError, match=r"listen 127\.0\.0\.1:\d+"):
        Node(other).__enter__()
    with Node(other):  # the folder was given free, though the start failed
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "rpel-peer"]


def test_sampler_uses_system_randomness_and_draws_uniform_sets() -> None:
    counts = Counter(tuple(sorted(from_os(1, 2, 5, 2))) for _ in range(3000))
    assert len(counts) == 6
    assert all(2 not in drawn for drawn in counts)
    assert min(counts.values()) > 350  # of 500 expected: seven standard deviations


# --- parts --------------------------------------------------------------------------------------------------


def test_initial_model_is_sent_with_the_computed_header(tmp_path: Path) -> None:
    files = found(tmp_path, 2)
    x = np.arange(6.0)
    header = json.dumps(
        {"__metadata__": {"by": "somebody"}} | json.loads(LAYOUT.header[8:]), indent=1
    ).encode()
    (tmp_path / "init.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + x.tobytes())
    body = initial_body(files.configs[0], LAYOUT)
    assert body is not None
    whole = LAYOUT.header + x.tobytes()
    for piece in (1, 7, 64, 1000):
        assert b"".join(body.read(begin, piece) for begin in range(0, body.size, piece)) == whole
    body.close()
    (tmp_path / "init.safetensors").unlink()
    assert initial_body(files.configs[0], LAYOUT) is None


@pytest.mark.parametrize("name", ["nnm+trimmed_mean", "median", "geometric_median", "mean", "monna"])
def test_rule_is_made_ready_for_every_number_of_answers_that_may_come(name: str) -> None:
    chosen = rule(name, f=2)
    make_ready(chosen, 8, 100, np.float32)
    found_sizes = set(sizes(chosen, 8))
    assert {(m, 2) for m in range(5, 10)} <= found_sizes  # own and 2 b_hat … s answers
    assert (8, 1) in found_sizes  # one of them not finite
