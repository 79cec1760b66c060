"""Batched atomistic simulation and training of machine-learned interatomic potentials.

Nothing heavy is imported here: ``import nvalchemi`` costs a few milliseconds. Import what you use from the
subpackages, for example ``from nvalchemi.dynamics import FIRE``.
"""

__version__ = "0.1.0"
