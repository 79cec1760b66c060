"""The stages of a dynamics run."""

from enum import Enum


class DynamicsStage(Enum):
    """Where in a run hooks fire.

    The whole loop, with every stage at its place::

        run(batch, n_steps):
            ON_ADMISSION                  # once for graphs that enter, also later from a sampler or another stage
            compute                       # first forces; hooks that are part of the evaluation act here too
            repeat until n_steps are made or no graph is active:
                BEFORE_STEP
                BEFORE_PRE_UPDATE
                pre_update                # first half kick, drift; whole move of a minimiser
                AFTER_PRE_UPDATE
                BEFORE_COMPUTE            # neighbour list
                compute                   # model -> energy, forces[, stress] of the active graphs
                AFTER_COMPUTE             # bias, clamp, checks
                BEFORE_POST_UPDATE
                post_update               # second half kick
                AFTER_POST_UPDATE         # wrapping
                AFTER_STEP                # logs, snapshots
                ON_CONVERGE               # when a graph newly meets the criteria
                ON_GRADUATE               # when the status of a graph reached the exit status

    With a sampler, graphs that are done leave then to the sinks and others take their room, through ``ON_ADMISSION``
    and first forces of their own (:mod:`nvalchemi.dynamics.inflight`). In a fused stage ``ON_GRADUATE`` of the
    engine left and ``ON_ADMISSION`` of the engine entered are here (:mod:`nvalchemi.dynamics.fused`).

    Values ascend in the order of a step; ``ON_ADMISSION`` is −1.
    """

    ON_ADMISSION = -1
    BEFORE_STEP = 0
    BEFORE_PRE_UPDATE = 1
    AFTER_PRE_UPDATE = 2
    BEFORE_COMPUTE = 3
    AFTER_COMPUTE = 4
    BEFORE_POST_UPDATE = 5
    AFTER_POST_UPDATE = 6
    AFTER_STEP = 7
    ON_CONVERGE = 8
    ON_GRADUATE = 9

    # Members are singletons compared by identity; Enum's own hash is a Python function and costs more than
    # a look-up.
    __hash__ = object.__hash__
