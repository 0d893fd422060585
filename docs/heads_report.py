"""What exit heads are worth on prompts: agreement with the last layer, expected acceptance, what the engine gains.

    python docs/heads_report.py --model MODEL --bundle HEADS --data QUESTIONS --output FILE.json

QUESTIONS is a JSONL file in Spec-Bench's format. The model answers each prompt greedily; every token of its answers is
a place where an exit's most likely token either is the last layer's or is not. FILE.json can go into a bundle's card:
`speclight export --measured FILE.json`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from speclight.infer.build import EngineOptions, build_engine, prepare
from speclight.infer.engine import Engine
from speclight.infer.files import replace_file
from speclight.infer.questions import read_questions, select
from speclight.infer.request import Completion, GenerationParams
from speclight.infer.stats import SequenceStats
from speclight.modules.batch import BatchItem, RaggedBatch
from speclight.modules.exit_heads import ExitHeads, Exits
from speclight.modules.layered_model import LayeredModel
from tqdm import tqdm


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--answer-tokens", type=int, default=128, help="longest answer that agreement is counted on")
    parser.add_argument("--engine-prompts", type=int, default=60, help="prompts that the engine drafts for")
    parser.add_argument("--engine-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=None)
    return parser.parse_args()


def compared(model: LayeredModel, exits: Exits, done: Completion) -> dict[int, dict[str, list[float]]]:
    """{exit: {measure: per token of the answer}}, from one pass over the whole text."""
    token_ids, first = [*done.prompt_ids, *done.token_ids], len(done.prompt_ids) - 1
    batch = RaggedBatch.build([BatchItem(token_ids[:-1], 0, ())], None, model.device)
    hidden, start, states = model.embed(batch), 0, {}
    for layer in (*exits.heads.layers, model.num_layers):
        hidden = states[layer] = model.run(hidden, batch, None, start, layer)
        start = layer
    final = model.logits(states[model.num_layers][first:]).float()
    p, best = final.softmax(-1), final.argmax(-1)
    found = {}
    for layer in exits.heads.layers:
        logits = exits.heads.scatter(exits.logits(layer, states[layer], batch)[first:].float())
        q = logits.softmax(-1)
        found[layer] = {
            "agreement": (logits.argmax(-1) == best).float().tolist(),
            "acceptance": torch.minimum(p, q).sum(-1).tolist(),
        }
    return found


def drafted(engine: Engine, prompts: list[Any], **settings: Any) -> dict[str, Any]:
    engine.reset()
    params = GenerationParams(**settings)
    total = SequenceStats.total(one.stats for one in engine.generate(prompts, params))
    found: dict[str, Any] = {
        "MAT": round(total.mat, 3),
        "acceptance": round(total.acceptance_rate, 3),
        "conditional acceptance": {str(k): round(v, 3) for k, v in total.conditional_acceptance.items()},
    }
    if total.inner_passes:
        inner = {str(k): round(v, 3) for k, v in total.inner_conditional_acceptance.items()}
        found |= {"inner acceptance": round(total.inner_acceptance_rate, 3), "inner conditional acceptance": inner}
    return found


@torch.inference_mode()
def main() -> None:
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    questions = select(read_questions(options.data))
    prepared = prepare(
        EngineOptions(model=options.model, bundle=options.bundle, dtype=options.dtype, max_num_seqs=32),
        ["early-exit", "hispec"],
    )
    engine = build_engine(prepared)
    chat = prepared.is_chat(None)
    prompts = [[{"role": "user", "content": q.turns[0]}] if chat else q.turns[0] for q in questions]
    assert prepared.bundle is not None
    exits = ExitHeads.from_bundle(prepared.bundle, engine.model).to(engine.model.dtype).bind(engine.model)
    answers = engine.generate(prompts, GenerationParams(method="ar", max_new_tokens=options.answer_tokens))
    sums: dict[str, dict[int, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for question, done in zip(questions, tqdm(answers, unit="text", disable=None), strict=True):
        for layer, measures in compared(engine.model, exits, done).items():
            for name, values in measures.items():
                for group in ("all", question.group):
                    sums[group][layer][name] += values
    means = {
        group: {str(n): {k: round(sum(v) / len(v), 4) for k, v in m.items()} for n, m in layers.items()}
        for group, layers in sums.items()
    }
    layers = exits.heads.layers
    some = prompts[:: max(1, len(prompts) // options.engine_prompts)][: options.engine_prompts]
    length = {"max_new_tokens": options.engine_tokens}
    report = {
        "data": f"the model's own greedy answers, up to {options.answer_tokens} tokens, to {len(prompts)} prompts",
        "top-1 agreement with the last layer": {n: m["agreement"] for n, m in means["all"].items()},
        "expected acceptance 1 - TV": {n: m["acceptance"] for n, m in means["all"].items()},
        "by group": {group: m for group, m in means.items() if group != "all"},
        "engine": f"{len(some)} of these prompts, {options.engine_tokens} new tokens, greedy, {options.dtype}",
    }
    for layer in layers:
        name = f"early-exit at {layer}, 2 drafts"
        report[name] = drafted(engine, some, method="early-exit", draft_layer=layer, draft_tokens=2, **length)
    if len(layers) > 1:
        settings = {"draft_layer": layers[0], "verify_layer": layers[-1], "inner_draft_tokens": 2, "window": 4}
        name = f"hispec {layers[0]} and {layers[-1]}, N_d 2, N_i 4"
        report[name] = drafted(engine, some, method="hispec", **settings, **length)
    replace_file(Path(options.output), (json.dumps(report, indent=1) + "\n").encode())
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
