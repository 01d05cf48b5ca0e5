"""FusedAdam against torch.optim on fp32 master weights."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recipes import RECIPES
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import narrowcast as nc
from narrowcast.optimizers import fused_adam
from narrowcast.testing import assert_close

FusedAdam = nc.optimizers.FusedAdam
SHAPES = ((32, 48), (48,), (3, 5, 2))
QUANTIZED = ("current", "mxfp8", "block", "nvfp4")


def parameters(dtype: torch.dtype, device: Any) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]


def give_gradients(params: list[Any], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)


def masters_of(params: list[Any]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().float().clone()) for p in params]


def lend_gradients(masters: list[nn.Parameter], params: list[Any]) -> None:
    for master, p in zip(masters, params):
        master.grad = p.grad.float()


@pytest.mark.parametrize("adam_w", [True, False], ids=["adamw", "adam"])
def test_on_fp32_it_is_torchs(adam_w: bool, device: torch.device) -> None:
    ours, theirs = parameters(torch.float32, device), parameters(torch.float32, device)
    options = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = FusedAdam(ours, adam_w_mode=adam_w, **options)
    reference = (torch.optim.AdamW if adam_w else torch.optim.Adam)(theirs, fused=True, **options)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        reference.step()
    assert all(p._version >= 4 for p in ours)  # a saved weight is found out of date
    for a, b in zip(ours, theirs):
        assert_close(a.detach(), b.detach(), "fp32_sum_order")
        assert_close(optimizer.state[a]["exp_avg_sq"], reference.state[b]["exp_avg_sq"], "fp32_sum_order")
    assert all("master_param" not in optimizer.state[p] for p in ours)


@pytest.mark.parametrize("how", ["copy", "remainders"])
def test_bf16_parameters_have_fp32_masters(how: str, device: torch.device) -> None:
    params = parameters(torch.bfloat16, device)
    masters = masters_of(params)
    optimizer = FusedAdam(params, lr=1e-4, master_weights=True, store_param_remainders=how == "remainders")
    reference = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.0, fused=True)
    before = [p.detach().clone() for p in params]
    for step in range(4):
        give_gradients(params, step % 2)
        lend_gradients(masters, params)
        optimizer.step()
        reference.step()
    for p, master, first in zip(params, masters, before):
        assert_close(optimizer.get_unscaled_state(p, "master_param"), master.detach(), "fp32_sum_order")
        assert_close(p.detach().float(), master.detach(), "bf16_output")
        expected = torch.int16 if how == "remainders" else torch.float32
        assert optimizer.state[p]["master_param"].dtype == expected
        assert not torch.equal(p, first)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_parameters_step_through_unrounded_masters(name: str, device: torch.device) -> None:
    value = torch.randn(64, 64)
    with nc.quantized_model_init(recipe=RECIPES[name], preserve_high_precision_init_val=True):
        layer = nc.Linear(64, 64, bias=False, device=device, init_method=lambda w: w.copy_(value))
    weight: Any = layer.weight
    assert isinstance(weight, nc.QuantizedTensor)
    optimizer = FusedAdam([weight], lr=1e-3, master_weights=True)
    master = nn.Parameter(value.to(device).clone())
    reference = torch.optim.AdamW([master], lr=1e-3, weight_decay=0.0, fused=True)
    pointers = [b.data_ptr() for b in weight.get_data_tensors() if b is not None]
    for step in range(3):
        give_gradients([weight], step)
        lend_gradients([master], [weight])
        optimizer.step()
        reference.step()
    stepped = optimizer.state[weight]["master_param"]  # the rounding is not in it
    assert_close(stepped, master.detach(), "fp32_sum_order")
    expected = weight._quantizer.quantize(stepped).dequantize()
    assert torch.equal(weight.detach().dequantize(), expected)
    assert pointers == [b.data_ptr() for b in weight.get_data_tensors() if b is not None]


def test_a_step_writes_no_quantized_parameter_itself() -> None:
    assert fused_adam._is_direct(torch.ones(2, dtype=torch.bfloat16))
    quantized = nc.MXFP8Quantizer(nc.DType.kFloat8E4M3).quantize(torch.ones(32, 32, dtype=torch.bfloat16))
    assert quantized.dtype == torch.bfloat16 and not fused_adam._is_direct(quantized)
    assert not fused_adam._is_direct(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("moment", [torch.float16, torch.uint8])
def test_a_quantized_parameter_whose_moments_have_scales_is_written(moment: torch.dtype) -> None:
    """It is quantized from its stepped master."""
    with nc.quantized_model_init(recipe=RECIPES["current"]):
        weight: Any = nc.Linear(32, 48, bias=False, device="cpu").weight
    before = weight.detach().dequantize()
    optimizer = FusedAdam([weight], lr=0.1, master_weights=True, exp_avg_dtype=moment)
    give_gradients([weight], 0)
    optimizer.step()
    values = weight.detach().dequantize()
    assert not torch.equal(values, before)
    assert torch.equal(
        values, weight._quantizer.quantize(optimizer.state[weight]["master_param"]).dequantize()
    )


def test_a_loaded_parameter_does_not_fall_back_to_its_first_value() -> None:
    with nc.quantized_model_init(recipe=RECIPES["current"], preserve_high_precision_init_val=True):
        layer, other = (nc.Linear(32, 32, bias=False, device="cpu") for _ in range(2))
    layer.load_state_dict(other.state_dict())
    weight: Any = layer.weight
    optimizer = FusedAdam([weight], lr=0.0, master_weights=True)
    give_gradients([weight], 0)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["master_param"], other.weight.detach().dequantize().float())


@pytest.mark.parametrize("way", ["state dicts", "checkpoint"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["delayed", *QUANTIZED])
def test_steps_go_on_to_the_bit_after_loading(
    name: str, dtype: torch.dtype, way: str, tmp_path: Path
) -> None:
    """Though checkpoints hold decoded weights, rounded to their dtype, from which other scales would follow."""

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        with nc.quantized_model_init(recipe=RECIPES[name]):
            model: Any = nn.Sequential(
                nc.Linear(64, 64, device="cpu", dtype=dtype),
                nc.LayerNormMLP(64, 96, device="cpu", dtype=dtype),
            )
        model = nc.set_recipe(model, RECIPES[name])
        return model, FusedAdam(model.parameters(), lr=1e-2, master_weights=True)

    def step(model: nn.Module, optimizer: Any, at: int) -> torch.Tensor:
        optimizer.zero_grad()
        torch.manual_seed(at)  # of stochastic rounding, too
        x = torch.randn(32, 64).to(dtype)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model, optimizer = made()
    for at in range(3):
        step(model, optimizer, at)
    nc.distributed.save_checkpoint(tmp_path / "saved", model, optimizer)
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = [step(model, optimizer, at) for at in (3, 4)]
    model, optimizer = made()
    if way == "checkpoint":
        nc.distributed.load_checkpoint(tmp_path / "saved", model, optimizer)
    else:
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    assert [step(model, optimizer, at) for at in (3, 4)] == expected


def test_a_grouped_weight() -> None:
    with nc.quantized_model_init(recipe=RECIPES["current"], preserve_high_precision_init_val=True):
        layer = nc.GroupedLinear(2, 32, 32, bias=False, device="cpu", single_grouped_weight=True)
    weight: Any = layer.weight
    value = weight.get_high_precision_init_val()
    optimizer = FusedAdam([weight], lr=1e-3, master_weights=True)
    weight.grad = torch.ones(weight.shape)
    optimizer.step()
    assert_close(optimizer.state[weight]["master_param"], value.view(weight.shape) - 1e-3, "fp32_sum_order")


LOW_BIT = {
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp16": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "fp8": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    "codes": {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.int8},
    "mixed": {"exp_avg_dtype": torch.uint8, "master_weights": True, "master_weight_dtype": torch.float16},
}


@pytest.mark.parametrize("name", LOW_BIT)
def test_state_in_few_bits_trains(name: str) -> None:
    """The same problem, nearly the same loss."""

    def losses(make: Any, dtype: torch.dtype) -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
        optimizer, x = make(model.parameters()), torch.randn(128, 16)
        y = torch.randn(128, 4)
        seen = []
        for _ in range(60):
            loss = (model(x.to(dtype)).float() - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    dtype = torch.bfloat16 if name == "mixed" else torch.float32
    ours = losses(lambda p: FusedAdam(p, lr=1e-2, **LOW_BIT[name]), dtype)
    theirs = losses(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0), torch.float32)
    assert abs(ours[-1] - theirs[-1]) < 0.08 * theirs[0]
    assert ours[-1] < 0.7 * ours[0]


@pytest.mark.parametrize("name", [*LOW_BIT, "remainders"])
def test_state_dicts_are_fp32_and_restore_the_dtypes(name: str) -> None:
    options = {**LOW_BIT, "remainders": {"master_weights": True, "store_param_remainders": True}}[name]
    params = parameters(torch.bfloat16, "cpu")
    optimizer = FusedAdam(params, lr=1e-2, **options)
    for step in range(2):
        give_gradients(params, step)
        optimizer.step()
    saved = optimizer.state_dict()
    assert all(t.dtype == torch.float32 for state in saved["state"].values() for t in state.values())
    again = [nn.Parameter(p.detach().clone()) for p in params]
    restored = FusedAdam(again, lr=1.0, **options)
    restored.load_state_dict(copy.deepcopy(saved))
    assert {float(restored.state[q]["step"]) for q in again} == {2.0} and restored.param_groups[0][
        "lr"
    ] == 1e-2
    for p, q in zip(params, again):
        for key, tensor in optimizer.state[p].items():
            assert restored.state[q][key].dtype == tensor.dtype
    for both in ((params, optimizer), (again, restored)):
        give_gradients(both[0], 7)
        both[1].step()
    for p, q in zip(params, again):
        assert_close(q.detach(), p.detach(), "bf16_output")
    elsewhere = FusedAdam(parameters(torch.bfloat16, "cpu"), master_weights=True)
    elsewhere.load_state_dict(saved)  # stored in another way
    assert {t.dtype for s in elsewhere.state.values() for t in s.values()} == {torch.float32}


def state_in_codes(optimizer: Any, params: list[Any]) -> list[torch.Tensor]:
    return [x for p in params for x in (*optimizer.state[p].values(), optimizer._ranges[p])]


@pytest.mark.parametrize("way", ["bf16", "remainders", "quantized"])
def test_moments_in_codes_go_on_to_the_bit_after_loading(way: str) -> None:
    """Though a state dict holds decoded values."""
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, **LOW_BIT["codes"]}
    options |= (
        {} if way == "bf16" else {"master_weights": True, "store_param_remainders": way == "remainders"}
    )
    if way == "quantized":
        with nc.quantized_model_init(recipe=RECIPES["current"]):
            params: list[Any] = [nc.Linear(48, 80, bias=False, device="cpu").weight]
    else:
        params = parameters(torch.bfloat16, "cpu")
    optimizer = FusedAdam(params, **options)
    for index in range(5):
        give_gradients(params, index)
        optimizer.step()
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    restored = FusedAdam(twins, **options)
    saved = copy.deepcopy(optimizer.state_dict())
    restored.load_state_dict(saved)
    for index in range(5, 8):
        ours, theirs = state_in_codes(optimizer, params), state_in_codes(restored, twins)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        for both in ((params, optimizer), (twins, restored)):
            give_gradients(both[0], index)
            both[1].step()
    for p, q in zip(params, twins):
        assert torch.equal(p.detach().float(), q.detach().float())
    first = optimizer.state_dict()["state"][0]["exp_avg"]
    assert first.dtype == torch.float32 and not torch.equal(first, saved["state"][0]["exp_avg"])


def test_moments_in_codes_are_little_more_than_a_byte_each() -> None:
    p = nn.Parameter(torch.randn(300, 1000).bfloat16())
    options = {"master_weights": True, "store_param_remainders": True, **LOW_BIT["codes"]}
    optimizer = FusedAdam([p], **options)
    give_gradients([p], 0)
    optimizer.step()
    kept = state_in_codes(optimizer, [p])
    assert sum(x.untyped_storage().nbytes() for x in kept) / p.numel() == pytest.approx(
        2 + 2 + 16 / 128, rel=1e-3
    )


def test_moments_in_codes_follow_those_in_fp32() -> None:
    """Weights after 100 steps, of gradients whose sizes differ by a factor of eight: within 4% of the way."""
    generator = torch.Generator().manual_seed(2)
    sizes = torch.randint(-3, 1, (40, 129), generator=generator).float().exp2()
    start = torch.randn(sizes.shape, generator=generator)
    moved = {}
    for name, options in {"fp32": {}, **{key: LOW_BIT[key] for key in ("codes", "fp8")}}.items():
        p = nn.Parameter(start.clone())
        optimizer = FusedAdam([p], lr=1e-3, betas=(0.9, 0.95), **options)
        for index in range(100):
            noise = torch.randn(sizes.shape, generator=torch.Generator().manual_seed(index))
            p.grad = sizes * (0.5 + noise)
            optimizer.step()
        moved[name] = p.detach() - start
    off = {key: ((moved[key] - moved["fp32"]).norm() / moved["fp32"].norm()).item() for key in moved}
    assert off["codes"] < 0.04 and off["codes"] < 0.6 * off["fp8"], off


def test_moments_in_codes_are_of_torchs_adamw_and_load_there() -> None:
    params = parameters(torch.float32, "cpu")
    theirs = torch.optim.AdamW(params, lr=1e-2)
    for index in range(3):
        give_gradients(params, index)
        theirs.step()
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    ours = FusedAdam(twins, lr=1.0, weight_decay=0.01, **LOW_BIT["codes"])
    ours.load_state_dict(theirs.state_dict())
    for p, q in zip(params, twins):
        for name in ("exp_avg", "exp_avg_sq"):
            assert_close(ours.get_unscaled_state(q, name), theirs.state[p][name], "fp8_layer")
    back = torch.optim.AdamW(twins)
    back.load_state_dict(ours.state_dict())
    assert torch.equal(back.state[twins[0]]["exp_avg"], ours.get_unscaled_state(twins[0], "exp_avg"))
    for optimizer, those in ((theirs, params), (back, twins)):
        give_gradients(those, 3)
        optimizer.step()
    for p, q in zip(params, twins):
        assert_close(q.detach(), p.detach(), "fp8_layer")


@pytest.mark.parametrize(
    "name, adam_w", [("fp32", False), ("fp8", True), ("codes", True), ("remainders", True)]
)
def test_capturable_compiles(name: str, adam_w: bool) -> None:
    options = {**LOW_BIT, "fp32": {}, "remainders": {"store_param_remainders": True}}[name]
    options = {"master_weights": True, "capturable": True, "weight_decay": 0.1, **options}
    params, twins = (parameters(torch.bfloat16, "cpu") for _ in range(2))
    ours, eager = (FusedAdam(p, lr=1e-2, adam_w_mode=adam_w, **options) for p in (params, twins))
    torch._dynamo.utils.counters.clear()
    step = torch.compile(ours.step, fullgraph=True, backend="aot_eager")
    give_gradients(params, 9)
    give_gradients(twins, 9)
    ours.step()
    eager.step()
    for index in range(3):
        give_gradients(params, index)
        give_gradients(twins, index)
        for optimizer in (ours, eager):
            optimizer.param_groups[0]["lr"].fill_(1e-2 / (index + 1))
        step()
        eager.step()
    for p, q in zip(params, twins):
        masters = [o.get_unscaled_state(x, "master_param") for o, x in ((ours, p), (eager, q))]
        assert_close(*masters, "fp32_sum_order" if name in ("fp32", "remainders") else "bf16_output")
    assert {float(ours.state[p]["step"]) for p in params} == {4.0}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_step_of_quantized_parameters_compiles() -> None:
    with nc.quantized_model_init(recipe=RECIPES["mxfp8"]):
        weights: list[Any] = [nc.Linear(32, 32, bias=False, device="cpu").weight for _ in range(2)]
    optimizer = FusedAdam(weights, lr=0.1, master_weights=True, capturable=True)
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for index in range(3):
        give_gradients(weights, index)
        (step if index else optimizer.step)()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for weight in weights:
        expected = weight._quantizer.quantize(optimizer.state[weight]["master_param"])
        assert torch.equal(weight.detach().dequantize(), expected.dequantize())


@pytest.mark.parametrize("way", ["eager", "capturable", "compiled"])
def test_a_parameter_counts_the_steps_that_it_takes(way: str) -> None:
    """As in PyTorch: one whose first gradient comes late, or that misses some, is corrected by its own count."""
    ours, theirs = parameters(torch.float32, "cpu"), parameters(torch.float32, "cpu")
    optimizer = FusedAdam(ours, lr=0.05, weight_decay=0.1, capturable=way != "eager")
    reference = torch.optim.AdamW(theirs, lr=0.05, weight_decay=0.1)
    step = torch.compile(optimizer.step, fullgraph=True, backend="aot_eager") if way == "compiled" else None
    present = [(0,), (0,), (0, 1), (0, 1, 2), (1,), (0, 1, 2), (2,), (0, 1, 2), (0, 1, 2), (0, 1, 2)]
    for index, those in enumerate(present):
        for params in (ours, theirs):
            give_gradients(params, index)
            for i, p in enumerate(params):
                p.grad = p.grad if i in those else None
        # the state of a parameter is made by a step outside of the graph
        (optimizer.step if step is None or index < 4 else step)()
        reference.step()
        for p, q in zip(ours, theirs):
            assert_close(p.detach(), q.detach(), "fp32_sum_order")
    for p, q in zip(ours, theirs):
        assert optimizer.state[p]["step"] == reference.state[q]["step"]


def test_parameters_in_step_share_their_count_and_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowcast.optimizers import fused_adam as room

    calls = []
    monkeypatch.setattr(room, "adam_", lambda weights, *_, **options: calls.append(len(weights)))
    params = parameters(torch.float32, "cpu")
    optimizer = FusedAdam(params)
    for _ in range(2):
        give_gradients(params, 0)
        optimizer.step()
    assert calls == [3, 3] and len({id(optimizer.state[p]["step"]) for p in params}) == 1


@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("capturable", [False, True])
def test_state_dicts_of_torch_load_and_load_there(kind: str, capturable: bool) -> None:
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9)}

    def make_torch(params: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, kind)(params, **options)  # type: ignore[no-any-return]

    def make_ours(params: Any) -> torch.optim.Optimizer:
        return FusedAdam(params, adam_w_mode=kind == "AdamW", capturable=capturable, **options)

    for make, other in ((make_torch, make_ours), (make_ours, make_torch)):
        params = parameters(torch.float32, "cpu")
        first = make(params)
        for index in range(3):
            give_gradients(params, index)
            params[1].grad = params[1].grad if index else None
            first.step()
        twins = [nn.Parameter(p.detach().clone()) for p in params]
        second = other(twins)
        saved = first.state_dict()
        for group in saved["param_groups"] if other is make_torch else ():
            group["capturable"] = False  # PyTorch's own refuses it on a CPU
        second.load_state_dict(saved)
        for both in ((params, first), (twins, second)):
            give_gradients(both[0], 7)
            both[1].step()
        for p, q in zip(params, twins):
            assert_close(p.detach(), q.detach(), "fp32_sum_order")


def test_state_dicts_whose_groups_count_load() -> None:
    """As Transformer Engine saves them."""
    params = parameters(torch.float32, "cpu")
    optimizer = FusedAdam(params)
    give_gradients(params, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        del state["step"]
    saved["param_groups"][0]["step"] = 5
    optimizer.load_state_dict(saved)
    assert {float(optimizer.state[p]["step"]) for p in params} == {5.0}
    assert "step" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "is momentum_buffer; FusedAdam loads exp_avg"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True, which FusedAdam has not"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "maximize=True, which FusedAdam has not"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "make it with adam_w_mode=False"),
    ],
)
def test_state_dicts_of_others_are_refused(make: Any, message: str) -> None:
    params = parameters(torch.float32, "cpu")
    other = make(params)
    give_gradients(params, 0)
    other.step()
    optimizer = FusedAdam(parameters(torch.float32, "cpu"), lr=0.25)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(other.state_dict())
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("make", [FusedAdam, lambda p: nc.optimizers.FusedSGD(p, lr=0.1, momentum=0.9)])
def test_state_of_other_shapes_and_what_is_no_state_is_refused(make: Any) -> None:
    params, others = (
        [torch.nn.Parameter(torch.ones(size, 2)) for size in sizes] for sizes in ((4, 3), (5, 3))
    )
    give_gradients(params, 0)
    optimizer = make(params)
    optimizer.step()
    saved = optimizer.state_dict()
    told = (
        r"of parameter 0 is \(4, 2\), the parameter \(5, 2\).*; load the state of an optimizer of this model"
    )
    with pytest.raises(ValueError, match=f"^state_dict is of other shapes: .*{told}"):
        make(others).load_state_dict(saved)
    with pytest.raises(
        ValueError, match=r"^state_dict is of groups of \[2\] parameters, and the optimizer has \[1"
    ):
        make(others[:1]).load_state_dict(saved)
    first = next(iter(saved["state"].values()))
    for wrong, error, told in (
        ({}, ValueError, "^state_dict lacks 'state' and has nothing; pass what"),
        (
            {"model": 1, "state": {}},
            ValueError,
            "^state_dict lacks 'param_groups' and has 'model' and 1 more; pass",
        ),
        (None, TypeError, "^state_dict is None, of type NoneType; pass what"),
        (
            {"state": {}, "param_groups": 3},
            TypeError,
            "^'param_groups' of state_dict is 3, of type int; pass",
        ),
        ({"state": {}, "param_groups": [{"lr": 1}]}, ValueError, "^a group of state_dict has no 'params'"),
        (
            {**saved, "state": {0: {**first, [*first][-1 if "step" not in [*first][-1:] else 0]: "x"}}},
            TypeError,
            "of parameter 0 is 'x', of type str; load tensors",
        ),
    ):
        with pytest.raises(error, match=told):
            make(params).load_state_dict(wrong)
    with pytest.raises(
        TypeError, match="^closure is 3, of type int; pass what can be called, such as a function"
    ):
        make(params).step(3)
    for model in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))):
        told = f"^params is a {type(model).__name__}; pass its parameters: model.parameters"
        with pytest.raises(TypeError, match=told):
            FusedAdam(model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^params is empty; pass model.parameters"):
        make(iter(()))
    again = make(params)
    again.load_state_dict(saved)
    assert len(again.state) == 2


def test_moments_without_a_step_are_refused() -> None:
    params = parameters(torch.float32, "cpu")
    optimizer = FusedAdam(params, lr=0.25)
    give_gradients(params, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state.pop("step")
    with pytest.raises(
        ValueError, match="is exp_avg, exp_avg_sq; FusedAdam loads exp_avg, exp_avg_sq and step"
    ):
        FusedAdam(parameters(torch.float32, "cpu")).load_state_dict(saved)


def test_an_empty_group() -> None:
    params = parameters(torch.float32, "cpu")
    for capturable in (False, True):
        optimizer = FusedAdam([{"params": []}, {"params": params}], capturable=capturable)
        give_gradients(params, 0)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        assert {float(optimizer.state[p]["step"]) for p in params} == {1.0}


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.filterwarnings("error")
def test_gradients_in_fp16_that_a_scaler_scaled(capturable: bool) -> None:
    params, twins = parameters(torch.float16, "cpu"), parameters(torch.float32, "cpu")
    optimizer = FusedAdam(params, lr=0.05, master_weights=True, capturable=capturable)
    for twin, p in zip(twins, params):
        twin.data.copy_(p.data)
    reference = torch.optim.AdamW(twins, lr=0.05, weight_decay=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for index in range(4):
        give_gradients(params, index)
        for p, q in zip(params, twins):
            q.grad = p.grad.float()
            p.grad *= 4
        if index == 1:
            params[0].grad[0, 0] = float("inf")
        else:
            reference.step()
        scaler.step(optimizer)
        scaler.update(4.0)
    for p, q in zip(params, twins):
        assert_close(optimizer.get_unscaled_state(p, "master_param"), q.detach(), "fp32_sum_order")


@pytest.mark.parametrize("how", ["copy", "remainders"])
def test_a_master_weight_that_is_stored_comes_back(how: str) -> None:
    (param,) = (nn.Parameter(torch.zeros(5, 7, dtype=torch.bfloat16)),)
    optimizer = FusedAdam([param], master_weights=True, store_param_remainders=how == "remainders")
    give_gradients([param], 0)
    optimizer.step()
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    optimizer.set_scaled_state(param, "master_param", values)
    assert torch.equal(optimizer.get_unscaled_state(param, "master_param"), values)
    if how == "remainders":  # whose other bits are the parameter
        assert torch.equal(param.detach(), values.bfloat16())


def test_loading_writes_the_rate_in_place() -> None:
    saved = FusedAdam(parameters(torch.float32, "cpu"), lr=0.25, capturable=True).state_dict()
    optimizer = FusedAdam(parameters(torch.float32, "cpu"), lr=0.5, capturable=True)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == 0.25


def test_schedulers_write_the_rate_in_place() -> None:
    params = parameters(torch.float32, "cpu")
    optimizer = FusedAdam(params, lr=0.5, capturable=True)
    rate = optimizer.param_groups[0]["lr"]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    give_gradients(params, 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is rate and rate.item() == pytest.approx(0.05)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("how", ["by the scaler", "by the optimizer", "unscaled"])
def test_gradient_scaler(how: str, capturable: bool) -> None:
    params, twins = parameters(torch.float32, "cpu"), parameters(torch.float32, "cpu")
    optimizer = FusedAdam(params, lr=0.1, capturable=capturable)
    reference = torch.optim.AdamW(twins, lr=0.1, weight_decay=0.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for index in range(3):
        give_gradients(twins, index)
        for p, q in zip(params, twins):
            p.grad = 8 * q.grad
        if index == 1:
            params[0].grad[0, 0] = float("inf")
        else:
            reference.step()
        if how == "unscaled":
            scaler.unscale_(optimizer)
        if how == "by the scaler":
            scaler.step(optimizer)
        else:
            optimizer.step(grad_scaler=scaler)
        scaler._per_optimizer_states.clear()
    for p, q in zip(params, twins):
        assert_close(p.detach(), q.detach(), "fp32_sum_order")
    assert {float(optimizer.state[p]["step"]) for p in params} == {2.0}


def test_decoupled_gradients_closures_and_idle_groups() -> None:
    params = parameters(torch.float32, "cpu")
    optimizer = FusedAdam(
        [{"params": params[:1]}, {"params": params[1:], "lr": 0.0}], lr=0.1, use_decoupled_grad=True
    )
    before = params[0].detach().clone()
    give_gradients(params, 0)
    assert optimizer.step(lambda: 5) == 5
    assert torch.equal(params[0], before), "grad is not read"
    params[0].decoupled_grad = torch.ones(SHAPES[0], dtype=torch.bfloat16)
    optimizer.step()
    assert not torch.equal(params[0], before)
    assert float(optimizer.state[params[0]]["step"]) == 1 and not optimizer.state[params[1]]
    optimizer.zero_grad()
    assert params[0].decoupled_grad is None and params[0].grad is None
    given = FusedAdam(params, set_grad_none=False)
    give_gradients(params, 0)
    given.zero_grad()
    assert params[0].grad is not None and not params[0].grad.any()


def test_without_bias_correction() -> None:
    p = nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([p], lr=1.0, betas=(0.5, 0.5), eps=0.0, bias_correction=False)
    p.grad = torch.full((4,), 2.0)
    optimizer.step()  # m = 1, v = 2
    assert_close(p.detach(), torch.full((4,), 1 - 2**-0.5), "fp32_sum_order")


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"amsgrad": True}, RuntimeError, "amsgrad"),
        ({"exp_avg_dtype": torch.float8_e4m3fn}, ValueError, "exp_avg_dtype is torch.float8_e4m3fn"),
        ({"master_weight_dtype": torch.bfloat16}, ValueError, "master_weight_dtype is torch.bfloat16"),
        ({"store_param_remainders": True}, RuntimeError, "needs master_weights=True"),
        ({"lr": -1.0}, ValueError, "lr is -1.0"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FusedAdam(parameters(torch.float32, "cpu"), **options)


def test_stochastic_rounding_without_bf16_parameters_is_told_once() -> None:
    params = parameters(torch.float32, "cpu")
    optimizer = FusedAdam(params, stochastic_rounding=True)
    give_gradients(params, 0)
    with pytest.warns(UserWarning, match="rounds bf16 parameters, and these are torch.float32: leave it out"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        mixed = [*params, *parameters(torch.bfloat16, "cpu")]
        give_gradients(mixed, 0)
        FusedAdam(mixed, stochastic_rounding=True).step()


def test_bad_parameters_and_gradients() -> None:
    (p, *_) = params = parameters(torch.float32, "cpu")
    give_gradients(params, 0)
    with pytest.raises(RuntimeError, match=r"needs parameters in torch.bfloat16, got torch.float32"):
        FusedAdam([p], master_weights=True, store_param_remainders=True).step()
    p.grad = p.grad.to_sparse()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        FusedAdam([p]).step()
    with nc.quantized_model_init(recipe=RECIPES["current"]):
        layer = nc.Linear(32, 32, device="cpu")
    give_gradients([layer.weight], 0)
    with pytest.raises(
        RuntimeError, match="Float8Tensor, which is too coarse for a step; use master_weights=True"
    ):
        FusedAdam([layer.weight]).step()


def test_sharded_parameters(tmp_path: Path) -> None:
    """FSDP2's: state is sharded alike, and travels by name."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layer: Any = nc.Linear(32, 32, device="cpu", recipe=RECIPES["current"])
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        optimizer = FusedAdam(layer.parameters(), lr=0.1, exp_avg_dtype=torch.uint8)
        layer(torch.randn(32, 32)).sum().backward()
        optimizer.step()
        saved = get_optimizer_state_dict(layer, optimizer)
        assert set(saved["state"]) == {"weight", "bias"}
        set_optimizer_state_dict(layer, optimizer, saved)
        state = optimizer.state[layer.weight]
        assert {name: (type(t), t.dtype) for name, t in state.items()} == {
            "exp_avg": (DTensor, torch.uint8),
            "exp_avg_sq": (DTensor, torch.float32),
            "step": (torch.Tensor, torch.float32),
        }
        coded = FusedAdam(layer.parameters(), lr=0.1, **LOW_BIT["codes"])
        set_optimizer_state_dict(layer, coded, saved)
        value = coded.get_unscaled_state(layer.weight, "exp_avg")
        assert isinstance(value, DTensor) and coded.state[layer.weight]["exp_avg"].dtype == torch.uint8
        assert_close(
            value.to_local(), optimizer.get_unscaled_state(layer.weight, "exp_avg").to_local(), "fp8_layer"
        )
    finally:
        dist.destroy_process_group()


def test_a_step_of_weights_that_gather_quantized_compiles(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        layers: list[Any] = [
            nc.Linear(32, 32, device="cpu", params_dtype=torch.bfloat16, recipe=RECIPES["current"])
        ]
        layers.append(copy.deepcopy(layers[0]))
        for layer in layers:
            nc.distributed.shard(layer, mesh=init_device_mesh("cpu", (1,)))
        ours, eager = (
            FusedAdam(layer.parameters(), lr=0.1, master_weights=True, capturable=True) for layer in layers
        )
        step = torch.compile(ours.step, fullgraph=True, backend="aot_eager")
        for index in range(3):
            x = torch.randn(32, 32, dtype=torch.bfloat16)
            for layer in layers:
                layer(x).float().square().sum().backward()
            (step if index else ours.step)()
            eager.step()
        assert torch.equal(layers[0].weight.full_tensor(), layers[1].weight.full_tensor())
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True])
def test_a_captured_step(quantized: bool) -> None:
    def make() -> list[Any]:
        torch.manual_seed(2)
        if not quantized:
            return parameters(torch.bfloat16, "cuda")
        with nc.quantized_model_init(recipe=RECIPES["current"]):
            return [nc.Linear(64, 64, bias=False, device="cuda").weight]

    params, twins = make(), make()
    ours, eager = (FusedAdam(p, lr=1e-2, master_weights=True, capturable=True) for p in (params, twins))
    give_gradients(params, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for _ in range(3):
        graph.replay()
    for _ in range(4):  # a captured step is not run
        give_gradients(twins, 0)
        eager.step()
    for p, q in zip(params, twins):
        assert torch.equal(ours.state[p]["master_param"], eager.state[q]["master_param"])
        assert torch.equal(p.detach().float(), q.detach().float())


@pytest.mark.gpu
@pytest.mark.inductor
def test_a_step_that_inductor_compiled_has_the_bits_of_an_eager_one() -> None:
    params, twins = (parameters(torch.bfloat16, "cuda") for _ in range(2))
    options = {"lr": 1e-2, "weight_decay": 0.1, "master_weights": True, "exp_avg_dtype": torch.bfloat16}
    ours, eager = (FusedAdam(p, capturable=True, **options) for p in (params, twins))
    step = torch.compile(ours.step, fullgraph=True)
    for index in range(4):
        give_gradients(params, index)
        give_gradients(twins, index)
        (step if index else ours.step)()
        eager.step()
    for p, q in zip(params, twins):
        assert torch.equal(p, q)
        assert all(torch.equal(ours.state[p][name], eager.state[q][name]) for name in ours.state[p])


def test_groups_of_a_loaded_state_count_their_own_steps() -> None:
    def make() -> tuple[list[nn.Parameter], FusedAdam]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3))]
        return parameters, FusedAdam([{"params": [p]} for p in parameters], lr=1e-2)

    def step(parameters: list[nn.Parameter], optimizer: FusedAdam) -> None:
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()

    parameters, optimizer = make()
    step(parameters, optimizer)
    others, restored = make()
    for other, p in zip(others, parameters):
        other.data.copy_(p.detach())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        step(parameters, optimizer)
        step(others, restored)
    assert [restored.state[p]["step"].item() for p in others] == [3.0, 3.0]
    assert all(torch.equal(p, other) for p, other in zip(parameters, others))
