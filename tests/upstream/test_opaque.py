"""Classes of values under the names of each release."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.torch_version import TorchVersion

from narrowcast.upstream import opaque


class Value:
    def __eq__(self, other: object) -> bool:
        return type(other) is Value

    def __hash__(self) -> int:
        return 1

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return "Value()", {"Value": Value}


def test_registering_prints_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Quiet(opaque.Base):  # type: ignore[misc, valid-type]
        __eq__, __hash__, __fx_repr__ = Value.__eq__, Value.__hash__, Value.__fx_repr__

    logger = logging.getLogger("torch._library.opaque_object")
    logger.addHandler(caplog.handler)
    try:
        assert opaque.register_value_type(Quiet)
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_the_names_are_those_of_the_release() -> None:
    assert (TorchVersion(torch.__version__) >= "2.14") == opaque._IS_NEW
    assert opaque.AVAILABLE


def test_a_second_class_of_one_name_is_known_and_a_refused_one_is_not() -> None:
    def make() -> type:
        class Again(opaque.Base):  # type: ignore[misc, valid-type]
            __eq__, __hash__, __fx_repr__ = Value.__eq__, Value.__hash__, Value.__fx_repr__

        return Again

    assert opaque.register_value_type(make()) and opaque.register_value_type(make())

    class NoEquality(opaque.Base):  # type: ignore[misc, valid-type]
        pass

    assert not opaque.register_value_type(NoEquality)


def test_the_error_names_the_way_out() -> None:
    with pytest.raises(RuntimeError, match=r"torch._library.opaque_object.*without torch.compile"):
        raise opaque.missing()
