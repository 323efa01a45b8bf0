"""Attacks: per-victim forgeries by an adversary that sees everything.
Adding one is a function and a row of a table."""

from rpel.attacks.forgeries import ATTACKS
from rpel.attacks.registry import Attack, attack
from rpel.attacks.traits import Poison, Traits, declare
from rpel.attacks.view import View

__all__ = ["ATTACKS", "Attack", "Poison", "Traits", "View", "attack", "declare"]
