"""Hooks of training: how the weights are updated, and what happens around it."""

from nvalchemi.training.hooks.accumulation import GradientAccumulationHook
from nvalchemi.training.hooks.checkpoint import CheckpointHook
from nvalchemi.training.hooks.clip import GradientClipHook
from nvalchemi.training.hooks.ddp import DDPHook
from nvalchemi.training.hooks.early_stopping import EarlyStoppingHook
from nvalchemi.training.hooks.ema import EMAHook
from nvalchemi.training.hooks.finetune import ModulePatchHook, TrainableParameterHook
from nvalchemi.training.hooks.precision import MixedPrecisionHook
from nvalchemi.training.hooks.spike import SpikeSkipHook
from nvalchemi.training.hooks.update import TrainingUpdateHook, TrainingUpdateOrchestrator

__all__ = [
    "CheckpointHook",
    "DDPHook",
    "EMAHook",
    "EarlyStoppingHook",
    "GradientAccumulationHook",
    "GradientClipHook",
    "MixedPrecisionHook",
    "ModulePatchHook",
    "SpikeSkipHook",
    "TrainableParameterHook",
    "TrainingUpdateHook",
    "TrainingUpdateOrchestrator",
]
