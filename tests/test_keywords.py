"""Wrong keywords of public functions and classes: the message has the nearest one."""

from __future__ import annotations

import enum
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast import _keywords
from narrowcast.serving.formats import CHECKPOINT_FORMATS

ANY = {
    "checkpoint": "the function's own keywords follow",
    "expert_parallel": "MoEDispatch checks them",
    "make_graphed_callables": "checks its old names, too; the test below",
    "recipe_from_name": "the recipe's class checks them",
    "shard": "those of fully_shard are checked in the call",
    "ColwiseParallel": "the constructor is PyTorch's",
    "RowwiseParallel": "the constructor is PyTorch's",
    "SequenceParallel": "the constructor is PyTorch's",
}
"""Callables whose further keywords are another's, and whose."""
for later in nc.distributed.__all__:  # loaded on demand
    getattr(nc.distributed, later)
EXPORTED = sorted(dict(_keywords.exported(nc)).items())


def keywords_of(value: Any) -> list[str]:
    """Return the names that a callable declares, by its signature, and none if its tensors are made by quantizers."""
    if isinstance(value, type) and (
        issubclass(value, (torch.Tensor, tuple)) or value.__init__ is object.__init__
    ):
        return []
    parameters = inspect.signature(value).parameters.values()
    return [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


CASES = [
    pytest.param(value, names, id=name)
    for name, value in EXPORTED
    if name not in ANY and "Storage" not in name and not issubclass(type(value), type(nc.DType))
    for names in [keywords_of(value)]
    if names
]


@pytest.mark.parametrize("function, names", CASES)
def test_a_misspelled_keyword_gets_the_nearest_one(function: Any, names: list[str]) -> None:
    for name in names:
        wrong = name[:-1] + 2 * name[-1]
        with pytest.raises(TypeError, match=f" takes no '{wrong}'; did you mean [a-z_0-9]+=") as raised:
            function(**{wrong: None})
        assert len(str(raised.value)) <= 300
    with pytest.raises(TypeError, match=r" takes no 'qqq'; it takes ") as raised:
        function(qqq=None)
    assert len(str(raised.value)) <= 300


MODULES = {
    value: pytest.param(value, id=f"{value.__module__.split('.')[1]}.{name}")
    for name, value in _keywords.exported(nc)
    if isinstance(value, type) and issubclass(value, nn.Module)
    if not issubclass(value, nc.ops.BasicOperation)  # an operation's further keywords are its own
}


@pytest.mark.parametrize("cls", MODULES.values())
def test_a_forward_names_the_nearest_keyword(cls: type[nn.Module]) -> None:
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    parameters = inspect.signature(module.forward).parameters.values()
    given = {
        each.name: None for each in parameters if each.default is each.empty and each.kind < each.VAR_KEYWORD
    }
    given.pop("extra_inputs", None)
    for name in keywords_of(module.forward):
        wrong = name[:-1] + 2 * name[-1]
        with pytest.raises(
            TypeError, match=f"{cls.__name__}.forward takes no '{wrong}'; did you mean {name}="
        ):
            module(**given, **{wrong: None})


class Called(nn.Module):
    """Calls its layers by the names that torch.nn gives their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.layer_norm, self.rms_norm = (
            nn.Linear(64, 64),
            nn.LayerNorm(64),
            nn.RMSNorm(64, 1e-5),
        )

    def forward(self, x: torch.Tensor, named: bool = True) -> torch.Tensor:
        if named:
            return self.rms_norm(x=self.layer_norm(input=self.linear(input=x)))
        return self.rms_norm(inp=self.layer_norm(inp=self.linear(inp=x)))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_converted_layer_takes_its_input_by_its_name_in_torch(compiled: bool) -> None:
    Called()(torch.ones(32, 64))
    model, x = nc.convert(Called(), "current", norms=True), torch.randn(32, 64)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    assert torch.equal(run(x), model(x, named=False))


def test_an_input_has_one_name() -> None:
    x = torch.ones(4, 64)
    for layer in nc.convert(Called(), "current", norms=True).children():
        with pytest.raises(TypeError, match=r"forward got inp and input, one input; give one of them"):
            layer(x, input=x)
        with pytest.raises(TypeError, match="forward takes no 'inputs'; did you mean"):
            layer(inputs=x)
        with pytest.raises(TypeError, match="input is None, of type NoneType; give a tensor"):
            layer()


def test_splits_that_are_missing_are_told() -> None:
    with pytest.raises(TypeError, match="m_splits is None; give the rows of each group as a list of ints"):
        nc.GroupedLinear(2, 64, 64, device="cpu")(torch.ones(4, 64))


def test_a_forward_that_is_overridden_names_what_ours_takes() -> None:
    class Own(nc.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x, fp8_ouput=True)

    with pytest.raises(TypeError, match="Own.forward takes no 'fp8_ouput'; did you mean fp8_output="):
        Own(8, 8)(torch.ones(3, 8))


def test_every_function_and_class_is_asked() -> None:
    assert len(CASES) > 130
    assert set(ANY) <= {name for name, _ in EXPORTED}
    for name in (
        "convert",
        "Linear",
        "TransformerLayer",
        "FusedAdam",
        "DelayedScaling",
        "MoEDispatch",
        "autocast",
    ):
        assert any(case.id == name for case in CASES), name


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ("wieghts", "did you mean weights=?"),
        ("skipp", "did you mean skip=?"),
        ("exclude", "did you mean skip=?"),
        ("head", "did you mean heads=?"),
        ("module_filter_fn", "use only= or skip=: names, patterns, or functions of (name, module)"),
    ],
)
def test_convert_names_the_keyword(wrong: str, remedy: str) -> None:
    with pytest.raises(TypeError, match=f"convert takes no '{wrong}'; ") as raised:
        nc.convert(nn.Linear(8, 8), "current", **{wrong: None})
    assert remedy in str(raised.value)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: nc.autocast("cuda", dtype=torch.bfloat16),
            "autocast takes no 'dtype'; that is torch.autocast, ",
        ),
        (lambda: nc.autocast(qqq=1), r"it takes enabled, calibrating, recipe, amax_reduction_group$"),
        (
            lambda: nc.optimizers.FusedAdam([nn.Parameter(torch.ones(2))], fused=True),
            "are always fused; leave it out$",
        ),
        (
            lambda: nc.set_recipe(nn.Linear(2, 2), "block", only="0"),
            r'name the layers in a table .*"mxfp8"}$',
        ),
        (lambda: nc.set_recipe(nn.Linear(2, 2), "block", exclude="0"), r'in a table .*, "lm_head": None}$'),
    ],
)
def test_a_keyword_of_another_function_is_told_apart(call: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told) as raised:
        call()
    assert len(str(raised.value)) <= 300


def test_options_of_transformer_engine_are_known() -> None:
    nc.Linear(16, 16, ub_overlap_ag=False)
    with pytest.raises(TypeError, match="Linear takes no 'ub_overlap_a'; did you mean ub_overlap_ag="):
        nc.Linear(16, 16, ub_overlap_a=False)
    with pytest.raises(
        TypeError, match="make_graphed_callables takes no 'fp8_recip'; did you mean fp8_recipe="
    ):
        nc.make_graphed_callables(nn.Linear(8, 8), (), fp8_recip=None)


def test_signatures_pickling_and_positions_stay() -> None:
    assert next(iter(inspect.signature(nc.convert).parameters)) == "model"
    assert list(inspect.signature(nc.Linear).parameters)[:2] == ["in_features", "out_features"]
    assert pickle.loads(pickle.dumps(nc.convert)) is nc.convert
    assert nc.Linear(16, 32, False).bias is None


class _Own(nc.Linear):
    def __init__(self, **options: Any) -> None:
        super().__init__(16, 16, **options)


def test_a_class_of_the_users_own_names_itself() -> None:
    with pytest.raises(TypeError, match="_Own takes no 'biass'; did you mean bias="):
        _Own(biass=False)


def test_checked_calls_compile() -> None:
    """In compiled code a checked function and class are traced like others."""
    logits, target = torch.randn(4, 8), torch.randint(8, (4,))

    def loss(x: torch.Tensor) -> torch.Tensor:
        with nc.autocast(enabled=True, recipe=nc.recipe.Float8CurrentScaling()):
            return nc.parallel_cross_entropy(inp=x, target=target, label_smoothing=0.1).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    assert torch.equal(compiled(logits), loss(logits))


def test_words_of_other_libraries_and_parts_of_names_are_known() -> None:
    with pytest.raises(TypeError, match="FusedAdam takes no 'learning_rate'; did you mean lr="):
        nc.optimizers.FusedAdam([torch.nn.Parameter(torch.ones(2))], learning_rate=1.0)
    with pytest.raises(
        TypeError, match="no 'moment_dtype'; the moments are two: exp_avg_dtype= and exp_avg_sq"
    ):
        nc.optimizers.FusedAdam([torch.nn.Parameter(torch.ones(2))], moment_dtype=torch.int8)
    with pytest.raises(TypeError, match="NVFP4BlockScaling takes no 'rht'; did you mean disable_rht="):
        nc.recipe.NVFP4BlockScaling(rht=True)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: nc.convert(nn.Linear(2, 2)), "convert lacks recipe; call convert(model, 'current')"),
        (lambda: nc.convert(), "convert lacks model, recipe; call convert(model, 'current')"),
        (lambda: nc.convert(recipe="current"), "convert lacks model; call convert(model, 'current')"),
        (
            lambda: nc.export(nn.Linear(2, 2), "folder"),
            "export lacks format; call export(model, path, 'compressed-tensors'); format is one of "
            + ", ".join(CHECKPOINT_FORMATS),
        ),
        (
            lambda: nc.serving.weights(nn.Linear(2, 2)),
            "weights lacks format; call weights(model, 'compressed-tensors'); format is one of "
            + ", ".join(CHECKPOINT_FORMATS),
        ),
        (
            lambda: nc.quantized_model_init("current"),
            "quantized_model_init got 'current' as a positional argument; write "
            "quantized_model_init(recipe='current')",
        ),
        (
            lambda: nc.Linear(64, 64, nc.recipe.MXFP8BlockScaling()),
            "Linear got MXFP8BlockScaling(...) as a positional argument; write Linear(in_features, out_features, "
            "recipe=MXFP8BlockScaling(...))",
        ),
        (
            lambda: nc.LayerNormMLP(64, 64, "mxfp8"),
            "LayerNormMLP got 'mxfp8' as a positional argument; write LayerNormMLP(hidden_size, ffn_hidden_size, "
            "recipe='mxfp8')",
        ),
        (
            lambda: nc.recipe.recipe_from_name(None),
            "name is None, of type NoneType; use one of 'delayed', 'current', 'rowwise', 'block', 'mxfp8', 'nvfp4', "
            "'mxfp6', 'mxfp4', 'tensorwise', 'rowwise_with_gw_hp'",
        ),
        (
            lambda: nc.CudaRNGStatesTracker().add("x", "y"),
            "seed is 'y', of type str; use a whole number",
        ),
        (lambda: nc.Linear(64, 64, "yes"), "bias is 'yes', of type str; use True or False"),
        (
            lambda: nc.convert(nn.Linear(2, 2), "current", ["0"]),
            "convert takes model, recipe by position, and ['0'] came as well; name it: only=, skip=, weights=, "
            "norms=, routers=, heads=, small=, blocks=, dry_run=, policy=, rows=",
        ),
        (
            lambda: nc.watch(nn.Linear(2, 2), 10),
            "watch takes model by position, and 10 came as well; name it: every=, only=",
        ),
        (
            lambda: nc.revert(nn.Linear(2, 2), 1),
            "revert takes model by position, and 1 came as well; leave it out",
        ),
        (lambda: nc.Linear(8), "Linear lacks out_features; call Linear(in_features, out_features)"),
        (
            lambda: nc.reduce_delayed_scaling(),
            "reduce_delayed_scaling lacks model; call reduce_delayed_scaling(model)",
        ),
    ],
)
def test_arguments_too_few_and_too_many_are_named(call: Any, told: str) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value) == told


@pytest.mark.parametrize(
    ("package", "name", "nearest"),
    [
        (nc, "linear", "narrowcast.Linear"),
        (nc, "FusedAdam", "narrowcast.optimizers.FusedAdam"),
        (nc, "weights", "narrowcast.serving.weights"),
        (nc.recipe, "Float8CurrentScalin", "narrowcast.recipe.Float8CurrentScaling"),
        (nc.recipe, "MXFP8", "narrowcast.recipe.MXFP8BlockScaling"),
        (nc.recipe, "NVFP4", "narrowcast.recipe.NVFP4BlockScaling"),
        (nc.nn, "Linea", "narrowcast.nn.Linear"),
        (nc.distributed, "load_checkpont", "narrowcast.distributed.load_checkpoint"),
    ],
)
def test_a_name_that_is_not_there_gets_the_nearest(package: Any, name: str, nearest: str) -> None:
    told = f"^module {package.__name__!r} has no attribute {name!r}; did you mean {nearest}[?]$"
    with pytest.raises(AttributeError, match=told):
        getattr(package, name)
    with pytest.raises(AttributeError, match="'HybridScaling'; it has DelayedScaling, Float8BlockScaling, "):
        getattr(nc.recipe, "HybridScaling")  # noqa: B009
    with pytest.raises(AttributeError, match="'AdamW'; it has FusedAdam$"):
        getattr(nc.optimizers, "AdamW")  # noqa: B009
    assert not hasattr(package, "qqq") and not hasattr(package, "__linear__")


@pytest.mark.parametrize("kind", [one for _, one in EXPORTED if issubclass(type(one), enum.EnumMeta)])
def test_a_wrong_member_of_an_enumeration_lists_the_members(kind: Any) -> None:
    with pytest.raises(AttributeError, match=f"^{kind.__name__} has no member 'E4M4'; use one of ") as raised:
        kind.E4M4  # noqa: B018
    assert all(member.name in str(raised.value) for member in kind) and len(str(raised.value)) <= 300
    assert pickle.loads(pickle.dumps([*kind])) == [*kind] and not hasattr(kind, "_repr_html_")


def test_a_wrong_format_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="'E4M4'; the nearest: 'E4M3'; use one of 'E2M1', "):
        nc.recipe.Format("E4M4")


def test_shard_without_ranks_names_the_remedy() -> None:
    with pytest.raises(TypeError, match="model is 3, of type int; pass a torch.nn.Module"):
        nc.distributed.shard(3)
    with pytest.raises(RuntimeError, match="there are no ranks .* start the script with torchrun"):
        nc.distributed.shard(torch.nn.Sequential(nc.Linear(16, 16, device="cpu")))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: nc.watch(nn.Linear(2, 2), interval=10), "watch takes no 'interval'; did you mean every=?"),
        (
            lambda: nc.bisect(nn.Linear(2, 2), interval=10),
            "bisect takes no 'interval'; it takes model, batch, ",
        ),
        (
            lambda: nc.recipe.DelayedScaling(interval=1),
            "DelayedScaling takes no 'interval'; Transformer Engine",
        ),
        *(
            (
                lambda word=word: nc.convert(nn.Linear(2, 2), "current", **{word: []}),
                f"convert takes no '{word}'; did you mean skip=?",
            )
            for word in ("ignore", "modules_to_not_convert", "skip_modules")
        ),
        (
            lambda: nc.convert("current", nn.Linear(2, 2)),
            "convert takes the model first and got 'current'; call convert(model, 'current')",
        ),
        (
            lambda: nc.export("out", nn.Linear(2, 2)),
            "export takes the model first and got 'out'; call export(model, path, 'compressed-tensors')",
        ),
        (
            lambda: nc.load_quantized("out", nn.Linear(2, 2)),
            "load_quantized takes the model first and got 'out'; call load_quantized(model, path)",
        ),
        (
            lambda: nc.convert(nn.Linear(2, 2), nc.recipe.current),
            "convert: recipe is the module narrowcast.recipe.current; pass 'current', the recipe's name",
        ),
    ],
)
def test_words_and_orders_of_other_packages_get_a_remedy(call: Any, told: str) -> None:
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value).startswith(told)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("quantize_", "narrowcast.convert converts a model"),
        ("list_recipes", "the names of recipes are delayed, current, rowwise, "),
        (
            "train",
            "train in your own loop after narrowcast.convert(model, 'current'), or run narrowcast train",
        ),
        ("Float8LinearConfig", "it is in narrowcast.compat.torchao_float8"),
    ],
)
def test_names_of_other_packages_get_what_to_use(name: str, told: str) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(nc, name)
    assert str(raised.value).startswith(f"module 'narrowcast' has no attribute '{name}'; {told}")
