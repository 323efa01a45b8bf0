"""Aggregation: every rule of the field, exact, composable, for one victim or thousands at once."""

from rpel.aggregation.base import Rule
from rpel.aggregation.coordinatewise import bulyan, meamed, median, trimmed_mean
from rpel.aggregation.graph import clipped_gossip_adaptive, clipped_gossip_oracle, cs_plus, gossip, gts, rtc
from rpel.aggregation.linear import (
    caf,
    centered_clipping,
    geometric_median,
    krum,
    mda,
    mean,
    monna,
    multi_krum,
    smea,
)
from rpel.aggregation.mixing import arc, bucketing, clipping, nnm
from rpel.aggregation.registry import RULES, chain, rule

__all__ = [
    "RULES",
    "Rule",
    "arc",
    "bucketing",
    "bulyan",
    "caf",
    "centered_clipping",
    "chain",
    "clipped_gossip_adaptive",
    "clipped_gossip_oracle",
    "clipping",
    "cs_plus",
    "geometric_median",
    "gossip",
    "gts",
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
