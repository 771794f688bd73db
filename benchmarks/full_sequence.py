"""One GRPO step on a long prompt: the conventional full-sequence step in PyTorch against capture, replay, sweep and update.

    python benchmarks/full_sequence.py --prompts 1024,4096 --groups 2,8 --budget-minutes 30

Both sides train the same LoRA adapter of the same random checkpoint on the same tokens, on one CPU device with the same
threads. The conventional step (`longstraw_jax/conventional/pytorch.py`) runs every member's prompt and response through
transformers under autograd. Ours is measured with the response gradient, and with the full one, which is PyTorch's. Each
measurement has a process of its own, and a row that could not be measured says why. Linux only: memory is read from /proc.
Needs torch, transformers, peft and matplotlib. Writes full_sequence.json, .md and .png.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
from full_sequence_report import CHECKPOINTED, FULL, GIB, METHODS, MIB, OURS, markdown, write

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SHAPE = dict(
    vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64,
    linear_value_head_dim=64, max_position_embeddings=1 << 20)
"""Qwen3.6's layer pattern and proportions: small enough for two cores, large enough that its products dominate."""
RANK, ALPHA, LEARNING_RATE = 16, 32, 1e-5
SIZES = dict(chunk=2048, queries=256, keys=512, logits=128, recurrence=64, block=2048)
"""The `BlockSizes` that were fastest at P = 4,096, or as fast and smaller."""

TOLERANCE = 2e-4  # of log-probabilities, between the two frameworks in float32
LONG, REPEATS = 60.0, 3  # a step that takes more seconds is measured once, a shorter one three times


@dataclass(frozen=True)
class Case:
    """One measurement."""

    method: str
    prompt: int
    group: int
    response: int

    def data(self) -> tuple[np.ndarray, list[np.ndarray], list[float]]:
        """(prompt ids [P], G responses [R], G advantages), the same for every method."""
        rng = np.random.default_rng(0)
        prompt = rng.integers(0, SHAPE["vocab_size"], self.prompt)
        responses = [rng.integers(0, SHAPE["vocab_size"], self.response) for _ in range(self.group)]
        return prompt, responses, rng.standard_normal(self.group).tolist()

    def results_file(self, directory: Path) -> Path:
        """What the first step computed: `logprobs` [G, R], and the gradient by parameter name."""
        return directory / f"{METHODS.index(self.method)}-{self.prompt}-{self.group}.npz"


def prepare(directory: Path) -> None:
    """Saves a random checkpoint and a PEFT adapter whose B is not zero, so that every gradient is at work."""
    import torch
    from peft import LoraConfig, get_peft_model

    from longstraw_jax.models.qwen36.model import LINEAR_LAYERS
    from torch_reference import build_tiny_qwen

    model = build_tiny_qwen(directory / "model", **SHAPE)
    adapted = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(LINEAR_LAYERS)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02, generator=generator)
    adapted.save_pretrained(directory / "adapter")


class TorchStep:
    """The conventional step. Calling it makes one and returns its log-probabilities [G, R] and its gradient."""

    def __init__(self, case: Case, directory: Path, threads: int):
        import torch
        from peft import PeftModel

        from torch_reference import load_torch

        torch.set_num_threads(threads)
        base = load_torch(directory / "model", attention="sdpa")
        self.case, self.data = case, case.data()
        self.model = PeftModel.from_pretrained(base, directory / "adapter", is_trainable=True)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=LEARNING_RATE, weight_decay=0.0)

    def warm_up(self) -> None:
        prompt, responses, advantages = self.data
        self._gradient(prompt[:64], responses[:1], advantages[:1])

    def _gradient(self, prompt, responses, advantages) -> list:
        from longstraw_jax.conventional.pytorch import response_step

        self.optimizer.zero_grad(set_to_none=True)
        return response_step(self.model, prompt, responses, advantages, detach_prompt=False,
                             gradient_checkpointing=self.case.method == CHECKPOINTED)[1]

    def __call__(self) -> dict[str, np.ndarray]:
        logprobs = self._gradient(*self.data)
        self.optimizer.step()
        gradient = {name.removeprefix("base_model.model.").removesuffix(".default.weight"): p.grad.numpy()
                    for name, p in self.model.named_parameters() if p.grad is not None}
        return {"logprobs": np.stack([row.numpy() for row in logprobs]), **gradient}

    def figures(self) -> dict:
        return {"compile_seconds": 0.0}


class LongstrawStep:
    """Capture, replay, sweep and update. The warm-up is a whole step, which compiles; each step starts from the same policy."""

    def __init__(self, case: Case, directory: Path, threads: int):
        import longstraw_jax as ls
        from longstraw_jax.capture import capture_program
        from longstraw_jax.members import members_program
        from longstraw_jax.sweep import sweep_program

        self.kind = "full" if case.method == FULL else "response"
        mesh, self.config = ls.make_mesh(), ls.OptimizerConfig(learning_rate=LEARNING_RATE)
        self.policy = ls.load_policy(directory / "model", mesh, adapter=directory / "adapter", sizes=ls.BlockSizes(**SIZES))
        prompt, responses, advantages = case.data()
        members = [ls.Response(ids, advantage=a) for ids, a in zip(responses, advantages, strict=True)]
        self.group, model = ls.Group(prompt, members), self.policy.model
        self.programs = {"capture": capture_program(model, mesh), "replay": members_program(model, mesh, self.kind == "full"),
                         "sweep": sweep_program(model, mesh)}
        self.seconds: dict[str, list[float]] = {name: [] for name in ("capture", "replay", "sweep", "update")}
        self.moments = ls.init_optimizer(self.policy, self.config)

    def warm_up(self) -> None:
        self()
        for seconds in self.seconds.values():
            seconds.clear()

    @contextlib.contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[stage].append(time.perf_counter() - begun)

    def __call__(self) -> dict[str, np.ndarray]:
        import jax

        import longstraw_jax as ls
        from longstraw_jax.models.parameters import to_host

        with self._clock("capture"):
            state = ls.capture(self.policy, self.group.prompt_ids, gradient=self.kind)
            jax.block_until_ready(state.rows)
        with self._clock("replay"):
            replayed = ls.replay(self.policy, state, self.group, gradient=self.kind)
            jax.block_until_ready(replayed.gradient)
        with self._clock("sweep"):
            replayed = ls.sweep(self.policy, state, self.group.prompt_ids, replayed, gradient=self.kind)
            jax.block_until_ready(replayed.gradient)
        gradient = to_host(replayed.gradient, self.policy.model.abstract_parameters()[0])
        with self._clock("update"):
            moved = ls.update(self.policy, self.moments, replayed.gradient, self.config)
            jax.block_until_ready(moved.policy.trainable)
        self.moments = moved.optimizer_state
        return {"logprobs": np.stack(replayed.logprobs), **gradient}

    def figures(self) -> dict:
        temporary = {name: max((x.memory_analysis().temp_size_in_bytes for x in program.executables.values()), default=0)
                     for name, program in self.programs.items()}
        return {"compile_seconds": sum(program.compile_seconds for program in self.programs.values()),
                "temporary_bytes": temporary, "stages": {name: statistics.median(x) for name, x in self.seconds.items()}}


def resident(field: str) -> int:
    """Bytes of this process: VmRSS (now), VmHWM (the peak since it was reset) or VmSize (address space)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":"))
    return int(line.split()[1]) << 10


def measure(case: Case, directory: Path, threads: int, limit: int) -> dict:
    """Median seconds of a step, and how far the process grew above what it held before: weights, moments, programs."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])  # before either side starts its threads
    step = (LongstrawStep if case.method in (OURS, FULL) else TorchStep)(case, directory, threads)
    step.warm_up()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the warm-up freed shall not hide growth
    before, seconds, busy = resident("VmRSS"), [], []
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    resource.setrlimit(resource.RLIMIT_AS, (resident("VmSize") + limit,) * 2)
    while len(seconds) < (1 if seconds and seconds[0] > LONG else REPEATS):
        begun, used = time.perf_counter(), time.process_time()
        try:
            results = step()
        except (MemoryError, RuntimeError) as error:
            refused = any(x in str(error) for x in ("allocate memory", "RESOURCE_EXHAUSTED"))
            if not refused and not isinstance(error, MemoryError):
                raise
            return {"status": f"out of memory: the step failed at a limit of {limit / GIB:.1f} GiB"}
        if not seconds:
            np.savez(case.results_file(directory), **results)
        seconds.append(time.perf_counter() - begun)
        busy.append(time.process_time() - used)
    return {"status": "measured", "seconds": statistics.median(seconds), "all_seconds": seconds, "cpu_seconds": busy,
            "peak_bytes": resident("VmHWM") - before, "held_bytes": before, **step.figures()}


def in_child(job: dict, timeout: float | None = None) -> dict:
    """Runs a job in a fresh process; its last line is the result."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error",
                                "OMP_NUM_THREADS": str(job.get("threads", 1))}
    try:
        done = subprocess.run([sys.executable, __file__, "--job", json.dumps(job)], env=environment, text=True,
                              timeout=timeout, capture_output=True)
    except subprocess.TimeoutExpired:
        return {"status": f"left out: stopped after {timeout / 60:.0f} min, at the end of the budget"}
    if done.returncode == -9:
        return {"status": "out of memory: the system ended the process"}
    if done.returncode:
        raise RuntimeError(f"{job} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def child(job: dict) -> dict:
    directory = Path(job["directory"])
    if "case" in job:
        return measure(Case(**job["case"]), directory, job["threads"], job["limit"])
    prepare(directory)
    return {}


def free_bytes(most_gib: float | None) -> int:
    """What a measurement may use: what is available less 2 GiB for everything else, and no more than `most_gib`."""
    line = next(x for x in Path("/proc/meminfo").read_text().splitlines() if x.startswith("MemAvailable"))
    free = max(GIB, (int(line.split()[1]) << 10) - 2 * GIB)
    return min(free, int(most_gib * GIB)) if most_gib else free


def refusal(case: Case, rows: list[dict], limit: int, seconds_left: float) -> dict | None:
    """Why a case is not worth starting, by the figures of its method so far; peaks grow with the sequence, times faster."""
    earlier = [r for r in rows if r["method"] == case.method and r["status"] == "measured"]
    if not earlier:
        return None if seconds_left > 0 else {"status": "left out: the time budget was used up"}
    last = max(earlier, key=lambda r: (r["prompt"], r["group"]))
    longer = (case.prompt + case.response) / (last["prompt"] + last["response"])
    peak = int(last["peak_bytes"] * longer)
    if case.method not in (OURS, FULL) and peak > limit:
        return {"status": f"out of memory: needs about {peak / GIB:.0f} GiB (from P = {last['prompt']:,}), "
                          f"{limit / GIB:.0f} GiB are there; not started", "estimated_peak_bytes": peak}
    one = last["seconds"] * longer ** (1.5 if longer > 1 else 1) * case.group / last["group"]
    total = one * (1 if one > LONG else REPEATS) + 20 + last["compile_seconds"]
    if total > seconds_left:
        left = f"{max(0.0, seconds_left) / 60:.1f} min of the budget were left"
        return {"status": f"left out: would take about {total / 60:.1f} min, {left}"}
    return None


def compare(args: argparse.Namespace, directory: Path) -> list[dict]:
    """All rows, shortest first, with their differences from ours."""
    rows, end = [], time.monotonic() + 60 * args.budget_minutes
    in_child({"directory": str(directory)})
    for case in (Case(m, p, g, args.response) for p in args.prompts for g in args.groups for m in METHODS):
        limit, left = free_bytes(args.memory_gib), end - time.monotonic()
        job = {"directory": str(directory), "case": asdict(case), "threads": args.threads, "limit": limit}
        row = asdict(case) | (refusal(case, rows, limit, left) or in_child(job, timeout=max(60.0, left)))
        ours = Case(FULL, case.prompt, case.group, case.response).results_file(directory)
        if row["status"] == "measured" and case.method not in (OURS, FULL) and ours.exists():
            row |= differences(np.load(case.results_file(directory)), np.load(ours))
        rows.append(row)
        measured = row["status"] == "measured"
        figures = f"{row['seconds']:.2f} s, {row['peak_bytes'] / MIB:,.0f} MiB" if measured else row["status"]
        print(f"P={case.prompt:,} G={case.group} {case.method}: {figures}", flush=True)
    return rows


def differences(theirs: dict[str, np.ndarray], ours: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest difference of log-probabilities, and of a parameter's gradient relative to its norm."""
    names = [name for name in theirs if name != "logprobs"]
    assert sorted(names) == sorted(name for name in ours if name != "logprobs"), "not the same parameters"
    return {"logprob_difference": float(np.abs(theirs["logprobs"] - ours["logprobs"]).max()),
            "gradient_difference": max(float(np.linalg.norm(theirs[n] - ours[n]) / np.linalg.norm(theirs[n])) for n in names)}


def machine(threads: int) -> dict:
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    cpu = next((value.strip() for name, _, value in lines if name.strip() == "model name"), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": threads, "memory_gib": round(memory / GIB, 1),
            "python": platform.python_version(), "date": datetime.date.today().isoformat(),
            **{name: metadata.version(name) for name in ("jax", "torch", "transformers", "peft")}}


def numbers(text: str) -> list[int]:
    return sorted({int(x) for x in text.split(",")})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=numbers, default=[1024, 4096, 16384], help="prompt lengths, separated by commas")
    parser.add_argument("--groups", type=numbers, default=[2, 8], help="group sizes, separated by commas")
    parser.add_argument("--response", type=int, default=128, help="tokens of each response")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where the results go")
    parser.add_argument("--budget-minutes", type=float, default=30, help="rows beyond it are left out, and say so")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores that both sides use")
    parser.add_argument("--memory-gib", type=float, help="memory of one measurement (default: what is available less 2)")
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        print("\n" + json.dumps(child(args.job)))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        rows = compare(args, Path(directory))
    result = {"machine": machine(args.threads), "model": SHAPE, "sizes": SIZES, "rank": RANK, "rows": rows}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "full_sequence.json").write_text(json.dumps(result, indent=1) + "\n")
    write(result, args.out)
    print(markdown(result))
    far = [r for r in rows if r.get("logprob_difference", 0) > TOLERANCE]
    for r in far:
        what = f"P={r['prompt']} G={r['group']} {r['method']}"
        print(f"{what}: log-probabilities differ by {r['logprob_difference']:.1e}, more than {TOLERANCE}", file=sys.stderr)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
