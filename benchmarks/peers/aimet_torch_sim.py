"""AIMET: cross-layer equalization, AdaRound and its quantization simulation; the ends at 8 bits."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path

import torch

# torchvision, which AIMET asks for, looks for these at import and has no build that brings them to this torch.
LIBRARY = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import aimet_torch  # noqa: E402
from aimet_torch import QuantizationSimModel  # noqa: E402
from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters  # noqa: E402
from aimet_torch.batch_norm_fold import fold_all_batch_norms  # noqa: E402
from aimet_torch.cross_layer_equalization import equalize_model  # noqa: E402
from aimet_torch.quantsim.config_utils import set_grouped_blockwise_quantization_for_weights  # noqa: E402, F401
from harness import Job, Made, NotOffered, Quantize, Setting, ends, main  # noqa: E402

ITERATIONS = int(os.environ.get("ADAROUND_ITERATIONS", "1000"))
SHAPE = (1, 3, 32, 32)
