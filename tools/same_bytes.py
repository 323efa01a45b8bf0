"""Whether a change keeps the bytes of runs: python tools/same_bytes.py BASE [--only NAME…] [--keep FOLDER].

Runs about fifty small specifications (every method, rule, attack and engine, faults, workers, resuming,
models and data from Python) with the sources of the commit BASE and with those of the working tree, on this
machine, and compares models.safetensors, counts.npz, nodes.npz, certificate.json and metrics.jsonl, all but
what may differ: seconds, and the versions that made them. Prints a line for each run that differs, with the
first difference; exit status 1 then.

A run that BASE cannot make is new and said to be so; a key that only the working tree writes is said, too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

Fields = dict[str, Any]
ROOT = Path(__file__).parents[1]
SMALL: Fields = {
    "model": "linear", "nodes": 10, "byzantine": 2, "pull": 6, "rounds": 4, "eval_every": 2, "eval_size": 100,
    "batch_size": 10, "threads": 2, "attack": "alie",
}  # fmt: skip
METHODS = (
    "all-to-all", "nna", "cs-plus", "gts", "gts-exact", "clipped-gossip", "clipped-gossip-oracle", "rtc",
    "ios", "balance", "d-psgd", "el-local", "el-oracle",
)  # fmt: skip
RULES = (
    "mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "centered_clipping", "mda",
    "monna", "meamed", "smea", "caf", "aksel", "cge", "dnc", "balance", "nnm+median", "nnm+krum",
    "bucketing+median", "clipping+trimmed_mean", "arc+trimmed_mean", "nnm+geometric_median",
)  # fmt: skip
ATTACKS: dict[str, Fields] = {
    "sf": {}, "foe": {}, "ipm": {}, "alie": {"z": "max"}, "dissensus": {}, "mimic": {}, "mimic_heuristic": {},
    "stale": {"delay": 2}, "inf": {}, "gaussian": {}, "min_max": {}, "min_sum": {"direction": "unit"},
    "fang": {}, "spectral": {}, "strongest": {"of": "alie+spectral"}, "none": {}, "label_flip": {},
    "backdoor": {},
}  # fmt: skip


def cases() -> dict[str, Fields]:
    """Every run by its name: what differs from SMALL, or a function that makes it another way."""
    by_name: dict[str, Fields] = {"plain": {}}
    by_name |= {f"method-{name}": {"method": name, **_rival(name)} for name in METHODS}
    by_name |= {f"rule-{name}": {"rule": name, "pull": 8} for name in RULES}
    by_name |= {f"attack-{name}": {"attack": name, "attack_params": given} for name, given in ATTACKS.items()}
    by_name |= {
        "engine-mlp": {"model": "mlp"},
        "engine-convolution": {"model": "mnist", "nodes": 6, "byzantine": 1, "pull": 4, "rounds": 2},
        "engine-batchnorm": {"model": "C(4)-R-B-M-D-L(10)-S", "nodes": 6, "byzantine": 1, "pull": 4},
        "engine-label-flip-batchnorm": {"model": "C(4)-R-B-M-L(10)-S", "nodes": 6, "byzantine": 1, "pull": 4,
                                        "attack": "label_flip"},
        "local-steps": {"local_steps": 3, "lr": ((2, 0.5), (4, 0.1))},
        "uniform": {"output": "uniform", "rounds": 6},
        "no-show": {"no_show": 0.2, "rule": "bucketing+median", "pull": 9, "nodes": 12},
        "no-show-graph": {"no_show": 0.2, "method": "clipped-gossip-oracle"},
        "silent": {"silent": True, "pull": 8},
        "consistent": {"consistent": True, "attack": "strongest"},
        "most-exposed": {"attack_params": {"targeting": "most-exposed"}},
        "flood": {"method": "el-local", "attack_params": {"flood": True}},
        "adversarial-placement": {"method": "cs-plus", "placement": "adversarial"},
        "honest-first": {"method": "rtc", "graph": "honest-first"},
        "virtual": {"partition": "virtual", "alpha": 0.5, "nodes": 40, "byzantine": 4, "pull": 10},
        "virtual-label-flip": {"partition": "virtual", "attack": "label_flip"},
        "iid": {"partition": "iid", "alpha": "inf"},
        "int8": {"wire": "int8", "attack": "strongest"},
        "asynchronous": {"asynchronous": True, "speeds": "lognormal:0.5+stragglers:0.2,5", "jitter": 0.2},
        "asynchronous-stale": {"asynchronous": True, "speeds": "stragglers:0.2,5", "attack": "stale"},
        "workers": {"workers": 2},
        "workers-fang": {"workers": 2, "attack": "fang", "output": "uniform"},
        "resume": {"checkpoint_every": 1, "output": "uniform", "attack": "stale", "_interrupt": 2},
        "own-model": {"_own": "sequential"},
        "own-batchnorm": {"_own": "batchnorm", "local_steps": 2},
        "own-odd": {"_own": "odd"},
        "own-nodes": {"_own": "per_node"},
        "regression": {"_own": "regression", "partition": "iid"},
    }  # fmt: skip
    return by_name


def _rival(method: str) -> Fields:
    return {"pull": None} if method in ("all-to-all", "nna") else {}


# --- one tree -----------------------------------------------------------------------------------------------


def run_all(out: Path, names: list[str]) -> None:
    """Make the runs with whatever rpel this process imports; a run that fails leaves its sentence."""
    for name in names:
        try:
            path = _run(cases()[name], out / name)
            (out / name / "folder").write_text(str(path.relative_to(out / name)), "utf-8")
        except Exception:
            (out / name).mkdir(parents=True, exist_ok=True)
            (out / name / "error").write_text(traceback.format_exc(limit=-4), "utf-8")
        print(".", end="", file=sys.stderr, flush=True)


def _run(changes: Fields, out: Path) -> Path:
    import rpel

    fields = {**SMALL, **changes, "out": str(out)}
    objects, interrupt = _objects(fields.pop("_own", None)), fields.pop("_interrupt", None)
    fields = {key: value for key, value in fields.items() if value is not None and key not in objects}
    if "train" in objects:
        fields = {key: value for key, value in fields.items() if key != "model"}
    if interrupt is None:
        return Path(str(rpel.simulate(**fields, **objects).path))

    def stop(progress: Any) -> None:
        if progress.round == interrupt:
            raise KeyboardInterrupt

    try:
        rpel.simulate(**fields, **objects, progress=stop)
    except KeyboardInterrupt:
        (folder,) = out.glob("*")
    return Path(str(rpel.resume(folder).path))


def _objects(kind: str | None) -> Fields:
    """Models and data as a user hands them over."""
    if kind is None:
        return {}
    import numpy as np
    import torch
    from torch import nn

    class Odd(nn.Module):
        """Nothing that a fast engine knows."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.scale = nn.Linear(5, 8), nn.Parameter(torch.ones(8))
            self.last = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(x)) * self.scale
            out: torch.Tensor = self.last(hidden.sort(dim=-1).values)
            return out

    torch.manual_seed(0)
    made: dict[str, Callable[[], nn.Module]] = {
        "sequential": lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)),
        "per_node": lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)),
        "batchnorm": lambda: nn.Sequential(
            nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)
        ),
        "regression": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0)),
        "odd": Odd,
    }
    source = np.random.default_rng(0)
    x = source.normal(size=(400, 5)).astype(np.float32)
    y: Any = (
        x[:, 0].astype(np.float32) if kind == "regression" else (x[:, :3].argmax(axis=1)).astype(np.int64)
    )
    train: Any = (x[:320], y[:320])
    if kind == "per_node":
        train = [(x[40 * i : 40 * (i + 1)], y[40 * i : 40 * (i + 1)]) for i in range(8)]
    more = {"loss": nn.functional.mse_loss} if kind == "regression" else {}
    return {"model": made[kind](), "train": train, "test": (x[320:], y[320:]), **more}


# --- comparing ----------------------------------------------------------------------------------------------


def differences(base: Path, head: Path) -> Iterator[str]:
    """What differs between the folders of two runs, one sentence each."""
    import numpy as np

    if (base / "models.safetensors").read_bytes() != (head / "models.safetensors").read_bytes():
        yield "models.safetensors"
    for name in ("counts.npz", "nodes.npz"):
        with np.load(base / name) as old, np.load(head / name) as new:
            for key in old.files:
                if key not in new.files or not np.array_equal(old[key], new[key], equal_nan=True):
                    yield f"{name}: {key}"
    old, new = (json.loads((folder / "certificate.json").read_text("utf-8")) for folder in (base, head))
    yield from _keys("certificate.json", old, new, ("versions", "objects"))
    rows = [(folder / "metrics.jsonl").read_text("utf-8").splitlines() for folder in (base, head)]
    if len(rows[0]) != len(rows[1]):
        yield f"metrics.jsonl: {len(rows[0])} and {len(rows[1])} rows"
    for number, (before, after) in enumerate(zip(*rows, strict=False), 1):
        yield from _keys(
            f"metrics.jsonl, round {number}", json.loads(before), json.loads(after), ("seconds",)
        )
    names = [folder.name for folder in (base, head)]
    if names[0][-12:] != names[1][-12:]:
        yield f"the hash: {names[0]} and {names[1]}"


def _keys(where: str, old: Fields, new: Fields, but: tuple[str, ...]) -> Iterator[str]:
    """Keys of records whose values differ; what only the new one has is no difference, at any depth."""
    for key, value in old.items():
        if key in but:
            continue
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            pairs: Iterator[tuple[Fields, Fields]] = zip_longest(value, new.get(key) or [], fillvalue={})
            for item, other in pairs:
                yield from _keys(f"{where}: {key}", item, other, ())
        elif isinstance(value, dict) and isinstance(new.get(key), dict):
            yield from _keys(f"{where}: {key}", value, new[key], ())
        elif key not in new or new[key] != value:
            yield f"{where}: {key} {value!r} and {new.get(key)!r}"[:200]


def gained(base: Path, head: Path) -> set[str]:
    """Keys of rows and certificates that only the working tree writes."""
    names = set()
    for name in ("certificate.json", "metrics.jsonl"):
        old, new = ((folder / name).read_text("utf-8") for folder in (base, head))
        if name.endswith("jsonl"):
            old, new = old.splitlines()[-1], new.splitlines()[-1]
        names |= {f"{name}: {key}" for key in set(json.loads(new)) - set(json.loads(old))}
    return names


def compare(out: Path, names: list[str]) -> int:
    """Print what differs; returns how many runs do."""
    changed, models, more = 0, 0, set()
    for name in names:
        sides = [out / side / name for side in ("base", "head")]
        errors = [(side / "error").read_text("utf-8") if (side / "error").is_file() else "" for side in sides]
        if errors[0] and not errors[1]:
            print(f"{name}: new ({errors[0].splitlines()[-1][:100]})")
        elif errors[1]:
            if errors[0].splitlines()[-1:] != errors[1].splitlines()[-1:]:
                changed += 1
                print(f"{name}: fails\n{errors[1]}")
            else:
                print(f"{name}: refused by both ({errors[1].splitlines()[-1][:100]})")
        else:
            base, head = (side / (side / "folder").read_text("utf-8") for side in sides)
            changes = list(differences(base, head))
            more |= gained(base, head)
            models += "models.safetensors" in changes
            if changes:
                changed += 1
                print(
                    f"{name}: {changes[0]}" + (f" (and {len(changes) - 1} more)" if len(changes) > 1 else "")
                )
    if more:
        print("written only now:", ", ".join(sorted(more)))
    print(f"{len(names) - changed} of {len(names)} runs have the same bytes; models differ in {models}")
    return changed


def main() -> int:
    """Run both trees, one after the other, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("base", help="a commit")
    parser.add_argument("--only", nargs="+", default=None, help="names of runs, or their beginnings")
    parser.add_argument(
        "--keep", type=Path, default=None, help="a folder for the runs; those of BASE there are reused"
    )
    given = parser.parse_args()
    names = [name for name in cases() if given.only is None or name.startswith(tuple(given.only))]
    with tempfile.TemporaryDirectory(prefix="same-bytes-") as scratch:
        out = (given.keep or Path(scratch)).resolve()
        commit = _git("rev-parse", "--short=12", given.base)
        stored = out / f"base-{commit}"
        missing = [name for name in names if not (stored / name).is_dir()]
        if missing:
            tree = Path(scratch) / "tree"
            _git("worktree", "add", "--detach", str(tree), commit)
            try:
                _made(tree / "src", stored, missing)
            finally:
                _git("worktree", "remove", "--force", str(tree))
        (Path(scratch) / "both").mkdir()
        (Path(scratch) / "both" / "base").symlink_to(stored)
        _made(ROOT / "src", Path(scratch) / "both" / "head", names)
        print(file=sys.stderr)
        return 1 if compare(Path(scratch) / "both", names) else 0


def _made(source: Path, out: Path, names: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run([sys.executable, __file__, "--run", str(out), *names], env=environment, check=True)


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        import logging

        logging.disable(logging.WARNING)
        run_all(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main())
