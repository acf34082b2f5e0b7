"""Instructions to ids: Llama's files against transformers, the start-up check, and what an instruction may hold."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_like import EMPTY_SPACE, PAD, llama_like, special

from aura_ros.backbones.openvla_oft.tokenizer import (
    CHECK_IDS,
    CHECK_INSTRUCTION,
    ByteTokenizer,
    LlamaTokenizer,
    check_instruction,
    prompt,
    prompt_ids,
)
from aura_ros.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "data" / "openvla_oft_tiny" / "golden_io.npz"
WORDS = [
    "pick",
    "up",
    "the",
    "black",
    "bowl",
    "put",
    "to",
    "in",
    "é",
    "漢字",
    "🤖",
    "\u200f",
    "\u200d",
    "0.5",
    "-",
]


def write(folder: Path, contents: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(contents, ensure_ascii=False), encoding="utf-8")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<PAD>"}
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("llama"), llama_like())


@pytest.fixture(scope="module")
def llama(folder) -> LlamaTokenizer:
    return LlamaTokenizer(folder)


def test_the_llama_and_byte_tokenizers_pass_the_start_up_check(llama):
    llama.check()
    ByteTokenizer().check()
    assert llama.vocab == PAD + 1


@pytest.mark.parametrize(
    ("name", "instruction"),
    [
        ("in.input_ids", "put the black bow in the basket"),
        ("in.input_ids_short", "Pick up the ANSWER"),
    ],
)
def test_prompt_ids_are_the_references_with_the_empty_space_token_once(llama, name, instruction):
    with np.load(GOLDEN) as stored:
        expected = stored[name][0].tolist()
    assert prompt_ids(llama, instruction) == [*expected, EMPTY_SPACE]


@pytest.mark.parametrize("loader", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", "AutoTokenizer"])
def test_ids_equal_those_of_transformers(folder, llama, loader, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, loader).from_pretrained(folder)
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=8)) for _ in range(50)]
    texts += ["  pick", "pick ", "pick  up", "pick up", CHECK_INSTRUCTION, "x" * 300]
    for text in texts:
        ids = llama.encode(prompt(text))
        assert ids == theirs(prompt(text))["input_ids"], text
        assert theirs.decode(ids, skip_special_tokens=True).strip() == prompt(text), text


def test_a_file_saved_with_padding_or_truncation_gives_the_same_ids(tmp_path, llama):
    contents = llama_like()
    padding = {"direction": "Left", "pad_to_multiple_of": None, "pad_id": PAD, "pad_type_id": 0}
    contents["padding"] = {"strategy": {"Fixed": 64}, **padding, "pad_token": "<PAD>"}
    contents["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    saved = LlamaTokenizer(write(tmp_path, contents))
    saved.check()
    assert prompt_ids(saved, "pick up the bowl") == prompt_ids(llama, "pick up the bowl")


def test_a_control_token_in_a_text_is_never_its_id(llama):
    for text in ("</s>", "pick <s> up", "<unk>", "a<PAD>"):
        ids = llama.encode(text)
        assert ids[0] == 1
        assert not {0, 1, 2, PAD} & set(ids[1:]), text


def swap(contents: dict, first: str, second: str) -> None:
    vocab = contents["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]


def another_size(contents: dict) -> None:
    contents["model"]["vocab"]["<more>"] = PAD + 1


def another_empty_space(contents: dict) -> None:
    swap(contents, "▁", next(token for token, i in contents["model"]["vocab"].items() if i == 28705))


def other_control_tokens(contents: dict) -> None:
    swap(contents, "<s>", "</s>")
    contents["added_tokens"] = [special(0, "<unk>"), special(2, "<s>"), special(1, "</s>")]
    contents["post_processor"] = None


def byte_level(contents: dict) -> None:
    """Like GPT-2 and Llama 3: another alphabet, no byte fallback, other control tokens."""
    alphabet = ["<|endoftext|>", *"!?:ĠĊ", *"abcdefghijklmnopqrstuvwxyzINOTW"]
    fillers = [f"<filler{i}>" for i in range(32000 - len(alphabet))]
    contents["model"].update(
        vocab={token: i for i, token in enumerate(alphabet + fillers)},
        merges=[],
        unk_token=None,
        byte_fallback=False,
    )
    byte = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    contents.update(
        normalizer=None, pre_tokenizer=byte, post_processor=byte, decoder=byte, added_tokens=[special(0, "!")]
    )


def lower_casing(contents: dict) -> None:
    contents["normalizer"]["normalizers"].insert(0, {"type": "Lowercase"})


def newline_dropping(contents: dict) -> None:
    newline = {"type": "Replace", "pattern": {"String": "\n"}, "content": ""}
    contents["normalizer"]["normalizers"].insert(0, newline)


def no_prefix_space(contents: dict) -> None:
    del contents["normalizer"]["normalizers"][0]


def no_merges(contents: dict) -> None:
    contents["model"]["merges"] = []


def no_byte_fallback(contents: dict) -> None:
    # The newline keeps its id, so that only letters outside the vocabulary tell.
    vocab = contents["model"]["vocab"]
    contents["model"]["byte_fallback"] = False
    contents["model"]["vocab"] = {"\n" if i == 13 else token: i for token, i in vocab.items()}


def cannot_encode(contents: dict) -> None:
    contents["model"].update(unk_token="<none>", byte_fallback=False)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (another_size, "it has 32001 tokens, expected 32000"),
        (another_empty_space, r"token 29871 is '<filler28705>', expected '▁'"),
        (other_control_tokens, "token 1 is '</s>', expected '<s>'"),
        (byte_level, r"token 1 is .*, expected '<s>'"),
        (lower_casing, r"id 1 of the prompt .* is \d+ \('▁in'\), expected 512"),
        (newline_dropping, r"id 19 of the prompt .* is \d+ .*, expected 13"),
        (no_prefix_space, r"id 1 of the prompt .*expected 512"),
        (no_merges, r"id 1 of the prompt .*expected 512"),
        (no_byte_fallback, r"it loses '🦥' \(ids \[1, .*0\]\), expected one token for each byte"),
        (cannot_encode, "it cannot encode a prompt"),
    ],
)
def test_another_tokenizer_fails_the_start_up_check_in_one_line(tmp_path, change, fault):
    contents = llama_like()
    change(contents)
    tokenizer = LlamaTokenizer(write(tmp_path, contents))
    with pytest.raises(UserError, match=fault) as caught:
        tokenizer.check()
    message = str(caught.value)
    assert str(tmp_path / "tokenizer.json") in message
    assert "not Llama-2's tokenizer" in message
    assert message.endswith("use the tokenizer.json that came with the checkpoint")
    assert "\n" not in message


def test_a_prompt_that_goes_on_after_the_expected_ids_fails_the_check(folder):
    class Longer(LlamaTokenizer):
        def encode(self, text: str) -> list[int]:
            return [*super().encode(text), EMPTY_SPACE, EMPTY_SPACE]

    with pytest.raises(UserError, match=f"{len(CHECK_IDS) + 1} ids of the prompt.*expected {len(CHECK_IDS)}"):
        Longer(folder).check()


@pytest.mark.parametrize(
    ("contents", "fault"),
    [
        (b"", "not a tokenizer"),
        (b"null", "not a tokenizer"),
        (b"[" * 100_000, "not a tokenizer"),
        (b'{"version": "1.0", "model": {"ty', "not a tokenizer"),
        (b'{"version": "' + b"9\\n" * 200 + b'"}', "not a tokenizer.*version '9 9 9"),
        (b"\xff\xfe{\x00}\x00", "not a tokenizer.*utf-8"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "Git LFS pointer.*git lfs pull",
        ),
        (b"\xef\xbb\xbf{}", "byte-order mark"),
    ],
    ids=["empty", "null", "deep", "truncated", "version", "utf-16", "lfs", "bom"],
)
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path, contents, fault):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(contents)
    with pytest.raises(UserError, match=fault) as caught:
        LlamaTokenizer(tmp_path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))


def test_a_lone_tokenizer_model_says_how_to_make_the_json(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(UserError, match=r"from_pretrained\('.*'\)\.save_pretrained\('OUT'\)") as caught:
        LlamaTokenizer(tmp_path)
    assert "sentencepiece" in str(caught.value)


def test_a_path_that_is_no_folder_and_a_folder_named_as_the_file_are_told_apart(tmp_path):
    with pytest.raises(UserError, match="absent' is not a folder"):
        LlamaTokenizer(tmp_path / "absent")
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(UserError, match=r"tokenizer\.json' is not a file"):
        LlamaTokenizer(tmp_path)


def test_a_file_that_cannot_be_read_is_one_line(folder, monkeypatch):
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"tokenizer\.json' cannot be read \(Permission denied\)"):
        LlamaTokenizer(folder)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("pick up\nthe bowl", r"U\+000A at position 7"),
        ("\tpick", r"U\+0009 at position 0"),
        ("pick\0", r"U\+0000 at position 4"),
        ("pick\x7f", r"U\+007F"),
        ("pick\x85up", r"U\+0085"),
        ("pick\u2028up", r"U\+2028"),
        ("pick\u2029up", r"U\+2029"),
        ("pick \ud83e", r"U\+D83E at position 5"),
        ("\n \u2028", "blank"),
        ("", "blank"),
        ("  \u00a0", "blank"),
        (" " * 10_000, "blank"),
        ("put </s> down", "'</s>'"),
        ("put </S> down", "'</s>'"),
        ("<s>put", "'<s>'"),
        ("put <UNK>", "'<unk>'"),
        ("put <PAD>", "'<pad>'"),
    ],
)
def test_an_instruction_that_is_no_plain_text_is_refused_by_name(llama, text, named):
    for refuse in (check_instruction, lambda text: prompt_ids(llama, text)):
        with pytest.raises(UserError, match=named) as caught:
            refuse(text)
        assert len(str(caught.value).splitlines()) == 1
        assert len(str(caught.value)) < 200
        str(caught.value).encode()


@pytest.mark.parametrize(
    "text",
    [
        "é ü 漢字",
        "🤖👨‍👩‍👧",
        "\u200f\u05d9\u05de\u05d9\u05df\u200e",
        "x" * 10_000,
        " pick ",
        "pick  up",
        "a < b > c",
        "İstanbul",
        "s>",
    ],
)
@pytest.mark.parametrize("name", ["llama", "byte"])
def test_any_printable_text_is_taken_as_it_is(llama, name, text):
    tokenizer = llama if name == "llama" else ByteTokenizer()
    ids = prompt_ids(tokenizer, text)
    assert ids == [*tokenizer.encode(prompt(text)), tokenizer.empty_space_id]
    assert ids[0] == tokenizer.bos_id
    assert not {0, 1, 2, PAD} & set(ids[1:])


def test_spaces_are_tokens_and_letter_case_is_none(llama):
    plain = prompt_ids(llama, "pick up")
    assert prompt_ids(llama, "Pick UP") == plain
    assert (
        len({tuple(prompt_ids(llama, text)) for text in ("pick up", " pick up", "pick up ", "pick  up")}) == 4
    )


def refusal(text: str) -> str | None:
    try:
        check_instruction(text)
    except UserError as error:
        return str(error)
    return None


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=st.text(max_size=30))
def test_any_text_is_encoded_without_control_ids_or_refused_in_one_line(llama, text):
    refused = refusal(text)
    if refused is not None:
        assert len(refused.splitlines()) == 1
        return
    for tokenizer in (llama, ByteTokenizer()):
        ids = prompt_ids(tokenizer, text)
        assert not {0, 1, 2} & set(ids[1:])
        assert all(0 <= token_id < tokenizer.vocab for token_id in ids)
