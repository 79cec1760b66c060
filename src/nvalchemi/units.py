"""Units and physical constants: the one place where numbers with dimensions are written down.

The package works in Å, eV, amu and K. The unit of time that follows is Å·sqrt(amu/eV) = 10.1805 fs, so a time given in
femtoseconds is multiplied by :data:`fs` and velocities are stored in sqrt(eV/amu). The constants are CODATA 2014, as in
ASE's default, so that trajectories of both codes agree to round-off.

>>> from nvalchemi import units
>>> round(1.0 * units.fs, 7)  # one femtosecond in internal time units
0.0982269
>>> round(units.kB * 300, 6)  # thermal energy at 300 K, eV
0.025852
"""

_e = 1.6021766208e-19  # elementary charge, C
_amu = 1.660539040e-27  # atomic mass constant, kg
_k = 1.38064852e-23  # Boltzmann constant, J/K

kB: float = _k / _e
"""Boltzmann constant, eV/K."""

fs: float = 1e-15 * 1e10 * (_e / _amu) ** 0.5
"""One femtosecond in internal time units, Å·sqrt(amu/eV)."""

ps: float = 1000.0 * fs
"""One picosecond in internal time units."""

Pascal: float = 1e-30 / _e
"""One pascal in eV/Å³."""

bar: float = 1e5 * Pascal
"""One bar in eV/Å³."""

GPa: float = 1e9 * Pascal
"""One gigapascal in eV/Å³."""

kcal_mol: float = 4184.0 / 6.022140857e23 / _e
"""One kilocalorie per mole in eV."""

kJ_mol: float = 1000.0 / 6.022140857e23 / _e
"""One kilojoule per mole in eV."""

Hartree: float = 27.211386024367243
"""One Hartree in eV."""

Bohr: float = 0.5291772105638411
"""One Bohr radius in Å."""
