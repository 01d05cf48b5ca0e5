"""Transformer Engine's names: what an import gives, what is refused, and code that was written for them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import narrowcast as nc
from narrowcast import compat

FIRST = "transformer_engine"


@pytest.fixture
def te() -> Iterator[Any]:
    nc.compat.install_transformer_engine()
    yield importlib.import_module(FIRST)
    nc.compat.uninstall_transformer_engine()


@pytest.fixture
def gpt(te: ModuleType) -> Iterator[Any]:
    name = "tests.compat.gpt_block" if __name__.startswith("tests.") else f"{__package__}.gpt_block"
    yield importlib.import_module(name)
    del sys.modules[name]


def test_the_modules_are_there_and_go_away(te: Any) -> None:
    nc.compat.install_transformer_engine()  # changes nothing
    assert sys.modules[FIRST] is te
    import transformer_engine.pytorch as tp
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.tensor.float8_tensor import (
        Float8Tensor,
    )

    assert tp.Linear is nc.Linear and te.pytorch is tp and Float8Tensor is nc.Float8Tensor
    assert recipe.DelayedScaling is te.common.recipe.DelayedScaling is nc.recipe.DelayedScaling
    for name in [name for name in sys.modules if name.split(".")[0] == FIRST]:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.name == name and sys.modules[name].__spec__ is spec
    nc.compat.uninstall_transformer_engine()
    assert importlib.util.find_spec(FIRST) is None
    with pytest.raises(ImportError):
        importlib.import_module(FIRST)


def test_the_package_has_metadata(te: Any) -> None:
    for name in ("transformer_engine", "transformer-engine", "Transformer-Engine"):
        assert importlib.metadata.version(name) == te.__version__ == "2.20.2+narrowcast"
        assert importlib.metadata.metadata(name)["Name"] == "transformer-engine"
    assert "transformer-engine" in importlib.metadata.packages_distributions()[FIRST]
    assert "transformer-engine" in {one.metadata["Name"] for one in importlib.metadata.distributions()}
    nc.compat.uninstall_transformer_engine()
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("transformer-engine")


def test_the_real_one_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FIRST).mkdir()
    (tmp_path / FIRST / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="Transformer Engine itself is installed .*uninstall it"):
        nc.compat.install_transformer_engine()
    monkeypatch.setitem(sys.modules, FIRST, ModuleType(FIRST))
    with pytest.raises(RuntimeError, match="itself is installed"):
        nc.compat.install_transformer_engine()


def test_absent_names_say_what_replaces_them(te: Any) -> None:
    with pytest.raises(ImportError, match="userbuffers; leave the ub_.*From Transformer Engine"):
        from transformer_engine.pytorch import initialize_ub  # noqa: F401
    with pytest.raises(ImportError, match=r"torch\.distributed\.all_reduce"):
        from transformer_engine.pytorch.distributed import symmetric_all_reduce  # noqa: F401
    with pytest.raises(ImportError, match="saved activations are not scattered, give the recipe saved_activ"):
        from transformer_engine.pytorch.distributed import prepare_te_modules_for_fsdp  # noqa: F401
    with pytest.raises(ImportError, match=r"narrowcast is for PyTorch"):
        importlib.import_module("transformer_engine.jax")
    with pytest.raises(AttributeError, match=r"use torch\.optim\.Muon"):
        _ = te.pytorch.newton_schulz
    assert not hasattr(te.pytorch, "no_such_name")
    with pytest.raises(AttributeError, match=r"narrowcast\.reduce_delayed_scaling"):
        _ = compat.FP8GlobalStateManager.quantization_state
    with pytest.raises(AttributeError, match="cannot be assigned"):
        compat.FP8GlobalStateManager.FP8_ENABLED = True


def test_the_extension_has_the_dtypes_and_says_what_replaces_the_rest(te: Any) -> None:
    extension = importlib.import_module("transformer_engine_torch")
    assert extension.DType is nc.DType
    with pytest.raises(AttributeError, match=r"C\+\+ extension; .* torch\.ops\.narrowcast"):
        _ = extension.generic_gemm
    for name, remedy in (
        ("set_offloading_param", "get_cpu_offload_context"),
        ("FusedAttention", "DotProductAttention"),
        ("backends", "DotProductAttention"),
    ):
        with pytest.raises(AttributeError, match=remedy):
            getattr(te.pytorch, name)
    nc.compat.uninstall_transformer_engine()
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformer_engine_torch")


def test_what_a_layer_and_a_recipe_do_not_have_says_what_to_use() -> None:
    layer = nc.Linear(16, 16)
    with pytest.warns(UserWarning, match=r"Linear\.fp8_meta is not there: layer\.recipe is the recipe"):
        assert not hasattr(layer, "fp8_meta")
    nc.set_recipe(layer, nc.recipe.DelayedScaling())
    assert all(hasattr(layer, name) for name in ("scale", "amax_history", "amax"))
    for wrong, remedy in (
        ("interval", "scales are renewed in every step; leave it out"),
        ("amax_history_length", "did you mean amax_history_len="),
        ("speed", "it takes margin, fp8_format"),
    ):
        with pytest.raises(TypeError, match=f"DelayedScaling takes no '{wrong}'; .*{remedy}"):
            nc.recipe.DelayedScaling(**{wrong: 1})


def test_layers_are_base_modules(te: Any) -> None:
    base = te.pytorch.module.base.TransformerEngineBaseModule
    layers = (
        nc.Linear(16, 16),
        nc.LayerNormLinear(16, 16),
        nc.LayerNormMLP(16, 32),
        nc.GroupedLinear(2, 16, 16),
    )
    assert all(isinstance(layer, base) for layer in layers)
    assert not isinstance(torch.nn.Linear(2, 2), base) and issubclass(nc.Linear, base)


def test_a_class_derived_from_the_base_owns_a_recipe(te: Any) -> None:
    class Mine(te.pytorch.module.base.TransformerEngineBaseModule):
        def __init__(self) -> None:
            super().__init__(name="mine")
            self.inside = te.pytorch.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inside(x)

    mine, recipe = Mine(), nc.recipe.Float8CurrentScaling()
    assert not isinstance(nc.Linear(16, 16), Mine) and mine.recipe is None
    nc.set_recipe(mine, recipe)
    assert nc.get_recipes(mine) == {"": recipe, "inside": recipe}
    x = torch.randn(4, 16, device=mine.inside.weight.device)
    assert torch.equal(torch.compile(mine, backend="aot_eager", fullgraph=True)(x), mine(x))


def test_the_manager_answers_from_the_thread() -> None:
    manager, recipe = compat.FP8GlobalStateManager, nc.recipe.Float8CurrentScaling()
    group: Any = SimpleNamespace(group_name="ranks")
    assert manager.is_fp8_available() == nc.is_fp8_available(return_reason=True)
    assert manager.is_mxfp8_available() == nc.is_mxfp8_available(return_reason=True)
    assert not manager.is_fp8_enabled() and not manager.is_first_fp8_module()
    context = nc.autocast(recipe=recipe, amax_reduction_group=group)
    for _ in range(2):  # one instance, entered again
        with context:
            assert manager.is_fp8_enabled() and manager.get_fp8_recipe() == recipe
            assert manager.get_fp8_group() is group and not manager.fp8_graph_capturing()
            assert manager.is_first_fp8_module() and not manager.is_first_fp8_module()
            kept = manager.get_autocast_state()
            with nc.autocast(enabled=False):
                assert not manager.is_fp8_enabled() and not manager.is_first_fp8_module()
                manager.set_autocast_state(kept)
                assert manager.is_fp8_enabled()
    with nc.autocast(enabled=False, calibrating=True, recipe=nc.recipe.DelayedScaling()):
        assert manager.is_fp8_calibration()
    with nc.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        assert manager.with_fp8_parameters() and manager.with_high_precision_init_val()
    nc.autocast(recipe=recipe).__enter__()
    manager.reset()
    assert not manager.is_fp8_enabled() and nc.state.THREAD.state.depth == 0


def test_the_manager_in_a_graph() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        manager = compat.FP8GlobalStateManager
        return x + 1 if manager.is_fp8_enabled() and not manager.fp8_graph_capturing() else x

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    with nc.autocast(recipe=nc.recipe.Float8CurrentScaling()):
        assert compiled(torch.zeros(1)).item() == 1
    assert compiled(torch.zeros(1)).item() == 0


def test_the_version_of_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, version in ((None, (0, 0, 0)), (8907, (8, 9, 7)), (91002, (9, 10, 2))):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda number=number: number)
        assert nc.get_cudnn_version() == version


def test_onnx_is_refused() -> None:
    with nc.onnx_export():
        pass
    with pytest.raises(NotImplementedError, match=r"torch\.export"), nc.onnx_export(enabled=True):
        pass


@pytest.mark.filterwarnings("ignore:fp8_autocast is now called:DeprecationWarning")
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_megatron_block_runs_unchanged(gpt: Any, recipe: str) -> None:
    torch.manual_seed(0)
    blocks = [gpt.Block(), gpt.Block(), gpt.Block()]
    for block in blocks[1:]:
        block.load_state_dict(blocks[0].state_dict())
    x = torch.randn(32, 1, 64, device=blocks[0].linear_proj.weight.device)
    eager = gpt.train(blocks[0], x, recipe)
    assert eager[-1] < eager[0]
    assert gpt.train(torch.compile(blocks[1], backend="aot_eager", fullgraph=True), x, recipe) == eager
    assert gpt.train(blocks[2], x, recipe, recompute=True) == eager


NO_GPU = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the packages are kept on the CPU, new layers are not"
)


@NO_GPU
class TestAccelerate:
    """accelerate's own path through Transformer Engine, as it is."""

    @pytest.fixture
    def accelerate(self, te: Any) -> Iterator[Any]:
        accelerate = pytest.importorskip(
            "accelerate", reason="needs accelerate: pip install 'narrowcast[hf]'"
        )
        from accelerate.state import AcceleratorState

        # one per process: tests before and behind want another precision
        AcceleratorState._reset_state(reset_partial_state=True)
        yield accelerate
        AcceleratorState._reset_state(reset_partial_state=True)

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 16))

    def test_an_accelerator_trains(self, accelerate: Any) -> None:
        from accelerate.utils import TERecipeKwargs

        model = self.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator = accelerate.Accelerator(
            mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()], cpu=True
        )
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model, optimizer = accelerator.prepare(model, optimizer)
        names = [type(module) for module in accelerator.unwrap_model(model).modules()][1:]
        assert names == [nc.Linear, nc.LayerNorm, nc.Linear]
        assert all(map(torch.equal, before, model.parameters()))
        x, losses = torch.randn(8, 32), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(3):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        assert losses[-1] < losses[0]
        assert nc.state.get_fp8_recipe() is not None

    def test_its_context_enters_the_recipe(self, accelerate: Any) -> None:
        from accelerate.utils import TERecipeKwargs, convert_model
        from accelerate.utils.transformer_engine import (
            apply_fp8_autowrap,
            has_transformer_engine_layers,
        )

        accelerate.Accelerator(cpu=True)  # convert_model asks the state that this makes
        model = self.model()
        seen: list[Any] = []
        with torch.no_grad():
            convert_model(model)
        assert has_transformer_engine_layers(model)
        model[0].register_forward_hook(lambda *_: seen.append(nc.state.THREAD.state.recipe))
        apply_fp8_autowrap(model, TERecipeKwargs(fp8_format="E4M3", amax_history_len=8))
        with pytest.warns(DeprecationWarning, match="fp8_autocast"):
            model(torch.randn(8, 32))
        with pytest.warns(DeprecationWarning, match="fp8_autocast"):
            model.eval()(torch.randn(8, 32))
        expected = nc.recipe.DelayedScaling(fp8_format=nc.recipe.Format.E4M3, amax_history_len=8)
        assert seen == [expected, None]
        with pytest.raises(ValueError, match="MXFP8 block scaling is not available: no CUDA device"):
            apply_fp8_autowrap(model, TERecipeKwargs(use_mxfp8_block_scaling=True))


@NO_GPU
class TestLightning:
    """Lightning's own plugin for Transformer Engine, as it is."""

    @pytest.mark.filterwarnings("ignore:fp8_autocast is now called:DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:CUDA is not available:UserWarning")
    def test_its_plugin_trains(self, te: Any) -> None:
        fabric = pytest.importorskip(
            "lightning_fabric", reason="needs Lightning: pip install lightning-fabric"
        )
        from lightning_fabric.plugins.precision import TransformerEnginePrecision

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 16))
        recipe = {"fp8_format": "HYBRID", "amax_history_len": 8}
        plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe)
        one = fabric.Fabric(accelerator="cpu", devices=1, plugins=plugin)
        model = one.setup_module(model)  # which makes new parameters
        optimizer = one.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        assert [type(layer) for layer in model.module] == [nc.Linear, nc.LayerNorm, nc.Linear]
        seen: list[Any] = []
        model.module[0].register_forward_hook(lambda *_: seen.append(nc.state.get_fp8_recipe()))
        x, losses = torch.randn(8, 32), []
        for _ in range(3):
            loss = model(x).square().mean()
            one.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert seen == [nc.recipe.DelayedScaling(amax_history_len=8)] * 3 and losses[-1] < losses[0]
