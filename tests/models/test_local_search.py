"""Search for the head's model on this machine, without network."""

import shutil

import pytest

from gllm.models.errors import ModelError
from gllm.models.hub import DEMO, find_folder, find_local_model
from gllm.models.identity import hash_model


@pytest.fixture(scope="module")
def model_hash():
    return hash_model(DEMO)


def test_name_of_the_head(model_hash):
    assert find_local_model("demo", model_hash) == DEMO


def test_folder_of_this_machine_outranks_the_name_of_the_head(tmp_path, model_hash):
    folder = shutil.copytree(DEMO, tmp_path / "copy")
    assert find_local_model("/models/only-on-the-head", model_hash, str(folder)) == folder


@pytest.mark.parametrize("name", ["/models/only-on-the-head", "./none", "a/b/c"])
def test_path_that_only_the_head_has(name, model_hash):
    with pytest.raises(ModelError, match="is not on this machine"):
        find_local_model(name, model_hash)


def test_hub_name_is_not_downloaded(tmp_path, model_hash):
    with pytest.raises(ModelError, match="pass --model FOLDER"):
        find_local_model("someone/no-such-model", model_hash, cache=tmp_path / "cache")


def test_hub_name_in_the_cache(tmp_path, model_hash):
    snapshot = tmp_path / "models--someone--copy" / "snapshots" / "1234"
    shutil.copytree(DEMO, snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("1234")
    folder = find_folder("someone/copy", tmp_path)
    if folder is None:
        pytest.fail("the cached model was not found")
    assert hash_model(folder) == model_hash


def test_another_model(tmp_path, model_hash):
    folder = shutil.copytree(DEMO, tmp_path / "copy")
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(ModelError, match=r"differs from that of the head \('demo', hash "):
        find_local_model("demo", model_hash, str(folder))
