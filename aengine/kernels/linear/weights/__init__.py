"""Quantised weight matrices, between the formats of checkpoints and the layouts of kernels; one class a file."""

from aengine.kernels.linear.weights.base import QuantizedWeight
from aengine.kernels.linear.weights.fp8 import Activations, Fp8Weight
from aengine.kernels.linear.weights.int4 import INT4_MIDDLE, Int4Weight
from aengine.kernels.linear.weights.mxfp4 import E2M1, MXFP4_GROUP, Mxfp4Weight

__all__ = [
    "E2M1",
    "INT4_MIDDLE",
    "MXFP4_GROUP",
    "Activations",
    "Fp8Weight",
    "Int4Weight",
    "Mxfp4Weight",
    "QuantizedWeight",
]
