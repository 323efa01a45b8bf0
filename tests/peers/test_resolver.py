"""Names that never resolve and addresses that swallow packets hold up nobody else."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rpel.peer.net.resolver import Resolver
from support import namespaces
from support.paths import TESTS

HOSTILE = 6


@pytest.fixture
def lookup() -> Iterator[Callable[..., list[Any]]]:
    """The system's resolver, as far as it matters here: names with "tarpit" in them block their thread."""
    over = threading.Event()

    def found(host: str, port: object, **_: object) -> list[Any]:
        if "tarpit" in host:
            over.wait()
        if "nowhere" in host:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, None, None, "", ("192.0.2.7", 0))]

    yield found
    over.set()


async def test_names_that_never_resolve_take_one_look_up_each_and_hold_up_no_other_name(
    lookup: Callable[..., list[Any]],
) -> None:
    resolver = Resolver(lookup=lookup)
    for _ in range(3):  # asked for again and again
        for number in range(HOSTILE):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await resolver.addresses(f"tarpit-{number}.example", HOSTILE + 2)
    assert resolver.under_way == HOSTILE
    async with asyncio.timeout(60):
        found = await asyncio.gather(
            *(resolver.addresses(f"clinic-{number}.example", HOSTILE + 2) for number in range(20))
        )
    assert {str(address) for addresses in found for address in addresses} == {"192.0.2.7"}


async def test_literal_address_is_never_looked_up() -> None:
    def refused(*_: object, **__: object) -> list[Any]:
        raise AssertionError

    resolver = Resolver(lookup=refused)
    assert [str(found) for host in ("10.1.2.3", "::1") for found in await resolver.addresses(host, 1)] == [
        "10.1.2.3",
        "::1",
    ]


async def test_name_without_an_address_is_an_error_that_names_it(lookup: Callable[..., list[Any]]) -> None:
    with pytest.raises(OSError, match=r"nowhere\.example"):
        await Resolver(lookup=lookup).addresses("nowhere.example", 4)


async def test_private_addresses_are_used_only_where_they_are_allowed() -> None:
    resolver = Resolver(lookup=lambda *_, **__: [(0, 0, 0, "", ("10.0.0.7", 0))])
    for host in ("127.0.0.1", "169.254.169.254", "::ffff:10.0.0.1", "inside.example"):
        with pytest.raises(OSError, match="allow_private"):
            await resolver.addresses(host, 4, private=False)
    assert [str(found) for found in await resolver.addresses("93.184.216.34", 4, private=False)] == [
        "93.184.216.34"
    ]


# --- with the system's own resolver and real packets, in a namespace ----------------------------------------

NAMESPACE = """
set -e
ip link set lo up
ip link add hole type veth peer name end; ip address add 10.255.0.2/24 dev hole
ip link set hole up; ip link set end up
for i in 1 9; do ip neighbour add 10.255.0.$i lladdr 02:00:00:00:00:09 dev hole; done  # where nobody is
printf 'nameserver 10.255.0.1\\noptions timeout:30 attempts:5\\n' > "$1/resolv.conf"
printf '127.0.0.1 localhost named.example\\n' > "$1/hosts"
mount --bind "$1/resolv.conf" /etc/resolv.conf; mount --bind "$1/hosts" /etc/hosts
exec "$2" -c "$3" "$1"
"""

TARPITS = """
import asyncio, json, sys
from pathlib import Path
from rpel.peer.net import client
from support.loopback import loopback

async def scenario():
    async with loopback(Path(sys.argv[1]), n=16) as net:
        tarpits = {i: f"https://tarpit-{i}.example:7443" for i in range(1, 9)}
        net.move({15: f"https://named.example:{net.transports[15].port}", **tarpits})
        client._LOOKUPS = 8 + 2
        return len(await net.transports[0].clocks())

print(json.dumps(asyncio.run(scenario())), flush=True)
import os; os._exit(0)
"""

HOLE = """
import asyncio, json, socket, sys
from ipaddress import ip_address
from rpel.peer.net.resolver import connect

async def scenario():
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with asyncio.timeout(5):
        kept = set()
        reached = await connect([ip_address("10.255.0.9"), ip_address("127.0.0.1")], port, kept)
    found = reached.getpeername()[0], len(kept)
    reached.close()
    return found

print(json.dumps(asyncio.run(scenario())), flush=True)
"""


def inside(folder: Path, program: str) -> Any:
    if why := namespaces.possible():
        pytest.skip(why)
    done = subprocess.run(
        ["unshare", "--net", "--mount", "bash", "-c", NAMESPACE, "-", str(folder), sys.executable, program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.integration
def test_eight_members_whose_names_never_resolve_keep_nobody_from_hearing_the_others(tmp_path: Path) -> None:
    assert inside(tmp_path, TARPITS) == 7


@pytest.mark.integration
def test_address_that_swallows_packets_costs_a_quarter_of_a_second(tmp_path: Path) -> None:
    assert inside(tmp_path, HOLE) == ["127.0.0.1", 1]
