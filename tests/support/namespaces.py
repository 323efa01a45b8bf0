"""Networks that can be cut: each peer in a namespace of its own,
half of them on one switch and half on another.

The switches, and the cable between them, live in one more namespace, so that the machine's own network is not
touched. Needs root and Linux; :func:`possible` says why not.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NET = "10.77.0"


def possible() -> str:
    """Why namespaces cannot be made here; "" if they can."""
    if not shutil.which("ip"):
        return "needs the program ip (iproute2)"
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    name = f"rpel-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False, text=True)
    if tried.returncode:
        return f"network namespaces are not allowed here ({tried.stderr.strip()})"
    _ip(f"netns del {name}")
    return ""


def url(number: int) -> str:
    """Where a peer is."""
    return f"https://{NET}.{number + 1}:7443"


class Namespaces:
    """Peers 0 … n − 1 with addresses 10.77.0.1 …; the first half left, the second half right."""

    def __init__(self, peers: int) -> None:
        self.peers, self._mark = peers, f"rpel-{secrets.token_hex(3)}"

    def namespace(self, number: int) -> str:
        return f"{self._mark}-{number}"

    @property
    def _hub(self) -> str:
        return f"{self._mark}-hub"

    def make(self) -> None:
        """All namespaces, cables and switches."""
        _ip(f"netns add {self._hub}")
        for side in ("left", "right"):
            _ip(f"link add {side} type bridge", f"link set {side} up", inside=self._hub)
        _ip(
            "link add trunk type veth peer name knurt",
            "link set trunk master left up",
            "link set knurt master right up",
            inside=self._hub,
        )
        for number in range(self.peers):
            self._connect(number)

    def _connect(self, number: int) -> None:
        name, side = self.namespace(number), "left" if number < self.peers // 2 else "right"
        _ip(f"netns add {name}")
        _ip(
            f"link add p{number} type veth peer name net netns {name}",
            f"link set p{number} master {side} up",
            inside=self._hub,
        )
        _ip("link set lo up", f"address add {NET}.{number + 1}/24 dev net", "link set net up", inside=name)

    def remove(self) -> None:
        """Take everything away again."""
        for name in [self._hub, *map(self.namespace, range(self.peers))]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    @contextmanager
    def split(self) -> Iterator[None]:
        """Inside, left and right do not reach each other; packets vanish."""
        _ip("link set trunk down", inside=self._hub)
        try:
            yield
        finally:
            _ip("link set trunk up", inside=self._hub)

    @contextmanager
    def isolated(self, number: int) -> Iterator[None]:
        """Inside, nobody reaches this peer and it reaches nobody."""
        _ip(f"link set p{number} down", inside=self._hub)
        try:
            yield
        finally:
            _ip(f"link set p{number} up", inside=self._hub)

    @contextmanager
    def one_way(self, number: int, deaf: list[int]) -> Iterator[None]:
        """Inside, what this peer sends to the ``deaf`` ones is lost, and what they send arrives."""
        routes = [f"{NET}.{other + 1}/32" for other in deaf]
        _ip(*(f"route add blackhole {route}" for route in routes), inside=self.namespace(number))
        try:
            yield
        finally:
            _ip(*(f"route del blackhole {route}" for route in routes), inside=self.namespace(number))


def _ip(*commands: str, inside: str = "") -> None:
    """Run ip commands, in a namespace if one is named."""
    position = ["-n", inside] if inside else []
    text = "".join(f"{command}\n" for command in commands)
    subprocess.run(["ip", *position, "-batch", "-"], input=text, text=True, check=True, capture_output=True)
