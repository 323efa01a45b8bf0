"""What a peer writes down of its rounds: one line each, in a chain of hashes that it signs.

Invariants: nothing written here holds an entry of a model; what cannot be written is said once and harms no
round, and leaves no part of a line; a line that repeats itself, for whatever reason, does not fill the disk.
"""

import base64
import hashlib
import io
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rpel.peer.config.membership import Membership
from rpel.peer.core.evidence import line_signed_by, of_member, sign_line
from rpel.peer.core.protocol import Report
from rpel.peer.net.snapshot import Snapshot
from rpel.types import Measured, Outcome

log = logging.getLogger("rpel")

AUDIT_FILE = "audit.jsonl"
_FIRST = "0" * 64
_UNMEASURED = Measured()
_LONGEST_LINES = 4 << 20  # bytes in which the last two lines of a log lie


@dataclass(frozen=True)
class Point:
    """One round in the history that the page draws."""

    round: int
    outcome: Outcome
    asked: int
    received: int
    accuracy: float | None = None
    loss: float | None = None


class Journal:
    """Writes one line per round: signed into the audit log, and once more where peer.toml's ``log`` says."""

    def __init__(self, audit: Path, copy: str | Path | None, id: str) -> None:
        self._audit, self._copy, self._id = Audit(audit), RoundLog(copy), id

    def write(
        self,
        report: Report,
        now: Snapshot,
        digest: str,
        pulled: Mapping[int, str],
        measured: Measured = _UNMEASURED,
        epsilon: float | None = None,
    ) -> None:
        """Write down a round that ended; what cannot be written is said and harms nothing.

        Args:
            report: How the round ended.
            now: The membership in force.
            digest: Of the own half-step; "" if there was none.
            pulled: Digests of the others' half-steps, by member.
            measured: Accuracy and loss, where they were measured.
            epsilon: What private steps have spent so far.
        """
        content = {
            **round_line(report, now.names, digest, time.time(), measured, epsilon),
            "member": self._id,
            "membership": now.membership.hash,
            "aggregated": {}
            if report.outcome is Outcome.LOCAL_ONLY
            else {now.names[member]: found for member, found in pulled.items()},
        }
        try:
            line = self._audit.write(
                content, partial(sign_line, now.secret, of_member(now.membership, now.me))
            )
        except OSError as error:
            log.warning("the audit log cannot be written (%s): rounds go on without it", error.strerror)
            line = json.dumps(content)
        self._copy.write(line)


def round_line(
    report: Report,
    names: Sequence[str],
    digest: str,
    now: float,
    measured: Measured = _UNMEASURED,
    epsilon: float | None = None,
) -> dict[str, Any]:
    """Return the log line of a round, with results by member id and ``now`` in seconds since 1970.

    >>> from rpel.types import PullResult
    >>> report = Report(
    ...     round=7, outcome=Outcome.AGGREGATED, asked=2, received=1, trim=0, degraded=0, frozen=False,
    ...     results={0: PullResult.OK, 2: PullResult.LATE}, saved=True, seconds=0.25, offset=0.0)
    >>> print(json.dumps(round_line(report, names=("a", "b", "c"), digest="ab12", now=0.0)))
    {"time": "1970-01-01T00:00:00.000+00:00", "round": 7, "outcome": "aggregated", "asked": 2, "received": 1,
    "trim": 0, "results": {"a": "ok", "c": "late"}, "digest": "ab12", "seconds": 0.25, "frozen": false,
    "model_age": 0}
    """
    line = {
        "time": datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds"),
        **{name: getattr(report, name) for name in ("round", "outcome", "asked", "received", "trim")},
        "results": {names[peer]: result for peer, result in report.results.items()},
        "digest": digest,
        "seconds": round(report.seconds, 6),
        "frozen": report.frozen,
        "model_age": report.degraded,
    }
    more = {"accuracy": measured.accuracy, "loss": measured.loss, "epsilon": epsilon}
    return line | {name: value for name, value in more.items() if value is not None}


def history(path: Path) -> list[Point]:
    """Return the rounds of a log, as far as they can be read: what a page draws after a restart."""
    points: dict[int, Point] = {}
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINES))
            lines = file.read().splitlines()
    except OSError:
        return []
    for text in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            line = json.loads(text)
            t, asked, received = (int(line[name]) for name in ("round", "asked", "received"))
            accuracy, loss = (
                None if (score := line.get(name)) is None else float(score) for name in ("accuracy", "loss")
            )
            points[t] = Point(t, Outcome(line["outcome"]), asked, received, accuracy, loss)
    return list(points.values())


class RoundLog:
    """A file of lines, opened anew for each so that it may be rotated; "-" is stdout, None nothing."""

    def __init__(self, target: str | Path | None) -> None:
        self.target = target
        self._failed = False

    def write(self, text: str) -> None:
        """Append a line; a full disk or a closed stdout costs that line and no more."""
        try:
            if self.target == "-":
                print(text, flush=True)
            elif self.target is not None:
                append_line(Path(self.target), text.encode())
            self._failed = False
        except (OSError, ValueError) as error:  # ValueError: stdout was closed
            if not self._failed:
                where = "standard output" if self.target == "-" else self.target
                log.warning("the log %s cannot be written (%s): rounds go on without it", where, error)
            self._failed = True


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file that only its owner can read: the whole line, or nothing and an OSError.

    An unfinished line, left by a crash or by a disk that was full, is removed first.
    """
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(handle, "r+b", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):  # a pipe or a terminal
            _write(handle, line + b"\n")
            return
        end, _ = _remove_unfinished_line(file)
        try:
            _write(handle, line + b"\n")
        except OSError:
            with suppress(OSError):  # if even that fails, the next append removes it
                file.truncate(end)
            raise


def _write(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _remove_unfinished_line(file: io.FileIO) -> tuple[int, bool]:
    """Cut a file of lines after its last whole one; returns its end, and whether there was more."""
    end = whole = file.seek(0, os.SEEK_END)
    while whole and _read(file, whole - 1, whole) != b"\n":
        begin = max(0, whole - _LONGEST_LINES)
        whole = begin + _read(file, begin, whole).rfind(b"\n") + 1
    if whole < end:
        file.truncate(whole)
    return whole, whole < end


def _read(file: io.FileIO, begin: int, end: int) -> bytes:
    file.seek(begin)
    return file.read(end - begin) or b""


class Repeats(logging.Filter):
    """Lets a line pass ``most`` times in ``seconds``, whatever it is about; then says how many were left out.

    >>> repeats = Repeats(most=1, clock=iter([0.0, 1.0, 2.0, 70.0]).__next__)
    >>> lines = [logging.LogRecord("rpel", logging.INFO, "", 0, "%s is late", (name,), None) for name
    ...     in "abcd"]
    >>> [repeats.filter(one) for one in lines], lines[3].getMessage()
    ([True, False, False, True], 'd is late (and 2 lines like this before)')
    """

    def __init__(
        self,
        most: int = 20,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        kinds: int = 1000,
    ) -> None:
        super().__init__()
        self._most, self._seconds, self._clock, self._kinds = most, seconds, clock, kinds
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}  # since when, how many

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = (record.name, str(record.msg)), self._clock()
        since, count = self._seen.get(kind, (now, 0))
        if now - since >= self._seconds:
            if count > self._most:
                # without arguments nothing in a message is formatted, so a % stays as it is
                record.msg = f"{record.getMessage()} (and {count - self._most} lines like this before)"
                record.args = ()
            since, count = now, 0
        if len(self._seen) >= self._kinds:
            self._seen.clear()
        self._seen[kind] = (since, count + 1)
        return count < self._most


class Audit:
    """A log of one JSON line per round that shows later what the peer did.

    Each line holds the hash of the line before and the peer's signature. Nobody, the peer included, can tell
    another story afterwards, except by leaving out the end.
    """

    def __init__(self, path: Path) -> None:
        """Continue the file. An unfinished last line is removed, and the next line says so."""
        self._path = path
        self._prev = _FIRST
        self._lost, self._reason = 0, ""  # lines that were not written since the last one
        if path.exists():
            with path.open("r+b", buffering=0) as file:
                end, cut = _remove_unfinished_line(file)
                lines = _read(file, max(0, end - _LONGEST_LINES), end)
            if lines:
                self._prev = _line_hash(lines[:-1].rpartition(b"\n")[2])
            if cut:
                self._lost, self._reason = 1, "it was unfinished when the peer started again"

    def write(self, content: Mapping[str, Any], sign: Callable[[bytes], bytes]) -> str:
        """Append a line, with the peer's signature ``sign(hash)``, and return it; OSError if that failed.

        The first line after lines that were lost has a ``gap`` that says how many, and why.
        """
        linked = {**content, "prev": self._prev}
        if self._lost:
            linked["gap"] = {"lines": self._lost, "reason": self._reason}
        signature = base64.b64encode(sign(_digest(linked))).decode()
        line = json.dumps({**linked, "signature": signature})
        try:
            append_line(self._path, line.encode())
        except OSError as error:
            self._lost, self._reason = self._lost + 1, error.strerror or str(error)
            raise
        self._prev, self._lost = _line_hash(line.encode()), 0
        return line


def check_audit(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of an audit log whose chain is whole; ValueError names the first line that does not fit.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     audit = Audit(Path(folder) / "audit.jsonl")
    ...     lines = [audit.write({"round": t}, sign=lambda digest: b"") for t in (1, 2)]
    ...     [line["round"] for line in check_audit(Path(folder) / "audit.jsonl")]
    [1, 2]
    """
    lines, prev = [], _FIRST
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            content = json.loads(line)
            named = content["prev"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(f"{path}, line {number} is not a line of an audit log") from None
        if named != prev:
            raise ValueError(f"{path}, line {number} does not follow line {number - 1}: the log was changed")
        if "gap" in content and not _is_gap(content["gap"]):
            raise ValueError(f"{path}, line {number} has a gap that does not say how many lines, and why")
        lines.append(content)
        prev = _line_hash(line)
    return lines


def verify_audit(path: str | os.PathLike[str], membership: Membership) -> list[dict[str, Any]]:
    """The lines of an audit log that is whole and whose last line the member that it names has signed."""
    lines = check_audit(path)
    if not lines:
        raise ValueError(f"{path} has no line")
    last = dict(lines[-1])
    try:
        number = membership.index(str(last["member"]))
        signature = base64.b64decode(last.pop("signature"), validate=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: its last line is not signed by a member ({error})") from None
    member = membership.members[number]
    if not line_signed_by(member.certificate, of_member(membership, number), _digest(last), signature):
        raise ValueError(f"{path}: its last line is not signed with the key of {member.id!r} in this network")
    return lines


def _is_gap(gap: object) -> bool:
    return (
        isinstance(gap, dict)
        and gap.keys() == {"lines", "reason"}
        and type(gap["lines"]) is int
        and gap["lines"] > 0
        and isinstance(gap["reason"], str)
    )


def missing_rounds(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """The rounds between the first and the last of an audit log that have no line, as (first, last).

    >>> missing_rounds([{"round": 1}, {"round": 2}, {"round": 5}, {"round": 7}])
    [(3, 4), (6, 6)]
    """
    rounds = sorted({line["round"] for line in lines if type(line.get("round")) is int})
    return [(here + 1, there - 1) for here, there in pairwise(rounds) if there > here + 1]


def _digest(content: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(content).encode()).digest()


def _line_hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
