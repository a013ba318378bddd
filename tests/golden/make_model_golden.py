"""Write the decoder's goldens next to this file: what transformers computes for the models of model_golden_cases.py.

    python tests/golden/make_model_golden.py

Needs torch and transformers, which the project itself does not use. The models are built from the same deterministic
weights that the tests build; only logits, ids, frequencies and norms are stored.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from checkpoint_cases import write_hf_folder  # noqa: E402
from model_golden_cases import BFLOAT16, FAMILIES, GENERATE, ROPE, GenerateCase, GoldenCase  # noqa: E402

Arrays = dict[str, np.ndarray]


def load(case: GoldenCase | GenerateCase, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The case's model with eager attention."""
    with tempfile.TemporaryDirectory() as folder:
        write_hf_folder(Path(folder), case.config, case.seed)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.eval()


def logits_of(model: transformers.PreTrainedModel, case: GoldenCase) -> np.ndarray:
    """float32 `[tokens, vocabulary]` of one pass without a cache."""
    tokens = torch.tensor([case.tokens])
    # The mask keeps transformers from taking jumps in the positions for the borders of packed sequences.
    output = model(
        input_ids=tokens,
        position_ids=torch.tensor([case.positions]),
        attention_mask=torch.ones_like(tokens),
        use_cache=False,
    )
    return output.logits[0].float().numpy()


def families() -> Arrays:
    """Logits of every family and variant."""
    return {name: logits_of(load(case), case) for name, case in FAMILIES.items()}


def rope() -> Arrays:
    """Inverse frequencies, attention factor and logits of every scaling rule, after the pass."""
    arrays = {}
    for name, case in ROPE.items():
        model = load(case)
        arrays[f"{name}.logits"] = logits_of(model, case)
        embedding = model.model.rotary_emb
        arrays[f"{name}.inverse_frequencies"] = embedding.inv_freq.numpy()
        arrays[f"{name}.attention_factor"] = np.float64(embedding.attention_scaling)
    return arrays


def generate() -> Arrays:
    """Ids of greedy decoding, and the logits behind each where the rope moves with the context."""
    arrays = {}
    for name, case in GENERATE.items():
        output = load(case).generate(
            torch.tensor([case.prompt]),
            attention_mask=torch.ones(1, len(case.prompt), dtype=torch.long),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=case.new_tokens, do_sample=False, pad_token_id=0, eos_token_id=None
            ),
            output_logits=True,
            return_dict_in_generate=True,
        )
        arrays[f"{name}.ids"] = output.sequences[0, len(case.prompt) :].numpy().astype(np.int32)
        logits = torch.cat(output.logits).numpy()
        top = np.sort(logits, axis=1)
        arrays[f"{name}.margins"] = top[:, -1] - top[:, -2]
        if name.startswith("dynamic"):
            arrays[f"{name}.logits"] = logits
    return arrays


def bfloat16() -> Arrays:
    """Logits in bfloat16, those of the same (rounded) weights in float32, and the norms of one row alone."""
    arrays = {}
    for name, case in BFLOAT16.items():
        model = load(case, torch.bfloat16)
        arrays[f"{name}.logits"] = logits_of(model, case)
        layer = (model.model.decoder if "opt" in name else model.model).layers[0]
        norm = layer.self_attn_layer_norm if "opt" in name else layer.input_layernorm
        x = torch.linspace(-3, 5, case.config["hidden_size"]).to(torch.bfloat16)
        arrays[f"{name}.norm"] = norm(x[None])[0].float().numpy()
        arrays[f"{name}.float32_logits"] = logits_of(model.float(), case)
    return arrays


def main() -> None:
    """One compressed file per group."""
    torch.manual_seed(0)
    with torch.inference_mode():
        for group in (families, rope, generate, bfloat16):
            np.savez_compressed(HERE / f"model_{group.__name__}.npz", **group())


if __name__ == "__main__":
    main()
