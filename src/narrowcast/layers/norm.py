"""The parameters of a norm: their initial values, and the inputs that fit them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .._checks import flags, in_range, is_one_of, not_among, positive, shape_of, shown
from ..autograd import NormSettings
from ..reference.norm import NORMALIZATIONS
from ..upstream.fsdp import placed_by_style
from .extra_state import EXTRA_STATE
from .neutral import NormOptions, check_neutral
from .parameters import ONE_BYTE, casts, named_layer, parameter_device, parameter_dtype, remedy
from .recipe_owner import refuse_script

if TYPE_CHECKING:
    from typing_extensions import Unpack


def norm_settings(normalization: str, eps: float, zero_centered_gamma: bool) -> NormSettings:
    """Return how a module normalizes.

    Raises:
        ValueError: an unknown normalization, or an eps that is no number of 0 or more.
    """
    if not is_one_of(normalization, NORMALIZATIONS):
        raise ValueError(f"normalization is {not_among(normalization, NORMALIZATIONS)}")
    in_range("eps", eps, "use a number, at least 0")
    flags(zero_centered_gamma=zero_centered_gamma)
    return NormSettings(normalization, float(eps), bool(zero_centered_gamma))


def norm_parameters(
    size: int, settings: NormSettings, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return uninitialized (weight, bias), each (size,); no bias for RMSNorm."""
    weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
    if settings.normalization == "RMSNorm":
        return weight, None
    return weight, nn.Parameter(torch.empty(size, dtype=dtype, device=device))


def reset_norm_parameters(weight: Tensor, bias: Tensor | None, settings: NormSettings) -> None:
    """Fill in place: gamma 1, bias 0."""
    weight.fill_(0.0 if settings.zero_centered_gamma else 1.0)
    if bias is not None:
        bias.zero_()


class NormParameters(nn.Module):
    """The parameters of a norm over the last dim, and how they begin; a subclass names its normalization.

    Arguments and the errors of construction are those of :class:`LayerNorm`.
    """

    _normalization: ClassVar[str]
    # the parameters are DTensors, used on a share of the rows
    _placed: bool = False
    __prepare_scriptable__ = refuse_script

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        sequence_parallel: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        params_dtype: torch.dtype | None = None,
        **options: Unpack[NormOptions],
    ) -> None:
        check_neutral(type(self).__name__, options, NormOptions)
        if (normalized_shape is None) == (hidden_size is None):
            raise ValueError(
                f"normalized_shape is {shown(normalized_shape)} and hidden_size is {shown(hidden_size)}; give one of "
                "them, the size of the last dim"
            )
        normalized_shape = hidden_size if normalized_shape is None else normalized_shape
        assert normalized_shape is not None
        shape = tuple(normalized_shape) if isinstance(normalized_shape, Sequence) else (normalized_shape,)
        if len(shape) != 1:
            raise ValueError(f"normalized_shape is {shown(normalized_shape)}; give the size of the last dim")
        positive(normalized_shape=shape[0])
        nn.Module.__init__(self)
        self.settings = norm_settings(self._normalization, eps, zero_centered_gamma)
        self.normalized_shape, self.eps, self.elementwise_affine = shape, self.settings.eps, True
        kind, place = parameter_dtype(params_dtype, dtype), parameter_device(device)
        weight, bias = norm_parameters(shape[0], self.settings, kind, place)
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        if sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.reset_parameters()

    def register_parameter(self, name: str, param: Any) -> None:
        """Register a parameter; note whether PyTorch's ``SequenceParallel`` places it: gradients are then partial."""
        super().register_parameter(name, param)
        if not self._placed and placed_by_style(param):
            self._placed = True

    def _take_over(self, name: str) -> None:
        """Set up the norm around the parameters of torch's norm it was."""
        self.settings = norm_settings(self._normalization, self.eps, False)
        if self._normalization == "RMSNorm":
            self.bias = None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set gamma to 1 and the bias to 0, where they are; on the meta device nothing."""
        reset_norm_parameters(self.weight, self.bias, self.settings)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Return size and options, as printed by the module."""
        return (
            f"{self.normalized_shape[0]}, eps={self.settings.eps}, "
            f"zero_centered_gamma={self.settings.zero_centered_gamma}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load without Transformer Engine's quantizer state of a norm."""
        own = {key: tensor for key, tensor in state_dict.items() if key != prefix + EXTRA_STATE}
        super()._load_from_state_dict(own, prefix, *args)

    def check_input(self, inp: Tensor) -> None:
        """Compare an input with the weight.

        Raises:
            ValueError: another last dim.
            RuntimeError: another device.
            TypeError: another dtype, outside torch.autocast and unless the parameters are fp32: those go with every
                input, as those of torch.nn.LayerNorm do.
        """
        weight: Any = self.weight
        if inp.shape[-1:] != weight.shape:
            raise ValueError(
                f"input has shape {shape_of(inp)}; its last dim must be that of the weight of {named_layer(self)}, "
                f"{shape_of(weight)}"
            )
        if inp.device != weight.device:
            raise RuntimeError(
                f"input is on {inp.device}, the parameters are on {weight.device} in {named_layer(self)}; "
                f"{remedy(weight)}"
            )
        if inp.dtype != weight.dtype != torch.float32 and not casts(inp):
            wide = "cast one of them, keep the parameters in torch.float32, or use torch.autocast"
            remedy_of_dtype = wide if weight.dtype.itemsize > 1 else ONE_BYTE
            raise TypeError(
                f"input is {inp.dtype}, the parameters are {weight.dtype} in {named_layer(self)}; {remedy_of_dtype}"
            )
