"""Velocities for structures that enter an engine."""

from enum import Enum

from nvalchemi.dynamics.hooks._context import dynamics_context
from nvalchemi.dynamics.parameters import GraphParameter
from nvalchemi.dynamics.random import check_seed
from nvalchemi.dynamics.stages import DynamicsStage
from nvalchemi.dynamics.velocities import initialize_velocities
from nvalchemi.hooks import HookContext


class InitializeVelocitiesHook:
    """Draw Maxwell–Boltzmann velocities for each structure when it enters the engine.

    The way to begin dynamics behind a relaxation in a :class:`~nvalchemi.dynamics.FusedStage`, and in a run fed by
    a sampler. The velocities depend on the seed and the ``system_id`` only, so they are the same alone and in
    any batch.

    Parameters
    ----------
    temperature : float
        K; ≥ 0.
    random_seed, remove_com, remove_rotations, rescale
        As in :func:`~nvalchemi.dynamics.initialize_velocities`.

    Raises
    ------
    ValueError
        A temperature that is negative or not finite.

    Examples
    --------
    >>> hook = InitializeVelocitiesHook(300.0)
    >>> hook.stage.name
    'ON_ADMISSION'
    """

    frequency = 1

    def __init__(
        self,
        temperature: float,
        *,
        random_seed: int = 42,
        remove_com: bool = True,
        remove_rotations: bool = False,
        rescale: bool = True,
    ) -> None:
        GraphParameter("temperature", temperature)
        self.temperature = temperature
        self.random_seed = check_seed(random_seed)
        self.remove_com = remove_com
        self.remove_rotations = remove_rotations
        self.rescale = rescale
        self.stage: Enum | None = DynamicsStage.ON_ADMISSION

    def __call__(self, ctx: HookContext, stage: Enum) -> None:
        """Overwrite the velocities of the structures that entered."""
        dynamics, batch = dynamics_context(self, ctx)
        admitted = dynamics.admitted_mask
        if admitted is None:
            raise ValueError(f"InitializeVelocitiesHook works at ON_ADMISSION, not at {stage.name}")
        entering = batch.index_select(admitted)
        initialize_velocities(
            entering,
            self.temperature,
            random_seed=self.random_seed,
            remove_com=self.remove_com,
            remove_rotations=self.remove_rotations,
            rescale=self.rescale,
        )
        batch.velocities[admitted[batch.batch_idx]] = entering.velocities
