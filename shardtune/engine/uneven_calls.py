"""Modules that ranks call alike, and whose insides they don't."""

from __future__ import annotations


class UnevenCalls:
    """Marks a module that calls the modules inside it as often as its input asks for, so that ranks
    do so unequally often.

    Gathering weights is a collective: whoever gathers them module by module must gather all weights
    of such a module together, around it. Its input is called `hidden_states`.
    """
