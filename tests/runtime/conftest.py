"""Tiny tensors: threads would only wait for each other. Models are as small as they can be."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from gllm.kernels.native.builds import select_build
from gllm.kernels.threads import set_num_threads
from tests.support.models.kernel_builds import using_build
from tests.support.models.tiny_models import save


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer, for tests of what is around it."""
    made = save("llama3", tmp_path_factory.mktemp("llama3"), seed=0)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    file = made / "model.safetensors"
    tensors = load_file(file)
    others = [name for name in tensors if re.match(r"model\.layers\.[1-9]", name)]
    save_file({name: tensors[name] for name in tensors.keys() - others}, file)
    return made


@pytest.fixture(scope="module")
def compiled_kernels() -> Iterator[None]:
    """The selected build for every operation, whatever is measured to be faster."""
    build = select_build()
    if build.path is None:
        pytest.skip(f"a BLAS decides the order of sums: {build.reason}")
    with using_build(build.name):
        yield
