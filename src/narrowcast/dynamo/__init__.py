"""Glue for ``torch.compile``: quantizers as compile-time values, tensors described without data."""

from .opaque_quantizers import is_value_opaque_quantizer, register_value_opaque_quantizer
from .tensor_proto import TensorProto, to_tensor_proto

# the names of the same things in the upstream project's later versions
TensorSpec = TensorProto
to_tensor_spec = to_tensor_proto

__all__ = [
    "TensorProto",
    "TensorSpec",
    "is_value_opaque_quantizer",
    "register_value_opaque_quantizer",
    "to_tensor_proto",
    "to_tensor_spec",
]
