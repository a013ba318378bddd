"""Writes default_model.json: transformers' greedy ids for the default model's own file, in float32.

Run from a checkout with torch, transformers and this project installed:

    python tests/golden/make_default_model_golden.py
"""

import json
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]

from benchmarks.equality import margins_of
from benchmarks.peer_systems import torch_model
from specinfer_jax.checkpoint.gguf_header import read_metadata
from specinfer_jax.checkpoint.resolve import resolve
from specinfer_jax.tokenizer import Tokenizer

CHATS = (
    "Name three rivers of Europe and one city on each.",
    "Write a Python function that returns the sum of the squares of a list.",
    "Repeat the word tree ten times, separated by commas.",
)
TOKENS = 40


def main() -> None:
    path = resolve("smollm2-135m-instruct")
    tokenizer, model = Tokenizer.from_gguf(read_metadata(path)), torch_model(path)
    cases = []
    for text in CHATS:
        prompt = tokenizer.encode_chat([{"role": "user", "content": text}])
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS,
                min_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        margins = margins_of(torch.cat(output.logits).float().numpy())
        cases.append(
            {
                "text": text,
                "prompt_ids": prompt,
                "ids": output.sequences[0, len(prompt) :].tolist(),
                "smallest_margin": min(margins),
            }
        )
    target = Path(__file__).parent / "default_model.json"
    target.write_text(json.dumps(cases, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
