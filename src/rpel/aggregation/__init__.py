"""Aggregation: every rule of the field, exact, composable, for one victim or thousands at once."""

from rpel.aggregation.base import Rule
from rpel.aggregation.coordinatewise import arc, bucketing, bulyan, clipping, meamed, median, nnm, trimmed_mean
from rpel.aggregation.graph import (
    balance,
    clipped_gossip_adaptive,
    clipped_gossip_oracle,
    cs_plus,
    gossip,
    gts,
    ios,
    rtc,
)
from rpel.aggregation.linear import (
    aksel,
    caf,
    centered_clipping,
    cge,
    dnc,
    geometric_median,
    krum,
    mda,
    mean,
    monna,
    multi_krum,
    smea,
)
from rpel.aggregation.registry import RULES, chain, rule

__all__ = [
    "RULES",
    "Rule",
    "aksel",
    "arc",
    "balance",
    "bucketing",
    "bulyan",
    "caf",
    "centered_clipping",
    "cge",
    "chain",
    "clipped_gossip_adaptive",
    "clipped_gossip_oracle",
    "clipping",
    "cs_plus",
    "dnc",
    "geometric_median",
    "gossip",
    "gts",
    "ios",
    "krum",
    "mda",
    "meamed",
    "mean",
    "median",
    "monna",
    "multi_krum",
    "nnm",
    "rtc",
    "rule",
    "smea",
    "trimmed_mean",
]
