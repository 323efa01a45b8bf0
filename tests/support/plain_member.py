"""A member that a test plays itself, by docs/protocol.md.

:class:`PlainMember` serves what a function says and records the requests that came; :func:`ask` sends one
request with a member's key. Nothing here is shared with the code under test.
"""

import base64
import hashlib
import http.client
import json
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from support.process_network import Member, ProcessNetwork
from support.waiting import PATIENCE

Reply = tuple[int, bytes, dict[str, str]]


def answer_json(content: dict[str, Any], status: int = 200) -> Reply:
    """A reply with a JSON object."""
    return status, json.dumps(content).encode(), {"Content-Type": "application/json"}


class PlainMember:
    """A member's server in threads of the test; ``reply(path)`` answers, or None where the usual answer fits.

    Usually it tells the right time, sends the common initial model, and has no half-step of any round.
    """

    def __init__(
        self, net: ProcessNetwork, member: Member, reply: Callable[[str], Reply | None] = lambda path: None
    ) -> None:
        self._net, self._member, self._reply = net, member, reply
        self._news = threading.Condition()
        self.requests: list[str] = []
        """The paths that were asked for, in their order."""

    def __enter__(self) -> Self:
        host, _, port = self._net.listen(self._member.number).rpartition(":")
        context = _context(ssl.PROTOCOL_TLS_SERVER, self._member)
        context.num_tickets = 0
        context.load_verify_locations(cadata="".join(m.certificate for m in self._net.membership.members))
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError), context.wrap_socket(self.request, server_side=True) as connection:
                    outer._serve(connection)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads, allow_reuse_address, block_on_close = True, True, False

        self._server = Server((host, int(port)), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE)

    def _serve(self, connection: ssl.SSLSocket) -> None:
        stream = connection.makefile("rb")
        while line := stream.readline():
            path = line.decode("latin-1").split()[1]
            while stream.readline().strip():
                pass
            with self._news:
                self.requests.append(path)
                self._news.notify_all()
            status, body, headers = self._reply(path) or self.usual(path)
            head = [f"HTTP/1.1 {status} {http.client.responses[status]}", f"Content-Length: {len(body)}"]
            head += [f"{name}: {value}" for name, value in headers.items()]
            connection.sendall("\r\n".join([*head, "", ""]).encode() + body)

    def position(self) -> float:
        """Seconds since the network's epoch."""
        return time.time() - self._net.membership.epoch

    def usual(self, path: str) -> Reply:
        """What an honest member answers that has played no round."""
        if path == "/v1/clock":
            return answer_json({"position": self.position()})
        if path == "/v1/status":
            return answer_json({})
        if path.startswith("/v1/seen/"):
            return answer_json({"seen": []})
        if path == "/v1/init":
            headers = {"RPEL-Round": "0", "RPEL-Position": f"{self.position():.6f}", "RPEL-Waited": "0"}
            body = (self._net.folder / "init.safetensors").read_bytes()
            return 200, body, {"Content-Type": "application/octet-stream"} | headers
        return (425 if path.startswith("/v1/model/") else 404), b"", {}

    def half_step(self, round: int, ahead: float = 0.0) -> Reply:
        """The common initial model as this member's half-step, signed, with a clock that is ahead."""
        m, body = self._net.membership, (self._net.folder / "init.safetensors").read_bytes()
        facts = {name: getattr(m, name) for name in ("run", "model_header_sha256", "init_sha256")}
        canonical = json.dumps(facts | {"member": self._member.id}, sort_keys=True, separators=(",", ":"))
        parts = [b"rpel half-step 3\0", hashlib.sha256(canonical.encode()).digest()]
        parts += [round.to_bytes(8, "big"), hashlib.sha256(body).digest()]
        key = load_pem_private_key((self._member.folder / "peer.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        signature = base64.b64encode(key.sign(b"".join(parts), ec.ECDSA(SHA256()))).decode()
        headers = {"Content-Type": "application/octet-stream", "RPEL-Round": str(round)}
        clock = {"RPEL-Position": f"{self.position() + ahead:.6f}", "RPEL-Waited": "0"}
        return 200, body, headers | clock | {"RPEL-Signature": signature}

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the requests make the condition true."""
        with self._news:
            assert self._news.wait_for(condition, PATIENCE), f"waited for {what}"


@contextmanager
def ask(net: ProcessNetwork, own: Member, other: Member, path: str) -> Iterator[http.client.HTTPResponse]:
    """Send one request with a member's key; the caller reads the body as slowly as it likes."""
    host, _, port = net.listen(other.number).rpartition(":")
    context = _context(ssl.PROTOCOL_TLS_CLIENT, own)
    context.load_verify_locations(cadata=net.membership.members[other.number].certificate)
    with socket.create_connection((host, int(port)), PATIENCE) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        with context.wrap_socket(plain) as connection:
            request = f"GET {path} HTTP/1.1\r\nHost: plain\r\nRPEL-Membership: {net.membership.hash}\r\n\r\n"
            connection.sendall(request.encode())
            with http.client.HTTPResponse(connection) as response:
                response.begin()
                yield response


def _context(kind: Any, own: Member) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a member is known by its certificate, which is the only one trusted
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(own.folder / "peer.crt", own.folder / "peer.key")
    return context
