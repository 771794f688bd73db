"""GRPO on pre-sampled groups from Python: several updates, the prompt captured anew for each.

    python examples/train_on_groups.py path/to/qwen3.6 groups.jsonl out
"""

import sys

import longstraw_jax as ls


def main(model: str, groups: str, out: str) -> None:
    policy = ls.load_policy(model, ls.make_mesh(), lora=ls.LoraConfig(rank=16, alpha=32))
    transaction = ls.Transaction(
        policy, ls.read_groups(groups, ls.load_tokenizer(model)), ls.ObjectiveConfig(kl_beta=0.01), ls.OptimizerConfig("adamw", 1e-5),
        name=model)
    for _ in range(4):
        receipt = transaction.step()
        print(f"step {receipt.step}: loss {receipt.loss:.6g}, gradient norm {receipt.grad_norm:.6g}")
    ls.save_adapter(transaction.policy, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
