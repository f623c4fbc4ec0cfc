"""ResNet-18 with GroupNorm: 11,173,962 parameters for (3, 32, 32) and 10 labels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fl_app import checks
from fl_app.models._layers import check_image
from fl_app.plugins import Model
from fl_app.stages import InputSpec

_WIDTHS = (64, 128, 256, 512)
_SMALLEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Resnet18Gn(Model):
    """torchvision's ResNet-18 (He et al. 2016, arXiv:1512.03385), each BatchNorm a GroupNorm.

    Attributes:
        stem: small (one 3 x 3 convolution, for images of about 32 x 32) or large (7 x 7 with stride
            2 and a max-pooling, for 224 x 224).
        num_groups: groups of each GroupNorm; divides 64.
    """

    stem: str
    num_groups: int

    def __post_init__(self) -> None:
        checks.one_of("model.stem", self.stem, ("small", "large"))
        checks.at_least("model.num_groups", self.num_groups, 1)
        if _WIDTHS[0] % self.num_groups:
            raise checks.fail("model.num_groups", self.num_groups, "must divide 64", "e.g. 32")

    def build(self, spec: InputSpec) -> nn.Module:
        """Returns the network [B, C, H, W] -> [B, num_classes] (scores before the softmax).

        Raises:
            ModelError: the inputs are not images (C, H, W) of at least 16 x 16.
        """
        from torchvision.models import resnet18

        check_image(self.kind, spec, _SMALLEST)
        network: nn.Module = resnet18(
            weights=None,
            num_classes=spec.num_classes,
            norm_layer=lambda channels: nn.GroupNorm(self.num_groups, channels),
        )
        channels = spec.shape[0]
        if self.stem == "small":
            network.conv1 = nn.Conv2d(channels, _WIDTHS[0], 3, padding=1, bias=False)
            network.maxpool = nn.Identity()
        elif channels != 3:
            network.conv1 = nn.Conv2d(channels, _WIDTHS[0], 7, stride=2, padding=3, bias=False)
        return network


PLUGIN = Resnet18Gn
