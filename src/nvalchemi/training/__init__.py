"""Training of machine-learned interatomic potentials: a strategy, its stages, hooks, losses and metrics."""

from nvalchemi.hooks import TrainContext
from nvalchemi.training._stages import TrainingStage
from nvalchemi.training.archive import DamagedCheckpointError
from nvalchemi.training.finetuning import FineTuningStrategy
from nvalchemi.training.hooks import (
    CheckpointHook,
    DDPHook,
    EarlyStoppingHook,
    EMAHook,
    GradientAccumulationHook,
    GradientClipHook,
    MixedPrecisionHook,
    ModulePatchHook,
    SpikeSkipHook,
    TrainableParameterHook,
    TrainingUpdateHook,
    TrainingUpdateOrchestrator,
)
from nvalchemi.training.losses import (
    ComposedLoss,
    ConstantWeight,
    CosineWeight,
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMSELoss,
    LinearWeight,
    LossOutput,
    PiecewiseWeight,
    StressHuberLoss,
    StressMSELoss,
)
from nvalchemi.training.metrics import ErrorMetrics
from nvalchemi.training.optimizer_config import OptimizerConfig
from nvalchemi.training.strategy import TrainingStrategy
from nvalchemi.training.validation import ValidationConfig

__all__ = [
    "CheckpointHook",
    "ComposedLoss",
    "ConstantWeight",
    "CosineWeight",
    "DDPHook",
    "DamagedCheckpointError",
    "EMAHook",
    "EarlyStoppingHook",
    "EnergyHuberLoss",
    "EnergyMAELoss",
    "EnergyMSELoss",
    "ErrorMetrics",
    "FineTuningStrategy",
    "ForceHuberLoss",
    "ForceL2NormLoss",
    "ForceMSELoss",
    "GradientAccumulationHook",
    "GradientClipHook",
    "LinearWeight",
    "LossOutput",
    "MixedPrecisionHook",
    "ModulePatchHook",
    "OptimizerConfig",
    "PiecewiseWeight",
    "SpikeSkipHook",
    "StressHuberLoss",
    "StressMSELoss",
    "TrainContext",
    "TrainableParameterHook",
    "TrainingStage",
    "TrainingStrategy",
    "TrainingUpdateHook",
    "TrainingUpdateOrchestrator",
    "ValidationConfig",
]
