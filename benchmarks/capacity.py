"""The published sizes, planned for GPUs that are not at hand: the table of docs/capacity.md.

    python benchmarks/capacity.py [NAME ..]

Runs the commands in CASES (all, or those named), each one a `longstraw plan`, and writes what they report to
benchmarks/results/capacity.json; cases that are not run keep what stands there. Needs the `plan` extra; no GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).with_name("results") / "capacity.json"

QWEN = "--model qwen3.6-27b --device h20 --mesh context=8 --response 8192"
GLM = "--model glm5.2 --device h20 --mesh context=1,expert=32 --response 1024 --weights bf16 --rank 8"
CASES = {
    "qwen 2M, G=2": f"{QWEN} --positions 2097152 --group 2",
    "qwen 2M, G=8": f"{QWEN} --positions 2097152 --group 8",
    "qwen 4.46M": f"{QWEN} --positions 4456448",
    "qwen largest": f"{QWEN} --positions 16777216 --largest",
    "qwen full 2M": f"{QWEN} --positions 2097152 --gradient full",
    "qwen full largest": f"{QWEN} --positions 5500000 --gradient full --entry-states host --largest",
    "one H200, device": "--device h200 --mesh context=1 --positions 1800000",
    "one H200, host": "--device h200 --mesh context=1 --positions 4456448 --memory host",
    "glm 2M": f"{GLM} --positions 2098176 --chunk 131072",
    "glm largest": f"{GLM} --positions 28000000 --chunk 131072 --largest",
    "glm full 2M": f"{GLM} --positions 2098176 --chunk 16384 --gradient full",
}


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        command = ["longstraw", "plan", *CASES[name].split()]
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "plan.json")
            program = [sys.executable, "-c", "from longstraw_jax.cli import main; main()"]
            subprocess.run([*program, *command[1:], "--json", str(out)], check=True)
            rows[name] = {"command": " ".join(command), **json.loads(out.read_text())}
        RESULTS.write_text(json.dumps({name: rows[name] for name in CASES if name in rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
