"""A small convolutional network for 28 x 28 grey images (or 8 x 8, as scikit-learn's digits)."""

import torch
from torch import nn


class ConvNet(nn.Module):
    """Two strided convolutions and two dense layers: 315,226 weights at 28 x 28.

    There is no BatchNorm: its statistics would depend on how many samples a rank holds, and the result must not
    depend on the layout. (GroupNorm and LayerNorm look at one sample at a time and are fine.)
    """

    def __init__(self, side: int = 28, classes: int = 10):
        super().__init__()
        quarter = side // 4  # two strides of 2: 28 -> 14 -> 7
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 48, kernel_size=4, stride=2, padding=1),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(48 * quarter * quarter, 128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """(batch, 1, side, side) -> logits (batch, classes)."""
        return self.classifier(self.features(images))
