"""Aggregation rules: exact, composable, for one victim or thousands at once."""

from rpel.rules.base import Group, RoundContext, Rule, aggregate_or_keep
from rpel.rules.coordinatewise import *
from rpel.rules.graph import *
from rpel.rules.graph import GossipRule
from rpel.rules.linear import *
from rpel.rules.mixing import *
from rpel.rules.mixing import PreAggregation, chain
from rpel.rules.registry import RULES, FunctionRule, rule

__all__ = [
    *RULES, "RULES", "FunctionRule", "GossipRule", "Group", "PreAggregation", "RoundContext", "Rule",
    "aggregate_or_keep", "chain", "rule",
]  # fmt: skip
