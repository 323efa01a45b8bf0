"""Ray, where it is installed: it places workers and starts them again (Ray Train), and runs tasks;
it moves no models.

A cluster belongs in a private network: nothing is encrypted, and gloo authenticates nobody. Ray that is
started here listens on loopback alone.
"""

import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from rpel.processes import start

_RESTARTS = 8
"""How often a group is started again: after a worker or its machine was lost,
or was lost while the group started."""
_REACH = 10.0
_ANYWHERE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Unless this is 0 when Ray is imported, it takes an address of the network for 127.0.0.1, on Linux, too."""
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}


@contextmanager
def connected(address: str | None, cpus: int) -> Iterator[Any]:
    """The module ray, connected to the cluster at that address; None starts one here, of so many CPUs,
    on loopback."""
    for key in (
        "RAY_USAGE_STATS_ENABLED",
        "RAY_TRAIN_ENABLE_STATE_TRACKING",
        *[_ANYWHERE] * (address is None),
    ):
        os.environ.setdefault(key, "0")
    try:
        import ray
    except ImportError:
        raise ValueError("engine ray needs Ray: pip install 'rpel[cluster]'") from None
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        options |= {"num_cpus": cpus, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        options["runtime_env"] = {"env_vars": _LOOPBACK}
    try:
        _reach(address)
        ray.init(address=address or "local", **options)
    except Exception as error:  # Ray raises Exception itself, too
        said = str(error).strip().splitlines()[0][:160]
        raise ValueError(f"no Ray cluster answers at {address or 'this machine'}: {said}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str | None) -> None:
    """OSError if nobody listens at host:port; Ray would try again for many minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.rpartition("/")[2], int(port)), timeout=_REACH).close()


def supervised(
    work: Callable[[dict[str, Any]], Any],
    config: Mapping[str, Any],
    workers: int,
    place: Path,
    carrier: str = "gloo",
    gpu: bool = False,
) -> Any:
    """What worker 0 returns of work(config), called by each of so many Ray workers, in one group of
    torch.distributed's with that carrier; gpu: with a GPU for each.

    A worker that is lost takes the group with it, which is started again. place: a folder that all machines
    see, for what Ray keeps of this; it is removed.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        work,
        train_loop_config=dict(config),
        torch_config=TorchConfig(backend=carrier),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpu, placement_strategy="SPREAD"),
        run_config=RunConfig(
            storage_path=str(place),
            failure_config=FailureConfig(max_failures=_RESTARTS, controller_failure_limit=_RESTARTS),
        ),
    )
    try:
        return trainer.fit().return_value
    except Exception as error:
        if not type(error).__module__.startswith("ray."):
            raise
        raise ValueError(
            f"Ray has given up after {_RESTARTS} restarts: {str(error).strip().splitlines()[-1]}"
        ) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


# --- one command a task -------------------------------------------------------------------------------------


class Task:
    """``rpel`` with some arguments as a Ray task, seen like a process that was started here."""

    def __init__(
        self, ray: Any, arguments: Sequence[str], stdout: Path, stderr: Path, threads: int = 1
    ) -> None:
        self._ray, self.returncode = ray, cast("int | None", None)
        remote = ray.remote(num_cpus=threads, max_retries=_RESTARTS)(_command)
        self._running = remote.remote(list(arguments), str(stdout.resolve()), str(stderr.resolve()), threads)

    def poll(self) -> int | None:
        """Its status, None while it runs; 1 where Ray could not finish it."""
        if self.returncode is None and self._ray.wait([self._running], timeout=0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        try:
            self.returncode = int(self._ray.get(self._running))
        except Exception as error:
            if not type(error).__module__.startswith("ray."):
                raise
            self.returncode = 130 if "Cancelled" in type(error).__name__ else 1
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Have it save and end."""
        with suppress(Exception):
            self._ray.cancel(self._running, recursive=False)

    def kill(self) -> None:
        with suppress(Exception):
            self._ray.cancel(self._running, force=True, recursive=False)


def _command(arguments: list[str], stdout: str, stderr: str, threads: int) -> int:
    """In the task: a process of its own, which is told when the task is cancelled,
    and sees when the task is gone."""
    process = start(arguments, Path(stdout), Path(stderr), threads)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        return process.wait()
