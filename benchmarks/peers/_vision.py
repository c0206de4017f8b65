"""Import this before torchvision, which some tools ask for: it wants operators that no build brings to this torch."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
