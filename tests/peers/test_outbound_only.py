"""Members behind a firewall that lets nothing in: a reverse tunnel, and TLS passed through by name,
both for real.

Five members are on the internet, so to say, and so is a jump host; two are in a hospital behind NAT. One of
these is reached by a port of the jump host that `ssh -R` made, the other by its name at HAProxy there,
which knows the way.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from support import namespaces
from support.namespaces import NET, Namespaces, _ip
from support.process_network import Member, Plan, ProcessNetwork
from support.waiting import PATIENCE

TOOLS = ("ip", "sshd", "ssh", "ssh-keygen", "haproxy", "iptables-legacy")
WHY = namespaces.possible() or next((f"needs {tool}" for tool in TOOLS if not shutil.which(tool)), "")
pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(WHY), reason=WHY)]

JUMP, ROUTER, TUNNELLED, NAMED = 5, 6, 5, 6
NAME = "named.jump.example"
INSIDE = "192.168.9"
LOOSE = (
    "-o",
    "StrictHostKeyChecking=no",
    "-o",
    "UserKnownHostsFile=/dev/null",
    "-o",
    "ExitOnForwardFailure=yes",
)
ALIVE = ("-o", "ServerAliveInterval=2", "-o", "ServerAliveCountMax=2", "-o", "ConnectTimeout=5")

SSHD = """\
HostKey {folder}/host
AuthorizedKeysFile {folder}/client.pub
PidFile none
StrictModes no
UsePAM no
GatewayPorts clientspecified
ClientAliveInterval 2
ClientAliveCountMax 2
"""
HAPROXY = """\
defaults
    mode tcp
    timeout connect 5s
    timeout client 2m
    timeout server 2m
frontend members
    bind :443
    tcp-request inspect-delay 5s
    tcp-request content accept if {{ req.ssl_hello_type 1 }}
    use_backend named if {{ req.ssl_sni -i {name} }}
backend named
    server named 127.0.0.1:7506
"""


class Hospital:
    """The namespaces, the router with its firewall, and the forwarders on the jump host."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.net = folder, Namespaces(7)  # 0-4 public members, 5 the jump host, 6 the router
        self.inside = {TUNNELLED: f"{self.net.namespace(ROUTER)}-a", NAMED: f"{self.net.namespace(ROUTER)}-b"}
        self.forwarders: list[subprocess.Popen[bytes]] = []
        self.tunnels: list[subprocess.Popen[bytes]] = []

    def namespace(self, number: int) -> str:
        return self.inside.get(number) or self.net.namespace(number)

    def url(self, number: int) -> str:
        if number == TUNNELLED:
            return f"https://{NET}.{JUMP + 1}:7505"
        return f"https://{NAME}:443" if number == NAMED else namespaces.url(number)

    def listen(self, number: int) -> str:
        return "127.0.0.1:7443" if number in self.inside else f"{NET}.{number + 1}:7443"

    def make(self) -> None:
        self.net.make()
        for number in [*range(7), "a", "b"]:
            name = (
                self.net.namespace(ROUTER) + f"-{number}"
                if isinstance(number, str)
                else self.net.namespace(number)
            )
            Path(f"/etc/netns/{name}").mkdir(parents=True)
            Path(f"/etc/netns/{name}/hosts").write_text(f"127.0.0.1 localhost\n{NET}.{JUMP + 1} {NAME}\n")
        router = self.net.namespace(ROUTER)
        _ip(
            "link add lan type bridge", f"address add {INSIDE}.1/24 dev lan", "link set lan up", inside=router
        )
        for number, name in self.inside.items():
            _ip(f"netns add {name}")
            _ip(
                f"link add i{number} type veth peer name net netns {name}",
                f"link set i{number} master lan up",
                inside=router,
            )
            _ip("link set lo up", f"address add {INSIDE}.{number}/24 dev net", "link set net up", inside=name)
            _ip(f"route add default via {INSIDE}.1", inside=name)
        self.run(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for rule in (
            "-t nat -A POSTROUTING -o net -j MASQUERADE", "-P FORWARD DROP", "-A FORWARD -i lan -j ACCEPT",
            "-A FORWARD -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
        ):  # fmt: skip
            self.run(router, "iptables-legacy", *rule.split())
        for name in ("host", "client"):
            subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", self.folder / name], check=True)
        (self.folder / "sshd.conf").write_text(SSHD.format(folder=self.folder))
        (self.folder / "haproxy.cfg").write_text(HAPROXY.format(name=NAME))
        Path("/run/sshd").mkdir(exist_ok=True)

    def run(self, name: str, *command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        inside = ["ip", "netns", "exec", name, *command]
        return subprocess.run(inside, check=check, capture_output=True, text=True, timeout=PATIENCE)

    def popen(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{Path(command[0]).name}.log").open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", name, *command], stdout=log, stderr=log, start_new_session=True
            )

    def forward(self) -> None:
        """sshd and HAProxy on the jump host."""
        jump, sshd = self.net.namespace(JUMP), shutil.which("sshd") or ""
        self.forwarders = [
            self.popen(jump, sshd, "-D", "-e", "-f", str(self.folder / "sshd.conf")),
            self.popen(jump, "haproxy", "-db", "-f", str(self.folder / "haproxy.cfg")),
        ]

    def stop_forwarding(self) -> None:
        """The jump host crashes: everything that runs there, the sessions of sshd included."""
        there = ["ip", "netns", "pids", self.net.namespace(JUMP)]
        for pid in subprocess.run(there, capture_output=True, text=True, check=False).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for process in self.forwarders:
            process.wait(PATIENCE)

    def tunnel(self) -> None:
        """What each member's operator runs, as systemd would: again and again."""
        for number, there in ((TUNNELLED, f"{NET}.{JUMP + 1}:7505"), (NAMED, "127.0.0.1:7506")):
            to = (
                "-N",
                "-i",
                str(self.folder / "client"),
                "-R",
                f"{there}:127.0.0.1:7443",
                f"root@{NET}.{JUMP + 1}",
            )
            ssh = " ".join(["ssh", *LOOSE, *ALIVE, *to])
            self.tunnels.append(
                self.popen(self.inside[number], "sh", "-c", f"while :; do {ssh}; sleep 1; done")
            )

    def remove(self) -> None:
        for process in [*self.tunnels, *self.forwarders]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(PATIENCE)
        self.stop_forwarding()
        for name in [*map(self.net.namespace, range(7)), *self.inside.values()]:
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        for name in self.inside.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self.net.remove()


@pytest.fixture
def hospital(tmp_path: Path) -> Iterator[Hospital]:
    made = Hospital(tmp_path)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def checked(hospital: Hospital, net: ProcessNetwork, number: int) -> dict[str, Any]:
    """What `rpel network status` says in a member's own network."""
    config = str(net.members[number].config)
    status = ("network", "status", "--config", config, "--step-seconds", "0", "--json")
    command = (sys.executable, "-m", "rpel", *status)
    found: dict[str, Any] = json.loads(hospital.run(hospital.namespace(number), *command, check=False).stdout)
    return found


def test_two_members_that_nobody_can_reach_directly_take_part_in_a_whole_run(
    hospital: Hospital, tmp_path: Path
) -> None:
    plan = Plan(
        peers=7, byzantine=1, rounds=30, period=2.0, deadline=1.4, start=20.0,
        urls=hospital.url, listen=hospital.listen, namespace=hospital.namespace,
    )  # fmt: skip
    hospital.forward()
    hospital.tunnel()
    folder = tmp_path / "net"
    folder.mkdir()
    with ProcessNetwork(folder, plan) as net:
        public, hidden = net.members[:5], net.members[5:]
        assert hospital.run(
            hospital.namespace(0), "ping", "-c1", "-W1", f"{INSIDE}.{NAMED}", check=False
        ).returncode
        net.start()
        net.wait(lambda: all("listens at" in member.errors for member in net.members), "all peers to listen")
        for number in (0, TUNNELLED, NAMED):
            found = checked(hospital, net, number)
            assert [row["reaches_you"] for row in found["members"]] == [True] * 6, found

        def results(member: Member, since: int) -> set[tuple[str, str]]:
            """(member asked, what came of it) in rounds after this one."""
            return {one for line in member.lines if line["round"] > since for one in line["results"].items()}

        def all_of(result: str, since: int) -> bool:
            """Whether that came of asking both hidden members, for every public one, since that round."""
            return all((other.id, result) in results(one, since) for one in public for other in hidden)

        net.wait(lambda: all_of("ok", 0), "the hidden members' models")
        hospital.stop_forwarding()
        gone = max(member.last for member in net.members)
        net.wait(lambda: all_of("unreachable", gone), "the forwarder to be missed")
        hospital.forward()
        back = max(member.last for member in net.members)
        net.wait(lambda: all_of("ok", back), "the hidden members to be heard again")
        net.wait(lambda: not any(member.running for member in net.members), "the end", patience=10 * PATIENCE)
        assert [member.process.status for member in net.members] == [0] * 7, net.picture()
        for member in net.members:
            assert (member.folder / "state" / "model.safetensors").exists()
            assert member.outcome(30) == "aggregated"
        assert all(line["outcome"] != "local_only" for member in hidden for line in member.lines), (
            net.picture()
        )
