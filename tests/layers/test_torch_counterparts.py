"""A layer is its ``torch.nn`` counterpart: what PyTorch and its users do to nn.Linear and the norms works on ours."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.parametrizations
import torch.nn.utils.parametrize
from torch import Tensor, nn
from torch.nn.utils import prune

import narrowcast as nc
from narrowcast.nn.qk_norm import HeadL2Norm
from narrowcast.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling

CURRENT = Float8CurrentScaling()
RECIPES = {"none": None, "current": CURRENT, "delayed": DelayedScaling(amax_history_len=2)}
LAYERS: dict[str, Any] = {
    "linear": lambda **options: nc.Linear(16, 32, **options),
    "layernorm_linear": lambda **options: nc.LayerNormLinear(16, 32, **options),
    "layernorm_mlp": lambda **options: nc.LayerNormMLP(16, 32, activation="swiglu", **options),
    "grouped_linear": lambda **options: nc.GroupedLinear(2, 16, 32, **options),
    "layernorm": lambda **options: nc.LayerNorm(16, **options),
    "rmsnorm": lambda **options: nc.RMSNorm(16, **options),
}
NORMS = ("layernorm", "rmsnorm")
needs_distributed = pytest.mark.skipif(not dist.is_available(), reason="needs torch.distributed")


def run(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, [x.shape[0], 0]) if isinstance(layer, nc.GroupedLinear) else layer(x)


def layer_and_twin(recipe: Any = None, bias: bool = True) -> tuple[nc.Linear, nn.Linear]:
    ours, theirs = nc.Linear(16, 32, bias=bias, device="cpu", recipe=recipe), nn.Linear(16, 32, bias=bias)
    theirs.load_state_dict(dict(ours.named_parameters()))
    return ours, theirs


# -- what it is --------------------------------------------------------------------------------------------------------


def test_classes() -> None:
    assert isinstance(nc.Linear(4, 4, device="cpu"), nn.Linear)
    assert isinstance(nc.LayerNorm(4, device="cpu"), nn.LayerNorm)
    assert isinstance(nc.RMSNorm(4, device="cpu"), nn.RMSNorm)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_leaf_in_one_line(name: str, recipe: Any) -> None:
    layer = LAYERS[name](device="cpu")
    if recipe is not None and name not in NORMS:
        nc.set_recipe(layer, recipe)
        run(layer, torch.randn(4, 16)).sum().backward()
    assert not list(layer.children())
    assert "\n" not in repr(layer)
    assert repr(layer).startswith(f"{type(layer).__name__}(")


@pytest.mark.parametrize("name", LAYERS)
def test_dtype_by_either_name(name: str) -> None:
    for options in ({"dtype": torch.bfloat16}, {"params_dtype": torch.bfloat16}):
        layer = LAYERS[name](device="cpu", **options)
        assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"params_dtype is torch\.bfloat16 and dtype is torch\.float32"):
        LAYERS[name](device="cpu", dtype=torch.float32, params_dtype=torch.bfloat16)


# -- what PyTorch's utilities do to it ---------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def orthogonal(layer: nn.Module) -> nn.Module:
    return nn.utils.parametrizations.orthogonal(layer, "weight", orthogonal_map="householder")


CHANGES: dict[str, Any] = {
    "parametrize": lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Doubled()),
    "parametrized_bias": lambda layer: nn.utils.parametrize.register_parametrization(
        layer, "bias", Doubled()
    ),
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": orthogonal,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
    "random_prune": lambda layer: prune.ln_structured(layer, "weight", amount=0.5, n=2, dim=0),
}


@pytest.mark.parametrize(
    "change, compiled",
    [
        *((change, False) for change in CHANGES),
        *((change, True) for change in ("parametrize", "weight_norm", "prune")),
    ],
)
def test_a_changed_weight(change: str, compiled: bool) -> None:
    """Equal to nn.Linear without a recipe, and to a layer that has the effective weight with one."""
    ours, theirs = layer_and_twin()
    x = torch.randn(8, 16, requires_grad=True)
    for layer in (ours, theirs):
        torch.manual_seed(1)
        CHANGES[change](layer)
    run_ours = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    results = []
    for call, layer in ((run_ours, ours), (theirs, theirs)):
        layer.eval()  # spectral_norm moves its vectors in training
        wanted = [x, *layer.parameters()]
        y = call(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), wanted)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)

    plain = nc.Linear(16, 32, device="cpu", recipe=CURRENT)
    plain.load_state_dict({"weight": ours.weight, "bias": ours.bias})
    ours.recipe = CURRENT
    assert torch.equal(run_ours(x), plain(x))
    (grad,) = torch.autograd.grad(run_ours(x).square().sum(), x)
    assert torch.equal(grad, torch.autograd.grad(plain(x).square().sum(), x)[0])


def test_parametrizations_come_off_again() -> None:
    ours, _ = layer_and_twin(CURRENT)
    x, before = torch.randn(8, 16), copy.deepcopy(ours)
    nn.utils.parametrize.register_parametrization(ours, "weight", Doubled())
    nn.utils.parametrize.remove_parametrizations(ours, "weight", leave_parametrized=False)
    prune.identity(ours, "weight")
    prune.remove(ours, "weight")
    assert torch.equal(ours(x), before(x))
    assert set(dict(ours.named_parameters())) == {"weight", "bias"}


@pytest.mark.parametrize("name", LAYERS)
def test_functional_call_and_flat_vectors(name: str) -> None:
    layer, x = LAYERS[name](device="cpu"), torch.randn(8, 16)
    if name not in NORMS:
        nc.set_recipe(layer, CURRENT)
    changed = copy.deepcopy(layer)
    vector = nn.utils.parameters_to_vector(layer.parameters()) * 1.5 + 0.01
    nn.utils.vector_to_parameters(vector, changed.parameters())
    called = torch.func.functional_call(
        layer,
        dict(changed.named_parameters()),
        (x, [8, 0]) if name == "grouped_linear" else (x,),
    )
    assert torch.equal(called, run(changed, x))
    assert not torch.equal(called, run(layer, x))


def test_gradients_through_functional_call() -> None:
    ours, _ = layer_and_twin(CURRENT)
    x, weight = torch.randn(8, 16), torch.randn(32, 16, requires_grad=True)
    out = torch.func.functional_call(ours, {"weight": weight}, (x,))
    (grad,) = torch.autograd.grad(out.square().sum(), weight)
    ours.weight = nn.Parameter(weight.detach())
    (expected,) = torch.autograd.grad(ours(x).square().sum(), ours.weight)
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_copies(name: str, recipe: Any, how: str, tmp_path: Path) -> None:
    layer, x = LAYERS[name](device="cpu"), torch.randn(8, 16)
    if recipe is not None and name not in NORMS:
        nc.set_recipe(layer, recipe)
    run(layer, x).sum().backward()
    if how == "deepcopy":
        copied = copy.deepcopy(layer)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(layer))
    else:
        torch.save(layer, tmp_path / "layer.pt")
        copied = torch.load(tmp_path / "layer.pt", weights_only=False)
    assert torch.equal(run(copied, x), run(layer, x))
    assert list(copied.state_dict()) == list(layer.state_dict())
    originals = {tensor.data_ptr() for tensor in (*layer.parameters(), *layer.buffers())}
    assert all(tensor.data_ptr() not in originals for tensor in (*copied.parameters(), *copied.buffers()))


@pytest.mark.parametrize("bias", [True, False])
def test_state_dicts_of_nn_linear(bias: bool) -> None:
    ours, theirs = nc.Linear(16, 32, bias=bias, device="cpu", recipe=CURRENT), nn.Linear(16, 32, bias=bias)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight)
    theirs = nn.Linear(16, 32, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("ours, theirs", [(nc.LayerNorm, nn.LayerNorm), (nc.RMSNorm, nn.RMSNorm)])
def test_state_dicts_of_norms(ours: Any, theirs: Any) -> None:
    a, b = ours(16, device="cpu"), theirs(16)
    b.load_state_dict(a.state_dict())
    a.load_state_dict(b.state_dict())
    x = torch.randn(4, 16)
    torch.testing.assert_close(a(x), theirs(16, eps=a.eps)(x))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_resized_as_a_vocabulary_is(recipe: Any) -> None:
    """What ``resize_token_embeddings`` of Hugging Face does to an output layer."""
    layer, x = nc.Linear(16, 32, bias=False, device="cpu", recipe=recipe), torch.randn(8, 16)
    before = layer(x)
    with torch.no_grad():
        layer(x, is_first_microbatch=True)  # the kept weight must go
        grown = torch.randn(40, 16)
        grown[:32] = layer.weight
    layer.weight = nn.Parameter(grown)
    layer.out_features = 40
    y = layer(x, is_first_microbatch=False)
    assert y.shape == (8, 40)
    if recipe is None:
        assert torch.equal(y[:, :32], before)
    y.sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.shape == (40, 16)
    layer.weight.data = grown[:20].clone()  # the other way it is done
    layer.out_features = 20
    assert layer(x).shape == (8, 20)


def test_tied_weights() -> None:
    embedding, head = nn.Embedding(32, 16), nc.Linear(16, 32, bias=False, device="cpu", recipe=CURRENT)
    head.weight = embedding.weight
    head(embedding(torch.arange(8))).square().sum().backward()
    assert embedding.weight.grad is head.weight.grad and embedding.weight.grad is not None


@pytest.mark.parametrize("name", NORMS)
def test_norms_take_the_dtypes_that_torch_takes(name: str) -> None:
    """That of the parameters, and every one where those are fp32; under torch.autocast all."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    for own in kinds:
        norm = LAYERS[name](device="cpu", dtype=own)
        for kind in kinds:
            x = torch.randn(4, 16).to(kind)
            if own in (kind, torch.float32):
                assert norm(x).dtype == kind
            else:
                with pytest.raises(TypeError, match=f"input is {kind}, the parameters are {own}"):
                    norm(x)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    assert norm(x).isfinite().all()


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["none", "current"])
@pytest.mark.parametrize("name", LAYERS)
def test_an_input_without_dims(name: str, recipe: Any) -> None:
    layer = LAYERS[name](device="cpu", **({} if name in NORMS else {"recipe": recipe}))
    with pytest.raises(ValueError, match=r"input has shape \(\); its last dim must be"):
        layer(torch.tensor(1.0), [1, 0]) if name == "grouped_linear" else layer(torch.tensor(1.0))


WEIGHTS = {"grouped_linear": ("weight0", "weight1"), "layernorm_mlp": ("fc1_weight", "fc2_weight")}


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["none", "current"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in NORMS])
def test_no_matrix_in_place_of_the_weight(name: str, recipe: Any) -> None:
    for weight in WEIGHTS.get(name, ("weight",)):
        for value in (None, nn.Parameter(torch.ones(32))):
            layer = LAYERS[name](device="cpu", recipe=recipe)
            setattr(layer, weight, value)
            with pytest.raises(ValueError, match=r"weight.* (is None|of shape \(32,\)|has shape \(\d+,)"):
                run(layer, torch.randn(4, 16))


def test_one_of_several_parameters_is_missing() -> None:
    """The others alone would be a narrower layer, in silence."""
    split, grouped = nc.Linear(16, 32, parameters_split=("q", "k")), nc.GroupedLinear(2, 16, 32)
    for layer, name in ((split, "k_weight"), (split, "q_bias"), (grouped, "weight0"), (grouped, "bias1")):
        value = getattr(layer, name)
        setattr(layer, name, None)
        with pytest.raises(ValueError, match=f"^{name} of .*Linear is None; assign an nn.Parameter like"):
            run(layer, torch.randn(4, 16, device=value.device))
        setattr(layer, name, value)


@pytest.mark.parametrize("recipe", [None, CURRENT], ids=["none", "current"])
def test_errors_of_an_input_name_the_layer(recipe: Any) -> None:
    layer = LAYERS["linear"](device="cpu", recipe=recipe, name="layers.0.up")
    with pytest.raises(ValueError, match=r"in_features=16, the weight of 'layers.0.up' is \(32, 16\)$"):
        layer(torch.randn(4, 17))
    with pytest.raises(TypeError, match=r"torch.float32 in 'layers.0.up' of \(32, 16\); cast the input"):
        layer(torch.randn(4, 16).double())
    with pytest.raises(ValueError, match=r"the weight of LayerNormLinear is \(32, 16\)$"):
        LAYERS["layernorm_linear"](device="cpu", recipe=recipe)(torch.randn(4, 17))


@pytest.mark.parametrize("name", LAYERS)
def test_inputs_that_are_not_dense(name: str) -> None:
    layer = LAYERS[name](device="cpu", **({} if name in NORMS else {"recipe": CURRENT}))
    rows = [torch.randn(2, 16), torch.randn(3, 16)]
    for x in (torch.eye(4, 16).to_sparse(), torch.eye(4, 16).to_sparse_csr()):
        with pytest.raises(TypeError, match=r"^input is torch.sparse_\w+; give x.to_dense\(\)$"):
            layer(x, [4, 0]) if name == "grouped_linear" else layer(x)
    for layout in (torch.strided, torch.jagged):
        x = torch.nested.nested_tensor(rows, layout=layout)
        with pytest.raises(TypeError, match="^input is a nested tensor; give x.to_padded_tensor"):
            layer(x, [4, 0]) if name == "grouped_linear" else layer(x)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.*deprecated",
    "ignore:Converting a tensor to a Python boolean",
    "ignore:nothing inside this autocast ran",
)
def test_torchscript_is_refused() -> None:
    """A trace in high precision records operators of PyTorch's alone."""
    model, x = nc.convert(nn.Sequential(nn.Linear(64, 64)), CURRENT), torch.randn(4, 64)
    with pytest.raises(NotImplementedError, match=r"^torch.jit.script does not take narrowcast's Linear,"):
        torch.jit.script(model)
    with pytest.raises(NotImplementedError, match=r"^torch.jit.trace does not take .*; use torch.compile"):
        torch.jit.trace(model, x)
    with nc.autocast(enabled=False):
        assert torch.equal(torch.jit.trace(model, x)(x), model(x))
    core, of_heads = nc.DotProductAttention(2, 8), torch.randn(5, 2, 2, 8)
    norms = nc.LayerNorm(64, device="cpu"), nc.RMSNorm(64, device="cpu"), HeadL2Norm(64, 1e-6)
    for layer in (*norms, core, nc.MoERouter(64, 4, 2, device="cpu"), nc.Fp8Padding(2), nc.Fp8Unpadding(2)):
        told = rf"^torch.jit.script does not take narrowcast's {type(layer).__name__},"
        with pytest.raises(NotImplementedError, match=told):
            torch.jit.script(nn.Sequential(layer))
    assert torch.equal(torch.jit.trace(core, 3 * (of_heads,))(*3 * (of_heads,)), core(*3 * (of_heads,)))
    operations = nc.ops.Sequential(nc.ops.LayerNorm(64, device="cpu"), nc.ops.Linear(64, 64, device="cpu"))
    for what, recipe in product((operations, *operations), (None, CURRENT)):
        told = r"^torch.jit.trace does not take narrowcast's (LayerNorm|BasicLinear),"
        with nc.autocast(recipe=recipe), pytest.raises(NotImplementedError, match=told):
            torch.jit.trace(what, x)


# -- where parameters live ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYERS)
def test_default_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As given, else the ambient one, the CPU as any other; the accelerator only where nobody says anything."""
    accelerator = torch.device("meta")
    monkeypatch.setattr("narrowcast.layers.parameters.default_device", lambda: accelerator)
    assert next(LAYERS[name]().parameters()).is_meta
    with torch.device("cpu"):
        assert next(LAYERS[name]().parameters()).device.type == "cpu"
        assert next(LAYERS[name](device="meta").parameters()).is_meta
    torch.set_default_device("cpu")
    try:
        assert next(LAYERS[name]().parameters()).device.type == "cpu"
    finally:
        torch.set_default_device(None)
    assert next(LAYERS[name]().parameters()).is_meta


# -- the meta device ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_meta_and_real_tensors_do_not_mix(name: str, recipe: Any) -> None:
    """No memory that nobody wrote to, whichever parameter is still on meta, and whether the input is."""
    options = {} if name in NORMS else {"recipe": recipe}
    layer, x = LAYERS[name](device="cpu", **options), torch.randn(8, 16)
    with pytest.raises(RuntimeError, match="meta"):
        run(layer, x.to("meta"))
    with pytest.raises(RuntimeError, match="meta"):
        run(LAYERS[name](device="meta", **options), x)
    for label, parameter in list(layer.named_parameters()):
        setattr(layer, label, nn.Parameter(parameter.detach().to("meta")))
        with pytest.raises(RuntimeError, match="meta"):
            run(layer, x)
        setattr(layer, label, parameter)
    assert run(LAYERS[name](device="meta", **options), x.to("meta")).is_meta


@pytest.mark.parametrize("how", ["argument", "context"])
@pytest.mark.parametrize("name", LAYERS)
def test_from_meta_by_to_empty(name: str, how: str) -> None:
    if how == "argument":
        layer = LAYERS[name](device="meta")
    else:
        with torch.device("meta"):
            layer = LAYERS[name]()
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.reset_parameters()
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.data.fill_(float("nan"))
    layer.reset_parameters()
    assert all(not parameter.is_meta and parameter.isfinite().all() for parameter in layer.parameters())
    assert run(layer, torch.randn(8, 16)).isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", ["linear", "layernorm_linear", "layernorm_mlp", "grouped_linear"])
def test_from_meta_with_a_recipe(name: str, recipe: Any) -> None:
    """The recipe may be given while on meta; a real layer with the same parameters behaves the same."""
    layer, real = LAYERS[name](device="meta", recipe=recipe), LAYERS[name](device="cpu", recipe=recipe)
    layer.to_empty(device="cpu")
    layer.reset_parameters()
    layer.load_state_dict(real.state_dict())
    x = torch.randn(8, 16)
    for _ in range(2):
        for one in (layer, real):
            run(one, x).square().sum().backward()
        assert torch.equal(run(layer, x), run(real, x))
    for a, b in zip((*layer.parameters(), *layer.buffers()), (*real.parameters(), *real.buffers())):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", LAYERS)
def test_from_meta_by_assignment(name: str, recipe: Any) -> None:
    own = {} if name in NORMS else {"recipe": recipe}
    layer, real = LAYERS[name](device="meta", **own), LAYERS[name](device="cpu", **own)
    # an assigned tensor is shared, and two layers do not share scales
    layer.load_state_dict({key: tensor.clone() for key, tensor in real.state_dict().items()}, assign=True)
    x = torch.randn(8, 16)
    assert not any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
    assert torch.equal(run(layer, x), run(real, x))


@pytest.mark.filterwarnings("ignore:the checkpoint has no delayed-scaling state")
def test_assigning_a_checkpoint_of_nn_linear_to_a_delayed_layer_on_meta() -> None:
    layer = nc.Linear(16, 32, device="meta", recipe=RECIPES["delayed"])
    layer.load_state_dict(nn.Linear(16, 32).state_dict(), assign=True)
    layer(torch.randn(8, 16)).sum().backward()
    assert not any(tensor.is_meta for tensor in layer.buffers())


@pytest.mark.parametrize("place", ["meta", "cpu"])
def test_to_empty_leaves_usable_scales(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For those who then fill the parameters by their own means, and reset nothing."""
    layer = nc.LayerNormMLP(16, 32, device=place, recipe=RECIPES["delayed"])
    if place == "cpu":
        for _ in range(2):
            layer(torch.randn(8, 16)).sum().backward()
        layer.zero_grad()
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    uninitialised = lambda tensor, **options: torch.full(tensor.shape, float("nan"), **options)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", uninitialised)
        layer.to_empty(device="cpu")
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]) if place == "cpu" else buffer.isfinite().all()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.1)
    y = layer(torch.randn(8, 16))
    y.sum().backward()
    assert y.isfinite().all() and all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES.values(), MXFP8BlockScaling()], ids=[*RECIPES, "mxfp8"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_forward_on_meta(name: str, recipe: Any, dtype: torch.dtype) -> None:
    """Shapes and dtypes of output and gradients without a byte of memory."""
    layer, x = LAYERS[name](device="meta", dtype=dtype), torch.randn(8, 16, device="meta", dtype=dtype)
    real, real_x = LAYERS[name](device="cpu", dtype=dtype), torch.randn(8, 16, dtype=dtype)
    outs = []
    for one, inp in ((layer, x), (real, real_x)):
        inp.requires_grad_()
        with nc.autocast(enabled=recipe is not None, recipe=recipe):
            out = run(one, inp)
        out.sum().backward()
        outs.append([out, inp.grad, *(parameter.grad for parameter in one.parameters())])
    for a, b in zip(*outs, strict=True):
        assert a.is_meta and a.shape == b.shape and a.dtype == b.dtype


def test_a_real_input_on_meta_parameters() -> None:
    with pytest.raises(RuntimeError, match="to_empty and reset_parameters"):
        nc.Linear(16, 32, device="meta")(torch.randn(8, 16))


# -- sharded -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@needs_distributed
@pytest.mark.parametrize("name", LAYERS)
def test_parameters_that_are_dtensors(name: str, one_rank: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    layer = LAYERS[name](device="cpu")
    reference = copy.deepcopy(layer)
    for label, parameter in list(layer.named_parameters()):
        placement = Shard(0) if name in ("linear", "layernorm") else Replicate()
        setattr(layer, label, nn.Parameter(distribute_tensor(parameter.detach(), one_rank, [placement])))
    x = torch.randn(8, 16)
    if name == "linear":
        out = layer(distribute_tensor(x, one_rank, [Replicate()]))
        torch.testing.assert_close(out.full_tensor(), reference(x))
    layer.reset_parameters()
    for parameter in layer.parameters():
        full: Any = parameter
        assert full.full_tensor().isfinite().all()
        assert isinstance(parameter, DTensor)


def fsdp1(model: nn.Module, use_orig_params: bool) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))


def fsdp2(model: nn.Sequential) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPERS: dict[str, Any] = {
    "fsdp1_flat": lambda model: fsdp1(model, False),
    "fsdp1_orig": lambda model: fsdp1(model, True),
    "fsdp2": fsdp2,
}


@needs_distributed
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_data_parallel_wrappers(wrapper: str, recipe: Any, one_rank: Any) -> None:
    """Training under FSDP on one rank gives the losses of training without."""
    losses = []
    operations = nc.ops.Sequential(
        nc.ops.LayerNorm(32, device="cpu"), nc.ops.Linear(32, 32, device="cpu"), nc.ops.GELU()
    )
    plain = nn.Sequential(nc.Linear(16, 32, device="cpu"), operations, nc.LayerNormMLP(32, 48, device="cpu"))
    for wrapped in (False, True):
        model: nn.Module = copy.deepcopy(plain)
        if recipe is not None:
            nc.set_recipe(model, recipe)
        if wrapped:
            model = WRAPPERS[wrapper](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
        seen = []
        for _ in range(4):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        losses.append(seen)
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
