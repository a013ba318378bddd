"""Write the tokenizer goldens next to this file, from the reference implementations.

    python tests/golden/make_tokenizer_golden.py --model SmolLM2-135M-Instruct.Q4_1.gguf

Needs transformers, sentencepiece, gguf and llama-cpp-python, none of which the project itself uses for tokens. Every
golden holds ids on which two independent implementations agree; where a third differs, its ids are kept beside them
with the reason in `why`.
"""

import argparse
import json
import pydoc_data.topics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gguf
import llama_cpp
import sentencepiece
import tokenizers
import transformers
from tokenizers import AddedToken, normalizers, pre_tokenizers, trainers

HERE = Path(__file__).parent

PROBES = [
    "<s> Hello",
    "[INST] hi",
    " two  spaces",
    "Café — 123 😊",
    "",
    " ",
    "\n",
    "a\tb\t\tc  d   e    f\n\n\n  g\r\nh   ",
    "def f(x: int) -> list[int]:\n    if x >= 10:\n        return [x ** 2, 0x1F]\n    return None  # 3.14e-5\n",
    "x 1  2   3 1234567 12½ ٣٤ Ⅷ",
    "I'm sure they'll say it's we've DON'T",
    "深層学習のモデル、你好世界。삼겹살 ďábelské žluťoučký кофе",
    "🙂🙂 삼겹살 ďábelské 👨‍👩‍👧 🇨🇿",
    "https://example.org/a_b?c=d&e=%20#f",
    '{"key": [1, 2.5, null], \'other\': "\\u00e9"}',
    "\u00a0no\u2003break\u200bzero \ufeff",
    "مرحبا بالعالم שלום नमस्ते",
    "!!! ??? ... ---- ==== ~~~~ $5.00 <b>",
]
SPECIAL_PROBES = {
    "smollm2": [
        "<|im_start|>user\nhi 3  4<|im_end|>\n<|im_start|>assistant\n",
        "a<|im_end|>b <|im_end|> c  <|endoftext|>1",
        "<|im_start|><|im_start|>",
        "<|im_start |> <im_end>",
    ],
    "sentencepiece": ["a</s> b", "<s>[INST] hi [/INST] there</s>", "</s></s>  x", "x<unk>y", "[INST]a[INST]  b"],
}
DECOMPOSED = "Cafe\u0301 n\u0303o A\u030a"
METASPACE = "Metaspace takes a leading space for the prefix; sentencepiece, llama.cpp and the published files do not."
NO_DIGITS = (
    "The conversion drops the Digits step of SmolLM2's tokenizer.json, so a space sticks to the number after it."
)


def write(name: str, content: dict) -> None:
    """One compact JSON file, without escapes."""
    text = json.dumps(content, ensure_ascii=False, indent=None, separators=(",", ":"))
    (HERE / f"tokenizer_{name}.json").write_text(text + "\n", encoding="utf-8")


def write_gguf(path: Path, metadata: dict[str, object]) -> None:
    """A GGUF file with a vocabulary and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def llama_cpp_ids(path: Path, texts: Sequence[str]) -> list[list[int]]:
    """Ids by llama.cpp, special tokens read, BOS left out."""
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]


def probes(texts: Sequence[str], ids: list[list[int]], other: list[list[int]], name: str, why: str) -> list[dict]:
    """One entry a text; the differing ids of the third implementation where there are some."""
    entries = []
    for text, right, theirs in zip(texts, ids, other, strict=True):
        entry = {"text": text, "ids": right}
        entries.append(entry if right == theirs else entry | {name: theirs, "why": why})
    return entries


def smollm2(model: Path) -> None:
    """The default model: the published tokenizer.json's pipeline around the file's vocabulary, and llama.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.gguf").symlink_to(model.resolve())
        converted = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    texts = PROBES + SPECIAL_PROBES["smollm2"]
    by_conversion = [converted.encode(text, add_special_tokens=False) for text in texts]
    published = converted._tokenizer
    published.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ids = [converted.encode(text, add_special_tokens=False) for text in texts]
    assert ids == llama_cpp_ids(model, texts)
    chat = [
        {"role": "user", "content": "What is 2  + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Danke 🙂"},
    ]
    write(
        "smollm2",
        {
            "probes": probes(texts, ids, by_conversion, "transformers_gguf_ids", NO_DIGITS),
            "decoded": [
                {
                    "ids": row,
                    "text": converted.decode(row),
                    "text_without_special": converted.decode(row, skip_special_tokens=True),
                }
                for row in ids
            ],
            "chat": {
                "messages": chat,
                "text": converted.apply_chat_template(chat, tokenize=False, add_generation_prompt=True),
                "text_without_prompt": converted.apply_chat_template(chat, tokenize=False),
                "ids": converted.apply_chat_template(chat, add_generation_prompt=True, return_dict=False),
            },
        },
    )


def corpus() -> list[str]:
    """English, code and a little of other scripts, from the standard library."""
    topics = pydoc_data.topics.topics
    lines = [line for name in sorted(topics)[:40] for line in topics[name].splitlines() if line.strip()]
    return lines + ["Café žluťoučký 삼겹살 2024 — naïve"] * 20


def byte_level() -> None:
    """A small byte-level vocabulary under every way to cut text: ids by llama.cpp."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    # A token that no merges lead to: taken whole only where merges are ignored for words of the vocabulary.
    tokens += ["Ġzyzzyva", "<user  defined>", "[PAD702]", "[PAD703]"]
    types = [3] * len(special) + [1] * (len(tokens) - len(special) - 3) + [4, 5, 5]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    texts = [*PROBES, "a zyzzyva  zyzzyva 12345", "x<user  defined> y<|im_end|>  1", "A1b22C333 'S x=>y a.b,c"]
    ids_by_pre = {}
    names = ["gpt-2", "smollm", "starcoder", "default", "llama-bpe", "smaug-bpe", "qwen2", "deepseek-r1-qwen", "tekken"]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = Path(folder) / f"{name}.gguf"
            write_gguf(path, metadata | {"tokenizer.ggml.pre": name})
            ids_by_pre[name] = llama_cpp_ids(path, texts)
    write(
        "byte_level",
        {
            "metadata": metadata,
            "texts": texts,
            "ids_by_pre": ids_by_pre,
            "qwen2_decomposed": {"text": DECOMPOSED, "ids": qwen2_ids(metadata, DECOMPOSED)},
            "gpt2_folder": gpt2_folder(metadata, texts),
        },
    )


def qwen2_ids(metadata: dict, text: str) -> list[int]:
    """Ids by transformers' own Qwen2 tokenizer, which composes characters first; llama.cpp does not."""
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"][:-3])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    return transformers.Qwen2Tokenizer(vocab=vocabulary, merges=merges).encode(text)


def gpt2_folder(metadata: dict, texts: Sequence[str]) -> dict:
    """A folder in OPT's form (vocab.json, merges.txt, BOS added) as transformers reads it."""
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        "add_prefix_space": False,
        "bos_token": {
            "__type": "AddedToken",
            "content": "<|endoftext|>",
            "normalized": True,
            "lstrip": False,
            "rstrip": False,
        },
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<pad>",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"][:-3])}
        (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
        merges = "\n".join(["#version: 0.2", *metadata["tokenizer.ggml.merges"]])
        (folder / "merges.txt").write_text(merges + "\n", encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "config.json").write_text(json.dumps({"model_type": "opt"}), encoding="utf-8")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*texts, "a<pad> b<|im_end|>"]
    return {
        "config": config,
        "texts": texts,
        "ids": [tokenizer.encode(text) for text in texts],
        "length": len(tokenizer),
    }


def sentencepiece_bpe() -> None:
    """A small sentencepiece model with byte fallback, as llama's: published form, sentencepiece itself, llama.cpp."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus.txt").write_text("\n".join(corpus()), encoding="utf-8")
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "corpus.txt"),
            model_prefix=str(folder / "tokenizer"),
            vocab_size=700,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            character_coverage=0.999,
            user_defined_symbols=["[INST]"],
            num_threads=1,
            minloglevel=2,
        )
        processor = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
        by_class = transformers.LlamaTokenizer.from_pretrained(folder, add_bos_token=True)
        metadata = spm_metadata(processor)
        texts = PROBES + SPECIAL_PROBES["sentencepiece"]
        goldens = {}
        for prefix in (True, False):
            path = folder / f"{prefix}.gguf"
            write_gguf(path, metadata | {"tokenizer.ggml.add_space_prefix": prefix})
            goldens[prefix] = llama_cpp_ids(path, texts)
    published = published_llama(by_class)
    ids = [published.encode(text) for text in texts]
    without_bos = [row[1:] for row in ids]
    assert without_bos == goldens[True]
    plain = [
        index
        for index, text in enumerate(texts)
        if not any(mark in text for mark in ("<s>", "</s>", "[INST]", "<unk>"))
    ]
    assert [processor.encode(texts[index]) for index in plain] == [without_bos[index] for index in plain]
    by_class_ids = [by_class.encode(text) for text in texts]
    write(
        "sentencepiece",
        {
            "metadata": metadata,
            "probes": probes(texts, ids, by_class_ids, "transformers_llama_class_ids", METASPACE),
            "ids_without_prefix": goldens[False],
            "decoded": [
                {
                    "ids": row,
                    "text": published.decode(row),
                    "text_without_special": published.decode(row, skip_special_tokens=True),
                }
                for row in ids
            ],
        },
    )


def spm_metadata(processor: sentencepiece.SentencePieceProcessor) -> dict[str, object]:
    """What a GGUF converter writes for a sentencepiece model."""
    size = processor.vocab_size()
    types = [
        2 if processor.is_unknown(index)
        else 3 if processor.is_control(index)
        else 6 if processor.is_byte(index)
        else 4 if processor.id_to_piece(index) == "[INST]"
        else 1
        for index in range(size)
    ]  # fmt: skip
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [processor.id_to_piece(index) for index in range(size)],
        "tokenizer.ggml.scores": [processor.get_score(index) for index in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def published_llama(by_class: transformers.LlamaTokenizer) -> transformers.PreTrainedTokenizerFast:
    """transformers' vocabulary and merges under the normaliser of the tokenizer.json that llama models ship."""
    backend = tokenizers.Tokenizer.from_str(by_class._tokenizer.to_str())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    assert backend.get_added_tokens_decoder()[0] == AddedToken("<unk>", normalized=False, special=True)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    smollm2(parser.parse_args().model)
    byte_level()
    sentencepiece_bpe()
