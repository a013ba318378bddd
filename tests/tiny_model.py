"""A llama of one layer with a byte-level tokenizer and a chat template, as a folder and as a GGUF file."""

from pathlib import Path
from unittest.mock import patch

import gguf
from checkpoint_cases import llama_config, write_gguf, write_hf_folder
from tokenizer_cases import BYTE_LEVEL, CHATML

from specinfer_jax.tokenizer import Tokenizer

METADATA = BYTE_LEVEL["metadata"] | {"tokenizer.ggml.pre": "smollm", "tokenizer.chat_template": CHATML}
TOKENIZER = Tokenizer.from_gguf(METADATA)
CONFIG = llama_config(vocab_size=len(METADATA["tokenizer.ggml.tokens"]), eos_token_id=2, num_hidden_layers=1)


def write_folder(path: Path, *, seed: int = 0, has_template: bool = True) -> Path:
    """A Hugging Face folder."""
    write_hf_folder(path, CONFIG, seed)
    for name, content in TOKENIZER.save_files().items():
        (path / name).write_bytes(content)
    if not has_template:
        (path / "tokenizer_config.json").unlink()
    return path


def write_file(path: Path, *, seed: int = 0) -> Path:
    """The same model as a GGUF file."""

    def add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
        writer.add_array("tokenizer.ggml.tokens", METADATA["tokenizer.ggml.tokens"])
        writer.add_token_types(METADATA["tokenizer.ggml.token_type"])
        writer.add_token_merges(METADATA["tokenizer.ggml.merges"])
        writer.add_tokenizer_pre("smollm")
        writer.add_chat_template(CHATML)

    # The writer of the cases knows placeholder tokens only.
    with patch.object(gguf.GGUFWriter, "add_token_list", add_tokenizer):
        write_gguf(path, CONFIG, seed)
    return path
