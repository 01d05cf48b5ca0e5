"""Grouped tensors: members of one allocation, operations on the dequantized members, in-place ones requantized."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast import functional
from narrowcast.tensors import grouped, grouped_layout, quantize_members
from narrowcast.tensors.grouped import GroupedTensorStorage

E4M3 = nc.DType.kFloat8E4M3
G, N, K = 3, 40, 48
QUANTIZERS: dict[str, nc.Quantizer] = {
    "tensor": nc.Float8CurrentScalingQuantizer(E4M3),
    "mxfp8": nc.MXFP8Quantizer(E4M3),
    "block 1d": nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "block 2d": nc.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=2),
    "nvfp4": nc.NVFP4Quantizer(),
    "identity": nc.IdentityQuantizer(),
}
each_quantizer = pytest.mark.parametrize("name", QUANTIZERS)


def values(seed: int = 0) -> Tensor:
    return torch.randn(G, N, K, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make(name: str = "tensor", seed: int = 0, **kwargs: Any) -> nc.GroupedTensor:
    return nc.GroupedTensor(quantize_members([values(seed)], QUANTIZERS[name]), **kwargs)


def assert_same_buffers(a: GroupedTensorStorage, b: GroupedTensorStorage) -> None:
    for one, other in zip(a.get_data_tensors(), b.get_data_tensors(), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)  # type: ignore[arg-type]


@each_quantizer
def test_members_are_those_of_the_quantizer(name: str) -> None:
    quantizer = QUANTIZERS[name]
    storage = quantize_members(list(values().unbind(0)), quantizer)
    assert_same_buffers(storage, quantize_members([values()], quantizer))
    members = storage.split_into_quantized_tensors()
    expected = [quantizer.replace(internal=True).quantize(value) for value in values().unbind(0)]
    for member, alone in zip(members, expected, strict=True):
        assert type(member) is type(alone) and member.shape == (N, K)
        for ours, theirs in zip(member.get_data_tensors(), alone.get_data_tensors(), strict=True):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            if (
                ours.dtype == torch.uint8 or name != "block 2d"
            ):  # where rows of scales are padded, others' follow
                assert torch.equal(ours, theirs)
    assert torch.equal(storage.dequantize(), torch.stack([alone.dequantize() for alone in expected]))


@each_quantizer
def test_ragged_members(name: str) -> None:
    """Groups of rows: every member equals what quantizing it alone gives."""
    quantizer: Any = QUANTIZERS[name]
    sizes = [20, 0, 33]
    x = values().reshape(-1, K)[: sum(sizes) + 5]
    layout = grouped_layout(quantizer._storage_name)
    storage = GroupedTensorStorage(
        functional.grouped_quantize(x, torch.tensor(sizes), quantizer, layout),
        quantizer=quantizer,
        storage_name=quantizer._storage_name,
        rowwise=True,
        columnwise=True,
        num_tensors=3,
        logical_shape=tuple(x.shape),
        fake_dtype=x.dtype,
        first_dims=torch.tensor(sizes),
    )
    assert storage.tensor_shapes == [(size, K) for size in sizes]
    for part, member in zip(x.split([*sizes, 5]), storage.split_into_quantized_tensors()):
        if part.numel():
            alone = quantizer.replace(internal=True).quantize(part)
            assert torch.equal(member.dequantize(), alone.dequantize())
    assert (storage.dequantize()[sum(sizes) :] == 0).all()
    with pytest.raises(NotImplementedError, match="different shapes"):
        nc.GroupedTensor(storage)
    with pytest.raises(NotImplementedError, match="different shapes"):
        storage.quantize([x])


@each_quantizer
def test_quantize_overwrites(name: str) -> None:
    storage, other = make(name), make(name, seed=1)
    pointers = [b.data_ptr() for b in storage.get_data_tensors() if b is not None]
    storage.quantize(values(1), noop_flag=torch.ones(1))
    assert_same_buffers(storage, make(name))
    storage.quantize(list(values(1).unbind(0)), noop_flag=torch.zeros(1))
    assert_same_buffers(storage, other)
    assert pointers == [b.data_ptr() for b in storage.get_data_tensors() if b is not None]


def test_one_operator_for_all_members(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = grouped.grouped_quantize_weights
    monkeypatch.setattr(grouped, "grouped_quantize_weights", lambda *args: calls.append(args) or run(*args))
    for name in QUANTIZERS:
        with torch.no_grad():
            make(name).mul_(2.0)
    assert len(calls) == 2 * len(QUANTIZERS)


def test_one_matrix_is_one_member() -> None:
    storage = quantize_members([values()[0]], QUANTIZERS["mxfp8"])
    assert storage.tensor_shapes == [(N, K)]
    assert_same_buffers(storage, quantize_members([values()[:1]], QUANTIZERS["mxfp8"]))


def test_copying_from_members_of_another_format_quantizes_their_values() -> None:
    tensor, source = make("mxfp8"), make("block 1d", seed=1)
    with torch.no_grad():
        tensor.copy_(source)
    assert_same_buffers(tensor, quantize_members([source.dequantize()], QUANTIZERS["mxfp8"]))
    coarse = nc.MXFP8Quantizer(nc.DType.kFloat8E5M2)
    with torch.no_grad():
        tensor.copy_(nc.GroupedTensor(quantize_members([values(2)], coarse)))  # buffers of the same shapes
    values_of_source = quantize_members([values(2)], coarse).dequantize()
    assert_same_buffers(tensor, quantize_members([values_of_source], QUANTIZERS["mxfp8"]))


def test_an_empty_one_has_the_dtype_that_is_asked_for() -> None:
    tensor = make()
    assert torch.empty_like(tensor).dtype == torch.bfloat16
    empty = torch.empty_like(tensor, dtype=torch.float32)
    assert isinstance(empty, nc.GroupedTensor) and empty.dtype == empty.fake_dtype == torch.float32


def test_members_that_cannot_be() -> None:
    quantizer = QUANTIZERS["tensor"]
    with pytest.raises(ValueError, match="give matrices"):
        quantize_members([torch.zeros(3)], quantizer)
    with pytest.raises(ValueError, match="one shape"):
        quantize_members([torch.zeros(2, 3), torch.zeros(3, 3)], quantizer)
    with pytest.raises(ValueError, match="give matrices"):
        quantize_members([torch.zeros(3), torch.zeros(3)], quantizer)


def test_directions() -> None:
    storage = quantize_members([values()], QUANTIZERS["mxfp8"].with_usage(rowwise=True, columnwise=False))
    assert storage.get_usages() == {"rowwise": True, "columnwise": False}
    with pytest.raises(RuntimeError, match="no column-wise data"):
        storage.columnwise_operand()
    storage.clear()
    assert storage.get_data_tensors() == (None,) * 4
    with pytest.raises(RuntimeError, match="no row-wise data"):
        storage.rowwise_operand()


def test_repr_names_what_it_is() -> None:
    text = repr(quantize_members([values()], QUANTIZERS["tensor"]))
    for part in (
        "GroupedTensorStorage(",
        "num_tensors=3",
        "(40, 48)",
        "(3, 40, 48)",
        "Float8Current",
        "bfloat16",
    ):
        assert part in text
    assert repr(make()).startswith("GroupedTensor(")


@each_quantizer
def test_operations_run_on_the_dequantized_members(name: str) -> None:
    tensor, plain = make(name), make(name).dequantize()
    assert tensor.shape == (G, N, K) and tensor.dtype == torch.bfloat16
    other = torch.ones(G, N, K, dtype=torch.bfloat16)
    for result, expected in (
        (tensor + other, plain + other),
        (other * tensor, other * plain),
        (torch.bmm(tensor, other.transpose(1, 2)), torch.bmm(plain, other.transpose(1, 2))),
        (tensor.sum(), plain.sum()),
        (
            torch.addcmul(other, tensor1=tensor, tensor2=other, value=0.5),
            torch.addcmul(other, plain, other, value=0.5),
        ),
    ):
        assert type(result) is Tensor and torch.equal(result, expected)


@each_quantizer
def test_in_place_operations_requantize(name: str) -> None:
    tensor = make(name)
    pointers = [b.data_ptr() for b in tensor.get_data_tensors() if b is not None]
    plain = tensor.dequantize().mul_(3.0)
    assert tensor.mul_(3.0) is tensor
    assert_same_buffers(tensor, quantize_members([plain], QUANTIZERS[name]))
    assert pointers == [b.data_ptr() for b in tensor.get_data_tensors() if b is not None]
    tensor.copy_(values(2))
    assert_same_buffers(tensor, make(name, seed=2))


def test_keywords_are_paired_by_name() -> None:
    """Optional arguments that are left out before the first keyword do not shift the pairing."""
    tensor, ones = make(), torch.ones(G, N, K, dtype=torch.bfloat16)
    result = torch.add(ones, ones, out=tensor)
    assert result is tensor
    assert_same_buffers(tensor, quantize_members([ones + ones], QUANTIZERS["tensor"]))
    other = make()
    plain = other.dequantize().addcmul_(ones, ones, value=0.5)
    other.addcmul_(ones, tensor2=ones, value=0.5)
    assert_same_buffers(other, quantize_members([plain], QUANTIZERS["tensor"]))
    with pytest.raises(TypeError):
        torch.add(ones, ones, nonsense=tensor)


def test_detach_and_alias_are_new_objects_on_the_same_buffers() -> None:
    tensor = make(requires_grad=True)
    for made, needs_grad in ((tensor.detach(), False), (torch.ops.aten.alias.default(tensor), True)):
        assert made is not tensor and isinstance(made, nc.GroupedTensor)
        assert made.requires_grad == needs_grad
        for one, other in zip(made.get_data_tensors(), tensor.get_data_tensors(), strict=True):
            assert one is other
    plain = make()
    parameter = torch.nn.Parameter(plain)
    assert isinstance(parameter, nc.GroupedTensor) and parameter is not plain and not plain.requires_grad
    copied = tensor.clone()
    assert_same_buffers(copied, tensor)
    assert copied.rowwise_data is not tensor.rowwise_data


def test_shapes_cannot_be_changed() -> None:
    tensor = make()
    assert tensor.view(-1).shape == (G * N * K,) and tensor.view(-1).dtype == torch.uint8
    assert isinstance(tensor.expand(G, N, K), nc.GroupedTensor) and isinstance(
        tensor.expand_as(tensor), nc.GroupedTensor
    )
    for change in (
        lambda: tensor.view(G * N, K),
        lambda: tensor.reshape(N, G, K),
        lambda: tensor[0],
        lambda: tensor[:, 1:3],
        lambda: torch.cat([tensor, tensor]),
        lambda: tensor.transpose(0, 1),
        lambda: tensor.unbind(0),
        lambda: tensor.squeeze(),
        lambda: tensor.squeeze(0),
        lambda: tensor.unsqueeze(0),
        lambda: tensor.split(1, 1),
        lambda: tensor.chunk(3),
        lambda: tensor.diagonal(),
        lambda: tensor.unfold(1, 4, 4),
        lambda: tensor.as_strided((4,), (1,)),
        lambda: tensor.t_() if tensor.dim() < 3 else tensor.transpose_(1, 2),
        lambda: torch.stack([tensor, tensor]),
        lambda: tensor.repeat(2, 1, 1),
        lambda: tensor.index_select(0, torch.tensor([0])),
        lambda: tensor.gather(0, torch.zeros(1, 1, 1, dtype=torch.int64)),
        lambda: tensor.flip(0),
        lambda: tensor.cumsum(0),  # not known to keep the shape
        lambda: tensor.masked_select(torch.ones(G, N, K, dtype=torch.bool)),
    ):
        with pytest.raises(RuntimeError, match=r"shape.*GroupedTensor.*call dequantize\(\) first"):
            change()


@each_quantizer
def test_parameters_as_one_vector(name: str) -> None:
    parameters = [torch.nn.Parameter(make(name)), torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))]
    vector = torch.nn.utils.parameters_to_vector(parameters)
    assert torch.equal(vector[: G * N * K], parameters[0].dequantize().view(-1))  # type: ignore[operator]
    (grad,) = torch.autograd.grad((2 * vector).sum(), parameters[0])
    assert torch.equal(grad, torch.full((G, N, K), 2.0, dtype=torch.bfloat16))
    with torch.no_grad(), pytest.raises(RuntimeError, match="through a view of a quantized tensor"):
        parameters[0].view(-1).zero_()
    new = torch.cat([values(5).view(-1), torch.zeros(5, dtype=torch.bfloat16)])
    torch.nn.utils.vector_to_parameters(new, parameters)
    assert_same_buffers(parameters[0], make(name, seed=5))  # type: ignore[arg-type]


@each_quantizer
def test_assigning_data(name: str) -> None:
    parameter: Any = torch.nn.Parameter(make(name))
    parameter.data = values(3)
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    assert_same_buffers(parameter, make(name, seed=3))
    source = make(name, seed=4)
    parameter.data = source
    assert parameter.rowwise_data is source.rowwise_data
    parameter.data = values(3).half()[:2]
    assert parameter.shape == (2, N, K) and parameter.dtype == parameter.fake_dtype == torch.float16
    assert parameter.dequantize().shape == (2, N, K)
    with pytest.raises(ValueError, match="give matrices, or one"):
        parameter.data = torch.ones(N, K)[0]
    with pytest.raises(ValueError, match="cannot make a GroupedTensor hold the data of a Float8Tensor"):
        parameter.data = QUANTIZERS["tensor"].quantize(torch.ones(N, K))


@each_quantizer
def test_modules_move_and_cast_their_parameters(name: str) -> None:
    module: Any = torch.nn.Module()
    module.weight = torch.nn.Parameter(make(name))
    codes = [None if b is None else b.clone() for b in module.weight.get_data_tensors()]
    value = module.weight.detach().dequantize(dtype=torch.float32)
    for change, dtype in (
        (module.half, torch.float16),
        (module.float, torch.float32),
        (module.cpu, torch.float32),
        (lambda: module.to("cpu", torch.bfloat16), torch.bfloat16),
    ):
        change()
        weight = module.weight
        assert isinstance(weight, torch.nn.Parameter) and isinstance(weight, nc.GroupedTensor)
        assert weight.dtype == weight.fake_dtype == weight.dequantize().dtype == dtype
        assert torch.allclose(weight.dequantize().float(), value, rtol=2**-7), dtype
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(weight.get_data_tensors(), codes))
    assert torch.equal(module.weight.dequantize(dtype=torch.float32), value)
    module.to("meta")
    buffers = [buffer for buffer in module.weight.get_data_tensors() if buffer is not None]
    assert isinstance(module.weight, nc.GroupedTensor) and module.weight.is_meta
    assert all(buffer.is_meta for buffer in buffers) and len(buffers) == len(
        [c for c in codes if c is not None]
    )
    module.to_empty(device="cpu")
    assert isinstance(module.weight, nc.GroupedTensor) and not module.weight.rowwise_data.is_meta
    with torch.no_grad():
        module.weight.copy_(values(2))
    assert torch.equal(module.weight.dequantize(), make(name, seed=2).dequantize())
    made = module.weight.to(torch.float32)
    assert type(made) is Tensor and torch.equal(made, module.weight.dequantize(dtype=torch.float32))


@each_quantizer
def test_copies_and_files(name: str) -> None:
    weight: Any = torch.nn.Parameter(make(name), requires_grad=False)
    file = io.BytesIO()
    torch.save({"weight": weight, "tensor": make(name, seed=1)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for made, expected in (
        (loaded["weight"], weight),
        (loaded["tensor"], make(name, seed=1)),
        (copy.deepcopy(weight), weight),
    ):
        assert type(made) is nc.GroupedTensor and made.dtype == expected.dtype
        assert isinstance(made, torch.nn.Parameter) == isinstance(expected, torch.nn.Parameter)
        assert not made.requires_grad and made.quantizer == expected.quantizer
        assert_same_buffers(made, expected)
        assert made.rowwise_data is not expected.rowwise_data
    other = make(name, seed=1)
    other.copy_(weight)
    assert_same_buffers(other, weight)


def test_members_of_another_number_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"the members are \(3, 40, 48\), got \(1, 40, 48\)"):
        make().quantize(values()[:1])


def test_gradient_passes_through_dequantize() -> None:
    tensor = make(requires_grad=True)
    tensor.dequantize(dtype=torch.float32).square().sum().backward()
    assert tensor.grad is not None and tensor.grad.dtype == torch.bfloat16
    assert torch.equal(tensor.grad, (2 * tensor.detach().dequantize(dtype=torch.float32)).bfloat16())


@each_quantizer
def test_flatten_and_back(name: str) -> None:
    tensor = make(name, requires_grad=True)
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    rebuilt = nc.GroupedTensor.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    assert_same_buffers(rebuilt, tensor)
    assert rebuilt.requires_grad and rebuilt.shape == tensor.shape and rebuilt.dtype == tensor.dtype


def test_under_inference_mode() -> None:
    weight: Any = torch.nn.Parameter(make("mxfp8"))
    with torch.inference_mode():
        for same in (
            weight.detach(),
            weight.data,
            weight.clone(),
            weight.view(G, N, K),
            weight.expand_as(weight),
        ):
            assert isinstance(same, nc.GroupedTensor)
            assert_same_buffers(same, weight)
        assert torch.equal(weight.view(-1), weight.dequantize().view(-1))
        with pytest.raises(RuntimeError, match="call dequantize"):
            weight.t()


@pytest.mark.parametrize("name", ["tensor", "mxfp8"])
def test_shared_memory(name: str) -> None:
    module: Any = torch.nn.Module()
    module.weight = torch.nn.Parameter(make(name))
    module.other = torch.nn.Parameter(QUANTIZERS[name].quantize(values()[0]))
    module.share_memory()
    for parameter in module.parameters():
        assert all(buffer.is_shared() for buffer in parameter.get_data_tensors() if buffer is not None)


@pytest.mark.gpu
@each_quantizer
def test_to_the_gpu_and_back(name: str) -> None:
    module: Any = torch.nn.Module()
    module.weight = torch.nn.Parameter(make(name))
    kept = make(name)
    module.cuda()
    assert isinstance(module.weight, nc.GroupedTensor) and module.weight.is_cuda
    assert all(buffer.is_cuda for buffer in module.weight.get_data_tensors() if buffer is not None)
    module.to("cpu")
    assert_same_buffers(module.weight, kept)
    module.to("cuda", torch.float16)
    assert module.weight.dtype == module.weight.fake_dtype == torch.float16 and module.weight.is_cuda
    module.weight.data = values(1).cuda()
    expected = quantize_members([values(1).cuda()], QUANTIZERS[name])
    assert_same_buffers(module.weight, expected)
