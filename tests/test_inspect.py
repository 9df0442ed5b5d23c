"""Inside a decoder: patterns against transformers' and against what the model computes, scores against loops."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import loud, ours_with
from transformers import GPT2Config, GPT2LMHeadModel

from gpt import inspect
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import UserError
from gpt.model.decoder import GPT
from gpt.model.positions import rotate
from gpt.runs import hf
from gpt.text.backends import ByteBPE
from gpt.text.tokenizer import Tokenizer, bytes_tokenizer

SMALL = GPTConfig(vocab_size=97, block_size=24, n_layer=3, n_head=4, n_embd=32)
SHAPES = [
    GPTConfig(97, 24, 3, 4, 32),
    GPTConfig(97, 24, 2, 2, 32, positions="sinusoidal"),
    GPTConfig.of("modern", 97, 24, 3, 4, 32),
    GPTConfig.of("modern", 97, 24, 3, 4, 32, n_kv_head=2, head_dim=16, window=5),
    GPTConfig(97, 24, 2, 2, 32, window=3, tied=False),
]


# Patterns


@pytest.mark.parametrize("heads", [1, 4])
def test_patterns_and_residual_equal_transformers(heads: int) -> None:
    config = GPTConfig(vocab_size=97, block_size=24, n_layer=3, n_head=heads, n_embd=32)
    torch.manual_seed(1)
    settings = GPT2Config.from_dict(hf.to_hf_config(config, 0, 0), attn_implementation="eager")
    theirs = GPT2LMHeadModel(settings).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    ids = torch.randint(97, (17,))
    with torch.no_grad():
        said = theirs(ids[None], output_attentions=True, output_hidden_states=True)
    seen = inspect.trace(ours_with(theirs, config), ids.numpy())
    assert np.abs(seen.patterns - torch.cat(said.attentions).numpy()).max() < 1e-5
    for layer, hidden in enumerate(said.hidden_states[:-1]):  # their last one is normalized
        assert torch.allclose(seen.residual[layer], hidden[0], atol=1e-4)
    assert torch.allclose(seen.logits, said.logits[0], atol=1e-4)


@pytest.mark.parametrize("config", SHAPES, ids=lambda c: f"{c.norm}-{c.positions}-{c.window}")
def test_patterns_give_what_the_model_attends(config: GPTConfig) -> None:
    """Patterns times values, through the output matrix, are what each attention adds, whatever computed it."""
    model = loud(config)
    ids = torch.randint(97, (20,))
    said: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    hooks = [
        block.attn.register_forward_hook(
            lambda module, args, out: said.append((module.qkv(args[0], args[2])[2], out, module.c_proj))
        )
        for block in model.h
    ]
    with torch.no_grad():
        logits = model(ids[None])
    for hook in hooks:
        hook.remove()
    seen = inspect.trace(model, ids.numpy())
    assert torch.equal(seen.logits, logits[0])
    for pattern, (v, out, c_proj) in zip(seen.patterns, said, strict=True):
        v = v.repeat_interleave(len(pattern) // v.size(1), dim=1)  # heads share them
        y = (torch.from_numpy(pattern)[None] @ v).transpose(1, 2).flatten(2)
        with torch.no_grad():
            assert torch.allclose(c_proj(y), out, atol=1e-4)
    assert np.allclose(seen.patterns.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(seen.patterns, 1).any()
    back = np.arange(20)[:, None] - np.arange(20)
    for pattern, window in zip(seen.patterns, config.windows, strict=True):
        assert ((pattern > 0) == ((back >= 0) & (back < (window or 20)))).all()
    assert np.ptp(seen.patterns[:, :, -1], axis=1).max() > 0.05  # heads do differ


def test_trace_leaves_the_model_as_it_was() -> None:
    model = loud(SMALL).train()
    model.h[1].attn.register_forward_pre_hook(lambda module, args: None)
    inspect.trace(model, [1, 2, 3])
    assert model.training
    assert [len(block.attn._forward_pre_hooks) for block in model.h] == [0, 1, 0]
    assert not model.ln_f._forward_pre_hooks
    with pytest.raises(ValueError, match="25 tokens do not fit"):
        inspect.trace(model, list(range(25)))
    assert not model.ln_f._forward_pre_hooks
    inspect.trace(model.eval(), [1, 2, 3])
    assert not model.training


@pytest.mark.parametrize("config", SHAPES[::3], ids=lambda c: c.norm)
def test_lens_ends_as_the_model_does(config: GPTConfig) -> None:
    model = loud(config)
    seen = inspect.trace(model, list(range(12)))
    lens = inspect.lens(model, seen.residual, top=97)
    assert lens.ids.shape == lens.probabilities.shape == (config.n_layer + 1, 12, 97)
    output = seen.logits.softmax(-1).numpy()
    assert np.allclose(np.take_along_axis(output, lens.ids[-1], 1), lens.probabilities[-1], atol=1e-6)
    assert (np.diff(lens.probabilities, axis=-1) <= 0).all()
    with torch.no_grad():  # the first row: the embedding and the place, through the last LayerNorm and the unembedding
        x = model.wte(torch.arange(12))
        table = model.position_table()
        x = x if table is None else x + table[:12]
        first = model.unembed(model.ln_f(x)).softmax(-1).numpy()
    assert np.allclose(np.take_along_axis(first, lens.ids[0], 1), lens.probabilities[0], atol=1e-6)


# What heads do


def keys_of(kind: str, ids: list[int], query: int) -> list[int]:
    """By the words of the definition."""
    earlier = range(query)
    if kind == "previous":
        return [query - 1]
    if kind == "first":
        return [0]
    if kind == "itself":
        return [query]
    if kind == "same":
        return [key for key in earlier if ids[key] == ids[query]]
    return [key for key in earlier if key > 0 and ids[key - 1] == ids[query]]


def test_scores_are_their_definitions() -> None:
    rng = np.random.default_rng(0)
    ids = [3, 1, 4, 1, 5, 3, 1, 4, 2, 2, 2]
    patterns = np.tril(rng.random((2, 3, 11, 11))).astype(np.float32)
    patterns /= patterns.sum(axis=-1, keepdims=True)
    found = inspect.head_scores(patterns, np.array(ids))
    for kind, layer, head in itertools.product(inspect.KINDS, range(2), range(3)):
        having = [query for query in range(2, 11) if keys_of(kind, ids, query)]
        by_hand = np.mean([patterns[layer, head, q, keys_of(kind, ids, q)].sum() for q in having])
        assert found.scores[kind][layer, head] == pytest.approx(by_hand, abs=1e-6)  # type: ignore[index]
        assert found.chance[kind] == pytest.approx(np.mean([len(keys_of(kind, ids, q)) / (q + 1) for q in having]))
    alone = inspect.head_scores(patterns[:1, :1], np.array(ids))
    bits = [-sum(x * math.log2(x) for x in patterns[0, 0, q, : q + 1].astype(float) if x > 0) for q in range(11)]
    assert alone.entropy[0, 0] == pytest.approx(np.mean(bits), abs=1e-5)
    back = [sum((q - k) * patterns[0, 0, q, k] for k in range(q + 1)) for q in range(11)]
    assert alone.distance[0, 0] == pytest.approx(np.mean(back), abs=1e-5)


def test_chance_in_a_window_is_that_of_the_window() -> None:
    ids = [3, 1, 4, 1, 5, 3, 1, 4, 2, 2, 2]
    patterns = np.zeros((2, 1, 11, 11), np.float32)
    for layer, window in enumerate((None, 3)):
        for query in range(11):  # even attention
            keys = range(0 if window is None else max(0, query - window + 1), query + 1)
            patterns[layer, 0, query, list(keys)] = 1 / len(keys)
    found = inspect.head_scores(patterns, np.array(ids), [None, 3])
    for kind in inspect.KINDS:
        assert found.lift(kind)[:, 0] == pytest.approx(0, abs=1e-6)  # type: ignore[index]
    assert inspect.mostly(found, found, 1, 0) is None


def one_kind(kind: str, ids: list[int]) -> np.ndarray:
    """A head that attends to keys of a kind alone, and to the first token where there are none."""
    pattern = np.zeros((1, 1, len(ids), len(ids)), np.float32)
    for query in range(len(ids)):
        keys = [key for key in keys_of(kind, ids, query) if 0 <= key <= query] or [0]
        pattern[0, 0, query, keys] = 1 / len(keys)
    return pattern


def test_heads_are_named_by_what_they_do() -> None:
    ids = [7, 8, 9, 10, 11, 7, 8, 9, 10, 11]
    probe = inspect.head_scores(one_kind("first", ids), np.array(ids))
    for kind in inspect.KINDS:
        here = inspect.head_scores(one_kind(kind, ids), np.array(ids))
        assert here.scores[kind][0, 0] == pytest.approx(1)  # type: ignore[index]
        assert here.lift(kind)[0, 0] == pytest.approx(1)  # type: ignore[index]
        assert inspect.mostly(here, probe, 0, 0) == kind
    even = np.tril(np.ones((1, 1, 10, 10), np.float32))
    even /= even.sum(axis=-1, keepdims=True)
    here = inspect.head_scores(even, np.array(ids))
    assert all(abs(here.lift(kind)[0, 0]) < 1e-6 for kind in inspect.KINDS)  # type: ignore[index]
    assert inspect.mostly(here, here, 0, 0) is None


def test_what_a_prompt_cannot_show_the_probe_does() -> None:
    different, twice = list(range(10)), [7, 8, 9, 10, 11, 7, 8, 9, 10, 11]
    here = inspect.head_scores(one_kind("matching", different), np.array(different))
    assert here.scores["matching"] is here.scores["same"] is None
    assert here.lift("matching") is None
    probe = inspect.head_scores(one_kind("matching", twice), np.array(twice))
    here = inspect.head_scores(np.tril(np.ones((1, 1, 10, 10), np.float32) / 10), np.array(different))
    assert inspect.mostly(here, probe, 0, 0) == "matching"
    nothing = inspect.head_scores(np.ones((1, 1, 1, 1), np.float32), np.array([5]))
    assert set(nothing.scores.values()) == {None}
    assert inspect.mostly(nothing, nothing, 0, 0) is None


@pytest.mark.parametrize("block_size", [1, 2, 7, 64, 1024])
def test_probe_comes_twice_and_fits(block_size: int) -> None:
    ids = inspect.probe_ids(bytes_tokenizer(), block_size)
    half = max(1, min(50, block_size // 2))
    assert len(ids) == min(2 * half, block_size)
    assert len(set(ids[:half].tolist())) == half
    assert block_size == 1 or ids[half:].tolist() == ids[:half].tolist()
    assert 256 not in ids
    assert ids.tolist() == inspect.probe_ids(bytes_tokenizer(), block_size).tolist()


def test_look_is_one_model_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loud(GPTConfig(257, 16, 2, 2, 32))
    ids = list(b"a longer prompt than fits")
    seen = inspect.look(model, ids, bytes_tokenizer(), layer=1)
    assert (seen.dropped, seen.ids.tolist(), seen.layers, seen.heads) == (9, ids[9:], [1], [0, 1])
    assert np.array_equal(seen.patterns[0], inspect.trace(model, ids[9:]).patterns[1])
    with torch.no_grad():
        assert np.allclose(seen.logits, model(torch.tensor([ids[9:]]))[0, -1].numpy(), atol=1e-6)
    whole, one = (inspect.look(model, ids, bytes_tokenizer(), head=head) for head in (None, 1))
    assert np.array_equal(one.here.entropy, whole.here.entropy[:, 1:])
    assert np.array_equal(one.probe.entropy, whole.probe.entropy[:, 1:])
    with pytest.raises(UserError, match="there is no layer 2") as wrong:
        inspect.look(model, ids, bytes_tokenizer(), layer=2)
    assert wrong.value.hint == "the model has 2, from 0 to 1"
    with pytest.raises(UserError, match="there is no head -1"):
        inspect.look(model, ids, bytes_tokenizer(), head=-1)
    with pytest.raises(UserError, match="no prompt"):
        inspect.look(model, [], bytes_tokenizer())
    monkeypatch.setattr(inspect, "host_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"the patterns of 16 tokens take 0\.0 GB, but only 0\.0 GB") as wrong:
        inspect.look(model, ids, bytes_tokenizer())
    assert wrong.value.hint == "use a shorter prompt, or one --layer"


# The embedding


@pytest.fixture
def words() -> tuple[GPT, Tokenizer]:
    """Four words that are tokens with a space before them, one without, and directions in which king - man + woman is
    queen."""
    base = bytes_tokenizer()
    tokens = [b" k", b" m", b" w", b" q", b"bo", b" b", b" bo"]
    ranks = {**base.backend.ranks, **{token: 256 + at for at, token in enumerate(tokens)}}
    tokenizer = Tokenizer("words", ByteBPE(base.pattern, ranks), len(ranks))
    model = loud(GPTConfig(270, 8, 1, 1, 8), seed=3)  # 6 ids more than there are tokens
    table = 0.1 * torch.randn(270, 8, generator=torch.Generator().manual_seed(0))
    royal, male = torch.eye(8)[0], torch.eye(8)[1]
    for id, vector in zip(range(256, 260), (royal + male, male, -male, royal - male), strict=True):
        table[id] += vector * (id - 250)  # lengths do not matter
    table[265:] = table[259]  # ids without a token lie where the answer does
    table[0] = 0  # a row that never was
    model.wte.weight.data = table
    return model, tokenizer


def test_neighbors_are_the_highest_cosines(words: tuple[GPT, Tokenizer]) -> None:
    model, tokenizer = words
    table = inspect.Embeddings(model, tokenizer)
    word = table.find("k")
    assert (word.text, word.ids) == (" k", [256])
    rows = model.wte.weight.detach().double()
    cosine = torch.cosine_similarity(rows, rows[256:257])
    by_hand = sorted((id for id in range(1, 264) if id != 256), key=lambda id: -float(cosine[id]))
    found = table.neighbors(word, 20)
    assert [near.id for near in found] == by_hand[:20]
    assert [near.cosine for near in found] == pytest.approx([float(cosine[id]) for id in by_hand[:20]], abs=1e-5)
    assert len(table.neighbors(word, 1000)) == 262  # all that have a token and a direction, without its own


def test_words_are_taken_as_in_running_text(words: tuple[GPT, Tokenizer]) -> None:
    table = inspect.Embeddings(*words)
    assert table.find("bo").text == " bo"  # a token each way
    assert table.find("box").ids == [262, ord("x")]
    assert table.find("x").text == "x"  # two tokens with a space
    assert table.find(" x").ids == [ord(" "), ord("x")]  # as it was typed
    several = table.find("box")
    mean = table.rows[[262, ord("x")]].mean(axis=0)
    assert np.allclose(table.vector(several), mean / np.linalg.norm(mean), atol=1e-6)
    for empty in ("", "  "):
        with pytest.raises(UserError, match="a word is empty"):
            table.find(empty)


def test_analogy_adds_directions(words: tuple[GPT, Tokenizer]) -> None:
    table = inspect.Embeddings(*words)
    terms = [(sign, table.find(word)) for sign, word in inspect.parse_analogy(["k", "-", "m", "+", "w"])]
    found = table.analogy(terms, 3)
    assert found[0].text == " q"
    assert not {near.id for near in found} & {256, 257, 258}  # the question's own words are no answer
    total = table.rows[256] - table.rows[257] + table.rows[258]
    assert found[0].cosine == pytest.approx(float(table.rows[259] @ total / np.linalg.norm(total)), abs=1e-5)


@pytest.mark.parametrize(
    ("typed", "terms"),
    [
        (["king", "-", "man", "+", "woman"], [(1, "king"), (-1, "man"), (1, "woman")]),
        (["king - man + woman"], [(1, "king"), (-1, "man"), (1, "woman")]),
        (["-", "man", "+", "well-known"], [(-1, "man"), (1, "well-known")]),
        (["+ a", "- b"], [(1, "a"), (-1, "b")]),
    ],
)
def test_sums_of_words(typed: list[str], terms: list[tuple[int, str]]) -> None:
    assert inspect.parse_analogy(typed) == terms


@pytest.mark.parametrize(
    "typed", [["king"], ["king", "man"], ["king", "-"], ["-"], [""], ["a", "-", "-", "b"], ["a", "-b"]]
)
def test_sums_that_are_none(typed: list[str]) -> None:
    with pytest.raises(UserError) as wrong:
        inspect.parse_analogy(typed)
    assert wrong.value.hint == "write it like: king - man + woman"


# Positions


@pytest.mark.parametrize("kind", ["learned", "sinusoidal"])
def test_similarity_of_places_is_the_mean_cosine(kind: str) -> None:
    model = loud(GPTConfig(97, 13, 1, 2, 8, positions=kind))  # type: ignore[arg-type]
    found = inspect.positions(model)
    assert model.position_table() is not None
    table = model.position_table().detach()  # type: ignore[union-attr]
    assert found.table is not None
    assert np.array_equal(found.table, table.numpy())
    for distance in range(13):
        pairs = torch.cosine_similarity(table[: 13 - distance], table[distance:])
        assert found.similarity[distance] == pytest.approx(float(pairs.mean()), abs=1e-5)


@pytest.mark.parametrize("scaling", [None, RopeScaling(8.0, 1.0, 4.0, 8)])
def test_similarity_of_rotary_places_is_a_score(scaling: RopeScaling | None) -> None:
    model = loud(GPTConfig(97, 13, 1, 2, 16, positions="rotary", rope_base=500.0, rope_scaling=scaling))
    found = inspect.positions(model)
    assert found.table is None
    ones = torch.ones(1, 1, 13, 8) / math.sqrt(8)
    assert model.rope is not None
    turned = rotate(ones, (model.rope[0], model.rope[1]))[0, 0]
    assert np.allclose(found.similarity, (turned @ turned[0]).numpy(), atol=1e-5)


def test_a_long_context_is_compared_beyond_the_models_table() -> None:
    config = GPTConfig(9, 131_072, 1, 1, 4, positions="rotary")
    model = GPT(config)
    assert len(inspect.positions(model).similarity) == 131_072
    assert model.rope is not None and model.rope.size(1) == 8192  # as it was
    assert len(inspect.positions(GPT(replace(config, block_size=2**20))).similarity) == inspect.MOST_ROTATIONS
