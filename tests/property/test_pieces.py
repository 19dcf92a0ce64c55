"""Token ids of pieces are those of the whole, whatever the text, for the kinds of tokenizers that models have."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Raw
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from preble.core.types import PackedTokens
from preble.errors import PromptTooLong, RequestError
from preble.prompts.endpoints import COMPLETIONS
from preble.prompts.endpoints.bodies import TEXT_OF_COMPLETION, KnownPrefix, PromptLimits
from preble.prompts.tokens import pieces, pool
from preble.prompts.tokens.pieces import Parts, PieceMemory
from preble.prompts.tokens.pool import LocalTokens
from preble.prompts.tokens.tokenizer import choose_encoder
from preble.serving.requests import parse_request

pytest.importorskip("fastokens")

WORD_OR_DIGITS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
LLAMA3 = WORD_OR_DIGITS + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "The quick brown fox isn't a dog's friend; they're 1234 metres away. " * 20,
    "def f(x):\n\treturn {'a': x ** 2}\n\n    # a comment with  two spaces\r\n" * 20,
    "Привет мир, как дела? 你好世界。今天天气很好 العالم مرحبا नमस्ते दुनिया 안녕하세요 🙂👩‍👩‍👧 ﬁne naïve Ünïcödé " * 20,
]


def byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer, normalizer: object = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken("<s>", special=True), AddedToken("<|user|>", special=True)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=900, special_tokens=specials, show_progress=False, initial_alphabet=alphabet),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def sentencepiece(*, prepend: bool, merged_with_previous: bool = False) -> Tokenizer:
    """As Llama 2 and Mistral (`prepend`), and Gemma: spaces are letters, and a word is not cut out before merging."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.normalizer = replace
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, " ".join("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")], trainer)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prepend else replace
    data = json.loads(tokenizer.to_str())
    data["pre_tokenizer"] = None
    if merged_with_previous:
        data["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        }
    # The bytes are tokens of the model, not added ones, as in the models' own files.
    data["added_tokens"] = [token for token in data["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(data))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "prefix_space": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "starcoder": lambda: byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
    ),
    "llama3": lambda: byte_level(split(LLAMA3)),
    "qwen2": lambda: byte_level(split(QWEN2), normalizers.NFC()),
    "gpt4o": lambda: byte_level(split(GPT_4O)),
    "deepseek": lambda: byte_level(split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK)),
    "llama2": lambda: sentencepiece(prepend=True),
    "gemma": lambda: sentencepiece(prepend=False, merged_with_previous=True),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    KINDS[request.param]().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces of 24 characters, so that short texts have many cuts, and short keys, so that some pieces share theirs."""
    monkeypatch.setattr(pieces, "PIECE_SIZE", 24)  # ships 4,096
    monkeypatch.setattr(pieces, "_KEY_SIZE", 6)  # ships 256
    monkeypatch.setattr(pieces, "_LARGEST", 72)  # ships 16,384
    monkeypatch.setattr(pieces, "_WINDOW", 96)  # ships 16,384
    monkeypatch.setattr(pieces, "_STEP", 200)  # ships 65,536
    monkeypatch.setattr(pool, "PIECE_SIZE", 24)  # ships 4,096
    monkeypatch.setattr(pieces, "MOST_AT_ONCE", 120)  # ships 20,480
    monkeypatch.setattr(pool, "MOST_AT_ONCE", 120)  # ships 20,480
    yield


WORDS = ("the quick brown fox ", "it isn't so ", "they'LL go ", "a b c d ", "eX tRa ", "word ", " x", "ab cd ef ")
SIGNS = ("  ", "\n", "\n\n  ", "\t", "\r\n", "    ", "1", "234 567 ", "3.14", "...", "!? ", "('x')", "\u00a0", "_")
SCRIPTS = (
    "你好世界",
    "今天。",
    "Привет мир ",
    "العالم ",
    "दुनिया ",
    "안녕 ",
    "é",
    "e\u0301",
    "ﬁ",
    "🙂",
    "👩\u200d👧",
    "İ",
)
MARKS = ("<s>", "<|user|>", "<s> it ", "\\", "\\n as ", '"', "\\u00ea bc ", "▁", "▁▁ and ", "\u200b")
SNIPPETS = st.sampled_from((*WORDS, *SIGNS, *SCRIPTS, *MARKS))
TEXTS = st.lists(st.one_of(SNIPPETS, SNIPPETS, st.text(max_size=8)), max_size=60).map("".join)


def is_unicode(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS.filter(is_unicode), escapes=st.booleans(), special=st.booleans())
def test_ids_in_pieces_are_those_of_the_whole(
    folder: Path, small_pieces: None, text: str, escapes: bool, special: bool
) -> None:
    tokens = LocalTokens(folder, None, inline_bytes=0, workers=1, memory_bytes=2**20)
    encoder = tokens._tokenizer.encoder
    assert encoder.joint is not None, "this tokenizer's prompts can be cut"
    right = encoder.encode(text, special)
    encoded = Raw(json.dumps(text, ensure_ascii=escapes).encode())
    try:
        for prompt in (encoded, text) * 3:  # each three times: all pieces new, then shared, then remembered
            assert asyncio.run(tokens.completion(prompt, special, None)) == right
    finally:
        tokens.close()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(beginnings=st.lists(TEXTS.filter(is_unicode), min_size=2, max_size=4), order=st.lists(st.integers(0, 99)))
def test_ids_in_pieces_are_those_of_the_whole_among_texts_that_share_pieces(
    folder: Path, small_pieces: None, beginnings: list[str], order: list[int]
) -> None:
    tokens = LocalTokens(folder, None, inline_bytes=0, workers=1, memory_bytes=2**16)
    encode = tokens._tokenizer.encoder.encode
    middle = " and so it goes on for all of them without any end"
    texts = [first + middle + last for first in beginnings for last in beginnings]
    try:
        for number in order:
            text = texts[number % len(texts)]
            prompt = text if number % 2 else Raw(json.dumps(text).encode())
            assert asyncio.run(tokens.completion(prompt, False, None)) == encode(text, False)
    finally:
        tokens.close()


BODIES = (
    '{"prompt":%s}',
    '{"stream": false, "model": "m", "prompt": %s, "max_tokens": 3}',
    '{"prompt":%s,"prompt":"another one"}',
    '{"prompt":%s,"pr\\u006fmpt":"another one"}',
    '{"prompt":"another one","prompt":%s}',
    '{"prompt":%s,"prompt":[1, 2]}',
    '{"model":"a \\" b","prompt":%s}',
    '{"metadata":{"prompt":"x"},"prompt":%s}',
    '{"prompt":[%s]}',
    '{"prompt":%s',
    '{"prompt":%s,"max_tokens":"many"}',
    '{"prompt":%s}}',
    '{"kv_transfer_params":1,"prompt":%s}',
)
LIMITS = PromptLimits(8, 1000)


def read(tokens: LocalTokens, body: bytes, begun: KnownPrefix | None) -> tuple[object, ...]:
    """Return everything that is read of a body and its token ids, or the error."""
    try:
        fields = parse_request(COMPLETIONS, {}, body, "id", LIMITS, begun=begun).fields
        if fields.begun is not None:
            found = [asyncio.run(tokens.complete(fields.begun, True, inf))]
        else:
            found = [
                p if isinstance(p, bytes) else asyncio.run(tokens.completion(p, True, None)) for p in fields.prompts
            ]
    except RequestError as error:
        return str(error), error.param
    return found, fields.model, fields.stream, fields.max_output_tokens


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(beginning=TEXTS.filter(is_unicode), end=TEXTS.filter(is_unicode), escapes=st.booleans())
def test_a_body_whose_beginning_is_known_is_read_as_any_other(
    folder: Path, small_pieces: None, beginning: str, end: str, escapes: bool
) -> None:
    tokens = LocalTokens(folder, None, inline_bytes=0, workers=1, memory_bytes=2**20)
    beginning += " and so it goes on for all of them " * 4
    texts = [json.dumps(beginning + rest, ensure_ascii=escapes) for rest in ("", " one end", end)]
    try:
        for _ in range(2):
            right = [read(tokens, (form % text).encode(), None) for form in BODIES for text in texts]
        for known, text in zip(right, [form % text for form in BODIES for text in texts], strict=True):
            begun = tokens.begin(text.encode(), TEXT_OF_COMPLETION)
            assert read(tokens, text.encode(), begun) == known
    finally:
        tokens.close()


def test_of_a_body_whose_beginning_is_known_only_the_rest_is_read(tmp_path: Path) -> None:
    KINDS["llama3"]().save(str(tmp_path / "tokenizer.json"))
    tokens = LocalTokens(tmp_path, None, inline_bytes=0, workers=1, memory_bytes=2**20)
    document = "".join(f"some words of page {number} \\u00e9\\n " for number in range(3000))
    bodies = [f'{{"model":"m","prompt":"{document}{number} of all","n":1}}'.encode() for number in range(3)]
    try:
        for body in bodies:
            begun = tokens.begin(body, TEXT_OF_COMPLETION)
            fields = parse_request(COMPLETIONS, {}, body, "id", LIMITS, begun=begun).fields
            if begun is None:
                asyncio.run(tokens.completion(fields.prompts[0], True, None))
    finally:
        tokens.close()
    assert begun is not None and fields.begun is begun
    assert len(begun.rest()) < pieces.PIECE_SIZE + max(pieces.PIECE_SIZE, len(document) / pieces._OF_BEGINNING)
    assert body[begun.start : begun.end].decode() == f"{document}2 of all"


def test_a_text_whose_beginning_is_known_may_be_completed_again(tmp_path: Path) -> None:
    KINDS["llama3"]().save(str(tmp_path / "tokenizer.json"))
    tokens = LocalTokens(tmp_path, None, inline_bytes=0, workers=1, memory_bytes=2**20)
    body = b'{"prompt":"%b"}' % (b"and so it goes on for all of them " * 1000)
    try:
        for _ in range(3):
            begun = tokens.begin(body, TEXT_OF_COMPLETION)
            fields = parse_request(COMPLETIONS, {}, body, "id", LIMITS, begun=begun).fields
            if fields.begun is None:
                right = asyncio.run(tokens.completion(fields.prompts[0], True, None))
        assert fields.begun is not None
        assert [asyncio.run(tokens.complete(fields.begun, True, inf)) for _ in range(2)] == [right, right]
    finally:
        tokens.close()


def parts_of(memory: PieceMemory, text: str | bytes) -> list[tuple[str, bool]]:
    """Put what is shared. Return the parts, and whether each was known."""
    quote = isinstance(text, bytes)
    found = []
    parts = Parts(memory, text, int(quote), len(text) - quote)
    while not parts.is_over:
        for part, ids, is_shared in parts.step():
            found.append((part if isinstance(part, str) else str(json.loads(b'"%b"' % part)), ids is not None))
            if is_shared:
                memory.put(part, PackedTokens(b"ids."))
    return found


@given(text=TEXTS.filter(is_unicode), is_json=st.booleans())
def test_parts_are_the_text_and_a_known_beginning_is_known_whatever_follows(text: str, is_json: bool) -> None:
    whole = (text + " and some more words ") * 400
    memory = PieceMemory(2**22)
    for end in ("", " one end", " another end"):
        found = parts_of(memory, json.dumps(whole + end).encode() if is_json else whole + end)
        assert "".join(part for part, _ in found) == whole + end
    longest = max(len(whole) / pieces._OF_BEGINNING, pieces.PIECE_SIZE)
    assert sum(len(part) for part, is_known in found if not is_known) < pieces.PIECE_SIZE + longest + len(text)


def test_the_pieces_of_a_long_text_are_few_and_not_too_large_to_be_done_at_once() -> None:
    memory, text = PieceMemory(2**24), "".join(f"some words {number} " for number in range(60_000))
    for _ in range(3):
        sizes = [len(part) for part, _ in parts_of(memory, text)]
    assert sizes[0] < 1.1 * pieces.PIECE_SIZE
    assert len(sizes) < len(text) / (2 * pieces.PIECE_SIZE)
    assert max(sizes) <= pieces.MOST_AT_ONCE


@pytest.mark.parametrize(
    "added",
    [AddedToken("New York"), AddedToken("<x> a", special=True), AddedToken("of", rstrip=True), AddedToken(" <y>")],
    ids=str,
)
def test_a_tokenizer_whose_added_tokens_reach_over_words_gets_no_pieces(added: AddedToken, tmp_path: Path) -> None:
    tokenizer = KINDS["gpt2"]()
    tokenizer.add_tokens([added])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder, _ = choose_encoder(tmp_path / "tokenizer.json")
    assert encoder.joint is None


@pytest.mark.parametrize("pattern", [r"\p{L}+ \p{L}+|[^\p{L}]+|\p{L}+", r"[\s\S]{1,7}"])
def test_a_pre_tokenizer_whose_words_have_spaces_inside_gets_no_pieces(pattern: str, tmp_path: Path) -> None:
    byte_level(split(pattern)).save(str(tmp_path / "tokenizer.json"))
    encoder, _ = choose_encoder(tmp_path / "tokenizer.json")
    assert encoder.joint is None


def test_a_vocabulary_that_merges_over_words_gets_no_pieces(tmp_path: Path) -> None:
    data = json.loads(KINDS["llama2"]().to_str())
    data["model"]["vocab"]["d▁"] = len(data["model"]["vocab"])
    data["model"]["merges"].append(["d", "▁"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    encoder, _ = choose_encoder(tmp_path / "tokenizer.json")
    assert encoder.joint is None


def test_a_vocabulary_that_merges_over_words_does_no_harm_where_words_are_cut_out_before(tmp_path: Path) -> None:
    data = json.loads(KINDS["llama3"]().to_str())
    data["model"]["vocab"]["dĠ"] = len(data["model"]["vocab"])
    data["model"]["merges"].append(["d", "Ġ"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    encoder, _ = choose_encoder(tmp_path / "tokenizer.json")
    assert encoder.joint is not None


def test_only_missed_pieces_are_decoded_and_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KINDS["llama3"]().save(str(tmp_path / "tokenizer.json"))
    tokens = LocalTokens(tmp_path, None, inline_bytes=0, workers=1, memory_bytes=2**20)
    done: list[int] = []
    plain = tokens._tokenizer.piece
    monkeypatch.setattr(tokens._tokenizer, "piece", lambda piece: (done.append(len(piece)), plain(piece))[1])
    document = "".join(f"some words of page {number} \\u00e9\\n " for number in range(3000))
    try:
        for question in ("what is it", "who wrote it", "how long is it"):
            asyncio.run(tokens.completion(Raw(f'"{document}{question}"'.encode()), True, None))
            done.append(0)
    finally:
        tokens.close()
    first, second, third = "".join("|" if not size else f" {size}" for size in done).split("|")[:3]
    assert sum(map(int, first.split())) == len(document) + len("what is it")
    assert sum(map(int, second.split())) == len(document) + len("who wrote it")
    assert int(third) < pieces.PIECE_SIZE + max(pieces.PIECE_SIZE, len(document) / pieces._OF_BEGINNING)


def test_a_piece_that_is_not_utf_8_is_the_clients_error(tmp_path: Path) -> None:
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    tokens = LocalTokens(tmp_path, None, inline_bytes=0, workers=1, memory_bytes=2**20)
    try:
        with pytest.raises(RequestError, match="JSON"):
            asyncio.run(tokens.completion(Raw(b'"' + b"some words " * 2000 + b'\xff"'), True, None))
    finally:
        tokens.close()


def ids_of(memory: PieceMemory, piece: bytes) -> PackedTokens | None:
    kept = memory.get(pieces.key_of(piece, 0, len(piece)), piece + b" a", 0, re.compile(b" a"))
    return None if kept is None else kept.ids


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3000), st.booleans()), max_size=200))
def test_the_memory_stays_within_its_budget_and_never_gives_other_ids(uses: list[tuple[int, int, bool]]) -> None:
    memory = PieceMemory(20_000)
    for number, size, has_common_end in uses:
        piece = b"%d " % number + b"x" * size
        piece = piece if has_common_end else piece[::-1]
        ids = PackedTokens(piece[::-1])
        assert ids_of(memory, piece) in (None, ids)
        memory.put(piece, ids)
        kept = [*memory._old.values(), *memory._young.values()]
        assert sum(len(one.text) + len(one.ids) for one in kept) <= 20_000
        assert memory._young_bytes == sum(one.num_bytes for one in memory._young.values())


def test_no_part_of_a_text_with_words_is_too_long_to_be_done_at_once() -> None:
    text = "".join(f"some words {number} " for number in range(3000))
    for num_letters in range(0, len(text), 500):
        assert all(len(part) <= pieces.MOST_AT_ONCE for part, _ in parts_of(PieceMemory(2**20), text[:num_letters]))


def test_pieces_that_came_once_are_not_kept() -> None:
    memory = PieceMemory(2**20)
    common = "".join(f"page {page} of all " for page in range(1000))
    for number in range(3):
        text = common + "".join(f"page {page} of number {number} only " for page in range(1000))
        for part, is_known in parts_of(memory, text):
            assert part in text
            assert is_known == (number == 2 and part in common)
    assert 0 < len(memory._young) == sum(one.text in common for one in memory._young.values())


def test_pieces_with_the_same_end_get_their_own_ids() -> None:
    memory = PieceMemory(2**20)
    end = b"y" * 1000
    memory.put(b"one " + end, PackedTokens(b"ids1"))
    memory.put(b"two " + end, PackedTokens(b"ids2"))
    assert ids_of(memory, b"two " + end) == b"ids2"
    assert ids_of(memory, b"one " + end) is None


def test_the_keys_of_pieces_that_came_once_are_bounded() -> None:
    memory = PieceMemory(2**20)
    for number in range(3000):
        assert not memory.was_seen(number)
    assert memory.was_seen(2999) and not memory.was_seen(0)
    assert len(memory._seen) + len(memory._seen_before) <= 2 * memory._most_seen


def test_a_piece_in_use_outlives_others() -> None:
    memory = PieceMemory(100_000)
    memory.put(b"used", PackedTokens(b"ids."))
    for number in range(1000):
        memory.put(b"%d" % number * 100, PackedTokens(b"x" * 400))
        assert ids_of(memory, b"used") == b"ids."


@pytest.mark.plain
@pytest.mark.parametrize("num_bytes", [100_000, 1_000_000])
async def test_a_long_prompt_never_holds_the_event_loop_for_a_millisecond(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in bytes, not in time: the clock goes on by what each step costs, as measured on a slow machine."""
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    tokens = LocalTokens(tmp_path, None, inline_bytes=0, workers=1, memory_bytes=2**24)
    now, turn_began, turns = 0.0, 0.0, [0.0]

    def worked(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def others() -> None:
        nonlocal turn_began
        while True:
            turns.append(now - turn_began)
            turn_began = now
            await asyncio.sleep(0)

    plain = tokens._tokenizer.piece
    known = tokens._memory.get
    monkeypatch.setattr(tokens._tokenizer, "piece", lambda text: (worked(len(text) * 15e-9), plain(text))[1])
    monkeypatch.setattr(tokens._memory, "get", lambda *where: (worked(10e-6), known(*where))[1])
    monkeypatch.setattr(pool, "time", SimpleNamespace(perf_counter=lambda: now))
    task = asyncio.create_task(others())
    body = b"".join(b"some words %d " % number for number in range(num_bytes // 12))[:num_bytes]
    try:
        for _ in range(3):  # new, shared, remembered
            await tokens.completion(Raw(b'"%b"' % body), True, None)
            await asyncio.sleep(0)
    finally:
        task.cancel()
        tokens.close()
    assert max(turns) < 0.001
    assert sum(turns) > 3 * max(turns)


async def test_a_giant_whose_client_has_left_is_tokenized_no_further_and_the_next_one_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    tokens = LocalTokens(tmp_path, None, inline_bytes=0, workers=1, memory_bytes=2**26)
    text = "".join(f"some words {number} " for number in range(200_000))
    num_done = 0
    plain = tokens._tokenizer.piece

    def piece(text: str | bytes) -> PackedTokens:
        nonlocal num_done
        num_done += "words" in str(text)  # backwards in the second prompt
        return plain(text)

    monkeypatch.setattr(tokens._tokenizer, "piece", piece)

    try:
        left = asyncio.create_task(tokens.completion(text, True, None))
        while not num_done:  # noqa: ASYNC110 (turn by turn, so that it cannot end meanwhile)
            await asyncio.sleep(0)
        following = asyncio.create_task(tokens.completion(text[::-1], True, None, 1000))
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        done = num_done
        with pytest.raises(PromptTooLong):
            await following
        assert num_done == done < len(text) / pieces.MOST_AT_ONCE / 2
    finally:
        tokens.close()


async def test_a_prompt_in_pieces_that_is_too_long_is_refused_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KINDS["gpt2"]().save(str(tmp_path / "tokenizer.json"))
    tokens = LocalTokens(tmp_path, None, inline_bytes=0, workers=1, memory_bytes=2**20)
    done: list[int] = []
    plain = tokens._tokenizer.piece
    monkeypatch.setattr(tokens._tokenizer, "piece", lambda piece: (done.append(len(piece)), plain(piece))[1])
    text = "".join(f"some words {number} " for number in range(100_000))
    try:
        with pytest.raises(PromptTooLong, match="maximum context length is 1000 tokens"):
            await tokens.completion(text, True, None, 1000)
        assert 0 < len(done) < 5
    finally:
        tokens.close()
