"""Meshes and fake devices."""

import os
import subprocess
import sys

import jax
import pytest

from longstraw_jax.errors import InputError
from longstraw_jax.sharding import AXES, fake_cpu_devices, make_mesh, parse_mesh


@pytest.mark.parametrize(("text", "degrees"), [
    ("context=8", {"context": 8, "expert": 1}),
    ("context=2,expert=4", {"context": 2, "expert": 4}),
    (" expert = 3 ", {"context": 1, "expert": 3}),
    ("", {"context": 1, "expert": 1}),
])
def test_parse_mesh(text, degrees):
    assert parse_mesh(text) == degrees


@pytest.mark.parametrize("text", [
    "context", "context=", "context=0", "context=-1", "context=1.5", "data=2", "8", "context=2;expert=2",
])
def test_parse_mesh_refuses(text):
    with pytest.raises(InputError, match="wanted for example context=8") as caught:
        parse_mesh(text)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("context", "expert"), [(1, 1), (8, 1), (2, 3), (1, 5)])
def test_make_mesh_takes_the_first_devices_row_by_row(context, expert):
    mesh = make_mesh(context, expert)
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == (context, expert)
    assert mesh.devices.reshape(-1).tolist() == jax.devices()[: context * expert]


def test_make_mesh_of_given_devices():
    devices = jax.devices()[:3:-1]
    assert make_mesh(2, 2, devices).devices.reshape(-1).tolist() == devices


@pytest.mark.parametrize("degrees", [(0, 1), (1, 0), (-2, 1)])
def test_make_mesh_refuses_degrees_below_one(degrees):
    with pytest.raises(InputError, match="wanted whole numbers >= 1"):
        make_mesh(*degrees)


def test_make_mesh_refuses_more_devices_than_there_are():
    with pytest.raises(InputError, match=r"needs 9 devices and there are 8 .*fake_cpu_devices\(9\)"):
        make_mesh(3, 3)


def test_fake_devices_of_this_session():
    assert (jax.device_count(), jax.default_backend()) == (8, "cpu")
    fake_cpu_devices(8)  # asking again for what there is changes nothing
    with pytest.raises(InputError, match="already runs with 8 cpu devices, 4 fake CPU devices were asked for"):
        fake_cpu_devices(4)
    with pytest.raises(InputError, match="0 fake CPU devices asked for"):
        fake_cpu_devices(0)


def test_fake_devices_of_a_fresh_process():
    # With more devices than threads in the client's pool, collectives in loops wait for ever.
    script = ("import os; from longstraw_jax.sharding import fake_cpu_devices; fake_cpu_devices(12); import jax; "
              "print(jax.device_count(), os.environ['NPROC'])")
    environment = {name: value for name, value in os.environ.items() if name not in ("NPROC", "XLA_FLAGS")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    devices, threads = map(int, done.stdout.split())
    assert devices == 12 < threads
