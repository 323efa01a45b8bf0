"""A ByzFL benchmark's config.json as a sweep file of ours, with what has no counterpart said.

ByzFL trains with a server that aggregates everybody's gradients; the nearest here is ``all-to-all``, where
every node aggregates everybody's models. Its lists become the grid; names and parameters are translated, f is
left to the plan (b_hat = b when everybody is heard). Keys of versions 0.0.8 to 0.0.11 are understood.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import tomli_w

from rpel.errors import nearest
from rpel.text import visible

RULES = {
    "Average": "mean", "Median": "median", "TrMean": "trimmed_mean", "GeometricMedian": "geometric_median",
    "Krum": "krum", "MultiKrum": "multi_krum", "CenteredClipping": "centered_clipping", "MDA": "mda",
    "MoNNA": "monna", "Meamed": "meamed", "SMEA": "smea", "CAF": "caf",
}  # fmt: skip
MIXERS = {"NNM": "nnm", "Bucketing": "bucketing", "Clipping": "clipping", "ARC": "arc"}
ATTACKS = {
    "NoAttack": "none", "SignFlipping": "sign_flipping",
    "InnerProductManipulation": "inner_product_manipulation", "FallOfEmpires": "foe",
    "ALittleIsEnough": "alie", "Mimic": "mimic", "Inf": "inf", "Gaussian": "gaussian",
    "LabelFlipping": "label_flip", "Optimal_InnerProductManipulation": "strongest",
    "Optimal_ALittleIsEnough": "strongest",
}  # fmt: skip
"""Those called optimal search the factor of the attack that stands behind the word."""
_DATASETS = {
    "mnist": "mnist",
    "fashion_mnist": "fashion-mnist",
    "fashionmnist": "fashion-mnist",
    "cifar10": "cifar10",
}
_MODELS = {"cnn_mnist": "mnist", "fc_mnist": "mlp", "logreg_mnist": "linear", "cnn_cifar": "cifar10"}
_UNUSED = {
    "size_train_set": "all training examples are used, and the test set is only for evaluation",
    "nb_data_distribution_seeds": "the seed of a run also deals out its data",
    "learning_rate_decay": 'write a schedule such as lr = "500:0.1,800:0.01"',
    "batch_norm_momentum": "the networks here have no such switch",
    "store_models": "the final models are always kept",
    "store_per_client_metrics": "nodes.npz always holds every node's accuracy",
}
_SAID_ALWAYS = (
    "nodes exchange models, not gradients, and there is no server: all-to-all is the nearest; method = "
    '"rpel" and '
    "pull = … would pull s peers instead"
)


@dataclass
class Imported:
    """The content of a sweep file, and sentences on what was left out or changed."""

    base: dict[str, Any]
    grid: dict[str, list[Any]]
    cells: list[dict[str, Any]]
    remarks: list[str] = field(default_factory=list)

    def to_toml(self) -> str:
        """A file that ``rpel sweep`` takes; the remarks stand in front of it."""
        comments = "".join(f"# {visible(line)}\n" for line in ["From a ByzFL configuration.", *self.remarks])
        more = {key: value for key, value in (("grid", self.grid), ("cells", self.cells)) if value}
        return comments + tomli_w.dumps(self.base | more)


def read(path: str | Path) -> Imported:
    """The sweep that a config.json means."""
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"there is no file {str(path)!r}: give ByzFL's config.json") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or "benchmark_config" not in content:
        raise ValueError(f'{path} is no ByzFL configuration: it has no "benchmark_config"')
    return convert(content)


def convert(content: Mapping[str, Any]) -> Imported:
    """The same from parsed JSON.

    >>> config = {"benchmark_config": {"nb_honest_clients": 8, "f": [1, 2], "nb_steps": 50},
    ...           "aggregator": {"name": "TrMean"}, "pre_aggregators": [{"name": "NNM"}],
    ...           "attack": {"name": "Inf"}}
    >>> found = convert(config)
    >>> found.base["rule"], found.base["attack"], found.cells
    ('nnm+trimmed_mean', 'inf', [{'byzantine': 1, 'nodes': 9}, {'byzantine': 2, 'nodes': 10}])
    """
    bench, model = content["benchmark_config"], content.get("model", {})
    server = content.get("server", {})
    clients = content.get("honest_clients", content.get("honest_nodes", {}))
    imported = Imported({"method": "all-to-all"}, {}, [], [_SAID_ALWAYS])
    _setting(imported, model, bench.get("data_distribution", []))
    _put(imported, "rounds", server.get("nb_steps", bench.get("nb_steps")))
    _put(imported, "lr", server.get("learning_rate", model.get("learning_rate")))
    for key in ("momentum", "weight_decay", "batch_size"):
        _put(imported, key, clients.get(key))
    _put(imported, "eval_every", content.get("evaluation_and_results", {}).get("evaluation_delta"))
    first, many = int(bench.get("training_seed", 0)), int(bench.get("nb_training_seeds", 1))
    imported.base |= {"seeds": f"{first}-{first + many - 1}"} if many > 1 else {"seed": first}
    _algorithm(imported, bench.get("training_algorithm", {}))
    _put(imported, "rule", _rules(imported, content))
    _attacks(imported, _listed(content.get("attack", {"name": "NoAttack"})))
    _sizes(imported, bench)
    _left_out(imported, (bench, model, server, clients, content.get("evaluation_and_results", {})))
    return imported


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _put(imported: Imported, key: str, value: Any) -> None:
    """A value into the base, several into the grid."""
    values = [] if value is None else _listed(value)
    if len(values) == 1:
        imported.base[key] = values[0]
    elif values:
        imported.grid[key] = values


def _named(what: str, name: str, known: Mapping[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"{what} {name!r} has no counterpart here; {nearest(name, known)}")
    return known[name]


def _setting(imported: Imported, model: Mapping[str, Any], distributions: Any) -> None:
    if "dataset_name" in model:
        _put(
            imported,
            "dataset",
            [_named("dataset_name", name, _DATASETS) for name in _listed(model["dataset_name"])],
        )
    names = [name for name in _listed(model.get("name", [])) if name]
    if names:
        known = [_MODELS.get(name) for name in names]
        if None in known:
            imported.remarks.append(
                f"model {names[known.index(None)]!r} has no counterpart: the paper's network is taken"
            )
        _put(imported, "model", list(dict.fromkeys(name for name in known if name)))
    alphas: list[Any] = []
    for one in _listed(distributions):
        kind, parameter = one.get("name"), one.get("distribution_parameter")
        if kind == "iid":
            imported.base["partition"] = "iid"
        elif kind == "dirichlet_niid":
            imported.base["partition"] = "dirichlet"
            alphas += _listed(parameter)
        else:
            imported.remarks.append(
                f"data_distribution {kind!r} has no counterpart: partition dirichlet with alpha is"
            )
    _put(imported, "alpha", alphas or None)


def _algorithm(imported: Imported, algorithms: Any) -> None:
    for one in _listed(algorithms):
        name, parameters = one.get("name", "DSGD"), one.get("parameters", {})
        if name == "FedAvg":
            _put(imported, "local_steps", parameters.get("local_steps_per_client"))
            if parameters.get("proportion_selected_clients", 1.0) != 1.0:
                imported.remarks.append(
                    "proportion_selected_clients has no counterpart: rpel pulls s of all instead"
                )
        elif name != "DSGD":
            imported.remarks.append(
                f"training_algorithm {name!r} has no counterpart: every round is one local step"
            )


def _rules(imported: Imported, content: Mapping[str, Any]) -> list[str]:
    chains = content.get("pre_aggregators", [])
    chains = chains if chains and isinstance(chains[0], list) else [chains]
    rules = []
    for before, last in product(chains, _listed(content.get("aggregator", {"name": "Average"}))):
        names = [_named("pre_aggregator", one["name"], MIXERS) for one in before]
        rules.append("+".join([*names, _named("aggregator", last["name"], RULES)]))
        for one in [*before, last]:
            if one.get("parameters"):
                given = ", ".join(f"{key} = {value}" for key, value in one["parameters"].items())
                imported.remarks.append(f"parameters of {one['name']} ({given}): ours are taken")
    imported.remarks[:] = list(dict.fromkeys(imported.remarks))
    return rules


def _attacks(imported: Imported, attacks: list[Mapping[str, Any]]) -> None:
    """Attacks with parameters cannot share a grid with those without:
    they become combinations of their own."""
    cells = []
    for one in attacks:
        name = _named("attack", one["name"], ATTACKS)
        search = {"of": ATTACKS[one["name"].removeprefix("Optimal_")]} if name == "strongest" else {}
        params = search or _parameters(imported, one)
        cells.append({"attack": name, **({"attack_params": params} if params else {})})
    if len(cells) == 1:
        imported.base |= cells[0]
    elif not any("attack_params" in cell for cell in cells):
        imported.grid["attack"] = [cell["attack"] for cell in cells]
    else:
        imported.cells = cells


def _parameters(imported: Imported, one: Mapping[str, Any]) -> dict[str, Any]:
    supported = {}
    for key, value in one.get("parameters", {}).items():
        if key in ("tau", "epsilon", "mu", "sigma") and isinstance(value, int | float):
            supported[key] = value
        else:
            imported.remarks.append(f"parameter {key} of {one['name']} is left out")
    return supported


def _sizes(imported: Imported, bench: Mapping[str, Any]) -> None:
    """n = honest + f for each f, which no grid can say: combinations of all that varies, one by one."""
    hostile = _listed(bench.get("f", bench.get("nb_byz", 0)))
    honest = _listed(bench.get("nb_honest_clients", bench.get("nb_workers", 10)))
    whole = "nb_honest_clients" not in bench and "nb_workers" in bench
    whole = bool(bench.get("set_honest_clients_as_clients", whole))
    sizes = [{"byzantine": b, "nodes": h if whole else h + b} for h, b in product(honest, hostile)]
    if len(sizes) == 1:
        imported.base |= sizes.pop()
    if sizes or imported.cells:
        swept = [dict(zip(imported.grid, values, strict=True)) for values in product(*imported.grid.values())]
        imported.cells = [
            {**one, **cell, **size}
            for one in swept
            for cell in imported.cells or [{}]
            for size in sizes or [{}]
        ]
        imported.grid = {}


def _left_out(imported: Imported, tables: tuple[Mapping[str, Any], ...]) -> None:
    for table in tables:
        for key, why in _UNUSED.items():
            if key in table and (table[key] is True or table[key] not in (None, False, 1.0)):
                imported.remarks.append(f"{key} is left out: {why}")
