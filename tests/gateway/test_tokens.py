from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from gateway.conftest import Serve
from gateway.fakes import replicas
from preble.config import AuthConfig
from preble.core.types import unpack_tokens
from preble.errors import ConfigError, PromptTooLong, RequestError
from preble.prompts.endpoints import ENDPOINTS, bodies
from preble.prompts.tokens import pool as token_pool
from preble.prompts.tokens import tokenizer as tokens
from preble.prompts.tokens.pool import LocalTokens, approximate_tokens
from preble.prompts.tokens.templates import ModelTemplates
from preble.prompts.tokens.tokenizer import PromptTokenizer, choose_encoder, find_model_files
from preble.serving import token_answers
from preble.serving.replicas.live import LiveReplicas
from preble.serving.token_answers import TokenAnswers
from support.waiting import eventually

TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
LONG = "all work and no play makes jack a dull boy. " * 2000


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level tokenizer that begins prompts with <s>, with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|user|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([LONG, "def f(x): return x"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(8)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with a model that the fast library does not support."""

    def unsupported(path: Path) -> None:
        raise ValueError("unsupported model")

    monkeypatch.setattr(tokens, "FastEncoder", unsupported)
    token_pool._loaded.cache_clear()
    yield
    token_pool._loaded.cache_clear()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": [5, 6, 2**31]}, "prompt"),
        ("/v1/completions", {"prompt": [[5], [6, 99_999_999]]}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 40_000 + [99_999]}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "input_ids": [99_999]}, "input_ids"),
        ("/generate", {"input_ids": [99_999]}, "input_ids"),
        ("/generate", {"input_ids": [[5], [99_999]]}, "input_ids"),
        ("/inference/v1/generate", {"token_ids": [99_999]}, "token_ids"),
        ("/v1/embeddings", {"input": [5, 99_999]}, "input"),
        ("/v1/embeddings", {"input": [[5], [-1]]}, "input[0]"),
        ("/encode", {"input_ids": [9e4]}, "input_ids[0]"),
        ("/v1/score", {"query": [5], "items": [[99_999]], "label_token_ids": [1]}, "items"),
        ("/invocations", {"prompt": [99_999]}, "prompt"),
    ],
)
async def test_an_id_that_the_model_does_not_have_is_a_400_and_reaches_no_replica(
    serve: Serve, model: Path, path: str, fields: dict[str, Any], param: str
) -> None:
    """It ends SGLang 0.5.23."""
    async with replicas(1, max_model_len=10**6) as [one], serve([one], tokenizer=str(model)) as gateway:
        async with gateway.http.post(path, json=fields) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["param"], one.requests) == (400, param, [])


async def test_every_id_of_the_tokenizer_is_passed_on_and_no_other(serve: Serve, model: Path) -> None:
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    async with replicas(1) as [one], serve([one], tokenizer=str(model)) as gateway:
        assert (await gateway.complete(prompt=[len(vocabulary) - 1]))[0] == 200
        assert (await gateway.complete(prompt=[len(vocabulary)]))[0] == 400


async def test_an_id_that_only_the_models_tables_have_is_passed_on(serve: Serve, model: Path, tmp_path: Path) -> None:
    """Tables are padded, so a model may have ids that its tokenizer does not make."""
    padded = shutil.copytree(model, tmp_path / "padded")
    (padded / "config.json").write_text('{"vocab_size": 448}', encoding="utf-8")
    async with replicas(1) as [one], serve([one], tokenizer=str(padded)) as gateway:
        assert (await gateway.complete(prompt=[447]))[0] == 200
        assert (await gateway.complete(prompt=[448]))[0] == 400


async def test_ids_of_another_model_are_not_measured_by_the_tokenizer(serve: Serve, model: Path) -> None:
    async with replicas(2) as [one, two]:
        two.models = [{"id": "other", "max_model_len": 1000}]
        async with serve([one, two], tokenizer=str(model)) as gateway:
            assert (await gateway.complete(model="other", prompt=[99_999]))[0] == 200


def ids(tokenizer: PromptTokenizer, text: str, special: bool = True) -> list[int]:
    return list(unpack_tokens(tokenizer.completion(text, special)))


def test_completions_get_special_tokens_unless_told_otherwise_and_are_not_truncated(model: Path) -> None:
    tokenizer = PromptTokenizer(model)
    with_bos = ids(tokenizer, LONG)
    assert with_bos[0] == 0 and len(with_bos) > 1000
    assert ids(tokenizer, LONG, special=False) == with_bos[1:]


def test_chats_get_only_what_the_template_writes(model: Path) -> None:
    tokenizer = PromptTokenizer(model)
    body = {"messages": [{"role": "user", "content": "dull boy"}]}
    plain = list(unpack_tokens(tokenizer.chat(json.dumps(body).encode())))
    assert plain == ids(tokenizer, "<s><|user|>dull boy", special=False)
    assert plain.count(0) == 1
    twice = tokenizer.chat(json.dumps({**body, "add_special_tokens": True}).encode())
    assert list(unpack_tokens(twice)) == [0, *plain]


def test_the_fast_library_is_chosen_where_it_gives_the_same_ids(model: Path) -> None:
    pytest.importorskip("fastokens")
    fast, is_fast = choose_encoder(model / "tokenizer.json")
    assert is_fast
    plain = tokens.PlainEncoder(model / "tokenizer.json")
    for text in ("", LONG, "<s>dull", "é🙂 \n\n"):
        for special in (True, False):
            assert fast.encode(text, special) == plain.encode(text, special)


def test_a_fast_library_that_gives_other_ids_is_not_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(tokens.PlainEncoder):
        def encode(self, text: str, add_special_tokens: bool) -> tokens.PackedTokens:
            right = super().encode(text, add_special_tokens)
            return tokens.PackedTokens(right[:-4]) if "don't" in text else right

    monkeypatch.setattr(tokens, "FastEncoder", Wrong)
    encoder, is_fast = choose_encoder(model / "tokenizer.json")
    assert not is_fast and type(encoder) is tokens.PlainEncoder


async def test_small_prompts_are_done_at_once_and_large_ones_in_threads(model: Path) -> None:
    pytest.importorskip("fastokens")
    pool = LocalTokens(model, None, inline_bytes=100, workers=2)
    tokenizer = PromptTokenizer(model)
    try:
        for text in ("dull", LONG):
            assert await pool.completion(text, True, None) == tokenizer.completion(text)
            body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
            assert await pool.chat(body, None) == tokenizer.chat(body)
    finally:
        pool.close()


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("fields", "at_once"),
    [
        ({"messages": [{"role": "user", "content": "x" * 10}] * 100}, True),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, True),
        ({"messages": [{"role": "user", "content": "{x" * 100}]}, True),
        ({"messages": [{"role": "user", "content": "x"}] * 1000}, False),
        ({"messages": [{"role": "user", "content": ["x"] * 1000}]}, False),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [TOOL] * 100}, False),
        ({"messages": [{"role": "user", "content": "x"}], "documents": [{}] * 1000}, False),
    ],
)
async def test_chats_of_many_parts_are_rendered_in_a_thread(
    fields: dict[str, object], at_once: bool, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastokens")
    pool = LocalTokens(model, None, inline_bytes=100_000, workers=2, memory_bytes=2**24)
    rendered_in: list[threading.Thread] = []
    render = ModelTemplates.render
    note = lambda *given: (rendered_in.append(threading.current_thread()), render(*given))[1]  # noqa: E731
    monkeypatch.setattr(ModelTemplates, "render", note)
    body = json.dumps(fields).encode()
    try:
        assert await pool.chat(body, None) == PromptTokenizer(model).chat(body)
        assert (rendered_in[0] is threading.main_thread()) == at_once
        if "tools" in fields:  # known by now
            rendered_in.clear()
            await pool.chat(body, None)
            assert rendered_in[0] is threading.main_thread()
    finally:
        pool.close()


async def test_the_slow_library_runs_in_processes_that_are_replaced_when_they_die(model: Path, slow: None) -> None:
    pool = LocalTokens(model, None, inline_bytes=100, workers=1)
    tokenizer = PromptTokenizer(model)
    body = json.dumps({"messages": [{"role": "user", "content": LONG}]}).encode()
    try:
        assert await pool.completion("dull", True, None) == tokenizer.completion("dull")
        [worker] = pool._lane._executor._processes.values()  # type: ignore[union-attr]
        worker.kill()
        await eventually(lambda: not worker.is_alive())
        assert await pool.chat(body, None) == tokenizer.chat(body)
        with pytest.raises(RequestError, match="`messages`"):
            await pool.chat(b'{"messages": 1}', None)
    finally:
        pool.close()


@pytest.fixture
def lengths(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that are tokenized from now on, in threads."""
    found: list[int] = []
    plain = PromptTokenizer.completion

    def completion(self: PromptTokenizer, text: str, add_special_tokens: bool = True) -> tokens.PackedTokens:
        found.append(len(text))
        return plain(self, text, add_special_tokens)

    tokenizer = PromptTokenizer(model)
    tokenizer.is_fast = True
    monkeypatch.setattr(token_pool, "_loaded", lambda *source: tokenizer)
    monkeypatch.setattr(PromptTokenizer, "completion", completion)
    return found


async def test_a_text_that_is_surely_too_long_is_never_tokenized_whole(lengths: list[int]) -> None:
    pool = LocalTokens(Path("any"), None, inline_bytes=100, workers=2)
    text = "all work and no play makes jack a dull boy " * 100_000
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    try:
        with pytest.raises(PromptTooLong, match="maximum context length is 1000 tokens"):
            await pool.completion(text, True, None, 1000)
        with pytest.raises(PromptTooLong):
            await pool.chat(body, None, 1000)
        assert len(lengths) < 10 and max(lengths) < 100_000
    finally:
        pool.close()


async def test_a_long_text_that_fits_gets_the_ids_of_the_whole(lengths: list[int], model: Path) -> None:
    pool = LocalTokens(Path("any"), None, inline_bytes=100, workers=2)
    text = "dull " * 50_000
    right = PromptTokenizer(model).completion(text)
    try:
        assert await pool.completion(text, True, None, len(right) // 4) == right
    finally:
        pool.close()


async def test_a_giant_does_not_hold_up_other_prompts(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them would take both threads; they have one of their own, one after the other."""
    begun, go_on = threading.Event(), threading.Event()
    plain = PromptTokenizer.completion

    def completion(self: PromptTokenizer, text: str, add_special_tokens: bool = True) -> tokens.PackedTokens:
        if len(text) > 2**20:
            begun.set()
            assert go_on.wait(60)
            return tokens.PackedTokens(b"")
        return plain(self, text, add_special_tokens)

    monkeypatch.setattr(PromptTokenizer, "completion", completion)
    pool = LocalTokens(Path("any"), None, inline_bytes=100, workers=2)
    try:
        giants = [asyncio.create_task(pool.completion("a" * (2**20 + 1), True, None)) for _ in range(3)]
        await eventually(begun.is_set)
        assert await pool.completion(LONG, True, None)
        assert not any(giant.done() for giant in giants)
        go_on.set()
        await asyncio.gather(*giants)
    finally:
        go_on.set()
        pool.close()


def test_a_half_surrogate_is_the_clients_error(model: Path) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        PromptTokenizer(model).completion("\ud800")


def test_a_model_may_have_a_template_of_its_own_for_tools_or_none(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    plain = b'{"messages": []}'
    with pytest.raises(RequestError, match="no chat template"):
        PromptTokenizer(tmp_path).chat(plain)
    named = [{"name": "default", "template": "dull"}, {"name": "tool_use", "template": "boy"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    tokenizer = PromptTokenizer(tmp_path)
    assert tokenizer.chat(plain) == tokenizer.completion("dull", False)
    with_tools = b'{"messages": [], "tools": [{"function": {"name": "f"}}]}'
    assert tokenizer.chat(with_tools) == tokenizer.completion("boy", False)
    (tmp_path / "chat_template.jinja").write_text("play", encoding="utf-8")
    assert PromptTokenizer(tmp_path).chat(plain) == tokenizer.completion("play", False)
    own = tmp_path / "own.jinja"
    own.write_text("work", encoding="utf-8")
    assert PromptTokenizer(tmp_path, own).chat(plain) == tokenizer.completion("work", False)


def test_a_tokenizer_is_found_in_a_folder_or_on_the_hub(model: Path, tmp_path: Path) -> None:
    parsed: list[str] = []

    def download(name: str, **options: object) -> str:
        parsed.append(name)
        return str(model)

    assert find_model_files(str(model)) == model
    assert find_model_files(str(model / "tokenizer.json")) == model
    assert find_model_files("org/name", download) == model
    assert parsed == ["org/name"]
    with pytest.raises(ConfigError, match="no such folder"):
        find_model_files(str(tmp_path / "none"), download)
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        find_model_files(str(tmp_path), download)


def test_a_hub_that_cannot_be_reached_is_a_clear_error() -> None:
    def download(name: str, **options: object) -> str:
        raise OSError("no route\nto host")

    with pytest.raises(ConfigError, match=r"'org/name': no such folder, .* provide it: no route\. Give a folder"):
        find_model_files("org/name", download)


def test_a_broken_tokenizer_file_is_the_operators_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be used"):
        PromptTokenizer(tmp_path)


def test_approximate_tokens_share_prefixes_as_their_texts_do() -> None:
    short, long = approximate_tokens(b"a" * 10), approximate_tokens(b"a" * 10 + b"b" * 10)
    assert (len(short), len(long)) == (12, 20)
    assert short[:8] == long[:8]


@pytest.mark.parametrize(
    ("num_words", "take_ids", "goes_as_ids"),
    [(2000, (True, True), True), (2000, (True, False), False), (2, (True, True), False)],
)
async def test_a_long_text_goes_as_ids_where_every_replica_takes_them(
    model: Path, serve: Serve, num_words: int, take_ids: tuple[bool, bool], goes_as_ids: bool
) -> None:
    text = "dull boy " * num_words
    async with replicas(2, max_model_len=65536) as fakes, serve(fakes, tokenizer=str(model)) as gateway:
        table = gateway.gateway.serving.replicas
        for live, takes_ids in zip(table.values(), take_ids, strict=True):
            table.set_takes_ids(live, takes_ids)
        for stream in (False, True):
            body = {"model": "tiny", "prompt": text, "max_tokens": 3, "stream": stream}
            async with gateway.http.post("/v1/completions", json=body) as answer:
                assert answer.status == 200
                await answer.read()
        ids = list(unpack_tokens(PromptTokenizer(model).completion(text)))
        sent = [json.loads(raw) for fake in fakes for raw in fake.bodies]
        assert [body["prompt"] for body in sent] == [ids if goes_as_ids else text] * 2
        assert {name for body in sent for name in body} == {"model", "prompt", "max_tokens", "stream"}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/detokenize", "/v1/responses/resp_1"])
async def test_requests_that_are_answered_unplaced_count_for_their_key(
    serve: Serve, model: Path, tmp_path: Path, path: str
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[a]\nsha256 = "{sha256(b"k").hexdigest()}"\nrequests_per_minute = 1\n', encoding="utf-8")
    auth, own = AuthConfig(keys_file=str(keys)), {"x-api-key": "k"}
    method = "GET" if "responses" in path else "POST"
    body = None if method == "GET" else {"prompt": "a", "tokens": [1]}
    async with replicas(1) as fakes, serve(fakes, tokenizer=str(model), auth=auth) as gateway:
        statuses = []
        for _ in range(2):
            async with gateway.http.request(method, path, json=body, headers=own) as answer:
                statuses.append(answer.status)
        assert statuses == [404 if method == "GET" else 200, 429]
        await gateway.idle()


async def test_a_large_body_of_ids_is_decoded_beside_the_event_loop(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def decoded(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return bodies.decoded(*arguments)

    monkeypatch.setattr(token_answers, "decoded", decoded)
    tokens = LocalTokens(model, None, inline_bytes=100, workers=1)
    answers = TokenAnswers(str(model), tokens, LiveReplicas())
    answers._replicas.check_model = lambda name: None  # type: ignore[method-assign]
    for ids in ("1", "1," * 100_000 + "1"):
        await answers.answer(ENDPOINTS["/detokenize"], f'{{"tokens": [{ids}]}}'.encode())
    assert [thread == threading.get_ident() for thread in threads] == [True, False]
    tokens.close()


async def test_more_ids_than_any_replica_makes_are_refused_undecoded(serve: Serve, model: Path) -> None:
    async with replicas(2, max_model_len=64) as fakes, serve(fakes, tokenizer=str(model)) as gateway:
        for count, status in ((64, 200), (65, 400)):
            async with gateway.http.post("/detokenize", json={"tokens": [1] * count}) as answer:
                said = await answer.text()
                assert answer.status == status, said
        assert "65 tokens" in said


async def test_ids_become_a_text_beside_the_event_loop(model: Path) -> None:
    class Slow:
        def decode_batch(self, ids: list[list[int]], *, skip_special_tokens: bool) -> list[str]:
            assert goes_on.wait(60), "the event loop waits for us"
            return ["text"]

    goes_on = threading.Event()
    tokens = LocalTokens(model, None, inline_bytes=100, workers=1)
    answers = TokenAnswers(str(model), tokens, LiveReplicas())
    answers._detokenizer = Slow()  # type: ignore[assignment]
    answers._replicas.check_model = lambda name: None  # type: ignore[method-assign]
    asked = asyncio.create_task(answers.answer(ENDPOINTS["/detokenize"], b'{"tokens": [1]}'))
    asyncio.get_running_loop().call_later(0, goes_on.set)
    assert await asked == b'{"prompt":"text"}'
    tokens.close()
