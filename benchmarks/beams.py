"""Compares beam search in `gpt` with Transformers (speed and results) and with CTranslate2 (speed only).

    python -m benchmarks.beams             GPT-2 124M with random weights
    python -m benchmarks.beams --tiny      a smoke test with a tiny model, in seconds

The systems take turns, so other load slows them equally. Needs the extra `bench`.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from benchmarks.results import Table, measured, write_section
from gpt.config.device import Compute
from gpt.config.model import PRESETS, GPTConfig
from gpt.config.sample import SampleConfig
from gpt.decoding import logits as filters
from gpt.decoding.context import Context
from gpt.decoding.engine import Engine, Request
from gpt.decoding.weights import prepare
from gpt.model.decoder import GPT
from gpt.model.quantize import quantize_model
from gpt.runs import checkpoint

CPU = Compute(torch.device("cpu"), torch.float32)
BEAMS = 4
Generation = Callable[[], list[list[int]]]


def make_models(config: GPTConfig, spread: float = 0.0, seed: int = 0) -> tuple[GPT, GPT2LMHeadModel]:
    """Returns our model and a Transformers model with the same random weights."""
    torch.manual_seed(seed)
    model = GPT(config).eval()
    for parameter in model.parameters():
        parameter.data += spread * torch.randn_like(parameter)
    their_model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.block_size, n_embd=config.n_embd, n_layer=config.n_layer,
            n_head=config.n_head, bos_token_id=0, eos_token_id=0,
        )
    ).eval()  # fmt: skip
    their_model.load_state_dict(checkpoint.to_stored(config, model.state_dict()), strict=False)
    their_model.tie_weights()
    return model, their_model


def generate_with_gpt(model: GPT, prompts: list[list[int]], new: int, beam: int = 0) -> list[list[int]]:
    """Generates with the engine of `gpt sample`: greedily, or with ``beam`` beams."""
    config = SampleConfig(greedy=not beam, beam=beam, max_tokens=new, ignore_eot=True)
    context = Context(model, CPU, len(prompts) * max(1, beam), len(prompts[0]) + new)
    engine, texts = Engine(context, ends=()), [list[int]() for _ in prompts]
    for prompt in prompts:
        engine.add(Request(prompt, config))
    for event in engine.run():
        texts[event.number] += [token.id for token in event.tokens]
    return texts


def generate_with_transformers(
    model: GPT2LMHeadModel, prompts: list[list[int]], new: int, beam: int = 1
) -> list[list[int]]:
    """Generates with Transformers' ``generate`` and its KV cache."""
    x = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            x, attention_mask=torch.ones_like(x), do_sample=False, num_beams=beam, max_new_tokens=new,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return [row[x.size(1) :].tolist() for row in out]


def ctranslate2_generator(
    their_model: GPT2LMHeadModel, folder: Path, kind: str
) -> Callable[[list[list[int]], int, int], list[list[int]]]:
    """Converts the weights for CTranslate2; returns a function that generates with it."""
    import ctranslate2 as ct2
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{id}": id for id in range(their_model.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "t0")), bos_token="t0", eos_token="t0", unk_token="t0"
    )
    if not (folder / "hf").exists():
        their_model.save_pretrained(folder / "hf")
        tokenizer.save_pretrained(folder / "hf")
    TransformersConverter(str(folder / "hf")).convert(str(folder / kind), quantization=kind)
    generator = ct2.Generator(
        str(folder / kind), device="cpu", compute_type=kind, intra_threads=torch.get_num_threads()
    )

    def run(prompts: list[list[int]], new: int, beam: int) -> list[list[int]]:
        results = generator.generate_batch(
            [[f"t{id}" for id in prompt] for prompt in prompts], beam_size=beam, max_length=new, min_length=new,
            include_prompt_in_result=False, sampling_topk=1,
        )  # fmt: skip
        return [list(result.sequences_ids[0]) for result in results]

    return run


def time_in_turns(systems: dict[str, Generation], rounds: int) -> dict[str, list[float]]:
    """Runs the systems in turn; returns the seconds of each of ``rounds`` rounds after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for round_number in range(rounds + 1):
        for name, work in systems.items():
            start_time = time.perf_counter()
            texts = work()
            if round_number:  # Round 0 is the warm-up.
                times[name].append(time.perf_counter() - start_time)
            assert len({len(ids) for ids in texts}) == 1
    return times


def measure_speed(config: GPTConfig, prompt: int, new: int, rounds: int) -> tuple[list[str], list[Table]]:
    """Measures beam search in tokens per second."""
    model, their_model = make_models(config)
    rng = random.Random(0)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(prompt)]]
    int8_model = prepare(quantize_model(make_models(config)[0], 8), CPU)
    float32_model = prepare(model, CPU)
    with tempfile.TemporaryDirectory() as folder:
        float32_generator, int8_generator = (
            ctranslate2_generator(their_model, Path(folder), kind) for kind in ("float32", "int8")
        )
        systems: dict[str, Generation] = {
            "`gpt`, float32": lambda: generate_with_gpt(float32_model, prompts, new, BEAMS),
            "Transformers, float32": lambda: generate_with_transformers(their_model, prompts, new, BEAMS),
            "CTranslate2, float32": lambda: float32_generator(prompts, new, BEAMS),
            "`gpt`, int8": lambda: generate_with_gpt(int8_model, prompts, new, BEAMS),
            "CTranslate2, int8": lambda: int8_generator(prompts, new, BEAMS),
        }
        times = time_in_turns(systems, rounds)
    rows = []
    for name, seconds in times.items():
        gpt_seconds = times["`gpt`, " + name.split(", ")[1]]
        ratio = statistics.median(
            their_time / our_time for their_time, our_time in zip(seconds, gpt_seconds, strict=True)
        )
        rows.append([name, f"{new / statistics.median(seconds):.1f}", f"{ratio:.2f}"])
    notes = [
        f"{BEAMS} beams, a prompt of {prompt} tokens, {new} new ones, {torch.get_num_threads()} threads, one process.",
        f"Medians of {rounds} rounds, prompt included; the ratio is the median speedup of `gpt` in the same dtype.",
    ]
    return notes, [Table(["system", "tokens/s", "ratio"], rows)]


def count_equal_cases(cases: int) -> tuple[list[str], list[Table]]:
    """Counts the random cases in which `gpt` and Transformers give equal results."""
    greedy = beams = 0
    for seed in range(cases):
        rng = random.Random(seed)
        model, their_model = make_models(GPTConfig(30, 64, 2, 2, 16), 0.3, seed)
        prompt, new = [rng.randrange(30) for _ in range(1 + seed % 7)], rng.randint(1, 14)
        greedy += generate_with_gpt(model, [prompt], new) == generate_with_transformers(their_model, [prompt], new)
        settings = {
            "beam": rng.randint(2, 8),
            "length_penalty": rng.choice([0.0, 0.5, 1.0, 1.5, 2.0]),
            "early_stopping": rng.choice(["off", "on", "never"]),
            "no_repeat_ngram": rng.choice([0, 0, 2, 3]),
            "repetition_penalty": rng.choice([0.0, 0.0, 1.3]),
        }
        beams += _are_beams_equal(model, their_model, prompt, seed % 30, new, settings)
    counts = {"greedy": greedy, "beam search, all beams": beams}
    counts |= {name: sum(_is_filter_equal(name, seed) for seed in range(cases)) for name in FILTERS}
    rows = [[name, str(equal), str(cases)] for name, equal in counts.items()]
    note = "Random models, prompts and settings. Ids must be equal, probabilities after a filter equal within 1e-6."
    return [note], [Table(["method", "equal cases", "cases"], rows)]


def _are_beams_equal(
    model: GPT, their_model: GPT2LMHeadModel, prompt: list[int], eot: int, new: int, settings: dict[str, Any]
) -> bool:
    config = SampleConfig(**settings, max_tokens=new)
    engine = Engine(Context(model, CPU, config.beam), {eot})
    engine.add(Request(prompt, config))
    *_, event = engine.run()
    best = event.best
    x = torch.tensor([prompt])
    out = their_model.generate(
        x, attention_mask=torch.ones_like(x), do_sample=False, num_beams=config.beam, max_new_tokens=new,
        eos_token_id=eot, pad_token_id=eot, length_penalty=config.length_penalty,
        early_stopping={"off": False, "on": True, "never": "never"}[config.early_stopping],
        no_repeat_ngram_size=config.no_repeat_ngram or None, repetition_penalty=config.repetition_penalty or None,
        num_return_sequences=config.beam, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    rows = [row[len(prompt) :].tolist() for row in out.sequences]
    expected = [row[: row.index(eot) + 1] if eot in row else row for row in rows]
    scores_equal = all(
        abs(beam.score - score) < 1e-4 for beam, score in zip(best, out.sequences_scores.tolist(), strict=True)
    )
    return [beam.ids for beam in best] == expected and scores_equal


FILTERS: dict[str, tuple[Callable[[torch.Tensor, list[int], float], torch.Tensor], Callable[[float], Any]]] = {
    "temperature": (lambda x, _, p: filters.apply_temperature(x, 0.1 + p), lambda p: TemperatureLogitsWarper(0.1 + p)),
    "top-k": (lambda x, _, p: filters.keep_top_k(x, 1 + int(60 * p)), lambda p: TopKLogitsWarper(1 + int(60 * p))),
    "top-p": (lambda x, _, p: filters.keep_top_p(x, p), lambda p: TopPLogitsWarper(p)),
    "min-p": (lambda x, _, p: filters.keep_min_p(x, p), lambda p: MinPLogitsWarper(p)),
    "repetition penalty": (
        lambda x, past, p: filters.penalize(x, past, 0.5 + p),
        lambda p: RepetitionPenaltyLogitsProcessor(0.5 + p),
    ),
    "no-repeat n-gram": (
        lambda x, past, p: filters.exclude(x, filters.find_repeats(past, 1 + int(4 * p))),
        lambda p: NoRepeatNGramLogitsProcessor(1 + int(4 * p)),
    ),
}


def _is_filter_equal(name: str, seed: int) -> bool:
    rng = random.Random(seed)
    logits = 3 * torch.randn(1, 50, generator=torch.Generator().manual_seed(seed))
    past, p = [rng.randrange(7) for _ in range(20)], rng.uniform(0.01, 0.99)
    our_filter, their_filter = FILTERS[name]
    probabilities, expected = (
        our_filter(logits[0], past, p).softmax(-1),
        their_filter(p)(torch.tensor([past]), logits)[0].softmax(-1),
    )
    return torch.equal(probabilities > 0, expected > 0) and torch.allclose(probabilities, expected, atol=1e-6)


def main() -> None:
    """Measures and writes the sections."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["speed", "exactness"])
    args = parser.parse_args()
    config = GPTConfig(300, 64, 2, 2, 16) if args.tiny else PRESETS["gpt2"].model
    prompt, new = (8, 8) if args.tiny else (32, 128)
    parts = {
        "speed": ("Beam search", lambda: measure_speed(config, prompt, new, args.rounds)),
        "exactness": ("Decoding: equal to Transformers", lambda: count_equal_cases(5 if args.tiny else 200)),
    }
    for name, (title, work) in parts.items():
        if args.only in (None, name):
            packages = ["torch", "transformers", *["ctranslate2"] * (name == "speed")]
            section = measured(title, "python -m benchmarks.beams", *work(), packages)
            if args.tiny:
                print(section)
            else:
                write_section("beams", section)


if __name__ == "__main__":
    main()
