"""Attacks: what hostile peers answer, one forged vector per victim, by an adversary that sees everything."""

from rpel.attacks.base import ALIASES, ATTACKS, Attack, Poison, State, Traits, about, attack, declare
from rpel.attacks.forgeries import FACTORS
from rpel.attacks.search import strongest
from rpel.attacks.view import View

__all__ = [
    "ALIASES", "ATTACKS", "FACTORS", "Attack", "Poison", "State", "Traits", "View", "about", "attack",
    "declare", "strongest",
]  # fmt: skip
