"""What the prompt's share of the gradient is worth: the response gradient and the full one on a task that needs the prompt.

    python benchmarks/prompt_gradient.py --seeds 3 --steps 60

Key lookup: pairs of a key and a value stand scattered in a long prompt of filler; the prompt ends in one of the keys, and the
response is its value. A small model learns it at 32 tokens by supervision; what is then compared is GRPO at a longer prompt,
from the same weights, prompts and random numbers: once with the response gradient, once with the full one. Also the cosine
between the two gradients, by prompt and response length and by layer. Writes prompt_gradient.json, .md and .png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import longstraw_jax as ls  # noqa: E402
from longstraw_jax.loading import to_weights  # noqa: E402
from longstraw_jax.models import parameters  # noqa: E402
from longstraw_jax.models.checkpoint import write_json, write_safetensors  # noqa: E402
from longstraw_jax.models.qwen36.model import Qwen36Model  # noqa: E402
from longstraw_jax.models.qwen36.spec import Qwen36Spec, spec_to_hf  # noqa: E402
from longstraw_jax.policy import random_policy  # noqa: E402
from longstraw_jax.sharding import Owners  # noqa: E402

KEYS, VALUES, FILLERS = 4, 16, 16
PAIRS, TAUGHT, BATCH = 4, 32, 64  # pairs in a prompt; prompt tokens and sequences a step in supervised training
SPEC = Qwen36Spec(
    vocab_size=KEYS + VALUES + FILLERS, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16, full_attention_interval=2, max_position_embeddings=1 << 16)
SIZES = ls.BlockSizes(chunk=1024, queries=256, keys=512, logits=128)
LORA = ls.LoraConfig(rank=8, alpha=16)
GROUP, PROMPTS_A_STEP = 8, 4


def lookup(rng: np.random.Generator, length: int, answers: int) -> tuple[np.ndarray, np.ndarray]:
    """(prompt [length] that ends in a key, response [2 answers - 1]: its value, then further keys with their values)."""
    keys, values = rng.permutation(KEYS)[:PAIRS], KEYS + rng.integers(0, VALUES, PAIRS)
    prompt = KEYS + VALUES + rng.integers(0, FILLERS, length)
    at = 2 * np.sort(rng.permutation((length - 1) // 2)[:PAIRS])
    prompt[at], prompt[at + 1] = keys, values
    asked = rng.permutation(PAIRS)[np.arange(answers) % PAIRS]
    prompt[-1] = keys[asked[0]]
    return prompt, np.stack([keys[asked], values[asked]], 1).reshape(-1)[1:]


def started(x: jax.Array) -> jax.Array:
    """A first matrix scaled for a width this small; the published models' spread would learn nothing in a few hundred steps."""
    return x * (x.shape[-1] ** -0.5 / 0.02) if x.ndim == 2 else x


def teach(directory: Path, steps: int, seed: int = 0) -> list[float]:
    """Supervised training on short sequences; saves a checkpoint, returns the losses."""
    mesh = ls.make_mesh()
    policy = random_policy(Qwen36Model(SPEC, Owners.of(mesh), "float32", None, SIZES), mesh, seed)
    weights, rng = {name: started(jnp.asarray(x)) for name, x in to_weights(policy).items()}, np.random.default_rng(seed)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, 50, steps), weight_decay=0.01)

    def loss(weights, ids):
        logprobs = jax.vmap(lambda row: policy.model.reference_logprobs(weights, row, 0))(ids)
        return -logprobs[:, TAUGHT - 1 :: 2].mean()  # the values after each key that is asked for

    @jax.jit
    def step(weights, state, ids):
        value, gradient = jax.value_and_grad(loss)(weights, ids)
        change, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state, value

    state, losses = optimizer.init(weights), []
    for i in range(steps):
        ids = np.stack([np.concatenate(lookup(rng, TAUGHT, PAIRS)) for _ in range(BATCH)])
        weights, state, value = step(weights, state, ids)
        losses.append(float(value))
        if i % 100 == 0:
            print(f"taught {i}: loss {np.mean(losses[-100:]):.3f}", flush=True)
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", {name: np.asarray(x) for name, x in weights.items()})
    write_json(directory / "config.json", spec_to_hf(SPEC))
    return losses


def load(directory: Path, seed: int) -> ls.Policy:
    return ls.load_policy(directory, ls.make_mesh(), lora=LORA, sizes=SIZES, seed=seed)


def flat(gradient: dict[str, np.ndarray], part: str = "") -> np.ndarray:
    return np.concatenate([x.ravel() for name, x in sorted(gradient.items()) if part in name])


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def both_gradients(policy: ls.Policy, group: ls.Group) -> tuple[dict, dict]:
    """(response gradient, full gradient) by parameter name."""
    abstract = policy.model.abstract_parameters()[0]
    state = ls.capture(policy, group.prompt_ids, gradient="full")
    replayed = ls.replay(policy, state, group, gradient="full")
    response = parameters.to_host(replayed.gradient, abstract)
    return response, parameters.to_host(ls.sweep(policy, state, group.prompt_ids, replayed).gradient, abstract)


def cosines(policy: ls.Policy, prompts: list[int], answers: list[int], draws: int) -> list[dict]:
    """Of the two gradients, summed over groups whose members' advantages are +1 and -1: all together and by layer."""
    rows, rng = [], np.random.default_rng(1)
    for length in prompts:
        for n in answers:
            found = []
            for _ in range(draws):
                prompt, right = lookup(rng, length, n)
                wrong = np.where(np.arange(len(right)) % 2, right, KEYS + rng.integers(0, VALUES, len(right)))
                members = (ls.Response(right, advantage=1.0), ls.Response(wrong, advantage=-1.0))
                found.append(both_gradients(policy, ls.Group(prompt, members)))
            response, full = ({name: sum(f[i][name] for f in found) for name in found[0][0]} for i in (0, 1))
            rows.append({"prompt": length, "response": len(right), "cosine": cosine(flat(response), flat(full)),
                         "share": float(np.linalg.norm(flat(full) - flat(response)) / np.linalg.norm(flat(full))),
                         "layers": [cosine(flat(response, part), flat(full, part))
                                    for part in (f"layers.{i}." for i in range(SPEC.num_hidden_layers))]})
            print(f"P={length} R={len(right)}: cosine {rows[-1]['cosine']:.3f}, layers "
                  + " ".join(f"{x:.3f}" for x in rows[-1]["layers"]), flush=True)
    return rows


def learn(policy: ls.Policy, kind: str, length: int, steps: int, rate: float, seed: int) -> dict:
    """GRPO from sampled one-token answers. The curve is the probability of the right answer on the step's new prompts."""
    config, rng, rewards, begun = ls.OptimizerConfig("adamw", rate), np.random.default_rng(100 + seed), [], time.perf_counter()
    moments = ls.init_optimizer(policy, config)
    every_token = [ls.Response([token]) for token in range(SPEC.vocab_size)]
    for _ in range(steps):
        gradient, reward = None, []
        for _ in range(PROMPTS_A_STEP):
            prompt, right = lookup(rng, length, 1)
            state = ls.capture(policy, prompt, gradient=kind)
            logprobs = np.concatenate(ls.score(policy, state, every_token))
            drawn = np.argmax(logprobs + rng.gumbel(size=(GROUP, len(logprobs))), axis=1)
            reward.append(float(np.exp(logprobs[right[0]])))
            group = ls.Group(prompt, tuple(ls.Response([token], reward=float(token == right[0])) for token in drawn))
            if not group.advantages.any():
                continue
            replayed = ls.replay(policy, state, group, gradient=kind, accumulator=gradient,
                                 weights=np.full(GROUP, 1 / GROUP / PROMPTS_A_STEP))
            gradient = ls.sweep(policy, state, prompt, replayed, gradient=kind).gradient
        rewards.append(float(np.mean(reward)))
        if gradient is not None:
            moved = ls.update(policy, moments, gradient, config)
            policy, moments = moved.policy, moved.optimizer_state
    seconds = time.perf_counter() - begun
    print(f"{kind}, seed {seed}: {np.mean(rewards[:5]):.3f} -> {np.mean(rewards[-5:]):.3f}, {seconds:.0f} s", flush=True)
    return {"gradient": kind, "seed": seed, "rewards": rewards, "seconds": seconds}


def draw(result: dict, path: Path) -> None:
    """Cosine against the prompt's length, by layer, and the reward curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2))
    rows = result["cosines"]
    for n in sorted({r["response"] for r in rows}):
        mine = [r for r in rows if r["response"] == n]
        left.plot([r["prompt"] for r in mine], [r["cosine"] for r in mine], marker="o", label=f"R = {n}")
    longest = [r for r in rows if r["prompt"] == max(x["prompt"] for x in rows)]
    for r in longest:
        middle.plot(range(len(r["layers"])), r["layers"], marker="o", label=f"R = {r['response']}")
    left.set(xscale="log", xlabel="prompt tokens", ylabel="cosine, response to full gradient", ylim=(-0.1, 1.05))
    middle.set(xlabel=f"layer, at P = {longest[0]['prompt']:,}", xticks=range(SPEC.num_hidden_layers), ylim=(-0.1, 1.05))
    for kind, color in (("response", "tab:red"), ("full", "tab:green")):
        curves = np.array([c["rewards"] for c in result["curves"] if c["gradient"] == kind])
        smooth = np.stack([np.convolve(c, np.ones(5) / 5, "valid") for c in curves])
        steps = np.arange(smooth.shape[1]) + 3
        right.plot(steps, smooth.T, color=color, alpha=0.25)
        right.plot(steps, smooth.mean(0), color=color, label=f"{kind} gradient")
    right.set(xlabel="GRPO steps", ylabel=f"p(right answer) at P = {result['length']:,}")
    for ax in (left, middle, right):
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=140)


def markdown(result: dict) -> str:
    lines = ["# The response gradient and the full one on key lookup", "",
             f"Model: {json.dumps(dataclasses.asdict(SPEC))}. LoRA rank {LORA.rank} on every linear layer.", "",
             "| prompt | response | cosine | prompt's share | by layer |", "|--:|--:|--:|--:|---|"]
    lines += [f"| {r['prompt']:,} | {r['response']} | {r['cosine']:.3f} | {r['share']:.3f} | {', '.join(f'{x:.3f}' for x in r['layers'])} |"
              for r in result["cosines"]]
    lines += ["", f"GRPO at P = {result['length']:,}, {PROMPTS_A_STEP} prompts of {GROUP} answers a step, AdamW at {result['rate']}:", "",
              "| gradient | seed | p(right), first 5 steps | last 5 steps | mean | seconds |", "|---|--:|--:|--:|--:|--:|"]
    lines += [f"| {c['gradient']} | {c['seed']} | {np.mean(c['rewards'][:5]):.3f} | {np.mean(c['rewards'][-5:]):.3f} | "
              f"{np.mean(c['rewards']):.3f} | {c['seconds']:.0f} |" for c in result["curves"]]
    return "\n".join([*lines, "", "![cosines and reward curves](prompt_gradient.png)", ""])


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--taught-steps", type=int, default=1500, help="supervised steps before")
    parser.add_argument("--checkpoint", type=Path, help="directory to keep the taught model in, or to take it from")
    parser.add_argument("--length", type=int, default=4096, help="prompt tokens of the GRPO runs")
    parser.add_argument("--steps", type=int, default=60, help="GRPO steps of a run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate of the GRPO runs")
    parser.add_argument("--prompts", type=numbers, default=[64, 256, 1024, 4096], help="prompt lengths of the cosines")
    parser.add_argument("--answers", type=numbers, default=[1, 8, 64], help="answers in a response of the cosines")
    parser.add_argument("--draws", type=int, default=4, help="groups that a cosine's gradients are summed over")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="where the results go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.checkpoint or Path(scratch)
        taught = [] if (directory / "config.json").exists() else teach(directory, args.taught_steps)
        result = {"length": args.length, "rate": args.rate, "taught": taught,
                  "cosines": cosines(load(directory, 0), args.prompts, args.answers, args.draws)}
        result["curves"] = [learn(load(directory, seed), kind, args.length, args.steps, args.rate, seed)
                            for seed in range(args.seeds) for kind in ("response", "full")]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "prompt_gradient.json").write_text(json.dumps(result, indent=1) + "\n")
    (args.out / "prompt_gradient.md").write_text(markdown(result))
    draw(result, args.out / "prompt_gradient.png")


if __name__ == "__main__":
    main()
