"""Attacks: per-victim forgeries by an adversary that sees everything. Adding one is a function and a row of a table."""

from rpel.attacks.forgeries import ATTACKS, BACKDOOR, TRAINING
from rpel.attacks.registry import Attack, attack
from rpel.attacks.view import View

__all__ = ["ATTACKS", "BACKDOOR", "TRAINING", "Attack", "View", "attack"]
