"""Small tokenizers of both kinds, and the goldens that the reference implementations wrote for them."""

import json
from pathlib import Path

import pytest

from specinfer_jax.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden"
SMOLLM2 = json.loads((GOLDEN / "tokenizer_smollm2.json").read_text(encoding="utf-8"))
BYTE_LEVEL = json.loads((GOLDEN / "tokenizer_byte_level.json").read_text(encoding="utf-8"))
SENTENCEPIECE = json.loads((GOLDEN / "tokenizer_sentencepiece.json").read_text(encoding="utf-8"))

BYTES = Tokenizer.from_gguf(BYTE_LEVEL["metadata"] | {"tokenizer.ggml.pre": "smollm"})
PIECES = Tokenizer.from_gguf(SENTENCEPIECE["metadata"])
PIECES_WITHOUT_PREFIX = Tokenizer.from_gguf(SENTENCEPIECE["metadata"] | {"tokenizer.ggml.add_space_prefix": False})
KINDS = pytest.mark.parametrize(
    "tokenizer", [BYTES, PIECES, PIECES_WITHOUT_PREFIX], ids=["bytes", "pieces", "pieces_without_prefix"]
)
STREAMED = "🙂🙂 삼겹살 ďábelské 👨‍👩‍👧"
CHATML = (
    "{% for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}\n"
    "    {{- '<|im_end|>\\n' -}}\n{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def with_template(template: str) -> Tokenizer:
    return Tokenizer.from_gguf(
        BYTE_LEVEL["metadata"] | {"tokenizer.ggml.pre": "gpt-2", "tokenizer.chat_template": template}
    )


def save_folder(folder: Path, tokenizer: Tokenizer, settings: dict | None = None, **files: dict) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config": settings or {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
