"""Chats: what templates see, what messages may hold, what is refused."""

from pathlib import Path

import pytest
from tokenizer_cases import BYTES, CHATML, SENTENCEPIECE, save_folder, with_template

from specinfer_jax.errors import TokenizerError
from specinfer_jax.tokenizer import Tokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


def test_a_chat_is_rendered_with_trimmed_blocks() -> None:
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert with_template(CHATML).apply_chat_template(CHAT, add_generation_prompt=False) == text
    assert with_template(CHATML).apply_chat_template(CHAT) == text + "<|im_start|>assistant\n"


def test_an_encoded_chat_has_no_special_token_twice() -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    tokenizer = Tokenizer.from_gguf(SENTENCEPIECE["metadata"] | {"tokenizer.chat_template": template})
    assert tokenizer.apply_chat_template(CHAT) == "<s>Be brief.</s>hi</s>"
    ids = tokenizer.encode_chat(CHAT)
    assert ids == tokenizer.encode("<s>Be brief.</s>hi</s>", add_special_tokens=False)
    assert [index for index in ids if index < 3] == [1, 2, 2]


@pytest.mark.parametrize(
    ("message", "content"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, ""),
        ({"role": "user"}, ""),
        ({"role": "user", "content": ""}, ""),
        ({"role": "user", "content": []}, ""),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
    ],
)
def test_content_may_be_absent_or_in_parts(message: dict, content: str) -> None:  # case B079
    template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    assert with_template(template).apply_chat_template([message]) == f"[{content}]"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ([{"role": "robot", "content": "x"}], "'robot'"),
        ([{"content": "x"}], "None"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "text alone"),
        ([{"role": "user", "content": 5}], "int"),
    ],
)
def test_what_is_no_chat_is_refused(messages: list[dict], words: str) -> None:  # case B079
    with pytest.raises(TokenizerError, match=words):
        with_template(CHATML).apply_chat_template(messages)


def test_a_model_without_a_template_cannot_chat() -> None:
    with pytest.raises(TokenizerError, match="no chat template"):
        BYTES.encode_chat(CHAT)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{% for %}", "not valid Jinja"),
        ("{{ 'a' + none }}", "does not accept"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_what_a_template_does_wrong_is_one_error(template: str, words: str) -> None:
    with pytest.raises(TokenizerError, match=words):
        with_template(template).apply_chat_template(CHAT)


def test_templates_have_what_transformers_gives_them() -> None:
    template = (
        "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ {'b': '<é>', 'a': 1} | tojson }}{% generation %}{{ message.role }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%%') }}{{ tools is none }}{{ pad_token is defined }}{{ bos_token }}"
    )
    expected = '{"b": "<é>", "a": 1}system%TrueFalse<|endoftext|>'
    assert with_template(template).apply_chat_template(CHAT) == expected


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    def loaded() -> str | None:
        return Tokenizer.from_hf_folder(tmp_path).chat_template

    save_folder(tmp_path, BYTES, {}, chat_template={"chat_template": "from chat_template.json"})
    assert loaded() == "from chat_template.json"
    named = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": "from the list"}]
    save_folder(tmp_path, BYTES, {"chat_template": named})
    assert loaded() == "from the list"
    save_folder(tmp_path, BYTES, {"chat_template": "from the configuration"})
    assert loaded() == "from the configuration"
    (tmp_path / "chat_template.jinja").write_text("from chat_template.jinja")
    assert loaded() == "from chat_template.jinja"
