"""Tokenizers of the emulated replica: the built-in one, and one from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import Raw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from preble.emulator.answers.tokenizer import EMULATED_TEXT, BuiltinTokenizer, FileTokenizer, load_tokenizer
from preble.errors import ConfigError, RequestError
from preble.prompts.endpoints.bodies import ChatBody

HELLO = [{"role": "user", "content": "Hello"}]
TOOLS = Raw('[{"type": "function", "function": {"name": "ü"}}]'.encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE model's folder, without a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["some words to learn from"], trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def with_template(folder: Path, target: Path, template: str) -> FileTokenizer:
    (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"chat_template": template, "bos_token": {"content": "<s>"}}
    (target / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return FileTokenizer(target)


def test_the_built_in_ids_never_change() -> None:
    assert BuiltinTokenizer().encode("One word, two\n") == [4113, 31764, 878, 12630, 24723]


def test_any_text_can_be_tokenized() -> None:
    assert len(BuiltinTokenizer().encode("déjà vu 🙂\ud800\t" + "x" * 100)) > 10
    assert BuiltinTokenizer().encode("") == []


def test_the_beginning_of_a_text_does_not_depend_on_its_end() -> None:
    tokenizer = BuiltinTokenizer()
    assert tokenizer.encode("a b c d")[:3] == tokenizer.encode("a b c")


def test_an_emulated_answer_has_the_ids_that_were_generated(folder: Path) -> None:
    for tokenizer in (BuiltinTokenizer(), FileTokenizer(folder)):
        text = "".join(tokenizer.output_pieces)
        assert text == EMULATED_TEXT
        assert tokenizer.encode(text, add_special_tokens=False) == list(tokenizer.output_ids)


def test_a_model_without_a_template_has_plain_markup(folder: Path) -> None:
    prompt = load_tokenizer(str(folder)).render_chat(HELLO, ChatBody())
    assert prompt == "<|user|>\nHello\n<|assistant|>\n"
    assert prompt == load_tokenizer(None).render_chat(HELLO, ChatBody())


def test_tools_are_part_of_the_prompt() -> None:
    prompt = BuiltinTokenizer().render_chat(HELLO, ChatBody(tools=TOOLS, add_generation_prompt=False))
    assert prompt == '<|tools|>\n[{"type": "function", "function": {"name": "ü"}}]\n<|user|>\nHello\n'


def test_the_models_own_template_is_used(folder: Path, tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools | tojson }}"
    tokenizer = with_template(folder, tmp_path, template)
    assert tokenizer.render_chat(HELLO, ChatBody(tools=TOOLS)) == (
        '<s>[user]Hello[{"type": "function", "function": {"name": "ü", "description": null, "parameters": null}}]'
    )


def test_what_the_template_refuses_is_the_clients_error(folder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(folder, tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        tokenizer.render_chat(HELLO, ChatBody())


def test_a_template_that_is_none_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="chat template cannot be compiled"):
        with_template(folder, tmp_path, "{% for %}")


def test_a_missing_or_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer at .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot load tokenizer"):
        load_tokenizer(str(tmp_path))
