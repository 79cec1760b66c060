"""The stages of training."""

from enum import Enum


class TrainingStage(Enum):
    """Named points of the training loop, in the order in which they are reached.

    The whole loop, with every stage at its place::

        SETUP                                   once per strategy; then the optimizers are built
        BEFORE_TRAINING
        for each epoch:
            BEFORE_EPOCH
            for each batch:
                BEFORE_BATCH                    gradients set to zero, unless vetoed
                BEFORE_FORWARD
                    predictions = training_fn(models, batch)
                AFTER_FORWARD
                BEFORE_LOSS
                    loss = loss_fn(predictions, batch)
                AFTER_LOSS
                BEFORE_BACKWARD
                DO_BACKWARD                     loss.backward()
                AFTER_BACKWARD
                BEFORE_OPTIMIZER_STEP
                DO_OPTIMIZER_STEP               optimizers and their schedulers step, unless vetoed
                    step_count += 1             when a step really ran
                AFTER_OPTIMIZER_STEP
                    validate, when due          AFTER_VALIDATION
                AFTER_BATCH
                validate, when due              AFTER_VALIDATION
            AFTER_EPOCH
        AFTER_TRAINING

    ``DO_BACKWARD`` and ``DO_OPTIMIZER_STEP`` are slots: a hook that claims one replaces what stands beside
    it, and at most one registered hook may claim each. Without a claim the strategy does it itself.

    The ``frequency`` of a hook counts optimizer steps, not batches: up to ``DO_OPTIMIZER_STEP`` those before the batch,
    from ``AFTER_OPTIMIZER_STEP`` on with its own. With ``frequency=5`` a hook is called at ``AFTER_OPTIMIZER_STEP`` or
    ``AFTER_BATCH`` after steps 5, 10, …, once each: batches that make no step (within an accumulation window, or
    vetoed) are passed over there. With ``frequency=1`` it is called after every batch, and ``ctx.step_made`` says
    whether that made a step.

    ``AFTER_BATCH`` and ``AFTER_EPOCH`` come last, validation included, so that what is written there (a
    checkpoint) is complete. ``AFTER_EPOCH`` is reached at the end of the data; training that ends by
    ``num_steps`` inside an epoch leaves that epoch open, to be continued.
    """

    # Members are single objects; Enum's own hash is a Python function that would run at every look-up in a table.
    __hash__ = object.__hash__

    SETUP = "setup"
    BEFORE_TRAINING = "before_training"
    BEFORE_EPOCH = "before_epoch"
    BEFORE_BATCH = "before_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    DO_BACKWARD = "do_backward"
    AFTER_BACKWARD = "after_backward"
    BEFORE_OPTIMIZER_STEP = "before_optimizer_step"
    DO_OPTIMIZER_STEP = "do_optimizer_step"
    AFTER_OPTIMIZER_STEP = "after_optimizer_step"
    AFTER_BATCH = "after_batch"
    AFTER_EPOCH = "after_epoch"
    AFTER_TRAINING = "after_training"
    AFTER_VALIDATION = "after_validation"


REPLACEMENT_SLOTS = frozenset({TrainingStage.DO_BACKWARD, TrainingStage.DO_OPTIMIZER_STEP})
"""Stages at which at most one registered hook may stand, in place of what the strategy would do."""

UPDATE_STAGES = frozenset(
    {
        TrainingStage.BEFORE_BATCH,
        TrainingStage.DO_BACKWARD,
        TrainingStage.DO_OPTIMIZER_STEP,
        TrainingStage.AFTER_OPTIMIZER_STEP,
    }
)
"""Stages that turn a loss into a change of weights; the update hooks live there."""

AFTER_STEP = frozenset({TrainingStage.AFTER_OPTIMIZER_STEP, TrainingStage.AFTER_BATCH})
"""Stages of a batch at which its own step, if it made one, is counted."""
