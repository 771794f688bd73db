"""Reading and writing of safetensors directories: what is on the disk, and every way in which it can be wrong."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from longstraw_jax.errors import InputError, LongstrawError, UnsupportedError
from longstraw_jax.models import checkpoint
from longstraw_jax.models.checkpoint import (
    SafetensorsDirectory,
    SafetensorsFile,
    match_names,
    read_config,
    read_json,
    write_json,
    write_safetensors,
)


def _tensors():
    rng = np.random.default_rng(0)
    return {"a.weight": rng.normal(size=(6, 4)).astype(np.float32),
            "b.weight": rng.normal(size=(3, 5)).astype(ml_dtypes.bfloat16),
            "scale": np.array(2.5, np.float32), "none": np.zeros((0, 4), np.float16)}


def _shard(directory, shards, **index):
    """Writes `shards`, file name -> tensors, and an index that lists them; `index` adds tensor name -> file name."""
    for name, tensors in shards.items():
        write_safetensors(directory / name, tensors)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors} | index
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    return directory


def _raw(path, entries, data):
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def _entry(start, stop, dtype="F32", shape=(1,)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def _one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_written_file_reads_back_here_and_in_the_library(tmp_path):
    tensors = _tensors()
    write_safetensors(tmp_path / "model.safetensors", tensors)
    ours, theirs = SafetensorsDirectory(tmp_path), safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert ours.shapes == {name: value.shape for name, value in tensors.items()}
    assert ours.dtypes == {name: value.dtype for name, value in tensors.items()}
    for name, value in tensors.items():
        for read in (ours.read(name), theirs[name]):
            assert (read.dtype, read.shape, read.tobytes()) == (value.dtype, value.shape, value.tobytes())
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("view", [lambda x: x.T, lambda x: x[:, 1:3], lambda x: x[::2], lambda x: x[::-1],
                                  np.asfortranarray, lambda x: np.broadcast_to(x[:1], x.shape),
                                  lambda x: x.astype(x.dtype.newbyteorder(">"))])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_arrays_whatever_their_strides_are_written_by_value(tmp_path, view, dtype):
    x = view(np.arange(24).reshape(6, 4).astype(dtype))
    write_safetensors(tmp_path / "x.safetensors", {"x": x})
    read = SafetensorsFile(tmp_path / "x.safetensors").read("x")
    assert read.flags.c_contiguous
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, x)


@pytest.mark.parametrize("index", [(), (slice(2, 5),), (slice(None), slice(1, 3)), (slice(0, 0), slice(None))])
def test_a_slice_is_an_owned_contiguous_copy(tmp_path, index):
    tensors = _tensors()
    write_safetensors(tmp_path / "model.safetensors", tensors)
    directory = SafetensorsDirectory(tmp_path)
    for name in ("a.weight", "b.weight"):
        read = directory.read(name, index)
        np.testing.assert_array_equal(read, tensors[name][index])
        assert type(read) is np.ndarray
        assert read.base is None
        assert read.flags.c_contiguous


def test_tensors_that_are_not_aligned_are_read_right(tmp_path):
    x = np.arange(5).astype(ml_dtypes.bfloat16)
    entries = {"byte": _entry(0, 1, "U8"), "x": _entry(1, 11, "BF16", (5,))}
    path = _raw(tmp_path / "x.safetensors", entries, b"\7" + x.tobytes())
    np.testing.assert_array_equal(SafetensorsFile(path).read("x", (slice(1, 4),)), x[1:4])


def test_shards_are_read_as_one(tmp_path):
    tensors = _tensors()
    names = list(tensors)
    directory = SafetensorsDirectory(_shard(tmp_path, {
        "model-1.safetensors": {n: tensors[n] for n in names[:1]},
        "model-2.safetensors": {n: tensors[n] for n in names[1:]}}))
    assert directory.shapes == {name: value.shape for name, value in tensors.items()}
    for name, value in tensors.items():
        assert directory.read(name).tobytes() == value.tobytes()


def test_a_tensor_that_the_index_leaves_out_is_listed(tmp_path):
    _shard(tmp_path, {"model-1.safetensors": {"a": np.ones(2), "extra": np.ones(3)}})
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "model-1.safetensors"}})
    assert SafetensorsDirectory(tmp_path).shapes == {"a": (2,), "extra": (3,)}


def test_a_missing_shard_and_a_key_that_its_shard_lacks_are_named(tmp_path):
    _shard(tmp_path, {"model-1.safetensors": {"a": np.ones(2)}}, b="model-2.safetensors")
    with pytest.raises(InputError, match=r"lacks model-2\.safetensors") as error:
        SafetensorsDirectory(tmp_path)
    _one_line(error)
    _shard(tmp_path, {"model-1.safetensors": {"a": np.ones(2)}}, c="model-1.safetensors")
    with pytest.raises(InputError, match=r"places c in model-1\.safetensors") as error:
        SafetensorsDirectory(tmp_path)
    _one_line(error)


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}, {"weight_map": {"a": 3}},
                                   {"weight_map": {"a": "../a.safetensors"}}, {"weight_map": {"a": ".."}}])
def test_a_senseless_index_is_refused(tmp_path, index):
    write_json(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(InputError) as error:
        SafetensorsDirectory(tmp_path)
    _one_line(error)


def test_directories_without_weights_or_config_are_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        SafetensorsDirectory(tmp_path / "nowhere")
    with pytest.raises(InputError, match="does not exist"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(InputError, match="neither model.safetensors nor"):
        SafetensorsDirectory(tmp_path)
    with pytest.raises(InputError, match=r"cannot read .*config\.json: No such file"):
        read_config(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is not a directory"):
        read_config(tmp_path / "file")


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_a_broken_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(InputError, match=r"config\.json") as error:
        read_config(tmp_path)
    _one_line(error)


def test_every_truncation_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    write_safetensors(path, _tensors())
    whole = path.read_bytes()
    for length in (0, 3, 8, 9, 100, len(whole) - 70, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError, match="not a whole safetensors file") as error:
            SafetensorsDirectory(tmp_path)
        _one_line(error)
    path.write_bytes(whole + b"\0")
    with pytest.raises(InputError, match="not a whole safetensors file"):
        SafetensorsDirectory(tmp_path)


@pytest.mark.parametrize("entries", [
    [], {"x": 3}, {"x": {}}, {"x": _entry(0, 8)}, {"x": _entry(0, 4, shape=(-1,))}, {"x": _entry(0, 4, shape=(True,))},
    {"x": _entry(4, 8)}, {"x": _entry(0, 4), "y": _entry(0, 4)}, {"x": _entry(-4, 0)}, {"x": _entry(0, 4, dtype=["F32"])},
    {"x": _entry(0, 4, shape=(1.0,))},
])
def test_a_header_that_does_not_fit_the_data_is_refused(tmp_path, entries):
    with pytest.raises(InputError, match="not a whole safetensors file") as error:
        SafetensorsFile(_raw(tmp_path / "x.safetensors", entries, bytes(8)))
    _one_line(error)


def test_other_files_and_element_types_are_refused(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InputError, match="not a whole safetensors file"):
        SafetensorsFile(tmp_path / "x.safetensors")
    with pytest.raises(UnsupportedError, match="'x' is F4"):
        SafetensorsFile(_raw(tmp_path / "x.safetensors", {"x": _entry(0, 2, "F4", (4,))}, bytes(2)))
    with pytest.raises(InputError, match="cannot read"):
        SafetensorsFile(tmp_path / "nothing.safetensors")


WANTED = {"model.layers.0.a": (2, 3), "lm_head.weight": (5, 2)}
PREFIXES = {"model.language_model.": "model."}
IGNORED = ("model.visual.", "mtp.", "model.layers.78.")


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_either_prefix_matches_and_ignored_names_are_listed(prefix):
    found = {f"{prefix}layers.0.a": (2, 3), "lm_head.weight": (5, 2)}
    extra = {"mtp.fc.weight": (1,), "model.visual.x": (9,), f"{prefix}layers.78.q": (4,)}
    names, ignored = match_names(found | extra, WANTED, PREFIXES, IGNORED)
    assert names == {"model.layers.0.a": f"{prefix}layers.0.a", "lm_head.weight": "lm_head.weight"}
    assert list(names) == list(WANTED)
    assert ignored == tuple(extra)


def test_a_wanted_name_is_never_ignored():
    assert match_names(WANTED, WANTED, PREFIXES, ("model.",)).names == {name: name for name in WANTED}


def test_faults_are_named_and_counted():
    found = {"lm_head.weight": (2, 5), **{f"model.layers.{i}.b": (1,) for i in range(5)}}
    with pytest.raises(InputError) as error:
        match_names(found, WANTED, PREFIXES, IGNORED)
    message = _one_line(error)
    assert "1 missing (model.layers.0.a)" in message
    assert "5 unexpected (model.layers.0.b, model.layers.1.b, model.layers.2.b and 2 more)" in message
    assert "1 of another shape (lm_head.weight is [2, 5], wanted [5, 2])" in message


def test_a_tensor_under_both_prefixes_is_refused():
    with pytest.raises(InputError, match="1 given twice .model.layers.0.a and model.language_model.layers.0.a"):
        match_names(WANTED | {"model.language_model.layers.0.a": (2, 3)}, WANTED, PREFIXES, IGNORED)


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"x": np.ones(3)})
    before = path.read_bytes()
    with pytest.raises(UnsupportedError, match="'x' is complex128"):
        write_safetensors(path, {"x": np.ones(3, np.complex128)})

    monkeypatch.setattr(checkpoint, "save_file", lambda tensors, *rest, **kw: safetensors.numpy.save_file(
        {name: value + 1 for name, value in tensors.items()}, *rest, **kw))
    with pytest.raises(LongstrawError, match="does not read back"):
        write_safetensors(path, {"x": np.zeros(3)})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for parent in ("nowhere", "file"):
        with pytest.raises(InputError, match="cannot write") as error:
            write_safetensors(tmp_path / parent / "x.safetensors", {"x": np.ones(3)})
        _one_line(error)


def test_files_carry_the_users_permissions(tmp_path):
    write_safetensors(tmp_path / "x.safetensors", {"x": np.ones(3)})
    write_json(tmp_path / "x.json", {"x": [1, None]})
    (tmp_path / "plain").write_text("")
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "plain").stat().st_mode}
    assert read_json(tmp_path / "x.json") == {"x": [1, None]}
