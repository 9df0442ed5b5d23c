"""Inspection: attention patterns compared with Transformers and the model, scores compared with loops."""

import itertools
import math
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from models import loud, ours_with
from transformers import GPT2Config, GPT2LMHeadModel

from gpt.config.model import GPTConfig
from gpt.insight import inspect
from gpt.model.decoder import GPT
from gpt.runs import hf
from gpt.system.errors import UserError
from gpt.tokenizers.backends import ByteBPE
from gpt.tokenizers.tokenizer import Tokenizer, bytes_tokenizer

SMALL = GPTConfig(vocab_size=97, block_size=24, n_layer=3, n_head=4, n_embd=32)
SHAPES = [
    GPTConfig(97, 24, 3, 4, 32),
    GPTConfig.of("modern", 97, 24, 3, 4, 32),
    GPTConfig.of("modern", 97, 24, 3, 4, 32, n_kv_head=2, head_dim=16, window=5),
    GPTConfig(97, 24, 2, 2, 32, window=3, tied=False),
]


# Patterns


@pytest.mark.parametrize("heads", [1, 4])
def test_patterns_and_residual_stream_match_transformers(heads: int) -> None:
    config = GPTConfig(vocab_size=97, block_size=24, n_layer=3, n_head=heads, n_embd=32)
    torch.manual_seed(1)
    settings = GPT2Config.from_dict(hf.to_hf_config(config, 0, 0), attn_implementation="eager")
    theirs = GPT2LMHeadModel(settings).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    ids = torch.randint(97, (17,))
    with torch.no_grad():
        their_output = theirs(ids[None], output_attentions=True, output_hidden_states=True)
    trace = inspect.trace(ours_with(theirs, config), ids.numpy())
    assert np.abs(trace.patterns - torch.cat(their_output.attentions).numpy()).max() < 1e-5
    for layer, hidden in enumerate(their_output.hidden_states[:-1]):  # The last hidden state is normalized.
        assert torch.allclose(trace.residual[layer], hidden[0], atol=1e-4)
    assert torch.allclose(trace.logits, their_output.logits[0], atol=1e-4)


@pytest.mark.parametrize("config", SHAPES, ids=lambda c: f"{c.norm}-{c.positions}-{c.window}")
def test_patterns_reproduce_attention_outputs(config: GPTConfig) -> None:
    """Patterns times values, multiplied by the output matrix, must equal the attention's output."""
    model = loud(config)
    ids = torch.randint(97, (20,))
    records: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    hooks = [
        block.attn.register_forward_hook(
            lambda module, args, out: records.append((module.qkv(args[0], args[2])[2], out, module.c_proj))
        )
        for block in model.h
    ]
    with torch.no_grad():
        logits = model(ids[None])
    for hook in hooks:
        hook.remove()
    trace = inspect.trace(model, ids.numpy())
    assert torch.equal(trace.logits, logits[0])
    for pattern, (v, out, c_proj) in zip(trace.patterns, records, strict=True):
        v = v.repeat_interleave(len(pattern) // v.size(1), dim=1)  # A group of heads shares values.
        y = (torch.from_numpy(pattern)[None] @ v).transpose(1, 2).flatten(2)
        with torch.no_grad():
            assert torch.allclose(c_proj(y), out, atol=1e-4)
    assert np.allclose(trace.patterns.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(trace.patterns, 1).any()
    distances = np.arange(20)[:, None] - np.arange(20)
    for pattern, window in zip(trace.patterns, config.windows, strict=True):
        assert ((pattern > 0) == ((distances >= 0) & (distances < (window or 20)))).all()
    assert np.ptp(trace.patterns[:, :, -1], axis=1).max() > 0.05  # Heads differ.


def test_trace_restores_the_model() -> None:
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
def test_last_lens_row_equals_the_models_output(config: GPTConfig) -> None:
    model = loud(config)
    trace = inspect.trace(model, list(range(12)))
    lens = inspect.lens(model, trace.residual, top=97)
    assert lens.ids.shape == lens.probabilities.shape == (config.n_layer + 1, 12, 97)
    output = trace.logits.softmax(-1).numpy()
    assert np.allclose(np.take_along_axis(output, lens.ids[-1], 1), lens.probabilities[-1], atol=1e-6)
    assert (np.diff(lens.probabilities, axis=-1) <= 0).all()
    with torch.no_grad():  # Row 0 is computed from the sum of token and position embeddings.
        x = model.wte(torch.arange(12))
        table = model.position_table()
        x = x if table is None else x + table[:12]
        first = model.unembed(model.ln_f(x)).softmax(-1).numpy()
    assert np.allclose(np.take_along_axis(first, lens.ids[0], 1), lens.probabilities[0], atol=1e-6)


# Head scores


def keys_of(kind: str, ids: list[int], query: int) -> list[int]:
    """Returns the positions that, by definition, a head of this kind attends to."""
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


def test_head_scores_follow_their_definitions() -> None:
    rng = np.random.default_rng(0)
    ids = [3, 1, 4, 1, 5, 3, 1, 4, 2, 2, 2]
    patterns = np.tril(rng.random((2, 3, 11, 11))).astype(np.float32)
    patterns /= patterns.sum(axis=-1, keepdims=True)
    scores = inspect.head_scores(patterns, np.array(ids))
    for kind, layer, head in itertools.product(inspect.KINDS, range(2), range(3)):
        queries = [query for query in range(2, 11) if keys_of(kind, ids, query)]
        expected = np.mean([patterns[layer, head, q, keys_of(kind, ids, q)].sum() for q in queries])
        assert scores.scores[kind][layer, head] == pytest.approx(expected, abs=1e-6)  # type: ignore[index]
        assert scores.chance[kind] == pytest.approx(np.mean([len(keys_of(kind, ids, q)) / (q + 1) for q in queries]))
    single = inspect.head_scores(patterns[:1, :1], np.array(ids))
    bits = [-sum(x * math.log2(x) for x in patterns[0, 0, q, : q + 1].astype(float) if x > 0) for q in range(11)]
    assert single.entropy[0, 0] == pytest.approx(np.mean(bits), abs=1e-5)
    distances = [sum((q - k) * patterns[0, 0, q, k] for k in range(q + 1)) for q in range(11)]
    assert single.distance[0, 0] == pytest.approx(np.mean(distances), abs=1e-5)


def test_head_scores_copy_one_layer_at_a_time() -> None:
    patterns = np.full((16, 2, 64, 64), 1 / 64, np.float32)
    tracemalloc.start()
    inspect.head_scores(patterns, np.arange(64))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < patterns.nbytes


def test_chance_level_depends_on_the_window() -> None:
    ids = [3, 1, 4, 1, 5, 3, 1, 4, 2, 2, 2]
    patterns = np.zeros((2, 1, 11, 11), np.float32)
    for layer, window in enumerate((None, 3)):
        for query in range(11):  # Attention is uniform.
            keys = range(0 if window is None else max(0, query - window + 1), query + 1)
            patterns[layer, 0, query, list(keys)] = 1 / len(keys)
    scores = inspect.head_scores(patterns, np.array(ids), [None, 3])
    for kind in inspect.KINDS:
        assert scores.lift(kind)[:, 0] == pytest.approx(0, abs=1e-6)  # type: ignore[index]
    assert {inspect.find_dominant_kind(scores, scores, layer, 0) for layer in (0, 1)} == {None}


def pattern_of_kind(kind: str, ids: list[int]) -> np.ndarray:
    """Returns the pattern of a head that attends only to keys of this kind. A query without such keys attends to the
    first token."""
    pattern = np.zeros((1, 1, len(ids), len(ids)), np.float32)
    for query in range(len(ids)):
        keys = [key for key in keys_of(kind, ids, query) if 0 <= key <= query] or [0]
        pattern[0, 0, query, keys] = 1 / len(keys)
    return pattern


def test_heads_are_labelled_by_behaviour() -> None:
    ids = [7, 8, 9, 10, 11, 7, 8, 9, 10, 11]
    probe = inspect.head_scores(pattern_of_kind("first", ids), np.array(ids))
    for kind in inspect.KINDS:
        scores = inspect.head_scores(pattern_of_kind(kind, ids), np.array(ids))
        assert scores.scores[kind][0, 0] == pytest.approx(1)  # type: ignore[index]
        assert scores.lift(kind)[0, 0] == pytest.approx(1)  # type: ignore[index]
        assert inspect.find_dominant_kind(scores, probe, 0, 0) == kind


def test_probe_labels_heads_if_the_prompt_cannot() -> None:
    distinct_ids, repeated_ids = list(range(10)), [7, 8, 9, 10, 11, 7, 8, 9, 10, 11]
    scores = inspect.head_scores(pattern_of_kind("matching", distinct_ids), np.array(distinct_ids))
    assert scores.scores["matching"] is scores.scores["same"] is None
    assert scores.lift("matching") is None
    probe = inspect.head_scores(pattern_of_kind("matching", repeated_ids), np.array(repeated_ids))
    scores = inspect.head_scores(np.tril(np.ones((1, 1, 10, 10), np.float32) / 10), np.array(distinct_ids))
    assert inspect.find_dominant_kind(scores, probe, 0, 0) == "matching"
    single_token = inspect.head_scores(np.ones((1, 1, 1, 1), np.float32), np.array([5]))
    assert set(single_token.scores.values()) == {None}
    assert inspect.find_dominant_kind(single_token, single_token, 0, 0) is None


@pytest.mark.parametrize("block_size", [1, 2, 7, 64, 1024])
def test_probe_ids_repeat_once_and_fit_the_context(block_size: int) -> None:
    ids = inspect.probe_ids(bytes_tokenizer(), block_size)
    period = max(1, min(50, block_size // 2))
    assert len(ids) == min(2 * period, block_size)
    assert len(set(ids[:period].tolist())) == period
    assert block_size == 1 or ids[period:].tolist() == ids[:period].tolist()
    assert 256 not in ids
    assert ids.tolist() == inspect.probe_ids(bytes_tokenizer(), block_size).tolist()


def test_probe_of_a_vocabulary_of_few_pieces() -> None:
    few = SimpleNamespace(backend=SimpleNamespace(pieces=dict.fromkeys(range(30))))
    assert sorted(inspect.probe_ids(few, 1024).tolist()) == sorted([*range(30), *range(30)])  # type: ignore[arg-type]


def test_inspection_computes_only_selected_layers_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loud(GPTConfig(257, 16, 2, 2, 32))
    ids = list(b"a longer prompt than fits")
    look = inspect.inspect_prompt(model, ids, bytes_tokenizer(), layer=1)
    assert (look.dropped, look.ids.tolist(), look.layers, look.heads) == (9, ids[9:], [1], [0, 1])
    assert np.array_equal(look.patterns[0], inspect.trace(model, ids[9:]).patterns[1])
    with torch.no_grad():
        assert np.allclose(look.logits, model(torch.tensor([ids[9:]]))[0, -1].numpy(), atol=1e-6)
    all_heads, one_head = (inspect.inspect_prompt(model, ids, bytes_tokenizer(), head=head) for head in (None, 1))
    assert np.array_equal(one_head.here.entropy, all_heads.here.entropy[:, 1:])
    assert np.array_equal(one_head.probe.entropy, all_heads.probe.entropy[:, 1:])
    with pytest.raises(UserError, match="there is no layer 2") as error:
        inspect.inspect_prompt(model, ids, bytes_tokenizer(), layer=2)
    assert error.value.hint == "the model has 2, from 0 to 1"
    with pytest.raises(UserError, match="there is no head -1"):
        inspect.inspect_prompt(model, ids, bytes_tokenizer(), head=-1)
    with pytest.raises(UserError, match="no prompt"):
        inspect.inspect_prompt(model, [], bytes_tokenizer())
    monkeypatch.setattr(inspect, "host_memory", lambda: 10_000)  # The patterns take 4,096 bytes, and work more.
    with pytest.raises(UserError, match=r"the patterns of 16 tokens take 0\.0 GB, but only 0\.0 GB") as error:
        inspect.inspect_prompt(model, ids, bytes_tokenizer())
    assert error.value.hint == "use a shorter prompt, or one --layer"


# The embedding


@pytest.fixture
def words() -> tuple[GPT, Tokenizer]:
    """Returns a model and a tokenizer with initials as words.

    These words are tokens with a leading space. "bo" is a token with and without a leading space.
    """
    base = bytes_tokenizer()
    tokens = [b" k", b" m", b" w", b" q", b"bo", b" b", b" bo"]
    ranks = {**base.backend.ranks, **{token: 256 + at for at, token in enumerate(tokens)}}
    tokenizer = Tokenizer("words", ByteBPE(base.pattern, ranks), len(ranks))
    model = loud(GPTConfig(270, 8, 1, 1, 8), seed=3)  # 6 more ids than tokens
    table = 0.1 * torch.randn(270, 8, generator=torch.Generator().manual_seed(0))
    royal, male = torch.eye(8)[0], torch.eye(8)[1]
    for id, vector in zip(range(256, 260), (royal + male, male, -male, royal - male), strict=True):
        table[id] += vector * (id - 250)  # Only directions count, so lengths differ.
    table[265:] = table[259]  # Ids without a token have the answer's direction.
    table[0] = 0  # This row is untrained.
    model.wte.weight.data = table
    return model, tokenizer


def test_neighbors_have_the_highest_cosines(words: tuple[GPT, Tokenizer]) -> None:
    model, tokenizer = words
    table = inspect.Embeddings(model, tokenizer)
    word = table.find("k")
    assert (word.text, word.ids) == (" k", [256])
    rows = model.wte.weight.detach().double()
    cosine = torch.cosine_similarity(rows, rows[256:257])
    expected = sorted((id for id in range(1, 264) if id != 256), key=lambda id: -float(cosine[id]))
    neighbors = table.neighbors(word, 20)
    assert [neighbor.id for neighbor in neighbors] == expected[:20]
    assert [neighbor.cosine for neighbor in neighbors] == pytest.approx(
        [float(cosine[id]) for id in expected[:20]], abs=1e-5
    )
    assert len(table.neighbors(word, 1000)) == 262  # Every row with a token and a direction, except the word's own.


def test_words_are_tokenized_as_in_running_text(words: tuple[GPT, Tokenizer]) -> None:
    table = inspect.Embeddings(*words)
    assert table.find("bo").text == " bo"  # "bo" is one token with and without a space
    assert table.find("box").ids == [262, ord("x")]
    assert table.find("x").text == "x"  # " x" would be two tokens
    assert table.find(" x").ids == [ord(" "), ord("x")]  # A typed space is kept.
    two_token_word = table.find("box")
    mean = table.rows[[262, ord("x")]].mean(axis=0)
    assert np.allclose(table.vector(two_token_word), mean / np.linalg.norm(mean), atol=1e-6)
    for blank in ("", "  "):
        with pytest.raises(UserError, match="a word is empty"):
            table.find(blank)
