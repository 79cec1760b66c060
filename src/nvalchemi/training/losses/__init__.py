"""Losses of energies, forces and stresses that add up: ``EnergyMSELoss() + 10.0 * ForceMSELoss()``."""

from nvalchemi.training.losses.base import ComposedLoss, LossFunction, LossOutput, LossTerm, loss_from_spec
from nvalchemi.training.losses.schedules import ConstantWeight, CosineWeight, LinearWeight, PiecewiseWeight
from nvalchemi.training.losses.terms import (
    EnergyHuberLoss,
    EnergyMAELoss,
    EnergyMSELoss,
    ForceHuberLoss,
    ForceL2NormLoss,
    ForceMSELoss,
    StressHuberLoss,
    StressMSELoss,
)

__all__ = [
    "ComposedLoss",
    "ConstantWeight",
    "CosineWeight",
    "EnergyHuberLoss",
    "EnergyMAELoss",
    "EnergyMSELoss",
    "ForceHuberLoss",
    "ForceL2NormLoss",
    "ForceMSELoss",
    "LinearWeight",
    "LossFunction",
    "LossOutput",
    "LossTerm",
    "PiecewiseWeight",
    "StressHuberLoss",
    "StressMSELoss",
    "loss_from_spec",
]
