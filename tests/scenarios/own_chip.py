"""A vendor's package for its own chip over the emulated NPU, from ``fl new-backend nimbus --device npu``."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

import distributions
from fl_dispatch.cli.new_backend import write_package
from host_engines import Engine, Host, Pass, Scenario, Served, clean, ran

KERNELS = {"silu_and_mul", "rms_norm", "rotary_embedding", "kv_cache_write", "paged_attention"}


def make_package(folder: Path) -> Path:
    """Write the package into a new folder, which acts as an installed distribution if it is on ``sys.path``."""
    package = folder / "nimbus-fl"
    write_package("nimbus", package, "npu")
    _install(package)
    return package


def _install(package: Path) -> None:
    """Add the distribution with entry points to a package's folder, as an installation would."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    groups = project["entry-points"].items()
    lines = [line for group, points in groups for line in (f"[{group}]", *(f"{n} = {v}" for n, v in points.items()))]
    distributions.install(package, project["name"], "\n".join(lines) + "\n", project["version"])


class OwnChip(Scenario):
    """The package serves with its chip, its kernels and its defaults.

    The chip has its own name over the emulated runtime, and a higher priority than the built-in one. In float32 the
    package's kernels, which use PyTorch, give Hugging Face's tokens exactly.
    """

    UNSET: ClassVar[tuple[str, ...]]
    """Variables that the host's tests usually set; here the package's defaults replace them."""
    WARNING: ClassVar[str]

    @pytest.fixture(scope="class")
    def package(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_package(tmp_path_factory.mktemp("own"))

    @pytest.fixture(scope="class")
    def serve(self, host: Host, package: Path, checkpoint: Callable[[str], Path]) -> Callable[..., Served]:
        path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
        variables = {"PYTHONPATH": path, **dict.fromkeys(self.UNSET, "")}

        def begin(*passes: Pass) -> Served:
            (started,) = host.serve(Engine(checkpoint("qwen3"), passes, {"dtype": "float32"}), **variables)
            return started.result()

        return begin

    @pytest.fixture(scope="class")
    def served(self, serve: Callable[..., Served]) -> Served:
        return serve(Pass(), Pass())

    def test_tokens_equal_hugging_face_also_from_the_cache(
        self, served: Served, expected: Callable[[str], list[list[int]]]
    ) -> None:
        assert [answer.tokens for answer in served.answers] == [expected("qwen3")] * 2
        assert sum(served.answers[1].cached) > 0

    def test_its_kernels_ran_and_no_other_vendors(self, host: Host, served: Served) -> None:
        (report,) = served.reports
        found = ran(report)
        assert all(found[operator] == {"vendor.nimbus"} for operator in KERNELS)
        assert not any("ascend" in impl_id for impl_ids in found.values() for impl_id in impl_ids)
        assert clean(report, host)

    def test_its_defaults_are_in_force(self, served: Served) -> None:
        assert "nimbus.yaml" in str(served.reports[0])

    def test_one_warning_says_that_nobody_verified_it(self, served: Served) -> None:
        assert served.log.count(self.WARNING) == 1

    def test_a_mistake_in_its_file_of_kernels_changes_the_tokens(
        self, served: Served, serve: Callable[..., Served], package: Path, expected: Callable[[str], list[list[int]]]
    ) -> None:
        kernels = package / "nimbus_fl/kernels.py"
        kernels.write_text(kernels.read_text().replace("functional.silu(gate) * up", "functional.silu(up) * gate"))
        assert serve(Pass()).answers[0].tokens != expected("qwen3")
