"""How Qwen3.6's tensors are called on disk."""

from __future__ import annotations

PREFIXES = {"model.language_model.": "model."}
"""The published multimodal checkpoint's prefix of the text model; a text-only checkpoint has the plain one."""

IGNORED = ("model.visual.", "mtp.")
"""Vision tower and multi-token prediction: no part of the text model."""
